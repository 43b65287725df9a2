"""Folders of this machine that a power cut does not take once they are made."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing, on the disk. OSError."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync(folder.parent)


def sync(path: str | Path) -> None:
    """Wait until the disk has the names in a folder, or the bytes of a file. OSError.

    Some file systems (of FUSE, SMB shares) can sync no folders and say so: their names are theirs to keep.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP) or not os.path.isdir(path):
            raise
    finally:
        os.close(handle)
