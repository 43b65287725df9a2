"""The arrays of messages as bytes, little endian and in C order, and back; any bytes give a value or InvalidRequest."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from embershard.proto.codec.lossless.ids import decode_ids
from embershard.proto.errors import InvalidRequest
from embershard.proto.messages import MAX_MESSAGE_BYTES, Array, Bytes, Floats, Ids

S = TypeVar("S", bound=np.generic)
Buffer = bytes | memoryview


def to_bytes(array: Array) -> bytes:
    """A copy of the values."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def read_ids(data: Buffer, table: str) -> Ids:
    """(U,) int64, a view of the bytes."""
    return _array(data, np.dtype("<i8"), table, "ids")


def read_floats(data: Buffer, table: str) -> Floats:
    """(U * dim,) float32, a view of the bytes."""
    return _array(data, np.dtype("<f4"), table, "rows")


def read_values(data: Buffer, codec: str, table: str) -> Floats | Bytes:
    """As `read_floats`; with a codec its payload, (N,) uint8."""
    return np.frombuffer(data, np.uint8) if codec else read_floats(data, table)


class IdReader:
    """The ids of one message. Compressed ones take no more memory than uncompressed ones could."""

    def __init__(self) -> None:
        self._left = MAX_MESSAGE_BYTES // 8

    def read(self, data: Buffer, table: str, packed: bool) -> tuple[Ids, Bytes | None]:
        """The ids, and what they travelled as where they were compressed. DamagedPayload."""
        if not packed:
            return read_ids(data, table), None
        coded = np.frombuffer(data, np.uint8)
        ids = decode_ids(coded, self._left)
        self._left -= len(ids)
        return ids, coded


def _array(data: Buffer, dtype: np.dtype[S], table: str, what: str) -> npt.NDArray[S]:
    size = memoryview(data).nbytes
    if size % dtype.itemsize:
        raise InvalidRequest(reason=f"table {table!r}: {size} bytes of {what} are no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)
