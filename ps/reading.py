"""What a pull reads of one table, in the form that was wanted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embershard.proto.codec.values import BUILTIN, ValuesCodec
from embershard.proto.messages import Bytes, Floats, Ids
from embershard.ps.table import Table

PLAIN = BUILTIN["none"]
# How much smaller than its rows a reply counts at most: a user-defined codec may say that millions take no bytes, and
# all of them are gathered first. int8 makes rows 3.9 times smaller.
_MOST = 8


class Read(NamedTuple):
    """Rows of one table, checked."""

    table: Table
    ids: Ids  # (U,)
    codec: ValuesCodec

    @property
    def nbytes(self) -> int:
        """Bytes that its rows take in the reply, or what a limit should count for them."""
        count, dim = len(self.ids), self.table.spec.dim
        return max(self.codec.nbytes(count, dim), 4 * count * dim // _MOST)

    def rows(self) -> tuple[Floats | Bytes, str]:
        """(U, dim) float32 and "", or a payload (N,) uint8 and the codec that reads it."""
        rows = self.table.gather(self.ids)
        if self.codec is PLAIN:
            return rows, ""
        payload = np.empty(self.codec.nbytes(*rows.shape), np.uint8)
        self.codec.encode(rows, payload, None)
        return payload, self.codec.name
