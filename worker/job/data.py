"""Sections of a job file that say what is read: one per reader, with the reader's own settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from embershard.proto.errors import JobError
from embershard.worker.data.files import as_file
from embershard.worker.job.data_section import DataSection, Evaluation
from embershard.worker.job.sections import CUSTOM, Count, Section
from embershard.worker.job.tabular import Delimiter, Encoding, FileFormat, Name, RaySection, TabularSection, on_disk

if TYPE_CHECKING:  # a job is checked in a second, without torch; a reader is imported when it is opened
    from embershard.worker.data.batch import Dataset
    from embershard.worker.data.columns import Columns
    from embershard.worker.data.interactions.tables import InteractionTables

Negatives = Annotated[int, Field(ge=0)]
DrawnBy = Literal["uniform", "popularity"]  # each item as often as another, or as often as it was taken


def _as_list(value: object) -> object:
    return (value,) if isinstance(value, (str, Path)) else value


_OR_ONE = BeforeValidator(_as_list, json_schema_input_type=Path | tuple[Path, ...])
Paths = Annotated[tuple[Path, ...], _OR_ONE]
SomePaths = Annotated[tuple[Path, ...], Field(min_length=1), _OR_ONE]


def _as_names(value: object) -> object:
    given = _as_list(value)
    return tuple(str(one) if isinstance(one, Path) else one for one in given) if isinstance(given, tuple) else given


_OR_ONE_NAME = BeforeValidator(_as_names, json_schema_input_type=str | tuple[str, ...])
Names = Annotated[tuple[Name, ...], _OR_ONE_NAME]
SomeNames = Annotated[tuple[Name, ...], Field(min_length=1), _OR_ONE_NAME]


class NcfFilesSection(DataSection):
    """The three files of the NCF paper; `prefix` is their common name, such as ncf-ml-1m/ml-1m."""

    reader: Literal["ncf"]
    prefix: Path
    negatives: Negatives = 4  # negative samples for each interaction, drawn again in each epoch
    negatives_by: DrawnBy = "uniform"  # popularity: in proportion to how often each item was taken
    pairs = True

    @property
    def evaluation(self) -> Evaluation:
        """Each user's held-out item among its candidates."""
        return "candidates"

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return ("test",)

    @property
    def has_clicks(self) -> bool:
        """Whether samples have labels of both kinds."""
        return self.negatives > 0

    def files(self) -> dict[str, tuple[Path, ...]]:
        """Field -> the files that it names, under `root`."""
        return {"prefix": tuple(Path(f"{self.prefix}.{e}") for e in ("train.pairs", "test.rating", "test.negative"))}

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        from embershard.worker.data.interactions.files import look_at_ncf

        look_at_ncf(folder / self.root / self.prefix)

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.interactions.movielens import NcfData

        popular = self.negatives_by == "popularity"
        return NcfData(folder / self.root / self.prefix, negatives=self.negatives, by_popularity=popular, seed=seed)


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
    test: Names = ()
    """Files with the items that each user took later, to evaluate on; of tables by default the latest ones of train."""
    hold_out: Count | None = None
    """Number of each user's latest items in train that are the split test, in place of files; by default 1."""
    delimiter: Delimiter | None = None
    """Character between the columns of a table of text; by default a comma, or a tab in TSV."""
    negatives: Negatives = 0  # items that the user did not take, added to each sample
    history: Annotated[int, Field(ge=0)] = 0
    """Number of other items that the user took, added to each sample (SimpleX)."""
    negatives_by: DrawnBy = "uniform"  # popularity: in proportion to how often each item was taken
    pairs = True

    @property
    def evaluation(self) -> Evaluation:
        """All items, ranked for each user."""
        return "ranking"

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return ("test",)

    def files(self) -> dict[str, tuple[Path, ...]]:
        """Field -> the local files and folders that it names, under `root`."""
        return on_disk({"train": self.train, "test": self.test})

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        if self.columns is not None:
            if self.test and self.hold_out is not None:
                return "hold_out", "takes the items to be found from train: remove it, or test"
            if not self.test and self.columns.time is None:
                return "columns", "has no time, by which each user's latest items are held out: name it, or give test"
            if self.history and "history" in (self.columns.user, self.columns.item):
                return "history", "adds a list of this name to requests, which columns has already: rename the column"
            return super().problem()
        for field in ("hold_out", "delimiter"):
            if getattr(self, field) is not None:
                return field, "has a meaning for tables alone: name their columns, as columns: {user: u, item: i}"
        for field, names in (("train", self.train), ("test", self.test)):
            if len(names) != 1:
                reason = f"is one file of lists, a line `user item item ...` per user, and not {len(names)}"
                return field, f"{reason}; if these are tables, name columns: {{user: u, item: i, time: t}}"
        return super().problem()

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        from embershard.worker.data.interactions.files import look_at_lists

        if self.columns is not None:
            self._tables(folder, self.delimiter, train=self.train, test=self.test).look()
        else:
            look_at_lists(folder / self.root / path for path in (*self.train, *self.test))

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.interactions.gowalla import InteractionLists
        from embershard.worker.data.interactions.tables import hold_out_latest

        popular = self.negatives_by == "popularity"
        if self.columns is None:
            train, test = (folder / self.root / names[0] for names in (self.train, self.test))
            return InteractionLists.read(
                train, test, negatives=self.negatives, history=self.history, by_popularity=popular, seed=seed
            )
        pairs, names = self._tables(folder, self.delimiter, train=self.train, test=self.test).read()
        if not self.test or self.hold_out:  # both where `evaluate --on` gives a test of its own
            held_out = hold_out_latest(pairs["train"], self.hold_out or 1)
            pairs = {**held_out, **pairs, "train": held_out["train"]}
            if not len(pairs["test"][0]):
                reason = f"no user has more than {self.hold_out or 1} items, of which the latest could be held out"
                raise JobError(where=self.train[0], reason=reason)
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


class _ColumnsSection(DataSection):
    label: str = "label"  # column of the label
    categorical: tuple[str, ...] = ()  # categorical columns; by default all that no other field names
    numeric: tuple[str, ...] = ()  # columns of numbers; a missing number is 0
    skip: tuple[str, ...] = ()  # columns that are not read
    ids: Literal["global", "hashed"] = "hashed"
    """hashed: the 62-bit hash of (column, text); global: integers that no two columns share."""
    num_ids: Count | None = None
    """Global ids are 0 to num_ids - 1."""
    log: bool = False
    """Replace each number x by log(1 + max(x, 0))."""

    @property
    def has_dense(self) -> bool:
        """Whether samples have dense features."""
        return bool(self.numeric)

    @property
    def hashed(self) -> bool:
        """Whether ids are hashes of feature and value."""
        return self.ids == "hashed"

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        named = [(field, name) for field in ("categorical", "numeric", "skip") for name in getattr(self, field)]
        names = [self.label, *(name for _, name in named)]
        for field, name in named:
            if names.count(name) > 1:
                return field, f"column {name!r} is named twice"
        if self.num_ids is not None and self.ids == "hashed":
            return "num_ids", "has no meaning for hashed ids; remove it"
        return None

    def columns(self) -> Columns:
        """Return the role of each column."""
        from embershard.worker.data.columns import Columns

        return Columns(
            label=self.label,
            categorical=self.categorical,
            numeric=self.numeric,
            skip=self.skip,
            ids=self.ids,
            log=self.log,
        )


class CtrCsvSection(_ColumnsSection):
    """CSV files with a header line, in memory or (stream) read anew in each epoch."""

    reader: Literal["ctr_csv"]
    train: Path  # file to train on
    valid: Path | None = None  # file to evaluate on
    test: Path | None = None  # another file to evaluate on
    delimiter: Delimiter = ","
    """Character between the columns."""
    halve_valid_by: str | None = None
    """Column by whose hash the rows of `valid` are divided into valid and test."""
    stream: bool = False  # read the files anew in each epoch, instead of keeping all samples in memory

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return ("valid", "test") if self.halve_valid_by else super().judged_on

    @property
    def streams_text(self) -> bool:
        """Whether text is read anew in each epoch."""
        return self.stream

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        if self.halve_valid_by and (self.valid is None or self.test is not None):
            return "halve_valid_by", "makes a test split of one half of valid: give a valid file and no test file"
        if self.halve_valid_by and self.stream:
            return "halve_valid_by", "needs the file in memory; remove stream"
        if self.stream and self.ids == "global" and self.num_ids is None:
            return "num_ids", "must be given: a stream of global ids does not tell the largest in advance"
        return super().problem()

    def first_rows(self) -> DataSection:
        """A stream, where that knows as much: global ids without num_ids are counted in the whole file."""
        if self.ids == "global" and self.num_ids is None:
            return self
        return self.model_copy(update={"stream": True, "halve_valid_by": None})

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        from embershard.worker.data.readers.ctr_csv import look

        files = {split: paths[0] for split, paths in self.paths(folder).items()}
        look(files, self.columns(), delimiter=self.delimiter, num_ids=self.num_ids)

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.readers.ctr_csv import CtrCsv, CtrCsvStream

        files = {split: paths[0] for split, paths in self.paths(folder).items()}
        columns, delimiter, num_ids = self.columns(), self.delimiter, self.num_ids
        if self.stream:
            return CtrCsvStream(files, columns, delimiter=delimiter, num_ids=num_ids, seed=seed)
        halve = self.halve_valid_by
        return CtrCsv(files, columns, delimiter=delimiter, num_ids=num_ids, halve_valid_by=halve, seed=seed)


class ParquetSection(_ColumnsSection):
    """Parquet files, or folders of them."""

    reader: Literal["parquet"]
    train: SomePaths  # files or folders to train on
    valid: Paths = ()  # files or folders to evaluate on
    test: Paths = ()  # other files or folders to evaluate on

    @property
    def costs_cpu(self) -> bool:
        """Whether making a batch costs more than handing it over."""
        return True

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        if self.ids == "global" and self.num_ids is None:
            return "num_ids", "must be given: a stream of global ids does not tell the largest in advance"
        return super().problem()

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        from embershard.worker.data.readers.parquet import look

        look(self.paths(folder), self.columns(), num_ids=self.num_ids)

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.readers.parquet import ParquetData

        return ParquetData(self.paths(folder), self.columns(), num_ids=self.num_ids, seed=seed)


class CriteoSection(DataSection):
    """Criteo's files as published, in memory or (stream) read anew in each epoch."""

    reader: Literal["criteo"]
    train: SomePaths  # files to train on
    valid: Paths = ()  # files to evaluate on
    test: Paths = ()  # other files to evaluate on
    stream: bool = False  # read the files anew in each epoch, instead of keeping all samples in memory

    @property
    def has_dense(self) -> bool:
        """Whether samples have dense features."""
        return True

    @property
    def hashed(self) -> bool:
        """Whether ids are hashes of feature and value."""
        return True

    @property
    def streams_text(self) -> bool:
        """Whether text is read anew in each epoch."""
        return self.stream

    def first_rows(self) -> DataSection:
        """Return this section as a stream, which opens without reading whole files."""
        return self.model_copy(update={"stream": True})

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        from embershard.worker.data.readers.criteo import look

        look(self.paths(folder))

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.readers.criteo import CriteoTsv, CriteoTsvStream

        return (CriteoTsvStream if self.stream else CriteoTsv)(self.paths(folder), seed=seed)


class AdultSection(DataSection):
    """Reads the files of the Adult census data."""

    reader: Literal["adult"]
    train: Path  # file to train on (adult.data)
    test: Path | None = None  # file to evaluate on (adult.test)
    standardise: bool = False  # scale each number to mean 0 and standard deviation 1
    shuffle: bool = True  # train in another order in each epoch; false: in the order of the file
    labels: Annotated[tuple[Literal["income", "never_married"], ...], Field(min_length=1)] = ("income",)
    """The labels that a sample has."""
    skip: tuple[str, ...] = ()
    """Categorical features that are left out."""

    @property
    def labels_of_samples(self) -> tuple[str, ...]:
        """The names of a sample's labels."""
        return self.labels

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        if "never_married" in self.labels and not {"marital_status", "relationship"} <= set(self.skip):
            return "skip", "must name marital_status and relationship, which tell the label never_married"
        return None

    @property
    def has_dense(self) -> bool:
        """Whether samples have dense features."""
        return True

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        from embershard.worker.data.readers.adult import look

        look(paths[0] for paths in self.paths(folder).values())

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.readers.adult import Adult

        paths = {split: found[0] for split, found in self.paths(folder).items()}
        return Adult(
            paths["train"],
            paths.get("test"),
            standardise=self.standardise,
            shuffle=self.shuffle,
            labels=self.labels,
            skip=self.skip,
            seed=seed,
        )


class ClicksSection(DataSection):
    """The built-in click stream; `samples` is the length of an epoch, without which the stream is endless."""

    reader: Literal["clicks"]
    samples: Count | None = None
    eval_samples: Count = 100_000  # samples of valid, and of test

    @property
    def has_dense(self) -> bool:
        """Whether samples have dense features."""
        return True

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return ("valid", "test")

    @property
    def endless(self) -> bool:
        """Whether an epoch never ends."""
        return self.samples is None

    @property
    def costs_cpu(self) -> bool:
        """Whether making a batch costs more than handing it over."""
        return True

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.readers.clicks import ClickStream

        return ClickStream(samples=self.samples, eval_samples=self.eval_samples, seed=seed)


class UserReaderSection(DataSection):
    """A reader of a user, `module:name`; fields that are not named here are its arguments.

    Whether a model fits its samples is checked when it is opened.
    """

    model_config = ConfigDict(extra="allow", serialize_by_alias=True)

    reader: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
    evaluates: Annotated[Literal["pointwise", "candidates"], Field(alias="evaluation")] = "pointwise"
    """pointwise: of labels; candidates: of ranked lists, for a reader whose batches have groups."""
    labels: Literal["probability", "any"] | None = None
    """probability: in 0..1, as binary cross-entropy needs them. Without it: any where the job has a loss of its own."""
    pairs = True

    @property
    def evaluation(self) -> Evaluation:
        """Return how the job evaluates the data: pointwise or candidates; `open` compares it with the reader's."""
        return self.evaluates

    @property
    def has_dense(self) -> bool:
        """Whether samples may have dense features."""
        return True

    @property
    def has_clicks(self) -> bool:
        """Whether samples must have labels of both kinds."""
        return False

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that it may have."""
        return ("valid", "test")

    def files(self) -> dict[str, tuple[Path, ...]]:
        """None: the reader alone knows which of its arguments are files."""
        return {}

    def takes(self, argument: str) -> bool:
        """Whether the reader can be called with an argument of that name."""
        from embershard.worker.data.user_defined import takes_argument

        return takes_argument(self.reader, argument)

    def open(self, folder: Path, seed: int) -> Dataset:
        """Call the reader. JobError where the job contradicts it; UserCodeFailed names file:line where it fails."""
        from embershard.worker.data.user_defined import open_reader

        root = (folder / self.root).resolve()
        dataset = open_reader(
            self.reader, self.model_extra or {}, root=root, seed=seed, any_labels=self.labels == "any"
        )
        if dataset.evaluation != self.evaluation:
            reason = f"is {self.evaluation}, but {self.reader} says {dataset.evaluation}: give both the same"
            raise JobError(where="data.evaluation", reason=reason)
        return dataset


def reader(value: object) -> str | None:
    """The section of a reader; named like its field, as mistakes are."""
    name = value.get("reader") if isinstance(value, dict) else getattr(value, "reader", None)
    return CUSTOM if ":" in str(name) else name


AnyData = Annotated[
    Annotated[NcfFilesSection, Tag("ncf")]
    | Annotated[ListsSection, Tag("lists")]
    | Annotated[SequencesSection, Tag("sequences")]
    | Annotated[CtrCsvSection, Tag("ctr_csv")]
    | Annotated[ParquetSection, Tag("parquet")]
    | Annotated[CriteoSection, Tag("criteo")]
    | Annotated[AdultSection, Tag("adult")]
    | Annotated[ClicksSection, Tag("clicks")]
    | Annotated[TabularSection, Tag("tabular")]
    | Annotated[RaySection, Tag("ray")]
    | Annotated[UserReaderSection, Tag(CUSTOM)],
    Discriminator(reader),
]
