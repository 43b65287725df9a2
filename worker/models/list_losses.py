"""Losses over lists: how a row's own item is scored beside other items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Batch
from embershard.worker.models.recommender import ListRecommender


def bce(own: Tensor, others: Tensor) -> Tensor:
    """Binary cross-entropy, the own item against the mean of the others (Kang and McAuley 2018, section III.E)."""
    return functional.softplus(-own).mean() + functional.softplus(others).mean()


def bpr(own: Tensor, others: Tensor) -> Tensor:
    """-ln sigmoid(own - other), its mean over all others (Rendle et al., "BPR", UAI 2009, section 4.1)."""
    return functional.softplus(others - own.unsqueeze(1)).mean()


def softmax(own: Tensor, others: Tensor) -> Tensor:
    """Cross-entropy of the own item among all items of its list, whose scores are corrected for how they were drawn."""
    return (torch.cat([own.unsqueeze(1), others], 1).logsumexp(1) - own).mean()


def ccl(own: Tensor, others: Tensor, *, margin: float = 0.9, negative_weight: float = 150.0) -> Tensor:
    """Cosine contrastive loss of cosines: 1 - own + negative_weight * mean(max(0, others - margin)).

    Mao et al., "SimpleX: A Simple and Strong Baseline for Collaborative Filtering", CIKM 2021.
    """
    return (1.0 - own).mean() + negative_weight * functional.relu(others - margin).mean()


_LOSSES: Mapping[str, Callable[..., Tensor]] = {"bce": bce, "bpr": bpr, "sampled_softmax": softmax, "ccl": ccl}


class ListLoss:
    """A loss by its name, with its arguments, of what a model says of the lists of a batch.

    `log_q` (num_ids,) is the log of how often each item is drawn as a negative; None: each as often as another. A
    sampled softmax subtracts it from all scores, the own item's too: its optimum is then that of the softmax over all
    items, with any number of negatives (Ma and Collins, EMNLP 2018, section 3). Other losses are of the negatives as
    they are drawn.
    """

    def __init__(
        self, model: ListRecommender, name: str, args: Mapping[str, Any] = {}, log_q: Tensor | None = None
    ) -> None:
        self._lists = model
        self._loss = partial(_LOSSES[name], **args)
        self._log_q = log_q if name == "sampled_softmax" else None

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """() float32. JobError where the samples have weights."""
        _check_unweighted(batch)
        lists = self._lists.split_lists(model(batch.ids, batch.dense, True), batch.ids)
        if self._log_q is not None:
            items = self._lists.list_items(batch.ids)
            corrections = [self._log_q[ids].to(scores.device) for ids, scores in zip(items, lists, strict=True)]
            lists = lists[0] - corrections[0], lists[1] - corrections[1]
        return self._loss(*lists)


class InBatchSoftmax:
    """Each user's own item against all items of the batch; how often an item is there is learnt as batches come.

    `items` gives the candidates of a batch's ids, the rows' own items first, as numbers of at least 0.
    """

    def __init__(self, items: Callable[[Tensor], Tensor]) -> None:
        self._items = items
        self._frequency = FrequencyEstimator()

    def state_dict(self) -> Mapping[str, object]:
        """Return the estimated frequencies of the items."""
        return self._frequency.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._frequency.load_state_dict(state)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """() float32. JobError where the samples have weights."""
        _check_unweighted(batch)
        items = self._items(batch.ids)
        log_q = self._frequency.update(items)
        logits = model(batch.ids, batch.dense, True)
        return sampled_softmax(logits, items.to(logits.device), log_q.to(logits.device))


def _check_unweighted(batch: Batch) -> None:
    if batch.weights is not None:
        reason = "its samples have weights, which a loss over lists of items does not use: leave them out"
        raise JobError(where="data", reason=reason)


def candidates(ids: Tensor) -> Tensor:
    """The items of a batch, (B, 2 + K, ...) -> (B * (1 + K), ...): each row's own item first, then what else it has."""
    return torch.cat([ids[:, 1], ids[:, 2:].flatten(0, 1)])


class FrequencyEstimator:
    """Estimate how often an item is in a batch from the steps between its appearances (Yi et al., algorithm 2).

    A popular item is several times in one batch, so that the number of times in a batch that has it is estimated, too.
    A stream needs no counts in advance; items share `slots` cells by their id's remainder.
    """

    def __init__(self, slots: int = 1 << 20, *, decay: float = 0.05, first_interval: float = 1000.0) -> None:
        self._last = torch.zeros(slots, dtype=torch.int64)
        self._interval = torch.full((slots,), first_interval)
        self._times = torch.ones(slots)
        self._decay = decay
        self._step = 0

    def update(self, items: Tensor) -> Tensor:
        """Count one batch of items (B,) int64; the log of each one's expected number in a batch, (B,)."""
        self._step += 1
        slots, place, times = (items % len(self._last)).unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
        seen, counts = self._last[slots], times.float()
        since = torch.where(seen > 0, (self._step - seen).float(), self._interval[slots])
        self._interval[slots] = torch.lerp(self._interval[slots], since, self._decay).clamp(min=1.0)
        self._times[slots] = torch.where(seen > 0, torch.lerp(self._times[slots], counts, self._decay), counts)
        self._last[slots] = self._step
        return (self._times[slots] / self._interval[slots]).log()[place]

    def state_dict(self) -> Mapping[str, object]:
        """Return the estimates and the step."""
        return {"last": self._last, "interval": self._interval, "times": self._times, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._last, self._interval = state["last"], state["interval"]
        self._times, self._step = state["times"], state["step"]


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
