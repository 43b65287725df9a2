"""A table behind torch.distributed.rpc: rows by id modulo the number of server processes, Adagrad where they lie.

Written for speed as far as rpc allows: unique ids, one call per server, answers awaited together, an update of a few
index operations, and the transport that torch prefers on one machine, which is shared memory.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

CALL_SECONDS = 60
CALL_THREADS = 8
EPS = 1e-10


class _Part:
    """What one server holds."""

    def __init__(self, rows: int, dim: int, lr: float, dense: Tensor) -> None:
        self._lr = lr
        self._rows, self._state = torch.randn(rows, dim), torch.zeros(rows, dim)
        self._dense, self._dense_state = dense, torch.zeros_like(dense)

    def pull(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._rows.index_select(0, ids), self._dense

    def push(self, ids: Tensor, gradients: Tensor, dense: Tensor) -> None:
        state = self._state.index_select(0, ids).addcmul_(gradients, gradients)
        self._state.index_copy_(0, ids, state)
        self._rows.index_add_(0, ids, gradients.div_(state.sqrt_().add_(EPS)), alpha=-self._lr)
        self._dense_state.addcmul_(dense, dense)
        self._dense.addcdiv_(dense, self._dense_state.sqrt().add_(EPS), value=-self._lr)


_part: _Part | None = None  # of this server


def create(rows: int, dim: int, lr: float, dense: Tensor) -> None:
    """Begin anew with these sizes."""
    global _part
    _part = _Part(rows, dim, lr, dense)


def pull(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, dim) of this server's ids (N,), and its dense weights."""
    assert _part is not None
    return _part.pull(ids)


def push(ids: Tensor, gradients: Tensor, dense: Tensor) -> None:
    """One step: ids (N,) are unique."""
    assert _part is not None
    _part.push(ids, gradients, dense)


class TableServers:
    """Server processes, as a context manager, and the calls to all of them."""

    def __init__(self, count: int, threads: int) -> None:
        self.count = count
        self._names = [_name(rank) for rank in range(1, count + 1)]
        self._threads = threads
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pushes: Future[Any] | None = None
        self.seconds: dict[str, list[float]] = {"pull": [], "push": []}  # from each call to its last answer

    def create(self, rows: int, dim: int, lr: float, dense: Tensor) -> None:
        """Make the table; dense weights (N,) are cut into as many parts."""
        parts = dense.tensor_split(self.count)
        size = -(-rows // self.count)
        for call in [
            rpc.rpc_async(name, create, (size, dim, lr, part.clone()))
            for name, part in zip(self._names, parts, strict=True)
        ]:
            call.wait()

    def pull(self, ids: Sequence[Tensor]) -> Future[list[tuple[Tensor, Tensor]]]:
        """Rows and dense weights of every server, to be waited for."""
        start = time.perf_counter()
        calls = [rpc.rpc_async(name, pull, (part,)) for name, part in zip(self._names, ids, strict=True)]
        return self._all("pull", start, calls)

    def push(self, ids: Sequence[Tensor], gradients: Sequence[Tensor], dense: Tensor) -> None:
        """Send gradients on their way."""
        start = time.perf_counter()
        parts = zip(self._names, ids, gradients, dense.tensor_split(self.count), strict=True)
        calls = [rpc.rpc_async(name, push, (its, rows, rest.clone())) for name, its, rows, rest in parts]
        self._pushes = self._all("push", start, calls)

    def finish(self) -> None:
        """Wait for the pushes that are under way."""
        if self._pushes is not None:
            self._pushes.wait()
        self._pushes = None

    def __enter__(self) -> Self:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # without a GPU: what a server holds lies on the host
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        for rank in range(1, self.count + 1):
            words = map(str, (rank, self.count + 1, port, self._threads))
            self._processes.append(subprocess.Popen([sys.executable, __file__, *words], env=environment))
        try:
            _join(0, self.count + 1, port)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        rpc.shutdown(graceful=False)
        self._end()

    def _all(self, kind: str, start: float, calls: list[Future[Any]]) -> Future[list[Any]]:
        def answers(done: Future[list[Future[Any]]]) -> list[Any]:
            self.seconds[kind].append(time.perf_counter() - start)
            return [call.wait() for call in done.wait()]

        return torch.futures.collect_all(calls).then(answers)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _name(rank: int) -> str:
    return f"server-{rank}" if rank else "trainer"


def _join(rank: int, world: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=CALL_THREADS, rpc_timeout=CALL_SECONDS, init_method=f"tcp://127.0.0.1:{port}"
    )
    rpc.init_rpc(_name(rank), rank=rank, world_size=world, rpc_backend_options=options)


def _main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "world", "port", "threads"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    _join(options.rank, options.world, options.port)
    rpc.shutdown()  # serves until the trainer is done with it


if __name__ == "__main__":
    _main()
