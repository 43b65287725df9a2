"""Whether all that the other parts need is there; the versions; and how fast the host and the GPU exchange bytes.

The first import compiles the kernels and keeps them beside their sources, so that no other part waits for that.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from part import Figures, report

if TYPE_CHECKING:  # it may be missing here, which is then said
    import torch

NEEDED = (
    "numpy", "numba", "grpc", "grpc_health", "grpc_reflection", "google.protobuf", "uvloop", "fsspec", "msgpack",
    "safetensors", "torch", "pyarrow", "pydantic", "rich", "typer", "pytest", "pytest_timeout", "hypothesis",
)  # fmt: skip
OURS = ("embershard.ps.server", "embershard.cli.worker", "embershard.cli.train", "embershard.benchmark.dlrm")
VERSIONS = ("torch", "numpy", "numba", "grpcio", "protobuf", "uvloop", "pydantic", "pyarrow")
COPIED_BYTES = 1 << 28


def main() -> None:
    """Import everything; exit 1 with what is missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    problems = {name: problem for name in NEEDED if (problem := _problem(name))}
    if problems:
        report(missing=problems)
        sys.exit(
            "\n".join(f"{name}: {problem}" for name, problem in problems.items()) + "\nfetch them: make gpu-wheels"
        )
    start = time.monotonic()
    for name in OURS:
        importlib.import_module(name)
    compiled = time.monotonic() - start
    versions = {name: version(name) for name in VERSIONS}
    report(versions=versions, import_seconds=round(compiled, 1), cores=len(os.sched_getaffinity(0)))
    print(f"imported in {compiled:.1f} s; {', '.join(f'{name} {its}' for name, its in versions.items())}")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, sees no GPU here")
    report(**_describe(torch.device(device)))


def _problem(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # a package that is there may be of no use with the others' versions
        return f"{type(error).__name__}: {error}"
    return ""


def _describe(device: torch.device) -> Figures:
    """Name, memory and GB/s of copies through pinned memory, both ways."""
    import torch

    if device.type == "cpu":
        return {"gpu": "none: a rehearsal", **_copies(torch.empty(COPIED_BYTES >> 6, dtype=torch.uint8), device)}
    properties = torch.cuda.get_device_properties(device)
    pinned = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "memory_gib": round(properties.total_memory / 2**30),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        **_copies(pinned, device),
    }


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no nvidia-smi"
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=False).stdout.strip()


def _copies(host: torch.Tensor, device: torch.device) -> Figures:
    import torch

    there = torch.empty(host.shape, dtype=host.dtype, device=device)
    found: Figures = {}
    for name, source, target in (("to_gpu_gb_s", host, there), ("to_host_gb_s", there, host)):
        for _ in range(2):  # the second one counts
            start = time.perf_counter()
            target.copy_(source)
            if device.type == "cuda":
                torch.cuda.synchronize()
            found[name] = round(host.numel() / (time.perf_counter() - start) / 1e9, 2)
    return found


if __name__ == "__main__":
    main()
