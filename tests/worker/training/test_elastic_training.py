"""Three Trainers over shards in this process, each in a thread: one dies, or comes late, and the others train on."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from embershard.local_shards import InProcessShards
from embershard.proto.errors import StaleWorker
from embershard.proto.messages import READ_ONLY_WORKER
from embershard.proto.snapshot.stored import open_snapshot
from embershard.worker.checkpoint.checkpoint import checkpoint_at
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.client.worker_group import ShardGroup
from embershard.worker.session.session import Session
from embershard.worker.trained.reading import ReadOnlySession, remote_tables, trained
from embershard.worker.training.evaluate import Evaluator
from embershard.worker.training.trainer import Trainer
from harness.clicks import Notes, click_data, click_job

WORKERS, SAMPLES, HELD_OUT, EPOCHS = 3, 600, 200, 3


class Killed(Exception):
    """What a worker that is killed leaves of its thread."""


class Recorded:
    """A dataset whose worker may die with the second batch of the second epoch, or find no batch in its first."""

    def __init__(self, whole, die=None, *, idle=False):
        self._whole, self._die, self._idle = whole, die, idle
        self._first = None

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def train(self, epoch, rank, world_size, batch_size):
        self._first = epoch if self._first is None else self._first
        idle = self._idle and epoch == self._first
        for number, batch in enumerate(() if idle else self._whole.train(epoch, rank, world_size, batch_size)):
            if self._die is not None and epoch == 1 and number == 1:
                self._die()
            yield batch


class Cluster:
    """Workers of one job."""

    def __init__(self, staleness, splits, **sections):
        train = {"epochs": EPOCHS, "batch_size": 20, "staleness": staleness, **sections.pop("train", {})}
        self.job = click_job(train=train, workers=WORKERS, data={"splits": splits}, **sections)
        self.shards = InProcessShards(2)
        self.staleness = staleness
        self.died = threading.Event()

    def run(self, rank, *, dies=False, idle=False, leaves=False, output=None):
        """One worker's run; None where it was killed, or left. With an `output` a fourth worker may come."""
        client = Client(self.shards.transports(), worker=rank)
        minute = timedelta(seconds=60)
        terms = Terms(workers=WORKERS, staleness=self.staleness, lease=minute, wait_timeout=minute)
        member, notes = client.join(terms), Notes()

        def die():
            member._ended.set()  # it is not heard of any more
            member.terms = replace(terms, lease=timedelta(milliseconds=1))  # and given up at once
            member._join(member.next_clock)
            self.died.set()
            raise Killed

        group = ShardGroup(client, rank, WORKERS + (output is not None), at_start=WORKERS)
        end = die if dies else (lambda: setattr(group, "leaving", True)) if leaves else None
        data = Recorded(click_data(train=SAMPLES, valid=HELD_OUT, test=HELD_OUT), end, idle=idle)
        trainer = Trainer(self.job, data, Session(client), group, [notes], output=output)
        try:
            result = trainer.run()
        except (Killed, StaleWorker):  # what it had on its way may meet the one in its place
            assert dies
            return None, notes
        client.close()
        return result, notes


@pytest.mark.parametrize(
    ("staleness", "splits", "victim"),
    [
        pytest.param(None, None, 0, marks=pytest.mark.long),
        (None, 12, 2),
        pytest.param(0, None, 2, marks=pytest.mark.long),
        (0, 12, 0),
        pytest.param(2, 12, 2, marks=pytest.mark.long),
    ],
)
def test_the_others_train_on_where_one_dies(staleness, splits, victim):
    cluster = Cluster(staleness, splits)
    with ThreadPoolExecutor(WORKERS) as pool:
        runs = list(pool.map(lambda rank: cluster.run(rank, dies=rank == victim), range(WORKERS)))
    assert runs[victim][0] is None
    first = 1 if victim == 0 else 0
    result, notes = runs[first]
    assert notes.result is result
    assert result.figures["valid"]["samples"] == HELD_OUT
    assert result.figures["valid"]["auc"] > 0.8
    assert result.expired_leases >= 1
    assert [e.epoch for e in notes.evaluations] == ([2, 3] if victim == 0 else [1, 2, 3])
    assert notes.plan.reporter == (1 if victim == 0 else None)
    share = SAMPLES // WORKERS
    if splits is None:
        assert result.samples == EPOCHS * SAMPLES - 2 * share
    else:
        assert result.returned_splits == 1
        assert result.samples >= EPOCHS * SAMPLES
    others = [run for rank, run in enumerate(runs) if rank not in (first, victim)]
    assert all(notes.result is None for _, notes in others)  # one of them reports


@pytest.mark.parametrize("staleness", [None, 0, pytest.param(2, marks=pytest.mark.long)])
def test_each_sample_is_trained_on_once_per_epoch_where_nobody_is_lost(staleness):
    cluster = Cluster(staleness, 12)
    with ThreadPoolExecutor(WORKERS) as pool:
        runs = list(pool.map(cluster.run, range(WORKERS)))
    steps = [result.steps for result, _ in runs]
    assert sum(steps) == EPOCHS * 12 * -(-SAMPLES // 12 // 20)
    assert all(result.samples == EPOCHS * SAMPLES for result, _ in runs)
    assert all(result.returned_splits == result.expired_leases == 0 for result, _ in runs)
    (seen,) = (result.staleness_seen for result, notes in runs if notes.result is result)
    assert sum(seen)
    assert staleness != 0 or not any(seen[1:])


@pytest.mark.parametrize("staleness", [None, pytest.param(2, marks=pytest.mark.long)])
def test_a_worker_that_leaves_finishes_its_part_and_another_one_takes_its_number(staleness, tmp_path):
    cluster = Cluster(staleness, 12)

    def leaves_and_comes_again():
        assert cluster.run(2, leaves=True, output=tmp_path)[0] is None
        return cluster.run(2, output=tmp_path)

    with ThreadPoolExecutor(WORKERS) as pool:
        last = pool.submit(leaves_and_comes_again)
        (first, notes), _ = pool.map(lambda rank: cluster.run(rank, output=tmp_path), range(2))
        assert last.result(250)[0] is not None
    assert (notes.result, first.samples, first.expired_leases) == (first, EPOCHS * SAMPLES, 0)
    assert first.returned_splits == 1  # which it was given as it left


@pytest.mark.parametrize("idle", [False, True], ids=["trains", "finds no batch in its first epoch"])
@pytest.mark.parametrize("staleness", [None, pytest.param(0, marks=pytest.mark.long)])
def test_who_comes_late_in_place_of_a_dead_worker_takes_part_to_the_end(staleness, idle):
    cluster = Cluster(staleness, 12)

    def comes_again():
        assert cluster.died.wait(100)
        return cluster.run(0, idle=idle)

    with ThreadPoolExecutor(WORKERS + 1) as pool:
        late = pool.submit(comes_again)
        runs = list(pool.map(lambda rank: cluster.run(rank, dies=rank == 0), range(WORKERS)))
        runs.append(late.result(250))
    result = runs[-1][0]
    # it reports, as the first, from the evaluation on that it took part in
    told = Counter(e.epoch for _, notes in runs for e in notes.evaluations)
    assert told == {1: 1, 2: 1, 3: 1}
    seconds = sorted((e.epoch, e.seconds) for _, notes in runs for e in notes.evaluations)
    assert [s for _, s in seconds] == sorted(s for _, s in seconds)  # whoever reports counts from the beginning
    assert [notes.result is not None for _, notes in runs].count(True) == 1
    assert {run[0].figures["valid"]["auc"] for run in runs if run[0]} == {result.figures["valid"]["auc"]}


@pytest.mark.parametrize(
    ("staleness", "victim"),
    [
        (None, 0),
        (0, None),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((None, None), (0, 0), (None, 2), (0, 2))),
    ],
)
def test_the_shards_hold_the_best_weights_at_the_end_whoever_dies(tmp_path, staleness, victim):
    first_is_best = {"early_stop": {"patience": 9, "min_delta": 100.0}}
    cluster = Cluster(staleness, None, train=first_is_best, checkpoint={"folder": str(tmp_path), "keep": 1})
    with ThreadPoolExecutor(WORKERS) as pool:
        runs = list(pool.map(lambda rank: cluster.run(rank, dies=rank == victim), range(WORKERS)))
    (result,) = (result for result, notes in runs if result is not None and notes.result is result)
    assert result.best_weights.restored
    client = Client(cluster.shards.transports(), worker=READ_ONLY_WORKER)
    reading = trained(cluster.job, click_data(train=1), ReadOnlySession(client), None)
    for name, module in remote_tables(reading.model).items():
        parts = list(open_snapshot(result.best_weights.checkpoint, "shards").read_table(name))
        ids, rows = (torch.from_numpy(np.concatenate(part)) for part in list(zip(*parts, strict=True))[:2])
        assert torch.equal(module.table.pull(ids), rows)
    assert {result.best_weights for result, _ in runs if result} == {result.best_weights}


def test_every_worker_has_its_own_running_statistics_after_an_evaluation(tmp_path):
    model = {"hidden": [4], "batch_norm": True}
    cluster = Cluster(0, None, name="deepfm", model=model, checkpoint={"folder": str(tmp_path), "best": False})
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(cluster.run, range(WORKERS)))
    saved = checkpoint_at(str(tmp_path))
    buffers = [saved.worker(rank)["buffers"] for rank in range(WORKERS)]
    (mean,) = (name for name in buffers[0] if name.endswith("running_mean"))
    assert len({tuple(own[mean].tolist()) for own in buffers}) == WORKERS


def test_a_buffer_that_an_evaluation_makes_or_grows_leaves_the_others_their_values():
    model = torch.nn.Sequential(torch.nn.Module(), torch.nn.BatchNorm1d(3))
    model[1].register_buffer("masks", torch.zeros(2))
    evaluator = Evaluator.__new__(Evaluator)
    evaluator._model = model
    evaluator._group = SimpleNamespace(
        is_first=False, broadcast=lambda buffers: [buffer.fill_(7) for buffer in buffers]
    )
    with evaluator._shared_buffers():
        assert model[1].running_mean.tolist() == [7.0] * 3
        model[0].register_buffer("positions", torch.ones(9))  # the first of all
        model[1].masks = torch.ones(5)
    assert (model[1].running_mean.tolist(), model[1].running_var.tolist()) == ([0.0] * 3, [1.0] * 3)
    assert (model[0].positions.tolist(), model[1].masks.tolist()) == ([1.0] * 9, [1.0] * 5)
