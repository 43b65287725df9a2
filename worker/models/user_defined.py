"""Models of users in jobs: any nn.Module that gives a logit per sample of ids and dense features."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from embershard.proto.errors import UserCodeFailed
from embershard.proto.user_modules import find, user_code, where_defined
from embershard.worker.data.batch import Batch, Schema
from embershard.worker.models.recommender import Recommender

Forward = Callable[[nn.Module, Batch], Tensor]  # the model, or torch's wrapper around it, and a batch -> (B,) logits


LARGE = 2**28  # floats of a table, 1 GiB, that no worker makes
_MOST_ROWS = 2**40  # in the shape of one: torch counts a tensor's bytes in 63 bits, and hashed ids have 62


class _LargeTablesOnMeta(TorchFunctionMode):
    """Tables above the limit come without memory; their first values, and that of a padding row, go nowhere."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # torch's own signature
        shape = args[0] if function is torch.empty and len(args) == 1 else ()
        if isinstance(shape, tuple | list) and len(shape) == 2 and math.prod(shape) > LARGE:
            args, kwargs = ((min(shape[0], _MOST_ROWS), shape[1]),), {**(kwargs or {}), "device": "meta"}
        return function(*args, **(kwargs or {}))


def build_model(name: str, args: Mapping[str, object], schema: Schema, dim: int) -> nn.Module:
    """Call `module:class` with `args` and with what its signature names of the data; the model that it gives.

    num_ids: size of the id space (2**62 for hashed ids), num_fields: ids of a sample, num_dense: dense features of a
    sample, features: names of the fields, dim: of the job's embeddings, schema: all of it, for es.FeatureEmbedding,
    where features have tables of their own and there is no num_ids. A table of more than 1 GiB, such as one of
    hashed ids, gets no memory here: it is on the meta device, and its first values are those of the job.

    BadModule where it is not there; UserCodeFailed, with file and line, where it raises or gives no nn.Module, or one
    without parameters.
    """
    what, make = f"model {name}", find(name)
    shape = {
        "schema": schema,
        **({} if schema.fields else {"num_ids": schema.table_rows}),  # with fields the ids of tables count from 0 each
        "num_fields": schema.num_vectors,
        "num_dense": schema.num_dense,
        "features": schema.features,
        "dim": dim,
    }
    with _LargeTablesOnMeta():
        model = call(what, make, args, shape)
    where = where_defined(make)
    if not isinstance(model, nn.Module):
        raise UserCodeFailed(what=what, reason=f"gave {model!r}, which is no nn.Module", where=where)
    if next(model.parameters(), None) is None:
        reason = "has no parameters: assign its layers to attributes of self, lists of them as nn.ModuleList"
        raise UserCodeFailed(what=what, reason=reason, where=where)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    for parameter_name, parameter in model.named_parameters():
        if parameter.is_meta and id(parameter) not in tables:
            reason = (
                f"has a parameter {parameter_name} of more than 1 GiB, or on the meta device: only tables may be so"
            )
            raise UserCodeFailed(what=what, reason=reason, where=where)
    return model


def call(what: str, make: object, args: Mapping[str, object], offered: Mapping[str, object] = {}) -> object:
    """Call a user's class or function with `args`, and with what its signature names of `offered`.

    UserCodeFailed where it cannot be called so, or raises; `what` begins the message.
    """
    where = where_defined(make)
    if not callable(make):
        raise UserCodeFailed(what=what, reason=f"is {make!r}, neither a class nor a function", where=where)
    try:
        signature = inspect.signature(make)
    except (ValueError, TypeError):  # of C code: it says itself what it does not take
        with user_code(what):
            return make(**args)
    named = {name: value for name, value in offered.items() if name in signature.parameters and name not in args}
    try:
        signature.bind(**named, **args)
    except TypeError as error:
        given = f"was given {', '.join([*named, *args]) or 'nothing'}"
        raise UserCodeFailed(what=what, reason=f"{given}, but takes {signature}: {error}", where=where) from None
    with user_code(what):
        return make(**named, **args)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let a model that is built inside draw what it draws in a run with this `train.seed`, and leave torch's generator.

    A user's model may keep tensors that no state_dict has: projections at random, buffers that are not persistent.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def forward_of(model: nn.Module, name: str = "") -> Forward:
    """Return a function from a batch to a model's logits, by what its forward takes: (ids, dense) or (ids).

    Logits may be (B,) or (B, 1), or (B, L) of several labels. UserCodeFailed where forward takes something else or,
    when it is called, raises or gives another shape; `name` is the user's name of the model.
    """
    if isinstance(model, Recommender):
        return lambda module, batch: module(batch.ids, batch.dense)
    what, where = f"model {name}", where_defined(model.forward)
    takes_dense = _takes(model.forward, 2)
    if not takes_dense and not _takes(model.forward, 1):
        reason = f"has forward{inspect.signature(model.forward)}, but is called with (ids, dense) or (ids)"
        raise UserCodeFailed(what=what, reason=reason, where=where)

    def forward(module: nn.Module, batch: Batch) -> Tensor:
        with user_code(what):
            logits: object = module(batch.ids, batch.dense) if takes_dense else module(batch.ids)
        if not isinstance(logits, Tensor) or logits.shape not in (batch.labels.shape, (len(batch), 1)):
            given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            wanted = "one logit per sample" if batch.labels.dim() == 1 else "a logit for each label of each sample"
            reason = f"gave {given} for {len(batch)} samples; return {wanted}, {tuple(batch.labels.shape)}"
            raise UserCodeFailed(what=what, reason=reason, where=where)
        return logits.reshape(batch.labels.shape)

    return forward


_WHOLE_ROWS = 8


def in_whole_rows(forward: Forward) -> Forward:
    """Logits of a batch that is filled up to a multiple of 8 rows by its last one, whose logits are left out.

    Products of matrices sum the rows behind the last multiple of 4 in another order. With whole rows an evaluation and
    a served model give a sample the same bits in any batch (MKL on Zen 4, but for layers of few inputs whose number is
    no multiple of 4: there a sample's place decides the last bit).
    """

    def whole(model: nn.Module, batch: Batch) -> Tensor:
        count, missing = len(batch), -len(batch) % _WHOLE_ROWS
        if not count or not missing:
            return forward(model, batch)
        index = torch.arange(count + missing).clamp(max=count - 1)
        dense = None if batch.dense is None else batch.dense[index.to(batch.dense.device)]
        labels = batch.labels[index.to(batch.labels.device)]
        return forward(model, Batch(batch.ids[index], dense, labels))[:count]

    return whole


def reads_dense(model: nn.Module) -> bool:
    """Whether a model takes dense features."""
    return _takes(model.forward, 2)


def embedding_inputs_of(model: nn.Module) -> Callable[[Batch], Mapping[str, Tensor]] | None:
    """Return a function that gives the ids that each table reads of a batch; None without a method embedding_inputs."""
    inputs = getattr(model, "embedding_inputs", None)
    if inputs is None:
        return None
    if _takes(inputs, 2):
        return lambda batch: inputs(batch.ids, batch.dense)
    return lambda batch: inputs(batch.ids)


def take_first_values(model: nn.Module, given: Callable[[str], bool]) -> None:
    """Move the tables whose first values the job gives (`given`, by name) to the meta device, without their own."""
    moved: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and not module.weight.is_meta and given(name):
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            empty = nn.Parameter(torch.empty(1, module.embedding_dim, device="meta"), weight.requires_grad)
            module.weight = moved.setdefault(id(weight), empty)


def _takes(function: Callable[..., object], count: int) -> bool:
    """Whether a function can be called with that many positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True
