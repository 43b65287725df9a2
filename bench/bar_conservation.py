"""Nothing of a gradient is lost or applied twice, whatever a link, a worker or a shard does.

Two shard processes, each behind a proxy of ours that loses 10 % of the replies (with the connection, after the shard
has applied), repeats 10 % of requests and of replies and delays 10 %. One worker, then two at a time, push gradients
with each codec. Rows begin at 0 and SGD has rate 1, so that minus a row is the sum of what was applied to it:

    |sum applied + sum held back - sum of gradients| / |sum of gradients| <= 1e-5      (norms over the whole table)

dgc has momentum 0 here: with it, the sum of what is sent is not that of the gradients by design. Codecs that hold
nothing back (fp16s, bf16, int8) are held to the payloads that they made, which are what arrives. The learning rate
changes on the way, and some residuals are evicted by others.

Then kill -9: of a worker, at a random moment, whose acknowledged pushes must be applied once, and at most the one that
was under way beside them; and of a shard, after which the other one's rows must still add up (its own are gone, and the
worker is told).

Prints one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from datetime import timedelta

import numpy as np
import numpy.typing as npt

import embershard as es
from embershard.deploy.supervisor import LocalShards, ShardSettings
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import decode
from embershard.proto.errors import EmbershardError, ShardUnavailable
from embershard.proto.messages import TableGradients
from embershard.proto.routing import Placement, even_ids, make_route
from embershard.worker.client.client import Client
from embershard.worker.compression.compressor import Compressor
from embershard.worker.compression.low_rank import DenseLayout, ParameterSlice
from faulty_link import BEHIND_LINK, FaultyLink
from timing import finish, print_table

BAR = 1e-5
SHARE = 0.1  # of the frames that something happens to
NUM_IDS, DIM, BATCH = 3000, 16, 400
BLOCKS, BLOCK = 24, 1024
ROWS = ["none", "fp16s", "bf16", "int8", "topk:0.01", "topk:0.05+fp16s", "rows:0.1", "rows:0.1+int8", "randomk:0.05",
        "dgc:0.01", "dgc:0.01+fp16s"]  # fmt: skip
DENSE = ["none", "int8", "topk:0.001", "dgc:0.001+fp16s", "randomk:0.01", "onebit", "powersgd:2", "powersgd:2+fp16s"]
RESIDUAL_ROWS = 600  # fewer than there are ids: some are evicted
TIMEOUT = timedelta(seconds=20)
Sums = npt.NDArray[np.float64]


class Table:
    """One table, pushed with one codec."""

    def __init__(self, codec: str, dense: bool, number: int) -> None:
        self.codec, self.dense = codec, dense
        dim = BLOCK if dense else DIM
        self.spec = es.TableSpec(
            name=f"t{number}", dim=dim, optimizer=es.SGD(lr=1.0), initializer=es.Constant(), seed=number
        )
        self.ids = even_ids(BLOCKS, self.spec.space_key) if dense else np.arange(NUM_IDS)
        self._order = np.argsort(self.ids)

    @property
    def compression(self) -> es.Compression:
        ways = {"dense": {"push": self.codec}} if self.dense else {"push": self.codec}
        return es.Compression(residual_rows=2 * RESIDUAL_ROWS, warmup_steps=5, **ways)  # type: ignore[arg-type]

    @property
    def layout(self) -> DenseLayout:
        half = BLOCKS // 2
        return DenseLayout(self.ids, [ParameterSlice(0, (half * 16, 64)), ParameterSlice(half, (half * 8, 128))])

    def declare(self, client: Client) -> None:
        client.compressor.settings = self.compression
        client.declare(self.spec, dense=self.dense)
        if self.dense:
            client.compressor.lay_out(self.spec.name, self.layout)

    def zeros(self) -> Sums:
        return np.zeros((len(self.ids), self.spec.dim))

    def places(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._order[np.searchsorted(self.ids[self._order], ids)]

    def gradients(self, worker: int, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], float]:
        """Ids, rows and the factor on the learning rate of one push."""
        rng = np.random.default_rng([worker, step])
        ids = self.ids if self.dense else rng.choice(NUM_IDS, BATCH, replace=False, p=_popularity())
        rows = rng.standard_normal((len(ids), self.spec.dim)).astype(np.float32)
        return ids, rows, 1.0 / (1 + step // 15)


def _popularity() -> Sums:
    weights = 1.0 / np.arange(1, NUM_IDS + 1)
    return weights / weights.sum()


class Worker:
    """Pushes to a table and counts what it pushed, and what payloads held of it."""

    def __init__(self, client: Client, table: Table) -> None:
        self.client, self.table = client, table
        self.pushed, self.sent = table.zeros(), table.zeros()
        pack = client.compressor.pack

        def recording(part: TableGradients, shard: int, start: int) -> list[TableGradients]:
            parts = pack(part, shard, start)
            for one in parts:
                self.sent += decoded(table, one)
            return parts

        client.compressor.pack = recording  # type: ignore[method-assign]

    def push(self, step: int) -> None:
        ids, rows, rate = self.table.gradients(self.client.worker, step)
        route = make_route(ids, self.table.spec.space_key, self.client.placement)
        ordered = np.empty_like(rows)
        ordered[route.index] = rows
        self.pushed[self.table.places(ids)] += rows.astype(np.float64) * np.float32(rate)
        self.client.push([(self.table.spec.name, route, ordered)], clock=step, lr_scale=float(np.float32(rate)))

    def push_all(self, steps: int) -> None:
        for step in range(steps):
            try:
                self.push(step)
            except ShardUnavailable:
                continue  # kept, and sent again with the next one
        self.client.push([], clock=steps)

    def expected(self, held: bool) -> Sums:
        """What shards should have applied."""
        codec = CodecName.parse(self.table.codec)
        if codec.is_plain:
            return self.pushed
        if not codec.has_feedback:
            return self.sent
        return self.pushed - self.held() if held else self.pushed

    def held(self) -> Sums:
        rows, held = self.table.zeros(), self.client.compressor.residual(self.table.spec.name)
        rows[self.table.places(held.ids)] = held.rows.astype(np.float64) * held.rates[:, None]
        return rows


def decoded(table: Table, part: TableGradients) -> Sums:
    """What a shard adds to the sum of a table, by the part that it is sent."""
    total = table.zeros()
    if not part.codec:
        total[table.places(part.ids)] = part.gradients.astype(np.float64) * part.lr_scale
        return total
    positions, rows, _ = decode(part.gradients, len(part.ids), table.spec.dim)  # type: ignore[arg-type]
    ids = part.ids if positions is None else part.ids[positions]
    total[table.places(ids)] = rows.astype(np.float64) * part.lr_scale
    return total


def applied(table: Table, client: Client) -> Sums:
    route = make_route(table.ids, table.spec.space_key, client.placement)
    (rows,) = client.pull([(table.spec.name, route)])
    return -rows[route.index].astype(np.float64)


def error_of(got: Sums, want: Sums, whole: Sums) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(whole))


def faults(
    addresses: Sequence[str], direct: Sequence[str], tables: list[Table], workers: int, steps: int
) -> list[float]:
    """The error of each table, pushed by some workers at a time."""
    errors = []
    for table in tables:
        with ExitStack() as stack:
            clients = [
                stack.enter_context(closing(Client.connect(addresses, worker=rank, timeout=TIMEOUT)))
                for rank in range(workers)
            ]
            for client in clients:
                table.declare(client)
            made = [Worker(client, table) for client in clients]
            threads = [threading.Thread(target=worker.push_all, args=(steps,)) for worker in made]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            looker = stack.enter_context(closing(Client.connect(direct, worker=99, timeout=TIMEOUT)))
            looker.declare(table.spec)
            want = sum((worker.expected(held=True) for worker in made), table.zeros())
            whole = sum((worker.pushed for worker in made), table.zeros())
            errors.append(error_of(applied(table, looker), want, whole))
    return errors


# --- kill -9 ---


def worker_process(addresses: str, codec: str, number: int) -> None:
    """Push until killed, and say which pushes were acknowledged."""
    table = Table(codec, False, number)
    with closing(Client.connect(addresses.split(","), worker=7, timeout=TIMEOUT)) as client:
        table.declare(client)
        worker = Worker(client, table)
        for step in range(10**6):
            worker.push(step)
            print(step, flush=True)


def killed_worker(
    addresses: Sequence[str], direct: Sequence[str], codec: str, number: int, rng: random.Random
) -> float:
    """kill -9 of a worker; the error of what was applied against its acknowledged pushes (and the one under way)."""
    words = [sys.executable, __file__, "--worker", ",".join(addresses), "--codec", codec, "--number", str(number)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = 0
    try:
        for line in process.stdout:
            acknowledged = int(line) + 1
            if acknowledged == 20:
                threading.Timer(rng.uniform(0.0, 0.2), process.kill).start()
    finally:
        process.kill()
        process.wait()
    table = Table(codec, False, number)
    with closing(Client.connect(direct, worker=99, timeout=TIMEOUT)) as client:
        client.declare(table.spec)
        got = applied(table, client)
        sums = sums_by_shard(table, acknowledged, client.placement)
    route = make_route(table.ids, table.spec.space_key, Placement.even(2))
    error = 0.0
    for shard in range(2):
        mine = table.places(route.ids[route.slice_of(shard)])
        whole = sums[shard][0][mine]
        error = max(error, min(error_of(got[mine], one[mine], whole) for one in sums[shard]))
    return error


def sums_by_shard(table: Table, acknowledged: int, placement: Placement) -> list[list[Sums]]:
    """What a worker's acknowledged pushes, and these with the next one, add up to: the same payloads, made again."""
    compressor = Compressor(7, placement)
    compressor.settings = table.compression
    compressor.add(compressor.with_codecs(table.spec, dense=False), dense=False)
    sums = [[table.zeros()] for _ in range(placement.num_shards)]
    total = [table.zeros() for _ in range(placement.num_shards)]
    for step in range(acknowledged + 1):
        ids, rows, rate = table.gradients(7, step)
        rate = float(np.float32(rate))
        route = make_route(ids, table.spec.space_key, placement)
        ordered = np.empty_like(rows)
        ordered[route.index] = rows
        compressor.begin([(table.spec.name, route, ordered)], rate)
        for shard in range(placement.num_shards):
            part = route.slice_of(shard)
            whole = TableGradients(table.spec.name, route.ids[part], ordered[part], rate)
            parts = compressor.pack(whole, shard, 0) if compressor.packs(table.spec.name) else [whole]
            total[shard] = total[shard] + sum((decoded(table, one) for one in parts), table.zeros())
            if step >= acknowledged - 1:
                sums[shard] = [*sums[shard][-1:], total[shard]]
    return sums


def killed_shard(codec: str, number: int, rng: random.Random) -> float:
    """kill -9 of shard 1 while a worker pushes; the error of what shard 0 has applied."""
    with LocalShards(2) as shards:
        table = Table(codec, False, number)
        with closing(Client.connect(shards.addresses, timeout=timedelta(seconds=2))) as client:
            table.declare(client)
            worker = Worker(client, table)
            kill = threading.Timer(rng.uniform(0.05, 0.3), os.kill, (shards.pids[1], signal.SIGKILL))
            kill.start()
            told = False
            for step in range(10**6):
                try:
                    worker.push(step)
                except EmbershardError:
                    told = True
                    break
            assert told
            route = make_route(table.ids, table.spec.space_key, client.placement)
            mine = route.ids[: route.splits[1]]
            only = make_route(mine, table.spec.space_key, client.placement)
            (rows,) = client.pull([(table.spec.name, only)])
            got = -rows[only.index].astype(np.float64)
            places = table.places(mine)
            want = worker.expected(held=True)[places]
            return error_of(got, want, worker.pushed[places])


def measure(steps: int, seed: int) -> tuple[dict[str, dict[str, float]], Counter[str]]:
    """Errors by codec and by what went wrong, and how often the proxies did what they are for."""
    rng = random.Random(seed)
    chosen = [(codec, False) for codec in ROWS] + [(codec, True) for codec in DENSE]
    happened: Counter[str] = Counter()
    errors: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        shards = stack.enter_context(LocalShards(2, ShardSettings(options=BEHIND_LINK)))
        links = [FaultyLink(address, SHARE, seed + number) for number, address in enumerate(shards.addresses)]
        addresses = [stack.enter_context(link.serving()) for link in links]
        number = 0
        for workers in (1, 2):
            tables = [Table(codec, dense, number + place) for place, (codec, dense) in enumerate(chosen)]
            number += len(tables)
            found = faults(addresses, shards.addresses, tables, workers, steps)
            for (codec, dense), error in zip(chosen, found, strict=True):
                errors.setdefault(f"{'dense' if dense else 'rows'} {codec}", {})[f"{workers} workers"] = error
        for codec in ("none", "int8", "topk:0.01", "dgc:0.01+fp16s"):
            number += 1
            error = killed_worker(addresses, shards.addresses, codec, number, rng)
            errors[f"rows {codec}"]["worker killed"] = error
        for link in links:
            happened += link.happened
    for codec in ("none", "topk:0.01"):
        number += 1
        errors[f"rows {codec}"]["shard killed"] = killed_shard(codec, number, rng)
    return errors, happened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="pushes of each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--codec", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker_process(args.worker, args.codec, args.number)
        return
    start = time.monotonic()
    errors, happened = measure(args.steps, args.seed)
    columns = ["1 workers", "2 workers", "worker killed", "shard killed"]
    print_table(
        ["codec", *columns],
        [
            [name, *(f"{row[column]:.1e}" if column in row else "" for column in columns)]
            for name, row in errors.items()
        ],
    )
    failures = [
        f"{name}, {what}: {error:.2e} is over {BAR:g}"
        for name, row in errors.items()
        for what, error in row.items()
        if not error <= BAR
    ]
    failures += [f"the proxy never had a {what}" for what in ("reply lost", "request repeated") if not happened[what]]
    result = {"bar": "conservation", "limit": BAR, "errors": errors, "happened": dict(happened)}
    finish({**result, "seconds": round(time.monotonic() - start, 1)}, failures)


if __name__ == "__main__":
    main()
