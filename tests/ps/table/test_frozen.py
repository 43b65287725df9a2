"""What another thread reads of a table that was frozen: its rows at that moment, whatever is pushed since."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto import spec
from embershard.proto.reference import mix64
from embershard.ps.table import frozen
from embershard.ps.table.frozen import CopyOnWriteRows
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table

REGISTRY = OptimizerRegistry()
OPTIMIZERS = [spec.SGD(lr=0.1), spec.Adagrad(lr=0.1), spec.RowWiseAdagrad(lr=0.1), spec.Adam(lr=0.1)]
Rows = dict[int, tuple[bytes, bytes]]


def make(dim: int = 3, optimizer: spec.Optimizer = OPTIMIZERS[1]) -> Table:
    table = spec.TableSpec(name="t", dim=dim, optimizer=optimizer)
    return Table(table, REGISTRY.find(optimizer))


def push(table: Table, ids: np.ndarray, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    table.apply(ids.astype(np.int64), rng.standard_normal((len(ids), table.spec.dim)).astype(np.float32))


def contents(table: Table) -> Rows:
    return {int(i): (w.tobytes(), s.tobytes()) for block in table.scan() for i, w, s in zip(*block, strict=True)}


def read(rows: CopyOnWriteRows, slots: np.ndarray | None = None) -> Rows:
    slots = rows.by_bucket()[0] if slots is None else slots
    block = rows.read(slots, rows.block(len(slots)))
    return {int(i): (w.tobytes(), s.tobytes()) for i, w, s in zip(*block, strict=True)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
@pytest.mark.parametrize("dim", [1, 3, 16, 17])
def test_a_frozen_table_reads_as_it_was_whatever_is_written_since(dim, optimizer):
    table = make(dim, optimizer)
    ids = np.arange(-500, 500)
    push(table, ids)
    then = contents(table)
    rows = table.freeze()
    push(table, np.arange(0, 900), seed=1)  # half of them are new
    table.add(np.arange(-300, -200), np.ones((100, dim), np.float32))
    table.load(np.arange(-450, -350), np.zeros((100, dim), np.float32))
    push(table, np.arange(0, 400), seed=2)
    assert read(rows) == then
    assert rows.num_rows == 1000
    assert rows.num_kept == 700


def test_rows_that_were_read_are_not_copied_any_more():
    table = make()
    ids = np.arange(1000)
    push(table, ids)
    then = contents(table)
    rows = table.freeze()
    slots, _ = rows.by_bucket()
    seen = read(rows, slots[:600])
    push(table, ids, seed=1)
    assert rows.num_kept == 400
    assert {**seen, **read(rows, slots[600:])} == then


def test_a_thawed_table_copies_nothing():
    table = make()
    push(table, np.arange(10))
    rows = table.freeze()
    table.thaw(rows)
    push(table, np.arange(10), seed=1)
    assert rows.num_kept == 0


def test_thawing_for_an_earlier_reader_leaves_the_present_one():
    table = make()
    push(table, np.arange(10))
    early, late = table.freeze(), table.freeze()
    table.thaw(early)
    push(table, np.arange(10), seed=1)
    assert late.num_kept == 10


def test_an_empty_table_can_be_frozen():
    table = make()
    rows = table.freeze()
    push(table, np.arange(5))
    slots, starts = rows.by_bucket()
    assert (len(slots), starts[-1], read(rows)) == (0, 0, {})


def test_slots_come_by_bucket_and_in_the_order_of_their_creation_within_one():
    table = make()
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 20_000)
    push(table, ids)
    rows = table.freeze()
    slots, starts = rows.by_bucket()
    buckets = (mix64(ids, table.spec.space_key) >> np.uint64(52)).astype(np.int64)
    assert np.array_equal(slots, np.argsort(buckets, kind="stable"))
    assert np.array_equal(np.diff(starts), np.bincount(buckets, minlength=4096))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2**16), st.integers(1, 60)), max_size=12), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_any_order_of_pushes_and_reads_gives_the_frozen_rows(steps, size):
    table = make(dim=2)
    push(table, np.arange(size))
    then = contents(table)
    rows = table.freeze()
    slots, _ = rows.by_bucket()
    seen: Rows = {}
    done = 0
    for is_read, seed, count in steps:
        if is_read:
            seen |= read(rows, slots[done : done + count])
            done = min(size, done + count)
        else:
            push(table, np.random.default_rng(seed).integers(0, 60, count), seed)
    assert {**seen, **read(rows, slots[done:])} == then


def test_a_reader_in_another_thread_sees_one_moment(monkeypatch):
    monkeypatch.setattr(frozen, "_SLICE_BYTES", 256)  # many turns of the lock
    table = make(dim=4)
    ids = np.arange(20_000)
    push(table, ids)
    then = contents(table)
    rows = table.freeze()
    found: list[Rows] = []
    reader = threading.Thread(target=lambda: found.append(read(rows)))
    reader.start()
    seed = 0
    while reader.is_alive():
        seed += 1
        push(table, np.random.default_rng(seed).integers(0, 20_000, 500), seed)
    reader.join()
    assert found[0] == then


def test_restored_rows_have_their_weights_and_states_and_go_on_as_the_others():
    one, other = make(optimizer=spec.Adam(lr=0.1)), make(optimizer=spec.Adam(lr=0.1))
    ids = np.arange(1000)
    push(one, ids)
    for block in one.scan(300):
        other.restore(*block)
    assert contents(other) == contents(one)
    for table in (one, other):
        push(table, np.arange(500, 1500), seed=1)
    assert contents(other) == contents(one)
