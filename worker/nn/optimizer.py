"""A session where torch code expects an optimizer: learning-rate schedulers, GradScaler and clipping work on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from embershard.proto.errors import BadLearningRate
from embershard.proto.spec import MAX_FLOAT32
from embershard.proto.spec import Optimizer as RowOptimizer
from embershard.worker.nn.rows_gradient import RowsGradient
from embershard.worker.session.dense import METADATA
from embershard.worker.session.session import Session
from embershard.worker.session.tables import RemoteTable

# what the optimizers of torch take from a group beside lr, and those of the shards have from the start
_FIXED = {"alpha", "betas", "dampening", "eps", "momentum", "weight_decay"}
# what changes a step of torch's where it is true
_SWITCHES = {"amsgrad", "centered", "lr_decay", "maximize", "nesterov"}


class ShardOptimizer(torch.optim.Optimizer):
    """A torch optimizer that pushes gradients to the shards, for code that expects a torch.optim.Optimizer.

    The shards apply the row optimizers. There is a group for the embeddings (one per optimizer, if they have
    several) and one for each table of dense weights; a group's "tables" are the names of its tables. Torch
    schedulers may change a group's "lr": the next push sends it, divided by the lr of the row optimizer, as the
    factor of the tables' learning rate. Its "params" are those of the wrapped model; one stands for each table that no
    wrapped model has. Their gradients may be changed in place between backward and `step`; those of rows are summed
    over equal ids.

    `weight` is the weight of the next step among the workers of a synchronous job: the number of samples of its
    mean.

    If torch.amp.GradScaler skips a step, nothing is pushed, but the clock advances. Rows, weights and optimizer
    states are on the shards: `state_dict` has only the learning rates.

    Create it after `wrap`, one for a session: a step pushes the gradients of all its tables. ValueError for a session
    without tables.
    """

    # GradScaler then calls `step` in any case and says what it found, so that the clock can move on
    _step_supports_amp_scaling = True

    def __init__(self, session: Session) -> None:
        self.session = session
        self._name = object()  # for the session, which would not be freed if it held the optimizer
        self._has_stepped = False
        self.weight = 1.0
        self.skipped_steps = 0
        dense = {weights.spec.name: weights for weights in session.dense_weights}
        embeddings: dict[RowOptimizer, list[RemoteTable]] = {}
        for table in session.tables:
            if table.spec.name not in dense:
                embeddings.setdefault(table.spec.optimizer, []).append(table)
        groups: list[dict[str, Any]] = [
            {
                "params": [_parameter_of(session, table) for table in tables],
                "lr": optimizer.lr,
                "name": "embedding",
                "tables": [table.spec.name for table in tables],
            }
            for optimizer, tables in embeddings.items()
        ]
        for name, weights in dense.items():
            groups.append(
                {"params": weights.parameters, "lr": weights.spec.optimizer.lr, "name": "dense", "tables": [name]}
            )
        if not groups:
            raise ValueError("this session has no tables yet; wrap a model with it first")
        self._full_rates = [float(group["lr"]) for group in groups]  # those of the row optimizers
        super().__init__(groups, {"lr": groups[0]["lr"]})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error: the groups are determined by the tables."""
        if len(self.param_groups) == len(self._full_rates):
            raise TypeError("a table has its optimizer from the start: pass wrap(optimizer={pattern: optimizer, ...})")
        self.param_groups.append(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Push the gradients like `Session.step`, those of each group with its learning rate.

        BadLearningRate, before anything is pushed, if a learning rate is negative, NaN or Inf, and ValueError if a
        group has got a weight_decay, or another setting that only wrap takes. RuntimeError if this optimizer and
        another one of the session step alternately.
        """
        self._refuse_turns()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scales = self._lr_scales()
        if float(getattr(self, "found_inf", 0.0)):
            self.skip()
            return loss
        grad_scale = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            inverse = 1.0 / float(grad_scale)
            for gradient in gradients(self):
                gradient.mul_(inverse)
        self.session.step(scales, weight=self.weight)
        return loss

    def _refuse_turns(self) -> None:
        """RuntimeError where another optimizer of the session has stepped since this one did.

        A loop with an optimizer for each of two networks expects each to train its own, and each trains both here. One
        that takes the place of another, as in a second fit, is none of two.
        """
        if self._has_stepped and self.session.stepped_by is not self._name:
            raise RuntimeError(
                "two ShardOptimizers of one session step by turns, and each pushes the gradients of all tables of the "
                "session: use one, or wrap each network with a session of its own (es.connect(..., worker=1) for the "
                "second)"
            )
        self._has_stepped, self.session.stepped_by = True, self._name

    def skip(self) -> None:
        """Make a step without a push: gradients are dropped, and the clock advances."""
        self.skipped_steps += 1
        self.session.skip()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those of rows included; also with `set_to_none=False`, so that no zeros are pushed."""
        self.session.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the groups; weights and optimizer states are on the shards."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load learning rates. ValueError if they belong to other tables."""
        given = state_dict["param_groups"]
        if [group["tables"] for group in given] != [group["tables"] for group in self.param_groups]:
            raise ValueError("these are the learning rates of other tables: the state is that of another model")
        for group, values in zip(self.param_groups, given, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})

    def _lr_scales(self) -> dict[str, float]:
        scales: dict[str, float] = {}
        for group, full in zip(self.param_groups, self._full_rates, strict=True):
            lr = checked_rate(group, self.session.clock)
            if fixed := sorted(_FIXED & group.keys() | {name for name in _SWITCHES if group.get(name)}):
                raise ValueError(
                    f"the group {_name(group)} has got {', '.join(fixed)}, which would have no effect: only lr may "
                    "change, all else is in the optimizers that wrap was given; leave it out, or set it there"
                )
            if full == 0.0 and lr > 0.0:
                raise BadLearningRate(
                    group=_name(group), lr=lr, step=self.session.clock, why="no factor raises a rate that began as 0"
                )
            scale = lr / full if full else 1.0
            if scale > float(np.finfo(np.float32).max):
                why = f"its factor on {full:.3g}, where it began, is beyond float32"
                raise BadLearningRate(group=_name(group), lr=lr, step=self.session.clock, why=why)
            scales.update(dict.fromkeys(group["tables"], scale))
        return scales


def _parameter_of(session: Session, table: RemoteTable) -> Tensor:
    """The parameter of the model, so that code finds it there by what it is; or what stands for one."""
    parameter = table.parameter
    return _StandIn.of(session, table.spec.name) if parameter is None else parameter


class _StandIn(Tensor):
    """What stands for a table that no wrapped model has among an optimizer's parameters: a gradient, and no values."""

    session: Session
    table: str

    @staticmethod
    def of(session: Session, table: str) -> _StandIn:
        """Return that of a table."""
        rows = Tensor._make_subclass(_StandIn, torch.zeros(1, device="cpu"), True)
        rows.session, rows.table = session, table
        return rows

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the rows read since the last step, which may be changed in place."""
        part = self.session.gradient_of(self.table)
        return None if part is None else part.gradients

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.session.drop_gradients(self.table)
        elif value is not self.grad:  # which an operator such as *= assigns
            raise ValueError(
                f"table {self.table!r}: the gradient of rows on the shards cannot be replaced; change it in place, as "
                "parameter.grad.mul_(...)"
            )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"_StandIn({self.table!r})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Refuse what asks for values, which would be zeros, or changes what the rows do not follow."""
        if func in METADATA - _CHANGES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NotImplementedError(
            "what stands for a table that no wrapped model has, among the parameters of a ShardOptimizer, has a "
            "gradient and no values: leave what changes weights (weight decay, SAM, Lookahead) to the table's optimizer"
        )


_CHANGES = {
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
}


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters, to be changed in place; of tables those of the rows read."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if isinstance(gradient, RowsGradient):
                gradient = gradient.as_subclass(Tensor)
            elif gradient.is_sparse:
                parameter.grad = gradient.coalesce()
                gradient = parameter.grad.values()
            found.append(gradient)
    return found


def checked_rate(group: dict[str, Any], step: int) -> float:
    """The learning rate of a group. BadLearningRate where it is negative, NaN, or not finite in float32."""
    lr = float(group["lr"])
    if not 0.0 <= lr <= MAX_FLOAT32:
        raise BadLearningRate(group=_name(group), lr=lr, step=step, why="a rate is a finite float32, at least 0")
    return lr


def _name(group: dict[str, Any]) -> str:
    return ", ".join(group.get("tables", ())) or "of all weights"
