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
from embershard.proto.compiled.intrinsics import array_at, detached, fma
from embershard.proto.compiled.jit import compiled
from embershard.proto.shared_memory import zero_floats
from embershard.worker.kernels import Mask
from embershard.worker.session.dense import untraced
from embershard.worker.session.gradients import RowGradients
from embershard.worker.session.reads import BundleRows, LookupResult

Collect = Callable[[RowGradients], None]

_NO_ORDER = np.empty(0, np.int64)
# (pack, unpack) of the code that runs, or None. Earlier versions of torch cannot say, and read no bundles.
_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
CAN_READ = _hooks is not None
# whether the backward that runs was told to retain_graph; a torch without it never refuses a second one
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)

_SECOND = (
    "Trying to backward through the graph a second time: the rows of a table were read by a forward that had its "
    "backward. Specify retain_graph=True there if you need to backward through the graph a second time"
)


def are_saves_hooked() -> bool:
    """Whether somebody takes the tensors that autograd saves, as an activation checkpoint does.

    It computes a forward again, and expects the same tensors. A bundle saves none, and is not there the second time: so
    rows come alone, then as now.
    """
    return _hooks is None or _hooks(True) is not None


def look_up(rows: Tensor, index: Tensor, how: str) -> Tensor:
    """rows[index], or of each row of an index (bags, n) the sum or mean of these: `how` is "rows", "sum" or "mean"."""
    return F.embedding(index, rows) if how == "rows" else F.embedding_bag(index, rows, mode=how)


def take(read: LookupResult, bundle: BundleRows, collect: Collect) -> Tensor | None:
    """Return the embeddings, or pooled bags, of one table of a bundle; None once a forward has taken them.

    The gradients of all tables reach `collect` together.
    """
    if not read.outputs:
        rows = bundle.rows.detach().requires_grad_()  # shares memory
        used = np.zeros(len(bundle.bounds), np.bool_)
        rows.register_post_accumulate_grad_hook(_collector(bundle, used, collect))  # type: ignore[no-untyped-call]
        read.outputs.extend(_BundleLookup.apply(rows, bundle, used))  # type: ignore[no-untyped-call]
    output, read.outputs[read.member] = read.outputs[read.member], None
    return output


class _BundleLookup(torch.autograd.Function):
    """F.embedding or F.embedding_bag for several tables, with the bits of one at a time, in outputs and gradients.

    It saves no tensor, whose loss torch would see in a second backward: a part of the outputs may have their first one
    after that of others.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, bundle: BundleRows, used: Mask) -> tuple[Tensor, ...]:
        ctx.bundle, ctx.used, ctx.freed = bundle, used, np.zeros(len(used), np.bool_)  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        dim, how = rows.shape[1], bundle.how
        bags = (bundle.bounds[:, 1] - bundle.bounds[:, 0]) // bundle.bounds[:, 2]
        if how == "rows":
            found = F.embedding(bundle.index, rows).numpy()
        else:
            lengths = np.repeat(bundle.bounds[:, 2], bags)
            offsets = torch.from_numpy(np.cumsum(lengths) - lengths)
            found = F.embedding_bag(bundle.index, rows, offsets, mode=how).numpy()
        outputs, start = [], 0
        for end, shape in zip(np.cumsum(bags).tolist(), bundle.shapes, strict=True):
            # no views for autograd, which would refuse to have one of several changed in place
            output = found[start:end]
            if how == "rows" and len(shape) != 1:
                output = output.reshape(*shape, dim)
            outputs.append(torch.from_numpy(output))
            start = end
        return tuple(outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        bundle: BundleRows = ctx.bundle  # type: ignore[attr-defined]
        used: Mask = ctx.used  # type: ignore[attr-defined]
        used[:] = [its is not None for its in gradients]
        if (ctx.freed & used).any():  # type: ignore[attr-defined]
            raise RuntimeError(_SECOND)
        if not _keeps_graph():
            ctx.freed |= used  # type: ignore[attr-defined]
        dim, bounds = bundle.rows.shape[1], bundle.bounds if used.all() else bundle.bounds[used]
        flat = [its if its.dim() == 2 else its.reshape(-1, dim) for its in gradients if its is not None]
        scales = np.ones(len(flat)) if bundle.how != "mean" else 1.0 / bounds[:, 2]
        if torch.is_grad_enabled():  # create_graph: by operations that autograd knows
            weighted = zip(flat, bounds[:, 2].tolist(), scales.tolist(), strict=True)
            joined = torch.cat([its.repeat_interleave(length, 0) * scale for its, length, scale in weighted])
            index = torch.cat([bundle.index[start:end] for start, end, _ in bounds.tolist()])
            return joined.new_zeros(bundle.rows.shape).index_add(0, index, joined), None, None
        flat = [its if its.stride(1) == 1 or dim == 1 else its.contiguous() for its in flat]  # alive until it is read
        places = np.array([(its.data_ptr(), its.stride(0)) for its in flat], np.int64).reshape(-1, 2)
        summed = zero_floats(*bundle.rows.shape)
        order = _NO_ORDER if bundle.how == "rows" else _order(bundle)
        _sum_rows((places, bounds), scales.astype(np.float32), bundle.index.numpy(), order, summed)
        return torch.from_numpy(summed), None, None


def _order(bundle: BundleRows) -> Ids:
    """(N,) in which order torch adds the gradients of a table's lookups: that of its sort, which is not stable."""
    flat = torch.from_numpy(bundle.flat)
    sizes = (bundle.bounds[:, 1] - bundle.bounds[:, 0]).tolist()
    if len(set(sizes)) == 1:
        return flat.view(len(sizes), -1).sort(1)[1].view(-1).numpy()
    return torch.cat([part.sort()[1] for part in torch.split(flat, sizes)]).numpy()


def _collector(bundle: BundleRows, used: Mask, collect: Collect) -> Callable[[Tensor], None]:
    """Hands the gradients of a bundle on, at the moment when backward has finished them."""
    first = bundle.specs[bundle.route.tables[0]]

    @untraced
    def collected(rows: Tensor) -> None:
        gradient, rows.grad = rows.grad, None
        if gradient is None or not gradient.shape[0]:
            return
        route, trained = bundle.route, used & [its is not None and not its.frozen for its in bundle.readers]
        if not trained.any():
            return
        # a table that led to no output of this backward has no gradient, nor has one that was frozen since
        if not trained.all():
            keep = np.repeat(np.broadcast_to(trained, route.counts.shape).reshape(-1), route.counts.reshape(-1))
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
