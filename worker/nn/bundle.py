"""Look the rows of a bundle of tables up by one autograd function, whichever modules read them, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from numba import types
from torch import Tensor
from torch.autograd.function import FunctionCtx

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled import intrinsics
from embershard.proto.compiled.intrinsics import array_at, detached, fma
from embershard.proto.compiled.jit import compiled
from embershard.worker.kernels import Mask
from embershard.worker.session.gradients import RowGradients
from embershard.worker.session.reads import BundleRows, LookupResult

Collect = Callable[[RowGradients], None]

_NO_ORDER = np.empty(0, np.int64)


def look_up(rows: Tensor, index: Tensor, how: str) -> Tensor:
    """rows[index], or of each row of an index (bags, n) the sum or mean of these: `how` is "rows", "sum" or "mean"."""
    return F.embedding(index, rows) if how == "rows" else F.embedding_bag(index, rows, mode=how)


def take(read: LookupResult, bundle: BundleRows, collect: Collect) -> Tensor | None:
    """What the reader of a table wants of its rows, for the first forward that asks for it; None after that.

    The gradients of all tables reach `collect` together.
    """
    if not read.outputs:
        rows = bundle.rows.detach().requires_grad_()  # shares memory
        used = np.zeros(len(bundle.ends), np.bool_)
        rows.register_post_accumulate_grad_hook(_collector(bundle, used, collect))  # type: ignore[no-untyped-call]
        read.outputs.extend(_BundleLookup.apply(rows, bundle, used))  # type: ignore[no-untyped-call]
    output, read.outputs[read.member] = read.outputs[read.member], None
    return output


class _Part(NamedTuple):
    """The lookups of one table."""

    lookups: slice  # of all flat ids
    bags: int  # or lookups, where they are not pooled
    length: int  # of a bag


def _parts(bundle: BundleRows) -> list[_Part]:
    parts, start = [], 0
    for end, shape in zip(bundle.ends, bundle.shapes, strict=True):
        bags, length = (end - start, 1) if bundle.how == "rows" else shape
        parts.append(_Part(slice(start, end), bags, length))
        start = end
    return parts


class _BundleLookup(torch.autograd.Function):
    """F.embedding or F.embedding_bag for several tables, with the bits of one at a time, in outputs and gradients.

    It saves no tensor: a part of its outputs may have a backward before the others.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, bundle: BundleRows, used: Mask) -> tuple[Tensor, ...]:
        ctx.bundle, ctx.used = bundle, used  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        parts, dim, how = _parts(bundle), rows.shape[1], bundle.how
        if how == "rows":
            found = F.embedding(bundle.index, rows).numpy()
        else:
            lengths = np.repeat([part.length for part in parts], [part.bags for part in parts])
            offsets = torch.from_numpy(np.cumsum(lengths) - lengths)
            found = F.embedding_bag(bundle.index, rows, offsets, mode=how).numpy()
        outputs, start = [], 0
        for part, shape in zip(parts, bundle.shapes, strict=True):
            # no views for autograd, which would refuse to have one of several changed in place
            output = found[start : start + part.bags]
            if how == "rows" and len(shape) != 1:
                output = output.reshape(*shape, dim)
            outputs.append(torch.from_numpy(output))
            start += part.bags
        return tuple(outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        bundle: BundleRows = ctx.bundle  # type: ignore[attr-defined]
        ctx.used[:] = [its is not None for its in gradients]  # type: ignore[attr-defined]
        found = [(part, its) for part, its in zip(_parts(bundle), gradients, strict=True) if its is not None]
        parts, dim = [part for part, _ in found], bundle.rows.shape[1]
        flat = [its if its.dim() == 2 else its.reshape(-1, dim) for _, its in found]
        scales = [1.0 / part.length if bundle.how == "mean" else 1.0 for part in parts]
        if torch.is_grad_enabled():  # create_graph: by operations that autograd knows
            each = [its.repeat_interleave(part.length, 0) for part, its in zip(parts, flat, strict=True)]
            joined = torch.cat([its * scale for its, scale in zip(each, scales, strict=True)])
            index = torch.cat([bundle.index[part.lookups] for part in parts])
            return joined.new_zeros(bundle.rows.shape).index_add(0, index, joined), None, None
        flat = [its if its.stride(1) == 1 or dim == 1 else its.contiguous() for its in flat]  # alive until it is read
        places = [(its.data_ptr(), its.stride(0)) for its in flat]
        bounds = [(part.lookups.start, part.lookups.stop, part.length) for part in parts]
        summed = np.zeros(tuple(bundle.rows.shape), np.float32)
        order = _NO_ORDER if bundle.how == "rows" else _order(bundle, parts)
        of_tables = np.array(places, np.int64).reshape(-1, 2), np.array(bounds, np.int64).reshape(-1, 3)
        _sum_rows(of_tables, np.array(scales, np.float32), bundle.index.numpy(), order, summed)
        return torch.from_numpy(summed), None, None


def _order(bundle: BundleRows, parts: list[_Part]) -> Ids:
    """(N,) in which order torch adds the gradients of a table's lookups: that of its sort, which is not stable."""
    flat = torch.from_numpy(bundle.flat)
    if len({part.lookups.stop - part.lookups.start for part in _parts(bundle)}) == 1:
        return flat.view(len(bundle.ends), -1).sort(1)[1].view(-1).numpy()
    order = torch.empty_like(flat)
    for part in parts:
        order[part.lookups] = flat[part.lookups].sort()[1]
    return order.numpy()


def _collector(bundle: BundleRows, used: Mask, collect: Collect) -> Callable[[Tensor], None]:
    """Hands the gradients of a bundle on, at the moment when backward has finished them."""
    first = bundle.specs[bundle.route.tables[0]]

    def collected(rows: Tensor) -> None:
        gradient, rows.grad = rows.grad, None
        if gradient is None or not gradient.shape[0]:
            return
        route = bundle.route
        if not used.all():  # a table that led to no output of this backward has no gradient
            keep = np.repeat(np.broadcast_to(used, route.counts.shape).reshape(-1), route.counts.reshape(-1))
            route, gradient = route.select(keep), gradient[torch.from_numpy(keep)]
        collect(RowGradients(first, route, gradient, specs=bundle.specs))

    return collected


_IDS = types.Array(types.int64, 1, "C", readonly=True)
_TABLE = types.int64[:, ::1]


@compiled(types.void(types.UniTuple(_TABLE, 2), types.float32[::1], _IDS, _IDS, types.float32[:, ::1]), intrinsics)
def _sum_rows(
    tables: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    scales: npt.NDArray[np.float32],
    index: Ids,
    order: Ids,
    out: Floats,
) -> None:
    """out[index[i]] += scale * the gradient of lookup i's bag, in the order of each table.

    tables: of each table, (T, 2) the address of its gradients and the floats from one to the next; and (T, 3) the first
    of its lookups, their end, and how many are a bag. order: of a table's lookups, counted from its first; (0,): as
    they are, without bags and scales.
    """
    places, bounds = detached(tables[0]), detached(tables[1])
    index, order, out, scales = detached(index), detached(order), detached(out), detached(scales)
    dim = np.uint64(out.shape[1])
    for t in range(places.shape[0]):
        begin, end, length, stride = bounds[t, 0], bounds[t, 1], bounds[t, 2], places[t, 1]
        if begin == end:
            continue
        rows = array_at(places[t, 0], ((end - begin) // length) * max(stride, 1) + out.shape[1], np.float32)
        if order.size == 0:
            for i in range(begin, end):
                u, first = np.uint64(index[i]), np.uint64((i - begin) * stride)
                for j in range(dim):
                    out[u, j] += rows[first + j]
            continue
        scale = scales[t]
        for n in range(begin, end):
            i = order[n]
            u, first = np.uint64(index[begin + i]), np.uint64(i // length * stride)
            for j in range(dim):
                out[u, j] = fma(scale, rows[first + j], out[u, j])  # as torch's axpy
