"""Tables that Ray Data reads, or that a function of a user makes with it, as blocks of rows."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from embershard.proto.errors import EmbershardError, JobError, UserCodeFailed
from embershard.proto.user_modules import find, user_code, where_defined
from embershard.worker.data.batch import Samples
from embershard.worker.data.files import File
from embershard.worker.data.readers.parquet import LOOK_ROWS, READ_ROWS
from embershard.worker.data.readers.tabular_files import (
    TableFormat,
    Wanted,
    check_columns,
    files_of,
    format_of_first,
    located,
)

if TYPE_CHECKING:
    from ray.data import Dataset

_READERS = {"parquet": "read_parquet", "csv": "read_csv", "jsonl": "read_json"}  # of ray.data


def open_datasets(
    files: Mapping[str, Sequence[File]],
    how: TableFormat,
    wanted: Wanted,
    to_samples: Callable[[pa.Table, str], Samples],
    counts: Mapping[str, int] = {},
) -> dict[str, RayTables]:
    """The tables of each split, as `open_tables` gives them: of files, or of one function `module:name`.

    JobError where Ray Data is not installed, no cluster answers, or a column is missing.
    """
    _connect()
    found = {}
    for part, named in files.items():
        kind = "" if _is_function(named[0]) else how.format or format_of_first(named[0])
        if kind and kind not in _READERS:
            raise JobError(where=str(named[0]), reason=f"Ray Data has no reader of {kind}: use data.reader tabular")
        # read on other nodes, whose processes have folders of their own
        paths = files_of(kind, named) if kind else named
        names = tuple(str(path.absolute()) if isinstance(path, Path) else path for path in paths)
        rows = counts.get(part)
        found[part] = RayTables(names=names, kind=kind, part=part, wanted=wanted, to_samples=to_samples, rows=rows)
    return found


@dataclass(frozen=True, kw_only=True)
class RayTables:
    """The rows of one split: of files that Ray Data reads, or of a function's dataset.

    A worker's share is whole files. Where there are fewer files than workers, and of a function's dataset, each worker
    reads all rows and keeps every W-th part of them. So a share has the same rows whoever reads it, and however often.
    """

    names: Sequence[str]  # of files, or of one function
    kind: str  # of the files; empty: a function
    part: str
    wanted: Wanted
    to_samples: Callable[[pa.Table, str], Samples]
    rows: int | None = None  # that were counted before

    @property
    def where(self) -> str:
        """The first file, or the function."""
        return self.names[0]

    def check(self) -> None:
        """Compare the columns. JobError where one is missing."""
        with _reading(self.where):
            schema = self._whole.schema()
        if schema is None:
            raise JobError(where=self.where, reason="no rows in the dataset")
        check_columns(self.where, schema.names, self.wanted)

    def num_rows(self) -> int | None:
        """Samples: Parquet files tell them by their footers, other datasets are read for it."""
        return self._count if self.rows is None else self.rows

    def fingerprint(self) -> dict[str, object]:
        """Return nothing: the files may be ones that Ray alone reads."""
        return {}

    def first_rows(self) -> Iterator[tuple[Callable[[int], str], pa.Table]]:
        """The first rows, and where each of them stands."""
        self.check()
        for _, table in self._tables(self._whole.limit(LOOK_ROWS), LOOK_ROWS):
            yield (lambda row: f"{self.where}: row {row + 1}"), table
            break

    def blocks(self, rank: int, world_size: int, shuffle: np.random.Generator | None) -> Iterator[Samples]:
        """This worker's files, or every W-th part of the rows where there are fewer files than workers."""
        if self.kind and len(self.names) >= world_size:
            names = self.names
            if shuffle is not None:
                names = [names[place] for place in shuffle.permutation(len(names))]
            own = names[rank::world_size]
            tables, where = self._tables(self._read(own), READ_ROWS), own[0]
        else:
            rows = READ_ROWS if world_size == 1 else max(1, min(READ_ROWS, self._count // (8 * world_size)))
            tables, where = self._tables(self._whole, rows, rank, world_size), self.where
        for begin, table in tables:
            with located(lambda row, begin=begin: f"{where}: row {begin + row + 1} from there on"):  # type: ignore[misc]
                yield self.to_samples(table, self.part)

    @cached_property
    def _whole(self) -> Dataset:
        return self._read(self.names)

    @cached_property
    def _count(self) -> int:
        with _reading(self.where):
            return int(self._whole.count())

    def _read(self, names: Sequence[str]) -> Dataset:
        if not self.kind:
            return _made_by(names[0])
        import ray.data

        with _reading(names[0]):
            dataset: Dataset = getattr(ray.data, _READERS[self.kind])(list(names), **self._options)
        return dataset

    @property
    def _options(self) -> Mapping[str, object]:
        """How to read the files: Arrow would take texts such as 007 or 12e3 for numbers, in which they lose digits."""
        if self.kind != "csv":
            return {}
        import pyarrow.csv as pa_csv

        texts = {name: pa.string() for name, (kind, _) in self.wanted.items() if kind == "text"}
        return {"convert_options": pa_csv.ConvertOptions(column_types=texts)}

    def _tables(
        self, dataset: Dataset, rows: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[int, pa.Table]]:
        """Each W-th part of so many rows, in the dataset's order, with its first row."""
        columns = list(self.wanted)
        with _reading(self.where):
            if self.kind:  # those of a function may be missing, which `check` says
                dataset = dataset.select_columns(columns)
            for number, table in enumerate(dataset.iter_batches(batch_size=rows, batch_format="pyarrow")):
                if number % world_size == rank:
                    yield number * rows, table.select(columns)


def _is_function(name: File) -> bool:
    return isinstance(name, str) and "://" not in name


def _made_by(name: str) -> Dataset:
    """The dataset of a user's function."""
    import ray.data

    function = find(name)
    with user_code(f"dataset {name}"):
        dataset = function()  # type: ignore[operator]
    if not isinstance(dataset, ray.data.Dataset):
        reason = f"gave a {type(dataset).__name__}; return a ray.data.Dataset"
        raise UserCodeFailed(what=f"dataset {name}", reason=reason, where=where_defined(function))
    return dataset


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """While Ray Data reads: JobError in place of whatever its tasks raise."""
    try:
        yield
    except EmbershardError:
        raise
    except Exception as error:  # the packages that it reads with, and a user's functions, may fail in any way
        said = str(error).strip().splitlines() or [""]
        raise JobError(where=where, reason=f"Ray Data cannot read it: {type(error).__name__}: {said[-1]}") from error


def _connect() -> None:
    """Be connected to the job's cluster. JobError where there is none, or Ray Data is not installed."""
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        reason = f"ray needs Ray Data, and {error.name} is not installed: pip install 'embershard[ray]'"
        raise JobError(where="data.reader", reason=reason) from None
    if not ray.is_initialized():
        address, at_main = os.environ.get("RAY_ADDRESS", "auto"), threading.current_thread() is threading.main_thread()
        ours = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            remedy = "train with --engine ray, start a cluster with `ray start --head`, or set RAY_ADDRESS"
            reason = f"ray needs a Ray cluster, and none answers at {address} ({error}); {remedy}"
            raise JobError(where="data.reader", reason=reason) from None
        if at_main:
            signal.signal(signal.SIGTERM, ours)  # a worker that is told to end leaves; Ray's handler would exit at once
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True  # a share is every W-th part: the parts have to be the same ones
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
