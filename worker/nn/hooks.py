"""What torch calls around a wrapped model: its weights are brought up to date before each forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from embershard.worker.nn.embedding import Embedding, EmbeddingBag
from embershard.worker.nn.optimizer import ShardOptimizer
from embershard.worker.nn.remote_weight import RemoteWeight
from embershard.worker.session.dense import DenseWeights, RemoteParameter, may_be_compiled, untraced
from embershard.worker.session.inputs import WrappedModel
from embershard.worker.session.session import Session

MARK = "_embershard_session"  # attribute of a wrapped model

_log = logging.getLogger(__name__)


def install(
    model: nn.Module,
    session: Session,
    tables: Mapping[str, Embedding | EmbeddingBag],
    dense: list[DenseWeights] | None,
) -> None:
    """Bring the weights of a wrapped model up to date before each forward.

    Where the shards hold its dense weights too (`dense`), new parameters are warned of.
    """
    wrapped = WrappedModel(model, tables)
    session.registry.models.append(wrapped)
    newcomers = None if dense is None else _Newcomers()
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # which takes no such hook
            module.register_load_state_dict_pre_hook(_refuse_assign)  # type: ignore[no-untyped-call]

    def before_forward(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if newcomers is not None:
            newcomers.look(model)
        for weights in dense or ():
            weights.follow()
        # otherwise the dense weights come with the first lookup, in its request, or as they are first used
        if not tables or hasattr(model, "embedding_inputs") or may_be_compiled():
            # inside torch.func's grad or vmap ids have no values
            is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
            session.stage([] if is_transformed else wrapped.lookups(*args, **kwargs))

    def after_forward(*_: object) -> None:
        session.unstage()

    model.register_forward_pre_hook(_Hook(before_forward), with_kwargs=True)
    model.register_forward_hook(_Hook(after_forward), always_call=True)
    setattr(model, MARK, session)


class _Newcomers:
    """Warns of parameters that a model got after wrap, or that were unfrozen here: nobody pushes their gradients.

    To look for them takes as long as a lookup, so it happens at forwards 1, 2, 4, 8 and so on.
    """

    def __init__(self) -> None:
        self._forwards = 0
        self._has_told = False

    def look(self, model: nn.Module) -> None:
        """Count a forward, and warn once."""
        self._forwards += 1
        if self._has_told or self._forwards & (self._forwards - 1):
            return
        for name, parameter in model.named_parameters():
            # functional_call puts other tensors in their place for a call
            is_ours = isinstance(parameter, RemoteParameter | RemoteWeight)
            if not is_ours and isinstance(parameter, nn.Parameter) and parameter.requires_grad:
                self._has_told = True
                _log.warning(
                    "parameter %r is not on the shards, since it came after wrap, or was frozen then and no plain "
                    "float32 parameter: session.step() does not train it; assign it, or unfreeze it, before wrap, or "
                    "train it with an optimizer of torch",
                    name,
                )
                return


class _Hook:
    """A forward hook of a wrapped model, which cannot be pickled, and says so."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    @untraced
    def __call__(self, *args: object) -> None:
        self._function(*args)

    @property
    def __name__(self) -> NoReturn:
        """Missing: torch.jit.script asks every hook for it, to compile it."""
        raise AttributeError(
            "torch.jit.script cannot compile a wrapped model, whose weights are on the shards: load model.state_dict() "
            "into a model that is not wrapped, and script that one"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a wrapped model holds a session and cannot be copied or pickled: copy the model before wrapping it, "
            "save model.state_dict(), average its dense weights with embershard.WeightAverage, and keep it out of the "
            "dataset and collate_fn of a DataLoader with workers"
        )


def _refuse_assign(module: nn.Module, state: object, prefix: str, metadata: Mapping[str, Any], *_: object) -> None:
    remote = (isinstance(parameter, RemoteParameter | RemoteWeight) for parameter in module.parameters())  # in no copy
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    if (swaps or metadata.get("assign_to_params_buffers")) and any(remote):
        how = "under torch.__future__.set_swap_module_params_on_conversion(True)" if swaps else "with assign=True"
        raise RuntimeError(
            f"load_state_dict {how} would take the weights of a wrapped model off the shards; leave that out"
        )


def _remote_parameters(optimizer: Optimizer) -> Iterator[RemoteParameter]:
    """The parameters on the shards that another optimizer has."""
    if not isinstance(optimizer, ShardOptimizer):
        for group in optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if isinstance(parameter, RemoteParameter))


def _before_step(optimizer: Optimizer, *_: object) -> None:
    for parameter in _remote_parameters(optimizer):
        parameter.weights.watch(parameter)  # a fused optimizer raises no version of what it changes


def _after_step(optimizer: Optimizer, *_: object) -> None:
    """ParameterChanged: a loop that never calls session.step() would train this process alone, silently.

    RuntimeError where nothing was changed, and nothing else can be: session.step() has taken the gradients.
    """
    remote = list(_remote_parameters(optimizer))
    for weights in {parameter.weights for parameter in remote}:  # each looks at all of its own
        weights.check_unchanged()
    others = (its for group in optimizer.param_groups for its in group["params"] if not isinstance(its, RemoteWeight))
    if remote and len(remote) == len(list(others)):
        raise RuntimeError(
            "this optimizer of torch has changed nothing: all of its parameters are on the shards, which train them by "
            "the optimizers that wrap was given, and session.step() has taken their gradients: leave optimizer.step() "
            "out, or train dense weights with it by wrap(..., dense='ddp')"
        )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
