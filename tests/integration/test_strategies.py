"""Two real workers in every strategy that is synchronous: together they are one process on the joint batch."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import embershard as es
from embershard.deploy.supervisor import LocalShards
from embershard.proto.errors import WorkerLost
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.shuffle import permutation
from harness.eventually import PATIENCE
from harness.processes import EMBERSHARD, descendants

sys.path.insert(0, str(Path(__file__).parent))
from strategy_peer import DATA_SEED, SAMPLES, job, train

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def shards():
    with LocalShards(2) as running:
        yield ",".join(running.addresses)


@contextmanager
def meeting_of_two() -> Iterator[dict[str, str]]:
    """The environment of two workers that nobody supervises, but for their ranks."""
    with socket.socket() as reserved:  # nobody else is given the port while it is bound here
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = str(reserved.getsockname()[1])
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
        yield {**os.environ, **meeting, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run_two(strategy: str, mode: str, ps: str, file: Path, **fields: object) -> dict[str, np.ndarray]:
    """What two workers reach together."""
    peer = Path(__file__).parent / "strategy_peer.py"
    with meeting_of_two() as meeting:
        workers = [
            subprocess.Popen(
                [sys.executable, str(peer), strategy, mode, ps, str(file), json.dumps(fields)],
                env={**meeting, "RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for worker in workers:
                _, errors = worker.communicate(timeout=PATIENCE)
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


def test_two_workers_of_ddp_are_one_process(tmp_path):
    want = train(job("local", "", workers=1), None, WorkerGroup())
    assert_equal_but_for_rounding(run_two("ddp", "", "", tmp_path / "found.npz"), want)


@pytest.mark.parametrize(("strategy", "mode"), [("ps", "ps"), ("hybrid", "ddp"), ("ps", "fsdp")])
def test_two_synchronous_workers_are_one_process(shards, tmp_path, strategy, mode):
    with es.local() as session:
        want = train(job("ps", "ps", workers=1), session, WorkerGroup())
    assert_equal_but_for_rounding(run_two(strategy, mode, shards, tmp_path / "found.npz"), want)


def test_dense_weights_on_shards_and_in_two_workers_have_the_same_bits(tmp_path):
    found = []
    for strategy, mode in (("ps", "ps"), ("hybrid", "ddp")):
        with LocalShards(2) as running:
            addresses = ",".join(running.addresses)
            schedule = {"name": "linear"}
            found.append(run_two(strategy, mode, addresses, tmp_path / f"{mode}.npz", lr_schedule=schedule))
    assert found[0].keys() == found[1].keys()
    for name, values in found[0].items():
        np.testing.assert_array_equal(found[1][name], values, err_msg=name)


JOB = """\
model: {name: dlrm, bottom: [8], hidden: [8]}
data: {reader: clicks, eval_samples: 1000, loader_processes: 0}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 2048, threads: 1}
workers: 2
shards: 2
"""


@pytest.mark.parametrize(
    ("sets", "want"),
    [
        (["strategy=local"], "1 worker on cpu, no shards"),
        (["strategy=ddp"], "2 workers on cpu, no shards"),
        (["strategy=hybrid", "train.staleness=4"], "2 workers on cpu, 2 shards"),
        (["train.staleness=local(2)"], "2 workers on cpu, 2 shards"),
    ],
    ids=str,
)
def test_one_job_trains_in_every_strategy(start, sets, want):
    process = start(JOB, *(word for assignment in sets for word in ("--set", assignment)))
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    assert want in text
    assert "valid AUC" in text


def test_shards_are_refused_where_a_strategy_has_none(start):
    process = start(JOB, "--set", "strategy=ddp", "--ps", "127.0.0.1:7700")
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "strategy ddp has no shards: --ps" in " ".join(text.split())


def test_a_lost_worker_ends_the_others_of_ddp(start):
    process = start(JOB, "--set", "strategy=ddp", "--set", "train.samples=1_000_000_000")
    for line in process.stdout:
        if "samples/s" in line:
            break
    victim = descendants(process.pid)[1]
    number = victim.environ()["RANK"]
    victim.kill()
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert f"worker {number} ended (SIGKILL)" in text


def test_a_worker_of_ddp_says_by_itself_that_it_lost_another(tmp_path):
    # a supervisor would end it, perhaps before it has said so
    (tmp_path / "job.yaml").write_text(JOB)
    command = [*EMBERSHARD, "worker", str(tmp_path / "job.yaml"), "--set", "strategy=ddp"]
    command += ["--set", "train.samples=1_000_000_000"]
    with meeting_of_two() as meeting:
        first, second = workers = [
            subprocess.Popen(
                command, env={**meeting, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for rank in range(2)
        ]
        try:
            for line in first.stdout:
                assert "error" not in line, line
                if "samples/s" in line:
                    break
            second.kill()
            text, _ = first.communicate(timeout=PATIENCE)
            assert first.returncode == 1
            assert f"worker 0 of 2 {WorkerLost.words}" in " ".join(text.split())
            assert "Traceback" not in text
            assert "Warning" not in text
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def test_two_workers_of_ddp_accumulate_and_clip_as_one_process(tmp_path):
    fields = {"accumulate": 2, "clip_norm": 0.05, "non_finite": "skip"}
    want = train(job("local", "", workers=1, **fields), None, WorkerGroup())
    assert_equal_but_for_rounding(run_two("ddp", "", "", tmp_path / "found.npz", **fields), want)


@pytest.mark.parametrize(("strategy", "mode"), [("ps", "ps"), ("hybrid", "ddp")])
def test_two_synchronous_workers_accumulate_as_one_process(shards, tmp_path, strategy, mode):
    with es.local() as session:
        want = train(job("ps", "ps", workers=1, accumulate=3), session, WorkerGroup())
    assert_equal_but_for_rounding(run_two(strategy, mode, shards, tmp_path / "found.npz", accumulate=3), want)


def test_a_nan_that_one_worker_meets_leaves_the_step_out_on_all(tmp_path):
    found = []
    for strategy, mode in (("hybrid", "ddp"), ("ps", "fsdp")):  # where weights are sharded, a norm is a collective
        with LocalShards(2) as running:
            addresses = ",".join(running.addresses)
            found.append(
                run_two(strategy, mode, addresses, tmp_path / f"{mode}.npz", non_finite="skip", nan_at=SAMPLES // 2)
            )
    epochs, workers = 2, 2
    assert int(found[0]["steps left out"]) == epochs * workers
    assert_equal_but_for_rounding(found[1], found[0])


def test_a_nan_in_a_workers_last_batch_leaves_out_no_step_of_the_others(tmp_path):
    last = int(permutation(SAMPLES, DATA_SEED, 0)[SAMPLES - 2])  # of the second worker, who has a batch less
    fields = {"non_finite": "skip", "epochs": 1, "nan_at": last}
    for strategy, mode in (("ddp", ""), ("hybrid", "ddp")):  # which scale losses, and gradients
        with ExitStack() as stack:
            running = stack.enter_context(LocalShards(2)).addresses if mode else []
            found = run_two(strategy, mode, ",".join(running), tmp_path / f"{strategy}{mode}.npz", **fields)
        assert int(found["steps left out"]) == 2  # one, by both


def test_rows_that_only_keep_company_are_left_alone(tmp_path):
    adam = {"name": "adamw", "lr": 0.05, "weight_decay": 0.1}  # moves a row whose gradient is 0, too
    sections = {"embedding": {"dim": 4, "optimizer": adam, "initializer": {"name": "normal", "std": 0.1}}}
    want = train(job("local", "", workers=1, sections=sections), None, WorkerGroup())
    assert_equal_but_for_rounding(run_two("ddp", "", "", tmp_path / "found.npz", sections=sections), want)


def test_workers_whose_dense_weights_are_all_frozen_keep_company(shards, tmp_path):
    frozen = {"freeze": ["bottom", "top", "output"]}
    with es.local() as session:
        want = train(job("ps", "ps", workers=1, sections=frozen), session, WorkerGroup())
    assert_equal_but_for_rounding(run_two("hybrid", "ddp", shards, tmp_path / "found.npz", sections=frozen), want)
