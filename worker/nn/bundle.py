"""Look the rows of a bundle of tables up by one autograd function, whichever modules read them, and in which order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from numba import types
from torch import Tensor
from torch.autograd.function import FunctionCtx

from embershard.proto.arrays import Floats, Ids
from embershard.proto.compiled import intrinsics
from embershard.proto.compiled.intrinsics import array_at, detached
from embershard.proto.compiled.jit import compiled
from embershard.worker.session.gradients import RowGradients
from embershard.worker.session.reads import BundleRows

Collect = Callable[[RowGradients], None]


def take(bundle: BundleRows, member: int, collect: Collect) -> Tensor | None:
    """The rows of a table's ids, for the first forward that asks for them; None after that.

    The gradients of all tables reach `collect` together.
    """
    if bundle.outputs is None:
        rows = bundle.rows.detach()  # shares memory
        rows.requires_grad_()
        used = np.zeros(len(bundle.ends), np.bool_)
        rows.register_post_accumulate_grad_hook(_collector(bundle, used, collect))  # type: ignore[no-untyped-call]
        bundle.outputs = list(_BundleLookup.apply(rows, bundle, used))  # type: ignore[no-untyped-call]
    output, bundle.outputs[member] = bundle.outputs[member], None
    return output


class _BundleLookup(torch.autograd.Function):
    """F.embedding for every table, with its bits and those of embedding._RowLookup's gradients.

    It saves no tensor: a part of its outputs may have a backward before the others.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, bundle: BundleRows, used: npt.NDArray[np.bool_]) -> tuple[Tensor, ...]:
        ctx.bundle, ctx.used = bundle, used  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        found, dim = F.embedding(bundle.index, rows).numpy(), rows.shape[1]
        outputs, start = [], 0
        for end, shape in zip(bundle.ends, bundle.shapes, strict=True):
            # no views for autograd, which would refuse to have one of several changed in place
            outputs.append(torch.from_numpy(found[start:end].reshape(*shape, dim)))
            start = end
        return tuple(outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        bundle: BundleRows = ctx.bundle  # type: ignore[attr-defined]
        ctx.used[:] = [gradient is not None for gradient in gradients]  # type: ignore[attr-defined]
        num_rows, dim = bundle.rows.shape
        if torch.is_grad_enabled():  # create_graph: by operations that autograd knows
            parts = torch.split(bundle.index, [shape.numel() for shape in bundle.shapes])
            index = torch.cat([part for part, its in zip(parts, gradients, strict=True) if its is not None])
            flat = torch.cat([its.reshape(-1, dim) for its in gradients if its is not None])
            return flat.new_zeros(num_rows, dim).index_add(0, index, flat), None, None
        kept: list[Tensor] = []
        places = np.zeros((2, len(gradients)), np.int64)
        for number, its in enumerate(gradients):
            if its is not None:
                flat = its if its.dim() == 2 else its.reshape(-1, dim)
                flat = flat if flat.stride(1) == 1 or dim == 1 else flat.contiguous()
                kept.append(flat)  # alive until they are read
                places[0, number], places[1, number] = flat.data_ptr(), flat.stride(0)
        summed = np.zeros((num_rows, dim), np.float32)
        _sum_rows(places[0], places[1], np.array(bundle.ends), bundle.index.numpy(), summed)
        return torch.from_numpy(summed), None, None


def _collector(bundle: BundleRows, used: npt.NDArray[np.bool_], collect: Collect) -> Callable[[Tensor], None]:
    """Hands the gradients of a bundle on, at the moment when backward has finished them."""
    specs = bundle.specs
    first = specs[bundle.route.tables[0]]

    def collected(rows: Tensor) -> None:
        gradient, rows.grad = rows.grad, None
        if gradient is None or not gradient.shape[0]:
            return
        route = bundle.route
        if not used.all():  # a table that led to no output of this backward has no gradient
            keep = np.repeat(np.broadcast_to(used, route.counts.shape).reshape(-1), route.counts.reshape(-1))
            route, gradient = route.select(keep), gradient[torch.from_numpy(keep)]
        collect(RowGradients(first, route, gradient, specs=specs))

    return collected


_IDS = types.Array(types.int64, 1, "C", readonly=True)


@compiled(types.void(_IDS, _IDS, _IDS, _IDS, types.float32[:, ::1]), intrinsics)
def _sum_rows(addresses: Ids, strides: Ids, ends: Ids, index: Ids, out: Floats) -> None:
    """out[index[i]] += the gradient of lookup i, in order; those of table t lie strides[t] floats from each other."""
    index, out = detached(index), detached(out)
    dim, begin = np.uint64(out.shape[1]), 0
    for t in range(ends.size):
        if addresses[t]:
            rows = array_at(addresses[t], (ends[t] - begin) * max(strides[t], 1) + out.shape[1], np.float32)
            for i in range(begin, ends[t]):
                u, first = np.uint64(index[i]), np.uint64((i - begin) * strides[t])
                for j in range(dim):
                    out[u, j] += rows[first + j]
        begin = ends[t]
