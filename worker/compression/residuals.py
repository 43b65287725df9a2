"""Keep the gradients of each id that were not sent yet: rows that wait for a later push, as many as fit.

A row is held with its age (the pushes that it is of), the factor on the learning rate by which its gradients count, and
for dgc its momentum. Where there is no room for another row, one that was not used for long is evicted and sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from embershard.proto.arrays import Floats, Ids
from embershard.worker.compression import residual_store
from embershard.worker.compression.residual_store import ResidualMemory, ResidualRows

_BY_SLOT = ResidualMemory._fields[:8]
_SAVED = ("ids", "rows", "momenta", "ages", "rates", "recent")


class Residuals:
    """Rows by id, at most `capacity` of them (None: any number); `momentum` keeps a second row beside each."""

    def __init__(self, dim: int, capacity: int | None, *, momentum: bool = False) -> None:
        self.dim, self.capacity, self.momentum = dim, capacity, momentum
        self._store = self._made(0)

    def __len__(self) -> int:
        """Rows in the residual."""
        return self._store.count("top") - self._store.count("num_free")

    def find(self, ids: Ids) -> Ids:
        """The slot of each id ((U,) int64, unique), -1 where it has none; they stay with their ids until `keep`."""
        self._store.counters["now"] += 1
        slots = np.empty(len(ids), np.int64)
        residual_store.find(ids, self._store, slots)
        return slots

    def add_to(self, slots: Ids, rows: Floats, ages: Floats, rate: float, momenta: Floats | None = None) -> None:
        """Add the residual to rows ((U, dim)) that count by `rate`, and to ages; copy momenta ((U, dim)), if wanted."""
        momenta = rows[:, :0] if momenta is None else momenta
        residual_store.add(slots, self._store, np.float32(rate), rows, ages, momenta)

    def keep(
        self, ids: Ids, slots: Ids, rows: Floats, ages: Floats, rate: float, momenta: Floats | None = None
    ) -> ResidualRows:
        """Hold these rows ((U, dim)) in place of what `slots`, from `find`, held; the evicted rows, with their rates.

        A row of zeros takes no room. One that overflowed is not held: what was sent of it is not finite either, and the
        shard that skips it counts it.
        """
        momenta = np.zeros((len(ids), self.dim if self.momentum else 0), np.float32) if momenta is None else momenta
        capacity = np.iinfo(np.int64).max if self.capacity is None else self.capacity
        new = int(np.count_nonzero(slots < 0))
        self._reserve(self._store.count("top") + new)
        most = min(len(ids), max(0, len(self) + new - capacity))
        gone = ResidualRows(
            np.empty(most, np.int64), np.empty((most, self.dim), np.float32),
            np.empty(most, np.float32), np.empty(most, np.float32),
        )  # fmt: skip
        count = residual_store.keep(ids, slots, (rows, ages, momenta), np.float32(rate), self._store, capacity, gone)
        return gone.some(slice(count))

    def restore_residual(self, residual: ResidualRows, rate: float) -> None:
        """Hold rows that were on their way as well, above the capacity if need be."""
        slots = self.find(residual.ids)
        rows, ages = residual.rows.copy(), np.zeros(len(residual.ids), np.float32)
        momenta = np.zeros((len(rows), self.dim if self.momentum else 0), np.float32)
        self.add_to(slots, rows, ages, rate, momenta)
        capacity, self.capacity = self.capacity, None
        try:
            self.keep(residual.ids, slots, rows, np.maximum(ages, residual.ages), rate, momenta)
        finally:
            self.capacity = capacity

    def scale_rates(self, factor: float) -> None:
        """Have the residual count so many times as much."""
        self._store.rates[:] *= np.float32(factor)

    def forget(self, ids: Ids) -> None:
        """Hold nothing of these ids ((U,) int64, unique) any more."""
        slots = self.find(ids)
        there = slots >= 0
        nothing = np.zeros((int(np.count_nonzero(there)), self.dim), np.float32)
        self.keep(ids[there], slots[there], nothing, np.zeros(len(nothing), np.float32), 1.0)

    def rows_by_id(self) -> ResidualRows:
        """All of it, by slot."""
        store, live = self._store, self._store.live()
        return ResidualRows(store.ids[live], store.rows[live], store.ages[live], store.rates[live])

    def with_momentum(self, momentum: bool) -> Residuals:
        """The same rows, with momenta of zero, or without them."""
        if momentum == self.momentum:
            return self
        other, residual = Residuals(self.dim, self.capacity, momentum=momentum), self.rows_by_id()
        for rate in np.unique(residual.rates):
            some = residual.rates == rate
            other.restore_residual(residual.some(some), float(rate))
        return other

    def state_dict(self) -> Mapping[str, object]:
        """All of it, so that the same rows are evicted later."""
        store = self._store
        state: dict[str, object] = {name: getattr(store, name)[: store.count("top")].copy() for name in _SAVED}
        return state | {"free": store.free[: store.count("num_free")].copy(), "hand": store.count("clock_hand")}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Hold what a state of the same dim holds, and nothing else. ValueError where it is another's."""
        saved = {name: np.asarray(state[name]) for name in (*_SAVED, "free")}
        top, free, momenta = len(saved["ids"]), saved["free"], saved["momenta"]
        if saved["rows"].shape != (top, self.dim) or momenta.shape[1:] not in ((0,), (self.dim,)):
            raise ValueError(f"residuals of {saved['rows'].shape[1:]} floats, not {self.dim}")
        self.momentum = momenta.shape[1] > 0
        self._store = self._made(top)
        for name, array in saved.items():
            getattr(self._store, name)[: len(array)] = array
        self._store.last[free] = -1
        self._store.counters[0] = top, len(free), int(str(state["hand"])), 1
        self._store.link()

    def _made(self, size: int) -> ResidualMemory:
        return ResidualMemory.made(size, self.dim, self.dim if self.momentum else 0)

    def _reserve(self, size: int) -> None:
        """Have room for `size` slots, as far as the capacity goes."""
        before = self._store
        if self.capacity is not None:
            size = min(size, max(self.capacity, before.count("top")))
        if size <= len(before.ids):
            return
        self._store = self._made(size)
        for name in _BY_SLOT:
            getattr(self._store, name)[: len(before.ids)] = getattr(before, name)
        self._store.counters[:] = before.counters
        self._store.link()
