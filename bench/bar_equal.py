"""The sharding changes nothing: one worker at staleness 0 has the same weights, to the bit, over 1, 2 and 4 shards,
in this process and over every transport to processes of their own, with prefetch and without, and the loss curve of
plain torch, to float rounding.

Once with SGD against torch.optim.SGD, once with a user-defined row optimizer against the same formula in torch. Prints
one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import embershard as es
from embershard.deploy.supervisor import LocalShards, ShardSettings
from embershard.proto import shared_memory
from embershard.proto.transport import stream
from embershard.worker.models.ctr.dlrm import DLRM
from embershard.worker.nn.remote_weight import RemoteWeight
from embershard.worker.session.session import Session

SHARDS = (1, 2, 4)
TRANSPORTS = {  # and what stands before the address of a shard to choose it
    "stream over Unix": "",
    "stream over shared memory": "",
    "stream over TCP": "tcp://",
    "grpc": "grpc://",
    "rpc": "rpc://",
}
PREFETCH = "stream over shared memory, prefetch"
STEPS, BATCH, FIELDS, DIM, NUM_DENSE, ROWS = 100, 256, 8, 16, 4, 20_000
# Sums of a batch's gradients and a fused multiply-add differ in their last bits, and 100 steps carry that on; a wrong
# row, a lost or a doubled push is 1e-3 and more.
TOLERANCE = 1e-5
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Batches = list[Batch]


class Model(nn.Module):
    """DLRM beside a bag over all ids: one table read by row, one pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.dlrm = DLRM(ROWS, FIELDS, DIM, NUM_DENSE, bottom=(32,), hidden=(64, 32))
        self.bag = nn.EmbeddingBag(ROWS, 1, mode="sum")

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.dlrm(ids, dense) + self.bag(ids).squeeze(1)
        return logits


class Signum(torch.optim.Optimizer):
    """signum.signum in torch, for rows that have a gradient: those of a batch, and all dense weights."""

    def __init__(self, parameters: object, lr: float, beta: float) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                gradient, momentum = parameter.grad, state["momentum"]
                touched = torch.ones(len(parameter), dtype=torch.bool)
                if gradient.is_sparse:
                    gradient = gradient.coalesce()
                    touched = torch.zeros(len(parameter), dtype=torch.bool)
                    touched[gradient.indices()[0]] = True
                    gradient = gradient.to_dense()
                momentum[touched] = group["beta"] * momentum[touched] + (1 - group["beta"]) * gradient[touched]
                parameter[touched] -= group["lr"] * momentum[touched].sign()


@dataclass(frozen=True)
class Run:
    """What one training left."""

    losses: list[float]
    digest: str  # of every weight


def batches() -> Batches:
    rng = np.random.default_rng(0)
    out = []
    for _ in range(STEPS):
        ids = torch.from_numpy(rng.zipf(1.2, (BATCH, FIELDS)) % ROWS)
        dense = torch.from_numpy(rng.normal(size=(BATCH, NUM_DENSE)).astype(np.float32))
        out.append((ids, dense, ((ids.sum(1) % 3 == 0) ^ (dense[:, 0] > 1)).float()))
    return out


def train(model: nn.Module, data: Iterable[Batch], step: Callable[[], object]) -> list[float]:
    losses = []
    for ids, dense, labels in data:
        loss = binary_cross_entropy_with_logits(model(ids, dense), labels)
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def in_torch(optimizer: Callable[[nn.Module], torch.optim.Optimizer], data: Batches, *, sparse: bool = False) -> Run:
    model = build()
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = sparse
    optim = optimizer(model)

    def step() -> None:
        optim.step()
        optim.zero_grad()

    return Run(train(model, data, step), "")


def reads(batch: Batch) -> dict[str, torch.Tensor]:
    return {"dlrm.embedding": batch[0], "bag": batch[0]}


def on_shards(session: Session, optimizer: es.SGD | es.Custom, data: Batches, *, prefetch: bool = False) -> Run:
    model = es.wrap(build(), session, optimizer=optimizer)
    ahead = session.prefetch(data, staleness=0, inputs=reads) if prefetch else data
    losses = train(model, ahead, session.step)
    assert not (prefetch and session.missed_reads)
    with torch.no_grad():
        model(*data[0][:2])  # brings the dense weights here
    rows = [m.table.pull(torch.arange(ROWS)) for m in model.modules() if isinstance(m, es.Embedding | es.EmbeddingBag)]
    digest = hashlib.sha256()
    for weight in (*rows, *(weight for weight in model.parameters() if not isinstance(weight, RemoteWeight))):
        digest.update(weight.detach().numpy().tobytes())
    return Run(losses, digest.hexdigest()[:16])


@contextmanager
def processes(num_shards: int, imports: list[str], transport: str) -> Iterator[list[str]]:
    """The addresses of fresh shards in processes of their own."""
    # all arrays lie in shared memory, or none; by default the large ones do
    shared_memory.SHARED_FROM_BYTES = stream.SHARED_FROM_BYTES = 1 if "shared" in transport else 2**30
    with LocalShards(num_shards, ShardSettings(imports=imports, rpc=transport == "rpc")) as shards:
        addresses = shards.rpc_addresses if transport == "rpc" else shards.addresses
        yield [TRANSPORTS[transport.removesuffix(", prefetch")] + address for address in addresses]


def runs(optimizer: es.SGD | es.Custom, data: Batches) -> dict[str, Run]:
    imports = [optimizer.function.split(":")[0]] if isinstance(optimizer, es.Custom) else []
    found = {}
    for shards in SHARDS:
        with es.local(shards, imports=imports) as session:
            found[f"local x{shards}"] = on_shards(session, optimizer, data)
        for transport in [*TRANSPORTS, PREFETCH]:
            with (
                processes(shards, imports, transport) as addresses,
                es.connect(addresses, timeout=timedelta(seconds=60)) as session,
            ):
                found[f"{transport} x{shards}"] = on_shards(session, optimizer, data, prefetch=transport == PREFETCH)
    return found


def main() -> int:
    torch.set_num_threads(1)
    data = batches()
    cases = {
        "sgd": (es.SGD(lr=0.3), in_torch(lambda m: torch.optim.SGD(m.parameters(), lr=0.3), data)),
        "signum": (
            es.Custom(function="signum:signum", lr=0.001, settings={"beta": 0.9}),
            in_torch(lambda m: Signum(m.parameters(), lr=0.001, beta=0.9), data, sparse=True),
        ),
    }
    figures: dict[str, object] = {
        "shards": SHARDS,
        "transports": ["local", *TRANSPORTS],
        "steps": STEPS,
        "batch": BATCH,
    }
    passed = True
    for name, (optimizer, reference) in cases.items():
        results = runs(optimizer, data)
        digests = {run.digest for run in results.values()}
        worst = max(
            abs(mine - theirs) / theirs
            for run in results.values()
            for mine, theirs in zip(run.losses, reference.losses, strict=True)
        )
        if len(digests) > 1:
            print({label: run.digest for label, run in results.items()}, file=sys.stderr)
        ok = len(digests) == 1 and worst <= TOLERANCE and reference.losses[-1] < reference.losses[0]
        passed &= ok
        figures[name] = {
            "weights_bit_identical": len(digests) == 1,
            "runs": len(results),
            "worst_relative_loss_difference_from_torch": worst,
            "first_loss": reference.losses[0],
            "last_loss": reference.losses[-1],
            "ok": ok,
        }
    print(json.dumps({"bar": "equal", "passed": passed, "tolerance": TOLERANCE, **figures}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
