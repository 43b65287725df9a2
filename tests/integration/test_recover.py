"""`embershard worker --recover`: workers that are started one by one, again and again, as a cluster does it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from embershard.deploy.attempts import LOST_EXIT_CODE, NO_PROGRESS_EXIT_CODE
from embershard.deploy.supervisor import LocalShards, RestartPolicy
from embershard.worker.checkpoint.checkpoint import checkpoint_at
from embershard.worker.checkpoint.recovery import FILE
from harness.eventually import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EPOCH = 12_000
JOB = f"""\
model: {{name: dlrm, bottom: [16], hidden: [16]}}
data: {{reader: clicks, samples: {EPOCH}, eval_samples: 2000, loader_processes: 0}}
embedding: {{dim: 4, optimizer: {{name: adagrad, lr: 0.05}}}}
train: {{batch_size: 64, epochs: 5, lease: 2}}
checkpoint: {{folder: checkpoints}}
"""


class Pod:
    """A worker that is started again whenever it ends with 75 or by a signal, as a pod of a Job is."""

    def __init__(self, folder, addresses, rank, of, *words):
        self._command = [
            sys.executable, "-m", "embershard.cli", "worker", "job.yaml", "--ps", addresses, "--recover",
            "--rank", str(rank), "--world-size", str(of), "--join-timeout", "60", *words,
        ]  # fmt: skip
        self._folder, self.said, self.codes = folder, "", []
        self.process = None
        self._is_over, self._may_start = False, threading.Event()
        self._may_start.set()
        self._thread = threading.Thread(target=self._keep_running, daemon=True)
        self._thread.start()

    def _keep_running(self):
        while self._may_start.wait() and not self._is_over:
            self.process = subprocess.Popen(
                self._command, cwd=self._folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            self.said += self.process.communicate()[0]
            self.codes.append(self.process.returncode)
            self._is_over |= self.codes[-1] != LOST_EXIT_CODE and self.codes[-1] >= 0

    def pause(self):
        """Start it no more, as where no node has room for it."""
        self._may_start.clear()

    def resume(self):
        self._may_start.set()

    def end(self):
        self._is_over = True
        self.resume()
        if self.process is not None:
            self.process.kill()
        self._thread.join(30)

    def wait(self):
        self._thread.join(200)
        assert not self._thread.is_alive(), self.said


@pytest.fixture
def pods(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    started = []

    def start(shards, of, *words):
        addresses = ",".join(shards.addresses)
        started.extend(Pod(tmp_path, addresses, rank, of, *words) for rank in range(of))
        return started[-of:]

    yield start
    for pod in started:
        pod.end()


@pytest.fixture
def shards():
    with LocalShards(2, restart=RestartPolicy()) as started:
        yield started


def kill_shard(shards, index=1):
    os.kill(shards.pids[index], signal.SIGKILL)


def await_checkpoints(folder, count):
    """Until so many were written, of which only the last ones stay."""
    seen = set()
    assert eventually(lambda: seen.update(folder.glob("checkpoints/step-*/checkpoint.json")) or len(seen) >= count)


def run_of(folder):
    return json.loads((folder / "checkpoints" / FILE).read_text())


@pytest.mark.parametrize("staleness", ["off", pytest.param("0", marks=pytest.mark.long)])
def test_a_shard_that_lost_its_rows_is_given_those_of_the_latest_checkpoint_with_the_others(
    shards, pods, tmp_path, staleness
):
    workers = pods(shards, 2, "--set", f"train.staleness={staleness}")
    await_checkpoints(tmp_path, 1)
    first = run_of(tmp_path)
    assert first["checkpoint"] is None
    kill_shard(shards)
    for worker in workers:
        worker.wait()
    assert [worker.codes[-1] for worker in workers] == [0, 0], workers[0].said
    assert LOST_EXIT_CODE in workers[0].codes
    last = run_of(tmp_path)
    assert last["number"] > first["number"]
    assert last["checkpoint"] is not None
    assert last["is_done"]
    assert checkpoint_at(str(tmp_path / "checkpoints")).manifest.step >= 5 * EPOCH // 64 // 2


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_where_the_first_worker_is_killed_all_begin_again_and_another_one_joins_the_rest(shards, pods, tmp_path, rank):
    workers = pods(shards, 2)
    await_checkpoints(tmp_path, 1)
    first = run_of(tmp_path)
    workers[rank].process.kill()
    for worker in workers:
        worker.wait()
    assert [worker.codes[-1] for worker in workers] == [0, 0], workers[0].said
    last = run_of(tmp_path)
    assert last["is_done"]
    if rank == 1:
        assert last["number"] == first["number"]
        assert workers[0].codes == [0]
    else:
        assert last["number"] > first["number"]
        assert last["checkpoint"] is not None


@pytest.mark.long
def test_a_job_whose_first_worker_is_lost_at_its_end_is_done(shards, pods, tmp_path):
    workers = pods(shards, 2, "--set", "train.lease=1")
    await_checkpoints(tmp_path, 4)  # of five
    first = workers[0]
    first.pause()
    first.process.kill()
    workers[1].wait()
    assert workers[1].codes == [0], workers[1].said
    assert run_of(tmp_path)["is_done"]
    first.resume()
    first.wait()
    assert first.codes[-1] == 0, first.said


def test_one_worker_that_is_killed_goes_on_from_the_latest_checkpoint_once_it_is_started_again(shards, pods, tmp_path):
    (worker,) = pods(shards, 1)
    await_checkpoints(tmp_path, 1)
    worker.process.kill()
    worker.wait()
    assert worker.codes[-1] == 0, worker.said
    assert run_of(tmp_path)["checkpoint"] is not None
    (again,) = pods(shards, 1)
    again.wait()
    assert again.codes == [0]
    assert "the job is done" in again.said


@pytest.mark.long
def test_a_job_that_fails_again_and_again_without_a_checkpoint_ends(shards, pods, tmp_path):
    (worker,) = pods(
        shards,
        1,
        "--attempts",
        "2",
        "--set",
        "train.epochs=200",
        "--set",
        "checkpoint.every=200",
        "--set",
        "checkpoint.best=false",
    )
    for _ in range(2):
        before = len(worker.codes)
        assert eventually(lambda: (tmp_path / "checkpoints" / FILE).exists() and worker.process.poll() is None)
        time.sleep(2)
        worker.process.kill()
        assert eventually(lambda before=before: len(worker.codes) > before)
    worker.wait()
    assert worker.codes[-1] == NO_PROGRESS_EXIT_CODE, worker.said
