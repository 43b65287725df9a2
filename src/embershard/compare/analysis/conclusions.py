"""From runs to what they say: paired estimates, volumes, break-even points and a verdict per arm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from embershard.compare.analysis.statistics import (
    ALPHA,
    Crossing,
    against_margin,
    crossing_by_formula,
    crossing_by_measurement,
    crossing_interval,
    estimate,
    pairs,
    ratio,
)
from embershard.compare.analysis.verdicts import verdicts_of
from embershard.compare.results import (
    UNLIMITED,
    YARDSTICK,
    BreakEven,
    Bytes,
    Estimate,
    Quality,
    QualityVerdict,
    Rate,
    Results,
    Run,
    Speed,
    SpeedVerdict,
    Volume,
    higher_is_better,
)

# what a difference must exceed to be of consequence; 0.001 of AUC is what CTR papers hold to be worth having
MARGINS = {"auc": 0.0005, "logloss": 0.001, "hr": 0.003, "ndcg": 0.003, "recall": 0.003}
NOT_JUDGED = ("calibration", "samples", "users")  # best near 1, or no quality at all
CODING = ("encode", "decode", "shards")  # parts of a step: the worker's, and what shards did of it meanwhile


def conclude(results: Results, margin: float | None = None) -> Results:
    """The same results with all that their runs say; `margin` is that of the metric that decides, if not the usual."""
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
        update={
            "quality": tuple(quality),
            "speeds": tuple(speeds),
            "volumes": tuple(_volumes(results)),
            "break_even": tuple(_break_even(results, arm, against) for arm, against in others if arm != against),
        }
    )
    return found.model_copy(update={"verdicts": verdicts_of(found)})


def compared_with(results: Results) -> list[tuple[str, str]]:
    """(Arm, other): every arm with the baseline, itself included for its own figures, and with that of fp16s."""
    labels = [arm.label for arm in results.arms]
    pairings = [(label, results.baseline) for label in labels]
    if YARDSTICK in labels and results.baseline != YARDSTICK:
        codecs = [arm.label for arm in results.arms if arm.is_codec]
        pairings += [(label, YARDSTICK) for label in codecs if label not in (YARDSTICK, results.baseline)]
    return pairings


def _metrics(results: Results) -> list[str]:
    """All that were computed, the deciding one first."""
    named = {name for run in results.runs for name in run.metrics} - set(NOT_JUDGED) - {results.metric}
    return [results.metric, *sorted(named)]


def _values(runs: Iterable[Run], value: Callable[[Run], float | None]) -> dict[int, float]:
    """Seed -> value, where there is one."""
    return {run.seed: found for run in runs if (found := value(run)) is not None}


def _quality(results: Results, arm: str, against: str, metric: str, rate: Rate, margin: float | None) -> Quality | None:
    def metric_of(run: Run) -> float | None:
        return run.metrics.get(metric)

    mine = _values(results.runs_of(arm, UNLIMITED, rate), metric_of)
    both = pairs(mine, _values(results.runs_of(against, UNLIMITED, rate), metric_of))
    if not both:
        return None
    name = metric.partition("@")[0]
    bound = margin if margin is not None and metric == results.metric else MARGINS.get(name)
    differences = [one - other for one, other in both]
    difference, higher = estimate(differences), higher_is_better(metric)
    tests = None if bound is None else against_margin(differences, bound)
    return Quality(
        arm=arm,
        against=against,
        metric=metric,
        rate=rate,
        value=estimate(list(mine.values())),
        difference=difference,
        higher_is_better=higher,
        margin=bound,
        p_equivalent=None if tests is None else tests.p_equivalent,
        verdict=_judge(
            difference, higher, *(() if tests is None else (tests.p_equivalent, tests.p_above, tests.p_below))
        ),
    )


def _judge(
    difference: Estimate, higher: bool, p_equivalent: float = 1.0, p_above: float = 1.0, p_below: float = 1.0
) -> QualityVerdict:
    if p_equivalent < ALPHA:
        return "equivalent"
    if difference.low is not None and difference.high is not None and not difference.low <= 0 <= difference.high:
        return "better" if (difference.mean > 0) == higher else "worse"
    return "not worse" if (p_above if higher else p_below) < ALPHA else "undecided"


def _speed(results: Results, arm: str, against: str, bandwidth: str) -> Speed | None:
    mine = _values(results.runs_of(arm, bandwidth), _speed_of)
    both = pairs(mine, _values(results.runs_of(against, bandwidth), _speed_of))
    if not both:
        return None
    speed_up = ratio([one / other for one, other in both])
    verdict: SpeedVerdict = "same or undecided"
    if speed_up.low is not None and speed_up.high is not None:
        verdict = "faster" if speed_up.low > 1 else "slower" if speed_up.high < 1 else verdict
    return Speed(
        arm=arm,
        against=against,
        bandwidth=bandwidth,
        samples_per_second=estimate(list(mine.values())),
        speed_up=speed_up,
        verdict=verdict,
    )


def _speed_of(run: Run) -> float | None:
    return run.samples_per_second or None


def _volumes(results: Results) -> Iterator[Volume]:
    of_arms = {arm.label: _bytes(results, arm.label) for arm in results.arms}
    baseline = of_arms[results.baseline]
    for label, parts in of_arms.items():
        for (direction, part), volume in parts.items():
            whole = baseline.get((direction, part))
            yield Volume(
                arm=label,
                direction=direction,
                part=part,
                sent=volume.sent,
                raw=volume.raw,
                predicted=volume.predicted,
                ratio=whole.sent / volume.sent if whole is not None and volume.sent else None,
            )


def _bytes(results: Results, arm: str) -> dict[tuple[str, str], Bytes]:
    """(Direction, part) -> the mean over an arm's quality runs."""
    parts: dict[tuple[str, str], list[Bytes]] = {}
    for run in results.runs_of(arm):
        for volume in run.bytes:
            parts.setdefault((volume.direction, volume.part), []).append(volume)
    return {
        (direction, part): Bytes(
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
    return BreakEven(
        arm=arm,
        against=against,
        formula=formula.bits_per_second,
        formula_says=formula.says,
        measured=measured.bits_per_second,
        measured_says=measured.says,
        low=low,
        high=high,
    )


def _by_formula(results: Results, arm: str, against: str) -> Crossing:
    sent = [sum(volume.sent for volume in _bytes(results, label).values()) for label in (arm, against)]
    coding = [_coding_seconds(results.runs_of(label)) for label in (arm, against)]
    if not all(sent) or coding[0] is None or coding[1] is None:
        return Crossing("unknown")
    return crossing_by_formula(sent[1] - sent[0], coding[0] - coding[1])


def _coding_seconds(runs: Iterable[Run]) -> float | None:
    """Of a step, encoding and decoding; None where no run says."""
    found = [sum(part.mean_ms for part in run.step if part.name in CODING) / 1e3 for run in runs if run.step]
    return float(np.mean(found)) if found else None


def _interval(costs: Mapping[float, Mapping[int, tuple[float, float]]]) -> tuple[float | None, float | None]:
    """Of the measured crossing, over the seeds that have a pair on every link."""
    seeds = sorted(set.intersection(*(set(found) for found in costs.values())))
    if len(seeds) < 2:
        return None, None
    differences = {bits: [found[seed][0] - found[seed][1] for seed in seeds] for bits, found in costs.items()}
    low, high = crossing_interval(differences) or (None, None)
    return low, None if high == math.inf else high


def _mean_of(costs: Mapping[int, tuple[float, float]], place: int) -> float:
    return float(np.mean([pair[place] for pair in costs.values()]))


def _costs(results: Results, arm: str, against: str) -> Mapping[float, Mapping[int, tuple[float, float]]]:
    """Bits per second -> seed -> seconds of a sample, of the arm and of the other, of the seeds that both have."""
    costs = {}
    for bandwidth in results.bandwidths:
        one, other = (_values(results.runs_of(label, bandwidth.label), _speed_of) for label in (arm, against))
        both = {seed: (1 / one[seed], 1 / other[seed]) for seed in one.keys() & other.keys()}
        if both:
            costs[bandwidth.bits_per_second or math.inf] = both
    return costs
