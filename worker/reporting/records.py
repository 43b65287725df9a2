"""Facts that a training run reports: the log, TensorBoard and the terminal all show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMode:
    """Describe how a run trains: all that its speed and quality depend on. A text is empty where none applies."""

    strategy: str  # ps, hybrid, ddp, dp, local; and what holds dense weights that are not on shards
    workers: int
    shards: int
    staleness: str  # "0 (synchronous)", "at most 4", "off", "local(8)"
    prefetch: str  # "off", "0", "1", ...
    codecs: str  # "float32", or "push int8, pull fp16s; dense push float32, pull delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A description of the run that is about to start."""

    job: Mapping[str, object]  # the job file's fields, defaults filled in; JSON values only
    name: str  # of the job, for people
    workers: int
    shards: int
    device: str
    dense_parameters: int
    total_samples: int | None  # of all workers; None where only reading tells
    metric: str  # decides which evaluation is the best
    split: str | None  # on which it is computed; None where nothing is evaluated
    resumed_step: int | None = None  # of the checkpoint that it goes on from
    warnings: Sequence[str] = ()
    mode: RunMode | None = None  # codecs: those of the first step
    reporter: int | None = None  # the worker that reports from here on, in place of one that was lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Training since the interval before, about a second ago, as the first worker saw it."""

    step: int  # steps of the first worker until now
    epoch: int  # from 1
    samples: int  # of all workers until now, the others taken to be as far as the first
    seconds: float  # since the start of the run
    loss: float  # mean of the interval
    samples_per_second: float  # of all workers
    wait_share: float  # of the interval's time, spent waiting; the sum of the next three
    lr_scale: float
    wait_shards: float = 0.0  # for shards: requests on their way, and what this worker does with them
    wait_workers: float = 0.0  # for other workers: a clock that is not closed, a collective
    wait_data: float = 0.0  # for the reader or loader
    cached_share: float | None = None  # of the rows that were looked up in a cache; None where none was


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The figures of one evaluation, and when it was made."""

    step: int
    epoch: int
    samples: int
    seconds: float
    figures: Mapping[str, Figures]  # split -> metric -> value
    improved: bool
    evaluation_seconds: float
    warnings: Sequence[str] = ()
    # split, and label where there are several -> mean prediction, mean label and samples of each bin of predictions
    reliability: Mapping[str, Sequence[tuple[float, float, int]]] = field(default_factory=dict)
    reachable: Mapping[str, Figures] = field(default_factory=dict)  # as in RunResult


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The bytes of a step of the first worker, one part of them: worker/client/byte_counts.py."""

    direction: str  # push, pull, other
    part: str  # ids, rows, dense, residual, other
    wire: float  # as it travelled, frames included
    raw: float  # with float32 rows and plain ids
    predicted: float | None  # of the codecs, from the number of rows and messages (worker/strategy/predicted_bytes.py)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A part of the first worker's steps: proto/timing.py."""

    name: str  # `step` is the whole; those that are not overlapped add up to it, `other` included
    p50_ms: float
    p99_ms: float
    mean_ms: float
    overlapped: bool  # in another thread, beside the others


@dataclass(frozen=True, slots=True, kw_only=True)
class BestWeights:
    """The weights of the best evaluation at the end of a run."""

    checkpoint: str | None = None  # that holds them; None where they were not kept
    current: bool = False  # whether shards and workers hold them, and not those of a later step
    restored: bool = False  # whether they were restored at the end
    not_kept: str = ""  # why the checkpoint could not be written


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run. `figures` are those of the best evaluation."""

    metric: str
    split: str | None
    figures: Mapping[str, Figures]
    reachable: Mapping[str, Figures]  # what no model can beat on each split, where the data knows
    best_epoch: int
    best_step: int
    stopped_early: bool
    epochs: int
    steps: int  # of the first worker
    samples: int  # of all workers
    seconds: float  # whole run, evaluations included
    train_seconds: float
    samples_per_second: float  # of all workers, while training
    wait_share: float  # of all workers' training time; the sum of the next three
    skipped_rows: int  # gradient rows that held NaN or Inf
    wait_shards: float = 0.0
    wait_workers: float = 0.0
    wait_data: float = 0.0
    mode: RunMode | None = None  # codecs: those of the last step
    evaluations: int = 0  # of which the best is reported
    warnings: Sequence[str] = ()
    advice: Sequence[str] = ()  # what would shorten a long wait, and what it costs
    skipped_steps: int = 0  # of all workers, left out for a NaN or Inf
    expired_leases: int = 0  # times that a worker was evicted
    returned_splits: int = 0  # parts of an epoch that were dealt again, since the worker that had them was lost
    staleness_seen: Sequence[int] = ()  # pushes by the updates that their rows had missed; the last: so many or more
    table_rows: Mapping[str, int] = field(default_factory=dict)
    bytes: Sequence[StepBytes] = ()  # evaluations left out; the mean of this process's steps
    step: Sequence[StepTime] = ()  # of the last steps
    best_weights: BestWeights = BestWeights()


class Observer(Protocol):
    """Receives the facts of a run from the worker that reports."""

    def started(self, plan: RunPlan) -> None:
        """Take note that the run begins."""

    def trained(self, interval: Interval) -> None:
        """Take note of the steps since the last call."""

    def evaluating(self) -> None:
        """Take note that an evaluation begins."""
        return

    def evaluated(self, evaluation: Evaluation) -> None:
        """Take note of an evaluation's figures."""

    def finished(self, result: RunResult) -> None:
        """The run is over, and well."""
        return

    def close(self) -> None:
        """Close the files; call it after an error too."""
        return
