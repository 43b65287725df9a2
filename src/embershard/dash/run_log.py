"""Follow the log of a run: log.jsonl and the records of its workers, while they are written and afterwards."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from embershard.dash.events import Event, Severity
from embershard.dash.track import Track
from embershard.proto.errors import EmbershardError
from embershard.worker.reporting.log import FILE_NAME
from embershard.worker.reporting.worker_record import worker_records

_MOST_BYTES = 8 * 2**20  # read at once, so that a long log does not hold up the sampler

Line = Mapping[str, object]


class NoRun(EmbershardError):
    """The panel was asked for a run that is not there."""

    template = "there is no run in {folder}: {reason}; name the folder that `embershard train` wrote, as in {example}"


@dataclass(slots=True)
class RunState:
    """Hold what the log says of its last run."""

    folder: str
    name: str = ""
    mode: str = ""
    codecs: str = ""
    metric: str = ""
    split: str | None = None
    began: float | None = None  # seconds since 1970
    last: float | None = None  # likewise, of the last line, by the clock of who wrote it
    age: float | None = None  # seconds since the last line
    samples: int = 0
    total_samples: int | None = None
    step: int = 0
    epoch: int = 0
    loss: float | None = None
    samples_per_second: float | None = None
    figure: float | None = None  # the metric at the last evaluation
    best: float | None = None  # of all evaluations
    reachable: float | None = None  # what no model can beat, where the data knows
    ended: bool = False
    notes: list[str] = field(default_factory=list)  # warnings and advice
    waits: dict[str, float] = field(default_factory=dict)  # shares of the first worker's time


class FollowedLog:
    """The log of the run in `folder`; `read` takes in what was written since. NoRun where there is none.

    With `wait` the log may come later: `embershard train` starts the panel before its workers.
    """

    def __init__(self, folder: Path, *, wait: bool = False) -> None:
        self.folder = folder
        self._file = folder / FILE_NAME
        if not wait:
            self._check()
        self._offset, self._inode = 0, 0
        self._all_read = False  # of what was there at the last read
        self._came: float | None = None  # time.monotonic() when a line came since then
        self._start()

    def _check(self) -> None:
        try:
            with self._file.open("rb"):
                return
        except FileNotFoundError:
            reason = f"it has no {FILE_NAME}" if self.folder.is_dir() else "the folder does not exist"
        except OSError as error:
            reason = f"{self._file} cannot be read ({error.strerror or error})"
        runs = sorted(Path("runs").glob(f"*/{FILE_NAME}"), key=lambda path: path.stat().st_mtime)
        raise NoRun(folder=str(self.folder), reason=reason, example=str(runs[-1].parent) if runs else "runs/JOB-TIME")

    def _start(self, restarts: int = 0) -> None:
        self.state = RunState(str(self.folder))
        self.training = Track(("loss", "samples_per_second"))
        self.evaluations = Track(("figure",), capacity=2048)
        self.restarts = restarts  # of the tracks: pages that hold the earlier ones ask for all

    def read(self) -> tuple[list[Event], dict[str, list[dict[str, float | None]]]]:
        """Take in new lines: what happened, and new points by track."""
        points: dict[str, list[dict[str, float | None]]] = {"training": [], "evaluations": []}
        all_read, lines = self._all_read, list(self._new_lines())
        if lines and all_read:
            self._came = time.monotonic()
        events = [event for line in lines for event in self._take(line, points)]
        self.state.age = self._age()
        return events, points

    def _age(self) -> float | None:
        if self.state.last is None:
            return None
        if self._came is not None:  # the clock of another machine may differ
            return time.monotonic() - self._came
        return max(0.0, time.time() - self.state.last)

    def workers(self) -> dict[int, Line]:
        """The records of this run's workers."""
        since = self.state.began or 0.0
        return {
            rank: record
            for rank, record in worker_records(self.folder).items()
            if (_number(record, "time") or 0.0) >= since - 1.0
        }

    def _new_lines(self) -> Iterator[Line]:
        try:
            with self._file.open("rb") as log:
                about = os.fstat(log.fileno())
                if about.st_ino != self._inode or about.st_size < self._offset:
                    self._start(self.restarts + bool(self._inode))
                    self._offset, self._inode = 0, about.st_ino
                log.seek(self._offset)
                data = log.read(_MOST_BYTES)
                self._all_read = len(data) < _MOST_BYTES
        except OSError:
            return  # the job may make it later, or its disk is away: the age of the last line tells
        whole = data.rpartition(b"\n")[0]
        if not whole and len(data) == _MOST_BYTES:
            whole = data  # no line of ours is so long: it is skipped below
        self._offset += len(whole) + bool(whole)
        for text in whole.split(b"\n"):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and isinstance(line.get("time"), int | float):
                yield line

    def _take(self, line: Line, points: dict[str, list[dict[str, float | None]]]) -> Iterator[Event]:
        time, state = float(str(line["time"])), self.state
        state.last = time
        match line.get("record"):
            case "config":
                yield from self._begin(line, time)
            case "takeover":
                yield Event(time, Severity.WARNING, f"worker {line.get('reporter')} reports from here on")
            case "train":
                state.samples, state.step = _whole(line, "samples"), _whole(line, "step")
                state.epoch = _whole(line, "epoch")
                state.loss, state.samples_per_second = _number(line, "loss"), _number(line, "samples_per_second")
                state.waits = {part: _number(line, f"wait_{part}") or 0.0 for part in ("shards", "workers", "data")}
                point = {"loss": state.loss, "samples_per_second": state.samples_per_second}
                self.training.add(time, point)
                points["training"].append({"time": time, **point})
            case "eval":
                yield from self._evaluated(line, time, points)
            case "recovery":
                lost, seconds = _whole(line, "lost_steps"), _number(line, "seconds") or 0.0
                text = f"the job was started again: {line.get('reason')}; about {lost} steps were lost"
                yield Event(time, Severity.WARNING, f"{text}, and {seconds:.1f} s passed")
            case "workers":
                change = f"{_whole(line, 'before')} -> {_whole(line, 'workers')}"
                yield Event(time, Severity.INFO, f"workers: {change}: {line.get('reason')}")
            case "result":
                yield from self._finished(line, time)

    def _begin(self, line: Line, time: float) -> Iterator[Event]:
        resumed = line.get("resumed_step")
        if resumed is None and self.training.points:
            self._start(self.restarts + 1)
        state = self.state
        mode = line.get("mode")
        if isinstance(mode, Mapping):
            state.mode, state.codecs = (
                f"{mode.get('strategy')}, staleness {mode.get('staleness')}",
                str(mode.get("codecs", "")),
            )
        state.name, state.metric = str(line.get("name", "")), str(line.get("metric", ""))
        state.split = None if line.get("split") is None else str(line["split"])
        state.total_samples = _whole(line, "total_samples") or None
        state.began, state.last, state.ended = state.began or time, time, False
        where = "" if resumed is None else f", from step {resumed}"
        yield Event(time, Severity.INFO, f"{state.name}: {line.get('workers')} workers begin to train{where}")
        yield from (Event(time, Severity.WARNING, text) for text in _texts(line, "warnings"))

    def _evaluated(self, line: Line, time: float, points: dict[str, list[dict[str, float | None]]]) -> Iterator[Event]:
        state = self.state
        figure = _figure(line, "figures", state)
        state.reachable = _figure(line, "reachable", state) or state.reachable
        state.figure = figure
        if line.get("improved") and figure is not None:
            state.best = figure
        self.evaluations.add(time, {"figure": figure})
        points["evaluations"].append({"time": time, "figure": figure})
        shown = "undefined" if figure is None else f"{figure:.4f}"
        best = ", the best so far" if line.get("improved") else ""
        yield Event(time, Severity.INFO, f"{state.metric.upper()} {shown} on {state.split}{best}")
        yield from (Event(time, Severity.WARNING, text) for text in _texts(line, "warnings"))

    def _finished(self, line: Line, time: float) -> Iterator[Event]:
        state = self.state
        state.ended = True
        state.samples, state.step = _whole(line, "samples"), _whole(line, "steps")
        state.best = _figure(line, "figures", state) or state.best
        state.reachable = _figure(line, "reachable", state) or state.reachable
        state.samples_per_second = _number(line, "samples_per_second")
        state.notes = [*_texts(line, "warnings"), *_texts(line, "advice")]
        seconds = _number(line, "seconds") or 0.0
        yield Event(time, Severity.INFO, f"the run ended well: {state.samples:,} samples in {seconds:,.0f} s")


def _figure(line: Line, name: str, state: RunState) -> float | None:
    splits = line.get(name)
    figures = splits.get(state.split) if isinstance(splits, Mapping) else None
    return _number(figures, state.metric) if isinstance(figures, Mapping) else None


def _number(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(line: Line, name: str) -> int:
    return int(_number(line, name) or 0)


def _texts(line: Line, name: str) -> list[str]:
    found = line.get(name)
    return [str(text) for text in found] if isinstance(found, list) else []
