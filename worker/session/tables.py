"""What a session declared: tables, the dense weights among them, and models with what they say of their reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from embershard.proto.arrays import Floats, Ids
from embershard.proto.spec import TableSpec
from embershard.worker.patterns import matches
from embershard.worker.session.dense import DenseWeights
from embershard.worker.session.inputs import Inputs, WrappedModel, reads_of_batches
from embershard.worker.session.loading import await_loaded, load_first
from embershard.worker.session.reads import Lookup
from embershard.worker.session.remote_table import RemoteTable

if TYPE_CHECKING:
    from embershard.worker.session.session import Session

B = TypeVar("B")
Values = Callable[[], Iterable[tuple[Ids, Floats]]]  # the first rows of a table, in portions


class Declared:
    """In the order of their declaration."""

    def __init__(self, session: Session) -> None:
        self.tables: dict[str, RemoteTable] = {}
        self.dense: list[DenseWeights] = []
        self.models: list[WrappedModel] = []
        self._session = session

    def table(self, spec: TableSpec, values: Values | None) -> RemoteTable:
        """See Session.table."""
        known = self.tables.get(spec.name)
        if known is not None and known.spec == spec:
            return known
        client, local = self._session.client, self._session.local_steps
        if local is not None:
            local.add(spec)
        created = client.declare(spec, load=values is not None, dense=self._is_dense(spec))
        if values is not None:
            if created:
                load_first(client, spec, values(), created)
            await_loaded(client, spec.name)
        table = self.tables[spec.name] = RemoteTable(self._session, spec)
        return table

    def add_dense(self, dense: DenseWeights) -> None:
        """Pull and push these dense weights with the tables."""
        self.dense.append(dense)
        try:
            self._session.table(dense.spec, lambda: [(dense.ids, dense.values())])  # one that only reads refuses
            self._session.client.compressor.lay_out(dense.spec.name, dense.layout)
        except BaseException:
            self.dense.remove(dense)
            raise

    def matching(self, wanted: str) -> list[str]:
        """Tables that a name, a pattern, or "dense" stands for. ValueError where there are none."""
        compressor = self._session.client.compressor
        dense = {name: compressor.is_dense(name) for name in self.tables}
        names = [name for name in dense if (dense[name] if wanted == "dense" else matches(name, wanted))]
        if not names:
            known = dict.fromkeys([*(["dense"] if any(dense.values()) else []), *dense])  # one may have that name
            raise ValueError(f"no table matches {wanted!r} (known: {', '.join(known) or 'none'})")
        return names

    def reads(self, inputs: Inputs[B] | None) -> Callable[[B], list[Lookup]]:
        """What a batch reads; see reads_of_batches."""
        tables = [table for table in self.tables.values() if not self._is_dense(table.spec)]
        return reads_of_batches(self.models, tables, inputs)

    def _is_dense(self, spec: TableSpec) -> bool:
        return any(spec is weights.spec for weights in self.dense)
