"""torch.compile for what a model does with its rows; reading them stays outside of the graph."""

from __future__ import annotations

import importlib.util
import os
import shutil
from itertools import chain

import torch
from torch import nn

from embershard.proto.errors import JobError
from embershard.worker.nn.activations import TABLES
from embershard.worker.nn.embedding import Embedding, EmbeddingBag


def compile_dense(model: nn.Module) -> None:
    """Compile the dense part of a wrapped model with torch.compile, in place; it compiles at the first batches.

    Embeddings stay uncompiled, because torch.compile cannot trace the pull of rows. JobError if this machine has no
    compiler for the device of the model.
    """
    devices = (tensor.device for tensor in chain(model.parameters(), model.buffers()))
    tables = (module.device for module in model.modules() if isinstance(module, Embedding | EmbeddingBag))
    missing = _missing(next(chain(devices, tables)))
    if missing is not None:
        raise JobError(where="train.compile", reason=missing)
    for module in model.modules():
        if isinstance(module, TABLES):
            setattr(module, "forward", torch.compiler.disable(module.forward))  # type: ignore[no-untyped-call]  # noqa: B010
    model.forward = torch.compile(model.forward)


def _missing(device: torch.device) -> str | None:
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "torch.compile needs triton on a GPU: install it, or set train.compile to false"
        if "CC" in os.environ or shutil.which("gcc") or shutil.which("clang"):
            return None
        return "triton needs a C compiler, and this machine has none: install gcc, or set train.compile to false"
    from torch._inductor import config  # what it will call itself; takes a moment to load

    names = [name for name in config.cpp.cxx if name]
    if any(shutil.which(name) for name in (*names, "c++", "clang++")):
        return None
    return (
        f"torch.compile needs a C++ compiler, and this machine has none ({', '.join(names)}): install g++, or set "
        "train.compile to false"
    )
