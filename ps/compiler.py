"""Numba as this project uses it: a decorator that also works where no cache can be kept, and three intrinsics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba
import numpy as np
from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic, overload
from numba.np.arrayobj import populate_array

F = TypeVar("F", bound=Callable[..., object])
_POINTER = ir.IntType(8).as_pointer()
_INT32 = ir.IntType(32)


def compiled(signature: object) -> Callable[[F], F]:
    """njit with this signature, without the GIL, kept on disk beside the source or in the user's cache folder.

    Where neither can be written (a read-only image without a home), the function is compiled anew at every start.
    """

    def decorate(function: F) -> F:
        try:
            return numba.njit(signature, cache=True, nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return numba.njit(signature, nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]

    return decorate


def inlined(function: F) -> F:
    """njit for a part of a compiled function: compiled with it, kept with it, never loaded alone."""
    return numba.njit(nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]


@intrinsic
def prefetch(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Ask for the cache line of array[index]: (array, uint64) -> None."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), _POINTER)
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT32, _INT32, _INT32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [_POINTER], kind)
        builder.call(function, [pointer, _INT32(0), _INT32(3), _INT32(1)])  # read, keep in every cache, data
        return context.get_dummy_value()

    return types.void(array, types.uint64), codegen


@intrinsic
def window(typingctx, array, start, length):  # type: ignore[no-untyped-def]
    """`length` floats from `start` of a C-ordered array seen flat: writable, and without a reference count."""
    view_type = types.Array(array.dtype, 1, "C")

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        view = context.make_array(view_type)(context, builder)
        itemsize = ir.IntType(64)(array.dtype.bitwidth // 8)
        populate_array(
            view,
            data=builder.gep(data, [args[1]]),
            shape=[args[2]],
            strides=[itemsize],
            itemsize=itemsize,
            meminfo=None,
        )
        return view._getvalue()

    return view_type(array, types.uint64, types.intp), codegen


@intrinsic
def _fma(typingctx, a, b, c):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a * b + c of float32, rounded once, as torch's vector loops do it."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


@overload(fma)
def _overload_fma(a, b, c):  # type: ignore[no-untyped-def]
    return lambda a, b, c: _fma(a, b, c)
