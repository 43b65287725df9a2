"""Turn the runs of a comparison into estimates over paired seeds, and decide by one rule what they show.

The rule: a claim is made only where the whole 95 % interval bears it, the interval that the report prints.

- A model is *equivalent* where the interval of the difference lies inside the margin, *better* or *worse* where it lies
  on one side of 0, *not worse* where it lies above the margin's worse end, and *undecided* otherwise. The first that
  holds counts. (Inside the margin at 95 %: both one-sided t tests hold at 2.5 %, Schuirmann 1987.)
- An arm is *faster* on a link where the interval of the speed-up lies above 1, *slower* where it lies below 1.
- An arm *paid* where its model is equivalent, better or not worse, each run that its model is judged by ended with the
  deciding metric, and it is faster on some link: it pays on these links. It *did not pay* where its model is worse, or
  where no link's interval reaches a speed-up of 1.05. Everything else is *undecided*.

quality_verdict, speed_verdict and outcome_of are this rule. Tables, sentences and the headline quote their answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from embershard.compare.analysis.statistics import (
    Crossing,
    crossing_by_formula,
    crossing_by_measurement,
    crossing_interval,
    estimate,
    pairs,
    ratio,
)
from embershard.compare.results import (
    FP16_BASELINE,
    UNLIMITED,
    ArmBytes,
    ArmOutcome,
    ArmRun,
    BreakEven,
    Estimate,
    MeanStepBytes,
    Quality,
    QualityVerdict,
    Rate,
    Results,
    Speed,
    SpeedVerdict,
    Verdict,
)
from embershard.compare.units import is_or_are, link_text, metric_name

# what a difference must exceed to be of consequence; 0.001 of AUC is what CTR papers hold to be worth having
MARGINS = {"auc": 0.0005, "logloss": 0.001, "hr": 0.003, "ndcg": 0.003, "recall": 0.003}
NO_GAIN = 1.05  # nobody changes a job for a speed-up below this
KEPT = ("equivalent", "not worse", "better")  # verdicts on a model that is good enough
# With fewer pairs of runs the report opens with a caution: an interval of two is 12.7 standard errors wide.
FEW_SEEDS = 3
NO_MARGIN = "without a margin (--margin) no model counts as equally good"  # of a metric that has none by default
NOT_JUDGED = ("calibration", "samples", "users")  # best near 1, or no quality at all
CODING = ("encode", "decode", "shards")  # parts of a step: the worker's, and what shards did of it meanwhile


def conclude(results: Results, margin: float | None = None) -> Results:
    """Add estimates and verdicts to results that hold only runs; `margin` replaces that of the deciding metric."""
    others = compared_with(results)
    rates: tuple[Rate, ...] = ("fixed", "tuned") if len(results.multiples) > 1 else ("fixed",)
    quality = [
        judged
        for arm, against in others
        for rate in rates
        for metric in _metrics(results)
        if (judged := _quality(results, arm, against, metric, rate, margin)) is not None
    ]
    labels = [bandwidth.label for bandwidth in results.bandwidths]
    speeds = [
        speed
        for arm, against in others
        for bandwidth in labels
        if (speed := _speed(results, arm, against, bandwidth)) is not None
    ]
    found = results.model_copy(
        update={"quality": tuple(quality), "speeds": tuple(speeds), "volumes": tuple(_volumes(results))}
    )
    return found.model_copy(
        update={
            "break_even": tuple(_break_even(found, arm, against) for arm, against in others if arm != against),
            "verdicts": tuple(_verdict(found, arm.label) for arm in found.arms if arm.label != found.baseline),
        }
    )


def compared_with(results: Results) -> list[tuple[str, str]]:
    """List the pairs (arm, other) to compare: each arm with the baseline (itself too), each codec with fp16s."""
    labels = [arm.label for arm in results.arms]
    pairings = [(label, results.baseline) for label in labels]
    if FP16_BASELINE in labels and results.baseline != FP16_BASELINE:
        codecs = [arm.label for arm in results.arms if arm.is_codec]
        pairings += [(label, FP16_BASELINE) for label in codecs if label not in (FP16_BASELINE, results.baseline)]
    return pairings


def _metrics(results: Results) -> list[str]:
    """The metrics to judge, the deciding one first."""
    named = {name for run in results.runs for name in run.metrics if is_judged(name)} - {results.metric}
    return [results.metric, *sorted(named)]


def is_judged(metric: str) -> bool:
    """Tell whether more or less of a metric makes a better model."""
    return metric.partition(":")[0] not in NOT_JUDGED  # of one label: calibration:income


def _values(runs: Iterable[ArmRun], value: Callable[[ArmRun], float | None]) -> dict[int, float]:
    """Map each seed to its run's value, where it has one."""
    return {run.seed: found for run in runs if (found := value(run)) is not None}


def _quality(results: Results, arm: str, against: str, metric: str, rate: Rate, margin: float | None) -> Quality | None:
    def metric_of(run: ArmRun) -> float | None:
        return run.metrics.get(metric)

    mine = _values(results.runs_of(arm, UNLIMITED, rate), metric_of)
    both = pairs(mine, _values(results.runs_of(against, UNLIMITED, rate), metric_of))
    if not both:
        return None
    name = metric.partition("@")[0].partition(":")[0]
    bound = margin if margin is not None and metric == results.metric else MARGINS.get(name)
    difference, higher = estimate([one - other for one, other in both]), metric not in results.lower_is_better
    return Quality(
        arm=arm,
        against=against,
        metric=metric,
        rate=rate,
        value=estimate(list(mine.values())),
        difference=difference,
        higher_is_better=higher,
        margin=bound,
        verdict=quality_verdict(difference, higher, bound),
    )


def quality_verdict(difference: Estimate, higher: bool, margin: float | None) -> QualityVerdict:
    """Decide what the interval of a paired difference shows of a model; `higher`: more of the metric is better."""
    if difference.low is None or difference.high is None:
        return "undecided"
    worst, best = (difference.low, difference.high) if higher else (-difference.high, -difference.low)
    if margin is not None and -margin < worst and best < margin:
        return "equivalent"
    if worst > 0 or best < 0:
        return "better" if worst > 0 else "worse"
    return "not worse" if margin is not None and worst > -margin else "undecided"


def speed_verdict(speed_up: Estimate) -> SpeedVerdict:
    """Decide what the interval of a speed-up shows."""
    if speed_up.low is None or speed_up.high is None:
        return "same or undecided"
    return "faster" if speed_up.low > 1 else "slower" if speed_up.high < 1 else "same or undecided"


def outcome_of(results: Results, arm: str, against: str) -> ArmOutcome:
    """Decide whether an arm paid beside another one."""
    quality = results.quality_of(arm, against)
    speeds = results.speeds_of(arm, against)
    if quality is not None and quality.verdict == "worse":
        return "did not pay"
    if speeds and all((speed.speed_up.high or NO_GAIN) < NO_GAIN for speed in speeds):
        return "did not pay"
    if quality is None or quality.verdict not in KEPT or lost_runs(results, arm, quality):
        return "undecided"
    return "paid" if any(speed.verdict == "faster" for speed in speeds) else "undecided"


def lost_runs(results: Results, arm: str, quality: Quality) -> int:
    """Count the runs that the arm's model is judged by and that failed, or ended without the metric.

    Those that are left may be the lucky ones: of a model that diverged AUC is not defined.
    """
    multiple = results.tuned.get(arm, 1.0) if quality.rate == "tuned" else 1.0
    key = (arm, "quality", multiple, UNLIMITED)
    own = [run for run in results.runs if (run.arm, run.kind, run.multiple, run.bandwidth) == key]
    return sum(not run.ok or run.metrics.get(quality.metric) is None for run in own)


def _speed(results: Results, arm: str, against: str, bandwidth: str) -> Speed | None:
    mine = _values(results.runs_of(arm, bandwidth), _speed_of)
    both = pairs(mine, _values(results.runs_of(against, bandwidth), _speed_of))
    if not both:
        return None
    speed_up = ratio([one / other for one, other in both])
    return Speed(
        arm=arm,
        against=against,
        bandwidth=bandwidth,
        samples_per_second=estimate(list(mine.values())),
        speed_up=speed_up,
        verdict=speed_verdict(speed_up),
    )


def _speed_of(run: ArmRun) -> float | None:
    return run.samples_per_second or None


def _volumes(results: Results) -> Iterator[ArmBytes]:
    of_arms = {arm.label: _bytes(results, arm.label) for arm in results.arms}
    baseline = of_arms[results.baseline]
    for label, parts in of_arms.items():
        for (direction, part), volume in parts.items():
            whole = baseline.get((direction, part))
            yield ArmBytes(
                arm=label,
                direction=direction,
                part=part,
                sent=volume.sent,
                raw=volume.raw,
                predicted=volume.predicted,
                ratio=whole.sent / volume.sent if whole is not None and volume.sent else None,
            )


def _bytes(results: Results, arm: str) -> dict[tuple[str, str], MeanStepBytes]:
    """Map (direction, part) to the mean bytes over an arm's quality runs."""
    parts: dict[tuple[str, str], list[MeanStepBytes]] = {}
    for run in results.runs_of(arm):
        for volume in run.bytes:
            parts.setdefault((volume.direction, volume.part), []).append(volume)
    return {
        (direction, part): MeanStepBytes(
            direction=direction,
            part=part,
            sent=float(np.mean([volume.sent for volume in found])),
            raw=_mean([volume.raw for volume in found]),
            predicted=_mean([volume.predicted for volume in found]),
        )
        for (direction, part), found in parts.items()
    }


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if len(there) == len(values) and there else None


def _break_even(results: Results, arm: str, against: str) -> BreakEven:
    costs = _costs(results, arm, against)
    means = {bits: (_mean_of(found, 0), _mean_of(found, 1)) for bits, found in costs.items()}
    formula, measured = _by_formula(results, arm, against), crossing_by_measurement(means)
    low, high = _interval(costs) if measured.says == "value" else (None, None)
    says, shown = measured.says, {speed.verdict for speed in results.speeds_of(arm, against)}
    if (says == "always" and shown != {"faster"}) or (says == "never" and shown != {"slower"}):
        says = "unknown"  # so the means have it; the intervals do not
    return BreakEven(
        arm=arm,
        against=against,
        formula=formula.bits_per_second,
        formula_says=formula.says,
        measured=measured.bits_per_second,
        measured_says=says,
        low=low,
        high=high,
    )


def _by_formula(results: Results, arm: str, against: str) -> Crossing:
    sent = [sum(volume.sent for volume in _bytes(results, label).values()) for label in (arm, against)]
    coding = [_coding_seconds(results.runs_of(label)) for label in (arm, against)]
    if not all(sent) or coding[0] is None or coding[1] is None:
        return Crossing("unknown")
    return crossing_by_formula(sent[1] - sent[0], coding[0] - coding[1])


def _coding_seconds(runs: Iterable[ArmRun]) -> float | None:
    """Mean seconds of a step that go into encoding and decoding; None where no run measured them."""
    found = [sum(part.mean_ms for part in run.step if part.name in CODING) / 1e3 for run in runs if run.step]
    return float(np.mean(found)) if found else None


def _interval(costs: Mapping[float, Mapping[int, tuple[float, float]]]) -> tuple[float | None, float | None]:
    """The interval of the measured crossing, from the seeds that have a pair on every link."""
    seeds = sorted(set.intersection(*(set(found) for found in costs.values())))
    if len(seeds) < 2:
        return None, None
    differences = {bits: [found[seed][0] - found[seed][1] for seed in seeds] for bits, found in costs.items()}
    low, high = crossing_interval(differences) or (None, None)
    return low, None if high == math.inf else high


def _mean_of(costs: Mapping[int, tuple[float, float]], place: int) -> float:
    return float(np.mean([pair[place] for pair in costs.values()]))


def _costs(results: Results, arm: str, against: str) -> Mapping[float, Mapping[int, tuple[float, float]]]:
    """Map bits per second and seed to seconds per sample of (arm, other), for seeds that both have."""
    costs = {}
    for bandwidth in results.bandwidths:
        one, other = (_values(results.runs_of(label, bandwidth.label), _speed_of) for label in (arm, against))
        both = {seed: (1 / one[seed], 1 / other[seed]) for seed in one.keys() & other.keys()}
        if both:
            costs[bandwidth.bits_per_second or math.inf] = both
    return costs


def _verdict(results: Results, arm: str) -> Verdict:
    quality, speeds = results.quality_of(arm, results.baseline), results.speeds_of(arm, results.baseline)
    best = max(speeds, key=lambda speed: speed.speed_up.mean, default=None)
    failed = sum(run.arm == arm and not run.ok for run in results.runs)
    sent = {label: sum(v.sent for v in results.volumes if v.arm == label) for label in (arm, results.baseline)}
    outcome = outcome_of(results, arm, results.baseline)
    faster_at = tuple(speed.bandwidth for speed in speeds if speed.verdict == "faster")
    judged = [*([quality.difference] if quality else []), *(speed.speed_up for speed in speeds)]
    return Verdict(
        arm=arm,
        outcome=outcome,
        quality="undecided" if quality is None else quality.verdict,
        rate="fixed" if quality is None else quality.rate,
        difference=None if quality is None else quality.difference,
        seeds=min((one.seeds for one in judged), default=0),
        pays_on=faster_at if outcome == "paid" else (),
        faster_at=faster_at,
        slower_at=tuple(speed.bandwidth for speed in speeds if speed.verdict == "slower"),
        undecided_at=tuple(speed.bandwidth for speed in speeds if speed.verdict == "same or undecided"),
        best_speed_up=None if best is None else best.speed_up.mean,
        best_at="" if best is None else best.bandwidth,
        bytes_ratio=sent[results.baseline] / sent[arm] if all(sent.values()) else None,
        failed_runs=failed,
        reasons=tuple(_reasons(results, arm, quality, speeds, failed)),
    )


def _reasons(
    results: Results, arm: str, quality: Quality | None, speeds: Sequence[Speed], failed: int
) -> Iterator[str]:
    own = [run for run in results.runs if (run.arm, run.kind, run.ok) == (arm, "quality", True)]
    undefined, name = sum(run.metrics.get(results.metric) is None for run in own), metric_name(results.metric)
    if failed:
        yield f"{failed} of its runs failed and {is_or_are(failed)} in no figure."
    if not speeds:
        yield "No run of it ended well beside one of the baseline, so nothing can be said of it."
        return
    if quality is None:
        yield f"No run of it has {name} beside one of the baseline, so nothing can be said of its model."
    else:
        if undefined:
            are = f"{is_or_are(undefined)} in no difference"
            yield f"{undefined} of its runs ended without {name}, as where a model diverged, and {are}."
        if quality.difference.seeds < 2:
            yield "One seed gives no interval: any difference may be chance."
        yield _quality_sentence(quality)
    links = {link.label: link_text(link) for link in results.bandwidths}
    for speed in speeds:
        where = "Without limit" if speed.bandwidth == UNLIMITED else f"At {links[speed.bandwidth]}"
        said = "not shown to be faster or slower" if speed.verdict == "same or undecided" else speed.verdict
        yield f"{where} it is {speed.speed_up.mean:.2f} times as fast{_interval_text(speed.speed_up, '.2f')}: {said}."


def _quality_sentence(quality: Quality) -> str:
    name, rate = metric_name(quality.metric), " at its own best learning rate" if quality.rate == "tuned" else ""
    moved = f"{name} differs by {quality.difference.mean:+.5f}{_interval_text(quality.difference, '+.5f')}{rate}"
    margin = "" if quality.margin is None else f" of {quality.margin:g}"
    said = {
        "equivalent": f"equivalent, within the margin{margin}",
        "not worse": f"not worse by more than the margin{margin}",
        "better": "better",
        "worse": "worse",
        "undecided": f"too uncertain for the margin{margin}" if margin else f"no difference is shown, and {NO_MARGIN}",
    }
    return f"{moved}: {said[quality.verdict]}."


def _interval_text(found: Estimate, form: str) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" (95 % interval {found.low:{form}} to {found.high:{form}})"
