"""Learning-rate schedules: a factor on every optimizer's learning rate, by step and by what evaluation says."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # a job file is checked without torch, unless it names a scheduler of torch's
    import torch
    from torch.optim import lr_scheduler


class LearningRates:
    """Apply a learning-rate schedule to the rates of the optimizers' groups.

    With `scheduler` ("StepLR" of torch.optim.lr_scheduler, say) and its `arguments` it is that one which moves them,
    once per step after the warm-up. ValueError as `make_scheduler` says.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        scheduler: str | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        self.scale = 1.0  # of the first group's rate
        self.schedule = schedule
        self._optimizers = optimizers
        self._full = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]
        self._schedulers = [
            make_scheduler(scheduler, arguments or {}, optimizer) for optimizer in optimizers if scheduler
        ]
        self._moved = 0

    def set(self, step: int) -> None:
        """Give every group its rate for a step, counted from 0. BadLearningRate for one that is no rate."""
        from embershard.worker.nn.optimizer import checked_rate

        factor = self.schedule.scale(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it cannot know that a step without a push is one too
            while self._moved < step - self.schedule.warmup_steps:
                for scheduler in self._schedulers:
                    # it reads its last rate from the group, which has one of the warm-up where steps were left out
                    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                        group["lr"] = float(rate)
                    scheduler.step()
                self._moved += 1
        rates = self._full
        if self._schedulers:
            rates = [[float(rate) for rate in scheduler.get_last_lr()] for scheduler in self._schedulers]
        for optimizer, of_groups in zip(self._optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, of_groups, strict=True):
                group["lr"] = rate * factor
                checked_rate(group, step)
        first, full = self._optimizers[0].param_groups[0]["lr"], self._full[0][0]
        self.scale = first / full if full else factor


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


# they take functions, other schedulers, or what an evaluation says
_NOT_BY_NAME = ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")


class UnknownScheduler(ValueError):
    """A name that is no scheduler's."""


def make_scheduler(
    name: str, arguments: Mapping[str, object], optimizer: torch.optim.Optimizer
) -> lr_scheduler.LRScheduler:
    """A scheduler of torch.optim.lr_scheduler.

    UnknownScheduler for a class that it has not, ValueError for arguments that the class does not take.
    """
    from torch.optim import lr_scheduler

    kind = getattr(lr_scheduler, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and name[0].isupper()):
        raise UnknownScheduler(f"torch.optim.lr_scheduler has no class {name!r}")
    if name in ("LRScheduler", *_NOT_BY_NAME):
        raise UnknownScheduler(
            f"{name} cannot be written in a job file; use it in a loop of your own, on es.ShardOptimizer"
        )
    taken = [key for key in inspect.signature(kind).parameters if key not in ("optimizer", "last_epoch", "verbose")]
    unknown = sorted(set(arguments) - set(taken))
    if unknown:
        raise ValueError(f"{name} takes no {unknown[0]!r}; it takes {', '.join(taken)}")
    try:
        make: Callable[..., lr_scheduler.LRScheduler] = kind
        return make(optimizer, **arguments)
    except (TypeError, ValueError, ArithmeticError, KeyError, AssertionError) as error:
        raise ValueError(f"{name}: {error}") from None


def check_scheduler(name: str, arguments: Mapping[str, object]) -> None:
    """ValueError where `make_scheduler` will refuse it."""
    import torch

    make_scheduler(name, arguments, torch.optim.Adagrad([torch.zeros(1)], lr=1.0))  # like shards without a momentum
