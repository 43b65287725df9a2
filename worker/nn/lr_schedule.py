"""Learning-rate schedules: a factor on every optimizer's learning rate, by step and by what evaluation says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "linear", "cosine", "step", "plateau"]


@dataclass(kw_only=True)
class Schedule:
    """The factor of each step of one worker; steps count from 0.

    After `warmup_steps` of linear growth: constant; linear or cosine, down to `end` at `total_steps`; step, times
    `factor` every `every` steps; plateau, times `factor` after `patience` evaluations in a row that were no better.
    """

    shape: Shape = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    end: float = 0.0
    every: int = 1
    factor: float = 0.1
    patience: int = 1
    plateaus: int = 0
    worse_in_a_row: int = 0

    def scale(self, step: int) -> float:
        """The factor of a step."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "step":
            return self.factor ** ((step - self.warmup_steps) // self.every)
        if self.shape == "plateau":
            return self.factor**self.plateaus
        if self.shape == "constant":
            return 1.0
        length = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / length)
        left = 1.0 - done if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.end + (1.0 - self.end) * left

    def observe(self, improved: bool) -> None:
        """Take note of an evaluation."""
        self.worse_in_a_row = 0 if improved else self.worse_in_a_row + 1
        if self.worse_in_a_row >= self.patience:
            self.plateaus += 1
            self.worse_in_a_row = 0


LOWER_IS_BETTER = frozenset({"logloss", "ne"})


@dataclass(kw_only=True)
class Best:
    """The best evaluation so far, by one metric, and how many in a row were no better since."""

    metric: str
    min_delta: float = 0.0
    value: float = math.nan
    worse_in_a_row: int = 0

    def observe(self, value: float) -> bool:
        """Take note of an evaluation; whether it is better than the best by more than `min_delta`."""
        sign = -1.0 if self.metric in LOWER_IS_BETTER else 1.0
        better = not math.isnan(value) and (math.isnan(self.value) or sign * (value - self.value) > self.min_delta)
        if better:
            self.value = value
        self.worse_in_a_row = 0 if better else self.worse_in_a_row + 1
        return better
