"""How a run goes, for people: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from embershard.proto.errors import OutputClosed
from embershard.worker.reporting.records import (
    BestWeights,
    Evaluation,
    Figures,
    Interval,
    RunMode,
    RunPlan,
    RunResult,
)

LINE_SECONDS = 10.0  # between two plain lines


class _Console(Console):
    """Stdout; where nobody reads it any more, the run ends with an error that says so."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()  # what is written on the way out goes nowhere
        except SystemExit:
            raise OutputClosed from None


class Terminal:
    """Shows a run on a console."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or _Console(highlight=False)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._figures = ""
        self._split: str | None = None
        self._next_line = 0.0

    def started(self, plan: RunPlan) -> None:
        """Print the plan and start the progress bar."""
        self._split = plan.split
        if plan.reporter is None:
            self._print(
                f"{plan.name}: {plan.workers} worker{'s' * (plan.workers > 1)} on {plan.device}, "
                f"{plan.shards or 'no'} shard{'s' * (plan.shards != 1)}, {plan.dense_parameters:,} dense parameters"
                + ("" if plan.mode is None else f"; {_mode(plan.mode)}")
                + ("" if plan.split is None else f"; the model is chosen by {plan.metric} on {plan.split}")
            )
        else:
            self._print(f"worker {plan.reporter} reports from here on")
        if plan.resumed_step is not None:
            self._print(f"resumed at step {plan.resumed_step:,}")
        for warning in plan.warnings:
            self._print(f"warning: {warning}")
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=plan.total_samples)
        self._bar.start()

    def trained(self, interval: Interval) -> None:
        """Move the bar, or say a line now and then."""
        text = (
            f"epoch {interval.epoch}  {interval.samples_per_second:,.0f} samples/s  loss {interval.loss:.4f}"
            f"{self._figures}  waiting {interval.wait_share:.0%}{_parts(interval)}"
        )
        if interval.cached_share is not None:
            text += f"  cached {interval.cached_share:.0%}"
        if self._bar is not None:
            self._bar.update(self._task, completed=interval.samples, description=text)
        elif interval.seconds >= self._next_line:
            self._next_line = interval.seconds + LINE_SECONDS
            self._print(f"{_clock(interval.seconds)}  {text}")

    def evaluating(self) -> None:
        """Say so on the bar."""
        if self._bar is not None:
            self._bar.update(self._task, description="evaluating", refresh=True)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Print a line with the figures of an evaluation."""
        shown = evaluation.figures.get(self._split or "", {})
        self._figures = "".join(f"  {_label(name)} {value:.4f}" for name, value in list(shown.items())[:1])
        parts = [f"{split}: {_figures(figures)}" for split, figures in evaluation.figures.items()]
        best = "  (best)" if evaluation.improved else ""
        self._print(f"{_clock(evaluation.seconds)}  epoch {evaluation.epoch}  {'   '.join(parts)}{best}")
        for warning in evaluation.warnings:
            self._print(f"warning: {warning}")

    def finished(self, result: RunResult) -> None:
        """The table of what was reached."""
        self.close()
        self._console.print(result_table(result))
        for line in result.advice:
            self._print(line)
        if result.figures:
            self._print(f"best weights: {_best_weights(result.best_weights)}")

    def close(self) -> None:
        """Remove the progress bar, if there is one."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def result_table(result: RunResult) -> Table:
    """Return a table of the result: figures, times, and where the time went."""
    table = Table(title="result", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for split, figures in result.figures.items():
        for name, value in figures.items():
            table.add_row(f"{split} {_label(name)}", _number(name, value) + _of_best(name, split, result))
    for name, text in (*_how_trained(result.mode), *_how_chosen(result)):
        table.add_row(name, text)
    table.add_row("samples", f"{result.samples:,}")
    table.add_row("time", f"{_clock(result.seconds)} ({_clock(result.train_seconds)} training)")
    table.add_row("speed", f"{result.samples_per_second:,.0f} samples/s")
    table.add_row("waiting", f"{result.wait_share:.1%} of the training time{_parts(result)}")
    if any(result.staleness_seen[1:]):
        table.add_row("staleness", _missed(result.staleness_seen))
    if result.skipped_rows:
        table.add_row("skipped", f"{result.skipped_rows:,} gradient rows with NaN or Inf")
    if result.skipped_steps:
        table.add_row("left out", f"{result.skipped_steps:,} steps with NaN or Inf")
    if result.expired_leases:
        table.add_row("workers evicted", f"{result.expired_leases:,} time{'s' * (result.expired_leases > 1)}")
    if result.returned_splits:
        returned = f"{result.returned_splits:,} input split{'s' * (result.returned_splits > 1)}"
        table.add_row("assigned again", f"{returned}, because the worker was lost or has left")
    for name, rows in sorted(result.table_rows.items()):
        table.add_row(f"table {name}", f"{rows:,} row{'s' * (rows != 1)}")
    return table


def _best_weights(best: BestWeights) -> str:
    if best.checkpoint is None and best.not_kept:
        return f"not kept: {best.not_kept}"
    kept = "not kept" if best.checkpoint is None else best.checkpoint
    with suppress(ValueError):
        kept = str(Path(kept).relative_to(Path.cwd()))
    if best.current and best.checkpoint is None:
        return "those of the last step, not kept"
    if best.restored:
        return f"{kept}, restored at the end"
    return kept if best.current else f"{kept}; not restored: the run ended with those of the last step"


def _how_trained(mode: RunMode | None) -> Iterator[tuple[str, str]]:
    if mode is None:
        return
    processes = f"{mode.workers} worker{'s' * (mode.workers != 1)}"
    processes += f" x {mode.shards} shard{'s' * (mode.shards != 1)}" if mode.shards else ""
    yield "mode", f"{processes}, {_mode(replace(mode, codecs=''))}"
    if mode.codecs:
        yield "codecs", mode.codecs


def _how_chosen(result: RunResult) -> Iterator[tuple[str, str]]:
    """When the evaluation that is reported was made, and on which split it was chosen among others."""
    if not result.figures:
        return
    early = ", stopped early" if result.stopped_early else ""
    last = f"{result.epochs} (step {result.steps:,}){early}"
    yield "best at", f"epoch {result.best_epoch} (step {result.best_step:,}) of {last}"
    if result.evaluations > 1:
        yield "chosen", f"the best of {result.evaluations} evaluations by {result.metric} on {result.split}"
        if result.split == "test":
            yield "CHOSEN ON TEST", "these figures are optimistic; to choose elsewhere, give a valid split"


def _mode(mode: RunMode) -> str:
    """What is said of a mode, but for the number of its processes."""
    named = ("strategy", mode.strategy), ("staleness", mode.staleness), ("prefetch", mode.prefetch)
    return ", ".join([*(f"{name} {text}" for name, text in named if text), *filter(None, [mode.codecs])])


def _parts(waits: Interval | RunResult) -> str:
    """What was waited for, the longest first; what would round to nothing is left out."""
    parts = (("shards", waits.wait_shards), ("other workers", waits.wait_workers), ("data", waits.wait_data))
    shown = [f"{name} {share:.0%}" for name, share in sorted(parts, key=lambda part: -part[1]) if share >= 0.005]
    return f" ({', '.join(shown)})" if shown else ""


def _missed(seen: Sequence[int]) -> str:
    """seen[n] pushes had missed n updates, the last ones so many or more."""
    up_to = list(accumulate(seen))
    median, p99, largest = (bisect_left(up_to, share * up_to[-1]) for share in (0.5, 0.99, 1.0))
    or_more = " or more" if largest == len(seen) - 1 else ""
    return f"median {median}, p99 {p99}, at most {largest}{or_more} updates"


def _of_best(name: str, split: str, result: RunResult) -> str:
    best = result.reachable.get(split, {}).get(name)
    if name not in ("auc", "logloss") or best is None:
        return ""
    return f"  (best reachable {_number(name, best)})"


def _figures(figures: Figures) -> str:
    shown = [(name, value) for name, value in figures.items() if name not in _TABLE_ONLY]
    return "  ".join(f"{_label(name)} {_number(name, value)}" for name, value in shown)


_TABLE_ONLY = ("ne", "calibration", "samples", "users")  # a line has room for what is looked at first
_LABELS = {"auc": "AUC", "ne": "NE", "recall": "Recall"}


def _label(name: str) -> str:
    base, at, k = name.partition("@")
    upper: Callable[[str], str] = str.upper
    return (upper(base) if base in ("hr", "ndcg") else _LABELS.get(base, base)) + at + k


def _number(name: str, value: float) -> str:
    if name in ("samples", "users"):
        return f"{value:,.0f}"
    return "undefined" if math.isnan(value) else f"{value:.4f}"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
