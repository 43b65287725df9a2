"""Where the time of a training step goes: `with span("pull"):` around its parts, free while nobody looks.

The parts: `data` (making or receiving a batch), `route` (ids unique and grouped by shard), `encode` and `decode`
(messages, codecs included), `send`, `wait` (for shards, or for a batch with its rows), `shards` (while they encoded or
decoded what a codec made, which is not in `wait`), `receive`, `pull` (the rest of one), `forward`, `backward`, `gather`
(gradients of one row summed) and `push` (the rest of a step's push). Spans nest, and each counts its own time without
that of the spans inside it, so the parts of one thread add up.

A span stays in one thread and holds no await: what ran meanwhile on an event loop would count as inside it.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from embershard.proto.arrays import Doubles
from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.monitoring.tracing import SPAN_BYTES, Span

_FIRST_PAUSE = 0.02  # seconds; doubles with every try
_LONGEST_PAUSE = 1.0
KEPT_STEPS = 4096  # the last ones: 32 KiB per part

_NO_SPAN = nullcontext()  # while no Recorder is installed
_recorder: Recorder | None = None


def span(name: str) -> AbstractContextManager[None]:
    """Counts what happens inside as part `name` of a step, where a Recorder is installed."""
    recorder = _recorder
    return _NO_SPAN if recorder is None else _Span(recorder, name)


def charge_to(part: str, seconds: float) -> None:
    """Count so much of the innermost open span of this thread as another part, as far as it is its own time."""
    recorder = _recorder
    outer: _Span | None = None if recorder is None else getattr(recorder.local, "top", None)
    if outer is not None and seconds > 0:
        outer.charge_to(part, seconds)


def begin_step() -> None:
    """Training goes on; what came since the last step (an evaluation, say) does not count."""
    if _recorder is not None:
        _recorder.begin()


def end_step() -> None:
    """A training step is done, and the next one begins."""
    if _recorder is not None:
        _recorder.end()


def split_now() -> TimeSplit | None:
    """The split of the Recorder that is installed; None without one."""
    return None if _recorder is None else _recorder.split()


def recent_parts(steps: int) -> dict[str, float]:
    """Seconds of the last steps by their parts, on the training thread; empty where no Recorder is installed."""
    return {} if _recorder is None else _recorder.recent(steps)


class Deadline:
    """A moment that several waits share."""

    def __init__(self, timeout: timedelta, clock: SystemClock = SYSTEM_CLOCK) -> None:
        self.timeout = timeout
        self.clock = clock
        self._end = clock.now() + timeout.total_seconds()

    @property
    def seconds(self) -> float:
        """Seconds that are left; negative once it passed."""
        return self._end - self.clock.now()

    @property
    def remaining(self) -> timedelta:
        """Time that is left, at least zero."""
        return timedelta(seconds=max(0.0, self.seconds))


def pauses(clock: SystemClock) -> Iterator[float]:
    """Seconds to wait after each try: growing, and jittered so that workers do not come back together."""
    pause = _FIRST_PAUSE
    while True:
        yield pause * clock.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE)


def sleep(seconds: float, deadline: Deadline) -> bool:
    """Whether time is left after a pause."""
    deadline.clock.sleep(max(0.0, min(seconds, deadline.seconds)))
    return deadline.seconds > 0


@dataclass(frozen=True, slots=True)
class PartTimes:
    """One part of a step, over the steps that were kept."""

    p50_ms: float
    p99_ms: float
    mean_ms: float
    share: float  # of the time of all steps


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """A step and its parts: those of the training thread and `other` add up to it, `overlapped` ones ran beside it."""

    steps: int
    step: PartTimes
    parts: Mapping[str, PartTimes]
    overlapped: Mapping[str, PartTimes]  # of other threads

    def __str__(self) -> str:
        """A table."""
        lines = [f"{f'{self.steps} steps':<20}{'p50':>12}{'p99':>12}{'share':>8}", _line("step", self.step)]
        for title, parts in (("", self.parts), ("overlapped, in other threads:", self.overlapped)):
            lines += [title] if title and parts else []
            lines += [_line(f"  {name}", part) for name, part in parts.items()]
        return "\n".join(lines)


def _line(name: str, part: PartTimes) -> str:
    return f"{name:<20}{part.p50_ms:>9.3f} ms{part.p99_ms:>9.3f} ms{part.share:>8.1%}"


class Tracer(Protocol):
    """Receives the begin and end of each step: StepTracer of proto/monitoring/tracing.py."""

    def begin(self) -> list[Span] | None:
        """Begin a step: where its spans go, None where it is not traced."""
        ...

    def end(self, spans: list[Span]) -> None:
        """End a step that was traced."""
        ...

    def stop(self) -> None:
        """Stop tracing: the steps from here on leave no spans."""
        ...


class Recorder:
    """Collects the spans of all threads, step by step, while it is installed (`with Recorder() as recorder:`).

    The thread that installs it is the training thread. A span counts in the step in which it ends. While a
    torch.profiler runs, spans are ranges of its trace (those of other threads where it profiles all threads).
    """

    def __init__(self, kept_steps: int = KEPT_STEPS) -> None:
        # torch's, whose flag is true while a profiler runs, whichever thread asks; a shard's process has none
        self.profiler = sys.modules.get("torch.autograd.profiler")
        self.local = threading.local()  # .top: the innermost open span of a thread
        self._kept = kept_steps
        self._steps = 0
        self._lock = threading.Lock()
        # (name, thread, seconds) of this step; all threads add to it without a lock, which a deque bears
        self._done: deque[tuple[str, int, float]] = deque()
        self._step_seconds = np.zeros(kept_steps)  # a ring
        self._seconds: dict[tuple[str, bool], Doubles] = {}  # likewise
        self._start = time.perf_counter()
        self._thread = threading.get_ident()
        self._before: Recorder | None = None
        self.tracer: Tracer | None = None  # of some of the steps
        self.traced: list[Span] | None = None  # the spans of this step, where it is traced
        # called with the seconds of every step and of its parts, by name and whether other threads did them
        self.watch: Callable[[float, Mapping[tuple[str, bool], float]], None] | None = None

    def __enter__(self) -> Self:
        global _recorder
        self._thread = threading.get_ident()
        self._before, _recorder = _recorder, self
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _recorder
        _recorder = self._before
        if self.tracer is not None:
            self.tracer.stop()

    def begin(self) -> None:
        """A step begins; what was collected since the last one ended is dropped."""
        with self._lock:
            self._done.clear()
            self._start = time.perf_counter()
        if self.tracer is not None:
            self.traced = self.tracer.begin()

    def end(self) -> None:
        """The step ends, and the next one begins."""
        with self._lock:
            end = time.perf_counter()
            now: dict[tuple[str, bool], float] = {}
            for name, thread, part in [self._done.popleft() for _ in range(len(self._done))]:
                key = name, thread != self._thread
                now[key] = now.get(key, 0.0) + part
            seconds, self._start = end - self._start, end
            at, self._steps = self._steps % self._kept, self._steps + 1
            for key in now.keys() - self._seconds.keys():
                self._seconds[key] = np.zeros(self._kept)
            for key, ring in self._seconds.items():
                ring[at] = now.get(key, 0.0)
            self._step_seconds[at] = seconds
        if self.watch is not None:
            self.watch(seconds, now)
        if self.tracer is not None:
            if self.traced is not None:
                self.tracer.end(self.traced)
            self.traced = self.tracer.begin()

    def add(self, name: str, seconds: float) -> None:
        """Count time of this thread that no span could hold."""
        self._done.append((name, threading.get_ident(), seconds))

    def recent(self, steps: int) -> dict[str, float]:
        """Seconds of each part in the mean of the last steps, `other` included: together they are the step."""
        with self._lock:
            kept = min(self._steps, self._kept, steps)
            if not kept:
                return {}
            at = np.arange(self._steps - kept, self._steps) % self._kept
            means = {name: float(ring[at].mean()) for (name, beside), ring in self._seconds.items() if not beside}
            return {**means, "other": max(0.0, float(self._step_seconds[at].mean()) - sum(means.values()))}

    def split(self) -> TimeSplit:
        """The steps until now, of which the last `kept_steps` are remembered."""
        with self._lock:
            kept = min(self._steps, self._kept)
            whole = self._step_seconds[:kept]
            total = float(whole.sum())
            rings = {key: ring[:kept] for key, ring in self._seconds.items()}
            main = {name: ring for (name, overlapped), ring in rings.items() if not overlapped}
            beside = {name: ring for (name, overlapped), ring in rings.items() if overlapped}
            main["other"] = whole - sum(main.values(), np.zeros(kept))
            return TimeSplit(
                steps=self._steps,
                step=_part(whole, total),
                parts={name: _part(ring, total) for name, ring in _largest_first(main)},
                overlapped={name: _part(ring, total) for name, ring in _largest_first(beside)},
            )


def _largest_first(rings: Mapping[str, Doubles]) -> list[tuple[str, Doubles]]:
    return sorted(rings.items(), key=lambda item: -float(item[1].sum()))


def _part(seconds: Doubles, total: float) -> PartTimes:
    if not len(seconds):
        return PartTimes(0.0, 0.0, 0.0, 0.0)
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return PartTimes(
        float(p50), float(p99), float(seconds.mean()) * 1e3, float(seconds.sum()) / total if total else 0.0
    )


class _Span:
    __slots__ = ("_inner", "_name", "_outer", "_range", "_recorder", "_start", "span")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name
        self._inner = 0.0  # seconds of the spans inside
        self._range: AbstractContextManager[object] | None = None
        self.span = b"" if recorder.traced is None else secrets.token_bytes(SPAN_BYTES)  # its id in a trace

    def __enter__(self) -> None:
        recorder = self._recorder
        self._outer: _Span | None = getattr(recorder.local, "top", None)
        recorder.local.top = self
        profiler = recorder.profiler
        if profiler is not None and profiler._is_profiler_enabled:
            self._range = profiler.record_function(self._name)
            self._range.__enter__()
        self._start = time.perf_counter()

    def charge_to(self, part: str, seconds: float) -> None:
        own = min(seconds, time.perf_counter() - self._start - self._inner)
        self._inner += own
        self._recorder.add(part, own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = time.perf_counter()
        seconds = end - self._start
        if self.span and (traced := self._recorder.traced) is not None:
            parent = b"" if self._outer is None else self._outer.span
            traced.append(Span(self._name, self.span, parent, self._start, end, {}))
        if self._range is not None:
            self._range.__exit__(kind, error, trace)
        self._recorder.local.top = self._outer
        if self._outer is not None:
            self._outer._inner += seconds
        self._recorder.add(self._name, seconds - self._inner)
