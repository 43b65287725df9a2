"""Folders that options name, and those that one job alone writes to."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import typer

from embershard.proto.errors import EmbershardError, Status


def folder(text: str) -> Path:
    """The folder that an option names; none, as of a variable that is not set, would be the current folder.

    A URL would be a folder here, with a colon in its name.
    """
    if not text:
        raise typer.BadParameter("it is empty; name a folder")
    if "://" in text:
        raise typer.BadParameter(f"{text} is a URL; name a folder of this machine, and copy what is in it then")
    return Path(text)


class FolderTaken(EmbershardError):
    """Another command writes to the same folder."""

    status = Status.FAILED_PRECONDITION
    template = (
        "another `embershard` command that runs now writes to {folder}: choose another folder for this one with "
        "{setting}, or wait for the end of that one"
    )


@contextlib.contextmanager
def kept_from_others(folders: Mapping[str, str | Path | None]) -> Iterator[None]:
    """Keep other jobs of this machine out of some folders, each by the setting that names it. FolderTaken.

    A folder that is not there is made. A URL, None, and a file system without locks are left as they are. The lock ends
    with this process, however that ends, and leaves no file.
    """
    locked: set[Path] = set()
    with contextlib.ExitStack() as stack:
        for setting, folder in folders.items():
            if folder is None or "://" in str(folder) or (path := Path(folder).resolve()) in locked:
                continue
            try:
                path.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderTaken(folder=str(folder), setting=setting) from None
            except OSError:  # the job writes there soon, and its error says more
                continue
            locked.add(path)
        yield
