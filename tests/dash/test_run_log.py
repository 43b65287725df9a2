"""The log of a run is followed while it is written."""

import dataclasses
import json
import time

import pytest

from embershard.dash.run_log import FollowedLog, NoRun
from embershard.worker.reporting.log import JsonLog
from embershard.worker.reporting.records import Evaluation, Interval, RunPlan, RunResult

PLAN = RunPlan(
    job={}, name="dlrm on clicks", workers=2, shards=2, device="cpu", dense_parameters=1, total_samples=100,
    metric="auc", split="valid",
)  # fmt: skip
INTERVAL = Interval(
    step=5, epoch=1, samples=50, seconds=1.0, loss=0.5, samples_per_second=40.0, wait_share=0.25, lr_scale=1.0,
    wait_shards=0.25,
)  # fmt: skip
EVALUATION = Evaluation(
    step=5, epoch=1, samples=50, seconds=1.0, figures={"valid": {"auc": 0.75}}, improved=True, evaluation_seconds=0.1,
    reachable={"valid": {"auc": 0.8}},
)  # fmt: skip
RESULT = RunResult(
    metric="auc", split="valid", figures={"valid": {"auc": 0.75}}, reachable={}, best_epoch=1, best_step=5,
    stopped_early=False, epochs=1, steps=10, samples=100, seconds=3.0, train_seconds=2.0, samples_per_second=50.0,
    wait_share=0.0, skipped_rows=0, advice=("more shards",),
)  # fmt: skip


@pytest.fixture
def log(tmp_path):
    written = JsonLog(tmp_path)
    yield written
    written.close()


def test_a_folder_without_a_run_is_an_error_that_names_it(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(NoRun) as caught:
            FollowedLog(folder)
        assert caught.value.fields["folder"] == str(folder)


def test_a_job_that_starts_may_write_its_log_later(tmp_path):
    followed = FollowedLog(tmp_path / "later", wait=True)
    assert followed.read()[0] == []
    written = JsonLog(tmp_path / "later")
    written.started(PLAN)
    written.close()
    assert len(followed.read()[0]) == 1
    assert followed.state.name == "dlrm on clicks"


def test_another_number_of_workers_is_an_event(tmp_path, log):
    log.started(PLAN)
    with log.path.open("a") as file:
        line = {"record": "workers", "time": 7.0, "before": 2, "workers": 3, "reason": "900 samples/s"}
        file.write(json.dumps(line) + "\n")
    assert FollowedLog(tmp_path).read()[0][-1].text == "workers: 2 -> 3: 900 samples/s"


def test_the_age_of_the_last_line_is_not_by_the_clock_of_another_machine(tmp_path, log, monkeypatch):
    log.started(PLAN)
    followed = FollowedLog(tmp_path)
    monkeypatch.setattr("time.time", lambda behind=time.time: behind() + 900.0)
    followed.read()
    assert followed.state.age >= 899.0  # it may be of a run that ended long ago
    monkeypatch.undo()
    with log.path.open("a") as file:
        file.write(json.dumps({"record": "train", "time": time.time() - 900.0, "step": 5}) + "\n")
    followed.read()
    assert followed.state.age < 100.0


def test_the_age_of_a_long_log_is_that_of_its_last_line_until_all_is_read(tmp_path, log, monkeypatch):
    log.started(PLAN)
    with log.path.open("a") as file:
        for step in range(9):
            file.write(json.dumps({"record": "train", "time": 7.0, "step": step}) + "\n")
    monkeypatch.setattr("embershard.dash.run_log._MOST_BYTES", 500)
    followed = FollowedLog(tmp_path)
    while followed.state.step < 8:
        followed.read()
    assert followed.state.age > 1e6


def test_each_line_is_taken_once_and_a_half_written_one_later(tmp_path, log):
    log.started(PLAN)
    followed = FollowedLog(tmp_path)
    followed.read()
    log.trained(INTERVAL)
    text = log.path.read_text()
    log.path.write_text(text[:-20])
    assert followed.read()[1]["training"] == []
    log.path.write_text(text)
    (point,) = followed.read()[1]["training"]
    assert (point["loss"], point["samples_per_second"]) == (0.5, 40.0)
    assert followed.read()[1]["training"] == []
    assert followed.training.points == 1


def test_what_no_model_can_beat_is_known_from_the_first_evaluation_on(tmp_path, log):
    log.started(PLAN)
    log.evaluated(EVALUATION)
    followed = FollowedLog(tmp_path)
    followed.read()
    assert (followed.state.figure, followed.state.best, followed.state.reachable) == (0.75, 0.75, 0.8)


def test_a_run_that_ended_says_so_and_what_it_advises(tmp_path, log):
    log.started(PLAN)
    log.trained(INTERVAL)
    log.finished(RESULT)
    followed = FollowedLog(tmp_path)
    followed.read()
    assert followed.state.ended
    assert (followed.state.samples, followed.state.best, followed.state.notes) == (100, 0.75, ["more shards"])


def test_a_new_run_in_the_folder_begins_anew_and_one_that_is_resumed_goes_on(tmp_path, log):
    log.started(PLAN)
    log.trained(INTERVAL)
    log.started(dataclasses.replace(PLAN, resumed_step=5))
    followed = FollowedLog(tmp_path)
    followed.read()
    assert (followed.training.points, followed.restarts) == (1, 0)
    log.started(PLAN)
    followed.read()
    assert (followed.training.points, followed.restarts) == (0, 1)


DAMAGED = ("nonsense", "[]", '{"record":"train"}', '{"record":"eval","time":1,"figures":7}', "[" * 9999)
OF_OTHERS = '{"record":"config","time":1,"mode":{}}'


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_left_out(tmp_path, log, line):
    log.started(PLAN)
    with log.path.open("a") as file:
        file.write(line + "\n")
    log.trained(INTERVAL)
    followed = FollowedLog(tmp_path)
    followed.read()
    assert followed.training.points == 1


def test_a_run_without_a_mode_is_shown_without_one(tmp_path, log):
    log.path.write_text(OF_OTHERS + "\n")
    log.trained(INTERVAL)
    followed = FollowedLog(tmp_path)
    followed.read()
    assert (followed.training.points, followed.state.codecs) == (1, "")


def test_a_record_of_a_worker_of_an_earlier_run_is_not_shown(tmp_path, log):
    log.started(PLAN)
    (tmp_path / "workers").mkdir()
    for worker, written in ((0, 1.0), (1, 4e9)):
        (tmp_path / "workers" / f"{worker}.json").write_text(json.dumps({"worker": worker, "time": written}))
    (tmp_path / "workers" / "2.json").write_text("{")
    followed = FollowedLog(tmp_path)
    followed.read()
    assert list(followed.workers()) == [1]
