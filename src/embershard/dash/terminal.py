"""The panel in the terminal: the samples of the page, as tables."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, RichLog, Static

from embershard.dash.events import Event, Severity
from embershard.dash.sampler import PanelSample, Sampler
from embershard.dash.shards import ShardRow
from embershard.dash.workers import WorkerRow
from embershard.doctor.check import size

_GOOD = ("serving", "trains", "paused")
_COLORS = {Severity.INFO: "", Severity.WARNING: "yellow", Severity.ERROR: "red"}
_TABLES = 20  # of an open shard; more would leave no room for anything else
_BAR = 24  # characters of a step
_PARTS = {
    "compute": "dark_orange",
    "pull": "blue",
    "push": "magenta",
    "shards": "cyan",
    "workers": "red",
    "data": "green",
    "other": "grey50",
}

Column = tuple[str, Callable[[ShardRow], str], Callable[[ShardRow], float]]
# heading, text, and what sorting goes by
_SHARDS: tuple[Column, ...] = (
    ("shard", lambda row: row.address if row.shard is None else str(row.shard), lambda row: row.shard or 0),
    ("health", lambda row: _health(row), lambda row: row.health in _GOOD),
    ("rows", lambda row: f"{row.rows:,}", lambda row: -row.rows),
    ("used", lambda row: size(row.used_bytes), lambda row: -row.used_bytes),
    ("of", lambda row: size(row.budget_bytes), lambda row: -row.budget_bytes),
    ("busy", lambda row: _known(row.busy, lambda value: f"{value:.0%}"), lambda row: -(row.busy or 0)),
    ("queue", lambda row: "-" if row.stale else size(row.queued_bytes), lambda row: -row.queued_bytes),
    ("in MB/s", lambda row: _known(row.received, lambda value: f"{value / 1e6:.1f}"), lambda row: -(row.received or 0)),
    ("out MB/s", lambda row: _known(row.sent, lambda value: f"{value / 1e6:.1f}"), lambda row: -(row.sent or 0)),
    ("pull p99", lambda row: _known(row.pull_p99, _ms), lambda row: -(row.pull_p99 or 0)),
    ("push p99", lambda row: _known(row.push_p99, _ms), lambda row: -(row.push_p99 or 0)),
    ("log lag", lambda row: _lag(row), lambda row: -row.log_waiting_bytes),
)


class TopApp(App[None]):
    """Shows the samples of a sampler, which it starts and ends."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { height: auto; padding: 0 1; }
    #facts { text-style: bold; }
    DataTable { height: auto; max-height: 45%; margin-top: 1; }
    RichLog { height: 1fr; min-height: 3; margin-top: 1; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),  # it ends every other command
        Binding("s", "sort", "sort shards by the next column"),
        Binding("enter", "open", "open a shard", priority=True),
        Binding("p", "pause", "pause"),
    ]

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler
        self._sorted = 0
        self._paused = False
        self._open: str | None = None  # address of the shard whose tables are shown
        self.sample: PanelSample | None = None

    def compose(self) -> ComposeResult:
        """The parts of the screen."""
        yield Static(id="facts")
        yield DataTable(id="shards", cursor_type="row")
        yield Static(id="detail")
        yield DataTable(id="workers", cursor_type="none")
        yield RichLog(id="events", wrap=True, max_lines=200)
        yield Footer()

    def on_mount(self) -> None:
        """Draw the tables' headings, and sample the shards from now on."""
        self.query_one("#shards", DataTable).add_columns(*(heading for heading, _, _ in _SHARDS))
        headings = ("worker", "state", "clock", "lease", "samples/s", "step", "where a step goes")
        self.query_one("#workers", DataTable).add_columns(*headings)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):  # which would leave the terminal as no shell wants it
            loop.add_signal_handler(number, partial(self.exit, return_code=128 + number))
        self._sampler.start(lambda sample: self.call_from_thread(self.show, sample))

    async def on_unmount(self) -> None:
        """End the sampler while this loop runs: its thread may wait for `show`, and shows nothing after the loop."""
        await asyncio.to_thread(self._sampler.close)

    def show(self, sample: PanelSample) -> None:
        """Redraw the screen with a sample, and add its events to the list."""
        log = self.query_one("#events", RichLog)
        for event in sample.events:
            log.write(_line(event))
        if self._paused:
            return
        self.sample = sample
        self.query_one("#facts", Static).update(facts(sample))
        table = self.query_one("#shards", DataTable)
        at = table.cursor_row
        table.clear()
        for row in self.shards:
            style = "grey50" if row.stale else ""
            cells = [
                Text(text(row), style, justify="right" if k > 1 else "left") for k, (_, text, _) in enumerate(_SHARDS)
            ]
            if row.health not in _GOOD:
                cells[1].stylize("red")
            table.add_row(*cells, key=row.address)
        table.move_cursor(row=at)
        workers = self.query_one("#workers", DataTable)
        workers.clear()
        for worker in sample.workers:
            workers.add_row(*worker_cells(worker))
        self._show_detail()

    @property
    def shards(self) -> Sequence[ShardRow]:
        """The shards as they are sorted."""
        return [] if self.sample is None else sorted(self.sample.shards, key=_SHARDS[self._sorted][2])

    @property
    def sort_column(self) -> str:
        """The heading that the shards are sorted by."""
        return _SHARDS[self._sorted][0]

    def action_sort(self) -> None:
        """Sort the shards by the next column."""
        self._sorted = (self._sorted + 1) % len(_SHARDS)
        self.notify(f"shards by {self.sort_column}", timeout=2)
        if self.sample is not None:
            self.show(replace(self.sample, events=()))

    def action_pause(self) -> None:
        """Stand still, or go on."""
        self._paused = not self._paused

    def action_open(self) -> None:
        """Show the tables of the shard under the cursor, or hide them."""
        at = self.query_one("#shards", DataTable).cursor_row
        address = self.shards[at].address if at < len(self.shards) else None
        self._open = None if address == self._open else address
        self._show_detail()

    def _show_detail(self) -> None:
        row = next((row for row in self.shards if row.address == self._open), None)
        text = Text()
        if row is not None:
            text.append(f"{row.address}, up {row.uptime:.0f} s {row.problem}\n", "bold")
            tables = self._sampler.tables(row.address)
            for table in tables[:_TABLES]:
                text.append(f"  {table.name}: {table.rows:,} rows of dim {table.dim}, {size(table.bytes)}, ")
                text.append(f"{table.optimizer}, push {table.push_codec}, pull {table.pull_codec}\n")
            if len(tables) > _TABLES:
                text.append(f"  and {len(tables) - _TABLES:,} more, which `embershard status` prints\n")
        self.query_one("#detail", Static).update(text)


def facts(sample: PanelSample) -> Text:
    """The first line: what the run has reached, and how fast."""
    serving = sum(row.health == "serving" for row in sample.shards)
    parts = [f"{serving} of {len(sample.shards)} shards"] if sample.shards else []  # else a run alone is shown
    parts += [f"{len(sample.workers)} workers"]
    run = sample.run
    if run is not None:
        figure = run.best if run.ended else run.figure
        reachable = "" if run.reachable is None else f" (best reachable {run.reachable:.4f})"
        parts = [run.name, *parts]
        parts += [] if figure is None else [f"{run.metric.upper()} {figure:.4f}{reachable}"]
        parts += [] if run.loss is None else [f"loss {run.loss:.4f}"]
        parts += [] if run.samples_per_second is None else [f"{run.samples_per_second:,.0f} samples/s"]
        parts += [f"{run.samples / run.total_samples:.0%}"] if run.total_samples else [f"{run.samples:,} samples"]
        parts += ["ended well"] if run.ended else []
    return Text("   ".join(parts))


def worker_cells(row: WorkerRow) -> list[Text]:
    """Return the cells of a worker's line: number, state and whom it waits for, figures, and the parts of a step."""
    state = Text(row.state, "green" if row.state in _GOOD else "yellow")
    if row.waits_for:
        state.append(f" for worker {', '.join(map(str, row.waits_for))}")
    if row.waits_for_shards:
        state.append(f" for shard {', '.join(map(str, row.waits_for_shards))}")
    if row.seconds:
        state.append(f", {row.seconds:.0f} s")
    bar = Text()
    for name, color in _PARTS.items():
        bar.append("█" * round(_BAR * row.parts.get(name, 0.0) / (row.step_ms or 1.0)), color)
    numbers = (
        _known(row.clock, lambda value: f"{value:,.0f}"),
        _known(row.lease, lambda value: f"{value:.1f} s"),
        _known(row.samples_per_second, lambda value: f"{value:,.0f}"),
        _known(row.step_ms, _ms),
    )
    return [Text(str(row.worker)), state, *(Text(number, justify="right") for number in numbers), bar]


def _line(event: Event) -> Text:
    return Text(f"{datetime.fromtimestamp(event.time):%H:%M:%S}  {event.text}", _COLORS[event.severity])


def _health(row: ShardRow) -> str:
    silent = row.health in ("down", "no access") and row.age is not None
    return f"{row.health}, {row.age:.0f} s ago" if silent else row.health


def _lag(row: ShardRow) -> str:
    return "no log" if row.durability == "memory" else size(row.log_waiting_bytes)


def _known(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def _ms(value: float) -> str:
    return f"{value:.1f} ms"
