"""Rows of a request for a job with features: values of several types, and what is said of those that are none."""

import numpy as np
import pyarrow as pa
import pytest

from embershard.proto.errors import BadRows
from embershard.worker.data.preprocess import FeatureSpec, Preprocessor
from embershard.worker.trained.served_inputs import FeatureInputs

FEATURES = {
    "user": FeatureSpec(),
    "tags": FeatureSpec(type="list", max_length=2),
    "age": FeatureSpec(type="number"),
}
GOOD = {"user": ["1", "2"], "tags": [["1", "a"], []], "age": [1.5, 2]}


@pytest.fixture(scope="module")
def inputs():
    return FeatureInputs({**Preprocessor(FEATURES).to_dict(), "ignored": []})


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"user": ["1", 2]},
        {"user": (np.int64(1), "2")},
        {"tags": [[1, "a"], []]},
        {"tags": (["1", "a"], None)},
        {"age": ["1.5", 2]},
    ],
)
def test_texts_and_integers_may_be_in_one_column(inputs, change):
    assert same(inputs({**GOOD, **change}), inputs(GOOD))


class Series:
    """A column of polars: the lists in it are Series, too."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return (Series(value) if isinstance(value, list) else value for value in self.values)

    def to_arrow(self):
        return pa.array(self.values)


class Schema(dict):
    def names(self):
        return list(self)


class Frame:
    """A data frame of polars, which is no mapping, with a schema that has a method `names`."""

    schema = Schema(GOOD)
    columns = tuple(GOOD)

    def __getitem__(self, name):
        return Series(GOOD[name])


def test_a_data_frame_of_polars_is_rows(inputs):
    assert same(inputs(Frame()), inputs(GOOD))


def test_an_integer_of_64_bits_is_its_text(inputs):
    large = [2**63 + 1, 2]
    assert same(inputs({**GOOD, "user": large}), inputs({**GOOD, "user": list(map(str, large))}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"user": ["1", 2.0]}, "row 1: 2.0 is neither a text nor an integer"),
        ({"user": [None, 2.0]}, "row 1: 2.0 is neither a text nor an integer"),
        ({"user": np.array([1.0, 2.0])}, "row 0: 1.0 is neither a text nor an integer"),
        ({"tags": [None, [1.5, None]]}, r"row 1: \[1.5, None\] has a value that is neither a text nor an integer"),
        ({"user": ["1", "\ud800"]}, "row 1: .* has characters that UTF-8 cannot spell"),
        ({"tags": [["1"], ["a", 1.5]]}, "row 1: 1.5 is neither a text nor an integer"),
        ({"tags": [["1"], "a"]}, "tags|list"),
        ({"tags": [None, "a"]}, "row 1: 'a' is no list of values"),
        ({"tags": [[], [{"a": 1}]]}, r"row 1: \[{'a': 1}\] .*is struct"),
        ({"age": ["many", 1]}, "'many' is not a number"),
        ({"age": [1.5, object()]}, "row 1: .* is no number"),
        ({"user": 7}, "7"),
        ({"user": {"a": 1, "b": 2}}, "{'a': 1, 'b': 2} is no list of values"),
        ({"user": [["1", "2"]]}, r"row 0: \['1', '2'\] is no single value"),
        ({"user": [None, {"id": 1}]}, "row 1: {'id': 1} is no single value"),
    ],
)
def test_a_value_that_is_none_is_named_with_its_row(inputs, change, reason):
    with pytest.raises(BadRows, match=reason) as found:
        inputs({**GOOD, **change})
    assert found.value.fields["feature"] == next(iter(change))
    assert found.value.fields["value"]


def test_a_column_without_a_value_is_missing_whatever_its_type(inputs):
    """As pandas has one of floats, and Arrow one of nulls."""
    missing = inputs({**GOOD, "user": [None, None]})
    for column in (pa.nulls(2), pa.nulls(2, pa.float64()), np.array([np.nan] * 2)):
        assert same(inputs({**GOOD, "user": column}), missing)
    assert same(inputs({**GOOD, "tags": pa.nulls(2, pa.float64())}), inputs({**GOOD, "tags": [None, []]}))
