"""What another thread reads of a table that was frozen: its rows at that moment, whatever is pushed since."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto import spec
from embershard.proto.arrays import mix64
from embershard.ps.table import frozen
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table

REGISTRY = OptimizerRegistry()
OPTIMIZERS = [spec.SGD(lr=0.1), spec.Adagrad(lr=0.1), spec.RowWiseAdagrad(lr=0.1), spec.Adam(lr=0.1)]


def make(count=0, dim=3, optimizer=OPTIMIZERS[1]):
    """A table with rows of so many ids."""
    table = Table(spec.TableSpec(name="t", dim=dim, optimizer=optimizer), REGISTRY.find(optimizer))
    push(table, np.arange(count))
    return table


def push(table, ids, seed=0):
    rng = np.random.default_rng(seed)
    table.apply(ids.astype(np.int64), rng.standard_normal((len(ids), table.spec.dim)).astype(np.float32))


def contents(*blocks):
    return {int(i): (w.tobytes(), s.tobytes()) for block in blocks for i, w, s in zip(*block, strict=True)}


def read(rows, slots=None):
    slots = rows.by_bucket()[0] if slots is None else slots
    return contents(rows.read(slots, rows.block(len(slots))))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
@pytest.mark.parametrize("dim", [1, 3, 16, 17])
def test_a_frozen_table_reads_as_it_was_whatever_is_written_since(dim, optimizer):
    table = make(1000, dim, optimizer)
    then, rows = contents(*table.scan()), table.freeze()
    push(table, np.arange(500, 1400), seed=1)  # half of them are new
    table.add(np.arange(200, 300), np.ones((100, dim), np.float32))
    table.load(np.arange(50, 150), np.zeros((100, dim), np.float32))
    push(table, np.arange(500, 900), seed=2)
    assert read(rows) == then
    assert (rows.num_rows, rows.num_kept) == (1000, 700)


def test_two_readers_see_a_table_each_at_its_own_moment():
    table = make(1000)
    first, rows = contents(*table.scan()), table.freeze()
    push(table, np.arange(300, 1200), seed=1)
    second, later = contents(*table.scan()), table.freeze()
    push(table, np.arange(0, 1300), seed=2)
    table.reserve(10**7)  # both move
    push(table, np.arange(0, 1300), seed=3)
    assert (read(rows), read(later)) == (first, second)
    assert (rows.num_kept, later.num_kept) == (1000, 1200)


def test_rows_that_were_read_or_thawed_are_not_copied_any_more():
    table = make(1000)
    then, thawed, rows = contents(*table.scan()), table.freeze(), table.freeze()
    table.thaw(thawed)  # leaves the other one
    slots, _ = rows.by_bucket()
    seen = read(rows, slots[:600])
    push(table, np.arange(1000), seed=1)
    assert (rows.num_kept, thawed.num_kept) == (400, 0)
    assert {**seen, **read(rows, slots[600:])} == then
    table.thaw(rows)
    push(table, np.arange(1000), seed=2)
    assert rows.num_kept == 400


def test_an_empty_table_can_be_frozen():
    table = make()
    rows = table.freeze()
    push(table, np.arange(5))
    slots, starts = rows.by_bucket()
    assert (len(slots), starts[-1], read(rows)) == (0, 0, {})


def test_slots_come_by_bucket_and_in_the_order_of_their_creation_within_one():
    table, ids = make(), np.random.default_rng(0).integers(-(2**62), 2**62, 20_000)
    push(table, ids)
    rows = table.freeze()
    slots, starts = rows.by_bucket()
    # not those of `ids`: in a block of 64, ids whose fingerprint another one has get their slots last
    found = rows.read(slots, rows.block(len(slots))).ids
    buckets = (mix64(found, table.spec.space_key) >> np.uint64(52)).astype(np.int64)
    assert np.array_equal(np.sort(found), np.sort(ids))
    assert np.array_equal(np.lexsort((slots, buckets)), np.arange(len(ids)))
    assert np.array_equal(np.diff(starts), np.bincount(buckets, minlength=4096))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2**16), st.integers(1, 60)), max_size=12), st.integers(1, 40))
@settings(max_examples=60)
def test_any_order_of_pushes_and_reads_gives_the_frozen_rows(steps, size):
    table = make(size, dim=2)
    then, rows = contents(*table.scan()), table.freeze()
    slots, seen, done = rows.by_bucket()[0], {}, 0
    for is_read, seed, count in steps:
        if is_read:
            seen |= read(rows, slots[done : done + count])
            done = min(size, done + count)
        else:
            push(table, np.random.default_rng(seed).integers(0, 60, count), seed)
    assert {**seen, **read(rows, slots[done:])} == then


def test_a_reader_in_another_thread_sees_one_moment(monkeypatch):
    monkeypatch.setattr(frozen, "_SLICE_BYTES", 256)  # many turns of the lock
    table, found, seed = make(20_000, dim=4), [], 0
    then, rows = contents(*table.scan()), table.freeze()
    reader = threading.Thread(target=lambda: found.append(read(rows)))
    reader.start()
    while reader.is_alive():
        seed += 1
        push(table, np.random.default_rng(seed).integers(0, 20_000, 500), seed)
    reader.join()
    assert found == [then]


def test_restored_rows_have_their_weights_and_states_and_go_on_as_the_others():
    one, other = make(1000, optimizer=OPTIMIZERS[3]), make(optimizer=OPTIMIZERS[3])
    for block in one.scan(300):
        other.restore(*block)
    assert contents(*other.scan()) == contents(*one.scan())
    for table in (one, other):
        push(table, np.arange(500, 1500), seed=1)
    assert contents(*other.scan()) == contents(*one.scan())


@given(st.lists(st.lists(st.integers(0, 200), max_size=150), min_size=1, max_size=4), st.sampled_from([1, 4, 17]))
@settings(max_examples=30, deadline=None)
def test_restored_rows_are_the_last_ones_of_their_ids_whether_these_are_new_or_there_or_twice_in_a_call(calls, dim):
    table = make(100, dim)
    model = contents(*table.scan())
    for number, ids in enumerate(calls):
        rng = np.random.default_rng(number)
        rows = rng.standard_normal((len(ids), dim)).astype(np.float32)
        state = rng.standard_normal((len(ids), table.num_state)).astype(np.float32)
        table.restore(np.array(ids, np.int64), rows, state)
        model.update({i: (row.tobytes(), one.tobytes()) for i, row, one in zip(ids, rows, state, strict=True)})
    assert contents(*table.scan()) == model
    assert table.num_rows == len(model)
