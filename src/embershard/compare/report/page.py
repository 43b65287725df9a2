"""The parts of a report as data, independent of HTML and Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from embershard.compare.report.drawing import Picture
from embershard.compare.results import ArmOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """A paragraph of the report."""

    text: str
    kind: Literal["prose"] = "prose"


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Text to copy as it stands; a folded one is shown on a click on its title."""

    title: str
    text: str
    folded: bool = False
    kind: Literal["code"] = "code"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table of plain text. The first cell of a row is its head; columns not named in `words` hold figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]  # each as long as columns
    words: Collection[str] = ()
    note: str = ""
    kind: Literal["table"] = "table"

    def is_number(self, place: int) -> bool:
        """Tell whether a column holds figures, which are aligned right."""
        return place > 0 and self.columns[place] not in self.words


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Pictures beside each other, where there is room."""

    pictures: Sequence[Picture]
    kind: Literal["pictures"] = "pictures"


PageBlock = Prose | Code | ReportTable | Pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFinding:
    """The outcome of one arm, in words."""

    arm: str
    outcome: ArmOutcome
    meaning: str
    sentences: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A heading and the blocks below it."""

    title: str
    name: str  # of the place in the page
    blocks: Sequence[PageBlock]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole report: title, summary and blocks."""

    title: str
    about: str  # a line: the job, its size, the machine
    summary: Sequence[str]  # the first paragraph, sentence by sentence
    warnings: Sequence[str]  # what a reader must know before the rest
    findings: Sequence[ArmFinding]
    sections: Sequence[PageSection] = field(default=())
