"""Taking a run's checkpoints, and putting a run back to where one was taken."""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from embershard.proto.errors import EmbershardError, JobError, SnapshotUnknown, Status, TablesInTheWay
from embershard.proto.snapshot.stored import read_manifest
from embershard.worker.checkpoint.checkpoint import (
    SNAPSHOT,
    BadCheckpoint,
    Checkpoint,
    whole_checkpoint,
)
from embershard.worker.checkpoint.folder import CheckpointFolder, CheckpointNotWritten, WritingCheckpoint
from embershard.worker.checkpoint.snapshots import restore_rows
from embershard.worker.checkpoint.tensors import State, Stateful, pack
from embershard.worker.client.client import Client
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.compression.compressor import Compressor
from embershard.worker.data.batch import Dataset
from embershard.worker.data.inputs.rows import RowInputs, earlier_names, other_order
from embershard.worker.job.job import Job
from embershard.worker.training.budget import Position
from embershard.worker.training.evaluate import Best

RANDOM, COMPRESSION, LOCAL_STEPS, TRIAL = "random", "compression", "local_steps", "trial"
LOCAL_WEIGHTS, BUFFERS, NUMBERING, FILES = "local_weights", "buffers", "numbering", "files"

_log = logging.getLogger(__name__)


class NotRestored(EmbershardError):
    """Shards that were not given the snapshot of a checkpoint."""

    status = Status.FAILED_PRECONDITION
    template = (
        "the shards have no table {table!r} of checkpoint {path}: restore its snapshot first "
        "(`embershard restore {path}/{snapshot} --ps ADDRESSES`), or use `embershard train --resume`"
    )


class BestNotRestored(EmbershardError):
    """The best weights are kept in a checkpoint, but could not be restored at the end of a run."""

    status = Status.FAILED_PRECONDITION
    template = (
        "the run has ended, but its best weights could not be restored: {reason}. They are in {path}; the shards may "
        "hold the weights of the last step. To restore the best ones: `embershard restore {path}/{snapshot} --ps "
        "ADDRESSES --replace`"
    )


class Attributes:
    """Some attributes of an object: numbers, texts, and lists and dicts of them."""

    def __init__(self, owner: object, *names: str) -> None:
        self._owner, self._names = owner, names

    def state_dict(self) -> Mapping[str, object]:
        """Return the values of the fields."""
        return {name: getattr(self._owner, name) for name in self._names}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Set the fields to these values."""
        for name in self._names:
            setattr(self._owner, name, state[name])


_NAMES = ""  # beside the columns, none of which is called so
_NO_ID = -1  # the first id of a column of numbers


class Numbering:
    """The ids of each column, where the files decide them.

    Items have ids behind those of the users, however many these are. Names have the place among all that there are.
    """

    def __init__(self, dataset: Dataset) -> None:
        inputs = getattr(dataset, "inputs", None)
        self._first: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._hashed: set[str] = set()
        if isinstance(inputs, RowInputs):
            for columns in (inputs.categorical, inputs.lists):
                self._first |= {column.name: column.first for column in columns}
                self._names |= {column.name: _digest(column.values) for column in columns if column.values}
            self._first |= {column.name: _NO_ID for column in inputs.numeric}  # which has a place, too
            self._hashed = {column.name for column in inputs.categorical if column.ids == "hashed"}

    def state_dict(self) -> Mapping[str, object]:
        """Return the first id of each column, in their order, and digests of their names, which a checkpoint keeps."""
        return {**self._first, _NAMES: self._names} if self._first else {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Compare the ids with those of a checkpoint, whatever the columns are called. JobError where they differ."""
        digests = state.get(_NAMES)  # checkpoints of files without names may have none
        columns = [name for name in state if name != _NAMES]
        named = earlier_names([*self._first], columns)
        if reason := other_order(named, columns):
            reason = f"{reason} than when the checkpoint was trained, and a model knows a column by its place"
            raise JobError(where="data", reason=f"{reason}: give the files the order of that time, or train anew")
        for name, before in named.items():
            told = repr(name) if name == before else f"{name!r} (then called {before!r})"
            reason = ""
            kinds = [("numbers" if first == _NO_ID else "ids") for first in (self._first[name], state[before])]
            if kinds[0] != kinds[1]:
                reason = f"column {told} is of {kinds[0]}, and was of {kinds[1]} when the checkpoint was trained"
            elif name != before and name in self._hashed:
                reason = (
                    f"column {name!r} was called {before!r} when the checkpoint was trained, and the id of a value is "
                    "a hash of it and its column"
                )
            elif isinstance(digests, Mapping) and digests.get(before, "") != self._names.get(name, ""):
                reason = f"the values of {told} are others than when the checkpoint was trained, which changes the ids"
            elif state[before] != self._first[name]:
                reason = (
                    f"the ids of {told} begin at {self._first[name]}, behind those of the columns before it, and began "
                    f"at {state[before]} when the checkpoint was trained"
                )
            if reason:
                remedy = "Use the files of that time, or train anew"
                raise JobError(where="data", reason=f"{reason}: its rows are of other values. {remedy}")


def _digest(values: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]


class TrainingData:
    """Compare the data of train with that of the checkpoint that a run resumes from.

    It compares the fingerprints of files, or the numbers of samples where the data is not of files. `warning` says how
    they differ; it is empty where they do not.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.warning = ""
        fingerprint = getattr(dataset, "fingerprint", None)
        self._found: Mapping[str, object] = (
            {"samples": dataset.num_samples("train")} if fingerprint is None else fingerprint()
        )

    def state_dict(self) -> Mapping[str, object]:
        """Return the fingerprint, which a checkpoint keeps."""
        return self._found

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Compare with the data of a checkpoint: a place in it is a number of samples."""
        if not self._found or not state or self._found == state:
            return
        now, before = (
            ", ".join(f"{name} {count:,}" for name, count in found.items() if isinstance(count, int))
            for found in (self._found, state)
        )
        self.warning = (
            f"data.train is not as it was at the checkpoint ({now}; then {before}): the epoch that it is in has some "
            "rows twice, or leaves some out, if rows were added, removed or moved, and what was learnt from the data "
            "is of the rows of then"
        )


class RandomNumbers:
    """The generators of torch (of a GPU, too, where there is one), numpy and Python in this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> Mapping[str, object]:
        """Return the states of all random number generators."""
        _, keys, *numpy = np.random.get_state(legacy=True)
        version, words, gauss = random.getstate()
        state: dict[str, object] = {
            "torch": torch.get_rng_state(),
            "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), *numpy],
            "python": [version, list(words), gauss],
        }
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the states of all random number generators."""
        match state:
            case {
                "torch": torch.Tensor() as cpu,
                "numpy": [torch.Tensor() as keys, int(place), int(has_gauss), float(normal)],
                "python": [version, list(words), gauss],
            }:
                torch.set_rng_state(cpu)
                np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), place, has_gauss, normal))
                random.setstate((version, tuple(words), gauss))
            case _:
                raise ValueError("the state of the random numbers has another form")
        cuda = state.get("cuda")
        if self._device.type == "cuda" and isinstance(cuda, torch.Tensor):
            torch.cuda.set_rng_state(cuda, self._device)


class Buffers:
    """The buffers of a model, such as the running statistics of batch norm; every worker has its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> Mapping[str, object]:
        """The buffers that a state_dict of the model would hold."""
        return {
            f"{path}.{name}" if path else name: buffer
            for path, module in self._model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Copy them into the model."""
        for name, buffer in self.state_dict().items():
            saved = state[name]
            assert isinstance(buffer, torch.Tensor)
            assert isinstance(saved, torch.Tensor)
            buffer.copy_(saved)


class Saver:
    """Takes the checkpoints of one worker's run, with the others.

    `shared` are the parts that are alike on all workers, `own` those that are not, by name. `client` leads to the
    shards, for a job that has some; what it holds back of gradients is this worker's own, too. `source` is the
    checkpoint that the run was resumed from. `best` is told which checkpoint holds the weights of the best evaluation;
    a job that names no folder keeps that one in `best_folder`, if there is one, and trains on where this cannot be
    written. `owner` is the name of the job in its folder (see owner.py), if whoever started it has given one.
    """

    def __init__(
        self,
        job: Job,
        group: WorkerGroup,
        *,
        shared: Mapping[str, Stateful],
        own: Mapping[str, Stateful],
        client: Client | None,
        best: Best,
        output: Path | None = None,
        source: Checkpoint | None = None,
        best_folder: Path | None = None,
        owner: str = "",
    ) -> None:
        self._job, self._group, self._client, self._output, self._best = job, group, client, output, best
        self._shared, self._own = shared, dict(own)
        if client is not None:
            self._own[COMPRESSION] = client.compressor
        self._folder: CheckpointFolder | None = None
        self.saves = job.checkpoint.folder is not None  # whether the job wants checkpoints
        name: Callable[[], str] | None = None  # without shards, one process writes all checkpoints
        if owner:
            name = partial(str, owner)
        elif client is not None:  # the lineage is not known yet
            name = lambda: f"{client.lineage.number:016x}/{job.prefix}"  # noqa: E731
        if job.checkpoint.folder is not None:
            self._folder = CheckpointFolder(job.checkpoint.folder, job.checkpoint.keep, source, name)
        elif best_folder is not None and job.checkpoint.best:
            self._folder = CheckpointFolder(str(best_folder), 0, source, name)
        self._writing: WritingCheckpoint | None = None
        self._begun = ""  # url of the last one that was begun
        self.not_kept = ""  # why the best weights could not be written, as the first worker knows

    def save(self, step: int, *, best: bool, due: bool, wait: bool) -> None:
        """Take a checkpoint, if the job wants this one; every worker must call it, with nothing in flight.

        `best`: the evaluation just made is the best. `due`: the job's plan has a checkpoint here. The first worker
        writes it, in a thread of its own: from here on it may train. `wait` until it is written; else the next one
        does. CheckpointNotWritten, or an error of the shards, on all, for this one or the one before. One that a shard
        does not know any more, as it was started anew or began another client's snapshot, is dropped: its rows have
        changed since. A job that waits for it takes it again.
        """
        if best:
            self._best.checkpoint = None  # until it is kept
        if self._folder is None:
            return
        best = best and self._job.checkpoint.best
        begins = best or (due and self.saves)
        if begins:
            if not self._settle(self._folder) and self._best.checkpoint == self._begun:
                self._forget_best()
            self._begin(self._folder, step, best)
        if wait:
            while not self._settle(self._folder) and begins:
                self._begin(self._folder, step, best)

    def _begin(self, folder: CheckpointFolder, step: int, best: bool) -> None:
        group = self._group
        url: str = group.broadcast_json(folder.new_url(step) if group.is_first else "")
        self._begun = url
        if best:
            self._best.checkpoint = url
        shared = _states(self._shared)  # by all: weights that are sharded are gathered
        own = group.gather(np.frombuffer(pack(_states(self._own)), np.uint8))
        if group.is_first:
            workers = zip(group.present, own, strict=True)
            self._writing = folder.begin(
                {"shared": pack(shared)} | {f"worker-{worker}": part.tobytes() for worker, part in workers},
                url=url,
                best=self._best.checkpoint if self._job.checkpoint.best else None,
                job=self._job,
                step=step,
                world_size=group.world_size,
                output=self._output,
                shards=self._client,
            )

    def _settle(self, folder: CheckpointFolder) -> bool:
        """Wait for a checkpoint that is being written; False if it was dropped.

        Another error is raised on all workers of a job that wants checkpoints.
        """
        failure: EmbershardError | None = None
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.wait()
        except EmbershardError as error:
            failure = error
        unknown = str(failure) if isinstance(failure, SnapshotUnknown) else ""
        failed, given_up = self._group.broadcast_json([failure is not None, unknown])
        if given_up:
            _log.warning("checkpoint %s was dropped: %s", self._begun, given_up)
            return False
        if failed and not self.saves:  # the result says so
            self._best.checkpoint, self.not_kept = None, str(failure or "")
            return True
        if failure is not None:
            raise failure
        if failed:
            reason = "the first worker could not write them; see its output"
            raise CheckpointNotWritten(path=folder.url, reason=reason, previous="not known here")
        return True

    def restore(self, checkpoint: Checkpoint) -> bool:
        """Put every part of this worker back to where it was; whether it was there. The shards were restored before.

        A worker that was not there then starts from the first one's state, without random numbers and residuals. The
        residuals of workers who are not here any more go to those who are.
        BadCheckpoint where the checkpoint does not hold what this run needs.
        """
        own = checkpoint.worker(self._group.rank)
        others = own or checkpoint.first_worker()
        load_parts(checkpoint, checkpoint.shared(), self._shared)
        if self._best.checkpoint is not None:
            self._best.checkpoint = whole_checkpoint(self._best.checkpoint, checkpoint.url)
        without = {COMPRESSION, LOCAL_STEPS, TRIAL} - others.keys()  # which a job may have since
        if own is None:
            without |= {RANDOM, COMPRESSION}
        load_parts(checkpoint, others, {name: part for name, part in self._own.items() if name not in without})
        if self._client is not None:
            _hold_for_others(checkpoint, self._client.compressor, self._group)
        return own is not None

    def check_best(self) -> None:
        """Forget a best evaluation whose checkpoint is not whole: its writer was lost. Every worker must call it."""
        if self._folder is None or self._best.checkpoint is None:
            return
        self._settle(self._folder)
        url = self._best.checkpoint
        whole = whole_checkpoint(url) if url and self._group.is_first else None
        self._best.checkpoint = self._group.broadcast_json(whole)
        if self._best.checkpoint is None and url is not None:
            self._forget_best()

    def _forget_best(self) -> None:
        """Have the next evaluation be the best."""
        self._best.checkpoint, self._best.value = None, math.nan

    def restore_best(self) -> State:
        """Put the weights of the best evaluation onto the shards and into the workers; the first worker's state then.

        Every worker must call it, with nothing in flight, and trains no more. BestNotRestored on those who could not;
        on all of them where the shards could not.
        """
        assert self._best.checkpoint is not None
        path, reason, state = self._best.checkpoint, "", None
        try:
            checkpoint = Checkpoint.open(path)
            state = checkpoint.first_worker()
            if self._client is not None and self._group.is_first:
                _check_tables(checkpoint, self._client)
                restore_rows(self._client, path, SNAPSHOT, replace_tables=True)
        except EmbershardError as error:
            reason = str(error)
        if self._group.any(bool(reason)) and not reason:
            reason = "another worker could not restore them; see its output"
        if state is None or reason:
            raise BestNotRestored(path=path, reason=reason, snapshot=SNAPSHOT)
        load_parts(checkpoint, checkpoint.shared(), {k: part for k, part in self._shared.items() if k == LOCAL_WEIGHTS})
        load_parts(checkpoint, state, {BUFFERS: self._own[BUFFERS]})
        return state

    def forget_residuals(self) -> None:
        """Drop the residuals of the checkpoint: the run has gone on since, and has sent them."""
        if self._client is not None:
            self._client.compressor.clear_residuals()


def _check_tables(checkpoint: Checkpoint, client: Client) -> None:
    """TablesInTheWay where the shards have tables of others by now, which would be lost."""
    there = {table.name for status in client.status() for table in status.tables}
    others = sorted(there - read_manifest(checkpoint.url, SNAPSHOT).tables.keys())
    if others:
        raise TablesInTheWay(tables=", ".join(others))


def _hold_for_others(checkpoint: Checkpoint, compressor: Compressor, group: WorkerGroup) -> None:
    for rank in range(group.rank + group.world_size, checkpoint.manifest.world_size, group.world_size):
        state = (checkpoint.worker(rank) or {}).get(COMPRESSION)
        if isinstance(state, dict):
            compressor.hold(state)


def position_of(checkpoint: Checkpoint, rank: int, world_size: int) -> Position:
    """Return the position at which a worker goes on in its data."""
    state = checkpoint.worker(rank) or checkpoint.first_worker()
    try:
        match state["budget"]:
            case dict() as budget:
                return Position.of(budget, world_size)
        raise TypeError("it is none")
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(path=checkpoint.url, reason=f"it holds no position in the data ({error!r})") from None


def check_restored(client: Client, checkpoint: Checkpoint) -> None:
    """NotRestored unless the shards hold the tables of a checkpoint's snapshot."""
    if not checkpoint.manifest.snapshot:
        return
    there = {table.name for status in client.status() for table in status.tables}
    missing = sorted(read_manifest(checkpoint.url, SNAPSHOT).tables.keys() - there)
    if missing:
        raise NotRestored(path=checkpoint.url, table=missing[0], snapshot=SNAPSHOT)


def _states(parts: Mapping[str, Stateful]) -> dict[str, object]:
    return {name: part.state_dict() for name, part in parts.items()}


def load_parts(checkpoint: Checkpoint, state: Mapping[str, object], parts: Mapping[str, Stateful]) -> None:
    """Give every part its state. BadCheckpoint where it is missing, or is that of something else."""
    for name, part in parts.items():
        try:
            saved = state[name]
            if not isinstance(saved, dict):
                raise TypeError(f"it is a {type(saved).__name__}")
            part.load_state_dict(saved)
        except (KeyError, ValueError, TypeError, RuntimeError, AssertionError) as error:
            reason = f"its state of {name!r} does not fit this job ({type(error).__name__}: {error})"
            raise BadCheckpoint(path=checkpoint.url, reason=reason) from None
