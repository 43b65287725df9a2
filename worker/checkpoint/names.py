"""What checkpoints are called, and the end of those that nobody finished; without torch, for who starts a job."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

MANIFEST = "checkpoint.json"
BEST_FILE = "BEST"
FOLDER = "step-"
NAME = re.compile(rf"{FOLDER}\d{{9,}}(-\d+)?")


def remove_unfinished(folder: Path) -> None:
    """Remove what was never finished from a job's folder of checkpoints, once all that write to it have ended."""
    with contextlib.suppress(OSError):  # it is in nobody's way
        (folder / f"{BEST_FILE}.new").unlink(missing_ok=True)
        for found in folder.glob(f"{FOLDER}*"):
            if NAME.fullmatch(found.name) and not (found / MANIFEST).exists():
                shutil.rmtree(found, ignore_errors=True)
