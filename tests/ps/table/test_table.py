"""The same claims over the compiled table and over its plain reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.proto import spec
from embershard.proto.errors import InvalidRequest, NoAddressSpace, SnapshotNotWritten, TableFull, WrongDim
from embershard.proto.reference import mix64
from embershard.ps.memory import MemoryBudget
from embershard.ps.table import table as module
from embershard.ps.table.hash_index import PAGE_LIMIT
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.reference import ReferenceTable
from embershard.ps.table.table import Table

DIMS = [1, 3, 5, 16, 17]
EDGE_IDS = np.array([0, -1, 1, np.iinfo(np.int64).min, np.iinfo(np.int64).max, 2**32, -(2**32)])
REGISTRY = OptimizerRegistry()


def table_spec(dim: int, optimizer: spec.Optimizer | None = None, **rest: object) -> spec.TableSpec:
    return spec.TableSpec(name="t", dim=dim, optimizer=optimizer or spec.Adagrad(lr=0.1), **rest)  # type: ignore[arg-type]


def compiled_table(table: spec.TableSpec) -> Table:
    return Table(table, REGISTRY.find(table.optimizer))


def reference_table(table: spec.TableSpec) -> ReferenceTable:
    return ReferenceTable(table, REGISTRY.find(table.optimizer))


def contents(table: Table | ReferenceTable) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    return {int(i): (w, s) for block in table.scan() for i, w, s in zip(*block, strict=True)}


@pytest.fixture(params=[compiled_table, reference_table], ids=["compiled", "reference"])
def make(request):
    return request.param


class TestTable:
    @pytest.mark.parametrize("dim", DIMS)
    def test_pull_of_unseen_ids_returns_first_values_and_creates_no_row(self, make, dim):
        table = make(table_spec(dim))
        rows = table.gather(EDGE_IDS)
        assert rows.shape == (len(EDGE_IDS), dim)
        assert np.array_equal(rows, table.gather(EDGE_IDS))
        assert len(np.unique(rows[:, 0])) == len(EDGE_IDS)
        assert table.num_rows == 0

    @pytest.mark.parametrize("dim", DIMS)
    def test_push_then_pull_returns_the_updated_row(self, make, dim):
        table = make(table_spec(dim, spec.SGD(lr=0.5)))
        before = table.gather(EDGE_IDS)
        gradients = np.arange(len(EDGE_IDS) * dim, dtype=np.float32).reshape(-1, dim)
        assert table.apply(EDGE_IDS, gradients) == (len(EDGE_IDS), 0)
        np.testing.assert_allclose(table.gather(EDGE_IDS), before - 0.5 * gradients, rtol=1e-6, atol=1e-6)
        assert table.num_rows == len(EDGE_IDS)

    def test_pull_and_push_of_no_ids_do_nothing(self, make):
        table = make(table_spec(3))
        none = np.empty(0, np.int64)
        assert table.gather(none).shape == (0, 3)
        assert table.apply(none, np.empty((0, 3), np.float32)) == (0, 0)
        table.load(none, np.empty((0, 3), np.float32))
        assert table.num_rows == 0

    def test_equal_ids_in_one_push_are_applied_in_order(self, make):
        once, twice = make(table_spec(3)), make(table_spec(3))
        gradients = np.array([[1, 2, 3], [-4, 5, -6], [7, -8, 9]], np.float32)
        once.apply(np.array([7, 8, 7]), gradients)
        for id_, gradient in zip([7, 8, 7], gradients, strict=True):
            twice.apply(np.array([id_]), gradient[None])
        assert np.array_equal(once.gather(np.array([7, 8])), twice.gather(np.array([7, 8])))
        assert once.num_rows == 2

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_rows_with_non_finite_gradients_are_skipped_counted_and_not_created(self, make, bad):
        table = make(table_spec(5))
        ids = np.arange(200)
        gradients = np.ones((200, 5), np.float32)
        gradients[::7, 4] = bad
        before = table.gather(ids)
        wrong = len(range(0, 200, 7))
        assert table.apply(ids, gradients) == (200 - wrong, wrong)
        assert table.num_rows == 200 - wrong
        changed = (table.gather(ids) != before).any(axis=1)
        assert np.array_equal(changed, np.arange(200) % 7 != 0)

    def test_the_largest_finite_gradient_is_applied(self, make):
        table = make(table_spec(2, spec.SGD(lr=1e-38), initializer=spec.Constant()))
        largest = np.full((1, 2), np.finfo(np.float32).max)
        assert table.apply(np.array([1]), largest) == (1, 0)

    def test_load_sets_weights_and_starts_the_state_anew(self, make):
        table = make(table_spec(3, spec.Adagrad(lr=0.1, initial_accumulator=0.25)))
        table.apply(np.array([1, 2]), np.ones((2, 3), np.float32))
        rows = np.arange(6, dtype=np.float32).reshape(2, 3)
        table.load(np.array([2, 3]), rows)
        assert np.array_equal(table.gather(np.array([2, 3])), rows)
        after = contents(table)
        assert set(after) == {1, 2, 3}
        assert np.array_equal(after[2][1], np.full(3, 0.25, np.float32))
        assert np.array_equal(after[1][1], np.full(3, 1.25, np.float32))

    def test_a_load_may_keep_the_state_of_rows_that_exist(self, make):
        table = make(table_spec(3, spec.Adagrad(lr=0.1, initial_accumulator=0.25)))
        table.apply(np.array([1]), np.ones((1, 3), np.float32))
        table.load(np.array([1, 2]), np.zeros((2, 3), np.float32), keep_state=True)
        after = contents(table)
        assert np.array_equal(after[1][0], np.zeros(3, np.float32))
        assert np.array_equal(after[1][1], np.full(3, 1.25, np.float32))
        assert np.array_equal(after[2][1], np.full(3, 0.25, np.float32))

    def test_lr_scale_multiplies_the_learning_rate_of_one_push(self, make):
        table = make(table_spec(1, spec.SGD(lr=0.5), initializer=spec.Constant(value=1.0)))
        table.apply(np.array([1]), np.ones((1, 1), np.float32), 0.5)
        table.apply(np.array([2]), np.ones((1, 1), np.float32))
        assert table.gather(np.array([1, 2])).tolist() == [[0.75], [0.5]]

    def test_clip_value_then_clip_norm_limit_a_gradient_row(self, make):
        table = make(table_spec(2, spec.SGD(lr=1.0, clip_value=4.0, clip_norm=1.0), initializer=spec.Constant()))
        table.apply(np.array([1, 2]), np.array([[3, -40], [0.3, 0.4]], np.float32))
        np.testing.assert_allclose(table.gather(np.array([1, 2])), [[-0.6, 0.8], [-0.3, -0.4]], rtol=1e-6)

    def test_the_space_of_ids_has_no_part_in_first_values(self, make):
        one, two = make(table_spec(4)), make(table_spec(4, id_space="shared"))
        assert np.array_equal(one.gather(EDGE_IDS), two.gather(EDGE_IDS))

    def test_another_seed_or_another_table_has_other_first_values(self, make):
        base = make(table_spec(4)).gather(EDGE_IDS)
        assert not (make(table_spec(4, seed=1)).gather(EDGE_IDS) == base).any()


class TestCompiledTable:
    @pytest.mark.parametrize("dim", DIMS)
    @pytest.mark.parametrize("kind", ["adagrad", "rowwise_adagrad", "sgd"])
    def test_it_says_the_same_as_the_reference(self, dim, kind):
        table = table_spec(dim, spec.Optimizer.of(kind, {"lr": 0.1, "clip_norm": 2.0, "weight_decay": 0.01}))
        fast, plain = compiled_table(table), reference_table(table)
        rng = np.random.default_rng(dim)
        for _ in range(4):
            ids = rng.integers(-150, 150, 300)
            gradients = rng.standard_normal((300, dim)).astype(np.float32)
            gradients[rng.random(300) < 0.05, 0] = np.nan
            assert fast.apply(ids, gradients, 0.7) == plain.apply(ids, gradients, 0.7)
        # the reference's fma rounds twice, which shows in the last bit, rarely
        everything = np.arange(-200, 200)
        np.testing.assert_allclose(fast.gather(everything), plain.gather(everything), rtol=2e-6, atol=1e-7)
        assert fast.num_rows == plain.num_rows
        assert set(contents(fast)) == set(contents(plain))

    @pytest.mark.parametrize("dim", DIMS)
    @pytest.mark.parametrize(
        "initializer", [spec.Constant(value=0.1), spec.Uniform(low=-2, high=3), spec.Normal(mean=1, std=0.3)]
    )
    def test_first_values_are_the_reference_s_to_the_bit(self, dim, initializer):
        table = table_spec(dim, initializer=initializer, seed=5)
        ids = np.concatenate([EDGE_IDS, np.arange(3000)])
        assert np.array_equal(compiled_table(table).gather(ids), reference_table(table).gather(ids))

    def test_first_values_are_the_same_after_a_row_exists(self):
        table = compiled_table(table_spec(6, spec.SGD(lr=0.0)))
        before = table.gather(EDGE_IDS)
        table.apply(EDGE_IDS, np.ones((len(EDGE_IDS), 6), np.float32))
        assert table.num_rows == len(EDGE_IDS)
        assert np.array_equal(table.gather(EDGE_IDS), before)

    def test_rows_stay_put_through_many_doublings(self):
        table = compiled_table(table_spec(1, spec.SGD(lr=1.0), initializer=spec.Constant()))
        rng = np.random.default_rng(1)
        ids = rng.permutation(np.arange(-1_500_000, 1_500_000) * 7919)
        values = rng.standard_normal((len(ids), 1)).astype(np.float32)
        for start in range(0, len(ids), 100_000):
            part = slice(start, start + 100_000)
            assert table.apply(ids[part], values[part]) == (100_000, 0)
        assert table.num_rows == len(ids)
        assert np.array_equal(table.gather(ids), -values)
        assert not table.gather(ids + 1).any()
        assert table.num_rows == len(ids)

    def test_rows_are_found_after_their_page_was_split_in_the_same_push(self):
        table = compiled_table(table_spec(1, spec.SGD(lr=1.0), initializer=spec.Constant()))
        old, new = np.arange(PAGE_LIMIT), np.arange(PAGE_LIMIT, PAGE_LIMIT + 3)
        table.apply(old, np.ones((len(old), 1), np.float32))
        both = np.concatenate([new, old[:50]])  # one block of the kernel: the first new row splits the only page
        table.apply(both, np.ones((len(both), 1), np.float32))
        assert table.num_rows == len(old) + len(new)
        assert (table.gather(old[:50]) == -2).all()

    def test_ids_of_one_bucket_grow_its_directory_alone(self):
        table = compiled_table(table_spec(1, spec.SGD(lr=1.0), initializer=spec.Constant()))
        candidates = np.arange(4_000_000)
        ids = candidates[mix64(candidates, table.spec.space_key) >> np.uint64(52) == 77]
        values = np.arange(1, len(ids) + 1, dtype=np.float32)[:, None]
        for _ in range(2):
            table.apply(ids, values)
        assert table.num_rows == len(ids)
        assert np.array_equal(table.gather(ids), -2 * values)
        assert table.nbytes < 1 << 20

    def test_a_table_of_three_ids_takes_kilobytes(self):
        table = compiled_table(table_spec(16))
        table.apply(np.arange(3), np.ones((3, 16), np.float32))
        assert table.nbytes < 64 << 10

    def test_scan_gives_every_row_once_in_slot_order(self):
        table = compiled_table(table_spec(3, spec.Adam(lr=0.1)))
        ids = np.random.default_rng(0).permutation(1000)
        table.apply(ids, np.ones((1000, 3), np.float32))
        blocks = list(table.scan(block=300))
        assert [len(block[0]) for block in blocks] == [300, 300, 300, 100]
        assert np.array_equal(np.concatenate([block[0] for block in blocks]), ids)
        assert np.array_equal(np.concatenate([block[1] for block in blocks]), table.gather(ids))
        assert blocks[0][2].shape == (300, 7)

    def test_read_only_and_strided_input_is_taken(self):
        table = compiled_table(table_spec(2, spec.SGD(lr=1.0), initializer=spec.Constant()))
        ids = np.frombuffer(np.arange(4).tobytes(), np.int64)
        table.apply(ids, np.frombuffer(np.ones(8, np.float32).tobytes(), np.float32).reshape(4, 2))
        assert (table.gather(np.arange(8)[::2]) == [[-1], [-1], [0], [0]]).all()

    def test_gather_writes_into_the_buffer_that_is_given(self):
        table = compiled_table(table_spec(2))
        out = np.empty((3, 2), np.float32)
        assert table.gather(np.arange(3), out) is out
        assert np.array_equal(out, table.gather(np.arange(3)))

    @pytest.mark.parametrize("shape", [(2, 3), (3, 2), (6,)])
    def test_rows_that_do_not_match_the_ids_name_the_table(self, shape):
        table = compiled_table(table_spec(3))
        for call in (table.apply, table.load):
            with pytest.raises(WrongDim, match="'t'"):
                call(np.arange(3), np.ones(shape, np.float32))
        with pytest.raises(WrongDim):
            table.gather(np.arange(3).reshape(1, 3))

    def test_ids_and_gradients_of_another_dtype_are_refused(self):
        table = compiled_table(table_spec(3))
        with pytest.raises(InvalidRequest, match="the ids must be int64, got float64"):
            table.gather(np.arange(3.0))
        with pytest.raises(InvalidRequest, match="the gradients must be float32, got float64"):
            table.apply(np.arange(3), np.ones((3, 3)))
        assert table.num_rows == 0

    def test_a_full_budget_is_named_with_its_figures_and_nothing_is_applied(self):
        budget = MemoryBudget(1 << 20)
        table = Table(table_spec(16), REGISTRY.find(spec.Adagrad(lr=0.1)), budget)
        table.apply(np.arange(4000), np.ones((4000, 16), np.float32))
        before = table.gather(np.arange(5))
        with pytest.raises(TableFull) as full:
            table.apply(np.arange(9000), np.ones((9000, 16), np.float32))
        assert full.value.fields["used_bytes"] == budget.used == table.nbytes
        assert full.value.fields["budget_bytes"] == budget.limit
        assert full.value.fields["asked_bytes"] >= 5000 * 4 * 34
        assert np.array_equal(table.gather(np.arange(5)), before)
        assert table.num_rows == 4000
        table.apply(np.arange(4000), np.ones((4000, 16), np.float32))  # these are there

    def test_the_budget_is_that_of_all_tables_and_gets_back_what_they_had(self):
        budget = MemoryBudget(64 << 20)
        tables = [Table(table_spec(16), REGISTRY.find(spec.Adagrad(lr=0.1)), budget) for _ in range(3)]
        for table in tables:
            table.apply(np.arange(1000), np.ones((1000, 16), np.float32))
        assert budget.used == sum(table.nbytes for table in tables)
        frozen = tables[0].freeze()
        assert budget.used == sum(table.nbytes for table in tables) + 10 * 1000
        tables[0].apply(np.arange(10), np.ones((10, 16), np.float32))
        assert budget.used == sum(table.nbytes for table in tables) + 10 * 1000 + 10 * 32 * 4
        tables[0].thaw(frozen)
        del frozen, table
        tables.clear()
        assert budget.used == 0

    def test_a_table_that_outgrows_its_addresses_moves_with_all_its_rows(self, monkeypatch):
        monkeypatch.setattr(module, "_FIRST_BYTES", 1 << 16)
        table, dim = compiled_table(table_spec(16)), 16
        first, count = table.capacity, 0
        frozen = None
        while table.capacity < 1000 * first:
            ids = np.arange(count, count + 5000)
            table.load(ids, np.repeat(ids.astype(np.float32), dim).reshape(-1, dim))
            count += 5000
            if count == 20_000:
                frozen = table.freeze()
        assert table.num_rows == count
        assert (table.gather(np.arange(count))[:, 0] == np.arange(count)).all()
        assert frozen is not None
        slots, starts = frozen.by_bucket()
        assert starts[-1] == 20_000
        block = frozen.read(slots, frozen.block(20_000))
        assert np.array_equal(block.rows[:, 0], block.ids)

    def test_twenty_thousand_tables_of_any_dim_find_addresses_on_a_machine_of_any_size(self):
        def size():
            return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

        def ranges():
            return len(Path("/proc/self/maps").read_text().splitlines())

        before, ranges_before = size(), ranges()
        budget, dims = MemoryBudget(2 << 40), [1, 3, 64, 1000, 65_536]
        made = [Table(spec_, REGISTRY.find(spec_.optimizer), budget) for spec_ in map(table_spec, 20 * dims)]
        assert size() - before < len(made) * 2**46 / 20_000
        assert ranges() - ranges_before <= 3 * len(made) + 20  # of 65,530

    def test_a_refused_reservation_shrinks_and_then_says_why(self, monkeypatch):
        real, refused = module.Arena, []

        def arena(nbytes):
            if nbytes > limit:
                refused.append(nbytes)
                raise OSError(12, "Cannot allocate memory")
            return real(nbytes)

        monkeypatch.setattr(module, "Arena", arena)
        limit = 40 << 20
        table = compiled_table(table_spec(16))
        table.apply(np.arange(100), np.ones((100, 16), np.float32))
        assert refused
        assert table.capacity * table.spec.dim * 4 < limit
        limit = 0
        with pytest.raises(NoAddressSpace, match="Cannot allocate memory"):
            compiled_table(table_spec(16))

    def test_a_table_that_cannot_move_keeps_its_rows_and_says_why(self, monkeypatch):
        monkeypatch.setattr(module, "_FIRST_BYTES", 1 << 16)
        table = compiled_table(table_spec(16))
        table.apply(np.arange(300), np.ones((300, 16), np.float32))
        before = table.gather(np.arange(300))

        def refuse(self, nbytes):
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(module.Arena, "grow", refuse)
        with pytest.raises(NoAddressSpace, match="Cannot allocate memory"):
            table.apply(np.arange(300, 9000), np.ones((8700, 16), np.float32))
        assert np.array_equal(table.gather(np.arange(300)), before)
        assert table.num_rows == 300

    def test_a_snapshot_gives_way_where_there_is_no_memory_for_its_copies(self):
        budget = MemoryBudget(1 << 20)
        table = Table(table_spec(16), REGISTRY.find(spec.Adagrad(lr=0.1)), budget)
        table.apply(np.arange(4000), np.ones((4000, 16), np.float32))
        frozen = table.freeze()
        table.apply(np.arange(4000), np.ones((4000, 16), np.float32))
        with pytest.raises(SnapshotNotWritten):
            frozen.by_bucket()

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def test_any_sequence_of_pushes_and_loads_equals_a_dict(self, data):
        dim = data.draw(st.integers(1, 4))
        table = table_spec(dim, spec.SGD(lr=1.0), initializer=spec.Constant(value=0.5))
        fast, plain = compiled_table(table), {}
        ids = st.one_of(st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1))
        for batch in data.draw(st.lists(st.tuples(st.booleans(), st.lists(ids, max_size=80)), max_size=6)):
            is_load, keys = batch
            rows = np.arange(len(keys) * dim, dtype=np.float32).reshape(-1, dim)
            for key, row in zip(keys, rows, strict=True):
                plain[key] = row if is_load else plain.get(key, np.full(dim, 0.5, np.float32)) - row
            (fast.load if is_load else fast.apply)(np.array(keys, np.int64), rows)
        found = contents(fast)
        assert found.keys() == plain.keys()
        assert all(np.array_equal(found[key][0], plain[key]) for key in plain)
