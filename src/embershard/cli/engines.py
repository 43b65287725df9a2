"""--engine of `embershard train`: where the processes of a job run, and what a Ray cluster is asked for."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from embershard.cli.sizes import file_bytes
from embershard.deploy.engine import LOCAL, ClusterEngine
from embershard.deploy.slurm import SlurmEngine
from embershard.proto.security.tls import TLS
from embershard.worker.job.job import Job


class EngineName(enum.Enum):
    """Name where the processes of a job run (--engine)."""

    LOCAL = "local"
    SLURM = "slurm"
    RAY = "ray"


EngineOption = Annotated[
    EngineName,
    typer.Option(
        help="Where to start shards and workers: on this machine (local), on the nodes of a Slurm job, or on those of "
        "a Ray cluster (RAY_ADDRESS)."
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="With another engine: use no TLS between its machines.  [default: TLS with certificates that this run "
        "creates]",
        show_default=False,
    ),
]
PackOption = Annotated[bool, typer.Option("--pack", help="With --engine ray: shards may share a node.")]
ShardResourcesOption = Annotated[
    str,
    typer.Option(
        metavar="NAME=AMOUNT,...",
        help="With --engine ray: resources of each shard, by Ray's names, such as CPU=2,memory=16GiB.  [default: "
        "CPU=1]",
        show_default=False,
    ),
]
WorkerResourcesOption = Annotated[
    str,
    typer.Option(
        metavar="NAME=AMOUNT,...",
        help="With --engine ray: resources of each worker, such as CPU=4,GPU=1; CPU also sets train.threads.  "
        "[default: CPU=train.threads, or 1]",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The options of `embershard train` that are about its engine."""

    name: EngineName = EngineName.LOCAL
    insecure: bool = False
    pack: bool = False
    shard_resources: Mapping[str, float] = field(default_factory=dict)
    worker_resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name is EngineName.LOCAL and self.insecure:
            raise typer.BadParameter("--insecure has a meaning with another --engine: here shards are on loopback")
        if self.name is not EngineName.RAY and (self.pack or self.shard_resources or self.worker_resources):
            raise typer.BadParameter("--pack, --shard-resources and --worker-resources are for --engine ray")

    @property
    def worker_threads(self) -> int | None:
        """The threads of a worker that was given cores."""
        cores = self.worker_resources.get("CPU")
        return None if cores is None else max(1, int(cores))

    def open(self, job: Job, ps: str | None, folder: Path, *, tls: TLS | None, metrics: str) -> ClusterEngine:
        """The engine. BadParameter where it cannot run what else was asked for; NotInSlurm, NoRay."""
        if self.name is EngineName.LOCAL:
            return LOCAL
        if metrics:
            raise typer.BadParameter("--metrics names ports of this machine: leave it out with another --engine")
        if tls is not None and self.insecure:
            raise typer.BadParameter("--tls and --insecure contradict each other")
        if tls is not None and not tls.server_name:
            reason = "shards have no addresses yet that a certificate could cover: name what it does cover"
            raise typer.BadParameter(f"--tls needs --tls-server-name with --engine {self.name.value}: {reason}")
        if "," in str(folder.absolute()):
            raise typer.BadParameter(
                f"a comma in --output {folder} would end the address of the shards: choose another folder"
            )
        announce, shards = folder.absolute() / "shards", job.shards if job.has_shards and ps is None else 0
        if self.name is EngineName.SLURM:
            return SlurmEngine.of_allocation(announce, shards=shards)
        if job.all_reduces:
            raise typer.BadParameter(f"strategy {job.strategy} all-reduces, which --engine ray does not set up")
        from embershard.deploy.ray import RayEngine

        return RayEngine(
            announce,
            shard_resources={"CPU": 1, **self.shard_resources},
            worker_resources={"CPU": max(1, job.train.threads or 1), **self.worker_resources},
            pack=self.pack,
        )


def parse_resources(text: str, option: str) -> Mapping[str, float]:
    """Amounts by name of "CPU=4,GPU=1,memory=16GiB"; memory in bytes. BadParameter where one is none."""
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, amount = (word.strip() for word in part.partition("="))
        if name == "memory":
            found[name] = file_bytes(amount, option, "memory=16GiB")
            continue
        try:
            found[name] = float(amount)
        except ValueError:
            found[name] = math.nan
        if not name or not 0 < found[name] < math.inf:
            raise typer.BadParameter(f"{part!r} is no resource; write CPU=4 or GPU=1", param_hint=option)
    return found
