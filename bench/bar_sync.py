"""Synchronous workers are one process on the joint batch: NeuMF and DLRM, 200 steps, with SGD, Adagrad and Adam.

1, 2 and 4 worker processes train over two shard processes at staleness 0, each on its share of the same joint batches;
torch trains on the whole batches in one process, with its own optimizers. After 200 steps no weight, of tables or
dense, may differ by more than 1e-5 in float32; and two runs of the same workers must agree to the bit. Prints a table
and one JSON line; exits 1 below the bar.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import embershard as es
from embershard.deploy.supervisor import LocalShards
from embershard.worker.models.ctr.dlrm import DLRM
from embershard.worker.models.retrieval.ncf import NeuMF
from embershard.worker.nn.remote_weight import RemoteWeight
from timing import finish, print_table

WORKERS = (1, 2, 4)
RUNS = 2
SHARDS = 2
STEPS, BATCH, ROWS, FIELDS, NUM_DENSE = 200, 256, 2_000, 8, 4
# Sums of a batch's gradients in another order differ in their last bits, which 200 steps carry on to about 1e-6; a
# lost, doubled or late push is a thousand times more. But where rounding decides on which side of zero the input of a
# ReLU lies, a whole gradient comes or goes: the towers are small, so that this is rare, and Adagrad's sums begin at
# 0.1, as in TensorFlow, for at 0 a weight's first step is the learning rate itself, however small its gradient.
TOLERANCE = 1e-5
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids, dense features, labels


class LazyAdam(torch.optim.Optimizer):
    """torch.optim.Adam's formula for the rows of an embedding that have a gradient, with a step counter per row.

    Without the counter it is torch.optim.SparseAdam, which corrects a new row's bias as if it had been trained as often
    as the whole table.
    """

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                    state["step"] = torch.zeros(len(parameter), 1, dtype=torch.float64)
                gradient = parameter.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                state["step"][rows] += 1
                step = state["step"][rows]
                mean = state["mean"][rows].lerp(values, 1 - 0.9)
                square = state["square"][rows].mul(0.999).addcmul(values, values, value=1 - 0.999)
                state["mean"][rows], state["square"][rows] = mean, square
                rate = (group["lr"] / (1 - 0.9**step)).float()
                correction = (1 - 0.999**step).sqrt().float()
                parameter[rows] -= rate * mean / (square.sqrt() / correction + 1e-8)


@dataclass(frozen=True)
class Case:
    """A model and an optimizer, here and in torch; the learning rates are those that users take."""

    model: str
    optimizer: es.SGD | es.Adagrad | es.Adam
    of_rows: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    of_dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer]

    @property
    def name(self) -> str:
        return f"{self.model}, {type(self.optimizer).__name__}"

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        if self.model == "NeuMF":
            return NeuMF(ROWS)
        return DLRM(ROWS, FIELDS, 16, NUM_DENSE, bottom=(32,), hidden=(32, 16))


def cases() -> list[Case]:
    found = []
    for model in ("NeuMF", "DLRM"):
        found += [
            Case(
                model,
                es.SGD(lr=0.1),
                lambda rows: torch.optim.SGD(rows, lr=0.1),
                lambda dense: torch.optim.SGD(dense, lr=0.1),
            ),
            Case(
                model,
                es.Adagrad(lr=0.05, initial_accumulator=0.1),
                lambda rows: torch.optim.Adagrad(rows, lr=0.05, initial_accumulator_value=0.1),
                lambda dense: torch.optim.Adagrad(dense, lr=0.05, initial_accumulator_value=0.1),
            ),
            Case(
                model,
                es.Adam(lr=0.001),
                lambda rows: LazyAdam(rows, lr=0.001),
                lambda dense: torch.optim.Adam(dense, lr=0.001),
            ),
        ]
    return found


def batches(model: str) -> list[Batch]:
    rng = np.random.default_rng(0)
    fields = 2 if model == "NeuMF" else FIELDS
    data = []
    for _ in range(STEPS):
        ids = torch.from_numpy(rng.zipf(1.2, (BATCH, fields)) % ROWS)
        dense = torch.from_numpy(rng.normal(size=(BATCH, NUM_DENSE)).astype(np.float32))
        data.append((ids, dense, ((ids.sum(1) % 3 == 0) ^ (dense[:, 0] > 1)).float()))
    return data


def tables(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding | es.Embedding)]


def train(model: nn.Module, data: list[Batch], step: Callable[[], object]) -> float:
    for ids, dense, labels in data:
        loss = binary_cross_entropy_with_logits(model(ids, dense), labels)
        loss.backward()
        step()
    return loss.item()


def in_torch(case: Case) -> tuple[list[np.ndarray], tuple[float, float]]:
    model = case.build()
    rows = [module.weight for module in tables(model)]
    for module in tables(model):
        # whose zeros change nothing under SGD and Adagrad; torch's sparse SGD would round a row once per use of it
        module.sparse = isinstance(case.optimizer, es.Adam)
    dense = [parameter for parameter in model.parameters() if all(parameter is not row for row in rows)]
    optimizers = [case.of_rows(rows), case.of_dense(dense)]
    data = batches(case.model)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        first = binary_cross_entropy_with_logits(model(*data[0][:2]), data[0][2]).item()
    last = train(model, data, step)
    return [weight.detach().numpy() for weight in (*rows, *dense)], (first, last)


def work(addresses: str, rank: int, workers: int, out: Path) -> None:
    """One worker: every case, one after the other."""
    torch.set_num_threads(1)
    share = slice(rank * BATCH // workers, (rank + 1) * BATCH // workers)
    with es.connect(
        addresses,
        worker=rank,
        workers=workers,
        staleness=0,
        timeout=timedelta(seconds=60),
        wait_timeout=timedelta(minutes=2),
    ) as session:
        for number, case in enumerate(cases()):
            model = es.wrap(case.build(), session, optimizer=case.optimizer, prefix=f"{number}/")
            mine = [(ids[share], dense[share], labels[share]) for ids, dense, labels in batches(case.model)]
            train(model, mine, lambda: session.step(weight=BATCH / workers))
            with torch.no_grad():
                model(*mine[0][:2])  # brings the dense weights here
            if rank == 0:
                rows = [module.table.pull(torch.arange(ROWS)) for module in tables(model)]
                others = [weight for weight in model.parameters() if not isinstance(weight, RemoteWeight)]
                for position, weight in enumerate((*rows, *others)):
                    np.save(out / f"{number}-{position:02}.npy", weight.detach().numpy())


def on_shards(workers: int, folder: Path) -> list[list[np.ndarray]]:
    """The weights of every case, of fresh shards."""
    folder.mkdir()
    with LocalShards(SHARDS) as shards:
        addresses = ",".join(shards.addresses)
        started = [
            subprocess.Popen([sys.executable, __file__, "--rank", str(rank), "--workers", str(workers),
                              "--shards", addresses, "--out", str(folder)])
            for rank in range(workers)
        ]  # fmt: skip
        try:
            if any([process.wait(240) for process in started]):
                raise SystemExit("a worker failed; it says why above")
        finally:
            for process in started:
                process.kill()
                process.wait()
    return [[np.load(path) for path in sorted(folder.glob(f"{number}-*.npy"))] for number in range(len(cases()))]


def worst(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(float(np.abs(mine - other).max()) for mine, other in zip(ours, theirs, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    started = time.perf_counter()
    reference = [in_torch(case) for case in cases()]
    rows: list[list[object]] = []
    failures: list[str] = []
    figures: dict[str, dict[str, float]] = {case.name: {} for case in cases()}
    identical = True
    with tempfile.TemporaryDirectory() as folder:
        for workers in WORKERS:
            runs = [on_shards(workers, Path(folder) / f"{workers}-{run}") for run in range(RUNS)]
            for number, case in enumerate(cases()):
                same = all(
                    np.array_equal(a, b) for run in runs[1:] for a, b in zip(runs[0][number], run[number], strict=True)
                )
                weights, (first, last) = reference[number]
                difference = worst(runs[0][number], weights)
                figures[case.name][str(workers)] = difference
                identical &= same
                rows.append(
                    [case.name, workers, f"{difference:.1e}", "yes" if same else "NO", f"{first:.3f}", f"{last:.3f}"]
                )
                if not same:
                    failures.append(f"{case.name} with {workers} workers: two runs differ")
                if not difference <= TOLERANCE:
                    failures.append(f"{case.name} with {workers} workers: a weight differs by {difference:.2e}")
                if not last < first:
                    failures.append(f"{case.name}: nothing was learned, so that nothing was compared")
    print_table(["", "workers", "largest difference", "same bits twice", "first loss", "last loss"], rows)
    finish(
        {
            "bar": "sync", "steps": STEPS, "joint_batch": BATCH, "shards": SHARDS, "workers": WORKERS,
            "tolerance": TOLERANCE, "largest_difference": figures, "runs_bit_identical": identical,
            "seconds": time.perf_counter() - started,
        },
        failures,
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--shards")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.rank is None:
        main()
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        work(given.shards, given.rank, given.workers, given.out)
