"""Two real workers in every strategy that is synchronous: together they are one process on the joint batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import embershard as es
from embershard.deploy.supervisor import LocalShards
from embershard.worker.group import WorkerGroup

sys.path.insert(0, str(Path(__file__).parent))
from strategy_peer import SAMPLES, job, train

pytestmark = pytest.mark.integration


@pytest.fixture
def shards() -> Iterator[str]:
    with LocalShards(2) as running:
        yield ",".join(running.addresses)


def run_two(strategy: str, mode: str, ps: str, file: Path) -> dict[str, np.ndarray]:
    """What two workers reach together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    meeting["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    peer = Path(__file__).parent / "strategy_peer.py"
    workers = [
        subprocess.Popen(
            [sys.executable, str(peer), strategy, mode, ps, str(file)],
            env={**os.environ, **meeting, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=90)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
    with np.load(file, allow_pickle=False) as found:
        return dict(found)


def assert_equal_but_for_rounding(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert found.keys() == want.keys()
    assert int(found["samples trained"]) == 2 * SAMPLES  # none twice, though one worker has a batch more
    for name, values in want.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=2e-5, err_msg=name)


def test_two_workers_of_ddp_are_one_process(tmp_path: Path) -> None:
    want = train(job("local", "", workers=1), None, WorkerGroup())
    assert_equal_but_for_rounding(run_two("ddp", "", "", tmp_path / "found.npz"), want)


@pytest.mark.parametrize(("strategy", "mode"), [("ps", "ps"), ("hybrid", "ddp"), ("ps", "fsdp")])
def test_two_synchronous_workers_are_one_process(shards: str, tmp_path: Path, strategy: str, mode: str) -> None:
    with es.local() as session:
        want = train(job("ps", "ps", workers=1), session, WorkerGroup())
    assert_equal_but_for_rounding(run_two(strategy, mode, shards, tmp_path / "found.npz"), want)
