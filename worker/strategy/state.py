"""The weights that workers hold, and their optimizers' state, as a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from embershard.worker.device import is_dtensor


class TorchWeights:
    """Parameters of a model and the state of their optimizers; whole on every worker, also where they are sharded."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers

    def state_dict(self) -> Mapping[str, object]:
        """All of it, on the host. Every worker must call it."""
        return {
            "weights": {name: _whole(parameter) for name, parameter in self._model.named_parameters()},
            "optimizers": [
                {
                    str(number): {key: _whole(value) for key, value in values.items()}
                    for number, values in optimizer.state_dict()["state"].items()
                }
                for optimizer in self._optimizers
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state that `state_dict` returned. ValueError for the state of another model."""
        weights, states = state["weights"], state["optimizers"]
        own = dict(self._model.named_parameters())
        if not isinstance(weights, dict) or not isinstance(states, list) or weights.keys() != own.keys():
            raise ValueError("it holds other weights than this model's")
        for name, parameter in own.items():
            parameter.copy_(_part(weights[name], parameter))
        for optimizer, saved in zip(self._optimizers, states, strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            moments = {
                int(number): {key: _part(value, parameters[int(number)]) for key, value in values.items()}
                for number, values in saved.items()
            }
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _whole(value: Tensor) -> Tensor:
    if is_dtensor(value):
        value = value.full_tensor()
    # a copy: FSDP frees the memory of whole weights as it likes
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _part(value: Tensor, parameter: Tensor) -> Tensor:
    """Place a value of the state on this worker: its share, where the parameter is sharded and the shapes agree."""
    if not isinstance(value, Tensor):
        return value
    value = value.clone()  # the state may be that of another run, which goes on
    if value.shape != parameter.shape:
        return value  # a count of steps
    if is_dtensor(parameter):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)
