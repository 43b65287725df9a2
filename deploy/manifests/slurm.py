"""A batch script of Slurm that trains a job on the nodes of its allocation."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from embershard.deploy.manifests.deployment import BadDeployment, Deployment

_RUN = "\0run"  # stands for the folder of the run: no word of a user has it
_NOTHING = ("null", "Null", "NULL", "~")  # in YAML, as which a setting is read


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
    if checkpoints in _NOTHING:
        raise BadDeployment(what=f"checkpoints {checkpoints}", reason="YAML reads it as nothing; name a folder")
    nodes = nodes or deployment.shards + deployment.workers
    processes = -(-(deployment.shards + deployment.workers) // nodes)  # of a node
    words = [*_program(executable), "train", str(job), "--engine", "slurm", "--output", _RUN, "--resume", "auto"]
    words += ["--shards", str(deployment.shards), "--workers", str(deployment.workers)]
    words += ["--set", f"durability={deployment.durability}"]
    # in quotes: in YAML the folder that a script is submitted from may have a comment in it
    own = f'"{_RUN}/checkpoints"'
    words += ["--set", f"checkpoint.folder={checkpoints or own}"]
    words += ["--insecure"] if insecure else []
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={deployment.name}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --cpus-per-task={processes * max(deployment.cpus, deployment.worker_cpus)}",
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


def _program(executable: str) -> list[str]:
    """The words of a command. BadDeployment where it has none, or a quotation without an end."""
    try:
        words = shlex.split(executable)
    except ValueError as error:
        raise BadDeployment(what=f"executable {executable!r}", reason=str(error)) from None
    if not words:
        raise BadDeployment(what="executable ''", reason="name the command, as embershard")
    return words


def _quoted(word: str) -> str:
    """A word of the script, in which the folder of the run alone is a variable."""
    before, found, after = word.partition(_RUN)
    if not found:
        return shlex.quote(word)
    return f'{shlex.quote(before) if before else ""}"$run"{shlex.quote(after) if after else ""}'
