"""The state machine of a shard, without a transport."""

from __future__ import annotations

import time
from typing import TypeVar

import numpy as np
import pytest

from embershard.proto import spec
from embershard.proto.codec.payload import encode_elements, encode_rows
from embershard.proto.codec.values.registry import BUILTIN, find_values
from embershard.proto.errors import (
    EmbershardError,
    FutureEpoch,
    InvalidRequest,
    LeaseLost,
    MessageTooLarge,
    NonFiniteValue,
    ShardBusy,
    StaleRun,
    StaleWorker,
    TableFull,
    TableLoading,
    TableMismatch,
    TooManyDeclares,
    TooManyTables,
    UnknownOptimizer,
    UnknownTable,
    WrongDim,
    WrongPlacement,
)
from embershard.proto.messages import (
    PACKED,
    Declare,
    Declared,
    GetStatus,
    Greeting,
    Heartbeat,
    Hello,
    Join,
    Load,
    Loaded,
    Pull,
    Push,
    Pushed,
    PushToken,
    Reply,
    Request,
    Rows,
    ShardStatus,
    Snapshot,
    Snapshotted,
    TableGradients,
    TableIds,
    replace,
)
from embershard.proto.protobuf import dumps, loads
from embershard.proto.routing import Placement, make_route
from embershard.ps.shard import Shard
from embershard.ps.table import tables as tables_module
from embershard.ps.table.optimizers import OptimizerRegistry

R = TypeVar("R", bound=Reply)
EPOCH = 1
DIM = 3


def table(name: str = "items", **changes: object) -> spec.TableSpec:
    settings: dict[str, object] = {"dim": DIM, "optimizer": spec.SGD(lr=0.5), "initializer": spec.Constant(value=1.0)}
    return spec.TableSpec(name=name, **{**settings, **changes})  # type: ignore[arg-type]


@pytest.fixture
def shard():
    made = Shard(0, Placement.even(1), OptimizerRegistry(), version="1.2.3")
    made.handle(Declare(table()))
    return made


def ask(shard: Shard, request: Request, kind: type[R]) -> R:
    reply = shard.handle(request)
    assert isinstance(reply, kind)
    return reply


def ids_of(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def pull(shard: Shard, *ids: int, name: str = "items") -> np.ndarray:
    return ask(shard, Pull(EPOCH, (TableIds(name, ids_of(*ids)),)), Rows).tables[0]


def gradients(ids: tuple[int, ...], value: float = 1.0, name: str = "items", **changes: object) -> TableGradients:
    rows = np.full((len(ids), DIM), value, np.float32)
    return TableGradients(name, ids_of(*ids), **{"gradients": rows, **changes})  # type: ignore[arg-type]


def push(*parts: TableGradients, seq: int = 1, epoch: int = 1, first: int = 1, placement: int = EPOCH) -> Push:
    return Push(PushToken(worker=0, epoch=epoch, seq=seq, first_incomplete=first), 0, placement, parts)


def load(*ids: int, value: float = 5.0, last: bool = True, worker: int = 0, **changes: object) -> Load:
    rows = np.full((len(ids), DIM), value, np.float32)
    fields = {"rows": rows, "placement_epoch": EPOCH, **changes}
    return Load("items", ids=ids_of(*ids), worker=worker, last=last, **fields)  # type: ignore[arg-type]


def status(shard: Shard) -> ShardStatus:
    return ask(shard, GetStatus(), ShardStatus)


def test_hello_is_answered_with_who_it_is():
    shard = Shard(1, Placement.even(4, epoch=9), OptimizerRegistry(), version="1.2.3")
    greeting = ask(shard, Hello(worker=2), Greeting)
    assert (greeting.shard, greeting.num_shards, greeting.placement_epoch, greeting.version) == (1, 4, 9, "1.2.3")


def test_every_start_is_another_instance():
    shards = [Shard(0, Placement.even(1), OptimizerRegistry()) for _ in range(2)]
    assert shards[0].greeting.instance != shards[1].greeting.instance


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_outside_of_the_placement_is_refused(index):
    with pytest.raises(ValueError, match=r"0\.\.1"):
        Shard(index, Placement.even(2), OptimizerRegistry())


def test_push_then_pull_returns_the_updated_row(shard):
    assert shard.handle(push(gradients((7, 8)))) == Pushed(duplicate=False, applied=2, skipped=0)
    assert pull(shard, 7, 9, 8).tolist() == [[0.5] * DIM, [1.0] * DIM, [0.5] * DIM]


def test_gradients_come_flat_from_the_wire(shard):
    message = loads(Push, dumps(push(gradients((7, 8)))))
    assert message.tables[0].gradients.shape == (2 * DIM,)
    shard.handle(message)
    assert pull(shard, 7, 8).tolist() == [[0.5] * DIM] * 2


def test_a_pull_of_several_tables_answers_in_the_order_of_the_request(shard):
    shard.handle(Declare(table("users", dim=2, initializer=spec.Constant(value=4.0))))
    parts = (TableIds("users", ids_of(1)), TableIds("items", ids_of(1, 2)), TableIds("users", ids_of()))
    rows = ask(shard, Pull(EPOCH, parts), Rows).tables
    assert [part.tolist() for part in rows] == [[[4.0, 4.0]], [[1.0] * DIM] * 2, []]


def test_a_pull_allocates_no_rows(shard):
    pull(shard, 1, 2, 3)
    assert status(shard).tables[0].rows == 0


def test_lr_scale_scales_this_push_alone(shard):
    shard.handle(push(gradients((7,), lr_scale=0.5), seq=1))
    assert pull(shard, 7).tolist() == [[0.75] * DIM]
    shard.handle(push(gradients((7,)), seq=2))
    assert pull(shard, 7).tolist() == [[0.25] * DIM]


def test_declaring_twice_creates_once(shard):
    assert shard.handle(Declare(table("other"))) == Declared(created=True, loading=False)
    assert shard.handle(Declare(table("other"))) == Declared(created=False, loading=False)


def test_a_declaration_that_differs_names_the_difference(shard):
    with pytest.raises(TableMismatch, match=r"dim: 3, not 4.*optimizer\.lr: 0\.5, not 0\.1"):
        shard.handle(Declare(table(dim=4, optimizer=spec.SGD(lr=0.1))))
    assert pull(shard, 1).shape == (1, DIM)


def test_an_optimizer_that_is_not_there_is_named(shard):
    with pytest.raises(UnknownOptimizer, match="--import"):
        shard.handle(Declare(table("other", optimizer=spec.Custom(function="mine:step", lr=0.1))))
    with pytest.raises(UnknownTable):
        pull(shard, 1, name="other")


def test_an_unknown_table_is_named_with_those_that_exist(shard):
    with pytest.raises(UnknownTable, match=r"no table 'nope' here \(declared: items\)"):
        pull(shard, 1, name="nope")


def test_the_list_of_known_tables_stays_short():
    shard = Shard(0, Placement.even(1), OptimizerRegistry())
    for i in range(25):
        shard.handle(Declare(table(f"t{i}")))
    with pytest.raises(UnknownTable, match="and 5 more"):
        pull(shard, 1)


def test_a_request_of_another_placement_is_refused(shard):
    for request in (Pull(2, ()), push(placement=2), load(1, placement_epoch=2)):
        with pytest.raises(WrongPlacement, match="epoch 2, the shard has 1"):
            shard.handle(request)


def test_an_id_of_another_shard_is_refused():
    placement = Placement.even(2)
    shards = [Shard(i, placement, OptimizerRegistry()) for i in range(2)]
    made = table(id_space="space")
    route = make_route(np.arange(100, dtype=np.int64), made.space_key, placement)
    for i, shard in enumerate(shards):
        shard.handle(Declare(made))
        mine, theirs = route.ids[route.slice_of(i)], route.ids[route.slice_of(1 - i)]
        assert pull(shard, *mine).shape == (len(mine), DIM)
        for request in (
            Pull(EPOCH, (TableIds("items", np.append(mine, theirs[0])),)),
            push(gradients((*mine, theirs[0]))),
            load(*mine, theirs[0]),
        ):
            with pytest.raises(InvalidRequest, match=f"id {theirs[0]} does not belong to shard {i}; .*'space'"):
                shard.handle(request)
        assert status(shard).tables[0].rows == 0


@pytest.mark.parametrize(
    "ids", [np.array([1], np.int32), np.array([1.0]), np.array([[1]], np.int64), np.arange(4, dtype=np.int64)[::2]]
)
def test_ids_of_a_wrong_kind_are_refused(shard, ids):
    with pytest.raises(InvalidRequest, match="ids must be"):
        shard.handle(Pull(EPOCH, (TableIds("items", ids),)))


@pytest.mark.parametrize("shape", [(1, DIM), (2, DIM - 1), (2 * DIM + 1,), (DIM, 2), (0,)])
def test_rows_that_do_not_match_the_ids_are_refused(shard, shape):
    with pytest.raises(WrongDim, match="'items': gradients hold"):
        shard.handle(push(gradients((1, 2), gradients=np.zeros(shape, np.float32))))
    with pytest.raises(WrongDim, match="'items': rows hold"):
        shard.handle(load(1, 2, rows=np.zeros(shape, np.float32)))


def test_gradients_of_another_dtype_are_refused(shard):
    with pytest.raises(InvalidRequest, match="float64"):
        shard.handle(push(gradients((1,), gradients=np.zeros((1, DIM)))))


@pytest.mark.parametrize("lr_scale", [-0.1, float("nan"), float("inf")])
def test_a_learning_rate_scale_without_sense_is_refused(shard, lr_scale):
    with pytest.raises(InvalidRequest, match="lr_scale"):
        shard.handle(push(gradients((1,), lr_scale=lr_scale)))


def test_a_pull_whose_rows_would_not_fit_is_refused_before_memory_is_taken():
    shard = Shard(0, Placement.even(1), OptimizerRegistry(), max_message_bytes=1000)
    shard.handle(Declare(table(dim=60)))
    assert pull(shard, 1, 2, 3).shape == (3, 60)
    with pytest.raises(MessageTooLarge, match="limit of 1000"):
        pull(shard, 1, 2, 3, 4, 5)


def test_non_finite_gradients_are_skipped_and_counted_and_the_rest_is_applied(shard):
    part = gradients((1, 2, 3))
    part.gradients[1, 0] = np.nan
    assert shard.handle(push(part)) == Pushed(duplicate=False, applied=2, skipped=1)
    assert pull(shard, 1, 2, 3).tolist() == [[0.5] * DIM, [1.0] * DIM, [0.5] * DIM]
    assert (status(shard).pushed_rows, status(shard).skipped_rows) == (2, 1)


def test_a_push_is_applied_once_however_often_it_comes(shard):
    message = push(gradients((7,)))
    assert shard.handle(message) == Pushed(duplicate=False, applied=1, skipped=0)
    for _ in range(3):
        assert shard.handle(message) == Pushed(duplicate=True, applied=1, skipped=0)
    assert pull(shard, 7).tolist() == [[0.5] * DIM]
    assert status(shard).duplicate_pushes == 3


def test_the_retry_of_an_applied_push_is_known_under_another_placement(shard):
    message = push(gradients((7,)))
    shard.handle(message)
    shard._placement = Placement.even(1, epoch=EPOCH + 1)
    assert shard.handle(message) == Pushed(duplicate=True, applied=1, skipped=0)
    with pytest.raises(WrongPlacement):
        shard.handle(push(gradients((7,)), seq=2))


def test_an_earlier_incarnation_of_a_worker_applies_nothing(shard):
    shard.handle(push(gradients((7,)), epoch=2))
    with pytest.raises(StaleWorker):
        shard.handle(push(gradients((7,)), epoch=1, seq=2))
    assert pull(shard, 7).tolist() == [[0.5] * DIM]


@pytest.mark.parametrize(
    "bad",
    [gradients((1,), name="nope"), gradients((1,), gradients=np.zeros(1, np.float32)), gradients((1,), lr_scale=-1.0)],
    ids=["table", "shape", "lr_scale"],
)
def test_a_push_is_applied_whole_or_not_at_all(shard, bad):
    with pytest.raises(EmbershardError):
        shard.handle(push(gradients((7,)), bad))
    assert pull(shard, 7).tolist() == [[1.0] * DIM]
    # and it left no record: the same number may come again
    assert shard.handle(push(gradients((7,)))) == Pushed(duplicate=False, applied=1, skipped=0)


def test_a_push_for_which_there_is_no_memory_is_applied_to_no_table(shard):
    shard.handle(Declare(table("full")))
    shard._budget.limit = shard._budget.used + 10_000
    with pytest.raises(TableFull) as full:
        shard.handle(push(gradients((7,)), gradients(tuple(range(1000)), name="full")))
    assert full.value.fields["table"] == "full"
    assert full.value.fields["used_bytes"] == status(shard).used_bytes
    assert full.value.fields["budget_bytes"] == status(shard).budget_bytes
    assert pull(shard, 7).tolist() == [[1.0] * DIM]
    assert [one.rows for one in status(shard).tables] == [0, 0]


def test_a_small_message_makes_a_shard_keep_no_more_than_its_budget():
    shard = Shard(0, Placement.even(1), OptimizerRegistry(), memory=64 << 20)
    dim, count = 65_536, 64
    shard.handle(Declare(table("wide", dim=dim, optimizer=spec.Adam(lr=0.001))))
    every_dim = np.arange(count, dtype=np.int64) * dim
    payload = encode_elements(every_dim, np.ones(count, np.float32), (count, dim), BUILTIN["onebit"], None)
    assert payload.nbytes < 500
    refused = 0
    for seq in range(1, 6):
        part = TableGradients("wide", np.arange(count) + 1000 * seq, payload, codec=PACKED)
        try:
            shard.handle(push(part, seq=seq))
        except TableFull:
            refused += 1
    assert refused == 4
    assert status(shard).used_bytes <= status(shard).budget_bytes == 64 << 20
    assert status(shard).tables[0].rows == count


def test_a_shard_takes_so_many_tables_and_no_more(monkeypatch):
    monkeypatch.setattr(tables_module, "MAX_TABLES", 2)
    shard = Shard(0, Placement.even(1), OptimizerRegistry())
    for name in "abab":
        shard.handle(Declare(table(name)))
    with pytest.raises(TooManyTables):
        shard.handle(Declare(table("c")))


def test_new_tables_come_no_faster_than_their_rate_and_those_that_exist_at_any(monkeypatch):
    monkeypatch.setattr(tables_module, "DECLARES_PER_SECOND", 5)
    shard = Shard(0, Placement.even(1), OptimizerRegistry())
    for number in range(5):
        shard.handle(Declare(table(f"t{number}")), 100.0)
    for now in (100.0, 100.1):
        with pytest.raises(TooManyDeclares) as busy:
            shard.handle(Declare(table("u")), now)
        assert isinstance(busy.value, ShardBusy)  # which a client waits for
        assert busy.value.fields["retry_after_ms"] > 0
    for _ in range(100):
        shard.handle(Declare(table("t0")), 100.1)
    shard.handle(Declare(table("u")), 100.3)


def test_a_snapshot_waits_for_gathered_pushes_and_for_no_others(shard, tmp_path):
    for worker in (0, 1):
        shard.handle(Join(worker=worker, epoch=1, clock=0, staleness=0, workers=2, lease_ms=60_000))

    def push(worker):
        gradients = (TableGradients("items", ids_of(7), np.ones((1, DIM), np.float32)),)
        shard.handle(Push(PushToken(worker, 1, 1, 1), 0, EPOCH, gradients))

    push(0)
    begun = Snapshot(url=str(tmp_path), name="early", id=1, step="begin")
    assert ask(shard, begun, Snapshotted).state == "waiting"
    push(1)
    assert ask(shard, replace(begun, step="watch"), Snapshotted).state in ("writing", "done")
    shard.handle(replace(begun, step="cancel"))
    assert ask(shard, Snapshot(url=str(tmp_path), name="late", id=2, step="begin"), Snapshotted).state in (
        "writing",
        "done",
    )


@pytest.mark.parametrize("codec", [False, True])
def test_equal_ids_of_a_push_count_as_the_sum_of_their_gradients(codec):
    shards = [Shard(0, Placement.even(1), OptimizerRegistry()) for _ in range(2)]
    ids, rows = ids_of(7, 2, 7, 7), np.arange(4 * DIM, dtype=np.float32).reshape(4, DIM)
    summed = np.stack([rows[0] + rows[2] + rows[3], rows[1]])
    sent = encode_rows(rows, find_values("none"), None) if codec else rows
    parts = [
        TableGradients("items", ids, sent, codec=PACKED if codec else "", unique=False),
        TableGradients("items", ids_of(7, 2), summed),
    ]
    for shard, part, applied in zip(shards, parts, (2, 2), strict=True):
        shard.handle(Declare(table(optimizer=spec.Adagrad(lr=0.5))))
        assert ask(shard, loads(Push, dumps(push(part))), Pushed).applied == applied
    np.testing.assert_array_equal(pull(shards[0], 7, 2), pull(shards[1], 7, 2))


def test_the_pushes_that_equal_ids_stand_for_are_summed_too(shard):
    rows = encode_rows(np.ones((3, DIM), np.float32), find_values("none"), None, ages=np.array([1, 2, 4], np.float32))
    part = TableGradients("items", ids_of(7, 2, 7), rows, codec=PACKED, unique=False)
    checked = shard._tables.check_gradients(part, None, 2**20)
    assert checked.ages is not None
    assert (checked.ids.tolist(), checked.ages.tolist(), checked.ages.dtype) == ([7, 2], [5, 2], np.float32)


def test_load_assigns_rows(shard):
    shard.handle(push(gradients((1,))))
    assert shard.handle(load(1, 2)) == Loaded(rows=2)
    assert pull(shard, 1, 2).tolist() == [[5.0] * DIM] * 2


def test_a_load_sent_again_does_not_undo_a_push_that_came_since(shard):
    first = load(1, token=PushToken(worker=3, epoch=9, seq=1, first_incomplete=1), worker=3, keep_state=True)
    assert shard.handle(first) == Loaded(rows=1)
    shard.handle(push(gradients((1,))))
    assert shard.handle(first) == Loaded(rows=1)  # its reply was lost, say
    assert pull(shard, 1).tolist() == [[4.5] * DIM]
    assert status(shard).duplicate_pushes == 1
    shard.handle(replace(first, token=PushToken(3, 9, 2, 2)))
    assert pull(shard, 1).tolist() == [[5.0] * DIM]


def test_a_late_copy_of_a_load_is_not_applied(shard):
    first = load(1, token=PushToken(0, 1, 1, 1))
    shard.handle(first)
    shard.handle(push(gradients((1,)), seq=2, first=2))
    assert shard.handle(first) == Loaded(rows=0)  # acknowledged long ago: nobody waits for the count
    assert pull(shard, 1).tolist() == [[4.5] * DIM]


def test_a_load_of_an_earlier_incarnation_is_refused(shard):
    shard.handle(push(gradients((1,)), epoch=2))
    with pytest.raises(StaleWorker):
        shard.handle(load(1, token=PushToken(0, 1, 1, 1)))


def test_load_of_non_finite_rows_writes_nothing(shard):
    rows = np.ones((2, DIM), np.float32)
    rows[1] = np.inf
    with pytest.raises(NonFiniteValue, match="3 non-finite"):
        shard.handle(load(1, 2, rows=rows))
    assert status(shard).tables[0].rows == 0


class TestLoading:
    @pytest.fixture
    def loading(self):
        shard = Shard(0, Placement.even(1), OptimizerRegistry())
        assert shard.handle(Declare(table(), worker=4, load=True)) == Declared(created=True, loading=True)
        return shard

    def test_a_table_that_is_loading_is_closed_until_the_last_part(self, loading):
        assert loading.handle(Declare(table(), worker=1)) == Declared(created=False, loading=True)
        for last in (False, True):
            for request in (Pull(EPOCH, (TableIds("items", ids_of(1)),)), push(gradients((1,))), load(1, worker=1)):
                with pytest.raises(TableLoading, match="by worker 4"):
                    loading.handle(request)
            loading.handle(load(int(last), worker=4, last=last))
        assert pull(loading, 0, 1).tolist() == [[5.0] * DIM] * 2
        assert not status(loading).tables[0].loading

    def test_another_worker_does_not_take_over(self, loading):
        assert loading.handle(Declare(table(), worker=5, load=True)) == Declared(created=False, loading=True)
        with pytest.raises(TableLoading):
            loading.handle(load(1, worker=5))

    def test_a_member_that_lost_its_lease_assigns_nothing(self):
        hour, day = 3600.0, 24 * 3600.0
        shard = Shard(0, Placement.even(1), OptimizerRegistry())
        shard.handle(Declare(table()), 0.0)
        lease_ms = round(1000 * hour)
        for worker in (0, 1):
            shard.handle(Join(worker=worker, epoch=7, clock=0, staleness=-1, workers=2, lease_ms=lease_ms), 0.0)
        assert shard.handle(load(1, worker=0, token=PushToken(0, 7, 1, 1)), hour / 2) == Loaded(1)  # and is heard of
        shard.handle(Heartbeat(worker=1, epoch=7), hour)
        shard.advance(hour * 1.2)
        shard.handle(load(1, worker=0, token=PushToken(0, 7, 2, 2)), hour * 1.2)
        shard.handle(
            Join(worker=1, epoch=8, clock=0, staleness=-1, workers=2, lease_ms=lease_ms), day
        )  # both leases have ended meanwhile
        shard.advance(day)
        with pytest.raises(LeaseLost):
            shard.handle(load(1, value=9.0, worker=0, token=PushToken(0, 7, 3, 3)), day)
        with pytest.raises(StaleWorker):
            shard.handle(load(1, value=9.0, worker=1, token=PushToken(1, 7, 1, 1)), day)
        assert pull(shard, 1).tolist() == [[5.0] * DIM]
        shard.handle(load(1, value=6.0, worker=0), day)  # of one that takes no part
        assert pull(shard, 1).tolist() == [[6.0] * DIM]

    def test_the_same_worker_takes_over_from_its_dead_self(self, loading):
        loading.handle(load(1, value=3.0, worker=4, last=False))
        assert loading.handle(Declare(table(), worker=4, load=True)) == Declared(created=True, loading=True)
        loading.handle(load(1, worker=4))
        assert pull(loading, 1).tolist() == [[5.0] * DIM]

    def test_nobody_is_told_to_load_twice(self, loading):
        loading.handle(load(worker=4))
        assert loading.handle(Declare(table(), worker=4, load=True)) == Declared(created=False, loading=False)

    def test_a_last_part_without_rows_ends_it(self, loading):
        loading.handle(load(1, worker=4, last=False))
        assert loading.handle(load(worker=4)) == Loaded(rows=0)
        assert pull(loading, 1).tolist() == [[5.0] * DIM]


def test_status_counts_what_happened(shard):
    pull(shard, 1, 2)
    shard.handle(push(gradients((1,))))
    with pytest.raises(UnknownTable):
        pull(shard, 1, name="nope")
    now = status(shard)
    assert (now.requests, now.pulled_rows, now.pushed_rows) == (5, 2, 1)
    assert now.resident_bytes > 2**20
    part = now.tables[0]
    assert (part.name, part.dim, part.rows, part.optimizer, part.loading) == ("items", DIM, 1, "sgd", False)
    assert part.bytes > 0


HOUR = 3600 * 10**9  # of an epoch or a run


@pytest.mark.parametrize("what", ["epoch", "run"])
def test_an_epoch_or_a_run_of_the_future_is_refused_and_fences_nobody(shard, what):
    now = time.time_ns()
    join = Join(worker=0, epoch=now, clock=0, staleness=-1, workers=1, lease_ms=60_000, run=now)
    shard.handle(join)
    for number in (now + HOUR, 2**63 - 1):
        with pytest.raises(FutureEpoch) as future:
            shard.handle(replace(join, worker=5, **{what: number}))
        assert future.value.fields["what"] == what
        assert str(future.value.fields["got"]) > str(future.value.fields["now"])
    with pytest.raises(FutureEpoch):
        shard.handle(push(gradients((7,)), epoch=2**64 - 1))
    shard.handle(push(gradients((7,)), epoch=now))
    shard.handle(replace(join, epoch=now + HOUR // 60, run=now + HOUR // 60))  # a minute is what clocks may differ by


def test_a_fenced_worker_is_told_by_whom(shard):
    now = time.time_ns()
    shard.handle(push(gradients((7,)), epoch=now), peer="10.0.0.1:999")
    with pytest.raises(StaleWorker, match=r"came at 20\d\d-.* from 10\.0\.0\.1:999"):
        shard.handle(push(gradients((7,)), epoch=now - 1))
    shard.handle(
        Join(worker=3, epoch=now, clock=0, staleness=-1, workers=1, lease_ms=60_000, run=now), peer="10.0.0.2:7"
    )
    with pytest.raises(StaleRun, match=r"begun on these shards by worker 3 at 20\d\d-.* from 10\.0\.0\.2:7"):
        shard.handle(Join(worker=4, epoch=now, clock=0, staleness=-1, workers=1, lease_ms=60_000, run=now - 1))
