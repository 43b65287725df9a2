"""A checkpoint of a model with nn.Embedding, brought into the shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from embershard.proto.arrays import Ids
from embershard.proto.errors import BadExport, EmbershardError, RowsLost, ShardRestarted, Status
from embershard.worker.data.batch import NUM_HASHED_IDS, Schema
from embershard.worker.data.inputs.rows import earlier_names, other_order
from embershard.worker.job.job import Job
from embershard.worker.session.session import Session
from embershard.worker.session.tables import load_portion
from embershard.worker.trained.folder import DTYPES, MODEL, TABLES, read_facts
from embershard.worker.trained.reading import PORTION, is_hashed, remote_tables
from embershard.worker.training.build import choose_strategy, job_model


class CannotImport(EmbershardError):
    """A file that is no state of the job's model: everything that does not fit, a line each."""

    status = Status.FAILED_PRECONDITION
    template = "cannot import {path}: {reason}"


class ShardLostImport(EmbershardError):
    """A shard without an event log that was restarted while a model was imported, or after a part of it was."""

    status = Status.FAILED_PRECONDITION
    template = (
        "cannot import {path}: {lost} was restarted without its rows, and other shards have some, of this import or of "
        "an earlier job. Restart all shards, or restore a snapshot onto them (embershard restore ... --replace), and "
        "import again. Shards with an event log (--log-dir) keep their rows"
    )


class _Slice(Protocol):
    """The part of safetensors' own class that is used here."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


class _TensorFile(Protocol):
    """The part of safetensors' own class that is used here."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str, /) -> torch.Tensor: ...
    def get_slice(self, name: str, /) -> _Slice: ...


class StateFile:
    """The tensors of safetensors files, read as they are needed."""

    def __init__(self, path: Path) -> None:
        """`path` is one file, or the folder of an export. CannotImport where there is none."""
        self.path = path
        paths = [file for name in (MODEL, TABLES) if (file := path / name).exists()] if path.is_dir() else [path]
        if not paths:
            raise CannotImport(path=str(path), reason=f"there is neither {MODEL} nor {TABLES} in it")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}  # as safetensors calls them: F32, I64, ...
        self._files: dict[str, _TensorFile] = {}
        for file in paths:
            try:
                opened: _TensorFile = safe_open(file, "pt")
                for name in opened.keys():
                    part = opened.get_slice(name)
                    self.shapes[name], self.dtypes[name] = tuple(part.get_shape()), part.get_dtype()
                    self._files[name] = opened
            except (OSError, SafetensorError) as error:
                reason = "no such file" if isinstance(error, FileNotFoundError) else f"no safetensors file ({error})"
                raise CannotImport(path=str(file), reason=reason) from None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows start to stop of a tensor, or all of it."""
        if stop is None:
            return self._files[name].get_tensor(name)
        return self._files[name].get_slice(name)[start:stop]


def check_export(folder: Path, inputs: Mapping[str, Any] | None) -> None:
    """CannotImport where a folder is no whole export, or where its ids are of other values than those of a job.

    `inputs` are the job's (`inputs_of`).
    """
    try:
        theirs = read_facts(folder, verify=True).inputs or {}
    except BadExport as error:
        raise CannotImport(path=str(error.fields["path"]), reason=str(error.fields["reason"])) from None
    inputs = inputs or {}
    own, before = _values(inputs), _values(theirs)
    named = {name: name for name in own if name in before}
    if inputs.get("kind") == theirs.get("kind") == "columns":  # of features the model's tables have the names
        named = earlier_names([*own], [*before])
    columns, theirs_columns = _columns(inputs), _columns(theirs)
    if reason := other_order(earlier_names(columns, theirs_columns), theirs_columns):
        reason = f"{reason} than in it, and a model knows a column by its place: give the files, or the job's features,"
        raise CannotImport(path=str(folder), reason=f"{reason} the order of then")
    hashed = {column["name"] for column in inputs.get("categorical", ()) if column["ids"] == "hashed"}
    for name, then in named.items():
        if name != then and name in hashed:
            reason = (
                f"column {name!r} of the job's files is called {then!r} in it, and the id of a value is a hash of it "
                "and its column: no value would find its row. Name the columns as they were then"
            )
            raise CannotImport(path=str(folder), reason=reason)
    if names := sorted(name for name, then in named.items() if own[name] != before[then]):
        reason = (
            f"its ids of {', '.join(names)} are of other values than those of the job's files, which have changed "
            "since the export: each value would get the row of another one. Name the files of that time"
        )
        raise CannotImport(path=str(folder), reason=reason)


def _columns(inputs: Mapping[str, Any]) -> list[str]:
    """The columns, or features, in the order of a model's inputs."""
    if "features" in inputs:
        return [*inputs["features"]]
    return [column["name"] for kind in ("categorical", "lists", "numeric") for column in inputs.get(kind, ())]


def _values(inputs: Mapping[str, Any]) -> dict[str, object]:
    """Table or column -> what decides which value has which of its ids, where the files of a job do."""
    columns = [*inputs.get("categorical", ()), *inputs.get("lists", ())]
    firsts = {column["name"]: (column["first"], list(column["values"])) for column in columns}
    return {**inputs.get("fitted", {}).get("vocabularies", {}), **firsts}


def import_state(path: Path, job: Job, schema: Schema, session: Session) -> dict[str, int]:
    """Load tables and dense weights into the shards; table -> rows. Optimizer states of these rows start anew.

    Tables that are not there yet are created, and closed to all workers until everything is loaded. CannotImport,
    before anything is changed, names all that does not fit; JobError a pattern of the job that fits nothing;
    ShardLostImport a shard that lost its rows meanwhile. Buffers are checked and not loaded: they live in the workers.
    """
    file = StateFile(path)
    plain = job_model(job, schema)
    mistakes = list(_mistakes(file, plain))
    if mistakes:
        raise CannotImport(path=str(path), reason="\n  ".join(["it does not fit the job's model:", *mistakes]))
    for name, parameter in plain.named_parameters():
        if not parameter.is_meta:
            parameter.data.copy_(file.read(name))
    loaded: dict[str, int] = {}
    with _lost_shards_named(path), session.registry.keep_closed():
        strategy = choose_strategy(job, plain, session, torch.device("cpu"))
        for name, module in remote_tables(strategy.model).items():
            spec = module.table.spec
            for ids, rows in _portions(file, name, module.num_embeddings, hashed=is_hashed(module)):
                load_portion(session.client, spec, ids, rows.to(torch.float32).contiguous().numpy())
                loaded[spec.name] = loaded.get(spec.name, 0) + len(ids)
        for weights in session.dense_weights:
            load_portion(session.client, weights.spec, weights.ids, weights.values())
            loaded[weights.spec.name] = len(weights.ids)
    return loaded


@contextmanager
def _lost_shards_named(path: Path) -> Iterator[None]:
    """ShardLostImport in place of errors whose remedy is a checkpoint, which nobody has of an import."""
    try:
        yield
    except RowsLost as error:
        raise ShardLostImport(path=str(path), lost=error.fields["lost"]) from None
    except ShardRestarted as error:
        raise ShardLostImport(path=str(path), lost=error.shard) from None


def _mistakes(file: StateFile, model: nn.Module) -> Iterator[str]:
    shapes = file.shapes
    state = model.state_dict()
    wanted: dict[str, tuple[int | None, ...]] = {name: tuple(value.shape) for name, value in state.items()}
    buffers = dict(model.named_buffers(remove_duplicate=False))  # which are not loaded: a mask may have -inf
    # masks, counts of batch norm, hashed ids; of all others any floats will do
    kinds = {name: DTYPES.get(value.dtype) for name, value in state.items() if not value.is_floating_point()}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            wanted[f"{name}.weight"] = (module.num_embeddings, module.embedding_dim)
            if module.num_embeddings >= NUM_HASHED_IDS:
                del wanted[f"{name}.weight"]
                count = next(iter(shapes.get(f"{name}.ids", ())), None)
                kinds[f"{name}.ids"] = "I64"
                wanted |= {f"{name}.ids": (count,), f"{name}.rows": (count, module.embedding_dim)}
    for name in [*wanted, *(name for name in shapes if name not in wanted)]:
        if name not in shapes:
            yield f"{name} {wanted[name]} is missing"
        elif name not in wanted:
            yield f"{name} {shapes[name]} is not in the model"
        elif shapes[name] != wanted[name]:
            yield f"{name} has shape {shapes[name]}, the model's is {wanted[name]}"
        elif not file.dtypes[name].startswith(kinds.get(name) or ("F", "BF")):
            yield f"{name} holds {file.dtypes[name]}, the model {kinds.get(name) or 'floats'}"
        elif name not in {**buffers, **kinds} and not all(part.float().isfinite().all() for part in _parts(file, name)):
            yield f"{name} has numbers that are not finite in float32"
        elif name.endswith(".ids") and name not in state and len(file.read(name).unique()) < shapes[name][0]:  # type: ignore[no-untyped-call]
            yield f"{name} has an id twice"


def _parts(file: StateFile, name: str) -> Iterator[torch.Tensor]:
    """A tensor in portions, of which each fits memory."""
    shape = file.shapes[name]
    if len(shape) != 2:
        yield file.read(name)
        return
    for start in range(0, shape[0], PORTION):
        yield file.read(name, start, min(start + PORTION, shape[0]))


def _portions(
    file: StateFile, name: str, num_embeddings: int | None, *, hashed: bool
) -> Iterator[tuple[Ids, torch.Tensor]]:
    count = file.shapes[f"{name}.ids"][0] if hashed else num_embeddings or 0
    for start in range(0, count, PORTION):
        stop = min(start + PORTION, count)
        if hashed:
            yield file.read(f"{name}.ids", start, stop).numpy(), file.read(f"{name}.rows", start, stop)
        else:
            yield np.arange(start, stop), file.read(f"{name}.weight", start, stop)
