"""Sections of a job file that say what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from embershard.worker.data.batch import Dataset, Evaluation
from embershard.worker.data.columns import Columns
from embershard.worker.data.ctr_csv import CtrCsv
from embershard.worker.data.ncf import NcfData
from embershard.worker.job_sections import Section

METRICS: dict[Evaluation, tuple[str, ...]] = {
    "pointwise": ("auc", "logloss", "ne", "calibration"),
    "candidates": ("hr@{k}", "ndcg@{k}"),
    "ranking": ("recall@{k}", "ndcg@{k}"),
}


class DataSection(Section):
    """A reader and its files. Relative paths start at `root`, which itself starts at the job file's folder."""

    reader: str
    root: Path = Path()
    evaluation: ClassVar[Evaluation] = "pointwise"
    pairs: ClassVar[bool] = False
    """Each sample is a user and an item."""

    @property
    def has_dense(self) -> bool:
        """Whether samples have dense features."""
        return False

    @property
    def splits(self) -> tuple[str, ...]:
        """What can be evaluated on."""
        return ("test",)

    def files(self) -> dict[str, Path]:
        """Field -> the file it names, under `root`."""
        return {}

    def open(self, folder: Path, seed: int) -> Dataset:
        """The reader; paths start at `folder`. JobError names file:line of what is wrong."""
        raise NotImplementedError


class NcfDataSection(DataSection):
    """The three files of the NCF paper; `prefix` is their common name, such as ncf-ml-1m/ml-1m."""

    reader: Literal["ncf"]
    prefix: Path
    negatives: Annotated[int, Field(ge=0)] = 4
    evaluation = "candidates"
    pairs = True

    def files(self) -> dict[str, Path]:
        """Field -> the file it names, under `root`."""
        return {"prefix": Path(f"{self.prefix}.train.pairs")}

    def open(self, folder: Path, seed: int) -> Dataset:
        """The reader."""
        return NcfData(folder / self.root / self.prefix, negatives=self.negatives, seed=seed)


class CtrCsvSection(DataSection):
    """CSV files with a header line."""

    reader: Literal["ctr_csv"]
    train: Path
    valid: Path | None = None
    test: Path | None = None
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    halve_valid_by: str | None = None
    label: str = "label"
    categorical: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    ids: Literal["global", "hashed"] = "hashed"
    log: bool = False

    @property
    def has_dense(self) -> bool:
        """Whether samples have dense features."""
        return bool(self.numeric)

    @property
    def splits(self) -> tuple[str, ...]:
        """What can be evaluated on."""
        named = tuple(name for name in ("valid", "test") if getattr(self, name) is not None)
        return ("valid", "test") if self.halve_valid_by else named

    def files(self) -> dict[str, Path]:
        """Field -> the file it names, under `root`."""
        return {name: path for name in ("train", "valid", "test") if (path := getattr(self, name)) is not None}

    def open(self, folder: Path, seed: int) -> Dataset:
        """The reader."""
        columns = Columns(
            label=self.label,
            categorical=self.categorical,
            numeric=self.numeric,
            skip=self.skip,
            ids=self.ids,
            log=self.log,
        )
        files = {name: folder / self.root / path for name, path in self.files().items()}
        return CtrCsv(files, columns, delimiter=self.delimiter, halve_valid_by=self.halve_valid_by, seed=seed)


AnyData = Annotated[NcfDataSection | CtrCsvSection, Field(discriminator="reader")]
