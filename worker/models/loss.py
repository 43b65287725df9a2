"""Losses that a training step minimises, each of one batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from embershard.proto.errors import UserCodeFailed
from embershard.proto.user_modules import find, user_code, where_defined
from embershard.worker.data.batch import Batch
from embershard.worker.models.list_losses import InBatchSoftmax, ListLoss
from embershard.worker.models.recommender import ListRecommender, Recommender
from embershard.worker.models.user_defined import Forward, call


class Loss(Protocol):
    """The mean loss of a batch, with a graph to the model's weights."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """() float32."""


class UserLoss:
    """A user's loss, called with (logits, labels) or, without a `forward`, with (model, batch); its result is checked.

    One that `takes_weights` gets those of the samples as `weights`. One that can know nothing of them is refused.
    A state that the user's object has is the loss's own, and so part of a checkpoint.
    """

    def __init__(
        self, what: str, where: str, function: Callable[..., object], forward: Forward | None, *, takes_weights: bool
    ) -> None:
        self._what, self._where, self._function, self._forward = what, where, function, forward
        self._takes_weights = takes_weights
        for name in ("state_dict", "load_state_dict"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """() float32. UserCodeFailed where the function raises, gives no single number, or would not see weights."""
        given = (model, batch) if self._forward is None else (self._forward(model, batch), batch.labels)
        named = {"weights": batch.weights} if self._forward is not None and self._takes_weights else {}
        if self._forward is not None and batch.weights is not None and not named:
            reason = "would train without the weights that the samples have; give it a parameter called weights"
            raise UserCodeFailed(what=self._what, reason=reason, where=self._where)
        with user_code(self._what):
            loss = self._function(*given, **named)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            reason = f"gave {found}; return the mean loss of the batch, a tensor without dimensions"
            raise UserCodeFailed(what=self._what, reason=reason, where=self._where)
        return loss


def loss_of(
    model: nn.Module, forward: Forward, name: str = "", args: Mapping[str, Any] = {}, *, log_q: Tensor | None = None
) -> Loss:
    """A loss by its name, made with `args`: a built-in one, or the user's `module:name`; without a name the model's.

    A user's loss whose first parameter is called `model` gets (model, batch), any other one (logits, labels), and the
    weights of the samples where it has a parameter `weights`. `log_q` is as of ListLoss.
    BadModule or UserCodeFailed where there is none, or it cannot be made. ValueError where a built-in one does not fit
    the model.
    """
    if ":" in name:
        return _user_loss(forward, name, args)
    name = name or getattr(model, "default_loss", "bce")
    if name == "sampled_softmax" and isinstance(model, Recommender) and model.in_batch:
        return InBatchSoftmax(model.batch_items)
    if isinstance(model, ListRecommender):
        return ListLoss(model, name, args, log_q)
    if name != "bce":
        raise ValueError(f"{name} needs a model that is trained on lists of items")
    return lambda module, batch: bce(forward(module, batch), batch.labels, batch.weights, **args)


def weight_by(model: nn.Module, *, own_loss: bool) -> Callable[[Batch], float]:
    """Return the weight of a batch among others: what its loss is a mean over; for `own_loss` its samples."""
    if own_loss:
        return len
    if isinstance(model, ListRecommender):
        return lambda batch: model.num_lists(batch.ids)
    return lambda batch: batch.weight


def bce(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None, *, label_weights: Sequence[float] = ()
) -> Tensor:
    """Binary cross-entropy of logits (B,) or (B, L): its mean over the samples, weighed by `weights` (B,).

    Of several labels it is the sum of their means, weighed by `label_weights` (L,). A label that is missing (NaN) has
    no loss, and does not count in its label's mean.
    """
    if labels.dim() == 1 and weights is None:
        return functional.binary_cross_entropy_with_logits(logits, labels)
    known = ~labels.isnan()
    losses = functional.binary_cross_entropy_with_logits(logits, labels.where(known, 0.0), reduction="none")
    counts = known.float() if weights is None else known * weights.view(-1, *[1] * (labels.dim() - 1))
    means = (losses * counts).sum(0) / counts.sum(0).clamp(min=torch.finfo(counts.dtype).tiny)
    if label_weights:
        means = means * torch.tensor(label_weights, device=means.device)
    return means.sum()


def _user_loss(forward: Forward, name: str, args: Mapping[str, object]) -> Loss:
    what, found = f"loss {name}", find(name)
    loss = call(what, found, args) if isinstance(found, type) or args else found
    if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        reason = "has parameters, which nothing trains: make them parameters of the model"
        raise UserCodeFailed(what=what, reason=reason, where=where_defined(found))
    if not callable(loss):
        raise UserCodeFailed(what=what, reason=f"is {loss!r}, which cannot be called", where=where_defined(found))
    parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    of_batch = next(iter(parameters), "") == "model"
    return UserLoss(
        what, where_defined(found), loss, None if of_batch else forward, takes_weights="weights" in parameters
    )
