"""Rows numbered in the order in which a batch uses them first."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.worker.kernels import by_first_use, by_first_use_in_torch
from embershard.worker.nn.embedding import _in_order_of_use


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30))
def test_rows_are_numbered_as_they_come_and_those_that_do_not_come_last(batch):
    found = by_first_use(np.array(batch, np.int64), 10)
    used = list(dict.fromkeys(batch))
    assert found.order.tolist() == used + [row for row in range(10) if row not in used]
    assert found.order[found.numbers].tolist() == batch
    assert found.rank[found.order].tolist() == list(range(10))
    in_torch = by_first_use_in_torch(torch.tensor(batch, dtype=torch.int64), 10)
    assert [part.tolist() for part in in_torch] == [part.tolist() for part in found]


def test_a_bag_reads_the_same_rows_whatever_their_numbers():
    rows, index = torch.randn(7, 3), torch.tensor([[4, 2], [2, 6], [4, 0]])
    numbers, ordered, padding = _in_order_of_use(index, rows, 6)
    assert torch.equal(ordered[numbers], rows[index])
    assert numbers.tolist() == [[0, 1], [1, 2], [0, 3]]
    assert padding == 2
    assert _in_order_of_use(index, rows, None)[2] is None
