"""Evaluation of trained weights: of a checkpoint, or of shards while others train, who are not held up."""

from __future__ import annotations

from pathlib import Path

import torch

from embershard.proto.errors import JobError
from embershard.worker.checkpoint.checkpoint import Checkpoint
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.batch import Dataset
from embershard.worker.data.user_defined import CheckedDataset
from embershard.worker.job.job import Job
from embershard.worker.job.readers.interactions import ListsSection
from embershard.worker.job.readers.tabular import TabularSection
from embershard.worker.job.readers.user_defined import UserReaderSection
from embershard.worker.models.user_defined import forward_of
from embershard.worker.trained.reading import ReadOnlySession, average_of, trained
from embershard.worker.training.evaluate import Evaluator
from embershard.worker.training.trainer import build_model, device_of


def trained_evaluator(
    job: Job,
    dataset: Dataset,
    session: ReadOnlySession | None,
    checkpoint: Checkpoint | None,
    *,
    curves: bool = False,
) -> Evaluator:
    """Return what scores a job's model with its trained weights, in one process.

    `session` leads to the shards, for a job that has some, and is no member of the job: the workers need not stop for
    it, so that rows of one evaluation may be some steps apart. Weights and running statistics that are in the workers,
    and the average that a run evaluates with, come from `checkpoint`. JobError where the data has nothing to evaluate
    on, or nothing in it; errors as of `trained`.
    """
    if not dataset.splits:
        reason = "there is nothing to evaluate on: name a file in data.valid or data.test, or by --on"
        raise JobError(where="data", reason=reason)
    device = device_of(job)
    # the layers that the run computed with: others round elsewhere
    model = build_model(job, dataset)
    forward = forward_of(model, job.model.name)
    strategy = trained(job, dataset, session, checkpoint, model=model, device=device)
    return Evaluator(
        job,
        dataset,
        strategy,
        WorkerGroup(),
        forward=forward,
        device=device,
        averaged=average_of(job, strategy, session, checkpoint),
        curves=curves,
    )


def open_file(job: Job, base: Path, path: Path) -> Dataset:
    """The data of a job whose only split is `test`, of one file; the job's own paths start at `base`.

    What a reader needs to number ids and to scale numbers comes from the job's own files. JobError for a reader that
    cannot take a file, and for a file that is missing, has other columns, or ids that the model does not know.
    """
    data = job.data
    fields = type(data).model_fields
    if "test" not in fields and not (isinstance(data, UserReaderSection) and data.takes("test")):
        reason = f"data.reader {data.reader} takes no file of its own to evaluate on"
        if isinstance(data, UserReaderSection):
            reason += "; give it an argument called test, the path of a file that is then its split test"
        raise JobError(where="--on", reason=reason)
    path = path.absolute()
    changes: dict[str, object] = {"test": (path,) if isinstance(getattr(data, "test", None), tuple) else path}
    if isinstance(data, TabularSection):  # what was not trained on is ranked, too, and not left out of a ranking
        items = (*data.catalogue, *(data.train if data.split is not None else ()), *data.valid, *data.test)
        changes = {"test": (str(path),), "catalogue": items}
    if isinstance(data, ListsSection):
        data = data.without_held_out()  # what was not trained on is not left out of a ranking
    if "valid" in fields:
        changes["valid"] = () if isinstance(getattr(data, "valid", None), tuple) else None
    if "halve_valid_by" in fields:
        changes["halve_valid_by"] = None
    own = None
    if not data.hashed and getattr(data, "num_ids", None) is None:  # only its files say how many ids the model has
        own = job.data.open(base, job.train.seed)
        changes |= {"num_ids": own.schema.num_ids} if "num_ids" in fields else {}
    dataset = data.model_copy(update=changes).open(base, job.train.seed)
    if isinstance(dataset, CheckedDataset):
        if "test" not in dataset.splits:
            reason = f"data.reader {data.reader} has no split test, which --on evaluates: its splits are "
            raise JobError(where="--on", reason=reason + (", ".join(dataset.splits) or "none"))
        dataset.splits = ("test",)
    if own is not None and not _numbered_alike(own, dataset):
        reason = "its users and items are not numbered as those that the model was trained on, which are the job's own"
        raise JobError(where=str(path), reason=_unknown_name(own, dataset) or reason)
    return dataset


def _unknown_name(own: Dataset, other: Dataset) -> str:
    """Say which user or item of a table is none of the job's own; the empty text where all are, or have no names."""
    known, given = (getattr(getattr(dataset, "inputs", None), "categorical", ()) for dataset in (own, other))
    for column, others in zip(known, given, strict=True):
        if new := sorted(set(others.values) - set(column.values)):
            reason = f"column {column.name!r} has values that the job's files lack ({len(new):,}), such as {new[0]!r}"
            return f"{reason}: the model knows nothing of them, so leave their rows out"
    return ""


def _numbered_alike(own: Dataset, other: Dataset) -> bool:
    items = [getattr(dataset, "item_ids", torch.empty(0)) for dataset in (own, other)]  # of a ranking
    return own.schema == other.schema and torch.equal(*items)
