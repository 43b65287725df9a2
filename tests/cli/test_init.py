"""`embershard init`: a job for a data file, which trains as it is."""

import csv
import gzip
import json
import random
import re
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli.init import CannotInit, Look, job_text, look_at
from embershard.local_shards import local
from embershard.proto.errors import EmbershardError
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.job import Job
from embershard.worker.job.load import load_job
from embershard.worker.training.trainer import Trainer

DRAW = random.Random(0)
N = 400
ROWS = [
    {
        "label": DRAW.randrange(2),
        "user_id": DRAW.randrange(50),
        "item": f"i{DRAW.randrange(30)}",
        "price": round(DRAW.expovariate(0.1), 2),
        "genres": [f"g{DRAW.randrange(5)}" for _ in range(DRAW.randrange(1, 4))],
        "time": datetime(2026, 1, 1) + timedelta(minutes=row),
        "source": "web",
    }
    for row in range(N)
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words):
    done = CliRunner().invoke(cli.app, ["init", *words])
    if isinstance(done.exception, EmbershardError):
        raise done.exception
    assert done.exit_code == 0, done.output


def as_text(rows, delimiter=",", comma=False):
    lines = [[str(v).replace(".", ",") if comma and isinstance(v, float) else
              "|".join(v) if isinstance(v, list) else v for v in row.values()] for row in rows]  # fmt: skip
    with open("text", "w", newline="") as file:
        out = csv.writer(file, delimiter=delimiter)
        out.writerows([list(rows[0]), *lines])
    return Path("text").read_text()


def write_csv(path):
    path.write_text(as_text(ROWS))


def write_gzip(path):
    path.write_bytes(gzip.compress(as_text(ROWS).encode()))


def write_excel(path):
    path.write_bytes(
        as_text([{**row, "item": f"Größe {row['item']}"} for row in ROWS], ";", comma=True).encode("cp1252")
    )


def write_tsv(path):
    path.write_text(as_text(ROWS, "\t"))


def write_lines(path):
    path.write_text("".join(json.dumps({**row, "time": str(row["time"])}) + "\n" for row in ROWS))


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path)


FILES = {
    "a.csv": write_csv,
    "a.csv.gz": write_gzip,
    "excel.csv": write_excel,
    "a.tsv": write_tsv,
    "a.jsonl": write_lines,
    "a.parquet": write_parquet,
}


@pytest.mark.parametrize("name", FILES)
def test_a_job_is_written_that_trains_as_it_is(name):
    FILES[name](Path(name))
    run(name)
    job = load_job(Path("job.yaml"), ["train.epochs=1"])
    data, features = job.data, job.features
    assert Job.model_validate(job.model_dump(mode="json")) == job  # as checkpoints and comparisons keep it
    assert (data.label, data.split.by, data.split.column) == (("label",), "time", "time")
    assert list(features) == ["user_id", "item", "price", "genres"]
    assert (features["price"].type, features["genres"].type) == ("number", "list")
    dataset = data.open(Path(), 0)
    assert [dataset.num_samples(part) for part in ("train", "valid", "test")] == [320, 40, 40]
    with local(1) as session:
        Trainer(job, dataset, session, WorkerGroup()).run()


def test_what_a_file_needs_to_be_read_is_found():
    write_excel(Path("excel.csv"))
    assert look_at(Path("excel.csv")).settings == {"encoding": "cp1252", "delimiter": ";", "decimal": ","}
    assert {type(value) for value in look_at(Path("excel.csv")).columns["price"]} == {float}


def features_of(columns, label=None):
    Path("a.csv").write_text("")
    return YAML(typ="safe").load(job_text(Path("a.csv"), Look(columns, {}), label, Path.cwd()))


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


def test_rows_are_split_by_the_finest_time_and_by_no_duration():
    rows = range(300)
    events = [datetime(2026, 1, 1) + timedelta(minutes=n) for n in rows]
    columns = {
        "click": [n % 2 for n in rows],
        "user": [f"u{n % 7}" for n in rows],
        "watch_time": [n / 7 for n in rows],
        "birth_date": [date(1980, 1, 1) + timedelta(days=n // 2) for n in rows],
        "event_time": [1_700_000_000 + n for n in rows],
        "bought": [None, *events[1:]],
    }
    job = features_of(columns)
    assert job["data"]["split"]["column"] == "event_time"
    assert list(job["features"]) == ["user", "watch_time"]
    del columns["event_time"], columns["birth_date"]
    assert features_of(columns)["data"]["split"]["by"] == "random"  # for one has no time
    columns["time"] = [f"{n // 60 % 24:02}:{n % 60:02}" for n in rows]
    job = features_of(columns)
    assert (job["data"]["split"]["by"], list(job["features"])) == ("random", ["user", "watch_time"])


def test_of_several_columns_of_zeros_and_ones_none_is_taken_for_the_label():
    columns = {"is_male": [0, 1] * 20, "saw_ad": [1, 0] * 20, "user": [f"u{n}" for n in range(40)]}
    with pytest.raises(CannotInit, match="is_male, saw_ad; name the label by --label"):
        features_of(columns)
    assert features_of(columns, "saw_ad")["data"]["label"] == "saw_ad"


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


def test_numbers_with_a_unit_are_remarked_unless_they_are_few():
    columns = {
        "label": [0, 1] * 100,
        "price": [f"${n}.50" for n in range(200)],
        "share": [f"{n / 7:.1f} %" for n in range(200)],
        "profit": [f"-${n}.50" for n in range(200)],
        "change": [f"+{n}%" for n in range(200)],
        "discount": [f"{n % 3}0%" for n in range(200)],
    }
    Path("a.csv").touch()
    found = job_text(Path("a.csv"), Look(columns, {}), None, Path.cwd())
    assert "# price: left out, its numbers have a unit, as $0.50: write them without" in found
    for name in ("share", "profit", "change"):
        assert f"# {name}: left out" in found
    assert "  discount: {}" in found


def test_what_pandas_and_databases_add_to_parquet_is_known():
    rows = range(300)
    columns = {
        "__index_level_0__": pa.array(rows),
        "label": [n % 2 for n in rows],
        "user_id": pa.array([1000 + n % 70 for n in rows]).cast(pa.decimal128(38, 0)),
        "price": [float("nan") if n % 3 else -float(n) for n in rows],
        "none\nof it": [float("nan")] * 300,
    }
    pq.write_table(pa.table(columns), "a.parquet")
    run("a.parquet")
    features = YAML(typ="safe").load(Path("job.yaml"))["features"]
    assert features == {"user_id": {}, "price": {"type": "number", "transform": "standardise"}}
    assert look_at(Path("a.parquet")).columns["price"][:4] == [0.0, None, None, -3.0]


def test_numbers_alone_get_embeddings_of_their_buckets():
    job = features_of({"label": [0, 1] * 200, "x": [n / 3 for n in range(400)]})
    assert job["features"] == {"x": {"type": "number", "bucketise": 10}}


WRONG = {
    "missing.csv": None,
    "a.doc": "label,x\n1,2\n",
    "empty.csv": "",
    "header.csv": "label,x\n",
    "numbers.csv": "1,2\n0,3\n",
    "twice.csv": "label,x,x\n1,2,3\n0,2,3\n",
    "no_label.csv": "a,b\n5,2\n6,3\n",
    "label_alone.csv": "label\n0\n1\n",
    "lines.jsonl": '{"label": 1}\n[2]\n',
    "no.parquet": "text",
    "old_mac.csv": "label,x\r1,2\r0,3\r",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_without_a_job_is_named_and_none_is_written(name):
    if WRONG[name] is not None:
        Path(name).write_text(WRONG[name])
    with pytest.raises(EmbershardError) as caught:
        run(name)
    assert name in str(caught.value)
    assert not Path("job.yaml").exists()


REMEDIES = {
    "rows.csv": ("0,u1,5\n1,u2,6\n0,u1,7\n", "rows.csv:1: it looks like a row: 'u1' is a value of its column, too"),
    "twice.csv": ("label,user\n1,a\n0,b\nlabel,user\n", "twice.csv:1: it looks like a row: 'label' is a value"),
    "array.json": ('[{"label": 1}]', "has to be written as lines of objects"),
    "indented.json": ('[\n {\n "label": 1}]', "indented.json:1: no JSON.*each line has to be one object"),
    "table.csv": ("PAR1\n", "table.csv: it is a Parquet file, no text: let its name end with .parquet"),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_a_file_that_is_not_what_it_seems_is_refused_with_a_remedy(name):
    text, message = REMEDIES[name]
    Path(name).write_text(text)
    with pytest.raises(EmbershardError, match=re.escape(message).replace(r"\.\*", ".*")):
        run(name)


def test_the_job_of_a_folder_trains_on_all_its_files():
    Path("parts").mkdir()
    for part in (1, 2):
        rows = "".join(f"u{part}{row % 7},{row % 2}\n" for row in range(50))
        Path(f"parts/{part}.csv").write_text(f"user,label\n{rows}")
    run("parts")
    job = load_job(Path("job.yaml"))
    assert list(job.data.features) == ["user"]
    assert sum(job.data.fit(Path(), 0).fitted["samples"].values()) == 100


def test_the_job_of_a_pattern_trains_on_the_files_in_folders_of_a_key():
    for day in (1, 2):
        folder = Path(f"clicks/day={day}")
        folder.mkdir(parents=True)
        columns = {"label": [0, 1] * 50, "user": [f"u{day * n % 77}" for n in range(100)]}
        pq.write_table(pa.table(columns), folder / "0.parquet")
    Path("clicks/_SUCCESS").touch()
    run("clicks/**/*.parquet")
    dataset = load_job(Path("job.yaml")).data.open(Path(), 0)
    assert sum(dataset.num_samples(part) for part in ("train", "valid", "test")) == 200
    with pytest.raises(EmbershardError, match="no file fits the pattern"):
        run("clicks/*.parquet", "--replace")
    with pytest.raises(EmbershardError, match=r"give the pattern clicks/\*\*/\*\.parquet"):
        run("clicks", "--replace")


def test_the_job_of_a_pattern_has_the_keys_of_folders_and_looks_at_files_all_over():
    for day in range(1, 31):
        folder = Path(f"clicks/day=2026-01-{day:02}/shop=s{day % 3}")
        folder.mkdir(parents=True)
        rows = range(16)
        columns = {"label": [day % 2] * 16, "id": rows, "user": [f"u{day * n % 7}" for n in rows]}
        pq.write_table(pa.table(columns | ({"tags": [["a"]] * 16} if day > 3 else {})), folder / "0.parquet")
    run("clicks/**/*.parquet")
    job = load_job(Path("job.yaml"))
    assert (job.data.split.by, job.data.split.column) == ("time", "day")
    assert list(job.features) == ["user", "shop"]
    assert "# tags: left out, some files have no such column" in Path("job.yaml").read_text()


def test_text_of_a_second_file_is_seen():
    Path("parts").mkdir()
    Path("parts/1.csv").write_text("label;user;price\n" + "".join(f"{n % 2};u{n % 7};{n}\n" for n in range(200)))
    lines = "".join(f"{n % 2};ü{n % 7};{n / 4 if n % 5 else 'NA'}\n".replace(".", ",") for n in range(200))
    Path("parts/2.csv").write_bytes(("label;user;price\n" + lines).encode("cp1252"))
    Path("parts/3.csv").write_text("label;user;price\n")
    look = look_at(Path("parts"))
    assert look.settings == {"delimiter": ";", "encoding": "cp1252", "decimal": ",", "missing": ["", "NA"]}
    assert (len(look.columns["price"]), look.starts) == (400, (0, 200))


def test_a_folder_without_a_file_of_a_known_format_is_refused():
    Path("parts").mkdir()
    Path("parts/notes.txt").write_text("no data")
    with pytest.raises(EmbershardError, match=r"no file in this folder ends with \.parquet"):
        run("parts")


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
    pq.write_table(pa.table(columns), "a.parquet")
    run("a.parquet")
    features = YAML(typ="safe").load(Path("job.yaml"))["features"]
    assert features == {"user": {}, "price": {"type": "number", "transform": "standardise"}}
    text = Path("job.yaml").read_text()
    assert "# items: left out, it has lists of floats, as [0.0]: save ids as integers" in text
    assert "# st: left out, its values are objects: write their fields (a, b) as columns" in text


def test_times_that_python_cannot_hold_and_empty_lists_are_left_out():
    times = [f"{1800 + n % 400}-01-01" for n in range(300)]
    columns = {
        "label": [n % 2 for n in range(300)],
        "user": [f"u{n % 7}" for n in range(300)],
        "until": pa.array([2**62, *range(299)], pa.timestamp("us")),  # of a database: infinity
        "never": pa.array([2**60] * 300, pa.timestamp("ms", "UTC")),
        "far": pa.array([2**31 - 1] * 300, pa.int32()).cast(pa.date32()),
        "old": pa.array(times).cast(pa.date32()),
        "empty": pa.array([[]] * 300, pa.list_(pa.string())),
    }
    pq.write_table(pa.table(columns), "a.parquet")
    columns = look_at(Path("a.parquet")).columns
    assert columns["until"][:2] == [None, datetime(1970, 1, 1)]
    assert set(columns["never"]) == set(columns["far"]) == {None}
    assert columns["old"][0] == date(1800, 1, 1)
    run("a.parquet")
    job = load_job(Path("job.yaml"))
    assert (job.data.split.column, list(job.features)) == ("old", ["user"])


def test_blanks_behind_delimiters_are_remarked():
    Path("a.csv").write_text("label, user\n" + "".join(f"{n % 2}, u{n % 7}\n" for n in range(300)))
    run("a.csv")
    assert list(load_job(Path("job.yaml")).features) == [" user"]
    assert "# a blank in front of a name or a value is a part of it" in Path("job.yaml").read_text()


def test_a_column_without_a_name_that_numbers_the_rows_is_left_out():
    Path("a.csv").write_text(",label,user\n" + "".join(f"{n},{n % 2},u{n % 7}\n" for n in range(300)))
    run("a.csv")
    assert YAML(typ="safe").load(Path("job.yaml"))["features"] == {"user": {}}


def test_numbers_that_are_missing_in_words_stay_numbers_and_thousands_separators_are_remarked():
    lines = [
        f'{n % 2},{"NaN" if n % 5 == 0 else n / 7},{"-inf" if n == 3 else n},u{n % 9},"{n + 1},234.5"'
        for n in range(300)
    ]
    Path("a.csv").write_text("label,price,count,user,sales\n" + "\n".join(lines) + "\n")
    run("a.csv")
    job = load_job(Path("job.yaml"))
    assert job.data.missing == ("", "-inf", "NaN")
    assert {name: feature.type for name, feature in job.features.items()} == {
        "price": "number", "count": "number", "user": None,
    }  # fmt: skip
    assert "# sales: left out" in Path("job.yaml").read_text()
    (batch,) = job.data.open(Path(), 0).evaluate("train", 0, 1, 999)
    assert bool(batch.dense.isfinite().all())


@pytest.mark.parametrize(
    ("texts", "positive"),
    [(("no", "yes"), "yes"), (("True", "False"), "True"), (("y", "n"), "y"), (("bought", "left"), "bought")],
)
def test_a_label_of_two_texts_is_declared(texts, positive):
    rows = [{"user": f"u{n % 7}", "bought": texts[n % 2], "x": n / 3} for n in range(200)]
    pq.write_table(pa.Table.from_pylist(rows), "a.parquet")
    run("a.parquet")
    job = load_job(Path("job.yaml"))
    assert job.data.label == ("bought",)
    assert job.data.label_values[1] == positive
    (batch,) = job.data.open(Path(), 0).evaluate("train", 0, 1, 999)
    assert set(batch.labels.tolist()) == {0.0, 1.0}


def test_a_label_of_two_texts_is_found_beside_a_column_of_minus_one_and_one():
    rows = [{"user": f"u{n % 7}", "bought": "yn"[n % 2], "side": 2 * (n // 2 % 2) - 1} for n in range(200)]
    pq.write_table(pa.Table.from_pylist(rows), "a.parquet")
    run("a.parquet")
    assert load_job(Path("job.yaml")).data.label == ("bought",)


LABELS = {  # name: (what it writes into a file, its values, label_values)
    "parquet": ("a.parquet", (-1, 1), ("-1", "1")),
    "csv": ("a.csv", ("-1", "1"), ("-1", "1")),
    "signs": ("a.csv", ("-1", "+1"), ("-1", "+1")),
    "others": ("a.parquet", (1, 2), ("1", "2")),
}


@pytest.mark.parametrize("case", LABELS)
def test_a_label_of_two_integers_is_declared(case):
    name, values, declared = LABELS[case]
    rows = [{"user": f"u{n % 7}", "click": values[n % 2], "x": n / 3} for n in range(200)]
    if name == "a.csv":
        Path(name).write_text(as_text(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), name)
    if case == "others":
        with pytest.raises(CannotInit, match="no column of zeros and ones"):
            run(name)
    run(name, *(["--label", "click"] if case == "others" else []))
    job = load_job(Path("job.yaml"))
    assert (job.data.label, job.data.label_values) == (("click",), declared)
    (batch,) = job.data.open(Path(), 0).evaluate("train", 0, 1, 999)
    assert set(batch.labels.tolist()) == {0.0, 1.0}


def test_a_column_of_minus_one_and_one_is_no_label_beside_one_of_zeros_and_ones():
    columns = {"clicked": [0, 1] * 20, "side": [-1, 1, 1, -1] * 10, "user": [f"u{n}" for n in range(40)]}
    job = features_of(columns)
    assert (job["data"]["label"], "label_values" in job["data"]) == ("clicked", False)
    assert features_of(columns, "side")["data"]["label_values"] == ["-1", "1"]


def test_of_two_columns_of_two_texts_none_is_taken_for_the_label():
    columns = {"a": ["x", "y"] * 20, "b": ["p", "q"] * 20, "user": [f"u{n}" for n in range(40)]}
    with pytest.raises(CannotInit):
        features_of(columns)
    assert features_of(columns, "b")["data"]["label_values"] == ["p", "q"]


def test_ids_with_one_letter_that_look_like_numbers_stay_texts():
    codes = ["12e3", "450", "7E1"]
    rows = [{"label": n % 2, "code": codes[n % 3], "price": f"{n}e-05", "size": f"{n}.5e3"} for n in range(200)]
    Path("a.csv").write_text(as_text(rows))
    run("a.csv")
    job = load_job(Path("job.yaml"))
    assert {name: feature.type for name, feature in job.features.items()} == {
        "code": None, "price": "number", "size": "number",
    }  # fmt: skip
    (batch,) = job.data.open(Path(), 0).evaluate("train", 0, 1, 999)
    assert len(set(batch.ids[:, 0].tolist())) == 3


def test_empty_lines_of_json_are_skipped_and_a_bad_one_is_named_with_its_line():
    lines = [json.dumps({"label": n % 2, "user": f"u{n % 7}"}) for n in range(60)]
    Path("a.jsonl").write_text("\n".join([lines[0], "", " ", *lines[1:], "", ""]))
    look = look_at(Path("a.jsonl"))
    assert [len(values) for values in look.columns.values()] == [60, 60]
    Path("b.jsonl").write_text(lines[0] + "\n\n{\n")
    with pytest.raises(EmbershardError) as found:
        run("b.jsonl")
    assert found.value.fields["where"] == "b.jsonl:3"


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
    pq.write_table(pa.table(columns), "a.parquet")
    run("a.parquet")
    assert load_job(Path("job.yaml")).features["seen"].table == "item"


def test_columns_of_any_name_become_features():
    rows = range(40)
    columns = {"label": [n % 2 for n in rows], "größe": list("abcd") * 10, "User ID": [n % 7 for n in rows]}
    job = features_of({**columns, "日 時": [["a"], ["b"]] * 20, "the price": [n / 7 for n in rows]})
    assert list(job["features"]) == ["größe", "User ID", "日 時", "the price"]
    assert job["features"]["日 時"]["type"] == "list"


def test_a_column_name_that_occurs_twice_in_parquet_is_refused():
    column = pa.array([0, 1])
    pq.write_table(pa.table([column, column, column], names=["label", "x", "x"]), "a.parquet")
    with pytest.raises(CannotInit):
        run("a.parquet")


def test_a_job_file_that_is_there_stays_unless_it_may_be_replaced():
    write_csv(Path("a.csv"))
    Path("job.yaml").write_text("mine")
    with pytest.raises(CannotInit):
        run("a.csv")
    assert Path("job.yaml").read_text() == "mine"
    with pytest.raises(EmbershardError):
        run("missing.csv", "--replace")
    assert Path("job.yaml").read_text() == "mine"
    run("a.csv", "--replace", "--label", "label", "-o", "job.yaml")
    assert load_job(Path("job.yaml")).features


def test_a_column_named_label_of_two_texts_is_the_label_beside_one_of_zeros_and_ones():
    columns = {"is_new": [row % 2 for row in range(50)], "label": ["no", "yes"] * 25, "user": list(range(50))}
    assert features_of(columns)["data"]["label"] == "label"


@pytest.mark.parametrize(("days", "by"), [(1, "random"), (4, "random"), (30, "time")])
def test_rows_of_too_few_times_are_not_split_by_them(days, by):
    rows = [{"label": row % 2, "user": row % 77, "day": date(2026, 1, 1 + row % days)} for row in range(300)]
    pq.write_table(pa.Table.from_pylist(rows), "a.parquet")
    run("a.parquet")
    job = load_job(Path("job.yaml"))
    assert job.data.split.by == by
    assert min(job.data.fit(Path(), 0).fitted["samples"].values()) > 0


def test_interactions_get_a_job_that_ranks_the_items_of_the_tables_own_users():
    plays = [{name: row[name] for name in ("user_id", "item", "time", "price")} for row in ROWS]
    Path("plays.csv").write_text(as_text(plays, delimiter=";"))
    with pytest.raises(CannotInit, match="of interactions, which have none, their columns by --user and --item"):
        run("plays.csv")
    run("plays.csv", "--user", "user_id", "--item", "item")
    job = load_job(Path("job.yaml"))
    assert (job.model.name, job.data.columns.model_dump()) == (
        "two_tower",
        {"user": "user_id", "item": "item", "time": "time"},
    )
    data = job.data.open(Path(), 0)
    assert set(data.inputs.names) == {"user_id", "item"}
    assert data.num_samples("test") == len({row["user_id"] for row in plays})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--user", "user_id", "--item", "product"), "no column 'product'"),
        (("--user", "user_id", "--item", "item"), "2 columns of times: time, seen_at; name that of the interaction"),
    ],
)
def test_interactions_need_a_user_an_item_and_one_time(words, reason):
    rows = [{**row, "seen_at": row["time"]} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), "plays.parquet")
    with pytest.raises(CannotInit, match=reason):
        run("plays.parquet", *words)
    for wrong in (("--user", "user_id"), ("--time", "time"), ("--user", "u", "--item", "i", "--label", "label")):
        done = CliRunner().invoke(cli.app, ["init", "plays.parquet", *wrong])
        assert (done.exit_code, "have --user and --item" in done.output) == (2, True)
    run("plays.parquet", "--user", "user_id", "--item", "item", "--time", "seen_at")


@pytest.mark.parametrize(("user", "word"), [("u{}", "null"), ("{}", "NaN")])
def test_a_word_for_a_missing_user_is_remarked_on(user, word):
    users = [user.format(number % 30) for number in range(300)]
    lines = [f"{name if place % 50 else word},i{place % 7},{1_700_000_000 + place}" for place, name in enumerate(users)]
    Path("plays.csv").write_text("\n".join(["user,item,time", *lines, ""]))
    run("plays.csv", "--user", "user", "--item", "item")
    assert f'# "{word}" is read as the user of that name: leave its rows out' in Path("job.yaml").read_text()


def test_users_that_are_floats_are_refused():
    lines = [f"{place % 30}.0,i{place % 7},{1_700_000_000 + place}" for place in range(300)]
    Path("plays.csv").write_text("\n".join(["user,item,time", *lines, ""]))
    with pytest.raises(CannotInit, match=r"the users in column 'user' are floats, as 0\.0: save integers"):
        run("plays.csv", "--user", "user", "--item", "item")


def test_parquet_files_with_texts_that_are_not_utf_8_are_refused():
    _, ends, data = pa.array([b"a", b"J\xfcrgen"]).buffers()
    pq.write_table(pa.table({"label": [0, 1], "user": pa.StringArray.from_buffers(2, ends, data)}), "a.parquet")
    with pytest.raises(CannotInit, match="column 'user' has texts that are not UTF-8"):
        run("a.parquet")


def test_lists_of_dictionaries_in_several_row_groups_are_lists():
    kind = pa.list_(pa.dictionary(pa.int32(), pa.string()))
    tags = pa.array([[f"t{place % 7}", "x"] for place in range(300)]).cast(kind)
    pq.write_table(pa.table({"label": [0, 1] * 150, "tags": tags}), "a.parquet", row_group_size=100)
    run("a.parquet")
    assert load_job(Path("job.yaml")).data.features["tags"].type == "list"
