"""The same claims over the compiled table and over its plain reference; test_optim compares what optimizers do."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto import spec
from embershard.proto.arrays import mix64
from embershard.proto.errors import InvalidRequest, NoAddressSpace, SnapshotNotWritten, TableFull, WrongDim
from embershard.ps.memory import MemoryBudget
from embershard.ps.table import arena
from embershard.ps.table import table as module
from embershard.ps.table.hash_index import PAGE_LIMIT
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.reference import ReferenceTable
from embershard.ps.table.table import Table

DIMS = [1, 3, 5, 16, 17]
EDGE_IDS = np.array([0, -1, 1, np.iinfo(np.int64).min, np.iinfo(np.int64).max, 2**32, -(2**32)])
REGISTRY = OptimizerRegistry()
SUMMING = spec.SGD(lr=1.0)
ZERO = spec.Constant(value=0.0)


def compiled(dim, optimizer=spec.Adagrad(lr=0.1), budget=None, **fields):  # noqa: B008
    return Table(spec.TableSpec(name="t", dim=dim, optimizer=optimizer, **fields), REGISTRY.find(optimizer), budget)


def reference(dim, optimizer=spec.Adagrad(lr=0.1), **fields):  # noqa: B008
    return ReferenceTable(spec.TableSpec(name="t", dim=dim, optimizer=optimizer, **fields), REGISTRY.find(optimizer))


def counting(dim=1):
    """A table of zeros from which a push of ones takes one."""
    return compiled(dim, SUMMING, initializer=ZERO)


def push(table, ids, values=1.0, *rest):
    """Apply gradients, or rows that are this value everywhere."""
    return table.apply(ids, np.full((len(ids), table.spec.dim), values, np.float32), *rest)


def contents(table):
    return {int(i): (w, s) for block in table.scan() for i, w, s in zip(*block, strict=True)}


def refuse(*_):
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("make", [compiled, reference])
class TestTable:
    @pytest.mark.parametrize("dim", DIMS)
    def test_pull_creates_no_row_and_push_then_pull_returns_the_updated_row(self, make, dim):
        table = make(dim, spec.SGD(lr=0.5))
        before = table.gather(EDGE_IDS)
        assert before.shape == (len(EDGE_IDS), dim)
        assert np.array_equal(before, table.gather(EDGE_IDS))
        assert len(np.unique(before[:, 0])) == len(EDGE_IDS)
        assert table.num_rows == 0
        gradients = np.arange(len(EDGE_IDS) * dim, dtype=np.float32).reshape(-1, dim)
        assert table.apply(EDGE_IDS, gradients) == (len(EDGE_IDS), 0)
        np.testing.assert_allclose(table.gather(EDGE_IDS), before - 0.5 * gradients, rtol=1e-6, atol=1e-6)
        assert table.num_rows == len(EDGE_IDS)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_rows_with_non_finite_gradients_are_skipped_counted_and_not_created(self, make, bad):
        table, ids, gradients = make(5), np.arange(200), np.ones((200, 5), np.float32)
        gradients[::7, 4] = bad
        before, wrong = table.gather(ids), len(ids[::7])
        assert table.apply(ids, gradients) == (200 - wrong, wrong)
        assert table.num_rows == 200 - wrong
        assert np.array_equal((table.gather(ids) != before).any(axis=1), ids % 7 != 0)

    def test_the_largest_finite_gradient_is_applied(self, make):
        assert push(make(2, spec.SGD(lr=1e-38)), np.array([1]), np.finfo(np.float32).max) == (1, 0)

    @pytest.mark.parametrize("keep_state", [False, True])
    def test_load_sets_weights_and_starts_the_state_anew_or_keeps_it(self, make, keep_state):
        table = make(3, spec.Adagrad(lr=0.1, initial_accumulator=0.25))
        push(table, np.array([1, 2]))
        rows = np.arange(6, dtype=np.float32).reshape(2, 3)
        table.load(np.array([2, 3]), rows, keep_state=keep_state)
        assert np.array_equal(table.gather(np.array([2, 3])), rows)
        states = {id_: state.tolist() for id_, (_, state) in contents(table).items()}
        assert states == {1: [1.25] * 3, 2: [1.25 if keep_state else 0.25] * 3, 3: [0.25] * 3}

    def test_clip_value_then_clip_norm_limit_a_gradient_row(self, make):
        table = make(2, spec.SGD(lr=1.0, clip_value=4.0, clip_norm=1.0), initializer=ZERO)
        table.apply(np.array([1, 2]), np.array([[3, -40], [0.3, 0.4]], np.float32))
        np.testing.assert_allclose(table.gather(np.array([1, 2])), [[-0.6, 0.8], [-0.3, -0.4]], rtol=1e-6)

    def test_first_values_depend_on_the_seed_and_not_on_the_space_of_ids(self, make):
        base = make(4).gather(EDGE_IDS)
        assert np.array_equal(make(4, id_space="shared").gather(EDGE_IDS), base)
        assert not (make(4, seed=1).gather(EDGE_IDS) == base).any()


class TestAgainstTheReference:
    @pytest.mark.parametrize("dim", DIMS)
    @pytest.mark.parametrize(
        "initializer", [spec.Constant(value=0.1), spec.Uniform(low=-2, high=3), spec.Normal(mean=1, std=0.3)]
    )
    def test_first_values_are_its_own_to_the_bit_also_once_a_row_exists(self, dim, initializer):
        fields, ids = {"initializer": initializer, "seed": 5}, np.concatenate([EDGE_IDS, np.arange(3000)])
        fast, want = compiled(dim, spec.SGD(lr=0.0), **fields), reference(dim, **fields).gather(ids)
        assert np.array_equal(fast.gather(ids), want)
        push(fast, EDGE_IDS)
        assert fast.num_rows == len(EDGE_IDS)
        assert np.array_equal(fast.gather(ids), want)

    @settings(max_examples=40)
    @given(st.data())
    def test_any_sequence_of_pushes_and_loads_equals_a_dict(self, data):
        dim = data.draw(st.integers(1, 4))
        fast, plain = compiled(dim, SUMMING, initializer=spec.Constant(value=0.5)), {}
        ids = st.one_of(st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1))
        for is_load, keys in data.draw(st.lists(st.tuples(st.booleans(), st.lists(ids, max_size=80)), max_size=6)):
            rows = np.arange(len(keys) * dim, dtype=np.float32).reshape(-1, dim)
            for key, row in zip(keys, rows, strict=True):
                plain[key] = row if is_load else plain.get(key, np.full(dim, 0.5, np.float32)) - row
            (fast.load if is_load else fast.apply)(np.array(keys, np.int64), rows)
        found = contents(fast)
        assert found.keys() == plain.keys()
        assert all(np.array_equal(found[key][0], plain[key]) for key in plain)


class TestIndex:
    def test_rows_stay_put_through_many_doublings(self):
        table, rng = counting(), np.random.default_rng(1)
        ids = rng.permutation(np.arange(-600_000, 600_000) * 7919)
        values = rng.standard_normal((len(ids), 1)).astype(np.float32)
        for start in range(0, len(ids), 100_000):
            part = slice(start, start + 100_000)
            assert table.apply(ids[part], values[part]) == (100_000, 0)
        assert np.array_equal(table.gather(ids), -values)
        assert not table.gather(ids + 1).any()
        assert table.num_rows == len(ids)

    def test_rows_are_found_after_their_page_was_split_in_the_same_push(self):
        table, old = counting(), np.arange(PAGE_LIMIT)
        push(table, old)
        # one block of the kernel: the first new row splits the only page
        push(table, np.concatenate([np.arange(PAGE_LIMIT, PAGE_LIMIT + 3), old[:50]]))
        assert table.num_rows == len(old) + 3
        assert (table.gather(old[:50]) == -2).all()

    def test_ids_of_one_bucket_grow_its_directory_alone(self):
        table, candidates = counting(), np.arange(4_000_000)
        ids = candidates[mix64(candidates, table.spec.space_key) >> np.uint64(52) == 77]
        values = np.arange(1, len(ids) + 1, dtype=np.float32)[:, None]
        for _ in range(2):
            table.apply(ids, values)
        assert table.num_rows == len(ids)
        assert np.array_equal(table.gather(ids), -2 * values)
        assert table.nbytes < 1 << 20


class TestArrays:
    def test_scan_gives_every_row_once_in_slot_order(self):
        table, ids = compiled(3, spec.Adam(lr=0.1)), np.random.default_rng(0).permutation(1000)
        push(table, ids)
        blocks = list(table.scan(block=300))
        assert [len(block[0]) for block in blocks] == [300, 300, 300, 100]
        assert np.array_equal(np.concatenate([block[0] for block in blocks]), ids)
        assert np.array_equal(np.concatenate([block[1] for block in blocks]), table.gather(ids))
        assert blocks[0][2].shape == (300, 7)

    def test_read_only_and_strided_input_is_taken_and_the_buffer_that_is_given_written(self):
        table, out = counting(2), np.empty((4, 2), np.float32)
        ids = np.frombuffer(np.arange(4).tobytes(), np.int64)
        table.apply(ids, np.frombuffer(np.ones(8, np.float32).tobytes(), np.float32).reshape(4, 2))
        assert table.gather(np.arange(8)[::2], out) is out
        assert (out == [[-1], [-1], [0], [0]]).all()

    @pytest.mark.parametrize("shape", [(2, 3), (3, 2), (6,)])
    def test_rows_that_do_not_match_the_ids_name_the_table(self, shape):
        table = compiled(3)
        for call in (table.apply, table.load):
            with pytest.raises(WrongDim, match="'t'"):
                call(np.arange(3), np.ones(shape, np.float32))
        with pytest.raises(WrongDim):
            table.gather(np.arange(3).reshape(1, 3))

    def test_ids_and_gradients_of_another_dtype_are_refused(self):
        table = compiled(3)
        with pytest.raises(InvalidRequest, match="the ids must be int64, got float64"):
            table.gather(np.arange(3.0))
        with pytest.raises(InvalidRequest, match="the gradients must be float32, got float64"):
            table.apply(np.arange(3), np.ones((3, 3)))
        assert table.num_rows == 0


class TestMemory:
    def test_a_full_budget_is_named_with_its_figures_and_nothing_is_applied(self):
        budget = MemoryBudget(1 << 20)
        table, ids = compiled(16, budget=budget), np.arange(4000)
        push(table, ids)
        before = table.gather(ids)
        with pytest.raises(TableFull) as full:
            push(table, np.arange(9000))
        assert full.value.fields["used_bytes"] == budget.used == table.nbytes
        assert full.value.fields["budget_bytes"] == budget.limit
        assert full.value.fields["asked_bytes"] >= 5000 * 4 * 34
        assert np.array_equal(table.gather(ids), before)
        assert table.num_rows == 4000
        frozen = table.freeze()
        push(table, ids)  # these are there
        with pytest.raises(SnapshotNotWritten):  # it gives way where there is no memory for its copies
            frozen.by_bucket()

    def test_the_budget_is_that_of_all_tables_and_gets_back_what_they_had(self):
        budget = MemoryBudget(64 << 20)
        tables = [compiled(16, budget=budget) for _ in range(3)]
        for table in tables:
            push(table, np.arange(1000))
        frozen = tables[0].freeze()
        assert budget.used == sum(table.nbytes for table in tables) + 14 * 1000
        push(tables[0], np.arange(10))
        assert budget.used == sum(table.nbytes for table in tables) + 14 * 1000 + 10 * 32 * 4
        tables[0].thaw(frozen)
        del frozen, table
        tables.clear()
        assert budget.used == 0

    def test_a_table_of_three_ids_takes_kilobytes(self):
        table = compiled(16)
        push(table, np.arange(3))
        assert table.nbytes < 64 << 10

    def test_an_empty_table_of_a_wide_optimizer_counts_the_state_that_it_keeps_for_new_rows(self):
        narrow, wide = (compiled(dim, spec.Adam(lr=0.1)) for dim in (16, 65_536))
        assert wide.nbytes - narrow.nbytes == 2 * 4 * (65_536 - 16)
        with pytest.raises(TableFull):
            compiled(65_536, spec.Adam(lr=0.1), MemoryBudget(256 << 10))

    def test_a_table_that_outgrows_its_addresses_moves_with_all_its_rows(self, monkeypatch):
        monkeypatch.setattr(module, "_FIRST_BYTES", 1 << 16)
        table, dim, count = compiled(16), 16, 0
        first = table.capacity
        while table.capacity < 1000 * first:
            ids = np.arange(count, count + 5000)
            table.load(ids, np.repeat(ids.astype(np.float32), dim).reshape(-1, dim))
            count += 5000
            if count == 20_000:
                frozen = table.freeze()
        assert table.num_rows == count
        assert (table.gather(np.arange(count))[:, 0] == np.arange(count)).all()
        slots, starts = frozen.by_bucket()
        assert starts[-1] == 20_000
        block = frozen.read(slots, frozen.block(20_000))
        assert np.array_equal(block.rows[:, 0], block.ids)

    def test_twenty_thousand_tables_of_any_dim_find_addresses_on_a_machine_of_any_size(self):
        def taken():
            pages, maps = (Path(f"/proc/self/{name}").read_text() for name in ("statm", "maps"))
            return np.array([int(pages.split()[0]) * 4096, len(maps.splitlines())])

        compiled(1)  # loads the kernels, which take address ranges of their own
        before, budget = taken(), MemoryBudget(2 << 40)
        made = [compiled(dim, budget=budget) for dim in 20 * [1, 3, 64, 1000, 65_536]]
        size, ranges = taken() - before
        assert size < len(made) * 2**46 / 20_000
        assert ranges <= 3 * len(made) + 20  # of 65,530

    def test_a_refused_reservation_shrinks_and_then_says_why(self, monkeypatch):
        real, limit, refused = module.Arena, 40 << 20, []

        def arena(nbytes):
            if nbytes > limit:
                refused.append(nbytes)
                refuse()
            return real(nbytes)

        monkeypatch.setattr(module, "Arena", arena)
        table = compiled(16)
        push(table, np.arange(100))
        assert refused
        assert table.capacity * table.spec.dim * 4 < limit
        limit = 0
        with pytest.raises(NoAddressSpace, match="Cannot allocate memory"):
            compiled(16)

    def test_a_table_that_cannot_move_keeps_its_rows_and_says_why(self, monkeypatch):
        monkeypatch.setattr(module, "_FIRST_BYTES", 1 << 16)
        table, ids = compiled(16), np.arange(300)
        push(table, ids)
        before = table.gather(ids)
        monkeypatch.setattr(module.Arena, "grow", refuse)
        with pytest.raises(NoAddressSpace, match="Cannot allocate memory"):
            push(table, np.arange(300, 9000))
        assert np.array_equal(table.gather(ids), before)
        assert table.num_rows == 300


def test_rows_restored_while_a_thread_takes_their_memory_are_what_was_given(monkeypatch):
    monkeypatch.setattr(arena, "_FEW_BYTES", 0)
    monkeypatch.setattr(arena, "_POPULATED_BYTES", 1 << 16)
    table, rng = compiled(4), np.random.default_rng(0)
    ids, rows, states = (
        np.arange(50_000),
        rng.standard_normal((50_000, 4), np.float32),
        np.ones((50_000, 4), np.float32),
    )
    push(table, np.array([-1]))
    with table.filling(len(ids)):
        for part in np.array_split(np.arange(len(ids)), 20):
            table.restore(ids[part], rows[part], states[part])
    assert np.array_equal(table.gather(ids), rows)
    assert np.array_equal(table.records(ids)[1], states)
    assert table.num_rows == len(ids) + 1
    assert not any(thread.name == "populate" for thread in threading.enumerate())


@pytest.mark.parametrize("num_rows", [0, 1, 448, 449, 5_000, 500_000])
def test_rows_are_found_in_an_index_that_is_as_wide_as_they_need_from_the_first_on(num_rows):
    tables, ids = (compiled(1), compiled(1)), np.arange(num_rows) * 7
    values = np.arange(num_rows, dtype=np.float32)[:, None]
    with tables[0].filling(num_rows):
        for table in tables:
            table.restore(ids, values, values)
    more = np.arange(2_000) * 7 + 3
    for table in tables:
        push(table, more)
        assert np.array_equal(table.gather(ids), values)
        assert table.num_rows == num_rows + len(more)
        assert not table.count_missing(np.concatenate([ids, more]))
    assert tables[0].nbytes <= 1.2 * tables[1].nbytes + 10_000, "the index takes more memory than one that grew"


def test_an_error_while_rows_are_restored_ends_the_thread_that_takes_memory(monkeypatch):
    monkeypatch.setattr(arena, "_FEW_BYTES", 0)
    with pytest.raises(KeyError), compiled(4).filling(10**6):
        raise KeyError
    assert not any(thread.name == "populate" for thread in threading.enumerate())


def test_the_first_pull_of_a_process_loads_no_kernel():
    code = """
import numpy as np
from embershard.proto.compiled import jit
from embershard.proto.spec import SGD, TableSpec
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
table = Table(TableSpec(name="t", dim=2, optimizer=SGD(lr=1.0)), OptimizerRegistry().find(SGD(lr=1.0)))
jit._FirstCall.load = None
print(table.gather(np.arange(3)).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "(3, 2)\n", done.stderr
