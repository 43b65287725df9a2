"""Checks of a run by what it left behind: whether it ended well, where its time went, and why its workers wait."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from embershard.doctor.case import Case
from embershard.doctor.check import Finding, check, fail, ok, some, warn
from embershard.doctor.run_record import RunRecord, number
from embershard.doctor.shards import is_busy
from embershard.worker.reporting.log import FILE_NAME

_LARGE_SHARE = 0.2  # of a step, for a part that is no computation
_BUSY_THREAD = 0.5
_UNEVEN = 4.0  # p99 of a step against its median
_FALL = 0.7  # of the speed at the start
_SLOW_CALL_SECONDS = 0.002
_SAVES = 1.02  # times fewer bytes: less is not the work of a codec
_MUCH_RESIDUAL = 0.1  # of the pushed bytes

_MODEL = "the model computes: more train.threads, train.linear onednn, mixed precision (bf16), a GPU, more workers"

_TROUBLES = {  # fields of a result that are 0 where all went well
    "skipped_rows": "gradient rows held NaN or Inf",
    "skipped_steps": "steps were skipped because of NaN or Inf",
    "expired_leases": "times a worker was evicted",
    "returned_splits": "input splits were assigned again",
}

# part of a step (proto/timing.py) -> what to try where it dominates
PARTS = {
    "wait": "prefetch with a staleness of 1 or 2 (train.prefetch), more shards, larger batches, or embedding.cache for "
    "hot rows; see `waiting`",
    "data": "data.loader_processes: 1 gives the reader a core of its own; a faster format (parquet) or disk",
    "route": "fewer tables: give features one table, or one id space (as the CTR readers do); smaller batches",
    "gather": "fewer tables, and fewer equal ids in a batch: let the reader pool repeated ones",
    "encode": "fewer and larger messages: fewer tables, fewer shards; a cheaper codec, or compression: auto",
    "decode": "fewer and larger messages: fewer tables, fewer shards; a cheaper codec, or compression: auto",
    "shards": "more shards; a cheaper codec, or compression: auto",
    "send": "a smaller dim, embedding.cache, a faster link; Unix sockets where shards and workers share a machine",
    "receive": "a smaller dim, embedding.cache, a faster link; Unix sockets where shards and workers share a machine",
    "pull": "fewer tables: give features one table, or one id space (as the CTR readers do)",
    "push": "prefetch (train.prefetch), so that pushes are sent in the background; fewer tables",
    "forward": _MODEL,
    "backward": _MODEL,
    "other": "look in trace.json (ui.perfetto.dev) for work between the parts: hooks, logging, metrics",
}
_COMPUTATION = ("forward", "backward")
_WAITS = {"shards": "wait_shards", "other workers": "wait_workers", "data": "wait_data"}  # fields of a result


@check(
    "run",
    asks="whether the run ended well",
    remedy="see the last lines of worker-*.log in the run's folder, and the error message; `gradients` and `leases` "
    "say what helps",
)
def ended(case: Case) -> Finding | None:
    """Check how the run's log ends."""
    run = case.run
    if run is None:
        return None
    if run.mistake:
        return fail(run.mistake, "name a folder that `embershard train --output` wrote, with a log.jsonl in it")
    damaged = f"; {run.damaged} damaged lines in {FILE_NAME}" if run.damaged else ""
    if run.result is None:
        return warn(f"no result: it still runs, or ended early, after step {_last_step(run)}{damaged}")
    text = f"{_count(run, 'steps')} steps, {_count(run, 'samples_per_second')} samples/s{damaged}"
    troubles = [f"{_count(run, name)} {what}" for name, what in _TROUBLES.items() if number(run.result, name)]
    return warn(f"{text}; {'; '.join(troubles)}") if troubles or damaged else ok(text)


@check(
    "step",
    asks="which part of a training step takes the most time",
    remedy="run once with --profile, then follow the advice for the slowest part (below)",
)
def step(case: Case) -> Finding | None:
    """Check which part of a step takes longest, by profile.json."""
    run = case.run
    if run is None or run.mistake:
        return None
    if run.profile is None:
        return ok(run.profile_mistake or "not known: there is no profile.json", "run it with --profile")
    shares = _shares(run, "parts")
    if not shares:
        return ok("not known: the profile has no steps", "profile a run of more than a hundred steps")
    name, share = max(shares.items(), key=lambda pair: pair[1])
    text = f"{name} takes {share:.0%} of {number(run.profile, 'step', 'p50_ms') or 0:.1f} ms"
    text += f" ({', '.join(f'{part} {value:.0%}' for part, value in _largest(shares, name))})"
    remedy = PARTS.get(name, PARTS["other"])
    beside = _largest(_shares(run, "overlapped"), name)
    if name == "wait" and beside and beside[0][1] > _BUSY_THREAD:  # what is waited for is made here, by one thread
        text += f"; meanwhile another thread spends {beside[0][1]:.0%} on {beside[0][0]}"
        remedy = PARTS.get(beside[0][0], remedy)
    return warn(text, remedy) if share > _LARGE_SHARE and name not in _COMPUTATION else ok(text, remedy)


@check(
    "even steps",
    asks="whether some steps take far longer than most",
    remedy="look for other programs on these cores, for swap, and for a worker or shard that stalls; evaluations do "
    "not count",
)
def even_steps(case: Case) -> Finding | None:
    """Compare the p99 of a step's time with its median."""
    profile = case.run.profile if case.run is not None else None
    p50, p99 = number(profile, "step", "p50_ms"), number(profile, "step", "p99_ms")
    if not p50 or p99 is None:
        return None
    text = f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    return warn(text) if p99 > _UNEVEN * p50 else ok(text)


@check(
    "waiting",
    asks="what share of the training time the workers wait, and why",
    remedy="follow the advice for the reason; if there is none, add --ps with the running shards to --run",
)
def waiting(case: Case) -> Finding | None:
    """The log's wait_share, and what speaks for which reason."""
    run = case.run
    if run is None or not run.train:
        return None
    share = number(run.result, "wait_share")
    if share is None:
        shares = [value for line in run.train if (value := number(line, "wait_share")) is not None]
        if not shares:
            return None
        share = statistics.median(shares)
    reasons = _reasons(case, run) if share > _LARGE_SHARE else []
    parts = {name: number(run.result, field) or 0.0 for name, field in _WAITS.items()}
    text = f"{share:.0%} of the training time"
    if any(parts.values()):
        text += f" ({', '.join(f'for {name} {part:.0%}' for name, part in _largest(parts, but=''))})"
    text += f"; {some([why for why, _ in reasons])}" if reasons else ""
    remedy = "; ".join(what for _, what in reasons)
    return warn(text, remedy) if share > _LARGE_SHARE else ok(text)


@check(
    "speed over time",
    asks="whether training became slower over time",
    remedy="see `memory`, `swap` and `load`: growing tables, a shard that fills up, other programs on the machine",
)
def speed_over_time(case: Case) -> Finding | None:
    """The last quarter of the intervals against the first, without the very first one."""
    lines = case.run.train if case.run is not None else ()
    speeds = [value for line in lines[1:] if (value := number(line, "samples_per_second")) is not None]
    if len(speeds) < 8:
        return None
    quarter = len(speeds) // 4
    early, late = statistics.median(speeds[:quarter]), statistics.median(speeds[-quarter:])
    text = f"{early:,.0f} samples/s at first, {late:,.0f} at last"
    return warn(text) if late < _FALL * early else ok(text)


@check(
    "evaluation",
    asks="what share of the run evaluations take",
    remedy="evaluate less often (evaluate.every), in larger batches (evaluate.batch_size), or on fewer samples",
)
def evaluation(case: Case) -> Finding | None:
    """Seconds of evaluation against those of the whole run."""
    run = case.run
    if run is None or not run.evaluations:
        return None
    spent = sum(number(line, "evaluation_seconds") or 0.0 for line in run.evaluations)
    last = run.result or run.evaluations[-1]
    whole = max(number(last, "seconds") or 0.0, spent)
    text = f"{spent:.1f} of {whole:.1f} s in {len(run.evaluations)} evaluations"
    return warn(text) if spent > 0.5 * whole else ok(text)


@check(
    "cache",
    asks="whether the cache of hot rows finds rows",
    remedy="raise embedding.cache.rows or embedding.cache.staleness, or remove the cache: it is useless if ids are not "
    "skewed",
)
def cache(case: Case) -> Finding | None:
    """The share of looked-up rows that the worker had."""
    lines = case.run.train if case.run is not None else ()
    shares = [value for line in lines if (value := number(line, "cached_share")) is not None]
    if not shares:
        return None
    share = statistics.median(shares)
    return (warn if share < 0.1 else ok)(f"{share:.0%} of the rows came from the cache")


@check(
    "compression",
    asks="how many bytes the codecs saved, and whether the residuals had room",
    remedy="raise compression.residual_rows: rows without room are sent whole; if a codec sends more bytes than "
    "float32, lower its ratio or remove it",
)
def compression(case: Case) -> Finding | None:
    """The result's bytes of a step, by direction and part."""
    found = (case.run.result or {}).get("bytes") if case.run is not None else None
    parts = [part for part in found if isinstance(part, Mapping)] if isinstance(found, list) else []
    wire = {way: sent for way in ("push", "pull") if (sent := _sum(parts, "wire", direction=way)) > 0}
    times = {way: _sum(parts, "raw", direction=way) / sent for way, sent in wire.items()}
    share = _sum(parts, "wire", direction="push", part="residual") / wire.get("push", math.inf)
    if share <= _MUCH_RESIDUAL and all(1 / _SAVES < one < _SAVES for one in times.values()):
        return None
    words = [
        f"{way} {one:.2f} times fewer bytes" if one >= 1 else f"{way} {1 / max(one, 1e-9):.2f} times more bytes"
        for way, one in times.items()
    ]
    if share > _MUCH_RESIDUAL:
        words.append(f"{share:.0%} of those pushed are rows that were held back and sent whole")
    is_worse = share > _MUCH_RESIDUAL or min(times.values()) <= 1 / _SAVES
    return (warn if is_worse else ok)(", ".join(words))


CHECKS = (ended, step, even_steps, waiting, speed_over_time, evaluation, cache, compression)


def _sum(parts: Sequence[Mapping[str, object]], field: str, **wanted: str) -> float:
    """Sum a field over the parts whose other fields are as wanted."""
    chosen = [part for part in parts if all(part.get(name) == value for name, value in wanted.items())]
    return sum(number(part, field) or 0.0 for part in chosen)


def _reasons(case: Case, run: RunRecord) -> list[tuple[str, str]]:
    """(what speaks for it, what to try) for every reason to wait that shows."""
    reasons = []
    bound = number(run.config, "job", "train", "staleness")
    ahead = number(run.config, "job", "train", "prefetch") or bound  # which prefetch follows where nothing else is said
    workers = number(run.config, "workers") or 1
    slow = [probe for probe in case.probes if (probe.call_seconds or 0) > _SLOW_CALL_SECONDS]
    busy = [probe for probe in case.probes if is_busy(probe)]
    if slow:
        call = max(probe.call_seconds or 0 for probe in slow) * 1e3
        reasons.append((f"the network: a small call takes {call:.1f} ms", "put workers nearer to the shards"))
    if busy:
        reasons.append((f"the shards are busy: {some([probe.name for probe in busy])}", "start more shards"))
    if bound == 0 and workers > 1:
        reasons.append(
            (
                "synchronous workers wait for the slowest of them in every step",
                "a bound (train.staleness: 2) evens out their steps, and lets rows be pulled ahead; see `waited for` "
                "for one that always lags",
            )
        )
    elif not ahead:
        reasons.append(
            (
                "no step is computed while pushes are on their way (train.prefetch is 0 or off)",
                "train.prefetch: 1 overlaps them, at a staleness of one step",
            )
        )
    return reasons


def _shares(run: RunRecord, threads: str) -> dict[str, float]:
    """Part -> its share of the steps; of the training thread ("parts"), or of the others ("overlapped")."""
    parts = (run.profile or {}).get(threads)
    names = list(map(str, parts)) if isinstance(parts, Mapping) else []
    return {name: share for name in names if (share := number(run.profile, threads, name, "share")) is not None}


def _largest(shares: Mapping[str, float], but: str) -> Sequence[tuple[str, float]]:
    return sorted(((k, v) for k, v in shares.items() if k != but), key=lambda pair: -pair[1])[:3]


def _count(run: RunRecord, name: str) -> str:
    return f"{number(run.result, name) or 0:,.0f}"


def _last_step(run: RunRecord) -> str:
    last = number(run.train[-1], "step") if run.train else None
    return "0" if last is None else f"{last:,.0f}"
