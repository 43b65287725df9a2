"""One worker's training: tables and dense weights read at a clock, gradients collected, and pushed at each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import NoReturn, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from embershard.proto.codec.name import CodecName
from embershard.proto.codec.user_defined import CodecRegistry
from embershard.proto.messages import READ_ONLY_WORKER
from embershard.proto.routing import Placement, Route
from embershard.proto.spec import TableSpec
from embershard.proto.timing import span
from embershard.proto.transport.addresses import parse_addresses
from embershard.proto.transport.emulated_link import UNLIMITED, parse_bandwidth
from embershard.worker.client.client import DEFAULT_TIMEOUT, Client, LrScale
from embershard.worker.client.connections import ClientStats
from embershard.worker.client.membership import Membership, Terms
from embershard.worker.compression.settings import Compression, codec_of
from embershard.worker.session.codec_switch import Switching
from embershard.worker.session.dense import DenseWeights
from embershard.worker.session.gradients import RowGradients, merge, to_arrays
from embershard.worker.session.inputs import Inputs
from embershard.worker.session.local_steps import LocalSteps
from embershard.worker.session.reads import Lookup, Read, Reads
from embershard.worker.session.remote_table import RemoteTable
from embershard.worker.session.tables import Declared, Values
from embershard.worker.session.traffic import Traffic

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
B = TypeVar("B")


class Session:
    """A worker's connection to the shards, and its clock.

    One thread trains with a session: forward, backward, `step()`. With `zero_grad()` and `step()` it stands where a
    training loop expects an optimizer. `lr_scale` multiplies the learning rate of every following push.

    Inside `for batch in session.prefetch(loader):` rows are pulled before they are needed and pushes are on their way
    while the loop goes on; everywhere else a forward waits for its rows, and a step for its push.
    """

    def __init__(
        self, client: Client, *, local_steps: int | None = None, compression: Compression | None = None
    ) -> None:
        self.client = client
        if compression is not None:
            client.compressor.settings = compression
        self.lr_scale = 1.0
        self.declared = Declared(self)
        self._collected: list[RowGradients] = []
        self._traffic = Traffic(client, None if local_steps is None else LocalSteps(client, local_steps))
        self.switching = Switching(client, self._traffic.settle)

    @property
    def clock(self) -> int:
        """Steps until now; a worker that joins a job late, or again, is at the job's."""
        return self._traffic.clock

    @property
    def membership(self) -> Membership | None:
        """This worker's place among the others; None for one that trains for itself."""
        return self.client.membership

    @property
    def placement(self) -> Placement:
        """Where ids live."""
        return self.client.placement

    @property
    def table_names(self) -> frozenset[str]:
        """Tables that this session declared."""
        return frozenset(self.declared.tables)

    @property
    def tables(self) -> tuple[RemoteTable, ...]:
        """What this session declared, dense weights included."""
        return tuple(self.declared.tables.values())

    @property
    def dense_weights(self) -> tuple[DenseWeights, ...]:
        """The dense weights that are pulled and pushed with the tables."""
        return tuple(self.declared.dense)

    @property
    def stats(self) -> ClientStats:
        """Counters since the start; `wait_seconds` is what the training thread waited for rows and for pushes."""
        return self._traffic.stats

    def staleness_seen(self) -> tuple[int, ...]:
        """Pushes to all shards by the updates that their rows had missed: 0, 1, ...; the last number: so many or more.

        Those whose rows' version is not known, as with a cache, are not among them.
        """
        return tuple(map(sum, zip(*(status.staleness_seen for status in self.client.status()), strict=True)))

    @property
    def local_steps(self) -> LocalSteps | None:
        """The copies that this worker trains on, if it does."""
        return self._traffic.local

    def cache_rows(self, rows: int = 100_000, staleness: int = 4) -> None:
        """Keep copies of up to `rows` hot rows per table in this process, and read them for `staleness` clocks.

        A forward at clock t (in `prefetch`: at batch t, beyond its own bound) then shows at least this worker's pushes
        up to t - 1 - staleness. `stats` counts the rows that were looked up and found. Dense weights, `pull`, and what
        a loop reads beyond its prefetched rows are never taken from copies; `load` and `refresh` drop them. Where
        max_norm scales a copy, it may take back pushes that the copy does not show. In a job with a bound, rows are
        pulled so much fresher that copies hold it, too. ValueError unless both are above zero, and where copies would
        break what `connect` promised.
        """
        self._traffic.keep_copies(rows, staleness)

    def compress(
        self, tables: str, *, push: str | CodecName | None = None, pull: str | CodecName | None = None
    ) -> list[str]:
        """Have tables travel so from the next push and pull on; their names.

        `tables` is a name, a pattern, or "dense" for all dense weights. A codec is one of docs/compression.md, such as
        "int8" or "topk:0.01+fp16s"; a direction that is not named stays as it is. What a codec has held back goes with
        the next push, or is what the next one holds back. It waits for the pushes that are under way. ValueError,
        before anything changes, where no table has such a name, and for a codec that is none or cannot serve one of
        them; UnknownCodec where a shard was not started with it.
        """
        names, check = self.declared.matching(tables), self.client.compressor.check
        to_shards, from_shards = (None if codec is None else codec_of(codec) for codec in (push, pull))
        self.switching.switch({name: check(name, to_shards, from_shards) for name in names})
        return names

    @property
    def missed_reads(self) -> int:
        """Reads inside `prefetch` of rows that had not been pulled ahead."""
        return self._traffic.ahead.missed

    def table(self, spec: TableSpec, values: Values | None = None) -> RemoteTable:
        """The table of `spec`, created where it does not exist.

        `values` gives its first (ids, rows) in portions; they are loaded by the worker that created the table, and
        every other worker waits until that is done. TableMismatch where the shards hold other settings.
        """
        return self.declared.table(spec, values)

    def read(self, table: RemoteTable, ids: torch.Tensor, device: torch.device) -> Read:
        """Rows for a tensor of ids: those pulled ahead for these ids, or pulled now."""
        return self._traffic.read(Lookup(table, ids, device))

    def read_ahead(self, wanted: Sequence[Lookup], dense: Sequence[DenseWeights] = ()) -> None:
        """Pull what is not here yet, and the dense weights that are out of date, in one request per shard."""
        self._traffic.read_ahead(wanted, dense)

    def forget_ahead(self) -> None:
        """Let go of what was pulled for one forward."""
        self._traffic.ahead.forward = {}

    def pull(self, wanted: Sequence[Lookup], dense: Sequence[DenseWeights] = ()) -> Reads:
        """Rows and dense weights as shards keep them now, after every push before, in one request per shard."""
        with self._traffic.exact(dense):
            return self._traffic.pull(wanted, dense)

    def exact(self) -> AbstractContextManager[None]:
        """Inside, forwards read rows and dense weights as the shards keep them, past the tables' pull codecs.

        For evaluations: what training reads before and after keeps its bits.
        """
        return self._traffic.exact(self.declared.dense)

    def load(self, table: RemoteTable, route: Route, rows: Floats, *, keep_state: bool = False) -> None:
        """Assign rows, after every push before; what was pulled ahead of the table is no longer up to date."""
        self._traffic.load(table.spec.name, route, rows, keep_state=keep_state)

    def collect(self, gradients: RowGradients) -> None:
        """Keep gradients until the next step."""
        self._collected.append(gradients)

    def gradients(self) -> list[RowGradients]:
        """What backward left for the tables until now, one part per table, to be changed in place if need be.

        Gradients of an id that was read several times are summed. They are on the device of the module that read.
        """
        self._collected = merge(self._collected, self.placement, self.client.compressor.packs)
        return list(self._collected)

    def step(self, lr_scales: Mapping[str, float] | None = None, *, weight: float = 1.0) -> None:
        """Push what backward left, to all shards at once, and advance the clock; `stats` counts the rows.

        `lr_scales` multiplies the learning rate of each table that it names, on top of `lr_scale`. `weight` is what
        these gradients count among those of the workers of a synchronous job: the number of samples of their mean.

        Gradients are cleared, so that no zero_grad is needed. It waits for the shards; inside `prefetch` it does not,
        unless too many pushes are on their way. There it first raises the error of an earlier push, if there was one,
        and has done nothing then. If a shard gives no answer in time, its part of the push is sent again, once, with
        the next step.
        """
        self._traffic.check()
        self.switching.follow(self.clock)
        with span("push"):
            gradients = to_arrays(self.gradients())
            gradients += [part for weights in self.declared.dense if (part := weights.gradients()) is not None]
            self._collected.clear()
            lr_scale: LrScale = self.lr_scale
            if lr_scales is not None:
                lr_scale = {table: self.lr_scale * lr_scales.get(table, 1.0) for table, _, _ in gradients}
            self._traffic.push(gradients, lr_scale, weight)

    def prefetch(
        self,
        loader: Iterable[B],
        *,
        staleness: int | None = None,
        inputs: Inputs[B] | None = None,
    ) -> Iterator[B]:
        """The loader's batches, each with its rows and the dense weights pulled ahead, while pushes are on their way.

        A batch shows this worker's pushes of all batches before it but the last `staleness` ones; with 0 the weights
        have the same bits as without prefetch. It defaults to the bound that `connect` was given, without one to 0. At
        most staleness + 1 pushes are in flight. The loader, and what says which ids a batch reads, run in a thread of
        their own, some batches ahead: `inputs(batch)` gives the ids by embedding module (of several models: by table),
        and defaults to the model's `embedding_inputs`, called with the batch, or with the parts of a batch that is a
        tuple or list. Rows that the model reads beyond these are pulled when it does.

        Errors of the loader, of pulls and of pushes are raised where the next batch is taken, those of pushes also by
        `step`; after a `break`, by the next use of the session. When the loop is left, everything in flight has been
        waited for. With a staleness above 0, max_norm may take back what a push in flight did to the rows it scales.

        ValueError where nothing says what a batch reads, or for a staleness that is negative or beyond the job's;
        RuntimeError inside another prefetch of this session.
        """
        return self._traffic.loop(loader, self.declared.reads(inputs), self.declared.dense, staleness)

    def flush(self) -> None:
        """Wait until every push is acknowledged; raises the error of one that was not. Local steps end a round."""
        self._traffic.flush()

    def zero_grad(self) -> None:
        """Drop the gradients collected since the last step."""
        self._collected.clear()
        for weights in self.declared.dense:
            weights.clear()

    def skip(self) -> None:
        """A step that changes nothing: the gradients are dropped, the clock moves on for everybody."""
        self.zero_grad()
        self.step(weight=0.0)

    def read_dense(self) -> None:
        """Pull the dense weights into their parameters, unless they are as the clock wants them."""
        self.read_ahead((), self.declared.dense)

    def refresh(self) -> None:
        """Read everything anew at the next forward, for instance to evaluate what other workers pushed.

        Inside `prefetch`, batches that were pulled ahead already keep their rows.
        """
        self._traffic.refresh()
        for weights in self.declared.dense:
            weights.forget()

    def reset_read_versions(self) -> None:
        """Have the next step be as old as what is read from here on, as after an evaluation between two steps."""
        self._traffic.reset_read_versions()

    def close(self) -> None:
        """Wait for what is in flight and close the connections; what was not pushed is dropped."""
        self._traffic.close()
        self._collected.clear()
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._traffic.local is not None:
                self.flush()
        finally:
            self.close()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a session holds connections and cannot be copied; copy the model before wrapping it")

    __reduce__ = __deepcopy__  # type: ignore[assignment]


def connect(
    addresses: str | Sequence[str],
    *,
    worker: int = 0,
    timeout: timedelta = DEFAULT_TIMEOUT,
    workers: int = 1,
    staleness: int | None = None,
    lease: timedelta = Terms.lease,
    staleness_aware_lr: bool = False,
    patience: timedelta = Terms.patience,
    run: int = 0,
    local_steps: int | None = None,
    bandwidth: str = UNLIMITED,
    compression: Compression | None = None,
    imports: Sequence[str] = (),
) -> Session:
    """A session with the shards at `addresses` ("host:port,host:port" or a list), in any order.

    Waits for shards that start later; every later call, too, ends by `timeout`. BadAddress where one cannot be.

    With several `workers`, or a `staleness`, this one (`worker` is its number) joins the clock of the job on the terms
    that membership.Terms describes, the same for all workers; ModeMismatch where they differ, StaleRun where its `run`
    is. With `local_steps` it trains on copies of its own and pushes what so many steps have changed (local_steps.py). A
    `bandwidth`, as "100mbit", emulates a slower link to the shards (bandwidth.py); ValueError where it is none.
    `compression` says how tables travel; `imports` names modules of codecs, BadModule or BadCodec where one fails.
    """
    terms = Terms(
        workers=workers,
        staleness=staleness,
        lease=lease,
        staleness_aware_lr=staleness_aware_lr,
        patience=patience,
        run=run,
    )
    if local_steps is not None and (local_steps < 1 or staleness_aware_lr):
        raise ValueError(
            "staleness_aware_lr has no meaning with local_steps, which push no gradients"
            if staleness_aware_lr
            else f"local_steps must be at least 1, got {local_steps}"
        )
    bits, codecs = parse_bandwidth(bandwidth), CodecRegistry(imports)
    client = Client.connect(parse_addresses(addresses), worker=worker, timeout=timeout, bandwidth=bits)
    client.compressor.find = codecs.find
    try:
        if workers > 1 or staleness is not None or staleness_aware_lr:
            client.join(terms)
        session = Session(client, local_steps=local_steps, compression=compression)
        if client.membership is None and worker != READ_ONLY_WORKER:
            session.switching.begin()
        return session
    except BaseException:
        client.close()
        raise
