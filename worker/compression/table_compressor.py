"""One table, as its gradients travel: their codec, and the residuals that it leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from embershard.proto.arrays import Bytes, Floats, Ids, mix64
from embershard.proto.codec.ids import encode_even_ids, encode_ids
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import decode, encode_rows
from embershard.proto.codec.values.onebit import BLOCK as ONEBIT_BLOCK
from embershard.proto.codec.values.registry import ValuesCodec
from embershard.proto.messages import PACKED, TableGradients
from embershard.proto.routing import BUCKET_SHIFT, Placement, Route, even_ids, make_route
from embershard.proto.spec import TableSpec
from embershard.worker.compression.error_feedback import EncodeOptions, Feedback, SentAverages, ShardGradients
from embershard.worker.compression.low_rank import DenseLayout, LowRank
from embershard.worker.compression.residual_store import ResidualRows, no_residual
from embershard.worker.compression.residuals import Residuals
from embershard.worker.compression.settings import Compression, Directions, uses_row_age, warmup_density

Find = Callable[[str], ValuesCodec]


class TableCompressor:
    """Encodes the gradients of one table, and keeps what a codec leaves out of them, by shard."""

    def __init__(self, spec: TableSpec, placement: Placement, find: Find, *, dense: bool) -> None:
        self.spec = spec
        self.is_dense = dense
        self.layout = DenseLayout(np.empty(0, np.int64), ())  # of dense weights
        self.directions = Directions()
        self.pushes = 0  # goes into the keys of random numbers
        self._block_order: Ids | None = None  # in which the layout's ids ascend, where they are even_ids
        self._even: dict[int, tuple[Ids, Bytes]] = {}  # first id -> those of a shard, and their bytes
        self._placement, self._find = placement, find
        self._capacity: int | None = None  # rows of the residual of one shard
        self._settings = Compression()
        self._warm = 0  # pushes by dgc
        self._clip = 1.0  # on the gradients of the push that is packed
        self._feedbacks: dict[int, Feedback] = {}  # by shard
        self._low_rank: LowRank | None = None  # of powersgd
        self._factors: Mapping[str, Any] | None = None  # a state for it, until there is one

    @property
    def drains(self) -> bool:
        """Whether there is a residual that its codec will not send."""
        return bool(self._feedbacks) and not self.directions.push.has_feedback

    def lay_out(self, layout: DenseLayout) -> None:
        """Set which parameters the blocks of a dense table hold."""
        self.layout = layout
        is_even = np.array_equal(layout.ids, even_ids(len(layout.ids), self.spec.space_key))
        self._block_order = np.argsort(layout.ids) if is_even and len(layout.ids) else None
        self._even.clear()

    def packed_ids(self, ids: Ids) -> Bytes | None:
        """The bytes of ids that ascend, or are blocks in their order; None for others, and where nothing is gained."""
        known, order = self.layout.ids, self._block_order
        if order is None or len(ids) < 3:  # whose key, and number, take 16 bytes
            return packed_ids(ids)
        before, packed = self._even.get(int(ids[0]), (None, None))
        if before is not None and np.array_equal(before, ids):  # every step moves the same blocks
            return packed
        places = order[np.minimum(np.searchsorted(known, ids, sorter=order), len(known) - 1)]
        if not ((places[1:] > places[:-1]).all() and np.array_equal(known[places], ids)):
            return packed_ids(ids)
        packed = encode_even_ids(places, len(known), self.spec.space_key)
        self._even[int(ids[0])] = ids.copy(), packed
        return packed

    @property
    def sent(self) -> SentAverages:
        """The rows of a message, and their age where they travel with it."""
        pushes = sum(feedback.pushes for feedback in self._feedbacks.values())
        rows = sum(feedback.sent_rows for feedback in self._feedbacks.values())
        if not rows:
            return SentAverages()
        aged = uses_row_age(self.spec) or self.directions.push.select == "rows"
        ages = sum(feedback.sent_ages for feedback in self._feedbacks.values()) / rows if aged else None
        elements = sum(feedback.sent_elements for feedback in self._feedbacks.values())
        is_steady = self.directions.push.select in ("topk", "randomk")  # dgc sends more at first
        return SentAverages(rows / pushes, ages, elements / pushes if is_steady else None)

    def follow(self, placement: Placement) -> None:
        """Keep each residual for the shard that has its id under this placement; one that moves loses its momentum."""
        self._placement = placement
        self._capacity = self._capacity_of(self._settings)
        for shard, feedback in list(self._feedbacks.items()):
            residual = feedback.residuals.rows_by_id()
            buckets = mix64(residual.ids, self.spec.space_key) >> np.uint64(BUCKET_SHIFT)
            moved = residual.some(placement.shard_of[buckets] != shard)
            feedback.residuals.forget(moved.ids)
            feedback.residuals.capacity = self._capacity
            if shard not in placement.shards:
                del self._feedbacks[shard]
            self._hold(moved)

    def use(self, directions: Directions, settings: Compression) -> None:
        """Travel so from here on; a residual passes to the next codec, or goes with the next push."""
        self.directions, self._settings = directions, settings
        self._capacity = self._capacity_of(settings)
        if directions.push.select != "powersgd":
            self._low_rank = None

    def begin(self, route: Route, rows: Floats, rate: float, workers: int) -> None:
        """A push of these rows begins, one of `workers` of its kind."""
        self.pushes += 1
        codec = self.directions.push
        if codec.select == "powersgd":
            self._factor(int(codec.number), route, rows, rate)
        if codec.select == "dgc":
            self._warm += 1
            self._clip = self._clipping(rows, workers)

    def pack(self, part: TableGradients, shard: int, key: int) -> tuple[list[TableGradients], int]:
        """Encode a part of a push; also return how many of its rows were skipped because they are not finite."""
        codec, rows = self.directions.push, cast(Floats, part.gradients)
        values, rate = self._find(codec.values), part.lr_scale
        if not codec.has_feedback:
            return [self._packed(part, encode_rows(rows, values, key))], 0
        feedback = self._feedback(shard)
        if not feedback.takes(rate):
            return [part], 0
        part, rows, skipped = _finite(part, rows)
        if self._clip != 1.0 and codec.select == "dgc":
            rows = rows * np.float32(self._clip)
        payload, gone = feedback.pack(ShardGradients(part.ids, rows, rate), self._how(codec, values, key, part.ids))
        parts = [self._packed(part, payload)]
        if len(gone.ids):
            parts.append(self._whole(gone, rate))
        return parts, skipped

    def restore_residual(self, part: TableGradients, shard: int) -> None:
        """Add what a shard will not apply to the residual again, where the table has one or its codec keeps one."""
        ids, rows, ages = part.ids, part.gradients, None
        if shard not in self._feedbacks and not self.directions.push.has_feedback and not part.is_residual:
            return
        if part.codec:
            positions, rows, ages = decode(cast(Bytes, rows), len(ids), self.spec.dim, self._find, part.codec)
            ids = ids if positions is None else ids[positions]
        finite = np.isfinite(rows).all(axis=1)
        ages = None if ages is None else ages[finite]
        rates = np.full(len(ids), part.lr_scale, np.float32)[finite]
        ages = np.ones(len(rates), np.float32) if ages is None else ages
        self._hold(ResidualRows(ids[finite], cast(Floats, rows[finite]), ages, rates))

    def take_out(self, part: TableGradients, shard: int) -> None:
        """Take the gradients of a part that was packed out of the residual again."""
        codec = self.directions.push
        if codec.has_feedback and self._feedback(shard).takes(part.lr_scale):
            clip = np.float32(self._clip if codec.select == "dgc" else 1.0)
            self.restore_residual(replace(part, gradients=cast(Floats, part.gradients) * -clip), shard)

    def drain(self, shard: int, rate: float, limit: int) -> list[TableGradients]:
        """Take out the residuals for a shard that would not be sent otherwise, in parts of at most `limit` bytes."""
        feedback = self._feedbacks.get(shard)
        if feedback is None or not feedback.takes(rate):
            return []
        del self._feedbacks[shard]
        rest = feedback.residuals.rows_by_id().scaled(rate)
        most = max(1, limit // (16 + 4 * self.spec.dim))  # rows, with their ids and ages
        pieces = (slice(start, start + most) for start in range(0, len(rest.ids), most))
        return [self._whole(rest.some(piece), rate) for piece in pieces]

    def forget(self, route: Route) -> None:
        """Hold nothing of these rows any more."""
        for shard, feedback in self._feedbacks.items():
            feedback.residuals.forget(route.ids[route.slice_of(shard)])

    def residual(self) -> ResidualRows:
        """Return the residuals, each row with its age and the rate by which it counts."""
        parts = [feedback.residuals.rows_by_id() for feedback in self._feedbacks.values()]
        return ResidualRows(*map(np.concatenate, zip(no_residual(self.spec.dim), *parts, strict=True)))

    def state_dict(self) -> Mapping[str, object]:
        """Return the state by which a resumed run has the same bits. No push may be on its way."""
        return {
            "pushes": self.pushes,
            "warm": self._warm,
            "shards": self._placement.num_shards,
            "residuals": {shard: feedback.state_dict() for shard, feedback in self._feedbacks.items()},
            "low_rank": self._factors if self._low_rank is None else self._low_rank.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], factor: float = 1.0) -> None:
        """Restore the state that `state_dict` returned; for another number of shards, residuals times `factor`.

        ValueError where it is another's.
        """
        self.pushes, self._warm, self._feedbacks = state["pushes"], state["warm"], {}
        self._low_rank, self._factors = None, state["low_rank"]
        self.hold(state, factor, alike=state["shards"] == self._placement.num_shards)

    def hold(self, state: Mapping[str, Any], factor: float = 1.0, *, alike: bool = False) -> None:
        """Add the residuals of a state to those here; with `alike` shards, and a factor of 1, just as it was."""
        for shard, feedback in state["residuals"].items():
            if alike:
                self._feedback(int(shard)).load_state_dict(feedback, factor)
            else:
                former = Residuals(self.spec.dim, None)
                former.load_state_dict(feedback["residuals"])
                former.scale_rates(factor)
                self._hold(former.rows_by_id())

    def clear_residuals(self) -> None:
        """Drop the gradients that error feedback keeps for later pushes, of all shards."""
        self._feedbacks = {}

    def _capacity_of(self, settings: Compression) -> int | None:
        return None if self.is_dense else max(1, settings.residual_rows // self._placement.num_shards)

    def _hold(self, residual: ResidualRows) -> None:
        """Add rows to the residuals of the shards that have their ids now."""
        route = make_route(residual.ids, self.spec.space_key, self._placement)
        order = np.empty(len(residual.ids), np.int64)
        order[route.index] = np.arange(len(residual.ids))
        for shard in self._placement.shards:
            some = order[route.slice_of(shard)]
            for rate in np.unique(residual.rates[some]):
                alike = some[residual.rates[some] == rate]
                share = ShardGradients(residual.ids[alike], residual.rows[alike], float(rate))
                self._feedback(shard).restore_residual(share, residual.ages[alike])

    def _feedback(self, shard: int) -> Feedback:
        if shard not in self._feedbacks:
            self._feedbacks[shard] = Feedback(self.spec.dim, self._capacity)
        return self._feedbacks[shard]

    def _factor(self, rank: int, route: Route, rows: Floats, rate: float) -> None:
        """Factor what a push is to send, with the residual."""
        if self._low_rank is None or self._low_rank.rank != rank:
            self._low_rank = LowRank(self.layout, self.spec.dim, rank, self.spec.row_seed)
            if self._factors is not None and self._factors["rank"] == rank:
                self._low_rank.load_state_dict(self._factors)
            self._factors = None
        corrected = np.empty_like(rows)
        for shard in self._placement.shards:
            part, feedback = route.slice_of(shard), self._feedback(shard)
            corrected[part] = rows[part]
            if feedback.takes(rate):
                corrected[part] = feedback.corrected(ShardGradients(route.ids[part], rows[part], rate))
        finite = np.isfinite(corrected).all(axis=1)
        self._low_rank.begin(route.ids[finite], corrected[finite])

    def _how(self, codec: CodecName, values: ValuesCodec, key: int, ids: Ids) -> EncodeOptions:
        if codec.select != "dgc":
            filled = self._filled(ids) if codec.values == "onebit" else None
            ages = uses_row_age(self.spec)
            return EncodeOptions(codec, values, codec.number, key, low_rank=self._low_rank, ages=ages, filled=filled)
        density = warmup_density(codec.number, self._warm - 1, self._settings.warmup_steps)
        return EncodeOptions(codec, values, density, key, self._settings.momentum, ages=uses_row_age(self.spec))

    def _filled(self, ids: Ids) -> Ids | None:
        """The floats of these blocks that are not padding; None where the blocks are not those of onebit."""
        known = self.layout.ids
        if not len(known) or self.spec.dim != ONEBIT_BLOCK:
            return None
        order = np.argsort(known)
        return self.layout.filled(self.spec.dim)[order[np.searchsorted(known, ids, sorter=order)]]

    def _clipping(self, rows: Floats, workers: int) -> float:
        """The factor by which dgc bounds the norm of one worker's gradient (Lin et al. 2018, section 3.2)."""
        if self._settings.clip_norm is None:
            return 1.0
        norm = float(np.linalg.norm(rows.astype(np.float64)))
        if not math.isfinite(norm):  # of the rows that are sent
            norm = float(np.linalg.norm(rows[np.isfinite(rows).all(axis=1)].astype(np.float64)))
        bound = self._settings.clip_norm / math.sqrt(workers)
        return min(1.0, bound / norm) if norm > 0 else 1.0

    def _whole(self, residual: ResidualRows, rate: float) -> TableGradients:
        """Rows that leave a residual, as float32: what a values codec would lose of them, nobody would send."""
        payload = encode_rows(residual.rows, self._find("none"), None, ages=residual.ages)
        return TableGradients(
            self.spec.name, residual.ids, payload, rate, 0, PACKED, packed_ids(residual.ids), is_residual=True
        )

    def _packed(self, part: TableGradients, payload: Bytes) -> TableGradients:
        codec = self.directions.push
        ids = None if part.route else self.packed_ids(part.ids)
        return replace(part, gradients=payload, codec=codec.values if codec.is_custom else PACKED, packed=ids)


def packed_ids(ids: Ids) -> Bytes | None:
    """The bytes of ids that ascend; None for others, and where nothing is gained."""
    if len(ids) < 2 or not (ids[1:] > ids[:-1]).all():
        return None
    packed = encode_ids(ids)
    return packed if packed.nbytes < ids.nbytes else None


def _finite(part: TableGradients, rows: Floats) -> tuple[TableGradients, Floats, int]:
    """A part without the rows that are not finite, which no residual may hold, and how many these are."""
    with np.errstate(all="ignore"):
        if math.isfinite(float(rows.sum())):  # which nothing in them could undo
            return part, rows, 0
    finite = np.isfinite(rows).all(axis=1)
    skipped = int(np.count_nonzero(~finite))
    return (replace(part, ids=part.ids[finite], route=0), rows[finite], skipped) if skipped else (part, rows, 0)
