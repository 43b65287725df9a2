"""Error feedback: what a push leaves out of a table's gradients is added to those of a later one.

Of p = g + e, where e is held of the ids of g, a part c is sent, and e = p - c is held from then on (Seide et al. 2014,
Stich et al. 2018): every gradient is applied in the end, some of it later. What is held counts by the learning rate
that it was made with: e is scaled by lr(then) / lr(now).

Deep gradient compression (dgc, Lin et al. 2018) keeps the momentum on this side, too: u = m u + g, v = v + u, of which
v[S] is sent, the largest, and v[S] = u[S] = 0: an element that was just sent must not be pushed on by old gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from embershard.proto.arrays import Bytes, Floats, Ids
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import decode, encode_elements, encode_rows
from embershard.proto.codec.select import Threshold, count_of, random_positions, row_norms
from embershard.proto.codec.values.registry import ValuesCodec
from embershard.worker.compression.low_rank import LowRank
from embershard.worker.compression.residual_store import ResidualRows
from embershard.worker.compression.residuals import Residuals

# A rate so much lower than that of what is held would blow this up; at 0 nothing that is sent has an effect.
_LOWEST_RATE = 2.0**-20


class ShardGradients(NamedTuple):
    """One shard's part of a table's gradients in one push."""

    ids: Ids  # (U,) unique
    rows: Floats  # (U, dim), finite
    rate: float  # the factor on the learning rate by which they count


class EncodeOptions(NamedTuple):
    """The options by which a part of a push is packed."""

    codec: CodecName
    values: ValuesCodec
    density: float  # the part of the elements or rows that is sent
    key: int  # of random numbers
    momentum: float = 0.0  # of dgc
    low_rank: LowRank | None = None  # of powersgd: the factors of the whole push
    ages: bool = True  # whether elements travel with the ages of their rows
    filled: Ids | None = None  # (U,) floats of each block of dense weights, of which the rest is padding; None: all


class Packed(NamedTuple):
    """The encoded part of a push, and the residual rows evicted for it; both with rows as of `share.rate`."""

    payload: Bytes
    gone: ResidualRows


class SentAverages(NamedTuple):
    """Averages over sent messages; None where one is not known or has no meaning."""

    rows: float | None = None  # of which something was sent
    age: float | None = None  # of these
    elements: float | None = None  # that were chosen one by one

    def of(self, rows: int, average: float) -> SentAverages:
        """Those of messages about `rows` rows, where these are of messages about `average`."""
        if self.rows is None or not average:
            return self
        scale = rows / average
        elements = None if self.elements is None else self.elements * scale
        return self._replace(rows=self.rows * scale, elements=elements)


class Feedback:
    """Error feedback of one table for one shard: keeps at most `capacity` rows of residuals (None: all)."""

    def __init__(self, dim: int, capacity: int | None) -> None:
        self.residuals = Residuals(dim, capacity)
        self._threshold = Threshold()
        self._memory = [np.empty((0, dim), np.float32), np.empty((0, dim), np.float32)]
        self._rate = 0.0  # of the last push that took or held something
        self.pushes = self.sent_rows = self.sent_elements = 0
        self.sent_ages = 0.0  # of these rows, summed

    def takes(self, rate: float) -> bool:
        """Whether a push that counts by this rate may hold something back; else it is to be sent whole."""
        return float(np.float32(rate)) > self._rate * _LOWEST_RATE  # residuals count by float32

    def pack(self, share: ShardGradients, how: EncodeOptions) -> Packed:
        """Encode the gradients together with the residuals of their ids; keep what is not sent."""
        self._rate = share.rate
        self.residuals = self.residuals.with_momentum(how.momentum > 0)
        slots = self.residuals.find(share.ids)
        ages = np.ones(len(share.ids), np.float32)
        rows = self._scratch(0, share.rows.shape)
        momenta = self._scratch(1, share.rows.shape) if how.momentum > 0 else None
        if momenta is None:
            rows[:] = share.rows
        else:
            rows[:] = momenta[:] = 0
        self.residuals.add_to(slots, rows, ages, share.rate, momenta)
        if momenta is not None:
            momenta *= np.float32(how.momentum)
            momenta += share.rows
            rows += momenta
        waited = float(ages.sum())
        if how.low_rank is None:
            payload = self._send(rows, ages, how, momenta)
        else:
            payload = how.low_rank.payload(share.ids, how.values, how.key)
            _take_out(payload, rows, ages, how)
        self.pushes += 1
        self.sent_rows += len(ages) - int(np.count_nonzero(ages))
        self.sent_ages += waited - float(ages.sum())
        return Packed(payload, self._hold(share, slots, rows, ages, momenta))

    def corrected(self, share: ShardGradients) -> Floats:
        """The rows of a share with what is held of their ids; it stays held."""
        rows = share.rows.copy()
        self.residuals.add_to(self.residuals.find(share.ids), rows, np.ones(len(rows), np.float32), share.rate)
        return rows

    def restore_residual(self, share: ShardGradients, ages: Floats | None) -> None:
        """Hold what was on its way to a shard that will not apply it."""
        if share.rate > 0 and len(share.ids):
            ages = np.ones(len(share.ids), np.float32) if ages is None else ages
            rates = np.full(len(share.ids), share.rate, np.float32)
            self.residuals.restore_residual(ResidualRows(share.ids, share.rows, ages, rates), share.rate)

    def state_dict(self) -> Mapping[str, object]:
        """Return the residuals and the threshold of the next push."""
        threshold = [self._threshold.bits, self._threshold.calls]
        return {"residuals": self.residuals.state_dict(), "threshold": threshold, "rate": self._rate}

    def load_state_dict(self, state: Mapping[str, Any], factor: float = 1.0) -> None:
        """Restore the residuals that `state_dict` returned, times `factor`."""
        self.residuals.load_state_dict(state["residuals"])
        self.residuals.scale_rates(factor)
        self._threshold = Threshold(*map(int, state["threshold"]))
        self._rate = float(state["rate"])

    def _scratch(self, number: int, shape: tuple[int, ...]) -> Floats:
        """Memory for one push; taking it anew costs more than the copy that it is for."""
        rows, dim = shape
        if len(self._memory[number]) < rows:
            self._memory[number] = np.empty((rows, dim), np.float32)
        return self._memory[number][:rows]

    def _send(self, rows: Floats, ages: Floats, how: EncodeOptions, momenta: Floats | None) -> Bytes:
        """The payload of the part that is sent; it is taken out of rows and momenta, and its rows' ages begin anew."""
        if how.codec.select == "rows":
            return self._send_rows(rows, ages, how)
        if how.codec.select == "all":
            return _send_all(rows, ages, how)
        return self._send_elements(rows, ages, how, momenta)

    def _send_elements(self, rows: Floats, ages: Floats, how: EncodeOptions, momenta: Floats | None) -> Bytes:
        flat = rows.reshape(-1)
        count = count_of(how.density, flat.size) if flat.size else 0
        # another key than that of the values, whose rounding is not to go by where they lie
        drawn = (how.key + 1) % 2**64 if how.codec.select == "randomk" else None
        at = self._threshold.select(flat, count) if drawn is None else random_positions(flat.size, count, drawn)
        self.sent_elements += at.size
        told = ages if how.ages else None
        payload = encode_elements(at, flat[at], rows.shape, how.values, how.key, drawn=drawn, ages=told)
        if how.values.name == "none":
            flat[at] = 0
            ages[at // rows.shape[1]] = 0
        else:
            _take_out(payload, rows, ages, how)
        if momenta is not None:
            momenta.reshape(-1)[at] = 0
        return payload

    def _send_rows(self, rows: Floats, ages: Floats, how: EncodeOptions) -> Bytes:
        count = count_of(how.density, len(rows)) if len(rows) else 0
        at = self._threshold.select(row_norms(rows), count)
        payload = encode_rows(rows[at], how.values, how.key, positions=at, ages=ages[at], num_ids=len(rows))
        _take_out(payload, rows, ages, how)
        return payload

    def _hold(
        self, share: ShardGradients, slots: Ids, rows: Floats, ages: Floats, momenta: Floats | None
    ) -> ResidualRows:
        return self.residuals.keep(share.ids, slots, rows, ages, share.rate, momenta).scaled(share.rate)


def _send_all(rows: Floats, ages: Floats, how: EncodeOptions) -> Bytes:
    """By onebit. The scale of a block leaves padding out, which would make that of one float 1024 times smaller."""
    payload, dim = encode_rows(rows, how.values, how.key), rows.shape[1]
    filled = np.full(len(rows), dim) if how.filled is None else how.filled
    partial = np.flatnonzero(filled < dim)
    if len(partial):  # a block of onebit is a row here
        payload[-4 * len(rows) :].view(np.float32)[partial] *= np.float32(dim) / filled[partial].astype(np.float32)
    _take_out(payload, rows, ages, how)
    for row in partial:
        rows[row, filled[row] :] = 0
    return payload


def _take_out(payload: Bytes, rows: Floats, ages: Floats, how: EncodeOptions) -> None:
    """Subtract from rows what a shard reads in the payload."""
    sent = decode(payload, len(rows), rows.shape[1], lambda _: how.values, how.values.name)
    at = slice(None) if sent.positions is None else sent.positions
    rows[at] -= sent.rows
    ages[at] = 0
