"""Values codecs: how (R, dim) float32 travel as bytes. Each has its file, encode and decode side by side."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from embershard.proto.arrays import Bytes, Floats
from embershard.proto.codec.values.bf16 import Bf16
from embershard.proto.codec.values.fp16s import Fp16s
from embershard.proto.codec.values.int8 import Int8
from embershard.proto.codec.values.onebit import Onebit
from embershard.proto.errors import UnknownCodec, check_size


class ValuesCodec(Protocol):
    """Stateless: (R, dim) float32 to bytes and back. A row that is not finite is read as a row that is not finite."""

    @property
    def name(self) -> str:
        """Name in a codec text."""

    @property
    def code(self) -> int:
        """The byte that names this form in a payload."""

    def nbytes(self, rows: int, dim: int) -> int:
        """Exact bytes of (rows, dim) floats."""

    def encode(self, rows: Floats, out: Bytes, key: int | None = None) -> None:
        """Write (R, dim) C-ordered floats into `out`, (nbytes,) uint8.

        key: 64-bit key of this call's random numbers, so that a retry writes the same bytes; None rounds to nearest.
        """

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Fill `out`, (R, dim) C-ordered, from (nbytes,) uint8. DamagedPayload when there are more or fewer bytes."""


class Plain:
    """The form `none`: float32 values as they are."""

    name = "none"
    code = 0

    def nbytes(self, rows: int, dim: int) -> int:
        """Bytes of (rows, dim) floats."""
        return 4 * rows * dim

    def encode(self, rows: Floats, out: Bytes, key: int | None = None) -> None:
        """Copy (R, dim) floats into `out`, (nbytes,) uint8."""
        out[:] = rows.reshape(-1).view(np.uint8)

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Fill `out`, (R, dim), from (nbytes,) uint8. DamagedPayload when there are more or fewer bytes."""
        check_size(self.name, payload.size, out.shape, self.nbytes(*out.shape))
        out.reshape(-1).view(np.uint8)[:] = payload


BUILTIN: dict[str, ValuesCodec] = {codec.name: codec for codec in (Plain(), Fp16s(), Bf16(), Int8(), Onebit())}


def find_values(name: str) -> ValuesCodec:
    """The built-in values codec of this name. UnknownCodec when there is none."""
    codec = BUILTIN.get(name)
    if codec is None:
        raise UnknownCodec(codec=name, known=", ".join(BUILTIN))
    return codec
