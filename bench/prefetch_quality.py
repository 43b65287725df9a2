"""What `train.prefetch` costs in quality and buys in speed: off, 0, 1, 2 and 4 over seeds, by `embershard train`.

One worker and two shards, so that the worker's own pushes are all that a batch can miss; `off` and 0 then have the same
bits. The jobs are short ones, where a missed push counts most. Each row has the AUC at the end of training, mean and
range over the seeds, its difference from prefetch 0 with the same seeds, and samples/s. The settings take turns, so
that other work on the machine slows all of them.

The runs are left in runs/prefetch-quality: stopped and started again it goes on where it was. Prints a table, and one
JSON line. It measures and judges nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from timing import load, machine, print_table
from train_job import EXAMPLES

FOLDER = Path(__file__).resolve().parent.parent / "runs" / "prefetch-quality"
PREFETCH = ("off", "0", "1", "2", "4")
JOBS: dict[str, tuple[str, ...]] = {  # example -> what its file has otherwise
    "adult": (),
    "frappe-fm": ("train.epochs=4", "train.early_stop=null", "evaluate.every=4"),
    "criteo": ("train.epochs=4", "evaluate.every=4"),
}


def train(example: str, prefetch: str, seed: int, words: Sequence[str]) -> dict[str, float]:
    """AUC at the end, steps and samples/s of a run; made only where it was not before. SystemExit where it fails."""
    folder = FOLDER / f"{example}-{prefetch}-{seed}"
    log = folder / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if not lines or lines[-1]["record"] != "result":
        shutil.rmtree(folder, ignore_errors=True)
        settings = [*JOBS[example], f"train.prefetch={prefetch}", f"train.seed={seed}"]
        command = [sys.executable, "-m", "embershard.cli", "train", str(EXAMPLES / f"{example}.yaml")]
        command += ["--workers", "1", "--output", str(folder), *words]
        command += [word for setting in settings for word in ("--set", setting)]
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"{example} with prefetch {prefetch} ended with exit code {done.returncode}")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    result, last = lines[-1], [line for line in lines if line["record"] == "eval"][-1]
    figures = last["figures"].get("test") or last["figures"]["valid"]
    return {"auc": figures["auc"], "steps": result["steps"], "speed": result["samples_per_second"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=list(JOBS), nargs="+", default=list(JOBS), help="some of the jobs")
    parser.add_argument("--data", help="the folder of the data, in place of the files' own")
    args = parser.parse_args()
    words = [] if args.data is None else ["--data", args.data]
    rows: list[list[object]] = []
    figures: dict[str, object] = {}
    for example in args.only:
        found: dict[str, list[dict[str, float]]] = {prefetch: [] for prefetch in PREFETCH}
        for seed in range(1, args.seeds + 1):
            for prefetch in PREFETCH:
                found[prefetch].append(train(example, prefetch, seed, words))
        base = [run["auc"] for run in found["0"]]
        for prefetch, runs in found.items():
            aucs = [run["auc"] for run in runs]
            moved = mean(aucs) - mean(base)
            span, speed = f"{min(aucs):.4f}..{max(aucs):.4f}", mean(run["speed"] for run in runs)
            steps = round(runs[0]["steps"])
            rows.append([example, steps, prefetch, f"{mean(aucs):.4f}", span, f"{moved:+.4f}", f"{speed:,.0f}"])
            figures[f"{example} {prefetch}"] = {
                "auc": [round(auc, 5) for auc in aucs],
                "difference": round(moved, 5),
                "samples_per_second": round(speed),
                "steps": steps,
            }
    print_table(("job", "steps", "prefetch", "AUC", "range", "difference", "samples/s"), rows)
    summary = {"bench": "prefetch-quality", "machine": machine(), "load": load(), "seeds": args.seeds}
    print(json.dumps({**summary, "figures": figures}), flush=True)


if __name__ == "__main__":
    main()
