"""User-defined values codecs: functions of the modules that a shard or a worker was started with.

    def read_half(payload, rows, dim):
        return payload.view(np.float16).reshape(rows, dim).astype(np.float32)

    @values_codec(decode=read_half, nbytes=lambda rows, dim: 2 * rows * dim)
    def half(rows, key):
        return rows.astype(np.float16)

A process that was started with the module `mine` finds it as "mine:half"; shards and workers both need it.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from embershard.proto.arrays import Bytes, Floats
from embershard.proto.codec.payload import CUSTOM
from embershard.proto.codec.values.registry import BUILTIN, ValuesCodec
from embershard.proto.errors import BadCodec, DamagedPayload, UnknownCodec, check_size
from embershard.proto.user_modules import members_of

T = TypeVar("T", bound=np.generic)
EncodeFunction = Callable[[Floats, int | None], object]  # (R, dim) and a key -> an array or bytes
DecodeFunction = Callable[[Bytes, int, int], object]  # (nbytes,), R and dim -> (R, dim) float32
SizeFunction = Callable[[int, int], int]  # R and dim -> bytes
_PROBE = np.linspace(-1.0, 1.0, 128, dtype=np.float32).reshape(2, 64)


@dataclass(frozen=True)
class CustomCodec:
    """A values codec of user-defined functions; what they raise or get wrong becomes BadCodec or DamagedPayload."""

    name: str
    write: EncodeFunction
    read: DecodeFunction
    size: SizeFunction
    code: int = CUSTOM

    def nbytes(self, rows: int, dim: int) -> int:
        """Bytes of (rows, dim) floats, 0 of none. BadCodec when its function does not say so."""
        if not rows * dim:
            return 0
        try:
            size = self.size(rows, dim)
        except Exception as error:  # a user's function may fail in any way
            raise BadCodec(codec=self.name, reason=f"nbytes {_raised(error)}") from error
        if not isinstance(size, int) or size < 0:
            raise BadCodec(codec=self.name, reason=f"nbytes gave {size!r} for {rows} rows of dim {dim}")
        return size

    def encode(self, rows: Floats, out: Bytes, key: int | None = None) -> None:
        """Write (R, dim) floats into `out`, (nbytes,) uint8. BadCodec when its function raises or gives other bytes."""
        if not rows.size:
            return
        try:
            written = self.write(_read_only(rows), key)
        except Exception as error:  # a user's function may fail in any way
            raise BadCodec(codec=self.name, reason=f"it {_raised(error)}") from error
        if isinstance(written, bytes | bytearray | memoryview):
            written = np.frombuffer(written, np.uint8)
        if not isinstance(written, np.ndarray) or written.dtype.hasobject:
            raise BadCodec(codec=self.name, reason=f"it gave {_kind(written)}, not an array or bytes")
        if written.nbytes != out.size:
            shape = f"{rows.shape[0]} rows of dim {rows.shape[1]}"
            raise BadCodec(
                codec=self.name, reason=f"it gave {written.nbytes} bytes for {shape}, its nbytes says {out.size}"
            )
        out[:] = np.ascontiguousarray(written).reshape(-1).view(np.uint8)

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Fill `out`, (R, dim), from (nbytes,) uint8.

        DamagedPayload when there are more or fewer bytes or its function raises, BadCodec when it gives no such rows.
        """
        check_size(self.name, payload.size, out.shape, self.nbytes(*out.shape))
        if not out.size:
            return
        try:
            rows = self.read(_read_only(payload), *out.shape)
        except Exception as error:  # a user's function may fail in any way
            raise DamagedPayload(codec=self.name, reason=f"its decode {_raised(error)}") from error
        if not isinstance(rows, np.ndarray) or rows.shape != out.shape or rows.dtype != np.float32:
            raise BadCodec(codec=self.name, reason=f"its decode gave {_kind(rows)}, not {out.shape} of float32")
        out[:] = rows


def values_codec(*, decode: DecodeFunction, nbytes: SizeFunction) -> Callable[[EncodeFunction], CustomCodec]:
    """Make a values codec of `def f(rows, key)`, with its decoder and its number of bytes.

    f(rows, key): encodes rows (R, dim) float32 as an array of any dtype, or bytes; key is for this call's random
    numbers (None: round to nearest). decode(payload, R, dim): decodes (nbytes,) uint8 to (R, dim) float32.
    nbytes(R, dim): the exact number of bytes, by which messages are split and damaged ones are detected. R is at
    least 1 and dim is any number, because single elements are sent as rows of 64 and a shorter one. A row that is
    not finite must be decoded as a row that is not finite. TypeError if a function does not take these arguments.
    """

    def declare(function: EncodeFunction) -> CustomCodec:
        for what, part, wants in (
            (function.__name__, function, "(rows, key)"),
            ("decode", decode, "(payload, rows, dim)"),
            ("nbytes", nbytes, "(rows, dim)"),
        ):
            if len(inspect.signature(part).parameters) != wants.count(",") + 1:
                raise TypeError(f"values_codec: {what} must take {wants}")
        return CustomCodec(f"{function.__module__}:{function.__name__}", function, decode, nbytes)

    return declare


class CodecRegistry:
    """The values codecs of one process, by name: the built-in ones and those of user modules.

    modules: their names; they are imported and their codecs tried at once, so that a mistake stops the process at its
    start. BadModule names a module that cannot be imported, BadCodec a codec that does not work.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._known = {**BUILTIN, **load_codecs(modules)}

    def find(self, name: str) -> ValuesCodec:
        """The values codec of this name. UnknownCodec when this process has none."""
        codec = self._known.get(name)
        if codec is None:
            raise UnknownCodec(codec=name, known=", ".join(self._known))
        return codec


def load_codecs(modules: Sequence[str]) -> Mapping[str, ValuesCodec]:
    """The codecs of these modules by name, `module:function`; each has coded two rows and read them back.

    A module may have none: it may hold row optimizers alone. BadModule and BadCodec as for CodecRegistry.
    """
    found: dict[str, ValuesCodec] = {}
    for module in modules:
        for name, member in members_of(module).items():
            if isinstance(member, CustomCodec):
                codec = found[f"{module}:{name}"] = replace(member, name=f"{module}:{name}")
                _try(codec)
    return found


def _try(codec: ValuesCodec) -> None:
    for key in (None, 1):
        payload = np.empty(codec.nbytes(*_PROBE.shape), np.uint8)
        codec.encode(_PROBE, payload, key)
        try:
            codec.decode(payload, np.empty_like(_PROBE))
        except DamagedPayload as error:  # its own bytes: the codec is what is wrong
            raise BadCodec(codec=codec.name, reason=str(error.fields["reason"])) from error


def _read_only(array: npt.NDArray[T]) -> npt.NDArray[T]:
    view = array.view()
    view.flags.writeable = False  # gradients are still needed, and a message may be sent again
    return view


def _raised(error: Exception) -> str:
    """Name an error that user code raised, and the line of it."""
    place = traceback.extract_tb(error.__traceback__)[:2][-1]  # the first is our call
    return f"raised {type(error).__name__}: {error} ({place.filename}:{place.lineno})"


def _kind(value: object) -> str:
    return f"{value.shape} of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
