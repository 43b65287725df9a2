"""Metrics of users: functions of labels and scores, and objects with torchmetrics' methods."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from embershard.proto.arrays import Floats
from embershard.proto.errors import UserCodeFailed
from embershard.proto.user_modules import find, user_code, where_defined
from embershard.worker.models.user_defined import call


class UserMetric:
    """A user's metric of one evaluation split, `module:name`; a class, or a function with `args`, is called first.

    It is called with labels and logits, (N,) float32 arrays of numpy as scikit-learn's metrics take them, and with the
    batches' groups, (N,) int64, where it takes a third argument, and the samples' weights, (N,) float32, where it takes
    an argument called weights. An object with `update` and `compute`, as torchmetrics
    has them, gets tensors, logits first, and labels as int64 where they are whole numbers.
    """

    def __init__(self, name: str, args: Mapping[str, object]) -> None:
        self.name = name.rpartition(":")[2]
        self._what, found = f"metric {name}", find(name)
        self._where = where_defined(found)
        self._metric = call(self._what, found, args) if isinstance(found, type) or args else found
        self._is_torchmetrics = all(callable(getattr(self._metric, n, None)) for n in ("update", "compute", "reset"))
        if not self._is_torchmetrics and not callable(self._metric):
            raise self._failed(f"is {self._metric!r}, which cannot be called")

    def __call__(
        self,
        labels: Floats,
        logits: Floats,
        groups: npt.NDArray[np.int64] | None,
        weights: Floats | None = None,
        *,
        split: str = "",
    ) -> float:
        """The figure.

        UserCodeFailed, with the split, file and line, where it raises, needs groups or weights and there are none, or
        gives no number.
        """
        what = f"{self._what}, of {_described(labels, split)}," if split else self._what
        if self._is_torchmetrics:
            with user_code(what):
                value = self._of_torchmetrics(labels, logits)
        else:
            assert callable(self._metric)
            given: list[object] = [labels, logits]
            if self._takes_groups():
                if groups is None:
                    raise self._failed("takes groups, and the reader's batches have none")
                given.append(groups)
            named = {} if weights is None or "weights" not in self._parameters() else {"weights": weights}
            if weights is None and self._parameters().get("weights") is inspect.Parameter.empty:
                raise self._failed("takes weights, and the samples have none")
            with user_code(what):
                value = self._metric(*given, **named)
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            shape = getattr(value, "shape", None)
            given_value = f"{type(value).__name__} of shape {tuple(shape)}" if shape is not None else repr(value)
            raise self._failed(f"gave {given_value}, which is no number") from None

    def _of_torchmetrics(self, labels: Floats, logits: Floats) -> object:
        whole = bool((labels == np.round(labels)).all())
        target = torch.from_numpy(labels)
        metric: object = self._metric
        metric.reset()  # type: ignore[attr-defined]
        metric.update(torch.from_numpy(logits), target.long() if whole else target)  # type: ignore[attr-defined]
        return metric.compute()  # type: ignore[attr-defined]

    def _takes_groups(self) -> bool:
        """Whether it has a third argument without a default, or one called groups."""
        parameters = self._parameters()
        third = [name for name in parameters if name != "weights"][2:3]
        return "groups" in parameters or (bool(third) and parameters[third[0]] is inspect.Parameter.empty)

    def _parameters(self) -> dict[str, object]:
        """The arguments that it takes by place, or that are called weights, with their defaults."""
        try:
            parameters = inspect.signature(self._metric).parameters.values()  # type: ignore[arg-type]
        except (TypeError, ValueError):  # of C code
            return {}
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return {p.name: p.default for p in parameters if p.kind in by_place or p.name == "weights"}

    def _failed(self, reason: str) -> UserCodeFailed:
        return UserCodeFailed(what=self._what, reason=reason, where=self._where)


def _described(labels: Floats, split: str) -> str:
    """A split and, where it has one only, its label: many metrics want two."""
    only = len(labels) > 0 and bool((labels == labels[0]).all())
    return f"{split}, whose {len(labels):,} labels are all {labels[0]:g}" if only else split
