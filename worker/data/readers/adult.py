"""UCI's Adult census income files (adult.data, adult.test), prepared as PERSIA's example and tests do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from embershard.proto.errors import JobError
from embershard.worker.data.batch import RowsDataset, Samples, Schema
from embershard.worker.data.files import BLOCK_BYTES, LOOK_BYTES, read_blocks
from embershard.worker.data.inputs.rows import CategoricalInput, NumericInput, RowInputs
from embershard.worker.data.text import Kind, Layout, column, read_tables

CATEGORICAL = (
    "workclass",
    "education",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "gender",
    "native_country",
)
NUMERIC = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")
_KINDS: dict[str, Kind] = {
    "age": "number",
    "workclass": "text",
    "fnlwgt": "skip",
    "education": "text",
    "education_num": "number",
    "marital_status": "text",
    "occupation": "text",
    "relationship": "text",
    "race": "text",
    "gender": "text",
    "capital_gain": "number",
    "capital_loss": "number",
    "hours_per_week": "number",
    "native_country": "text",
    "income": "label",
}
# every field but the first begins with a space; labels of the test file end in a dot
_INCOME = {" <=50K": 0.0, " >50K": 1.0, " <=50K.": 0.0, " >50K.": 1.0}
LAYOUT = Layout(columns=_KINDS, label_values=_INCOME, missing=())


class Adult(RowsDataset):
    """8 categorical features and 5 numbers in memory; `test` is optional. `skip` leaves categorical features out.

    PERSIA's recipe takes the numbers as they are and the samples in file order (shuffle=False, standardise=False).
    Ids are the places of the train file's values in sorted order, feature after feature; "?" is a value like others,
    and each feature has one more id for values that only another file has. (PERSIA numbers the test file's values
    anew, which shifts the countries: .001 less AUC.) Labels are `income` (above 50K), `never_married`, or both.
    """

    def __init__(
        self,
        train: Path,
        test: Path | None = None,
        *,
        standardise: bool = False,
        shuffle: bool = False,
        labels: Sequence[str] = ("income",),
        skip: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        files = {"train": train} if test is None else {"train": train, "test": test}
        tables = {name: _read(path) for name, path in files.items()}
        vocabularies = {name: np.unique(_texts(tables["train"], name)) for name in CATEGORICAL if name not in skip}
        dense = {name: np.stack([column(table, n) for n in NUMERIC], axis=1) for name, table in tables.items()}
        mean: npt.NDArray[np.float64] = np.zeros(len(NUMERIC))
        std: npt.NDArray[np.float64] = np.ones(len(NUMERIC))
        if standardise:
            mean, std = (np.asarray(f(dense["train"], axis=0, dtype=np.float64)) for f in (np.mean, np.std))
            std = np.asarray(np.where(std > 0, std, 1))
            dense = {name: (x - mean) / std for name, x in dense.items()}
        rows = {
            name: Samples(_ids(table, vocabularies), dense[name].astype(np.float32), _labels(table, labels))
            for name, table in tables.items()
        }
        self.inputs = _inputs(vocabularies, mean.tolist(), std.tolist())
        num_ids = sum(len(known) + 1 for known in vocabularies.values())
        schema = Schema(tuple(vocabularies), len(NUMERIC), num_ids, labels=tuple(labels))
        super().__init__(schema, rows, where=str(train), seed=seed, shuffle=shuffle)


def look(paths: Iterable[Path]) -> None:
    """Parse the first lines of every file, without torch. JobError names file:line of what is wrong."""
    for path in paths:
        _whole(path, next(_tables(path, LOOK_BYTES)))


def _read(path: Path) -> pa.Table:
    return _whole(path, pa.concat_tables(_tables(path)))


def _tables(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[pa.Table]:
    # adult.test as published begins with "|1x3 Cross validator"; without it the first line is a sample
    note = next(read_blocks(path, block_bytes=1 << 10)).text.startswith(b"|")
    return read_tables(path, LAYOUT, skip_lines=int(note), block_bytes=block_bytes)


def _whole(path: Path, table: pa.Table) -> pa.Table:
    """A table in which no number is missing. JobError where one is."""
    for name in NUMERIC:
        if table.column(name).null_count:
            raise JobError(where=str(path), reason=f"column {name!r} has missing values")
    return table


def _texts(table: pa.Table, name: str) -> npt.NDArray[np.str_]:
    return np.asarray(pc.utf8_trim_whitespace(table.column(name)).to_pylist(), dtype=np.str_)


def _ids(table: pa.Table, vocabularies: Mapping[str, npt.NDArray[np.str_]]) -> npt.NDArray[np.int64]:
    """(N, F) offset of the feature + place in its vocabulary, or the place behind it where unknown."""
    ids = np.empty((table.num_rows, len(vocabularies)), np.int64)
    offset = 0
    for i, (name, known) in enumerate(vocabularies.items()):
        texts = _texts(table, name)
        place = np.searchsorted(known, texts)
        unknown = known[np.minimum(place, len(known) - 1)] != texts
        ids[:, i] = offset + np.where(unknown, len(known), place)
        offset += len(known) + 1
    return ids


def _inputs(vocabularies: Mapping[str, npt.NDArray[np.str_]], mean: Sequence[float], std: Sequence[float]) -> RowInputs:
    """What is done with these columns, for what serves the model."""
    categorical, first = [], 0
    for name, known in vocabularies.items():
        categorical.append(CategoricalInput(name=name, ids="vocabulary", values=tuple(known.tolist()), first=first))
        first += len(known) + 1
    scales = zip(NUMERIC, mean, std, strict=True)
    return RowInputs(
        categorical=tuple(categorical),
        numeric=tuple(NumericInput(name=name, mean=m, std=s, required=True) for name, m, s in scales),
        ignored=(*LAYOUT.names("label", "skip"), *(name for name in CATEGORICAL if name not in vocabularies)),
    )


def _labels(table: pa.Table, names: Sequence[str]) -> npt.NDArray[np.float32]:
    """(N,) of one label, (N, L) of several."""
    found = {
        "income": [_INCOME[text] for text in column(table, "income")],
        "never_married": _texts(table, "marital_status") == "Never-married",
    }
    chosen = [np.array(found[name], np.float32) for name in names]
    return chosen[0] if len(chosen) == 1 else np.stack(chosen, axis=1)
