"""Made-up comparisons with the shape of real ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from embershard.compare.conclusions import conclude
from embershard.compare.results import UNLIMITED, Arm, Bandwidth, Bytes, Conditions, Point, Results, Run, StepPart

# label -> (meaning, shares of push rows, push dense, pull rows, pull dense, coding ms, what it does to the AUC)
ARMS = {
    "none": ("nothing is compressed: float32 in both directions", 1.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "fp16s": ("half precision, scaled by row, in both directions", 0.52, 0.501, 0.52, 0.501, 0.6, 0.00002),
    "int8": ("8-bit integers with a scale by block, in both directions", 0.31, 0.28, 0.31, 0.28, 0.9, -0.00005),
    "topk:0.01": ("the largest 1 % of the gradients, the rest later", 0.02, 0.012, 1, 0.05, 2.5, -0.0012),
    "dgc:0.001": ("the largest 0.1 % of dense gradients, momentum-corrected", 1.0, 0.002, 1.0, 0.02, 1.8, -0.0003),
}  # fmt: skip
BITS = {"100mbit": 1e8, "1gbit": 1e9, UNLIMITED: None}
ROWS, DENSE, IDS = 80_000.0, 1_444_000.0, 22_000.0  # bytes of a step
COMPUTE, BATCH, STEPS = 0.045, 8192, 950


def fake_results(
    arms: Sequence[str] = tuple(ARMS),
    seeds: int = 5,
    bandwidths: Sequence[str] = tuple(BITS),
    *,
    multiples: Sequence[float] = (1.0,),
    failed: Sequence[str] = (),
    measured: bool = True,
    noise: float = 1.0,
) -> Results:
    """A comparison on what could be Frappe.

    `failed` arms have no run of seed 2; without `measured` runs say neither bytes nor parts of a step.
    """
    rng = np.random.default_rng(7)
    shared = rng.normal(0, 0.0006 * noise, seeds)  # what a seed does to all arms
    tuned = {arm: multiples[min(i, len(multiples) - 1)] for i, arm in enumerate(arms)} if len(multiples) > 1 else {}
    runs = []
    for arm in arms:
        for seed in range(1, seeds + 1):
            ok = not (arm in failed and seed == 2)
            make = _Maker(arm, seed, ok, measured, noise, rng)
            level = 0.9838 + shared[seed - 1] + rng.normal(0, 0.00008 * noise)
            runs.append(make.quality(level, 1.0))
            if tuned.get(arm, 1.0) != 1.0:
                runs.append(make.quality(level + 0.0002, tuned[arm]))
            runs += [make.speed(bandwidth) for bandwidth in bandwidths if bandwidth != UNLIMITED]
    versions = {"embershard": "0.1.0", "torch": "2.13.0", "numpy": "2.2.6"}
    results = Results(
        name="deepfm on ctr_csv",
        job_file="examples/frappe-deepfm.yaml",
        job={"model": {"name": "deepfm", "hidden": [400, 400, 400]}, "train": {"batch_size": 4096, "epochs": 40}},
        command=("embershard", "compare", "examples/frappe-deepfm.yaml", "--arms", ",".join(arms)),
        metric="auc",
        split="test",
        deciding_split="valid",
        reachable={},
        workers=2,
        shards=2,
        link="token bucket",
        baseline=arms[0],
        arms=tuple(
            Arm(
                label=arm,
                meaning=ARMS[arm][0],
                settings=(f"compression={{push: {arm}}}",),
                is_codec=True,
                added=arm == "fp16s",
            )
            for arm in arms
        ),
        bandwidths=tuple(Bandwidth(label=label, bits_per_second=BITS[label]) for label in bandwidths),
        seeds=tuple(range(1, seeds + 1)),
        full=False,
        speed_steps=60,
        skipped_share=0.25,
        multiples=tuple(multiples),
        tuned=tuned,
        complete=True,
        seconds=sum(run.total_seconds for run in runs),
        runs=tuple(runs),
        quality=(),
        speeds=(),
        volumes=(),
        break_even=(),
        verdicts=(),
        notes=(
            "An arm of fp16s stands beside the others: what beats float32 alone proves little.",
            "On limited links runs of 60 steps were measured, their first quarter left out.",
        ),
        conditions=Conditions(
            machine="a made-up processor",
            cores=2,
            memory_gib=16,
            system="Linux 6.1",
            python="3.11.9",
            versions=versions,
        ),
    )
    return conclude(results)


class _Maker:
    """The runs of one arm and seed."""

    def __init__(self, arm: str, seed: int, ok: bool, measured: bool, noise: float, rng: np.random.Generator) -> None:
        self._arm, self._seed, self._ok, self._measured = arm, seed, ok, measured
        self._noise, self._rng = noise, rng

    def quality(self, level: float, multiple: float) -> Run:
        speed = self._samples_per_second(math.inf)
        level += ARMS[self._arm][6]
        curve = []
        for epoch in range(1, 20):
            auc = level - 0.25 * math.exp(-epoch / 1.7) - 0.0001 * max(0, epoch - 15)
            samples = epoch * 50 * BATCH
            figures = {"auc": auc, "logloss": 0.148 + 4 * (level - auc) + 0.004, "ne": 0.25, "calibration": 1.0}
            curve.append(Point(samples=samples, seconds=samples / speed, figures={"valid": figures, "test": figures}))
        return self._run("quality", UNLIMITED, multiple, STEPS, speed, tuple(curve))

    def speed(self, bandwidth: str) -> Run:
        bits = BITS[bandwidth]
        assert bits is not None
        return self._run("speed", bandwidth, 1.0, 60, self._samples_per_second(bits), ())

    def _samples_per_second(self, bits: float) -> float:
        seconds = COMPUTE + ARMS[self._arm][5] / 1e3 + 8 * sum(b.sent for b in self._bytes()) / bits
        return BATCH / seconds * math.exp(self._rng.normal(0, 0.01 * self._noise))

    def _bytes(self) -> tuple[Bytes, ...]:
        _, push_rows, push_dense, pull_rows, pull_dense, *_ = ARMS[self._arm]
        parts = {
            ("push", "ids"): (64.0, 64.0),
            ("push", "rows"): (ROWS * push_rows, ROWS),
            ("push", "dense"): (DENSE * push_dense, DENSE),
            ("pull", "ids"): (IDS, IDS),
            ("pull", "rows"): (ROWS * pull_rows, ROWS),
            ("pull", "dense"): (DENSE * pull_dense, DENSE),
            ("push", "other"): (400.0, 400.0),
            ("pull", "other"): (300.0, 300.0),
        }
        return tuple(
            Bytes(direction=direction, part=part, sent=sent, raw=raw, predicted=sent * 0.996)
            for (direction, part), (sent, raw) in parts.items()
        )

    def _step(self, speed: float) -> tuple[StepPart, ...]:
        whole, coding = BATCH / speed * 1e3, ARMS[self._arm][5]
        parts = {"route": 1.1, "forward": 12.0, "backward": 21.0, "encode": 0.4 + coding * 0.6, "decode": coding * 0.4}
        parts["push"] = 2.0
        parts["wait"] = max(0.0, whole - sum(parts.values()) - 1.0)
        parts["other"] = whole - sum(parts.values())
        found = [("step", whole, False), *((name, ms, False) for name, ms in parts.items()), ("send", 1.5, True)]
        return tuple(
            StepPart(name=name, p50_ms=ms, p99_ms=ms * 1.6, mean_ms=ms, overlapped=beside) for name, ms, beside in found
        )

    def _run(
        self, kind: str, bandwidth: str, multiple: float, steps: int, speed: float, curve: tuple[Point, ...]
    ) -> Run:
        ok, seconds = self._ok, steps * BATCH / speed
        best = curve[14] if curve and ok else None
        return Run(
            arm=self._arm,
            seed=self._seed,
            bandwidth=bandwidth,
            kind=kind,
            multiple=multiple,
            ok=ok,
            error="" if ok else "worker 0: the loss of step 12 is nan; lower the learning rate",
            attempts=1 if ok else 2,
            words=("--set", f"train.seed={self._seed}"),
            folder=f"runs/{kind}-{self._arm}-{self._seed}-{bandwidth}",
            began="2026-11-21 12:00:00 +0000",
            total_seconds=seconds + 8,
            steps=steps if ok else 0,
            samples=steps * BATCH if ok else 0,
            train_seconds=seconds if ok else 0.0,
            samples_per_second=speed if ok else None,
            wait_share=0.3 if ok else None,
            metrics=best.figures["test"] if best else {},
            decided=best.figures["valid"]["auc"] if best else None,
            best_samples=best.samples if best else 0,
            stopped_early=bool(best),
            curve=curve if ok else (),
            bytes=self._bytes() if ok and self._measured else (),
            step=self._step(speed) if ok and self._measured else (),
            versions={"embershard": "0.1.0", "torch": "2.13.0"},
            load_average=0.4,
        )


@pytest.fixture
def make_results() -> Callable[..., Results]:
    """Makes a comparison; see fake_results."""
    return fake_results
