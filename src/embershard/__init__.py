"""embershard: a sharded parameter server for recommender models in PyTorch.

Names are imported when they are first used, so that a shard's process never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embershard import errors as errors
    from embershard.local_shards import local as local
    from embershard.proto.codec.user_defined import values_codec as values_codec
    from embershard.proto.errors import EmbershardError as EmbershardError
    from embershard.proto.spec import FTRL as FTRL
    from embershard.proto.spec import SGD as SGD
    from embershard.proto.spec import Adagrad as Adagrad
    from embershard.proto.spec import Adam as Adam
    from embershard.proto.spec import AdamW as AdamW
    from embershard.proto.spec import Constant as Constant
    from embershard.proto.spec import Custom as Custom
    from embershard.proto.spec import Normal as Normal
    from embershard.proto.spec import RMSprop as RMSprop
    from embershard.proto.spec import RowWiseAdagrad as RowWiseAdagrad
    from embershard.proto.spec import TableSpec as TableSpec
    from embershard.proto.spec import Uniform as Uniform
    from embershard.ps.table.optimizers import row_optimizer as row_optimizer
    from embershard.worker.checkpoint.snapshots import begin_snapshot as begin_snapshot
    from embershard.worker.checkpoint.snapshots import open_snapshot as open_snapshot
    from embershard.worker.checkpoint.snapshots import restore_snapshot as restore_snapshot
    from embershard.worker.checkpoint.snapshots import take_snapshot as take_snapshot
    from embershard.worker.client.client import Client as Client
    from embershard.worker.compression.settings import Compression as Compression
    from embershard.worker.data.splits import SplitSampler as SplitSampler
    from embershard.worker.memory import keep_freed_memory as keep_freed_memory
    from embershard.worker.nn.activations import checkpoint_activations as checkpoint_activations
    from embershard.worker.nn.averaging import WeightAverage as WeightAverage
    from embershard.worker.nn.compile import compile_dense as compile_dense
    from embershard.worker.nn.embedding import Embedding as Embedding
    from embershard.worker.nn.embedding import EmbeddingBag as EmbeddingBag
    from embershard.worker.nn.onednn import use_onednn as use_onednn
    from embershard.worker.nn.optimizer import ShardOptimizer as ShardOptimizer
    from embershard.worker.nn.wrap import wrap as wrap
    from embershard.worker.session.session import Session as Session
    from embershard.worker.session.session import connect as connect

_HOME = {
    "embershard.local_shards": ("local",),
    "embershard.proto.codec.user_defined": ("values_codec",),
    "embershard.proto.errors": ("EmbershardError",),
    "embershard.proto.spec": (
        "SGD",
        "Adagrad",
        "RowWiseAdagrad",
        "Adam",
        "AdamW",
        "FTRL",
        "RMSprop",
        "Custom",
        "Constant",
        "Normal",
        "Uniform",
        "TableSpec",
    ),
    "embershard.ps.table.optimizers": ("row_optimizer",),
    "embershard.worker.nn.activations": ("checkpoint_activations",),
    "embershard.worker.nn.averaging": ("WeightAverage",),
    "embershard.worker.client.client": ("Client",),
    "embershard.worker.nn.compile": ("compile_dense",),
    "embershard.worker.compression.settings": ("Compression",),
    "embershard.worker.data.splits": ("SplitSampler",),
    "embershard.worker.nn.embedding": ("Embedding", "EmbeddingBag"),
    "embershard.worker.memory": ("keep_freed_memory",),
    "embershard.worker.nn.onednn": ("use_onednn",),
    "embershard.worker.nn.optimizer": ("ShardOptimizer",),
    "embershard.worker.session.session": ("Session", "connect"),
    "embershard.worker.checkpoint.snapshots": ("begin_snapshot", "open_snapshot", "restore_snapshot", "take_snapshot"),
    "embershard.worker.nn.wrap": ("wrap",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [  # noqa: RUF022  # in the order of use
    "connect",
    "local",
    "wrap",
    "Session",
    "Compression",
    "SplitSampler",
    "ShardOptimizer",
    "Client",
    "Embedding",
    "EmbeddingBag",
    "TableSpec",
    "SGD",
    "Adagrad",
    "RowWiseAdagrad",
    "Adam",
    "AdamW",
    "FTRL",
    "RMSprop",
    "Custom",
    "row_optimizer",
    "values_codec",
    "Constant",
    "Normal",
    "Uniform",
    "take_snapshot",
    "begin_snapshot",
    "restore_snapshot",
    "open_snapshot",
    "WeightAverage",
    "checkpoint_activations",
    "compile_dense",
    "keep_freed_memory",
    "use_onednn",
    "EmbershardError",
    "errors",
]


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("embershard.errors")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'embershard' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
