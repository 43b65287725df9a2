"""Plan the runs of a comparison: which, in which order, and with which command line.

Runs of equal seed are paired: `train.seed` decides first values and the order of the data. The order goes by seeds, and
within one the arms take turns at being first, so that a machine that grows slow hits all arms alike, and a comparison
that is stopped has whole pairs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from embershard.compare.results import UNLIMITED, Arm, ArmRun, Bandwidth, Record, RunKind, run_key
from embershard.worker.job.job import Job

MOST_SEEDS = 1000
SKIPPED_SHARE = 0.25  # of a run's steps, its beginning: first rows, connections, compiled code, empty caches
TRIAL_STEPS = 75  # in which compression.auto measures and tries codecs, if their first trial decides
_ARM_LENGTH = 100  # of its part of a folder's name, which has up to 255 bytes


class Experiment(Record):
    """The settings that identify a comparison.

    Arms, bandwidths and seeds say which runs it has; with another value of any other field they would be other ones.
    """

    job: Mapping[str, object]  # the base job, defaults filled in
    overrides: tuple[str, ...]
    imports: tuple[str, ...]
    arms: tuple[tuple[str, tuple[str, ...]], ...]  # (label, settings), the baseline first
    bandwidths: tuple[str, ...]  # `unlimited` last
    seeds: tuple[int, ...]
    multiples: tuple[float, ...]  # of the learning rates
    speed_steps: int | None  # of a run on a limited link; None: whole
    link: Literal["token bucket", "network namespace"]
    ps: tuple[str, ...] = ()  # addresses of the shards, which run already; none: each run starts its own
    code_sha256: Mapping[str, str] = {}  # of the file of every module of the user's that the runs import

    def difference(self, other: Experiment) -> str:
        """Say why the runs of both cannot be compared: a line per differing field; empty where they can."""
        arms = dict(self.arms).keys() & dict(other.arms).keys()
        modules = self.code_sha256.keys() & other.code_sha256.keys()
        mine, theirs = (one._of_all_runs(arms, modules) for one in (self, other))
        return "\n".join(f"  {name}: {_short(a)} there, {_short(b)} now" for name, a, b in _differences(mine, theirs))

    def joined(self, other: Experiment) -> Experiment:
        """Join two experiments without a difference into one with the runs of both."""
        update = {
            "arms": tuple({**dict(self.arms), **dict(other.arms)}.items()),
            "bandwidths": tuple(dict.fromkeys([*self.bandwidths[:-1], *other.bandwidths])),
            "seeds": tuple(sorted({*self.seeds, *other.seeds})),
            "code_sha256": {**self.code_sha256, **other.code_sha256},
        }
        return self.model_copy(update=update)

    def _of_all_runs(self, arms: Set[str], modules: Set[str]) -> dict[str, object]:
        """The fields that must be equal in all runs, with the settings of the given arms and the given modules."""
        fields: dict[str, object] = json.loads(self.model_dump_json(exclude={"bandwidths", "seeds"}))
        code = {module: sha256 for module, sha256 in self.code_sha256.items() if module in modules}
        settings = {label: list(settings) for label, settings in self.arms if label in arms}
        return {**fields, "arms": settings, "code_sha256": code}


def _differences(one: object, other: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    if one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            yield from _differences(one.get(key), other.get(key), f"{name}.{key}" if name else str(key))
    else:
        yield name, one, other


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run that a comparison makes."""

    kind: RunKind
    arm: str
    seed: int
    bandwidth: str
    multiple: float
    words: tuple[str, ...]  # of `embershard train`, behind the job file

    @property
    def key(self) -> str:
        """The key of its run."""
        return run_key(self.kind, self.arm, self.seed, self.bandwidth, self.multiple)

    @property
    def folder(self) -> str:
        """The folder of its log below that of the comparison, in letters that every file system has."""
        rate = "" if self.multiple == 1 else f"-rate{self.multiple:g}"
        arm = "".join(char if char.isascii() and (char.isalnum() or char in "-._") else "_" for char in self.arm)
        if len(arm) > _ARM_LENGTH:
            arm = f"{arm[:_ARM_LENGTH]}-{zlib.crc32(self.arm.encode()):08x}"
        return f"runs/{self.kind}-{arm}-seed{self.seed}-{self.bandwidth}{rate}"


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """The runs of an experiment; `arms` are label -> (arm, its job)."""

    experiment: Experiment
    arms: Mapping[str, tuple[Arm, Job]]
    bandwidths: Sequence[Bandwidth]

    @property
    def full(self) -> bool:
        """Whether limited links have whole runs too."""
        return self.experiment.speed_steps is None

    @property
    def tuning_seed(self) -> int:
        """The seed of the tuning runs, which no judged run has: a rate chosen by their luck would look too good.

        It lies behind all that may be added, so that the rates need not be looked for again then.
        """
        return self.experiment.seeds[0] + MOST_SEEDS

    def tuning(self) -> list[Task]:
        """The runs that choose each arm's learning rate; empty where it is fixed."""
        multiples = self.experiment.multiples
        if len(multiples) < 2:
            return []
        return [self._task("tune", arm, self.tuning_seed, UNLIMITED, m) for m in multiples for arm in self.arms]

    def judged(self) -> list[Task]:
        """The runs at the job's own learning rates."""
        tasks = []
        for turn, seed in enumerate(self.experiment.seeds):
            for bandwidth in reversed(self.bandwidths):  # `unlimited` first
                limited = bandwidth.bits_per_second is not None
                kind: RunKind = "speed" if limited and not self.full else "quality"
                tasks += [
                    self._task(kind, arm, seed, bandwidth.label, 1.0)
                    for arm in self._turn(turn)
                    if not limited or can_be_limited(self.arms[arm][1])
                ]
        return tasks

    def tuned(self, chosen: Mapping[str, float]) -> list[Task]:
        """The runs at each arm's own best rates, where these are not the job's."""
        return [
            self._task("quality", arm, seed, UNLIMITED, chosen[arm])
            for turn, seed in enumerate(self.experiment.seeds)
            for arm in self._turn(turn)
            if chosen.get(arm, 1.0) != 1.0
        ]

    def tasks(self, chosen: Mapping[str, float]) -> list[Task]:
        """All runs, with the learning rates that were chosen."""
        return [*self.tuning(), *self.judged(), *self.tuned(chosen)]

    def choose(self, runs: Sequence[ArmRun]) -> dict[str, float]:
        """Choose each arm's multiple by its best tuning run, the nearest to 1 among equals; 1 where all failed."""
        chosen = {}
        for arm, (_, job) in self.arms.items() if len(self.experiment.multiples) > 1 else ():
            key = ("tune", arm, self.tuning_seed, True)
            found = [run for run in runs if (run.kind, run.arm, run.seed, run.ok) == key and run.decided is not None]
            sign = -1 if job.lower_is_better else 1
            best = max(found, key=lambda run: (sign * (run.decided or 0.0), -abs(run.multiple - 1)), default=None)
            chosen[arm] = 1.0 if best is None else best.multiple
        return chosen

    def _turn(self, number: int) -> list[str]:
        """The arms in an order that begins with another one each time."""
        labels = list(self.arms)
        return labels[number % len(labels) :] + labels[: number % len(labels)]

    def _task(self, kind: RunKind, arm: str, seed: int, bandwidth: str, multiple: float) -> Task:
        found, job = self.arms[arm]
        settings = [*self.experiment.overrides, *found.settings, f"train.seed={seed}"]
        settings += ["checkpoint={best: false}"]  # its folder would be that of all runs, and writing takes time
        settings += ["train.recover=null"] if job.train.recover else []
        if can_be_limited(job):
            emulated = self.experiment.link == "token bucket"
            settings.append(f"network.bandwidth={bandwidth if emulated else UNLIMITED}")
        settings += _rates(job, multiple) if multiple != 1 else []
        settings += _shortened(job, self.experiment.speed_steps) if kind == "speed" else []
        words = [word for setting in settings for word in ("--set", setting)]
        if job.has_shards:
            words += [word for module in self.experiment.imports for word in ("--import", module)]
            words += ["--ps", ",".join(self.experiment.ps)] if self.experiment.ps else []
        return Task(kind=kind, arm=arm, seed=seed, bandwidth=bandwidth, multiple=multiple, words=tuple(words))


def can_be_limited(job: Job) -> bool:
    """Tell whether all traffic of the job's workers passes the links to the shards: torch's all-reduce does not."""
    return job.has_shards and job.dense_mode == "ps"


def tries_codecs(job: Job) -> bool:
    """Tell whether the job's workers measure in its first steps which codecs they use, so that the link decides."""
    return job.compression is not None and (job.compression.auto or job.compression.unless_slower)


def _rates(job: Job, multiple: float) -> Iterator[str]:
    """Settings that multiply every learning rate of the job."""
    for name, section in (("embedding", job.embedding), ("dense", job.dense)):
        if section.optimizer is not None:
            yield f"{name}.optimizer.lr={section.optimizer.model_dump()['lr'] * multiple!r}"
        if section.groups:
            groups = [group.model_dump(mode="json", exclude_unset=True) for group in section.groups]
            for group in groups:
                group["optimizer"]["lr"] *= multiple
            yield f"{name}.groups={json.dumps(groups)}"


def _shortened(job: Job, steps: int | None) -> Iterator[str]:
    """Settings that shorten the job to so many steps, to measure speed without what only quality needs."""
    assert steps is not None
    assert job.train.budget is not None
    unit, length = job.train.budget
    if tries_codecs(job):  # in steps that lie in the skipped beginning then
        steps = max(steps, round(TRIAL_STEPS / SKIPPED_SHARE))
    if unit == "steps":
        steps = min(steps, length)
    else:
        yield f"train.{unit}=null"  # --set or the arm may have given it, beside which steps would be a second length
    yield f"train.steps={steps}"
    given = (
        ("train.lr_schedule", job.train.lr_schedule.name != "constant" or job.train.lr_schedule.warmup_steps),
        ("train.early_stop", job.train.early_stop is not None),
        ("evaluate.every", job.evaluate.every is not None),
        ("data.splits", job.data.splits is not None),
    )
    yield from (
        f"{field}={'{name: constant}' if field == 'train.lr_schedule' else 'null'}"
        for field, is_given in given
        if is_given
    )
    if job.compression is not None and any(codec.select == "dgc" for *_, codec in job.compression.choices()):
        yield "compression.warmup_steps=0"  # at the density that most of a long run has
