"""Workers between a least and a most number: what is asked for, and what is measured."""

from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from embershard.cli.app import app
from embershard.cli.scaling import _MeasuringWindow, parse_workers
from embershard.deploy.scaling import Measured

JOB = """\
model: {name: dlrm, bottom: [8], hidden: [8]}
data: {reader: clicks, samples: 1000, eval_samples: 100, splits: auto}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, epochs: 1}
"""


@pytest.mark.parametrize(("text", "want"), [("4", (4, 4)), ("2-8", (2, 8)), (" 1 - 3 ", (1, 3)), (None, None)])
def test_a_number_of_workers_or_its_bounds(text, want):
    assert parse_workers(text) == want


@pytest.mark.parametrize("text", ["", "0", "0-2", "3-2", "2-", "-2", "2-3-4", "two", "1.5"])
def test_what_is_no_number_of_workers_is_refused(text):
    with pytest.raises(typer.BadParameter):
        parse_workers(text)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("strategy=hybrid", "ties all workers together"),
        ("train.staleness=0", "depends on their number"),
        ("train.staleness=local(4)", "depends on their number"),
        ("data.splits=null", "data.splits to auto"),
        ("train.lr_schedule={name: cosine}", "how many steps"),
    ],
)
def test_a_job_whose_steps_or_data_depend_on_the_number_of_workers_is_refused(setting, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB.replace("splits: auto", "") if "hybrid" in setting else JOB)
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["train", "job.yaml", "--workers", "2-3", "--set", setting])
    assert done.exit_code == 2
    assert why in done.output


@dataclass
class Shard:
    """The part of a shard's status that is looked at."""

    uptime_seconds: float
    apply_busy_seconds: float
    instance: str = "one"


def records(time, *rates, shards=0.2, workers=0.1, data=0.5):
    waits = {"shards": shards, "workers": workers, "data": data}
    return {rank: {"time": time, "samples_per_second": rate, "waits": waits} for rank, rate in enumerate(rates)}


def test_a_measurement_is_the_mean_of_what_all_workers_and_the_busiest_shard_say():
    window = _MeasuringWindow((0, 1), records(1.0, 9e9, 9e9))
    window.take(records(1.0, 9e9, 9e9))  # of before
    assert not window.is_due(100.0)
    window.take(records(2.0, 9e9))
    assert not window.is_due(100.0)  # the other one does not train yet
    window.take(records(3.0, 9e9, 9e9))
    assert window.is_due(100.0)
    assert window.end(100.0, [Shard(10.0, 5.0), Shard(20.0, 5.0)]) is None
    for time in (4.0, 5.0, 5.0, 6.0):
        window.take(records(time, 100.0 * time, 50.0, 7e9, shards=0.3))  # the third worker has left
    assert not window.is_due(129.0)
    assert window.is_due(130.0)
    statuses = [Shard(40.0, 8.0), Shard(50.0, 23.0)]
    assert window.end(130.0, statuses) == Measured(2, 550.0, 0.6, pytest.approx(0.4))
    assert not window.is_due(170.0)  # the next one has begun


@pytest.mark.parametrize("statuses", [(), [Shard(5.0, 1.0, "another")]], ids=["no answer", "another process"])
def test_a_measurement_in_which_a_shard_was_away_is_dropped(statuses):
    window = _MeasuringWindow((0,), {})
    window.take(records(1.0, 100.0))
    window.end(0.0, [Shard(10.0, 5.0)])
    for time in (2.0, 3.0, 4.0):
        window.take(records(time, 100.0))
    assert window.end(30.0, statuses) is None


def test_a_record_that_is_damaged_counts_for_nothing():
    window = _MeasuringWindow((0,), {})
    window.take({0: {"time": 1.0}})
    window.end(0.0, [Shard(10.0, 5.0)])
    for time in (2.0, 3.0, 4.0):
        window.take({0: {"time": time, "samples_per_second": "many", "waits": [1]}})
    assert window.end(30.0, [Shard(40.0, 5.0)]) == Measured(1, 0.0, 0.0, 0.0)
