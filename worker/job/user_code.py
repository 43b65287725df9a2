"""Where the modules of a job's own code lie."""

from __future__ import annotations

import sys
from pathlib import Path


def search_from(folder: Path) -> None:
    """Have this process, and those that it starts, find modules in a folder.

    The folder comes last, so that a module in it hides no installed one.
    """
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.append(path)
