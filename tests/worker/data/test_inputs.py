"""Rows of a request become the ids and dense features that the job's reader makes of the same rows in a file."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embershard.errors import BadRows
from embershard.worker.data.columns import Columns
from embershard.worker.data.inputs.rows import CategoricalInput, NumericInput, RowInputs
from embershard.worker.data.readers.adult import CATEGORICAL, LAYOUT, NUMERIC, Adult
from embershard.worker.data.readers.clicks import ClickStream
from embershard.worker.data.readers.criteo import CriteoTsv
from embershard.worker.data.readers.ctr_csv import CtrCsv
from embershard.worker.data.readers.parquet import ParquetData

ADULT = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, <=50K
50, Private, 83311, Bachelors, 13, Divorced, ?, Husband, White, Female, 0, 0, 13, Cuba, >50K
38, Private, 215646, HS-grad, 9, Divorced, Sales, Not-in-family, Black, Male, 0, 0, 40, Peru, <=50K
"""


def csv(folder):
    text = "label,a,b,n,m,s\n1,x,7,1.5,-2,p\n0,,é,,3,q\n1, x,007,16777217,1e-3,r\n"
    (folder / "a.csv").write_text(text)
    rows = {"a": ["x", None, " x"], "b": [7, "é", "007"], "n": [1.5, None, 16777217], "m": [-2, 3, 1e-3]}
    return CtrCsv({"train": folder / "a.csv"}, Columns(numeric=("n", "m"), skip=("s",), log=True)), rows


def global_csv(folder):
    (folder / "a.csv").write_text("label,u,i,n\n1,0,5,1\n0,1,6,\n")
    data = CtrCsv({"train": folder / "a.csv"}, Columns(numeric=("n",), ids="global"))
    return data, {"u": np.array([0, 1]), "i": [5, 6], "n": np.array([1, np.nan]), "label": [1, 0]}


def parquet(folder):
    table = pa.table(
        {"label": [1, 0], "a": pa.array([7, None]), "b": [True, False], "d": ["x", "y"], "n": pa.array([1, None])}
    )
    table = table.set_column(3, "d", table["d"].dictionary_encode())
    pq.write_table(table, folder / "a.parquet")
    return ParquetData({"train": [folder / "a.parquet"]}, Columns(numeric=("n",))), table


def criteo(folder):
    line = ["1", "5", *[""] * 12, "68fd1e64", *[""] * 25]
    (folder / "a.tsv").write_text("\t".join(line) + "\n")
    rows = dict(zip((f"I{i}" for i in range(1, 14)), [[5], *[[None]] * 12], strict=True))
    rows |= dict(zip((f"C{i}" for i in range(1, 27)), [["68fd1e64"], *[[""]] * 25], strict=True))
    return CriteoTsv({"train": [folder / "a.tsv"]}), rows


def adult(folder, **settings):
    (folder / "adult.data").write_text(ADULT)
    (folder / "adult.test").write_text(ADULT.replace("Peru", "Oz"))
    lines = [line.split(", ") for line in ADULT.replace("Peru", "Oz").splitlines()]
    columns = dict(zip(LAYOUT.columns, zip(*lines, strict=True), strict=True))
    rows = {name: columns[name] for name in CATEGORICAL} | {name: [*map(int, columns[name])] for name in NUMERIC}
    return Adult(folder / "adult.data", folder / "adult.test", **settings), rows


def standardised(folder):
    return adult(folder, standardise=True)


def clicks(folder):
    data = ClickStream(eval_samples=20)
    (batch,) = data.evaluate("test", 0, 1, 100)
    firsts = [feature.first for feature in data.inputs.categorical]
    rows = dict(zip(data.inputs.names, [*(batch.ids - torch.tensor(firsts)).T.tolist(), *batch.dense.T], strict=True))
    return data, rows


@pytest.mark.parametrize("case", [csv, global_csv, parquet, criteo, adult, standardised, clicks])
def test_rows_become_what_the_reader_makes_of_them(tmp_path, case):
    data, rows = case(tmp_path)
    (batch,) = data.evaluate("test" if "test" in data.splits else "train", 0, 1, 100)
    inputs = RowInputs.of(json.loads(json.dumps(data.inputs.as_data())))  # as an export has it
    ids, dense = inputs(rows)
    assert ids.tolist() == batch.ids.tolist()
    np.testing.assert_array_equal(dense, batch.dense)
    ids, dense = inputs({name: [] for name in inputs.names})
    assert (len(ids), len(dense)) == (0, 0)


INPUTS = RowInputs(
    categorical=(
        CategoricalInput(name="h"),
        CategoricalInput(name="g", ids="global", num_ids=10),
        CategoricalInput(name="v", ids="vocabulary", values=("a", "b")),
    ),
    numeric=(NumericInput(name="n"), NumericInput(name="r", required=True)),
    ignored=("label",),
)
GOOD = {"h": ["x"], "g": [1], "v": ["a"], "n": [1.0], "r": [2]}


@pytest.mark.parametrize(
    ("change", "feature", "value"),
    [
        ({"other": [1]}, "other", None),
        ({"h": None}, "h", "None"),
        ({"h": ...}, "h", None),
        ({"h": ["x", "y"]}, "g", 1),
        ({"h": "x"}, "h", "'x'"),
        ({"h": [1.0]}, "h", "1.0"),
        ({"h": [["x"]]}, "h", "['x']"),
        ({"h": [["x", "y"]], "g": [1, 2]}, "h", "['x', 'y']"),
        ({"g": [{"id": 1}], "h": ["x", "y"]}, "g", "{'id': 1}"),
        ({"h": ["\ud800"]}, "h", "'\\ud800'"),
        ({"h": np.array([[1]])}, "h", "array([[1]])"),
        ({"g": [-1]}, "g", "-1"),
        ({"g": [10]}, "g", "10"),
        ({"g": [None]}, "g", "None"),
        ({"g": ["1"]}, "g", "'1'"),
        ({"g": [True]}, "g", "True"),
        ({"v": [0.5]}, "v", "0.5"),
        ({"n": ["1"]}, "n", "'1'"),
        ({"n": [float("inf")]}, "n", "inf"),
        ({"n": [1e300]}, "n", "1e+300"),
        ({"r": [None]}, "r", "None"),
    ],
    ids=str,
)
def test_a_feature_that_cannot_be_used_is_named_with_its_value(change, feature, value):
    INPUTS({**GOOD, "label": [0]})
    rows = {name: values for name, values in {**GOOD, **change}.items() if values is not ...}
    with pytest.raises(BadRows) as raised:
        INPUTS(rows)
    assert (raised.value.fields["feature"], raised.value.fields["value"]) == (feature, value)


def test_rows_have_to_be_columns_by_name():
    with pytest.raises(TypeError):
        INPUTS([{"h": "x"}])
