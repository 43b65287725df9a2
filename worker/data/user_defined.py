"""Readers of users: a function or class that a job names as `data.reader: module:name`, and what each batch must be."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import Parameter
from pathlib import Path
from types import GeneratorType

import numpy as np
import torch

from embershard.proto.errors import JobError, UserCodeFailed
from embershard.proto.user_modules import find, user_code, where_defined
from embershard.worker.data.batch import (
    NUM_HASHED_IDS,
    Batch,
    Dataset,
    Evaluation,
    RowsDataset,
    Samples,
    Schema,
)
from embershard.worker.data.inputs.rows import PADDING, RowInputs
from embershard.worker.data.shuffle import check_share
from embershard.worker.data.stream import SHUFFLE_ROWS, StreamDataset, in_batches, shuffled

Rows = Samples | tuple[object, object, object]  # ids (N, F), dense features (N, D) or None, labels (N,)
_MEMBERS = ("schema", "evaluation", "splits", "num_samples", "train", "evaluate")  # of a Dataset
_FIELDS = ("loader_processes", "splits", "evaluation", "labels")  # of the job's section, which the reader is not given
_GIVEN = ("root", "seed")  # arguments that a reader gets without the job's naming them
_ADVICE = "return es.RowsDataset, or derive a class from es.Reader"


class Reader:
    """Base class of a user-defined reader that streams samples: subclasses declare their features and define `read`.

        class Logs(es.Reader):
            features = ("user", "item")
            num_ids = 1_000_000         # ids are below it; without it they are hashes (es.hash_ids)
            splits = ("valid",)         # to evaluate on, beside "train"

            def __init__(self, root, days=7): ...

            def read(self, split):
                yield ids, None, labels     # (N, 2) integers, (N, num_dense) numbers or None, (N,) labels; any N

    Ids must be unique across features: two features never share an id.

    Each of the W workers reads all samples and keeps every W-th one. If reading takes longer than training,
    override `read_share` so that a worker skips the files or blocks of other workers. Training shuffles the samples
    in a buffer of `shuffle_rows` samples (0: no shuffling), in an order determined by the job's seed and the epoch.
    """

    features: tuple[str, ...] = ()
    num_dense: int = 0
    num_ids: int | None = None
    splits: tuple[str, ...] = ()
    shuffle_rows: int = SHUFFLE_ROWS
    seed: int | None = None
    """Of the order of the samples; the job's where it is not given."""
    inputs: RowInputs | None = None
    """How ids and dense features are made of columns, so that an export can score rows."""

    def read(self, split: str) -> Iterable[Rows]:
        """Yield blocks of samples of "train" or of one of `splits`, from its start; called once per epoch."""
        raise NotImplementedError("a reader needs a method `read(self, split)`, which yields (ids, dense, labels)")

    def read_share(self, split: str, rank: int, world_size: int) -> Iterable[Rows]:
        """Blocks of worker `rank`'s share of a split: disjoint, and together everything. Here: each W-th sample."""
        start = rank  # of the next block's samples, the first that is this worker's
        for block in _checked(self.read, self.schema, split):
            yield block.take(slice(start, None, world_size))
            start = (start - len(block)) % world_size

    def set_defaults(self, where: str, seed: int) -> None:
        """Use the job's seed if the reader has none."""
        self.seed = seed if self.seed is None else self.seed

    @property
    def schema(self) -> Schema:
        """Features and the id space."""
        return Schema(tuple(self.features), self.num_dense, self.num_ids)

    @property
    def evaluation(self) -> Evaluation:
        """Labels and logits, one by one."""
        return "pointwise"

    def num_samples(self, split: str) -> int | None:
        """Return the number of samples of a split, or None if it is not known (default); some schedules need it."""
        return None

    def train(self, epoch: int, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Yield the batches of this worker's share of an epoch."""
        check_share(rank, world_size, batch_size)
        blocks = _checked(self.read_share, self.schema, "train", rank, world_size)
        if self.shuffle_rows:
            blocks = shuffled(blocks, self.shuffle_rows, np.random.default_rng((self.seed or 0, epoch, rank)))
        return (rows.batch() for rows in in_batches(blocks, batch_size))

    def evaluate(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Yield the batches of this worker's share of a split, in the order of reading."""
        check_share(rank, world_size, batch_size)
        blocks = _checked(self.read_share, self.schema, split, rank, world_size)
        return (rows.batch() for rows in in_batches(blocks, batch_size))


class CheckedDataset:
    """A user's dataset, each batch of which is checked and given the types that training needs.

    UserCodeFailed, with the split, epoch and batch, where it raises, yields nothing to train on, or has batches that
    are not as its schema says. `any_labels`: labels need not be in 0..1.
    """

    def __init__(self, dataset: Dataset, name: str, where: str, *, any_labels: bool = False) -> None:
        self._dataset, self._name, self._where, self._any_labels = dataset, f"reader {name}", where, any_labels
        missing = [member for member in _MEMBERS if not hasattr(type(dataset), member) and not hasattr(dataset, member)]
        if missing:
            raise self._failed("", f"gave a {type(dataset).__name__} without {', '.join(missing)}; {_ADVICE}")
        with user_code(self._name):
            self.schema = schema = dataset.schema
            self.evaluation: Evaluation = dataset.evaluation
            self.splits = tuple(dataset.splits)
            self.inputs: RowInputs | None = getattr(dataset, "inputs", None)
        if not isinstance(schema, Schema):
            raise self._failed("", f"has a schema of type {type(schema).__name__}, not es.Schema")
        if reason := _bad_schema(schema) or _bad_inputs(self.inputs, schema):
            raise self._failed("", reason)

    def num_samples(self, split: str) -> int | None:
        """Samples of a split, where the reader tells without reading."""
        with user_code(f"{self._name} (num_samples of {split})"):
            count = self._dataset.num_samples(split)
            return None if count is None else operator.index(count)  # numpy's own integers are no data of JSON

    def train(self, epoch: int, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Yield the batches of this worker's share of an epoch."""
        share = "" if world_size == 1 else f" for share {rank + 1} of {world_size}"
        return self._epoch(epoch, lambda: self._dataset.train(epoch, rank, world_size, batch_size), share)

    def _epoch(self, epoch: int, read: Callable[[], Iterator[Batch]], share: str = "") -> Iterator[Batch]:
        at = f"train, epoch {epoch + 1}"
        with user_code(f"{self._name} ({at})"):
            schema, batches = self._dataset.schema, read()
        if schema != self.schema:
            raise self._failed(at, f"has another schema than when it was opened: {schema}, before {self.schema}")
        empty = True
        for batch in self._batches(batches, at):
            empty = False
            yield batch
        if empty:
            raise self._failed(at, f"yielded no samples{share}")

    def evaluate(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """This worker's share of a split; it may be empty."""
        with user_code(f"{self._name} ({split})"):
            batches = self._dataset.evaluate(split, rank, world_size, batch_size)
        yield from self._batches(batches, split, groups=self.evaluation == "candidates")

    def first_batch(self, split: str, batch_size: int) -> Batch:
        """The first batch of a split, read without a buffer to shuffle in; of "train" in two epochs."""
        if split != "train":
            found = next(self.evaluate(split, 0, 1, batch_size), None)
            if found is None:
                raise self._failed(split, "yielded no samples")
            return found
        data = self._dataset
        if getattr(data.train, "__func__", None) in (Reader.train, RowsDataset.train):  # which shuffle
            read = [partial(data.evaluate, split, 0, 1, batch_size)] * 2
        else:
            read = [partial(data.train, epoch, 0, 1, batch_size) for epoch in (0, 1)]
        first, _ = (next(self._epoch(epoch, read[epoch])) for epoch in (0, 1))
        return first

    def _batches(self, batches: Iterable[object], at: str, *, groups: bool = False) -> Iterator[Batch]:
        number = 1
        if not isinstance(batches, Iterable):
            raise self._failed(at, f"returned a {type(batches).__name__} in place of batches")
        with user_code(f"{self._name} ({at})"):
            batches = iter(batches)
        while True:
            try:
                with user_code(f"{self._name} ({at}, batch {number})"):
                    batch = next(batches, None)
                    if batch is None:
                        return
                    checked = _batch(batch, self.schema, self._any_labels, groups=groups)
            except UserCodeFailed as error:
                # what is wrong with a batch is raised here, of which the user has no line
                if isinstance(error.__cause__, BadSamples):
                    where = error.__cause__.where or _at_yield(batches) or self._where
                    raise self._failed(f"{at}, batch {number}", str(error.__cause__), where) from None
                raise
            yield checked
            number += 1

    def _failed(self, at: str, reason: str, where: str = "") -> UserCodeFailed:
        what = f"{self._name} ({at})" if at else self._name
        return UserCodeFailed(what=what, reason=reason, where=where or self._where)


def first_batch(dataset: Dataset, split: str, batch_size: int) -> Batch:
    """The first batch of a split, in the order of its files where the reader allows; JobError where there is none."""
    if isinstance(dataset, CheckedDataset):
        return dataset.first_batch(split, batch_size)
    in_order = split != "train" or isinstance(dataset, (RowsDataset, StreamDataset))
    read = dataset.evaluate(split, 0, 1, batch_size) if in_order else dataset.train(0, 0, 1, batch_size)
    found = next(read, None)
    if found is None:
        raise JobError(where=f"data ({split})", reason="has no samples")
    return found


class BadSamples(ValueError):
    """Samples that are not as their schema says; `where` is the line that gave them, if it is known."""

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(reason)
        self.where = where


def open_reader(
    name: str, arguments: Mapping[str, object], *, root: Path, seed: int, any_labels: bool = False
) -> CheckedDataset:
    """Call `module:name` with the job's arguments, and with `root` and `seed` where it takes them.

    BadModule where there is no such function or class; JobError for an argument that it does not take, or one that is
    missing; UserCodeFailed where it raises, or returns what is no dataset.
    """
    made = find(name)
    where = where_defined(made)
    if not callable(made):
        raise UserCodeFailed(
            what=f"reader {name}", reason=f"is a {type(made).__name__}, no class or function", where=where
        )
    with user_code(f"reader {name}"):
        dataset = made(**_arguments(name, made, arguments, {"root": root, "seed": seed}))
    if isinstance(dataset, (Reader, RowsDataset)):
        dataset.set_defaults(name, seed)
    return CheckedDataset(dataset, name, where, any_labels=any_labels)


def takes_argument(name: str, argument: str) -> bool:
    """Whether the reader `module:name` can be called with an argument of that name. BadModule where it is not there."""
    try:
        inspect.signature(find(name)).bind_partial(**{argument: None})  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _arguments(
    name: str, made: object, arguments: Mapping[str, object], offered: Mapping[str, object]
) -> dict[str, object]:
    """The job's arguments and those of `offered` that a signature has. JobError where they do not fit it."""
    try:
        taken = inspect.signature(made).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # of some builtins nothing is known
        return dict(arguments)
    named = {key for key, p in taken.items() if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    takes = ", ".join(str(p) for p in taken.values() if p.name not in _GIVEN) or "no argument"
    where = f"{name}, {where_defined(made)}"
    if not any(p.kind is Parameter.VAR_KEYWORD for p in taken.values()):
        for key in arguments.keys() - named:
            near = difflib.get_close_matches(key, {*named, *_FIELDS} - {*_GIVEN}, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {takes}"
            raise JobError(where=f"data.{key}", reason=f"the reader has no such argument; {hint} ({where})")
    given = {key: value for key, value in offered.items() if key in named} | dict(arguments)
    for key, p in taken.items():
        if p.default is Parameter.empty and p.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
            if key not in given:
                raise JobError(where=f"data.{key}", reason=f"is missing: the reader takes {takes} ({where})")
    return given


def _checked(read: object, schema: Schema, split: str, *share: int) -> Iterator[Samples]:
    """Blocks of a user's method, each as its schema says; BadSamples with the line that yielded another one."""
    assert callable(read)
    blocks = read(split, *share)
    if not isinstance(blocks, Iterable):
        raise BadSamples(f"returned a {type(blocks).__name__} in place of blocks of samples", where_defined(read))
    for block in blocks:
        try:
            yield _samples(block, schema)
        except BadSamples as error:
            error.where = error.where or _at_yield(blocks) or where_defined(read)
            raise


def _at_yield(source: object) -> str:
    """file:line where a generator stands."""
    if not isinstance(source, GeneratorType) or source.gi_frame is None:
        return ""
    return f"{source.gi_frame.f_code.co_filename}:{source.gi_frame.f_lineno}"


def _batch(batch: object, schema: Schema, any_labels: bool, *, groups: bool) -> Batch:
    """A batch that is as its schema says. BadSamples where it is not."""
    whole = batch if isinstance(batch, Batch) else None
    rows = _samples(batch if whole is None else (whole.ids, whole.dense, whole.labels, whole.weights), schema)
    labels = rows.labels
    if not any_labels and ((labels < 0) | (labels > 1)).any():  # a missing one, NaN, is neither
        wrong = labels[(labels < 0) | (labels > 1)][0]
        raise BadSamples(f"gave a label of {wrong:g}, which is not in 0..1; data.labels: any takes other ones")
    whose = whole.groups if whole is not None else None
    if groups and (whose is None or whose.dtype != torch.int64 or whose.shape != (len(rows),)):
        shown = "none" if whose is None else f"{whose.dtype} of shape {tuple(whose.shape)}"
        raise BadSamples(f"gave groups that are not int64 of shape ({len(rows)},), but {shown}")
    made = rows.batch()
    return made if whose is None else replace(made, groups=whose)


def _samples(block: object, schema: Schema) -> Samples:
    """Samples of what a reader gave. BadSamples where they are not as its schema says."""
    try:
        given = (block.ids, block.dense, block.labels, block.weights) if isinstance(block, Samples) else block
        if not isinstance(given, tuple | list) or len(given) not in (3, 4):
            raise ValueError(f"a {type(block).__name__} in place of (ids, dense, labels)")
        rows = Samples.of(*given)
    except (ValueError, TypeError) as error:  # numpy and torch may refuse what it is made of
        raise BadSamples(f"gave samples that cannot be used: {error}") from None
    if reason := _mismatch(rows, schema):
        raise BadSamples(reason)
    return rows


def _mismatch(rows: Samples, schema: Schema) -> str:
    """How samples differ from their schema; empty where they do not."""
    num_columns, num_dense = rows.ids.shape[1], 0 if rows.dense is None else rows.dense.shape[1]
    num_labels = 1 if rows.labels.ndim == 1 else rows.labels.shape[1]
    if num_columns != schema.num_id_columns:
        known = f"{len(schema.features)}: {', '.join(schema.features)}"
        if schema.fields:
            return f"gave {num_columns} columns of ids; its schema has {schema.num_id_columns}, of features {known}"
        return f"gave ids of {num_columns} features; its schema has {known}"
    if num_dense != schema.num_dense_columns:
        return f"gave {num_dense} dense features; its schema has num_dense = {schema.num_dense_columns}"
    if num_labels != len(schema.labels):
        return f"gave {num_labels} labels; its schema has {len(schema.labels)}: {', '.join(schema.labels)}"
    if not len(rows):
        return ""
    lowest = PADDING if schema.fields else 0
    columns = [(field.name, schema.id_limits[field.table]) for field in schema.fields for _ in range(field.width)]
    for at, (feature, limit) in enumerate(columns or [(name, schema.num_ids) for name in schema.features]):
        ids, bound = rows.ids[:, at], NUM_HASHED_IDS if limit is None else limit
        if ids.min() < lowest or ids.max() >= bound:
            wrong = ids.min() if ids.min() < lowest else ids.max()
            below = f"num_ids = {limit}" if limit is not None else f"2**62 = {bound}"
            return f"gave id {wrong} of feature {feature}; ids are at least {lowest} and below {below}"
    for what, values in (("a label", rows.labels), ("a dense feature", rows.dense), ("a weight", rows.weights)):
        missing = np.isnan(values) if what == "a label" and num_labels > 1 and values is not None else False
        if values is not None and not (np.isfinite(values) | missing).all():
            return f"gave {what} that is not finite: {values[~(np.isfinite(values) | missing)][0]}"
    return ""


def _bad_inputs(inputs: object, schema: Schema) -> str:
    """What is wrong with a reader's `inputs`; empty where nothing is."""
    if inputs is None:
        return ""
    if not isinstance(inputs, RowInputs):
        return f"has inputs of type {type(inputs).__name__}, not es.RowInputs"
    ids, dense = inputs({name: [] for name in inputs.names})
    found = ids.shape[1], 0 if dense is None else dense.shape[1]
    # of lists to train on a batch has negatives, too
    if found[0] > schema.num_id_columns or found[1] != schema.num_dense_columns:
        wanted = schema.num_id_columns, schema.num_dense_columns
        return f"has inputs that make {found[0]} columns of ids and {found[1]} dense ones; its schema has {wanted}"
    return ""


def _bad_schema(schema: Schema) -> str:
    """What is wrong with a schema; empty where nothing is."""
    names, num_ids = schema.features, schema.num_ids
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
        return f"has features {names!r}; they are a tuple of names, one at least"
    if len(set(names)) < len(names):
        return f"names a feature twice: {', '.join(names)}"
    if schema.fields and tuple(field.name for field in schema.fields) != names:
        return f"has fields of other features: {', '.join(field.name for field in schema.fields)}"
    if unknown := sorted({field.table for field in schema.fields} - schema.id_limits.keys()):
        return f"has no table {unknown[0]!r}, which a field names (known: {', '.join(schema.id_limits) or 'none'})"
    if not isinstance(schema.num_dense, int) or schema.num_dense < 0:
        return f"has num_dense {schema.num_dense!r}; it is an integer of at least 0"
    if num_ids is not None and (not isinstance(num_ids, int) or num_ids < 1):
        return f"has num_ids {num_ids!r}; it is an integer of at least 1, or None for hashed ids"
    return ""
