"""Wait for a condition, not for a while."""

import time
from collections.abc import Callable

PATIENCE = 250.0  # seconds, on a machine that does much else


def eventually(condition: Callable[[], object], within: float = PATIENCE) -> bool:
    """Whether it comes true within so many seconds."""
    end = time.monotonic() + within
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
