"""Checks of the job that the shards serve: its clock, its workers, who is waited for, and how stale rows are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from embershard.doctor.case import Case
from embershard.doctor.check import Finding, check, fail, numbers, ok, some, warn
from embershard.proto.messages import ShardStatus

_SILENT_SHARE = 0.5  # of a lease: workers renew theirs four times in it


@check(
    "clock",
    asks="whether the shards are at the same clock, and whether it advances",
    remedy="see `waited for`; if one shard is behind, see `load`, and its output",
)
def clock(case: Case) -> Finding | None:
    """The first clock that is not closed, on every shard, at two looks."""
    if not _trains(case):
        return ok("no worker is a member: nobody trains, or one worker on its own") if case.statuses else None
    clocks = [status.clock for _, status in case.statuses]
    moved = sum(status.clock - probe.before.clock for probe, status in case.statuses if probe.before is not None)
    text = f"{min(clocks):,}" if min(clocks) == max(clocks) else f"{min(clocks):,} to {max(clocks):,}"
    bound = case.statuses[0][1].staleness
    mode = "synchronous" if bound == 0 else f"bound {bound}" if bound > 0 else "no bound"
    text += f" ({mode}), {'moving' if moved else 'not advancing between two looks'}"
    # one answer is a little older than another, and a clock closes on all shards within one step
    far = max(clocks) - min(clocks) > 2 + moved
    return warn(f"{text}; {_behind(case)} is behind") if far else ok(text)


@check(
    "members",
    asks="whether every shard knows the same workers, as many as the job has",
    remedy="start the missing workers: no clock closes before all have joined once; for a worker that left, see its "
    "output",
)
def members(case: Case) -> Finding | None:
    """Workers that hold a lease."""
    if not _trains(case):
        return None
    known = [frozenset(member.worker for member in status.members) for _, status in case.statuses]
    partly = sorted(frozenset.union(*known) - frozenset.intersection(*known))
    if partly:
        return warn(f"not members on every shard: workers {numbers(partly)}")
    paused = sorted({m.worker for _, status in case.statuses for m in status.members if m.paused})
    text = f"workers {numbers(sorted(known[0]))}" + (f"; paused: {numbers(paused)}" if paused else "")
    wanted = case.job.workers if case.job is not None else 0
    return warn(f"{text}; the job has {wanted}") if len(known[0]) < wanted else ok(text)


@check(
    "waited for",
    asks="which worker the others wait for",
    remedy="look at that worker's machine (load, data, thermal limits, network); a staleness bound lets the others "
    "continue for some steps, `off` without limit; a dead worker is evicted at the end of its lease",
)
def waited_for(case: Case) -> Finding | None:
    """Workers that have not pushed the clock which the others have, at both looks."""
    if not _trains(case):
        return None
    last, first = Counter[int](), Counter[int]()
    for probe, status in case.statuses:
        last.update(_holding(status))
        if probe.before is not None and probe.before.clock == status.clock:
            first.update(_holding(probe.before))
    stuck = sorted(last.keys() & first.keys())
    if not stuck and all(_is_early(probe.before) and _is_early(status) for probe, status in case.statuses):
        return warn("nothing closes: not all workers of the job have joined yet")
    if stuck:
        heard = _least_lease(case)
        words = [f"worker {worker} (its lease has {heard[worker]:.1f} s left)" for worker in stuck]
        return warn(f"the clock did not move between two looks: {some(words)} did not push it yet")
    return ok(f"at this moment: workers {numbers(sorted(last))}" if last else "nobody")


@check(
    "leases",
    asks="whether workers lost their leases, or are about to",
    remedy="see the output of those workers: killed, stopped, or starved of CPU for longer than train.lease, which may "
    "be raised",
)
def leases(case: Case) -> Finding | None:
    """Expired leases, and what is left of the others."""
    if not case.statuses:
        return None
    expired = max(status.expired_leases for _, status in case.statuses)
    whole = case.job.train.lease if case.job is not None else 0.0
    left = _least_lease(case)
    silent = [f"worker {worker}: {seconds:.1f} s left" for worker, seconds in left.items()]
    silent = silent if any(seconds < whole * _SILENT_SHARE for seconds in left.values()) else []
    if expired or silent:
        return warn("; ".join([*([f"{expired} expired since the shards started"] * bool(expired)), *silent]))
    return ok("none expired" + (f"; the shortest has {min(left.values()):.1f} s left" if left else ""))


@check(
    "staleness seen",
    asks="how many updates the rows had missed when gradients made from them arrived",
    remedy="lower train.staleness (0 is synchronous), set train.staleness_aware_lr, or use fewer workers",
)
def staleness_seen(case: Case) -> Finding | None:
    """The shards' histograms, added up."""
    counts = Counter[int]()
    for _, status in case.statuses:
        counts.update({staleness: pushes for staleness, pushes in enumerate(status.staleness_seen) if pushes})
    if not counts:
        return None
    last = max(len(status.staleness_seen) for _, status in case.statuses) - 1
    most = f"{last} or more" if counts[last] else str(max(counts))
    mean = sum(staleness * pushes for staleness, pushes in counts.items()) / counts.total()
    text = f"{counts.total():,} pushes: mean {mean:.1f}, p99 {_quantile(counts, 0.99)}, at most {most} updates"
    # workers that are as quick as each other miss one step of each of the others, and those that their bound allows
    usual = case.workers * (1 + max(0, *(status.staleness for _, status in case.statuses)))
    known = case.job is not None or _trains(case)
    return warn(text) if known and mean > 2 * usual else ok(text)


@check(
    "job and workers",
    asks="whether the job's staleness is the one that the running shards serve",
    remedy="give all workers the same job file; a job with other settings needs its own shards",
)
def job_and_workers(case: Case) -> Finding | None:
    """The job file against what runs."""
    if case.job is None or not case.statuses or not case.job.has_shards or case.job.train.local_steps:
        return None
    if not _trains(case):
        return ok("no worker is a member yet")
    wanted = case.job.train.bound if case.job.train.bound is not None else -1
    running = {status.staleness for _, status in case.statuses if status.members}
    if running != {wanted}:
        return fail(f"the job's train.staleness is {_bound(wanted)}, the shards serve {_bound(*running)}")
    return ok(f"staleness {_bound(wanted)}")


CHECKS = (clock, members, waited_for, leases, staleness_seen, job_and_workers)


def _trains(case: Case) -> bool:
    return any(status.members for _, status in case.statuses)


def _behind(case: Case) -> str:
    return min(case.statuses, key=lambda pair: pair[1].clock)[0].name


def _holding(status: ShardStatus) -> list[int]:
    """Workers without whom a clock stays open that another one has pushed."""
    active = [member for member in status.members if not member.paused]
    if not any(member.clock > status.clock for member in active):
        return []
    return [member.worker for member in active if member.clock <= status.clock]


def _is_early(status: ShardStatus | None) -> bool:
    """Whether a clock is open that all members have pushed: it waits for workers that never joined."""
    active = [member.clock for member in (status.members if status is not None else ()) if not member.paused]
    return status is not None and bool(active) and min(active) > status.clock


def _least_lease(case: Case) -> Mapping[int, float]:
    """Worker -> seconds that are left of its lease, where the least is left."""
    left: dict[int, float] = {}
    for _, status in case.statuses:
        for member in status.members:
            left[member.worker] = min(left.get(member.worker, member.lease_seconds), member.lease_seconds)
    return left


def _quantile(counts: Mapping[int, int], share: float) -> int:
    passed, total = 0, sum(counts.values())
    for missed in sorted(counts):
        passed += counts[missed]
        if passed >= share * total:
            return missed
    return 0


def _bound(*values: int) -> str:
    return " and ".join("off" if value < 0 else str(value) for value in values)
