"""PowerSGD against the paper's formulas in plain numpy, as a worker packs a dense table and its shards decode it."""

from itertools import pairwise

import numpy as np
import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import decode
from embershard.proto.messages import TableGradients
from embershard.proto.routing import Placement, even_ids, make_route
from embershard.proto.spec import SGD, TableSpec
from embershard.worker.compression.compressor import Compressor
from embershard.worker.compression.low_rank import DenseLayout, LowRank, ParameterSlice, predict_low_rank

BLOCK = 16
PLACES = [ParameterSlice(0, (6, 8)), ParameterSlice(3, (5,)), ParameterSlice(4, (12, 2, 3)), ParameterSlice(9, (2, 2))]
NUM_BLOCKS = 10
SPEC = TableSpec(name="dense", dim=BLOCK, optimizer=SGD(lr=1.0), seed=7)
IDS = even_ids(NUM_BLOCKS, SPEC.space_key)


def gradients(seed):
    random, rows = np.random.default_rng(seed), np.zeros((NUM_BLOCKS, BLOCK), np.float32)
    for place in PLACES:
        matrix(rows, place)[:] = random.standard_normal((place.shape[0], place.size // place.shape[0]))
    return rows


def matrix(rows, place):
    return rows.reshape(-1)[place.start * BLOCK :][: place.size].reshape(place.shape[0], -1)


def blocks_of(ids):
    return [int(np.flatnonzero(IDS == i)[0]) for i in ids]


class Worker:
    """A worker with one dense table on some shards, whose messages hold at most `most` blocks."""

    def __init__(self, codec="powersgd:1", shards=1, most=NUM_BLOCKS):
        self.compressor = Compressor(0, Placement.even(shards))
        self.compressor.add(SPEC, dense=True)
        self.compressor.lay_out("dense", DenseLayout(IDS, PLACES))
        self.compressor.choose("dense", CodecName.parse(codec))
        self.placement, self.most = Placement.even(shards), most
        self.sent = []  # shard, part

    def push(self, rows, rate=1.0, blocks=slice(None)):
        """What the shards apply of a push; rows of NaN stand for those that are not there."""
        route, rows = make_route(IDS[blocks], SPEC.space_key, self.placement), rows[blocks]
        self.compressor.begin([("dense", route, rows)], rate)
        applied = np.full((NUM_BLOCKS, BLOCK), np.nan, np.float32)
        self.sent = []
        for shard, (start, stop) in enumerate(pairwise(route.splits.tolist())):
            for first in range(start, stop, self.most):
                part = slice(first, min(first + self.most, stop))
                whole = TableGradients("dense", route.ids[part], rows[part], rate)
                self.sent += [(shard, sent) for sent in self.compressor.pack(whole, shard, first - start)]
        for _, part in self.sent:
            applied[blocks_of(part.ids)] = decode(part.gradients, len(part.ids), BLOCK).rows
        return applied

    def held(self):
        """All that is held back, by block."""
        rows, held = np.zeros((NUM_BLOCKS, BLOCK), np.float32), self.compressor.residual("dense")
        rows[blocks_of(held.ids)] = held.rows
        return rows


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_factors_are_those_of_the_paper(shards):
    worker, low_rank = Worker(shards=shards), LowRank(DenseLayout(IDS, PLACES), BLOCK, 1, SPEC.row_seed)
    q = np.asarray(low_rank.state_dict()["rights"]["0"], np.float64)
    error = np.zeros((6, 8))
    for step in range(4):
        rows = gradients(step)
        applied = matrix(worker.push(rows), PLACES[0])
        m = matrix(rows, PLACES[0]).astype(np.float64) + error
        p = m @ q
        p /= np.linalg.norm(p)
        q = m.T @ p
        # a part of a matrix for which the factors would be no smaller goes as it is
        want = np.where(np.isclose(applied, m, atol=1e-6), m, p @ q.T)
        np.testing.assert_allclose(applied, want, atol=1e-5)
        assert (want != m).any()
        error = m - want


def test_what_factors_lose_nothing_of_goes_to_the_bit():
    rows = gradients(0)
    applied = Worker().push(rows)
    plain = [3, *range(9, NUM_BLOCKS)]  # a vector, and a matrix of which factors would be no smaller
    assert applied[plain].tobytes() == rows[plain].tobytes()
    assert Worker("powersgd:12").push(rows).tobytes() == rows.tobytes()
    for place in (PLACES[0], PLACES[2]):
        part = matrix(rows, place)
        part[:] = np.outer(np.arange(1, len(part) + 1), np.arange(1, place.columns + 1))  # of the rank of the factors
    np.testing.assert_allclose(Worker().push(rows), rows, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("codec", ["powersgd:1", "powersgd:1+fp16s", "powersgd:2+int8"])
@pytest.mark.parametrize(("shards", "most"), [(1, 10), (2, 10), (3, 2), (1, 1)])
def test_what_is_applied_and_what_is_held_add_up_to_the_gradients(codec, shards, most):
    worker = Worker(codec, shards, most)
    total, applied = np.zeros((NUM_BLOCKS, BLOCK)), np.zeros((NUM_BLOCKS, BLOCK))
    for step in range(5):
        rows = gradients(step)
        total += rows
        applied += worker.push(rows)
    assert np.abs(applied + worker.held() - total).max() < 1e-5 * np.abs(total).max()
    assert most == 1 or np.abs(worker.held()).max() > 0.05


@pytest.mark.parametrize("codec", ["powersgd:1", "powersgd:2+fp16s", "powersgd:3+int8"])
@pytest.mark.parametrize(("shards", "most"), [(1, 10), (2, 10), (3, 2), (1, 5)])
def test_the_bytes_of_a_push_are_known_before(codec, shards, most):
    worker, chosen = Worker(codec, shards, most), CodecName.parse(codec)
    worker.push(gradients(0))
    values, ids = worker.compressor.find(chosen.values), [part.ids for _, part in worker.sent]
    want = predict_low_rank(DenseLayout(IDS, PLACES), BLOCK, int(chosen.number), ids, values)
    assert sum(part.gradients.nbytes for _, part in worker.sent) == want


def test_what_is_held_counts_by_the_learning_rate_of_its_own_push_and_is_given_back():
    worker, rows = Worker(), gradients(0)
    left = rows - worker.push(rows, rate=1.0)
    applied = worker.push(np.zeros_like(rows), rate=0.5)
    np.testing.assert_allclose(applied + worker.held(), 2 * left, atol=1e-5)
    worker = Worker(shards=2)
    worker.push(rows)
    for shard, part in worker.sent:
        worker.compressor.restore_residual([part], shard)
    np.testing.assert_allclose(worker.held(), rows, atol=1e-6)


def test_a_block_that_is_not_finite_is_never_held():
    worker = Worker()
    worker.push(gradients(0))
    before, rows = worker.held(), gradients(1)
    rows[1, 3] = np.nan
    applied = worker.push(rows)
    assert np.isnan(applied).any(1).tolist() == [number == 1 for number in range(NUM_BLOCKS)]
    assert worker.held()[1].tobytes() == before[1].tobytes()
    np.testing.assert_allclose(applied[[0, 2]], (rows + before)[[0, 2]])
    assert np.isfinite(worker.push(gradients(2))).all()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_push_without_a_finite_block_sends_and_holds_nothing(shards):
    worker = Worker(shards=shards)
    assert np.isnan(worker.push(np.full_like(gradients(0), np.nan))).all()
    assert not worker.held().any()
    assert np.isfinite(worker.push(gradients(2))).all()


def test_numbers_that_overflow_do_not_spoil_later_steps():
    worker, rows = Worker(), gradients(0)
    rows[:3] *= np.float32(1e38)
    with np.errstate(all="ignore"):
        worker.push(rows)
        worker.push(rows)
    rows = gradients(1)
    for _ in range(3):
        applied = worker.push(np.zeros_like(rows))
    assert np.isfinite(worker.push(rows)[4:]).all()
    assert np.isfinite(applied[4:]).all()


def test_a_parameter_without_a_gradient_is_left_alone():
    worker = Worker()
    worker.push(gradients(0))
    before = worker.held()
    assert np.isnan(worker.push(gradients(1), blocks=slice(4, None))[:4]).all()
    assert worker.held()[:4].tobytes() == before[:4].tobytes()


def test_what_is_held_is_sent_when_another_codec_follows():
    worker, rows = Worker(), gradients(0)
    left = rows - worker.push(rows)
    worker.compressor.choose("dense", CodecName.parse("none"))
    sent = np.zeros_like(rows)
    for part in worker.compressor.drain(0, 1.0, 2**20):
        sent[blocks_of(part.ids)] = decode(part.gradients, len(part.ids), BLOCK).rows
    np.testing.assert_allclose(sent, left, atol=1e-6)
    assert not worker.held().any()


def test_a_run_goes_on_from_its_state_to_the_bit():
    first, second = (LowRank(DenseLayout(IDS, PLACES), BLOCK, 1, 3) for _ in range(2))
    first.begin(IDS, gradients(0))
    second.load_state_dict(dict(first.state_dict()))
    values = Worker().compressor.find("int8")
    for low_rank in (first, second):
        low_rank.begin(IDS, gradients(1))
    assert first.payload(IDS, values, 5).tobytes() == second.payload(IDS, values, 5).tobytes()
    with pytest.raises(ValueError, match="of another rank"):
        LowRank(DenseLayout(IDS, PLACES), BLOCK, 2, 3).load_state_dict(dict(first.state_dict()))


def test_factors_travel_as_values_of_which_the_size_is_known():
    with pytest.raises(ValueError, match="factors travel as none"):
        Worker().compressor.check("dense", CodecName.parse("powersgd:1+mine:codec"))
