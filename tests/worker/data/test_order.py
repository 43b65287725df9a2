import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.proto.errors import JobError
from embershard.worker.data.batch import RowsDataset, Samples, Schema


def numbered(count: int, **options: bool) -> RowsDataset:
    """A dataset whose sample i has id i."""
    rows = Samples(np.arange(count)[:, None], np.arange(count, dtype=np.float32)[:, None], np.zeros(count, np.float32))
    schema = Schema(("number",), 1, count)
    return RowsDataset(schema, {"train": rows, "valid": rows}, where="numbers.csv", seed=5, **options)


def ids(batches) -> list[int]:
    return [int(i) for batch in batches for i in batch.ids[:, 0]]


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 20), st.integers(0, 3))
def test_shares_are_disjoint_and_cover_everything(count, world_size, batch_size, epoch):
    data = numbered(count)
    if count < world_size:
        with pytest.raises(JobError, match=f"numbers.csv: {count} samples cannot be split over {world_size} workers"):
            data.train(epoch, 0, world_size, batch_size)
        return
    shares = [ids(data.train(epoch, rank, world_size, batch_size)) for rank in range(world_size)]
    assert sorted(itertools.chain(*shares)) == list(range(count))
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 20))
def test_evaluation_shares_cover_everything_and_may_be_empty(count, world_size, batch_size):
    data = numbered(count)
    shares = [ids(data.evaluate("valid", rank, world_size, batch_size)) for rank in range(world_size)]
    assert sorted(itertools.chain(*shares)) == list(range(count))


def test_batch_k_of_all_workers_is_batch_k_of_one_with_the_joint_size():
    data = numbered(103)
    joint = list(data.train(2, 0, 1, 30))
    parts = [list(data.train(2, rank, 3, 10)) for rank in range(3)]
    for k, batch in enumerate(joint):
        assert sorted(ids([batch])) == sorted(ids([part[k] for part in parts if k < len(part)]))


def test_each_epoch_has_another_order_and_the_same_epoch_the_same():
    data = numbered(50)
    assert ids(data.train(0, 0, 1, 7)) == ids(data.train(0, 0, 1, 7))
    assert ids(data.train(0, 0, 1, 7)) != ids(data.train(1, 0, 1, 7))
    assert ids(numbered(50, shuffle=False).train(1, 0, 1, 7)) == list(range(50))


def test_every_column_moves_with_its_sample():
    for batch in numbered(40).train(0, 1, 2, 6):
        assert batch.ids[:, 0].tolist() == batch.dense[:, 0].tolist()


@pytest.mark.parametrize(("rank", "world_size", "batch_size"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)])
def test_a_share_that_makes_no_sense_is_refused(rank, world_size, batch_size):
    data = numbered(4)
    with pytest.raises(ValueError, match="must be"):
        data.train(0, rank, world_size, batch_size)
    with pytest.raises(ValueError, match="must be"):
        data.evaluate("valid", rank, world_size, batch_size)


def test_an_unknown_split_is_named():
    with pytest.raises(JobError, match=r"no split 'test' \(known: train, valid\)"):
        numbered(4).evaluate("test", 0, 1, 1)
