"""Losses that a training step minimises, each of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional

from embershard.worker.data.batch import Batch
from embershard.worker.models.recommender import Recommender
from embershard.worker.models.two_tower import FrequencyEstimator, TwoTower, candidates, sampled_softmax


class Loss(Protocol):
    """The mean loss of a batch, with a graph to the model's weights."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """() float32."""


def binary_cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Of the logits and the labels."""
    return functional.binary_cross_entropy_with_logits(model(batch.ids, batch.dense), batch.labels)


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


def loss_of(model: Recommender) -> Loss:
    """The loss that a model is made for."""
    return InBatchSoftmax() if isinstance(model, TwoTower) else binary_cross_entropy
