"""The intrinsics of the kernels: what numba does not say in Python."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic, overload

from embershard.proto.compiled.jit import load

_POINTER = ir.IntType(8).as_pointer()
_INT32 = ir.IntType(32)

ROW_FUNCTION = types.void(types.float32[::1], types.float32[::1], types.float32[::1], types.float64[::1])


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
def detached(typingctx, array):  # type: ignore[no-untyped-def]
    """The same array without its reference count: the compiler does not always see that counting it is needless.

    For arrays that outlive the call, as a kernel's arguments do.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        view = context.make_array(array)(context, builder, args[0])
        view.meminfo = view.meminfo.type(None)
        view.parent = view.parent.type(None)
        return view._getvalue()

    return array(array), codegen


@intrinsic
def window(typingctx, array, start, length):  # type: ignore[no-untyped-def]
    """`length` floats from `start` of a C-ordered array seen flat: writable, and without a reference count."""
    view_type = types.Array(array.dtype, 1, "C")

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        # imported here: only what compiles needs it, not what loads a kernel that was compiled before
        from numba.np.arrayobj import populate_array

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
def array_at(typingctx, address, size, kind):  # type: ignore[no-untyped-def]
    """The array of so many numbers at an address: (int64, int64, np.float32 or the like), without a reference count."""
    view_type = types.Array(kind.dtype, 1, "C")

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        from numba.np.arrayobj import populate_array  # here, as in `window`

        view = context.make_array(view_type)(context, builder)
        itemsize = ir.IntType(64)(kind.dtype.bitwidth // 8)
        populate_array(
            view,
            data=builder.inttoptr(args[0], context.get_data_type(kind.dtype).as_pointer()),
            shape=[args[1]],
            strides=[itemsize],
            itemsize=itemsize,
            meminfo=None,
        )
        return view._getvalue()

    return view_type(types.int64, types.intp, kind), codegen


@intrinsic
def first_match(typingctx, array, start, high):  # type: ignore[no-untyped-def]
    """First i < 8 with array[start + i] >> 32 == high, 8 if there is none: (uint64 array, uint64, uint64) -> uint64.

    One vector comparison; `start` must be a multiple of 8 and the array 64-byte aligned.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        eight = ir.VectorType(ir.IntType(64), 8)
        line = builder.load(builder.bitcast(builder.gep(data, [args[1]]), eight.as_pointer()), align=64)
        wanted = ir.Constant(eight, ir.Undefined)
        for i in range(8):
            wanted = builder.insert_element(wanted, args[2], _INT32(i))
        same = builder.icmp_unsigned("==", builder.lshr(line, eight([32] * 8)), wanted)
        mask = builder.zext(builder.bitcast(same, ir.IntType(8)), ir.IntType(64))
        return builder.cttz(builder.or_(mask, ir.IntType(64)(256)), ir.IntType(1)(True))

    return types.uint64(array, types.uint64, types.uint64), codegen


@intrinsic
def call_row_function(typingctx, address, row, state, grad, hyper):  # type: ignore[no-untyped-def]
    """Call the ROW_FUNCTION at an address; False if it raised. (numba's function type costs 30 us per kernel call.)"""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = context.call_conv.get_function_type(types.none, ROW_FUNCTION.args)
        function = builder.inttoptr(args[0], kind.as_pointer())
        status, _ = context.call_conv.call_function(builder, function, types.none, ROW_FUNCTION.args, args[1:])
        return status.is_ok

    return types.boolean(types.int64, *ROW_FUNCTION.args), codegen


def address_of(dispatcher: Callable[..., object]) -> int:
    """Address of a function that was compiled with one signature; valid while the function lives."""
    (result,) = load(dispatcher).overloads.values()  # type: ignore[attr-defined]
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


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
