"""What the tables of one principal may have, and that a request over it changes nothing."""

import signal
from contextlib import closing

import numpy as np
import pytest

from embershard.proto.errors import QuotaExceeded, TableQuotaExceeded
from embershard.proto.messages import Declare, Load, PushToken
from embershard.proto.security.tokens import TokenFile, new_token, token_digest, write_private
from embershard.proto.wire import Feature
from embershard.ps.security.access import Access
from embershard.ps.security.access_file import Quotas, TableLimits
from embershard.ps.security.table_quotas import TableQuotas
from embershard.worker.checkpoint.snapshots import drop_tables, restore_snapshot, take_snapshot
from embershard.worker.client.client import Client
from harness.hostile_peers import Peer
from harness.raises import raises
from harness.served import ServedShard, shard_process
from harness.shards import gradients, ids_of, join, make_shard, push, rows, table


def quotas(owns=lambda name: True, **limits):
    return TableQuotas("p", owns, Quotas(**limits).of_tables)


class Sender:
    """Somebody with quotas who pushes; without any where `limits` is None."""

    def __init__(self, shard, limits, worker=0):
        self.shard, self.limits, self.worker, self.seq = shard, limits, worker, 0

    def push(self, *parts, **fields):
        self.seq += 1
        request = push(*parts, worker=self.worker, seq=self.seq, first=self.seq, **fields)
        return self.shard.handle(request, 0.0, "", self.limits)


def num_rows(shard):
    return {one.name: one.rows for one in shard.status().tables}


def test_ids_that_are_new_are_refused_beyond_the_quota_and_those_that_are_there_go_on():
    shard = make_shard(table())
    sender = Sender(shard, quotas(rows_held=3))
    sender.push(gradients([1, 2, 3]))
    with raises(TableQuotaExceeded, who="p", what="rows in its tables", limit=3, would=4):
        sender.push(gradients([2, 4]))
    assert num_rows(shard) == {"items": 3}
    assert rows(shard, 2).tolist() == [[-1.0] * 3]  # the part of it that could be applied was not
    sender.push(gradients([1, 2, 3]))
    assert rows(shard, 2).tolist() == [[-2.0] * 3]


def test_the_error_is_a_quota_exceeded_that_nobody_retries():
    assert issubclass(TableQuotaExceeded, QuotaExceeded)
    assert not TableQuotaExceeded.retryable


def test_who_has_no_quota_is_not_held_to_that_of_another():
    shard = make_shard(table())
    Sender(shard, quotas(rows_held=1)).push(gradients([1]))
    Sender(shard, None, worker=1).push(gradients(range(10)))
    with pytest.raises(TableQuotaExceeded):
        Sender(shard, quotas(rows_held=1), worker=2).push(gradients([77]))


def test_a_push_that_was_refused_is_settled_and_one_that_was_applied_is_known_again():
    shard = make_shard(table())
    sender = Sender(shard, quotas(rows_held=1))
    sender.push(gradients([1]))
    with pytest.raises(TableQuotaExceeded):
        sender.push(gradients([2]))
    sender.push(gradients([1]))
    again = push(gradients([1]), seq=3, first=3)
    assert shard.handle(again, 0.0, "", quotas(rows_held=0)).duplicate
    assert rows(shard, 1).tolist() == [[-2.0] * 3]


def test_a_limit_of_a_pattern_counts_its_tables_together_and_no_others():
    shard = make_shard(table("ads_a"), table("ads_b"), table("users"))
    limit = quotas(tables=(TableLimits(pattern="ads_*", rows_held=4),), rows_held=10)
    sender = Sender(shard, limit)
    sender.push(gradients([1, 2], name="ads_a"), gradients([1, 2], name="ads_b"))
    with raises(TableQuotaExceeded, what="rows in tables ads_*", limit=4, would=5):
        sender.push(gradients([3], name="ads_b"))
    sender.push(gradients(range(6), name="users"))
    with raises(TableQuotaExceeded, what="rows in its tables", limit=10, would=11):
        sender.push(gradients([7], name="users"))


def test_tables_of_others_do_not_count():
    shard = make_shard(table("own"), table("other"))
    Sender(shard, None, worker=1).push(gradients(range(100), name="other"))
    sender = Sender(shard, quotas(lambda name: name == "own", rows_held=2))
    sender.push(gradients([1, 2], name="own"))
    shard.handle(Declare(table("third")), 0.0)  # the tables that are there are looked at anew
    with pytest.raises(TableQuotaExceeded):
        sender.push(gradients([3], name="own"))


def test_bytes_are_those_of_rows_states_and_index():
    shard = make_shard(table(dim=64))
    (before,) = shard.status().tables
    sender = Sender(shard, quotas(bytes_held=before.bytes + 200_000))
    made = 0
    with raises(TableQuotaExceeded, what="bytes in its tables"):
        for made in range(0, 10_000, 10):
            sender.push(gradients(range(made, made + 10), dim=64))
    (after,) = shard.status().tables
    assert after.rows == made
    assert before.bytes + 100_000 < after.bytes <= before.bytes + 200_000


def test_a_table_is_not_made_where_its_index_alone_is_too_large():
    shard = make_shard(table("a"))
    (held,) = shard.status().tables
    used = shard.status().used_bytes
    with pytest.raises(TableQuotaExceeded):
        shard.handle(Declare(table("b")), 0.0, "", quotas(bytes_held=2 * held.bytes - 1))
    assert (list(num_rows(shard)), shard.status().used_bytes) == (["a"], used)
    shard.handle(Declare(table("a")), 0.0, "", quotas(bytes_held=0))  # compared, not made
    shard.handle(Declare(table("b")), 0.0, "", quotas(bytes_held=2 * held.bytes))


@pytest.mark.parametrize("token", [None, PushToken(0, 1, 1, 1)])
def test_a_load_is_held_to_the_quota(token):
    shard = make_shard(table())

    def load(*ids):
        ones = np.ones((len(ids), 3), np.float32)
        return shard.handle(Load("items", 1, ids_of(*ids), ones, token=token), 0.0, "", quotas(rows_held=2))

    with pytest.raises(TableQuotaExceeded):
        load(1, 2, 3)
    assert num_rows(shard) == {"items": 0}


def synchronous(shard, limits):
    """Two workers of a synchronous job, whose pushes are applied once both are there."""
    for worker in range(2):
        shard.handle(join(worker, workers=2), 0.0)
    return [Sender(shard, limits, worker) for worker in range(2)]


def test_what_waits_for_its_clock_counts_and_an_id_of_two_workers_counts_once():
    shard = make_shard(table())
    first, second = synchronous(shard, quotas(rows_held=5))
    first.push(gradients([1, 2, 3, 4]), clock=0, weight=1.0, last=False)
    with raises(TableQuotaExceeded, limit=5, would=6):
        first.push(gradients([5, 6]), clock=0, weight=1.0)
    second.push(gradients([1, 2, 3, 4]), clock=0, weight=1.0, last=False)
    second.push(gradients([5]), clock=0, weight=1.0)
    first.push(gradients([5]), clock=0, weight=1.0)
    assert num_rows(shard) == {"items": 5}


def test_ids_that_are_named_twice_count_once():
    shard = make_shard(table())
    Sender(shard, quotas(rows_held=2)).push(gradients([1, 1, 2, 2], unique=False))
    assert num_rows(shard) == {"items": 2}


def test_rows_are_not_looked_at_where_all_ids_could_be_new(monkeypatch):
    shard = make_shard(table())
    looked = []
    count = shard.core.tables.entry("items").table.count_missing
    monkeypatch.setattr(type(shard.core.tables.entry("items").table), "count_missing",
                        lambda _, ids: looked.append(len(ids)) or count(ids))  # fmt: skip
    sender = Sender(shard, quotas(rows_held=10))
    sender.push(gradients(range(5)))
    assert looked == []
    sender.push(gradients(range(6)))
    assert looked


def entry(token, limits):
    return f"- {{name: p, role: train, token_sha256: '{token_digest(token).hex()}', quotas: {{{limits}}}}}"


@pytest.mark.parametrize("limit", [4, 5])
def test_a_restore_is_held_to_the_quota_before_anything_is_replaced(tmp_path, limit):
    write_private(tmp_path / "token", token := new_token())
    write_private(tmp_path / "access.yaml", entry(token, f"rows_held: {limit}"))
    served = ServedShard(access=Access(tmp_path / "access.yaml"))
    served.shard.handle(Declare(table()))
    Sender(served.shard, None).push(gradients(range(5)))
    with closing(Client.connect([served.address], token=TokenFile(tmp_path / "token"))) as client:
        take_snapshot(client, str(tmp_path / "snapshots"), "s")
        drop_tables(client)
        served.shard.handle(Declare(table("kept")))
        if limit == 5:
            restore_snapshot(client, str(tmp_path / "snapshots"), "s", replace_tables=True)
        else:
            with raises(TableQuotaExceeded, what="rows in its tables", limit=4, would=5):
                restore_snapshot(client, str(tmp_path / "snapshots"), "s", replace_tables=True)
    assert num_rows(served.shard) == ({"items": 5} if limit == 5 else {"kept": 0})
    served.stop()


@pytest.mark.integration
def test_a_quota_outlives_the_shard_and_is_another_with_another_file(tmp_path):
    token, file = new_token(), tmp_path / "access.yaml"
    write_private(file, entry(token, "tables: {'it*': {rows_held: 3}}"))
    options = ("--access", str(file), "--durability", "log", "--log-dir", str(tmp_path / "log"))

    def connected(process):
        return Peer(f"tcp://{process.address}", Feature.TOKEN, token=token)

    with shard_process(*options) as process:
        peer = connected(process)
        peer.ask(Declare(table(dim=4)))
        peer.ask(push(gradients([1, 2, 3], dim=4)))
        with raises(TableQuotaExceeded, who="p", limit=3, would=4):
            peer.ask(push(gradients([4], dim=4), seq=2))
        peer.sock.close()
        process.popen.send_signal(signal.SIGKILL)
        process.popen.wait()
    with shard_process(*options) as process:
        peer = connected(process)
        with raises(TableQuotaExceeded, who="p", limit=3, would=4):
            peer.ask(push(gradients([4], dim=4), seq=3))
        peer.ask(push(gradients([1], dim=4), seq=4))
        peer.sock.close()
    write_private(file, entry(token, "rows_held: 4"))
    with shard_process(*options) as process:
        peer = connected(process)
        peer.ask(push(gradients([4], dim=4), seq=5))
        with pytest.raises(TableQuotaExceeded):
            peer.ask(push(gradients([5], dim=4), seq=6))
        peer.sock.close()
