"""A job for interactions, which have no label."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.init.look import CannotInit
from embershard.worker.job.load import load_job
from harness.init_tables import ROWS, as_text, run


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
        assert (done.exit_code, "--user and --item" in done.output) == (2, True)
    run("plays.parquet", "--user", "user_id", "--item", "item", "--time", "seen_at")


@pytest.mark.parametrize(("user", "word"), [("u{}", "null"), ("{}", "NaN"), ("{}e3", "NA")])
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


@pytest.mark.parametrize("price", ["1", "NA"])  # a word of another column is none of this one
@pytest.mark.parametrize("gap", ["", "NaN"])
def test_users_that_pandas_made_floats_of_because_some_are_missing_are_refused_with_the_cast(gap, price):
    lines = ["user,item,time,price"]
    for place in range(300):
        user = gap if place % 50 == 1 else f"{place % 30}.0"
        lines.append(f"{user},i{place % 7},{1_700_000_000 + place},{place + 0.5 if place % 9 else price}")
    Path("plays.csv").write_text("\n".join([*lines, ""]))
    with pytest.raises(CannotInit, match=r"'user' are floats, as 0\.0: save integers .*cast the column to Int64"):
        run("plays.csv", "--user", "user", "--item", "item")
