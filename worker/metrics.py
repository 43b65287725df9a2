"""Quality of a recommender: AUC, logloss, normalised entropy, calibration; HR@K, NDCG@K, Recall@K.

Functions take whole arrays. The three collectors take batches, merge what several workers saw, and end in named
figures. A figure that is not defined (AUC of one class, say) is NaN. All arithmetic is float64 over exact ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.floating]
Array = torch.Tensor | npt.NDArray[np.generic]


def auc(labels: Floats, scores: Floats) -> float:
    """Chance that a positive scores above a negative, ties counting half (Mann-Whitney U); exact.

    labels (N,) of 0 and 1, scores (N,) in any monotone scale. NaN with one class only, or with a NaN score.
    """
    positives = int(np.count_nonzero(labels > 0.5))
    negatives = len(labels) - positives
    if not positives or not negatives or np.isnan(scores).any():
        return math.nan
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])  # start of each run of equal scores
    sizes = np.diff(np.r_[first, len(ordered)])
    hits = np.add.reduceat((labels[order] > 0.5).astype(np.int64), first)
    below = first - (np.cumsum(hits) - hits)  # negatives under each run
    return float((hits * (below + (sizes - hits) / 2)).sum() / (positives * negatives))


def logloss(labels: Floats, logits: Floats) -> float:
    """Mean binary cross-entropy in nats of logits, computed without overflow. NaN without samples."""
    if not len(labels):
        return math.nan
    z = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # a NaN prediction gives NaN, no warning
        return float(np.mean(np.logaddexp(0.0, z) - labels * z))


def normalised_entropy(labels: Floats, logits: Floats) -> float:
    """Logloss over that of always predicting the mean label (He et al., ADKDD 2014). NaN with one class only."""
    rate = float(np.mean(labels, dtype=np.float64)) if len(labels) else 0.0
    if not 0.0 < rate < 1.0:
        return math.nan
    return logloss(labels, logits) / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def calibration(labels: Floats, logits: Floats) -> float:
    """Mean prediction over mean label; 1 is perfect. NaN without a positive."""
    observed = float(np.sum(labels, dtype=np.float64))
    return float(np.sum(_sigmoid(logits))) / observed if observed else math.nan


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


@dataclass(frozen=True, slots=True)
class Users:
    """Users to rank all items for; the pairs index a score matrix: `scores[seen_user, seen_item] = -inf`."""

    ids: torch.Tensor  # (B,) int64, or (B, 1 + history) with what they took
    seen_user: npt.NDArray[np.int64]  # (S,) row of the score matrix
    seen_item: npt.NDArray[np.int64]  # (S,) column: an item of the user's train set
    relevant_user: npt.NDArray[np.int64]  # (R,) row, ascending
    relevant_item: npt.NDArray[np.int64]  # (R,) column: an item to be found


@dataclass(eq=False)
class Pointwise:
    """Collects labels and logits: auc, logloss, ne, calibration, samples."""

    labels: list[npt.NDArray[np.float32]] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
    groups: list[npt.NDArray[np.int64]] = field(default_factory=list)  # where batches have some

    def update(self, logits: Array, labels: Array, groups: Array | None = None) -> None:
        """One batch: logits (B,), labels (B,), and groups (B,), which only a user's metrics use; or (B, C) of lists."""
        if groups is not None and logits.ndim == 2:
            groups = _integers(groups).repeat(logits.shape[1])
        self.logits.append(_floats(logits))
        self.labels.append(_floats(labels))
        if groups is not None:
            self.groups.append(_integers(groups))

    def merge(self, other: Pointwise) -> None:
        """Add what another worker collected."""
        self.labels += other.labels
        self.logits += other.logits
        self.groups += other.groups

    def arrays(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64] | None]:
        """Labels, logits and groups, (N,) each, of everything collected; no groups where a batch had none."""
        labels = np.concatenate([np.empty(0, np.float32), *self.labels])
        logits = np.concatenate([np.empty(0, np.float32), *self.logits])
        groups = np.concatenate([np.empty(0, np.int64), *self.groups])
        return labels, logits, groups if len(groups) == len(labels) else None

    def compute(self) -> dict[str, float]:
        """The figures over everything collected."""
        labels, logits, _ = self.arrays()
        return {
            "auc": auc(labels, logits),
            "logloss": logloss(labels, logits),
            "ne": normalised_entropy(labels, logits),
            "calibration": calibration(labels, logits),
            "samples": float(len(labels)),
        }


@dataclass(eq=False)
class Candidates:
    """Collects ranked candidate lists: hr@k, ndcg@k, users."""

    k: int = 10
    ranks: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def update(self, logits: Array, labels: Array, groups: Array | None = None) -> None:
        """One batch of whole groups: logits, labels and groups are (B,); or (B, C), where each row is a group."""
        if logits.ndim == 2:
            groups = np.repeat(np.arange(logits.shape[0]), logits.shape[1])
            logits, labels = logits.reshape(-1), labels.reshape(-1)
        if groups is None:
            raise ValueError("candidates need the groups of their batch")
        self.ranks.append(candidate_ranks(_floats(logits), _floats(labels), _integers(groups)))

    def merge(self, other: Candidates) -> None:
        """Add what another worker collected."""
        self.ranks += other.ranks

    def compute(self) -> dict[str, float]:
        """The figures over everything collected."""
        ranks = np.concatenate([np.empty(0, np.int64), *self.ranks])
        return {
            f"hr@{self.k}": hit_rate(ranks, self.k),
            f"ndcg@{self.k}": ndcg_one(ranks, self.k),
            "users": float(len(ranks)),
        }


@dataclass(eq=False)
class FullRanking:
    """Collects rankings of all items: recall@k, ndcg@k, users; means over users, as LightGCN's code takes them.

    recall@k = hits in the first k / relevant items; ndcg@k = DCG / the DCG of min(k, relevant items) hits in front.
    """

    k: int = 20
    recalls: list[npt.NDArray[np.float64]] = field(default_factory=list)
    ndcgs: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def update(self, scores: torch.Tensor, users: Users) -> None:
        """One batch: scores (B, I) of every item for each user, changed in place (seen items become -inf)."""
        scores[torch.from_numpy(users.seen_user), torch.from_numpy(users.seen_item)] = -math.inf
        top = torch.topk(scores, min(self.k, scores.shape[1]), dim=1).indices.cpu().numpy()  # (B, k)
        num_items = scores.shape[1]
        relevant = np.sort(users.relevant_user * num_items + users.relevant_item)
        keys = top + np.arange(len(top))[:, None] * num_items
        hits = np.isin(keys, relevant)  # (B, k)
        counts = np.bincount(users.relevant_user, minlength=len(top))
        gains = 1.0 / np.log2(np.arange(2, hits.shape[1] + 2))
        ideal = np.r_[0.0, np.cumsum(gains)][np.minimum(counts, hits.shape[1])]
        has = counts > 0
        self.recalls.append(hits.sum(axis=1)[has] / counts[has])
        self.ndcgs.append((hits * gains).sum(axis=1)[has] / ideal[has])

    def merge(self, other: FullRanking) -> None:
        """Add what another worker collected."""
        self.recalls += other.recalls
        self.ndcgs += other.ndcgs

    def compute(self) -> dict[str, float]:
        """The figures over everything collected."""
        recalls = np.concatenate([np.empty(0), *self.recalls])
        ndcgs = np.concatenate([np.empty(0), *self.ndcgs])
        some = len(recalls) > 0
        return {
            f"recall@{self.k}": float(recalls.mean()) if some else math.nan,
            f"ndcg@{self.k}": float(ndcgs.mean()) if some else math.nan,
            "users": float(len(recalls)),
        }


def _floats(array: Array) -> npt.NDArray[np.float32]:
    numbers = array.detach().float().cpu().numpy() if isinstance(array, torch.Tensor) else array
    return numbers.astype(np.float32, copy=True).reshape(-1)  # a copy: the caller may reuse its buffer


def _integers(array: Array) -> npt.NDArray[np.int64]:
    return (array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else array).astype(np.int64)


def _sigmoid(logits: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        return np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
