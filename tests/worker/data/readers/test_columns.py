"""Columns of tables: those read as dictionaries, lists that are cut, and files with their columns in another order."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import embershard as es
from embershard.worker.data.preprocess import FeatureSpec, Preprocessor
from embershard.worker.data.readers import tabular_files
from embershard.worker.data.values import BadValue
from embershard.worker.job.load import load_job

REST = "embedding: {optimizer: {name: sgd, lr: 0.1}}\ntrain: {epochs: 1, batch_size: 32}\n"


def fitted(folder, features, **data):
    """The data section of a table with these features, for a model that may read sequences."""
    text = (
        f"model: {{class: own:Model}}\ndata: {json.dumps({'reader': 'tabular', **data})}\nfeatures: {features}\n{REST}"
    )
    (folder / "job.yaml").write_text(text)
    return load_job(folder / "job.yaml").data.fit(folder, 0)


FEATURES = """
  user: {}
  tags: {type: list, weight_separator: ":", max_length: 3}
  history: {type: sequence, table: user, max_length: 2, too_long: truncate}
  number: {ids: exact, num_ids: 100}
  common: {min_count: 3}
  price: {type: number}
  both: {type: cross, of: [user, number]}
"""


def repeating(rows=300):
    draw = np.random.default_rng(1)
    texts = lambda count, size: [None if i == 3 else f"t{i}" for i in draw.integers(0, size, count)]  # noqa: E731
    return {
        "user": texts(rows, 20),
        "tags": [[f"a{i}:{i}" for i in draw.integers(0, 9, n)] for n in draw.integers(0, 4, rows)],
        "history": [texts(n, 20) if n else None for n in draw.integers(0, 5, rows)],
        "number": [str(i) for i in draw.integers(0, 100, rows)],
        "common": texts(rows, 40),
        "price": [f"{i / 4}" for i in draw.integers(0, 9, rows)],
        "label": draw.integers(0, 2, rows),
    }


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_texts_that_repeat_are_read_as_dictionaries_and_have_the_same_ids(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tabular_files, "READ_ROWS", 40)
    columns = {name: pa.array(values) for name, values in repeating().items()}
    for name in ("user", "number", "common", "price"):
        columns[name] = columns[name].cast(kind)
    for name in ("tags", "history"):
        columns[name] = columns[name].cast(pa.large_list(kind))
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=100)
    section = fitted(tmp_path, FEATURES, train="a.parquet")
    dataset = section.open(tmp_path, 0)
    types = {
        table.schema.field("user").type
        for _, _, table in dataset._sources["train"]._tables(tmp_path / "a.parquet", 0, 40)
    }
    assert types == {pa.dictionary(pa.int32(), pa.string())}
    ids, dense = section.preprocessor()(columns)
    batches = list(dataset.evaluate("train", 0, 1, 1000))
    np.testing.assert_array_equal(np.concatenate([batch.ids for batch in batches]), ids)
    np.testing.assert_array_equal(np.concatenate([batch.dense for batch in batches]), dense)


def test_texts_that_hardly_repeat_are_read_as_texts(tmp_path):
    users = [f"u{i}" for i in range(200)]
    pq.write_table(pa.table({"user": users, "label": [0, 1] * 100}), tmp_path / "a.parquet", row_group_size=100)
    source = fitted(tmp_path, "{user: {}}", train="a.parquet").open(tmp_path, 0)._sources["train"]
    types = [table.schema.field("user").type for _, _, table in source._tables(tmp_path / "a.parquet", 0, 50)]
    assert pa.types.is_dictionary(types[0])
    assert [table.schema.field("user").type for _, _, table in source._tables(tmp_path / "a.parquet", 1, 50)] == 2 * [
        pa.string()
    ]


def test_a_line_break_is_named_with_its_row_where_others_share_the_dictionary(tmp_path):
    users = pa.array(["a", "b", "a", "b\nc", "a", "b"]).dictionary_encode()
    with pytest.raises(BadValue) as found:
        Preprocessor({"user": FeatureSpec()})({"user": users[1:]})
    assert found.value.row == 2
    ids, _ = Preprocessor({"user": FeatureSpec()})({"user": users[:3]})
    assert ids[:, 0].tolist() == es.hash_ids("user", ["a", "b", "a"]).tolist()


@pytest.mark.parametrize("feature", [{}, {"type": "number"}, {"type": "list", "separator": "|"}])
def test_a_text_that_is_not_utf_8_is_named_with_its_row(feature):
    _, ends, data = pa.array([b"1", b"2", b"J\xfcrgen", b"4"]).buffers()
    texts = pa.StringArray.from_buffers(4, ends, data)
    for column in (texts[1:], pa.chunked_array([texts[1:2], texts[2:]])):
        with pytest.raises(BadValue, match=r"column 'user': b'J\\xfcrgen' is not UTF-8") as found:
            Preprocessor({"user": FeatureSpec(**feature), "age": FeatureSpec()})({"user": column, "age": ["a"] * 3})
        assert found.value.row == 1


def test_columns_of_other_lengths_are_refused():
    preprocessor = Preprocessor({"user": FeatureSpec(), "age": FeatureSpec(type="number")})
    with pytest.raises(ValueError, match="user 2, age 1"):
        preprocessor({"user": ["a", "b"], "age": [1.0]})


@pytest.mark.parametrize("kind", ["list", "sequence"])
def test_a_long_list_keeps_its_first_values_and_a_sequence_its_last_ones(kind):
    feature = FeatureSpec(type=kind, max_length=2, too_long="truncate", weights="w")
    lists = [["a"], ["a", "b", "c"], [], None, ["d", "e", "f", "g"], ["h", "i"]]
    weights = [[1.0], [1.0, 2.0, 3.0], [], None, [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
    ids, dense = Preprocessor({"tags": feature})({"tags": lists, "w": weights})
    kept = slice(0, 2) if kind == "list" else slice(-2, None)
    for row, values in enumerate(lists):
        own = es.hash_ids("tags", (values or [])[kept]).tolist()
        assert ids[row].tolist() == own + [es.PADDING] * (2 - len(own))
        assert dense[row].tolist() == (weights[row] or [])[kept] + [0.0] * (2 - len(own))


def test_lines_of_json_are_split_alike_whatever_the_order_of_their_keys(tmp_path):
    rows = [{"user": f"u{i}", "age": i, "label": i % 2} for i in range(200)]
    found = []
    for order in (("user", "age", "label"), ("label", "age", "user")):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps({k: row[k] for k in order}) + "\n" for row in rows))
        section = fitted(tmp_path, "{user: {}}", train="train.jsonl", split={"by": "random", "test": 0.3})
        found.append(np.concatenate([batch.ids for batch in section.open(tmp_path, 0).evaluate("test", 0, 1, 64)]))
    np.testing.assert_array_equal(*found)
