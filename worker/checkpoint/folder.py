"""Write the checkpoints of a job into one folder, and remove those that it does not keep."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import posixpath
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path

from embershard.proto.errors import EmbershardError, SnapshotNotWritten, SnapshotUnreadable, Status
from embershard.proto.snapshot.sealed import seal_json
from embershard.proto.snapshot.storage import Storage
from embershard.proto.snapshot.stored import open_snapshot
from embershard.worker.checkpoint.checkpoint import (
    ENDING,
    SNAPSHOT,
    Checkpoint,
    CheckpointManifest,
    checkpoint_names,
    time_of_newest,
)
from embershard.worker.checkpoint.owner import BEST_FILE, FOLDER, MANIFEST, NAME, CheckpointFolderTaken, FolderOwner
from embershard.worker.checkpoint.snapshots import RunningSnapshot, begin_snapshot
from embershard.worker.client.client import Client
from embershard.worker.job.job import Job

_PROBE = ".embershard-probe"
_FIRST = f"shared{ENDING}"  # the file of a checkpoint that is written first

_log = logging.getLogger(__name__)


class CheckpointNotWritten(EmbershardError):
    """A checkpoint that could not be written."""

    status = Status.FAILED_PRECONDITION
    template = (
        "cannot write checkpoint {path}: {reason}; free some space, or choose another checkpoint.folder (if the job "
        "has none, another --output); the last whole checkpoint is {previous}"
    )


class CheckpointFolderInUse(EmbershardError):
    """A new run that would mix its checkpoints with those of an earlier one, and remove them."""

    status = Status.FAILED_PRECONDITION
    template = (
        "checkpoint.folder {path} holds checkpoints of an earlier run, up to step {step}: continue from there with "
        "--resume latest, or choose another folder"
    )


class CheckpointFolder:
    """A folder of checkpoints, of which the newest `keep` and the best one stay. One job writes into it.

    If another job begins to write into it, this one stops: CheckpointFolderTaken (see owner.py).

    `source`, from which the run was resumed, stays too: workers that are started again begin with it. So do those that
    the ones that stay are increments of. `owner` gives the name of the job in owner.py; without, this object is one.
    """

    def __init__(
        self,
        url: str,
        keep: int = 2,
        source: Checkpoint | None = None,
        owner: Callable[[], str] | None = None,
    ) -> None:
        self._storage = Storage(url)
        self._keep = keep
        self._source = None if source is None else source.url
        token = secrets.token_hex(8)
        self._owner = FolderOwner(self._storage, owner or (lambda: token))
        self._before: list[str] = []  # whole checkpoints, when the one that is written was begun
        self._not_before = 0.0  # seconds since 1970: the next one is newer, also where a clock was set back
        self._failure: EmbershardError | None = None  # why it could not be begun

    @property
    def url(self) -> str:
        """The folder or URL that the checkpoints are in."""
        return self._storage.url

    def check(self, *, resumed: bool) -> None:
        """CheckpointNotWritten if nothing can be written, CheckpointFolderInUse if a new run would mix with another."""
        if not resumed and (found := checkpoint_names(self._storage)):
            raise CheckpointFolderInUse(path=self.url, step=Checkpoint.open(self._storage.at(found[-1])).manifest.step)
        with self._named(_PROBE):
            self._storage.make_folder("")
            self._storage.replace(_PROBE, b"")
            self._storage.remove(_PROBE)

    def new_url(self, step: int) -> str:
        """Take the folder for this job, and in it a place for its next checkpoint; `begin` says where this failed.

        The place is apart from those that are there, of which one may be half written: a first worker that lost its
        lease may still write the checkpoint that another one makes in its place, and a job that had the folder before
        writes until it finds out. Of two that reserve one place at once the check stops one, or both.
        """
        name, self._failure = f"{FOLDER}{step:09d}", None
        try:
            with self._named(name):
                self._storage.make_folder("")
                self._before = checkpoint_names(self._storage)
                self._not_before = math.nextafter(time_of_newest(self._storage, self._before), math.inf)
                self._owner.claim()
                name = _free_name(step, list(self._storage.sizes("")))
                self._storage.make_folder(name)
                self._storage.replace(f"{name}/{_FIRST}", b"")  # object storage shows no empty folders
                self._owner.check()
        except EmbershardError as error:
            self._failure = error
            if not isinstance(error, CheckpointFolderTaken):  # else the place may be the other job's
                self._remove(name)
        return self._storage.at(name)

    def begin(
        self,
        states: Mapping[str, bytes],
        *,
        url: str,
        best: str | None,
        job: Job,
        step: int,
        world_size: int,
        output: Path | None,
        shards: Client | None,
    ) -> WritingCheckpoint:
        """Write a checkpoint of packed states, by the names of their files, to a `new_url`, and drop the oldest ones.

        `best` is the one of the best evaluation: itself, or one before. `shards` are those whose snapshot is a part of
        it. When this returns they hold the moment, and may be changed again while all is being written.
        """
        name, before = posixpath.basename(url), self._before
        manifest = CheckpointManifest(
            job=job.model_dump(mode="json"),
            step=step,
            world_size=world_size,
            files={f"{file}{ENDING}": hashlib.sha256(data).hexdigest() for file, data in states.items()},
            snapshot=shards is not None,
            output=None if output is None else str(output.absolute()),
            time=max(time.time(), self._not_before),
        )
        snapshot: RunningSnapshot | None = None
        failure = self._failure
        if failure is None and shards is not None:
            parent = self._storage.at(f"{before[-1]}/{SNAPSHOT}") if before else None
            incremental = job.checkpoint.incremental
            try:
                with self._undone(name):
                    snapshot = begin_snapshot(
                        shards, self._storage.at(name), SNAPSHOT, at_clock=0, incremental=incremental, parent_url=parent
                    )
            except EmbershardError as error:
                failure = error

        def finish() -> str:
            if failure is not None:
                raise failure
            with self._undone(name):
                for file, data in states.items():
                    self._storage.replace(f"{name}/{file}{ENDING}", data)
                if snapshot is not None:
                    snapshot.finish()
                self._owner.check()
                self._storage.replace(
                    f"{name}/{MANIFEST}", seal_json(manifest.model_dump_json(indent=1, exclude={"sha256"}).encode())
                )
                self._mark(best)
            self._prune([*before, name], best)
            return url

        return WritingCheckpoint(finish)

    def _mark(self, best: str | None) -> None:
        """Name the best one, where it is in this folder."""
        name = "" if best is None else posixpath.basename(best)
        if name and self._storage.at(name) == best:
            self._storage.replace(BEST_FILE, f"{name}\n".encode())
        else:  # a run that went back to before what is marked, or that keeps no best one any more
            self._storage.remove(BEST_FILE)

    def _prune(self, whole: list[str], best: str | None) -> None:
        """Keep the newest ones, and what another writer may still write; halves of earlier steps are no use to anyone.

        What has no name of ours is not ours.
        """
        newest = whole[len(whole) - self._keep :] if self._keep < len(whole) else whole
        own = _step_of(whole[-1])
        names = [name for name in self._storage.sizes("") if NAME.fullmatch(name)]
        self._owner.check()  # only now: a job that takes the folder after this check had begun none of them
        kept = {name for name in names if name in newest or self._storage.at(name) in (self._source, best)}
        try:
            kept |= {parent for name in kept for parent in self._parents(name)}
        except SnapshotUnreadable as error:  # nobody knows now what they need
            _log.warning("old checkpoints stay for now: %s", error)
            return
        for name in names:
            if name not in kept and (name in whole or _step_of(name) < own):
                with contextlib.suppress(EmbershardError):  # it is in nobody's way
                    self._storage.remove(f"{name}/{MANIFEST}")  # first: half of a checkpoint must not be found
                    self._storage.remove(name)

    def _parents(self, name: str) -> list[str]:
        """The checkpoints whose snapshots that of another one goes on from. SnapshotUnreadable."""
        try:
            chain = open_snapshot(self._storage.at(name), SNAPSHOT).chain
        except SnapshotUnreadable:
            raise
        except EmbershardError:  # it has none, or is of no use
            return []
        return [posixpath.basename(posixpath.dirname(one.url)) for one in chain[1:]]

    @contextlib.contextmanager
    def _undone(self, name: str) -> Iterator[None]:
        """Leaves nothing of a checkpoint behind that is not finished."""
        with self._named(name):
            try:
                yield
            except BaseException as error:
                try:
                    self._owner.check()  # another job may have removed what was written
                except SnapshotUnreadable:  # nor would it remove anything, and each try may take minutes
                    raise error from None
                except CheckpointFolderTaken:
                    self._remove(name)
                    raise
                self._remove(name)
                raise

    def _remove(self, name: str) -> None:
        with contextlib.suppress(EmbershardError):  # it is in nobody's way
            self._storage.remove(name)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Says which checkpoint could not be written."""
        try:
            yield
        except (SnapshotNotWritten, SnapshotUnreadable) as error:
            reason = error.fields["reason"] if isinstance(error, SnapshotNotWritten) else error
            previous = self._storage.at(self._before[-1]) if self._before else "none"
            raise CheckpointNotWritten(path=self._storage.at(name), reason=str(reason), previous=previous) from None


class WritingCheckpoint:
    """A checkpoint on its way to the disk, by a thread of its own."""

    def __init__(self, finish: Callable[[], str]) -> None:
        self._finish = finish
        self._url, self._awaited = "", False
        self._failure: EmbershardError | None = None
        self._thread = threading.Thread(target=self._run, name="embershard checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Until it is written; where it is. CheckpointNotWritten where a file is not taken; nothing of it is left."""
        self._awaited = True
        self._thread.join()  # it ends by the deadlines of the snapshot
        if self._failure is not None:
            raise self._failure
        return self._url

    def _run(self) -> None:
        try:
            self._url = self._finish()
        except EmbershardError as error:
            self._failure = error
            if not self._awaited:  # who waits, now or later, gets the error itself, with its remedy
                short = str(error)
                if isinstance(error, CheckpointNotWritten):
                    short = "checkpoint {path} was not written: {reason}".format_map(error.fields)
                _log.warning("%s", short)


def _step_of(name: str) -> int:
    return int(name.removeprefix(FOLDER).partition("-")[0])


def _free_name(step: int, taken: list[str]) -> str:
    """A folder's name: a run that was resumed from an earlier step comes by later ones again."""
    name = first = f"{FOLDER}{step:09d}"
    for number in count(2):
        if name not in taken:
            break
        name = f"{first}-{number}"
    return name
