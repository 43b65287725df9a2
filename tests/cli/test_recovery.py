"""What a job that was started again says of it: by the steps of its log, and the time until the next line."""

import json

import pytest

from embershard.cli.recovery import Recoveries


@pytest.fixture
def log(tmp_path):
    """Appends lines to the log of a run."""

    def write(*records, end="\n"):
        with (tmp_path / "log.jsonl").open("a") as file:
            for record in records:
                file.write((record if isinstance(record, str) else json.dumps(record)) + end)

    return write


def told(folder):
    return [one for line in (folder / "log.jsonl").open() if (one := json.loads(line))["record"] == "recovery"]


def test_the_steps_behind_the_checkpoint_are_lost_and_the_next_line_of_the_log_ends_the_pause(tmp_path, log):
    log({"record": "train", "step": 5000})  # of a run before this one
    said = []
    recoveries = Recoveries(tmp_path, said.append)
    recoveries.look()
    assert (recoveries.summary(), said) == ("", [])
    log({"record": "config"}, {"record": "train", "step": 130}, {"record": "eval", "step": 130})
    log('{"record": "train", "st', end="")  # of a worker that was killed
    recoveries.stop()
    recoveries.begin("shard 1 ended", "checkpoints/step-100", 100)
    recoveries.look()
    assert (len(said), recoveries.made[0].seconds) == (1, None)
    log("", {"record": "config"})
    recoveries.look()
    recoveries.look()
    (record,) = [one for one in recoveries.made]
    assert (record.step, record.lost_steps, record.checkpoint) == (100, 30, "checkpoints/step-100")
    assert 0 <= record.seconds < 60
    assert len(said) == 2


def test_each_restart_is_a_line_of_the_log_and_their_sum_the_end_of_the_run(tmp_path, log):
    recoveries = Recoveries(tmp_path, lambda line: None)
    recoveries.begin("worker 0 ended", None, 0)  # before the log was begun
    log({"record": "config"}, {"record": "train", "step": 50})
    recoveries.look()
    recoveries.begin("worker 0 ended", "checkpoints/step-40", 40)
    log({"record": "config"})
    recoveries.look()
    assert [(record["step"], record["lost_steps"]) for record in told(tmp_path)] == [(0, 0), (40, 10)]
    assert "2 times: about 10 steps" in recoveries.summary()
