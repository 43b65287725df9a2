"""Dense parameters as rows of a dense table.

A parameter fills whole blocks of BLOCK floats, so that a parameter without a gradient is simply not pushed, as
torch.optim leaves it alone. On a device all blocks are one buffer, of which the parameters are views. Blocks have ids
that an even placement routes in their own order, so that rows are pulled and gradients pushed without a permutation.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, SupportsIndex, TypeVar

import numpy as np
import torch
import torch._C._dynamo.eval_frame as eval_frame
from torch import nn
from torch.utils import _pytree as pytree

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import EmbershardError
from embershard.proto.routing import Placement, Route, even_ids, make_route
from embershard.proto.spec import TableSpec, name_key
from embershard.worker.compression.low_rank import DenseLayout, ParameterSlice
from embershard.worker.device import host_rows
from embershard.worker.session.gradients import RowGradients, to_host

F = TypeVar("F", bound=Callable[..., Any])

BLOCK = 1024  # floats: 4 KiB, small enough to spread over shards, large enough that ids cost nothing


def untraced(function: F) -> F:
    """Have torch.compile call a function as it is: neither the function nor what it calls becomes part of a graph.

    As torch.compiler.disable, which imports torch's compiler and takes seconds for that.
    """
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # torch before 2.8
        return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Context manager that pauses torch.func's grad, vmap and jvp: inside them a tensor's memory cannot be written."""
    functorch, levels = torch._C._functorch, []
    try:
        while functorch.peek_interpreter_stack() is not None:
            levels.append(functorch.pop_dynamic_layer_stack())
        yield
    finally:
        while levels:
            functorch.push_dynamic_layer_stack(levels.pop())


def refuse_trace(table: str) -> None:
    """Raise NotImplementedError inside torch.jit.trace, which would keep a table's rows as constants."""
    if torch._C._is_tracing():
        raise NotImplementedError(
            f"table {table!r}: torch.jit.trace, and torch.onnx.export(dynamo=False), would keep these rows as the "
            "answer for all ids and steps: load model.state_dict() into a model that is not wrapped, and trace that one"
        )


def have_same_values(values: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether two float32 tensors of one shape have the same values; NaN, of training that diverged, equals NaN."""
    return torch.equal(values, others) or torch.equal(values.view(torch.int32), others.view(torch.int32))


class ParameterChanged(EmbershardError):
    """A dense parameter was changed in this process, though the shards hold it."""

    template = (
        "parameter {parameter!r} was changed in this process, but the shards hold its values, and the next pull would "
        "undo the change: leave optimizer.step() out (session.step() trains the dense weights, too; or "
        "wrap(..., dense='ddp') leaves them to an optimizer of torch), set first values before wrap, average with "
        "embershard.WeightAverage, and assign other values, for all workers, by parameter.copy_(values) under "
        "torch.no_grad()"
    )


@dataclass(frozen=True, slots=True)
class _ParameterSlice:
    """A parameter, and the blocks that it fills."""

    name: str
    parameter: nn.Parameter
    start: int  # first block
    stop: int

    def view(self, blocks: torch.Tensor) -> torch.Tensor:
        """The parameter's part of (num_blocks, BLOCK) floats, in its shape."""
        first, count = self.start * BLOCK, self.parameter.numel()
        part = blocks.view(-1)[first : first + count].view(self.parameter.shape)
        # a storage of its own: who saves a state_dict may leave all but one tensor of a storage out
        return torch.from_dlpack(part)  # type: ignore[attr-defined]


class _Part(NamedTuple):
    """The blocks of some parameters, as a route has them."""

    route: Route
    order: Ids | None  # (U,) the rank of each block's number among these; None where they ascend


def layout_seed(named: Sequence[tuple[str, nn.Parameter]]) -> int:
    """A number that two workers share only if their dense parameters have the same names and shapes."""
    return name_key(";".join(f"{name}{tuple(parameter.shape)}" for name, parameter in named)) >> 1


class DenseWeights:
    """The dense parameters of one model and their table."""

    def __init__(
        self,
        spec: TableSpec,
        named: Sequence[tuple[str, nn.Parameter]],
        placement: Placement,
    ) -> None:
        self.spec = spec
        self._slices: list[_ParameterSlice] = []
        start = 0
        for name, parameter in named:
            stop = start + -(-parameter.numel() // BLOCK)
            self._slices.append(_ParameterSlice(name, parameter, start, stop))
            start = stop
        self.num_blocks = start
        self.ids = even_ids(start, spec.space_key)  # (num_blocks,) int64
        self._by_id = np.argsort(self.ids)  # blocks in the order of their ids
        self.place(placement)
        # by which step each parameter was pushed last, whatever was frozen since; pulls lack the pushes of `late` steps
        self._steps, self._pushed_at, self.late = 0, [-math.inf] * len(self._slices), 0
        self._clock: int | None = None  # when the parameters were last pulled
        self._expired = False  # some parameters are StaleParameters
        self._erased = False  # and have lost their old values
        self._watched: dict[int, torch.Tensor] = {}  # parameter's place -> its values when `data` was asked for
        self._pull: Callable[[DenseWeights], None] | None = None
        self._assign: Callable[[str, Route, Floats], None] | None = None
        self._copied: torch.cuda.Event | None = None
        for place in self._slices:
            place.parameter.__class__ = RemoteParameter
            place.parameter.weights = self  # type: ignore[attr-defined]
            place.parameter.grad = None  # of a backward before; a table's weight loses it, too
        self._bind()

    def place(self, placement: Placement) -> None:
        """Route the blocks by this placement from here on."""
        self._all = make_route(self.ids, self.spec.space_key, placement)
        self._in_order = np.array_equal(self._all.ids, self.ids)
        self._parts: dict[tuple[bool, ...], _Part] = {}

    def _bind(self) -> None:
        """Make every parameter a view of one buffer on its device."""
        devices = {place.parameter.device for place in self._slices}
        if len(devices) > 1:
            raise ValueError(
                f"dense parameters lie on several devices ({', '.join(sorted(map(str, devices)))}); "
                "move the model to one of them"
            )
        device = devices.pop()
        self._host = host_rows(self.num_blocks, BLOCK, device).zero_()
        self._blocks = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._views = []
        for place in self._slices:
            view = place.view(self._blocks)
            view.copy_(place.parameter.detach())
            torch.Tensor.data.__set__(place.parameter, view)  # type: ignore[attr-defined]
            self._views.append((place.parameter, view.data_ptr()))
        self._padding = torch.zeros(BLOCK, dtype=torch.float32, device=device)
        self._host.copy_(self._blocks)  # a pull of some blocks leaves the others as they are
        self._note_versions()

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
        """All blocks as they are here, (num_blocks, BLOCK): up to date, or as they were before the first pull."""
        assert not self._erased
        return to_host([self._blocks])[0]

    def stale(self, clock: int) -> bool:
        """Whether the parameters have to be pulled before they are read at `clock`."""
        return self._clock != clock or self._expired

    def expire(self) -> None:
        """Pull the parameters that are trained before anything reads them: they change on the shards now."""
        self.check_unchanged()
        slices = zip(self._slices, self._pushed_at, strict=True)
        self._mark_stale([place for place, at in slices if at == self._steps or place.parameter.requires_grad])

    def forget(self) -> None:
        """Pull all parameters before anything reads them, whatever the clock says."""
        self.check_unchanged()
        self._clock = None
        self._mark_stale(self._slices)

    def keep_at(self, pull: Callable[[DenseWeights], None], assign: Callable[[str, Route, Floats], None]) -> None:
        """Have `pull` bring the parameters up to date when somebody reads one that is not, as now; `values` stay.

        `assign` changes blocks ((U, BLOCK), in route order) of the table where they are kept.
        """
        self._pull, self._assign = pull, assign
        self._clock, self._expired = None, True
        for place in self._slices:
            place.parameter.__class__ = StaleParameter

    def read(self) -> None:
        """Bring the parameters up to date, for somebody who reads one of them."""
        assert self._pull is not None
        self._pull(self)

    def assign(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Give a parameter other values on the shards, past the optimizer, whose state stays."""
        assert self._assign is not None
        self.check_unchanged()
        block = (values.data_ptr() - self._blocks.data_ptr()) // (4 * BLOCK)
        source = next((its.parameter for its in self._slices if its.start <= block < its.stop), None)
        if isinstance(source, StaleParameter):
            self.read()  # a state_dict that was not copied has the current values, as in torch
        place = next(its for its in self._slices if its.parameter is parameter)
        flat = torch.zeros((place.stop - place.start) * BLOCK)
        flat[: parameter.numel()] = torch.broadcast_to(values.detach(), parameter.shape).reshape(-1)
        part = self._select(tuple(its is place for its in self._slices))
        rows = flat.view(-1, BLOCK).numpy()
        try:
            self._assign(self.spec.name, part.route, rows if part.order is None else rows[part.order])
        finally:  # some of the shards may have the values
            self._mark_stale([place])

    def reads(self) -> Route:
        """The blocks to pull: all of them at first, later those of the parameters that are, or just were, trained."""
        if self._clock is None:
            return self._all
        late = [self._steps - at <= self.late for at in self._pushed_at]
        return self._part(
            tuple(
                is_late or isinstance(its := place.parameter, StaleParameter) or its.requires_grad
                for place, is_late in zip(self._slices, late, strict=True)
            )
        ).route

    def follow(self) -> None:
        """Go where the model went: to another device, for instance. ParameterChanged after a change in place."""
        with torch._C.DisableTorchFunctionSubclass():
            if any(parameter.data_ptr() != pointer for parameter, pointer in self._views):
                self.check_unchanged()
                self._bind()
            elif any(its.parameter._version > at for its, at in zip(self._slices, self._versions, strict=True)):
                self.check_unchanged()  # a loop without a step would never come to know

    def watch(self, parameter: nn.Parameter) -> None:
        """Remember a parameter's values: what is done with its `data` raises no version."""
        place = next(number for number, its in enumerate(self._slices) if its.parameter is parameter)
        self._watched.setdefault(place, parameter.detach().clone())

    def changed(self) -> str | None:
        """The name of a parameter that somebody else than a pull changed. ValueError where one is of another type."""
        with torch._C.DisableTorchFunctionSubclass():
            for number, (place, version) in enumerate(zip(self._slices, self._versions, strict=True)):
                before, now = self._watched.get(number), place.parameter
                if now.dtype != torch.float32:
                    raise ValueError(
                        f"parameter {place.name!r} became {now.dtype}; shards hold float32: use torch.autocast "
                        "instead of converting a wrapped model"
                    )
                same = before is None or have_same_values(before, now.detach().to(before))
                if now._version > version or not same:
                    return place.name
        return None

    def check_unchanged(self) -> None:
        """ParameterChanged, once, where somebody else than a pull changed a parameter: all are pulled anew then."""
        name = self.changed()
        self._watched.clear()
        if name is not None:
            self._clock = None
            with torch._C.DisableTorchFunctionSubclass():
                self._mark_stale(self._slices)
            raise ParameterChanged(parameter=name)

    def _mark_stale(self, slices: Sequence[_ParameterSlice]) -> None:
        """NaN takes the place of old values: whatever reads them past the class, as an alias does, is seen at once.

        Autograd learns of the change, as from an optimizer: a graph that holds old values has no backward any more.
        """
        self._expired = self._erased = True
        for place in slices:  # first: a Ctrl-C may come in between, and nobody is to read NaN
            place.parameter.__class__ = StaleParameter
        if len(slices) == len(self._slices):
            self._blocks.fill_(torch.nan)
        else:
            for place in slices:
                self._blocks[place.start : place.stop].fill_(torch.nan)
        parameters = [place.parameter for place in slices]
        self._note_versions(parameters)
        torch.autograd.graph.increment_version(parameters)

    def _mark_read(self) -> None:
        """The parameters have the values of the shards now."""
        for parameter in self.parameters:
            parameter.__class__ = RemoteParameter
        self._note_versions()
        self._expired = self._erased = False

    def _note_versions(self, increased: Sequence[nn.Parameter] = ()) -> None:
        """Remember the versions as they are, or will be once those of some parameters were increased.

        Noted afterwards, a Ctrl-C in between would look like a change by somebody else.
        """
        more = set(map(id, increased))
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [place.parameter._version + (id(place.parameter) in more) for place in self._slices]

    def accept(self, route: Route, rows: Floats, clock: int) -> None:
        """Take the pulled blocks ((U, BLOCK), in route order) over into the parameters."""
        self.follow()
        self.check_unchanged()
        if self._copied is not None:
            self._copied.synchronize()  # the last copy to the device, done since long
        values = self._host.numpy()
        blocks = slice(None) if route is self._all and self._in_order else self._blocks_of(route)
        if not self._expired and not np.array_equal(values[blocks], rows, equal_nan=True):
            # no step in between: a graph that holds the old values has no backward any more
            self._note_versions(self.parameters)
            torch.autograd.graph.increment_version(self.parameters)
        values[blocks] = rows
        if self._blocks is not self._host:
            self._blocks.copy_(self._host, non_blocking=True)
            if self._blocks.is_cuda:
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record(torch.cuda.current_stream(self._blocks.device))
        self._clock = clock
        self._mark_read()

    def gradients(self) -> RowGradients | None:
        """Gradients of the parameters that have one, copied once, and clear them; None without any."""
        self.follow()
        self.check_unchanged()
        present = tuple(place.parameter.grad is not None for place in self._slices)
        self._steps += 1
        pushed = zip(present, self._pushed_at, strict=True)
        self._pushed_at = [self._steps if is_pushed else at for is_pushed, at in pushed]
        if not any(present):
            return None
        pieces = []
        for place in self._slices:
            gradient, place.parameter.grad = place.parameter.grad, None
            if gradient is not None:
                flat = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
                pieces += [flat, self._padding[: -flat.numel() % BLOCK]]
        part = self._part(present)
        # a new buffer each time: the last one may still be on its way
        rows = torch.cat(pieces).reshape(-1, BLOCK)
        if part.order is not None:
            rows = rows[torch.from_numpy(part.order).to(rows.device)]
        return RowGradients(self.spec, part.route, rows)

    def clear(self) -> None:
        """Drop the gradients of the dense weights."""
        for place in self._slices:
            place.parameter.grad = None

    def _part(self, wanted: tuple[bool, ...]) -> _Part:
        part = self._parts.get(wanted)
        if part is None:
            part = self._parts[wanted] = self._select(wanted)
        return part

    def _select(self, wanted: tuple[bool, ...]) -> _Part:
        keep = np.zeros(self.num_blocks, bool)
        for place, want in zip(self._slices, wanted, strict=True):
            keep[place.start : place.stop] = want
        route = self._all if all(wanted) else self._all.select(keep[self._blocks_of(self._all)])
        return _Part(route, None if self._in_order else self._blocks_of(route).argsort().argsort())

    def _blocks_of(self, route: Route) -> Ids:
        """The number of each block of a route."""
        return self._by_id[np.searchsorted(self.ids, route.ids, sorter=self._by_id)]


def check_no_graph(parameter: nn.Parameter) -> None:
    """RuntimeError where torch would not change a parameter in place."""
    if torch.is_grad_enabled() and parameter.requires_grad:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation: use torch.no_grad()"
        )


class RemoteParameter(nn.Parameter):
    """A dense parameter that the shards hold and this process reads.

    `copy_`, which load_state_dict calls, assigns its values on the shards. What is written into it otherwise would be
    lost: the next pull takes its place. DenseWeights finds it by its version, which torch raises at each change in
    place, and where `data` was asked for, which changes without that, by its values.
    """

    weights: DenseWeights

    def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> Self:
        """Assign these values on the shards, past the optimizer, whose state stays; where torch could, not in a graph.

        All workers read them then.
        """
        check_no_graph(self)
        self.weights.assign(self, other)
        return self

    @property
    def data(self) -> torch.Tensor:
        """The values apart from autograd; a change in them is found at the next step, as ParameterChanged."""
        self.weights.watch(self)
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.weights.watch(self)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        """A parameter of torch with the same values: what somebody copies is no longer trained on the shards."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickled as the copy."""
        return copy.deepcopy(self).__reduce_ex__(protocol)


class StaleParameter(RemoteParameter):
    """A RemoteParameter that is pulled before its values are used, by whatever function and whoever holds it.

    DenseWeights gives parameters this class when they change on the shards, and the other one when they are pulled.
    Compiled code does not ask; see `may_be_compiled`.
    """

    @classmethod
    @untraced
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Pull the parameters among the arguments, then call the function."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _read_parameters((args, kwargs))
        return func(*args, **kwargs)


def _read_parameters(value: object) -> None:
    if isinstance(value, StaleParameter):
        value.weights.read()
    elif isinstance(value, Mapping):
        for part in value.values():
            _read_parameters(part)
    elif isinstance(value, list | tuple):
        for part in value:
            _read_parameters(part)


def _read_in_tree(parameter: StaleParameter) -> tuple[list[nn.Parameter], None]:
    parameter.weights.read()
    return [parameter], None  # no StaleParameter any more, and so a leaf


# torch.func takes the values of its arguments past __torch_function__, but goes through them as trees before
pytree.register_pytree_node(StaleParameter, _read_in_tree, lambda leaves, _: next(iter(leaves)))

# what a parameter says of itself without its values
METADATA = {
    *(
        getattr(getattr(torch.Tensor, name), access)
        for name in ("device", "dtype", "grad", "grad_fn", "is_cuda", "is_leaf", "is_meta", "is_sparse", "itemsize",
                     "layout", "nbytes", "ndim", "requires_grad", "shape", "_version")
        for access in ("__get__", "__set__", "__delete__")
    ),
    *(
        getattr(torch.Tensor, name)
        for name in ("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "is_inference",
                     "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
                     "stride")
    ),
}  # fmt: skip


def may_be_compiled() -> bool:
    """Whether this process has functions of torch.compile or torch.jit, which do not call torch's functions."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    # None stands for torch.compiler.disable
    backends = {} if dynamo is None else getattr(dynamo, "cached_backends", {0: "unknown"})
    if any(backend is not None for backend in backends.values()):
        return True
    return bool(torch.jit._state._python_cu.get_functions())  # type: ignore[func-returns-value]
