"""Whole jobs by the command line on a GPU: examples/demo.yaml in mixed precision and in each strategy that fits.

Workers that share one GPU all-reduce over gloo, which nccl would refuse; FSDP wants a GPU for each worker, and is run
where there are several. Compared is how far the AUC on the validation samples stays below that of a job on the CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from part import report

JOB = Path(__file__).resolve().parents[2] / "examples/demo.yaml"
BOUND = 0.03  # of AUC: precision, and the order in which workers' pushes come
JOB_SECONDS = 240  # whoever runs this part may have less patience


def jobs(device: str, gpus: int) -> dict[str, list[str]]:
    """Settings by name; the first is the reference."""
    on_device = f"train.device={device}"
    found = {
        "cpu": ["train.device=cpu", "workers=1"],
        "fp16": [on_device, "workers=1", "train.amp=fp16"],
        "hybrid, 2 workers, bf16": [on_device, "strategy=hybrid", "train.amp=bf16"],
        "tables in 2 workers": [on_device, "strategy=ddp", "embedding.dim=4"],  # 34 million rows in each
    }
    if gpus > 1:
        found["fsdp, 2 workers"] = [on_device, "dense.mode=fsdp", "train.staleness=0"]
    return found


def auc_of(settings: list[str], samples: int, folder: Path) -> float:
    """Train; the last validation AUC. RuntimeError with the last lines where it fails."""
    sets = [*settings, f"train.samples={samples}", f"evaluate.every={samples}", "data.eval_samples=20000"]
    command = [sys.executable, "-m", "embershard.cli", "train", str(JOB), "--output", str(folder)]
    command += [word for assignment in sets for word in ("--set", assignment)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOB_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: " + " | ".join((done.stdout + done.stderr).splitlines()[-8:]))
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return next(float(it["figures"]["valid"]["auc"]) for it in reversed(records) if "figures" in it)


def main() -> None:
    """Run all; exit 1 where one fails, once all have run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=250_000)
    options = parser.parse_args()
    failures, want = [], None
    for name, settings in jobs(options.device, torch.cuda.device_count()).items():
        start = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                auc = auc_of(settings, options.samples, Path(folder))
        except Exception as error:  # the others still run
            failures.append(f"{name}: {type(error).__name__}: {error}")
            continue
        want = auc if want is None else want
        seconds = round(time.perf_counter() - start, 1)
        report(check=name, found=want - auc, bound=BOUND, auc=auc, seconds=seconds)
        print(f"{name}: AUC {auc:.4f} in {seconds} s")
        if not want - auc <= BOUND:
            failures.append(f"{name}: AUC {auc:.4f} against {want:.4f}")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
