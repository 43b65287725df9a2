"""`weight` of an embedding whose rows are on the shards: read by ids, or as a whole where it is not large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from embershard.proto.arrays import Ids
from embershard.proto.errors import EmbershardError
from embershard.proto.routing import Route
from embershard.worker.nn.rows_gradient import RowsGradient, TableTooLarge, changed_tensor
from embershard.worker.session.dense import (
    METADATA,
    ParameterChanged,
    check_no_graph,
    have_same_values,
    outside_transforms,
    refuse_trace,
    untraced,
)
from embershard.worker.session.gradients import RowGradients
from embershard.worker.session.tables import RemoteTable

_MOST_ROWS = 2**46  # in the shape of a weight: torch counts a tensor's bytes in 63 bits, and hashed ids have 62
WHOLE_LIMIT = 64 * 2**20  # bytes of a table that may be read as a whole


class NoRowsRead(EmbershardError):
    """A table that stands for the rows of a batch was read before any of them."""

    template = (
        "table {table!r} was read as a whole before any row of this step, and beyond_limit='batch_rows' gives it the "
        "rows of the batch: add the regulariser to the loss after the forward"
    )


class RemoteWeight(nn.Parameter):
    """The weight (num_embeddings, dim) of a table on the shards, as models and training loops use nn.Embedding's.

    F.embedding, F.embedding_bag and weight[ids] read the rows of these ids. Every other use reads the whole table, once
    per step; beyond `limit` bytes it raises TableTooLarge or, with `batch_rows`, gets the (U, dim) rows that this step
    has looked up. Gradients of both kinds are pushed by the next `Session.step()`. With a whole read, all rows are
    pushed, as torch's optimizers change all rows of a dense weight.

    `grad` is that of the rows read since the last step. `copy_`, which load_state_dict calls, assigns the whole table
    on the shards. Changing values in place otherwise is an error (ParameterChanged).
    """

    table: RemoteTable
    limit: int
    batch_rows: bool

    embedding: ClassVar[Callable[..., Callable[..., Tensor]]]  # set by embedding.py, which imports this file
    embedding_bag: ClassVar[Callable[..., Callable[..., Tensor]]]

    @staticmethod
    def of(
        parameter: nn.Parameter, table: RemoteTable, num_embeddings: int, limit: int, *, batch_rows: bool = False
    ) -> RemoteWeight:
        """The weight of a table in place of a parameter: the same object, so that all who hold it read the shards.

        A parameter on the meta device cannot be moved: its weight is another object, on the CPU.
        """
        parameter.grad = None
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        nothing = torch.full((1, 1), torch.nan, dtype=torch.float32, device=device)
        nothing = nothing.expand(min(num_embeddings, _MOST_ROWS), table.spec.dim)
        if parameter.is_meta:
            parameter = nn.Parameter(nothing, parameter.requires_grad)
        else:
            parameter.data = nothing
        parameter.__class__ = RemoteWeight
        assert isinstance(parameter, RemoteWeight)
        parameter.table, parameter.limit = table, limit
        table.parameter = parameter
        parameter.batch_rows, parameter._lookups = batch_rows and 4 * parameter.numel() > limit, []
        parameter._whole, parameter._read_at, parameter._whole_version, parameter.looked_up_at = None, -1, 0, -1
        parameter._shown, parameter._reads_whole, parameter._chosen_at = None, False, -1
        parameter.in_use = parameter._used = parameter._was_used = False
        is_trained = parameter.requires_grad
        parameter.requires_grad_()  # torch takes hooks for no other tensor
        Tensor.register_post_accumulate_grad_hook(parameter, RemoteWeight._collect)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(is_trained)
        return parameter

    in_use: bool  # as a whole, in this step or the last one
    looked_up_at: int  # clock of the last lookup by ids whose gradient the whole does not get
    _lookups: list[Ids]  # of that clock, where they stand for the whole
    _whole: Tensor | None  # (num_embeddings, dim), a leaf, while it is as the step wants it
    _read_at: int  # clock
    _whole_version: int  # of the whole, as it was read
    _shown: Tensor | None  # a copy of the whole, where somebody got it apart from autograd
    _used: bool  # as a whole, and with a gradient, in this step
    _was_used: bool  # in the step before
    _reads_whole: bool  # whether lookups do
    _chosen_at: int  # clock

    def whole(self) -> Tensor:
        """Return all rows, (num_embeddings, dim), or with batch_rows those that this step has looked up, (U, dim).

        The session collects their gradient. TableTooLarge beyond the limit; NoRowsRead before the step's first lookup.
        """
        if self.batch_rows:
            return self._rows_of_step()
        if not torch.is_inference_mode_enabled() and torch.is_grad_enabled() and self.requires_grad:
            self._used = True
        return self._whole_of_step()

    def for_lookups(self) -> Tensor | None:
        """The whole, where the step trains it anyway: the gradients of lookups are then summed as torch sums them.

        A whole that somebody only looked at does not change which rows are trained. All lookups of a step read alike:
        an activation checkpoint repeats some in backward, and takes what these save for what it has saved.
        """
        is_trained = torch.is_grad_enabled() and self.requires_grad
        if self._is_current() and (not is_trained or self.changed()):  # to other values, for an evaluation
            return self._whole_of_step()
        if not is_trained:
            return None
        clock = self.table.session.clock
        if self._chosen_at != clock:
            self._chosen_at = clock
            self._reads_whole = self._was_used or (self._used and self.looked_up_at != clock)
        return self._whole_of_step() if self._reads_whole else None

    def keep_lookup(self, ids: Ids) -> None:
        """Keep the ids of a lookup, as some of those that stand for the whole in this step."""
        self._lookups = [*(self._lookups if self.looked_up_at == self.table.session.clock else ()), ids]

    def _collect(self) -> None:
        """Take a gradient of the weight itself, which a torch.autograd.Function gives it, for one of the whole."""
        gradient = super().grad
        Tensor.grad.__set__(self, None)  # type: ignore[union-attr]
        self._used = True
        self._whole_of_step().backward(gradient)  # type: ignore[no-untyped-call]

    def _rows_of_step(self) -> Tensor:
        if self.looked_up_at != self.table.session.clock:
            raise NoRowsRead(table=self.table.spec.name)
        ids = torch.from_numpy(np.unique(np.concatenate(self._lookups)))
        return self.embedding(self.table, self.shape[0], weight=self)(ids.to(self.device))

    def stepped(self) -> bool:
        """The rows change on the shards now; whether the next step may read them as a whole, too.

        NaN takes the place of old values, for whoever kept them: torch would show the new ones there.
        """
        whole = self._whole
        self.forget()
        if whole is not None and self.requires_grad:
            with torch.no_grad():
                whole.fill_(torch.nan)
        self._was_used, self._used = self._used, False
        self.in_use = self._was_used
        return self.in_use

    def forget(self) -> None:
        """Read the whole anew at its next use."""
        self.check_unchanged()
        self._whole = self._shown = None

    def check_unchanged(self) -> None:
        """ParameterChanged where somebody changed the values that were read, and did not put them back."""
        name = self.changed()
        if name is not None:
            self._whole = self._shown = None
            raise ParameterChanged(parameter=name)

    def changed(self) -> str | None:
        """The name of the table, where the values that were read are others now."""
        if self._whole is None:
            return None
        if self._shown is None:
            same = self._whole._version == self._whole_version
        else:  # numpy raises no version, and who puts values back does
            same = have_same_values(self._shown, self._whole.detach())
        return None if same else self.table.spec.name

    def move(self, device: torch.device) -> None:
        """Have the rows on another device."""
        self.forget()
        nothing = torch.full((1, 1), torch.nan, dtype=torch.float32, device=device).expand(self.shape)
        with torch._C.DisableTorchFunctionSubclass():  # __torch_function__ takes an assignment for a user's
            Tensor.data.__set__(self, nothing)  # type: ignore[attr-defined]

    def _is_current(self) -> bool:
        return self._whole is not None and self._read_at == self.table.session.clock

    def _whole_of_step(self) -> Tensor:
        refuse_trace(self.table.spec.name)
        if not self._is_current():
            self.forget()
            nbytes = 4 * self.numel()
            if nbytes > self.limit:
                raise TableTooLarge(table=self.table.spec.name, nbytes=nbytes, limit=self.limit)
            with outside_transforms(), torch.inference_mode(False), torch.no_grad():
                read = self.table.session.read_all(self, self.table.spec, self.shape[0], self.device)
                whole = read.rows[read.index].requires_grad_()
                whole.register_post_accumulate_grad_hook(_collector(self, read.route))  # type: ignore[no-untyped-call]
            self.in_use = True
            self._whole, self._read_at, self._whole_version = whole, self.table.session.clock, whole._version
        assert self._whole is not None
        if self._whole.requires_grad != self.requires_grad:  # frozen, or unfrozen, since it was read
            self._whole.requires_grad_(self.requires_grad)
        return self._whole

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Self:
        """Assign the whole table on the shards, past the optimizer, whose state stays; all workers read it then.

        ValueError for values that are NaN since a step, and for fewer that stand for a table beyond the limit.
        """
        check_no_graph(self)
        name, whole = self.table.spec.name, self._whole
        values = torch.broadcast_to(other, self.shape).detach()
        if other.numel() < self.numel() and 4 * self.numel() > self.limit:
            raise ValueError(
                f"table {name!r} has {self.shape[0]} rows, too many to be assigned from {other.numel()} values"
            )
        if values[:1].isnan().all() and values.isnan().all() and len(values):
            raise ValueError(
                f"table {name!r}: all values are NaN, as those of a state_dict are after the next step; keep "
                "copy.deepcopy(model.state_dict())"
            )
        self.table.assign(values)
        if whole is not None and values.data_ptr() != whole.data_ptr():
            with torch.no_grad():
                whole.fill_(torch.nan)  # so that a graph with the old values has no backward, as in torch
        return self

    @property
    def grad(self) -> RowsGradient | None:
        """The gradient of the rows that were read since the last step; None where backward left none."""
        part = self.table.session.gradient_of(self.table.spec.name)
        return None if part is None else RowsGradient.of(part, self.shape[0], self.limit)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, RowsGradient):  # what zero_grad and in-place changes assign
            raise ValueError(
                f"table {self.table.spec.name!r}: the gradient of rows on the shards cannot be replaced; change it in "
                "place, as emb.weight.grad.mul_(...)"
            )
        if value is None:
            self.table.session.drop_gradients(self.table.spec.name)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        """The whole table, apart from autograd; a change that lasts is found at the next step, as ParameterChanged."""
        whole = self._whole_of_step().detach()
        if self._shown is None and whole._version == self._whole_version:
            self._shown = whole.clone()
        return whole

    @data.setter
    def data(self, value: Tensor) -> None:
        """Put the own values back. ParameterChanged for others.

        A model that moves does the same: a tied layer assigns what it read, on the new device.
        """
        whole = self._whole
        if whole is None or value.dtype != whole.dtype:
            raise ParameterChanged(parameter=self.table.spec.name)
        if value.device == self.device:
            is_same = value.data_ptr() == whole.data_ptr()
            if not is_same and self._shown is not None and (is_same := have_same_values(self._shown, value)):
                whole.detach().copy_(value)
        else:
            is_same = torch.equal(value.to(whole.device), whole.detach())
        if not is_same:
            raise ParameterChanged(parameter=self.table.spec.name)
        if value.device != self.device:
            self.move(value.device)

    def set_(self, source: object = None, *_: object, **__: object) -> Self:
        """Refused, as all changes in place; torch asks no subclass before it does this one."""
        if source is not self:  # which register_parametrization sets
            raise ParameterChanged(parameter=self.table.spec.name)
        return self

    def register_hook(self, hook: object) -> NoReturn:
        """Refused: gradients of rows have no hooks."""
        raise NotImplementedError(
            f"table {self.table.spec.name!r}: a hook would see no gradient, for rows are read by batch; change "
            "emb.weight.grad between backward() and session.step()"
        )

    register_post_accumulate_grad_hook = register_hook

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"RemoteWeight({self.table.spec.name!r}, {tuple(self.shape)}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"table {self.table.spec.name!r} lives on the shards and cannot be copied; copy the model before wrapping "
            "it, average its dense weights with embershard.WeightAverage, or export it"
        )

    __reduce_ex__ = __deepcopy__

    @classmethod
    @untraced
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call the function with rows, or with the whole table, in place of the weight."""
        kwargs = kwargs or {}
        if (func in METADATA and func not in _LAYOUT) or func in _ALSO_METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.detach:
            return args[0].data
        if func is Tensor.stride:  # of the whole, which is read for whoever goes by them
            return _strides(args[0], *args[1:], **kwargs)
        if func is Tensor.is_contiguous:
            return kwargs.get("memory_format", torch.contiguous_format) == torch.contiguous_format
        if func in _MEMORY:
            _ = args[0].data  # what is written there raises no version, and is found by the values
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        if func is F.embedding_bag:
            return _embedding_bag(*args, **kwargs)
        if func is Tensor.__getitem__ and isinstance(args[0], RemoteWeight) and _are_ids(args[1]):
            return _rows(args[0], args[1])
        if func is torch.index_select or func is Tensor.index_select:
            return _index_select(*args, **kwargs)
        if func is torch.autograd.grad:
            _refuse_rows(*args, **kwargs)
        changed = changed_tensor(func, args, kwargs, RemoteWeight)
        if changed is not None:
            raise ParameterChanged(parameter=changed.table.spec.name)
        return func(*_with_wholes(args), **_with_wholes(kwargs))


_ALSO_METADATA = {Tensor.size, Tensor.__len__}
_LAYOUT = {Tensor.stride, Tensor.is_contiguous}
# functions that return the memory itself
_MEMORY = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage}

# as StaleParameter, for torch.func
pytree.register_pytree_node(RemoteWeight, lambda weight: ([weight.whole()], None), lambda leaves, _: next(iter(leaves)))


def _strides(weight: RemoteWeight, dim: int | None = None) -> tuple[int, int] | int:
    strides = (weight.shape[1], 1)
    return strides if dim is None else strides[dim]


def _refuse_rows(outputs: object, inputs: Tensor | Sequence[Tensor], *_: object, **__: object) -> None:
    """NotImplementedError for a gradient by a weight of which rows were read by ids: that by the whole has none."""
    for weight in [inputs] if isinstance(inputs, Tensor) else inputs:
        if isinstance(weight, RemoteWeight) and weight.looked_up_at == weight.table.session.clock:
            raise NotImplementedError(
                f"table {weight.table.spec.name!r}: torch.autograd.grad by the weight would miss the rows that were "
                "read by ids; differentiate by the output of emb(ids), or call backward() and read emb.weight.grad"
            )


def _are_ids(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)


def _rows(weight: RemoteWeight, ids: Tensor) -> Tensor:
    if (ids.device != weight.device) or (ids.numel() and bool((ids < 0).any())):
        ids = torch.where(ids < 0, ids + weight.shape[0], ids)
    return weight.embedding(weight.table, weight.shape[0], weight=weight)(ids)


def _index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    if isinstance(input, RemoteWeight) and dim in (0, -2) and index.dim() == 1:
        return _rows(input, index)
    return torch.index_select(_with_wholes(input), dim, index)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if not isinstance(weight, RemoteWeight):  # the ids are the whole of a table: no ids, then, as torch will say
        return F.embedding(_with_wholes(input), weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    module = weight.embedding(
        weight.table,
        weight.shape[0],
        padding_idx=padding_idx,
        max_norm=max_norm,
        norm_type=norm_type,
        scale_grad_by_freq=scale_grad_by_freq,
        weight=weight,
    )
    return module(input)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    per_sample_weights = _with_wholes(per_sample_weights)
    if not isinstance(weight, RemoteWeight):
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    module = weight.embedding_bag(
        weight.table,
        weight.shape[0],
        mode=mode,
        padding_idx=padding_idx,
        max_norm=max_norm,
        norm_type=norm_type,
        scale_grad_by_freq=scale_grad_by_freq,
        include_last_offset=include_last_offset,
        weight=weight,
    )
    return module(input, offsets, per_sample_weights)


def _with_wholes(value: Any) -> Any:
    """The same arguments with the whole table in place of each weight."""
    if isinstance(value, RemoteWeight):
        return value.whole()
    if isinstance(value, Mapping):
        return {key: _with_wholes(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_with_wholes, value))
    if isinstance(value, list | tuple):
        return type(value)(map(_with_wholes, value))
    return value


def _collector(weight: RemoteWeight, route: Route) -> Callable[[Tensor], None]:
    """Hands the gradient of a whole table to the session."""
    table = weight.table
    order = torch.from_numpy(np.ascontiguousarray(route.ids))

    @untraced
    def collect(whole: Tensor) -> None:
        gradient, whole.grad = whole.grad, None
        if gradient is not None and weight.requires_grad:  # torch, too, drops it if frozen since
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            table.session.collect(RowGradients(table.spec, route, gradient[order.to(gradient.device)]))

    return collect
