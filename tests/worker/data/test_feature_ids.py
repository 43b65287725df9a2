import json
from datetime import date, datetime, time, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import embershard as es
from embershard.proto.arrays import mix64
from embershard.proto.optim.initial_rows import initial_rows
from embershard.proto.spec import Initializer
from embershard.worker.data.hashing import hash_column, hash_numbers, hash_texts
from embershard.worker.data.inputs.feature_ids import feature_ids, feature_key, spelled

VECTORS = json.loads((Path(__file__).resolve().parents[3] / "docs" / "ids.json").read_text())


def plain_hash(feature: str, text: str) -> int:
    return int(mix64(np.array([feature_key(text)], np.uint64), feature_key(feature))[0]) >> 2


def test_golden_values_that_trained_models_depend_on():
    assert feature_key("") == 0xCBF29CE484222325  # of FNV-1a's own test suite, as is the next
    assert feature_key("foobar") == 0x85944171F73967E8
    texts = pa.array(["68fd1e64", "80e26c9b", "", None])
    assert hash_texts("C1", texts).tolist() == [1967393312682577910, 3389191576056925162, *2 * [822756714119015051]]
    assert hash_texts("C2", texts[:1]).tolist() == [945191552597813388]
    users = [4604571015714533304, 3415556649193756730, 2953700271109957636]
    assert hash_numbers("user", np.array([0, 1, -1])).tolist() == users


@settings(max_examples=30)
@given(st.text(max_size=5), st.lists(st.one_of(st.none(), st.text(max_size=30)), min_size=1, max_size=20))
def test_hash_equals_its_definition(feature, texts):
    found = hash_texts(feature, pa.array(texts, pa.string()))
    assert found.tolist() == [plain_hash(feature, text or "") for text in texts]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_slices_and_chunks_hash_as_the_whole(kind):
    texts = pa.array([b"a", b"bc", b"", b"def"]).cast(kind)
    whole = hash_texts("f", texts)
    assert hash_texts("f", texts[1:3]).tolist() == whole[1:3].tolist()
    assert hash_texts("f", pa.chunked_array([texts[:1], texts[1:]])).tolist() == whole.tolist()
    assert hash_texts("f", pa.chunked_array([], kind)).tolist() == []


INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_integers_have_the_ids_of_their_decimal_texts(kind):
    bounds = np.iinfo(kind.to_pandas_dtype())
    powers = [sign * 10**digits - less for digits in range(20) for less in (0, 1) for sign in (1, -1)]
    values = [bounds.min, None, *(value for value in powers if bounds.min <= value <= bounds.max), bounds.max]
    want = [plain_hash("f", "" if value is None else str(value)) for value in values]
    array = pa.array(values, kind)
    assert hash_column("f", array).tolist() == want
    assert hash_column("f", array[2:]).tolist() == want[2:]
    assert hash_column("f", pa.chunked_array([array[:1], array[1:].drop_null()])).tolist() == [want[0], *want[2:]]


@pytest.mark.parametrize("values", [["a", None, "", "b", "a"], [7, None, -1, 7, 2**40]], ids=["texts", "integers"])
def test_a_dictionary_has_the_ids_of_its_values(values):
    array = pa.array(values).dictionary_encode()
    want = [plain_hash("f", "" if value is None else str(value)) for value in values]
    assert hash_column("f", array).tolist() == want
    assert hash_column("f", array[1:3]).tolist() == want[1:3]
    own = pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 1], pa.int8()), pa.array([None, "b"]))
    assert hash_column("f", own).tolist() == [plain_hash("f", text) for text in ("b", "", "", "b")]


def test_ids_are_non_negative_and_spread_without_collisions():
    ids = np.concatenate([hash_numbers(f, np.arange(200_000)) for f in ("a", "b")])
    assert ids.min() >= 0
    assert ids.max() < 2**62
    assert len(np.unique(ids)) == 400_000


@pytest.mark.parametrize("case", VECTORS["ids"], ids=lambda case: case["column"] or "no name")
def test_the_ids_of_the_specification(case):
    column, values = case["column"], [value for value, _ in case["values"]]
    wanted = [int(found) for _, found in case["values"]]
    assert [es.feature_id(column, value) for value in values] == wanted
    keys = np.full(len(values), feature_key(column), np.uint64)
    assert feature_ids(keys, [spelled(value) for value in values]).tolist() == wanted
    assert [int(es.hash_ids(column, [value])[0]) for value in values] == wanted


@pytest.mark.parametrize("case", VECTORS["first_rows"], ids=lambda case: case["initializer"]["name"])
def test_the_first_rows_of_the_specification(case):
    settings = dict(case["initializer"])
    initializer = Initializer.of(settings.pop("name"), settings)
    found = initial_rows(initializer, int(case["row_seed"], 16), np.array(case["ids"], np.int64), 3)
    assert found.tolist() == case["rows"]


@pytest.mark.parametrize("value", [1.0, float("nan"), b"a", ["a"], np.float32(1)], ids=str)
def test_a_value_that_is_no_category_has_no_id(value):
    with pytest.raises(TypeError):
        es.feature_id("a", value)
    if isinstance(value, float):
        with pytest.raises(TypeError):
            es.hash_ids("a", [value, None])


@pytest.mark.parametrize("value", [1.0, time(12), datetime(2026, 1, 1), timedelta(1)], ids=str)
@pytest.mark.parametrize("is_dictionary", [False, True])
def test_a_value_with_several_texts_has_no_id(value, is_dictionary):
    values = pa.array([value, None])
    with pytest.raises(TypeError):
        es.hash_ids("a", values.dictionary_encode() if is_dictionary else values)


def test_a_date_is_its_text():
    day = date(2026, 1, 31)
    text = es.feature_id("a", "2026-01-31")
    assert [*es.hash_ids("a", pa.array([day])).tolist(), es.feature_id("a", day)] == [text, text]
