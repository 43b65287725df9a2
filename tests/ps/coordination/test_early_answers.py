"""A push whose sender keeps it is answered when it is applied; what is safe by then, later replies say."""

import pytest

from embershard.proto import errors
from embershard.proto.messages import Heartbeat, Load, Pull, PushToken, TableIds
from harness.held_log import HeldLog
from harness.raises import raises
from harness.shards import gradients, ids_of, join, make_shard, push, rows, table


class Sent:
    """Requests to a shard whose log is on a slow disk, and the replies that have left, by name."""

    def __init__(self):
        self.log = HeldLog()
        self.shard = make_shard(table(), log=self.log)
        self.log.sync()
        self.left = {}

    def send(self, name, request):
        try:
            reply = self.shard.handle(request)
        except errors.EmbershardError as error:
            reply = error
        self.shard.when_may_leave(lambda: self.left.setdefault(name, reply))


@pytest.fixture
def sent():
    return Sent()


def early(seq, **fields):
    return push(gradients([1]), seq=seq, early=True, **fields)


def pull(**fields):
    return Pull(1, (TableIds("items", ids_of(1)),), epoch=1, **fields)


def test_a_push_that_is_kept_is_answered_at_once_and_what_is_safe_follows(sent):
    sent.send("one", early(1))
    assert (sent.left["one"].early, sent.left["one"].acknowledged) == (True, 0)
    sent.send("not safe", pull())
    sent.log.sync()
    sent.send("safe", pull())
    sent.send("two", early(2))
    assert [sent.left[name].acknowledged for name in ("not safe", "safe", "two")] == [0, 1, 1]
    sent.send("of another", pull(worker=3))
    assert sent.left["of another"].acknowledged == 0


def test_everything_else_waits_until_it_is_safe(sent):
    refused = push(gradients([1], name="other"), seq=3, early=True)
    for name, request in {"kept by nobody": push(gradients([1]), seq=1), "refused": refused, "join": join()}.items():
        sent.send(name, request)
        assert name not in sent.left
        sent.log.sync()
        assert name in sent.left
    assert not sent.left["kept by nobody"].early
    assert isinstance(sent.left["refused"], errors.UnknownTable)


def test_a_duplicate_and_what_comes_out_of_order_are_answered_when_they_are_safe(sent):
    for name, seq in {"three": 3, "again": 3, "two": 2}.items():
        sent.send(name, early(seq, first=1))
    assert list(sent.left) == ["three"]
    sent.log.sync()
    assert [(sent.left[name].duplicate, sent.left[name].early) for name in ("again", "two")] == [
        (True, False),
        (False, False),
    ]
    sent.send("pull", pull())
    assert sent.left["pull"].acknowledged == 3


def test_a_heartbeat_that_asks_is_answered_when_all_is_safe_from_any_worker(sent):
    sent.send("one", early(1))
    sent.send("ask", Heartbeat(worker=0, epoch=1, flush=True))
    assert "ask" not in sent.left
    sent.log.sync()
    assert sent.left["ask"].acknowledged == 1
    sent.send("no member", Heartbeat(worker=0, epoch=1))
    assert isinstance(sent.left["no member"], errors.InvalidRequest)


def test_another_incarnation_begins_anew(sent):
    sent.send("one", early(5, first=1))
    sent.log.sync()
    sent.send("other", push(gradients([1]), epoch=2, seq=1, early=True))
    assert (sent.left["other"].early, sent.left["other"].acknowledged) == (True, 0)


LOAD = Load("items", 1, ids_of(1), rows(make_shard(table()), 1), 0, token=PushToken(0, 1, 1, 1), term=6)


@pytest.mark.parametrize(
    "request_",
    [early(1, term=6), pull(term=6), LOAD, Heartbeat(worker=0, epoch=1, term=6)],
    ids=lambda r: type(r).__name__,
)
def test_a_request_for_another_process_is_refused_and_changes_nothing(request_):
    shard = make_shard(table(), log=HeldLog())
    shard.greeting.term = 5
    before = shard.core.lsn
    with raises(errors.OtherTerm, got=6, want=5):
        shard.handle(request_)
    assert shard.core.lsn == before
