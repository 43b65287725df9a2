"""Rows that are removed are as if they had never been, and their slots serve new ones."""

import numpy as np
import pytest

from embershard.proto import spec
from embershard.ps.memory import MemoryBudget
from embershard.ps.table.changes import ChangeTracker
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table

ADAGRAD = spec.Adagrad(lr=0.1)
DIM = 3


def make(budget=None):
    made = spec.TableSpec(name="t", dim=DIM, optimizer=ADAGRAD, initializer=spec.Normal(), seed=4)
    return Table(made, OptimizerRegistry().find(ADAGRAD), budget)


def push(table, ids, seed=0):
    values = np.random.default_rng(seed).standard_normal((len(ids), DIM)).astype(np.float32)
    table.apply(np.asarray(ids, np.int64), values)


def contents(*blocks):
    return {int(i): (w.tobytes(), s.tobytes()) for block in blocks for i, w, s in zip(*block, strict=True)}


def read(rows):
    slots, starts = rows.by_bucket()
    assert starts[-1] == len(slots) == rows.num_rows
    return contents(rows.read(slots, rows.block(len(slots))))


@pytest.mark.parametrize("seed", range(5))
def test_a_table_from_which_rows_are_removed_is_one_that_never_had_them(seed):
    table, model, frozen, rng = make(), {}, None, np.random.default_rng(seed)
    for number, step in enumerate(rng.choice(["push", "remove", "freeze", "read"], 30)):
        ids = rng.choice(3000, rng.integers(1, 1000), replace=False).tolist()
        if step == "push":
            fresh, known = make(), [id_ for id_ in ids if id_ in model]  # a row that was removed begins anew
            if known:
                fresh.restore(np.array(known), *map(np.stack, zip(*map(model.get, known), strict=True)))
            for one in (table, fresh):
                push(one, ids, number)
            model |= dict(zip(ids, zip(*fresh.records(np.array(ids)), strict=True), strict=True))
        elif step == "remove":
            assert table.remove(np.array(ids)) == len(model.keys() & set(ids))
            model = {id_: row for id_, row in model.items() if id_ not in ids}
        elif step == "freeze":
            frozen = table.freeze(), {i: (row.tobytes(), state.tobytes()) for i, (row, state) in model.items()}
        elif frozen is not None:
            assert read(frozen[0]) == frozen[1]
            table.thaw(frozen[0])
            frozen = None
        assert table.num_rows == len(model) <= table.num_slots
        assert contents(*table.scan(block=100)) == {i: (r.tobytes(), s.tobytes()) for i, (r, s) in model.items()}


def test_a_removed_row_reads_as_its_first_value_and_begins_with_a_first_state():
    table, fresh, ids = make(), make(), np.arange(1000)
    push(table, ids)
    assert table.remove(ids[::2]) == 500
    assert table.remove(ids[::2]) == 0
    assert (table.num_rows, table.num_slots) == (500, 1000)
    for after in (table.gather, lambda ids: (push(table, ids, 1), push(fresh, ids, 1), table.gather(ids))[2]):
        np.testing.assert_array_equal(after(ids[::2]), fresh.gather(ids[::2]))


def test_slots_and_memory_of_removed_rows_are_used_again_but_not_while_a_snapshot_reads():
    budget = MemoryBudget(2**62)
    table = make(budget)
    push(table, range(1000))
    budget.limit = budget.used + 60_000  # for pages of the index, not for as many records once more
    for start in range(0, 10_000, 1000):
        table.remove(np.arange(start, start + 1000))
        push(table, range(start + 1000, start + 2000))
    assert table.num_slots == 1000
    budget.limit = 2**62
    frozen = table.freeze()
    then = contents(*table.scan())
    table.remove(np.arange(10_000, 10_500))
    push(table, range(500))
    assert table.num_slots == 1500
    assert read(frozen) == then
    table.thaw(frozen)
    push(table, range(500, 1000))
    assert (table.num_slots, table.num_rows) == (1500, 1500)


def test_who_reads_what_changed_is_told_of_removed_rows():
    table, ids, version = make(), np.arange(10), 7
    push(table, ids)
    table.changes = ChangeTracker(DIM, lambda: version)
    table.changes.watch(ids)
    version += 1
    table.remove(ids[3:5])
    assert table.changes.since(ids, 8).tolist() == [*range(9, 15)]


@pytest.mark.parametrize("count", [0, 1])
def test_to_remove_what_is_not_there_changes_nothing(count):
    table = make()
    push(table, range(count))
    assert table.remove(np.arange(5, 9)) == 0
    assert table.num_rows == table.num_slots == count
