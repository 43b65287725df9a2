"""Other people's models, driven by their own training loops, have the same loss curve wrapped as unwrapped.

DeepFM and DIN of deepctr-torch (BaseModel.fit), DCN-V2 and YoutubeDNN of torch-rechub (CTRTrainer, MatchTrainer): built
once, copied, the copy wrapped over two shard processes; `session` stands where their loops expect an optimizer. Every
step's loss is compared: with SGD to float rounding; with Adagrad and Adam, whose first steps blow a last bit up to a
whole step of lr, against torch itself, started from weights that differ in their last bit. Prints one JSON line; exits
1 below the bar.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import embershard as es
from embershard.deploy.supervisor import LocalShards

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
# deepctr-torch looks up its newest version when it is imported, and needs this package for nothing else
sys.modules["requests"] = types.ModuleType("requests")

from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat, get_feature_names  # noqa: E402
from deepctr_torch.models import DIN, DeepFM  # noqa: E402
from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature  # noqa: E402
from torch_rechub.models.matching import YoutubeDNN  # noqa: E402
from torch_rechub.models.ranking import DCNv2  # noqa: E402
from torch_rechub.trainers import CTRTrainer, MatchTrainer  # noqa: E402

STEPS, BATCH, USERS, ITEMS, LENGTH = 120, 128, 400, 900, 6
SAMPLES = STEPS * BATCH
TOLERANCE = 1e-6  # relative, of a step's loss: a few last bits of float32
PERTURBED_RUNS = 2
LARGEST = 0.01  # relative: not even the most sensitive model may be further off


class Recorded:
    """A loss function that keeps its values."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function, self.values = function, list[float]()

    def __call__(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        loss = self.function(*arguments, **keywords)
        self.values.append(loss.item())
        return loss


def columns() -> dict[str, np.ndarray]:
    """A made-up interaction log: users, items, histories that 0 fills up, prices, and clicks that depend on them."""
    rng = np.random.default_rng(0)
    user = rng.zipf(1.3, SAMPLES) % USERS
    item = 1 + rng.zipf(1.2, SAMPLES) % (ITEMS - 1)
    history = 1 + rng.zipf(1.2, (SAMPLES, LENGTH)) % (ITEMS - 1)
    length = rng.integers(1, LENGTH + 1, SAMPLES)
    history[np.arange(LENGTH) >= length[:, None]] = 0
    price = rng.normal(size=SAMPLES).astype(np.float32)
    taste = rng.normal(size=(USERS, 4)) @ rng.normal(size=(4, ITEMS))
    click = (taste[user, item] + price + rng.normal(size=SAMPLES) > 0).astype(np.float32)
    return {"user": user, "item": item, "hist_item": history, "length": length, "price": price, "click": click}


def deepctr_curve(model: Any, optimizer: Any, data: dict[str, np.ndarray]) -> list[float]:
    """Losses per step of deepctr's own fit."""
    loss = Recorded(nn.functional.binary_cross_entropy)
    model.compile(optimizer, loss)
    inputs = {name: data[name] for name in model.feature_index}
    model.fit(inputs, data["click"], batch_size=BATCH, shuffle=False, verbose=0)
    return [value / BATCH for value in loss.values]


def deepfm() -> nn.Module:
    features = [SparseFeat("user", USERS, 8), SparseFeat("item", ITEMS, 8), DenseFeat("price", 1)]
    # their L2 walks the tables' weights, which are on the shards; a table's own weight_decay is the way to say that
    model: nn.Module = DeepFM(features, features, dnn_hidden_units=(64, 32), l2_reg_linear=0, l2_reg_embedding=0)
    return model


def din() -> nn.Module:
    """Reads the item table for the candidate and for the history, with attention and Dice (batch norm) inside."""
    item = SparseFeat("item", ITEMS, 8, embedding_name="item")
    history = SparseFeat("hist_item", ITEMS, 8, embedding_name="item")
    features = [
        SparseFeat("user", USERS, 8), item, DenseFeat("price", 1),
        VarLenSparseFeat(history, maxlen=LENGTH, length_name="length"),
    ]  # fmt: skip
    assert "hist_item" in get_feature_names(features)
    model: nn.Module = DIN(features, ["item"], dnn_hidden_units=(64, 32), l2_reg_embedding=0)
    return model


class Loader:
    """Batches of columns, as torch-rechub's trainers take them."""

    def __init__(self, data: dict[str, np.ndarray], names: list[str], target: np.ndarray) -> None:
        self.inputs = {name: torch.from_numpy(data[name]) for name in names}
        self.target = torch.from_numpy(target)

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for start in range(0, SAMPLES, BATCH):
            part = slice(start, start + BATCH)
            yield {name: column[part] for name, column in self.inputs.items()}, self.target[part]


def rechub_curve(
    trainer: Callable[..., Any], model: nn.Module, optimizer: Any, loader: Loader, **mode: int
) -> list[float]:
    """Losses per step of torch-rechub's own epoch."""
    theirs = trainer(model, optimizer_fn=lambda parameters, **_: optimizer, model_path=tempfile.gettempdir(), **mode)
    theirs.criterion = Recorded(theirs.criterion)
    theirs.train_one_epoch(loader)
    values: list[float] = theirs.criterion.values
    return values


def dcn_v2_curve(model: nn.Module, optimizer: Any, data: dict[str, np.ndarray]) -> list[float]:
    return rechub_curve(CTRTrainer, model, optimizer, Loader(data, ["user", "item", "price"], data["click"]))


def dcn_v2() -> nn.Module:
    features = [SparseFeature("user", USERS, 8), SparseFeature("item", ITEMS, 8), DenseFeature("price")]
    model: nn.Module = DCNv2(features, n_cross_layers=2, mlp_params={"dims": [64, 32], "dropout": 0.0})
    return model


def youtube_curve(model: nn.Module, optimizer: Any, data: dict[str, np.ndarray]) -> list[float]:
    rng = np.random.default_rng(1)
    negatives = 1 + rng.integers(0, ITEMS - 1, (SAMPLES, 5))
    loader = Loader(
        {**data, "negatives": negatives}, ["user", "hist_item", "item", "negatives"], np.zeros(SAMPLES, np.int64)
    )
    return rechub_curve(MatchTrainer, model, optimizer, loader, mode=2)


def youtube_dnn() -> nn.Module:
    """One item table, read for the history (mean, padded), the clicked item, and five negatives."""
    user = [
        SparseFeature("user", USERS, 16),
        SequenceFeature("hist_item", ITEMS, 16, pooling="mean", shared_with="item", padding_idx=0),
    ]
    item = [SparseFeature("item", ITEMS, 16, padding_idx=0)]
    negatives = [SequenceFeature("negatives", ITEMS, 16, pooling="concat", shared_with="item", padding_idx=0)]
    model: nn.Module = YoutubeDNN(user, item, negatives, {"dims": [32, 16]}, temperature=0.1)
    return model


class Both(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.parts = (first, second)
        super().__init__([p for part in self.parts for group in part.param_groups for p in group["params"]], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


@dataclass(frozen=True)
class Pair:
    """One optimizer on both sides."""

    name: str
    ours: es.SGD | es.Adagrad
    theirs: Callable[[nn.Module], torch.optim.Optimizer]
    dense: es.Adam | None = None


def sgd(lr: float) -> Pair:
    return Pair("SGD", es.SGD(lr=lr), lambda model: torch.optim.SGD(model.parameters(), lr=lr))


def adagrad(lr: float) -> Pair:
    return Pair("Adagrad", es.Adagrad(lr=lr), lambda model: torch.optim.Adagrad(model.parameters(), lr=lr))


def adagrad_and_adam(lr: float, dense_lr: float) -> Pair:
    """Adagrad for the tables, Adam for the dense weights."""

    def theirs(model: nn.Module) -> torch.optim.Optimizer:
        tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
        held = {id(weight) for weight in tables}
        others = [parameter for parameter in model.parameters() if id(parameter) not in held]
        return Both(torch.optim.Adagrad(tables, lr=lr), torch.optim.Adam(others, lr=dense_lr))

    return Pair("Adagrad, Adam for dense weights", es.Adagrad(lr=lr), theirs, es.Adam(lr=dense_lr))


@dataclass(frozen=True)
class Case:
    """One model, its own training loop, and the optimizers to train it with."""

    name: str
    build: Callable[[], nn.Module]
    curve: Callable[[nn.Module, Any, dict[str, np.ndarray]], list[float]]
    pairs: tuple[Pair, ...]


CASES = (
    Case("deepctr-torch DeepFM", deepfm, deepctr_curve, (sgd(0.003), adagrad(0.02))),
    Case("deepctr-torch DIN", din, deepctr_curve, (sgd(0.01), adagrad(0.02))),
    Case("torch-rechub DCNv2", dcn_v2, dcn_v2_curve, (sgd(0.5), adagrad_and_adam(0.05, 0.001))),
    Case("torch-rechub YoutubeDNN", youtube_dnn, youtube_curve, (sgd(0.5), adagrad(0.05))),
)


def difference(curve: list[float], reference: list[float]) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(curve, reference, strict=True))


def perturbed(model: nn.Module) -> nn.Module:
    """A copy whose weights went one float32 up or down."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            towards = torch.where(torch.rand_like(parameter) < 0.5, -torch.inf, torch.inf)
            parameter.copy_(torch.nextafter(parameter, towards))
    return model


def compare(case: Case, pair: Pair, addresses: tuple[str, ...], data: dict[str, np.ndarray]) -> dict[str, object]:
    torch.manual_seed(0)
    start = case.build()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        in_torch = copy.deepcopy(start)
        theirs = case.curve(in_torch, pair.theirs(in_torch), data)
        noise = 0.0
        if pair.name != "SGD":
            for _ in range(PERTURBED_RUNS):
                model = perturbed(start)
                noise = max(noise, difference(case.curve(model, pair.theirs(model), data), theirs))
        with es.connect(addresses) as session:
            prefix = "".join(c if c.isalnum() else "-" for c in f"{case.name} {pair.name}") + "/"
            model = es.wrap(start, session, optimizer=pair.ours, dense_optimizer=pair.dense, prefix=prefix)
            ours = case.curve(model, session, data)
    worst = difference(ours, theirs)
    learned = float(np.mean(theirs[:10]) - np.mean(theirs[-10:]))
    return {
        "model": case.name,
        "optimizer": pair.name,
        "steps": len(ours),
        "worst_relative_difference": worst,
        "torch_against_itself_one_bit_off": noise or None,
        "first_loss": theirs[0],
        "last_loss_torch": theirs[-1],
        "last_loss_shards": ours[-1],
        "ok": len(ours) == STEPS and worst <= min(max(TOLERANCE, noise), LARGEST) and learned > 0.01,
    }


def main() -> int:
    torch.set_num_threads(1)
    data = columns()
    with LocalShards(2) as shards:
        results = [compare(case, pair, shards.addresses, data) for case in CASES for pair in case.pairs]
    passed = all(result["ok"] for result in results)
    print(json.dumps({"bar": "wrap", "passed": passed, "tolerance": TOLERANCE, "shards": 2, "models": results}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
