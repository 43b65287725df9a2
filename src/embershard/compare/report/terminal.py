"""Print the result of a comparison in a terminal: the first paragraph, and a line per arm."""

from __future__ import annotations

import re

from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from embershard.compare.report.summary import summary, warnings
from embershard.compare.report.tables import short_table
from embershard.compare.results import Results

_TONES = {"paid": "green", "did not pay": "red", "undecided": "yellow"}
_NARROW = 100  # columns; below it some figures are left to the report
_LEFT_OUT = ("bytes per step", "quality", "pays on")


def print_summary(results: Results, console: Console) -> None:
    """Print the beginning of report.html without the intervals."""
    console.print(_summary_and_table(results, narrow=console.width < _NARROW))


def _summary_and_table(results: Results, narrow: bool) -> Group:
    found = short_table(results)
    places = [i for i, column in enumerate(found.columns) if not (narrow and column in _LEFT_OUT)]
    rows = [[re.sub(r" \[.*\]$", "", row[place]) for place in places] for row in found.rows]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, place in enumerate(places):
        name = found.columns[place].replace("speed-up,", "speed,")
        width = max(map(len, [*name.split(), *(row[number] for row in rows)]))
        table.add_column(escape(name), justify="right" if found.is_number(place) else "left", min_width=width)
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
