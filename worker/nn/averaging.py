"""An average of the dense weights over the steps, to evaluate with: smoother than the last ones, and often better.

Polyak & Juditsky 1992; torch.optim.swa_utils computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from embershard.worker.nn.remote_weight import RemoteWeight

Share = Callable[[Sequence[Tensor]], None]


class WeightAverage:
    """The exponential moving average of parameters, average = decay * average + (1 - decay) * weights per step.

    It begins with the weights after the first step. `read` brings parameters up to date that live on shards: a worker
    sees what a step made of them in the next forward, and they are taken in there. Table rows are not averaged.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, decay: float = 0.999, read: Callable[[], None] | None = None
    ) -> None:
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.steps = 0  # taken in
        self._parameters = [its for its in parameters if not isinstance(its, RemoteWeight)]
        self._read = read
        self._pending = False
        self.values: list[Tensor] = []

    def stepped(self) -> None:
        """The weights have changed; what they are now is taken in by the next `observe`."""
        self._pending = True

    def observe(self) -> None:
        """Take the parameters in, once per step; they must be up to date."""
        if not self._pending:
            return
        if not self.values:
            self.values = [parameter.detach().clone() for parameter in self._parameters]
        else:
            self._update(self.values, self._parameters, self.steps)
        self.steps += 1
        self._pending = False

    @contextmanager
    def applied(self, share: Share | None = None) -> Iterator[None]:
        """The parameters hold the average, and their own values again afterwards.

        `share` gives all workers the values of one, so that they evaluate one model.
        """
        if self._read is not None:
            self._read()
        self.observe()
        own = [parameter.detach().clone() for parameter in self._parameters]
        values = self.values or [value.clone() for value in own]
        if share is not None:
            share(values)
        self._put(values)
        try:
            yield
        finally:
            self._put(own)

    def state_dict(self) -> dict[str, Any]:
        """The average, of all steps that were taken in."""
        return {"steps": self.steps, "pending": self._pending, "values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the average that `state_dict` returned."""
        self.steps, self._pending = state["steps"], state["pending"]
        self.values = [value.to(parameter) for value, parameter in zip(state["values"], self._parameters, strict=False)]

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            # a change for a while: to parameters of shards a change that lasts is an error
            with torch.autograd._unsafe_preserve_version_counter(parameter):  # type: ignore[attr-defined]
                parameter.copy_(value)
