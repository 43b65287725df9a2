"""Which pictures a comparison has, and what they show of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from embershard.compare.analysis.statistics import estimate
from embershard.compare.report.svg import (
    WIDTH,
    Picture,
    Plot,
    Scale,
    linear_ticks,
    padded,
    plot,
    ratio_ticks,
    text_width,
    tick_texts,
    x_ticks,
)
from embershard.compare.report.tables import BYTE_PARTS, bytes_sent, mean_step, part_name
from embershard.compare.results import UNLIMITED, ArmRun, Bandwidth, Estimate, Results, higher_is_better
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


def _curve(results: Results, run: ArmRun, metric: str) -> dict[int, float]:
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
            speed = results.speed_of(arm.label, against, link.label)
            if speed is not None and arm.label != against:
                points.append(_point(place, speed.speed_up))
        if points:
            series.append(Series(arm.label, style, points))
            found = results.break_even_of(arm.label, against)
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


_BAR, _GAP, _LABEL = 14.0, 3.0, 17.0
_CUT = "Some intervals reach beyond the picture."


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a series and, where seeds were repeated, its 95 % interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """What one arm has in a picture."""

    name: str
    style: int  # its colour, marker and dash, the same in all pictures
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Bar:
    """A stacked bar: parts in order, and how far its whole reaches at worst."""

    name: str  # in front of it, short
    parts: Mapping[str, float]
    reaches: float | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    """The bars of one arm."""

    name: str
    total: str  # at the right, in words
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Even:
    """Where an arm's speed-up passes 1, in bits per second; None: it is not known or does not."""

    measured: float | None = None
    formula: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What stands around a picture."""

    name: str  # of the file and the element
    title: str
    description: str  # what a reader who does not see it needs to know
    x: str = ""
    y: str = ""
    notes: Sequence[str] = field(default=())


def draw_curves(
    labels: Labels,
    series: Sequence[Series],
    *,
    zone: float | None = None,
    x_text: Callable[[float], str] | None = None,
) -> Picture:
    """Lines with bands; `zone` shades 0 +- zone and keeps zero in sight (differences)."""
    picture = Picture(labels.name, labels.title, labels.description)
    picture.series_legend([(one.name, one.style) for one in series])
    xs = [point.x for one in series for point in one.points]
    (low, high), cut = _y_range(series, zone)
    ticks = linear_ticks(low, high)
    x_range = (0.0, max(xs) * 1.02)
    y_ticks = list(zip(ticks, tick_texts(ticks), strict=True))
    area = plot(picture, x_range, (low, high), y_ticks, (labels.x, labels.y))
    if zone is not None:
        _draw_zone(area, zone)
    places = linear_ticks(*x_range, 4)
    words = [x_text(place) for place in places] if x_text else tick_texts(places)
    x_ticks(area, list(zip(places, words, strict=True)))
    for one in series:
        _draw_band(area, one)
    for one in series:
        picture.polyline([(area.x(point.x), area.y(point.y)) for point in one.points], one.style, area.clip)
        last = one.points[-1]
        picture.marker(area.x(last.x), area.y(last.y), one.style, f"{one.name}: {last.y:.5g} at the end")
    for note in [*labels.notes, *([_CUT] if cut else [])]:
        picture.wrapped(note)
    return picture


def draw_bars(
    labels: Labels, groups: Sequence[Bars], styles: Mapping[str, int], text: Callable[[float], str]
) -> Picture:
    """Stacked bars, arm below arm, on one scale from 0; `styles` are the parts in their order and their colours."""
    picture = Picture(labels.name, labels.title, labels.description)
    every = [bar for group in groups for bar in group.bars]
    seen = [part for part in styles if any(bar.parts.get(part, 0) > 0 for bar in every)]
    picture.legend(
        seen, lambda i, x, y: picture.shape("rect", f"part p{styles[seen[i]]}", x=x + 6, y=y - 6, width=14, height=12)
    )
    longest = max(sum(bar.parts.values()) for bar in every) or 1.0
    # a tail much longer than every bar would press them all into a corner
    high = min(max([longest, *(bar.reaches or 0 for bar in every)]), 2 * longest)
    left = max(text_width(bar.name) for bar in every)
    scale = Scale(low=0, high=high, start=left + 8 if left else 0, end=WIDTH - 8)
    for group in groups:
        picture.text(0, picture.top + 13, group.name, "strong")
        picture.text(WIDTH, picture.top + 13, group.total, "tick", "end")
        picture.top += _LABEL + 1
        for bar in group.bars:
            picture.text(0, picture.top + 11, bar.name, "tick")
            _draw_bar(picture, scale, group.name, bar, styles, text)
            picture.top += _BAR + _GAP
        picture.top += 6
    for note in labels.notes:
        picture.wrapped(note)
    return picture


def draw_speedups(
    labels: Labels, links: Sequence[tuple[str, float | None]], series: Sequence[Series], even: Mapping[str, Even]
) -> Picture:
    """Speed-up (logarithmic) against bandwidth; a point's x is the number of its link, an unlimited one stands apart.

    links: (name, bits per second or None for unlimited), slowest first.
    """
    picture = Picture(labels.name, labels.title, labels.description)
    picture.series_legend([(one.name, one.style) for one in series])
    (low, high), cut = _ratio_range(series)
    ticks = ratio_ticks(low, high)
    limited = [bits for _, bits in links if bits is not None]
    crossings = [bits for one in even.values() for bits in (one.measured, one.formula) if bits]
    slow, fast = _link_range(limited, crossings)
    apart = fast * (fast / slow) ** 0.25 if limited else fast  # where unlimited stands
    x_range = (slow, apart * (apart / slow) ** 0.08 if limited else apart * 2)
    y_ticks = [(tick, f"{tick:g}x") for tick in ticks]
    area = plot(picture, x_range, (low, high), y_ticks, (labels.x, labels.y), log=(True, True))
    places = [apart if bits is None else bits for _, bits in links]
    x_ticks(area, [(place, name) for place, (name, _) in zip(places, links, strict=True)])
    picture.line("even", area.x(x_range[0]), area.y(1), area.x(x_range[1]), area.y(1))
    for number, one in enumerate(series):
        # seeds' intervals of different arms beside each other, not over each other
        shift = (number - (len(series) - 1) / 2) * 5
        _draw_speedup(area, one, places, shift, limited=len(limited))
        _draw_even(area, one, even.get(one.name, Even()))
    for note in [*labels.notes, *([_CUT] if cut else [])]:
        picture.wrapped(note)
    return picture


def _y_range(series: Sequence[Series], zone: float | None) -> tuple[tuple[float, float], bool]:
    """What is seen: the last three quarters, for a model's first values would press the rest into a line."""
    end = max(point.x for one in series for point in one.points)
    late = [point for one in series for point in one.points if point.x >= 0.25 * end]
    low, high = min(point.y for point in late), max(point.y for point in late)
    if zone is not None:
        low, high = min(low, -1.5 * zone), max(high, 1.5 * zone)
    return _with_bounds(low, high, late, high - low)


def _ratio_range(series: Sequence[Series]) -> tuple[tuple[float, float], bool]:
    points = [point for one in series for point in one.points]
    low, high = math.log(min(0.97, *(point.y for point in points))), math.log(max(1.03, *(point.y for point in points)))
    logs = [
        Point(0, math.log(point.y), point.low and math.log(point.low), point.high and math.log(point.high))
        for point in points
    ]
    (low, high), cut = _with_bounds(low, high, logs, max(high - low, math.log(1.5)))
    return (math.exp(low), math.exp(high)), cut


def _with_bounds(low: float, high: float, points: Sequence[Point], reach: float) -> tuple[tuple[float, float], bool]:
    """A range of means and room for their intervals, up to `reach` on each side; whether some go beyond.

    Two seeds give intervals many times as wide as all means lie apart: nothing else could be seen.
    """
    lowest = min([low, *(point.low for point in points if point.low is not None)])
    highest = max([high, *(point.high for point in points if point.high is not None)])
    cut = lowest < low - reach or highest > high + reach
    return padded(max(lowest, low - reach), min(highest, high + reach)), cut


def _draw_zone(area: Plot, zone: float) -> None:
    top, bottom = area.y(zone), area.y(-zone)
    width = area.x.end - area.x.start + 12
    words = f"within the margin of {zone:g}"
    area.picture.shape("rect", "zone", words, x=area.x.start, y=top, width=width, height=bottom - top)
    area.picture.line("even", area.x.start, area.y(0), area.x.start + width, area.y(0))


def _draw_band(area: Plot, one: Series) -> None:
    upper = [(area.x(point.x), area.y(point.high)) for point in one.points if point.high is not None]
    lower = [(area.x(point.x), area.y(point.low)) for point in one.points if point.low is not None]
    if upper and lower:
        area.picture.band(upper, lower, one.style, area.clip)


def _draw_bar(
    picture: Picture, scale: Scale, group: str, bar: Bar, styles: Mapping[str, int], text: Callable[[float], str]
) -> None:
    begin = 0.0
    for part, style in styles.items():
        value = bar.parts.get(part, 0.0)
        if value > 0:
            start, end = scale(begin), scale(begin + value)
            hint = f"{group}, {bar.name}: {part} {text(value)}" if bar.name else f"{group}: {part} {text(value)}"
            width = max(end - start, 0.4)
            picture.shape("rect", f"part p{style}", hint, x=start, y=picture.top, width=width, height=_BAR)
        begin += value
    if bar.reaches is not None and bar.reaches > begin:
        middle, end = picture.top + _BAR / 2, scale(min(bar.reaches, scale.high))
        hint = f"{group}: p99 of the whole {text(bar.reaches)}"
        picture.line("reach", scale(begin), middle, end, middle, hint)
        if bar.reaches <= scale.high:
            picture.line("reach", end, middle - 5, end, middle + 5, hint)
        else:  # an arrow: it goes on
            picture.shape("path", "reach", hint, d=f"M{end - 5:.1f} {middle - 4:.1f}L{end:.1f} {middle:.1f}l-5 4")


def _link_range(limited: Sequence[float], crossings: Sequence[float]) -> tuple[float, float]:
    if not limited:
        return 1.0, 2.0
    slow, fast = min(limited), max(limited)
    near = [bits for bits in crossings if slow / 30 <= bits <= fast * 30]  # what is further off is told in words
    return min([slow, *near]) * 0.7, max([fast, *near]) * 1.3


def _draw_speedup(area: Plot, one: Series, places: Sequence[float], shift: float, limited: int) -> None:
    at = [(area.x(places[round(point.x)]) + shift, point) for point in one.points]
    measured = [(x, area.y(point.y)) for x, point in at if round(point.x) < limited]
    if len(measured) > 1:
        area.picture.polyline(measured, one.style)
    for x, point in at:
        hint = f"{one.name}: {point.y:.3g}x"
        if point.low is not None and point.high is not None:
            style = f"whisker s{one.style % 8}"
            hint += f" [{point.low:.3g}, {point.high:.3g}]"
            high, low = (min(max(area.y(bound), area.y.end), area.y.start) for bound in (point.high, point.low))
            area.picture.line(style, x, low, x, high, hint)
        area.picture.marker(x, area.y(point.y), one.style, hint)


def _draw_even(area: Plot, one: Series, even: Even) -> None:
    """Rings on the line of 1: full where it was measured, dotted where the formula has it."""
    for bits, kind, words in ((even.measured, "", "measured"), (even.formula, " formula", "by formula")):
        if bits is not None and area.x.low <= bits <= area.x.high:
            hint = f"{one.name}: break-even {words} at {bits / 1e6:,.3g} Mbit/s"
            ring = f"ring s{one.style % 8}{kind}"
            area.picture.shape("circle", ring, hint, cx=area.x(bits), cy=area.y(1), r=6.5)
