"""A wrapped model over real shard processes: equal to torch, and honest about shards that pause, die or come back."""

import copy
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from standing_still import standing_still
from torch import nn

import embershard as es
from embershard.deploy.supervisor import LocalShards, RestartPolicy
from embershard.proto.errors import ShardRestarted, ShardUnavailable, UnknownOptimizer
from embershard.worker.session.session import Session
from harness.raises import raises

pytestmark = pytest.mark.integration

BENCH = Path(__file__).resolve().parents[2] / "bench"


class Model(nn.Module):
    """An embedding read by every feature, a bag, and a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.bag = nn.Embedding(500, 8), nn.EmbeddingBag(500, 1, mode="sum")
        self.tower = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def embedding_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"embedding": ids, "bag": ids}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.tower(self.embedding(ids).flatten(1)) + self.bag(ids)
        return logits.squeeze(1)


def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        ids = torch.randint(500, (64, 4), generator=generator)
        yield ids, (ids.sum(1) % 2).float()


def train(model: nn.Module, session: Session, count: int = 20) -> list[float]:
    losses = []
    for ids, labels in batches(count):
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
        loss.backward()
        session.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def shards():
    with LocalShards(2) as running:
        yield running


def test_training_over_two_processes_has_torchs_loss_curve(shards):
    reference = Model()
    with es.connect(shards.addresses) as session:
        model = es.wrap(copy.deepcopy(reference), session, optimizer=es.SGD(lr=0.3), prefix="curve/")
        ours = train(model, session)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3)
    theirs = []
    for ids, labels in batches(20):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(reference(ids), labels)
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_two_workers_lose_and_double_no_push(shards):
    steps, workers = 30, 2
    spec = es.TableSpec(name="counts", dim=4, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))

    def work(worker):
        with es.connect(shards.addresses, worker=worker) as session:
            module = es.Embedding(session.table(spec))
            for step in range(steps):
                module(torch.arange(step, step + 100)).sum().backward()
                session.step()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with es.connect(shards.addresses, worker=workers) as session:
        rows = session.table(spec).pull(torch.arange(130))
    pushes = [sum(step <= i < step + 100 for step in range(steps)) * workers for i in range(130)]
    torch.testing.assert_close(rows[:, 0], -torch.tensor(pushes, dtype=torch.float32), rtol=0, atol=0)


def test_a_shard_that_pauses_is_waited_for(shards):
    with es.connect(shards.addresses) as session:
        model = es.wrap(Model(), session, optimizer=es.SGD(lr=0.3), prefix="pause/")
        train(model, session, 2)
        waited = session.stats.wait_seconds
        with ThreadPoolExecutor(1) as pool:
            with standing_still(shards.pids[1]):
                training = pool.submit(train, model, session, 2)
                time.sleep(0.5)
                assert not training.done()
            training.result(60)
        assert session.stats.wait_seconds > waited


def test_a_user_defined_row_optimizer_trains_in_shards_started_with_it(shards, monkeypatch):
    optimizer = es.Custom(function="signum:signum", lr=0.01, settings={"beta": 0.9})
    model = Model()
    told = {"shard": re.compile("shard . at 127"), "optimizer": "signum:signum"}
    with es.connect(shards.addresses) as session, raises(UnknownOptimizer, **told):
        es.wrap(Model(), session, optimizer=optimizer, prefix="custom/")
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCH)])
    with LocalShards(1, imports=["signum"]) as own, es.connect(own.addresses) as session:
        losses = train(es.wrap(copy.deepcopy(model), session, optimizer=optimizer), session)
    with es.local(1, imports=["signum"]) as session:
        assert losses == train(es.wrap(model, session, optimizer=optimizer), session)


def test_a_worker_waits_for_shards_that_start_after_it():
    def connect(port):
        with es.connect(f"127.0.0.1:{port}", timeout=timedelta(seconds=100)) as session:
            return session.placement.num_shards

    with socket.socket() as reserved, ThreadPoolExecutor(1) as pool:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))  # nobody else is given the port
        port = reserved.getsockname()[1]
        worker = pool.submit(connect, port)
        time.sleep(0.5)
        assert not worker.done()
        with LocalShards(1, base_port=port):
            assert worker.result(100) == 1


def test_a_killed_shard_is_named_by_the_deadline():
    with LocalShards(2) as running, es.connect(running.addresses, timeout=timedelta(seconds=5)) as session:
        model = es.wrap(Model(), session, optimizer=es.SGD(lr=0.3))
        train(model, session, 3)
        os.kill(running.pids[1], signal.SIGKILL)
        with raises(ShardUnavailable, shard=f"shard 1 at {running.addresses[1]}", seconds=5.0):
            train(model, session, 1)


def test_a_shard_that_was_restarted_without_its_rows_ends_the_training():
    policy = RestartPolicy(first_pause=timedelta(seconds=0.1))
    patience = timedelta(seconds=100)  # it takes seconds to start
    with LocalShards(2, restart=policy) as running, es.connect(running.addresses, timeout=patience) as session:
        model = es.wrap(Model(), session, optimizer=es.SGD(lr=0.3))
        train(model, session, 3)
        os.kill(running.pids[0], signal.SIGKILL)
        with raises(ShardRestarted, shard=f"shard 0 at {running.addresses[0]}"):
            train(model, session, 1000)
        with raises(ShardRestarted, shard=re.compile("shard 0")):  # and it stays so
            train(model, session, 1)
