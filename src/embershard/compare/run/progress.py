"""Show the progress of a comparison: a bar with the time left on a terminal, a line per run elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from embershard.compare.results import ArmRun
from embershard.compare.run.plan import Task
from embershard.compare.run.run_log import RunProgress


def time_left(tasks: Sequence[Task], runs: Mapping[str, ArmRun]) -> float | None:
    """Estimate the seconds that the tasks will take by similar runs; None before there is one."""
    seconds: dict[tuple[str, ...], list[float]] = {}
    for run in (run for run in runs.values() if run.ok):
        for like in _likenesses(run):
            seconds.setdefault(like, []).append(run.total_seconds)
    left = 0.0
    for task in tasks:
        alike = [like for like in _likenesses(task) if like in seconds]
        if not alike:
            return None
        left += statistics.fmean(seconds[alike[0]])
    return left


def _likenesses(one: Task | ArmRun) -> Sequence[tuple[str, ...]]:
    """The kinds of run that take as long, the closest first; a tuning run is as long as a judged one."""
    kind = "speed" if one.kind == "speed" else "whole"
    return ((kind, one.bandwidth, one.arm), (kind, one.bandwidth), (kind,), ())


class Show:
    """Prints which run is made, how far it is and how much time is left."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._bar: Progress | None = None
        self._row = TaskID(0)
        self._tasks: Sequence[Task] = ()  # that are left, the present one first
        self._runs: Mapping[str, ArmRun] = {}
        self._done = 0

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def begin(self, tasks: Sequence[Task], runs: Mapping[str, ArmRun], done: int) -> None:
        """Show that the first of the tasks begins, after `done` others."""
        self._tasks, self._runs, self._done = tasks, runs, done
        if self._console.is_terminal and self._bar is None:
            self._bar = Progress(
                BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn(), console=self._console,
                transient=True,
            )  # fmt: skip
            self._row = self._bar.add_task("", total=None)
            self._bar.start()
        self.look(RunProgress(0.0, "starting"))

    def look(self, progress: RunProgress) -> None:
        """Show how far the run is; only on a terminal."""
        if self._bar is None:
            return
        share, all_tasks = progress.share or 0.0, self._done + len(self._tasks)
        left = time_left(self._tasks[1:], self._runs)
        this = time_left(self._tasks[:1], self._runs)
        words = f"{self._done + 1} of {all_tasks}: {name_of(self._tasks[0])}: {progress.text}"
        if left is not None and this is not None:
            words += f"; {duration(left + this * (1 - share))} left"
        self._bar.update(self._row, completed=self._done + share, total=all_tasks, description=words)

    def end(self, run: ArmRun) -> None:
        """Print the result of a run that is over."""
        self._done += 1
        tasks, task = self._tasks[1:], self._tasks[0]
        words = [f"{self._done} of {self._done + len(tasks)}: {name_of(task)}: {_outcome(run)}"]
        left = time_left(tasks, self._runs)
        if tasks and left is not None:
            words.append(f"about {duration(left)} left")
        self.say("; ".join(words))

    def close(self) -> None:
        """Remove the progress bar, if there is one."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def name_of(task: Task | ArmRun) -> str:
    """Name a run for people."""
    rate = "" if task.multiple == 1 else f", rate x {task.multiple:g}"
    return f"{task.arm}, seed {task.seed}, {task.bandwidth}{rate}{' (tuning)' * (task.kind == 'tune')}"


def duration(seconds: float) -> str:
    """Write seconds as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


def _outcome(run: ArmRun) -> str:
    if not run.ok:
        return f"FAILED twice: {run.error.splitlines()[-1].strip() if run.error else ''}"
    words = [f"{name} {value:.4f}" for name, value in list(run.metrics.items())[:1] if value is not None]
    words = words if run.kind != "speed" else []
    words += [f"{run.samples_per_second:,.0f} samples/s"] if run.samples_per_second else []
    return ", ".join([*words, f"{run.total_seconds:.0f} s"])
