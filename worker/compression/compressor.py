"""What each table's two directions use now, and the parts of messages that are made so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from embershard.proto.codec.choice import Codec
from embershard.proto.codec.ids import encode_ids
from embershard.proto.codec.payload import decode, encode_rows
from embershard.proto.codec.values import ValuesCodec, find_values
from embershard.proto.messages import PACKED, Bytes, Floats, Ids, Push, TableGradients
from embershard.proto.routing import Route, mix64
from embershard.proto.spec import TableSpec
from embershard.worker.compression.feedback import Feedback, How, Share
from embershard.worker.compression.residuals import Held, nothing_held
from embershard.worker.compression.schedule import warmup_density
from embershard.worker.compression.settings import PLAIN, Compression, Directions, check_momentum
from embershard.worker.spans import span

LrScale = float | Mapping[str, float]  # of all tables, or of each by its name (1 for those that are not named)

_SHARD_BITS = 12  # a placement has 4096 shards at most


@dataclass(slots=True)
class _Table:
    """One table, as it travels."""

    spec: TableSpec
    dense: bool
    directions: Directions
    pushes: int = 0  # goes into the keys of random numbers
    warm: int = 0  # pushes by dgc
    clip: float = 1.0  # on the gradients of the push that is packed
    held: dict[int, Feedback] = field(default_factory=dict)  # by shard


class Compressor:
    """How the tables of one client travel, from one push or pull to the next.

    `find` gives the values codecs of this process. Pushes are packed by one thread at a time; the rest may be called
    from any.
    """

    def __init__(self, worker: int = 0, num_shards: int = 1, find: Callable[[str], ValuesCodec] = find_values) -> None:
        self.settings = Compression()
        self.find = find
        self.workers = 1  # that push to these tables
        self.skipped_rows = 0  # gradient rows that held NaN or Inf
        self._num_shards = num_shards
        self._draining: set[str] = set()
        self._worker = worker
        self._tables: dict[str, _Table] = {}

    def add(self, spec: TableSpec, *, dense: bool) -> None:
        """Have a table travel as the settings say. ValueError where that cannot be."""
        if spec.name not in self._tables:
            directions = self.settings.of(spec.name, dense)
            check_momentum(spec, directions.push, self.settings.momentum)
            self._tables[spec.name] = _Table(spec, dense, directions)

    def check(self, table: str, push: Codec | None = None, pull: Codec | None = None) -> Directions:
        """How a table would travel, so changed (None: as now). ValueError where it cannot."""
        entry = self._tables[table]
        before = entry.directions
        after = Directions(before.push if push is None else push, before.pull if pull is None else pull)
        after.push.check("push", entry.dense)
        after.pull.check("pull", entry.dense)
        check_momentum(entry.spec, after.push, self.settings.momentum)
        return after

    def choose(self, table: str, push: Codec | None = None, pull: Codec | None = None) -> None:
        """Have a table travel so from its next push and pull on. ValueError, and no change, where that cannot be."""
        entry, after = self._tables[table], self.check(table, push, pull)
        entry.directions = after
        if after.push.has_feedback:
            self._draining.discard(table)
        elif entry.held:
            self._draining.add(table)

    def directions(self) -> dict[str, Directions]:
        """What every table uses now."""
        return {name: table.directions for name, table in self._tables.items()}

    def held(self, table: str) -> Held:
        """What is held back of a table's gradients, each row with its age and the rate by which it counts."""
        parts = [feedback.residuals.held() for feedback in self._tables[table].held.values()]
        parts.append(nothing_held(self._tables[table].spec.dim))
        return Held(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def is_dense(self, table: str) -> bool:
        """Whether a table holds dense weights."""
        return self._tables[table].dense

    def pull_codec(self, table: str) -> Codec:
        """How its rows come."""
        entry = self._tables.get(table)
        return PLAIN if entry is None else entry.directions.pull

    def packs(self, table: str) -> bool:
        """Whether its pushes travel as payloads."""
        entry = self._tables.get(table)
        return entry is not None and not entry.directions.push.is_plain

    def begin(self, gradients: Sequence[tuple[str, Route, Floats]]) -> None:
        """A push of these gradients begins."""
        for table, _, rows in gradients:
            entry = self._tables[table]
            entry.pushes += 1
            if entry.directions.push.select == "dgc":
                entry.warm += 1
                entry.clip = self._clip(rows)

    def pack(self, part: TableGradients, shard: int, start: int) -> list[TableGradients]:
        """What is sent for a part of a push, whose first row is that of number `start` among those of its shard."""
        entry = self._tables[part.table]
        codec, rows = entry.directions.push, cast(Floats, part.gradients)
        values, key = self.find(codec.values), self._key(entry, shard, start)
        with span("encode"):
            if not codec.has_feedback:
                return [_packed(part, encode_rows(rows, values, key), codec)]
            held = entry.held.setdefault(shard, Feedback(entry.spec.dim, self._capacity(entry)))
            if not held.takes(part.lr_scale):
                return [part]
            part, rows = self._without_bad_rows(part, rows)
            if entry.clip != 1.0 and codec.select == "dgc":
                rows = rows * np.float32(entry.clip)
            packed = held.pack(Share(part.ids, rows, part.lr_scale), self._how(entry, codec, values, key))
            gone = packed.gone
            parts = [_packed(part, packed.payload, codec)]
            if len(gone.ids):
                other = replace(part, ids=gone.ids, route=0)
                payload = encode_rows(gone.rows, values, (key + 1) % 2**64, ages=gone.ages)
                parts.append(_packed(other, payload, codec))
            return parts

    def give_back(self, push: Push, shard: int) -> None:
        """Hold again what a shard will not apply, as far as its tables hold something back."""
        for part in push.tables:
            entry = self._tables.get(part.table)
            if entry is None or shard not in entry.held:
                continue
            ids, rows, ages = part.ids, part.gradients, None
            if part.codec:
                sent = decode(cast(Bytes, rows), len(ids), entry.spec.dim, self.find, part.codec)
                ids, rows, ages = ids if sent.positions is None else ids[sent.positions], sent.rows, sent.ages
            finite = np.isfinite(rows).all(axis=1)
            ages = None if ages is None else ages[finite]
            entry.held[shard].give_back(Share(ids[finite], cast(Floats, rows[finite]), part.lr_scale), ages)

    def leftovers(self, shard: int, lr_scale: LrScale, limit: int) -> list[TableGradients]:
        """What is held for a shard of tables whose codec holds nothing back, in parts of at most `limit` bytes.

        It is not held any longer.
        """
        parts = []
        for table in sorted(self._draining):
            entry, rate = self._tables[table], rate_of(lr_scale, table)
            held = entry.held.get(shard)
            if held is None or not held.takes(rate):
                continue
            rest = held.empty(rate)
            most = max(1, limit // (16 + 4 * entry.spec.dim))  # rows, with their ids and ages
            for start in range(0, len(rest.ids), most):
                some = slice(start, start + most)
                payload = encode_rows(rest.rows[some], self.find("none"), None, ages=rest.ages[some])
                part = TableGradients(table, rest.ids[some], payload, rate)
                parts.append(_packed(part, payload, PLAIN))
        return parts

    def _how(self, entry: _Table, codec: Codec, values: ValuesCodec, key: int) -> How:
        if codec.select != "dgc":
            return How(codec, values, codec.number, key)
        density = warmup_density(codec.number, entry.warm - 1, self.settings.warmup_steps)
        return How(codec, values, density, key, self.settings.momentum)

    def _capacity(self, entry: _Table) -> int | None:
        """Rows that one shard's part of a table may hold back."""
        return None if entry.dense else max(1, self.settings.residual_rows // self._num_shards)

    def _clip(self, rows: Floats) -> float:
        """The factor by which dgc bounds the norm of this worker's share of a gradient (section 3.2 of its paper)."""
        if self.settings.clip_norm is None:
            return 1.0
        norm = float(np.linalg.norm(rows.astype(np.float64)))
        bound = self.settings.clip_norm / math.sqrt(self.workers)
        return min(1.0, bound / norm) if norm > 0 else 1.0

    def _without_bad_rows(self, part: TableGradients, rows: Floats) -> tuple[TableGradients, Floats]:
        """A part without the rows that are not finite, which are counted: no residual may hold them."""
        with np.errstate(all="ignore"):
            if math.isfinite(float(rows.sum())):  # which nothing in them could undo
                return part, rows
        finite = np.isfinite(rows).all(axis=1)
        self.skipped_rows += int(np.count_nonzero(~finite))
        return (part, rows) if finite.all() else (replace(part, ids=part.ids[finite], route=0), rows[finite])

    def _key(self, entry: _Table, shard: int, start: int) -> int:
        """A key of random numbers, that of no other part of any push."""
        key = np.uint64(entry.spec.row_seed)
        for number in (self._worker, entry.pushes, start << _SHARD_BITS | shard):
            key = np.uint64(mix64(np.uint64(number), key))
        return int(key)


def rate_of(lr_scale: LrScale, table: str) -> float:
    """The factor on a table's learning rate."""
    return lr_scale.get(table, 1.0) if isinstance(lr_scale, Mapping) else lr_scale


def packed_ids(ids: Ids) -> Bytes | None:
    """The bytes of ids that ascend; None for others, and where nothing is gained."""
    if len(ids) < 2 or not (ids[1:] > ids[:-1]).all():
        return None
    packed = encode_ids(ids)
    return packed if packed.nbytes < ids.nbytes else None


def _packed(part: TableGradients, payload: Bytes, codec: Codec) -> TableGradients:
    ids = None if part.route else packed_ids(part.ids)
    return replace(part, gradients=payload, codec=codec.values if codec.is_custom else PACKED, packed=ids)
