"""The machine of a shard: its disk, which stays, and its process, which ends and is started again."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.proto.errors import EmbershardError, LogDamaged, LogStalled, LogTooNew
from embershard.proto.messages import (
    Compress,
    Declare,
    GetStatus,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Load,
    Pull,
    Push,
    Rendezvous,
    TakeSplit,
)
from embershard.proto.routing import Placement
from embershard.ps import recovery
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.dispatch import Dispatch
from embershard.ps.journal.folder import LogFolder
from embershard.ps.journal.manifest import read_manifest
from embershard.ps.journal.progress import RecoveryProgress
from embershard.ps.journal.reader import LogReader
from embershard.ps.journal.segments import SyncFailed
from embershard.ps.shard import Shard
from harness.simulated_disk import Worst

from .machinery.disk import MachineDisk
from .machinery.network import SimulatedCall, as_bytes
from .machinery.world import Process
from .oracles.model import OPTIMIZERS
from .oracles.oracle import ShardOracle

if TYPE_CHECKING:
    from .simulation import Simulation


# kind of an open request -> the state that a fault finds
WAITS = {
    Push: "push", Pull: "pull", Load: "load", Declare: "declare", Join: "join", Leave: "leave", Heartbeat: "heartbeat",
    Hello: "hello", Rendezvous: "rendezvous", TakeSplit: "split", GetStatus: "hello", Compress: "declare",
}  # fmt: skip


class ShardMachine:
    """Runs shard `number`, with a supervisor that starts it again."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.sim, self.number = simulation, number
        self.disk = MachineDisk(simulation.world)
        self.disk.latency = simulation.scenario.disk_latency
        self.disk.on_operation = lambda kind, name, seconds: simulation.faults.operation(number, kind, name, seconds)
        self.oracle = ShardOracle(simulation.world, number, simulation.scenario.durability)
        self.oracle.on_event = lambda event: simulation.faults.event(number, event)
        self.folder = Path(f"/logs/shard-{number}")
        self.process: Process | None = None
        self.dispatch: Dispatch | None = None
        self.shard: Shard | None = None
        self.log: recovery.ShardLog | None = None
        self.has_power, self.is_serving = True, False
        self._waiting: list[SimulatedCall] = []  # calls that this process has
        self._inbox: Any = None  # of its I/O thread, where it has one
        self._to_restore: tuple[Path, int, int] | None = None  # path, offset, byte

    @property
    def states(self) -> set[str]:
        """What it does now."""
        states = {WAITS[call.kind] for call in self.sim.network.open_calls(self.number)}
        states.add("serving" if self.is_serving else "recovering")
        states |= set(self.disk.under_way)
        if self.log is not None and self.log.bases.writing:
            states.add("base")
        if self.shard is not None and self.shard.core.clock.pending:
            states.add("gathered")
        return states

    def start(self) -> None:
        """Start a process."""
        world, scenario = self.sim.world, self.sim.scenario
        drift = world.random.uniform(-scenario.drift, scenario.drift)
        self.has_power = True
        self.process = process = Process(world, f"shard-{self.number}", drift=drift)
        process.oracle = self.oracle  # type: ignore[attr-defined]
        self.disk.process = process
        process.spawn(lambda: self._serve(process))

    def kill(self, seconds: float, *, power: bool = False, keeps: bool = True) -> None:
        """End the process, or the machine, which may keep something that was not synced; start it after so long."""
        process = self.process
        assert process is not None
        self.sim.world.note("kill", self.number, power)
        self.process = self.dispatch = self.shard = self.log = None
        self.is_serving = False
        process.kill()
        self.disk.kill()
        if power:
            self.has_power = False
            chance = self.sim.world.random
            self.disk.lose_power(chance if keeps else Worst(chance.getrandbits(32)))
            self.oracle.may_lose |= self.sim.scenario.durability == "log"
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            random = self.sim.world.random
            late = random.uniform(0.0, 0.3) if power else random.uniform(1e-4, 2e-3)
            self.sim.network.refuse(call, late, "the connection broke")
        self.sim.world.at(seconds, self.start)

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so many seconds."""
        process = self.process
        assert process is not None
        process.stop()
        self.sim.world.at(seconds, process.go_on)

    def flip(self, chooser: random.Random) -> bool:
        """End the process and flip a bit of a record that is on the disk, and is not of its last group."""
        if self._to_restore is not None or not self.is_serving:
            return False
        self.kill(chooser.choice([0.01, 0.2]))
        disk = self.disk
        manifest = read_manifest(disk, self.folder) if self.folder in disk._folders else None
        if manifest is None:
            return True  # a kill
        try:
            records = list(LogReader(disk, self.folder, manifest).records())
        except EmbershardError:
            return True
        if manifest.bases and chooser.random() < 0.3:
            folder = self.folder / chooser.choice(manifest.bases).name
            name = chooser.choice(sorted(disk.list(folder)))
            self._flip_bit(folder / name, chooser.randrange(len(disk.content(folder / name))), chooser)
            self.oracle.damaged_base = folder.name
            return True
        if len(records) < 3:
            return True
        last = records[-1].header
        whole = [record for record in records if record.header.lsn < last.lsn - last.in_group - 1]
        if not whole:
            return True
        record = chooser.choice(whole)
        path = self.folder / str(record.segment)
        self._flip_bit(path, record.offset + chooser.randrange(record.header.num_bytes), chooser)
        self.oracle.damaged = record.header.lsn, path.name
        return True

    def _flip_bit(self, path: Path, offset: int, chooser: random.Random) -> None:
        data = self.disk.content(path)
        self._to_restore = path, offset, data[offset]
        data[offset] ^= 1 << chooser.randrange(8)
        self.disk.sync_all()  # a loss of power before it is found would hide it

    def serve(self, call: SimulatedCall) -> None:
        """A request arrives."""
        process = self.process
        if process is not None and process.is_stopped:
            process.held.append(lambda: self.serve(call))
            self._waiting.append(call)
            return
        if process is None or self.dispatch is None:
            random = self.sim.world.random
            late = random.uniform(1e-4, 1e-3) if self.has_power else random.uniform(0.05, 1.0)
            self.sim.network.refuse(call, late, "Connection refused")
            return
        if call not in self._waiting:
            self._waiting.append(call)
        submit = partial(self._submit, process, self.dispatch, call)
        submit() if self._inbox is None else self._inbox.put(submit)

    def _receive(self, process: Process) -> None:
        """What the I/O thread of a process does."""
        inbox = self._inbox
        while not process.is_dead:
            inbox.get()()

    def _submit(self, process: Process, dispatch: Dispatch, call: SimulatedCall) -> None:
        """Have a process answer a request."""
        oracle, network, scenario = self.oracle, self.sim.network, self.sim.scenario
        made: dict[str, object] = {}

        def work() -> None:
            if scenario.work_seconds:
                process.clock.sleep(process.clock.uniform(0.0, scenario.work_seconds / 2))

        def read() -> object:
            work()
            made["request"] = call.read()
            return made["request"]

        def write(reply: object) -> object:
            oracle.reply(made["request"], reply)
            if isinstance(made["request"], Pull):
                made["rows"] = oracle.rows(made["request"])
            made["lsn"], made["reply"] = len(oracle.history), reply
            work()  # meanwhile the log may have written its event
            return as_bytes(reply)

        def done(future: object) -> None:
            if process.is_dead:
                return
            if call in self._waiting:
                self._waiting.remove(call)
            if future.cancelled():
                return
            error = future.exception()
            if error is not None and type(error).__name__ == "InternalError":
                self.oracle.fail(f"{call.kind.__name__}: {error}")
            if error is not None:
                self.sim.world.covered[f"answer {type(error).__name__}"] += 1
                if not isinstance(error, LogStalled):  # which may stand for an answer that is not safe
                    oracle.refuses(made.get("request"))
            else:
                oracle.leaves(made["request"], made["reply"], made["lsn"])
            network.reply(call, future.result() if error is None else as_bytes(error), made.get("rows"))

        deadline = process.clock.now() + call.seconds
        is_small = call.kind in (Pull, Push) and call.num_bytes <= scenario.small_bytes
        future = dispatch.submit(
            call.kind, read, write, num_bytes=call.num_bytes, deadline=deadline, peer="", is_small=is_small
        )
        if is_small:
            how = "queued" if not made else "parked" if "reply" not in made and not future.done() else "done"
            self.sim.world.covered[f"small requests that the I/O thread has {how}"] += 1
        future.add_done_callback(done)

    def _serve(self, process: Process) -> None:
        """What a shard's process does from its start on."""
        scenario, world = self.sim.scenario, self.sim.world
        shard = Shard(self.number, self.sim.placement, OPTIMIZERS, clock=process.clock,
                      max_message_bytes=scenario.max_message_bytes)  # fmt: skip
        process.clock.sleep(world.random.uniform(1e-3, 3e-2))  # an interpreter starts
        progress = RecoveryProgress(process.clock)
        self.shard = shard
        self.dispatch = Dispatch(shard, ApplyThread(clock=process.clock), progress)
        self._inbox = process.clock.queue() if scenario.small_bytes else None
        if self._inbox is not None:
            process.spawn(lambda: self._receive(process))
        try:
            log = self.log = self._recover(shard, process, progress)
        except (LogDamaged, LogTooNew) as error:  # a bit of a version was flipped
            self._restore(error)
            return
        except SyncFailed as error:
            self._fatal(process, error)
            return
        except EmbershardError as error:  # the supervisor tries again
            world.note("no start", self.number, type(error).__name__, error)
            if type(error).__name__ not in ("LogUnusable",):
                self.oracle.fail(f"it does not start: {type(error).__name__}: {error}")
            self.kill(0.3)
            return
        self.oracle.recovered(shard.core)
        if scenario.group_bytes is not None:
            log.journal._group_bytes = scenario.group_bytes
        log.start()
        self.dispatch.open()
        self.is_serving = True
        world.note("serving", self.number)

    def _recover(self, shard: Shard, process: Process, progress: RecoveryProgress) -> recovery.ShardLog:
        scenario, random = self.sim.scenario, self.sim.world.random
        disk, process_disk = self.disk, self.disk.process
        disk.process = None  # the oracle's look takes no time
        disk.make_folder(self.folder)
        self.oracle.before_recovery(disk, self.folder, read_manifest(disk, self.folder))
        disk.process = process_disk
        if self.oracle.damaged is None and not self.oracle.damaged_base:
            self._to_restore = None
        folder = LogFolder.open(
            self.folder,
            shard=self.number,
            num_shards=scenario.shards,
            disk=disk,
            new_id=lambda: random.getrandbits(64) | 1,
        )
        limit = None if scenario.log_segments is None else scenario.log_segments * scenario.segment_bytes
        return recovery.recover(
            shard,
            folder,
            scenario.durability,
            segment_bytes=scenario.segment_bytes,
            progress=progress,
            on_fatal=lambda error: self._fatal(process, error),
            least_cost=2**60 if scenario.base_tail is None else scenario.base_tail,
            cost_share=0.0,
            row_cost=0,
            limit_bytes=limit,
        )

    def _fatal(self, process: Process, error: BaseException) -> None:
        if process.is_dead:
            return
        self.sim.world.covered[f"processes ended by {type(error).__name__}"] += 1
        self.sim.world.note("fatal", self.number, type(error).__name__, error)
        if type(error).__name__ not in ("SyncFailed",):
            self.oracle.fail(f"the process ends by {type(error).__name__}: {error}")
        self.kill(0.1)
        process.clock.sleep(1.0)  # raises: nothing of it goes on

    def _restore(self, error: LogDamaged | LogTooNew) -> None:
        """Somebody restores the file from a copy."""
        self.sim.world.covered[f"damage found in {'a base' if self.oracle.damaged_base else 'the log'}"] += 1
        self.sim.world.note("damage", self.number, error.fields.get("lsn"))
        if self._to_restore is None:
            self.oracle.fail(f"damage where none is: {error.fields}")
            return
        path, offset, byte = self._to_restore
        if path.name not in str(error.fields["path"]):
            self.oracle.fail(f"damage of {path} is said to be in {error.fields['path']}")
        for data in (self.disk._names[path].data, self.disk._names[path].durable):
            data[offset] = byte
        self._to_restore = self.oracle.damaged = None
        self.oracle.damaged_base = ""
        self.kill(0.05)


def _observe(log: recovery.ShardLog, event, outcome) -> int:
    lsn = _append(log, event, outcome)
    process = getattr(log._clock, "_process", None)
    if process is not None:  # of a simulation
        process.oracle.appended(lsn, event, outcome)
    return lsn


_append = recovery.ShardLog.append
recovery.ShardLog.append = _observe  # type: ignore[method-assign]
assert Placement
