"""Checks of what computes: threads against cores, the GPU, and which library multiplies on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess

from embershard.doctor.case import Case
from embershard.doctor.check import Finding, check, fail, ok, warn
from embershard.doctor.installation import has_torch
from embershard.doctor.machine import usable_cores

_NVIDIA_SMI_SECONDS = 2.5


@check(
    "threads",
    asks="whether the threads of all workers here fit the cores",
    remedy="set OMP_NUM_THREADS (or train.threads) to cores / workers, less what shards and loaders need: more threads "
    "than cores wait for each other",
)
def threads(case: Case) -> Finding | None:
    """torch's threads x workers on this machine, against the cores that it may use: a container's may be fewer."""
    if not has_torch():
        return None
    import torch

    cores, workers = usable_cores(), case.workers
    if case.job is not None:
        source = "train.threads" if case.job.train.threads else "half of the machine's cores, shared"
        own = case.job.worker_threads(workers)
    else:
        given = os.environ.get("OMP_NUM_THREADS")
        source = f"OMP_NUM_THREADS={given}" if given else "torch's default"
        own = torch.get_num_threads()
    text = f"{own} ({source}) x {workers} worker{'s' * (workers != 1)} on {cores:g} cores"
    return warn(text) if own * workers > cores else ok(text)


@check(
    "GPU",
    asks="whether torch sees the GPUs of this machine (none is needed)",
    remedy="install a driver that nvidia-smi works with, and a build of torch for its CUDA version",
)
def gpu(case: Case) -> Finding | None:
    """torch.cuda against nvidia-smi; without a GPU, training runs on the CPU."""
    if not has_torch():
        return None
    import torch

    needed = case.job is not None and case.job.train.device == "cuda"
    missing = fail if needed else warn
    driver = _nvidia_smi()
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return ok(f"{', '.join(names)}; CUDA {torch.version.cuda}; {driver or 'nvidia-smi is not installed'}")
    if torch.version.cuda is None and driver.startswith("driver"):
        return missing(f"{driver}, but this torch ({torch.__version__}) was built without CUDA")
    if torch.version.cuda is not None and driver:
        return missing(f"torch was built for CUDA {torch.version.cuda} and sees no GPU; {driver}")
    text = "none: no nvidia-smi here, and torch sees no device; training runs on the CPU"
    return fail(f"train.device is cuda; {text}") if needed else ok(text)


@check(
    "bf16",
    asks="whether mixed precision in bfloat16 would be fast here",
    remedy="set train.amp to off, or to fp16 on a GPU without bfloat16",
)
def bf16(case: Case) -> Finding | None:
    """Instructions of the CPU, or the GPU's word, against what the job wants."""
    if not has_torch():
        return None
    import torch

    from embershard.worker.nn.onednn import cpu_flags

    wanted = case.job is not None and case.job.train.amp == "bf16"
    missing = warn if wanted else ok
    if torch.cuda.is_available():
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
        return ok("the GPU has bfloat16") if has_it else missing("the GPU has no bfloat16: use fp16")
    has = cpu_flags()
    found = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in has]
    fast = any(name.endswith("bf16") for name in found)
    words = "in hardware" if fast else "only by conversion, so mixed precision would not be faster here"
    return (ok if fast else missing)(f"bfloat16 {words} ({', '.join(found) or 'no AVX2'})")


@check(
    "matrix products",
    asks="whether matrix products use the faster of MKL and oneDNN on this CPU",
    remedy="set train.linear to auto or onednn",
)
def matrix_products(case: Case) -> Finding | None:
    """worker/nn/onednn.py, against what the job says."""
    if not has_torch():
        return None
    from embershard.worker.nn.onednn import onednn_is_faster

    chosen = case.job.train.linear if case.job is not None else "auto"
    if not onednn_is_faster():
        return ok("torch's own (MKL) is right for this CPU")
    if chosen == "torch":
        return warn("oneDNN is faster on this CPU (AVX-512, not Intel's), and train.linear is torch")
    return ok("oneDNN is faster on this CPU; jobs use it by themselves")


CHECKS = (threads, gpu, bf16, matrix_products)


def _nvidia_smi() -> str:
    """What the driver says: "driver 550.54 (...)", why it fails, or nothing where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    question = [program, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(question, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer ({type(error).__name__})"
    lines = (done.stdout or done.stderr).strip().splitlines() or ["nothing"]
    return f"driver {lines[0]}" if done.returncode == 0 else f"nvidia-smi fails: {lines[0]}"
