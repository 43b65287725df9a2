"""Dense parameters as rows of a dense table.

A parameter fills whole blocks of BLOCK floats, so that a parameter without a gradient is simply not pushed, as
torch.optim leaves it alone. On a device all blocks are one buffer, of which the parameters are views. Blocks have ids
that an even placement routes in their own order, so that rows are pulled and gradients pushed without a permutation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from embershard.proto.arrays import Floats, Ids
from embershard.proto.routing import Placement, Route, even_ids, make_route
from embershard.proto.spec import TableSpec, name_key
from embershard.worker.compression.low_rank import DenseLayout, ParameterSlice
from embershard.worker.device import host_rows, to_host
from embershard.worker.session.gradients import RowGradients

BLOCK = 1024  # floats: 4 KiB, small enough to spread over shards, large enough that ids cost nothing


@dataclass(frozen=True, slots=True)
class _ParameterSlice:
    """Where a parameter lies."""

    name: str
    parameter: nn.Parameter
    start: int  # first block
    stop: int

    def view(self, blocks: torch.Tensor) -> torch.Tensor:
        """The parameter's part of (num_blocks, BLOCK) floats, in its shape."""
        flat = blocks[self.start : self.stop].view(-1)[: self.parameter.numel()]
        return flat.view(self.parameter.shape)


def layout_seed(named: Sequence[tuple[str, nn.Parameter]]) -> int:
    """A number that two workers share only if their dense parameters have the same names and shapes."""
    return name_key(";".join(f"{name}{tuple(parameter.shape)}" for name, parameter in named)) >> 1


class DenseWeights:
    """The dense parameters of one model and their table."""

    def __init__(self, spec: TableSpec, named: Sequence[tuple[str, nn.Parameter]], placement: Placement) -> None:
        self.spec = spec
        self._slices: list[_ParameterSlice] = []
        start = 0
        for name, parameter in named:
            stop = start + -(-parameter.numel() // BLOCK)
            self._slices.append(_ParameterSlice(name, parameter, start, stop))
            start = stop
        self.num_blocks = start
        self.ids = even_ids(start, spec.space_key)  # (num_blocks,) int64
        self._all = make_route(self.ids, spec.space_key, placement)
        self._in_order = np.array_equal(self._all.ids, self.ids)
        self._parts: dict[tuple[bool, ...], Route] = {}
        self._clock: int | None = None  # when the parameters were last pulled
        self._copied: torch.cuda.Event | None = None
        self._bind()

    def _bind(self) -> None:
        """Make every parameter a view of one buffer on its device."""
        devices = {place.parameter.device for place in self._slices}
        if len(devices) > 1:
            raise ValueError(
                f"dense parameters lie on several devices ({', '.join(sorted(map(str, devices)))}); "
                "move the model to one of them"
            )
        for place in self._slices:
            if place.parameter.dtype != torch.float32:
                raise ValueError(
                    f"parameter {place.name!r} became {place.parameter.dtype}; shards hold float32: use torch.autocast "
                    "instead of converting a wrapped model"
                )
        device = devices.pop()
        self._host = host_rows(self.num_blocks, BLOCK, device).zero_()
        self._blocks = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._views = []
        for place in self._slices:
            view = place.view(self._blocks)
            view.copy_(place.parameter.data)
            place.parameter.data = view
            self._views.append((place.parameter, view.data_ptr()))
        self._padding = torch.zeros(BLOCK, device=device)
        self._host.copy_(self._blocks)  # a pull of some blocks leaves the others as they are

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the blocks hold, in their order."""
        return [place.parameter for place in self._slices]

    @property
    def layout(self) -> DenseLayout:
        """Which parameters the blocks of the table hold."""
        return DenseLayout(
            self.ids, [ParameterSlice(place.start, tuple(place.parameter.shape)) for place in self._slices]
        )

    def values(self) -> Floats:
        """All blocks as they are here, (num_blocks, BLOCK)."""
        return to_host([self._blocks])[0]

    @property
    def storage(self) -> int:
        """The address of the memory that all parameters share."""
        return self._blocks.untyped_storage().data_ptr()

    def stale(self, clock: int) -> bool:
        """Whether the parameters have to be pulled before they are read at `clock`."""
        return self._clock != clock

    def follow(self) -> None:
        """Go where the model went: to another device, for instance."""
        if any(parameter.data_ptr() != pointer for parameter, pointer in self._views):
            self._bind()

    def forget(self) -> None:
        """Pull again at the next read, whatever the clock says."""
        self._clock = None

    def reads(self) -> Route:
        """The blocks to pull: all of them at first, later those of the parameters that are trained."""
        if self._clock is None:
            return self._all
        return self._part(tuple(place.parameter.requires_grad for place in self._slices))

    def accept(self, route: Route, rows: Floats, clock: int) -> None:
        """Take the pulled blocks ((U, BLOCK), in route order) over into the parameters."""
        self.follow()
        if self._copied is not None:
            self._copied.synchronize()  # the last copy to the device, done since long
        if self._in_order and len(rows) == self.num_blocks:
            self._host.numpy()[:] = rows
        else:
            self._host.numpy()[self._blocks_of(route)] = rows
        if self._blocks is not self._host:
            self._blocks.copy_(self._host, non_blocking=True)
            if self._blocks.is_cuda:
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record(torch.cuda.current_stream(self._blocks.device))
        self._clock = clock

    def gradients(self) -> RowGradients | None:
        """Gradients of the parameters that have one, copied once, and clear them; None without any."""
        self.follow()
        present = tuple(place.parameter.grad is not None for place in self._slices)
        if not any(present):
            return None
        pieces = []
        for place in self._slices:
            gradient, place.parameter.grad = place.parameter.grad, None
            if gradient is not None:
                flat = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
                pieces += [flat, self._padding[: -flat.numel() % BLOCK]]
        route = self._part(present)
        # a new buffer each time: the last one may still be on its way
        rows = torch.cat(pieces).reshape(-1, BLOCK)
        if not self._in_order:
            rows = rows[torch.from_numpy(self._blocks_of(route).argsort().argsort()).to(rows.device)]
        return RowGradients(self.spec, route, rows)

    def clear(self) -> None:
        """Drop the gradients of the dense weights."""
        for place in self._slices:
            place.parameter.grad = None

    def _part(self, wanted: tuple[bool, ...]) -> Route:
        if all(wanted):
            return self._all
        route = self._parts.get(wanted)
        if route is None:
            keep = np.zeros(self.num_blocks, bool)
            for place, want in zip(self._slices, wanted, strict=True):
                keep[place.start : place.stop] = want
            route = self._parts[wanted] = self._all.select(keep[self._blocks_of(self._all)])
        return route

    def _blocks_of(self, route: Route) -> Ids:
        """The number of each block of a route."""
        order = np.argsort(self.ids)
        return order[np.searchsorted(self.ids, route.ids, sorter=order)]


# reading these of a parameter needs no values
_METADATA = {getattr(torch.Tensor, name).__get__ for name in ("device", "dtype", "shape")}


class DeferredRead(TorchFunctionMode):
    """Reads dense weights that wait for a lookup before anything else uses them.

    It sees every call of a torch function, method or operator in its thread, and finds the weights by their memory,
    whatever tensor they are reached by. It does not see an extension that takes tensors past torch's own functions,
    nor compiled code: see `may_be_compiled`.
    """

    def __init__(self, weights: Sequence[DenseWeights], read: Callable[[], None]) -> None:
        super().__init__()
        self.weights = list(weights)
        self._storages = {its.storage for its in weights}
        self._read = read

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self.weights and func not in _METADATA and (self._holds(args) or self._holds(tuple(kwargs.values()))):
            self._read()
        return func(*args, **kwargs)

    def stop(self) -> bool:
        """End the watch; False while a function runs that it watches, because torch has taken it off meanwhile."""
        if not any(mode is self for mode in _get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
            return False
        above = []
        while (mode := _pop_mode()) is not self:  # type: ignore[no-untyped-call]
            above.append(mode)
        for mode in reversed(above):  # those of the model, which are inside this one
            _push_mode(mode)  # type: ignore[no-untyped-call]
        return True

    def _holds(self, value: object) -> bool:
        """Whether any of the weights are in an argument."""
        if isinstance(value, torch.Tensor):
            try:
                return value.untyped_storage().data_ptr() in self._storages
            except (NotImplementedError, RuntimeError):  # sparse, or wrapped by a transform: it may hide a weight
                return True
        if isinstance(value, Mapping):
            return any(map(self._holds, value.values()))
        return isinstance(value, list | tuple) and any(map(self._holds, value))


def may_be_compiled() -> bool:
    """Whether this process has functions of torch.compile or torch.jit, which do not call torch's functions."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    # None stands for torch.compiler.disable
    backends = {} if eval_frame is None else getattr(eval_frame, "cached_backends", {0: "unknown"})
    if any(backend is not None for backend in backends.values()):
        return True
    return bool(torch.jit._state._python_cu.get_functions())  # type: ignore[func-returns-value]
