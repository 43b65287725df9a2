"""A batch script of Slurm that trains a job on the nodes of its allocation."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from embershard.deploy.manifests.deployment import Deployment


def batch_script(
    deployment: Deployment,
    job: PurePosixPath,
    *,
    nodes: int | None = None,
    checkpoints: str = "",
    executable: str = "embershard",
    insecure: bool = False,
) -> str:
    """The text of a script for sbatch; `nodes` is by default one for each shard and each worker.

    `embershard train --engine slurm` runs on the first node and starts every shard and worker as a job step of its own.
    A node that is lost costs what it ran, which is started again on another one; where it is the first, Slurm starts
    the script again, and the job goes on from its latest checkpoint. These are in `checkpoints`, by default a folder of
    the run's own. All nodes have to see the folder that the script is submitted from. `executable` may be several
    words.
    """
    words = [*shlex.split(executable), "train", str(job), "--engine", "slurm", "--output", "$run", "--resume", "auto"]
    words += ["--shards", str(deployment.shards), "--workers", str(deployment.workers)]
    words += [
        "--set",
        f"durability={deployment.durability}",
        "--set",
        f"checkpoint.folder={checkpoints or '$run/checkpoints'}",
    ]
    words += ["--insecure"] if insecure else []
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={deployment.name}",
        f"#SBATCH --nodes={nodes or deployment.shards + deployment.workers}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --cpus-per-task={max(deployment.cpus, deployment.worker_cpus)}",
        f"#SBATCH --output={deployment.name}-%j.log",
        "#SBATCH --open-mode=append",
        "# start again after the first node was lost, or this job had to make room for another",
        "#SBATCH --requeue",
        "# go on without another node that was lost",
        "#SBATCH --no-kill",
        "",
        "set -eu",
        'run="$PWD/runs/$SLURM_JOB_NAME-$SLURM_JOB_ID"',
        # in the place of the shell: Slurm's signals reach it
        "exec " + " ".join(map(_quoted, words)),
    ]
    return "\n".join(lines) + "\n"


def _quoted(word: str) -> str:
    """A word of the script, in which $run alone is a variable."""
    before, found, after = word.partition("$run")
    if not found:
        return shlex.quote(word)
    return f'{shlex.quote(before) if before else ""}"$run"{shlex.quote(after) if after else ""}'
