"""The ids that pulls left with a shard, so that the pushes that follow need not send them again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from embershard.proto.arrays import Ids

# A worker names a route within a few steps or never (an evaluation, a forward without a backward). These bound what
# one that never does can make a shard remember; what was dropped is sent again with its ids.
MAX_ROUTES = 1024  # of a worker
MAX_BYTES = 32 * 2**20  # of a worker
MAX_ALL_BYTES = 256 * 2**20  # of all: whoever pulls may say that it is any worker
MAX_WORKERS = 4096


@dataclass(slots=True)
class _Kept:
    """The routes of one worker's incarnation, the oldest first."""

    routes: OrderedDict[int, tuple[str, Ids]] = field(default_factory=OrderedDict)
    nbytes: int = 0


class RouteCache:
    """Number -> (table, ids), per worker's incarnation; bounded, the oldest are dropped.

    An earlier incarnation keeps its own: who only reads may have the number of a worker that trains.
    """

    def __init__(self) -> None:
        self._workers: OrderedDict[tuple[int, int], _Kept] = OrderedDict()  # the one that pulled last at the end
        self._nbytes = 0

    def keep(self, worker: int, epoch: int, number: int, table: str, ids: Ids) -> None:
        """Remember a copy of ids ((U,) int64) of a table."""
        kept = self._workers.setdefault((worker, epoch), _Kept())
        self._workers.move_to_end((worker, epoch))
        self._drop(kept, number)
        kept.routes[number] = (table, ids.copy())  # the array may be a part of a whole message
        kept.nbytes += ids.nbytes
        self._nbytes += ids.nbytes
        while len(kept.routes) > MAX_ROUTES or kept.nbytes > MAX_BYTES:
            self._drop(kept, next(iter(kept.routes)))
        while len(self._workers) > MAX_WORKERS or self._nbytes > MAX_ALL_BYTES:
            self._drop_worker(next(iter(self._workers)))

    def find(self, worker: int, epoch: int, number: int, table: str) -> Ids | None:
        """The ids kept under a number; None where they are not known, or are another table's."""
        kept = self._workers.get((worker, epoch))
        if kept is None:
            return None
        name, ids = kept.routes.get(number, ("", None))
        return ids if name == table else None

    def forget(self, worker: int, epoch: int, number: int) -> None:
        """Drop a route whose push was applied."""
        if kept := self._workers.get((worker, epoch)):
            self._drop(kept, number)

    def _drop(self, kept: _Kept, number: int) -> None:
        route = kept.routes.pop(number, None)
        if route is not None:
            kept.nbytes -= route[1].nbytes
            self._nbytes -= route[1].nbytes

    def _drop_worker(self, worker: tuple[int, int]) -> None:
        kept = self._workers.pop(worker, None)
        if kept is not None:
            self._nbytes -= kept.nbytes
