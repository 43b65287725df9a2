"""float32 to fp16 and back inside kernels: by the processor's instructions, or in integers where it has none.

Both round to nearest even and give the same bits, so that shards and workers may run on different processors.
"""

from __future__ import annotations

import platform

import numpy as np
from numba import types
from numba.core import config
from numba.core.cgutils import ir
from numba.core.codegen import ll as llvm
from numba.extending import intrinsic, overload

from embershard.proto.codec.values.floats import ABS, INFINITY, bits_of, float_of
from embershard.proto.compiled.jit import inlined

_U = np.uint32
_SUBNORMAL = _U(113 << 23)  # 2^-14, the smallest normal fp16
_MAGIC = _U(126 << 23)  # 0.5: its last bit is worth 2^-24, as an fp16's below 2^-14


def processor_converts() -> bool:
    """Whether numba may use instructions for it: where there are none LLVM would call a function that is not there."""
    if config.CPU_NAME or config.CPU_FEATURES:  # numba was told to make code for a processor, of which we know nothing
        return False
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    try:
        return bool(llvm.get_host_cpu_features().get("f16c", False))
    except RuntimeError:  # LLVM does not know what this one has
        return False


@inlined
def half_in_integers(x: np.float32) -> np.uint16:
    """fp16 bits of a float below 65,520."""
    bits = bits_of(x)
    size = bits & ABS
    subnormal = bits_of(float_of(size) + float_of(_MAGIC)) - _MAGIC  # the addition rounds
    normal = (size - _U(112 << 23) + _U(0xFFF) + ((size >> _U(13)) & _U(1))) >> _U(13)
    return np.uint16((subnormal if size < _SUBNORMAL else normal) | ((bits >> _U(16)) & _U(0x8000)))


@inlined
def float_in_integers(half: np.uint16) -> np.float32:
    """The float of any fp16 bits."""
    size = _U(half) & _U(0x7FFF)
    subnormal = bits_of(np.float32(np.int32(size)) * np.float32(2.0**-24))
    normal = (size << _U(13)) + _U(112 << 23)
    normal = normal | INFINITY if size >= _U(0x7C00) else normal
    return float_of((subnormal if size < _U(0x400) else normal) | ((_U(half) & _U(0x8000)) << _U(16)))


@intrinsic
def _half_of(typingctx, x):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def _float_of_half(typingctx, half):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


def half_of(x: np.float32) -> np.uint16:
    """fp16 bits of a float below 65,520."""
    return np.float16(x).view(np.uint16)


def float_of_half(half: np.uint16) -> np.float32:
    """The float of any fp16 bits."""
    return np.float32(np.uint16(half).view(np.float16))


@overload(half_of)
def _overload_half_of(x):  # type: ignore[no-untyped-def]
    return (lambda x: _half_of(x)) if processor_converts() else (lambda x: half_in_integers(x))


@overload(float_of_half)
def _overload_float_of_half(half):  # type: ignore[no-untyped-def]
    return (lambda half: _float_of_half(half)) if processor_converts() else (lambda half: float_in_integers(half))
