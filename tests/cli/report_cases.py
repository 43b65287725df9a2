"""Comparisons that never ran, made up by seed: what a report is tried on."""

import zlib
from dataclasses import KW_ONLY, dataclass

import numpy as np

from embershard.compare import results as r
from embershard.compare.analysis.conclusions import conclude
from embershard.compare.run.arms import find_arms
from embershard.compare.run.plan import ComparisonPlan, Experiment
from embershard.worker.job.load import load_job

LINKS = {"100mbit": 1e8, "1gbit": 1e9, "unlimited": None}


@dataclass(frozen=True)
class Kind:
    """How an arm behaves."""

    label: str
    meaning: str = "what it means"
    _: KW_ONLY
    push: float = 1.0  # share of the bytes that are left
    pull: float = 1.0
    codec_ms: float = 0.0
    step_ms: float = 8.0  # without the link and the codec
    quality: float = 0.0  # AUC beside the baseline's
    noise: float = 0.00008
    is_codec: bool = True
    added: bool = False


NONE = Kind("none", "32-bit floats, nothing compressed")
FP16S = Kind("fp16s", "16-bit floats with an exponent per row", push=0.52, pull=0.52, codec_ms=0.2, added=True)
INT8 = Kind("int8", "8-bit integers with a scale per row", push=0.31, pull=0.31, codec_ms=0.4)
TOPK = Kind("topk:0.01", "the largest 1 % of a gradient, the rest later", push=0.03, codec_ms=0.9, quality=-0.004)
SLOW = Kind("powersgd:4", "gradients as products of rank 4", push=0.8, codec_ms=30.0, quality=-0.0001)
STALE = Kind("staleness=4", "workers at most 4 steps apart", is_codec=False, step_ms=5.0)
SYNC = Kind("staleness=0", "workers in step", is_codec=False)
_RAW = {("push", "ids"): 8e3, ("push", "rows"): 180e3, ("push", "dense"): 60e3, ("push", "other"): 300.0,
        ("pull", "ids"): 16e3, ("pull", "rows"): 180e3, ("pull", "dense"): 60e3, ("pull", "other"): 500.0}  # fmt: skip


def _bytes(kind):
    left = {"push": kind.push, "pull": kind.pull}
    found = []
    for (direction, part), raw in _RAW.items():
        share = left[direction] if part in ("rows", "dense") else (0.4 if part == "ids" and left[direction] < 1 else 1)
        sizes = {"sent": raw * share, "raw": raw, "predicted": raw * share * 1.004}
        found.append(r.MeanStepBytes(direction=direction, part=part, **sizes))
    return tuple(found)


def _step_ms(kind, bits):
    moved = sum(one.sent for one in _bytes(kind))
    return kind.step_ms + kind.codec_ms + (0.0 if bits is None else moved * 8 / bits * 1e3)


def _step(kind, bits, noise):
    link = _step_ms(kind, bits) - kind.step_ms - kind.codec_ms
    shares = {"route": 0.06, "pull": 0.14, "forward": 0.3, "backward": 0.36, "push": 0.08, "other": 0.06}
    parts = {name: share * kind.step_ms for name, share in shares.items()}
    shares = {"encode": 0.45, "decode": 0.25, "shards": 0.3}
    parts |= {"wait": link + 0.2} | {name: share * kind.codec_ms for name, share in shares.items()}
    whole = sum(parts.values())
    found = [r.StepPart(name="step", p50_ms=whole, p99_ms=whole * 1.6 + noise, mean_ms=whole * 1.05, overlapped=False)]
    for name, ms in parts.items():
        found.append(r.StepPart(name=name, p50_ms=ms, p99_ms=ms * 1.8, mean_ms=ms * 1.05, overlapped=False))
    return *found, r.StepPart(name="push", p50_ms=2.0, p99_ms=4.1, mean_ms=2.1, overlapped=True)


def _run(kind, seed, link, bits, what, multiple=1.0):
    random = np.random.default_rng([seed, zlib.crc32(f"{kind.label} {link}".encode())])
    shared = np.random.default_rng(seed).normal(0, 0.0004)  # what a seed does to all arms: pairing takes it out
    speed = 2 * 1024e3 / _step_ms(kind, bits) * (1 + random.normal(0, 0.01))
    off_rate = abs(np.log(multiple / (0.5 if kind.label == "topk:0.01" else 1.0)))
    final = 0.9780 + kind.quality + shared + random.normal(0, kind.noise) - 0.002 * off_rate
    curve, samples = [], 0
    for number in range(1, 13):
        samples = number * 230_000
        auc = final - 0.12 * np.exp(-number / 2.2) + random.normal(0, kind.noise)
        figures = {split: {"auc": auc, "logloss": 0.9 - auc * 0.75} for split in ("valid", "test")}
        curve.append(r.CurvePoint(samples=samples, seconds=samples / speed, figures=figures))
    whole = what != "speed"
    return r.ArmRun(
        arm=kind.label, seed=seed, bandwidth=link, kind=what, multiple=multiple, ok=True, error="", attempts=1,
        words=("--set", f"seed={seed}"), folder=f"runs/{kind.label}-{seed}-{link}", began="2026-11-21 12:00:00 +0000",
        total_seconds=80.0, steps=1350 if whole else 200, samples=samples if whole else 400_000,
        train_seconds=samples / speed, samples_per_second=speed, wait_share=0.1,
        metrics={"auc": final, "logloss": 0.9 - final * 0.75} if whole else {}, decided=final if whole else None,
        best_samples=samples if whole else 0, stopped_early=False, curve=tuple(curve) if whole else (),
        bytes=_bytes(kind), step=_step(kind, bits, 0.3 * seed), versions={"torch": "2.13.0"}, load_average=0.4,
    )  # fmt: skip


def fake_results(
    kinds=(NONE, FP16S, INT8, TOPK), *, links=LINKS, seeds=(1, 2, 3, 4, 5), failed=(), multiples=(1.0,),
    name="deepfm on frappe", error="ShardLost: shard 1 at 127.0.0.1:7701 did not answer within 30 s",
) -> r.Results:  # fmt: skip
    """A whole comparison. `failed` are quality runs (arm, seed)."""
    runs = [
        _run(kind, seed, link, bits, "quality" if bits is None else "speed")
        for kind in kinds for link, bits in links.items() for seed in seeds
    ]  # fmt: skip
    tuned = {}
    if len(multiples) > 1:
        runs += [_run(kind, seeds[0], "unlimited", None, "tune", multiple) for kind in kinds for multiple in multiples]
        tuned = {kind.label: (0.5 if kind is TOPK else 1.0) for kind in kinds}
        runs += [_run(TOPK, seed, "unlimited", None, "quality", 0.5) for seed in seeds if TOPK in kinds]
    gone = {"ok": False, "error": error, "attempts": 2, "metrics": {}, "decided": None, "samples_per_second": None}
    gone |= {"curve": (), "bytes": (), "step": ()}
    for place, run in enumerate(runs):
        if run.kind == "quality" and (run.arm, run.seed) in failed:
            runs[place] = run.model_copy(update=gone)
    arms = tuple(
        r.Arm(label=kind.label, meaning=kind.meaning, is_codec=kind.is_codec, added=kind.added,
            settings=(f"compression.push={kind.label}" if kind.is_codec else kind.label,)) for kind in kinds
    )  # fmt: skip
    return conclude(r.Results(
        name=name, job_file="job.yaml",
        job={"seed": 1, "train": {"batch_size": 1024, "epochs": 12}, "model": {"name": "deepfm"}},
        command=("embershard", "compare", "job.yaml", "--arms", ",".join(kind.label for kind in kinds)),
        metric="auc", split="test", deciding_split="valid", lower_is_better=("logloss",), reachable={}, workers=2,
        shards=2, link="token bucket", baseline=kinds[0].label, arms=arms,
        bandwidths=tuple(r.Bandwidth(label=label, bits_per_second=bits) for label, bits in links.items()),
        seeds=tuple(seeds), full=False, speed_steps=200, skipped_share=0.2, multiples=tuple(multiples), tuned=tuned,
        complete=True, seconds=6400.0, runs=tuple(runs),
        quality=(), speeds=(), volumes=(), break_even=(), verdicts=(),
        notes=() if len(seeds) > 1 else ("One seed: no intervals and no tests; a difference may be chance.",),
        conditions=r.RunConditions(machine="AMD EPYC 9B14", cores=2, memory_gib=15, system="Linux 6.1", python="3.11.9",
                              versions={"embershard": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"}),
    ))  # fmt: skip


JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16]}
data: {reader: clicks, eval_samples: 3000}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 10_000}
"""


def plan_of(job, *arms, links=(), overrides=(), **fields) -> ComparisonPlan:
    """The plan for a job's file: of these arms, on these links and, as every plan, without limit."""
    found = find_arms(arms, job, overrides, None)
    bandwidths = [r.Bandwidth(label=label, bits_per_second=LINKS[label]) for label in (*links, r.UNLIMITED)]
    values = {
        "job": load_job(job).model_dump(mode="json"), "overrides": overrides, "imports": (), "seeds": (0, 1),
        "arms": tuple((arm.label, arm.settings) for arm, _ in found.values()), "multiples": (1.0,),
        "bandwidths": tuple(one.label for one in bandwidths), "speed_steps": 50, "link": "token bucket", **fields,
    }  # fmt: skip
    return ComparisonPlan(Experiment.model_validate(values), found, bandwidths)
