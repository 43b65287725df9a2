"""Bundles of tables on a shard: what single tables do, in one message and one kernel call; and what is refused."""

import re
import tracemalloc
import weakref

import numpy as np
import pytest

from embershard.proto import errors, spec
from embershard.proto.messages import Declare, Load, Pull, Push, TableGradients, TableIds
from embershard.proto.routing import Placement, make_bundle
from embershard.ps.events import PushEvent
from embershard.ps.security.access import tables_of
from embershard.ps.shard import Shard
from embershard.ps.table import kernels
from embershard.ps.table import table as table_module
from embershard.ps.table import tables as tables_module
from embershard.ps.table.optimizers import OptimizerRegistry
from harness.events import again
from harness.held_log import HeldLog
from harness.raises import raises
from harness.shards import ids_of, join, make_shard, push, rows, table

DIM = 3
NAMES = ("sums", "moments", "plain")
SPECS = (
    table("sums", DIM, optimizer=spec.Adagrad(lr=0.5), initializer=spec.Uniform(low=-1, high=1)),
    table("moments", DIM, optimizer=spec.Adam(lr=0.1, clip_norm=0.5), initializer=spec.Normal()),
    table("plain", DIM),
)
COUNTS = (2, 0, 3)
IDS = ids_of(7, 8, 7, 9, 10)


def bundle(counts=COUNTS, ids=IDS, members=NAMES, **fields):
    return TableIds("", ids, members=members, counts=counts, **fields)


def pushed(values, counts=COUNTS, ids=IDS, members=NAMES, **fields):
    return TableGradients("", ids, values, members=members, counts=counts, **fields)


def single(values, counts, ids, **fields):
    """The same as parts of one table each."""
    ends = np.cumsum(counts)
    return [
        TableGradients(name, ids[end - count : end], values[end - count : end], **fields)
        for name, end, count in zip(NAMES, ends, counts, strict=True)
        if count
    ]


def draw(seed, counts):
    generator = np.random.default_rng(seed)
    ids = np.concatenate([generator.choice(50, count, replace=False) for count in counts])
    return ids.astype(np.int64), generator.standard_normal((sum(counts), DIM)).astype(np.float32)


def state(shard):
    """Rows and counters of every table."""
    names = [one.name for one in shard.status().tables]
    found = [rows(shard, *range(50), name=name).tobytes() for name in names]
    return found, [(one.rows, one.pushed_rows, one.skipped_rows) for one in shard.status().tables]


@pytest.fixture
def shard():
    return make_shard(*SPECS)


def test_a_pull_answers_with_the_rows_of_its_tables_and_counts_them(shard):
    shard.handle(push(pushed(np.ones((5, DIM), np.float32))))
    reply = shard.handle(Pull(1, (bundle(), TableIds("plain", ids_of(9)))))
    expected = np.concatenate([rows(shard, 7, 8, name="sums"), rows(shard, 7, 9, 10, name="plain")])
    assert np.array_equal(reply.tables[0], expected)
    assert np.array_equal(reply.tables[1], rows(shard, 9, name="plain"))
    assert reply.codecs == ()
    assert [one.pulled_rows for one in shard.status().tables] == [2 + 2, 0, 3 + 1 + 3 + 1]
    assert [one.rows for one in shard.status().tables] == [2, 0, 3]


@pytest.mark.parametrize("fields", [{}, {"difference": True}], ids=["gradients", "differences"])
def test_pushes_have_the_bits_of_single_tables(fields):
    one, many = make_shard(*SPECS), make_shard(*SPECS)
    for seq in range(1, 8):
        counts = tuple(np.random.default_rng(seq).integers(0, 30, 3).tolist())
        ids, values = draw(seq, counts)
        values[seq::11, 1] = np.nan
        rate = {"lr_scale": 1.0 / seq}
        replies = [
            one.handle(push(*single(values, counts, ids, **rate), seq=seq, **fields)),
            many.handle(push(pushed(values, counts, ids, **rate), seq=seq, **fields)),
        ]
        assert replies[0] == replies[1]
        assert state(one) == state(many)


def test_all_tables_are_one_kernel_call(shard, monkeypatch):
    calls = []
    for name in ("gather", "apply"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *given, name=name, kernel=kernel: calls.append(name) or kernel(*given)
        )
    shard.handle(Pull(1, (bundle(),)))
    shard.handle(push(pushed(np.ones((5, DIM), np.float32))))
    assert calls == ["gather", "apply"]


def test_tables_grow_and_are_found_where_they_have_moved(monkeypatch):
    monkeypatch.setattr(table_module, "_FIRST_BYTES", 1 << 20)
    one, many = make_shard(*SPECS), make_shard(*SPECS)
    for seq in range(1, 6):
        ids = np.concatenate([np.arange(20_000) + 20_000 * seq] * 2).astype(np.int64)
        values, counts = np.full((len(ids), DIM), 0.5, np.float32), (20_000, 0, 20_000)
        one.handle(push(*single(values, counts, ids), seq=seq))
        many.handle(push(pushed(values, counts, ids), seq=seq))
    assert state(one) == state(many)
    assert state(many)[1][0][0] == 100_000


def test_a_push_names_the_ids_of_a_pull_divided_as_they_were(shard):
    values, twin = np.ones((5, DIM), np.float32), make_shard(*SPECS)
    twin.handle(push(pushed(values)))
    shard.handle(Pull(1, (bundle(route=4),), epoch=1))
    nothing = ids_of()
    for wrong in (pushed(values, (3, 0, 2), nothing, route=4), pushed(values, COUNTS, nothing, NAMES[::-1], route=4)):
        with raises(errors.UnknownRoute, route=4):
            shard.handle(push(wrong))
    shard.handle(push(pushed(values, ids=nothing, route=4)))
    assert state(shard) == state(twin)
    with raises(errors.UnknownRoute, table="sums, moments, plain"):
        shard.handle(push(pushed(values, ids=nothing, route=4), seq=2))


@pytest.mark.parametrize(
    ("part", "error", "text"),
    [
        (bundle(members=("sums", "no_such", "plain")), errors.UnknownTable, "'no_such'"),
        (bundle(members=("sums", "wide", "plain")), errors.InvalidRequest, r"tables of dims \[3, 5\]"),
        (bundle(members=("sums", "plain", "sums")), errors.InvalidRequest, "names one twice"),
        (bundle(counts=(2, 0, 2)), errors.InvalidRequest, "counts say 4 ids, and it has 5"),
        (bundle(counts=(2, 3)), errors.InvalidRequest, "2 counts say 5 ids"),
        (bundle(counts=(8, -3, 0)), errors.InvalidRequest, "3 counts"),
        (bundle(ids=IDS.astype(np.int32)), errors.InvalidRequest, "ids must be"),
        (bundle(members=("sums", "loading", "plain")), errors.TableLoading, "'loading'"),
        (pushed(np.ones((4, DIM), np.float32)), errors.WrongDim, "'sums'"),
        (pushed(np.ones((5, DIM), np.float32), lr_scale=np.nan), errors.InvalidRequest, "'sums': lr_scale"),
        (
            pushed(np.ones((5, DIM), np.float32), unique=False),
            errors.InvalidRequest,
            "'sums' the first, must have unique_ids",
        ),
        (pushed(np.ones((5, DIM), np.float32), (2, 0, 2)), errors.InvalidRequest, "counts say 4 ids"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(shard, part, error, text):
    shard.handle(Declare(table("wide", 5)))
    shard.handle(Declare(table("loading", DIM), worker=3, load=True))
    before = shard.status().tables
    with pytest.raises(error, match=text):
        shard.handle(Pull(1, (part,)) if isinstance(part, TableIds) else push(part))
    assert shard.status().tables == before
    shard.handle(push(pushed(np.ones((5, DIM), np.float32)), seq=2))  # the shard goes on


def test_a_table_that_was_loaded_meanwhile_is_open(shard):
    shard.handle(Declare(table("late", DIM), worker=3, load=True))
    part = bundle(members=("sums", "late", "plain"))
    with pytest.raises(errors.TableLoading):
        shard.handle(Pull(1, (part,)))
    shard.handle(Load("late", 1, ids_of(1), np.ones((1, DIM), np.float32), 3))
    assert len(shard.handle(Pull(1, (part,))).tables[0]) == 5


@pytest.mark.parametrize("kind", [Pull, Push])
def test_an_id_of_another_shard_is_refused_with_its_table(kind):
    placement, flat = Placement.even(2), np.tile(np.arange(50), 2)
    keys = tuple(one.space_key for one in SPECS[:2])
    route = make_bundle(flat, np.array([50, 100]), NAMES[:2], keys, placement).route
    shard = Shard(0, placement, OptimizerRegistry())
    for one in SPECS:
        shard.handle(Declare(one))
    mine, counts = route.ids[route.slice_of(0)].copy(), route.counts_of(0, route.slice_of(0))
    foreign = route.ids[route.slice_of(1)][-1]
    assert len(shard.handle(Pull(1, (bundle(counts, mine, NAMES[:2]),))).tables[0]) == len(mine)
    mine[-1] = foreign
    values = np.ones((len(mine), DIM), np.float32)
    wrong = Pull(1, (bundle(counts, mine, NAMES[:2]),))
    if kind is Push:
        wrong = push(pushed(values, counts, mine, NAMES[:2]))
    with pytest.raises(errors.InvalidRequest, match=f"'moments': id {foreign} does not belong to shard 0"):
        shard.handle(wrong)


@pytest.mark.parametrize("staleness", [0, 2])
def test_bundles_of_several_workers_have_the_bits_of_single_tables(staleness):
    shards = make_shard(*SPECS), make_shard(*SPECS)
    for clock in range(3):
        for worker in range(2):
            counts = tuple(np.random.default_rng(10 * clock + worker).integers(0, 30, 3).tolist())
            ids, values = draw(10 * clock + worker, counts)
            fields = {"worker": worker, "seq": clock + 1, "clock": clock, "weight": 1.0 + worker}
            for shard, parts in zip(shards, (single(values, counts, ids), [pushed(values, counts, ids)]), strict=True):
                if not clock:
                    shard.handle(join(worker, workers=2, staleness=staleness))
                if clock or worker:
                    shard.handle(push(*parts, **fields))
        assert state(shards[0]) == state(shards[1])


def test_memory_for_all_tables_is_asked_for_before_any_changes():
    shard = make_shard(*SPECS, memory=2_000_000)
    before = state(shard)
    counts = (100, 0, 60_000)
    ids = np.concatenate([np.arange(100), np.arange(60_000)]).astype(np.int64)
    with raises(errors.TableFull, table="plain"):
        shard.handle(push(pushed(np.ones((len(ids), DIM), np.float32), counts, ids)))
    assert state(shard) == before


@pytest.mark.parametrize("other", ["bundle", "table"])
def test_address_space_is_asked_for_a_table_that_is_in_two_parts_with_the_rows_of_both(other, monkeypatch):
    monkeypatch.setattr(table_module, "_FIRST_BYTES", 1 << 16)
    shard = make_shard(*SPECS)
    capacity = min(one.capacity for one in shard.core.tables.all())
    monkeypatch.setattr(table_module, "MAX_ROWS", capacity)
    before, count = state(shard), capacity - 10
    values = np.ones((count, DIM), np.float32)
    first, second = np.arange(count), np.arange(count, 2 * count)
    parts = [pushed(values, (count, 0, 0), first)]
    if other == "bundle":
        parts.append(pushed(values, (0, count), second, ("plain", "sums")))
    else:
        parts.insert(0, TableGradients("sums", second, values))
    with raises(errors.NoAddressSpace, table="sums"):
        shard.handle(push(*parts))
    assert state(shard) == before
    shard.handle(push(parts[1], seq=2))  # either alone has room


@pytest.mark.parametrize("form", ["table", "bundle", "both", "clock"])
def test_a_full_table_takes_pushes_to_rows_that_it_has(form, monkeypatch):
    monkeypatch.setattr(table_module, "_FIRST_BYTES", 1 << 16)
    shard = make_shard(*SPECS)
    capacity = shard.core.tables.entry("sums").table.capacity
    monkeypatch.setattr(table_module, "MAX_ROWS", capacity)
    if form == "clock":
        for worker in range(2):
            shard.handle(join(worker=worker, workers=2))

    def parts(ids):
        values = np.ones((len(ids), DIM), np.float32)
        one, several = TableGradients("sums", ids, values), pushed(values, (len(ids), 0, 0), ids)
        return {"bundle": [several], "both": [one, several]}.get(form, [one])

    def train(clock, ids):
        for worker in range(2):
            shard.handle(push(*parts(ids), worker=worker, seq=clock + 1, clock=clock))

    ids = np.arange(capacity // 8 * 6)
    for clock, some in enumerate(np.split(ids, 6)):  # few at once: what two parts, or workers, create counts twice
        train(clock, some)
    train(6, ids)
    assert np.all(rows(shard, *ids[:3], name="sums") != rows(shard, *ids[:3] + capacity, name="sums"))
    before = state(shard)
    with raises(errors.NoAddressSpace, table="sums"):
        shard.handle(push(*parts(ids + capacity // 2), seq=8, clock=7))
    assert state(shard) == before
    train(7, ids)
    assert shard.core.clock.failed is None


def test_rows_that_a_snapshot_reads_are_kept_as_they_were(shard):
    ids, values = draw(0, (20, 20, 20))
    shard.handle(push(pushed(values, (20, 20, 20), ids)))
    tables = shard.core.tables.all()
    before = [next(one.scan())[1] for one in tables]  # in the order of slots, as the image
    frozen = [one.freeze() for one in tables]
    shard.handle(push(pushed(values, (20, 20, 20), ids), seq=2))
    for one, image, expected in zip(tables, frozen, before, strict=True):
        slots = image.slots()
        assert np.array_equal(image.read(slots, image.block(len(slots))).rows, expected[slots])
        assert not np.array_equal(next(one.scan())[1], expected)
        one.thaw(image)
    twin = make_shard(*SPECS)
    for seq in (1, 2):
        twin.handle(push(*single(values, (20, 20, 20), ids), seq=seq))
    assert state(shard)[0] == state(twin)[0]


def test_a_log_has_a_bundle_with_its_ids_and_a_replay_the_same_bits(shard):
    log = HeldLog()
    logged = make_shard(log=log)
    for one in SPECS:
        logged.handle(Declare(one))
    ids, values = draw(3, (10, 5, 7))
    logged.handle(Pull(1, (bundle((10, 5, 7), ids, route=1),), epoch=1))
    logged.handle(push(pushed(values, (10, 5, 7), ids_of(), route=1)))
    events = [again(event) for event in log.events if isinstance(event, PushEvent)]
    assert [part.ids.tolist() for part in events[0].push.tables] == [ids.tolist()]
    for event in events:
        shard.core.apply(event)
    assert state(shard)[0] == state(logged)[0]


def test_tables_that_others_took_the_place_of_are_forgotten(shard):
    part = pushed(np.ones((5, DIM), np.float32))
    shard.handle(push(part))
    before = [weakref.ref(one) for one in shard.core.tables.all()]
    shard.core.tables.replace([shard.core.new_table(one) for one in SPECS])
    assert [one() for one in before] == [None] * 3
    shard.handle(push(part, seq=2))
    assert [one.rows for one in shard.status().tables] == [2, 0, 3]


def test_memory_of_remembered_bundles_is_bounded_by_their_members(monkeypatch):
    monkeypatch.setattr(tables_module, "_MOST_MEMBERS", 500)
    shard = make_shard(*(table(f"table.{number}", DIM) for number in range(50)))
    draw = np.random.default_rng(0)

    def pull(count):
        for _ in range(count):  # in any order, by names of their own
            members = tuple([f"table.{number}" for number in draw.permutation(50)])
            shard.handle(Pull(1, (bundle((0,) * 50, ids_of(), members),)))

    pull(1)
    tracemalloc.start()
    try:
        pull(109)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 60_000  # of 10 bundles; of all, by the names of messages, 605,000


def test_all_members_are_tables_that_a_request_names():
    both = TableIds("a", IDS), bundle()
    assert tables_of(Pull(1, both)) == ["a", *NAMES]
    assert tables_of(push(pushed(np.ones((5, DIM), np.float32)))) == list(NAMES)


def test_the_greeting_says_that_bundles_are_taken(shard):
    assert shard.greeting.bundles
    assert re.fullmatch(r"[0-9a-f]{16}", shard.greeting.instance)
