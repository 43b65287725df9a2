"""The state machine of a shard, without a transport."""

import re
import time

import numpy as np
import pytest

from embershard.proto import errors, spec
from embershard.proto.codec.payload import encode_elements, encode_rows
from embershard.proto.codec.values.registry import BUILTIN, find_values
from embershard.proto.messages import (
    PACKED,
    Declare,
    Declared,
    GetStatus,
    Heartbeat,
    Hello,
    Load,
    Loaded,
    Pull,
    Push,
    Pushed,
    PushToken,
    TableGradients,
    TableIds,
    replace,
)
from embershard.proto.protobuf import dumps, loads
from embershard.proto.routing import Placement, make_route
from embershard.ps import shard as shard_module
from embershard.ps.shard import Shard
from embershard.ps.table import tables as tables_module
from embershard.ps.table.optimizers import OptimizerRegistry
from harness.raises import raises
from harness.shards import gradients, ids_of, join, make_shard, push, rows, table

DIM = 3
ITEMS = table("items", DIM, optimizer=spec.SGD(lr=0.5), initializer=spec.Constant(value=1.0))


@pytest.fixture
def shard():
    return make_shard(ITEMS)


def pulled(shard, *ids):
    return rows(shard, *ids).tolist()


def load(*ids, value=5.0, **changes):
    fields = {"rows": np.full((len(ids), DIM), value, np.float32), "placement_epoch": 1, **changes}
    return Load("items", ids=ids_of(*ids), **fields)


def test_a_greeting_says_who_it_is_and_every_start_is_another_instance():
    shards = [Shard(1, Placement.even(4, epoch=9), OptimizerRegistry(), version="1.2.3") for _ in range(2)]
    greeting, other = (shard.handle(Hello(worker=2)) for shard in shards)
    assert (greeting.shard, greeting.num_shards, greeting.placement_epoch, greeting.version) == (1, 4, 9, "1.2.3")
    assert greeting.instance != other.instance
    for index in (-1, 2):
        with pytest.raises(ValueError, match=r"0\.\.1"):
            Shard(index, Placement.even(2), OptimizerRegistry())


def test_push_then_pull_returns_the_updated_row_at_this_pushs_learning_rate(shard):
    message = loads(Push, dumps(push(gradients((7, 8)))))
    assert message.tables[0].gradients.shape == (2 * DIM,)  # flat from the wire
    assert shard.handle(message) == Pushed(duplicate=False, applied=2, skipped=0)
    assert pulled(shard, 7, 9, 8) == [[0.5] * DIM, [1.0] * DIM, [0.5] * DIM]
    shard.handle(push(gradients([7], lr_scale=0.5), seq=2))
    assert pulled(shard, 7) == [[0.25] * DIM]


def test_a_pull_of_several_tables_answers_in_the_order_of_the_request_and_allocates_no_rows(shard):
    shard.handle(Declare(table("users", dim=2, initializer=spec.Constant(value=4.0))))
    parts = (TableIds("users", ids_of(1)), TableIds("items", ids_of(1, 2)), TableIds("users", ids_of()))
    answer = shard.handle(Pull(1, parts)).tables
    assert [part.tolist() for part in answer] == [[[4.0, 4.0]], [[1.0] * DIM] * 2, []]
    assert [part.rows for part in shard.status().tables] == [0, 0]


def test_declaring_twice_creates_once_and_a_declaration_that_differs_names_the_difference(shard):
    assert shard.handle(Declare(table("other"))) == Declared(created=True, loading=False)
    assert shard.handle(Declare(table("other"))) == Declared(created=False, loading=False)
    with raises(errors.TableMismatch, difference=re.compile(r"dim: 3, not 4.*optimizer\.lr: 0\.5, not 0\.1")):
        shard.handle(Declare(replace(ITEMS, dim=4, optimizer=spec.SGD(lr=0.1))))
    assert rows(shard, 1).shape == (1, DIM)


def test_while_a_job_goes_on_another_number_of_rows_is_refused_and_a_later_model_may_have_more(shard):
    same = Declared(created=False, loading=False)
    for num_rows in (7, 8):  # one loop after the other, without a job
        assert shard.handle(Declare(ITEMS, num_rows=num_rows)) == same
    for job in range(2):
        shard.handle(join(workers=2, run=job + 1))
        for num_rows in (0, 9 + job, 9 + job, 0):
            assert shard.handle(Declare(ITEMS, num_rows=num_rows)) == same
        with raises(errors.OtherRows, table=ITEMS.name, want=9 + job, got=8):
            shard.handle(Declare(ITEMS, num_rows=8))


@pytest.mark.parametrize(("count", "known"), [(1, "^t0$"), (25, "and 5 more")])
def test_an_unknown_table_is_named_with_a_short_list_of_those_there_are(count, known):
    with raises(errors.UnknownTable, table="other", known=re.compile(known)):
        rows(make_shard(*[table(f"t{i}") for i in range(count)]), 1, name="other")


def test_a_request_of_another_placement_is_refused(shard):
    for request in (Pull(2, ()), push(placement=2), load(1, placement_epoch=2)):
        with raises(errors.WrongPlacement, got=2, want=1):
            shard.handle(request)


def test_an_id_of_another_shard_is_refused():
    placement, made = Placement.even(2), replace(ITEMS, id_space="space")
    route = make_route(np.arange(100, dtype=np.int64), made.space_key, placement)
    for i in range(2):
        shard = Shard(i, placement, OptimizerRegistry())
        shard.handle(Declare(made))
        mine, (theirs, *_) = route.ids[route.slice_of(i)], route.ids[route.slice_of(1 - i)]
        assert rows(shard, *mine).shape == (len(mine), DIM)
        pull = Pull(1, (TableIds("items", np.append(mine, theirs)),))
        for request in (pull, push(gradients((*mine, theirs))), load(*mine, theirs)):
            with pytest.raises(errors.InvalidRequest, match=f"id {theirs} does not belong to shard {i}; .*'space'"):
                shard.handle(request)
        assert shard.status().tables[0].rows == 0


@pytest.mark.parametrize(
    "ids", [np.array([1], np.int32), np.array([1.0]), np.array([[1]], np.int64), np.arange(4, dtype=np.int64)[::2]]
)
def test_ids_of_a_wrong_kind_are_refused(shard, ids):
    with pytest.raises(errors.InvalidRequest, match="ids must be"):
        shard.handle(Pull(1, (TableIds("items", ids),)))


@pytest.mark.parametrize("shape", [(1, DIM), (2, DIM - 1), (2 * DIM + 1,), (DIM, 2), (0,)])
def test_rows_that_do_not_match_the_ids_are_refused(shard, shape):
    with raises(errors.WrongDim, table="items", what="gradients"):
        shard.handle(push(gradients((1, 2), gradients=np.zeros(shape, np.float32))))
    with raises(errors.WrongDim, table="items", what="rows"):
        shard.handle(load(1, 2, rows=np.zeros(shape, np.float32)))


@pytest.mark.parametrize(
    ("field", "names"),
    [({"gradients": np.zeros((1, DIM))}, "float64")]
    + [({"lr_scale": scale}, "lr_scale") for scale in (-0.1, float("nan"), float("inf"), 1e39)],
)
def test_gradients_of_another_dtype_or_a_senseless_scale_are_refused(shard, field, names):
    with pytest.raises(errors.InvalidRequest, match=names):
        shard.handle(push(gradients([1], **field)))


def test_a_pull_whose_rows_would_not_fit_is_refused_before_memory_is_taken():
    shard = make_shard(table(dim=60), max_message_bytes=1000)
    assert rows(shard, 1, 2, 3).shape == (3, 60)
    with raises(errors.MessageTooLarge, limit=1000):
        rows(shard, 1, 2, 3, 4, 5)


def test_a_push_or_a_load_is_applied_once_however_often_it_comes_also_under_another_placement(shard):
    message = push(gradients([7]))
    first = load(8, token=PushToken(3, 9, 1, 1), worker=3, keep_state=True)
    assert shard.handle(message) == Pushed(duplicate=False, applied=1, skipped=0)
    assert shard.handle(first) == Loaded(rows=1)
    shard.handle(push(gradients([8]), seq=2))  # a load sent again does not undo a push that came since
    for epoch in (1, 1, 2):
        shard._placement = Placement.even(1, epoch=epoch)
        assert shard.handle(message) == Pushed(duplicate=True, applied=1, skipped=0)
        assert shard.handle(first) == Loaded(rows=1)
    for request in (push(gradients([7]), seq=3), load(8, token=PushToken(3, 9, 2, 2), worker=3)):
        with pytest.raises(errors.WrongPlacement):
            shard.handle(request)
    shard._placement = Placement.even(1)
    assert pulled(shard, 7, 8) == [[0.5] * DIM, [4.5] * DIM]
    assert shard.status().duplicate_pushes == 6
    shard.handle(replace(first, token=PushToken(3, 9, 2, 2)))
    assert pulled(shard, 8) == [[5.0] * DIM]
    assert shard.handle(first) == Loaded(rows=0)  # acknowledged long ago: nobody waits for the count


@pytest.mark.parametrize(
    "bad", [{"name": "nope"}, {"gradients": np.zeros(1, np.float32)}, {"lr_scale": -1.0}], ids=["table", "shape", "lr"]
)
def test_a_push_is_applied_whole_or_not_at_all(shard, bad):
    with pytest.raises(errors.EmbershardError):
        shard.handle(push(gradients([7]), gradients([1], **bad)))
    assert pulled(shard, 7) == [[1.0] * DIM]
    # and it left no record: the same number may come again
    assert shard.handle(push(gradients([7]))) == Pushed(duplicate=False, applied=1, skipped=0)


def test_a_push_for_which_there_is_no_memory_is_applied_to_no_table(shard):
    shard.handle(Declare(table("full")))
    shard.core.budget.limit = shard.core.budget.used + 10_000
    status = shard.status()
    with raises(errors.TableFull, table="full", used_bytes=status.used_bytes, budget_bytes=status.budget_bytes):
        shard.handle(push(gradients([7]), gradients(range(1000), name="full")))
    assert pulled(shard, 7) == [[1.0] * DIM]
    assert [one.rows for one in shard.status().tables] == [0, 0]


def test_a_small_message_makes_a_shard_keep_no_more_than_its_budget():
    dim, count = 65_536, 64
    shard = make_shard(table("wide", dim, optimizer=spec.Adam(lr=0.001)), memory=64 << 20)
    every_dim = np.arange(count, dtype=np.int64) * dim
    payload = encode_elements(every_dim, np.ones(count, np.float32), (count, dim), BUILTIN["onebit"], None)
    assert payload.nbytes < 500
    part = TableGradients("wide", np.arange(count), payload, codec=PACKED)
    shard.handle(push(part))
    with pytest.raises(errors.TableFull):
        shard.handle(push(replace(part, ids=part.ids + count), seq=2))
    status = shard.status()
    assert status.used_bytes <= status.budget_bytes == 64 << 20
    assert status.tables[0].rows == count


def test_a_shard_takes_so_many_tables_and_no_more(monkeypatch):
    monkeypatch.setattr(tables_module, "MAX_TABLES", 2)
    shard = make_shard(*map(table, "abab"))
    with pytest.raises(errors.TooManyTables):
        shard.handle(Declare(table("c")))


def test_new_tables_come_no_faster_than_their_rate_and_those_that_exist_at_any(monkeypatch):
    monkeypatch.setattr(shard_module, "DECLARES_PER_SECOND", 5)
    shard = make_shard(*[table(f"t{number}") for number in range(5)], now=100.0)
    for now in (100.0, 100.1):
        with pytest.raises(errors.TooManyDeclares) as busy:
            shard.handle(Declare(table("u")), now)
        assert isinstance(busy.value, errors.ShardBusy)  # which a client waits for
        assert busy.value.fields["retry_after_ms"] > 0
    for _ in range(100):
        shard.handle(Declare(table("t0")), 100.1)
    shard.handle(Declare(table("u")), 100.3)


@pytest.mark.parametrize("codec", [False, True])
def test_equal_ids_of_a_push_count_as_the_sum_of_their_gradients_and_of_their_ages(codec):
    sent, ages = np.arange(4 * DIM, dtype=np.float32).reshape(4, DIM), np.array([1, 2, 4, 8], np.float32)
    summed = np.stack([sent[0] + sent[2] + sent[3], sent[1]])

    def part(ids, values, ages, **fields):
        if not codec:
            return TableGradients("items", ids_of(*ids), values, **fields)
        payload = encode_rows(values, find_values("none"), None, ages=ages)
        return TableGradients("items", ids_of(*ids), payload, codec=PACKED, **fields)

    shards = []
    for one in (part((7, 2, 7, 7), sent, ages, unique=False), part((7, 2), summed, np.array([13, 2], np.float32))):
        shards.append(make_shard(table(optimizer=spec.Adagrad(lr=0.5))))
        assert shards[-1].handle(loads(Push, dumps(push(one)))).applied == 2
    assert pulled(shards[0], 7, 2) == pulled(shards[1], 7, 2)


class TestLoad:
    @pytest.fixture
    def loading(self):
        shard = make_shard()
        assert shard.handle(Declare(ITEMS, worker=4, load=True)) == Declared(created=True, loading=True)
        return shard

    def test_load_assigns_rows_but_none_where_one_is_not_finite(self, shard):
        with raises(errors.NonFiniteValue, count=3):
            shard.handle(load(1, 2, rows=np.array([[1] * DIM, [np.inf] * DIM], np.float32)))
        assert shard.status().tables[0].rows == 0
        shard.handle(push(gradients([1])))
        assert shard.handle(load(1, 2)) == Loaded(rows=2)
        assert pulled(shard, 1, 2) == [[5.0] * DIM] * 2

    def test_a_table_that_is_loading_is_closed_until_the_last_part(self, loading):
        for request in (Declare(ITEMS, worker=1), Declare(ITEMS, worker=5, load=True)):  # nobody else takes over
            assert loading.handle(request) == Declared(created=False, loading=True)
        for part in (load(1, worker=4, last=False), load(worker=4)):  # the last one may have no rows
            for request in (Pull(1, (TableIds("items", ids_of(1)),)), push(gradients([1])), load(1, worker=5)):
                with raises(errors.TableLoading, worker=4):
                    loading.handle(request)
            loading.handle(part)
        assert pulled(loading, 1) == [[5.0] * DIM]
        assert not loading.status().tables[0].loading
        assert loading.handle(Declare(ITEMS, worker=4, load=True)) == Declared(created=False, loading=False)

    def test_the_same_worker_takes_over_from_its_dead_self(self, loading):
        loading.handle(load(1, value=3.0, worker=4, last=False))
        assert loading.handle(Declare(ITEMS, worker=4, load=True)) == Declared(created=True, loading=True)
        loading.handle(load(1, worker=4))
        assert pulled(loading, 1) == [[5.0] * DIM]

    def test_a_member_that_lost_its_lease_assigns_nothing(self, shard):
        hour, day = 3600.0, 24 * 3600.0
        mode = {"staleness": -1, "workers": 2, "lease_ms": round(1000 * hour)}
        for worker in (0, 1):
            shard.handle(join(worker, epoch=7, **mode), 0.0)
        assert shard.handle(load(1, token=PushToken(0, 7, 1, 1)), hour / 2) == Loaded(1)  # and is heard of
        shard.handle(Heartbeat(worker=1, epoch=7), hour)
        shard.advance(hour * 1.2)
        shard.handle(load(1, token=PushToken(0, 7, 2, 2)), hour * 1.2)
        shard.handle(join(1, epoch=8, **mode), day)  # both leases have ended meanwhile
        shard.advance(day)
        for worker, error in ((0, errors.LeaseLost), (1, errors.StaleWorker)):
            with pytest.raises(error):
                shard.handle(load(1, value=9.0, worker=worker, token=PushToken(worker, 7, 3, 3)), day)
        assert pulled(shard, 1) == [[5.0] * DIM]
        shard.handle(load(1, value=6.0), day)  # of one that takes no part
        assert pulled(shard, 1) == [[6.0] * DIM]


@pytest.mark.parametrize(
    ("request_of", "is_quick"),
    [
        (lambda: Pull(1, (TableIds("items", np.arange(2000)),)), True),
        (lambda: Pull(1, (TableIds("unknown", np.arange(2000)),)), True),
        (lambda: Pull(1, (TableIds("items", np.arange(60_000)),)), False),  # packed they may have come in 8 KB
        (lambda: Pull(1, (TableIds("items", np.arange(10), codec="int8"),)), False),
        (lambda: push(gradients([1, 2])), True),
        (lambda: push(gradients([1, 2], codec="mine")), False),
        (lambda: Hello(), False),
    ],
)
def test_a_request_is_quick_if_it_is_a_pull_or_push_of_few_floats_without_a_codec(shard, request_of, is_quick):
    assert shard.is_quick(request_of()) is is_quick


def test_no_push_is_quick_that_may_close_a_clock_and_apply_all_workers_gradients(shard):
    shard.handle(join(0, workers=2))
    assert not shard.is_quick(push(gradients([1])))


@pytest.mark.parametrize(("seconds_ago", "is_quick"), [(0, True), (70, False)])
def test_a_pull_is_quick_at_staleness_0_unless_the_end_of_a_lease_may_close_a_clock(shard, seconds_ago, is_quick):
    arrived = shard.system.now() - seconds_ago
    for worker in range(2):
        shard.handle(join(worker, workers=2, lease_ms=60_000), arrived)
    shard.advance(arrived)
    assert shard.is_quick(Pull(1, (TableIds("items", ids_of(1)),), 0, 1, required_clock=1)) is is_quick


def test_status_counts_what_happened(shard):
    rows(shard, 1, 2)
    shard.handle(push(gradients([1])))
    with pytest.raises(errors.UnknownTable):
        rows(shard, 1, name="nope")
    now = shard.handle(GetStatus())
    assert (now.requests, now.pulled_rows, now.pushed_rows) == (5, 2, 1)
    assert now.resident_bytes > 2**20
    (part,) = now.tables
    assert (part.name, part.dim, part.rows, part.optimizer, part.loading) == ("items", DIM, 1, "sgd", False)
    assert part.bytes > 0


HOUR = 3600 * 10**9  # of an epoch or a run


@pytest.mark.parametrize("what", ["epoch", "run"])
def test_an_epoch_or_a_run_of_the_future_is_refused_and_fences_nobody(shard, what):
    now = time.time_ns()
    shard.handle(join(0, epoch=now, run=now))
    for number in (now + HOUR, 2**63 - 1):
        with pytest.raises(errors.FutureEpoch) as future:
            shard.handle(join(5, **{"epoch": now, "run": now, what: number}))
        assert future.value.fields["what"] == what
        assert str(future.value.fields["got"]) > str(future.value.fields["now"])
    with pytest.raises(errors.FutureEpoch):
        shard.handle(push(gradients([7]), epoch=2**64 - 1))
    shard.handle(push(gradients([7]), epoch=now))
    shard.handle(join(0, epoch=now + HOUR // 60, run=now + HOUR // 60))  # a minute is what clocks may differ by


def test_a_fenced_worker_is_told_by_whom(shard):
    now = time.time_ns()
    shard.handle(push(gradients([7]), epoch=now), peer="10.0.0.1:999")
    with raises(errors.StaleWorker, by=re.compile(r" at 20\d\d-.* from 10\.0\.0\.1:999")):
        shard.handle(push(gradients([7]), epoch=now - 1))
    shard.handle(join(3, epoch=now, run=now), peer="10.0.0.2:7")
    with raises(errors.StaleRun, by=re.compile(r" by worker 3 at 20\d\d-.* from 10\.0\.0\.2:7")):
        shard.handle(join(4, epoch=now, run=now - 1))
