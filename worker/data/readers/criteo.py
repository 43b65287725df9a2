"""Criteo's display advertising data as published: tab-separated label, I1-I13 integers, C1-C26 hexadecimal ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from embershard.proto.errors import JobError
from embershard.worker.data.batch import RowsDataset, Schema
from embershard.worker.data.columns import Columns
from embershard.worker.data.stream import SHUFFLE_ROWS, StreamDataset
from embershard.worker.data.text import Kind, Layout, TextSource

NUMERIC = tuple(f"I{i}" for i in range(1, 14))
CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = Columns(categorical=CATEGORICAL, numeric=NUMERIC, ids="hashed", log=True)
_KINDS: dict[str, Kind] = {"label": "label", **dict.fromkeys(NUMERIC, "number"), **dict.fromkeys(CATEGORICAL, "text")}
LAYOUT = Layout(columns=_KINDS, delimiter="\t")
INPUTS = COLUMNS.inputs(LAYOUT, None)
SCHEMA = Schema(CATEGORICAL, len(NUMERIC), None)


class CriteoTsv(RowsDataset):
    """Criteo files in memory (264 bytes per sample), plain or gzipped.

    Integers become log(1 + x), negative ones as 0; a missing integer is 0; ids are hashes of (column, text), so that a
    missing id has an embedding of its own in each column.
    """

    inputs = INPUTS

    def __init__(self, files: Mapping[str, Sequence[Path]], *, seed: int = 0) -> None:
        sources = _sources(files)
        splits = {name: source.load() for name, source in sources.items()}
        super().__init__(SCHEMA, splits, where=sources["train"].where, seed=seed)


class CriteoTsvStream(StreamDataset):
    """The same samples from files larger than memory."""

    inputs = INPUTS

    def __init__(self, files: Mapping[str, Sequence[Path]], *, seed: int = 0, shuffle_rows: int = SHUFFLE_ROWS) -> None:
        super().__init__(SCHEMA, _sources(files), seed=seed, shuffle_rows=shuffle_rows)


def look(files: Mapping[str, Sequence[Path]]) -> None:
    """Parse the first lines of every file, without torch. JobError names file:line of what is wrong."""
    for source in _sources(files).values():
        source.check()


def _sources(files: Mapping[str, Sequence[Path]]) -> dict[str, TextSource]:
    for split in {"train": (), **files}:
        if not files.get(split):
            raise JobError(where="files", reason=f"no {split} file is named")
    return {name: TextSource(paths=paths, layout=LAYOUT, to_rows=COLUMNS.rows) for name, paths in files.items()}
