"""Draw pictures with matplotlib, as SVG whose text stays text and whose bytes repeat.

Colours are drawn in the light values of templates/picture.css and then replaced by its variables, so that one picture
serves light, dark and paper.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from embershard.compare.results import BreakEven
from embershard.compare.units import bits_text

WIDTH = 440  # of every picture in pixels: it is shown at 340 to 500
_PLOT, _LINE, _BAR, _MARGIN = 285, 17, 17, 14  # heights in pixels: axes, a line of text, a bar, air around a picture
_CHARACTER = 6.6  # mean width of a character in pixels
_COLORS, _MARKERS = 8, "os^DvPXp"  # of arms: a marker and a colour each, then the same with dashes
_DASHES: tuple[tuple[float, Sequence[float]], ...] = ((0, ()), (0, (4, 2)), (0, (1.5, 2)), (0, (5, 2, 1.5, 2)))
_STEPS = (1, 2, 5, 10)  # between ticks, times a power of ten
_CUT = "Some intervals reach beyond the picture."
_HINT = "hint:"  # begins the gid of what shows a text where the mouse rests on it
_SVG = "{http://www.w3.org/2000/svg}"


@cache
def picture_style() -> str:
    """The style sheet of all pictures."""
    return (files("embershard.compare") / "templates" / "picture.css").read_text(encoding="utf-8")


@cache
def _palette() -> dict[str, str]:
    """Colour names of the style sheet and their light values, which are drawn."""
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", picture_style().partition("@media")[0]))


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture that is drawn when its SVG is asked for."""

    name: str  # of its file and of its element
    title: str
    description: str  # says what it shows to readers who do not see it
    draw: Callable[[], Figure]

    @cached_property
    def svg(self) -> str:
        """An SVG element to stand in a page that has picture_style()."""
        color, text = _palette(), io.StringIO()
        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # those of the user would change the picture
            matplotlib.rcParams.update({
                "svg.fonttype": "none", "svg.hashsalt": self.name, "font.family": "DejaVu Sans", "font.size": 12,
                "text.color": color["ink"], "text.parse_math": False, "axes.edgecolor": color["soft"],
                "axes.labelcolor": color["soft"], "axes.titlecolor": color["soft"], "axes.titlelocation": "left",
                "axes.titlesize": 12,
                "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
                "axes.facecolor": "none", "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
                "axes.formatter.useoffset": False, "axes.formatter.limits": (-9, 9), "axes.xmargin": 0,
                "grid.color": color["rule"], "grid.linewidth": 1, "ytick.left": False, "xtick.color": color["soft"],
                "ytick.color": color["soft"], "figure.facecolor": "none", "lines.linewidth": 1.9,
                "lines.markersize": 7, "lines.markeredgewidth": 0.8, "lines.markeredgecolor": color["paper"],
            })  # fmt: skip
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self.draw().savefig(text, format="svg", metadata=nothing)
        return self._finished(text.getvalue())

    def alone(self) -> str:
        """The same as a file that needs nothing else, with a margin."""
        root = ElementTree.fromstring(self.svg)
        _, _, width, height = (float(part) for part in root.get("viewBox", "").split())
        size = {"width": width + 2 * _MARGIN, "height": height + 2 * _MARGIN}
        root.attrib |= {name: f"{value:g}" for name, value in size.items()}
        root.set("viewBox", f"{-_MARGIN} {-_MARGIN} {size['width']:g} {size['height']:g}")
        style = ElementTree.Element(f"{_SVG}style")
        style.text = picture_style()
        root.insert(0, style)
        return ElementTree.tostring(root, encoding="unicode") + "\n"

    def _finished(self, text: str) -> str:
        """Matplotlib's SVG with variables for colours, a title, a description, hints, and no ids but those in use."""
        names = {value: f"var(--{name})" for name, value in reversed(_palette().items())}
        text = re.sub("#[0-9a-f]{6}", lambda found: names.get(found[0], found[0]), text)
        text = re.sub(r'font-family: [^;"]*(; )?| transform="rotate\(-0 [^"]*"', "", text).replace("xlink:href", "href")
        root = ElementTree.fromstring(text)
        used = set(re.findall(r"(?:href=\"#|url\(#)(\w+)", text))
        for element in root.iter():
            gid = element.get("id", "")
            if gid.startswith(_HINT):
                hint = ElementTree.Element(f"{_SVG}title")
                hint.text = gid.removeprefix(_HINT)
                element.insert(0, hint)
            if gid not in used:
                element.attrib.pop("id", None)
        for defs in root.findall(f"{_SVG}defs"):
            for style in defs.findall(f"{_SVG}style"):  # it would style the whole page
                defs.remove(style)
        for place, (tag, words) in enumerate((("title", self.title), ("desc", self.description))):
            element = ElementTree.Element(f"{_SVG}{tag}", {"id": f"{self.name}-{tag}"})
            element.text = words
            root.insert(place, element)
        root.attrib |= {"class": "picture", "role": "img", "aria-labelledby": f"{self.name}-title {self.name}-desc"}
        for name in ("width", "height", "version"):
            del root.attrib[name]
        ElementTree.register_namespace("", _SVG.strip("{}"))
        return ElementTree.tostring(root, encoding="unicode")


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """One value of a series and, where seeds were repeated, its 95 % interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one arm in a picture."""

    name: str
    style: int  # its colour, marker and dash, the same in all pictures
    points: Sequence[ChartPoint]

    @property
    def color(self) -> str:
        """The colour in which the series is drawn."""
        return _palette()[f"s{self.style % _COLORS}"]

    def line(self, points: Sequence[tuple[float, float]], *, marked: bool = False, hint: str = "") -> Line2D:
        """A line through points, or markers on them."""
        marker = _MARKERS[self.style % len(_MARKERS)] if marked else "None"
        xs, ys = zip(*points, strict=True) if points else ((), ())
        line = Line2D(xs, ys, color=self.color, linestyle=_DASHES[self.style // _COLORS % len(_DASHES)], marker=marker)
        line.set_gid(_HINT + hint if hint else None)
        return line


@dataclass(frozen=True, slots=True)
class Bar:
    """A stacked bar: parts in order, and the p99 of its whole."""

    name: str  # in front of it, short
    parts: Mapping[str, float]
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class ArmBars:
    """The bars of one arm."""

    name: str
    total: str  # at the right, in words
    bars: Sequence[Bar]


def _frame(
    title: str, signs: Sequence[Line2D | Patch], names: Sequence[str], height: float, notes: Sequence[str]
) -> tuple[Figure, tuple[float, float, float, float]]:
    """A figure with a title, a legend and notes, and the place between them: `height` pixels for axes."""
    columns = next(
        (
            count for count in range(len(names), 1, -1)
            if sum(40 + _CHARACTER * max(map(len, part)) for part in np.array_split(names, count)) <= WIDTH
        ),
        1,
    )  # fmt: skip
    lines = [line for note in notes for line in textwrap.wrap(note, 74)]
    bottom = 15 * len(lines) + 6 * bool(lines)
    whole = 34 + _LINE * math.ceil(len(names) / columns) + height + bottom
    figure = Figure(figsize=(WIDTH / 72, whole / 72), dpi=72)  # a pixel is a point
    figure.text(0, 1 - 14 / whole, title, size=13.5, weight="bold")
    figure.legend(
        signs, names, loc="upper left", bbox_to_anchor=(0, 1 - 24 / whole), ncols=columns, frameon=False, borderpad=0,
        borderaxespad=0, handlelength=1.6, handletextpad=0.5, columnspacing=1.2, labelspacing=0.3,
    )  # fmt: skip
    for place, line in enumerate(reversed(lines)):
        figure.text(0, (3 + 15 * place) / whole, line, size=11.5, color=_palette()["soft"])
    return figure, (0, bottom / whole, 1, height / whole)


def _axes(title: str, series: Sequence[Series], x: str, y: str, notes: Sequence[str]) -> Axes:
    """Axes below a legend of the series."""
    signs = [one.line([], marked=True) for one in series]
    figure, place = _frame(title, signs, [one.name for one in series], _PLOT, notes)
    figure.set_layout_engine("constrained", rect=place, w_pad=0, h_pad=0)
    axes = figure.add_subplot()
    axes.set_title(y)
    axes.set_xlabel(x)
    return axes


def draw_curves(
    title: str, series: Sequence[Series], x: str, y: str, x_text: Callable[[float], str], zone: float | None = None
) -> Figure:
    """Lines with bands; `zone` shades 0 +- zone and keeps zero in sight (differences)."""
    (low, high), cut = _y_range(series, zone)
    axes = _axes(title, series, x, y, [_CUT] * cut)
    axes.set_xlim(0, 1.02 * max(point.x for one in series for point in one.points))
    axes.set_ylim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: x_text(value)))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
    if zone is not None:
        shade = axes.axhspan(-zone, zone, color=_palette()["s3"], alpha=0.13, linewidth=0)
        shade.set_gid(f"{_HINT}within the margin of {zone:g}")
        axes.axhline(0, color=_palette()["ink"], linewidth=1.2, linestyle=(0, (3, 2.5)))
    _draw_lines(axes, series)
    for one in series:
        points = [(point.x, point.y) for point in one.points]
        end = axes.add_line(one.line(points[-1:], marked=True, hint=f"{one.name}: {points[-1][1]:.5g} at the end"))
        end.set_clip_on(False)
    return _figure(axes)


def _draw_lines(axes: Axes, series: Sequence[Series]) -> None:
    """Bands, then the lines before them."""
    for one in series:
        bounded = [point for point in one.points if point.low is not None and point.high is not None]
        if bounded:
            xs, lows, highs = zip(*((point.x, point.low, point.high) for point in bounded), strict=True)
            axes.fill_between(xs, lows, highs, color=one.color, alpha=0.15, linewidth=0).set_gid(
                f"{_HINT}{one.name}: 95 % band"
            )
    for one in series:
        axes.add_line(one.line([(point.x, point.y) for point in one.points]))


def draw_calibration(title: str, series: Sequence[Series], x: str, y: str) -> Figure:
    """Lines with bands, and the diagonal on which predictions are right."""
    axes = _axes(title, series, x, y, ["Dashed: where predictions are right."])
    end = 1.02 * max(max(point.x, point.y) for one in series for point in one.points)
    axes.set_xlim(0, end)
    axes.set_ylim(0, end)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.axline((0, 0), slope=1, color=_palette()["ink"], linewidth=1.2, linestyle=(0, (3, 2.5)))
    _draw_lines(axes, series)
    for one in series:
        for point in one.points:
            hint = f"{one.name}: {point.x:.3g} predicted, {point.y:.3g} seen"
            axes.add_line(one.line([(point.x, point.y)], marked=True, hint=hint))
    return _figure(axes)


def draw_speed_ups(
    title: str, links: Sequence[tuple[str, float | None]], series: Sequence[Series], even: Mapping[str, BreakEven],
    y: str, notes: Sequence[str],
) -> Figure:  # fmt: skip
    """Speed-up (logarithmic) against bandwidth; a point's x is the number of its link, an unlimited one stands apart.

    links: (name, bits per second or None for unlimited), slowest first.
    """
    (low, high), cut = _ratio_range(series)
    axes = _axes(title, series, "bandwidth of each worker's link", y, [*notes, *[_CUT] * cut])
    limited = [bits for _, bits in links if bits is not None]
    crossings = [bits for one in even.values() for bits in (one.measured, one.formula) if bits]
    slow, fast = _link_range(limited, crossings)
    apart = fast * (fast / slow) ** 0.25 if limited else fast  # where unlimited stands
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xlim(slow, apart * (apart / slow) ** 0.08 if limited else apart * 2)
    axes.set_ylim(low, high)
    places = [apart if bits is None else bits for _, bits in links]
    axes.set_xticks(places, [name for name, _ in links])
    subs = (1, 1.5, 2, 3, 5, 7) if high / low < 12 else (1, 2, 5)
    locator = MaxNLocator(5, steps=_STEPS) if high / low < 2.5 else LogLocator(subs=subs)
    ticks = [tick for tick in locator.tick_values(low, high) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.axhline(1, color=_palette()["ink"], linewidth=1.2, linestyle=(0, (3, 2.5)))
    for number, one in enumerate(series):
        # intervals of different arms beside each other, not over each other
        shift = ScaledTranslation((number - (len(series) - 1) / 2) * 5 / 72, 0, _figure(axes).dpi_scale_trans)
        measured = [(places[round(point.x)], point.y) for point in one.points if round(point.x) < len(limited)]
        lines = [one.line(measured)] if len(measured) > 1 else []
        for point in one.points:
            x, hint = places[round(point.x)], f"{one.name}: {point.y:.3g}x"
            if point.low is not None and point.high is not None:
                hint += f" [{point.low:.3g}, {point.high:.3g}]"
                lines.append(one.line([(x, point.low), (x, point.high)], hint=hint))
            lines.append(one.line([(x, point.y)], marked=True, hint=hint))
        for line in lines:
            axes.add_line(line)
            line.set_transform(axes.transData + shift)
        found = even.get(one.name)
        rings = [] if found is None else [(found.measured, "measured", "-"), (found.formula, "by formula", ":")]
        for bits, words, dash in rings:
            if bits is not None and slow <= bits <= axes.get_xlim()[1]:
                ring = axes.scatter(
                    [bits], [1], s=13**2, facecolors="none", edgecolors=one.color, linewidths=1.8, linestyles=dash
                )
                ring.set_gid(f"{_HINT}{one.name}: break-even {words} at {bits_text(bits)}")
    return _figure(axes)


def draw_bars(
    title: str, groups: Sequence[ArmBars], colors: Mapping[str, str], text: Callable[[float], str], notes: Sequence[str]
) -> Figure:
    """Stacked bars, arm below arm, on one scale from 0; `colors` are the parts in their order and their colours."""
    every = [bar for group in groups for bar in group.bars]
    seen = [part for part in colors if any(bar.parts.get(part, 0) > 0 for bar in every)]
    signs = [Patch(facecolor=_palette()[colors[part]]) for part in seen]
    height = sum(24 + _BAR * len(group.bars) for group in groups)
    figure, place = _frame(title, signs, seen, height, notes)
    axes = figure.add_axes(place)
    axes.set_axis_off()
    longest = max(sum(bar.parts.values()) for bar in every) or 1.0
    # a tail much longer than every bar would press them all into a corner
    high = min(max([longest, *(bar.p99 or 0 for bar in every)]), 2 * longest)
    left = max(8 * bool(bar.name) + _CHARACTER * len(bar.name) for bar in every)
    pixel = high / (WIDTH - 8 - left)
    axes.set_xlim(-left * pixel, (WIDTH - left) * pixel)
    axes.set_ylim(height, 0)
    top = 0.0
    for group in groups:
        axes.text(-left * pixel, top + 13, group.name, weight="bold")
        axes.text((WIDTH - left) * pixel, top + 13, group.total, ha="right", color=_palette()["soft"])
        top += 18
        for bar in group.bars:
            middle, begin = top + 7, 0.0
            axes.text(-left * pixel, middle, bar.name, va="center", color=_palette()["soft"])
            for part in seen:
                value = bar.parts.get(part, 0.0)
                color, edge = _palette()[colors[part]], _palette()["paper"]
                (drawn,) = axes.barh(middle, value, height=14, left=begin, color=color, edgecolor=edge, linewidth=0.8)
                drawn.set_gid(f"{_HINT}{group.name}{', ' * bool(bar.name)}{bar.name}: {part} {text(value)}")
                begin += value
            if bar.p99 is not None and bar.p99 > begin:
                end, sign = (bar.p99, "|") if bar.p99 <= high else (high, ">")  # an arrow: it goes on
                ink = _palette()["ink"]
                (line,) = axes.plot([begin, end], [middle] * 2, color=ink, linewidth=1.3)
                line.set(marker=sign, markevery=[1], markeredgecolor=ink)
                line.set_gid(f"{_HINT}{group.name}: p99 of the whole {text(bar.p99)}")
            top += _BAR
        top += 6
    return figure


def _figure(axes: Axes) -> Figure:
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def _y_range(series: Sequence[Series], zone: float | None) -> tuple[tuple[float, float], bool]:
    """The range that is drawn: of the last three quarters, for a model's first values would press the rest flat."""
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
        ChartPoint(0, math.log(point.y), point.low and math.log(point.low), point.high and math.log(point.high))
        for point in points
    ]
    (low, high), cut = _with_bounds(low, high, logs, max(high - low, math.log(1.5)))
    return (math.exp(low), math.exp(high)), cut


def _with_bounds(
    low: float, high: float, points: Sequence[ChartPoint], reach: float
) -> tuple[tuple[float, float], bool]:
    """A range of means with room for their intervals, up to `reach` on each side; whether some go beyond.

    Two seeds give intervals many times as wide as all means lie apart: nothing else could be seen.
    """
    lowest = min([low, *(point.low for point in points if point.low is not None)])
    highest = max([high, *(point.high for point in points if point.high is not None)])
    cut = lowest < low - reach or highest > high + reach
    low, high = max(lowest, low - reach), min(highest, high + reach)
    air = 0.06 * (high - low) or max(0.05 * abs(low), 1e-6)
    return (low - air, high + air), cut


def _link_range(limited: Sequence[float], crossings: Sequence[float]) -> tuple[float, float]:
    if not limited:
        return 1.0, 2.0
    slow, fast = min(limited), max(limited)
    near = [bits for bits in crossings if slow / 30 <= bits <= fast * 30]  # what is further off is told in words
    return min([slow, *near]) * 0.7, max([fast, *near]) * 1.3
