"""What a job that was started again says of it: by the steps of its log, and the time until the next line."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import pytest

from embershard.cli import local_job
from embershard.cli.recovery import Recoveries
from embershard.deploy.workers import WorkerFailed
from embershard.proto.errors import JobError, ShardFailed
from embershard.worker.checkpoint import folder as folder_module
from embershard.worker.checkpoint.folder import CheckpointFolder
from harness.job import make_job


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


KILLED = ShardFailed(what="shard 0 ended with SIGKILL", log="", code=-9, served=True)
REFUSED = ShardFailed(what="shard 0 ended with exit code 1 before it served", log="", code=1, served=False)
STOPPED = ShardFailed(what="shard 0 ended with exit code 0", log="", code=0, served=True)
ENDED = {"worker": 0, "how": "", "log": "", "lines": ""}
LOST, OWN = WorkerFailed(**ENDED, code=75), WorkerFailed(**ENDED, code=1)


@dataclass
class Saved:
    """A checkpoint, as far as a start from it looks at it."""

    step: int

    @property
    def url(self):
        return f"checkpoints/step-{self.step}"

    @property
    def manifest(self):
        return self


class LocalJob(local_job.LocalJob):
    """A job whose attempts end as they are told to: the error of each (None: well), and its latest checkpoint."""

    ends: ClassVar[list] = []
    begun: ClassVar[list] = []

    def _attempt(self, checkpoint, timeout):
        self.begun.append((checkpoint and checkpoint.step, timeout.total_seconds()))
        error, _ = self.ends[len(self.begun) - 1]
        if error is not None:
            raise error

    def _latest(self, began):
        step = self.ends[len(self.begun) - 1][1]
        if step is BAD:
            raise JobError(where="checkpoint", reason="is damaged")
        return Saved(step) if step else None


BAD = object()


@pytest.mark.parametrize(
    ("ends", "ps", "begun", "raised"),
    [
        ([(KILLED, 20), (None, 0)], None, [None, 20], None),
        ([(STOPPED, 20), (LOST, 40), (None, 0)], None, [None, 20, 40], None),
        ([(KILLED, 0), (None, 0)], None, [None, None], None),
        ([(KILLED, 20), (KILLED, 20)], None, [None, 20], KILLED),
        ([(OWN, 20)], None, [None], OWN),
        ([(REFUSED, 20)], None, [None], REFUSED),
        ([(KILLED, BAD)], None, [None], KILLED),
        ([(KeyboardInterrupt(), 20)], None, [None], KeyboardInterrupt()),
        ([(LOST, 20), (None, 0)], "a:1", [None, 20], None),
        ([(LOST, 0)], "a:1", [None], LOST),
    ],
)
def test_attempts_begin_with_the_latest_checkpoint_until_one_ends_well_or_is_the_last(
    tmp_path, monkeypatch, ends, ps, begun, raised
):
    monkeypatch.setattr(LocalJob, "ends", ends)
    monkeypatch.setattr(LocalJob, "begun", [])
    monkeypatch.setattr(local_job.time, "sleep", lambda seconds: None)
    job = make_job(checkpoint={"folder": str(tmp_path)})
    recoveries = Recoveries(tmp_path, lambda line: None)
    local = LocalJob(
        job=job, command=[], least=1, folder=tmp_path, ps=ps, imports=(), replace=False, recoveries=recoveries
    )
    with nullcontext() if raised is None else pytest.raises(type(raised)) as caught:
        local.train(None)
    assert raised is None or caught.value is raised or isinstance(raised, KeyboardInterrupt)
    assert [step for step, _ in local.begun] == begun
    assert [seconds for _, seconds in local.begun][1:] == [300 if ps else 60] * (len(begun) - 1)
    assert len(recoveries.made) == len(begun) - 1


def test_a_run_knows_its_checkpoints_where_the_clock_was_set_back(tmp_path, monkeypatch):
    job = make_job(checkpoint={"folder": str(tmp_path)})
    folder = CheckpointFolder(str(tmp_path))
    local = LocalJob(job=job, command=[], least=1, folder=tmp_path, ps=None, imports=(), replace=False, recoveries=None)
    for step, now in ((20, 2000.0), (10, 1000.0)):
        monkeypatch.setattr(folder_module.time, "time", lambda now=now: now)
        before = local._newest()
        url = folder.new_url(step)
        folder.begin({}, url=url, best=None, job=job, step=step, world_size=1, output=None, shards=None).wait()
        assert local_job.LocalJob._latest(local, before).manifest.step == step
        assert local_job.LocalJob._latest(local, local._newest()) is None
