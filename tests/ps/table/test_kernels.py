"""First values, the index's edge cases, and the intrinsics."""

import statistics

import numba
import numpy as np
import pytest

from embershard.proto import spec
from embershard.proto.arrays import mix64
from embershard.proto.compiled.intrinsics import first_match, fma
from embershard.proto.optim import initial_rows
from embershard.ps.table import hash_index
from embershard.ps.table.arena import Arena
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table

# bit patterns of float32: a row's first values are part of what machines must agree on
GOLDEN_UNIFORM = [[3173507269, 1045110930, 1057931806], [1053107925, 1060769965, 3194635248]]
GOLDEN_NORMAL = [[3176300315, 1048617390, 1061464762], [1057015564, 1066156525, 3197427751]]


def sgd_table(dim=1, initializer=spec.Constant(), **fields):  # noqa: B008
    optimizer = spec.SGD(lr=1.0)
    table = spec.TableSpec(**{"name": "t", "dim": dim, "optimizer": optimizer, "initializer": initializer, **fields})
    return Table(table, OptimizerRegistry().find(optimizer))


@pytest.fixture
def table():
    """Rows of one zero each, from which `push` takes one."""
    return sgd_table()


def push(table, ids):
    table.apply(ids, np.ones((len(ids), 1), np.float32))


class TestFirstValues:
    @pytest.mark.parametrize(
        ("initializer", "bits"), [(spec.Uniform(low=-1, high=1), GOLDEN_UNIFORM), (spec.Normal(), GOLDEN_NORMAL)]
    )
    def test_golden_values(self, initializer, bits):
        rows = sgd_table(3, initializer, name="golden", seed=7).gather(np.array([0, -1]))
        assert rows.view(np.uint32).tolist() == bits

    def test_normal_quantile_and_minus_log_are_what_they_are_called(self):
        words = np.unique(np.random.default_rng(0).integers(0, 2**32, 3000))
        words = np.concatenate([[0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1], words]).astype(np.uint64)
        exact = [statistics.NormalDist().inv_cdf((int(word) + 0.5) / 2**32) for word in words]
        np.testing.assert_allclose(initial_rows.normal_quantile(words), exact, rtol=3e-7, atol=1e-9)
        k = np.unique(np.geomspace(1, 2**32, 5000).astype(np.uint64))
        np.testing.assert_allclose(initial_rows.minus_log(k), -np.log(k / 2.0**33), rtol=1e-12)

    def test_normal_values_have_their_moments(self):
        rows = sgd_table(16, spec.Normal(mean=2, std=0.5)).gather(np.arange(200_000)).astype(np.float64)
        z = (rows - 2) / 0.5
        assert abs(z.mean()) < 3e-3
        assert abs(z.std() - 1) < 3e-3
        assert abs((z**3).mean()) < 1e-2
        assert abs((z**4).mean() - 3) < 3e-2
        assert abs(np.corrcoef(z.T) - np.eye(16)).max() < 1.2e-2  # neither do positions of a row go together
        assert abs(np.corrcoef(z[:-1, 0], z[1:, 0])[0, 1]) < 1e-2  # nor neighbouring ids

    def test_uniform_values_fill_their_range_without_its_end(self):
        rows = sgd_table(8, spec.Uniform(low=1.0, high=1.0000005)).gather(np.arange(10_000))
        assert rows.min() == 1.0
        assert rows.max() == np.nextafter(np.float32(1.0000005), np.float32(0))
        spread = sgd_table(8, spec.Uniform(low=-3, high=1)).gather(np.arange(50_000))
        np.testing.assert_allclose(np.quantile(spread, [0.25, 0.5, 0.75]), [-2, -1, 0], atol=0.03)
        assert (sgd_table(3, spec.Uniform(low=0.25, high=0.25)).gather(np.arange(9)) == 0.25).all()


def unmix(h, key):
    """The id whose hash is h."""
    z = h ^ h >> 31 ^ h >> 62
    z = z * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z = z ^ z >> 27 ^ z >> 54
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    z = (z ^ z >> 30 ^ z >> 60) ^ int(key)
    return z - 2**64 if z >= 2**63 else z


class TestIndex:
    def test_ids_with_one_fingerprint_are_told_apart(self, table):
        one, two = (
            np.array([unmix(n << 52 | middle << 32 | n * 31, table._index_key) for n in range(100)])
            for middle in (1, 2)
        )
        push(table, one)
        assert not table.gather(two).any()
        push(table, np.stack([one, two, two]).T.ravel())  # a row, then twice its twin, in one push
        assert (table.gather(np.concatenate([one, two])) == -2).all()
        assert table.num_rows == 2 * len(one)

    def test_the_fingerprint_0_is_not_taken_for_a_free_cell(self, table):
        zero = np.array([unmix(number << 52, table._index_key) for number in range(40)])
        assert (mix64(zero, int(table._index_key)) & np.uint64(0xFFFFFFFF) == 0).all()
        for _ in range(2):
            assert not table.gather(zero[20:]).any()
            push(table, zero[:20])
        assert (table.gather(zero[:20]) == -2).all()
        assert table.num_rows == 20

    def test_ids_made_to_collide_with_the_index_key_at_hand_do_not_end_in_a_loop(self, table):
        same = np.array([unmix(5 << 52 | number << 32 | 77, table._index_key) for number in range(600)])
        with pytest.raises(AssertionError, match="index"):
            push(table, same)
        assert table.num_rows == hash_index.PAGE_LIMIT
        assert (table.gather(same[:100]) == -1).all()

    def test_ids_that_collide_in_the_public_hash_are_rows_like_others(self, table):
        hashes = [*(5 << 52 | number << 32 | 77 for number in range(1200)), *(5 << 52 | n for n in range(100, 1300))]
        same = np.array([unmix(h, table.spec.space_key) for h in hashes])
        push(table, same)
        assert table.num_rows == len(same)
        assert (table.gather(same) == -1).all()

    def test_a_page_is_split_into_two_that_share_its_cells_and_ids_without_a_row_are_counted(self, table):
        ids = np.arange(hash_index.PAGE_LIMIT + 1)
        push(table, ids[:-1])
        before = table.nbytes
        push(table, ids[-1:])
        assert 4096 < table.nbytes - before < 5000
        assert (table.gather(ids) == -1).all()
        assert [table.count_missing(some) for some in (ids[-10:] + 4, ids, ids[:0])] == [4, 0, 0]


class TestIntrinsics:
    def test_fma_rounds_once(self):
        fused = numba.njit(lambda a, b, c: fma(a, b, c))
        a, c = np.float32(1 + 2**-12), np.float32(-1)
        assert fused(a, a, c) == fma(a, a, c) == np.float32(2**-11 + 2**-24)
        assert a * a + c != np.float32(2**-11 + 2**-24)

    def test_first_match_is_the_first_cell_with_the_high_word(self):
        search = numba.njit(lambda cells, start, high: first_match(cells, start, high))
        cells = Arena(4096).array(np.uint64)[:24]
        for place in (*range(8), None):
            cells[:] = np.arange(24) + (3 << 32)
            if place is not None:
                cells[8 + place :] = (5 << 32) + 1
            assert search(cells, np.uint64(8), np.uint64(5)) == (8 if place is None else place)
