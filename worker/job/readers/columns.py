"""Settings of the readers `ctr_csv` and `parquet`: clicks whose columns are listed by their roles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from embershard.worker.job.data_section import DataSection, Delimiter, Paths, SomePaths
from embershard.worker.job.sections import Count

if TYPE_CHECKING:  # a job is checked in a second, without torch; a reader is imported when it is opened
    from embershard.worker.data.batch import Dataset
    from embershard.worker.data.columns import Columns


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
