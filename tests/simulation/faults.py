"""What fails, when: seeded, and aimed at requests, writes and syncs that are under way."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from embershard.proto.messages import Declare, Leave, Load, Push, TakeSplit
from embershard.ps.events import Event, PushEvent, Settled, Term

from .machinery.network import SimulatedCall
from .machines import WAITS
from .scenario import LOST_TABLES, RARE

if TYPE_CHECKING:
    from .simulation import Simulation

LINK = ["drop", "repeat", "delay", "reorder", "cut"]
PROCESS = ["kill shard", "power loss", "stop shard", "stop worker", "kill worker", "flip"]
DISK = {"write": ["disk full", "eio", "slow disk"], "sync": ["failed sync", "slow disk"]}
KINDS = [*LINK, *PROCESS, "disk full", "eio", "failed sync", "slow disk"]
STATES = ["serving", "recovering", "write", "sync", "base", "gathered", "push", "pull", "load", "declare", "join",
          "leave", "heartbeat", "hello", "rendezvous", "split"]  # fmt: skip
# how often a short loss begins with an event, where it is not 0.2: of pushes and terms there are many
_LOSSES = {PushEvent: 0.12, Term: 0.05, Declare: 0.8, Leave: 0.5, Load: 0.5}
_RARE = {Leave: 0.12, Load: 0.12, TakeSplit: 0.4}  # requests of which there are few: how often something hits a message
IMPOSSIBLE = {("flip", "recovering")}  # what a kind does not come in: a flip is made in a log that was read


class Faults:
    """The faults of one simulation: `counts` by kind, `states` also by what the shard did.

    A fault hits a request that is not answered, or a write or a sync of a shard's disk; one that hits nothing does not
    happen. It counts in each state in which the shard is then, and by each kind of request that is open there.

    Half of the seeds leave out some kinds and prefer others: where all come, what takes two of one kind is rare (swarm
    testing, Groce et al. 2012). A scenario's focus adds faults that follow each other:

    - "short losses": a machine of mode `log` loses power soon after its kernel has written what it had, so that it
      loses the last events and no others;
    - "partitions": workers are cut off from all shards for longer than their leases, and links for longer than calls;
    - "syncs": in mode `log` a sync for a base fails, and the machine of the next process loses power; in mode `fsync` a
      write or sync takes long, and the machine loses power meanwhile;
    - "lost tables": a push gets lost, its machine loses power, and a new table is lost with it; the shard's process is
      killed as it has taken this push, after all;
    - "rare requests": disks fail, and bits flip, while a worker pauses, leaves, loads rows or takes a part of the data.
    """

    def __init__(self, simulation: Simulation, count: int) -> None:
        self.sim, self.left = simulation, count
        self.random = random.Random(f"faults {simulation.scenario.seed}")
        weights = [0, 0, 1, 4] if self.random.random() < 0.5 else [1]
        self._weights = {kind: self.random.choice(weights) for kind in KINDS}
        if not simulation.scenario.may_lose_workers:
            self._weights["kill worker"] = 0
        self.focus = simulation.scenario.focus
        self._cut_seconds = [0.05, 0.5, 2.0]
        self._others = 1.0  # how frequent faults are that do not follow each other
        self._awaits: type | None = None  # the event before which no fault comes
        if self.focus == "short losses":
            self._weights |= {"power loss": 0, "flip": 0}  # a flip has the disk written
            self._others = 0.25
            if simulation.scenario.is_member and self.random.random() < 0.3:
                self._awaits = Leave
        elif self.focus == "partitions":
            self._weights |= {"cut": 4, "stop worker": 4}
            self._awaits = PushEvent
            self._cut_seconds = [2.0, 5.0, 8.0]
        elif self.focus == LOST_TABLES:
            self._weights |= {"power loss": 0, "flip": 0}
            self._others = 0.25
        elif self.focus == RARE:
            self._weights |= {"disk full": 1, "eio": 1, "failed sync": 2, "flip": 4}
            self._others = 0.25
        self._losing: dict[int, int] = {}  # shards whose machine will lose power -> events before
        self._losing_table = -1, -1  # the shard that loses one, and whose push is lost before
        self._refused: set[int] = set()  # shards of which the last event is that a push was refused or put off
        self._distrusted: set[int] = set()  # shards of which a sync for a base has failed
        self.counts: Counter[str] = Counter()
        self.states: Counter[tuple[str, str]] = Counter()
        self.quiet_until = 0.0

    def _wanted(self, probability: float) -> bool:
        if self.left <= 0 or self._awaits or self.random.random() >= probability:
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
        if self.focus == "partitions" and call.kind is Push and direction == "request" and self._wanted(0.1):
            return self._isolate(call)
        if self.focus == LOST_TABLES and call.kind is Push and self._losing_table == (call.shard, -1):
            return self._lose_push(call)
        usual = 0.12 * self._others
        if not self._wanted(_RARE.get(call.kind, usual) if self.focus == RARE else usual):
            return ""
        if self.random.random() < 0.5:
            seconds = self.random.choice([0.0, 2e-4, 1e-3]) * self.random.random()
            shard, worker = call.shard, call.worker
            kind = self._choose(PROCESS)
            if kind:
                self.sim.world.at(seconds, lambda: self.process(kind, shard, worker))
            return ""
        kind = self._choose(LINK)
        if not kind:
            return ""
        self._count(kind, self.sim.machines[call.shard].states | {WAITS[call.kind]})
        if kind == "cut":
            until = self.sim.world.now + self.random.choice(self._cut_seconds)
            self.sim.network.cuts[call.worker, call.shard, direction] = until
            return "drop"
        return kind

    def operation(self, shard: int, kind: str, name: str, seconds: float) -> None:
        """A disk begins to write or to sync."""
        if self.focus == "syncs":
            focused = self._is_slow if self.sim.scenario.durability == "fsync" else self._fails_base
            if focused(shard, kind, name):
                return
        calls = self.sim.network.open_calls(shard)
        is_rare = self.focus == RARE and any(call.kind in _RARE for call in calls)
        if not self._wanted(0.5 if is_rare else (0.10 if calls else 0.02) * self._others):
            return
        machine = self.sim.machines[shard]
        if self.random.random() < (0.8 if is_rare else 0.4):
            what = self._choose(DISK[kind])
            if not what:
                return
            self._count(what, machine.states | {kind})
            if what == "disk full":
                machine.disk.full_until = self.sim.world.now + self.random.choice([0.02, 0.4, 1.5])
            else:
                machine.disk.failing[kind] = {"slow disk": "slow"}.get(what, what)
            return
        workers = [call.worker for call in calls]
        worker = self.random.choice(workers or range(self.sim.scenario.workers))
        what, moment = self._choose(PROCESS), seconds * self.random.random()
        if what:
            self.sim.world.at(moment, lambda: self.process(what, shard, worker))

    def event(self, shard: int, event: Event) -> None:
        """A shard has applied an event, which its log does not have yet."""
        if self._awaits and isinstance(event, self._awaits):
            self._awaits = None
        if self.focus == LOST_TABLES:
            self._lose_table(shard, event)
        tables = self.sim.machines[shard].oracle.model.tables
        if self.focus != "short losses" or len(tables) <= isinstance(event, Declare):
            return  # who loses the first table loses all, and training ends
        is_after_refusal = isinstance(event, PushEvent) and shard in self._refused
        (self._refused.add if isinstance(event, Settled) else self._refused.discard)(shard)
        if shard in self._losing:
            self._losing[shard] -= 1
        elif self._wanted(0.8 if is_after_refusal else _LOSSES.get(type(event), 0.2)):
            self._begin_loss(shard, event, is_after_refusal)
        if self._losing.get(shard) == 0:
            worker = self.random.randrange(self.sim.scenario.workers)
            if self.random.random() < 0.3:  # others wait for it, and hear what of theirs is safe
                self.sim.world.at(1e-3, lambda: self.process("stop worker", shard, worker))
            self.sim.world.at(self.random.choice([1e-3, 2e-3, 5e-3, 0.02, 0.5]), lambda: self._lose(shard, worker))

    def _lose_table(self, shard: int, event: Event) -> None:
        """As _begin_loss, where the last table is declared; end the process that has taken the push after all."""
        sim, (losing, worker) = self.sim, self._losing_table
        if isinstance(event, Declare) and event.spec.name == sim.scenario.tables[-1].name and self._wanted(0.8):
            sim.machines[shard].disk.write_back()
            sim.world.note("write back", shard)
            self._losing_table = shard, -1
        elif isinstance(event, PushEvent) and losing == shard and event.push.token.worker == worker:
            self._losing_table = -1, -1
            sim.world.at(self.random.uniform(1e-4, 2e-3), lambda: self.process("kill shard", shard, worker))

    def _lose_push(self, call: SimulatedCall) -> str:
        """The first push after the declaration gets lost; soon its shard's machine loses power."""
        if not self._wanted(1.0):
            return ""
        shard, worker = self._losing_table = call.shard, call.worker
        self._count("drop", self.sim.machines[shard].states | {"push"})
        self.sim.world.at(self.random.choice([1e-3, 5e-3]), lambda: self.process("power loss", shard, worker))
        return self.random.choice(["silence", "drop"])

    def _begin_loss(self, shard: int, event: Event, is_after_refusal: bool) -> None:
        """From here on a machine's kernel writes nothing to the disk, until it loses power some events later."""
        sim = self.sim
        sim.machines[shard].disk.write_back()
        sim.world.note("write back", shard)
        events = [0, 0, 1, 2] if isinstance(event, Load | Leave) else [1, 1, 2, 3, 5]
        if isinstance(event, Declare):  # with pushes of its table
            events = [1, 2, 3, 4, 5, 6]
        self._losing[shard] = 1 if is_after_refusal else self.random.choice(events)  # what comes later shows the loss
        other = self.random.randrange(sim.scenario.shards)
        if isinstance(event, Load) and other != shard:  # which gives no answer until the call is given up
            sim.network.cuts[event.worker, other, "reply"] = sim.world.now + 1.2 * sim.scenario.timeout

    def _lose(self, shard: int, worker: int) -> None:
        self._losing.pop(shard, None)
        self.process("power loss", shard, worker)

    def _is_slow(self, shard: int, kind: str, name: str) -> bool:
        """Whether a write or sync of a log takes long, and its machine loses power meanwhile."""
        log, machine = self.sim.machines[shard].log, self.sim.machines[shard]
        is_base = log is not None and log.bases.writing
        if not name.startswith("log-") or not self._wanted(0.4 if is_base else 0.1):
            return False
        self._count("slow disk", machine.states | {kind})
        machine.disk.failing[kind] = "slow"
        self.sim.world.at(self.random.choice([2e-3, 0.02, 0.05, 0.1]), lambda: self.process("power loss", shard, 0))
        return True

    def _fails_base(self, shard: int, kind: str, name: str) -> bool:
        """Whether a sync fails that a base needs, or a machine loses power after the next process has taken one."""
        machine = self.sim.machines[shard]
        bases = None if machine.log is None else machine.log.bases
        if bases is None or not self._wanted(0.5):
            return False
        if shard in self._distrusted and bases.taken:
            self._distrusted.discard(shard)
            self.sim.world.at(self.random.choice([0.0, 2e-3, 0.02]), lambda: self.process("power loss", shard, 0))
            return True
        if not bases.writing or kind != "sync" or not name.startswith("log-") or shard in self._distrusted:
            return False
        if self.sim.scenario.staleness == 0 and not self.sim.machines[shard].shard.core.clock.pending:
            return False  # of what is older than a base, only pushes that wait for their clock are needed
        self._count("failed sync", machine.states | {"sync"})
        machine.disk.failing["sync"] = "failed sync"
        self._distrusted.add(shard)
        for worker in self.sim.workers:  # those who have not pushed, so that the next base needs these pushes, too
            if worker.is_training and worker.process is not None and self.random.random() < 0.6:
                worker.stop(2.5)
        return True

    def _isolate(self, call: SimulatedCall) -> str:
        """Cut a worker off from all shards for longer than its lease, and one link for longer, one way."""
        sim, worker = self.sim, call.worker
        self._count("cut", sim.machines[call.shard].states | {WAITS[call.kind]})
        seconds = 1.5 * sim.scenario.lease
        for shard in range(sim.scenario.shards):
            sim.network.cuts[worker, shard, "request"] = sim.world.now + seconds
        shard, direction = (
            self.random.randrange(sim.scenario.shards),
            self.random.choice(["request", "reply", "reply", "reply"]),
        )
        until = sim.world.now + seconds + self.random.choice([0.5, 2.5, 2.5, 3.0]) * sim.scenario.timeout
        sim.world.at(seconds, lambda: sim.network.cuts.update({(worker, shard, direction): until}))
        return "drop"

    def _choose(self, kinds: list[str]) -> str:
        """One of these kinds; empty where this seed has none of them."""
        weights = [self._weights[kind] for kind in kinds]
        return self.random.choices(kinds, weights)[0] if any(weights) else ""

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
            keeps = self.focus not in ("short losses", LOST_TABLES) or self.random.random() < 0.2
            machine.kill(self.random.choice([0.05, 0.5]), power=True, keeps=keeps)
        elif not machine.flip(self.random):
            return
        self._count(kind, states)
