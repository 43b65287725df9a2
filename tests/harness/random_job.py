"""A job that does anything at any time to one shard, by the numbers of a seed; and a shard's whole state."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np

from embershard.proto import errors, spec
from embershard.proto.codec.payload import encode_elements, encode_rows
from embershard.proto.codec.values.registry import find_values
from embershard.proto.messages import (
    PACKED,
    Compress,
    Declare,
    Heartbeat,
    Leave,
    Load,
    Pull,
    PushToken,
    Rendezvous,
    TableCodecs,
    TableGradients,
    TableIds,
    TakeSplit,
)
from embershard.proto.routing import Placement
from embershard.ps.core import Core
from embershard.ps.memory import MemoryBudget
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.ps.table.table import Table
from harness.shards import ids_of, join, make_shard, push, table

DIM = 4
LEASE = 10.0
OPTIMIZERS = [
    spec.SGD(lr=0.1),
    spec.Adagrad(lr=0.1),
    spec.Adam(lr=0.01),
    spec.FTRL(lr=0.1),
]


class Recorder:
    """A log in memory."""

    def __init__(self) -> None:
        self.events, self.outcomes = [], []

    def append(self, event, outcome):
        self.events.append(event)
        self.outcomes.append(outcome)
        return len(self.events)

    def when_safe(self, lsn, call, refuse=None):
        call()

    def status(self):
        return "log", 0, 0

    def check_room(self, num_bytes):
        pass


class RandomJob:
    """Workers that do anything at any time, by the numbers of a seed."""

    def __init__(self, seed: int, staleness: int, optimizer: spec.Optimizer, *, aware: bool) -> None:
        self.random, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.now, self.outcomes = 100.0, Counter()
        self.shard = self.begin()
        self.tables = [table("a", DIM, optimizer=optimizer, initializer=spec.Normal(), seed=seed), table("b", DIM + 1)]
        for one in self.tables:
            self.send(Declare(one, lineage=seed + 1, begins_lineage=True))
        self.mode = {"staleness": staleness, "staleness_aware_lr": aware, "lease_ms": round(1000 * LEASE), "workers": 2}
        self.epochs, self.seqs, self.clocks, self.routes = [1, 1, 1], Counter(), Counter(), itertools.count(1)
        self.done, self.last = {}, []  # splits in hand; messages that may come again

    def begin(self) -> Shard:
        """The shard that they work on."""
        self.log = Recorder()
        return make_shard(now=self.now, log=self.log)

    def run(self, steps: int) -> RandomJob:
        for worker in range(2):
            self.join(worker)
        actions = [self.push] * 12 + [self.wait, self.wait, self.join, self.leave, self.load, self.repeat, self.declare]
        actions += [self.split, self.meet, self.compress, self.restart, self.refused]
        for _ in range(steps):
            self.random.choice(actions)(self.random.randrange(3))
        return self

    def send(self, request):
        try:
            reply = self.shard.handle(request, self.now)
        except errors.EmbershardError as error:
            reply = error
        self.outcomes[type(request).__name__, type(reply).__name__] += 1
        return reply

    def token(self, worker):
        self.seqs[worker] += 1
        return PushToken(worker, self.epochs[worker], self.seqs[worker], max(1, self.seqs[worker] - 2))

    def part(self, worker, spec_):
        ids = np.unique(self.rng.integers(0, 400, self.random.randrange(1, 200)))
        gradients = self.rng.standard_normal((len(ids), spec_.dim)).astype(np.float32)
        if self.random.random() < 0.1:
            gradients[0, 0] = np.nan
        route = 0
        if self.random.random() < 0.3:
            route = next(self.routes)
            self.send(Pull(1, (TableIds(spec_.name, ids, route),), worker, self.epochs[worker]))
            if self.random.random() < 0.1:
                route += 10_000  # one that nobody knows
        form = self.random.choice(["plain", "int8", "topk", "twice"])
        sent = {"route": route, "lr_scale": self.random.choice([1.0, 0.5])}
        own = ids[:0] if route else ids
        if form == "int8":
            payload = encode_rows(gradients, find_values("int8"), int(self.rng.integers(2**60)))
            return TableGradients(spec_.name, own, payload, codec=PACKED, **sent)
        if form == "topk" and not np.isnan(gradients).any():
            top = np.sort(np.argsort(-np.abs(gradients), axis=None)[: max(1, gradients.size // 10)])
            payload = encode_elements(top, gradients.reshape(-1)[top], gradients.shape, find_values("none"), None)
            return TableGradients(spec_.name, own, payload, codec=PACKED, **sent)
        if form == "twice" and not route:
            return TableGradients(spec_.name, np.repeat(ids, 2), np.repeat(gradients, 2, 0), unique=False, **sent)
        return TableGradients(spec_.name, own, gradients, **sent)

    def push(self, worker):
        parts = [self.part(worker, one) for one in self.tables if self.random.random() < 0.7]
        last = self.random.random() < 0.8
        version = max(0, self.shard.core.clock.updates.version - self.random.randrange(4))
        message = push(*parts, worker=worker, epoch=self.epochs[worker], clock=self.clocks[worker], last=last,
                       version=version, weight=self.random.choice([1.0, 3.0]),
                       difference=self.random.random() < 0.1)  # fmt: skip
        token = self.token(worker)
        message = type(message)(token, *[getattr(message, name) for name in message.__slots__[1:]])
        reply = self.send(message)
        if isinstance(reply, errors.LeaseLost):
            self.join(worker)
        elif not isinstance(reply, errors.EmbershardError):
            self.clocks[worker] += last
        self.last.append(message)

    def refused(self, worker):
        part = TableGradients("a", ids_of(1, 2), np.ones((1, DIM), np.float32))
        token = self.token(worker)
        self.send(push(part, worker=worker, epoch=token.epoch, seq=token.seq, first=token.first_incomplete))

    def repeat(self, worker):
        for message in self.random.sample(self.last, min(3, len(self.last))):
            self.send(message)

    def load(self, worker):
        ids = np.unique(self.rng.integers(0, 400, 20))
        rows = self.rng.standard_normal((len(ids), DIM)).astype(np.float32)
        token = self.token(worker) if self.random.random() < 0.7 else None
        self.last.append(Load("a", 1, ids, rows, worker, keep_state=self.random.random() < 0.5, token=token))
        self.send(self.last[-1])

    def declare(self, worker):
        name = self.random.choice("abcde")
        self.send(Declare(table(name, DIM), worker, load=name > "c", dense=self.random.random() < 0.5))

    def join(self, worker):
        clock = max(self.clocks[worker], self.shard.core.clock.open)
        reply = self.send(join(worker, epoch=self.epochs[worker], clock=clock, **self.mode))
        if not isinstance(reply, errors.EmbershardError):
            self.clocks[worker] = max(clock, reply.clock)

    def restart(self, worker):
        if self.random.random() < 0.3:
            self.epochs[worker] += 1
            self.seqs[worker] = 0
            self.join(worker)

    def leave(self, worker):
        pause = self.random.random() < 0.5
        self.send(Leave(worker=worker, epoch=self.epochs[worker], pause=pause))

    def wait(self, worker):
        for _ in range(self.random.randrange(1, 3)):
            self.now += 0.6 * LEASE
            for other in range(3):
                if other != worker:
                    self.send(Heartbeat(worker=other, epoch=self.epochs[other]))
        self.shard.advance(self.now)

    def split(self, worker):
        data_epoch = self.random.choice([0] * 8 + [1])
        for other in (worker, *range(3)):
            step = {"data_epoch": data_epoch, "num_splits": 5, "done": self.done.get(other, -1)}
            reply = self.send(TakeSplit(worker=other, epoch=self.epochs[other], **step))
            self.done[other] = getattr(reply, "index", -1)

    def meet(self, worker):
        name, payload = f"meeting {self.random.randrange(6)}", self.rng.integers(0, 255, 20, np.uint8)
        for other in range(3):
            self.send(Rendezvous(other, self.epochs[other], name, payload, bool(worker)))

    def compress(self, worker):
        revision = self.shard.core.compression.revision + self.random.randrange(2)
        codecs = TableCodecs(table="a", push=self.random.choice(["int8", "none"]))
        self.send(Compress(revision=revision, tables=[codecs]))


def state_of(core: Core) -> dict[str, object]:
    """All of a shard's state, in plain values: the bits of its rows, of the gradients that wait, and its control."""
    tables = {}
    for table_ in core.tables.all():
        ids, rows, states = contents(table_)
        order = np.argsort(ids)
        tables[table_.spec.name] = table_.spec, *(part[order].tobytes() for part in (ids, rows, states))
    pending = sorted(
        (part.table.spec.name, part.ids.tobytes(), part.gradients.tobytes(), part.lr_scale)
        for part in core.clock.pending.parts()
    )
    return {"rows": tables, "pending": pending, **core.control()}


def contents(table_: Table) -> list[np.ndarray]:
    """The ids, rows and states of a table."""
    shapes = (0,), (0, table_.spec.dim), (0, table_.num_state)
    empty = [np.empty(shape, dtype) for shape, dtype in zip(shapes, (np.int64, np.float32, np.float32), strict=True)]
    return [np.concatenate(parts) for parts in zip(empty, *table_.scan(), strict=True)]


def empty_core() -> Core:
    return Core(0, Placement.even(1), OptimizerRegistry(), budget=MemoryBudget(2**62))


def replay(core: Core, events, outcomes) -> Core:
    for number, (event, outcome) in enumerate(zip(events, outcomes, strict=True)):
        again = core.apply(event)
        for what in ("rows", "changed", "version", "clock"):
            assert getattr(again, what) == getattr(outcome, what), (number, event, what)
        assert str(again.error) == str(outcome.error)
    return core
