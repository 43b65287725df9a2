"""Which job a folder of checkpoints belongs to, so that two jobs never write into one folder at the same time."""

from __future__ import annotations

import json
import socket
import time

from pydantic import BaseModel, ConfigDict, ValidationError

from embershard.proto.errors import EmbershardError, SnapshotUnreadable, Status
from embershard.proto.snapshot.storage import Storage
from embershard.worker.checkpoint.names import OWNER_FILE

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
    since: float  # seconds since 1970


class FolderOwner:
    """The owner of a folder of checkpoints: the last job that claimed it, by the file OWNER.

    It needs neither locks, which object storage and some network drives lack, nor clocks. A job that was started later,
    in place of one that was killed or by mistake beside one that runs, takes the folder over at its first checkpoint.
    The job that had the folder before finds that out, and writes no more.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def claim(self, owner: str) -> bool:
        """Take the folder for a job, by a name that no other job has; whether another one had it until now.

        CheckpointFolderTaken where another job has taken it from this one. SnapshotNotWritten, SnapshotUnreadable.
        """
        present = self._read()
        if present is not None:
            if present.owner == owner:
                return False
            self._check(present, owner)
        former = [] if present is None else [*present.former, present.owner][-_FORMER:]
        record = _Record(owner=owner, former=former, host=socket.gethostname(), since=time.time())
        self._storage.replace(OWNER_FILE, record.model_dump_json(indent=1).encode())
        return present is not None

    def check(self, owner: str) -> None:
        """CheckpointFolderTaken where another job has taken the folder from this one. SnapshotUnreadable."""
        present = self._read()
        if present is not None:
            self._check(present, owner)

    def _check(self, present: _Record, owner: str) -> None:
        if owner in present.former:
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(present.since))
            raise CheckpointFolderTaken(path=self._storage.url, host=present.host, since=since)

    def _read(self) -> _Record | None:
        try:
            return _Record.model_validate(json.loads(self._storage.read(OWNER_FILE)))
        except FileNotFoundError:
            return None
        except (ValueError, ValidationError, RecursionError) as error:
            reason = f"it is damaged ({str(error).splitlines()[0]}); remove it"
            raise SnapshotUnreadable(path=self._storage.at(OWNER_FILE), reason=reason) from None
