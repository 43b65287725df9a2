"""A trained model, put together from what shards and workers hold, to be scored and written down."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from embershard.proto.errors import EmbershardError, Status
from embershard.proto.spec import TableSpec
from embershard.worker.checkpoint.checkpoint import Checkpoint
from embershard.worker.checkpoint.tensors import Stateful
from embershard.worker.data.batch import NUM_HASHED_IDS, Dataset
from embershard.worker.job.job import Job
from embershard.worker.nn.averaging import Share
from embershard.worker.nn.embedding import Embedding, EmbeddingBag
from embershard.worker.session.session import Session
from embershard.worker.session.tables import RemoteTable, Values, await_loaded
from embershard.worker.strategy.protocol import Strategy
from embershard.worker.training import build
from embershard.worker.training.build import choose_strategy, job_model
from embershard.worker.training.saver import LOCAL_WEIGHTS, NUMBERING, Buffers, Numbering, load_parts

PORTION = 2**18  # rows of one request
_CPU = torch.device("cpu")


class Averaged(Protocol):
    """A context in which the dense weights are their average."""

    def __call__(self, share: Share | None = None) -> AbstractContextManager[None]:
        """Enter it; `share` gives all workers the values of one."""


class NotTrained(EmbershardError):
    """Shards without the tables of a job."""

    status = Status.NOT_FOUND
    template = (
        "there is no table {table!r} of this job in the source (it has: {known}); check that job and source belong "
        "together, and the job's prefix"
    )


class OnlyInWorkers(EmbershardError):
    """Weights that shards do not hold."""

    status = Status.FAILED_PRECONDITION
    template = (
        "{what} of this job are in its workers, not on the shards: name a checkpoint of the run (checkpoint.folder) as "
        "the source"
    )


class ReadOnlySession(Session):
    """A session that creates no tables: a mistaken job must not leave any behind."""

    def table(self, spec: TableSpec, values: Values | None = None, *, num_rows: int = 0) -> RemoteTable:
        """The table of `spec`; NotTrained if not all shards have one of its name, TableMismatch if it is another.

        `num_rows` is not compared: who reads other data than the workers did may have fewer ids.
        """
        held = [{table.name for table in status.tables} for status in self.client.status()]
        known = sorted(set.intersection(*held))  # a shard without it would create it
        if spec.name not in known:
            raise NotTrained(table=spec.name, known=", ".join(known) or "none")
        table = super().table(spec)  # without offering to load it, which takes the right to train
        if values is not None:
            await_loaded(self.client, spec.name)
        return table


def trained(
    job: Job,
    dataset: Dataset,
    session: ReadOnlySession | None,
    checkpoint: Checkpoint | None,
    *,
    model: nn.Module | None = None,
    device: torch.device = _CPU,
) -> Strategy:
    """The strategy of a job with its trained weights.

    `session` leads to shards, for a job that has some; `checkpoint` is that of a run. `model` is the job's, as it was
    built for a run; else it is built of plain torch modules. OtherJob, NotTrained or TableMismatch where these are of
    another job, JobError where the dataset has other ids; OnlyInWorkers where a checkpoint is missing.
    """
    if checkpoint is not None:
        checkpoint.check_job(job)
    if model is None:
        torch.manual_seed(job.train.seed)
        model = job_model(job, dataset.schema)
    strategy = choose_strategy(job, model, session, device)
    held, buffers = strategy.local_weights, Buffers(strategy.model)
    if checkpoint is not None:
        parts: dict[str, Stateful] = {NUMBERING: Numbering(dataset)}
        load_parts(checkpoint, checkpoint.shared(), parts if held is None else {**parts, LOCAL_WEIGHTS: held})
        load_parts(checkpoint, checkpoint.first_worker(), {"buffers": buffers})
    elif held is not None:
        raise OnlyInWorkers(what="weights")
    elif names := ", ".join(buffers.state_dict()):
        raise OnlyInWorkers(what=f"buffers ({names})")
    if session is not None:
        session.pull([], session.dense_weights)
    strategy.model.eval()
    return strategy


def average_of(
    job: Job, strategy: Strategy, session: ReadOnlySession | None, checkpoint: Checkpoint | None
) -> Averaged:
    """Put the average that a run evaluated with in the place of the dense weights, inside; `share` as of Evaluator.

    Nothing where the job has none, or no checkpoint holds it: it is in the workers. BadCheckpoint.
    """
    average = None if checkpoint is None else build.average_of(job, strategy.model, session)
    if checkpoint is None or average is None:
        return lambda share=None: nullcontext()
    step = checkpoint.first_worker().get("step")
    if not isinstance(step, dict) or not step.get("average"):  # the run was made without one
        return lambda share=None: nullcontext()
    load_parts(checkpoint, step, {"average": average})
    return average.applied


def remote_tables(model: nn.Module) -> dict[str, Embedding | EmbeddingBag]:
    """Name in a wrapped model -> embedding, by every name that it has."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if isinstance(module, Embedding | EmbeddingBag)}


def is_hashed(module: Embedding | EmbeddingBag) -> bool:
    """Whether its ids are hashes, of which no list exists but that of the rows."""
    return module.num_embeddings is None or module.num_embeddings >= NUM_HASHED_IDS


def pull_all(module: Embedding | EmbeddingBag) -> torch.Tensor:
    """Every row of a table with a vocabulary, (num_embeddings, dim); those never trained have their first values."""
    assert module.num_embeddings is not None
    weight = torch.empty(module.num_embeddings, module.embedding_dim, dtype=torch.float32, device="cpu")
    for start in range(0, len(weight), PORTION):
        ids = torch.arange(start, min(start + PORTION, len(weight)), device="cpu")
        weight[start : start + len(ids)] = module.table.pull(ids)
    return weight
