"""What every section of a job file has that says what is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PlainValidator

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
