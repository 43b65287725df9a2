"""DLRM of one dim and batch size, trained in every way of programs.py: samples/s, and where the time goes.

Adagrad everywhere; all see the same batches, again and again, so that no row is new once it is measured. Threads are
set: torch's in the trainer and in rpc's servers have a quarter of the cores each; shards use none of torch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from itertools import cycle, islice

import torch
from busy import busy_seconds
from clock import Clock, p50_p99
from part import Figures, report
from programs import Program, programs
from torch.nn.functional import binary_cross_entropy_with_logits

from embershard.benchmark import dlrm
from embershard.benchmark.dlrm import Batch, make_batches
from embershard.benchmark.settings import Train
from embershard.proto.timing import PartTimes, Recorder, TimeSplit, end_step, span
from embershard.worker.device import keep_freed_memory, pinned, to_device

POOL = 8  # batches
PROFILED = 5  # steps
MOST_STEPS = 1000


def train(program: Program, batches: Iterable[Batch], device: torch.device, clock: Clock | None = None) -> int:
    """Steps that were made; the last loss has been looked at."""
    steps, loss = 0, torch.zeros(())
    for ids, dense, labels in program.loop(batches):
        if clock is not None:
            clock.mark("before")
        with span("forward"):
            logits = program.model(ids, to_device(dense, device))
            loss = binary_cross_entropy_with_logits(logits, to_device(labels, device))
        if clock is not None:
            clock.mark("forward")
        with span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        if clock is not None:
            clock.mark("backward")
        program.step()
        if clock is not None:
            clock.mark("update")
        end_step()
        steps += 1
    program.finish()
    if not loss.isfinite():  # which waits for a GPU
        raise FloatingPointError(f"the loss is {loss.item()}")
    return steps


def for_a_while(pool: list[Batch], seconds: float) -> Iterator[Batch]:
    """The batches of a pool again and again: all of them once, and until time is up."""
    end = time.monotonic() + seconds
    for number, batch in enumerate(islice(cycle(pool), MOST_STEPS)):
        if number >= len(pool) and time.monotonic() > end:
            return
        yield batch


def measure(program: Program, pool: list[Batch], device: torch.device, seconds: float) -> Figures:
    """Figures of one program, warm."""
    train(program, pool, device)
    for calls in program.seconds.values():
        calls.clear()
    batch, clock = len(pool[0][0]), Clock(device)
    with Recorder() as recorder:
        start = time.perf_counter()
        steps = train(program, for_a_while(pool, seconds), device, clock)
        wall = time.perf_counter() - start
    split, parts = recorder.split(), clock.parts()
    calls = {name: p50_p99([second * 1e3 for second in its]) for name, its in program.seconds.items() if its}
    found: Figures = {
        "samples_per_s": round(steps * batch / wall),
        "steps": steps,
        "step_ms": parts.pop("step"),
        "device_ms": parts,
        "host_ms": {name: _times(part) for name, part in split.parts.items()},
        "beside_ms": {name: _times(part) for name, part in split.overlapped.items()} | calls,
        "overlap": overlap(split, sum(map(sum, program.seconds.values())) * 1e3 / steps),
    }
    try:
        busy = busy_seconds(lambda: train(program, pool[:PROFILED], device), device)
        found["gpu_busy"] = round(busy / PROFILED / (wall / steps), 4)
    except RuntimeError as error:  # the other figures do not need it
        found["gpu_busy_error"] = str(error)
    return found


def overlap(split: TimeSplit, calls_ms: float) -> float | None:
    """The share of the time of pulls and pushes, in other threads and `calls_ms`, in which nobody waited for them."""
    beside = sum(part.mean_ms for part in split.overlapped.values()) + calls_ms
    if not beside:
        return None
    waited = split.parts["wait"].mean_ms if "wait" in split.parts else 0.0
    return round(max(0.0, 1.0 - waited / beside), 4)


def _times(part: PartTimes) -> tuple[float, float]:
    return round(part.p50_ms, 3), round(part.p99_ms, 3)


def main() -> None:
    """Measure every program; one that fails leaves the others their turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--rows", type=int, default=2_600_000)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each program")
    options = parser.parse_args()
    keep_freed_memory()
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    torch.set_num_threads(threads)
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    settings = Train(rows=options.rows, dim=options.dim, batch=options.batch)
    dlrm.POOL = POOL  # a large batch takes a while to be drawn
    pool = [tuple(pinned(part, device) for part in batch) for batch in islice(make_batches(settings, 0), POOL)]
    unique = sum(len(ids.unique()) for ids, _, _ in pool) / POOL
    cell = {"dim": options.dim, "batch": options.batch, "rows_per_step": round(unique), "threads": threads}
    failures = []
    for name, make in programs(settings, device, threads).items():
        try:
            with make() as program:
                found = measure(program, pool, device, options.seconds)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
            report(**cell, program=name, error=failures[-1])
            continue
        report(**cell, program=name, **found)
        print(f"{name}: {found['samples_per_s']:,} samples/s")
    assert not failures, "; ".join(failures)


if __name__ == "__main__":
    main()
