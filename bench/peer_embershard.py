"""embershard on the workloads of the peers' common.py, as one more program beside them: same command line and output.

Real shard processes, and workers as processes of their own. The rows of both workloads are all resident on the shards
before the first step, as they are with the peers, and for `dlrm` they are those that inproc.py draws, so that losses
compare. The other programs lie in the folder that EMBERSHARD_PEERS names.

torch multiplies matrices by MKL, which leaves half of an AMD processor's vector unit idle; TensorFlow and Paddle bring
oneDNN, which does not. Our client multiplies by oneDNN, as `embershard worker` does on such processors, and
peers.py gives torch's programs the same; `--linear torch` leaves torch's kernels alone, beside theirs without it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from peers import PEERS

sys.path.insert(1, str(PEERS))

import common as C  # before numpy: it says how many threads that may use

TRANSPORTS = {"stream": "", "tcp": "tcp://", "grpc": "grpc://"}
PORTION = 2**18  # rows loaded at a time


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport", default="stream", choices=TRANSPORTS, help="stream: a Unix socket on one machine"
    )
    parser.add_argument("--staleness", type=int, default=1, help="dlrm: of session.prefetch; -1: no prefetch")
    parser.add_argument(
        "--malloc", default="keep", choices=["keep", "default"], help="keep: as `embershard worker` does"
    )
    parser.add_argument("--linear", default="onednn", choices=["onednn", "torch"], help="dlrm: who multiplies matrices")
    parser.add_argument("--spans", action="store_true", help="print where the time of a step goes, to stderr")
    parser.add_argument("--addresses", default="")
    parser.add_argument("--pids", default="")


def main(a: argparse.Namespace) -> None:
    """Start shards and workers, and print what the workers measured."""
    from embershard.deploy.supervisor import LocalShards

    workers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="embershard") as folder, LocalShards(a.servers) as shards:
        addresses = ",".join(TRANSPORTS[a.transport] + address for address in shards.addresses)
        given = ["--addresses", addresses, "--pids", " ".join(map(str, shards.pids)), "--dir", folder]
        try:
            for rank in range(a.workers):
                command = [sys.executable, __file__, *sys.argv[1:], "--role", "worker", "--rank", str(rank), *given]
                workers[f"worker{rank}"] = C.spawn(command, None, f"{folder}/worker{rank}.log")
            results = C.wait_results(a, folder, workers, timeout=600)
        finally:
            C.stop(workers, grace=3)
        if a.spans:
            print(C.tail(f"{folder}/worker0.log"), file=sys.stderr)
    dlrm = {"staleness": a.staleness, "linear": a.linear} if a.workload == "dlrm" else {}
    C.collect(a, "embershard", results, transport=a.transport, **dlrm)


def make_meter(a: argparse.Namespace) -> Any:
    """A meter that charges the CPU of every process of the job."""
    shards = [int(pid) for pid in a.pids.split()]
    Path(a.dir, f"pid{a.rank}").write_text(str(os.getpid()))
    files = [Path(a.dir, f"pid{rank}") for rank in range(a.workers)]
    while not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.01)
    pids = shards + [int(file.read_text()) for file in files]
    return C.Meter(a, lambda: pids, lambda: shards)


def milliseconds(*times: float) -> list[float]:
    return [1000 * (stop - start) for start, stop in pairwise(times)]


class PullPush:
    """A step of W-PS: pull and push, Adagrad on the shards, which have `num_rows` rows before the first."""

    def __init__(self, session: Any, num_rows: int = C.PS_N) -> None:
        import numpy as np

        import embershard as es
        from embershard.proto.shared_memory import empty_floats

        def values() -> Iterator[tuple[Any, Any]]:
            draw = np.random.default_rng(0)
            for start in range(0, num_rows, PORTION):
                ids = np.arange(start, min(start + PORTION, num_rows))
                yield ids, (draw.random((len(ids), C.PS_DIM), np.float32) - np.float32(0.5)) * np.float32(0.1)

        table = session.table(es.TableSpec(name="rows", dim=C.PS_DIM, optimizer=es.Adagrad(lr=C.PS_LR)), values)
        self._name, self._key, self._client = table.spec.name, table.spec.space_key, session.client
        # where our models have them: in the memory that shards of this machine share
        self._gradients, self._out = (empty_floats(C.PS_DRAW, C.PS_DIM) for _ in range(2))
        self._gradients[...] = C.ps_grad()

    def __call__(self, step: int, ids: Any) -> tuple[int, list[float]]:
        """The number of unique ids, and milliseconds of the route, the pull and the push."""
        from embershard.proto.routing import make_route

        t0 = time.time()
        route = make_route(ids, self._key, self._client.placement)
        unique = len(route.ids)
        t1 = time.time()
        self._client.pull([(self._name, route)], [self._out[:unique]], keep=True)
        t2 = time.time()
        self._client.push([(self._name, route, self._gradients[:unique])], clock=step)
        return unique, milliseconds(t0, t1, t2, time.time())


def train_ps(a: argparse.Namespace) -> None:
    """Pull and push, Adagrad on the shards."""
    import embershard as es
    from embershard.proto.timing import begin_step, end_step

    with es.connect(a.addresses) as session:
        pull_push = PullPush(session)
        meter = make_meter(a)
        begin_step()
        for step, ids in enumerate(C.ps_ids(a.steps)):
            meter.begin_step(step)
            unique, parts = pull_push(step, ids)
            meter.end_step(step, unique, parts=parts)
            end_step()
        meter.finish()


def make_dlrm(a: argparse.Namespace, session: Any, device: str = "cpu") -> Any:
    """The model of W-DLRM on the session's shards; with rows on `meta`, a shard makes each when it is first pushed."""
    import torch
    from dlrm_torch import Dense
    from torch import nn

    import embershard as es
    from embershard.worker.device import keep_freed_memory
    from embershard.worker.nn.onednn import use_onednn

    class DLRM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Dense()  # first, and then the rows: the order in which inproc.py draws them
            rows = torch.empty(C.TOTAL, C.DIM, device=device).uniform_(-C.EMB_INIT, C.EMB_INIT)
            self.embedding = nn.Embedding(C.TOTAL, C.DIM, _weight=rows)

        def embedding_inputs(self, ids: torch.Tensor, dense: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"embedding": ids}

        def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
            return self.net(dense, self.embedding(ids))  # type: ignore[no-any-return]

    if a.malloc == "keep":
        keep_freed_memory()
    sgd = es.SGD(lr=C.DENSE_LR)
    initializer = es.Normal(std=C.EMB_INIT)  # of rows on `meta`
    model = es.wrap(DLRM(), session, optimizer=es.Adagrad(lr=C.EMB_LR), dense_optimizer=sgd, initializer=initializer)
    if a.linear == "onednn":
        use_onednn(model)
    return model


def dlrm_batches(a: argparse.Namespace, count: int) -> list[Any]:
    """Ids, dense values and labels of every batch, as tensors."""
    import torch

    tensors = ((batch[2], batch[0], batch[3]) for batch in C.dlrm_batches(count, a.rank))
    return [tuple(map(torch.from_numpy, arrays)) for arrays in tensors]


def train_dlrm(a: argparse.Namespace) -> None:
    """The training loop that a user writes."""
    from dlrm_torch import loss_fn

    import embershard as es
    from embershard.proto.timing import begin_step, end_step

    batches = dlrm_batches(a, a.steps)
    with es.connect(a.addresses, worker=a.rank) as session:
        model = make_dlrm(a, session)
        meter = make_meter(a)
        loop: Iterable[Any] = batches if a.staleness < 0 else session.prefetch(batches, staleness=a.staleness)
        loop = iter(loop)
        begin_step()
        for step in range(a.steps):
            meter.begin_step(step)
            ids, dense, labels = next(loop)
            loss = loss_fn(model(ids, dense), labels)
            loss.backward()
            session.step()
            if step == a.steps - 1:
                session.flush()
            meter.end_step(step, 0, loss.item())
            end_step()
        meter.finish()
        assert session.missed_reads == 0


def work(a: argparse.Namespace) -> None:
    """A worker."""
    from embershard.proto.timing import Recorder

    train = {"ps": train_ps, "dlrm": train_dlrm}[a.workload]
    with Recorder() if a.spans else contextlib.nullcontext() as recorder:
        train(a)
        if recorder is not None:
            print(recorder.split(), flush=True)


if __name__ == "__main__":
    arguments = C.args(options)
    (main if arguments.role == "main" else work)(arguments)
