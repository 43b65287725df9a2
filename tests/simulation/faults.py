"""What fails, when: seeded, and aimed at requests, writes and syncs that are under way."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from .machinery.network import SimulatedCall
from .machines import WAITS

if TYPE_CHECKING:
    from .simulation import Simulation

LINK = ["drop", "repeat", "delay", "reorder", "cut"]
PROCESS = ["kill shard", "power loss", "stop shard", "stop worker", "kill worker", "flip"]
DISK = {"write": ["disk full", "eio", "slow disk"], "sync": ["failed sync", "slow disk"]}
KINDS = [*LINK, *PROCESS, "disk full", "eio", "failed sync", "slow disk"]
STATES = ["serving", "recovering", "write", "sync", "base", "gathered", "push", "pull", "load", "declare", "join",
          "leave", "heartbeat", "hello", "rendezvous", "split"]  # fmt: skip
IMPOSSIBLE = {("flip", "recovering")}  # what a kind does not come in: a flip is made in a log that was read


class Faults:
    """The faults of one simulation: `counts` by kind, `states` also by what the shard did.

    A fault hits a request that is not answered, or a write or a sync of a shard's disk; one that hits nothing does not
    happen. It counts in each state in which the shard is then, and by each kind of request that is open there.
    """

    def __init__(self, simulation: Simulation, count: int) -> None:
        self.sim, self.left = simulation, count
        self.random = random.Random(f"faults {simulation.scenario.seed}")
        self.counts: Counter[str] = Counter()
        self.states: Counter[tuple[str, str]] = Counter()
        self.quiet_until = 0.0

    def _wanted(self, probability: float) -> bool:
        if self.left <= 0 or self.random.random() >= probability:
            return False
        return self.sim.world.now >= self.quiet_until

    def _count(self, kind: str, states: set[str]) -> None:
        self.left -= 1
        self.quiet_until = self.sim.world.now + self.random.choice([0.0, 0.0, 0.001, 0.02])
        self.counts[kind] += 1
        self.states.update((kind, state) for state in states)
        self.sim.world.note("fault", kind, *sorted(states))

    def message(self, call: SimulatedCall, direction: str) -> str:
        """What becomes of a message; it may also be the moment at which a process fails."""
        if not self._wanted(0.12):
            return ""
        if self.random.random() < 0.5:
            seconds = self.random.choice([0.0, 2e-4, 1e-3]) * self.random.random()
            shard, worker = call.shard, call.worker
            kind = self._process_kind()
            self.sim.world.at(seconds, lambda: self.process(kind, shard, worker))
            return ""
        kind = self.random.choice(LINK)
        self._count(kind, self.sim.machines[call.shard].states | {WAITS[call.kind]})
        if kind == "cut":
            until = self.sim.world.now + self.random.choice([0.05, 0.5, 2.0])
            self.sim.network.cuts[call.worker, call.shard, direction] = until
            return "drop"
        return kind

    def operation(self, shard: int, kind: str, name: str, seconds: float) -> None:
        """A disk begins to write or to sync."""
        if not self._wanted(0.10 if self.sim.network.open_calls(shard) else 0.02):
            return
        machine = self.sim.machines[shard]
        if self.random.random() < 0.4:
            what = self.random.choice(DISK[kind])
            self._count(what, machine.states | {kind})
            if what == "disk full":
                machine.disk.full_until = self.sim.world.now + self.random.choice([0.02, 0.4, 1.5])
            else:
                machine.disk.failing[kind] = {"slow disk": "slow"}.get(what, what)
            return
        workers = [call.worker for call in self.sim.network.open_calls(shard)]
        worker = self.random.choice(workers or range(self.sim.scenario.workers))
        what = self._process_kind()
        self.sim.world.at(seconds * self.random.random(), lambda: self.process(what, shard, worker))

    def _process_kind(self) -> str:
        kinds = PROCESS if self.sim.scenario.may_lose_workers else [one for one in PROCESS if one != "kill worker"]
        return self.random.choice(kinds)

    def process(self, kind: str, shard: int, worker: int) -> None:
        """A process or a machine fails, now."""
        machine = self.sim.machines[shard]
        calls = self.sim.network.open_calls(shard)
        if self.left <= 0 or not (machine.disk.under_way or calls) or machine.process is None:
            return
        states = machine.states
        if any(one.is_finished for one in self.sim.workers):
            return
        if kind in ("stop worker", "kill worker"):
            if not any(call.worker == worker for call in calls) or not self.sim.workers[worker].is_training:
                return
            if kind == "kill worker":
                self.sim.workers[worker].kill(self.random.choice([0.01, 0.5, 3.0]))
            else:
                self.sim.workers[worker].stop(self.random.choice([0.01, 0.3, 2.5]))
        elif kind == "stop shard":
            machine.stop(self.random.choice([0.01, 0.3, 2.5]))
        elif kind == "kill shard":
            machine.kill(self.random.choice([0.001, 0.05, 0.5]))
        elif kind == "power loss":
            machine.kill(self.random.choice([0.05, 0.5]), power=True)
        elif not machine.flip(self.random):
            return
        self._count(kind, states)
