"""Models of RecBole, trained by its Trainer, which calls calculate_loss and not forward, with RecBole's defaults."""

from __future__ import annotations

import copy
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import dok_matrix
from torch import nn

# names that numpy 2 no longer has, and that RecBole reads
for removed, name in {"float_": "float64", "complex_": "complex128", "unicode_": "str_"}.items():
    setattr(np, removed, getattr(np, name))
dok_matrix._update = lambda matrix, data: matrix._dict.update(data)  # and one of scipy's, likewise

from recbole.config import Config  # noqa: E402
from recbole.data import create_dataset, data_preparation  # noqa: E402
from recbole.utils import get_model, get_trainer, init_seed  # noqa: E402

import embershard as es  # noqa: E402
from wrap.compare import Case, Recorded  # noqa: E402
from wrap.log import BATCH, COLUMNS, LENGTH  # noqa: E402

DATA = tempfile.TemporaryDirectory()


@functools.cache
def data_path() -> str:
    """A folder with the log as one of RecBole's atomic files."""
    folder = Path(DATA.name, "clicks")
    folder.mkdir()
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    seen = set()
    rows = zip(COLUMNS["user"], COLUMNS["item"], COLUMNS["click"], strict=True)
    for number, (user, item, click) in enumerate(rows):
        if (user, item) not in seen:
            lines.append(f"{user}\t{item}\t{click}\t{number}")
        seen.add((user, item))
    (folder / "clicks.inter").write_text("\n".join(lines) + "\n")
    return DATA.name


@functools.cache
def prepared(name: str) -> tuple[Config, Any]:
    """The settings of a model, its own where they are not of the data, and the data set."""
    settings = {
        "data_path": data_path(), "checkpoint_dir": DATA.name, "use_gpu": False, "state": "ERROR",
        "show_progress": False, "epochs": 1, "train_batch_size": BATCH, "MAX_ITEM_LIST_LENGTH": LENGTH,
        **SETTINGS.get(name, {}),
    }  # fmt: skip
    arguments, sys.argv = sys.argv, sys.argv[:1]  # which Config reads
    try:
        config = Config(model=name, dataset="clicks", config_dict=settings)
    finally:
        sys.argv = arguments
    init_seed(config["seed"], config["reproducibility"])
    return config, create_dataset(config)


CLICKS = {
    "load_col": {"inter": ["user_id", "item_id", "rating"]}, "LABEL_FIELD": "rating", "train_neg_sample_args": None,
    "eval_args": {"mode": "labeled", "split": {"RS": [0.8, 0.1, 0.1]}}, "metrics": ["AUC"], "valid_metric": "AUC",
}  # fmt: skip
SOFTMAX = {"load_col": {"inter": ["user_id", "item_id", "timestamp"]}, "train_neg_sample_args": None}
SETTINGS: dict[str, dict[str, Any]] = {"DeepFM": CLICKS, "SASRec": SOFTMAX, "GRU4Rec": SOFTMAX}


def build(name: str) -> nn.Module:
    config, dataset = prepared(name)
    train_data, _, _ = data_preparation(config, copy.deepcopy(dataset))
    init_seed(config["seed"], config["reproducibility"])
    model: nn.Module = get_model(name)(config, train_data.dataset)
    return model


def train(name: str, model: nn.Module, optimizer: Any) -> list[float]:
    config, dataset = prepared(name)
    init_seed(config["seed"], config["reproducibility"])
    train_data, _, _ = data_preparation(config, copy.deepcopy(dataset))
    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    trainer.optimizer = es.ShardOptimizer(optimizer) if isinstance(optimizer, es.Session) else optimizer
    loss = Recorded(model.calculate_loss)
    model.calculate_loss = loss
    try:
        trainer.fit(train_data, saved=False, verbose=False)
    finally:
        del model.calculate_loss
    return loss.values


def scores(name: str, model: Any) -> torch.Tensor:
    """Over all items for a batch of the test data, or, of a model without that, for a batch of the training data."""
    config, dataset = prepared(name)
    init_seed(config["seed"], config["reproducibility"])
    train_data, _, test_data = data_preparation(config, copy.deepcopy(dataset))
    model.eval()
    try:
        result: torch.Tensor = model.full_sort_predict(next(iter(test_data))[0])
    except NotImplementedError:
        result = model.predict(next(iter(train_data)))
    return result


def case(name: str, *, sgd: float, adagrad: float, reads_whole: bool = False) -> Case:
    return Case(
        package="recbole", name=name, build=functools.partial(build, name), train=functools.partial(train, name),
        scores=functools.partial(scores, name),
        sgd=sgd, adagrad=adagrad, reads_whole=reads_whole,
    )  # fmt: skip


CASES = (
    case("BPR", sgd=20.0, adagrad=0.05),
    case("NeuMF", sgd=5.0, adagrad=0.05),
    case("DeepFM", sgd=0.5, adagrad=0.01),
    case("LightGCN", sgd=0.5, adagrad=0.05, reads_whole=True),
    case("SASRec", sgd=0.1, adagrad=0.02, reads_whole=True),
    case("GRU4Rec", sgd=0.1, adagrad=0.02, reads_whole=True),
)
