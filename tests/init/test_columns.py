"""What each column is: a feature of a type, or left out with a reason."""

from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from embershard.worker.job.load import load_job
from harness.init_tables import features_of, job_of, run, text_of


def test_columns_become_what_their_values_are():
    rows = range(300)
    job = features_of(
        {
            "clicked": [n % 2 for n in rows],
            "other": [n % 3 % 2 for n in rows],
            "id": list(rows),
            "count": [n * n for n in rows],
            "ad_id": [n * 7 for n in rows],
            "code": [f"{n % 9:03}" for n in rows],
            "empty": [None] * 300,
            "text": [f"{n} is a long text that nobody wrote twice, because it has its number in front" for n in rows],
            "no": [n % 3 for n in rows],
            "the price": [n / 7 for n in rows],
        }
    )
    assert job["data"]["label"] == "clicked"
    assert job["features"] == {
        "other": {},
        "count": {"type": "number", "transform": "standardise"},
        "ad_id": {},
        "code": {},
        "no": {},
        "the price": {"type": "number", "transform": "standardise"},
    }
    assert job["data"]["split"] == {"by": "random", "valid": 0.1, "test": 0.1}


def test_names_of_ids_times_and_labels_are_known_in_every_spelling():
    rows = range(300)
    job = features_of(
        {
            "isMale": [n % 3 % 2 for n in rows],
            "isClick": [n % 2 for n in rows],
            "userId": [n * 7 for n in rows],
            "Item ID": [n * 5 for n in rows],
            "movieid": [n * 3 for n in rows],
            "SKUCode": [n * 2 for n in rows],
            "visitorid": [n * 11 for n in rows],
            "uid": [n * 13 for n in rows],
            "paid": [n * n for n in rows],
            "max_bid": [n * n for n in rows],
            "eventTime": [1_700_000_000 + n for n in rows],
        }
    )
    number = {"type": "number", "transform": "standardise"}
    assert (job["data"]["label"], job["data"]["split"]["column"]) == ("isClick", "eventTime")
    ids = ("isMale", "userId", "Item ID", "movieid", "SKUCode", "visitorid", "uid")
    assert job["features"] == {name: {} for name in ids} | {"paid": number, "max_bid": number}


def test_the_name_of_a_time_may_end_with_its_unit():
    rows = range(300)
    job = features_of(
        {
            "click": [n % 2 for n in rows],
            "user": [f"u{n % 7}" for n in rows],
            "play_time_ms": [n * n for n in rows],
            "time_ms": [1_700_000_000_000 + n for n in rows],
        }
    )
    assert job["data"]["split"]["column"] == "time_ms"
    assert job["features"].keys() == {"user", "play_time_ms"}


def test_numbers_with_a_unit_are_remarked_unless_they_are_few():
    columns = {
        "label": [0, 1] * 100,
        "price": [f"${n}.50" for n in range(200)],
        "share": [f"{n / 7:.1f} %" for n in range(200)],
        "profit": [f"-${n}.50" for n in range(200)],
        "change": [f"+{n}%" for n in range(200)],
        "discount": [f"{n % 3}0%" for n in range(200)],
    }
    found = text_of(columns)
    assert "# price: left out, its numbers have a unit, as $0.50: write them without" in found
    for name in ("share", "profit", "change"):
        assert f"# {name}: left out" in found
    assert "  discount: {}" in found


def test_numbers_alone_get_embeddings_of_their_buckets():
    job = features_of({"label": [0, 1] * 200, "x": [n / 3 for n in range(400)]})
    assert job["features"] == {"x": {"type": "number", "bucketise": 10}}


def test_columns_of_parquet_that_no_feature_can_read_are_left_out_and_decimals_are_numbers():
    rows = range(300)
    columns = {
        "label": [n % 2 for n in rows],
        "user": [f"u{n % 7}" for n in rows],
        "nested": [[[n], [1]] for n in rows],
        "map": pa.array([[("a", n)] for n in rows], pa.map_(pa.string(), pa.int64())),
        "floats": [[n / 7] for n in rows],
        "item_id": [float(n % 7) for n in rows],  # of integers some of which are missing
        "items": [[float(n % 7)] for n in rows],
        "st": [{"a": n, "b": [n]} for n in rows],
        "brackets": [f"[{n}, 1]" for n in rows],
        "when": [f"2026-01-01 {n // 60:02}:{n % 60:02}" for n in rows],
        "price": [Decimal(n) / 100 for n in rows],
        "hour": pa.array([n % 24 * 3600 for n in rows], pa.time32("s")),
        "stay": pa.array(rows, pa.duration("s")),
        "session": pa.array([bytes([255, n % 256] * 8) for n in rows], pa.uuid()),
        "ns": pa.array([n * 1001 for n in rows], pa.timestamp("ns")),
    }
    job_of(columns)
    features = YAML(typ="safe").load(Path("job.yaml"))["features"]
    assert features == {"user": {}, "price": {"type": "number", "transform": "standardise"}}
    text = Path("job.yaml").read_text()
    assert "# items: left out, it has lists of floats, as [0.0]: save ids as integers" in text
    assert "# st: left out, its values are objects: write their fields (a, b) as columns" in text


def test_a_list_shares_the_table_of_the_one_column_that_its_values_are_in():
    rows = range(300)
    items = [f"i{n % 40}" for n in rows]
    columns = {
        "label": [n % 2 for n in rows],
        "item": items,
        "user": [f"u{n % 50}" for n in rows],
        "History of items": [items[n : n + 3] for n in rows],
        "seen": ["|".join(items[n : n + 2]) for n in rows],
        "tags": [[f"t{n % 9}"] for n in rows],
        "shop_id": [100 + n % 60 for n in rows],
        "other_id": [100 + n % 70 for n in rows],
        "shops": [[100 + n % 30, 101] for n in rows],  # those of two columns
        "hour": [n % 24 for n in rows],
        "hours": [[n % 24, 3] for n in rows],  # small numbers say nothing
    }
    features = features_of(columns)["features"]
    assert {name: feature["table"] for name, feature in features.items() if "table" in feature} == {
        "History of items": "item", "seen": "item",
    }  # fmt: skip
    assert job_of(columns).features["seen"].table == "item"


def test_columns_of_any_name_become_features():
    rows = range(40)
    columns = {"label": [n % 2 for n in rows], "größe": list("abcd") * 10, "User ID": [n % 7 for n in rows]}
    job = features_of({**columns, "日 時": [["a"], ["b"]] * 20, "the price": [n / 7 for n in rows]})
    assert list(job["features"]) == ["größe", "User ID", "日 時", "the price"]
    assert job["features"]["日 時"]["type"] == "list"


def test_ids_that_are_floats_in_one_file_of_several_are_left_out():
    Path("parts").mkdir()
    for name, shift in (("a", 0), ("b", 0.0)):
        columns = {
            "label": [0, 1] * 100,
            "user_id": [n + shift for n in range(200)],
            "shop": ["x", "x", "y"] * 66 + ["y"] * 2,
        }
        pq.write_table(pa.table(columns), f"parts/{name}.parquet")
    run("parts")
    assert "# user_id: left out, its ids are floats, as 0.0: save integers" in Path("job.yaml").read_text()


DAYS = [date(2026, 1, 1) + timedelta(days=n) for n in range(200)]
GROUPS = [f"{n * 7:,}" for n in range(200)]
WRITTEN = {  # values of numbers and times as people write them: what is remarked
    "a few thousands": ([f"{text}.50" for text in GROUPS], "numbers have thousands separators, as 1,001.50"),
    "of Germans": (
        [f"{text.replace(',', '.')},50" for text in GROUPS],
        "numbers have thousands separators, as 1.001,5",
    ),
    "of the French": (
        [text.replace(",", "\u202f") for text in GROUPS],
        "numbers have thousands separators, as 1\u202f0",
    ),
    "of Indians": ([f"{n},23,456" for n in range(1, 100)], "numbers have thousands separators, as 1,23,456"),
    "decimal commas": ([f"{n},5" for n in range(200)], "values are numbers with a decimal comma, or lists, as 0,5: "),
    "of Americans": ([f"{day:%m/%d/%Y} 1:05 PM" for day in DAYS], "times are not written as"),
    "days": ([f"{day:%d.%m.%Y}" for day in DAYS], "times are not written as"),
    "in two ways": ([f"{day:%b %d, %Y}" if day.day % 2 else f"{day}" for day in DAYS], "times are not written as"),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_numbers_and_times_as_people_write_them_are_no_categories(case):
    values, remark = WRITTEN[case]
    columns = {
        "label": [n % 2 for n in range(len(values))],
        "amount": values,
        "user": [f"u{n}" for n in range(len(values))],
    }
    assert f"# amount: left out, its {remark}" in text_of(columns)


def test_texts_that_look_like_numbers_or_times_in_part_stay_categories():
    rows = range(300)
    features = features_of(
        {
            "label": [n % 2 for n in rows],
            "version": [f"{n % 7}.{n % 31}.{n % 12}" for n in rows],
            "size": [f"{n % 40},{n}" if n % 3 else f"size {n}" for n in rows],
            "code": [f"{n:05}" for n in rows],
        }
    )["features"]
    assert features == {"version": {}, "size": {}, "code": {}}


def test_fractions_in_texts_of_parquet_are_numbers():
    rows = range(300)
    columns = {
        "label": [n % 2 for n in rows],
        "price": [f"{n / 4:.2f}" for n in rows],
        "zip": [f"{n:05}" for n in rows],
    }
    job = job_of(columns)
    assert {name: feature.type for name, feature in job.features.items()} == {"price": "number", "zip": None}
    (batch,) = job.data.open(Path(), 0).evaluate("train", 0, 1, 999)
    assert len(set(batch.dense[:, 0].tolist())) > 200


def test_lists_whose_values_are_no_categories_are_left_out():
    rows = range(300)
    columns = {
        "label": [n % 2 for n in rows],
        "user": [f"u{n % 7}" for n in rows],
        "prices": pa.array([[Decimal(n) / 4] for n in rows]),
        "seen": pa.array([[n] for n in rows], pa.list_(pa.timestamp("s"))),
        "codes": pa.array([[b"\xff"] for n in rows]),
        "days": pa.array([[n] for n in rows], pa.list_(pa.date32())),
        "ids": pa.array([[Decimal(n)] for n in rows], pa.list_(pa.decimal128(38, 0))),
    }
    assert list(job_of(columns).features) == ["user", "days", "ids"]
    assert "# prices: left out, it has lists of values of type Decimal, as 0.00" in Path("job.yaml").read_text()


@pytest.mark.parametrize(
    ("values", "remark"),
    [
        (["NA", "de", "fr"], "# NA is a value as others: leave the cells of missing ones empty"),
        (["True", "False", "True"], "# rows of a served model need these texts, too: False, True"),
    ],
)
def test_texts_that_a_request_would_have_otherwise_are_remarked_on(values, remark):
    columns = {"label": [n % 2 for n in range(90)], "home": values * 30}
    assert f"  home: {{}}     {remark}\n" in text_of(columns)


@pytest.mark.parametrize(
    ("text", "remark"), [("2026-01-{} 10:00", "a time"), ("{}.1.2026", "its times are not written as")]
)
def test_times_of_text_of_which_there_are_few_are_no_categories(text, remark):
    columns = {
        "label": [n % 2 for n in range(90)],
        "bought": [text.format(10 + n % 9) for n in range(90)],
        "user": list(range(90)),
    }
    assert f"# bought: left out, {remark}" in text_of(columns)


@pytest.mark.parametrize("values", [("5.0", "7.0"), ("+1", "-1")])
def test_two_numbers_of_text_that_are_no_label_are_read_as_numbers(values):
    lines = [f"{n % 2},{values[n % 3 == 0]},{values[n % 5 == 0]},u{n}" for n in range(150)]
    Path("a.csv").write_text("\n".join(["label,side,shop_id,user", *lines, ""]))
    run("a.csv")
    assert {name: one.type for name, one in load_job(Path("job.yaml")).features.items()} == {
        "side": "number",
        "user": None,
    }
    assert f"# shop_id: left out, its ids are floats, as {float(values[1])}" in Path("job.yaml").read_text()
