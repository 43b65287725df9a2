"""The events that a shard kept, applied again in their order, make the same state, bit for bit.

A random job runs through the shard: joins and leaves, leases that run out, pushes of every form, refused ones and
repeated ones, loads, declares, splits, rendezvous.
"""

from __future__ import annotations

import random
from collections import Counter

import msgpack
import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.messages import Declare
from embershard.ps.core import Core
from embershard.ps.events import PushEvent
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from harness.events import again
from harness.random_job import OPTIMIZERS, RandomJob, Recorder, contents, empty_core, replay, state_of
from harness.shards import join, make_shard, table


def again_from(base: Core, events) -> Core:
    """A core made of the control and the rows of another, and of the events that it has gathered."""
    control = msgpack.unpackb(msgpack.packb(base.control()), strict_map_key=False)
    tables = []
    for old in base.tables.all():
        tables.append(Table(old.spec, OptimizerRegistry().find(old.spec.optimizer)))
        tables[-1].restore(*contents(old))
    core = empty_core()
    core.restore(control, tables)
    for lsn in control["clock"]["pending"]:
        core.gather_again(lsn, events[lsn - 1])
    return core


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.name)
@pytest.mark.parametrize("staleness", [0, 2, -1])
def test_a_replay_of_the_events_has_the_same_bits_also_from_the_middle_on(optimizer, staleness):
    seen, gathered = Counter(), 0
    for seed in range(2):
        job = RandomJob(seed, staleness, optimizer, aware=bool(seed % 2)).run(150)
        events, outcomes = [again(event) for event in job.log.events], job.log.outcomes
        middle = random.Random(seed).randrange(len(events))
        base = replay(empty_core(), events[:middle], outcomes[:middle])
        second = again_from(base, events)
        assert state_of(second) == state_of(base)
        gathered += len(base.control()["clock"]["pending"])
        for core in (base, second):
            replay(core, events[middle:], outcomes[middle:])
            want, got = state_of(job.shard.core), state_of(core)
            for part in want:
                assert got[part] == want[part], part
        seen.update(type(event).__name__ for event in events)
        assert any(event.ids for event in job.log.events if isinstance(event, PushEvent))
    assert gathered or staleness
    # each kind of event came, so that its replay was tried
    requests = "Load Declare CompressRequest JoinRequest LeaveRequest Rendezvous TakeSplitRequest"
    assert set(f"PushEvent Expired Settled {requests}".split()) <= set(seen), seen


def test_a_replay_accepts_the_number_of_rows_that_was_said_while_no_worker_was_here():
    log = Recorder()
    shard = make_shard(now=0.0, log=log)
    shard.handle(join(lease_ms=1000), 0.0)
    shard.handle(Declare(table(), num_rows=7), 0.0)
    shard.handle(Declare(table(), worker=1, num_rows=8), 2.0)  # the lease of the only member has ended
    shard.handle(join(lease_ms=1000), 2.0)
    shard.handle(Declare(table(pull_codec=CodecName.parse("fp16s")), num_rows=8), 2.0)
    replay(empty_core(), [again(event) for event in log.events], log.outcomes)
