import numpy as np
import pytest
import torch

from embershard.proto.routing import sum_rows


@pytest.mark.parametrize("dim", [1, 3, 16, 17, 64])
@pytest.mark.parametrize(("count", "num_rows"), [(0, 0), (0, 4), (1, 1), (500, 7), (500, 900)])
def test_it_is_index_add_to_the_bit(dim, count, num_rows):
    rng = np.random.default_rng(dim)
    index = rng.integers(0, max(num_rows, 1), count)
    rows = rng.standard_normal((count, dim)).astype(np.float32)
    want = torch.zeros(num_rows, dim).index_add_(0, torch.from_numpy(index), torch.from_numpy(rows))
    assert np.array_equal(sum_rows(index, rows, num_rows), want.numpy())


def test_rows_that_are_not_finite_spoil_their_own_sum_only():
    rows = np.array([[1], [np.nan], [2], [np.inf]], np.float32)
    rows.flags.writeable = False
    assert np.array_equal(sum_rows(np.array([0, 1, 0, 2]), rows, 4), [[3], [np.nan], [np.inf], [0]], equal_nan=True)
