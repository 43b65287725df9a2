"""Sections of a job file that say how it is trained and judged."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from embershard.proto import spec
from embershard.proto.transport.emulated_link import UNLIMITED, parse_bandwidth
from embershard.worker.job.sections import (
    AnyInitializer,
    AnyOptimizer,
    CodeSection,
    Count,
    Section,
    as_code,
    is_off,
)
from embershard.worker.nn.lr_schedule import Shape


def _argument(value: object) -> object:
    """One reason, where pydantic gives one for each kind that it could be."""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    kinds = (int, float) if isinstance(value, (list, tuple)) else (bool, int, float, str, type(None))
    if not all(isinstance(part, kinds) for part in parts):
        raise ValueError("must be a number, a text, true, false, null or a list of numbers")
    if not all(math.isfinite(part) for part in parts if isinstance(part, float)):
        raise ValueError("must be finite")
    return tuple(value) if isinstance(value, list) else value


Argument = Annotated[bool | int | float | str | tuple[int | float, ...] | None, PlainValidator(_argument)]


class GroupSection(Section):
    """A parameter group with its own optimizer: the weights whose name, or a module that contains them, matches
    `match`.
    """

    match: Pattern  # a shell pattern
    optimizer: AnyOptimizer  # optimizer of these weights


class TableGroupSection(GroupSection):
    """A parameter group of embeddings, with its own optimizer and, optionally, initializer."""

    initializer: AnyInitializer | None = None  # first values of the rows; by default those of `embedding`


# torch's own Normal(0, 1) is far too large for sums and products of many rows: after 300,000 of the demo's clicks DLRM
# is at AUC .717 with it and at .762 with this one (docs/training/step.md, "First values")
DEFAULT_INITIALIZER = spec.Normal(std=0.01)


def optimizers_of(groups: Sequence[GroupSection], default: spec.Optimizer) -> dict[str, spec.Optimizer]:
    """Pattern -> optimizer, the groups' first."""
    return {**{group.match: group.optimizer.build() for group in groups}, "*": default}


def initializers_of(
    groups: Sequence[TableGroupSection], default: spec.Initializer
) -> dict[str, spec.Initializer | None]:
    """Pattern -> first values, as `optimizers_of`; a group without any has the default ones."""
    own = {group.match: group.initializer.build() if group.initializer else default for group in groups}
    return {**own, "*": default}


class CacheSection(Section):
    """Cache up to `rows` frequently read rows per table in each worker; a copy is at most `staleness` steps old."""

    rows: Annotated[int, Field(ge=1)] = 100_000
    staleness: Annotated[int, Field(ge=1)] = 4


class EmbeddingSection(Section):
    """The embedding tables; `dim` is 16 unless the model determines it.

    Without an `initializer` the first values are small (docs/training/step.md, "First values"). The first of the
    `groups` that matches a table sets its optimizer and initializer.
    """

    dim: Annotated[int, Field(ge=1, le=65_536)] | None = None
    optimizer: AnyOptimizer  # optimizer of the rows
    initializer: AnyInitializer | None = None
    groups: tuple[TableGroupSection, ...] = ()
    cache: CacheSection | None = None  # copies of frequently read rows in the workers

    def optimizers(self) -> dict[str, spec.Optimizer]:
        """Pattern -> optimizer; the first pattern that matches counts."""
        return optimizers_of(self.groups, self.optimizer.build())

    def initializers(self, default: spec.Initializer = DEFAULT_INITIALIZER) -> dict[str, spec.Initializer | None]:
        """Pattern -> first values of tables that have none of their own, on the meta device."""
        return initializers_of(self.groups, self.initializer.build() if self.initializer else default)


StrategyName = Literal["ps", "hybrid", "ddp", "dp", "local"]
DenseMode = Literal["ps", "ddp", "fsdp"]


class DenseSection(Section):
    """All weights that are not embeddings; without an `optimizer` they use that of the embeddings.

    `mode` says where they are: on the shards (ps), or in the workers, with DistributedDataParallel (ddp) or FSDP2
    (fsdp).
    """

    optimizer: AnyOptimizer | None = None
    groups: tuple[GroupSection, ...] = ()  # the first group that matches a weight sets its optimizer
    mode: DenseMode = "ps"


_SHAPED: dict[str, tuple[str, ...]] = {  # field -> the schedules in which it has a meaning
    "end": ("linear", "cosine"),
    "every": ("step",),
    "factor": ("step", "plateau"),
    "patience": ("plateau",),
    "scheduler": ("torch",),
    "args": ("torch",),
}


class ScheduleSection(Section):
    """Choose how the learning rates change.

    After `warmup_steps` steps of linear growth they stay constant (constant), fall to `end` times their value until
    the end of the run (linear, cosine; `end` is 0 by default), or are multiplied by `factor` (0.1 by default) every
    `every` steps (step) or after `patience` (1 by default) evaluations in a row that were not better (plateau).
    `name: torch` uses the `class` of torch.optim.lr_scheduler with the arguments `args`; it advances with every step.
    """

    model_config = ConfigDict(populate_by_name=True)

    name: Literal[Shape, "torch"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    end: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    every: Count | None = None
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    patience: Count | None = None
    scheduler: str | None = Field(default=None, alias="class")
    args: dict[str, Argument] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, shapes in _SHAPED.items():
            if getattr(self, name) is not None and self.name not in shapes:
                field = "class" if name == "scheduler" else name
                raise ValueError(f"ScheduleSection: {field} has no meaning for {self.name}; remove it")
        if self.name == "step" and self.every is None:
            raise ValueError("ScheduleSection: every must say after how many steps the rate falls")
        if self.name == "torch":
            self._check_scheduler()
        return self

    def _check_scheduler(self) -> None:
        if self.scheduler is None:
            raise ValueError("ScheduleSection: class must name one of torch.optim.lr_scheduler")
        # torch, for those who name a part of it
        from embershard.worker.nn.lr_schedule import UnknownScheduler, check_scheduler

        try:
            check_scheduler(self.scheduler, self.args or {})
        except ValueError as error:
            field = "class" if isinstance(error, UnknownScheduler) else "args"
            raise ValueError(f"ScheduleSection: {field} is refused: {error}") from None


class EarlyStopSection(Section):
    """Stop after `patience` evaluations in a row that were not better than the best by more than `min_delta`."""

    patience: Count
    min_delta: Annotated[float, Field(ge=0.0)] = 0.0


BUDGETS = frozenset({"train.epochs", "train.steps", "train.samples"})  # a job has one


# None is `off`; False must not become the number 0
Staleness = Annotated[
    Annotated[int, Field(ge=0, strict=True)] | None,
    BeforeValidator(
        lambda value: None if is_off(value) else value,
        json_schema_input_type=Annotated[int, Field(ge=0)] | Literal["off", False] | None,
    ),
]


_LOCAL = re.compile(r"local\(([1-9]\d{0,6})\)")


_Staleness = (
    Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=rf"^(off|{_LOCAL.pattern})$")] | Literal[False] | None
)


def _consistency(value: object) -> int | str | None:
    if value is None or is_off(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and _LOCAL.fullmatch(value):
        return value
    raise ValueError(f"must be 0, a number of clocks, off or local(steps), got {value!r}")


class AverageSection(Section):
    """Evaluate with the exponential moving average of the dense weights."""

    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999  # share of the average that a step keeps


class StepSection(Section):
    """Choose how a step is computed (docs/training/step.md)."""

    amp: Annotated[
        Literal["off", "bf16", "fp16"],
        BeforeValidator(
            lambda value: "off" if is_off(value) else value,
            json_schema_input_type=Literal["off", "bf16", "fp16", False],
        ),
    ] = "off"
    """Run the forward in bfloat16 or float16."""
    accumulate: Count = 1  # number of batches of a step, which uses the mean of their gradients
    clip_norm: Annotated[float, Field(gt=0.0)] | None = None  # maximum L2 norm of all gradients of a worker
    non_finite: Literal["stop", "skip"] = "stop"  # a step with NaN or Inf ends the run (stop) or is skipped (skip)
    checkpoint_activations: bool = False  # MLP towers recompute their activations in backward
    compile: bool = False  # use torch.compile for everything but the embeddings
    average: AverageSection | None = None  # evaluate with a moving average of the dense weights


class TrainSection(StepSection):
    """Choose how long to train, by exactly one of epochs, steps (of each worker) and samples (of all workers), and how.

    `staleness` says which pushes of the other workers a step must see (docs/training/staleness.md). 0: all of the
    earlier clocks (synchronous). k: all but those of the last k clocks. off: no bound. local(k): each worker trains k
    steps on its own copies of the rows, and pushes the difference. `staleness_aware_lr` divides the learning rate of a
    push by the number of updates that its rows had missed. A worker that sends no heartbeat for `lease` seconds is
    evicted. Workers wait up to `recovery_timeout` seconds for a shard that recovers its rows from its event log.
    `embershard train` restarts up to `restart_workers` workers that were killed by a signal. With `recover` (the
    default if checkpoint.folder is set) it continues from the latest checkpoint if the job ended because a shard or a
    worker was lost.

    `prefetch: k` pulls the rows of coming batches while the current one computes: the rows of a batch may miss the last
    k pushes of the same worker. 0 gives the same bits as `off`. It must not exceed a bound set by `staleness`.
    """

    batch_size: Count  # samples of a batch of one worker
    epochs: Count | None = None  # passes over the training data
    steps: Count | None = None  # steps of each worker
    samples: Count | None = None
    """Samples of all workers, as whole batches of each: a shorter last batch of an epoch counts as a full one."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0  # of first values, the order of the data, negatives and dropout
    lr_schedule: ScheduleSection = ScheduleSection()  # how the learning rates change
    early_stop: EarlyStopSection | None = None  # when to stop before the end
    staleness: Annotated[int | str | None, PlainValidator(_consistency, json_schema_input_type=_Staleness)] = None
    """0, a number of clocks, off (the default), or local(k)."""
    staleness_aware_lr: bool = False
    lease: Annotated[float, Field(ge=0.1, le=86_400)] = 10.0  # seconds until a silent worker is evicted
    recovery_timeout: Annotated[float, Field(ge=0.0, le=86_400)] = 1800.0  # seconds to wait for a recovering shard
    restart_workers: Annotated[int, Field(ge=0)] = 0  # number of lost workers that are restarted
    recover: bool | None = None  # continue from the latest checkpoint after a failure
    prefetch: Staleness = 0  # pushes of the same worker that a batch may miss; off: rows are not pulled in advance
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if torch sees one
    linear: Literal["auto", "torch", "onednn"] = "auto"  # library for linear layers on a CPU; auto: the faster one
    threads: Count | None = None  # torch threads of each worker; by default half of the cores, divided by the workers

    @property
    def bound(self) -> int | None:
        """Clocks that a worker may be ahead of what it sees; None for any number."""
        return self.staleness if isinstance(self.staleness, int) else None

    @property
    def local_steps(self) -> int | None:
        """Steps on a worker's own copies; None where it has none."""
        found = _LOCAL.fullmatch(self.staleness) if isinstance(self.staleness, str) else None
        return int(found[1]) if found else None

    @property
    def budget(self) -> tuple[str, int] | None:
        """Unit and length of the run."""
        given = [(unit, value) for unit in ("epochs", "steps", "samples") if (value := getattr(self, unit)) is not None]
        return given[0] if len(given) == 1 else None


POINTWISE = ("auc", "logloss", "ne", "calibration", "gauc")  # of each label where there are several: auc:income


class MetricSection(CodeSection):
    """A metric: the name of a built-in one, or `module:name` (docs/howto/own-model.md)."""

    code: Annotated[str, Field(alias="class", min_length=1)]
    """Its name."""
    lower_is_better: bool = False
    """Whether a smaller value is better, for a metric of yours."""

    @property
    def is_custom(self) -> bool:
        """Whether a user defined it."""
        return ":" in self.code and self.code.partition(":")[0] not in POINTWISE

    @property
    def short_name(self) -> str:
        """The name without its module; a label's metric keeps the label."""
        return super().short_name if self.is_custom else self.code


Metric = Annotated[MetricSection, BeforeValidator(as_code, json_schema_input_type=str | MetricSection)]


class EvaluateSection(Section):
    """When to evaluate, and by which metric the best evaluation is chosen.

    `every` is in the unit of the run's length (epochs, steps or samples). Without it each epoch is evaluated or, if the
    length is in steps or samples, only the end.
    """

    every: Count | None = None
    metric: str | None = None  # by default the first of `metrics`
    top_k: Count | None = None  # the k of HR@k, NDCG@k, ...; by default 20 for lists, otherwise 10
    groups: str | None = None
    """A feature, such as the user; gauc is the mean of the AUCs of the samples that share a value of this feature."""
    user: str | None = None
    """The feature of the user, for model feature_towers: what a user took before is left out of the user's ranking."""
    batch_size: Count = 16_384  # samples of a batch of an evaluation


def _check_bandwidth(value: object) -> str:
    text = str(value)
    parse_bandwidth(text)
    return text


class NetworkSection(Section):
    """Emulate a slower link between each worker and the shards."""

    bandwidth: Annotated[str, BeforeValidator(_check_bandwidth, json_schema_input_type=str)] = UNLIMITED
    """Such as 100mbit or 1gbit."""


class CheckpointSection(Section):
    """Checkpoints to resume from, in `folder`, a folder or fsspec URL that all workers and shards see.

    The newest `keep` checkpoints are kept. `every` is in the unit of the run's length (epochs, steps or samples);
    without it, each evaluation writes a checkpoint. The end of a run writes one, too. With `best` the checkpoint of the
    best evaluation is kept in addition, and `restore_best` restores its weights at the end of the run. Without a
    `folder`, `embershard train` keeps only the best one, in the run's folder. With `incremental` shards write only the
    rows that changed since the previous checkpoint, which is kept as long as it is needed.
    """

    folder: Annotated[str, Field(min_length=1)] | None = None
    every: Count | None = None
    keep: Count = 2
    incremental: bool = False
    best: bool = True
    restore_best: bool = True


Pattern = Annotated[str, Field(min_length=1)]
