"""What a report consists of, whatever it is written as."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from embershard.compare.report.svg import Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """A paragraph."""

    text: str
    kind: Literal["prose"] = "prose"


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Text to copy, as it stands; a long one is folded away behind its title."""

    title: str
    text: str
    folded: bool = False
    kind: Literal["code"] = "code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells of plain text; a row's first one is its head. Columns hold figures but the first and those in `words`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]  # each as long as columns
    words: Collection[str] = ()
    note: str = ""
    kind: Literal["table"] = "table"

    def is_number(self, place: int) -> bool:
        """Whether a column holds figures, which are aligned at their ends."""
        return place > 0 and self.columns[place] not in self.words


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Pictures beside each other, where there is room."""

    pictures: Sequence[Picture]
    kind: Literal["pictures"] = "pictures"


Block = Prose | Code | Table | Pictures
Outcome = Literal["paid", "did not pay", "undecided", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one arm came to, in words."""

    arm: str
    outcome: Outcome
    meaning: str
    sentences: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and what stands below it."""

    title: str
    name: str  # of the place in the page
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole report."""

    title: str
    about: str  # a line: the job, its size, the machine
    summary: Sequence[str]  # the first paragraph, sentence by sentence
    warnings: Sequence[str]  # what a reader must know before the rest
    findings: Sequence[Finding]
    sections: Sequence[Section] = field(default=())
