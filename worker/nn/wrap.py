"""`wrap`: an nn.Module whose weights live on the shards.

nn.Embedding and nn.EmbeddingBag become remote tables, every other parameter blocks of one dense table. What stays
here: buffers (the running statistics of batch norm, for instance) and frozen parameters of other types than float32, or
of classes with functions of their own (quantised ones).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import nn
from torch.jit._script import RecursiveScriptModule
from torch.nn.utils import parametrize

from embershard.proto.arrays import Floats, Ids
from embershard.proto.errors import TableMismatch
from embershard.proto.spec import Adagrad, Constant, Initializer, Normal, Optimizer, RowWiseAdagrad, TableSpec
from embershard.worker.nn.embedding import Embedding, EmbeddingBag
from embershard.worker.nn.hooks import MARK, install
from embershard.worker.nn.remote_weight import WHOLE_LIMIT, RemoteWeight
from embershard.worker.patterns import choose
from embershard.worker.session.dense import BLOCK, DenseWeights, RemoteParameter, layout_seed
from embershard.worker.session.session import Session
from embershard.worker.session.tables import RemoteTable, Values

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
Tables = dict[str, Embedding | EmbeddingBag]  # by module name, every name of a module that has several

_PORTION = 2**18  # rows loaded at a time
# of a module, what torch calls around it
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class OtherParameters(TableMismatch):
    """Dense weights of another model under the name of this one's."""

    template = (
        "table {table!r} holds the dense weights of a model with other parameters; use another prefix, or other shards"
    )


@dataclass(frozen=True, slots=True)
class _TableModules:
    """Modules that share one weight, and so one table."""

    names: list[str]  # of every place in the tree, the first names the table
    modules: list[nn.Embedding | nn.EmbeddingBag]

    @property
    def weight(self) -> nn.Parameter:
        return self.modules[0].weight  # type: ignore[return-value]


def wrap(
    model: nn.Module,
    session: Session,
    *,
    optimizer: Optimizer | Mapping[str, Optimizer],
    dense_optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    dense: Literal["ps", "ddp", "fsdp"] = "ps",
    initializer: Initializer | Mapping[str, Initializer | None] | None = None,
    id_space: Mapping[str, str] | None = None,
    seed: int = 0,
    prefix: str = "",
    whole_limit: int = WHOLE_LIMIT,
    beyond_limit: Literal["error", "batch_rows"] = "error",
) -> nn.Module:
    """Move a model's weights to the shards, and return the same model, to be trained with `session.step()`.

    Every nn.Embedding and nn.EmbeddingBag becomes a table, all other parameters rows of a dense table. The worker
    that creates the tables loads its values onto the shards, and the other workers use these. A table on the `meta`
    device is never materialised: `initializer` (default: Normal(0, 1), as in torch) and `seed` determine the first
    values of its rows. `dense_optimizer` defaults to `optimizer`, or to Adagrad for RowWiseAdagrad; its clip_norm
    applies to blocks of 1024 floats. `optimizer`, `dense_optimizer` and `initializer` may each be a mapping by
    pattern, for example {"user_*": es.Adam(lr=1e-3), "*": es.SGD(lr=0.1)}: the first pattern applies that matches
    the name of an embedding or a dense parameter, or of a module that contains it. `id_space` gives modules (by
    name) a common id space, so that one route serves all of them; it defaults to the model's `embedding_id_spaces`.
    `prefix` is put before the names of tables, for several models on the same shards.

    With `dense` "ddp" or "fsdp" only the embeddings move, and the other parameters stay with torch: pass the result
    to DistributedDataParallel (or its parts to fully_shard), create a torch optimizer for its parameters, and step
    both, `optimizer.step(); session.step()`. Gradients are then the mean over the workers, whatever the sizes of
    their batches, so push with the same weight on all workers.

    Model and loop can use parameters as before: any use, in forward or elsewhere, computes with the shards' values.
    The weight of an embedding is read by rows (`F.embedding(ids, emb.weight)`, `emb.weight[ids]`), and as a whole
    by all other uses (a tied layer, `F.linear(h, emb.weight)`, a sum over `model.parameters()`, `state_dict`), up
    to `whole_limit` bytes. For a larger table such a use is an error or, with `beyond_limit` "batch_rows", it gets
    the rows that this step has looked up, (U, dim): a regulariser over all parameters, added after the forward,
    then covers the batch's rows. A change in place raises ParameterChanged, because the next pull would undo it; so
    does a step of torch's optimizer.

    A subclass of nn.Embedding with its own forward is trained as a dense parameter. Frozen tables are pulled and
    never pushed; frozen dense parameters are loaded once, so that all workers have the same values, and are trained
    when they are unfrozen.

    ValueError if the model cannot be wrapped: it is already wrapped, is scripted as a whole, is tied to a table that
    cannot be read as a whole, has a tensor or another parameter in the memory of a parameter (self.w =
    emb.weight.data), or has parameters that are not initialised, on the meta device without being a table, or, where
    the shards hold them, not float32 or of a class with its own __torch_function__. TypeError for an optimizer of
    torch. OtherParameters if the shards hold other dense weights; OtherRows if another worker's embedding has another
    num_embeddings; TableTooLarge if a use would read a table beyond the limit as a whole.
    """
    if hasattr(model, MARK):
        raise ValueError("this model is wrapped already")
    if isinstance(model, RecursiveScriptModule):
        raise ValueError(
            "a scripted model takes no forward hook, which wrap needs: wrap torch.nn.Sequential(model), or script parts"
        )
    _refuse_wrapped(model)
    if id_space is None:
        id_space = getattr(model, "embedding_id_spaces", {})
    if dense not in ("ps", "ddp", "fsdp"):
        raise ValueError(f"dense must be ps, ddp or fsdp, got {dense!r}")
    if dense != "ps" and dense_optimizer is not None:
        raise ValueError(f"dense_optimizer: with dense {dense!r} torch's own optimizer trains the dense weights")
    optimizers = _rules(optimizer)
    _check_kinds("optimizer", optimizers)
    if dense_optimizer is not None:
        _check_kinds("dense_optimizer", _rules(dense_optimizer))
    of_dense = _dense_rules(optimizers, dense_optimizer) if dense == "ps" else {}
    if beyond_limit not in ("error", "batch_rows"):
        raise ValueError(f"beyond_limit must be error or batch_rows, got {beyond_limit!r}")
    batch_rows = beyond_limit == "batch_rows"
    settings = _Settings(optimizers, _rules(initializer), seed, prefix, whole_limit, batch_rows, dense == "ps")
    model, tables = _move_tables(model, session, settings, id_space)
    weights = _dense(model, session, of_dense, _dense_name(tables, prefix)) if dense == "ps" else None
    if dense != "ps" and session.membership is not None:
        session.membership.may_rejoin = session.membership.terms.staleness is None
    install(model, session, tables, weights)
    return model


def _refuse_wrapped(model: nn.Module) -> None:
    """ValueError for a parameter that the wrap of another model has moved: two tables would hold it."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, RemoteParameter | RemoteWeight):
            raise ValueError(
                f"parameter {name!r} is on the shards already, since a model that has it was wrapped: wrap once, one "
                "module that holds all models that share it; after a wrap that ended with an error, build the model "
                "anew"
            )


def _rules(given: T | Mapping[str, T]) -> Mapping[str, T]:
    return given if isinstance(given, Mapping) else {"*": given}


def _check_kinds(name: str, rules: Mapping[str, object]) -> None:
    """TypeError for what no shard can apply, as an optimizer of torch or a name."""
    for rule in rules.values():
        if not isinstance(rule, Optimizer):
            what = f"{type(rule).__module__}.{type(rule).__qualname__}"
            raise TypeError(
                f"{name} is a {what}, and the shards apply optimizers of embershard: give one, as es.Adam(lr=0.001)"
            )


def _dense_rules(
    optimizers: Mapping[str, Optimizer], given: Optimizer | Mapping[str, Optimizer] | None
) -> Mapping[str, Optimizer]:
    if given is None and "*" not in optimizers:
        raise ValueError("optimizer has no pattern '*', which the dense weights would take: give dense_optimizer")
    rules = {"*": elementwise(optimizers["*"])} if given is None else _rules(given)
    if any(isinstance(optimizer, RowWiseAdagrad) for optimizer in rules.values()):
        raise ValueError("dense_optimizer: RowWiseAdagrad keeps one accumulator per row; use Adagrad for dense weights")
    return rules


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the tables of a model are made with."""

    optimizers: Mapping[str, Optimizer]  # by pattern
    initializers: Mapping[str, Initializer | None]
    seed: int
    prefix: str
    whole_limit: int  # bytes
    batch_rows: bool  # whether the rows of a batch stand for a larger table
    are_parameters: bool  # whether the tables' weights stay among the model's parameters

    def may_be_tied(self, weight: nn.Parameter) -> bool:
        """Whether a layer may read a table's weight as a whole."""
        return self.are_parameters and not weight.is_meta and 4 * weight.numel() <= self.whole_limit


def _move_tables(
    model: nn.Module, session: Session, settings: _Settings, id_space: Mapping[str, str]
) -> tuple[nn.Module, Tables]:
    """The model with remote embeddings in the place of its own, and these."""
    groups = _groups(model)
    _validate(model, groups, id_space, settings)
    names = _table_names(groups, settings.prefix)
    _validate_names(session, names)
    modules = [group.names[0] for group in groups]
    optimizer_of = choose(modules, settings.optimizers, "optimizer")
    initializer_of = choose(modules, settings.initializers, "initializer")
    replaced: dict[nn.Module, Embedding | EmbeddingBag] = {}
    for group, name in zip(groups, names, strict=True):
        # a materialised table has all its values: its rows never come from an initializer
        initializer = settings.initializers[initializer_of[group.names[0]]] if group.weight.is_meta else None
        spec = TableSpec(
            name=name,
            dim=group.weight.shape[1],
            optimizer=settings.optimizers[optimizer_of[group.names[0]]],
            initializer=initializer or Normal(),
            id_space=next((id_space[n] for n in group.names if n in id_space), ""),
            seed=settings.seed,
        )
        num_rows = group.modules[0].num_embeddings
        table = session.table(spec, _values(group), num_rows=num_rows)
        weight = RemoteWeight.of(group.weight, table, num_rows, settings.whole_limit, batch_rows=settings.batch_rows)
        for module in group.modules:
            module._parameters["weight"] = weight  # instead of one on meta, for whoever keeps the module
            replaced[module] = remote = _remote(module, table, weight)
            if not settings.are_parameters:  # torch's optimizers, DDP and FSDP take all parameters for their own
                del remote._parameters["weight"]
                remote.__dict__["weight"] = weight
    tables = {name: replaced[m] for name, m in model.named_modules(remove_duplicate=False) if m in replaced}
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is not None and child in replaced:
                parent._modules[key] = replaced[child]
    return replaced.get(model, model), tables


def _validate_names(session: Session, names: Iterable[str]) -> None:
    """Between workers a table is shared by its name; within one session that would silently mix two models."""
    if taken := sorted(session.table_names.intersection(names)):
        raise ValueError(
            f"this session has a table {taken[0]!r} already; give this model a prefix of its own: "
            "wrap(..., prefix='second/')"
        )


def _is_table(module: nn.Module) -> bool:
    """Whether a module does what torch's own class does."""
    for kind in (nn.Embedding, nn.EmbeddingBag):
        if isinstance(module, kind):
            return type(module).forward is kind.forward or parametrize.is_parametrized(module)
    return False


def _groups(model: nn.Module) -> list[_TableModules]:
    groups: dict[int, _TableModules] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not _is_table(module):
            continue
        assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if parametrize.is_parametrized(module):
            raise ValueError(f"module {name!r} is parametrized; a remote table cannot be, remove the parametrization")
        if any(getattr(module, kind) for kind in _HOOKS):
            raise ValueError(f"module {name!r} has hooks, which its remote twin would lose; register them after wrap")
        weight = module.weight
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            raise ValueError(
                f"the weight of module {name!r} has hooks, which would see no gradient, for rows are read by batch: "
                "remove them, and change emb.weight.grad between backward() and session.step()"
            )
        own = [
            key for part in (module._parameters, module._buffers, module._modules) for key in part if key != "weight"
        ]
        if own:
            raise ValueError(
                f"table {name!r} has a {own[0]!r} of its own, which a remote one has not; keep it beside it"
            )
        group = groups.setdefault(id(module.weight), _TableModules([], []))
        group.names.append(name)
        if module not in group.modules:
            group.modules.append(module)
    return list(groups.values())


def _validate(model: nn.Module, groups: list[_TableModules], id_space: Mapping[str, str], settings: _Settings) -> None:
    """ValueError for what cannot be wrapped, before anything is declared."""
    tables = {id(group.weight): group.names[0] for group in groups}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{key}" if name else key
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(f"parameter {full!r} has no shape yet; run one forward before wrap")
            owner = tables.get(id(parameter))
            if owner is not None and not _is_table(module) and not settings.may_be_tied(parameter):
                raise ValueError(
                    f"parameter {full!r} is the weight of embedding {owner!r} too, and reads the whole table: that "
                    "takes dense='ps', a weight that is not on the meta device, and a table of at most "
                    f"{settings.whole_limit} bytes (wrap(..., whole_limit=)); untie them, or score sampled candidates"
                )
            moves = owner is not None or (parameter.requires_grad and settings.are_parameters)
            if moves and _has_own_functions(parameter):
                raise ValueError(
                    f"parameter {full!r} is a {type(parameter).__name__}, a class with its own __torch_function__ or "
                    "__torch_dispatch__, which it would lose on the shards: make it a torch.nn.Parameter, and compute "
                    "in forward what the class does"
                )
            if parameter.dtype != torch.float32 and moves:
                remedy = "call model.float() before wrap, and use torch.autocast for mixed precision"
                if parameter.is_complex():  # which float() leaves as it is
                    remedy = "make torch.view_as_real(values) the parameter, and use torch.view_as_complex in forward"
                raise ValueError(f"parameter {full!r} is {parameter.dtype}; shards hold float32: {remedy}")
            if parameter.is_meta and owner is None:
                raise ValueError(
                    f"parameter {full!r} is on the meta device; only embeddings may stay there: materialise the others"
                )
    moving = {n: p for n, p in model.named_parameters() if settings.are_parameters or id(p) in tables}
    _refuse_aliases(model, {_memory(p): n for n, p in moving.items() if _memory(p)})
    _refuse_overlaps(model, moving)
    known = {name for group in groups for name in group.names}
    unknown = sorted(set(id_space) - known)
    if unknown:
        raise ValueError(
            f"id_space names {', '.join(unknown)}, which is no embedding (known: {', '.join(sorted(known))})"
        )


def _has_own_functions(parameter: nn.Parameter) -> bool:
    """Whether a parameter's class changes what functions of torch do with it, as those of quantised weights do."""
    kind = type(parameter)
    plain = (nn.Parameter.__torch_function__, nn.Parameter.__torch_dispatch__)
    return (kind.__torch_function__, kind.__torch_dispatch__) != plain


def _refuse_aliases(model: nn.Module, moved: Mapping[int, str]) -> None:
    """ValueError for a tensor in the memory of a parameter that moves: it would keep the first values."""
    for name, module in model.named_modules():
        # of torch.nn.utils.spectral_norm, for instance, which computes its tensor anew
        computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        for key, kept in {**dict(module.named_buffers(recurse=False)), **vars(module)}.items():
            for value in _tensors([kept]):
                if key not in computed and not isinstance(value, nn.Parameter) and _memory(value) in moved:
                    raise ValueError(
                        f"{f'{name}.{key}'.lstrip('.')} shares memory with parameter {moved[_memory(value)]!r}, which "
                        "moves to the shards, and would keep its first values: use the parameter instead, or clone it"
                    )


def _tensors(kept: Iterable[object], depth: int = 2) -> Iterator[torch.Tensor]:
    """The tensors among what attributes hold, and in their lists and dicts, which may have millions of numbers."""
    for value in kept:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth and isinstance(value, list | tuple | dict):  # not of a mapping that reads files
            yield from _tensors(value.values() if isinstance(value, dict) else value, depth - 1)


def _refuse_overlaps(model: nn.Module, moving: Mapping[str, nn.Parameter]) -> None:
    """ValueError for two parameters in one memory, as after b.data = a.data: on the shards each has its own values."""
    placed = [(p.data_ptr(), n, p) for n, p in model.named_parameters() if _memory(p) and p.numel()]
    before: list[tuple[str, nn.Parameter]] = []  # those that reach behind the start of the next one
    for start, name, parameter in sorted(placed, key=lambda its: its[0]):
        before = [its for its in before if its[1].data_ptr() + _reach(its[1]) > start]
        for other, its in before:
            is_trained = its.requires_grad or parameter.requires_grad
            if is_trained and not moving.keys().isdisjoint((other, name)) and _have_common_elements(its, parameter):
                raise ValueError(
                    f"parameters {other!r} and {name!r} share memory, and would be trained apart on the shards: make "
                    "them one parameter (b.weight = a.weight, in place of b.weight.data = a.weight.data), or clone "
                    "one of them"
                )
        before.append((name, parameter))


def _have_common_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors, of which the first begins no later, have memory in common; columns of one matrix do not."""
    offset = second.data_ptr() - first.data_ptr()
    memory = np.empty(max(_reach(first), offset + _reach(second)), np.uint8)  # never touched
    one, other = (
        np.ndarray(
            its.shape, f"V{its.element_size()}", memory, at, [stride * its.element_size() for stride in its.stride()]
        )
        for its, at in ((first, 0), (second, offset))
    )
    return np.shares_memory(one, other)


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _memory(tensor: torch.Tensor) -> int:
    """Where a tensor lies; 0 for nowhere."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a DTensor is made of other tensors
        return 0


def _table_names(groups: list[_TableModules], prefix: str) -> list[str]:
    names = [prefix + re.sub(r"[^\w.\-/]", "_", group.names[0] or "embedding", flags=re.ASCII) for group in groups]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"several embeddings would be named {', '.join(sorted(twice))}; rename one of the modules")
    return names


def _dense_name(tables: Tables, prefix: str) -> str:
    name = f"{prefix}dense"
    taken = any(module.table.spec.name == name for module in tables.values())
    return f"{name}.blocks" if taken else name


def elementwise(optimizer: Optimizer) -> Optimizer:
    """The optimizer for blocks of unrelated floats: an accumulator per row means nothing there."""
    if isinstance(optimizer, RowWiseAdagrad):
        return Adagrad(**optimizer.params())
    return optimizer


def _values(group: _TableModules) -> Values | None:
    """First values of a table: a materialised weight, or for a meta one its padding row, which starts as zero."""
    weight = group.weight
    if not weight.is_meta:
        return lambda: _portions(weight)
    padding = [m.padding_idx for m in group.modules if m.padding_idx is not None]
    if not padding:
        return None
    ids = np.array(sorted({int(p) for p in padding}), np.int64)
    return lambda: [(ids, np.zeros((len(ids), weight.shape[1]), np.float32))]


def _portions(weight: torch.Tensor) -> Iterator[tuple[Ids, Floats]]:
    for start in range(0, weight.shape[0], _PORTION):
        rows = weight.detach()[start : start + _PORTION].cpu().contiguous().numpy()
        yield np.arange(start, start + len(rows), dtype=np.int64), rows


def _remote(
    module: nn.Embedding | nn.EmbeddingBag, table: RemoteTable, weight: RemoteWeight
) -> Embedding | EmbeddingBag:
    """The remote twin of a module, with the methods of a class of its own, and with what the model keeps in it."""
    remote: Embedding | EmbeddingBag
    if isinstance(module, nn.Embedding):
        remote = _class_of(module, Embedding)(
            table,
            module.num_embeddings,
            padding_idx=module.padding_idx,
            max_norm=module.max_norm,
            norm_type=module.norm_type,
            scale_grad_by_freq=module.scale_grad_by_freq,
            weight=weight,
        )
    else:
        remote = _class_of(module, EmbeddingBag)(
            table,
            module.num_embeddings,
            mode=module.mode,
            padding_idx=module.padding_idx,
            max_norm=module.max_norm,
            norm_type=module.norm_type,
            scale_grad_by_freq=module.scale_grad_by_freq,
            include_last_offset=module.include_last_offset,
            weight=weight,
        )
    for key, value in vars(module).items():
        vars(remote).setdefault(key, value)
    return remote.train(module.training)


def _class_of(module: nn.Module, remote: type[M]) -> type[M]:
    own = type(module)
    return remote if own in (nn.Embedding, nn.EmbeddingBag) else type(own.__name__, (remote, own), {})


def _dense(model: nn.Module, session: Session, rules: Mapping[str, Optimizer], name: str) -> list[DenseWeights]:
    """The dense weights by their optimizers: those of "*" are table `name`, those of the nth pattern `name`.n."""
    float32 = [(n, p) for n, p in model.named_parameters() if p.dtype == torch.float32]
    named = {n: p for n, p in float32 if not isinstance(p, RemoteWeight) and not _has_own_functions(p)}
    pattern_of = choose(named, rules, "dense_optimizer") if named else {}
    tables = []
    for number, (pattern, optimizer) in enumerate(rules.items(), start=1):
        chosen = [(n, p) for n, p in named.items() if pattern_of[n] == pattern]
        if chosen:
            own = name if pattern == "*" else f"{name}.{number}"
            tables.append(_dense_table(session, chosen, optimizer, own))
    return tables


def _dense_table(
    session: Session, named: list[tuple[str, nn.Parameter]], optimizer: Optimizer, name: str
) -> DenseWeights:
    _validate_names(session, [name])
    # every worker must cut its parameters alike: the seed, which nothing else uses here, says how
    spec = TableSpec(
        name=name, dim=BLOCK, optimizer=optimizer, initializer=Constant(), id_space=name, seed=layout_seed(named)
    )
    dense = DenseWeights(spec, named, session.placement)
    try:
        session.add_dense(dense)
    except TableMismatch as error:
        if "seed" not in str(error.fields.get("difference", "")):
            raise
        raise OtherParameters(table=name) from error
    session.client.directory.subscribe(dense.place)
    return dense


def dense_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict of a wrapped model without its tables."""
    state: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, Embedding | EmbeddingBag):
            module._save_to_state_dict(state, f"{name}." if name else "", keep_vars=False)
    return state
