"""Encode and decode a worker's messages: the codecs that each table uses now, in both directions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import numpy as np

from embershard.proto.arrays import Bytes, Floats, Ids
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.values.registry import ValuesCodec, find_values
from embershard.proto.messages import TableGradients, TableKey
from embershard.proto.routing import Placement, Route, mix64
from embershard.proto.spec import TableSpec
from embershard.proto.timing import span
from embershard.worker.compression.error_feedback import SentAverages
from embershard.worker.compression.low_rank import DenseLayout
from embershard.worker.compression.residual_store import ResidualRows
from embershard.worker.compression.settings import PLAIN, Compression, Directions, check_momentum
from embershard.worker.compression.table_compressor import TableCompressor

LrScale = float | Mapping[str, float]  # of all tables, or of each by its name (1 for those that are not named)

_log = logging.getLogger(__name__)

_SHARD_BITS = 12  # a placement has 4096 shards at most


class Compressor:
    """Encode the gradients and decode the rows of one client's tables, from one push or pull to the next.

    One thread packs pushes; no push is under way while a table is chosen another codec, or a state is taken or loaded.
    """

    def __init__(self, worker: int, placement: Placement) -> None:
        self.settings = Compression()
        self.find: Callable[[str], ValuesCodec] = find_values  # gives the values codecs of this process
        self.workers = 1  # that push to these tables
        self.share = 1.0  # of what is pushed of a clock: what a push of this worker counts
        self.differences = False  # whether pushes are of differences of weights, as those of local steps
        self.skipped_rows = 0  # gradient rows that held NaN or Inf, and were not sent
        self.also_changed: list[tuple[str, Ids]] = []  # rows that the last push changed beside its own
        self._worker, self._placement = worker, placement
        self._tables: dict[str, TableCompressor] = {}
        self.switched: set[str] = set()  # tables that have moved rows by other codecs than their present ones
        self.has_feedback = False  # whether any table ever had a residual
        # the codecs of tables whose rows, or gradients, do not travel as plain float32
        self.coded_pulls: dict[str, CodecName] = {}
        self.coded_pushes: dict[str, CodecName] = {}

    def with_codecs(self, spec: TableSpec, *, dense: bool) -> TableSpec:
        """A spec with the codecs that its table will use: those of the settings, or else its own.

        One of a table that is here says it by itself. ValueError where it cannot use them, UnknownCodec where this
        process has them not.
        """
        if self._is_new(spec.name, dense):
            push, pull = self.settings.of(spec.name, dense)
            push, pull = spec.push_codec if push.is_plain else push, spec.pull_codec if pull.is_plain else pull
            push.check("push", dense)
            pull.check("pull", dense)
            spec = replace(spec, push_codec=push, pull_codec=pull)
        self._check(spec, spec.push_codec)
        for codec in (spec.push_codec, spec.pull_codec):
            self.find(codec.values)
        return spec

    def add(self, spec: TableSpec, *, dense: bool) -> None:
        """Have a new table travel as its spec, of `with_codecs`, says."""
        if self._is_new(spec.name, dense):
            self._tables[spec.name] = TableCompressor(spec, self._placement, lambda name: self.find(name), dense=dense)
            self._use(spec.name, Directions(spec.push_codec, spec.pull_codec))

    def _is_new(self, table: str, dense: bool) -> bool:
        """A snapshot that was restored does not say which tables are dense."""
        compressor = self._tables.get(table)
        return compressor is None or (dense and not compressor.is_dense)

    def follow(self, placement: Placement) -> None:
        """Keep each residual for the shard that has its id from here on."""
        self._placement = placement
        for compressor in self._tables.values():
            compressor.follow(placement)

    def lay_out(self, table: str, layout: DenseLayout) -> None:
        """Say what the blocks of a dense table are: some codecs ask for it."""
        self._tables[table].lay_out(layout)

    def layout(self, table: str) -> DenseLayout:
        """Return which parameters the blocks of a dense table hold."""
        return self._tables[table].layout

    def check(self, table: str, push: CodecName | None = None, pull: CodecName | None = None) -> Directions:
        """Return the codecs of a table after a change (None: unchanged). ValueError where they cannot serve it."""
        compressor = self._tables[table]
        before = compressor.directions
        after = Directions(before.push if push is None else push, before.pull if pull is None else pull)
        after.push.check("push", compressor.is_dense)
        after.pull.check("pull", compressor.is_dense)
        self._check(compressor.spec, after.push)
        return after

    def choose(self, table: str, push: CodecName | None = None, pull: CodecName | None = None) -> None:
        """Have a table travel so from its next push and pull on. ValueError, and no change, where that cannot be."""
        self._use(table, self.check(table, push, pull))

    def directions(self) -> dict[str, Directions]:
        """Return the codecs that every table uses now."""
        return {name: compressor.directions for name, compressor in self._tables.items()}

    def residual(self, table: str) -> ResidualRows:
        """Return the residuals of a table, each row with its age and the rate by which it counts."""
        return self._tables[table].residual()

    def residual_rows(self) -> dict[str, int]:
        """The number of rows whose gradients wait in this worker, of every table that has some."""
        if not self.has_feedback:
            return {}
        counts = {name: len(compressor.residual().ids) for name, compressor in self._tables.items()}
        return {name: count for name, count in counts.items() if count}

    def is_dense(self, table: str) -> bool:
        """Whether a table holds dense weights."""
        return self._tables[table].is_dense

    def pull_codec(self, table: str) -> CodecName:
        """Return the codec that a table's rows are pulled with."""
        return self.coded_pulls.get(table, PLAIN)

    def packs(self, table: str) -> bool:
        """Whether its pushes travel as payloads."""
        return table in self.coded_pushes

    def in_bundles(self, tables: Sequence[str]) -> AbstractSet[str]:
        """Select the tables that may travel in bundles: uncompressed in both directions, and without a residual."""
        plain = set(tables) - self.coded_pushes.keys() - self.coded_pulls.keys()
        return {table for table in plain if not self._tables[table].drains} if self.has_feedback else plain

    def are_plain(self, tables: Sequence[str]) -> bool:
        """Whether rows and gradients of all of these tables travel as they are."""
        return self.coded_pushes.keys().isdisjoint(tables) and self.coded_pulls.keys().isdisjoint(tables)

    def packed_ids(self, table: str, ids: Ids) -> Bytes | None:
        """The bytes by which ids of a table travel where it is coded; None: as they are."""
        return self._tables[table].packed_ids(ids)

    def sent(self, table: str) -> SentAverages:
        """Return the average rows and age of the messages that sent some of a table's gradients."""
        return self._tables[table].sent

    def begin(self, gradients: Sequence[tuple[TableKey, Route, Floats]], lr_scale: LrScale) -> None:
        """A push of these gradients begins."""
        for table, route, rows in gradients:
            if isinstance(table, str) and table in self.coded_pushes:
                with span("encode"):
                    self._tables[table].begin(route, rows, rate_of(lr_scale, table), self.workers)

    def pack(self, part: TableGradients, shard: int, start: int) -> list[TableGradients]:
        """Encode a part of a push, which starts at row `start` of those for its shard."""
        compressor = self._tables[part.table]
        with span("encode"):
            parts, skipped = compressor.pack(part, shard, self._key(compressor, shard, start))
        self.skipped_rows += skipped
        self.also_changed += [(other.table, other.ids) for other in parts[1:]]
        return parts

    def drain(self, shard: int, lr_scale: LrScale, limit: int) -> list[TableGradients]:
        """Return the residuals of tables whose codec keeps none, in parts of at most `limit` bytes for a shard.

        It leaves the residual.
        """
        draining = [compressor for compressor in self._tables.values() if compressor.drains]
        parts: list[TableGradients] = []
        with span("encode"):
            for compressor in draining:
                parts += compressor.drain(shard, rate_of(lr_scale, compressor.spec.name), limit)
        self.also_changed += [(part.table, part.ids) for part in parts]
        return parts

    def restore_residual(self, parts: Sequence[TableGradients], shard: int) -> None:
        """Hold again what a shard will not apply, as far as its tables hold something back."""
        # residuals first: where there is one, gradients of the step itself are added to it, too
        for part in sorted(parts, key=lambda part: not part.is_residual) if self.has_feedback else ():
            if part.members:  # whose tables hold nothing back
                continue
            if len(part.ids) and part.lr_scale > 0:
                self._tables[part.table].restore_residual(part, shard)

    def take_out(self, part: TableGradients, shard: int) -> None:
        """Hold no gradients of a part that was packed, and will not be sent."""
        self._tables[part.table].take_out(part, shard)

    def forget(self, table: str, route: Route) -> None:
        """Hold nothing of rows that were assigned: the pushes before it are over."""
        if self.has_feedback and table in self._tables:
            self._tables[table].forget(route)

    def state_dict(self) -> Mapping[str, object]:
        """Return the state of every table, by which a resumed run has the same bits."""
        counts = {"share": self.share, "differences": self.differences}
        return {name: {**compressor.state_dict(), **counts} for name, compressor in self._tables.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned. ValueError where it is of other tables.

        A residual counts as much as it would have then, whatever a push counts now. Gradients are dropped, and said,
        where pushes are differences of weights now, and the other way round.
        """
        for compressor, found in self._found(state):
            compressor.load_state_dict(found, found["share"] / self.share)
            self.has_feedback |= bool(found["residuals"])

    def hold(self, state: Mapping[str, Any]) -> None:
        """Add the residuals of another worker, who is gone, as `load_state_dict` does."""
        for compressor, found in self._found(state):
            compressor.hold(found, found["share"] / self.share)
            self.has_feedback |= bool(found["residuals"])

    def _found(self, state: Mapping[str, Any]) -> Iterator[tuple[TableCompressor, Mapping[str, Any]]]:
        """The tables of which a state says something, and what they can take of it."""
        for name, compressor in self._tables.items():
            found = state.get(name)
            if found is None:
                continue
            if found["residuals"] and found["differences"] != self.differences:
                then, now = ("differences of weights", "gradients")[:: 1 if found["differences"] else -1]
                _log.warning("table %s: its residual is dropped: it is of %s, and pushes are %s", name, then, now)
                found = {**found, "residuals": {}}
            yield compressor, found

    def clear_residuals(self) -> None:
        """Drop the residuals of all tables."""
        for compressor in self._tables.values():
            compressor.clear_residuals()

    def _check(self, spec: TableSpec, push: CodecName) -> None:
        check_momentum(spec, push, self.settings.momentum)
        if push.select == "powersgd" and push.is_custom:
            raise ValueError(f"table {spec.name!r}: {push}: factors travel as none, fp16s, bf16 or int8")

    def _use(self, table: str, directions: Directions) -> None:
        self.has_feedback |= directions.push.has_feedback
        self._tables[table].use(directions, self.settings)
        for codecs, codec in ((self.coded_pushes, directions.push), (self.coded_pulls, directions.pull)):
            if codec.is_plain:
                codecs.pop(table, None)
            else:
                codecs[table] = codec

    def _key(self, compressor: TableCompressor, shard: int, start: int) -> int:
        """A key of random numbers, that of no other part of any push."""
        key = np.uint64(compressor.spec.row_seed)
        for number in (self._worker, compressor.pushes, start << _SHARD_BITS | shard):
            key = np.uint64(mix64(np.uint64(number), key))
        return int(key)


def rate_of(lr_scale: LrScale, table: str) -> float:
    """The factor on a table's learning rate."""
    scale = lr_scale.get(table, 1.0) if isinstance(lr_scale, Mapping) else lr_scale
    return float(scale)
