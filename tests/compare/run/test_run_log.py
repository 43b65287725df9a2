"""What the log of a run says of it."""

import json

import pytest
from report_cases import INT8, NONE, fake_results

from embershard.compare.run.plan import Task
from embershard.compare.run.progress import time_left
from embershard.compare.run.run_log import RunLog, RunProgress

CONFIG = {
    "record": "config", "metric": "auc", "split": "valid", "total_samples": 1000, "python": "3.11.9",
    "versions": {"embershard": "0.1.0", "torch": "2.13.0"},
}  # fmt: skip
RESULT = {
    "record": "result", "metric": "auc", "split": "valid", "figures": {"valid": {"auc": 0.8}, "test": {"auc": 0.79}},
    "reachable": {"test": {"auc": 0.9}}, "steps": 100, "samples": 1000, "train_seconds": 9.0,
    "samples_per_second": 111.0, "wait_share": 0.4, "stopped_early": True,
}  # fmt: skip


def interval(step, speed, wait=0.5):
    fields = {"epoch": 1, "samples": 10 * step, "wait_share": wait, "seconds": 1.0, "loss": None}
    return {"record": "train", "step": step, "samples_per_second": speed, **fields}


def evaluation(samples, seconds, auc, improved):
    figures = {"valid": {"auc": auc}, "test": {"auc": auc - 0.01, "ne": None}}
    fields = {"seconds": seconds, "evaluation_seconds": 2.0, "figures": figures, "improved": improved}
    return {"record": "eval", "samples": samples, **fields}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def log_of(tmp_path):
    def read(*records):
        (tmp_path / "log").write_text(lines(CONFIG, *records))
        log = RunLog(tmp_path / "log", 0)
        log.read()
        return log

    return read


def test_the_reliability_is_that_of_the_best_evaluation_on_the_split_that_is_judged(log_of):
    bins = {"valid": [[0.1, 0.2, 9]], "test": [[0.2, 0.3, 5], [0.5, 0.4, 5]], "test a b": [[0.3, 0.3, 4]]}
    best, last = evaluation(500, 6.0, 0.8, True), evaluation(1000, 13.0, 0.7, False)
    found = log_of({**best, "reliability": bins}, {**last, "reliability": {"test": []}}, RESULT).figures()
    assert found.reliability == {"": ((0.2, 0.3, 5), (0.5, 0.4, 5)), "a b": ((0.3, 0.3, 4),)}
    assert log_of(best, RESULT).figures().reliability == {}  # of earlier versions


def test_figures_are_those_of_the_best_evaluation(log_of):
    found = log_of(evaluation(500, 6.0, 0.8, True), evaluation(1000, 13.0, 0.7, False), RESULT).figures()
    assert (found.metrics, found.decided, found.best_samples) == ({"auc": 0.79}, 0.8, 500)
    assert (found.splits, found.reachable, found.stopped_early) == (("test", "valid"), {"auc": 0.9}, True)
    assert [(p.samples, p.seconds) for p in found.curve] == [(500, 4.0), (1000, 9.0)]  # evaluations left out
    assert found.curve[0].figures["test"] == {"auc": pytest.approx(0.79), "ne": None}
    assert found.versions == {"embershard": "0.1.0", "torch": "2.13.0", "python": "3.11.9"}


@pytest.mark.parametrize(
    ("intervals", "speed", "wait"),
    [
        # the first quarter is left out, and the rest weighs by its time
        ([(20, 1.0), (30, 2.0), (60, 300.0, 0.0), (100, 100.0, 1.0)], 700 / (1.0 + 4.0), 4.0 / 5.0),
        ([(34, 1.0), (67, 300.0), (100, 300.0)], 300, 0.5),  # an interval that is longer, as a whole
        ([], 111.0, 0.4),  # a run too short to leave any out has the speed of its result
    ],
)
def test_speed_is_that_behind_the_beginning(log_of, intervals, speed, wait):
    found = log_of(*(interval(*fields) for fields in intervals), RESULT).figures()
    assert (found.samples_per_second, found.wait_share) == pytest.approx((speed, wait))
    assert (found.wait_shards, found.wait_workers, found.wait_data) == (None, None, None)  # of an earlier version


def test_the_parts_of_waiting_are_those_behind_the_beginning_too(log_of):
    parts = ("wait_shards", "wait_workers", "wait_data")
    first, second, third = ({**interval(*at), **dict(zip(parts, waits, strict=True))} for at, waits in (
        ((30, 1.0), (1.0, 0.0, 0.0)), ((65, 350.0), (0.0, 0.5, 0.0)), ((100, 350.0), (0.25, 0.25, 0.125)),
    ))  # fmt: skip
    result = {**RESULT, **dict.fromkeys(parts, 0.9)}
    found = log_of(first, second, third, result).figures()
    assert [getattr(found, part) for part in parts] == pytest.approx([0.125, 0.375, 0.0625])
    short = log_of(result).figures()
    assert [getattr(short, part) for part in parts] == [0.9, 0.9, 0.9]


def test_a_log_is_read_as_it_grows_and_from_where_a_run_begins(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(lines(RESULT))
    log = RunLog.after(path)
    assert not log.read()
    assert log.trouble == "it wrote no result"
    assert log.progress() == RunProgress(0.0, "starting")
    with path.open("a") as file:
        file.write(lines(CONFIG, interval(25, 300.0)) + '{"record": "ev')
        file.flush()
        assert log.read()
        assert log.progress() == RunProgress(0.25, "epoch 1, 300 samples/s")
        file.write(lines(evaluation(500, 6.0, 0.8, True))[14:])
    assert log.read()
    assert log.progress().text == "epoch 1, 300 samples/s, auc 0.8000"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_that_a_worker_was_lost_in_is_not_what_it_should_have_been(log_of, lost):
    assert bool(log_of({**RESULT, "expired_leases": lost}).trouble) == bool(lost)


def task(kind, arm, bandwidth="unlimited"):
    return Task(kind=kind, arm=arm, seed=9, bandwidth=bandwidth, multiple=1.0, words=())


def test_the_time_left_goes_by_the_runs_most_like_those_to_come():
    made = [run for run in fake_results((NONE, INT8), seeds=(1,)).runs if run.bandwidth != "1gbit"]
    seconds = zip(made, (20.0, 60.0, 10.0, 40.0), strict=True)
    runs = {run.key: run.model_copy(update={"total_seconds": total}) for run, total in seconds}
    assert time_left([task("quality", "none")], runs) == 60.0
    assert time_left([task("quality", "bf16")], runs) == 50.0
    assert time_left([task("tune", "int8"), task("speed", "none", "100mbit")], runs) == 40.0 + 20.0
    assert time_left([task("speed", "none", "1gbit")], runs) == 15.0
    failed = {key: run.model_copy(update={"ok": False, "total_seconds": 1.0}) for key, run in runs.items()}
    assert time_left([task("speed", "none")], {}) is time_left([task("speed", "none")], failed) is None
