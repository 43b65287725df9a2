"""Tables on a terminal, of columns without lines between them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table


def table_of(words: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """A table without rows, of columns of words and then of numbers."""
    view = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in words:
        view.add_column(name, no_wrap=True)
    for name in numbers:
        view.add_column(name, justify="right", no_wrap=True)
    return view
