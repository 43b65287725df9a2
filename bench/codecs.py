"""What the codecs cost and what they save, each against what it has to beat: memory copy, torch.topk, the index table.

values    every values codec at dims 16, 32 and 64, on 10 million floats that lie in no cache: encode with a key (a
          push), without one (a pull) and decode, in GB of float32 per second of CPU on one core, beside numpy's copy of
          the same floats and, as a multiple, exact torch.topk of their magnitudes at ratio 0.01
top-k     the selection by a sampled threshold at ratio 0.01 over 40 steps of gradients that change and shrink, against
          exact torch.topk of magnitudes that are given to it; its kept count in every step; the payload of it
others    randomk, powersgd (of CPU on all cores) and the packing of ids, in GB of float32 or int64 per second
indices   sparse payloads of random positions, against 4 bytes per element, beside the same positions as int64 and
          int32; 0.5 is where most indices cost more than what they save
messages  the bytes of the frames of real messages (Pull, Rows, Push) of a session, against those of codec none, with
          plain ids, and, stricter, with its ids packed too; 20,000 ids of 10 million, and hashed 64-bit ones
dgc       payloads of dgc at 0.001 for a million dense weights: warm, and over 10,000 steps with the default warm-up
          (100 steps at each of 4 densities)

Every time is the median of interleaved repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

import embershard as es
from embershard.proto import protobuf
from embershard.proto.codec.ids import decode_ids, encode_ids
from embershard.proto.codec.name import BUILTIN_VALUES
from embershard.proto.codec.payload import decode, encode_elements
from embershard.proto.codec.select import Threshold, count_of, random_positions
from embershard.proto.codec.values.registry import find_values
from embershard.proto.messages import Message, Pull, Push, Reply, Request, Rows, arrays
from embershard.proto.routing import Placement
from embershard.proto.transport.local import LocalTransport
from embershard.proto.wire import frame_bytes
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client.client import Client
from embershard.worker.compression.low_rank import DenseLayout, LowRank, ParameterSlice
from embershard.worker.compression.settings import Compression, warmup_density
from timing import finish, machine, median, print_table, thread_seconds

ELEMENTS = 10_000_000
RATIO = 0.01
COPY_BAR = 0.2  # of the speed of a memory copy, for every values codec both ways
STEPS = 40  # of top-k: more than share a threshold
TOPK_BAR = 5.0
KEPT = (0.8, 1.25)
# density, values -> the ratio that the positions' entropy allows, less 1 %
INDEX_BARS = {(0.01, "none"): 79.0, (0.01, "fp16s"): 131.0, (0.001, "none"): 729.0}
MESSAGE_BARS = {("fp16s", 32): 1.9, ("fp16s", 64): 1.9, ("bf16", 32): 1.9, ("bf16", 64): 1.9}
MESSAGE_BARS |= {("int8", 16): 3.0, ("int8", 64): 3.6}
IDS = 20_000
RANK, MATRIX = 4, (4096, 2048)
DGC_RATIO, DGC_WEIGHTS, DGC_STEPS, WARMUP_STEPS = 0.001, 2**20, 10_000, 100
DGC_BARS = {"warm": 600.0, "whole run": 150.0}

Result = dict[str, float]
T = TypeVar("T")


def gradients(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(1e-3)


def value_speeds(repeats: int, failures: list[str]) -> Result:
    """GB/s of every codec, dim and way."""
    speeds: Result = {}
    lines = []
    for dim in (16, 32, 64):
        rows, seconds = gradients(ELEMENTS // dim, dim), dict[str, list[float]]()
        out, magnitudes = np.empty_like(rows), torch.from_numpy(np.abs(rows)).view(-1)
        work: dict[str, Callable[[], object]] = {"copy": lambda rows=rows, out=out: np.copyto(out, rows)}
        for name in BUILTIN_VALUES:
            codec = find_values(name)
            payload = np.empty(codec.nbytes(*rows.shape), np.uint8)
            given = (codec, rows, payload, out)
            work[f"{name} push"] = lambda g=given: g[0].encode(g[1], g[2], 1)
            work[f"{name} pull"] = lambda g=given: g[0].encode(g[1], g[2], None)
            work[f"{name} decode"] = lambda g=given: g[0].decode(g[2], g[3])
        for _ in range(repeats + 1):
            for what, run in work.items():
                seconds.setdefault(what, []).append(thread_seconds(run))
        topk = median([thread_seconds(lambda m=magnitudes: torch.topk(m, int(RATIO * len(m)))) for _ in range(3)])
        took = {what: median(times[1:]) for what, times in seconds.items()}
        for name in BUILTIN_VALUES:
            ways = [rows.nbytes / took[f"{name} {way}"] / 1e9 for way in ("push", "pull", "decode")]
            lines.append((f"{name}, dim {dim}", *ways, rows.nbytes / took["copy"] / 1e9, topk / took[f"{name} push"]))
            for way, speed in zip(("push", "pull", "decode"), ways, strict=True):
                speeds[f"{name} {way} {dim}"] = round(speed, 2)
                if speed < COPY_BAR * lines[-1][4]:
                    failures.append(f"{name} {way} at dim {dim}: {speed:.2f} GB/s, under {COPY_BAR:g} of a copy")
    print_table(["GB/s of floats", "push", "pull", "decode", "copy", "x torch.topk"], lines)
    return speeds


def selection(repeats: int, failures: list[str]) -> Result:
    """The sampled threshold against exact torch.topk, and the payload of what it selects."""
    count, threshold, codec = count_of(RATIO, ELEMENTS), Threshold(), find_values("fp16s")
    shape = (ELEMENTS // 64, 64)
    flat, rng = gradients(ELEMENTS), np.random.default_rng(1)
    seconds: dict[str, list[float]] = {"exact": [], "ours": [], "encode": [], "decode": []}
    kept = []

    def timed(what: str, work: Callable[[], T]) -> T:
        start = time.thread_time()
        result = work()
        seconds[what].append(time.thread_time() - start)
        return result

    for step in range(STEPS):
        np.add(flat, np.resize(rng.standard_normal(100_000, np.float32) * np.float32(1e-3), ELEMENTS), out=flat)
        np.multiply(flat, np.float32(0.7), out=flat)
        positions = timed("ours", lambda: threshold.select(flat, count))
        kept.append(len(positions) / count)
        if step % max(1, STEPS // repeats) == 0:
            payload = timed("encode", lambda at=positions: encode_elements(at, flat[at], shape, codec, None))
            timed("decode", lambda payload=payload: decode(payload, *shape))
            magnitudes = torch.from_numpy(np.abs(flat))
            timed("exact", lambda magnitudes=magnitudes: torch.topk(magnitudes, count))
    took = {what: median(times) for what, times in seconds.items()} | {"slowest": max(seconds["ours"])}
    names = {
        "exact": "torch.topk",
        "ours": f"sampled threshold, median of {STEPS}",
        "slowest": "sampled threshold, slowest",
        "encode": "its payload, fp16s",
        "decode": "the payload read",
    }
    lines = [(name, 1e3 * took[what], 4 * ELEMENTS / took[what] / 1e9) for what, name in names.items()]
    print_table([f"{ELEMENTS:,} elements, ratio {RATIO}", "ms", "GB/s"], lines)
    faster, slowest = took["exact"] / took["ours"], took["exact"] / took["slowest"]
    print(f"{faster:.1f}x torch.topk ({slowest:.1f}x where slowest); kept {min(kept):.3f} to {max(kept):.3f} of k")
    if faster < TOPK_BAR:
        failures.append(f"top-k by threshold: {faster:.1f}x torch.topk, not {TOPK_BAR:g}x")
    if not (KEPT[0] <= min(kept) and max(kept) <= KEPT[1]):
        failures.append(f"top-k by threshold: kept {min(kept):.3f} to {max(kept):.3f} of k, not {KEPT}")
    speeds = {f"{what} GB/s": round(4 * ELEMENTS / took[what] / 1e9, 2) for what in seconds}
    return {"x torch.topk": round(faster, 1), "least kept": min(kept), "most kept": max(kept), **speeds}


def other_speeds(repeats: int) -> Result:
    """GB/s of CPU, there and back, of what is neither a values codec nor topk."""
    plain, blocks, rng = find_values("none"), gradients(MATRIX[0], MATRIX[1]), np.random.default_rng(4)
    flat, shape, ids = blocks.reshape(-1), blocks.shape, np.arange(len(blocks))
    factors = LowRank(DenseLayout(ids, [ParameterSlice(0, MATRIX)]), MATRIX[1], RANK, 0)

    def randomk() -> np.ndarray:
        at = random_positions(flat.size, count_of(RATIO, flat.size), 1)
        return encode_elements(at, flat[at], shape, plain, None, drawn=1)

    def powersgd() -> np.ndarray:
        factors.begin(ids, blocks)
        return factors.payload(ids, plain, None)

    def rows_of(payload: np.ndarray) -> object:
        return decode(payload, *shape)

    work: dict[str, tuple[int, Callable[[], np.ndarray], Callable[[np.ndarray], object]]] = {
        f"randomk:{RATIO}": (flat.nbytes, randomk, rows_of),
        f"powersgd:{RANK}, {MATRIX[0]} x {MATRIX[1]}": (flat.nbytes, powersgd, rows_of),
    }
    for kind, low, high in (("of 10 million", 0, 10_000_000), ("hashed", -(2**63), 2**63 - 1)):
        some = np.unique(rng.integers(low, high, 1_000_000))
        work[f"ids {kind}"] = (
            some.nbytes, lambda some=some: encode_ids(some), lambda packed, some=some: decode_ids(packed, some.size)
        )  # fmt: skip
    speeds: Result = {}
    lines = []
    for name, (nbytes, encode, read) in work.items():
        payload, seconds = encode(), dict[str, list[float]]()
        for _ in range(repeats):
            for way, run in (("push", encode), ("decode", lambda payload=payload, read=read: read(payload))):
                start = time.process_time()
                run()
                seconds.setdefault(way, []).append(time.process_time() - start)
        ways = {f"{name} {way}": round(nbytes / median(times) / 1e9, 2) for way, times in seconds.items()}
        lines.append((name, *ways.values()))
        speeds |= ways
    print_table(["GB/s", "push", "decode"], lines)
    return speeds


def index_cost(failures: list[str]) -> Result:
    """How often a sparse payload fits into the dense one."""
    result: Result = {}
    lines = []
    for density in (0.5, 0.01, 0.001):
        positions = np.flatnonzero(np.random.default_rng(2).random(ELEMENTS) < density)
        values = gradients(len(positions))
        ours = {
            name: 4 * ELEMENTS / encode_elements(positions, values, (ELEMENTS // 64, 64), find_values(name), None).size
            for name in ("none", "fp16s")
        }
        plain = [4 * ELEMENTS / ((4 + size) * len(positions)) for size in (8, 4)]
        lines.append((f"p = {density:g}", *plain, ours["none"], ours["fp16s"], 1 / density))
        for name, ratio in ours.items():
            result[f"{density:g} {name}"] = round(ratio, 2)
            if ratio < INDEX_BARS.get((density, name), 0):
                failures.append(f"p = {density:g}, {name}: {ratio:.1f}x, not {INDEX_BARS[density, name]:g}x")
    print_table(["x smaller than float32", "int64", "int32", "ours", "ours, fp16s", "values alone"], lines)
    half, whole = result["0.5 none"], 4 * 64 / find_values("fp16s").nbytes(1, 64)
    print(f"p = 0.5: int64 positions are a loss, int32 gain nothing, ours take {1 - half / 2:.0%} from the ratio;")
    verdict = "a loss" if half < whole else "a gain"
    print(f"and against fp16s of all elements ({whole:.2f}x) the largest half of them ({half:.2f}x) is {verdict}")
    return {**result, "0.5 against fp16s": round(half / whole, 3)}


class CountedShard:
    """A shard in this process that keeps the bytes of the frames that its messages would be."""

    def __init__(self) -> None:
        self.frames: dict[type[Message], int] = {}
        self.packed_ids = 0  # what the ids would take packed
        self.ids = 0  # what they took
        self._shard = Shard(0, Placement.even(1), OptimizerRegistry())

    def handle(self, request: Request) -> Reply:
        reply = self._shard.handle(request)
        for message in (request, reply):
            size = frame_bytes(len(protobuf.head_bytes(message)), [array.nbytes for array in arrays(message)])
            self.frames[type(message)] = self.frames.get(type(message), 0) + size
        if isinstance(request, Pull):
            for part in request.tables:
                self.ids += (part.ids if part.packed is None else part.packed).nbytes
                self.packed_ids += min(part.ids.nbytes, encode_ids(np.sort(part.ids)).nbytes)
        return reply


def step_bytes(codec: str, dim: int, ids: torch.Tensor) -> tuple[int, int]:
    """Bytes of a step that reads these rows and pushes a gradient for each; and with the ids packed."""
    counted = CountedShard()
    client = Client([LocalTransport(counted.handle, "local/0")])
    with es.Session(client, compression=Compression(push=codec, pull=codec)) as session:
        spec = es.TableSpec(name="items", dim=dim, optimizer=es.SGD(lr=0.1), initializer=es.Normal(std=0.01))
        table = es.Embedding(session.table(spec))
        (table(ids) * torch.randn(len(ids), dim)).sum().backward()
        session.step()
    total = sum(counted.frames[kind] for kind in (Pull, Rows, Push))
    return total, total - counted.ids + counted.packed_ids


def message_ratios(failures: list[str]) -> Result:
    """Bytes of real messages against those of codec none."""
    rng = np.random.default_rng(3)
    populations = {
        "of 10 million": np.unique(rng.integers(0, 10_000_000, IDS)),
        "hashed": rng.integers(-(2**63), 2**63 - 1, IDS),
    }
    result: Result = {}
    lines = []
    for kind, drawn in populations.items():
        ids = torch.from_numpy(rng.permutation(drawn))
        for dim in (16, 32, 64):
            plain, plain_packed = step_bytes("none", dim, ids)
            for codec in ("fp16s", "bf16", "int8"):
                sent, _ = step_bytes(codec, dim, ids)
                ratios = (plain / sent, plain_packed / sent)
                lines.append((f"{codec}, dim {dim}, ids {kind}", *ratios, sent / len(ids)))
                result[f"{codec} {dim} {kind}"] = round(min(ratios), 3)
                bar = MESSAGE_BARS.get((codec, dim), 0)
                if min(ratios) < bar:
                    failures.append(f"{codec} at dim {dim}, ids {kind}: {min(ratios):.2f}x, not {bar:g}x")
    print_table(["x fewer bytes, both ways", "none", "none, ids packed", "bytes per id"], lines)
    return result


def dgc_ratios(failures: list[str]) -> Result:
    """Bytes of dense gradients against those of dgc."""
    flat, sizes = gradients(DGC_WEIGHTS), dict[float, int]()

    def payload_bytes(density: float) -> int:
        if density not in sizes:
            positions = Threshold().select(flat, count_of(density, flat.size))
            values = flat[positions]
            sizes[density] = encode_elements(positions, values, (DGC_WEIGHTS // 64, 64), find_values("none"), None).size
        return sizes[density]

    sent = sum(payload_bytes(warmup_density(DGC_RATIO, step, WARMUP_STEPS)) for step in range(DGC_STEPS))
    result = {"warm": flat.nbytes / payload_bytes(DGC_RATIO), "whole run": DGC_STEPS * flat.nbytes / sent}
    print_table([f"dgc:{DGC_RATIO}, x fewer bytes", ""], list(result.items()))
    for what, bar in DGC_BARS.items():
        if result[what] < bar:
            failures.append(f"dgc {what}: {result[what]:.0f}x, not {bar:g}x")
    return {what: round(ratio, 1) for what, ratio in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(), flush=True)
    start, failures = time.perf_counter(), list[str]()
    result = {
        "values_gb_per_s": value_speeds(args.repeats, failures),
        "topk": selection(args.repeats, failures),
        "others": other_speeds(args.repeats),
        "indices": index_cost(failures),
        "messages": message_ratios(failures),
        "dgc": dgc_ratios(failures),
    }
    print(f"{time.perf_counter() - start:.0f} s")
    finish({"bench": "codecs", **result}, failures)


if __name__ == "__main__":
    main()
