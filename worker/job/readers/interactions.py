"""Settings of the readers `lists` and `sequences`: who took which item, in tables or in files of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, PrivateAttr

from embershard.proto.errors import JobError
from embershard.worker.data.files import as_file
from embershard.worker.job.data_section import (
    DataSection,
    Delimiter,
    DrawnBy,
    Encoding,
    Evaluation,
    FileFormat,
    Name,
    Names,
    Negatives,
    SomeNames,
    on_disk,
)
from embershard.worker.job.sections import Count, Section

if TYPE_CHECKING:  # a job is checked in a second, without torch; a reader is imported when it is opened
    from embershard.worker.data.batch import Dataset
    from embershard.worker.data.interactions.tables import InteractionTables


class InteractionColumnsSection(Section):
    """Name the columns of a table of interactions. Users and items may be texts or integers."""

    user: Name  # column of the user
    item: Name  # column of the item
    time: Name | None = None
    """Column of the time, a date or a number; without it, interactions are in the order of the files."""


class _InteractionsSection(DataSection):
    columns: InteractionColumnsSection | None = None
    """Read tables (Parquet, CSV, TSV, lines of JSON) with these columns."""
    format: FileFormat | None = None
    """Format of the tables; by default the files' names show it."""
    encoding: Encoding = "utf-8"
    """Encoding of tables of text, such as cp1252."""

    @property
    def has_clicks(self) -> bool:
        """Whether samples have labels of both kinds."""
        return False

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        for field, default in (("format", None), ("encoding", "utf-8")):
            if self.columns is None and getattr(self, field) != default:
                return field, "has a meaning for tables alone: name their columns, as columns: {user: u, item: i}"
        named = None if self.columns is None else (self.columns.user, self.columns.item, self.columns.time)
        if named is not None and len(set(named)) < len(named):
            return "columns", f"names one column twice ({', '.join(map(str, named))})"
        return None

    def _tables(self, folder: Path, delimiter: str | None, **parts: tuple[str, ...]) -> InteractionTables:
        from embershard.worker.data.interactions.tables import InteractionTables
        from embershard.worker.data.readers.tabular_files import TableFormat

        assert self.columns is not None
        files = {part: [as_file(folder / self.root, name) for name in names] for part, names in parts.items() if names}
        how = TableFormat(format=self.format, encoding=self.encoding, delimiter=delimiter)
        return InteractionTables(files=files, how=how, **self.columns.model_dump())


class ListsSection(_InteractionsSection):
    """Read the items that each user took; a model is evaluated by ranking all items for each user.

    The files are lists, a line per user (Gowalla and its like), or with `columns` tables with a row per interaction.
    """

    reader: Literal["lists"]
    train: SomeNames  # files with the items that each user took, to train on
    valid: Names = ()
    """Files with the items that each user took later, by which the best evaluation is chosen."""
    test: Names = ()
    """Files with the items that each user took after these; tables without files have valid and test in train."""
    hold_out: Count | None = None
    """Of tables: number of each user's latest items in train that are the split test, and of those before them that are
    valid; by default 1. If `test` names files, it holds out valid alone.
    """
    delimiter: Delimiter | None = None
    """Character between the columns of a table of text; by default a comma, or a tab in TSV."""
    negatives: Negatives = 0  # items that the user did not take, added to each sample
    history: Annotated[int, Field(ge=0)] = 0
    """Number of other items that the user took, added to each sample (SimpleX)."""
    negatives_by: DrawnBy = "uniform"  # popularity: in proportion to how often each item was taken
    pairs = True
    _removed: tuple[str, ...] = PrivateAttr(default=())

    @property
    def evaluation(self) -> Evaluation:
        """All items, ranked for each user."""
        return "ranking"

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return tuple(part for part in ("valid", "test") if getattr(self, part) or part in self._held_out)

    @property
    def _held_out(self) -> tuple[str, ...]:
        """The splits that are the latest items of train."""
        if self.columns is None or self.valid or (self.test and self.hold_out is None):
            return ()
        return ("valid",) if self.test else ("valid", "test")

    def without_held_out(self) -> Self:
        """This section, where what it holds out is in no split: train stays as it is, for a file to evaluate on."""
        copy = self.model_copy()
        copy._removed = self._held_out
        return copy

    def files(self) -> dict[str, tuple[Path, ...]]:
        """Field -> the local files and folders that it names, under `root`."""
        return on_disk({"train": self.train, "valid": self.valid, "test": self.test})

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        if self.columns is not None:
            if self.valid and self.hold_out is not None:
                return "hold_out", "takes valid from train: remove it, or valid"
            if self._held_out and self.columns.time is None:
                remedy = "remove hold_out" if self.test else "give test"
                return "columns", f"has no time, by which each user's latest items are held out: name it, or {remedy}"
            if self.history and "history" in (self.columns.user, self.columns.item):
                return "history", "adds a list of this name to requests, which columns has already: rename the column"
            return super().problem()
        for field in ("hold_out", "delimiter"):
            if getattr(self, field) is not None:
                return field, "has a meaning for tables alone: name their columns, as columns: {user: u, item: i}"
        for field, names in (("train", self.train), ("valid", self.valid), ("test", self.test)):
            if len(names) != 1 and (names or field != "valid"):
                reason = f"is one file of lists, a line `user item item ...` per user, and not {len(names)}"
                return field, f"{reason}; if these are tables, name columns: {{user: u, item: i, time: t}}"
        return super().problem()

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        from embershard.worker.data.interactions.files import look_at_lists

        if self.columns is not None:
            self._tables(folder, self.delimiter, train=self.train, valid=self.valid, test=self.test).look()
        else:
            look_at_lists(folder / self.root / path for path in (*self.train, *self.valid, *self.test))

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.interactions.gowalla import InteractionLists
        from embershard.worker.data.interactions.tables import hold_out_latest

        popular = self.negatives_by == "popularity"
        if self.columns is None:
            train, test = (folder / self.root / names[0] for names in (self.train, self.test))
            valid = folder / self.root / self.valid[0] if self.valid else None
            return InteractionLists.read(
                train, test, valid, negatives=self.negatives, history=self.history, by_popularity=popular, seed=seed
            )
        files = {"train": self.train, "valid": self.valid, "test": self.test}
        pairs, names = self._tables(folder, self.delimiter, **files).read()
        if parts := self._removed or self._held_out:
            count = self.hold_out or 1
            held_out = hold_out_latest(pairs["train"], count, parts)
            if not len(held_out[parts[0]][0]):
                reason = f"no user has more than {count * len(parts)} items, of which the latest could be held out"
                raise JobError(where=self.train[0], reason=reason)
            pairs |= {"train": held_out["train"]} if self._removed else held_out
        return InteractionLists(
            pairs,
            where=self.train[0],
            names=names,
            negatives=self.negatives,
            history=self.history,
            by_popularity=popular,
            seed=seed,
        )


class SequencesSection(_InteractionsSection):
    """Read the actions of users in the order of time; a model ranks each user's last item among `candidates` others.

    The file has one line `user item` per action, ordered by time, or with `columns` it is a table.
    """

    reader: Literal["sequences"]
    actions: SomeNames  # file with the actions of all users; with `columns` any number of them
    max_length: Count = 50  # the last actions of a user that the model reads
    negatives: Count = 1  # negative items at each position, in training
    negatives_by: DrawnBy = "uniform"
    """popularity: in proportion to how often each item was taken. Candidates are always drawn uniformly."""
    candidates: Count = 100
    users: Annotated[int, Field(ge=0)] = 10_000  # number of users to evaluate, drawn once; 0: all
    delimiter: Delimiter | None = None
    """Character between user and item, by default a space; of a table a comma, or a tab in TSV."""
    sequences = True

    @property
    def evaluation(self) -> Evaluation:
        """Each user's next item among candidates."""
        return "candidates"

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return ("valid", "test")

    def files(self) -> dict[str, tuple[Path, ...]]:
        """Field -> the local files and folders that it names, under `root`."""
        return on_disk({"actions": self.actions})

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        if self.columns is None and len(self.actions) > 1:
            return "actions", "is one file: if these are tables, name columns: {user: u, item: i, time: t}"
        return super().problem()

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        from embershard.worker.data.interactions.files import look_at_actions

        if self.columns is not None:
            self._tables(folder, self.delimiter, actions=self.actions).look()
        else:
            look_at_actions(folder / self.root / self.actions[0], self.delimiter or " ")

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.interactions.files import read_actions
        from embershard.worker.data.interactions.sequences import ActionSequences

        if self.columns is not None:
            pairs, names = self._tables(folder, self.delimiter, actions=self.actions).read()
            actions, where = pairs["actions"], self.actions[0]
        else:
            path, names = folder / self.root / self.actions[0], None
            actions, where = read_actions(path, self.delimiter or " "), str(path)
        return ActionSequences(
            actions,
            where=where,
            names=names,
            max_length=self.max_length,
            negatives=self.negatives,
            by_popularity=self.negatives_by == "popularity",
            candidates=self.candidates,
            users=self.users,
            seed=seed,
        )
