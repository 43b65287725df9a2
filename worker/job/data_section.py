"""What every section of a job file has that says what is read, and types of fields that several of them have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from embershard.worker.data.files import is_delimiter, is_url
from embershard.worker.job.sections import Count, Section

if TYPE_CHECKING:  # a job is checked in a second, without torch; a reader is imported when it is opened
    from embershard.worker.data.batch import Dataset

Evaluation = Literal["pointwise", "candidates", "ranking"]
METRICS: dict[Evaluation, tuple[str, ...]] = {
    "pointwise": ("auc", "logloss", "ne", "calibration"),
    "candidates": ("hr@{k}", "ndcg@{k}"),
    "ranking": ("recall@{k}", "ndcg@{k}"),
}
# computed as well, and shown where a job names them
MORE_METRICS: dict[Evaluation, tuple[str, ...]] = {
    "pointwise": (),
    "candidates": ("map@{k}",),
    "ranking": ("map@{k}", "coverage@{k}"),
}
LOWER_IS_BETTER = frozenset({"logloss", "ne"})
SPLITS = ("train", "valid", "test")
Name = Annotated[str, Field(min_length=1)]


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
Negatives = Annotated[int, Field(ge=0)]
DrawnBy = Literal["uniform", "popularity"]  # each item as often as another, or as often as it was taken


def _encoding(value: str) -> str:
    try:
        if "a1,".encode(value) != b"a1,":
            raise LookupError
    except LookupError:
        raise ValueError(f"must be an encoding that ASCII is a part of, as utf-8 or cp1252, got {value!r}") from None
    return "utf-8" if value.lower().replace("_", "-") in ("utf-8", "utf8", "utf-8-sig") else value


def _delimiter(value: str) -> str:
    if not is_delimiter(value):
        raise ValueError(f"must be one ASCII character, no quote or line end, got {value!r}")
    return value


Delimiter = Annotated[str, AfterValidator(_delimiter)]
Encoding = Annotated[str, AfterValidator(_encoding)]
FileFormat = Literal["parquet", "csv", "tsv", "jsonl"]


def on_disk(named: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[Path, ...]]:
    """Field -> its local files and folders: what is no URL and no pattern."""
    local = {field: [name for name in names if not is_url(name) and "*" not in name] for field, names in named.items()}
    return {field: tuple(map(Path, names)) for field, names in local.items() if names}


def _parts(value: object) -> int | str | None:
    if value is None or value == "auto":
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31:
        return value
    raise ValueError(f"must be a number of parts, auto or null, got {value!r}")


class DataSection(Section):
    """A reader and its files. Relative paths start at `root`."""

    reader: str
    root: Path = Path()
    """Folder of the files; a relative one starts at the job file's folder."""
    loader_processes: Annotated[int, Field(ge=0, le=1)] | None = None
    """1: a separate process beside each worker reads the batches; 0: the worker reads them. By default 1 if reading
    costs CPU time and there are free cores.
    """
    splits: Annotated[
        int | str | None, PlainValidator(_parts, json_schema_input_type=Count | Literal["auto"] | None)
    ] = None
    """Number of input splits of an epoch, assigned to free workers; auto: 8 per worker. Without it: equal shares."""
    pairs: ClassVar[bool] = False
    """Each sample is a user and an item."""
    sequences: ClassVar[bool] = False
    """Each sample is a user's history and the items behind it."""

    @property
    def evaluation(self) -> Evaluation:
        """Return how to evaluate: pointwise (labels, logits), candidates (ranked lists) or ranking (all items)."""
        return "pointwise"

    @property
    def labels_of_samples(self) -> tuple[str, ...]:
        """The names of a sample's labels."""
        return ("label",)

    @property
    def has_dense(self) -> bool:
        """Whether samples have dense features."""
        return False

    @property
    def has_clicks(self) -> bool:
        """Whether samples have labels of both kinds."""
        return True

    @property
    def hashed(self) -> bool:
        """Whether ids are hashes, of which no table can hold all."""
        return False

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return tuple(field for field in ("valid", "test") if getattr(self, field, None))

    @property
    def endless(self) -> bool:
        """Whether an epoch never ends."""
        return False

    @property
    def has_code(self) -> bool:
        """Whether code of a user reads it."""
        return ":" in self.reader

    @property
    def streams_text(self) -> bool:
        """Whether text is read anew in each epoch, which does not tell in advance how many samples there are."""
        return False

    @property
    def costs_cpu(self) -> bool:
        """Whether making a batch costs more than handing it over: then a process does it, where cores are to spare."""
        return self.streams_text

    def files(self) -> dict[str, tuple[Path, ...]]:
        """Field -> the files and folders that it names, under `root`."""
        named: dict[str, tuple[Path, ...]] = {}
        for field in SPLITS:
            value = getattr(self, field, None)
            if value:
                named[field] = (value,) if isinstance(value, Path) else tuple(value)
        return named

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        return None

    def open(self, folder: Path, seed: int) -> Dataset:
        """The reader; paths start at `folder`. JobError names file:line of what is wrong."""
        raise NotImplementedError

    def look(self, folder: Path) -> None:
        """Try the first rows of every file, without torch. JobError names file:line of what is wrong."""

    def first_rows(self) -> DataSection:
        """This section, or one like it whose reader reads no whole files when it is opened: to try a model on."""
        return self

    def paths(self, folder: Path) -> dict[str, tuple[Path, ...]]:
        """Return the files of each split."""
        return {split: tuple(folder / self.root / path for path in paths) for split, paths in self.files().items()}
