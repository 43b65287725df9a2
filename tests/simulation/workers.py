"""A worker of the simulated job: real client and membership code, in greenlets of its process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from embershard.proto.errors import (
    BadOptimizer,
    ClientClosed,
    EmbershardError,
    InvalidRequest,
    JobOver,
    LeaseLost,
    MemoryLost,
    MessageTooLarge,
    RendezvousOver,
    RowsLost,
    ShardRestarted,
    ShardUnavailable,
    StaleWorker,
    UnknownTable,
    WorkerLost,
)
from embershard.proto.messages import Compress, Pull, Push, Rows, TableCodecs
from embershard.proto.routing import make_route
from embershard.proto.spec import TableSpec
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms

from .machinery.network import SimulatedCall, SimulatedTransport
from .machinery.world import Process
from .oracles.waits import untold

if TYPE_CHECKING:
    from .simulation import Simulation

NUM_IDS, NUM_DENSE = 24, 6
QUIET_SECONDS = 60.0  # within which all workers finish once nothing fails any more
EXPECTED = (ShardUnavailable, WorkerLost, ClientClosed, JobOver)


class SimulatedWorker:
    """Worker `number`: it trains `steps` steps, in as many processes as it takes."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.sim, self.number = simulation, number
        self.scenario = simulation.scenario
        self.process: Process | None = None
        self.incarnation = 0
        self.done = 0  # steps
        self.is_done = self.is_finished = self.is_training = False
        self.lost_leases = 0
        self.client: Client | None = None
        self.pushed: dict[str, np.ndarray] = {}  # table -> (NUM_IDS, dim) sum of what was given to push
        self.is_exact = True  # whether everything given to push was taken
        self.pulled: dict[int, tuple[Pull, object]] = {}  # shard -> request and what the oracle says of its reply
        self._asked: dict[int, float] = {}  # shard -> when it was last asked for rows of a clock

    def start(self) -> None:
        """Start a process."""
        world, scenario = self.sim.world, self.scenario
        drift = world.random.uniform(-scenario.drift, scenario.drift)
        self.incarnation += 1
        self.process = Process(world, f"worker-{self.number}", drift=drift)
        self.process.spawn(self._main)

    def kill(self, seconds: float) -> None:
        """kill -9, and another one after so many seconds."""
        assert self.process is not None
        self.sim.world.note("kill worker", self.number)
        self.process.kill()
        self.is_training = self.is_exact = self.is_done = False
        self.sim.network.open = [call for call in self.sim.network.open if call.process is not self.process]
        self.sim.world.at(seconds, self.start)

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so many seconds."""
        assert self.process is not None
        self.process.stop()
        self.sim.world.at(seconds, self.process.go_on)

    def called(self, call: SimulatedCall, outcome: object) -> None:
        """A call of this worker begins (outcome None), or is over."""
        oracle = self.sim.machines[call.shard].oracle
        if outcome is None:
            oracle.submitted(call)
            if isinstance(call.request, Pull) and call.request.required_clock:
                self._asked[call.shard] = self.sim.world.now
            if isinstance(call.request, Push) and self.client and self.client.epoch == call.request.token.epoch:
                kept = {one.push.token.seq for one in self.client.connections.kept._kept[call.shard]}
                oracle.keeps(call.request.token, kept, self.scenario.kept_pushes)
            return
        oracle.answered(call, outcome)
        if isinstance(call.request, Pull) and isinstance(outcome, Rows) and call.expected is not None:
            self.pulled[call.shard] = call.request, call.expected

    def asked_lately(self) -> set[int]:
        """The shards at which this worker has waited for a clock to the last, if it has waited for long."""
        return {shard for shard, at in self._asked.items() if at > self.sim.world.now - 2 * self.scenario.timeout}

    def _main(self) -> None:
        while not self.is_finished:
            try:
                self._train()
            except EXPECTED as error:
                is_lost = isinstance(error, WorkerLost) and (self.sim.has_lost or self._was_left_behind())
                if is_lost or self._waits_unheard():
                    # another one waits, or has finished, and what it had said is lost with the power: this one is told
                    if wrong := untold(self.sim, self):
                        self.sim.world.fail(wrong)
                        return
                    self.sim.is_given_up = True
                self._give_up(error)
            except EmbershardError as error:
                if not self._is_allowed(error):
                    self.sim.world.fail(f"worker {self.number}: {type(error).__name__}: {error}")
                    return
                self._give_up(error)

    def _give_up(self, error: EmbershardError) -> None:
        """The program ends by an error; it is started again."""
        assert self.process is not None
        self.sim.world.covered[f"worker ends by {type(error).__name__}"] += 1
        self.sim.world.note("worker ends", self.number, type(error).__name__)
        self.is_training = self.is_exact = self.is_done = False
        if self.client is not None:
            self.lost_leases += self.client.lost_leases
        self.incarnation += 1
        self.process.clock.sleep(0.5)
        if self.client is not None:
            for connection in self.client.connections:
                connection.transport.close()
            if self.client.membership is not None:
                self.client.membership._ended.set()

    def _waits_unheard(self) -> bool:
        """Whether a wait that WorkerLost would end ends as if no shard answered, and so would all that follow.

        A shard says half a second before the end of a call that it waits for others, by its own clock, which may be
        40 % slower than the caller's.
        """
        sim = self.sim
        return sim.has_lost and sim.scenario.drift > 0 and sim.world.now > sim.calm_at + QUIET_SECONDS

    def _was_left_behind(self) -> bool:
        """Whether another worker has finished, and its lease has ended: this one, evicted before, began a new job."""
        evicted = any(machine.oracle.expired for machine in self.sim.machines)
        return evicted and any(worker.is_done for worker in self.sim.workers if worker is not self)

    def _is_allowed(self, error: EmbershardError) -> bool:
        """Whether an error may end a worker: what a loss of power took, it is told."""
        if self.sim.has_lost:
            if isinstance(error, ShardRestarted | RowsLost):
                self.sim.is_given_up = True
            told = MemoryLost | InvalidRequest | LeaseLost | StaleWorker | ShardRestarted | RowsLost | UnknownTable
            return isinstance(error, told) or error.retryable
        return isinstance(error, LeaseLost) or error.retryable

    def _train(self) -> None:
        process, scenario = self.process, self.scenario
        assert process is not None
        clock = process.clock
        transports = [
            SimulatedTransport(self.sim.network, process, self.number, shard, self.called)
            for shard in range(scenario.shards)
        ]
        timeout = timedelta(seconds=scenario.timeout)
        self.client = client = Client(transports, worker=self.number, timeout=timeout, clock=clock)
        client.compressor.differences = scenario.local_steps
        self.is_training = True
        for table in self._tables():
            created = client.declare(table, load=scenario.loads, dense=is_dense(table))
            if created and scenario.loads:
                self._load(client, table.name, NUM_IDS + 1000 * self.incarnation, created)
        if scenario.is_member:
            terms = Terms(
                workers=scenario.workers,
                staleness=scenario.staleness,
                lease=timedelta(seconds=scenario.lease),
                staleness_aware_lr=scenario.aware,
                wait_timeout=timedelta(seconds=30),
            )
            client.join(terms)
            self._meet(client, "begin")
        self._steps(client)
        self._flush(client)  # a clock does not wait for one that has paused
        if client.membership is not None:
            self._await_safe(client)
            client.membership.pause()
            self._meet(client, "end")
        self._flush(client)
        self.is_done = True
        while not all(worker.is_done for worker in self.sim.workers):  # one that comes again must find the others
            clock.sleep(0.05)
            if self.sim.has_lost:  # one that is idle learns by its next call that what it pushed is lost
                self._ask(client)
        for worker in self.sim.workers:
            worker.is_training = False  # none is killed from here on
        self.is_finished = True
        self.lost_leases += client.lost_leases
        client.close()
        self.is_training = False

    def _tables(self) -> tuple[TableSpec, ...]:
        """Those that this worker has declared by now, or declares first."""
        return self.scenario.tables[:-1] if self.done < self.scenario.late_table else self.scenario.tables

    def _steps(self, client: Client) -> None:
        member, split, clock = client.membership, -1, 0
        steps = self.scenario.steps + sum(self.scenario.more_steps[self.number : self.number + 1])
        while self.done < steps:
            if self.scenario.splits and member is not None:
                found = member.take_split(0, 3 * self.scenario.steps, split).index
                self.sim.took(self.number, split, found)
                split = found
                if split < 0:
                    break
            clock = clock if member is None else max(clock, member.first)
            if self.scenario.late_table and self.done == self.scenario.late_table:
                client.declare(self.scenario.tables[-1], dense=is_dense(self.scenario.tables[-1]))
            self._step(client, clock)
            clock += 1
            self.done += 1
            if self.scenario.rests and member is not None and self.done % self.scenario.rests == 0:
                clock = self._rest(client, clock)
        else:
            if self.scenario.splits and split >= 0 and member is not None:
                self.sim.took(self.number, split, -1)  # it is given to another one when this one leaves

    def _compress(self, client: Client, revision: int) -> None:
        """Tell the shards how a table shall travel; those who follow it are sessions, which are not simulated."""
        table = self.scenario.tables[0].name
        try:
            client.ask_all(Compress(revision=revision, tables=(TableCodecs(table=table, push="fp16s"),)))
        except ShardUnavailable:
            self._pause(client)
        except InvalidRequest as error:
            if "revision" not in error.message:
                raise

    def _step(self, client: Client, clock: int) -> None:
        rng = np.random.default_rng([self.scenario.seed, self.number, self.incarnation, clock])
        chosen = [t for t in self._tables() if rng.random() < 0.8]
        ids = [np.unique(rng.integers(0, NUM_IDS, 1 + rng.integers(6))) for _ in chosen]
        ids = [np.arange(NUM_DENSE) if is_dense(t) else one for one, t in zip(ids, chosen, strict=True)]
        routes = [make_route(one, table.space_key, client.placement) for one, table in zip(ids, chosen, strict=True)]
        reads = [(table.name, route) for table, route in zip(chosen, routes, strict=True)]
        if self.scenario.compresses and rng.random() < 0.2:
            self._compress(client, 1 + clock)
        versions: dict[int, int] = {}
        rows = []
        if reads:
            rows = self._pull(client, reads, clock, versions, keep=bool(rng.random() < 0.5))
        if self.scenario.compute and self.process is not None:
            self.process.clock.sleep(rng.random() * self.scenario.compute)
        gradients = []
        for (name, route), values in zip(reads, rows, strict=True):
            noise = rng.standard_normal(values.shape).astype(np.float32)
            if rng.random() < 0.05 and not self.sim.is_coded(name):
                noise[0, 0] = np.nan
            gradient = noise + np.float32(0.1) * values
            self._count(name, route.ids, gradient)
            gradients.append((name, route, gradient))
        if self.scenario.refused and rng.random() < 0.3 and gradients:
            self._push(client, gradients, clock, versions, lr_scale=float("nan"))
            others = [(name, route, rows + np.float32(0.5)) for name, route, rows in gradients]
            self._push(client, others, clock, versions)  # of the same clock: others may wait for it
        elif self.scenario.loads and rng.random() < 0.3:
            self._load(client, self.scenario.tables[0].name, 5, None)
            self._push(client, gradients, clock, versions)
        else:
            self._push(client, gradients, clock, versions)

    def _pull(self, client: Client, reads, clock: int, versions, *, keep: bool):
        member = client.membership
        while True:
            self.pulled.clear()
            try:
                rows = client.pull(reads, keep=keep, clock=clock if member is not None else None, versions=versions)
                break
            except ShardUnavailable:
                self._pause(client)
            except (InvalidRequest, BadOptimizer) as error:  # of a push before, which was kept
                self._check_refused(error)
        if all(len(pull.tables) for pull, _ in self.pulled.values()):
            self._check(reads, rows)
        return rows

    def _check(self, reads, rows) -> None:
        """What the client made of the replies is what the shards had."""
        want: dict[tuple[str, int], np.ndarray] = {}
        for pull, tables in self.pulled.values():
            for part, values in zip(pull.tables, tables, strict=True):
                for id_, row in zip(part.ids.tolist(), values, strict=True):
                    want[part.table, id_] = row
        for (name, route), values in zip(reads, rows, strict=True):
            if self.sim.rounds(name):
                continue
            for id_, row in zip(route.ids.tolist(), values, strict=True):
                if (name, id_) in want and want[name, id_].tobytes() != row.tobytes():
                    self.sim.world.fail(f"worker {self.number} reads another row {id_} of {name} than the shard has")
                    return

    def _push(self, client: Client, gradients, clock: int, versions, lr_scale: float = 1.0) -> None:
        try:
            weight, difference = float(1 + self.number), self.scenario.local_steps
            client.push(
                gradients, clock=clock, versions=versions, weight=weight, lr_scale=lr_scale, difference=difference
            )
        except ShardUnavailable:  # it is kept, and sent before the next one
            self._pause(client)
        except (InvalidRequest, BadOptimizer) as error:  # perhaps of a push before, as in _pull
            self._check_refused(error)
            if isinstance(error, BadOptimizer):  # a refused push ends no clock: this worker, too, would wait for it
                self._push(client, [], clock, versions)

    def _check_refused(self, error: EmbershardError) -> None:
        """Raise what a push was not refused with on purpose."""
        self.is_exact = False
        if isinstance(error, BadOptimizer) and self.scenario.raises:
            return
        if not self.scenario.refused or "lr_scale must be finite" not in error.message:
            raise error

    def _pause(self, client: Client) -> None:
        """A shard has not answered within the timeout of a call; the program tries on, or ends."""
        assert self.process is not None
        if self._waits_unheard():
            raise ShardUnavailable(shard="", seconds=0.0, reason="the program waits no longer", address="")
        if self.scenario.may_lose_workers and self.sim.faults.random.random() < 0.3 and self.sim.faults.left > 0:
            raise ShardUnavailable(shard="", seconds=0.0, reason="the program gives up", address="")
        self.process.clock.sleep(0.1)

    def _load(self, client: Client, table: str, count: int, shards: frozenset[int] | None) -> None:
        spec = client.spec(table)
        rng = np.random.default_rng([self.scenario.seed, self.number, self.incarnation, self.done, count])
        ids = np.arange(NUM_IDS) if count > 1000 else np.unique(rng.integers(0, NUM_IDS, count))
        route = make_route(ids, spec.space_key, client.placement)
        rows = rng.standard_normal((len(route.ids), spec.dim)).astype(np.float32)
        self.is_exact = False
        while True:
            try:
                client.load(table, route, rows, shards=shards, keep_state=shards is None)
                return
            except (InvalidRequest, BadOptimizer) as error:  # of a push before
                self._check_refused(error)
            except ShardUnavailable:  # a load is not kept: another one, of other rows
                if shards is None:
                    return
                rows += np.float32(1.0)
                self._pause(client)

    def _meet(self, client: Client, name: str) -> None:
        assert client.membership is not None
        payload = bytes([self.number]) * self.scenario.payload_bytes
        while True:
            try:
                # the others are past it where all leases ended, and this process began another job on the shards
                timeout = timedelta(seconds=5) if self.incarnation > 1 and name == "begin" else None
                met = client.membership.rendezvous(name, payload, wait_timeout=timeout)
                self.sim.met(name, tuple(met))
                return
            except RendezvousOver:
                return
            except WorkerLost:
                if timeout is None:
                    raise
                return
            except MessageTooLarge:
                if self.scenario.payload_bytes * self.scenario.workers <= self.scenario.max_message_bytes:
                    raise
                return
            except ShardUnavailable:
                self._pause(client)

    def _ask(self, client: Client) -> None:
        """Read a row of each shard."""
        table = self.scenario.tables[0]
        try:
            client.pull([(table.name, make_route(np.arange(NUM_IDS), table.space_key, client.placement))])
        except ShardUnavailable:
            self._pause(client)

    def _flush(self, client: Client) -> None:
        """Send what is kept."""
        while not client._pushes.is_empty:
            try:
                client._deliver_waiting()
            except (InvalidRequest, BadOptimizer) as error:
                self._check_refused(error)
            except ShardUnavailable:
                self._pause(client)

    def _rest(self, client: Client, clock: int) -> int:
        """Pause between two steps, as a session does while it evaluates; the clock at which it goes on."""
        member, process = client.membership, self.process
        assert member is not None
        assert process is not None
        self._flush(client)
        self._await_safe(client)
        self._insist(client, member.pause)
        process.clock.sleep(process.clock.uniform(0.0, 0.1))
        self._insist(client, lambda: member.resume(clock))
        return max(clock, member.first)

    def _await_safe(self, client: Client) -> None:
        """Wait until all pushes are safe, as a session does before it pauses: one that came again would be late."""
        self._insist(client, client.flush)

    def _insist(self, client: Client, call: Callable[[], object]) -> None:
        """Call until all shards answer, or the program ends."""
        while True:
            try:
                call()
                return
            except ShardUnavailable:
                self._pause(client)

    def _count(self, table: str, ids: np.ndarray, gradient: np.ndarray) -> None:
        total = self.pushed.setdefault(table, np.zeros((NUM_IDS, gradient.shape[1])))
        finite = np.isfinite(gradient).all(axis=1)
        total[ids[finite]] += gradient[finite]


def is_dense(table: TableSpec) -> bool:
    """Whether a table is of dense weights, of which every step reads all."""
    return table.pull_codec.select == "delta"
