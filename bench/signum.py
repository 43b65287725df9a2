"""A user-defined row optimizer: Signum (Bernstein et al. 2018), momentum and then only its sign.

Shards take it with `embershard ps --import signum`, where this folder is on their path.
"""

import numpy as np
import numpy.typing as npt

import embershard as es
from embershard.proto.arrays import Floats


@es.row_optimizer(state_per_dim=1, settings={"beta": 0.9})
def signum(row: Floats, state: Floats, grad: Floats, hyper: npt.NDArray[np.float64]) -> None:
    lr, beta = np.float32(hyper[0]), np.float32(hyper[1])
    for j in range(row.size):
        state[j] = beta * state[j] + (np.float32(1) - beta) * grad[j]
        row[j] -= lr * np.sign(state[j])
