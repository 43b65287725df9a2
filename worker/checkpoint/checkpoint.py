"""Checkpoints: what shards and workers need to go on as if a run had never ended.

A checkpoint is a folder, `step-N`, in the folder of the job's checkpoints:

    shards/                the snapshot of all shards (worker/checkpoint/snapshots.py), where the job has any
    shared.safetensors     what is the same for all workers: schedule, best evaluation, dense weights that workers hold
    worker-R.safetensors   what worker R has of its own: random numbers, running statistics
    checkpoint.json        the job, the step, and the sha256 of the files above

A snapshot may be an increment of that of an earlier checkpoint (`checkpoint.incremental`), which then has to stay.

checkpoint.json comes last and at once: a folder without it is no checkpoint, however far its writer came. The first
worker writes all of it, so the folder must be one that all workers and shards see. The file BEST beside the checkpoints
names the one with the weights of the best evaluation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from embershard.proto.errors import EmbershardError, JobError, SnapshotUnreadable, Status
from embershard.proto.snapshot.sealed import check_json
from embershard.proto.snapshot.storage import Storage
from embershard.proto.snapshot.stored import read_manifest
from embershard.worker.checkpoint.owner import BEST_FILE, FOLDER, MANIFEST, NAME
from embershard.worker.checkpoint.snapshots import restore_snapshot
from embershard.worker.client.client import Client
from embershard.worker.job.job import Job
from embershard.worker.job.readers.tabular import TabularSection

if TYPE_CHECKING:
    from embershard.worker.checkpoint.tensors import State

SNAPSHOT = "shards"
LATEST, BEST = "latest", "best"
_SHOWN = 5  # names of a folder, in an error
ENDING = ".safetensors"  # of the files of states
_VERSION = 1

# what a resumed run may not change, and the parts of it that it may
_FEATURES = "data.features"
_OF_TRAIN = ("train.batch_size", "train.accumulate", "train.seed")  # a place in the data is counted by them
_FIXED = ("strategy", "model", "data", "embedding", "dense", "prefix", *_OF_TRAIN)
_FREE = ("data.root", "data.fitted", "data.loader_processes", "data.splits", "data.eval_samples", "embedding.cache")


class BadCheckpoint(EmbershardError):
    """A folder that is no checkpoint, or a damaged one, or one of a newer version."""

    status = Status.FAILED_PRECONDITION
    template = "checkpoint {path}: {reason}"


class OtherJob(EmbershardError):
    """A checkpoint of a job that trains something else."""

    status = Status.FAILED_PRECONDITION
    template = (
        "checkpoint {path} is of another job: {difference}; use the job file that it was trained with. To begin a "
        "new run, leave out --resume; to score another file, use `embershard evaluate --on`"
    )


class CheckpointManifest(BaseModel):
    """The contents of checkpoint.json: job, step and checksums."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    version: Literal[1] = 1
    job: dict[str, object]
    step: int  # of the first worker
    world_size: int
    files: dict[str, str]  # name -> sha256
    snapshot: bool  # whether there is one of shards
    output: str | None = None  # the run's folder of logs
    time: float  # seconds since 1970
    sha256: str | None = None  # of all other fields


class Checkpoint:
    """A whole checkpoint, in a folder or at a URL."""

    def __init__(self, storage: Storage, manifest: CheckpointManifest) -> None:
        self._storage = storage
        self.manifest = manifest

    @property
    def url(self) -> str:
        """The folder or URL that the checkpoint is in."""
        return self._storage.url

    @property
    def output(self) -> Path | None:
        """The folder of logs of its run, if that is here."""
        path = None if self.manifest.output is None else Path(self.manifest.output)
        return path if path is not None and path.is_dir() else None

    @classmethod
    def open(cls, url: str) -> Checkpoint:
        """The checkpoint at a place. BadCheckpoint where there is none that this version can read."""
        storage = Storage(url)
        try:
            text = storage.read(MANIFEST)
        except FileNotFoundError:
            raise BadCheckpoint(path=url, reason=f"it has no {MANIFEST}: it was never finished, or is none") from None
        except SnapshotUnreadable as error:
            raise BadCheckpoint(path=url, reason=f"cannot be read: {error.fields['reason']}") from None
        try:
            values = json.loads(text)
            version = values.get("version") if isinstance(values, dict) else None
            if isinstance(version, int) and version > _VERSION:
                reason = f"it has version {version}, and this program reads {_VERSION}; upgrade it"
                raise BadCheckpoint(path=url, reason=reason)
            manifest = CheckpointManifest.model_validate(values)
            check_json(text, values)
            return cls(storage, manifest)
        except (ValueError, RecursionError) as error:  # pydantic's are ValueErrors
            what = f"field {_first_field(error)}" if isinstance(error, ValidationError) else str(error)
            reason = f"{MANIFEST} is damaged, or not ours ({what}); take the checkpoint before it"
            raise BadCheckpoint(path=url, reason=reason) from None

    @property
    def _workers(self) -> list[str]:
        names = [name.removesuffix(ENDING) for name in self.manifest.files]
        return [name for name in names if re.fullmatch(r"worker-\d{1,9}", name)]

    def shared(self) -> State:
        """Read the state that all workers share. BadCheckpoint where it is damaged."""
        return self._read("shared")

    def worker(self, rank: int) -> State | None:
        """Read one worker's own state; None for one that was not there. BadCheckpoint where it is damaged."""
        return self._read(f"worker-{rank}") if f"worker-{rank}" in self._workers else None

    def first_worker(self) -> State:
        """Read the state of the first worker that was there. BadCheckpoint where it is damaged."""
        return self._read(min(self._workers, default="worker-0", key=lambda name: int(name.removeprefix("worker-"))))

    def check_job(self, job: Job) -> None:
        """OtherJob if a job trains something else than this checkpoint's."""
        theirs: Mapping[str, object] = self.manifest.job
        with contextlib.suppress(ValidationError):  # with the defaults of fields that are newer than the checkpoint
            theirs = Job.model_validate(theirs).model_dump(mode="json")
        # an optimizer in a worker has its state by the number of each parameter that is trained
        fixed = _FIXED if job.has_shards and job.dense_mode == "ps" else (*_FIXED, "freeze")
        difference = _difference(theirs, job.model_dump(mode="json"), fixed)
        if difference:
            raise OtherJob(path=self.url, difference=difference)

    def _read(self, name: str) -> State:
        from embershard.worker.checkpoint.tensors import (
            unpack,  # only here: to find and check a checkpoint takes no torch
        )

        file = f"{name}{ENDING}"
        want = self.manifest.files.get(file)
        try:
            data = self._storage.read(file)
            got = hashlib.sha256(data).hexdigest()
            if got != want:
                raise ValueError(f"its sha256 is {got[:12]}..., not {str(want)[:12]}...")
            return unpack(data)
        except (FileNotFoundError, SnapshotUnreadable, ValueError) as error:
            said = "it is not there" if isinstance(error, FileNotFoundError) else str(error)
            reason = f"{file} is damaged: {said}; take the checkpoint before it"
            raise BadCheckpoint(path=self.url, reason=reason) from None


def find_checkpoint(where: str, job: Job) -> Checkpoint:
    """The checkpoint that --resume names: a folder of one, a folder of several, whose newest it is, "latest" or "best".

    BadCheckpoint or JobError where there is none, OtherJob where it is not of this job.
    """
    best = where == BEST
    if where in (LATEST, BEST):
        if job.checkpoint.folder is None:
            reason = "the job has no checkpoint.folder to look in; name the checkpoint"
            raise JobError(where=f"--resume {where}", reason=reason)
        where = job.checkpoint.folder
    found = best_checkpoint(where) if best else checkpoint_at(where)
    if found is None:
        what = "checkpoint that is marked as the best" if best else "whole checkpoint"
        raise BadCheckpoint(path=Storage(where).url, reason=f"there is no {what} in it{_what_is_there(where, job)}")
    found.check_job(job)
    return found


def _what_is_there(url: str, job: Job) -> str:
    """What a place has that holds no checkpoint, and where the job has some, to append to an error."""
    storage, folder = Storage(url), job.checkpoint.folder
    names = sorted(storage.sizes(""))
    shown = f"; it has {_listed(names)}" if names else "; it is empty"
    if storage.is_missing:
        shown = ", as there is no such folder"
    elif unfinished := sorted({name for name in names if NAME.fullmatch(name)} - {*checkpoint_names(storage)}):
        shown += f" ({unfinished[0]} has no {MANIFEST}: it was never finished)"
    if folder is None or (others := Storage(folder)).url == storage.url or not (own := checkpoint_names(others)):
        return shown
    return f"{shown}. checkpoint.folder {others.url} has {_listed(own)}: name one of these, or use --resume {LATEST}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= _SHOWN else [*names[:_SHOWN], f"{len(names) - _SHOWN} more"])


def restore_shards(client: Client, checkpoint: Checkpoint, *, replace: bool = False) -> None:
    """Give all shards the rows of a checkpoint; tables like its own are replaced, with `replace` all others, too.

    TablesInTheWay where the shards hold tables of another name, dim or optimizer.
    """
    held = {(table.name, table.dim, table.optimizer) for status in client.status() for table in status.tables}
    tables = read_manifest(checkpoint.url, SNAPSHOT).tables
    own = {(name, table.spec.dim, table.spec.optimizer.name) for name, table in tables.items()}
    restore_snapshot(client, checkpoint.url, SNAPSHOT, replace_tables=replace or held <= own)


def settings_of(job: Job) -> dict[str, object]:
    """Return what a resumed run of a job may not change, and how long it trains, by field."""
    budget = ("train.epochs", "train.steps", "train.samples")
    return dict(_settings(job.model_dump(mode="json"), (*_FIXED, *budget)))


def with_preprocessing(job: Job, folder: Path, checkpoint: Checkpoint | None = None) -> Job:
    """A job with what its features need of the training data: that of a checkpoint, else what its files tell now.

    JobError names what is wrong with a file; `folder` is where its relative paths start.
    """
    if not isinstance(job.data, TabularSection) or job.data.fitted is not None:
        return job
    before = {} if checkpoint is None else checkpoint.manifest.job.get("data")
    stored = before.get("fitted") if isinstance(before, dict) else None
    data = job.data.fit(folder, job.train.seed) if stored is None else job.data.with_fitted(stored)
    return job.model_copy(update={"data": data})


def checkpoint_at(url: str) -> Checkpoint | None:
    """The checkpoint that a folder is, or the newest of those in it; None where there is none."""
    storage = Storage(url)
    if MANIFEST in storage.sizes(""):
        return Checkpoint.open(url)
    found = checkpoint_names(storage)
    return Checkpoint.open(storage.at(found[-1])) if found else None


def best_checkpoint(url: str) -> Checkpoint | None:
    """The checkpoint of the best evaluation of those in a folder; None where none is marked as it.

    BadCheckpoint where the one that is marked is not there.
    """
    storage = Storage(url)
    try:
        name = storage.read(BEST_FILE).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if not NAME.fullmatch(name):
        raise BadCheckpoint(path=storage.at(BEST_FILE), reason="it names no checkpoint; name one yourself")
    return Checkpoint.open(storage.at(name))


def whole_checkpoint(url: str, beside: str = "") -> str | None:
    """Return the place of a checkpoint: beside another one, if their folder was moved, or as before; None: gone."""
    moved = [f"{posixpath.dirname(beside)}/{posixpath.basename(url)}"] if beside else []
    return next((place for place in (*moved, url) if MANIFEST in Storage(place).sizes("")), None)


def checkpoint_names(storage: Storage) -> list[str]:
    """Names of the whole checkpoints in a folder, the newest last."""
    names = [name for name in storage.sizes("") if name.startswith(FOLDER) and MANIFEST in storage.sizes(name)]

    def age(name: str) -> float:
        try:
            return Checkpoint.open(storage.at(name)).manifest.time
        except BadCheckpoint:
            return math.inf  # to be named, not passed over in silence

    return sorted(names, key=age)


def time_of_newest(storage: Storage, names: Sequence[str]) -> float:
    """When the newest of these checkpoints that can be read was made, in seconds since 1970; 0 without any."""
    for name in reversed(names):
        with contextlib.suppress(BadCheckpoint):
            return Checkpoint.open(storage.at(name)).manifest.time
    return 0.0


def _first_field(error: ValidationError) -> str:
    details = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, details['loc']))}: {details['msg']}"


def _difference(theirs: Mapping[str, object], ours: Mapping[str, object], fixed: tuple[str, ...]) -> str:
    """The settings that differ and are fixed, as `field: here, not there`; empty where only such differ as may."""
    there, here = dict(_settings(theirs, fixed)), dict(_settings(ours, fixed))
    keys = [key for key in {**here, **there} if here.get(key) != there.get(key)]
    if _FEATURES in keys:  # says more than the fields of those that are here or there alone
        keys = [key for key in keys if not key.startswith(f"{_FEATURES}.")]
    return ", ".join(f"{key} is {here.get(key)!r} here and {there.get(key)!r} there" for key in keys)


def _settings(job: Mapping[str, object], fixed: tuple[str, ...], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in job.items():
        name = f"{path}{key}"
        if name == _FEATURES and isinstance(value, Mapping):
            yield name, list(value)  # their order is that of a model's inputs
        if isinstance(value, Mapping) and value:
            yield from _settings(value, fixed, f"{name}.")
        elif _within(name, fixed) and not _within(name, _FREE):
            yield name, value


def _within(name: str, fields: tuple[str, ...]) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in fields)
