"""The pictures of a report, drawn as SVG by hand.

Not by matplotlib: its SVG fixes the colours of one background and turns text into outlines. Drawn here a picture weighs
a few kB, follows the reader's light or dark, can be searched and read aloud, and stays the same, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
