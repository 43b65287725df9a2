"""Evaluation: every worker scores its share with one and the same model, the first one adds up.

The shares are those of the workers who are there as it begins. Where one of them is lost meanwhile it is done again by
those who are left: the figures are of all samples, each of them once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.batch import Batch, Dataset, Evaluation, RankingDataset, Schema
from embershard.worker.device import to_device as tensor_to_device
from embershard.worker.job.job import Job
from embershard.worker.metrics import Candidates, FullRanking, Labels, Pointwise, reliability
from embershard.worker.models.recommender import RankingModel
from embershard.worker.models.user_defined import Forward, in_whole_rows
from embershard.worker.nn.averaging import Share
from embershard.worker.strategy.protocol import Strategy
from embershard.worker.training.user_metric import UserMetric

Collector = Pointwise | Labels | Candidates | FullRanking
Figures = dict[str, float]


class Evaluator:
    """Scores a dataset's splits with the weights that the shards have when all workers are here."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        strategy: Strategy,
        group: WorkerGroup,
        *,
        forward: Forward,
        device: torch.device,
        averaged: Callable[[Share], AbstractContextManager[None]] = lambda _: nullcontext(),
        curves: bool = False,
    ) -> None:
        self.curves: dict[str, list[tuple[float, float, int]]] = {}
        """Split (and label, where there are several) -> its reliability curve, of the last evaluation, if asked for."""
        self._model, self._dataset, self._strategy, self._group = strategy.model, dataset, strategy, group
        self._forward, self._metrics = in_whole_rows(forward), metrics_of(job)
        self._batch_size, self._device = job.evaluate.batch_size, device
        self._averaged, self._with_curves = averaged, curves

    def evaluate(self) -> dict[str, Figures]:
        """Split -> metric -> value, on every worker. All must call it, once what anyone pushed before is in."""
        return self._group.retry_on_membership_change(self._evaluate)

    def _evaluate(self) -> dict[str, Figures]:
        self._strategy.refresh()
        figures: dict[str, Figures] = {}
        averaged = self._averaged(self._group.broadcast)
        with torch.no_grad(), self._shared_buffers(), _evaluating(self._model), self._strategy.exact(), averaged:
            items = self._item_vectors() if self._dataset.evaluation == "ranking" else None
            for split in self._dataset.splits:
                collectors = self._score(split) if items is None else [self._rank(split, items)]
                for collector in collectors:
                    _gather(collector, self._group)
                if self._group.is_first:
                    figures[split] = self._metrics.compute(collectors, split)
                    self.curves = {**self.curves, **(_curves(split, collectors) if self._with_curves else {})}
        return self._group.broadcast_json(figures)

    @contextmanager
    def _shared_buffers(self) -> Iterator[None]:
        """Score with the first worker's buffers everywhere; afterwards each worker has its own again, to train with."""
        own = {} if self._group.is_first else {name: its.clone() for name, its in self._model.named_buffers()}
        try:
            self._group.broadcast(self._model.buffers())
            yield
        finally:
            for name, buffer in self._model.named_buffers():  # of which a forward may have made some, or grown them
                if name in own and own[name].shape == buffer.shape:
                    buffer.copy_(own[name])

    def _score(self, split: str) -> Sequence[Collector]:
        schema = self._dataset.schema
        collectors = self._metrics.collectors(schema.labels)
        for batch in self._dataset.evaluate(split, *self._group.share, self._batch_size):
            logits = self._forward(self._model, to_device(batch, self._device))
            groups = self._metrics.groups_of(batch, schema)
            for collector in collectors:
                collector.update(logits, batch.labels, groups, batch.weights)
        return collectors

    def _item_vectors(self) -> torch.Tensor:
        """Vectors (I, dim) of all items, for all splits."""
        ids, dense = cast(RankingDataset, self._dataset).items  # it says that it is ranked
        assert isinstance(self._model, RankingModel)
        dense, step = _floats_on(dense, self._device), 1 << 14
        parts = [slice(first, first + step) for first in range(0, len(ids), step)]
        return torch.cat([self._model.item_vectors(ids[p], None if dense is None else dense[p]) for p in parts])

    def _rank(self, split: str, items: torch.Tensor) -> Collector:
        dataset = cast(RankingDataset, self._dataset)
        assert isinstance(self._model, RankingModel)
        collector = FullRanking(self._metrics.top_k, num_items=len(items))
        # a score matrix of the batch's size, whatever the number of items
        users_per_batch = max(1, (self._batch_size << 10) // max(1, len(items)))
        for users in dataset.users(split, *self._group.share, users_per_batch):
            vectors = self._model.user_vectors(users.ids, _floats_on(users.dense, self._device))
            collector.update(vectors @ items.T, users)
        return collector


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch whose floats are on a device; ids stay on the host, where they are routed."""
    if device.type == "cpu":
        return batch
    dense, weights = _floats_on(batch.dense, device), _floats_on(batch.weights, device)
    return dataclasses.replace(batch, dense=dense, labels=tensor_to_device(batch.labels, device), weights=weights)


def _floats_on(floats: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if floats is None else tensor_to_device(floats, device)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def _curves(split: str, collectors: Sequence[Collector]) -> dict[str, list[tuple[float, float, int]]]:
    """The reliability curve of each label of a split; none of ranked items."""
    found = {}
    for collector in collectors[:1]:
        if isinstance(collector, Pointwise | Labels):
            parts = collector.labels if isinstance(collector, Labels) else [("", collector)]
            for label, part in parts:
                scored = part.arrays()
                found[f"{split} {label}".strip()] = reliability(scored.labels, scored.logits, scored.weights)
    return found


def _gather(collector: Collector, group: WorkerGroup) -> None:
    """Put what all workers collected into the first one's collector."""
    if isinstance(collector, Labels):
        for part in collector.parts:
            _gather(part, group)
        return
    for field in dataclasses.fields(collector):
        parts = getattr(collector, field.name)
        if isinstance(parts, list):
            empty = np.empty(0, _DTYPES[field.name])
            setattr(collector, field.name, group.gather(np.concatenate([empty, *parts])))


_DTYPES = {
    "groups": np.int64,
    "weights": np.float32,
    "labels": np.float32,
    "logits": np.float32,
    "ranks": np.int64,
    "recalls": np.float64,
    "ndcgs": np.float64,
    "precisions": np.float64,
    "shown": np.int64,
}


_COUNTS = {"samples", "users"}  # which are shown beside any metrics
_IF_NAMED = {"map", "coverage", "gauc"}  # which are shown where a job names them


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The metrics of an evaluation: built-in ones by name, and those of a user."""

    evaluation: Evaluation
    top_k: int = 10
    names: tuple[str, ...] = ()  # in the order in which they are shown; none: the usual ones
    own: tuple[UserMetric, ...] = ()
    groups: str | None = None  # the feature by which gauc groups samples

    def collectors(self, labels: Sequence[str] = ("label",)) -> list[Pointwise | Labels | Candidates]:
        """Return the collectors of a split for `compute`, for samples with these labels."""
        if self.evaluation == "pointwise":
            return [Pointwise() if len(labels) == 1 else Labels(tuple(labels))]
        built_in: list[Pointwise | Labels | Candidates] = [Candidates(self.top_k)]
        return built_in + [Pointwise()] * bool(self.own)

    def groups_of(self, batch: Batch, schema: Schema) -> torch.Tensor | None:
        """(B,) int64: the ids of the feature that groups samples, or else the batch's own groups, if it has some."""
        if self.groups is None:
            return batch.groups
        starts = {field.name: field.start for field in schema.fields}
        return batch.ids[:, starts[self.groups] if starts else schema.features.index(self.groups)]

    def compute(self, collectors: Sequence[Collector], split: str = "") -> Figures:
        """The figures of what was collected of a split. UserCodeFailed, naming it, where a user's metric raises."""
        found = collectors[0].compute() | self.of_user(collectors, split)
        if not self.names:
            return {name: value for name, value in found.items() if name.partition("@")[0] not in _IF_NAMED}
        return {name: found[name] for name in (*self.names, *(_COUNTS & found.keys()))}

    def of_user(self, collectors: Sequence[Collector], split: str = "") -> Figures:
        """The figures of the user's metrics; errors as of `compute`."""
        found: Figures = {}
        for metric in self.own:
            scores = collectors[-1]
            if isinstance(scores, Labels):
                own = {f"{metric.name}:{label}": _of_label(metric, part, split) for label, part in scores.labels}
                found |= {metric.name: scores.mean(list(own.values())), **own}
            else:
                assert isinstance(scores, Pointwise)
                found[metric.name] = metric(*scores.arrays(), split=split)
        return found


def _of_label(metric: UserMetric, part: Pointwise, split: str) -> float:
    """The figure of one of several labels; NaN, as of a built-in metric, where no sample has it."""
    scored = part.arrays()
    return metric(*scored, split=split) if len(scored.labels) else math.nan


def metrics_of(job: Job) -> Metrics:
    """The metrics of a job. BadModule or UserCodeFailed where one of its own is not there, or cannot be made."""
    own = tuple(UserMetric(metric.code, metric.args) for metric in job.metrics if metric.is_custom)
    names = job.metric_names if job.metrics or job.evaluate.groups or len(job.data.labels_of_samples) > 1 else ()
    if job.metrics and job.own_loss is None and job.data.evaluation == "pointwise":
        names = tuple(dict.fromkeys((*names, "ne")))  # which the first evaluation is judged by, whatever is shown
    return Metrics(evaluation=job.data.evaluation, top_k=job.top_k, names=names, own=own, groups=job.evaluate.groups)


@dataclass(kw_only=True)
class Best:
    """The best evaluation so far, by one metric, and how many in a row were no better since.

    `checkpoint` is the one that holds its weights, where they are kept.
    """

    metric: str = ""
    lower_is_better: bool = False
    min_delta: float = 0.0
    value: float = math.nan
    worse_in_a_row: int = 0
    checkpoint: str | None = None

    @property
    def is_latest(self) -> bool:
        """Whether the last evaluation was the best."""
        return not math.isnan(self.value) and self.worse_in_a_row == 0

    def state_dict(self) -> dict[str, object]:
        """Return what a resumed run, or a late worker, has to know."""
        return {name: getattr(self, name) for name in ("metric", "value", "worse_in_a_row", "checkpoint")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; the best by another metric is forgotten."""
        if state["metric"] == self.metric:
            self.value, self.worse_in_a_row = state["value"], state["worse_in_a_row"]
            self.checkpoint = state["checkpoint"]

    def observe(self, value: float) -> bool:
        """Take note of an evaluation; whether it is better than the best by more than `min_delta`."""
        sign = -1.0 if self.lower_is_better else 1.0
        better = not math.isnan(value) and (math.isnan(self.value) or sign * (value - self.value) > self.min_delta)
        if better:
            self.value = value
        self.worse_in_a_row = 0 if better else self.worse_in_a_row + 1
        return better
