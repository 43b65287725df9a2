"""`embershard manifests`: what a cluster's own tools need to run a job's shards and workers."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer

from embershard.deploy.manifests.compose import compose_file
from embershard.deploy.manifests.deployment import BadDeployment, Deployment, Durability
from embershard.deploy.manifests.kubernetes import KubernetesSettings, kubernetes_objects
from embershard.deploy.manifests.slurm import batch_script
from embershard.deploy.manifests.systemd import systemd_units
from embershard.proto.errors import CannotWrite

manifests = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Print the files with which a cluster runs the shards and workers of a job.",
)

# what is a bool or a number in YAML 1.1, which kubectl and compose read, and text in 1.2, which is written here
_NOT_TEXT = re.compile(r"(?i:y|yes|n|no|on|off)|[0-9]+(:[0-5]?[0-9])+")

NameOption = Annotated[str, typer.Option(help="Name of the job: a-z, 0-9 and -.")]
ShardsOption = Annotated[int, typer.Option(help="Number of shards.", min=1, max=4096)]
WorkersOption = Annotated[int, typer.Option(help="Number of workers.", min=1)]
MemoryOption = Annotated[int, typer.Option(metavar="MIB", help="Memory of each shard, in MiB.", min=256)]
CpusOption = Annotated[int, typer.Option(help="Cores of each shard.", min=1)]
WorkerMemoryOption = Annotated[int, typer.Option(metavar="MIB", help="Memory of each worker, in MiB.", min=256)]
WorkerCpusOption = Annotated[int, typer.Option(help="Cores of each worker.", min=1)]
DurabilityOption = Annotated[
    Durability, typer.Option(help="Which failures a shard's rows survive (docs/durability.md).")
]
SnapshotsOption = Annotated[
    list[str] | None,
    typer.Option(help="Folder or URL at or below which checkpoints may be written; may be repeated."),
]


@manifests.command("systemd")
def systemd(
    name: NameOption,
    shards: ShardsOption,
    host: Annotated[str, typer.Option(help="Address to listen on; the first shard uses port 7700.")] = "127.0.0.1",
    first: Annotated[int, typer.Option(help="Index of the first shard of this machine.", min=0)] = 0,
    count: Annotated[int | None, typer.Option(help="Number of shards on this machine.  [default: all]", min=1)] = None,
    memory: MemoryOption = 4096,
    durability: DurabilityOption = "log",
    snapshots: SnapshotsOption = None,
    keys: Annotated[Path | None, typer.Option("--tls", metavar="DIR", help="Folder of the certificates.")] = None,
    access: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of access rules (docs/security.md).")
    ] = None,
    executable: Annotated[str, typer.Option(help="Path of the command.")] = "/usr/local/bin/embershard",
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write the units to, such as /etc/systemd/system.")
    ] = None,
) -> None:
    """Print the systemd units for the shards of one machine: a service for each shard, and a target for all of them."""
    if first + (count or 1) > shards:
        what = f"--first {first}" if count is None else f"--first {first} --count {count}"
        raise BadDeployment(what=what, reason=f"there are {shards} shards, from 0 to {shards - 1}")
    deployment = Deployment(
        name=name, shards=shards, memory=memory, durability=durability, snapshots=tuple(snapshots or ())
    )
    units = systemd_units(
        deployment,
        host=host,
        executable=executable,
        first=first,
        count=count if count is not None else shards - first,
        keys=None if keys is None else PurePosixPath(keys.absolute()),
        access=None if access is None else PurePosixPath(access.absolute()),
    )
    _give(units, output)


@manifests.command("kubernetes")
def kubernetes(
    name: NameOption,
    job: Annotated[Path, typer.Option(help="The job file.")],
    image: Annotated[str, typer.Option(help="Image of the shards (docs/cluster.md).")],
    worker_image: Annotated[str, typer.Option(help="Image of the workers.  [default: that of the shards]")] = "",
    namespace: Annotated[str, typer.Option(help="Namespace of all objects.")] = "default",
    issuer: Annotated[
        str, typer.Option(help="cert-manager Issuer of the certificates.  [default: connections are not encrypted]")
    ] = "",
    shards: ShardsOption = 2,
    workers: WorkersOption = 2,
    cpus: CpusOption = 2,
    worker_cpus: WorkerCpusOption = 2,
    memory: MemoryOption = 4096,
    worker_memory: WorkerMemoryOption = 4096,
    storage: Annotated[str, typer.Option(help="Size of each shard's volume for its event log.")] = "20Gi",
    durability: DurabilityOption = "log",
    snapshots: SnapshotsOption = None,
    data_claim: Annotated[str, typer.Option(help="Volume claim that workers mount at /data.")] = "",
    service_account: Annotated[
        str, typer.Option(help="Service account of all pods, for example with permissions for storage.")
    ] = "",
    pack: Annotated[bool, typer.Option("--pack", help="Let shards share a node.")] = False,
) -> None:
    """Print the objects for kubectl apply: shards as a StatefulSet, workers as an indexed Job, and what they need."""
    deployment = Deployment(
        name=name,
        shards=shards,
        workers=workers,
        cpus=cpus,
        worker_cpus=worker_cpus,
        memory=memory,
        worker_memory=worker_memory,
        durability=durability,
        snapshots=tuple(snapshots or ()),
    )
    settings = KubernetesSettings(
        image=image,
        worker_image=worker_image,
        namespace=namespace,
        issuer=issuer,
        storage=storage,
        spread=not pack,
        data_claim=data_claim,
        service_account=service_account,
    )
    objects = kubernetes_objects(deployment, _text_of(job), settings)
    _print("---\n".join(map(_yaml, objects)))


@manifests.command("compose")
def compose(
    name: NameOption,
    image: Annotated[str, typer.Option(help="Image of the shards (docs/cluster.md).")],
    worker_image: Annotated[str, typer.Option(help="Image of the workers.  [default: that of the shards]")] = "",
    job: Annotated[str, typer.Option(help="Path of the job file, as the compose file sees it.")] = "./job.yaml",
    keys: Annotated[
        str, typer.Option("--tls", metavar="DIR", help="Folder of a certificate for the name `shards`.")
    ] = "",
    shards: ShardsOption = 2,
    workers: WorkersOption = 2,
    cpus: CpusOption = 1,
    worker_cpus: WorkerCpusOption = 1,
    memory: MemoryOption = 4096,
    worker_memory: WorkerMemoryOption = 4096,
    durability: DurabilityOption = "log",
) -> None:
    """Print a compose file: shards and workers in containers of one machine."""
    deployment = Deployment(
        name=name,
        shards=shards,
        workers=workers,
        cpus=cpus,
        worker_cpus=worker_cpus,
        memory=memory,
        worker_memory=worker_memory,
        durability=durability,
    )
    _print(_yaml(compose_file(deployment, image=image, worker_image=worker_image, job=job, keys=keys)))


@manifests.command("slurm")
def slurm(
    name: NameOption,
    job: Annotated[Path, typer.Option(help="The job file, as the nodes see it.")],
    shards: ShardsOption = 2,
    workers: WorkersOption = 2,
    nodes: Annotated[int | None, typer.Option(help="Nodes.  [default: one per shard and worker]", min=1)] = None,
    cpus: CpusOption = 2,
    worker_cpus: WorkerCpusOption = 2,
    durability: DurabilityOption = "log",
    checkpoints: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="Where checkpoints go.  [default: the run's folder]", show_default=False),
    ] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS between the nodes.")] = False,
    executable: Annotated[str, typer.Option(help="The command, as the nodes run it.")] = "embershard",
) -> None:
    """Print a batch script for sbatch, which trains a job on the nodes of its allocation."""
    deployment = Deployment(
        name=name, shards=shards, workers=workers, cpus=cpus, worker_cpus=worker_cpus, durability=durability
    )
    text = batch_script(
        deployment,
        PurePosixPath(job),
        nodes=nodes,
        checkpoints=checkpoints,
        executable=executable,
        insecure=insecure,
    )
    _print(text)


def _print(text: str) -> None:
    """Print what another program reads: UTF-8, whatever the locale of this one is."""
    typer.echo(text.encode(errors="surrogateescape"), nl=False)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadDeployment(what=f"--job {path}", reason=getattr(error, "strerror", None) or str(error)) from None


def _yaml(found: object) -> str:
    from ruamel.yaml import YAML

    yaml, text = YAML(), io.StringIO()
    yaml.default_flow_style = False
    yaml.width = 120
    yaml.representer.add_representer(str, _represented)
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump(found, text)
    return text.getvalue()


def _represented(representer: Any, text: str) -> Any:
    """Several lines as they are; in quotes what would be no text without."""
    style = "|" if "\n" in text else "'" if _NOT_TEXT.fullmatch(text) else None
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _give(files: dict[str, str], output: Path | None) -> None:
    """Write files to a folder, or print them one after another."""
    if output is None:
        _print("\n".join(f"# {name}\n{text}" for name, text in files.items()))
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            beside = output / f"{name}.new"
            try:  # a full disk leaves the file that is in use
                beside.write_text(text, encoding="utf-8")
                os.replace(beside, output / name)
            finally:
                beside.unlink(missing_ok=True)
    except OSError as error:
        path, reason = error.filename or output, error.strerror or str(error)
        raise CannotWrite(path=str(path), reason=reason, remedy="choose another folder with --output") from None
    typer.echo(f"{output}: {', '.join(files)}")
