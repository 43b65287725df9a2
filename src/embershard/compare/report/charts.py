"""Choose the pictures of a report and the figures that they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from embershard.compare.analysis.statistics import estimate
from embershard.compare.report.drawing import (
    ArmBars,
    Bar,
    ChartPoint,
    Picture,
    Series,
    draw_bars,
    draw_calibration,
    draw_curves,
    draw_speed_ups,
)
from embershard.compare.report.tables import BYTE_PARTS, bytes_sent, mean_step, part_name
from embershard.compare.results import UNLIMITED, ArmRun, Bandwidth, Estimate, Results
from embershard.compare.units import bytes_text, count_text, link_text, metric_name, milliseconds, ratio_text

_BYTE_COLORS = {part: "p12" if part == "other" else f"p{place}" for place, part in enumerate(BYTE_PARTS)}
_STEP_COLORS = {"data": "p0", "route": "p1", "pull": "p2", "wait": "p4", "shards": "p13", "receive": "p3",
                "decode": "p8", "forward": "p5", "backward": "p6", "gather": "p11", "encode": "p7", "push": "p9",
                "send": "p10", "other": "p12"}  # fmt: skip
_SMALL = 0.02  # of the longest bar: parts that are nowhere above it are drawn with `other`


def quality_pictures(results: Results) -> Iterator[Picture]:
    """Picture both metrics against samples and wall time, and the deciding one's difference from the baseline."""
    metrics = _drawn_metrics(results)
    for metric in metrics:
        yield from _against_samples(results, metric)
    if metrics:
        yield from _differences(results, metrics[0])
    for bandwidth in results.bandwidths:
        yield from _against_time(results, metrics[0] if metrics else results.metric, bandwidth)
    for metric in metrics[1:]:
        yield from _against_time(results, metric, results.bandwidths[0])


def calibration_pictures(results: Results) -> Iterator[Picture]:
    """Picture mean labels against mean predictions, in bins of about as many samples each, label by label."""
    labels = dict.fromkeys(label for run in results.runs for label in run.reliability)
    for label in labels:
        series = []
        for style, arm in enumerate(results.arms):
            curves = [bins for run in results.runs_of(arm.label) if (bins := run.reliability.get(label))]
            curves = [bins for bins in curves if len(bins) == len(curves[0])]  # equal predictions share a bin
            points = [
                _point(sum(mean for mean, _, _ in bins) / len(bins), estimate([rate for _, rate, _ in bins]))
                for bins in zip(*curves, strict=True)
            ]
            if points:
                series.append(Series(arm.label, style, points))
        if not series:
            continue
        title = f"Calibration{f' of {label}' if label else ''}"
        said = "; ".join(
            f"{one.name} " + ", ".join(f"{point.x:.3g}: {point.y:.3g}" for point in one.points) for one in series
        )
        yield Picture(
            name=f"calibration-{_slug(label)}".rstrip("-"),
            title=title,
            description=f"Mean label of each bin of predictions, a line per arm{_bands(results)}. {said}.",
            draw=partial(draw_calibration, title, series, "mean prediction", f"mean label on {results.split}"),
        )


def speed_pictures(results: Results, against: Sequence[str]) -> Iterator[Picture]:
    """Picture the speed-up over each of some arms, against bandwidth."""
    for other in against:
        yield from _speed_ups(results, other)


def byte_picture(results: Results) -> Iterator[Picture]:
    """Picture the bytes per step, by direction and part."""
    base = bytes_sent(results, results.baseline)
    groups = []
    for arm in results.arms:
        sent = bytes_sent(results, arm.label)
        if not sent:
            continue
        bars = []
        for direction in ("push", "pull"):
            parts: dict[str, float] = {}
            for volume in results.volumes:
                if (volume.arm, volume.direction) == (arm.label, direction):
                    parts[part_name(direction, volume.part)] = volume.sent
            bars.append(Bar(direction, parts))
        beside = "" if base is None or arm.label == results.baseline else _beside(sent, base)
        groups.append(ArmBars(arm.label, f"{bytes_text(sent)}{beside}", bars))
    if groups:
        described = "; ".join(f"{group.name} {group.total}" for group in groups)
        title = "Bytes per step, by direction and part"
        yield Picture(
            name="bytes",
            title=title,
            description=f"Stacked bars of one worker's bytes per step, push and pull of every arm: {described}.",
            draw=lambda: draw_bars(title, groups, _BYTE_COLORS, bytes_text, ()),
        )


def _beside(sent: float, base: float) -> str:
    """Say how many times fewer, or more, bytes these are."""
    return f" · {ratio_text(base / sent)} fewer" if sent <= base else f" · {ratio_text(sent / base)} more"


def step_pictures(results: Results) -> Iterator[Picture]:
    """Picture where the time of a step goes, link by link."""
    for bandwidth in results.bandwidths:
        yield from _step_picture(results, bandwidth)


def _drawn_metrics(results: Results) -> list[str]:
    """The deciding metric, and the one that papers report beside it."""
    name, _, at = results.metric.partition("@")
    beside = {"auc": "logloss", "logloss": "auc", "hr": f"ndcg@{at}", "ndcg": f"hr@{at}"}.get(name)
    return [metric for metric in (results.metric, beside) if metric and _has_curves(results, metric)]


def _has_curves(results: Results, metric: str) -> bool:
    return any(_curve(results, run, metric) for arm in results.arms for run in results.runs_of(arm.label))


def _split(results: Results) -> str:
    """The split of the curves: the judged one, if it was evaluated during training."""
    splits = {split for run in results.runs for point in run.curve for split in point.figures}
    return results.split if results.split in splits else results.deciding_split


def _curve(results: Results, run: ArmRun, metric: str) -> dict[int, float]:
    """Map samples to the value of a metric."""
    split = _split(results)
    found = ((point.samples, point.figures.get(split, {}).get(metric)) for point in run.curve)
    return {samples: value for samples, value in found if value is not None}


def _point(x: float, found: Estimate) -> ChartPoint:
    return ChartPoint(x, found.mean, found.low, found.high)


def _against_samples(results: Results, metric: str) -> Iterator[Picture]:
    series = []
    for style, arm in enumerate(results.arms):
        curves = [curve for run in results.runs_of(arm.label) if (curve := _curve(results, run, metric))]
        common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        points = [_point(samples, estimate([curve[samples] for curve in curves])) for samples in common]
        if points:
            series.append(Series(arm.label, style, points))
    if series:
        yield _curves_picture(results, metric, series, "samples", "samples", "samples of all workers")


def _against_time(results: Results, metric: str, bandwidth: Bandwidth) -> Iterator[Picture]:
    series = []
    for style, arm in enumerate(results.arms):
        points = _timed(results, arm.label, metric, bandwidth.label)
        if points:
            series.append(Series(arm.label, style, points))
    if not series:
        return
    link = link_text(bandwidth)
    free = bandwidth.bits_per_second is None
    where = "wall time, link without limit" if free else f"wall time at {link}"
    yield _curves_picture(results, metric, series, f"time-{_slug(bandwidth.label)}", where, "training time")


def _timed(results: Results, arm: str, metric: str, bandwidth: str) -> list[ChartPoint]:
    """Values at equal numbers of samples; their time is the mean over seeds."""
    curves: list[dict[int, tuple[float, float]]] = []  # samples -> (seconds, value), one per seed
    for run in results.runs_of(arm, bandwidth if results.full else UNLIMITED):
        values = _curve(results, run, metric)
        timed = ((point.samples, results.seconds_at(run, point, bandwidth)) for point in run.curve)
        curve = {
            samples: (found, values[samples]) for samples, found in timed if found is not None and samples in values
        }
        if curve:
            curves.append(curve)
    points = []
    for samples in sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []:
        pairs = [curve[samples] for curve in curves]
        seconds = sum(seconds for seconds, _ in pairs) / len(pairs)
        points.append(_point(seconds, estimate([value for _, value in pairs])))
    return points


def _curves_picture(
    results: Results, metric: str, series: Sequence[Series], name: str, against: str, x: str
) -> Picture:
    better = "lower" if metric in results.lower_is_better else "higher"
    title = f"{metric_name(metric)} against {against}"
    ends = "; ".join(f"{one.name} {one.points[-1].y:.4f}" for one in series)
    unit, text = ("", count_text) if x.startswith("samples") else _clock(series)
    y = f"{metric_name(metric)} on {_split(results)}, {better} is better"
    return Picture(
        name=f"{_slug(metric)}-{name}",
        title=title,
        description=f"{title}, {better} is better, a line per arm{_bands(results)}. Values at the end: {ends}.",
        draw=lambda: draw_curves(title, series, f"{x}{unit}", y, text),
    )


def _clock(series: Sequence[Series]) -> tuple[str, Callable[[float], str]]:
    """Choose the unit of an axis of seconds."""
    longest = max(point.x for one in series for point in one.points)
    unit, size = next(
        ((unit, size) for unit, size in (("hours", 3600), ("minutes", 60)) if longest > 3 * size), ("seconds", 1)
    )
    return f", {unit}", lambda seconds: f"{seconds / size:.3g}"


def _differences(results: Results, metric: str) -> Iterator[Picture]:
    base = {run.seed: _curve(results, run, metric) for run in results.runs_of(results.baseline)}
    series = []
    for style, arm in enumerate(results.arms):
        curves = {run.seed: _curve(results, run, metric) for run in results.runs_of(arm.label)}
        both = [seed for seed in curves if seed in base and arm.label != results.baseline]
        if not both:
            continue
        common = sorted(set.intersection(*(set(curves[seed]) & set(base[seed]) for seed in both)))
        points = [_point(x, estimate([curves[seed][x] - base[seed][x] for seed in both])) for x in common]
        if points:
            series.append(Series(arm.label, style, points))
    if not series:
        return
    margin = next((one.margin for one in results.quality if one.metric == metric and one.margin), None)
    what = f"{metric_name(metric)} minus that of {results.baseline}"
    title = f"{what}, paired by seed"
    ends = "; ".join(f"{one.name} {one.points[-1].y:+.5f}" for one in series)
    zone = f"; shaded: the margin of {margin:g}" if margin else ""
    y = f"difference on {_split(results)}{zone}"
    yield Picture(
        name=f"{_slug(metric)}-difference",
        title=title,
        description=f"{what} against samples{_bands(results)}{zone}. At the end: {ends}.",
        draw=lambda: draw_curves(title, series, "samples of all workers", y, count_text, margin),
    )


def _speed_ups(results: Results, against: str) -> Iterator[Picture]:
    series = []
    for style, arm in enumerate(results.arms):
        points = []
        for place, link in enumerate(results.bandwidths):
            speed = results.speed_of(arm.label, against, link.label)
            if speed is not None and arm.label != against:
                points.append(_point(place, speed.speed_up))
        if points:
            series.append(Series(arm.label, style, points))
    if not series:
        return
    even = {found.arm: found for found in results.break_even if found.against == against}
    links = [(link_text(link), link.bits_per_second) for link in results.bandwidths]
    said = "; ".join(
        f"{one.name}: " + ", ".join(f"{point.y:.3g}x at {links[round(point.x)][0]}" for point in one.points)
        for one in series
    )
    rings = any(found.measured or found.formula for found in even.values())
    notes = ["Rings: break-even, measured (full) and by formula W* (dotted), where it lies in the picture."] * rings
    title, y = f"Speed-up over {against}", f"times as fast as {against}, logarithmic"
    yield Picture(
        name=f"speed-up-over-{_slug(against)}",
        title=title,
        description=f"Speed-up over {against} against bandwidth, one line per arm. {said}.",
        draw=lambda: draw_speed_ups(title, links, series, even, y, notes),
    )


def _step_picture(results: Results, bandwidth: Bandwidth) -> Iterator[Picture]:
    groups: list[ArmBars] = []
    for arm in results.arms:
        parts = mean_step(part for run in results.runs_of(arm.label, bandwidth.label) for part in run.step)
        whole = next((part for part in parts if part.name == "step" and not part.overlapped), None)
        if whole is None:
            continue
        bars = []
        for overlapped in (False, True):
            found = {part.name: part.p50_ms for part in parts if part.overlapped == overlapped and part.name != "step"}
            if found:
                bars.append(Bar("beside" if overlapped else "", found, None if overlapped else whole.p99_ms))
        groups.append(ArmBars(arm.label, f"p50 {milliseconds(whole.p50_ms)} · p99 {milliseconds(whole.p99_ms)}", bars))
    if not groups:
        return
    free = bandwidth.bits_per_second is None
    where = "link without limit" if free else link_text(bandwidth)
    described = "; ".join(f"{group.name} {group.total}" for group in groups)
    title = f"Time of a step, {where}"
    yield Picture(
        name=f"step-{_slug(bandwidth.label)}",
        title=title,
        description=f"Stacked bars of the median time of each part of a step; {described}.",
        draw=lambda: draw_bars(title, _without_small(groups), _STEP_COLORS, milliseconds, _step_notes(groups)),
    )


def _without_small(groups: Sequence[ArmBars]) -> list[ArmBars]:
    """Count parts that are small in every bar, and those without a colour, as `other`."""
    every = [bar for group in groups for bar in group.bars]
    bound = _SMALL * max(sum(bar.parts.values()) for bar in every)
    kept = {part for bar in every for part, value in bar.parts.items() if value > bound} & _STEP_COLORS.keys()
    folded = []
    for group in groups:
        bars = []
        for bar in group.bars:
            parts = {part: value for part, value in bar.parts.items() if part in kept}
            rest = sum(value for part, value in bar.parts.items() if part not in kept)
            parts["other"] = parts.get("other", 0.0) + rest
            bars.append(replace(bar, parts=parts))
        folded.append(replace(group, bars=bars))
    return folded


def _step_notes(groups: Sequence[ArmBars]) -> list[str]:
    notes = [
        "Bars: medians of the parts, those below 2 % with other. Line: up to the p99 of the step (an arrow: it ends "
        "beyond the picture)."
    ]
    if any(bar.name == "beside" for group in groups for bar in group.bars):
        notes.append("Beside: in other threads, at the same time.")
    return notes


def _bands(results: Results) -> str:
    if len(results.seeds) < 2:
        return ", one seed, hence no bands"
    return f", with 95 % bands over {len(results.seeds)} seeds"


def _slug(words: str) -> str:
    return "-".join("".join(character if character.isalnum() else " " for character in words.lower()).split())
