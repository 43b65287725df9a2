"""Train the job of examples/sasrec.yaml in plain torch and in one process: the control of bar_models.py.

Model, optimizers and the loop are torch's and this file's own: every history is padded to its whole length, attention
is nn.MultiheadAttention with a causal mask, and a step moves the rows of its batch, as shards do (LazyAdam of
torch_control.py). embershard only reads the data and computes the metrics. An epoch has as many updates as that of
asynchronous workers.

Prints each evaluation, and the one that is best on valid as a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from torch import Tensor, nn
from torch.nn import functional

from embershard.worker.data.interactions.sequences import ActionSequences
from embershard.worker.metrics import Candidates
from torch_control import LazyAdam
from train_job import EXAMPLES


class PlainSASRec(nn.Module):
    """Pre-norm SASRec over histories that are padded on the left."""

    def __init__(self, num_items: int, dim: int, length: int, blocks: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, dim, sparse=True)
        self.positions = nn.Parameter(nn.init.xavier_normal_(torch.empty(length, dim)))
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(dim, heads, dropout, batch_first=True) for _ in range(blocks)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-8) for _ in range(2 * blocks + 1))
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2 * blocks))
        for parameter in (*self.attention.parameters(), *self.layers.parameters()):
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)
        self.dropout = nn.Dropout(dropout)

    def forward(self, history: Tensor) -> Tensor:
        """States (B, L, dim) of histories (B, L), -1 on the left where they are shorter."""
        length = history.shape[1]
        known = (history >= 0).unsqueeze(2)
        x = self.items(history.clamp(min=0)) * self.items.embedding_dim**0.5 + self.positions
        x = self.dropout(x) * known
        # a padded place sees itself, so that no row of the mask is empty; nobody else sees it
        hidden = (history < 0).unsqueeze(1) & ~torch.eye(length, dtype=torch.bool)
        mask = (hidden | torch.ones(length, length).triu(1).bool()).repeat_interleave(self.attention[0].num_heads, 0)
        for i, attention in enumerate(self.attention):
            normed = self.norms[2 * i](x)
            x = x + attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
            hidden_layer, output = self.layers[2 * i], self.layers[2 * i + 1]
            inner = self.dropout(hidden_layer(self.norms[2 * i + 1](x))).relu()
            x = (x + self.dropout(output(inner))) * known
        states: Tensor = self.norms[-1](x)
        return states


def right_aligned(history: Tensor) -> Tensor:
    """Histories (B, L) that are filled from the left, moved to the right."""
    length = history.shape[1]
    counts = (history >= 0).sum(1, keepdim=True)
    place = torch.arange(length) - (length - counts)
    return torch.where(place >= 0, history.gather(1, place.clamp(min=0)), -1)


def evaluate(model: PlainSASRec, data: ActionSequences, split: str) -> dict[str, float]:
    """Figures of a split."""
    found, length = Candidates(10), len(model.positions)
    model.eval()
    with torch.no_grad():
        for batch in data.evaluate(split, 0, 1, 16_384):
            states = model(right_aligned(batch.ids[:, :length]))[:, -1]
            found.update((model.items(batch.ids[:, length:]) * states.unsqueeze(1)).sum(2), batch.labels)
    model.train()
    return found.compute()


def train(job: Mapping[str, Any], path: Path, seed: int, epochs: int) -> dict[str, Any]:
    """Train; figures on test of the epoch that is best on valid."""
    torch.manual_seed(seed)
    section, recipe, every = job["model"], job["train"], job["evaluate"]["every"]
    data = ActionSequences.read(path, max_length=job["data"]["max_length"], seed=seed)
    length = job["data"]["max_length"]
    dim = job["embedding"]["dim"]
    model = PlainSASRec(data.num_items, dim, length, section["blocks"], section["heads"], section["dropout"])
    nn.init.normal_(model.items.weight, std=0.01)
    settings = job["embedding"]["optimizer"]
    others = [parameter for parameter in model.parameters() if parameter is not model.items.weight]
    optimizers = [
        LazyAdam([model.items.weight], settings["lr"], beta2=settings["beta2"]),
        torch.optim.Adam(others, settings["lr"], (0.9, settings["beta2"])),
    ]
    best: dict[str, Any] = {}
    began = time.perf_counter()
    for epoch in range(1, epochs + 1):
        for batch in data.train(epoch - 1, 0, 1, recipe["batch_size"]):
            history, lists = batch.ids[:, :length], batch.ids[:, length:].view(len(batch), length, 2)
            states = model(right_aligned(history))
            known, own = right_aligned(lists[:, :, 0]) >= 0, right_aligned(lists[:, :, 0])
            other = right_aligned(lists[:, :, 1])
            positive, negative = ((model.items(ids[known]) * states[known]).sum(1) for ids in (own, other))
            loss = functional.softplus(-positive).mean() + functional.softplus(negative).mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        if epoch % every == 0:
            figures = {split: evaluate(model, data, split) for split in data.splits}
            print(f"{time.perf_counter() - began:4.0f} s  epoch {epoch}  {figures}", flush=True)
            if not best or figures["valid"]["ndcg@10"] > best["valid"]["ndcg@10"]:
                best = {**figures, "best_epoch": epoch}
    return {**best, "epochs": epochs, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="instead of the job file's")
    parser.add_argument("--output", type=Path, help="a file for the JSON line")
    args = parser.parse_args()
    path = EXAMPLES / "sasrec.yaml"
    job = YAML(typ="safe").load(path)
    root = Path(os.environ.get("EMBERSHARD_DATA", path.parent / job["data"]["root"]))
    torch.set_num_threads(1)
    found = train(job, root / job["data"]["actions"], args.seed, args.epochs or job["train"]["epochs"])
    print(json.dumps(found))
    if args.output is not None:
        args.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
