"""A compose file for the shards and workers of a job in containers of one machine."""

from __future__ import annotations

from typing import Any

from embershard.deploy.manifests.deployment import METRICS_PORT, PORT, USER, BadDeployment, Deployment, check_image

_STATE, _CHECKPOINTS, _RUN = "/state", "/checkpoints", "/run/embershard"  # in the image, for its user
_RESTARTS = 10  # of a worker; an error of the job itself would come again


def compose_file(
    deployment: Deployment, *, image: str, worker_image: str = "", job: str = "./job.yaml", keys: str = ""
) -> dict[str, Any]:
    """A service for each shard and worker, a network of their own without published ports, and volumes.

    Each shard has a volume for its log; worker 0 has one for the run's log and results (/run/embershard), and all share
    one for checkpoints (/checkpoints).

    `job` is the path of the job file, and `keys` the folder of a certificate that covers the name "shards", for all of
    them; without it connections are not encrypted.
    """
    check_image(image, worker_image or image)
    job, keys = _path("job", job), _path("--tls", keys) if keys else ""
    services: dict[str, Any] = {}
    for shard in range(deployment.shards):
        words = deployment.shard_words(shard=str(shard), listen=f"0.0.0.0:{PORT}")
        words += ["--metrics", f"0.0.0.0:{METRICS_PORT}", "--snapshots", _CHECKPOINTS]
        volumes = [f"checkpoints:{_CHECKPOINTS}"]
        if deployment.durability != "memory":
            words += ["--log-dir", _STATE]
            volumes.append(f"state-{shard}:{_STATE}")
        words += ["--tls", "/keys"] if keys else ["--insecure"]
        services[f"shard-{shard}"] = {
            **_service(image, words, deployment.memory, deployment.cpus, keys, volumes),
            "restart": "on-failure",
            "stop_grace_period": "45s",  # a shard finishes what it has accepted, within 30 s
        }
    addresses = f"shard-[0-{deployment.shards - 1}]:{PORT}"
    for worker in range(deployment.workers):
        words = ["worker", "/job/job.yaml", "--ps", addresses, "--rank", str(worker)]
        words += ["--world-size", str(deployment.workers), "--local-rank", "0", "--local-world-size", "1", "--recover"]
        words += ["--output", _RUN] if worker == 0 else []
        words += ["--tls", "/keys", "--tls-server-name", "shards"] if keys else []
        volumes = [f"{job}:/job/job.yaml:ro", f"checkpoints:{_CHECKPOINTS}"]
        volumes += [f"run:{_RUN}"] if worker == 0 else []
        services[f"worker-{worker}"] = {
            **_service(worker_image or image, words, deployment.worker_memory, deployment.worker_cpus, keys, volumes),
            "depends_on": [f"shard-{shard}" for shard in range(deployment.shards)],
            "restart": f"on-failure:{_RESTARTS}",
        }
    named = [f"state-{shard}" for shard in range(deployment.shards)] if deployment.durability != "memory" else []
    volumes_of_all = [*named, "checkpoints", *(["run"] if deployment.workers else [])]
    return {
        "name": deployment.name,
        "services": services,
        "volumes": {name: {} for name in volumes_of_all},
    }


def _path(what: str, path: str) -> str:
    """A path as compose tells it from a volume's name, and from a variable; a colon would end it."""
    if not path or ":" in path or not path.isprintable():
        reason = "compose takes no such path for a volume: choose one of printable characters without a colon"
        raise BadDeployment(what=f"{what} {path!r}", reason=reason)
    path = path.replace("$", "$$")
    return path if path.startswith((".", "/", "~")) else f"./{path}"


def _service(image: str, words: list[str], memory: int, cpus: int, keys: str, volumes: list[str]) -> dict[str, Any]:
    mounts = [*volumes, *([f"{keys}:/keys:ro"] if keys else [])]
    return {
        "image": image,
        "command": [word.replace("$", "$$") for word in words],
        "user": f"{USER}:{USER}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": ["/tmp"],  # in the container
        "mem_limit": f"{memory}m",
        "cpus": cpus,
        **({"volumes": mounts} if mounts else {}),
    }
