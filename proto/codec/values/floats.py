"""Array types of the codecs' kernels, and the bits of a float32."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic, overload

ABS = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign
INFINITY = np.uint32(0x7F800000)


def read_only(dtype: object) -> object:
    """Type of a flat array that a kernel reads; a payload may start at any byte of a message."""
    return types.Array(dtype, 1, "C", readonly=True, aligned=False)


def written(dtype: object) -> object:
    """Type of a flat array that a kernel fills, at any byte."""
    return types.Array(dtype, 1, "C", aligned=False)


@intrinsic
def _bits_of(typingctx, x):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def _float_of(typingctx, bits):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


def bits_of(x: np.float32) -> np.uint32:
    """The bits of a float32."""
    return np.float32(x).view(np.uint32)


def float_of(bits: np.uint32) -> np.float32:
    """The float32 of these bits."""
    return np.uint32(bits).view(np.float32)


@overload(bits_of)
def _overload_bits_of(x):  # type: ignore[no-untyped-def]
    return lambda x: _bits_of(x)


@overload(float_of)
def _overload_float_of(bits):  # type: ignore[no-untyped-def]
    return lambda bits: _float_of(bits)
