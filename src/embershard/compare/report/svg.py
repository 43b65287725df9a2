"""The frame of a picture as SVG: scales, ticks, axes, legend.

Colours are classes of templates/picture.css, so that one picture serves light and dark and paper; text stays text. The
same input gives the same bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

WIDTH = 440  # of every picture, in its own units: it is shown at 340 to 500 pixels
_CHARACTER = 6.4  # mean width of a character at the text's size
_LINE = 17  # height of a line of text
_MARGIN = 14  # around a picture that stands alone
STYLES = 8  # colours, markers; a dash for every further round of them

_MARKERS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0Z",
    "M-3.2 -3.2H3.2V3.2H-3.2Z",
    "M0 -4.2L4 3.2H-4Z",
    "M0 -4.6L4.2 0L0 4.6L-4.2 0Z",
    "M0 4.2L4 -3.2H-4Z",
    "M-4 -1.4H-1.4V-4H1.4V-1.4H4V1.4H1.4V4H-1.4V1.4H-4Z",
    "M-4 -2.2L-2.2 -4L0 -1.8L2.2 -4L4 -2.2L1.8 0L4 2.2L2.2 4L0 1.8L-2.2 4L-4 2.2L-1.8 0Z",
    "M0 -4.4L4.2 -1.4L2.6 3.6H-2.6L-4.2 -1.4Z",
)
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values from `low` to `high` become places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value; beyond the ends too."""
        low, high, here = self.low, self.high, value
        if self.log:
            low, high, here = math.log(low), math.log(high), math.log(value)
        return self.start + (here - low) / (high - low) * (self.end - self.start)


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) within [low, high]."""
    step = _round_step((high - low) / about)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def ratio_ticks(low: float, high: float) -> list[float]:
    """Round values for a logarithmic axis."""
    if high / low < 2.5:
        return linear_ticks(low, high)
    steps = (1, 1.5, 2, 3, 5, 7) if high / low < 12 else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(-9, 10) for step in steps]
    return [tick for tick in ticks if low <= tick <= high]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Ticks with as many digits as tell them apart."""
    if len(ticks) < 2:
        return [f"{tick:.4g}" for tick in ticks]
    step = min(after - before for before, after in itertools.pairwise(ticks))
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick + 0.0:,.{digits}f}" for tick in ticks]


def padded(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """The same range with some air at both ends; never empty."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-6):
        air = max(abs(low) * 0.05, 1e-6)
        return low - air, high + air
    air = (high - low) * share
    return low - air, high + air


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(nice * power for nice in (1, 2, 5, 10) if step <= nice * power * (1 + 1e-9))


class Picture:
    """An SVG that grows downward: title, legend, then what its maker draws."""

    def __init__(self, name: str, title: str, description: str) -> None:
        self.name = name  # a file's name and an element's id
        self.title = title
        self.description = description
        self.top = 4.0  # the first free place from above
        self._root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "picture", "role": "img"})
        self._root.set("aria-labelledby", f"{name}-title {name}-description")
        SubElement(self._root, "title", {"id": f"{name}-title"}).text = title
        SubElement(self._root, "desc", {"id": f"{name}-description"}).text = description
        self.text(0, self.top + 12, title, "name")
        self.top += _LINE + 5

    def svg(self, style: str = "") -> str:
        """Its text; with a style sheet, a ground and a margin of its own where it is to stand alone."""
        margin = _MARGIN if style else 0
        width, height = WIDTH + 2 * margin, _number(self.top + 2 * margin)
        self._root.set("viewBox", f"{-margin} {-margin} {width} {height}")
        self._root.set("width", str(width))
        self._root.set("height", height)
        if not style:
            return tostring(self._root, encoding="unicode")
        alone = Element("svg", self._root.attrib)
        SubElement(alone, "style").text = style
        ground = {"class": "paper", "x": str(-margin), "y": str(-margin), "width": "100%", "height": "100%"}
        SubElement(alone, "rect", ground)
        alone.extend(self._root)
        return tostring(alone, encoding="unicode") + "\n"

    def shape(self, tag: str, classes: str, hint: str = "", **attributes: str | float) -> None:
        """Any element; `hint` is shown where the mouse rests on it."""
        values = {name.replace("_", "-"): _attribute(value) for name, value in attributes.items()}
        element = SubElement(self._root, tag, {"class": classes, **values})
        if hint:
            SubElement(element, "title").text = hint

    def line(self, classes: str, x1: float, y1: float, x2: float, y2: float, hint: str = "") -> None:
        """A straight line."""
        self.shape("line", classes, hint, x1=x1, y1=y1, x2=x2, y2=y2)

    def text(self, x: float, y: float, words: str, classes: str = "", anchor: str = "start") -> None:
        """Words that begin, end or are centred at a place; `y` is their base line."""
        attributes = {"x": _number(x), "y": _number(y), "text-anchor": anchor}
        SubElement(self._root, "text", {"class": classes, **attributes} if classes else attributes).text = words

    def polyline(self, points: Sequence[tuple[float, float]], style: int, clip: str = "") -> None:
        """A series' line."""
        path = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
        clipped = {"clip_path": f"url(#{clip})"} if clip else {}
        self.shape("path", f"line s{style % STYLES}", d=path, stroke_dasharray=dash(style), **clipped)

    def band(
        self, upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], style: int, clip: str
    ) -> None:
        """The area between a series' bounds."""
        path = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in [*upper, *reversed(lower)]) + "Z"
        self.shape("path", f"band s{style % STYLES}", d=path, clip_path=f"url(#{clip})")

    def marker(self, x: float, y: float, style: int, hint: str = "", classes: str = "mark") -> None:
        """A series' own sign at a place."""
        place = f"translate({_number(x)} {_number(y)})"
        self.shape("path", f"{classes} s{style % STYLES}", hint, d=_MARKERS[style % STYLES], transform=place)

    def clip(self, x: float, y: float, width: float, height: float) -> str:
        """The id of an area that curves do not leave."""
        name = f"{self.name}-area"
        area = SubElement(self._root, "clipPath", {"id": name})
        values = {"x": x, "y": y, "width": width, "height": height}
        SubElement(area, "rect", {key: _number(value) for key, value in values.items()})
        return name

    def legend(self, entries: Sequence[str], draw: Callable[[int, float, float], None]) -> None:
        """Names in as many lines as they need; `draw` puts the sign of entry i at (x, middle of its line), 20 wide."""
        x = 0.0
        for place, words in enumerate(entries):
            width = 26 + _CHARACTER * len(words) + 14
            if x and x + width - 14 > WIDTH:
                x = 0.0
                self.top += _LINE
            draw(place, x, self.top + _LINE / 2)
            self.text(x + 26, self.top + 12.5, words)
            x += width
        self.top += _LINE + 6

    def series_legend(self, entries: Sequence[tuple[str, int]]) -> None:
        """A legend of lines with markers: (name, style)."""

        def draw(place: int, x: float, y: float) -> None:
            style = entries[place][1]
            self.polyline([(x, y), (x + 20, y)], style)
            self.marker(x + 10, y, style)

        self.legend([name for name, _ in entries], draw)

    def wrapped(self, words: str, classes: str = "note") -> None:
        """A sentence below everything, in lines."""
        line = ""
        for word in words.split():
            if line and len(line) + 1 + len(word) > WIDTH / (_CHARACTER * 0.93):
                self._note(line, classes)
                line = ""
            line = f"{line} {word}".strip()
        self._note(line, classes)

    def _note(self, line: str, classes: str) -> None:
        self.text(0, self.top + 11, line, classes)
        self.top += _LINE - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """The area of a picture that has two axes."""

    picture: Picture
    x: Scale
    y: Scale
    clip: str


def plot(
    picture: Picture,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    y_ticks: Sequence[tuple[float, str]],
    labels: tuple[str, str],
    *,
    height: float = 210,
    log: tuple[bool, bool] = (False, False),
) -> Plot:
    """Room for curves: a grid at the y ticks, the labels of both axes; the x ticks are drawn by `x_ticks`."""
    left = 10 + _CHARACTER * max((len(words) for _, words in y_ticks), default=1)
    picture.text(0, picture.top + 11, labels[1], "label")
    top = picture.top + _LINE + 4
    bottom = top + height
    x = Scale(low=x_range[0], high=x_range[1], start=left, end=WIDTH - 14, log=log[0])
    y = Scale(low=y_range[0], high=y_range[1], start=bottom, end=top, log=log[1])
    for value, words in y_ticks:
        picture.line("grid", left, y(value), WIDTH - 2, y(value))
        picture.text(left - 6, y(value) + 4, words, "tick", "end")
    picture.line("axis", left, bottom, WIDTH - 2, bottom)
    picture.text((left + WIDTH - 2) / 2, bottom + 2 * _LINE + 2, labels[0], "label", "middle")
    picture.top = bottom + 2 * _LINE + 10
    clip = picture.clip(left, top, WIDTH - 2 - left, height)
    return Plot(picture=picture, x=x, y=y, clip=clip)


def x_ticks(area: Plot, ticks: Sequence[tuple[float, str]]) -> None:
    """Ticks below a plot's area: (value, words)."""
    bottom = area.y.start
    for value, words in ticks:
        place = area.x(value)
        area.picture.line("axis", place, bottom, place, bottom + 4)
        half = _CHARACTER * len(words) / 2
        area.picture.text(min(max(place, half), WIDTH - half), bottom + _LINE, words, "tick", "middle")


def dash(style: int) -> str:
    """The dashes of a style; none in the first round of colours."""
    return _DASHES[style // STYLES % len(_DASHES)] or "none"


def text_width(words: str) -> float:
    """Estimated, in a picture's units."""
    return _CHARACTER * len(words)


def _attribute(value: str | float) -> str:
    return value if isinstance(value, str) else _number(value)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
