"""Train a job file of examples/ in plain torch and in one process: the control of bar_ctr.py.

Models, optimizers and the training loop are torch's and this file's own. embershard only reads the data and computes
the metrics. The recipe is the job file's: model, optimizers, batch, epochs, schedule, early stop, first values. An
asynchronous worker updates the weights once per batch of `train.batch_size`, and so does this loop: an epoch has the
same number of updates.

`--rows` says which rows of a table Adam moves and decays at a step: `all`, as torch.optim.Adam does and as in the
published runs, or those of the `batch`, each with a step count of its own, which is the rule of shards.

Prints each evaluation, and the best one by AUC as a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from torch import Tensor, nn
from torch.nn import functional

from embershard.worker.data.batch import Batch, RowsDataset
from embershard.worker.data.columns import Columns
from embershard.worker.data.readers.adult import Adult
from embershard.worker.data.readers.ctr_csv import CtrCsv
from embershard.worker.metrics import auc, logloss
from train_job import EXAMPLES

Section = Mapping[str, Any]  # of a job file


class LazyAdam(torch.optim.Optimizer):
    """Adam that moves and decays the rows with a gradient only; each row counts its own steps."""

    def __init__(
        self, tables: list[nn.Parameter], lr: float, weight_decay: float = 0.0, *, beta2: float = 0.999
    ) -> None:
        super().__init__(tables, {"lr": lr, "weight_decay": weight_decay, "beta2": beta2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the rows of the tables' sparse gradients."""
        for group in self.param_groups:
            for table in group["params"]:
                state = self.state[table]
                if not state:
                    state.update(mean=torch.zeros_like(table), square=torch.zeros_like(table))
                    state["step"] = torch.zeros(len(table), 1)
                found = table.grad.coalesce()
                rows = found.indices()[0]
                gradient = found.values() + group["weight_decay"] * table[rows]
                state["step"][rows] += 1
                state["mean"][rows] = 0.9 * state["mean"][rows] + 0.1 * gradient
                beta2 = group["beta2"]
                state["square"][rows] = beta2 * state["square"][rows] + (1 - beta2) * gradient.square()
                mean = state["mean"][rows] / (1 - 0.9 ** state["step"][rows])
                square = state["square"][rows] / (1 - beta2 ** state["step"][rows])
                table[rows] -= group["lr"] * mean / (square.sqrt() + 1e-8)


class Control(nn.Module):
    """The model of a job file, written from its paper; ids are unique across the fields."""

    def __init__(self, job: Section, num_ids: int, num_fields: int, num_dense: int) -> None:
        super().__init__()
        self.settings: Section = job["model"]
        self.name: str = self.settings["name"]
        dim = job["embedding"].get("dim", 1)
        width = num_fields * dim
        if self.name in ("lr", "fm", "wide_deep", "deepfm"):
            self.linear = nn.Embedding(num_ids, 1)
            self.bias = nn.Parameter(torch.zeros(1))
        if self.name != "lr":
            self.embedding = nn.Embedding(num_ids, dim)
        if "hidden" in self.settings:
            widths = [width, *self.settings["hidden"]]
            self.mlp = nn.Sequential(*[self._block(*pair) for pair in pairwise(widths)])
            self.output = nn.Linear(widths[-1] + (width if self.name == "dcn_v2" else 0), 1)
        if self.name == "dcn_v2":
            self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(self.settings["cross_layers"]))
        if self.name == "persia_dnn":
            self.sparse = nn.Sequential(nn.Linear(width, 128), nn.BatchNorm1d(128))
            self.dense = nn.Sequential(nn.Linear(num_dense, 16), nn.BatchNorm1d(16))
            self.output = nn.Sequential(nn.Linear(144, 256), nn.Linear(256, 128), nn.Linear(128, 1))

    def _block(self, width_in: int, width_out: int) -> nn.Module:
        norm = nn.BatchNorm1d(width_out) if self.settings["batch_norm"] else nn.Identity()
        return nn.Sequential(nn.Linear(width_in, width_out), norm, nn.ReLU(), nn.Dropout(self.settings["dropout"]))

    def forward(self, ids: Tensor, dense: Tensor | None = None) -> Tensor:
        """Logits (B,) of ids (B, F) and dense (B, D)."""
        if self.name in ("lr", "fm", "wide_deep", "deepfm"):
            return self.linear(ids).sum((1, 2)) + self.bias + self._second(ids)
        flat = self.embedding(ids).flatten(1)
        if self.name == "dlrm":  # with the interaction `cat` the top MLP reads the vectors themselves
            last = self.mlp(flat)
        elif self.name == "dcn_v2":
            last = torch.cat([self._crossed(flat), self.mlp(flat)], 1)
        else:
            last = torch.cat([self.sparse(flat), self.dense(dense)], 1)
        logits: Tensor = self.output(last)
        return logits.squeeze(1)

    def _second(self, ids: Tensor) -> Tensor | float:
        """What FM, Wide&Deep and DeepFM add to their linear part."""
        if self.name == "lr":
            return 0.0
        rows = self.embedding(ids)  # (B, F, dim)
        deep: Tensor | float = 0.0
        if self.name != "fm":
            deep = self.output(self.mlp(rows.flatten(1))).squeeze(1)
        if self.name == "wide_deep":
            return deep
        products = torch.bmm(rows, rows.transpose(1, 2))  # (B, F, F), the pairs of equation 1 in Rendle 2010
        return deep + products.triu(diagonal=1).sum((1, 2))

    def _crossed(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.cross:
            x = x0 * layer(x) + x
        return x


def train(job: Section, splits: Mapping[str, Batch], seed: int, rows_moved: str = "all") -> dict[str, Any]:
    """Train on the split `train`; figures of the best epoch by AUC on the last split."""
    recipe, rows = job["train"], splits["train"]
    held_out = list(splits.values())[-1]
    num_ids = 1 + max(int(part.ids.max()) for part in splits.values())
    torch.manual_seed(seed)
    model = Control(job, num_ids, rows.ids.shape[1], 0 if rows.dense is None else rows.dense.shape[1])
    optimizers = _optimizers(job, model, rows_moved)
    schedulers = [_plateau(recipe["lr_schedule"], one) for one in optimizers if "lr_schedule" in recipe]
    best: dict[str, Any] = {"auc": 0.0}
    worse, began = 0, time.perf_counter()
    for epoch in range(1, recipe.get("epochs", 1) + 1):
        order = torch.randperm(len(rows)) if job["data"].get("shuffle", True) else torch.arange(len(rows))
        for part in order.split(recipe["batch_size"])[: recipe.get("steps")]:
            loss = functional.binary_cross_entropy_with_logits(_logits(model, rows, part), rows.labels[part])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        figures = evaluate(model, held_out)
        seconds = time.perf_counter() - began
        print(f"{seconds:4.0f} s  epoch {epoch}  {figures}", flush=True)
        worse = 0 if figures["auc"] > best["auc"] else worse + 1
        if not worse:
            best = {**figures, "best_epoch": epoch}
        for scheduler in schedulers:
            scheduler.step(figures["auc"])
        if "early_stop" in recipe and worse >= recipe["early_stop"]["patience"]:
            break
    return {**best, "epochs": epoch, "seconds": seconds}


def evaluate(model: nn.Module, rows: Batch) -> dict[str, float]:
    """AUC and logloss of a split."""
    model.eval()
    with torch.no_grad():
        logits = torch.cat([_logits(model, rows, part) for part in torch.arange(len(rows)).split(8192)]).numpy()
    model.train()
    labels = rows.labels.numpy()
    return {"auc": auc(labels, logits), "logloss": logloss(labels, logits)}


def _logits(model: nn.Module, rows: Batch, part: Tensor) -> Tensor:
    logits: Tensor = model(rows.ids[part], None if rows.dense is None else rows.dense[part])
    return logits


def _optimizers(job: Section, model: nn.Module, rows_moved: str) -> list[torch.optim.Optimizer]:
    """Those of the tables, which get their first values, and of the other weights."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    initializer = job["embedding"]["initializer"]
    for weight in tables:
        if initializer["name"] == "normal":
            nn.init.normal_(weight, std=initializer["std"])
        else:
            nn.init.uniform_(weight, initializer["low"], initializer["high"])
    others = [p for p in model.parameters() if all(p is not weight for weight in tables)]
    settings = job["embedding"]["optimizer"]
    dense = _optimizer(job.get("dense", job["embedding"])["optimizer"], others)
    if rows_moved == "all" or settings["name"] != "adam":
        return [_optimizer(settings, tables), dense]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True
    return [LazyAdam(tables, settings["lr"], settings.get("weight_decay", 0.0)), dense]


def _optimizer(section: Section, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    names = {"initial_accumulator": "initial_accumulator_value"}
    settings = {names.get(key, key): value for key, value in section.items() if key != "name"}
    return kinds[section["name"]](parameters, **settings)


def _plateau(section: Section, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    # a job counts the evaluations in a row that were no better, torch those that it lets pass
    lets_pass = section.get("patience", 1) - 1
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", section["factor"], lets_pass, threshold=0.0)


def read(job: Section, data: Path) -> dict[str, Batch]:
    """The job's splits, each as one batch in file order."""
    section = job["data"]
    files = {name: data / section[name] for name in ("train", "valid", "test") if name in section}
    adult = section["reader"] == "adult"
    dataset: RowsDataset = Adult(**files) if adult else CtrCsv(files, Columns(ids="global"))
    return {name: next(dataset.evaluate(name, 0, 1, dataset.num_samples(name) or 1)) for name in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", help="a job file of examples/, without .yaml")
    parser.add_argument("--seed", type=int, help="instead of the job file's")
    parser.add_argument("--rows", choices=("all", "batch"), default="all", help="those that Adam moves and decays")
    parser.add_argument("--hidden", type=int, nargs="+", help="widths of the MLP, instead of the job file's")
    parser.add_argument("--output", type=Path, help="a file for the JSON line")
    args = parser.parse_args()
    path = EXAMPLES / f"{args.example}.yaml"
    job = YAML(typ="safe").load(path)
    data = Path(os.environ.get("EMBERSHARD_DATA", path.parent / job["data"]["root"]))
    if args.hidden:
        job["model"]["hidden"] = args.hidden
    found = train(job, read(job, data), job["train"]["seed"] if args.seed is None else args.seed, args.rows)
    print(json.dumps(found))
    if args.output is not None:
        args.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
