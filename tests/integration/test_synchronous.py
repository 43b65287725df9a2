"""Workers and shards as processes of their own, at one clock: equal to one process, and past a worker that stands."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from standing_still import standing_still

import embershard as es
from embershard.deploy.supervisor import LocalShards

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

sys.path.insert(0, str(Path(__file__).parent))
from sync_peer import build, joint_batches, train  # noqa: E402

PEER = Path(__file__).with_name("sync_peer.py")
STALENESS = 0
WITHIN = 250.0  # seconds, on a machine that does much else
Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path):
    """Workers 0 to n - 1, each with a file for its weights, that train when they are sent a line."""
    started: list[subprocess.Popen[str]] = []

    def begin(ps, workers, *, lease=60.0):
        for rank in range(workers):
            words = [ps, *map(str, (rank, workers, STALENESS, tmp_path / f"{rank}", lease))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            started.append(subprocess.Popen([sys.executable, str(PEER), *words], text=True, **pipes))
        return started

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def train_now(worker: subprocess.Popen[str]) -> None:
    worker.stdin.write("\n")
    worker.stdin.flush()


def weights(folder: Path, rank: int) -> list[np.ndarray]:
    with np.load(folder / f"{rank}.npz") as found:
        return [found[name] for name in found.files]


@pytest.mark.parametrize("workers", [2, 4])
def test_synchronous_worker_processes_train_as_one_process_on_the_joint_batch(start, tmp_path, workers):
    with LocalShards(2) as shards:
        processes = start(",".join(shards.addresses), workers)
        for process in processes:
            train_now(process)
        assert [process.wait(WITHIN) for process in processes] == [0] * workers
    with es.local(2) as session:
        alone = train(es.wrap(build(), session, optimizer=es.Adam(lr=0.01)), session, joint_batches())
    for mine, theirs in zip(weights(tmp_path, 0), alone, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=0)
    for rank in range(1, workers):  # when the last clock is closed all see the same
        for mine, other in zip(weights(tmp_path, 0), weights(tmp_path, rank), strict=True):
            np.testing.assert_array_equal(mine, other)


def test_a_worker_that_stands_still_is_left_behind_and_comes_back(start):
    with LocalShards(2) as shards:
        here, stopped = start(",".join(shards.addresses), 2, lease=2.0)
        assert stopped.stdout.readline() == "begins\n"
        with standing_still(stopped.pid):  # before the first of its steps
            train_now(stopped)
            train_now(here)
            assert here.wait(WITHIN) == 0  # after a lease
        out, _ = stopped.communicate(timeout=WITHIN)
        assert stopped.returncode == 0
        assert int(out.removeprefix("lost ")) >= 1
