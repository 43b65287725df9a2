"""The results of a comparison as data: the content of results.json, from which a report is made.

A run trains the job once: one arm, one seed, one link. `quality` runs train it whole on a link without limit, and are
judged; `speed` runs are short, on a limited link; `tune` runs are judged on the split that decides, to choose an arm's
learning rate, and are in no other figure. Runs of equal seed are paired: same first values, same order of the data.

A mapping of metrics holds auc, logloss, ne, calibration, or hr@K, ndcg@K, recall@K; one that is not defined is None.
Of an arm's pictures, samples against quality comes from `Run.curve`; wall time on a limited link, where quality is not
measured again, is samples over the speed there (`Results.seconds_at`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

FORMAT = 1
FILE_NAME = "results.json"
UNLIMITED = "unlimited"
FP16_BASELINE = "fp16s"  # stands beside all codecs: to beat float32 alone proves little
RunKind = Literal["quality", "speed", "tune"]
ArmOutcome = Literal["paid", "did not pay", "undecided"]
SpeedVerdict = Literal["faster", "slower", "same or undecided"]  # by whether the interval contains 1
Rate = Literal["fixed", "tuned"]  # the job's learning rate, or the arm's own best multiple of it
Metrics = Mapping[str, float | None]
# by where the 95 % interval of the difference lies: analysis/conclusions.py has the rule
QualityVerdict = Literal["equivalent", "not worse", "better", "worse", "undecided"]


class Record(BaseModel):
    """A frozen record that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Arm(Record):
    """One of the settings that are compared."""

    label: str  # as it was named: "int8", "staleness=4", "push=int8/pull=fp16s"
    meaning: str  # in plain words, for people who do not know the names
    settings: tuple[str, ...]  # "section.field=value", over the job file
    is_codec: bool  # it says how rows and gradients travel, and nothing else
    added: bool = False  # nobody asked for it: an arm of fp16s stands beside all codecs


class Bandwidth(Record):
    """A link between each worker and the shards."""

    label: str  # "100mbit", "unlimited"
    bits_per_second: float | None  # in either direction; None without limit


class CurvePoint(Record):
    """One evaluation of a run."""

    samples: int  # of all workers
    seconds: float  # of training until then, evaluations left out
    figures: Mapping[str, Metrics]  # split -> metric -> value


class MeanStepBytes(Record):
    """Bytes that a step of the first worker moves between it and all shards, the mean of a run."""

    direction: str  # push: gradients to the shards; pull: rows from them, with what asks for them; other: neither
    part: str  # ids, rows, dense, residual, other
    sent: float  # bytes on the wire
    raw: float | None  # with float32 rows and plain ids
    predicted: float | None  # by the codecs' own sizes, from the number of rows and messages


class StepPart(Record):
    """Time of one part of the first worker's steps; parts that are not overlapped add up to `step`."""

    name: str  # step, route, pull, forward, backward, encode, push, wait, ..., other
    p50_ms: float
    p99_ms: float
    mean_ms: float
    overlapped: bool  # in another thread, beside the others


class RunFigures(Record):
    """The measurements of a run; what was not measured is None or empty."""

    steps: int = 0  # of the first worker
    samples: int = 0  # of all workers
    train_seconds: float = 0.0  # of a worker
    samples_per_second: float | None = None  # of all workers, its beginning left out
    wait_share: float | None = None  # of the training time; the sum of the next three
    wait_shards: float | None = None  # None in what versions before these fields wrote
    wait_workers: float | None = None
    wait_data: float | None = None
    metrics: Metrics = {}  # of the best evaluation, on Results.split
    decided: float | None = None  # Results.metric of the best evaluation on Results.deciding_split
    best_samples: int = 0  # at the best evaluation
    stopped_early: bool = False
    skipped_rows: int = 0  # gradient rows that held NaN or Inf, and were not applied
    curve: tuple[CurvePoint, ...] = ()
    # of the best evaluation, by label: mean prediction, mean label and samples of each bin of predictions
    reliability: Mapping[str, tuple[tuple[float, float, int], ...]] = {}
    bytes: tuple[MeanStepBytes, ...] = ()
    step: tuple[StepPart, ...] = ()
    reachable: Metrics = {}  # what no model can beat, where the data knows
    splits: tuple[str, str] = ("", "")  # on which it is judged, and on which its best evaluation is chosen
    versions: Mapping[str, str] = {}


class ArmRun(RunFigures):
    """One training of the job."""

    arm: str
    seed: int
    bandwidth: str
    kind: RunKind
    multiple: float  # of the job's learning rates
    ok: bool
    error: str  # the last words of a run that failed twice
    attempts: int
    words: tuple[str, ...]  # of `embershard train`, behind the job file: settings, modules and data
    folder: str  # of its log, below that of the comparison
    began: str  # "2026-11-21 12:00:00 +0000"
    total_seconds: float  # from the command to its end
    load_average: float  # of the last minute, when it began

    @property
    def key(self) -> str:
        """The name that identifies it in its comparison."""
        return run_key(self.kind, self.arm, self.seed, self.bandwidth, self.multiple)


def run_key(kind: RunKind, arm: str, seed: int, bandwidth: str, multiple: float) -> str:
    """Build the name that identifies a run in a comparison."""
    return f"{kind} {arm} seed={seed} {bandwidth} rate={multiple:g}"


class Estimate(Record):
    """A mean over seeds with its 95 % interval (Student's t); with one seed low and high are None."""

    mean: float
    low: float | None
    high: float | None
    seeds: int


class Quality(Record):
    """An arm's metric, and its paired difference from another arm's (arm minus other)."""

    arm: str
    against: str  # the baseline, or the arm of fp16s
    metric: str
    rate: Rate  # of the arm; the other arm has its own best rate too where it is tuned
    value: Estimate
    difference: Estimate  # for ratios of samples, too, a plain difference
    higher_is_better: bool
    margin: float | None  # a difference below it is of no consequence; None for metrics without one
    verdict: QualityVerdict


class Speed(Record):
    """An arm's speed on one link, and the speed-up over another arm."""

    arm: str
    against: str
    bandwidth: str
    samples_per_second: Estimate
    speed_up: Estimate  # geometric mean over paired runs; 1: as fast
    verdict: SpeedVerdict


class ArmBytes(Record):
    """Bytes of one part that an arm moves per step and worker, the mean over its quality runs."""

    arm: str
    direction: str
    part: str
    sent: float  # bytes
    raw: float | None
    predicted: float | None
    ratio: float | None  # the baseline's bytes of this direction and part over these


class BreakEven(Record):
    """The bandwidth below which an arm is faster than another, in bits per second of each worker's link."""

    arm: str
    against: str
    formula: float | None  # (bytes_raw - bytes_sent) * 8 / (seconds of encode + decode); None: see formula_says
    formula_says: Literal["value", "always", "never", "unknown"]  # always: it saves bytes and costs no time
    measured: float | None  # where the interpolated difference of the costs crosses 0
    # always, never: shown to be faster, or slower, on every measured link; unknown: not shown, or one link alone
    measured_says: Literal["value", "always", "never", "unknown"]
    # 95 % interval of `measured` over seeds (Fieller). low None: one seed; 0: it reaches below all measured links.
    low: float | None = None
    high: float | None = None  # None beside a `low`: without limit the arm is not shown to be slower


class Verdict(Record):
    """Whether an arm paid beside the baseline: faster, with as good a model."""

    arm: str
    outcome: ArmOutcome
    quality: QualityVerdict  # of Results.metric, at the rate of `rate`
    rate: Rate
    difference: Estimate | None  # of Results.metric: the cost where it is on the worse side
    seeds: int  # pairs of runs behind it, of the estimate that has the fewest; 0: there are none
    pays_on: tuple[str, ...]  # bandwidths: `faster_at` where the outcome is paid
    faster_at: tuple[str, ...]  # bandwidths
    slower_at: tuple[str, ...]
    undecided_at: tuple[str, ...]
    best_speed_up: float | None
    best_at: str  # the bandwidth of it
    bytes_ratio: float | None  # the baseline's bytes per step over this arm's
    failed_runs: int
    reasons: tuple[str, ...]  # sentences


class RunConditions(Record):
    """The machine and the versions of the runs."""

    machine: str
    cores: int
    memory_gib: int
    system: str
    python: str
    versions: Mapping[str, str]
    mixed: tuple[str, ...] = ()  # what changed between runs: "torch 2.12.0 and 2.13.0"


class Results(Record):
    """The results of a whole comparison, as JSON."""

    format: int = FORMAT
    name: str  # of the job, for people: "deepfm on ctr_csv"
    job_file: str
    job: Mapping[str, object]  # its fields, defaults filled in
    command: tuple[str, ...]  # that gets there again
    metric: str  # that decides: auc, hr@10, ...
    split: str  # on which arms are judged: test, where there is one
    deciding_split: str  # on which a run's best evaluation is chosen
    lower_is_better: tuple[str, ...]  # those of the runs' metrics that are best where they are lowest
    reachable: Metrics  # what no model can beat on `split`, where the data knows
    workers: int
    shards: int
    link: Literal["token bucket", "network namespace"]  # how a bandwidth is made
    baseline: str  # label of the first arm
    arms: tuple[Arm, ...]
    bandwidths: tuple[Bandwidth, ...]  # slowest first, `unlimited` last
    seeds: tuple[int, ...]
    full: bool  # limited links, too, were measured with whole runs
    speed_steps: int | None  # length of a run on a limited link; None: whole
    skipped_share: float  # of each run, its beginning, which no speed counts
    multiples: tuple[float, ...]  # of the learning rate that were tried; (1.0,) where it is fixed
    tuned: Mapping[str, float]  # arm -> chosen multiple
    complete: bool  # nothing is left to run
    seconds: float  # of all runs
    runs: tuple[ArmRun, ...]
    quality: tuple[Quality, ...]
    speeds: tuple[Speed, ...]
    volumes: tuple[ArmBytes, ...]
    break_even: tuple[BreakEven, ...]
    verdicts: tuple[Verdict, ...]  # of all arms but the baseline
    notes: tuple[str, ...]  # sentences that a reader must know: added arms, one seed, shortened runs, failed ones
    conditions: RunConditions

    def runs_of(self, arm: str, bandwidth: str = UNLIMITED, rate: Rate = "fixed") -> Iterator[ArmRun]:
        """Iterate over the successful runs of an arm on a link, by seed; without limit they are its quality runs."""
        multiple = self.tuned.get(arm, 1.0) if rate == "tuned" else 1.0
        kind = "quality" if bandwidth == UNLIMITED or self.full else "speed"
        for run in sorted(self.runs, key=lambda run: run.seed):
            if run.ok and (run.arm, run.bandwidth, run.kind, run.multiple) == (arm, bandwidth, kind, multiple):
                yield run

    def quality_of(self, arm: str, against: str) -> Quality | None:
        """The deciding metric of an arm beside another, at each arm's own best learning rate where these were tried."""
        key = (arm, against, self.metric)
        found = {one.rate: one for one in self.quality if (one.arm, one.against, one.metric) == key}
        return found.get("tuned", found.get("fixed"))

    def speeds_of(self, arm: str, against: str) -> list[Speed]:
        """The speeds of an arm beside another, link by link."""
        return [speed for speed in self.speeds if (speed.arm, speed.against) == (arm, against)]

    def speed_of(self, arm: str, against: str, bandwidth: str) -> Speed | None:
        """The speed of an arm beside another on one link."""
        return next((speed for speed in self.speeds_of(arm, against) if speed.bandwidth == bandwidth), None)

    def break_even_of(self, arm: str, against: str) -> BreakEven | None:
        """The bandwidth at which an arm stops being faster than another."""
        return next((even for even in self.break_even if (even.arm, even.against) == (arm, against)), None)

    def seconds_at(self, run: ArmRun, point: CurvePoint, bandwidth: str) -> float | None:
        """Estimate the training seconds until a point of a quality run on that link, by the arm's speed there."""
        if bandwidth == run.bandwidth:
            return point.seconds
        speeds = [speed for speed in self.speeds if (speed.arm, speed.bandwidth) == (run.arm, bandwidth)]
        return point.samples / speeds[0].samples_per_second.mean if speeds else None


def write_results(results: Results, folder: Path) -> Path:
    """Write results.json, whole or not at all."""
    path = folder / FILE_NAME
    beside = path.with_suffix(".json.tmp")
    beside.write_text(json.dumps(results.model_dump(mode="json"), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(beside, path)
    return path


def read_results(path: Path) -> Results:
    """Read the results of a file. ValueError where it holds none."""
    return TypeAdapter(Results).validate_json(path.read_text(encoding="utf-8"))
