"""What the worker's cache of hot rows finds, against an LRU, the most frequent rows, and endless room.

Batches of 65,536 Zipf ids over ten million rows, each id looked up once per batch; a copy is read for `staleness`
batches. Shares are of the unique ids, without the first ten batches; milliseconds per batch, medians. All sides drop
copies that are too old: endless room says what the bound alone costs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np

from embershard.proto.routing import Placement, make_route
from embershard.worker.session.row_cache import RowCache
from timing import finish, machine, median, print_table

NUM_ROWS, BATCH, PRIME = 10_000_000, 65_536, 2654435761
WARM_UP = 10
Batches = list[np.ndarray]


def share(batches: Batches, staleness: int, keep: Callable[[OrderedDict[int, int], int], bool]) -> float:
    """Share of lookups that find a young copy; `keep(copies, id)` makes room for an id, or refuses it."""
    copies: OrderedDict[int, int] = OrderedDict()  # id -> clock, the least recently used first
    found = looked = 0
    for clock, ids in enumerate(batches):
        for id_ in ids.tolist():
            young = clock - copies.get(id_, -staleness - 1) <= staleness
            if young or keep(copies, id_):
                copies[id_] = copies[id_] if young else clock
                copies.move_to_end(id_)
            found += young and clock >= WARM_UP
        looked += len(ids) * (clock >= WARM_UP)
    return found / looked


def lru(rows: int) -> Callable[[OrderedDict[int, int], int], bool]:
    """The rows used last."""

    def keep(copies: OrderedDict[int, int], id_: int) -> bool:
        if id_ not in copies and len(copies) == rows:
            copies.popitem(last=False)
        return True

    return keep


def ours(batches: Batches, rows: int, dim: int, staleness: int) -> tuple[float, float, float]:
    """Share found, and the medians of lookup and store."""
    cache = RowCache(rows, dim, staleness)
    found = looked = 0
    lookups, stores = [], []
    for clock, ids in enumerate(batches):
        out = np.zeros((len(ids), dim), np.float32)
        start = time.perf_counter()
        missed = cache.lookup(ids, clock, out)
        middle = time.perf_counter()
        new, pulled = ids[missed], out[missed]
        before = time.perf_counter()
        cache.store(new, pulled, clock)
        if clock >= WARM_UP:
            lookups.append(middle - start)
            stores.append(time.perf_counter() - before)
            found, looked = found + len(ids) - len(missed), looked + len(ids)
    return found / looked, 1e3 * median(lookups), 1e3 * median(stores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 4_000, 16_000, 100_000])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--batches", type=int, default=50)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    placement = Placement.even(1)
    batches = [
        make_route(rng.zipf(1.2, BATCH) % NUM_ROWS * PRIME % NUM_ROWS, 0, placement).ids for _ in range(args.batches)
    ]
    counts = Counter(id_ for ids in batches for id_ in ids.tolist())
    endless = share(batches, args.staleness, lambda copies, id_: True)
    print(f"{machine()}; dim {args.dim}, staleness {args.staleness}, {len(batches[0]):,} unique ids per batch")
    table: list[list[object]] = []
    figures: dict[str, object] = {"endless": round(endless, 4)}
    for rows in args.rows:
        found, lookup_ms, store_ms = ours(batches, rows, args.dim, args.staleness)
        top = {id_ for id_, _ in counts.most_common(rows)}
        recent = share(batches, args.staleness, lru(rows))
        ideal = share(batches, args.staleness, lambda copies, id_, top=top: id_ in top)  # type: ignore[misc]
        table.append(
            [f"{rows:,}", f"{found:.1%}", f"{recent:.1%}", f"{ideal:.1%}", f"{endless:.1%}", lookup_ms, store_ms]
        )
        figures[f"rows{rows}"] = {
            "found": round(found, 4), "lru": round(recent, 4), "most_frequent": round(ideal, 4),
            "lookup_ms": round(lookup_ms, 3), "store_ms": round(store_ms, 3),
        }  # fmt: skip
    print_table(["room", "cache", "LRU", "most frequent", "endless", "lookup ms", "store ms"], table)
    finish({"bench": "row_cache", "dim": args.dim, "staleness": args.staleness, **figures}, [])


if __name__ == "__main__":
    main()
