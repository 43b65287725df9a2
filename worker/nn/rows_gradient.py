"""`weight.grad` of an embedding whose rows are on the shards: that of the rows that the step has read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from embershard.proto.errors import EmbershardError
from embershard.worker.session.dense import METADATA, untraced
from embershard.worker.session.gradients import RowGradients

W = TypeVar("W", bound=Tensor)


class TableTooLarge(EmbershardError):
    """A table was read as a whole that has more bytes than may be read so."""

    template = (
        "table {table!r} was read as a whole, but it has {nbytes} bytes, over the limit of {limit}: read the rows of a "
        "batch with emb(ids); score sampled candidates in place of all items (sampled softmax); regularise by the "
        "optimizer's weight_decay, or over the rows of each batch by wrap(..., beyond_limit='batch_rows'); or raise "
        "wrap(..., whole_limit=)"
    )


def changed_tensor(
    func: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], kind: type[W]
) -> W | None:
    """Return the tensor of a kind that a function would change, if there is one."""
    name = getattr(func, "__name__", "").partition(".")[0]
    module = getattr(func, "__module__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_operator = name in ("__setitem__", "__set__", "__delete__") or (name.startswith("__i") and name != "__invert__")
    is_operator = is_operator and name not in ("__index__", "__int__")
    candidates: list[object] = [kwargs.get("out")]
    if (is_in_place or is_operator or kwargs.get("inplace")) and args:
        candidates.append(args[0])
    if module == "torch.nn.init":
        candidates.append(kwargs.get("tensor"))
    for value in candidates:
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, kind):
                return one
    return None


class RowsGradient(Tensor):
    """The gradient of a table's rows: those that were read have one, all others zero.

    In-place functions by a number change what is pushed; norms and other reductions that zero rows do not change are
    those of the rows read; any other function gets the gradient of the whole table, where that is within the limit: a
    copy, which is not pushed and cannot be changed in place.
    """

    ids: Tensor  # (U,)
    num_rows: int
    limit: int
    table: str

    @staticmethod
    def of(part: RowGradients, num_rows: int, limit: int) -> RowsGradient:
        """Return the gradient of the step so far; it shares the memory of the part."""
        gradient = part.gradients.as_subclass(RowsGradient)
        gradient.ids, gradient.num_rows = torch.from_numpy(part.route.ids), num_rows
        gradient.limit, gradient.table = limit, part.spec.name
        return gradient

    def detach(self) -> RowsGradient:
        """The same memory, apart from autograd."""
        gradient = self.as_subclass(Tensor).detach().as_subclass(RowsGradient)
        gradient.__dict__.update(self.__dict__)
        return gradient

    @property
    def data(self) -> RowsGradient:
        """The same memory, apart from autograd: what changes in it is pushed."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> NoReturn:
        raise _would_change(self.table, "an assignment to data")

    def set_(self, *_: object, **__: object) -> NoReturn:
        """Refused; torch asks no subclass before it does this."""
        raise _would_change(self.table, "set_")

    def __deepcopy__(self, memo: object) -> Tensor:
        """The gradient of the whole table, as a tensor of torch."""
        return self.clone()

    def numel(self) -> int:
        """Return the number of elements of the whole weight, unread rows included."""
        return self.shape.numel()

    nelement = numel

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the whole weight, (num_embeddings, dim)."""
        return torch.Size((self.num_rows, super().shape[1]))

    def is_beyond_limit(self) -> bool:
        """Whether the gradient of the whole table is too large to be made."""
        return self.element_size() * self.numel() > self.limit

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"RowsGradient({self.table!r}, {tuple(self.shape)}, {len(self.ids)} rows)"

    @classmethod
    @untraced
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call the function with the rows, or with the gradient of the whole table."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.detach_:  # as loops write before zero_(): it is apart already, and torch refuses for views
            return args[0]
        is_of_rows = name in _OF_ROWS or (
            name in _OF_ELEMENTS and (args[0] if args else kwargs["input"]).is_beyond_limit()
        )
        if is_of_rows and _is_by_number(name, args, kwargs) and _keeps_zeros(func, name, args, kwargs):
            result = func(*_unwrapped(args), **_unwrapped(kwargs))
            return args[0] if name.endswith("_") else result
        if (changed := changed_tensor(func, args, kwargs, RowsGradient)) is not None:
            raise _would_change(changed.table, name)
        return func(*_densified(args), **_densified(kwargs))


def _would_change(table: str, name: str) -> NotImplementedError:
    return NotImplementedError(
        f"table {table!r}: {name} would change gradients of rows that nobody read; scale by a number, or add the term "
        "to the loss"
    )


_OF_A_COPY = (
    "a part of emb.weight.grad is a copy, and a change of it would not be pushed: change the rows of "
    "session.gradients(), or scale all of emb.weight.grad by a number; to read it elsewhere, take "
    "emb.weight.grad.clone()"
)
# functions that return the memory itself, which others may change (an array of numpy says that it is read-only)
_MEMORY = {Tensor.__dlpack__, Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr}


class _Copy(Tensor):
    """The gradient of a whole table, or a part of it. What changes it would not be pushed, and is an error."""

    def set_(self, *_: object, **__: object) -> NoReturn:
        """Refused; torch asks no subclass before it does this."""
        raise NotImplementedError(_OF_A_COPY)

    @classmethod
    @untraced
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call the function; what shares memory with the copy is one, too."""
        kwargs = kwargs or {}
        if func in _MEMORY or changed_tensor(func, args, kwargs, _Copy) is not None:
            raise NotImplementedError(_OF_A_COPY)
        with torch._C.DisableTorchFunctionSubclass():
            memory = {value.untyped_storage().data_ptr() for value in args if isinstance(value, _Copy)}
            return _shared(func(*args, **kwargs), memory)


def _shared(value: Any, memory: AbstractSet[int]) -> Any:
    """The same result, with copies in place of tensors in their memory."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    if isinstance(value, Tensor) and value.layout == torch.strided and value.untyped_storage().data_ptr() in memory:
        return value.as_subclass(_Copy)
    return type(value)(_shared(part, memory) for part in value) if type(value) in (list, tuple) else value


# functions that zero rows do not change, or that keep them zero
_OF_ROWS = {
    "_amp_foreach_non_finite_check_and_unscale_", "_foreach_abs_", "_foreach_clamp_max_", "_foreach_clamp_min_",
    "_foreach_div_", "_foreach_mul_", "_foreach_norm", "_foreach_zero_", "clamp_", "clamp_max_", "clamp_min_", "div_",
    "linalg_vector_norm", "mul_", "nan_to_num_", "neg_", "norm", "sign_", "vector_norm", "zero_",
}  # fmt: skip
# of each element, whatever its row: of a table beyond the limit those of the rows are asked for with any() or all()
_OF_ELEMENTS = {"isfinite", "isinf", "isnan"}


def _is_by_number(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether nothing else has a shape, and no dimension is named."""
    if len(args) > 2 and name in ("norm", "linalg_vector_norm", "vector_norm"):  # a dimension, by its place
        return False
    others = [*args[1:], *kwargs.values()]
    others += [its for value in others if isinstance(value, list | tuple) for its in value]
    return kwargs.get("dim") is None and all(its.dim() == 0 for its in others if isinstance(its, Tensor))


def _keeps_zeros(func: Callable[..., object], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether rows that nobody read keep a gradient of zero, and count for nothing.

    Not by a clamp whose bounds leave zero out, and not in a norm of negative order, as the least element.
    """
    if name.endswith("norm"):
        order = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2.0))
        return order is None or isinstance(order, str) or float(order) >= 0.0
    if "clamp" not in name:
        return True
    own = _unwrapped(args[0])
    zeros = [torch.zeros(1, device=one.device) for one in (own if name.startswith("_foreach") else [own])]
    func(zeros if name.startswith("_foreach") else zeros[0], *args[1:], **kwargs)
    return not any(map(bool, zeros))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, RowsGradient):
        return value.as_subclass(Tensor)
    if isinstance(value, Mapping):
        return {key: _unwrapped(part) for key, part in value.items()}
    return type(value)(map(_unwrapped, value)) if isinstance(value, list | tuple) else value


def _densified(value: Any) -> Any:
    if isinstance(value, RowsGradient):
        rows = value.as_subclass(Tensor)
        if value.is_beyond_limit():
            nbytes = rows.element_size() * value.numel()
            raise TableTooLarge(table=value.table, nbytes=nbytes, limit=value.limit)
        whole = rows.new_zeros(value.num_rows, rows.shape[1]).index_copy(0, value.ids.to(rows.device), rows)
        return whole.as_subclass(_Copy)
    if isinstance(value, Mapping):
        return {key: _densified(part) for key, part in value.items()}
    return type(value)(map(_densified, value)) if isinstance(value, list | tuple) else value
