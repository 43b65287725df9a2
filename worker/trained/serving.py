"""A trained model served from the folder of an export: in numpy and torch, without shards.

Nothing here imports a shard, a session, gRPC, numba or pyarrow, so that a server starts in the time that torch takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import BadExport, BadIds, BadRows, CannotServe
from embershard.worker.data.batch import Batch, Schema
from embershard.worker.data.inputs.rows import PADDING, CategoricalInput, RowInputs
from embershard.worker.job.job import Job
from embershard.worker.models.layers import FeatureEmbedding
from embershard.worker.models.recommender import ListRecommender, RankingModel, id_columns, scores_lists
from embershard.worker.models.user_defined import forward_of, in_whole_rows, seeded
from embershard.worker.trained.folder import (
    FACTS,
    INT8,
    MODEL,
    ONNX,
    TABLES,
    ExportFacts,
    TableFacts,
    read_facts,
)
from embershard.worker.trained.quantise import load_int8
from embershard.worker.trained.served_inputs import FeatureInputs, Inputs, make_inputs
from embershard.worker.trained.served_tables import NumberedRows, ServedEmbedding, SortedRows, served_table

Dense = Literal["torch", "onnx", "int8"]
Score = Callable[[Tensor, Tensor | None], Floats]  # ids (N, C), dense (N, D) -> logits


def load_exported(folder: str | Path, *, dense: Dense = "torch", verify: bool = False) -> ExportedModel:
    """Load the model of an export (`embershard export`) to score rows, without shards; its tables are memory-mapped.

    `dense` selects how the dense part is computed: by torch, by onnxruntime (from `export --onnx`), or by torch
    with int8 layers (from `export --int8`). `verify` reads every file and compares its digest. You need only the
    folder and, for a model of your own, its module.

    BadExport names a file that is missing, damaged, or of another version; CannotServe names what is missing in the
    export or not installed.
    """
    if "://" in str(folder):
        raise BadExport(path=str(folder), reason="it is a URL: copy the folder to a disk of this machine")
    path = Path(folder)
    if dense not in get_args(Dense):
        raise ValueError(f"dense must be torch, onnx or int8, got {dense!r}")
    facts = read_facts(path, verify=verify)
    model = ExportedModel(path, facts, dense)
    now = read_facts(path)
    if (now.written, now.files) != (facts.written, facts.files):
        raise BadExport(path=str(path), reason="another export replaced its files while they were read: load it again")
    return model


class ExportedModel:
    """A trained model, to be read only. Any number of threads may call it at once."""

    def __init__(self, folder: Path, facts: ExportFacts, dense: Dense) -> None:
        self.folder, self.schema = folder, facts.schema
        self.job = _job(folder, facts)
        """The job that it was trained by."""
        state = _tensors(folder / MODEL)
        with seeded(self.job.train.seed):
            model = self.job.model.build(self.schema, self.job.dim, "meta")
        self._inputs = _inputs(folder, facts, id_columns(model, self.schema))
        _put_tables(model, folder, facts.tables)
        _load(model, state, folder / MODEL)
        if dense == "int8":
            _quantise(model, _tensors(folder / INT8), folder / INT8)
        self._model = model.eval().requires_grad_(False)
        self._score = self._onnx(folder / ONNX) if dense == "onnx" else self._torch()

    @property
    def features(self) -> tuple[str, ...]:
        """The columns that `score` needs, or () where it cannot be used."""
        return () if self._inputs is None else self._inputs.names

    def score(self, rows: object) -> Floats:
        """Logits (N,) of rows: columns by name, as a dict of lists or arrays, an Arrow table or a data frame.

        They are (N, labels) of a job with several labels, and (N, items) of data.reader sequences. Columns become ids
        and dense features as in training. BadRows names a feature that is unknown, missing, or has a value that it
        cannot have. CannotServe where the job's reader does not tell what it does: use score_ids.
        """
        if self._inputs is None:
            reason = f"reader {self.job.data.reader} does not describe its columns (`inputs`); use score_ids"
            raise CannotServe(what="score", reason=reason)
        ids, dense = self._inputs(rows)
        return self._logits(ids, dense)

    def score_ids(self, ids: object, dense: object = None) -> Floats:
        """Logits (N,) of ids (N, columns) and dense features (N, columns), arrays or tensors, as a reader gives them.

        BadIds for other shapes and types, and ids that no table of the model has.
        """
        found, floats = _array("ids", ids, "iu"), None
        count, columns = id_columns(self._model, self.schema), self.schema.num_dense_columns
        more = scores_lists(self._model) and found.ndim == 2 and found.shape[1] > count
        if found.ndim != 2 or (found.shape[1] != count and not more):
            raise BadIds(what="ids", reason=f"have shape {found.shape}, the model takes (N, {count})")
        if columns:
            floats = _array("dense", dense, "iuf").astype(np.float32)
            if floats.shape != (len(found), columns):
                raise BadIds(what="dense", reason=f"have shape {floats.shape}, not {(len(found), columns)}")
        elif dense is not None:
            raise BadIds(what="dense", reason="the model takes none")
        _check_ids(self._model, self.schema, found)
        return self._logits(found.astype(np.int64), floats)

    def _logits(self, ids: Ids, dense: Floats | None) -> Floats:
        if not len(ids):  # models may not take an empty batch
            return np.empty((0, *self._shape(ids)), np.float32)
        return self._score(torch.from_numpy(ids), None if dense is None else torch.from_numpy(dense))

    def _shape(self, ids: Ids) -> tuple[int, ...]:
        """The shape of a row's logits."""
        if scores_lists(self._model):
            assert isinstance(self._model, ListRecommender)
            return (ids.shape[1] - self._model.history,)
        return (len(self.schema.labels),) * (len(self.schema.labels) > 1)

    def ids(self, column: str, values: object) -> Ids:
        """Ids (N,) of the values of a column, or (N, width) of a column of lists, as `score` reads them.

        Names that the table of interactions did not have share an id, which has first values; in a history they are
        left out.
        BadRows names a value that the column cannot have; CannotServe where the model's columns are no plain ids.
        """
        if not isinstance(self._inputs, RowInputs):
            raise CannotServe(what="ids", reason="this model's columns have no ids of their own; use score")
        parts = {one.name: replace(self._inputs, categorical=(one,), lists=()) for one in self._inputs.categorical}
        parts |= {one.name: replace(self._inputs, categorical=(), lists=(one,)) for one in self._inputs.lists}
        if column not in parts:
            raise BadRows(feature=column, value=None, reason=f"unknown (known: {', '.join(parts)})")
        found, _ = replace(parts[column], numeric=(), ignored=())({column: values})
        return found[:, 0] if parts[column].categorical else found

    def embedding(self, name: str, ids: object) -> Floats:
        """Rows (*shape, dim) of ids of any shape, of the embedding module of this name (`tables` has them).

        Ids that were never trained have the first values that a shard would give them. BadIds, CannotServe.
        """
        found = self.tables.get(name)
        if found is None:
            known = ", ".join(self.tables) or "none"
            raise CannotServe(what=f"embedding {name!r}", reason=f"the model has no such table (known: {known})")
        wanted = _array("ids", ids, "iu").astype(np.int64)
        is_hashed = isinstance(found, ServedEmbedding) and isinstance(found.table, SortedRows)
        if not is_hashed and wanted.size and not 0 <= wanted.min() <= wanted.max() < found.num_embeddings:
            raise BadIds(what="ids", reason=f"table {name!r} has ids 0..{found.num_embeddings - 1}")
        if isinstance(found, ServedEmbedding):
            return cast(Floats, found.rows(torch.from_numpy(wanted)).numpy())
        return cast(Floats, found.weight.detach()[torch.from_numpy(wanted)].numpy())

    @property
    def tables(self) -> dict[str, ServedEmbedding | nn.Embedding | nn.EmbeddingBag]:
        """Name -> embedding module of the model."""
        kinds = ServedEmbedding | nn.Embedding | nn.EmbeddingBag
        return {name: module for name, module in self._model.named_modules() if isinstance(module, kinds)}

    def user_vectors(self, users: object) -> Floats:
        """Vectors (N, dim) of users' ids (N,), of a model for retrieval; if it reads features, of columns by name.

        The best items have the largest products of their vectors with the user's. Where the model reads histories,
        `users` is (N, 1 + history), with -1 behind a shorter one.
        """
        return self._vectors("user_vectors", "user", users)

    def item_vectors(self, items: object) -> Floats:
        """Vectors (N, dim) of items' ids (N,), of a model for retrieval; if it reads features, of columns by name.

        Users and items share a table: `ids` gives the ids of items by their names or numbers.
        """
        return self._vectors("item_vectors", "item", items)

    def _vectors(self, method: str, feature: str, given: object) -> Floats:
        model, dense = self._model, None
        if not isinstance(model, RankingModel):
            raise CannotServe(what=method, reason=f"{self.job.model.name} is no model for retrieval, as two_tower is")
        if isinstance(self._inputs, FeatureInputs):
            of_item = set(model.features_of_item)
            features = of_item if feature == "item" else self._inputs.features - of_item
            ids, dense = self._inputs.of_some(given, features)
        else:
            ids = self._checked_ids(feature, given)
        with torch.inference_mode():
            tensors = torch.from_numpy(ids), None if dense is None else torch.from_numpy(dense)
            return cast(Floats, getattr(model, method)(*tensors).numpy())

    def _checked_ids(self, feature: str, given: object) -> Ids:
        """Ids (N,) of users or items, or (N, 1 + history) of users, as `user_vectors` says. BadIds."""
        found = _array("ids", given, "iu").astype(np.int64)
        wanted = 1 + (feature == "user" and bool(getattr(self._model, "history", 0)))
        if not 1 <= found.ndim <= wanted:
            shape = "(N,)" if wanted == 1 else "(N,) or (N, 1 + history)"
            raise BadIds(what=f"ids of {feature}s", reason=f"have shape {found.shape}, not {shape}")
        own = found if found.ndim == 1 else found[:, 0]
        _check_range(f"ids of {feature}s", own, *self._ids_of(feature))
        if found.ndim == 2:
            taken = found[:, 1:]
            _check_range("ids of the history", taken[taken != PADDING], *self._ids_of("item"))
        return found

    def _ids_of(self, feature: str) -> tuple[int, int | None]:
        """The first id of users, or of items, and the one behind their last."""
        columns: tuple[CategoricalInput, ...] = getattr(self._inputs, "categorical", ())
        named = {one.name: one for one in columns}
        if len(columns) == 2 and columns[0].ids == "vocabulary":  # whose names are those of the table
            named = dict(zip(("user", "item"), columns, strict=True))
        own = named.get(feature)
        if own is not None and own.num_ids:
            return own.first, own.first + own.num_ids
        return 0, self.schema.num_ids if not self.schema.fields else next(iter(self.schema.id_limits.values()))

    def _torch(self) -> Score:
        model, forward = self._model, in_whole_rows(forward_of(self._model, self.job.model.name))
        labels = (len(self.schema.labels),) * (len(self.schema.labels) > 1)

        def score(ids: Tensor, dense: Tensor | None) -> Floats:
            with torch.inference_mode():
                # a user's model gives logits of the labels' shape
                batch = Batch(ids, dense, torch.empty(len(ids), *labels, device="cpu"))
                return cast(Floats, forward(model, batch).numpy())

        return score

    def _onnx(self, path: Path) -> Score:
        try:
            import onnxruntime
        except ImportError:
            raise CannotServe(what=str(path), reason="needs onnxruntime: pip install 'embershard[serve]'") from None
        if not path.exists():
            raise BadExport(path=str(path), reason="no such file: export the model with --onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # of onnxruntime, which has kinds of its own
            raise BadExport(path=str(path), reason=str(error).partition("\n")[0]) from None
        names = [one.name for one in session.get_inputs()]
        tables = {name: self.tables[name.removesuffix(".rows")] for name in names if name.endswith(".rows")}

        def score(ids: Tensor, dense: Tensor | None) -> Floats:
            # one row at least, which padding reads
            unique, index = torch.cat([ids.new_zeros(1), ids.reshape(-1).clamp(min=0)]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
            read = self._ids_by_table(ids)
            given: dict[str, object] = {
                name: _rows_of(table, unique, read.get(name.removesuffix(".rows"))) for name, table in tables.items()
            }
            given["index"] = torch.where(ids == PADDING, PADDING, index[1:].view(ids.shape)).numpy()
            if "dense" in names and dense is not None:
                given["dense"] = dense.numpy()
            return cast(Floats, session.run(["logits"], given)[0])

        return score

    def _ids_by_table(self, ids: Tensor) -> dict[str, Tensor]:
        """Name of a module -> the ids that it reads, of tables of features in a model of ours; none of other models.

        A hashed table has a row for every id: without this, first values were computed that nobody reads.
        """
        if not type(self._model).__module__.startswith("embershard."):  # who knows what else it reads
            return {}
        embeddings = [(name, m) for name, m in self._model.named_modules() if isinstance(m, FeatureEmbedding)]
        return {
            f"{name}.{one.tables[table]}".removeprefix("."): read
            for name, one in embeddings
            for table, read in one.inputs(ids).items()
        }


def _rows_of(table: ServedEmbedding | nn.Embedding | nn.EmbeddingBag, ids: Tensor, read: Tensor | None) -> Floats:
    """Rows (U, dim) of ids (U,); zeros for those that the table does not have, or that are not `read` from it."""
    rows = torch.zeros(len(ids), table.embedding_dim, dtype=torch.float32, device="cpu")
    inside = (ids >= 0) & (ids < table.num_embeddings)
    if read is not None:
        inside &= torch.isin(ids, read)
    own = ids[inside]
    rows[inside] = table.rows(own) if isinstance(table, ServedEmbedding) else table.weight.detach()[own]
    return cast(Floats, rows.numpy())


def _array(what: str, value: object, kinds: str) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.asarray(value)
    if array.dtype.kind not in kinds and array.size:
        wanted = "integers" if kinds == "iu" else "numbers"
        raise BadIds(what=what, reason=f"are {array.dtype}, not {wanted}")
    return array


def _check_ids(model: nn.Module, schema: Schema, ids: npt.NDArray[Any]) -> None:
    """BadIds where a column has ids that its table does not have."""
    if isinstance(model, ListRecommender):  # which has one table
        limit = next(iter(schema.id_limits.values())) if schema.fields else schema.num_ids
        history = np.arange(model.history) + model.history_start
        _check_range("ids", np.delete(ids, history, axis=1), 0, limit)
        _check_range("ids of the history", ids[:, history], PADDING, limit)
        return
    if not schema.fields:
        _check_range("ids", ids, 0, schema.num_ids)
    for one in schema.fields:
        low = 0 if one.pooling == "none" else PADDING
        columns = ids[:, one.start : one.start + one.width]
        _check_range(f"ids of {one.name!r}", columns, low, schema.id_limits[one.table])


def _check_range(what: str, ids: npt.NDArray[Any], low: int, limit: int | None) -> None:
    if not ids.size:
        return
    if int(ids.min()) < low or (limit is not None and int(ids.max()) >= limit):
        bad = int(ids.min()) if int(ids.min()) < low else int(ids.max())
        raise BadIds(what=what, reason=f"{bad} is not in {low}..{'' if limit is None else limit - 1}")


def _job(folder: Path, facts: ExportFacts) -> Job:
    try:
        return Job.model_validate(facts.job)
    except ValidationError as error:
        raise BadExport(path=str(folder / FACTS), reason=f"its job is none: {error}") from None


def _inputs(folder: Path, facts: ExportFacts, id_columns: int) -> Inputs | None:
    if facts.inputs is None:
        return None
    try:
        inputs = make_inputs(facts.inputs)
        ids, dense = inputs({name: [] for name in inputs.names})  # no rows: all that it computes with is there
        found = ids.shape[1], 0 if dense is None else dense.shape[1]
        if found != (wanted := (id_columns, facts.schema.num_dense_columns)):
            raise ValueError(f"{found} columns of ids and numbers, and the model takes {wanted}")
        return inputs
    except (AttributeError, KeyError, TypeError, ValueError, BadRows) as error:
        raise BadExport(path=str(folder / FACTS), reason=f"its inputs are none: {error!r}") from None


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in memory that is the file's; BadExport."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # it is no mapping
    except FileNotFoundError:
        raise BadExport(path=str(path), reason="no such file") from None
    except (OSError, SafetensorError) as error:
        raise BadExport(path=str(path), reason=f"no safetensors file ({error})") from None


def _put_tables(model: nn.Module, folder: Path, tables: Mapping[str, TableFacts]) -> None:
    """Give the model's tables of hashed ids their rows."""
    hashed = {name: facts for name, facts in tables.items() if facts.file == TABLES}
    pairs = _tensors(folder / TABLES) if hashed else {}
    for name, facts in hashed.items():
        try:
            like = model.get_submodule(name)
            ids, rows = pairs[f"{name}.ids"], pairs[f"{name}.rows"]
            initializer, seed = facts.build_initializer(), int(facts.row_seed, 16)
        except (AttributeError, KeyError, ValueError, TypeError) as error:
            raise BadExport(path=str(folder / FACTS), reason=f"table {name!r}: {error}") from None
        shapes = (ids.dtype, ids.shape, rows.dtype, rows.shape)
        if shapes != (torch.int64, (facts.rows,), torch.float32, (facts.rows, facts.dim)):
            raise BadExport(path=str(folder / TABLES), reason=f"table {name!r} is {shapes}, not what {FACTS} says")
        served = SortedRows(ids.numpy(), rows.numpy(), initializer, seed)
        assert isinstance(like, nn.Embedding | nn.EmbeddingBag)
        model.set_submodule(name, served_table(served, like))


def _load(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Give a model the tensors of its state_dict without copying them; BadExport where they are another model's."""
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and f"{name}.weight" in wanted:
            wanted[f"{name}.weight"] = (module.num_embeddings, module.embedding_dim)  # on meta it is a stand-in
    found = {name: tuple(value.shape) for name, value in state.items()}
    if found != wanted:
        name = next(name for name in {**wanted, **found} if found.get(name) != wanted.get(name))
        reason = f"{name} is {found.get(name, 'missing')}, the job's model has {wanted.get(name, 'none of that name')}"
        raise BadExport(path=str(path), reason=reason)
    for name, module in model.named_modules():
        for key in [*module._parameters, *module._buffers]:
            value = state.get(f"{name}.{key}" if name else key)
            if value is not None and key in module._parameters:
                module._parameters[key] = nn.Parameter(value, requires_grad=False)
            elif value is not None:
                module._buffers[key] = value
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        if type(module) not in (nn.Embedding, nn.EmbeddingBag):  # a subclass has a forward of its own
            continue
        assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if module.max_norm is not None and "weight" in module._parameters:
            # torch scales rows in the table itself, some of them twice where threads read them at once
            served = served_table(NumberedRows(module.weight), module)
            served.weight = module.weight  # for models that read it as a whole
            model.set_submodule(name, served)


def _quantise(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        load_int8(model, tensors)
    except (KeyError, RuntimeError) as error:
        raise BadExport(path=str(path), reason=f"not of this model: {error}") from None
