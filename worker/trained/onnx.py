"""The dense part of a model as ONNX: what follows once the rows of a batch are looked up.

Inputs: `index` (B, F) int64, the positions of a batch's ids among the rows given; `dense` (B, D) float32, for a model
with dense features; and for each table NAME.rows (U, dim) float32. Output: `logits` (B,) float32. With
index = arange(B * F).view(B, F) the rows are simply those of each sample, one behind the other.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from embershard.proto.errors import EmbershardError, Status
from embershard.worker.data.batch import Schema
from embershard.worker.job.job import Job
from embershard.worker.trained.export import CannotExport

FILE = "dense.onnx"
_NEEDS = ("onnx", "onnxscript")


class ExportNotInstalled(EmbershardError):
    """A package that the ONNX export needs is not installed."""

    status = Status.FAILED_PRECONDITION
    template = "--onnx needs {packages}: pip install 'embershard[export]'"


class DensePart(nn.Module):
    """A model whose tables are inputs."""

    def __init__(self, model: nn.Module, tables: list[str]) -> None:
        super().__init__()
        self.model = model
        self.tables = tables

    def forward(self, index: Tensor, dense: Tensor | None, rows: list[Tensor]) -> Tensor:
        """Logits (B,) of positions (B, F), dense features (B, D) and each table's rows (U, dim)."""
        weights = {f"{name}.weight": weight for name, weight in zip(self.tables, rows, strict=True)}
        logits: Tensor = functional_call(self.model, weights, (index, dense))
        return logits


def check_onnx() -> None:
    """ExportNotInstalled unless torch can write ONNX here."""
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise ExportNotInstalled(packages=" and ".join(missing))


def dense_part(job: Job, schema: Schema, state: Mapping[str, Tensor]) -> DensePart:
    """The dense part with the weights of a state_dict; its tables have one row, for they are inputs."""
    model = job.model.build(schema, job.dim, "meta")
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    for name in tables:
        table = model.get_submodule(name)
        assert isinstance(table, nn.Embedding | nn.EmbeddingBag)
        table.weight = nn.Parameter(torch.zeros(1, table.embedding_dim))
    own = model.state_dict()
    for name in own.keys() - {f"{table}.weight" for table in tables}:
        own[name].copy_(state[name])
    return DensePart(model.eval(), tables)


def export_onnx(part: DensePart, schema: Schema, out: Path) -> Path:
    """Write `dense.onnx` into `out`; its path. CannotExport where torch cannot express it, or the disk is full."""
    fields, samples = len(schema.features), 3
    tables = [part.model.get_submodule(name) for name in part.tables]
    rows = [torch.randn(samples * fields, int(str(table.embedding_dim))) for table in tables]
    index = torch.arange(samples * fields).view(samples, fields)
    dense = torch.rand(samples, schema.num_dense) if schema.num_dense else None
    batch, count = torch.export.Dim("batch"), torch.export.Dim("rows")
    names = ["index", *(["dense"] if dense is not None else []), *(f"{table}.rows" for table in part.tables)]
    path, new = out / FILE, out / f"{FILE}.new"
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # the exporter prints how it goes
            warnings.simplefilter("ignore")
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses packages that no model here needs
            torch.onnx.export(
                copy.deepcopy(part),
                (index, dense, rows),
                new,
                input_names=names,
                output_names=["logits"],
                dynamic_shapes=({0: batch}, None if dense is None else {0: batch}, [{0: count} for _ in rows]),
                dynamo=True,
                external_data=False,
            )
        os.replace(new, path)
        return path
    except Exception as error:  # of torch.export, onnxscript or the disk: each has its own kinds
        new.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        raise CannotExport(path=str(path), reason=reason) from None
