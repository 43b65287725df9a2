"""nn.Embedding and nn.EmbeddingBag over remote tables.

Forward pulls the batch's unique rows into a leaf tensor and runs torch's own function over it, so that torch defines
every argument's meaning; backward leaves one gradient per unique row, which the next `Session.step()` pushes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx

from embershard.proto.arrays import Ids
from embershard.proto.routing import Route, sum_rows
from embershard.proto.spec import TableSpec
from embershard.worker.nn.bundle import CAN_READ, are_saves_hooked, look_up, take
from embershard.worker.nn.remote_weight import RemoteWeight
from embershard.worker.session.dense import ParameterChanged, untraced
from embershard.worker.session.gradients import RowGradients
from embershard.worker.session.reads import How, LookupResult
from embershard.worker.session.tables import RemoteTable


class _RemoteRows(nn.Module):
    """What Embedding and EmbeddingBag share: reading rows as a leaf of autograd."""

    def __init__(
        self,
        table: RemoteTable,
        num_embeddings: int | None,
        *,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        frozen: bool,
        weight: RemoteWeight | None,
    ) -> None:
        nn.Module.__init__(self)  # without the weight of nn.Embedding, which comes next for the classes below
        self.table = table
        self.num_embeddings = num_embeddings
        self.embedding_dim = table.spec.dim
        self.padding_idx = self._checked_padding(padding_idx)
        self.max_norm = None if max_norm is None else float(max_norm)
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = False  # only touched rows are ever sent, whatever torch's `sparse` says
        self._frozen = frozen
        if weight is not None:
            self.register_parameter("weight", weight)
        # follows the module through .to(device); no buffer, of which torch's own embedding has none
        device = None if weight is None else weight.device  # None: torch.set_default_device's
        self._anchor = torch.empty(0, dtype=torch.float32, device=device)

    def _checked_padding(self, padding_idx: int | None) -> int | None:
        if padding_idx is None or self.num_embeddings is None:
            return padding_idx
        if not -self.num_embeddings <= padding_idx < self.num_embeddings:
            raise ValueError(f"table {self.table.spec.name!r}: padding_idx must be within num_embeddings")
        return padding_idx % self.num_embeddings

    @property
    def frozen(self) -> bool:
        """Whether rows are read and never pushed: where the weight requires no gradient."""
        return self._is_frozen(self._weight)

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        if (weight := self._weight) is None:
            self._frozen = frozen
        else:
            weight.requires_grad_(not frozen)

    def _is_frozen(self, weight: torch.Tensor | None) -> bool:
        if weight is None:
            return self._frozen
        with torch._C.DisableTorchFunctionSubclass():  # every lookup asks
            return not weight.requires_grad

    @property
    def spec(self) -> TableSpec:
        """The specification of the table that is read."""
        return self.table.spec

    @property
    def device(self) -> torch.device:
        """The device that looked-up rows are put on."""
        return self._anchor.device

    def how(self, ids: torch.Tensor) -> How:
        """Return "rows" where these ids can be looked up in a bundle with other tables; "" where not."""
        return "rows" if self._takes_bundle() else ""

    def _takes_bundle(self) -> bool:
        """Whether rows may come in a bundle: where nothing but their sum counts of a gradient."""
        if not CAN_READ or self.padding_idx is not None or self.max_norm is not None or self.scale_grad_by_freq:
            return False
        weight = self._weight
        if isinstance(weight, RemoteWeight) and (weight.in_use or weight.batch_rows):
            return False
        return not self._is_frozen(weight) and self.device.type == "cpu"

    def _check_range(self, least: int, largest: int) -> None:
        if self.num_embeddings is not None and (least < 0 or largest >= self.num_embeddings):
            raise IndexError(
                f"table {self.table.spec.name!r}: id {least if least < 0 else largest} is out of range, "
                f"ids must be 0 to {self.num_embeddings - 1}"
            )

    def _read(self, read: LookupResult) -> tuple[torch.Tensor, torch.Tensor, int | None, Ids]:
        """(index, rows, padding, ids of the rows): rows[index] are those read, rows[padding] is the padding row."""
        read = read.alone()
        route = read.route
        if self.num_embeddings is not None and len(route.ids):
            self._check_range(int(route.ids.min()), int(route.ids.max()))
        padding = None
        if self.padding_idx is not None:
            found = np.flatnonzero(route.ids == self.padding_idx)
            padding = int(found[0]) if len(found) else None
        if self.max_norm is not None:
            self._renormalise(read)
        rows = read.rows.detach()  # shares memory; each reader has a gradient of its own
        if not self.frozen and torch.is_grad_enabled():
            if torch._C._functorch.peek_interpreter_stack() is not None:
                raise NotImplementedError(
                    f"table {self.table.spec.name!r}: rows looked up inside torch.func.vmap or grad get no gradient; "
                    "call emb(ids) outside, and use its result there"
                )
            if isinstance(weight := self._weight, RemoteWeight):
                if weight.batch_rows:
                    weight.keep_lookup(route.ids)
                weight.looked_up_at = self.table.session.clock
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _collector(self, route, read.index, padding)
            )
        return read.index, rows, padding, route.ids

    def _from_bundle(self, read: LookupResult) -> torch.Tensor | None:
        """Output from the rows of a bundle, where a lookup has them for this module and no forward has taken them."""
        bundle, member, weight = read.bundle, read.member, self._weight
        if bundle is None or bundle.readers[member] is not self or self._is_frozen(weight):
            return None
        self._check_range(bundle.least[member], bundle.largest[member])
        if not torch.is_grad_enabled():
            return look_up(read.rows, read.index, bundle.how)
        if are_saves_hooked():
            return None
        found = take(read, bundle, self.table.session.collect)
        if found is not None and isinstance(weight, RemoteWeight):  # of batch_rows there is none, see _takes_bundle
            weight.looked_up_at = self.table.session.clock
        return found

    def _renormalise(self, read: LookupResult) -> None:
        """Scale rows over max_norm down, here and on the shards, as torch does in its table."""
        assert self.max_norm is not None
        with torch.no_grad():
            over = read.rows.norm(self.norm_type, dim=1) > self.max_norm
            if not bool(over.any()):
                return
            session, name = self.table.session, self.table.spec.name
            if session.local_steps is None and not session.client.compressor.pull_codec(name).is_plain:
                # what a codec made of a row is not to take the place of what the shard keeps
                (rows,) = session.client.pull([(name, read.route.select(over.cpu().numpy()))], exact=True)
                read.rows[over] = torch.from_numpy(rows).to(read.rows.device)
                over = read.rows.norm(self.norm_type, dim=1) > self.max_norm
                if not bool(over.any()):
                    return
            torch.embedding_renorm_(read.rows, read.index.view(-1), self.max_norm, self.norm_type)
            keep = over.cpu().numpy()
            self.table.load(read.route.select(keep), read.rows[over].cpu().numpy(), keep_state=True)

    @property
    def _weight(self) -> torch.Tensor | None:
        weight = self._parameters.get("weight")
        return self.__dict__.get("weight") if weight is None else weight

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        if name == "weight" and name not in self._parameters:
            raise AttributeError(
                f"table {self.table.spec.name!r} takes any id, so it has no weight as a whole; read rows with "
                "module.table.pull(ids)"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise ParameterChanged(parameter=self.table.spec.name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name == "weight":  # as parametrizations do, to put what they compute in its place
            raise NotImplementedError(
                f"table {self.table.spec.name!r}: rows on the shards are read past what takes the place of the weight, "
                "as a parametrization does: compute with emb(ids) or emb.weight in the model's forward"
            )
        super().__delattr__(name)

    def _whole(self) -> torch.Tensor | None:
        """All rows, where this step reads them anyway, or where another tensor takes the weight's place."""
        weight = self._weight
        if isinstance(weight, RemoteWeight):
            if not weight.in_use:
                return None
            if self.max_norm is None:
                return weight.for_lookups()
            weight.check_unchanged()  # the rows are read, and scaled, on the shards
            return None
        return weight  # of torch.func.functional_call

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Follow the model to another device. TypeError for another type than float32."""
        anchor = fn(self._anchor)
        if anchor.dtype != torch.float32:
            raise TypeError(
                f"table {self.table.spec.name!r}: shards hold float32; use torch.autocast instead of converting a "
                "wrapped model"
            )
        weight = self._parameters.pop("weight", None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._anchor = anchor
        if weight is not None:
            self._parameters["weight"] = weight
        if isinstance(weight, RemoteWeight) and weight.device != self._anchor.device:
            weight.move(self._anchor.device)
        return self

    def extra_repr(self) -> str:
        """Arguments that differ from torch's defaults."""
        text = f"{self.table.spec.name!r}, {self.num_embeddings or 'any id'}, {self.embedding_dim}"
        for name in ("padding_idx", "max_norm"):
            if getattr(self, name) is not None:
                text += f", {name}={getattr(self, name)}"
        return text + (", frozen" if self.frozen else "")


class Embedding(_RemoteRows, nn.Embedding):  # type: ignore[misc]
    """nn.Embedding whose rows are on the shards; with `num_embeddings` None it takes any 64-bit id."""

    def __init__(
        self,
        table: RemoteTable,
        num_embeddings: int | None = None,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        frozen: bool = False,
        weight: RemoteWeight | None = None,
    ) -> None:
        _RemoteRows.__init__(
            self,
            table,
            num_embeddings,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            frozen=frozen,
            weight=weight,
        )

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of the ids `input` (any shape, int32 or int64), `(*input.shape, dim)`."""
        if input.layout == torch.jagged:
            rows = self.forward(input.values())
            return torch.nested.nested_tensor_from_jagged(rows, input.offsets(), input.lengths())  # type: ignore[attr-defined]
        if (whole := self._whole()) is not None:
            return F.embedding(input, whole, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq)
        read = self.table.session.read(self.table.spec, input, self.device)
        if (found := self._from_bundle(read)) is not None:
            return found
        index, rows, padding, _ = self._read(read)
        if rows.requires_grad and rows.device.type == "cpu":
            return _RowLookup.apply(rows, index)  # type: ignore[no-any-return, no-untyped-call]
        return F.embedding(index, rows, padding)


class _RowLookup(torch.autograd.Function):
    """F.embedding on the CPU, with a faster way back to the same bits; the collector drops the padding row."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)  # whose loss torch sees in a second backward
        # kept as well: an activation checkpoint puts what it has computed again in the place of what is saved
        ctx.index, ctx.num_rows = index, rows.shape[0]  # type: ignore[attr-defined]
        return F.embedding(index, rows)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _ = ctx.saved_tensors  # type: ignore[attr-defined]
        index, count = ctx.index.view(-1), ctx.num_rows  # type: ignore[attr-defined]
        gradient = gradient.reshape(-1, gradient.shape[-1])
        if torch.is_grad_enabled():  # create_graph: by operations that autograd knows
            return gradient.new_zeros(count, gradient.shape[1]).index_add(0, index, gradient), None
        return torch.from_numpy(sum_rows(index.numpy(), gradient.contiguous().numpy(force=True), count)), None


class EmbeddingBag(_RemoteRows, nn.EmbeddingBag):  # type: ignore[misc]
    """nn.EmbeddingBag whose rows are on the shards; with `num_embeddings` None it takes any 64-bit id."""

    def __init__(
        self,
        table: RemoteTable,
        num_embeddings: int | None = None,
        *,
        mode: str = "mean",
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        include_last_offset: bool = False,
        frozen: bool = False,
        weight: RemoteWeight | None = None,
    ) -> None:
        _RemoteRows.__init__(
            self,
            table,
            num_embeddings,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            frozen=frozen,
            weight=weight,
        )
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"table {table.spec.name!r}: mode must be sum, mean or max, got {mode!r}")
        if mode == "max" and scale_grad_by_freq:
            raise ValueError(f"table {table.spec.name!r}: mode max has no scale_grad_by_freq")
        self.mode = mode
        self.include_last_offset = include_last_offset

    @untraced
    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pooled rows, (bags, dim), of ids (bags, n), or of flat ids with the starts of the bags in `offsets`."""
        self._check(input, offsets, per_sample_weights)
        if (whole := self._whole()) is not None:
            return F.embedding_bag(
                input,
                whole,
                offsets,
                self.max_norm,
                self.norm_type,
                self.scale_grad_by_freq,
                self.mode,
                per_sample_weights=per_sample_weights,
                include_last_offset=self.include_last_offset,
                padding_idx=self.padding_idx,
            )
        read = self.table.session.read(self.table.spec, input, self.device)
        if per_sample_weights is None and (found := self._from_bundle(read)) is not None:
            return found
        index, rows, padding, ids = self._read(read)
        index, rows, padding = _in_order_of_ids(index, rows, padding, ids)
        return F.embedding_bag(
            index,
            rows,
            None if offsets is None else offsets.to(index.device, torch.int64),
            mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(rows.device),
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def how(self, ids: torch.Tensor) -> How:
        """Return how bags of these ids are pooled where a bundle can do it, "sum" or "mean"; "" where not."""
        if ids.dim() != 2 or not ids.shape[1] or not self._takes_bundle():
            return ""
        return "sum" if self.mode == "sum" else "mean" if self.mode == "mean" else ""

    def _check(self, input: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None) -> None:
        table = f"table {self.table.spec.name!r}"
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError(f"{table}: 2-D ids are bags already, offsets must be None")
        elif input.dim() == 1:
            if offsets is None or offsets.dim() != 1:
                raise ValueError(f"{table}: 1-D ids need 1-D offsets, got {None if offsets is None else offsets.shape}")
        else:
            raise ValueError(f"{table}: ids must be 1-D or 2-D, got {input.dim()}-D")
        if weights is not None:
            if self.mode != "sum":
                raise NotImplementedError(f"{table}: per_sample_weights need mode 'sum', not {self.mode!r}")
            if weights.shape != input.shape:
                raise ValueError(
                    f"{table}: per_sample_weights of shape {tuple(weights.shape)} do not match "
                    f"ids of shape {tuple(input.shape)}"
                )


def _in_order_of_ids(
    index: torch.Tensor, rows: torch.Tensor, padding: int | None, ids: Ids
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """The same rows in the order of their ids.

    torch sums a bag's gradients in an order that depends on how its rows compare to each other (its sort is not
    stable), and a route numbers them by shard; in this order the sums have the bits of torch's over the whole table.
    """
    order = torch.from_numpy(np.ascontiguousarray(ids)).argsort()
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device="cpu")).to(index.device)
    padding = None if padding is None else int(rank[padding])
    return rank[index], rows.index_select(0, order.to(rows.device)), padding


def _collector(
    reader: _RemoteRows, route: Route, index: torch.Tensor, padding: int | None
) -> Callable[[torch.Tensor], None]:
    """Hands the gradient of a leaf to the session, at the moment when backward has finished it.

    Before that only the autograd graph holds the leaf: a forward without a backward leaves nothing behind.
    `scale_grad_by_freq` divides a row's gradient by the number of times that its id was read.
    """

    @untraced
    def collect(rows: torch.Tensor) -> None:
        gradient, rows.grad = rows.grad, None
        if gradient is None or not gradient.shape[0] or reader.frozen:  # torch, too, drops it if frozen since
            return
        if reader.scale_grad_by_freq:  # here, since torch's own bags divide by the count of another id (2.13, CPU)
            counts = torch.bincount(index.view(-1), minlength=len(route.ids))
            gradient = gradient / counts.unsqueeze(1)
        table = reader.table
        table.session.collect(RowGradients(table.spec, route, gradient, padding))

    return collect


RemoteWeight.embedding, RemoteWeight.embedding_bag = Embedding, EmbeddingBag
