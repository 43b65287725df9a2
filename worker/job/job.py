"""Job files: YAML, checked whole before anything starts; every mistake is named with its line and field."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, get_args

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from embershard.proto.errors import JobError
from embershard.worker.job.checks import IGNORED_BY_STRATEGY, mode_contradictions
from embershard.worker.job.compression import AnyCompression, compression_contradictions
from embershard.worker.job.data import METRICS, AnyData
from embershard.worker.job.job_step import Pattern, step_contradictions
from embershard.worker.job.job_workers import worker_contradictions
from embershard.worker.job.sections import CUSTOM, AnyModel, Count, Section
from embershard.worker.job.training import (
    BUDGETS,
    CheckpointSection,
    DenseMode,
    DenseSection,
    EmbeddingSection,
    EvaluateSection,
    NetworkSection,
    StrategyName,
    TrainSection,
)
from embershard.worker.job.yaml import JobSource, Mistake
from embershard.worker.job.yaml import Path as Location

DEFAULT_DIM = 16


class JobFileError(JobError):
    """A job with mistakes: all of them, a line each."""

    template = "{text}"

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__(text="\n".join(map(str, mistakes)), count=len(mistakes))
        self.mistakes = tuple(mistakes)


class Job(Section):
    """A training job.

    `strategy` says where its weights live: on shards (ps), with the dense ones in the workers (hybrid), or in torch
    alone, by one process (local), DataParallel (dp) or DistributedDataParallel (ddp).
    """

    strategy: StrategyName = "ps"
    model: AnyModel
    data: AnyData
    embedding: EmbeddingSection
    dense: DenseSection = DenseSection()
    train: TrainSection
    freeze: tuple[Pattern, ...] = ()  # names of parameters, or of modules, that are not trained
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection | None = None
    compression: AnyCompression = None
    network: NetworkSection = NetworkSection()
    workers: Count = 1
    shards: Count = 2
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][\w.\-/]*$|^$", max_length=100)] = ""  # of the tables' names
    output: Path | None = None

    @property
    def has_shards(self) -> bool:
        """Whether shards hold its embeddings."""
        return self.strategy in ("ps", "hybrid")

    @property
    def dense_mode(self) -> DenseMode:
        """Where the dense weights live, of a job with shards."""
        return "ddp" if self.strategy == "hybrid" and self.dense.mode == "ps" else self.dense.mode

    def elastic(self, workers: int) -> bool:
        """Whether training goes on where one of several workers is lost: none of them holds what the others need."""
        return workers > 1 and self.has_shards and self.dense_mode == "ps"

    def num_splits(self, workers: int) -> int:
        """Parts in which an epoch is dealt out to the workers; 0 where each has its share of it."""
        if not self.elastic(workers) or self.data.splits is None:
            return 0
        return self.data.splits if isinstance(self.data.splits, int) else 8 * workers

    @property
    def all_reduces(self) -> bool:
        """Whether torch adds gradients up over its workers, which then make every step together."""
        return self.strategy == "ddp" or (self.has_shards and self.dense_mode != "ps")

    @property
    def dim(self) -> int:
        """Dim of the embeddings, where the model does not decide it."""
        return self.embedding.dim or DEFAULT_DIM

    @property
    def top_k(self) -> int:
        """K of HR@K, NDCG@K and Recall@K."""
        return self.evaluate.top_k or (20 if self.data.evaluation == "ranking" else 10)

    @property
    def metrics(self) -> tuple[str, ...]:
        """What an evaluation computes."""
        return tuple(name.format(k=self.top_k) for name in METRICS[self.data.evaluation])

    def worker_threads(self, local_workers: int) -> int:
        """Threads of torch in each of this machine's workers.

        Where the job does not say: half of the cores are theirs, for shards and readers need some too.
        """
        return self.train.threads or max(1, (os.cpu_count() or 1) // (2 * local_workers))

    def loader_processes(self, local_workers: int) -> int:
        """Processes that make the batches of each worker; `local_workers` share this machine with its shards, if any.

        Where the job does not say: 1 where making a batch costs CPU and each process can have a core of its own.
        """
        if self.data.loader_processes is not None:
            return self.data.loader_processes
        shards = self.shards if self.has_shards else 0
        return int(self.data.costs_cpu and (os.cpu_count() or 1) >= 2 * local_workers + shards)

    @property
    def metric(self) -> str:
        """What decides which evaluation is the best."""
        return self.evaluate.metric or self.metrics[0]


def load_job(path: Path, overrides: Sequence[str] = (), data_root: Path | None = None) -> Job:
    """The job of a file, with "section.field=value" overrides on top; `data_root` replaces data.root.

    An override of the strategy takes away what the file says of shards, where the strategy has none.

    JobFileError names every mistake: what is no YAML, unknown or missing or of the wrong type or out of range; if there
    is none of these, every contradiction between fields, and every data file that is not there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise JobFileError([Mistake(str(path), "", f"cannot be read: {reason}")]) from None
    source = JobSource.parse(text, str(path))
    if source.mistakes:
        raise JobFileError(source.mistakes)
    for assignment in overrides:  # before they are applied: what they give themselves stays
        for field in IGNORED_BY_STRATEGY.get(assignment.removeprefix("strategy="), ()):
            source.drop(field)
    source.override(overrides, choices=[BUDGETS])
    if data_root is not None:
        source.put(("data", "root"), str(data_root.absolute()), f"--data {data_root}")
    try:
        job = Job.model_validate(source.values)
    except ValidationError as error:
        found = [_mistake(details, source) for details in error.errors(include_url=False)]
        raise JobFileError(_in_order([*source.mistakes, *found])) from None
    found = [Mistake(source.where(at), ".".join(map(str, at)), why) for at, why in _contradictions(job, path.parent)]
    if source.mistakes or found:
        raise JobFileError(_in_order([*source.mistakes, *found]))
    return job


def _in_order(mistakes: Sequence[Mistake]) -> list[Mistake]:
    def line(mistake: Mistake) -> int:
        number = mistake.where.rpartition(":")[2]
        return int(number) if number.isdigit() else 1 << 30  # overrides last

    return sorted(mistakes, key=line)


def _contradictions(job: Job, folder: Path) -> Iterator[tuple[Location, str]]:
    yield from _model_and_data(job)
    yield from _length(job)
    yield from _judging(job)
    yield from mode_contradictions(job)
    yield from step_contradictions(job)
    yield from worker_contradictions(job)
    yield from compression_contradictions(job)
    for field, files in job.data.files().items():
        for file in (folder / job.data.root / file for file in files):
            problem = _absent(file)
            if problem is not None:
                yield ("data", field), problem


def _absent(file: Path) -> str | None:
    """Why a file or folder cannot be had."""
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name with a zero character
        return f"no file {file}; check data.root (or pass --data), or the name"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}; check data.root (or pass --data), or the name"
    return None


def _model_and_data(job: Job) -> Iterator[tuple[Location, str]]:
    name, reader = job.model.name, job.data.reader
    if job.model.needs == "pairs" and not job.data.pairs:
        yield ("model", "name"), f"{name} needs a user and an item per sample, but data.reader {reader} reads features"
    if job.model.needs == "dense" and not job.data.has_dense:
        yield ("model", "name"), f"{name} needs dense features, but data.reader {reader} has none here"
    if name == "two_tower" and job.data.has_clicks:
        yield ("model", "name"), f"{name} learns from positives alone: set data.negatives to 0, or use reader lists"
    if name != "two_tower" and job.data.evaluation == "ranking":
        yield ("model", "name"), f"data.reader {reader} ranks all items for each user, which takes two_tower"
    problem = job.data.problem()
    if problem is not None:
        yield ("data", problem[0]), problem[1]
    if job.embedding.dim is not None and not job.model.takes_dim:
        other = "model.factors decides it" if "factors" in type(job.model).model_fields else "it has only weights"
        yield ("embedding", "dim"), f"has no meaning for {name} ({other}); remove it"
    if getattr(job.model, "batch_norm", job.model.needs == "dense") and job.train.batch_size == 1:
        yield ("train", "batch_size"), "batch norm needs at least 2 samples"


def _length(job: Job) -> Iterator[tuple[Location, str]]:
    train = job.train
    if train.budget is None:
        yield ("train",), "give exactly one of epochs, steps and samples"
        return
    unit, length = train.budget
    if unit == "steps" and train.lr_schedule.warmup_steps >= length:
        yield ("train", "lr_schedule", "warmup_steps"), f"must be below train.steps, which is {length}"
    if unit == "epochs" and job.data.endless:
        yield ("train", "epochs"), "the data has no end: give data.samples, or train.samples instead"
    schedule = train.lr_schedule.name
    if unit == "epochs" and schedule in ("linear", "cosine") and job.data.streams_text:
        reason = f"{schedule} needs the number of steps, which streamed text does not tell"
        yield ("train", "lr_schedule", "name"), f"{reason}: give train.steps in place of train.epochs"
    if unit == "samples" and length < job.workers:
        yield ("workers",), f"{job.workers} workers cannot share {length} samples"
    if job.evaluate.every is not None and job.evaluate.every > length:
        yield ("evaluate", "every"), f"must be at most train.{unit}, which is {length}"
    if job.checkpoint is not None and job.checkpoint.every is not None and job.checkpoint.every > length:
        yield ("checkpoint", "every"), f"must be at most train.{unit}, which is {length}"


def _judging(job: Job) -> Iterator[tuple[Location, str]]:
    if job.metric not in job.metrics:
        reason = f"is not computed on data.reader {job.data.reader}; it has {', '.join(job.metrics)}"
        yield ("evaluate", "metric"), f"{job.metric!r} {reason}"
    if job.metric == "calibration":
        yield ("evaluate", "metric"), "calibration is best near 1, not at an end; choose another metric"
    if job.evaluate.top_k is not None and job.data.evaluation == "pointwise":
        yield ("evaluate", "top_k"), f"has no meaning for data.reader {job.data.reader}; remove it"
    if not job.data.judged_on:
        for at, given in (("early_stop", job.train.early_stop is not None), ("lr_schedule", _plateau(job))):
            if given:
                yield ("train", at), "needs something to evaluate on: name a file in data.valid or data.test"


def _plateau(job: Job) -> bool:
    return job.train.lr_schedule.name == "plateau"


def _mistake(details: ErrorDetails, source: JobSource) -> Mistake:
    location, section = _without_tags(details["loc"])
    kind, context, message = details["type"], details.get("ctx", {}), details["msg"]
    if kind == "extra_forbidden":
        known = sorted(_fields(section))
        near = difflib.get_close_matches(str(location[-1]), known, 1)
        message = f"unknown field; did you mean {near[0]}?" if near else f"unknown field (known: {', '.join(known)})"
    elif kind == "missing":
        message = "is missing"
    elif kind == "union_tag_not_found":
        location = (*location, context["discriminator"].strip("'").replace("tag()", "name"))
        message = "is missing"
    elif kind == "union_tag_invalid":
        location = (*location, context["discriminator"].strip("'").replace("tag()", "name"))
        known = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
        near = difflib.get_close_matches(context["tag"], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        message = f"unknown {context['tag']!r}; {hint}"
    elif kind in ("model_type", "model_attributes_type"):
        message = f"is a section of fields, got {details['input']!r}"
    elif kind == "value_error":
        message = message.removeprefix("Value error, ")
        named = re.match(r"\w+: (\w+) ", message)  # the specs say "Adam: lr must be ..."
        if named is not None and named[1] in _fields(section):
            location = (*location, named[1])
            message = message[named.end() :]
    else:
        message = f"{message[0].lower()}{message[1:]}, got {details['input']!r}"
    return Mistake(source.where(location), ".".join(map(str, location)), message)


def _fields(section: type[BaseModel] | None) -> list[str]:
    """The fields of a section as a file names them."""
    return [] if section is None else [field.alias or name for name, field in section.model_fields.items()]


def _without_tags(loc: Sequence[str | int]) -> tuple[Location, type[BaseModel] | None]:
    """A location without the names that pydantic puts in for a chosen section, and the section that it ends in."""
    section: type[BaseModel] | None = Job
    choices: list[type[BaseModel]] = []
    path: list[str | int] = []
    for part in loc:
        chosen = [choice for choice in choices if part in _tags(choice)]
        if chosen:
            section, choices = chosen[0], []
            continue
        path.append(part)
        field = section.model_fields.get(str(part)) if section is not None else None
        if field is not None:
            choices = list(_sections(field.annotation))
            section = choices[0] if len(choices) == 1 else section if not choices else None
    return tuple(path), section


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


def _tags(section: type[BaseModel]) -> tuple[str, ...]:
    for name in ("name", "reader"):
        if name in section.model_fields:
            return get_args(section.model_fields[name].annotation) or (CUSTOM,)
    return ()
