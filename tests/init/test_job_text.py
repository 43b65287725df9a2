"""A job for a table with a label: its files, and how its rows are split."""

from datetime import date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from embershard.proto.errors import EmbershardError
from embershard.worker.job.load import load_job
from harness.init_tables import features_of, job_of, run


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


def test_the_job_of_a_folder_trains_on_all_its_files():
    Path("parts").mkdir()
    for part in (1, 2):
        rows = "".join(f"u{part}{row % 25},{row % 2}\n" for row in range(50))
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


def test_blanks_behind_delimiters_are_remarked():
    Path("a.csv").write_text("label, user\n" + "".join(f"{n % 2}, u{n % 7}\n" for n in range(300)))
    run("a.csv")
    assert list(load_job(Path("job.yaml")).features) == [" user"]
    assert "# blanks in front of a name or a value, or behind it, are a part of it" in Path("job.yaml").read_text()


def test_a_column_without_a_name_that_numbers_the_rows_is_left_out():
    Path("a.csv").write_text(",label,user\n" + "".join(f"{n},{n % 2},u{n % 7}\n" for n in range(300)))
    run("a.csv")
    assert YAML(typ="safe").load(Path("job.yaml"))["features"] == {"user": {}}


@pytest.mark.parametrize(("days", "by"), [(1, "random"), (4, "random"), (30, "time")])
def test_rows_of_too_few_times_are_not_split_by_them(days, by):
    rows = [{"label": row % 2, "user": row % 77, "day": date(2026, 1, 1 + row % days)} for row in range(300)]
    job = job_of(rows)
    assert job.data.split.by == by
    assert min(job.data.fit(Path(), 0).fitted["samples"].values()) > 0


@pytest.mark.parametrize("value", [" {}", "{} ", " u{}"])
def test_blanks_of_values_alone_are_remarked(value):
    lines = [f"{n % 2},{value.format(n % 7)},{n}.5 ,  " for n in range(300)]
    Path("a.csv").write_text("\n".join(["label,user,price,note", *lines, ""]))
    run("a.csv")
    text = Path("job.yaml").read_text()
    assert "# blanks in front of a name or a value, or behind it, are a part of it, as in user" in text


def test_blanks_around_numbers_are_not_remarked():
    Path("a.csv").write_text("label,user,price\n" + "".join(f"{n % 2},u{n % 7}, {n}.5 \n" for n in range(300)))
    run("a.csv")
    assert "blanks" not in Path("job.yaml").read_text()


@pytest.mark.parametrize(("num_features", "rate"), [(19, 0.05), (20, 0.01)])
def test_rows_of_many_features_get_a_lower_rate(num_features, rate):
    columns = {f"c{number}": [f"v{row % 7}" for row in range(40)] for number in range(num_features)}
    assert features_of({"click": [0, 1] * 20, **columns})["embedding"]["optimizer"]["lr"] == rate
