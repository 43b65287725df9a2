"""W-PS against its floor on this machine: the same kernels' work and the same bytes, without any protocol.

W-PS: 65,536 Zipf ids of 10 million rows of dim 64, 13,677 of them unique, pulled from two shards and pushed with
Adagrad by one worker, all rows there before the first step. Beside it the least that can do this work with two
processes that hold the rows: the worker makes its route, sends each of them its ids, and gets the rows in its array;
then it sends the gradients, and waits until they are applied. `socket`: all of it by Unix sockets with buffers of
4 MiB, in system calls of whole arrays; `memory`: ids, rows and gradients lie in memory that the processes share, and
the sockets carry a byte to wake the other side. The floor is the cheaper of the two, by the wall time of a step.

All run in turn, five rounds of 50 steps, medians. Prints one JSON line; exits 1 where W-PS takes more than 1.5x its
floor. The programs of peers.py define the ids (EMBERSHARD_PEERS).
"""

from __future__ import annotations

import argparse
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from peer_embershard import PORTION, C, PullPush
from timing import cpu_seconds, finish, load, machine, median, print_table

BAR = 1.5
SHARDS, STEPS, ROUNDS = 2, 50, 5
MOST_IDS = C.PS_DRAW
ROW_BYTES, SOCKET_BYTES = 4 * C.PS_DIM, 4 * 2**20


class Shared(NamedTuple):
    """Memory of a worker and one of its servers."""

    ids: Any  # (MOST_IDS,) int64
    rows: Any  # (MOST_IDS, dim) float32
    gradients: Any

    @classmethod
    def make(cls) -> Shared:
        arrays = [
            np.frombuffer(mmap.mmap(-1, MOST_IDS * size), dtype)
            for size, dtype in ((8, np.int64), (ROW_BYTES, np.float32), (ROW_BYTES, np.float32))
        ]
        return cls(arrays[0], *(array.reshape(MOST_IDS, C.PS_DIM) for array in arrays[1:]))


def make_table(shard: int, num_rows: int) -> Any:
    """The table of one server, with its part of all rows."""
    import embershard as es
    from embershard.proto.routing import Placement, make_route
    from embershard.ps.table.optimizers import OptimizerRegistry
    from embershard.ps.table.table import Table

    spec = es.TableSpec(name="rows", dim=C.PS_DIM, optimizer=es.Adagrad(lr=C.PS_LR))
    table, placement = Table(spec, OptimizerRegistry().find(spec.optimizer)), Placement.even(SHARDS)
    for start in range(0, num_rows, PORTION):
        route = make_route(np.arange(start, min(start + PORTION, num_rows)), spec.space_key, placement)
        ids = route.ids[route.slice_of(shard)]
        table.load(ids, np.zeros((len(ids), C.PS_DIM), np.float32))
    return table


def receive(sock: socket.socket, into: Any) -> None:
    view = memoryview(into).cast("B")
    while len(view):
        count = sock.recv_into(view)
        if not count:
            raise SystemExit(0)
        view = view[count:]


def serve(sock: socket.socket, shared: Shared, shard: int, num_rows: int) -> None:
    """Answer pulls and pushes until the worker leaves: a number of ids, negative where they lie in shared memory."""
    table = make_table(shard, num_rows)
    count, local = np.zeros(1, np.int64), Shared.make()
    sock.sendall(b"r")
    while True:
        receive(sock, count)
        number, here = abs(int(count[0])), shared if count[0] < 0 else local
        ids, rows, gradients = here.ids[:number], here.rows[:number], here.gradients[:number]
        if here is local:
            receive(sock, ids)
        table.gather(ids, rows)
        sock.sendall(memoryview(rows).cast("B") if here is local else b"r")
        if here is local:
            receive(sock, gradients)
        else:
            receive(sock, bytearray(1))
        table.apply(ids, gradients)
        sock.sendall(b"d")


@contextmanager
def servers(num_rows: int) -> Iterator[tuple[list[socket.socket], list[Shared], list[int]]]:
    """Processes that hold the rows: their sockets, what they share with us, and their ids."""
    socks, shared, pids = list[socket.socket](), list[Shared](), list[int]()
    try:
        for shard in range(SHARDS):
            near, far = socket.socketpair()
            for sock in (near, far):
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
            memory = Shared.make()
            pid = os.fork()
            if not pid:
                near.close()
                try:
                    serve(far, memory, shard, num_rows)
                finally:
                    os._exit(0)
            far.close()
            socks.append(near)
            shared.append(memory)
            pids.append(pid)
        for sock in socks:
            receive(sock, bytearray(1))
        yield socks, shared, pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def floor_step(socks: list[socket.socket], shared: list[Shared], *, in_memory: bool) -> Callable[[int, Any], None]:
    """A step of the worker."""
    import embershard as es
    from embershard.proto.routing import Placement, make_route

    key = es.TableSpec(name="rows", dim=C.PS_DIM, optimizer=es.Adagrad(lr=C.PS_LR)).space_key
    placement, out, gradients = Placement.even(SHARDS), np.zeros((MOST_IDS, C.PS_DIM), np.float32), C.ps_grad()

    def step(number: int, ids: Any) -> None:
        route = make_route(ids, key, placement)
        parts = [route.slice_of(shard) for shard in range(SHARDS)]
        for sock, memory, part in zip(socks, shared, parts, strict=True):
            count = part.stop - part.start
            if in_memory:
                memory.ids[:count] = route.ids[part]
                sock.sendall(np.array([-count]))
            else:
                sock.sendall(np.array([count]).tobytes() + route.ids[part].tobytes())
        for sock, part in zip(socks, parts, strict=True):
            receive(sock, bytearray(1) if in_memory else out[part])
        for sock, part in zip(socks, parts, strict=True):
            if in_memory:  # where backward would have left them
                sock.sendall(b"g")
            else:
                sock.sendall(memoryview(gradients[part]).cast("B"))
        for sock in socks:
            receive(sock, bytearray(1))

    return step


def measured(step: Callable[[int, Any], object], batches: list[Any], pids: list[int]) -> tuple[float, float]:
    """Milliseconds of wall time and of CPU of all processes, for a step."""
    seconds, before = [], cpu_seconds([*pids, os.getpid()])
    for number, ids in enumerate(batches):
        start = time.perf_counter()
        step(number, ids)
        seconds.append(time.perf_counter() - start)
    return 1e3 * median(seconds), 1e3 * (cpu_seconds([*pids, os.getpid()]) - before) / len(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rows", type=int, default=C.PS_N, help="of the table, fewer for a quick look (12 GB for all)")
    args = parser.parse_args()
    print(f"{machine()}; {load()}")
    batches = [ids % args.rows for ids in C.ps_ids(STEPS)]
    with ExitStack() as stack:
        socks, shared, pids = stack.enter_context(servers(args.rows))  # first: a process with threads does not fork
        import embershard as es
        from embershard.deploy.supervisor import LocalShards

        shards = stack.enter_context(LocalShards(SHARDS))
        session = stack.enter_context(es.connect(",".join(shards.addresses)))
        sides: dict[str, tuple[Callable[[int, Any], object], list[int]]] = {
            "embershard": (PullPush(session, args.rows), list(shards.pids)),
            "floor, socket": (floor_step(socks, shared, in_memory=False), pids),
            "floor, memory": (floor_step(socks, shared, in_memory=True), pids),
        }
        seen = {name: list[tuple[float, float]]() for name in sides}
        for step, its in sides.values():
            measured(step, batches[:10], its)
        for _ in range(args.rounds):
            for name, (step, its) in sides.items():
                seen[name].append(measured(step, batches, its))
    walls = {name: median([wall for wall, _ in figures]) for name, figures in seen.items()}
    cpus = {name: median([cpu for _, cpu in figures]) for name, figures in seen.items()}
    floor = min(walls["floor, socket"], walls["floor, memory"])
    ratio = median([ours[0] / min(a[0], b[0]) for ours, a, b in zip(*(seen[name] for name in sides), strict=True)])
    print_table(["", "step, ms", "CPU, ms", "of the floor"], [[n, walls[n], cpus[n], walls[n] / floor] for n in sides])
    failures = [f"W-PS takes {ratio:.2f}x its floor, at most {BAR}"] * (ratio > BAR)
    finish({"load": load(), "rows": args.rows, "wall_ms": walls, "cpu_ms": cpus, "ratio": ratio}, failures)


if __name__ == "__main__":
    main()
