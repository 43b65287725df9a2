"""Train a job on a Ray cluster from a Ray driver.

import embershard.ray
result = embershard.ray.run("job.yaml", shards=4, workers=8, output="/shared/runs/one")
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embershard.deploy.sessions import start_each
from embershard.proto.errors import EmbershardError
from embershard.proto.user_modules import environment_for_child

__all__ = ["Result", "RunFailed", "run"]


class RunFailed(EmbershardError):
    """A job ended without a result."""

    template = "the job ended with exit code {code}; see {folder}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a job: its folder, and the last record of its log (metrics, samples, seconds)."""

    folder: Path
    record: dict[str, Any]


def run(
    job: str | os.PathLike[str],
    *,
    shards: int | None = None,
    workers: int | tuple[int, int] | None = None,
    output: str | os.PathLike[str] | None = None,
    settings: Sequence[str] = (),
    imports: Sequence[str] = (),
    resume: str | None = None,
    insecure: bool = False,
    address: str | None = None,
    pack: bool = False,
    shard_resources: Mapping[str, float] | None = None,
    worker_resources: Mapping[str, float] | None = None,
) -> Result:
    """Train the job of a file on the Ray cluster that this process is connected to, and wait for its end.

    Every shard and worker is a process of its own, which an actor owns; progress and the final table are printed here.
    `shards` and `workers` stand in for those of the job, `workers=(2, 8)` for two and up to eight while more of them
    pay (docs/training/workers.md). `settings` are further ones ("train.epochs=2"), `imports` modules with row
    optimizers or codecs. All nodes have to see the folder `output` and what the job reads. Connections are encrypted
    unless `insecure`. `resume` is that of `embershard train`; "auto" goes on from the latest checkpoint, if there is
    one. `address` is that of another cluster. Ctrl-C ends all of its processes.

    Each shard and each worker takes so much of its node, by Ray's names: `worker_resources={"CPU": 4, "GPU": 1}`,
    `shard_resources={"CPU": 2, "memory": 16 * 2**30}`, or resources of the cluster's own. Without CPU it is one core,
    for a worker train.threads. Each shard has a node to itself, unless `pack` lets them share.

    RunFailed where the job ends with an error, which is printed; NoRoom is one of them.
    """
    folder = Path(output or Path("runs") / f"{Path(job).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    words = ["train", os.fspath(job), "--engine", "ray", "--output", str(folder), "--parent-pid", str(os.getpid())]
    options = {
        "--shards": shards,
        "--workers": "-".join(map(str, workers)) if isinstance(workers, tuple) else workers,
        "--resume": resume,
        "--shard-resources": _resources(shard_resources),
        "--worker-resources": _resources(worker_resources),
    }
    words += [word for option, value in options.items() if value is not None for word in (option, str(value))]
    words += [word for setting in settings for word in ("--set", setting)]
    words += [word for module in imports for word in ("--import", module)]
    words += [option for option, given in (("--insecure", insecure), ("--pack", pack)) if given]
    environment = environment_for_child()
    if (cluster := address or _own_cluster()) is not None:
        environment["RAY_ADDRESS"] = cluster
    command = [sys.executable, "-m", "embershard.cli", *words]
    # in a session of its own: Ctrl-C at the terminal reaches it once, from here
    code = _wait_for(lambda: subprocess.Popen(command, env=environment, start_new_session=True))
    if code:
        raise RunFailed(code=code, folder=str(folder))
    lines = (folder / "log.jsonl").read_text().splitlines()
    return Result(folder, json.loads(lines[-1]))


def _wait_for(start: Callable[[], subprocess.Popen[bytes]]) -> int:
    """Start a process and return its exit code. An interrupt at any moment ends the process before this raises."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        start_each([lambda: started.append(start())])
        return started[0].wait()
    except BaseException:
        for process in started:
            process.send_signal(signal.SIGINT)  # it ends what it has started
            process.wait()
        raise


def _resources(amounts: Mapping[str, float] | None) -> str | None:
    return ",".join(f"{name}={amount:.15g}" for name, amount in amounts.items()) if amounts else None


def _own_cluster() -> str | None:
    """The address of the cluster that this process is connected to; None where it is to none."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else None
