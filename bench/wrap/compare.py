"""One model in its own training loop, with plain torch and wrapped over the shards, compared step by step."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

import embershard as es
from embershard.worker.nn.remote_weight import RemoteWeight

WHOLE_TOLERANCE = 1e-6  # relative, with SGD, of a model that reads a table as a whole; of others: not a bit
ROUNDING = 1e-6  # relative, of a loss with an adaptive optimizer: a few last bits of float32
PERTURBED_RUNS = (2, 20)  # of torch with first weights one bit off: the least, and the most where ours is further off
LARGEST = 0.02  # relative, of a loss: not even the most sensitive model may be further off

Kind = Literal["SGD", "Adagrad", "Adam"]
KINDS: tuple[Kind, ...] = ("SGD", "Adagrad", "Adam")


class Recorded:
    """A loss function that keeps its values."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function, self.values = function, list[float]()

    def __call__(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        loss = self.function(*arguments, **keywords)
        self.values.append(loss.item())
        return loss


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and its own training loop."""

    package: str  # as it is installed
    name: str
    build: Callable[[], nn.Module]
    train: Callable[[Any, Any], list[float]]  # a model with an optimizer or a session; the loss of each step
    sgd: float  # learning rates
    adagrad: float
    adam: float = 0.001
    reads_whole: bool = False  # whether a table is read as a whole, by a layer or a regulariser
    scores: Callable[[Any], torch.Tensor] | None = None  # of the trained model


@dataclass(frozen=True)
class Run:
    """What a training loop left."""

    losses: list[float]  # of each step
    weights: dict[str, torch.Tensor]  # and buffers, and scores of an evaluation, at the end

    def of_losses(self, reference: Run) -> float:
        """The largest relative difference of a step's loss."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, reference.losses, strict=True))

    def of_all(self, reference: Run) -> float:
        """The largest relative difference: of a step's loss, and of a weight to the largest of its tensor."""
        if self.weights.keys() != reference.weights.keys():
            raise ValueError(f"other weights: {sorted(self.weights.keys() ^ reference.weights.keys())}")
        largest = self.of_losses(reference)
        for name, weight in reference.weights.items():
            if weight.numel():
                difference = (self.weights[name].double() - weight.double()).abs().max()
                largest = max(largest, float(difference / weight.double().abs().max().clamp(min=1e-30)))
        return largest


class Several(torch.optim.Optimizer):
    """Several optimizers as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([p for part in self.parts for group in part.param_groups for p in group["params"]], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]  # schedulers change their lr

    def load_state_dict(self, state_dict: Any) -> None:
        """Keep the groups, of which torch would make others than those of the parts; accelerate loads what it saved."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss


def in_torch(case: Case, kind: Kind, model: nn.Module, whole: frozenset[str]) -> torch.optim.Optimizer:
    """Torch's optimizer.

    "Adam" is Adam for dense weights and for the tables in `whole`, which are read as a whole, and Adagrad for the
    others: torch's Adam moves rows that a batch did not read, and a shard's does not.
    """
    if kind == "SGD":
        return torch.optim.SGD(model.parameters(), lr=case.sgd)
    if kind == "Adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=case.adagrad)
    by_rows = [module.weight for name, module in model.named_modules() if is_table(module) and name not in whole]
    held = {id(weight) for weight in by_rows}
    others = [parameter for parameter in model.parameters() if id(parameter) not in held]
    parts = ((torch.optim.Adagrad, by_rows, case.adagrad), (torch.optim.Adam, others, case.adam))
    return Several([make(parameters, lr=lr) for make, parameters, lr in parts if parameters])


def on_shards(case: Case, kind: Kind, whole: frozenset[str]) -> dict[str, Any]:
    """The arguments of wrap for the same optimizer."""
    if kind == "SGD":
        return {"optimizer": es.SGD(lr=case.sgd)}
    if kind == "Adagrad":
        return {"optimizer": es.Adagrad(lr=case.adagrad)}
    adam = es.Adam(lr=case.adam)
    return {"optimizer": {**dict.fromkeys(whole, adam), "*": es.Adagrad(lr=case.adagrad)}, "dense_optimizer": adam}


def is_table(module: nn.Module) -> bool:
    """Whether wrap moves a module's weight as a table."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def perturbed(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose weights went one float32 up or down."""
    model, draw = copy.deepcopy(model), torch.Generator(torch.get_default_device()).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            towards = torch.where(torch.rand(parameter.shape, generator=draw) < 0.5, -torch.inf, torch.inf)
            parameter.copy_(torch.nextafter(parameter, towards))
    return model


def run(case: Case, model: nn.Module, optimizer: Any) -> Run:
    """Train from the same random numbers, which dropout and samplers take."""
    seed(1)
    losses = case.train(model, optimizer)
    with torch.no_grad():
        weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
        if case.scores is not None:
            weights["scores"] = case.scores(model)
    return Run(losses, weights)


def run_in_torch(case: Case, kind: Kind, model: nn.Module, whole: frozenset[str]) -> Run:
    return run(case, model, in_torch(case, kind, model, whole))


def run_on_shards(
    case: Case, kind: Kind, model: nn.Module, whole: frozenset[str], addresses: tuple[str, ...]
) -> tuple[Run, frozenset[str]]:
    """What it left, and the modules whose tables the loop read as a whole."""
    prefix = "".join(c if c.isalnum() else "-" for c in f"{case.package} {case.name} {kind}") + "/"
    read: set[str] = set()

    def train(model: nn.Module, session: es.Session) -> list[float]:
        losses = case.train(model, session)
        weights = {name: p for name, p in model.named_parameters() if isinstance(p, RemoteWeight)}
        read.update(name.removesuffix(".weight") for name, weight in weights.items() if weight.in_use)
        return losses

    with es.connect(addresses) as session:
        wrapped = es.wrap(model, session, prefix=prefix, **on_shards(case, kind, whole))
        return run(replace(case, train=train), wrapped, session), frozenset(read)


def compare(case: Case, addresses: tuple[str, ...], *, exact: bool = True) -> list[dict[str, Any]]:
    """One result per optimizer; `exact`: SGD must have torch's bits, or those within a rounding."""
    whole: frozenset[str] = frozenset()
    results = []
    with quiet():
        seed(0)
        start = case.build()
        for kind in KINDS:
            if kind == "Adam" and not whole and all(is_table(m) or not m._parameters for m in start.modules()):
                continue  # no weights for Adam
            theirs = run_in_torch(case, kind, copy.deepcopy(start), whole)
            ours, read = run_on_shards(case, kind, copy.deepcopy(start), whole, addresses)
            worst = ours.of_all(theirs) if kind == "SGD" and exact else ours.of_losses(theirs)
            result = {
                "package": case.package, "version": version(case.package), "model": case.name, "optimizer": kind,
                "steps": len(theirs.losses), "read_as_a_whole": sorted(read), "worst_relative_difference": worst,
                "first_losses": float(np.mean(theirs.losses[:10])), "last_losses": float(np.mean(theirs.losses[-10:])),
            }  # fmt: skip
            if kind == "SGD":
                whole = read
            if kind == "SGD" and exact:
                limit = WHOLE_TOLERANCE if case.reads_whole else 0.0
            else:
                spread, runs = spread_of_torch(case, kind, start, whole, theirs, worst)
                result |= {"torch_one_bit_off": spread, "runs_of_torch_one_bit_off": runs}
                limit = min(max(spread, ROUNDING), LARGEST)
            learned = result["last_losses"] < result["first_losses"]
            ok = worst <= limit and learned and bool(read) == case.reads_whole
            results.append({**result, "limit": limit, "ok": ok})
    return results


def spread_of_torch(
    case: Case, kind: Kind, start: nn.Module, whole: frozenset[str], theirs: Run, worst: float
) -> tuple[float, int]:
    """How far torch is from itself, and the number of runs that say so."""
    least, most = PERTURBED_RUNS
    spread = 0.0
    for number in range(1, most + 1):
        other = run_in_torch(case, kind, perturbed(start, number), whole)
        spread = max(spread, other.of_losses(theirs))
        if number >= least and worst <= max(spread, ROUNDING):
            break
    return spread, number


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what packages print off the screen, and what they write in a folder that goes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield
