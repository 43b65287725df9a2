"""From the command to serving: how long one shard's process takes until it answers, and a worker's until it can train.

The other sides of the ratios are the interpreter with grpc alone, the least that a shard over gRPC could take, and with
torch alone, the least that a worker could.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

RUNS = 7
BAR_SECONDS = 3.0
SHARD = [sys.executable, "-m", "embershard.cli", "ps", "--shard", "0", "--of", "1", "--listen", "127.0.0.1:0"]
FLOOR = [sys.executable, "-c", "import grpc.aio, numpy; print('ready', flush=True)"]
WORKER = [
    sys.executable,
    "-c",
    "import embershard.cli.worker, embershard.worker.training.trainer; print('ready', flush=True)",
]
TORCH = [sys.executable, "-c", "import torch; print('ready', flush=True)"]


def seconds_to_first_line(command: list[str]) -> float:
    """Time until the process prints its first line; then it is ended."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        took = time.perf_counter() - start
    finally:
        process.terminate()
        process.wait(timeout=30)
    if not line:
        raise SystemExit(f"{' '.join(command)} ended without a word, exit code {process.returncode}")
    return took


def main() -> int:
    first = seconds_to_first_line(SHARD)  # compiles where the cache is cold
    shard, floor, worker, torch = [], [], [], []
    for _ in range(RUNS):
        shard.append(seconds_to_first_line(SHARD))
        floor.append(seconds_to_first_line(FLOOR))
        worker.append(seconds_to_first_line(WORKER))
        torch.append(seconds_to_first_line(TORCH))
    warm, bare = statistics.median(shard), statistics.median(floor)
    trains, least = statistics.median(worker), statistics.median(torch)
    print(f"first start {first:.2f} s, warm {warm:.2f} s (slowest {max(shard):.2f} s), python with grpc {bare:.2f} s")
    print(f"a worker's imports {trains:.2f} s, torch's alone {least:.2f} s")
    result = {
        "bench": "startup",
        "first_s": round(first, 3),
        "warm_s": round(warm, 3),
        "floor_s": round(bare, 3),
        "ratio": round(warm / bare, 2),
        "worker_s": round(trains, 3),
        "torch_s": round(least, 3),
        "worker_ratio": round(trains / least, 2),
        "bar_s": BAR_SECONDS,
        "ok": warm < BAR_SECONDS,
    }
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
