"""Epochs that are dealt out: every sample once where nobody is lost, and again what a lost worker had."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import embershard as es
from embershard.local_shards import InProcessShards
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.data.shuffle import permutation
from embershard.worker.data.splits import SplitQueue
from embershard.worker.session.session import Session


@pytest.fixture
def join():
    """Makes sessions of one job of two workers."""
    shards, sessions = InProcessShards(), []

    def make(rank, staleness=None, *, lease=10.0):
        session = Session(Client(shards.transports(), worker=rank))
        session.client.join(Terms(workers=2, staleness=staleness, lease=timedelta(seconds=lease)))
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.close()


def test_what_a_lost_worker_had_is_dealt_again_and_counted(join):
    one, other = join(0, lease=0.3), join(1, lease=0.3)
    lost = next(SplitQueue(other, 4).deal(0))
    other.membership._ended.set()  # it is not heard of any more
    queue = SplitQueue(one, 4)
    dealt = list(queue.deal(0))
    assert sorted(dealt) == [0, 1, 2, 3]
    assert dealt[-1] == lost
    assert queue.returned == 1
    assert sorted(queue.deal(1)) == [0, 1, 2, 3]
    assert queue.returned == 1  # of both epochs


def test_a_split_whose_steps_were_dropped_is_this_workers_once_more(join):
    session = join(0)
    join(1)
    member = session.membership
    dealt = []
    for split in SplitQueue(session, 3).deal(0):
        dealt.append(split)
        if len(dealt) == 2:
            member.lost_leases += 1  # on a shard that does not deal
    assert dealt == [0, 1, 1, 2]


@pytest.fixture
def observed(join, monkeypatch):
    """Make a session that notes flushes, and the split that it says it finished with each question for another."""

    def make(staleness=None, ask=lambda member: None):
        session, said = join(0, staleness), []
        join(1, staleness)
        member, take = session.membership, session.membership.take_split
        monkeypatch.setattr(session, "flush", lambda: said.append("flush"))
        monkeypatch.setattr(member, "take_split", lambda *what: (said.append(what[-1]), ask(member), take(*what))[-1])
        return session, said

    return make


def test_a_split_is_finished_when_its_pushes_are_acknowledged(observed):
    def lose_lease(member):
        member.lost_leases += 1

    session, said = observed(ask=lose_lease)  # while it waits for a split: this costs none
    assert list(SplitQueue(session, 2).deal(0)) == [0, 1]
    assert said == ["flush", -1, "flush", 0, "flush", 1]
    said.clear()
    assert list(SplitQueue(session, 2).deal(1, ahead=True)) == [0, 1]
    assert said == [-1, 0, 1]  # what is in flight then is of splits that are not done


def test_nobody_waits_for_the_clock_of_a_worker_that_waits_for_a_split(observed):
    paused = []
    session, _ = observed(0, lambda member: paused.append(member.paused))
    assert not any(session.membership.paused for _ in SplitQueue(session, 2).deal(0))
    assert paused == [True] * 3


def test_a_data_loader_reads_each_sample_once_per_epoch_in_another_order(join):
    data = TensorDataset(torch.arange(101))

    def read(session):
        sampler = es.SplitSampler(session, len(data), splits=10, seed=4)
        loader = DataLoader(data, batch_size=8, sampler=sampler)
        found = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            found.append([int(sample) for (batch,) in loader for sample in batch])
        return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(read, [join(0), join(1)])
    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(101))
    with es.local() as alone:
        whole = read(alone)
    assert whole[0] != whole[1]
    assert whole[0] == [int(i) for split in range(10) for i in permutation(101, 4, 0)[split::10]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_pass_over_an_epoch_is_refused(join, workers):
    with es.local() as alone:
        session = alone if workers == 1 else join(0)
        sampler = es.SplitSampler(session, 10, splits=2)
        assert len(list(sampler)) == 10
        with pytest.raises(ValueError, match=r"set_epoch\(1\)"):
            list(sampler)
        sampler.set_epoch(1)
        assert len(list(sampler)) == 10


def test_a_sampler_that_makes_no_sense_is_refused(join):
    with es.local() as session:
        with pytest.raises(ValueError, match="splits must be"):
            es.SplitSampler(session, 10, splits=11)
        sampler = es.SplitSampler(session, 10, splits=2)
        sampler.set_epoch(3)
        with pytest.raises(ValueError, match="epochs come in order"):
            sampler.set_epoch(2)
    with pytest.raises(ValueError, match="staleness 0"):
        es.SplitSampler(join(0, 0), 10, splits=2)
