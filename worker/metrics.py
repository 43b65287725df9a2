"""Quality of a recommender: AUC, GAUC, logloss, normalised entropy, calibration; HR@K, NDCG@K, MAP@K, Recall@K.

Functions take whole arrays; where samples have weights, each counts as often as its weight says. The collectors take
batches, and end in named figures; worker/training/evaluate.py joins those of several workers by their lists. A figure
that is not defined (AUC of one class, say) is NaN. All arithmetic is float64 over exact ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.floating]
Array = torch.Tensor | npt.NDArray[np.generic]


def auc(labels: Floats, scores: Floats, weights: Floats | None = None) -> float:
    """Chance that a positive scores above a negative, ties counting half (Mann-Whitney U); exact.

    labels (N,) of 0 and 1, scores (N,) in any monotone scale, weights (N,): a pair counts as much as the product of its
    weights. NaN with one class only, or with a NaN score.
    """
    counts, positive = _counts(labels, weights), labels > 0.5
    positives = counts[positive].sum()
    negatives = counts.sum() - positives
    if not positives or not negatives or np.isnan(scores).any():
        return math.nan
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])  # start of each run of equal scores
    hits = np.add.reduceat((counts * positive)[order], first)
    misses = np.add.reduceat((counts * ~positive)[order], first)
    below = np.cumsum(misses) - misses  # negatives under each run
    return float((hits * (below + misses / 2)).sum() / (positives * negatives))


def gauc(labels: Floats, scores: Floats, groups: npt.NDArray[np.int64], weights: Floats | None = None) -> float:
    """Mean AUC of groups (users, say) that have both classes, weighed by their samples (Zhou et al. 2018).

    labels, scores, groups and weights are (N,). NaN without such a group, or with a NaN score.
    """
    if not len(labels) or np.isnan(scores).any():
        return math.nan
    order = np.lexsort((scores, groups))
    ordered, own = scores[order], groups[order]
    counts, positive = _counts(labels, weights)[order], labels[order] > 0.5
    begins = np.r_[True, own[1:] != own[:-1]]
    starts = np.flatnonzero(begins)  # of each group
    first = np.flatnonzero(begins | np.r_[True, ordered[1:] != ordered[:-1]])  # of each run of equal scores in one
    hits, misses = np.add.reduceat(counts * positive, first), np.add.reduceat(counts * ~positive, first)
    below = np.cumsum(misses) - misses  # negatives under each run, those of earlier groups included
    group = np.searchsorted(starts, first, side="right") - 1
    positives, negatives = np.add.reduceat(counts * positive, starts), np.add.reduceat(counts * ~positive, starts)
    before = np.cumsum(negatives) - negatives
    wins = np.bincount(group, hits * (below - before[group] + misses / 2), len(starts))
    both = (positives > 0) & (negatives > 0)
    if not both.any():
        return math.nan
    aucs = wins[both] / (positives[both] * negatives[both])
    return float(np.average(aucs, weights=(positives + negatives)[both]))


def _counts(labels: Floats, weights: Floats | None) -> npt.NDArray[np.number]:
    """How often each sample counts; without weights once, in integers, whose sums are exact."""
    return np.ones(len(labels), np.int64) if weights is None else weights.astype(np.float64)


def reliability(
    labels: Floats, logits: Floats, weights: Floats | None = None, *, bins: int = 10
) -> list[tuple[float, float, int]]:
    """Mean prediction, mean label and samples of up to `bins` bins, which have about as many samples each.

    Samples are put into bins by their prediction, as scikit-learn's calibration_curve does by quantiles; equal ones
    come into one bin. One whose samples all have weight 0 is left out. Empty without samples, and with a NaN
    prediction.
    """
    predicted = _sigmoid(logits)
    if not len(labels) or np.isnan(predicted).any():
        return []
    which = np.searchsorted(np.quantile(predicted, np.linspace(0, 1, bins + 1)[1:-1]), predicted)
    found = []
    for number in np.unique(which):
        chosen = which == number
        of_chosen = None if weights is None else weights[chosen]
        mean, rate = _mean(predicted[chosen], of_chosen), _mean(labels[chosen], of_chosen)
        if not math.isnan(mean):
            found.append((mean, rate, int(chosen.sum())))
    return found


def logloss(labels: Floats, logits: Floats, weights: Floats | None = None) -> float:
    """Mean binary cross-entropy in nats of logits, computed without overflow. NaN without samples."""
    z = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # a NaN prediction gives NaN, no warning
        return _mean(np.logaddexp(0.0, z) - labels * z, weights)


def normalised_entropy(labels: Floats, logits: Floats, weights: Floats | None = None) -> float:
    """Logloss over that of always predicting the mean label (He et al., ADKDD 2014). NaN with one class only."""
    rate = _mean(labels, weights)
    if not 0.0 < rate < 1.0:
        return math.nan
    return logloss(labels, logits, weights) / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def calibration(labels: Floats, logits: Floats, weights: Floats | None = None) -> float:
    """Mean prediction over mean label; 1 is perfect. NaN without a positive."""
    observed = _mean(labels, weights)
    return _mean(_sigmoid(logits), weights) / observed if observed else math.nan


def _mean(values: Floats, weights: Floats | None) -> float:
    """The mean, weighed; NaN where nothing counts."""
    if not len(values):
        return math.nan
    if weights is None:
        return float(np.mean(values, dtype=np.float64))
    total = float(weights.sum(dtype=np.float64))
    return float((values.astype(np.float64) * weights).sum()) / total if total else math.nan


def candidate_ranks(scores: Floats, labels: Floats, groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(G,) rank, from 0, of each group's one positive among its candidates; a tie counts against it.

    scores, labels and groups are (N,); a group is a run of equal numbers. ValueError unless each has one positive.
    A NaN score ranks above everything, so that a broken model never looks good.
    """
    if not len(groups):
        return np.empty(0, np.int64)
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    positive = labels > 0.5
    if (np.add.reduceat(positive.astype(np.int64), starts) != 1).any():
        raise ValueError("each group of candidates needs exactly one positive, and whole groups per batch")
    own = np.repeat(scores[positive], np.diff(np.r_[starts, len(groups)]))
    above: npt.NDArray[np.int64] = np.add.reduceat((~(scores < own) & ~positive).astype(np.int64), starts)
    return above


def hit_rate(ranks: npt.NDArray[np.int64], k: int) -> float:
    """HR@K of ranks from 0: the share of groups whose positive is among the first k. NaN without groups."""
    return float(np.mean(ranks < k)) if len(ranks) else math.nan


def ndcg_one(ranks: npt.NDArray[np.int64], k: int) -> float:
    """NDCG@K of one positive per group: the mean of ln 2 / ln(rank + 2) where rank < k, else 0. NaN without groups."""
    if not len(ranks):
        return math.nan
    return float(np.mean(np.where(ranks < k, math.log(2) / np.log(ranks + 2.0), 0.0)))


def map_one(ranks: npt.NDArray[np.int64], k: int) -> float:
    """MAP@K of one positive per group: the mean of 1 / (rank + 1) where rank < k, else 0. NaN without groups."""
    return float(np.mean(np.where(ranks < k, 1.0 / (ranks + 1.0), 0.0))) if len(ranks) else math.nan


@dataclass(frozen=True, slots=True)
class Users:
    """Users to rank all items for; the pairs index a score matrix: `scores[seen_user, seen_item] = -inf`."""

    ids: torch.Tensor  # (B,) int64, or (B, 1 + history) with what they took, or (B, C) of features
    seen_user: npt.NDArray[np.int64]  # (S,) row of the score matrix
    seen_item: npt.NDArray[np.int64]  # (S,) column: an item that the user took before
    relevant_user: npt.NDArray[np.int64]  # (R,) row, ascending
    relevant_item: npt.NDArray[np.int64]  # (R,) column: an item to be found
    dense: torch.Tensor | None = None  # (B, D) float32, of features


class Scored(NamedTuple):
    """Samples of a split with what a model gave them, (N,) each."""

    labels: npt.NDArray[np.float32]
    logits: npt.NDArray[np.float32]
    groups: npt.NDArray[np.int64] | None
    weights: npt.NDArray[np.float32] | None


@dataclass(eq=False)
class Pointwise:
    """Collects labels and logits: auc, logloss, ne, calibration, samples, and gauc of batches that have groups.

    A missing label (NaN) is left out. Where batches have weights the figures are weighed; `samples` is their number.
    """

    labels: list[npt.NDArray[np.float32]] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
    groups: list[npt.NDArray[np.int64]] = field(default_factory=list)  # where batches have some
    weights: list[npt.NDArray[np.float32]] = field(default_factory=list)  # likewise

    def update(self, logits: Array, labels: Array, groups: Array | None = None, weights: Array | None = None) -> None:
        """One batch: logits, labels, groups and weights, (B,) each; or logits and labels (B, C) of lists."""
        if groups is not None and logits.ndim == 2:
            groups = _integers(groups).repeat(logits.shape[1])
        self.logits.append(_floats(logits))
        self.labels.append(_floats(labels))
        if groups is not None:
            self.groups.append(_integers(groups))
        if weights is not None and logits.ndim == 1:
            self.weights.append(_floats(weights))

    def arrays(self) -> Scored:
        """All samples with a label; no groups, and no weights, where a batch had none."""
        labels = np.concatenate([np.empty(0, np.float32), *self.labels])
        logits = np.concatenate([np.empty(0, np.float32), *self.logits])
        groups = np.concatenate([np.empty(0, np.int64), *self.groups])
        weights = np.concatenate([np.empty(0, np.float32), *self.weights])
        known, whole = ~np.isnan(labels), slice(None)
        chosen = whole if known.all() else known
        return Scored(
            labels[chosen],
            logits[chosen],
            groups[chosen] if len(groups) == len(labels) else None,
            weights[chosen] if len(weights) == len(labels) and self.weights else None,
        )

    @property
    def is_finite(self) -> bool:
        """Whether no sample with a label has a prediction that is NaN or infinite."""
        batches = zip(self.labels, self.logits, strict=True)
        return all(np.isfinite(logits[~np.isnan(labels)]).all() for labels, logits in batches)

    def compute(self) -> dict[str, float]:
        """The figures over everything collected."""
        labels, logits, groups, weights = self.arrays()
        return {
            "auc": auc(labels, logits, weights),
            "logloss": logloss(labels, logits, weights),
            "ne": normalised_entropy(labels, logits, weights),
            "calibration": calibration(labels, logits, weights),
            "samples": float(len(labels)),
            **({} if groups is None else {"gauc": gauc(labels, logits, groups, weights)}),
        }


@dataclass(eq=False)
class Labels:
    """Collects several labels: each figure of each, `auc:income`, and by its bare name the mean over the labels.

    A mean leaves out a label whose figure is undefined: one without samples, or of one class. `samples` are all of
    them, `samples:income` those that have this label.
    """

    names: tuple[str, ...]
    parts: tuple[Pointwise, ...] = ()

    def __post_init__(self) -> None:
        self.parts = tuple(Pointwise() for _ in self.names)

    @property
    def labels(self) -> list[tuple[str, Pointwise]]:
        """The name of each label, and what was collected of it."""
        return list(zip(self.names, self.parts, strict=True))

    def update(self, logits: Array, labels: Array, groups: Array | None = None, weights: Array | None = None) -> None:
        """One batch: logits and labels (B, L), NaN where a label is missing, groups (B,) and weights (B,)."""
        for i, part in enumerate(self.parts):
            part.update(logits[:, i], labels[:, i], groups, weights)

    def compute(self) -> dict[str, float]:
        """The figures over everything collected."""
        found = [part.compute() for part in self.parts]
        means = {name: self.mean([one[name] for one in found]) for name in found[0]}
        means["samples"] = float(sum(map(len, self.parts[0].labels)))
        own = list(zip(self.names, found, strict=True))
        return means | {f"{name}:{label}": value for label, figures in own for name, value in figures.items()}

    def mean(self, values: Sequence[float]) -> float:
        """The mean of a figure over the labels for which it is defined; NaN where predictions have made one NaN."""
        own = zip(values, self.parts, strict=True)
        defined = [value for value, part in own if not math.isnan(value) or not part.is_finite]
        return float(np.mean(defined)) if defined else math.nan


@dataclass(eq=False)
class Candidates:
    """Collects ranked candidate lists: hr@k, ndcg@k, users."""

    k: int = 10
    ranks: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def update(self, logits: Array, labels: Array, groups: Array | None = None, weights: Array | None = None) -> None:
        """One batch of whole groups: logits, labels and groups are (B,); or (B, C), where each row is a group.

        A group counts once, whatever the weights of its samples.
        """
        if logits.ndim == 2:
            groups = np.repeat(np.arange(logits.shape[0]), logits.shape[1])
            logits, labels = logits.reshape(-1), labels.reshape(-1)
        if groups is None:
            raise ValueError("candidates need the groups of their batch")
        self.ranks.append(candidate_ranks(_floats(logits), _floats(labels), _integers(groups)))

    def compute(self) -> dict[str, float]:
        """The figures over everything collected."""
        ranks = np.concatenate([np.empty(0, np.int64), *self.ranks])
        return {
            f"hr@{self.k}": hit_rate(ranks, self.k),
            f"ndcg@{self.k}": ndcg_one(ranks, self.k),
            f"map@{self.k}": map_one(ranks, self.k),
            "users": float(len(ranks)),
        }


@dataclass(eq=False)
class FullRanking:
    """Collects rankings of all items: recall@k, ndcg@k, map@k, users; means over users, as LightGCN's code takes them.

    recall@k = hits in the first k / relevant items; ndcg@k = DCG / the DCG of min(k, relevant items) hits in front;
    map@k = the mean precision at each hit, over min(k, relevant items). Of items with equal scores these are the means
    over all their orders (McSherry and Najork, "Computing Information Retrieval Performance Measures Efficiently in the
    Presence of Tied Scores", ECIR 2008): one score for all items is worth as much as a random order. coverage@k is the
    share of all items that are in anyone's first k; those that a user has seen are in none of this user's. A NaN score
    ranks above everything and is no hit, so that a broken model never looks good.
    """

    k: int = 20
    recalls: list[npt.NDArray[np.float64]] = field(default_factory=list)
    ndcgs: list[npt.NDArray[np.float64]] = field(default_factory=list)
    precisions: list[npt.NDArray[np.float64]] = field(default_factory=list)
    shown: list[npt.NDArray[np.int64]] = field(default_factory=list)  # columns of items, each once per batch
    num_items: int = 0

    def update(self, scores: torch.Tensor, users: Users) -> None:
        """One batch: scores (B, I) of every item for each user, changed in place (seen items become -inf)."""
        scores[torch.from_numpy(users.seen_user), torch.from_numpy(users.seen_item)] = -math.inf
        scores = scores.float()
        best = torch.topk(scores, min(self.k + 1, scores.shape[1]), dim=1)  # one more, to see if equal scores go on
        values, top = best.values.cpu().numpy(), best.indices.cpu().numpy()
        of_last = np.zeros(len(top), np.int64)  # items with the score of place k, where more of them follow
        goes_on = (values[:, self.k :] == values[:, self.k - 1 : self.k]).any(axis=1)
        if goes_on.any():
            rows = torch.from_numpy(goes_on).to(scores.device)
            of_last[goes_on] = (scores[rows] == best.values[rows, -1:]).sum(1).cpu().numpy()
        values, top = values[:, : self.k], top[:, : self.k]  # (B, k)
        relevant = torch.from_numpy(users.relevant_user), torch.from_numpy(users.relevant_item)
        chances, hits_up_to = _expected_hits(values, of_last, users.relevant_user, scores[relevant].cpu().numpy())
        places = np.arange(1, values.shape[1] + 1)
        counts = np.bincount(users.relevant_user, minlength=len(top))
        gains = 1.0 / np.log2(places + 1)
        ideal = np.r_[0.0, np.cumsum(gains)][np.minimum(counts, len(places))]
        has = counts > 0
        self.recalls.append(chances.sum(axis=1)[has] / counts[has])
        self.ndcgs.append((chances * gains).sum(axis=1)[has] / ideal[has])
        averages = (hits_up_to / places).sum(axis=1)[has]
        self.precisions.append(averages / np.minimum(counts, len(places))[has])
        self.shown.append(np.unique(top[values != -math.inf]).astype(np.int64))
        self.num_items = scores.shape[1]

    def compute(self) -> dict[str, float]:
        """The figures over everything collected."""
        recalls = np.concatenate([np.empty(0), *self.recalls])
        ndcgs = np.concatenate([np.empty(0), *self.ndcgs])
        precisions = np.concatenate([np.empty(0), *self.precisions])
        shown = np.unique(np.concatenate([np.empty(0, np.int64), *self.shown]))
        some = len(recalls) > 0
        return {
            f"recall@{self.k}": float(recalls.mean()) if some else math.nan,
            f"ndcg@{self.k}": float(ndcgs.mean()) if some else math.nan,
            f"map@{self.k}": float(precisions.mean()) if some else math.nan,
            f"coverage@{self.k}": len(shown) / self.num_items if some else math.nan,
            "users": float(len(recalls)),
        }


def _expected_hits(
    values: Floats, of_last: npt.NDArray[np.int64], user: npt.NDArray[np.int64], own: Floats
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(B, k) the chance that a place has a hit, and the mean of hit * hits up to it, over all orders of equal scores.

    values (B, k) are the scores of the first k places, of_last (B,) the number of items with the last one, where there
    are more of them; user and own (R,) are row and score of each relevant item.
    """
    place = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    begins, ends = np.ones(values.shape, bool), np.ones(values.shape, bool)  # a run of equal scores; NaN equals nothing
    begins[:, 1:] = ends[:, :-1] = values[:, 1:] != values[:, :-1]
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    last = np.minimum.accumulate(np.where(ends, place, values.shape[1])[:, ::-1], axis=1)[:, ::-1]
    size = last - first + 1
    size = np.maximum(size, np.where(last == values.shape[1] - 1, of_last[:, None], 0))
    equal = (values[user] == own[:, None]) & (own > -math.inf)[:, None]  # (R, k); no hit is an item that was seen
    found = torch.zeros(values.shape, dtype=torch.float64, device="cpu")
    found.index_add_(0, torch.from_numpy(user), torch.from_numpy(equal).double())
    chances = found.numpy() / size
    before = np.take_along_axis(chances.cumsum(axis=1) - chances, first, axis=1)  # hits in the runs before
    within = (place - first) * (found.numpy() - 1) / np.maximum(size - 1, 1)  # more hits of the run, where here is one
    return chances, chances * (before + 1 + within)


def _floats(array: Array) -> npt.NDArray[np.float32]:
    numbers = array.detach().float().cpu().numpy() if isinstance(array, torch.Tensor) else array
    return numbers.astype(np.float32, copy=True).reshape(-1)  # a copy: the caller may reuse its buffer


def _integers(array: Array) -> npt.NDArray[np.int64]:
    return (array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else array).astype(np.int64)


def _sigmoid(logits: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        return np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
