"""A check: one question about this machine, the shards, a job or a run, and what to do where the answer is bad."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from embershard.doctor.case import Case

DEADLINE_SECONDS = 3.0
_HANGS = "look for a network folder, a disk or a driver that hangs; on a machine that is overloaded, ask again"


class Level(enum.StrEnum):
    """The outcome of one of doctor's checks."""

    OK = "ok"
    WARN = "warn"  # it runs, but slower or less safely than it could
    FAIL = "fail"  # it does not run


@dataclass(frozen=True, slots=True)
class Finding:
    """An answer; `remedy` is what to do, where that depends on what was found."""

    level: Level
    text: str
    remedy: str = ""


def ok(text: str, remedy: str = "") -> Finding:
    """Report that nothing is wrong."""
    return Finding(Level.OK, text, remedy)


def warn(text: str, remedy: str = "") -> Finding:
    """Return an answer of something that runs, but slower or less safely than it could."""
    return Finding(Level.WARN, text, remedy)


def fail(text: str, remedy: str = "") -> Finding:
    """Report that something does not work."""
    return Finding(Level.FAIL, text, remedy)


Examine = Callable[[Case], Finding | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A question with its name, what it asks and what usually helps; docs/doctor.md lists them all."""

    name: str
    asks: str
    remedy: str
    examine: Examine  # None where it does not apply
    seconds: float = DEADLINE_SECONDS

    def run(self, case: Case) -> Finding | None:
        """The answer, by its deadline; whatever goes wrong with a check is an answer too. None: it does not apply."""
        answers: list[Finding | None] = []

        def examine() -> None:
            try:
                answers.append(self.examine(case))
            except Exception as error:  # a doctor that falls ill helps nobody
                answers.append(warn(f"could not be checked: {type(error).__name__}: {error}"))

        # a thread, because what hangs (a dead network folder, a driver) cannot be interrupted
        thread = threading.Thread(target=examine, name=f"check {self.name}", daemon=True)
        thread.start()
        thread.join(self.seconds)
        return answers[0] if answers else fail(f"no answer within {self.seconds:.0f} s: what it looks at hangs", _HANGS)


def check(name: str, *, asks: str, remedy: str, seconds: float = DEADLINE_SECONDS) -> Callable[[Examine], Check]:
    """Make a function a check."""
    return lambda examine: Check(name=name, asks=asks, remedy=remedy, examine=examine, seconds=seconds)


_SHOWN = 4


def size(num_bytes: int) -> str:
    """Format a number of bytes for people."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def some(parts: Sequence[str]) -> str:
    """The first ones, and how many there are beyond."""
    more = f"; and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return "; ".join(parts[:_SHOWN]) + more


def numbers(values: Iterable[int]) -> str:
    """Numbers with commas between them."""
    return ", ".join(map(str, values))
