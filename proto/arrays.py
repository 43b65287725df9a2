"""The types of the arrays in messages and kernels, how large a message may be, and the hash of ids in plain numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Array = Ids | Floats | Bytes

# 64 MiB above gRPC's 4 MiB default: large enough to amortise a call, small enough to bound memory per connection.
MAX_MESSAGE_BYTES = 64 * 2**20


def mix64(x: npt.NDArray[np.int64] | npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele et al. 2014) of every x ^ key; routing.py has it compiled."""
    z = x.astype(np.uint64) ^ np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
