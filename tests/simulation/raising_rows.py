"""An optimizer of a user's own, whose row function raises for some gradients."""

import numpy as np

from embershard import row_optimizer

LIMIT = 2.2  # a gradient's first float above it raises


@row_optimizer(state_per_dim=1)
def limited(row, state, grad, hyper):
    if grad[0] > np.float32(2.2):
        raise ValueError("too large")
    for j in range(row.size):
        state[j] += np.float32(1.0)
        row[j] -= np.float32(hyper[0]) * grad[j]
