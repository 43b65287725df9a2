"""Which pictures a comparison has, and what they show of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from embershard.compare.analysis.statistics import estimate
from embershard.compare.report.pictures import (
    Bar,
    Bars,
    Even,
    Labels,
    Point,
    Series,
    draw_bars,
    draw_curves,
    draw_speedups,
)
from embershard.compare.report.svg import Picture
from embershard.compare.report.tables import BYTE_PARTS, break_even_of, bytes_sent, mean_step, part_name, speed_of
from embershard.compare.results import UNLIMITED, Bandwidth, Estimate, Results, Run, higher_is_better
from embershard.compare.units import (
    bytes_text,
    count_text,
    link_text,
    metric_name,
    milliseconds,
    ratio_text,
)

_BYTE_STYLES = {part: 12 if part == "other" else style for style, part in enumerate(BYTE_PARTS)}
_STEP_STYLES = {"data": 0, "route": 1, "pull": 2, "wait": 4, "shards": 13, "receive": 3, "decode": 8, "forward": 5,
                "backward": 6, "gather": 11, "encode": 7, "push": 9, "send": 10, "other": 12}  # fmt: skip
_SMALL = 0.02  # of the longest bar: parts that are nowhere above it are drawn with `other`


def quality_pictures(results: Results) -> Iterator[Picture]:
    """The deciding metric against samples, its difference from the baseline's, and both metrics against wall time."""
    metrics = _drawn_metrics(results)
    for metric in metrics:
        yield from _against_samples(results, metric)
    if metrics:
        yield from _differences(results, metrics[0])
    for bandwidth in results.bandwidths:
        yield from _against_time(results, metrics[0] if metrics else results.metric, bandwidth)
    for metric in metrics[1:]:
        yield from _against_time(results, metric, results.bandwidths[0])


def speed_pictures(results: Results, against: Sequence[str]) -> Iterator[Picture]:
    """Speed-up over each of some arms, against bandwidth."""
    for other in against:
        yield from _speed_ups(results, other)


def byte_picture(results: Results) -> Iterator[Picture]:
    """Bytes per step, by direction and part."""
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
        fewer = f" · {ratio_text(base / sent)} fewer" if base and arm.label != results.baseline else ""
        groups.append(Bars(arm.label, f"{bytes_text(sent)}{fewer}", bars))
    if groups:
        described = "; ".join(f"{group.name} {group.total}" for group in groups)
        labels = Labels(
            name="bytes",
            title="Bytes per step, by direction and part",
            description=f"Stacked bars of one worker's bytes per step, push and pull of every arm: {described}.",
        )
        yield draw_bars(labels, groups, _BYTE_STYLES, bytes_text)


def step_pictures(results: Results) -> Iterator[Picture]:
    """Where the time of a step goes, link by link."""
    for bandwidth in results.bandwidths:
        yield from _step_picture(results, bandwidth)


def _drawn_metrics(results: Results) -> list[str]:
    """The deciding one and, where it has one, that beside it in papers."""
    name, _, at = results.metric.partition("@")
    beside = {"auc": "logloss", "logloss": "auc", "hr": f"ndcg@{at}", "ndcg": f"hr@{at}"}.get(name)
    return [metric for metric in (results.metric, beside) if metric and _has_curves(results, metric)]


def _has_curves(results: Results, metric: str) -> bool:
    return any(_curve(results, run, metric) for arm in results.arms for run in results.runs_of(arm.label))


def _split(results: Results) -> str:
    """Of the curves: where arms are judged, if that was evaluated on the way."""
    splits = {split for run in results.runs for point in run.curve for split in point.figures}
    return results.split if results.split in splits else results.deciding_split


def _curve(results: Results, run: Run, metric: str) -> dict[int, float]:
    """Samples -> value."""
    split = _split(results)
    found = ((point.samples, point.figures.get(split, {}).get(metric)) for point in run.curve)
    return {samples: value for samples, value in found if value is not None}


def _point(x: float, found: Estimate) -> Point:
    return Point(x, found.mean, found.low, found.high)


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


def _timed(results: Results, arm: str, metric: str, bandwidth: str) -> list[Point]:
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
    better = "higher" if higher_is_better(metric) else "lower"
    title = f"{metric_name(metric)} against {against}"
    ends = "; ".join(f"{one.name} {one.points[-1].y:.4f}" for one in series)
    unit, text = ("", count_text) if x.startswith("samples") else _clock(series)
    labels = Labels(
        name=f"{_slug(metric)}-{name}",
        title=title,
        description=f"{title}, {better} is better, a line per arm{_bands(results)}. Values at the end: {ends}.",
        x=f"{x}{unit}",
        y=f"{metric_name(metric)} on {_split(results)}, {better} is better",
    )
    return draw_curves(labels, series, x_text=text)


def _clock(series: Sequence[Series]) -> tuple[str, Callable[[float], str]]:
    """The unit that suits an axis of seconds."""
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
    title = f"{metric_name(metric)} minus that of {results.baseline}"
    ends = "; ".join(f"{one.name} {one.points[-1].y:+.5f}" for one in series)
    zone = f"; shaded: the margin of {margin:g}" if margin else ""
    labels = Labels(
        name=f"{_slug(metric)}-difference",
        title=f"{title}, paired by seed",
        description=f"{title} against samples{_bands(results)}{zone}. At the end: {ends}.",
        x="samples of all workers",
        y=f"difference on {_split(results)}{zone}",
    )
    yield draw_curves(labels, series, zone=margin, x_text=count_text)


def _speed_ups(results: Results, against: str) -> Iterator[Picture]:
    series, even = [], {}
    for style, arm in enumerate(results.arms):
        points = []
        for place, link in enumerate(results.bandwidths):
            speed = speed_of(results, arm.label, link.label, against)
            if speed is not None and arm.label != against:
                points.append(_point(place, speed.speed_up))
        if points:
            series.append(Series(arm.label, style, points))
            found = break_even_of(results, arm.label, against)
            even[arm.label] = Even() if found is None else Even(measured=found.measured, formula=found.formula)
    if not series:
        return
    links = [(link_text(link), link.bits_per_second) for link in results.bandwidths]
    said = "; ".join(
        f"{one.name}: " + ", ".join(f"{point.y:.3g}x at {links[round(point.x)][0]}" for point in one.points)
        for one in series
    )
    rings = any(found.measured or found.formula for found in even.values())
    labels = Labels(
        name=f"speed-up-over-{_slug(against)}",
        title=f"Speed-up over {against}",
        description=f"Speed-up over {against} against bandwidth, one line per arm. {said}.",
        x="bandwidth of each worker's link",
        y=f"times as fast as {against}, logarithmic",
        notes=["Rings: break-even, measured (full) and by formula W* (dotted), where it lies in the picture."] * rings,
    )
    yield draw_speedups(labels, links, series, even)


def _step_picture(results: Results, bandwidth: Bandwidth) -> Iterator[Picture]:
    groups: list[Bars] = []
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
        groups.append(Bars(arm.label, f"p50 {milliseconds(whole.p50_ms)} · p99 {milliseconds(whole.p99_ms)}", bars))
    if not groups:
        return
    free = bandwidth.bits_per_second is None
    where = "link without limit" if free else link_text(bandwidth)
    described = "; ".join(f"{group.name} {group.total}" for group in groups)
    labels = Labels(
        name=f"step-{_slug(bandwidth.label)}",
        title=f"Time of a step, {where}",
        description=f"Stacked bars of the median time of each part of a step; {described}.",
        notes=_step_notes(groups),
    )
    yield draw_bars(labels, _without_small(groups), _STEP_STYLES, milliseconds)


def _without_small(groups: Sequence[Bars]) -> list[Bars]:
    """The same with parts that are small in every bar, and those without a colour, as `other`."""
    every = [bar for group in groups for bar in group.bars]
    bound = _SMALL * max(sum(bar.parts.values()) for bar in every)
    kept = {part for bar in every for part, value in bar.parts.items() if value > bound} & _STEP_STYLES.keys()
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


def _step_notes(groups: Sequence[Bars]) -> list[str]:
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
