"""Many cases of bytes that nobody should send; case n depends on n alone, and a failure names it."""

import os
import random
from collections.abc import Callable

CASES = int(os.environ.get("EMBERSHARD_FUZZ_FRAMES", "1000"))


def run_cases(check: Callable[[random.Random], object], refused: type[Exception], cases: int = CASES) -> int:
    """In how many cases `check` was true; it may raise `refused`, and nothing else."""
    given = 0
    for case in range(cases):
        try:
            given += bool(check(random.Random(case)))
        except refused:
            pass
        except BaseException as error:
            error.add_note(f"case {case}")
            raise
    return given


def mutate(rng: random.Random, data: bytearray, at: int, size: int) -> None:
    """Flip, remove, insert or replace bytes there."""
    match rng.randrange(4):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at : at + size]
        case 2:
            data[at:at] = rng.randbytes(size)
        case _:
            data[at : at + size] = rng.randbytes(size)
