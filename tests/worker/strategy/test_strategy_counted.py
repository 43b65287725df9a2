"""What shards counted in a run, where they served another one before, and where one of them was restarted."""

import torch

import embershard as es
from embershard.proto.transport.local import LocalTransport
from embershard.worker.client.client import Client
from embershard.worker.session.session import Session
from embershard.worker.strategy.shards import ShardCounters

SPEC = es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=0.1))
IDS = torch.arange(64)  # so many are on two shards


class Worker:
    """Trains on some shards, which may be replaced."""

    def __init__(self, shards, rank):
        transports = [
            LocalTransport(lambda message, i=i: shards[i].handle(message), f"local/{i}") for i in range(len(shards))
        ]
        self.session = Session(Client(transports, worker=rank))
        self._module = es.Embedding(self.session.table(SPEC))

    def push(self, *before):
        """A step, whose rows miss those of others."""
        loss = self._module(IDS).sum()
        for other in before:
            other.push()
        loss.backward()
        self.session.step()


def test_what_was_counted_before_is_not_of_this_run(make_shards):
    shards = make_shards(2)
    mine, other = Worker(shards, 0), Worker(shards, 1)
    mine.push()  # the first one's version says nothing
    mine.push(other, other)
    before = mine.session.staleness_seen()
    counted = ShardCounters(mine.session.client)
    assert sum(counted.staleness_seen()) == counted.expired_leases() == 0

    mine.push()
    mine.push(other)
    now = mine.session.staleness_seen()
    assert before[:3] == (4, 0, 2)
    assert now[:3] == (8, 2, 2)
    assert counted.staleness_seen()[:3] == (4, 2, 0)
    assert counted.table_rows() == {"t": 64}

    shards[1] = make_shards(2)[1]  # restarted, empty
    assert counted.staleness_seen()[:3] == (2, 1, 0)
