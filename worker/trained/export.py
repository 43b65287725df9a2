"""Write trained weights as files that torch, ONNX and others read without shards: see worker/trained/folder.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from embershard.proto.arrays import Floats, Ids
from embershard.proto.optim.initial_rows import initial_rows
from embershard.proto.spec import TableSpec
from embershard.worker.nn.wrap import dense_state
from embershard.worker.trained.folder import (
    MODEL,
    TABLES,
    TRAINED,
    CannotExport,
    TableFacts,
    TensorStream,
    check_tensors,
    make_folder,
    write_tensors,
)
from embershard.worker.trained.reading import PORTION, is_hashed, pull_all, remote_tables

ReadTable = Callable[[str], Iterator[tuple[Ids, Floats]]]  # table -> portions of the rows that exist, in any order

SORTED_BYTES = 256 * 2**20  # of rows that are sorted at once


def export_weights(
    model: nn.Module, out: Path, read_table: ReadTable | None, rows: Mapping[str, int]
) -> dict[str, TableFacts]:
    """Write the weights of a trained model into the folder `out`; module -> facts, for its export.json.

    `read_table` gives the rows of a snapshot, which need not fit memory, only their ids; `rows` how many of each table
    exist on the shards. Without a snapshot nothing says which rows were trained, only how many, and tables of hashed
    ids cannot be listed: CannotExport.
    """
    dense = dense_state(model)
    check_tensors(out / MODEL, dense)
    make_folder(out)
    weights: dict[str, torch.Tensor | TensorStream] = {
        name: value.detach().cpu().clone() for name, value in dense.items()
    }
    pairs: dict[str, torch.Tensor | TensorStream] = {}
    trained: dict[str, torch.Tensor] = {}
    facts: dict[str, TableFacts] = {}
    for name, module in remote_tables(model).items():
        spec, num_rows = module.table.spec, module.num_embeddings
        file, count = (TABLES, 0) if is_hashed(module) else (MODEL, rows.get(spec.name, 0))
        if read_table is not None:
            ids = _sorted_ids(read_table, spec.name)
            portions = _in_order(read_table, spec, ids, out)
            count = len(ids)
        if file == TABLES:
            if read_table is None:
                reason = (
                    f"the ids of table {spec.name!r} are hashes, which shards do not list: take a snapshot "
                    "(`embershard snapshot FOLDER`), and export FOLDER"
                )
                raise CannotExport(path=str(out / TABLES), reason=reason)
            num_rows = count
            pairs[f"{name}.ids"] = torch.from_numpy(ids)
            values = (torch.from_numpy(values) for _, values in portions)
            pairs[f"{name}.rows"] = TensorStream(torch.float32, (count, spec.dim), values)
        elif read_table is None:
            weights[f"{name}.weight"] = pull_all(module)
        else:
            assert num_rows is not None
            trained[name] = torch.zeros(num_rows, dtype=torch.bool, device="cpu")
            trained[name][torch.from_numpy(ids)] = True
            weights[f"{name}.weight"] = TensorStream(
                torch.float32, (num_rows, spec.dim), _with_first_values(spec, num_rows, portions)
            )
        initializer: dict[str, str | float] = {"name": spec.initializer.kind, **spec.initializer.params()}
        facts[name] = TableFacts(file, spec.dim, num_rows or 0, count, initializer, f"{spec.row_seed:016x}")
    for file, tensors in ((MODEL, weights), (TABLES, pairs), (TRAINED, trained)):
        if tensors:
            write_tensors(out / file, tensors)
    return facts


def _sorted_ids(read_table: ReadTable, table: str) -> Ids:
    """(N,) the ids of a table's rows, ascending."""
    return np.sort(np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in read_table(table))]))


def _in_order(read_table: ReadTable, spec: TableSpec, ids: Ids, folder: Path) -> Iterator[tuple[Ids, Floats]]:
    """Portions of a table's rows by ascending ids, of which `ids` are all; of a large table by way of files."""
    rows_each = max(1, SORTED_BYTES // (4 * spec.dim))
    firsts = ids[::rows_each]  # of each portion
    if len(firsts) < 2:
        portions = [*read_table(spec.name), (np.empty(0, np.int64), np.empty((0, spec.dim), np.float32))]
        order = np.argsort(np.concatenate([ids for ids, _ in portions]))
        yield ids, np.concatenate([rows for _, rows in portions])[order]
        return
    record = np.dtype([("id", np.int64), ("row", np.float32, (spec.dim,))])
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for some, rows in read_table(spec.name):
            portion = np.searchsorted(firsts, some, "right") - 1
            for number in np.unique(portion).tolist():
                here = portion == number
                records = np.empty(int(here.sum()), record)
                records["id"], records["row"] = some[here], rows[here]
                with (Path(name) / str(number)).open("ab") as file:
                    file.write(records.tobytes())
        for number in range(len(firsts)):
            path = Path(name) / str(number)
            records = np.fromfile(path, record)
            path.unlink()
            order = np.argsort(records["id"])
            yield records["id"][order], records["row"][order]


def _with_first_values(
    spec: TableSpec, num_rows: int, portions: Iterator[tuple[Ids, Floats]]
) -> Iterator[torch.Tensor]:
    """All rows of a table with a vocabulary, portion by portion: those given, and first values between them."""
    start = 0
    for ids, rows in portions:
        stop = int(ids[-1]) + 1 if len(ids) else start
        for first in range(start, stop, PORTION):
            here = slice(*np.searchsorted(ids, (first, min(first + PORTION, stop))))
            yield _first_values(spec, first, min(first + PORTION, stop), ids[here], rows[here])
        start = stop
    for first in range(start, num_rows, PORTION):
        yield _first_values(spec, first, min(first + PORTION, num_rows))


def _first_values(
    spec: TableSpec, start: int, stop: int, ids: Ids | None = None, rows: Floats | None = None
) -> torch.Tensor:
    values = initial_rows(spec.initializer, spec.row_seed, np.arange(start, stop), spec.dim)
    if ids is not None and rows is not None:
        values[ids - start] = rows
    return torch.from_numpy(values)
