"""Which job a folder of checkpoints belongs to, so that two jobs never write into one folder at the same time.

Without torch, for who starts a job.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from embershard.proto.errors import EmbershardError, SnapshotUnreadable, Status
from embershard.proto.snapshot.storage import Storage

# the names of checkpoints, and of files in them and beside them
FOLDER = "step-"
NAME = re.compile(rf"{FOLDER}\d{{9,}}(-\d+)?")
MANIFEST = "checkpoint.json"
BEST_FILE, _OWNER_FILE = "BEST", "OWNER"
_FORMER = 1000  # owners that are remembered


class CheckpointFolderTaken(EmbershardError):
    """Another job has begun to write its checkpoints into the folder of this one."""

    status = Status.FAILED_PRECONDITION
    template = (
        "checkpoint.folder {path} belongs to another job since {since}, when that job (on {host}) wrote its first "
        "checkpoint there: this job no longer writes to the folder, and ends. Give each job its own checkpoint.folder"
    )


class _Record(BaseModel):
    """The contents of the file."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    owner: str
    former: list[str]  # those that had the folder before, the latest last
    host: str  # of the process that claimed it
    since: float = Field(ge=0, lt=2**40)  # seconds since 1970


class FolderOwner:
    """The owner of a folder of checkpoints: the last job that claimed it, by the file OWNER.

    It needs neither locks, which object storage and some network drives lack, nor clocks. A job that was started later,
    in place of one that was killed or by mistake beside one that runs, takes the folder over at its first checkpoint.
    The job that had the folder before finds that out, and writes no more.

    `name` gives that of this job, which all who may write its checkpoints know, and no other job has.
    """

    def __init__(self, storage: Storage, name: Callable[[], str]) -> None:
        self._storage, self._name = storage, name

    def claim(self) -> None:
        """Take the folder for this job, before it begins a checkpoint.

        CheckpointFolderTaken where another job has taken it from this one. SnapshotNotWritten, SnapshotUnreadable.
        """
        present, owner = self._read(), self._name()
        if present is not None:
            if present.owner == owner:
                return
            if owner in present.former:
                raise self._taken(present)
        former = [] if present is None else [*present.former, present.owner][-_FORMER:]
        record = _Record(owner=owner, former=former, host=socket.gethostname(), since=time.time())
        self._storage.replace(_OWNER_FILE, record.model_dump_json(indent=1).encode())

    def check(self) -> None:
        """CheckpointFolderTaken unless the folder belongs to this job, or to none. SnapshotUnreadable."""
        present = self._read()
        if present is not None and present.owner != self._name():
            raise self._taken(present)

    def _taken(self, present: _Record) -> CheckpointFolderTaken:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(present.since))
        return CheckpointFolderTaken(path=self._storage.url, host=present.host, since=since)

    def _read(self) -> _Record | None:
        try:
            return _Record.model_validate(json.loads(self._storage.read(_OWNER_FILE)))
        except FileNotFoundError:
            return None
        except (ValueError, ValidationError, RecursionError) as error:
            reason = f"it is damaged ({str(error).splitlines()[0]}); remove it"
            raise SnapshotUnreadable(path=self._storage.at(_OWNER_FILE), reason=reason) from None


def remove_unfinished(url: str, owner: str) -> None:
    """Remove what a job never finished from its folder of checkpoints, once all that write for it have ended."""
    with contextlib.suppress(EmbershardError):  # it is in nobody's way
        storage = Storage(url)
        names = [name for name in storage.sizes("") if NAME.fullmatch(name) and MANIFEST not in storage.sizes(name)]
        # only now: a job that takes the folder after this check had begun none of them
        FolderOwner(storage, lambda: owner).check()
        for name in [*names, f"{BEST_FILE}.new"]:
            storage.remove(name)
