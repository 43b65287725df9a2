"""Settings of the reader `ray`: tables that Ray Data reads."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from embershard.worker.job.data_section import SPLITS
from embershard.worker.job.readers.tabular import TabularSection

if TYPE_CHECKING:  # a job is checked in a second, without torch and pyarrow
    from embershard.worker.data.readers.tabular import Tabular


class RaySection(TabularSection):
    """Tables that Ray Data reads in the job's Ray cluster: Parquet, CSV or lines of JSON, or a function's dataset.

    `train`, `valid` and `test` are files, folders, patterns with *, URLs, or one function `module:name` that returns a
    ray.data.Dataset. The features are in the job's section `features`.
    """

    reader: Literal["ray"]  # type: ignore[assignment]
    format: Literal["parquet", "csv", "jsonl"] | None = None
    """Format of the files; by default the files' names show it."""

    @property
    def has_code(self) -> bool:
        """Whether a function of a user makes a dataset."""
        return any(_is_function(name) for part in SPLITS for name in getattr(self, part))

    @property
    def streams_text(self) -> bool:
        """Whether nobody knows in advance how many samples there are: Ray Data counts them."""
        return False

    @property
    def costs_cpu(self) -> bool:
        """Whether a process beside the worker pays: no, Ray's own processes read."""
        return False

    def files(self) -> dict[str, tuple[Path, ...]]:
        """Field -> the local files and folders that it names, under `root`."""
        named = {part: tuple(p for p in paths if not _is_function(str(p))) for part, paths in super().files().items()}
        return {part: paths for part, paths in named.items() if paths}

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        for field in ("delimiter", "encoding", "decimal", "missing", "columns"):
            if field in self.model_fields_set:
                return field, "has no meaning for data.reader ray: use tabular, or set it in a function of your own"
        if self.loader_processes:
            return "loader_processes", "must be 0 with data.reader ray, whose own processes read; remove it"
        for part in SPLITS:
            names = getattr(self, part)
            if len(names) > 1 and any(map(_is_function, names)):
                return part, "is files, or one function module:name"
        return super().problem()

    def tabular(self, folder: Path) -> Tabular:
        """Return the reader of the tables. BadFeature where features contradict each other."""
        from embershard.worker.data.readers.ray import open_datasets

        made = super().tabular(folder)
        functions = {part: names for part in SPLITS if (names := getattr(self, part)) and _is_function(names[0])}
        return replace(made, files={**made.files, **functions}, open_tables=open_datasets)


def _is_function(name: str) -> bool:
    """Whether it is `module:name`, and no file or URL."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name) is not None
