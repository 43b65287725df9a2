"""Trained weights as files that torch, ONNX and others read without a word of shards.

A folder:

    model.safetensors      state_dict of the model with plain nn.Embedding: tables, dense weights and buffers
    tables.safetensors     tables of hashed ids, which are no matrix: NAME.ids (N,) int64 and NAME.rows (N, dim) float32
    trained.safetensors    NAME (rows,) bool: which rows of model.safetensors were trained; others have first values
    export.json            the job, and what is known of each table
    dense.onnx             the dense part, with rows as inputs (worker/trained/onnx.py)
    dense.int8.safetensors its linear layers in int8 (worker/trained/quantise.py)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import EmbershardError, Status
from embershard.worker.job.job import Job
from embershard.worker.job.tabular import TabularSection
from embershard.worker.nn.wrap import dense_state
from embershard.worker.trained.reading import is_hashed, pull_all, remote_tables

ReadTable = Callable[[str], Iterator[tuple[Ids, Floats]]]  # table -> portions of the rows that exist

MODEL, TABLES, TRAINED, FACTS = "model.safetensors", "tables.safetensors", "trained.safetensors", "export.json"


class CannotExport(EmbershardError):
    """A model that cannot be written down, or a place that does not take it."""

    status = Status.FAILED_PRECONDITION
    template = "cannot write {path}: {reason}"


@dataclass(frozen=True, slots=True)
class TableFacts:
    """One table of an export."""

    file: str
    dim: int
    rows: int  # in the file
    trained: int  # of these


def export_weights(
    model: nn.Module, job: Job, out: Path, read_table: ReadTable | None, rows: Mapping[str, int]
) -> dict[str, TableFacts]:
    """Write the weights of a trained model into the folder `out`; module -> facts.

    `read_table` gives the rows of a snapshot, `rows` how many of each table exist on the shards. Without a snapshot
    nothing says which rows were trained, only how many, and tables of hashed ids cannot be listed: CannotExport.
    """
    make_folder(out)
    weights = {name: value.detach().cpu().clone() for name, value in dense_state(model).items()}
    pairs: dict[str, torch.Tensor] = {}
    trained: dict[str, torch.Tensor] = {}
    facts: dict[str, TableFacts] = {}
    for name, module in remote_tables(model).items():
        table = module.table.spec.name
        if is_hashed(module):
            if read_table is None:
                reason = f"the ids of table {table!r} are hashes, which only a snapshot lists: name one as the source"
                raise CannotExport(path=str(out / TABLES), reason=reason)
            portions = [(np.empty(0, np.int64), np.empty((0, module.embedding_dim), np.float32)), *read_table(table)]
            pairs[f"{name}.ids"] = torch.from_numpy(np.concatenate([ids for ids, _ in portions]))
            pairs[f"{name}.rows"] = torch.from_numpy(np.concatenate([values for _, values in portions]))
            count = len(pairs[f"{name}.ids"])
            facts[name] = TableFacts(TABLES, module.embedding_dim, count, count)
            continue
        weights[f"{name}.weight"] = weight = pull_all(module)
        if read_table is not None:
            trained[name] = torch.zeros(len(weight), dtype=torch.bool)
            for ids, _ in read_table(table):
                trained[name][torch.from_numpy(ids)] = True
        facts[name] = TableFacts(MODEL, module.embedding_dim, len(weight), rows.get(table, 0))
    for file, tensors in ((MODEL, weights), (TABLES, pairs), (TRAINED, trained)):
        if tensors:
            write_tensors(out / file, tensors)
        else:
            remove_file(out / file)  # of an earlier export, whose rows these are not
    told = {"job": job.model_dump(mode="json"), "tables": {name: asdict(fact) for name, fact in facts.items()}}
    if isinstance(job.data, TabularSection):
        told["preprocessing"] = job.data.preprocessor().to_dict()
    write_bytes(out / FACTS, json.dumps(told, indent=1).encode())
    return facts


def make_folder(path: Path) -> None:
    """The folder of an export. CannotExport where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotExport(path=str(path), reason=error.strerror or str(error)) from None


def remove_file(path: Path) -> None:
    """Remove what may be there. CannotExport where it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CannotExport(path=str(path), reason=error.strerror or str(error)) from None


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tensors by name as one safetensors file; whole or not there. CannotExport where the disk does not take it."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.touch()
        mode = new.stat().st_mode  # what this user gives to new files; the library would let nobody else read it
        save_file(dict(tensors), new, {"format": "pt"})
        new.chmod(mode)
        os.replace(new, path)
    except (OSError, SafetensorError) as error:
        new.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CannotExport(path=str(path), reason=reason) from None


def write_bytes(path: Path, data: bytes) -> None:
    """A small file, whole or not there. CannotExport where the disk does not take it."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_bytes(data)
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise CannotExport(path=str(path), reason=error.strerror or str(error)) from None
