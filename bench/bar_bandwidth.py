"""Training over a link of 100 Mbit/s with and without codecs, and what the codecs cost where the link is no limit.

A DLRM with the paper's towers and two ids in each of its 26 features, dim 64, batches of 256: a step moves about 11
MB, two thirds of them rows. Every weight is on 2 shards of this machine, Adagrad, in a plain loop: pull, forward and
backward, push, one after the other. (Where pulls run ahead, the busier direction of the link decides, and topk gains
what its pull does.)

Arms, for rows and dense weights, pushes and pulls alike, unless it says otherwise:
    none       float32
    fp16s      fp16s
    int8       int8
    topk       pushes topk:0.01; pulls rows as int8, since a pull cannot leave anything for later, and dense weights
               as `delta`, what changed, exactly
    normal4    rows both ways by bench/normal_codec.py, a user-defined codec that is slow
    auto       measures, and chooses from fp16s, int8 and delta; only on the link without limit
    fp16s?     as fp16s with `unless_slower`: tried in the first steps, and left on unless these take longer; and so
               int8? and topk?; on the links of 100 Mbit/s and without limit

Links are the token bucket of proto/transport/emulated_link.py. The arms take turns in one process, lap by lap; each
figure is the median over rounds of this arm's time against that of `none` in the same round.

Bars: at 100 Mbit/s at least 1.7 (fp16s), 2.8 (int8) and 6 times (topk) the speed of none, tried or not. Without limit
at least 0.97 times what is there for that, `auto` and each codec with `unless_slower`; the figures of the others, which
a user fixes whatever they cost, say which would hold it by themselves. Bytes that were predicted from the rows within
1 % of those on the sockets. The break-even bandwidth by the formula (bytes saved over the time of encoding and
decoding, the worker's and the slowest shard's) within 20 % of the one where the times of arm and none, measured on
links of several bandwidths, meet; one beyond the fastest of these is only held to be so.

--netns: once more over a real link of 100 Mbit/s (network namespaces and tbf; root, ip and tc): both must agree within
8 % (headers of Ethernet, IP and TCP take 4 % of the real one). Prints one JSON line; exits 1 below a bar.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import embershard as es
from embershard.compare.analysis.conclusions import CODING
from embershard.compare.run.netns import Namespaces
from embershard.deploy.supervisor import LocalShards, ShardSettings
from embershard.proto.timing import Recorder
from embershard.proto.transport.emulated_link import parse_bandwidth
from embershard.worker.client.byte_counts import ByteCount
from embershard.worker.client.connections import ClientStats
from embershard.worker.device import keep_freed_memory
from embershard.worker.models.ctr.dlrm import DLRM
from embershard.worker.strategy.predicted_bytes import break_even as by_formula
from embershard.worker.strategy.predicted_bytes import predict_volumes
from embershard.worker.training.autotune import CodecTuner, Trial
from timing import finish, machine, median, print_table

SPEED_UPS = {"fp16s": 1.7, "int8": 2.8, "topk": 6.0}
MIN_UNLIMITED, MAX_PREDICTION, MAX_BREAK_EVEN, MAX_NETNS = 0.97, 0.01, 0.20, 0.08
SLOW, UNLIMITED = "100mbit", "unlimited"
FASTER = ("300mbit", "1gbit", "2gbit")  # where times are measured for the break-even, beside SLOW
SHARDS, FIELDS, HOT, DIM, NUM_DENSE, ROWS, BATCH = 2, 26, 2, 64, 13, 2_000_000, 256
CODECS = {
    "none": {},
    "fp16s": {"push": "fp16s", "pull": "fp16s", "dense": {"push": "fp16s", "pull": "fp16s"}},
    "int8": {"push": "int8", "pull": "int8", "dense": {"push": "int8", "pull": "int8"}},
    "topk": {"push": "topk:0.01", "pull": "int8", "dense": {"push": "topk:0.01", "pull": "delta"}},
    "normal4": {"push": "normal_codec:normal4", "pull": "normal_codec:normal4"},
    "auto": {},
}
TRIED = tuple(f"{name}?" for name in SPEED_UPS)
MEASURING = ("auto", *TRIED)
POOL = 8  # batches, over and over


@dataclass
class Figures:
    """One arm on one link."""

    laps: list[float]  # seconds of a step
    bytes: float  # of a step, on the sockets
    predicted: float | None  # None where codecs changed on the way
    coding: float  # seconds of a step, this process's and, while it waited, the shards'
    codecs: dict[str, str]

    @property
    def seconds(self) -> float:
        return median(self.laps)


# --- the worker's process ---


class MultiHot(nn.Module):
    """A DLRM whose features have several ids each, of which the rows are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.dlrm = DLRM(1, FIELDS, DIM, NUM_DENSE)
        self.dlrm.embedding = nn.Identity()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", device="meta")

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Logits (B,) of ids (B * FIELDS, HOT) and dense (B, NUM_DENSE)."""
        return self.dlrm(self.bag(ids).view(-1, FIELDS, DIM), dense)


class Arm:
    """A model of its own, trained by one arm's codecs."""

    def __init__(self, name: str, addresses: str, bandwidth: str, number: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.name = name
        self.session = es.connect(
            addresses,
            worker=number,
            bandwidth=bandwidth,
            imports=["normal_codec"],
            compression=es.Compression(**CODECS[name.rstrip("?")]),
        )
        self.model = es.wrap(MultiHot(), self.session, optimizer=es.Adagrad(lr=0.01), prefix=f"{bandwidth}-{number}/")
        rng = np.random.default_rng(1)
        per_field = ROWS // FIELDS
        offsets = np.repeat(np.arange(FIELDS), BATCH).reshape(FIELDS, BATCH).T.reshape(-1, 1) * per_field
        self.pool = cycle(
            (
                torch.from_numpy(rng.integers(0, per_field, (BATCH * FIELDS, HOT)) + offsets),
                torch.from_numpy(rng.standard_normal((BATCH, NUM_DENSE), np.float32)),
                torch.from_numpy(rng.integers(0, 2, BATCH).astype(np.float32)),
            )
            for _ in range(POOL)
        )
        self.measured: CodecTuner | Trial | None = None
        if name == "auto":
            self.measured = CodecTuner(self.session, (), frozenset())
        elif name in TRIED:
            self.measured = Trial(self.session, self.session.client.compressor.directions())
        self.steps = 0
        self.laps: list[float] = []
        self.coding: list[float] = []

    @property
    def is_measuring(self) -> bool:
        """Whether it has yet to choose how it travels."""
        if isinstance(self.measured, Trial):
            return self.measured.left_on is None
        return self.measured is not None and not self.measured.done

    def run(self, steps: int) -> float:
        """Seconds of a step."""
        start = perf_counter()
        for _ in range(steps):
            if self.measured is not None:
                self.measured.follow(self.steps)
            ids, dense, labels = next(self.pool)
            binary_cross_entropy_with_logits(self.model(ids, dense), labels).backward()
            self.session.step()
            self.steps += 1
        return (perf_counter() - start) / steps

    def lap(self, steps: int) -> None:
        """Measure some steps, behind one that takes the caches back from the other arms."""
        self.run(1)
        with Recorder() as recorder:
            self.laps.append(self.run(steps))
            recorder.end()
        parts = recorder.split().parts
        self.coding.append(sum(parts[name].mean_ms for name in CODING if name in parts) / 1e3 / steps)

    def figures(self, before: ClientStats, steps: int) -> Figures:
        """Of all laps; so many steps have been made since `before`."""
        stats, client = self.session.stats, self.session.client
        moved = {part: moved.minus(before.volume.get(part, ByteCount())) for part, moved in stats.volume.items()}
        num_bytes = stats.sent_bytes + stats.received_bytes - before.sent_bytes - before.received_bytes
        codecs = {
            f"{'dense' if client.compressor.is_dense(table) else 'rows'} {direction}": str(getattr(both, direction))
            for table, both in client.compressor.directions().items()
            for direction in ("push", "pull")
        }
        predicted = None if self.measured is not None else sum(predict_volumes(moved, client).values()) / steps
        return Figures(self.laps, num_bytes / steps, predicted, median(self.coding), codecs)


def work(addresses: str, bandwidth: str, names: Sequence[str], rounds: int, steps: int) -> dict[str, Figures]:
    """Laps of all arms by turns."""
    keep_freed_memory()  # as `embershard worker` does
    arms = [Arm(name, addresses, bandwidth, number) for number, name in enumerate(names)]
    for arm in arms:
        while arm.is_measuring:
            arm.run(1)
        arm.run(POOL)  # rows exist then, and residuals have their room
    before = {arm.name: (arm.session.stats, arm.steps) for arm in arms}
    order = np.random.default_rng(0)  # an arm behind the same one in every round would have what that leaves in caches
    for _ in range(rounds):
        for number in order.permutation(len(arms)):
            arms[number].lap(steps)
    found = {arm.name: arm.figures(stats, arm.steps - begun) for arm in arms for stats, begun in [before[arm.name]]}
    for arm in arms:
        arm.session.close()
    return found


# --- the bench ---


def measured(command: Sequence[str]) -> dict[str, Figures]:
    """What a worker's process found."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"a worker ended with exit code {done.returncode}; it says why above")
    return {name: Figures(**figures) for name, figures in json.loads(done.stdout.splitlines()[-1]).items()}


def words(addresses: Sequence[str], bandwidth: str, arms: Sequence[str], rounds: int, steps: int) -> list[str]:
    return [
        __file__, "--worker", bandwidth, "--addresses", ",".join(addresses), "--arms", ",".join(arms),
        "--rounds", str(rounds), "--steps", str(steps),
    ]  # fmt: skip


def over_bucket(bandwidth: str, arms: Sequence[str], rounds: int, steps: int) -> dict[str, Figures]:
    with LocalShards(SHARDS, ShardSettings(imports=["normal_codec"])) as shards:
        return measured([sys.executable, *words(shards.addresses, bandwidth, arms, rounds, steps)])


def over_namespaces(arms: Sequence[str], rounds: int, steps: int) -> dict[str, Figures]:
    """The same over a real link of 100 Mbit/s. NoNamespaces where there can be none."""
    with Namespaces() as link, link.shards(SHARDS, ["normal_codec"]) as addresses:
        link.shape(parse_bandwidth(SLOW))
        return measured([*link.worker_prefix, sys.executable, *words(addresses, UNLIMITED, arms, rounds, steps)])


def speed_up(found: dict[str, Figures], arm: str) -> float:
    """Median over rounds of the time of `none` over that of the arm."""
    return median([none / own for none, own in zip(found["none"].laps, found[arm].laps, strict=True)])


def break_even(arm: str, by_link: dict[str, dict[str, Figures]]) -> tuple[float | None, float | None]:
    """Bits per second at which an arm is as fast as none: by the formula, and where the measured times meet."""
    slow = by_link[SLOW]
    coding = median([found[arm].coding - found["none"].coding for found in by_link.values()])
    formula = by_formula(slow["none"].bytes, slow[arm].bytes, coding)
    # seconds of none beyond the arm's, over seconds per bit: a line, which is 0 at the break-even
    seconds_per_bit = np.array([1 / float(parse_bandwidth(bandwidth) or 0) for bandwidth in by_link])
    gained = np.array(
        [
            median([none - own for none, own in zip(found["none"].laps, found[arm].laps, strict=True)])
            for found in by_link.values()
        ]
    )
    slope, cost = np.polyfit(seconds_per_bit, gained, 1, w=1 / gained.clip(1e-3))
    return formula, float(slope / -cost) if cost < 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netns", action="store_true", help="measure over a real link, too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of a lap")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    parser.add_argument("--arms", default="none,fp16s,int8,topk,normal4", help=argparse.SUPPRESS)
    args = parser.parse_args()
    arms = args.arms.split(",")
    if args.worker:
        found = work(args.addresses, args.worker, arms, args.rounds, args.steps)
        print(json.dumps({name: asdict(figures) for name, figures in found.items()}), flush=True)
        return
    print(machine(), flush=True)
    by_link = {SLOW: over_bucket(SLOW, [*arms, *TRIED], args.rounds, args.steps)}
    # short steps, of which the break-even is a small difference: more of them
    by_link |= {bandwidth: over_bucket(bandwidth, arms, 3 * args.rounds, args.steps) for bandwidth in FASTER}
    unlimited = over_bucket(UNLIMITED, [*arms, *MEASURING], 4 * args.rounds + 1, 4 * args.steps)
    real = over_namespaces(arms, args.rounds, args.steps) if args.netns else {}
    report(by_link, unlimited, real)


def report(by_link: dict[str, dict[str, Figures]], unlimited: dict[str, Figures], real: dict[str, Figures]) -> None:
    """Print the tables and the JSON line."""
    failures: list[str] = []
    rows: list[list[object]] = []
    result: dict[str, dict[str, object]] = {}
    slow = by_link[SLOW]
    for arm, figures in unlimited.items():
        mine: dict[str, object] = {"speed_up_unlimited": round(speed_up(unlimited, arm), 3), "codecs": figures.codecs}
        if arm in slow:
            own = slow[arm]
            steady = arm != "none" and arm not in TRIED
            formula, crossing = break_even(arm, by_link) if steady else (None, None)
            off = own.predicted / own.bytes - 1 if own.predicted is not None else 0.0
            mine |= {
                "speed_up": round(speed_up(slow, arm), 3),
                "step_ms": {
                    name: round(1e3 * found[arm].seconds, 2) for name, found in by_link.items() if arm in found
                },
                "coding_ms": round(1e3 * own.coding, 3),
                "bytes_per_step": round(own.bytes),
                "predicted_off_by": round(off, 5),
                "break_even_mbit_formula": formula and round(formula / 1e6),
                "break_even_mbit_measured": crossing and round(crossing / 1e6),
            }
            failures += check(arm, mine)
        if arm in real:
            mine["speed_up_netns"] = round(speed_up(real, arm), 3)
            mine["netns_over_bucket"] = round(real[arm].seconds / slow[arm].seconds, 3)
            if abs(real[arm].seconds / slow[arm].seconds - 1) > MAX_NETNS:
                failures.append(f"{arm}: a step takes {mine['netns_over_bucket']} times as long over the real link")
        mine["step_ms_unlimited"] = round(1e3 * figures.seconds, 2)
        result[arm] = mine
        rows.append([arm, *(str(mine.get(key, "")) for key in COLUMNS)])
    for arm in MEASURING:
        if speed_up(unlimited, arm) < MIN_UNLIMITED:
            failures.append(f"{arm}: {speed_up(unlimited, arm):.3f} times none without limit, bar {MIN_UNLIMITED}")
    print_table(["arm", *COLUMNS], rows)
    alone = [arm for arm in SPEED_UPS if speed_up(unlimited, arm) >= MIN_UNLIMITED]
    print(f"at least {MIN_UNLIMITED} without limit by themselves: {', '.join(alone) or 'none of them'}; auto chose "
          f"{unlimited['auto'].codecs}")  # fmt: skip
    finish({"bar": "bandwidth", "arms": result}, failures)


COLUMNS = (
    "speed_up", "speed_up_netns", "speed_up_unlimited", "bytes_per_step", "predicted_off_by", "coding_ms",
    "step_ms_unlimited", "break_even_mbit_formula", "break_even_mbit_measured",
)  # fmt: skip


def check(arm: str, mine: dict[str, object]) -> list[str]:
    """What of an arm's figures is below a bar."""
    failures = []
    speed, off = float(str(mine["speed_up"])), float(str(mine["predicted_off_by"]))
    least = SPEED_UPS.get(arm.rstrip("?"), 0.0)
    if speed < least:
        failures.append(f"{arm}: {speed:.2f} times none at {SLOW}, bar {least}")
    if abs(off) > MAX_PREDICTION:
        failures.append(f"{arm}: predicted bytes are off by {off:.2%}, bar {MAX_PREDICTION:.0%}")
    formula, crossing = mine["break_even_mbit_formula"], mine["break_even_mbit_measured"]
    fastest = float(parse_bandwidth(FASTER[-1]) or 0) / 1e6
    both = [found if isinstance(found, int) else math.inf for found in (formula, crossing)]
    if arm != "none" and min(both) < fastest and not abs(both[0] / both[1] - 1) <= MAX_BREAK_EVEN:
        failures.append(f"{arm}: break-even at {crossing} Mbit/s, by the formula {formula}, bar {MAX_BREAK_EVEN:.0%}")
    return failures


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).parent))
    main()
