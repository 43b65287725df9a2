"""Local steps: a worker trains so many steps on copies of its own, and pushes what they have changed.

With several workers this is Geo-SGD (local SGD with averaging, Stich 2019): in a round a worker pulls each row that it
reads once, and its dense weights once, applies its own gradients to these copies, and at the end of the round pushes
the differences, which the shards add past the optimizer. In a synchronous job the differences of a round are averaged,
each by the weight of its steps; otherwise each worker pushes its own, divided by the number of workers. Then it takes
fresh rows.

The optimizer's state (Adagrad's sums, Adam's moments and steps) of what a worker trains stays with this worker, from
round to round, in its memory: shards have none, and it ends with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embershard.proto.arrays import Floats, Ids
from embershard.proto.messages import Pushed, TableKey
from embershard.proto.routing import Route, ascending, make_route
from embershard.proto.spec import LOCAL_OPTIMIZERS, TableSpec
from embershard.worker.client.client import Client
from embershard.worker.client.push import Gradients, Versions
from embershard.worker.compression.compressor import LrScale, rate_of
from embershard.worker.kernels import IdIndex, LocalRowOptimizer, overlap
from embershard.worker.session.row_source import WrappedSource


def check_local(spec: TableSpec) -> None:
    """ValueError for a table whose optimizer local steps do not know."""
    if spec.optimizer.name not in LOCAL_OPTIMIZERS:
        raise ValueError(
            f"table {spec.name!r}: local steps know {', '.join(LOCAL_OPTIMIZERS)}, not {spec.optimizer.name}; "
            "choose one of these, or train without local_steps"
        )


class _LocalTable:
    """A worker's rows of one table, and the optimizer's state of all that it ever trained."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.formula = LocalRowOptimizer(spec.optimizer)
        self.index = IdIndex()
        self.rows = np.empty((0, spec.dim), np.float32)
        self.base = np.empty((0, spec.dim), np.float32)  # the rows as they were pulled
        self.initial_state = self.formula.initial(spec.dim)
        self.state = np.empty((0, len(self.initial_state)), np.float32)
        self.is_fresh = np.empty(0, np.bool_)  # whether a row was pulled in this round
        self.trained = np.empty(0, np.bool_)  # and changed

    def numbers(self, ids: Ids) -> Ids:
        """Places of ids; new ones have no row yet."""
        numbers = self.index.numbers(ids)
        if len(self.index) > len(self.rows):
            more = max(len(self.index), 2 * len(self.rows)) - len(self.rows)
            self.rows = _grown(self.rows, more, 0.0)
            self.base = _grown(self.base, more, 0.0)
            self.state = _grown(self.state, more, self.initial_state)
            self.is_fresh = np.concatenate([self.is_fresh, np.zeros(more, np.bool_)])
            self.trained = np.concatenate([self.trained, np.zeros(more, np.bool_)])
        return numbers

    def take(self, numbers: Ids, rows: Floats) -> None:
        """Rows that were pulled, unless they came before."""
        new = ~self.is_fresh[numbers]
        self.base[numbers[new]] = self.rows[numbers[new]] = rows[new]
        self.is_fresh[numbers] = True

    def apply(self, numbers: Ids, gradients: Floats, lr_scale: float) -> int:
        """One step of the optimizer; the number of rows whose gradient is not finite, which are left as they are."""
        lr = self.formula.settings["lr"] * lr_scale
        changed = self.formula.update(self.rows, self.state, numbers, np.ascontiguousarray(gradients), lr)
        self.trained[numbers[changed]] = True
        return len(numbers) - int(np.count_nonzero(changed))

    def assign(self, ids: Ids, rows: Floats) -> None:
        """Have other values in the rows that are here, or are being pulled: a whole table may be assigned."""
        known = overlap(ids, self.index.ids)
        numbers, rows = self.numbers(ids[known]), rows[known]
        self.base[numbers] = self.rows[numbers] = rows
        self.is_fresh[numbers] = True

    def end_round(self) -> tuple[Ids, Floats]:
        """Return the changes since the rows were pulled, ids and differences; mark the rows to be pulled again."""
        numbers = np.flatnonzero(self.trained)
        ids, differences = self.index.ids[numbers], self.rows[numbers] - self.base[numbers]
        self.is_fresh[:] = self.trained[:] = False
        return ids, differences


def _grown(array: Floats, more: int, row: Floats | float) -> Floats:
    return np.concatenate([array, np.full((more, array.shape[1]), row, np.float32)])


def _name(table: TableKey) -> str:
    """The table; never a bundle, see WrappedSource.in_bundles."""
    assert isinstance(table, str)
    return table


class LocalSteps(WrappedSource):
    """A client's pulls and pushes, by way of copies that `steps` pushes change before the shards see any of it.

    Pulls and pushes may come from two threads. A pull that the end of a round overtakes brings rows of that round.
    """

    def __init__(self, client: Client, steps: int) -> None:
        super().__init__(client)
        self.skipped_rows = 0  # gradient rows that held NaN or Inf
        self._client, self._steps = client, steps
        client.compressor.differences = True
        self._copies: dict[str, _LocalTable] = {}
        self._done = 0  # steps of this round
        self._weight = 0.0  # of all of them
        self._lost_leases = client.lost_leases  # when it began
        self._clock = 0  # rounds
        self._lock = threading.Lock()  # of the copies; never held during a call

    @property
    def clock(self) -> int:
        """The job's: rounds, not steps."""
        member = self._client.membership
        return self._clock if member is None else max(self._clock, member.first)

    def add(self, spec: TableSpec) -> None:
        """Keep copies of a table. ValueError where local steps do not know its optimizer."""
        check_local(spec)
        self._copies.setdefault(spec.name, _LocalTable(spec))

    def pull(
        self,
        reads: Sequence[tuple[TableKey, Route]],
        out: Sequence[Floats] | None = None,
        *,
        keep: bool = False,
        clock: int | None = None,
        versions: Versions | None = None,
        exact: bool = False,
    ) -> list[Floats]:
        """Pull as Client.pull does, from the copies where they are of this round; the clock counts rounds.

        With `exact` they are the rows that the shards keep, with what this round has changed of the copies.
        """
        self._drop_lost()
        if exact:
            return self._pull_exact(reads, out, versions)
        if out is None:
            dims = [self._copies[_name(table)].spec.dim for table, _ in reads]
            out = [np.empty((len(route.ids), dim), np.float32) for (_, route), dim in zip(reads, dims, strict=True)]
        missing: list[tuple[TableKey, Route]] = []
        places: list[tuple[int, Ids]] = []
        with self._lock:
            for part, (table, route) in enumerate(reads):
                copies = self._copies[_name(table)]
                numbers = copies.numbers(route.ids)
                out[part][...] = copies.rows[numbers]
                absent = ~copies.is_fresh[numbers]
                if absent.any():
                    # a whole route as it is: what is pulled as changes (delta) goes by the ids of the pull before
                    missing.append((table, route if absent.all() else route.select(absent)))
                    places.append((part, np.flatnonzero(absent)))
            clock = self.clock
        if missing:
            pulled = self._client.pull(missing, clock=clock, versions=versions)
            self._drop_lost()
            with self._lock:
                for (table, route), (part, rows), values in zip(missing, places, pulled, strict=True):
                    if clock == self.clock:
                        copies = self._copies[_name(table)]
                        copies.take(copies.numbers(route.ids), values)
                    out[part][rows] = values
        return list(out)

    def _pull_exact(
        self, reads: Sequence[tuple[TableKey, Route]], out: Sequence[Floats] | None, versions: Versions | None
    ) -> list[Floats]:
        """No copies are made of what it brings: training reads by the tables' codecs."""
        pulled = self._client.pull(reads, out, clock=self.clock, versions=versions, exact=True)
        with self._lock:
            for (table, route), rows in zip(reads, pulled, strict=True):
                copies = self._copies[_name(table)]
                numbers = copies.numbers(route.ids)
                trained = copies.trained[numbers]
                mine, base, theirs = copies.rows[numbers[trained]], copies.base[numbers[trained]], rows[trained]
                # the sum of a difference is not always what it was taken from
                rows[trained] = np.where(theirs == base, mine, theirs + (mine - base))
        return pulled

    def push(
        self,
        gradients: Gradients,
        *,
        clock: int,
        lr_scale: LrScale = 1.0,
        weight: float = 1.0,
        versions: Versions | None = None,
    ) -> Pushed:
        """Apply gradients to the copies; the last step of a round pushes what has changed."""
        lost_leases = self._client.lost_leases
        self.pull([(table, route) for table, route, _ in gradients])  # after a round's end, for rows read before it
        if self._client.lost_leases != lost_leases:
            return Pushed(False, 0, 0)
        applied = skipped = 0
        with self._lock:
            for table, route, values in gradients:
                copies = self._copies[_name(table)]
                failed = copies.apply(copies.numbers(route.ids), values, rate_of(lr_scale, _name(table)))
                applied, skipped = applied + len(values) - failed, skipped + failed
            self.skipped_rows += skipped
            self._done, self._weight = self._done + 1, self._weight + weight
        if self._done >= self._steps:
            self.flush()
        return Pushed(False, applied, skipped)

    def state_dict(self) -> Mapping[str, object]:
        """The optimizer's state of all rows that this worker trained, by table; between two rounds."""
        with self._lock:
            return {
                name: {"ids": copies.index.ids.copy(), "state": copies.state[: len(copies.index)].copy()}
                for name, copies in self._copies.items()
            }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the optimizer's state of `state_dict`."""
        with self._lock:
            for name, copies in self._copies.items():
                numbers = copies.numbers(np.asarray(state[name]["ids"]))
                copies.state[numbers] = state[name]["state"]

    def flush(self) -> None:
        """End a round that has begun: push what has changed, and let the next reads take fresh rows."""
        self._drop_lost()
        if not self._done:
            return
        member = self._client.membership
        # a synchronous job averages what is gathered; what is added one after the other is divided here
        alone = member is None or member.terms.staleness == 0
        share = np.float32(1.0 if alone or member is None else 1.0 / member.terms.workers)
        changes: list[tuple[str, Route, Floats]] = []
        clock = self.clock
        try:
            with self._lock:
                if not self._done:  # a pull has found the lease lost meanwhile
                    return
                clock = self.clock
                for name, copies in self._copies.items():
                    ids, differences = copies.end_round()
                    route = make_route(ids, copies.spec.space_key, self._client.placement)
                    if self._client.compressor.packs(name):
                        route = ascending(route)
                    ordered = np.empty_like(differences)
                    ordered[route.index] = differences * share
                    if len(ids):
                        changes.append((name, route, ordered))
                weight = self._weight
                self._done, self._weight, self._clock = 0, 0.0, clock + 1
            self._client.push(changes, clock=clock, weight=weight, difference=True)
        except BaseException:
            if member is not None and member.next_clock <= clock:
                self._clock = clock  # a Ctrl-C came before the push: other workers wait for it
            raise

    def refresh(self) -> None:
        """Between two rounds: let the next reads take fresh rows."""
        with self._lock:
            for copies in self._copies.values() if not self._done else ():
                copies.end_round()

    def _drop_lost(self) -> None:
        """Let go of a round that began before a lease was lost: the others went on without it."""
        with self._lock:
            if self._client.lost_leases == self._lost_leases:
                return
            self._lost_leases = self._client.lost_leases
            self._drop()

    def drop_round(self) -> None:
        """Let go of what this round has changed, and let the next reads take fresh rows."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._done, self._weight = 0, 0.0
        for copies in self._copies.values():
            copies.end_round()

    def load(self, table: str, route: Route, rows: Floats, *, keep_state: bool = False) -> None:
        """Assign rows on the shards; with `keep_state` (max_norm, say) it is a change of the copies, to be pushed."""
        copies = self._copies[table]
        if keep_state:
            self.pull([(table, route)])
        else:
            self._client.load(table, route, rows)
        with self._lock:
            if keep_state:
                numbers = copies.numbers(route.ids)
                copies.rows[numbers], copies.trained[numbers] = rows, True
            else:
                copies.assign(route.ids, rows)
