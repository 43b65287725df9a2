import errno
import os
from datetime import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.proto.errors import JobError
from embershard.worker.data.columns import Columns
from embershard.worker.data.hashing import hash_texts
from embershard.worker.data.readers import parquet
from embershard.worker.data.readers.parquet import ParquetData

GLOBAL = Columns(ids="global")


def write(path, rows=1000, row_group_size=100, start=0, **columns):
    numbers = np.arange(start, start + rows)
    table = pa.table({"label": numbers % 2, "n": numbers, **columns})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def ids(batches):
    return [int(i) for batch in batches for i in batch.ids[:, 0]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 10])
def test_shares_are_disjoint_even_and_cover_everything(tmp_path, world_size):
    path = write(tmp_path / "a.parquet")
    data = ParquetData({"train": [path], "valid": [path]}, GLOBAL, num_ids=1000, shuffle_rows=150)
    shares = [ids(data.train(0, rank, world_size, 16)) for rank in range(world_size)]
    assert sorted(i for share in shares for i in share) == list(range(1000))
    assert max(map(len, shares)) - min(map(len, shares)) <= 100
    with pytest.raises(JobError, match="10 row groups"):
        next(data.train(0, 0, 11, 16))
    evaluated = [ids(data.evaluate("valid", rank, world_size, 16)) for rank in range(world_size)]
    assert sorted(i for share in evaluated for i in share) == list(range(1000))
    assert data.num_samples("train") == 1000


def test_no_more_than_a_part_of_a_row_group_is_decoded_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "READ_ROWS", 64)
    path = write(tmp_path / "a.parquet", row_group_size=1000)
    data = ParquetData({"train": [path]}, GLOBAL, num_ids=1000)
    sizes = [len(rows) for rows in data._sources["train"].blocks(0, 1, None)]
    assert max(sizes) <= 64
    assert sum(sizes) == 1000


def test_folders_stand_for_their_files(tmp_path):
    write(tmp_path / "b.parquet", rows=10, start=10)
    write(tmp_path / "a.parquet", rows=10)
    (tmp_path / "readme.txt").write_text("no data")
    data = ParquetData({"train": [tmp_path]}, GLOBAL, num_ids=20)
    assert ids(data.evaluate("train", 0, 1, 7)) == list(range(20))


def test_every_kind_of_column(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table(
        {
            "click": [True, False, True],
            "word": pa.array(["x", None, "y"]).dictionary_encode(),
            "number": pa.array([7, 8, None], pa.int32()),
            "price": [1.0, float("nan"), None],
            "age": pa.array([3, 0, 1], pa.int8()),
            "count": [20_000_001, None, 0],
        }
    )
    pq.write_table(table, path)
    data = ParquetData({"train": [path]}, Columns(label="click", numeric=("age", "count", "price"), log=True))
    (batch,) = data.evaluate("train", 0, 1, 10)
    assert data.schema.features == ("word", "number")
    assert batch.labels.tolist() == [1, 0, 1]
    assert batch.ids[:, 0].tolist() == hash_texts("word", pa.array(["x", "", "y"])).tolist()
    assert batch.ids[:, 1].tolist() == hash_texts("number", pa.array(["7", "8", ""])).tolist()
    want = [[1, 3, 20_000_001], [0, 0, 0], [0, 1, 0]]
    np.testing.assert_allclose(batch.dense.numpy(), np.log1p(want), rtol=1e-6)
    plain = ParquetData({"train": [path]}, Columns(label="click", numeric=("count",), skip=("price",)))
    (batch,) = plain.evaluate("train", 0, 1, 10)
    assert batch.dense[:, 0].tolist() == [np.float32(20_000_001), 0, 0]  # rounded


def test_broken_files_are_named(tmp_path):
    good = write(tmp_path / "a.parquet").read_bytes()
    path = tmp_path / "b.parquet"
    with pytest.raises(JobError, match=r"b\.parquet: no such file"):
        ParquetData({"train": [path]})
    for text in (b"", b"label,n\n", good[: len(good) // 2], good[:-8]):
        path.write_bytes(text)
        with pytest.raises(JobError, match=r"b\.parquet: not a whole Parquet file"):
            ParquetData({"train": [path]})
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match=r"no \*\.parquet file"):
        ParquetData({"train": [tmp_path / "empty"]})
    with pytest.raises(JobError, match="no train file"):
        ParquetData({"valid": [tmp_path]})


@pytest.mark.parametrize("call", [(os, "stat"), (Path, "iterdir"), (pq, "ParquetFile")], ids=lambda call: call[1])
def test_what_cannot_be_read_is_neither_empty_nor_cut(tmp_path, monkeypatch, call):
    def denied(*_given, **_options):
        raise PermissionError(errno.EACCES, "Permission denied")

    write(tmp_path / "a.parquet")
    with monkeypatch.context() as patched:
        patched.setattr(*call, denied)
        with pytest.raises(JobError, match=r"cannot be read: Permission denied"):
            ParquetData({"train": [tmp_path]})


@pytest.mark.parametrize(
    ("columns", "values", "error"),
    [
        (GLOBAL, {"n": [1, 2, -3]}, r"row group 0: column 'n' has an id that is missing or negative"),
        (GLOBAL, {"n": [1, None, 3]}, r"row group 0: column 'n' has an id that is missing or negative"),
        (GLOBAL, {"n": [1, 5, 3]}, r"row group 0: column 'n': id 5 is not below num_ids = 5"),
        (GLOBAL, {"n": ["a", "b", "c"]}, r"row group 0: column 'n' is no id"),
        (Columns(), {"n": [1.5, 2.0, 3.0]}, r"a\.parquet: column 'n' has double values: not categorical"),
        (
            Columns(),
            {"n": [time(12), time(13), None]},
            r"a\.parquet: column 'n' has time64\[us\] values: not categorical",
        ),
        (Columns(), {"label": [0, 1, 2]}, r"row group 0: column 'label' has a label that is not 0 or 1"),
        (Columns(numeric=("x",)), {"x": [0, float("inf"), 2]}, "column 'x' has a number that is not finite"),
        (Columns(numeric=("y",)), {}, r"no column 'y' \(there are: label, n\)"),
        (Columns(skip=("m",)), {}, r"no column 'm' \(there are: label, n\)"),
        (Columns(skip=("n",)), {}, "no categorical column is left"),
    ],
)
def test_bad_values_are_named(tmp_path, columns, values, error):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": [0, 1, 0], "n": [1, 2, 3]} | values), path)
    with pytest.raises(JobError, match=error):
        list(ParquetData({"train": [path]}, columns, num_ids=5).train(0, 0, 1, 10))


@pytest.mark.parametrize("columns", [{"label": [1], "other": [2]}, {"label": [1], "n": [2.0]}])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_every_file_of_every_split_is_looked_at_first(tmp_path, split, columns):
    first, second = write(tmp_path / "a.parquet"), tmp_path / "b.parquet"
    pq.write_table(pa.table(columns), second)
    with pytest.raises(JobError, match=r"b\.parquet: .*column 'n'"):
        ParquetData({"train": [first], split: [first, second]})


def test_a_split_without_rows_is_refused_and_an_empty_file_beside_others_is_not(tmp_path):
    first, empty = write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", rows=0)
    assert ParquetData({"train": [first], "valid": [empty, first]}).num_samples("valid") == 1000
    for files in ({"train": [empty]}, {"train": [first], "valid": [empty]}):
        with pytest.raises(JobError, match=r"b\.parquet: no rows in the file"):
            ParquetData(files)
