"""What checkpoints are called, and the end of those that nobody finished; without torch, for who starts a job."""

from __future__ import annotations

import contextlib
import re

from embershard.proto.errors import EmbershardError
from embershard.proto.snapshot.storage import Storage

MANIFEST = "checkpoint.json"
BEST_FILE, OWNER_FILE = "BEST", "OWNER"
FOLDER = "step-"
NAME = re.compile(rf"{FOLDER}\d{{9,}}(-\d+)?")


def remove_unfinished(url: str) -> None:
    """Remove what was never finished from a job's folder of checkpoints, once all that write to it have ended."""
    with contextlib.suppress(EmbershardError):  # it is in nobody's way
        storage = Storage(url)
        for name in storage.sizes(""):
            is_half = NAME.fullmatch(name) and MANIFEST not in storage.sizes(name)
            if is_half or name in (f"{BEST_FILE}.new", f"{OWNER_FILE}.new"):
                storage.remove(name)
