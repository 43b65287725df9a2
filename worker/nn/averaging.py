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
    """Keep the exponential moving average of parameters: average = decay * average + (1 - decay) * weights per step.

    It starts with the weights after the first step. `read` pulls parameters that are on shards: a worker sees the
    result of a step only in the next forward, and averages it there. Rows of embedding tables are not averaged.
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
        """Note that the weights have changed; the next `observe` adds them to the average."""
        self._pending = True

    def observe(self) -> None:
        """Add the parameters to the average, once per step; they must be up to date."""
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
        """Context manager in which the parameters have the averaged values; afterwards they have their own again.

        `share` copies the values of one worker to all workers, so that they evaluate the same model.
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
        """Return the average as a state_dict."""
        return {"steps": self.steps, "pending": self._pending, "values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the average that `state_dict` returned."""
        self.steps, self._pending = state["steps"], state["pending"]
        self.values = [value.to(parameter) for value, parameter in zip(state["values"], self._parameters, strict=False)]

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            # a change for a while, in this process: one that lasts is an error, and parameter.copy_ would assign it on
            # the shards, for all workers
            with torch.autograd._unsafe_preserve_version_counter(parameter):  # type: ignore[attr-defined]
                Tensor.copy_(parameter, value)
