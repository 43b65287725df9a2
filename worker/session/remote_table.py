"""One table of a session, as models and programs hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from embershard.proto.arrays import Floats, Ids
from embershard.proto.routing import Route, make_route
from embershard.proto.spec import TableSpec
from embershard.worker.session.reads import Lookup

if TYPE_CHECKING:
    from embershard.worker.session.session import Session


class RemoteTable:
    """One table of a session, declared on every shard."""

    def __init__(self, session: Session, spec: TableSpec) -> None:
        self.session = session
        self.spec = spec

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids` (any shape, int32 or int64) as they are now, (*ids.shape, dim), apart from autograd.

        Whatever the table's pull codec, they have the shards' bits.
        """
        read = self.session.pull([Lookup(self, ids, ids.device)])[self.spec.name][0]
        return read.rows[read.index]

    def load(self, route: Route, rows: Floats, *, keep_state: bool = False) -> None:
        """Assign rows ((U, dim) float32, in route order); their optimizer's state starts anew, unless it is kept."""
        self.session.load(self, route, rows, keep_state=keep_state)

    def route(self, ids: torch.Tensor) -> Route:
        """The route of a tensor of ids. RuntimeError unless they are int32 or int64."""
        return make_route(self.flat(ids), self.spec.space_key, self.session.placement)

    def flat(self, ids: torch.Tensor) -> Ids:
        """Ids as (N,) int64 on the host. RuntimeError unless they are int32 or int64."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise RuntimeError(f"table {self.spec.name!r}: ids must be int64 or int32, got {ids.dtype}")
        return ids.detach().to("cpu", torch.int64).contiguous().view(-1).numpy()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"table {self.spec.name!r} lives on the shards and cannot be copied; copy the model before wrapping it"
        )

    __reduce__ = __deepcopy__  # type: ignore[assignment]
