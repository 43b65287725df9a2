"""A simulated job: workers, shards, their machines and the links between them, from the numbers of one seed."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from dataclasses import dataclass

import numpy as np

from embershard.proto.routing import Placement
from embershard.ps.bases import base
from embershard.worker.client import kept

from .faults import Faults
from .machinery.network import Network, SimulatedCall
from .machinery.world import World
from .machines import ShardMachine
from .oracles.oracle import plain_rows
from .scenario import Scenario
from .workers import NUM_IDS, QUIET_SECONDS, SimulatedWorker

LOST_SECONDS = 300.0  # the same after a loss of power in mode `log`: some waits end by their wait_timeout only
LONGEST_SECONDS = 400.0  # with faults


@dataclass
class Result:
    """What came of a seed."""

    seed: int
    wrong: list[str]
    faults: Counter[str]  # by kind
    states: Counter[tuple[str, str]]  # faults by kind and what they found
    trace: str
    seconds: float  # simulated
    events: int
    recoveries: int
    bases: int  # that recoveries began with
    covered: Counter[str]  # what happened how often


class Simulation:
    """One run. `faults` replaces the number of faults of the seed, `focus` what it prefers."""

    def __init__(self, seed: int, faults: int | None = None, *, focus: str | None = None, lines: bool = False) -> None:
        self.scenario = scenario = Scenario.of(seed, faults, focus)
        self.world = World(f"world {seed}")
        if lines:
            self.world.lines = []
        self.placement = Placement.even(scenario.shards)
        self.faults = Faults(self, scenario.faults)
        self.network = Network(self.world, self._serve, self._fate)
        self.machines = [ShardMachine(self, number) for number in range(scenario.shards)]
        self.workers = [SimulatedWorker(self, number) for number in range(scenario.workers)]
        self.is_given_up = False  # a shard's rows are lost with its machine's power, and workers were told
        self.calm_at = LONGEST_SECONDS  # since when nothing fails any more
        self.meetings: dict[str, tuple[int, ...]] = {}
        self.holders: dict[int, int] = {}  # split -> worker that has it
        self.finished_splits: Counter[int] = Counter()

    @property
    def has_lost(self) -> bool:
        """Whether a machine lost power in mode `log`, so that acknowledged events may be gone."""
        return any(machine.oracle.has_lost or machine.oracle.may_lose for machine in self.machines)

    def run(self) -> Result:
        """Run to the end."""
        world = self.world
        enabled, log = gc.isenabled(), logging.getLogger("embershard")
        level, rows_per_file, kept_pushes = log.level, base.rows_per_file, kept.KEPT_PUSHES
        kept.KEPT_PUSHES = self.scenario.kept_pushes
        base.rows_per_file = lambda dim, num_state: self.scenario.base_rows
        log.setLevel(logging.CRITICAL + 1)
        gc.disable()  # greenlets that are collected end in the middle of others
        try:
            for machine in self.machines:
                machine.start()
            for worker in self.workers:
                world.at(world.random.uniform(0.0, 0.05), worker.start)
            over = lambda: self.is_given_up or all(worker.is_finished for worker in self.workers)  # noqa: E731
            if not world.run(lambda: over() or self.faults.left <= 0, LONGEST_SECONDS) and not world.wrong:
                self.faults.left = 0
            self.faults.left, self.calm_at = 0, world.now
            seconds = LOST_SECONDS if self.has_lost else QUIET_SECONDS
            if not over() and not world.wrong and not world.run(over, world.now + seconds) and not world.wrong:
                late = [worker.number for worker in self.workers if not worker.is_finished]
                world.fail(f"workers {late} have not finished within {seconds:.0f} s without faults")
            if not world.wrong and not self.is_given_up:
                up = lambda: all(m.is_serving for m in self.machines)  # noqa: E731
                if not world.run(up, world.now + 30.0) and not world.wrong:
                    world.fail("a shard does not come back")
                world.run(lambda: False, world.now + 2.0)
            if not world.wrong and not self.is_given_up:
                self._check_end()
        finally:
            world.end()
            log.setLevel(level)
            base.rows_per_file, kept.KEPT_PUSHES = rows_per_file, kept_pushes
            if enabled:
                gc.enable()
        return Result(
            self.scenario.seed, world.wrong, self.faults.counts, self.faults.states, world.trace, world.now,
            sum(len(machine.oracle.history) for machine in self.machines),
            sum(machine.oracle.recoveries for machine in self.machines) - len(self.machines),
            sum(machine.oracle.bases for machine in self.machines),
            world.covered,
        )  # fmt: skip

    def is_coded(self, table: str) -> bool:
        """Whether a table's gradients travel by a codec."""
        return any(one.name == table and not one.push_codec.is_plain for one in self.scenario.tables)

    def rounds(self, table: str) -> bool:
        """Whether a table's rows are rounded on their way."""
        found = next(one for one in self.scenario.tables if one.name == table)
        return not (found.pull_codec.is_plain or found.pull_codec.select == "delta")

    def met(self, name: str, workers: tuple[int, ...]) -> None:
        """A worker read who came to a rendezvous."""
        began_again = any(worker.incarnation > 1 for worker in self.workers)  # perhaps as another job
        lost = began_again or any(machine.oracle.expired or machine.oracle.has_lost for machine in self.machines)
        if self.meetings.setdefault(name, workers) != workers and not lost:
            self.world.fail(f"rendezvous {name}: {workers} for one, {self.meetings[name]} for another")

    def took(self, worker: int, done: int, split: int) -> None:
        """A worker finished a part of the data, and was given another one."""
        if done >= 0:
            self.finished_splits[done] += 1
            self.holders.pop(done, None)
        if split >= 0:
            self.holders[split] = worker

    def _serve(self, call: SimulatedCall) -> None:
        self.machines[call.shard].serve(call)

    def _fate(self, call: SimulatedCall, direction: str) -> str:
        return self.faults.message(call, direction)

    def _check_end(self) -> None:
        for machine in self.machines:
            oracle = machine.oracle
            assert machine.shard is not None
            oracle.compare(machine.shard.core, "at the end")
            oracle.replay(machine.shard.core, self.placement, self.scenario.max_message_bytes)
            for token, sent in oracle.sent.items():
                if sent.state == "acknowledged" and token not in oracle.lsn_of and token not in oracle.lost:
                    self.world.fail(f"shard {oracle.shard}: push {token} was acknowledged and is not in the log")
        if not self.world.wrong:
            self._check_conservation()
        if not self.world.wrong and self.is_undisturbed():
            self._check_synchronous()

    def is_undisturbed(self) -> bool:
        """Whether a synchronous run lost no worker, and nothing else that changes its result."""
        return (
            self.scenario.staleness == 0
            and not self.scenario.rests  # who takes part in a clock is a question of time
            and self.scenario.faults > 0
            and all(worker.incarnation == 1 and not worker.lost_leases for worker in self.workers)
            and not any(machine.oracle.expired or machine.oracle.has_lost for machine in self.machines)
        )

    def _check_conservation(self) -> None:
        """Of tables that begin at 0, with SGD of rate 1: what was pushed is what was applied, and what is held."""
        if not all(w.is_exact and w.incarnation == 1 and not w.lost_leases for w in self.workers):
            return
        if any(machine.oracle.expired or machine.oracle.has_lost for machine in self.machines):
            return
        if self.scenario.staleness == 0 or self.scenario.aware or self.scenario.refused:
            return  # a clock's weights scale what is applied
        for table in self.scenario.tables:
            if table.optimizer.name != "sgd" or table.optimizer.params()["lr"] != 1.0:
                continue
            if table.initializer.kind != "constant" or table.push_codec.values == "int8":
                continue
            self.world.covered["tables of which pushed = applied + held"] += 1
            total = np.zeros((NUM_IDS, table.dim))
            for worker in self.workers:
                total += worker.pushed.get(table.name, 0.0)
                assert worker.client is not None
                held = worker.client.compressor.residual(table.name)
                np.subtract.at(total, held.ids, held.rows)
            for machine in self.machines:
                model = machine.oracle.model.tables.get(table.name)
                for ids, rows, _ in model.scan() if model else ():
                    total[ids] += -rows if self.scenario.local_steps else rows  # differences are added
            limit = 1e-3 if table.push_codec.values == "none" else 1e-2  # 16 bits round by up to 2^-12 of each value
            if not np.abs(total).max() <= limit:
                self.world.fail(f"table {table.name}: pushed = applied + held is off by {np.abs(total).max():.3g}")

    def _check_synchronous(self) -> None:
        """The weights are those of a run without faults."""
        self.world.covered["synchronous runs compared with an undisturbed one"] += 1
        twin = Simulation(self.scenario.seed, 0, focus=self.scenario.focus)
        result = twin.run()
        if result.wrong:
            self.world.fail(f"without faults: {result.wrong[0]}")
            return
        for mine, its in zip(self.machines, twin.machines, strict=True):
            for table in self.scenario.tables:
                pair = [machine.oracle.model.tables.get(table.name) for machine in (mine, its)]
                rows = [plain_rows(one) if one is not None else {} for one in pair]
                if rows[0] != rows[1]:
                    self.world.fail(f"shard {mine.number}, table {table.name}: other weights than without faults")
                    return


def simulate(seed: int, *, focus: str | None = None) -> Result:
    """Run a seed, with another focus where one is given."""
    return Simulation(seed, focus=focus).run()
