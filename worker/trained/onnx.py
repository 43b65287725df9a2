"""The dense part of a model as ONNX: what follows once the rows of a batch are looked up.

Inputs: `index` (B, C) int64, the positions of a batch's ids among the rows given, -1 where a list is shorter than its
columns; `dense` (B, D) float32, for a model with dense features; and for each table NAME.rows (U, dim) float32. Output:
`logits` (B,) float32, (B, L) of several labels, (B, items) behind a history. With index = arange(B * C).view(B, C) the
rows are simply those of each sample, one behind the other.

A table that is read by other ids than the batch's, such as one of positions in a sequence, stays a weight in the file.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from embershard.proto.errors import EmbershardError, Status
from embershard.worker.data.batch import NUM_HASHED_IDS, Batch, Dataset, Schema
from embershard.worker.data.inputs.rows import PADDING
from embershard.worker.job.job import Job
from embershard.worker.models.recommender import RetrievalModel, id_columns, scores_lists
from embershard.worker.models.user_defined import forward_of, reads_dense, seeded
from embershard.worker.nn.activations import TABLES
from embershard.worker.nn.embedding import Embedding, EmbeddingBag
from embershard.worker.nn.wrap import dense_state
from embershard.worker.trained.folder import ONNX, CannotExport, move
from embershard.worker.trained.reading import is_hashed, pull_all

_NEEDS = ("onnx", "onnxscript")


class ExportNotInstalled(EmbershardError):
    """A package that the ONNX export needs is not installed."""

    status = Status.FAILED_PRECONDITION
    template = "--onnx needs {packages}: pip install 'embershard[export]'"


class DensePart(nn.Module):
    """A model whose tables are inputs."""

    def __init__(self, model: nn.Module, tables: list[str], *, columns: int = 1) -> None:
        super().__init__()
        self.model = model
        self.tables = tables
        self.columns = columns  # of its logits
        self.takes_dense = reads_dense(model)

    def forward(self, index: Tensor, dense: Tensor | None, rows: list[Tensor]) -> Tensor:
        """Logits (B,) or (B, L) of positions (B, C), dense features (B, D) and each table's rows (U, dim)."""
        weights = {f"{name}.weight": weight for name, weight in zip(self.tables, rows, strict=True)}
        logits: Tensor = functional_call(self.model, weights, (index, dense) if self.takes_dense else (index,))
        return logits if self.columns > 1 or scores_lists(self.model) else logits.reshape(-1)


def check_onnx() -> None:
    """ExportNotInstalled unless torch can write ONNX here."""
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise ExportNotInstalled(packages=" and ".join(missing))


def dense_part(job: Job, schema: Schema, state: Mapping[str, Tensor], fixed: Mapping[str, Tensor] = {}) -> DensePart:
    """The dense part with the weights of a state_dict; its tables have one row, for they are inputs.

    `fixed`: the weights of tables that stay in it, by name.
    """
    with seeded(job.train.seed):
        model = job.model.build(schema, job.dim, "meta")
    tables = [name for name in _tables(model) if name not in fixed]
    for name, table in _tables(model).items():
        table.weight = nn.Parameter(fixed[name] if name in fixed else torch.zeros(1, table.embedding_dim))
    own, named = model.state_dict(), model.named_modules(remove_duplicate=False)  # a table may have several names
    for name in own.keys() - {f"{table}.weight" for table, module in named if isinstance(module, TABLES)}:
        own[name].copy_(state[name])
    return DensePart(model.eval(), tables, columns=len(schema.labels))


def _tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Name -> table; a parametrized one, whose weight is computed, is no table here."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, TABLES))
    return {name: m for name, m in named if isinstance(m, Embedding | EmbeddingBag) or "weight" in m._parameters}


def part_of_trained(job: Job, model: nn.Module, dataset: Dataset, path: Path) -> DensePart:
    """The dense part of a trained model, once it gives what the model gives, on samples of the data.

    CannotExport where it does not: a model that computes with ids gets positions in their place.
    """
    batch = _samples(model, dataset)
    forward = forward_of(model, job.model.name)
    for name, table in _tables(model).items():
        if isinstance(table, nn.EmbeddingBag) and table.padding_idx is not None:
            reason = f"table {name!r} leaves an id out of its sums (padding_idx), but gets positions in place of ids"
            raise CannotExport(path=str(path), reason=f"{reason}: leave --onnx out")
    padding = batch.ids == PADDING
    ids, index = batch.ids[~padding].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    # neither in the order of ids nor from 0 on, so that no position is an id by chance
    positions = 1 + torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    given = batch.ids.masked_scatter(~padding, positions[index])
    with torch.no_grad():
        with _watched(model) as reads:
            wanted = forward(model, batch)
        with _watched(model) as rolled:
            forward(model, replace(batch, ids=batch.ids.roll(1, 0)))
        # the ids of a list are flat, and stay the same where the last sample has none; hashed ones are never held whole
        fixed = {n for n in reads if _same(reads[n], rolled[n]) and not _is_hashed(model.get_submodule(n))}
        while True:
            weights = {name: _whole(model.get_submodule(name)) for name in fixed}
            part = dense_part(job, dataset.schema, dense_state(model), weights)
            rows = [_rows_at(model.get_submodule(name), ids, positions) for name in part.tables]
            failed = ""
            with _watched(part.model) as of_part:
                try:
                    found = part(given, batch.dense, rows)
                except (IndexError, RuntimeError) as error:  # of torch: a position beyond the rows, another shape
                    failed = str(error).partition("\n")[0]
            # the ids of a field may be all alike among these samples
            mistaken = {name for name in fixed if name in of_part and not _same(of_part[name], reads[name])}
            if not mistaken:
                break
            fixed -= mistaken
    if not failed and not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
        worst = int((found - wanted).abs().argmax())
        failed = f"{found[worst]:.5g} in place of {wanted[worst]:.5g}"
    if failed:
        raise _computes_with_ids(path, failed)
    return part


def _samples(model: nn.Module, dataset: Dataset) -> Batch:
    """Some of the data's samples, as they are scored: without negatives."""
    if isinstance(model, RetrievalModel):
        batch = next(dataset.train(0, 0, 1, 64))
        history = batch.ids[:, batch.ids.shape[1] - model.history :]
        return replace(batch, ids=torch.cat([batch.ids[:, :2], history], 1))
    return next(dataset.evaluate(dataset.splits[0], 0, 1, 64) if dataset.splits else dataset.train(0, 0, 1, 64))


def _computes_with_ids(path: Path, found: str) -> CannotExport:
    reason = (
        f"its dense part does not give the model's logits ({found}): it gets positions of ids among the rows given, "
        "so the model may look ids up, but not compute with them (ids + 1, ids != 0), nor read a table as a whole; "
        "give each field ids of its own in the reader, or leave --onnx out"
    )
    return CannotExport(path=str(path), reason=reason)


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """The ids that each table is called with, by its name."""
    reads: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, given: reads.setdefault(name, []).append(given[0].clone())

    hooks = [table.register_forward_pre_hook(watch(name)) for name, table in _tables(model).items()]
    try:
        yield reads
    finally:
        for hook in hooks:
            hook.remove()


def _is_hashed(table: nn.Module) -> bool:
    return isinstance(table, Embedding | EmbeddingBag) and is_hashed(table)


def _whole(table: nn.Module) -> Tensor:
    if isinstance(table, Embedding | EmbeddingBag):
        return pull_all(table)
    assert isinstance(table, nn.Embedding | nn.EmbeddingBag)
    return table.weight.detach()


def _rows_at(table: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """Rows (U + 1, dim) of ids (U,) at their positions; zeros for those of another table, beyond this one."""
    assert isinstance(table, nn.Embedding | nn.EmbeddingBag)
    rows = torch.zeros(len(ids) + 1, table.embedding_dim)
    inside = ids < (table.num_embeddings or NUM_HASHED_IDS)
    own = table.table.pull(ids[inside]) if isinstance(table, Embedding | EmbeddingBag) else table.weight[ids[inside]]
    rows[positions[inside]] = own.detach()
    return rows


def export_onnx(part: DensePart, schema: Schema, out: Path) -> Path:
    """Write `dense.onnx` into `out`; its path. CannotExport where torch cannot express it, or the disk is full."""
    columns, samples = id_columns(part.model, schema) + scores_lists(part.model), 3
    tables = [part.model.get_submodule(name) for name in part.tables]
    rows = [torch.randn(samples * columns, int(str(table.embedding_dim))) for table in tables]
    index = torch.arange(samples * columns).view(samples, columns)
    dense = torch.rand(samples, schema.num_dense_columns) if schema.num_dense_columns and part.takes_dense else None
    batch, count = torch.export.Dim("batch"), torch.export.Dim("rows")
    of_index = {0: batch, 1: torch.export.Dim.DYNAMIC} if scores_lists(part.model) else {0: batch}
    names = ["index", *(["dense"] if dense is not None else []), *(f"{table}.rows" for table in part.tables)]
    path, new = out / ONNX, out / f"{ONNX}.new"
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # the exporter prints how it goes
            warnings.simplefilter("ignore")
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses packages that no model here needs
            program = torch.onnx.export(
                copy.deepcopy(part),
                (index, dense, rows),
                new,
                input_names=names,
                output_names=["logits"],
                dynamic_shapes=(of_index, None if dense is None else {0: batch}, [{0: count} for _ in rows]),
                dynamo=True,
                external_data=False,
            )
        assert program is not None
        fixed = [
            dim for one in program.model.graph.inputs if one.shape for dim in one.shape[:1] if isinstance(dim, int)
        ]
        if fixed:  # torch.export silently takes the numbers of its samples
            reason = "its forward makes a number of the batch's size, as len(ids) does: write ids.shape[0]"
            raise RuntimeError(f"it would take {fixed[0]} rows alone, for {reason}, or leave --onnx out")
        move(new, path)
        return path
    except Exception as error:  # of torch.export, onnxscript or the disk: each has its own kinds
        new.unlink(missing_ok=True)
        cause = error.__cause__ or error  # the exporter's own text is how to report it
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(cause).partition("\n")[0]
        raise CannotExport(path=str(path), reason=reason) from None
