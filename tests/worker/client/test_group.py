"""Workers that meet over gloo, in two real processes, and through shards, in threads; and the world of one."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed

from embershard.local_shards import InProcessShards
from embershard.proto.errors import RendezvousOver, WorkerLost, WorkersApart
from embershard.proto.timing import Deadline
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.client.worker_group import (
    Evicted,
    MembershipChanged,
    ShardGroup,
    TorchGroup,
    WorkerGroup,
    _await_all,
)
from harness.raises import raises

PEER = """
import os
from datetime import timedelta
from embershard.worker.client.worker_group import WorkerGroup
from test_group import take_part

with WorkerGroup.join(int(os.environ["RANK"]), 2, timedelta(seconds=60)) as group:
    take_part(group)
"""


def take_part(group):
    """The part of worker 0 or 1 of two, who meet."""
    rank = group.rank
    group._piece = 16  # bytes at once
    assert group.join_segment({"best": 0.5 + rank}) == (0, {"best": 0.5})
    group.barrier()
    for dtype in (np.float32, np.float64, np.int64):
        parts = group.gather(np.arange(9 * rank, dtype=dtype) + 2**53 * (dtype is np.int64))
        assert len(parts) == (2 if rank == 0 else 0)
        if rank == 0:
            assert [len(part) for part in parts] == [0, 9]
            assert parts[1].dtype == dtype
            assert parts[1].tolist() == (np.arange(9, dtype=dtype) + 2**53 * (dtype is np.int64)).tolist()
    assert group.sum(rank + 1.5) == 4.0
    assert group.any(rank == 1)
    assert not group.any(False)
    assert group.broadcast_json({"auc": 0.1 + rank, "split": ["valid"]}) == {"auc": 0.1, "split": ["valid"]}
    buffers = [torch.full((2, 2), float(rank)), torch.tensor(rank + 5), torch.full((2, 4), float(rank))[:, ::2]]
    group.broadcast(buffers)
    assert [buffer.tolist() for buffer in buffers] == [[[0.0, 0.0], [0.0, 0.0]], 5, [[0.0, 0.0], [0.0, 0.0]]]
    group.end_segment(0)
    assert group.share == (rank, 2)
    assert group.is_first == group.reports == (rank == 0)
    clocks = []
    group.begin_segment(0, clocks.append, 7 + rank, {})
    assert clocks == [8]


@pytest.mark.integration
def test_two_processes_meet_over_gloo():
    with socket.socket() as reserved:  # nobody else is given the port while it is bound here
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = str(reserved.getsockname()[1])
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        command = [sys.executable, "-c", PEER]
        peers = [subprocess.Popen(command, env={**env, "WORLD_SIZE": "2", "RANK": str(rank)}) for rank in range(2)]
        try:
            assert [peer.wait(250) for peer in peers] == [0, 0]
        finally:
            for peer in peers:
                peer.kill()


def test_a_failure_of_gloo_is_a_lost_worker_with_its_words(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("[pair.cc:534] Closed by peer [::1]:9. This is typically a crash.\nRaised from")

    monkeypatch.setattr(torch.distributed, "all_gather", fail)
    with raises(WorkerLost, reason="Closed by peer [::1]:9"):
        TorchGroup(0, 2).barrier()


def test_a_rank_that_does_not_come_or_comes_twice_is_named(monkeypatch):
    store = torch.distributed.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    with pytest.raises(WorkersApart, match=r"worker 1 of 3 .*: worker 0, 2 did not come in time\. Give all workers"):
        WorkerGroup.join(1, 3, timedelta(seconds=1))
    with pytest.raises(WorkersApart, match="another process is worker 1 already"):
        WorkerGroup.join(1, 3, timedelta(seconds=1))


def test_a_world_of_one_needs_no_network_and_a_rank_is_below_its_size():
    with WorkerGroup.join(0, 1) as group:
        assert group.sum(2.5) == 2.5
    with pytest.raises(ValueError, match="rank"):
        WorkerGroup(2, 2)


def test_what_all_of_them_put_down_at_once_is_bounded(monkeypatch):
    class Mirrored(WorkerGroup):
        """All others put down what this one does."""

        def _all_gather_bytes(self, data, *, want_payloads=True):
            sizes.append(len(data))
            return {worker: data for worker in self.present}

    sizes = []
    monkeypatch.setattr("embershard.worker.client.worker_group.RENDEZVOUS_BYTES", 64)
    group, values = Mirrored(0, 4), np.arange(10.0)
    assert [part.tolist() for part in group.gather(values)] == [values.tolist()] * 4
    buffers = [torch.tensor([True, False, True]), torch.arange(7.0), torch.empty(0), torch.arange(3)]
    group.broadcast(buffers)
    assert [buffer.tolist() for buffer in buffers] == [[True, False, True], list(range(7)), [], [0, 1, 2]]
    assert max(sizes) == 64 // 4
    assert [len(part) for part in group.gather(values[:0])] == [0] * 4
    assert Mirrored(1, 4).gather(values) == []


def test_what_is_done_together_is_tried_again_for_each_worker_that_can_be_lost():
    def losing(count):
        outcomes = iter([MembershipChanged()] * count)

        def work():
            for loss in outcomes:
                raise loss
            return "done"

        return work

    assert WorkerGroup(0, 3).retry_on_membership_change(losing(2)) == "done"
    with pytest.raises(WorkerLost):
        WorkerGroup(0, 3).retry_on_membership_change(losing(3))


@pytest.fixture
def join():
    """Makes members of a job on two shards in this process."""
    shards, clients = InProcessShards(2), []

    def make(rank, workers, *, lease=60.0):
        client = Client(shards.transports(), worker=rank)
        clients.append(client)
        client.join(Terms(workers=workers, lease=timedelta(seconds=lease), wait_timeout=timedelta(seconds=60)))
        return ShardGroup(client, rank, workers)

    yield make
    for client in clients:
        client.close()


def die(group):
    """Stop beating, without a word. What is left of its lease is over at once: only others' leases must last."""
    member = group._membership
    member._ended.set()
    kept, member.terms = member.terms, replace(member.terms, lease=timedelta(milliseconds=1))
    assert member._join(member.first) == member.first
    member.terms = kept


def all_do(groups, work):
    """What every worker does, side by side."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [done.result(100) for done in [pool.submit(work, group) for group in groups]]


@pytest.fixture
def begin(join):
    """Make members that have begun a segment together."""

    def make(workers, *, ended=False):
        groups = [join(rank, workers) for rank in range(workers)]
        all_do(groups, lambda group: group.join_segment({}))
        if ended:
            all_do(groups, lambda group: group.end_segment(0))
        return groups

    return make


def test_two_workers_meet_through_shards(join):
    all_do([join(rank, 2) for rank in range(2)], take_part)


def test_nobody_takes_a_worker_for_lost_that_joined_after_it(join):
    second = join(1, 2, lease=100.0)  # it does not beat before the first one joins
    groups = [join(0, 2), second]
    all_do(groups, lambda group: group.join_segment({}))
    assert [group.reports for group in groups] == [True, False]


def test_who_dies_is_neither_waited_for_nor_the_end_of_the_others(begin):
    groups = begin(3)
    die(groups[0])
    all_do(groups[1:], lambda group: group.end_segment(0))
    found = [(group.present, group.is_first, group.share) for group in groups[1:]]
    assert found == [((1, 2), True, (0, 2)), ((1, 2), False, (1, 2))]
    assert all_do(groups[1:], lambda group: group.broadcast_json(group.rank)) == [1, 1]
    buffers = [torch.full((2,), float(group.rank)) for group in groups]
    all_do(groups[1:], lambda group: group.broadcast([buffers[group.rank]]))
    assert [buffer.tolist() for buffer in buffers[1:]] == [[1.0, 1.0]] * 2


def test_the_first_that_lives_stands_in_for_who_reported_until_all_have_met(begin):
    groups = begin(3)
    assert [group.reports for group in groups] == [True, False, False]
    die(groups[0])
    for group in groups[1:]:
        while 0 in group._membership.members:
            group._membership._heartbeat(timedelta(seconds=60))
    assert [group.reports for group in groups[1:]] == [True, False]
    assert not groups[1].is_first  # as they agreed when they met


def test_the_highest_number_is_found_by_those_who_are_left(begin):
    groups = begin(3, ended=True)
    die(groups[2])
    assert all_do(groups[:2], lambda group: group.highest(group.rank)) == [1, 1]


def test_what_is_done_together_is_done_again_by_those_who_are_left(join):
    groups = [join(rank, 3) for rank in range(3)]
    tries = dict.fromkeys(range(3), 0)

    def work(group):
        group.join_segment({})
        group.end_segment(0)

        def total():
            tries[group.rank] += 1
            if group.rank == 0:
                die(group)
                return -1.0
            return group.sum(group.share[1] + group.rank)

        return group.retry_on_membership_change(total)

    assert all_do(groups, work) == [-1.0, 7.0, 7.0]  # 2 + 1 and 2 + 2
    assert tries == {0: 1, 1: 2, 2: 2}


def test_who_joins_late_takes_part_from_its_first_meeting_on(begin, join):
    def two_segments(group):
        for segment in range(2):
            group.end_segment(segment)
            group.begin_segment(segment, lambda clock: None, 5, {"plateaus": segment})

    *groups, lost = begin(3)
    die(lost)
    all_do(groups, two_segments)
    late = join(2, 3)
    assert late.join_segment({"plateaus": 9}) == (2, {"plateaus": 1, "clock": 5})
    assert (late.late, late.is_first, late.reports) == (True, False, False)
    all_do([*groups, late], lambda group: group.end_segment(2))
    assert late.present == groups[0].present == (0, 1, 2)
    assert all_do([*groups, late], lambda group: group.broadcast_json(group.rank)) == [0, 0, 0]


def test_who_joins_during_an_evaluation_waits_for_its_end_and_holds_nobody_up(begin, join):
    *groups, lost = begin(3)
    die(lost)
    all_do(groups, lambda group: group.end_segment(0))
    all_do(groups, lambda group: group.barrier())
    late = join(2, 3)
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(late.join_segment, {})
        assert all_do(groups, lambda group: group.sum(1.0)) == [2.0, 2.0]
        assert not entered.done()
        all_do(groups, lambda group: group.begin_segment(0, lambda clock: None, 5, {"plateaus": 8}))
        assert entered.result(100) == (1, {"plateaus": 8, "clock": 5})


class Running:
    """Shards on which others meet, who are that many meetings further each time before this worker finds them."""

    def __init__(self, missed):
        self.membership, self.calls = self, []
        self.segment, self.last = 3, 3 + missed

    def status(self):
        return [SimpleNamespace(rendezvous=f"{self.segment}/on/4")]

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def rendezvous(self, *call, participants, wait_timeout):
        self.calls.append((*call, participants, wait_timeout))
        if self.segment == self.last:
            return {0: b"", 1: b"", 2: b'{"plateaus": 4}', 4: b'{"plateaus": 5}'}
        self.segment += 1
        raise RendezvousOver(name=call[0])


def test_who_comes_late_catches_up_with_workers_that_meet_meanwhile():
    shards = Running(missed=2)
    group = ShardGroup(shards, 1, 5)
    assert group.join_segment({"plateaus": 9}) == (5, {"plateaus": 4})  # the first one's word that has one
    assert group.present == (0, 1, 2, 4)
    # it says nothing of its own, waits as long as a segment takes, and no clock waits for it until it is there
    meetings = [("pause", (f"{segment}/on", b"", (), None)) for segment in (3, 4, 5)]
    assert shards.calls == [*(call for pair in meetings for call in pair), "resume"]
    with pytest.raises(WorkerLost):
        ShardGroup(Running(missed=1000), 1, 2).join_segment({})


@pytest.mark.parametrize("rank", [0, 1])
def test_who_was_given_up_learns_that_it_was_left_behind_and_enters_again(begin, rank):
    groups = begin(2)
    lost, other = groups[rank], groups[1 - rank]
    die(lost)
    other.end_segment(0)
    for _ in range(20):  # so many that the shard forgets what was said
        other.barrier()
    other.begin_segment(0, lambda clock: None, 3, {"plateaus": 7})
    with pytest.raises(Evicted):
        lost.end_segment(0)
    assert (lost.is_first, lost.reports) == (False, False)
    assert lost.join_segment({}) == (1, {"plateaus": 7, "clock": 3})
    all_do(groups, lambda group: group.end_segment(1))
    assert lost.present == (0, 1)


def test_who_misses_the_beginning_of_a_segment_enters_again(join, monkeypatch):
    group = join(0, 1)
    group.join_segment({})
    group.end_segment(0)
    rendezvous = group._membership.rendezvous

    def begun(name, *said, **how):
        if name == "1/on":  # the others are beyond it
            raise RendezvousOver(name=name)
        return rendezvous(name, *said, **how)

    monkeypatch.setattr(group._membership, "rendezvous", begun)
    with pytest.raises(Evicted):
        group.begin_segment(0, lambda clock: None, 3, {})


@pytest.mark.parametrize("left", [True, False], ids=["the others left", "the others are about to leave"])
def test_who_was_given_up_and_comes_back_after_the_end_learns_that_it_is_over(begin, left):
    groups = begin(2)
    die(groups[1])
    groups[0].end_segment(0)
    groups[0].begin_segment(0, lambda clock: None, 3, {})
    groups[0].end_segment(1, last=True)
    for _ in range(20):  # so many that the shard forgets how the segment began
        groups[0].barrier()
    if left:
        groups[0]._membership.leave()
    with pytest.raises(Evicted):
        groups[1].end_segment(0)
    groups[1].join_segment({})
    assert groups[1].over
    with pytest.raises(Evicted):
        groups[1].end_segment(1, last=True)
    assert not groups[1].is_first


@pytest.mark.parametrize(("wishes", "want"), [((True, True), True), ((True, False), False), ((False, False), False)])
def test_workers_use_nccl_where_all_of_them_can(wishes, want):
    store, deadline = torch.distributed.HashStore(), Deadline(timedelta(seconds=30))
    assert all_do([0, 1], lambda rank: _await_all(store, rank, 2, deadline, nccl=wishes[rank])) == [want, want]
