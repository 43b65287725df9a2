"""Losses that a training step minimises, each of one batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from embershard.proto.errors import UserCodeFailed
from embershard.proto.user_modules import find, user_code, where_defined
from embershard.worker.data.batch import Batch
from embershard.worker.models.user_defined import Forward, call


class Loss(Protocol):
    """The mean loss of a batch, with a graph to the model's weights."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """() float32."""


class InBatchSoftmax:
    """Each user's own item against all items of the batch; how often an item is there is learnt as batches come."""

    def __init__(self) -> None:
        self._frequency = FrequencyEstimator()

    def state_dict(self) -> Mapping[str, object]:
        """Return the estimated frequencies of the items."""
        return self._frequency.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._frequency.load_state_dict(state)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """() float32."""
        items = candidates(batch.ids)
        log_q = self._frequency.update(items)
        logits = model(batch.ids, None, True)
        return sampled_softmax(logits, items.to(logits.device), log_q.to(logits.device))


class UserLoss:
    """A user's loss, called with (logits, labels) or, without a `forward`, with (model, batch); its result is checked.

    A state that the user's object has is the loss's own, and so part of a checkpoint.
    """

    def __init__(self, what: str, where: str, function: Callable[..., object], forward: Forward | None) -> None:
        self._what, self._where, self._function, self._forward = what, where, function, forward
        for name in ("state_dict", "load_state_dict"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """() float32. UserCodeFailed where the function raises, or gives no single number."""
        given = (model, batch) if self._forward is None else (self._forward(model, batch), batch.labels)
        with user_code(self._what):
            loss = self._function(*given)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            reason = f"gave {found}; return the mean loss of the batch, a tensor without dimensions"
            raise UserCodeFailed(what=self._what, reason=reason, where=self._where)
        return loss


def loss_of(model: nn.Module, forward: Forward, name: str = "", args: Mapping[str, object] = {}) -> Loss:
    """The loss of a job: the user's `module:name`, called with `args` if it is a class or has some; else the model's.

    A user's loss whose first parameter is called `model` gets (model, batch), any other one (logits, labels).
    BadModule or UserCodeFailed where there is none, or it cannot be made.
    """
    if name:
        return _user_loss(forward, name, args)
    if getattr(model, "default_loss", "") == "sampled_softmax":
        return InBatchSoftmax()
    return lambda module, batch: functional.binary_cross_entropy_with_logits(forward(module, batch), batch.labels)


def _user_loss(forward: Forward, name: str, args: Mapping[str, object]) -> Loss:
    what, found = f"loss {name}", find(name)
    loss = call(what, found, args) if isinstance(found, type) or args else found
    if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        reason = "has parameters, which nothing trains: make them parameters of the model"
        raise UserCodeFailed(what=what, reason=reason, where=where_defined(found))
    if not callable(loss):
        raise UserCodeFailed(what=what, reason=f"is {loss!r}, which cannot be called", where=where_defined(found))
    first = next(iter(inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters), "")
    return UserLoss(what, where_defined(found), loss, None if first == "model" else forward)


def candidates(ids: Tensor) -> Tensor:
    """The items of a batch, (B, 2 + K, ...) -> (B * (1 + K), ...): each row's own item first, then what else it has."""
    return torch.cat([ids[:, 1], ids[:, 2:].flatten(0, 1)])


class FrequencyEstimator:
    """How often an item is in a batch, estimated from the steps between its appearances (Yi et al., algorithm 2).

    A stream needs no counts in advance; items share `slots` cells by their id's remainder.
    """

    def __init__(self, slots: int = 1 << 20, *, decay: float = 0.05, first_interval: float = 1000.0) -> None:
        self._last = torch.zeros(slots, dtype=torch.int64)
        self._interval = torch.full((slots,), first_interval)
        self._decay = decay
        self._step = 0

    def update(self, items: Tensor) -> Tensor:
        """Counts one batch of items (B,) int64 and returns the log of each one's chance of being in a batch, (B,)."""
        self._step += 1
        slots = items % len(self._last)
        seen = self._last[slots]
        interval = torch.where(
            seen > 0,
            torch.lerp(self._interval[slots], (self._step - seen).float(), self._decay),
            self._interval[slots],
        )
        self._interval[slots] = interval.clamp(min=1.0)
        self._last[slots] = self._step
        return -interval.clamp(min=1.0).log()

    def state_dict(self) -> Mapping[str, object]:
        """Return the estimates and the step."""
        return {"last": self._last, "interval": self._interval, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._last, self._interval, self._step = state["last"], state["interval"], state["step"]


def sampled_softmax(logits: Tensor, items: Tensor, log_q: Tensor) -> Tensor:
    """Cross-entropy of each user's own item among all C candidates, corrected for how they were drawn.

    logits (B, C); items (C,) int64, row i's own item is items[i]; log_q (C,) is the log of each candidate's
    expected number in a batch. Other appearances of a row's own item are no negatives and are left out.
    """
    batch = torch.arange(len(logits), device=logits.device)
    same = items.unsqueeze(0) == items[: len(logits)].unsqueeze(1)
    same[batch, batch] = False
    corrected = (logits - log_q).masked_fill(same, float("-inf"))
    return functional.cross_entropy(corrected, batch)
