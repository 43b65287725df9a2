"""Print the result of a comparison in a terminal: the first paragraph, and a line per arm."""

from __future__ import annotations

import re
from typing import Literal

from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from embershard.compare.report.summary import summary, warnings
from embershard.compare.report.tables import short_table
from embershard.compare.results import Results

_TONES = {"paid": "green", "did not pay": "red", "undecided": "yellow"}
_ARM_WIDTH = 12  # of an arm's name at least
_NARROW = 100  # columns; below it some figures are left to the report
_LEFT_OUT = ("bytes per step", "quality", "pays on")


def print_summary(results: Results, console: Console) -> None:
    """Print the beginning of report.html without the intervals."""
    console.print(_summary_and_table(results, console.width))


def _summary_and_table(results: Results, columns: int) -> Group:
    found = short_table(results)
    places = [i for i, column in enumerate(found.columns) if not (columns < _NARROW and column in _LEFT_OUT)]
    rows = [[re.sub(r" \[.*\]$", "", row[place]) for place in places] for row in found.rows]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    names = [found.columns[place].replace("speed-up,", "speed,") for place in places]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    if sum(widths) + len(widths) > columns:  # names are folded, of arms too, so that no figure is cut off
        widths = [max(map(len, [*name.split(), *cells])) for name, *cells in zip(names, *rows, strict=True)]
        widths[0] = max(_ARM_WIDTH, min(widths[0], columns - sum(widths[1:]) - len(widths)))
    for place, name, width in zip(places, names, widths, strict=True):
        side: Literal["right", "left"] = "right" if found.is_number(place) else "left"
        table.add_column(escape(name), justify=side, min_width=width, max_width=width, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_TONES.get(cell, "")) for cell in row))
    said = [_text(words, "yellow") for words in warnings(results)]
    return Group(_text(" ".join(summary(results))), *said, Padding(table, (1, 0, 0, 0)))


def _text(words: str, style: str = "") -> Text:
    """Turn words into rich text; names in backticks become bold."""
    text = Text(style=style)
    for place, piece in enumerate(re.split("`([^`]+)`", words)):
        text.append(piece, style="bold" if place % 2 else "")
    return text
