"""What the log of a run says of it."""

import json
from pathlib import Path

import pytest
from report_cases import INT8, NONE, fake_results

from embershard.compare.run.plan import Task
from embershard.compare.run.progress import name_of, time_left
from embershard.compare.run.run_log import RunLog, RunProgress


def config() -> dict[str, object]:
    return {
        "record": "config", "metric": "auc", "split": "valid", "total_samples": 1000, "python": "3.11.9",
        "versions": {"embershard": "0.1.0", "torch": "2.13.0"},
    }  # fmt: skip


def interval(step: int, speed: float, wait: float = 0.5) -> dict[str, object]:
    return {
        "record": "train", "step": step, "epoch": 1, "samples": 10 * step, "samples_per_second": speed,
        "wait_share": wait, "seconds": 1.0, "loss": None,
    }  # fmt: skip


def evaluation(samples: int, seconds: float, auc: float, *, improved: bool) -> dict[str, object]:
    figures = {"valid": {"auc": auc}, "test": {"auc": auc - 0.01, "ne": None}}
    return {
        "record": "eval", "samples": samples, "seconds": seconds, "evaluation_seconds": 2.0, "figures": figures,
        "improved": improved,
    }  # fmt: skip


def result(**fields: object) -> dict[str, object]:
    return {
        "record": "result", "metric": "auc", "split": "valid",
        "figures": {"valid": {"auc": 0.8}, "test": {"auc": 0.79}},
        "reachable": {"test": {"auc": 0.9}}, "steps": 100, "samples": 1000, "train_seconds": 9.0,
        "samples_per_second": 111.0, "wait_share": 0.4, "stopped_early": True, **fields,
    }  # fmt: skip


def log_of(path: Path, *records: dict[str, object]) -> RunLog:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    log = RunLog(path, 0)
    log.read()
    return log


def test_figures_are_those_of_the_best_evaluation(tmp_path):
    evaluations = [evaluation(500, 6.0, 0.8, improved=True), evaluation(1000, 13.0, 0.7, improved=False)]
    found = log_of(tmp_path / "log", config(), *evaluations, result()).figures()
    assert found.metrics == {"auc": 0.79}
    assert found.decided == 0.8
    assert found.splits == ("test", "valid")
    assert found.reachable == {"auc": 0.9}
    assert found.best_samples == 500
    assert found.stopped_early
    assert [(point.samples, point.seconds) for point in found.curve] == [
        (500, 4.0),
        (1000, 9.0),
    ]  # evaluations left out
    assert found.curve[0].figures["test"] == {"auc": pytest.approx(0.79), "ne": None}
    assert found.versions == {"embershard": "0.1.0", "torch": "2.13.0", "python": "3.11.9"}


def test_speed_leaves_out_the_first_quarter_and_weighs_by_time(tmp_path):
    intervals = [interval(20, 1.0), interval(30, 2.0), interval(60, 300.0, 0.0), interval(100, 100.0, 1.0)]
    found = log_of(tmp_path / "log", config(), *intervals, result()).figures()
    assert found.samples_per_second == pytest.approx(700 / (1.0 + 4.0))
    assert found.wait_share == pytest.approx(4.0 / 5.0)


def test_an_interval_longer_than_the_first_quarter_is_left_out_as_a_whole(tmp_path):
    intervals = [interval(34, 1.0), interval(67, 300.0), interval(100, 300.0)]
    assert log_of(tmp_path / "log", config(), *intervals, result()).figures().samples_per_second == pytest.approx(300)


def test_a_run_too_short_to_leave_any_out_has_the_speed_of_its_result(tmp_path):
    found = log_of(tmp_path / "log", config(), result()).figures()
    assert (found.samples_per_second, found.wait_share) == (111.0, 0.4)


def test_a_log_is_read_as_it_grows_and_from_where_a_run_begins(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(result()) + "\n")
    log = RunLog.after(path)
    assert not log.read()
    assert log.trouble == "it wrote no result"
    assert log.progress() == RunProgress(0.0, "starting")
    with path.open("a") as file:
        file.write(json.dumps(config()) + "\n" + json.dumps(interval(25, 300.0)) + '\n{"record": "ev')
        file.flush()
        assert log.read()
        assert log.progress() == RunProgress(0.25, "epoch 1, 300 samples/s")
        file.write(json.dumps(evaluation(500, 6.0, 0.8, improved=True))[14:] + "\n")
        file.flush()
    assert log.read()
    assert log.progress().text == "epoch 1, 300 samples/s, auc 0.8000"
    assert log.trouble


def test_a_run_that_a_worker_was_lost_in_is_not_what_it_should_have_been(tmp_path):
    assert log_of(tmp_path / "log", config(), result(expired_leases=0)).trouble == ""
    assert "(1)" in log_of(tmp_path / "log", config(), result(expired_leases=1)).trouble


def task(kind: str, arm: str, bandwidth: str = "unlimited") -> Task:
    return Task(kind=kind, arm=arm, seed=9, bandwidth=bandwidth, multiple=1.0, words=())


def test_the_time_left_goes_by_the_runs_most_like_those_to_come():
    made = [run for run in fake_results((NONE, INT8), seeds=(1,)).runs if run.bandwidth != "1gbit"]
    runs = {
        run.key: run.model_copy(update={"total_seconds": seconds})
        for run, seconds in zip(made, (20.0, 60.0, 10.0, 40.0), strict=True)
    }
    assert time_left([task("quality", "none")], runs) == 60.0
    assert time_left([task("quality", "bf16")], runs) == 50.0
    assert time_left([task("tune", "int8"), task("speed", "none", "100mbit")], runs) == 40.0 + 20.0
    assert time_left([task("speed", "none", "1gbit")], runs) == 15.0
    assert time_left([task("speed", "none")], {}) is None
    failed = {key: run.model_copy(update={"ok": False, "total_seconds": 1.0}) for key, run in runs.items()}
    assert time_left([task("speed", "none")], failed) is None
    assert name_of(task("tune", "int8")) == "int8, seed 9, unlimited (tuning)"
