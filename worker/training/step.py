"""One training step: what becomes of a batch, from the forward to the push."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from embershard.proto.errors import EmbershardError
from embershard.proto.timing import span
from embershard.worker.checkpoint.tensors import is_stateful
from embershard.worker.data.batch import Batch
from embershard.worker.device import is_dtensor
from embershard.worker.job.training import StepSection
from embershard.worker.nn.averaging import Share, WeightAverage
from embershard.worker.nn.optimizer import gradients
from embershard.worker.strategy.allreduce import check_reduced, check_used
from embershard.worker.strategy.protocol import StepBatch, Strategy
from embershard.worker.training.evaluate import to_device

# fp16 begins with a scale of 2**16 and halves it with every step that overflows: 100 in a row are no search any more
MAX_SKIPS_IN_A_ROW = 100
_CPU = torch.device("cpu")


class NonFiniteLoss(EmbershardError):
    """Training diverged: the loss or a gradient is NaN or Inf."""

    template = (
        "worker {worker}: the {what} of step {step} is {value}{after}; "
        "lower the learning rate, add warm-up steps, or look at the data for values without bounds"
    )


class TrainStep:
    """Forward, loss, backward, and with every `accumulate`-th batch the strategy's step.

    `loss(module, batch)` gives the mean loss of a batch. Of the `settings` it uses amp, accumulate, clip_norm and
    non_finite; gradients are searched for NaN and Inf only where a step may be left out, or their norm is computed
    anyway. `agree` makes one norm of the workers' norms, their maximum, where dense weights are all-reduced: all
    workers then clip by it, and leave a step out together, when it is inf.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[nn.Module, Batch], Tensor],
        strategy: Strategy,
        settings: StepSection,
        *,
        device: torch.device = _CPU,
        average: WeightAverage | None = None,
        agree: Callable[[float], float] | None = None,
        worker: int = 0,
    ) -> None:
        self._module, self._loss, self._strategy, self._settings = module, loss, strategy, settings
        self._device, self._average, self._agree, self._worker = device, average, agree, worker
        self._scaler = torch.amp.GradScaler(device.type) if settings.amp == "fp16" else None
        self.steps = 0  # those that were left out included
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._batches: list[StepBatch] = []  # since the last step
        self._unit = 0.0  # weight of the first of them that has one
        self._weight = 0.0  # of all of them, in units
        self._bad_loss = False
        self._may_skip = settings.non_finite == "skip" or self._scaler is not None
        self._buffers: list[tuple[Tensor, Tensor]] = []  # as they were before the step
        self._last_good_batch: Batch | None = None  # the last one whose step was made

    def __call__(self, step_batch: StepBatch) -> float:
        """The loss of a batch, after all that is to be done with it; accumulated batches count by their weight.

        NonFiniteLoss where the settings, or too many steps left out in a row, say so.
        """
        if not self._batches and self._may_skip:
            self._buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        # a batch of weight 0 must not add a NaN that was left out before
        batch = step_batch.batch if step_batch.samples or self._last_good_batch is None else self._last_good_batch
        with span("forward"), self._autocast():
            loss = self._loss(self._module, to_device(batch, self._device))
        if self._average is not None:
            self._average.observe()
        self._batches.append(step_batch)
        mass = step_batch.joint or step_batch.weight  # the same on all workers that step together
        self._unit = self._unit or mass
        weight = mass / self._unit if mass else 0.0
        with span("backward"):
            factor = weight * step_batch.loss_scale
            scaled = loss if factor == 1.0 else loss * factor
            if self._scaler is not None:
                scaled = self._scaler.scale(scaled)
            if step_batch.samples or scaled.requires_grad:  # an idle worker has no rows, which may be all that trains
                check_used(self._module, scaled)
                scaled.backward()  # type: ignore[no-untyped-call]
                check_reduced(self._module)
            value = loss.item()  # only now: it waits for a GPU, which has backward's work to do meanwhile
        self._weight += weight
        if not math.isfinite(value) and step_batch.samples:
            if self._settings.non_finite == "stop":
                raise self._error("loss", self.steps + 1, value)
            self._bad_loss = True
        if len(self._batches) == self._settings.accumulate:
            self._step()
        return value

    def averaged(self, share: Share) -> AbstractContextManager[None]:
        """The average of the weights in their place, if there is one; `share` as of WeightAverage.applied."""
        return nullcontext() if self._average is None else self._average.applied(share)

    def finish(self) -> None:
        """Make a step of the batches that are too few for one, if there are any."""
        if self._batches:
            self._step()

    def state_dict(self) -> dict[str, Any]:
        """Counters, the scale of the loss, the average of the weights, and what the loss has learnt."""
        scaler = self._scaler.state_dict() if self._scaler is not None else {}
        average = self._average.state_dict() if self._average is not None else {}
        learnt: Mapping[str, Any] = self._loss.state_dict() if is_stateful(self._loss) else {}
        counts = {"steps": self.steps, "skipped": self.skipped}
        return {**counts, "scaler": scaler, "average": average, "objective": learnt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.steps, self.skipped = state["steps"], state["skipped"]
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        if self._average is not None and state["average"]:
            self._average.load_state_dict(state["average"])
        if is_stateful(self._loss):
            self._loss.load_state_dict(state["objective"])

    def _autocast(self) -> AbstractContextManager[object]:
        if self._settings.amp == "off":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16 if self._settings.amp == "bf16" else torch.float16)

    def _step(self) -> None:
        batches, weight, bad_loss = self._batches, self._weight or 1.0, self._bad_loss
        self._batches, self._unit, self._weight, self._bad_loss = [], 0.0, 0.0, False
        self.steps += 1
        if self._scaler is not None:
            for optimizer in self._strategy.optimizers:
                self._scaler.unscale_(optimizer)
        norm = self._norm(weight, bad_loss)
        if math.isinf(norm):
            self._skip()
            return
        factor = 1.0 / weight
        if self._settings.clip_norm is not None:
            factor *= min(1.0, self._settings.clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        if factor != 1.0:
            for gradient in self._gradients():
                gradient.mul_(factor)
        has_gradients = self._scaler is None or bool(self._gradients())
        self._strategy.step(sum(step_batch.weight for step_batch in batches))
        good = [step_batch.batch for step_batch in batches if step_batch.samples]
        self._last_good_batch = good[-1] if good else self._last_good_batch
        self._skipped_in_a_row = 0
        if self._scaler is not None:
            # where nothing had a gradient it has not looked for overflows, and would not go on
            self._scaler.update(None if has_gradients else self._scaler.get_scale())
        if self._average is not None:
            self._average.stepped()

    def _norm(self, weight: float, bad_loss: bool) -> float:
        """Norm of the mean gradient, agreed by all workers; inf for a step to be left out, 0 where it is not needed."""
        settings = self._settings
        if settings.clip_norm is None and settings.non_finite == "stop" and self._scaler is None:
            return 0.0
        norm = global_norm(self._gradients()) / weight  # by every worker: it is a collective where weights are sharded
        norm = norm if math.isfinite(norm) and not bad_loss else math.inf
        return norm if self._agree is None else self._agree(norm)

    def _skip(self) -> None:
        if self._settings.non_finite == "stop" and self._scaler is None:
            raise self._error("gradient norm", self.steps, math.inf)
        self.skipped += 1
        self._skipped_in_a_row += 1
        self._strategy.skip()
        for buffer, before in self._buffers:  # running statistics would keep a NaN for ever
            buffer.copy_(before)
        if self._scaler is not None:  # by hand: another worker may be the one that overflowed
            self._scaler.update(self._scaler.get_scale() * self._scaler.get_backoff_factor())
            self._scaler.load_state_dict({**self._scaler.state_dict(), "_growth_tracker": 0})
        if self._skipped_in_a_row > MAX_SKIPS_IN_A_ROW:
            after = f", as were those of the {MAX_SKIPS_IN_A_ROW} before"
            raise self._error("loss or gradient norm", self.steps, math.inf, after)

    def _gradients(self) -> list[Tensor]:
        return [gradient for optimizer in self._strategy.optimizers for gradient in gradients(optimizer)]

    def _error(self, what: str, step: int, value: float, after: str = "") -> NonFiniteLoss:
        return NonFiniteLoss(worker=self._worker, what=what, step=step, value=value, after=after)


@torch.no_grad()
def global_norm(tensors: Sequence[Tensor]) -> float:
    """L2 norm of all of them together; one copy to the host per device."""
    squares: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        norm = torch.linalg.vector_norm(tensor)
        if is_dtensor(norm):
            norm = norm.full_tensor()
        squares.setdefault(norm.device, []).append(norm.square())
    return math.sqrt(sum(torch.stack(parts).sum().item() for parts in squares.values()))
