"""Which column is the label, what its values stand for, and which columns would tell it."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.init.look import CannotInit
from embershard.worker.job.load import load_job
from harness.init_tables import as_text, features_of, job_of, run


def test_a_label_with_missing_values_is_named_and_no_other_column_taken_in_its_place():
    columns = {"clicked": [0, 1, None, 1] * 10, "is_male": [0, 1] * 20, "user": [f"u{n}" for n in range(40)]}
    with pytest.raises(CannotInit, match=r"'clicked' has no value in 10 of 40 rows.*leave these rows out"):
        features_of(columns)
    assert features_of(columns, "is_male")["data"]["label"] == "is_male"
    columns["clicked"] = [0, 1, "maybe", 1] * 10  # no value is missing
    assert features_of(columns)["data"]["label"] == "is_male"


def test_a_second_label_and_a_column_that_tells_the_label_are_no_features():
    rows = range(300)
    columns = {
        "click": [n % 3 % 2 for n in rows],
        "conversion": [int(n % 6 == 1) for n in rows],
        "was_clicked": [["no", "yes"][n % 3 % 2] for n in rows],
        "shown": [5 if n % 3 % 2 else 7 for n in rows],
        "vip": [n % 2 for n in rows],
        "user": [f"u{n % 7}" for n in rows],
    }
    job = features_of(columns)
    assert (job["data"]["label"], list(job["features"])) == ("click", ["vip", "user"])
    assert list(features_of(columns, "conversion")["features"]) == ["was_clicked", "shown", "vip", "user"]
    tags = {**columns, "tags": [["a"]] * 300}
    assert "vip" in features_of(tags, "tags")["features"]  # what the label may be is checked elsewhere
    few = {name: values[:30] for name, values in columns.items()}  # which may be alike by chance
    assert "shown" in features_of(few)["features"]


@pytest.mark.parametrize(
    ("texts", "positive"),
    [
        (("no", "yes"), "yes"),
        (("True", "False"), "True"),
        (("y", "n"), "y"),
        (("bought", "left"), "bought"),
        (("ja", "nein"), "ja"),
    ],
)
def test_a_label_of_two_texts_is_declared(texts, positive):
    rows = [{"user": f"u{n % 7}", "bought": texts[n % 2], "x": n / 3} for n in range(200)]
    job = job_of(rows)
    assert job.data.label == ("bought",)
    assert job.data.label_values[1] == positive
    (batch,) = job.data.open(Path(), 0).evaluate("train", 0, 1, 999)
    assert set(batch.labels.tolist()) == {0.0, 1.0}


def test_a_label_of_two_texts_is_found_beside_numbers_of_which_there_are_two_and_texts_of_such():
    rows = [{"bought": "yn"[n % 2], "side": n // 2 % 2 * 2 - 1, "shop": f"0{7 + n // 4 % 2 * 5}"} for n in range(200)]
    assert job_of(rows).data.label == ("bought",)


LABELS = {  # name: (what it writes into a file, its values, label_values)
    "parquet": ("a.parquet", (-1, 1), ("-1", "1")),
    "csv": ("a.csv", ("-1", "1"), ("-1", "1")),
    "signs": ("a.csv", ("-1", "+1"), ("-1", "+1")),
    "floats": ("a.parquet", (-1.0, 1.0), ("-1", "1")),
    "floats of csv": ("a.csv", ("1.0", "-1.0"), ("-1.0", "1.0")),
    "others": ("a.parquet", (1, 2), ("1", "2")),
    "other floats": ("a.parquet", (1.0, 2.0), ("1", "2")),
    "other floats of csv": ("a.csv", ("2.0", "1.0"), ("1.0", "2.0")),
}


@pytest.mark.parametrize("case", LABELS)
def test_a_label_of_two_integers_is_declared(case):
    name, values, declared = LABELS[case]
    rows = [{"user": f"u{n % 7}", "click": values[n % 2], "x": n / 3} for n in range(200)]
    if name == "a.csv":
        Path(name).write_text(as_text(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), name)
    if "other" in case:
        with pytest.raises(CannotInit, match="no column of zeros and ones"):
            run(name)
    run(name, *(["--label", "click"] if "other" in case else []))
    job = load_job(Path("job.yaml"))
    assert (job.data.label, job.data.label_values) == (("click",), declared)
    (batch,) = job.data.open(Path(), 0).evaluate("train", 0, 1, 999)
    assert set(batch.labels.tolist()) == {0.0, 1.0}


def test_a_column_of_minus_one_and_one_is_no_label_beside_one_of_zeros_and_ones():
    columns = {"clicked": [0, 1] * 20, "side": [-1, 1, 1, -1] * 10, "user": [f"u{n}" for n in range(40)]}
    job = features_of(columns)
    assert (job["data"]["label"], "label_values" in job["data"]) == ("clicked", False)
    assert features_of(columns, "side")["data"]["label_values"] == ["-1", "1"]


@pytest.mark.parametrize(
    ("columns", "reason", "declared"),
    [
        ({"is_male": [0, 1] * 20, "saw_ad": [1, 0] * 20}, "is_male, saw_ad; name the label by --label", None),
        ({"shop": ["007", "012"] * 20}, ".", ["007", "012"]),  # texts of numbers
        ({"a": ["x", "y"] * 20, "b": ["p", "q"] * 20}, ".", ["p", "q"]),
    ],
)
def test_of_columns_that_may_be_the_label_or_not_none_is_taken_unless_it_is_named(columns, reason, declared):
    label, columns = list(columns)[-1], {**columns, "user": [f"u{n}" for n in range(40)]}
    with pytest.raises(CannotInit, match=reason):
        features_of(columns)
    data = features_of(columns, label)["data"]
    assert (data["label"], data.get("label_values")) == (label, declared)


def test_a_column_named_label_of_two_texts_is_the_label_beside_one_of_zeros_and_ones():
    columns = {"is_new": [row % 2 for row in range(50)], "label": ["no", "yes"] * 25, "user": list(range(50))}
    assert features_of(columns)["data"]["label"] == "label"
