"""The learning rates of a run's optimizers, step by step: our own shapes, or a scheduler of torch, after a warm-up."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from embershard.worker.nn.lr_schedule import Schedule
from embershard.worker.nn.optimizer import checked_rate
from embershard.worker.nn.schedulers import make_scheduler


class LearningRates:
    """What a schedule makes of the rates that the optimizers' groups begin with.

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
        factor = self.schedule.scale(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it cannot know that a step without a push is one too
            while self._moved < step - self.schedule.warmup_steps:
                for scheduler in self._schedulers:
                    scheduler.step()
                self._moved += 1
        # a scheduler reads its last rate from the group: it is there whenever it moves, since the factor is 1 then
        rates = self._full
        if self._schedulers:
            rates = [[float(rate) for rate in scheduler.get_last_lr()] for scheduler in self._schedulers]
        for optimizer, of_groups in zip(self._optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, of_groups, strict=True):
                group["lr"] = rate * factor
                checked_rate(group, step)
        first, full = self._optimizers[0].param_groups[0]["lr"], self._full[0][0]
        self.scale = first / full if full else factor
