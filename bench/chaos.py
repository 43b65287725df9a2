"""Faults of real processes, links and disks, for the bars: shards are those of embershard.deploy, under its supervisor.

kill        kill -9 of a shard, at whatever it does: serving, starting, recovering
stop        SIGSTOP, and SIGCONT after a while
lose_power  the disk (chaos_disk.py) keeps what was synced, all shards are killed, and the machine starts anew
cut         a link (faulty_link.py) whose connections break, and that takes none for a while

Full disks are in chaos_disk.py.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt

import embershard as es
from chaos_disk import PowerDisk
from embershard.deploy.supervisor import LocalShards, RestartPolicy, ShardSettings
from embershard.local_shards import InProcessShards
from embershard.proto.codec.name import CodecName
from embershard.proto.messages import Pull, TableIds
from embershard.proto.messages import Rows as RowsReply
from embershard.proto.routing import Placement, make_route
from embershard.ps.events import PushEvent
from embershard.ps.journal.folder import LogFolder, log_folder
from embershard.ps.recovery import EventReader, replay
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from faulty_link import BEHIND_LINK

AGAIN = RestartPolicy(first_pause=timedelta(0), quick=timedelta(0))  # however often a shard dies
TIMEOUT = timedelta(seconds=300)
WORKERS, IDS, BATCH, DIM = 2, 300, 40, 8
MODES: dict[str, dict[str, int]] = {
    "asynchronous": {},
    "bounded": {"workers": WORKERS, "staleness": 3},
    "synchronous": {"workers": WORKERS, "staleness": 0},
}
SPECS = [
    es.TableSpec(
        name=name,
        dim=DIM,
        optimizer=optimizer,
        initializer=es.Normal(std=0.1),
        push_codec=CodecName.parse(codec),
    )
    for name, codec, optimizer in (
        ("plain", "none", es.Adagrad(lr=0.1)),
        ("topk", "topk:0.25", es.SGD(lr=0.1)),
        ("int8", "int8", es.Adam(lr=0.01)),
    )
]
Rows = dict[str, npt.NDArray[np.float32]]


def kill(shards: LocalShards, index: int) -> bool:
    """Kill -9 of a shard's process; False where it was dead already and is not started again yet."""
    with suppress(ProcessLookupError):
        os.kill(shards.pids[index], signal.SIGKILL)
        return True
    return False


def stop(shards: LocalShards, index: int, seconds: float) -> bool:
    """Stop a shard's process for a while; whether it lived."""
    pid = shards.pids[index]
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        return True
    return False


class Machine:
    """Shards with a log on a disk, which all lose power at once and start again at the same addresses."""

    def __init__(self, num_shards: int, disk: PowerDisk, durability: str) -> None:
        self._num_shards, self._disk, self._durability = num_shards, disk, durability
        self._base_port = free_ports(num_shards)
        self.log_dir = disk.folder / "logs"
        self.shards = self._started()

    def lose_power(self) -> None:
        """Take the power of the disk, kill all shards, and start the machine and them again."""
        self._disk.cut()
        ending = threading.Thread(target=self.shards.close)  # it starts none again from here on
        ending.start()
        while ending.is_alive():
            for index in range(self._num_shards):
                kill(self.shards, index)
            ending.join(0.1)
        self._disk.restore()
        self.shards = self._started()

    def close(self) -> None:
        """End all shards."""
        self.shards.close()

    def _started(self) -> LocalShards:
        shards = LocalShards(
            self._num_shards,
            ShardSettings(durability=self._durability, log_dir=self.log_dir, options=BEHIND_LINK),
            base_port=self._base_port,
            restart=AGAIN,
            report=lambda line: None,
        )
        return shards.__enter__()


def free_ports(count: int) -> int:
    """The first of some ports in a row that nobody uses now."""
    chooser = random.Random()
    while True:
        first = chooser.randrange(20_000, 32_000)  # below those that Linux gives to connections
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(closing(socket.socket())).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


class Pusher(threading.Thread):
    """A worker that pushes to all tables, step after step, until `last` says at which one it ends.

    In a synchronous job the workers share ids: the order in which they come does not matter then.
    """

    specs: Sequence[es.TableSpec] = SPECS
    num_ids = WORKERS * IDS

    def __init__(self, client: Client, mode: str) -> None:
        super().__init__(daemon=True)
        self.client, self.clocked = client, bool(MODES[mode])
        self.first = 0 if mode == "synchronous" else client.worker * IDS
        self.acknowledged, self.last = 0, 10**9
        self.error: BaseException | None = None
        for spec in self.specs:
            client.declare(spec)

    def run(self) -> None:
        try:
            while self.acknowledged < self.last:
                self.step(self.acknowledged)
                self.acknowledged += 1
        except BaseException as error:
            self.error = error

    def step(self, step: int) -> None:
        chooser = np.random.default_rng([self.client.worker, step])
        ids = self.first + np.sort(chooser.choice(IDS, BATCH, replace=False))
        gradients = chooser.standard_normal((BATCH, DIM)).astype(np.float32)
        routes = {spec.name: make_route(ids, spec.space_key, self.client.placement) for spec in SPECS}
        self.client.pull(list(routes.items()), clock=step if self.clocked else None)
        parts = [(name, route, gradients[route.index.argsort()]) for name, route in routes.items()]
        # every third step pushes what local steps have changed
        self.client.push(parts, clock=step, difference=step % 3 == 2)


class Job:
    """Workers that push to some shards, in threads of this process."""

    def __init__(self, clients: Sequence[Client], mode: str, pusher: type[Pusher] = Pusher) -> None:
        self.mode = mode
        if MODES[mode]:
            for client in clients:
                client.join(Terms(lease=timedelta(minutes=10), **MODES[mode]))  # type: ignore[arg-type]
        self.pushers = [pusher(client, mode) for client in clients]

    def start(self) -> None:
        for pusher in self.pushers:
            pusher.start()

    def check(self) -> None:
        """Raise what a worker ended with."""
        for pusher in self.pushers:
            if pusher.error is not None:
                raise pusher.error

    def await_steps(self, steps: int) -> None:
        """Until each worker has made so many more."""
        wanted = [pusher.acknowledged + steps for pusher in self.pushers]
        end = time.monotonic() + TIMEOUT.total_seconds()
        while any(one.acknowledged < want for one, want in zip(self.pushers, wanted, strict=True)):
            self.check()
            if time.monotonic() > end:
                raise TimeoutError(f"no worker went on for {TIMEOUT}")
            time.sleep(0.002)

    def moves(self, seconds: float) -> bool:
        """Whether any worker makes a step in this time."""
        before = [pusher.acknowledged for pusher in self.pushers]
        time.sleep(seconds)
        self.check()
        return before != [pusher.acknowledged for pusher in self.pushers]

    def finish(self, last: int = 0) -> tuple[int, Rows]:
        """Let the workers come to one step; it, and all rows then."""
        last = last or max(pusher.acknowledged for pusher in self.pushers) + 5
        for pusher in self.pushers:
            pusher.last = last
        for pusher in self.pushers:
            pusher.join(TIMEOUT.total_seconds())
        self.check()
        assert all(pusher.acknowledged == last for pusher in self.pushers)
        one = self.pushers[0]
        client, ids = one.client, np.arange(one.num_ids)
        reads = [(spec.name, make_route(ids, spec.space_key, client.placement)) for spec in one.specs]
        found = client.pull(reads, clock=last if MODES[self.mode] else None)
        return last, {table: rows[route.index] for (table, route), rows in zip(reads, found, strict=True)}


@contextmanager
def job_on(addresses: Sequence[str], mode: str, pusher: type[Pusher] = Pusher) -> Iterator[Job]:
    """A job on shards, that has started; its connections end with the block."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(closing(Client.connect(addresses, worker=rank, timeout=TIMEOUT)))
            for rank in range(WORKERS)
        ]
        job = Job(clients, mode, pusher)
        job.start()
        yield job


def undisturbed(steps: int, mode: str, num_shards: int) -> Rows:
    """The rows after so many steps of each worker, on shards that nothing happens to."""
    shards = InProcessShards(num_shards)
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(Client(shards.transports(), worker=rank))) for rank in range(WORKERS)]
        job = Job(clients, mode)
        job.start()
        return job.finish(steps)[1]


def log_problems(log_dir: Path, num_shards: int, steps: int, rows: Rows, seen: Counter[str]) -> list[str]:
    """What is wrong with the shards' logs: pushes that are missing or there twice, rows that a replay makes otherwise.

    Every worker has made `steps`, all acknowledged; `rows` are what was pulled after them. The shards must have ended.
    """
    problems = []
    placement = Placement.even(num_shards)
    for shard in range(num_shards):
        folder = LogFolder.existing(log_folder(log_dir, shard))
        try:
            times: Counter[tuple[int, int]] = Counter()
            decode = EventReader()
            for record in folder.records():
                event = decode(record.body)
                seen["events"] += 1
                if isinstance(event, PushEvent):
                    times[event.push.token.worker, event.push.token.seq] += 1
            want = {(worker, seq) for worker in range(WORKERS) for seq in range(1, steps + 1)}
            lost, doubled = want - times.keys(), [token for token, count in times.items() if count > 1]
            seen["pushes"] += len(times)
            seen["lost"] += len(lost)
            seen["doubled"] += len(doubled)
            if lost or doubled or times.keys() - want:
                problems.append(f"shard {shard}: {len(lost)} pushes lost, {len(doubled)} doubled, of {len(want)}")
            replayed = Shard(shard, placement, OptimizerRegistry())
            replay(replayed.core, folder)
        finally:
            folder.close()
        problems += other_rows(replayed, placement, SPECS, rows)
    return problems


def other_rows(shard: Shard, placement: Placement, specs: Sequence[es.TableSpec], rows: Rows) -> list[str]:
    """Tables of which a shard with a replayed log has other rows than these, of ids 0, 1, ..."""
    problems, index = [], shard.greeting.shard
    for spec in specs:
        route = make_route(np.arange(len(rows[spec.name])), spec.space_key, placement)
        mine = route.ids[route.slice_of(index)]
        reply = shard.handle(Pull(placement.epoch, (TableIds(spec.name, mine),)))
        assert isinstance(reply, RowsReply)
        if not np.array_equal(reply.tables[0], rows[spec.name][mine]):
            problems.append(f"shard {index}: a replay of its log makes other rows of table {spec.name}")
    return problems


def differing(one: Rows, other: Rows) -> list[str]:
    """Tables whose rows are not equal to the bit."""
    return [name for name, rows in one.items() if not np.array_equal(rows, other[name])]


def shards_with_logs(num_shards: int, log_dir: Path, durability: str, say: Callable[[str], None]) -> LocalShards:
    settings = ShardSettings(durability=durability, log_dir=log_dir, options=BEHIND_LINK)
    return LocalShards(num_shards, settings, restart=AGAIN, report=say)


def random_pause(chooser: random.Random, job: Job, longest: float = 0.4) -> None:
    """Wait for a random moment: of a shard that serves, or that starts or recovers, each as often."""
    if chooser.random() < 0.5:
        job.await_steps(2)
        time.sleep(chooser.uniform(0, longest))
    else:
        time.sleep(chooser.uniform(0, 3 * longest))
    job.check()
