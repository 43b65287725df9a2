"""What a seed stands for: a job's mode, tables, workers and shards, and how often what fails."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from embershard.proto import spec
from embershard.proto.codec.name import CodecName

OPTIMIZERS = [spec.SGD(lr=0.1), spec.SGD(lr=1.0), spec.Adagrad(lr=0.1), spec.Adam(lr=0.01), spec.FTRL(lr=0.1)]
RAISING = spec.Custom(function="simulation.raising_rows:limited", lr=0.5)
PUSH_CODECS = ["none"] * 5 + ["int8", "topk:0.4", "rows:0.5", "fp16s"]
PULL_CODECS = ["none"] * 4 + ["delta", "delta", "fp16s", "int8"]

# What half of the seeds prefer, of what several faults in a row have to come for; "" is none
FOCUSES = ["", "", "", "", "short losses", "short losses", "partitions", "syncs"]
# these came later, and have some of the seeds that have none of the others, by numbers of their own: what was named
# before is as it was
RARE, LOST_TABLES = "rare requests", "lost tables"


@dataclass(frozen=True)
class Scenario:
    """All of it comes from the seed."""

    seed: int
    durability: str
    shards: int
    workers: int
    is_member: bool
    staleness: int | None
    aware: bool
    tables: tuple[spec.TableSpec, ...]
    steps: int
    splits: bool
    max_message_bytes: int
    segment_bytes: int
    group_bytes: int | None
    disk_latency: float
    lease: float
    timeout: float
    drift: float
    loads: bool
    refused: bool
    may_lose_workers: bool
    prefetches: bool
    faults: int
    payload_bytes: int  # that each worker brings to a rendezvous
    base_tail: int | None  # bytes of events behind a base before the next one is taken; None: no bases
    base_rows: int  # of a file of a base
    kept_pushes: int  # that a worker may keep until they are safe
    local_steps: bool  # pushes are differences of rows
    raises: bool  # the row function of the first table raises for some gradients
    compresses: bool  # somebody changes the codecs that the shards tell
    log_segments: int | None  # that the folder of a log may have beside its images
    focus: str = ""  # which faults it prefers, see faults.py
    compute: float = 0.0  # seconds at most between a pull and its push
    more_steps: tuple[int, ...] = ()  # of each worker: who has fewer pauses while the others go on
    late_table: int = 0  # steps of a worker before it declares the last table
    rests: int = 0  # steps after which a worker pauses and goes on; 0: it does not
    small_bytes: int = 0  # of a pull or push that an I/O thread may do; 0: none, and there is no such thread
    work_seconds: float = 0.0  # that a request has the tables for, at most

    @classmethod
    def of(cls, seed: int, faults: int | None = None, focus: str | None = None) -> Scenario:
        """That of a seed; `faults` replaces its number of faults, and `focus` what it prefers.

        With a `focus` a seed is what it was when it was named, without what seeds draw since.
        """
        r = random.Random(f"scenario {seed}")
        is_sync = r.random() < 0.45
        is_member = is_sync or r.random() < 0.8
        staleness = 0 if is_sync else r.choice([None, 1, 3])
        tables = []
        for number in range(r.choice([1, 1, 2, 3])):
            optimizer, push = r.choice(OPTIMIZERS), r.choice(PUSH_CODECS)
            initializer = r.choice([spec.Constant(value=0.0), spec.Normal(std=0.1)])
            codecs = {"push_codec": CodecName.parse(push), "pull_codec": CodecName.parse(r.choice(PULL_CODECS))}
            tables.append(spec.TableSpec(name="abc"[number], dim=r.choice([1, 2, 3]), optimizer=optimizer, seed=seed,
                                         initializer=initializer, **codecs))  # fmt: skip
        local_steps = r.random() < 0.15
        raises = not is_sync and r.random() < 0.25
        if raises:  # for a worker that sends a push again it is the same push, without residuals
            tables[0] = replace(tables[0], optimizer=RAISING, push_codec=CodecName.parse("none"))
        count = 20 + r.randrange(20)
        scenario = cls(
            seed=seed,
            durability=r.choice(["fsync", "fsync", "log"]),
            shards=r.choice([1, 1, 2, 2, 3]),
            workers=r.choice([2, 3, 3]) if is_sync else r.choice([1, 2, 2, 3]),
            is_member=is_member,
            staleness=staleness,
            aware=not is_sync and is_member and r.random() < 0.4,
            tables=tuple(tables),
            steps=r.randrange(5, 12),
            splits=is_member and not is_sync and r.random() < 0.3,
            max_message_bytes=r.choice([2**26, 2**26, 700]),
            segment_bytes=r.choice([2048, 4096, 4096, 16384]),
            group_bytes=r.choice([None, None, 1]),
            disk_latency=r.choice([2e-4, 2e-4, 2e-3]),
            lease=r.choice([1.0, 2.0, 10.0]),
            timeout=r.choice([3.0, 6.0]),
            drift=r.choice([0.0, 0.2]),
            loads=not is_sync and r.random() < 0.4,
            refused=not is_sync and r.random() < 0.4,
            may_lose_workers=r.random() < 0.5,
            prefetches=r.random() < 0.3,
            faults=count if faults is None else faults,
            payload_bytes=r.choice([20, 20, 400]),
            base_tail=r.choice([None, 0, 1000, 3000]),
            base_rows=r.choice([3, 7, 1000]),
            kept_pushes=r.choice([2048, 2048, 1, 3]),
            local_steps=local_steps,
            raises=raises,
            compresses=r.random() < 0.2,
            log_segments=r.choice([None, None, None, 6]),
        )
        return _focused(_with_io_thread(scenario), _own_focus(seed)) if focus is None else _focused(scenario, focus)


def _own_focus(seed: int) -> str:
    """The focus of a seed."""
    chosen = random.Random(f"focus {seed}").choice(FOCUSES)
    share = 1.0 if chosen else random.Random(f"later focus {seed}").random()
    return RARE if share < 0.125 else LOST_TABLES if share < 0.1875 else chosen


def _with_io_thread(scenario: Scenario) -> Scenario:
    """A scenario that may have an I/O thread, which does small pulls and pushes."""
    r = random.Random(f"small {scenario.seed}")
    small_bytes, work_seconds = r.choice([0, 250, 2**14, 2**14]), r.choice([0.0, 5e-4, 3e-3])
    return replace(scenario, small_bytes=small_bytes, work_seconds=work_seconds if small_bytes else 0.0)


def _focused(scenario: Scenario, focus: str) -> Scenario:
    """A scenario with a focus, and with what its faults can hit."""
    known = {*FOCUSES, RARE, LOST_TABLES}
    assert focus in known, f"a focus is one of {sorted(known)}, not {focus}"
    r = random.Random(f"focus {scenario.seed}")  # of its own: the other numbers of a seed are as without it
    r.choice(FOCUSES)  # see _own_focus
    scenario = replace(scenario, focus=focus)
    if focus == "short losses":
        workers = 1 if scenario.staleness != 0 and r.random() < 0.4 else scenario.workers
        more_steps = tuple(r.choice([0, 0, 4, 8]) for _ in range(workers))
        if scenario.splits:  # one that paused with a part of the data would be waited for: no program does
            more_steps = ()
        tables = scenario.tables
        if len(tables) == 1:  # so that one may be lost and not the other
            tables = (*tables, replace(tables[0], name="b"))
        compute = r.choice([0.0, 2e-3, 0.02])
        scenario = replace(scenario, workers=workers, more_steps=more_steps, tables=tables, compute=compute)
        return replace(scenario, durability="log")
    if focus == "partitions":
        return replace(scenario, lease=r.choice([1.0, 2.0]), shards=max(2, scenario.shards))
    if focus == "syncs":
        return replace(scenario, durability=r.choice(["log", "fsync"]), base_tail=0)
    if focus == RARE and scenario.is_member:
        splits = scenario.staleness != 0 and r.random() < 0.7
        loads = scenario.staleness != 0
        return replace(scenario, splits=splits, loads=loads, rests=0 if splits else r.choice([1, 2, 3]))
    if focus == LOST_TABLES:  # one worker declares the last table first, and another one again
        tables, lease, late_table = scenario.tables, r.choice([1.0, 2.0]), r.choice([1, 2, 3])
        if len(tables) == 1:
            tables = (*tables, replace(tables[0], name="b"))
        scenario = replace(
            scenario, tables=tables, lease=lease, late_table=late_table, workers=max(2, scenario.workers)
        )
        scenario = replace(scenario, durability="log", staleness=None, is_member=True)
        return replace(scenario, loads=False, splits=False, aware=False)
    return scenario
