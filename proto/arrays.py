"""The types of the arrays in messages and kernels, and how large a message may be."""

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
