"""Objects of Kubernetes for the shards and workers of a job: a StatefulSet, an indexed Job and what they need.

Plain objects, no operator and no templates: kubectl, kustomize, Argo and Flux take them as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from embershard.deploy.attempts import LOST_EXIT_CODE, NO_PROGRESS_EXIT_CODE
from embershard.deploy.manifests.deployment import METRICS_PORT, PORT, USER, BadDeployment, Deployment, check_image

Object = dict[str, Any]

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_OBJECT = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"(?=.*[1-9])[0-9]+(\.[0-9]+)?(k|[KMGTPE]i|[MGTPE])?")
# in the container
_STATE, _KEYS, _JOB, _ACCESS, _DATA, _SCRATCH = "/state", "/keys", "/job", "/access", "/data", "/tmp"
_READY_MINUTES = 10  # for a shard to start; a recovery may take longer, and answers meanwhile
_WORKERS_MINUTES = 30  # until the last worker has found a node
_FAILED_EXIT_CODE = 1


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """Images, names and sizes for the manifests of one job; BadDeployment where Kubernetes would refuse one of them.

    `issuer` is a cert-manager Issuer of the namespace, which issues the certificates of shards and workers; without one
    connections are not encrypted, and the NetworkPolicy alone keeps strangers away. `storage` is the size of each
    shard's volume for its log. Shards `spread` over nodes: two never share one. `data_claim` is a volume claim that
    workers mount at /data. Pods have the rights of `service_account`, as to object storage.
    """

    image: str
    worker_image: str = ""  # by default that of the shards
    namespace: str = "default"
    issuer: str = ""
    storage: str = "20Gi"
    spread: bool = True
    data_claim: str = ""
    service_account: str = ""

    def __post_init__(self) -> None:
        check_image(self.image, self.worker_image or self.image)
        for what in ("issuer", "data_claim", "service_account"):
            if (found := getattr(self, what)) and not _OBJECT.fullmatch(found):
                raise BadDeployment(what=f"{what} {found!r}", reason="a name of an object has a-z, 0-9, - and .")
        if not _QUANTITY.fullmatch(self.storage):
            raise BadDeployment(what=f"storage {self.storage!r}", reason="it is a size, as 20Gi")
        if not _NAMESPACE.fullmatch(self.namespace):
            reason = "a namespace has at most 63 of a-z, 0-9 and -"
            raise BadDeployment(what=f"namespace {self.namespace!r}", reason=reason)


def kubernetes_objects(deployment: Deployment, job: str, settings: KubernetesSettings) -> list[Object]:
    """The objects, in the order in which they can be applied; `job` is the text of the job file.

    BadDeployment where a job would not survive what a cluster does.
    """
    sections = _sections(job)
    _check_strategy(sections)
    checkpoints = _checkpoint_folder(sections, deployment)
    if deployment.workers < 1:
        raise BadDeployment(what="workers 0", reason="a job has at least one")
    if checkpoints and checkpoints not in deployment.snapshots:  # one below another is no harm
        deployment = replace(deployment, snapshots=(*deployment.snapshots, checkpoints))
    names = _Names(deployment, settings)
    return [
        _config_map(names, job),
        *([_certificate(names, "shard"), _certificate(names, "worker")] if settings.issuer else []),
        _service(names),
        _stateful_set(names),
        _disruption_budget(names),
        _network_policy(names),
        _worker_job(names, recovers=bool(checkpoints)),
    ]


def _sections(job: str) -> Object:
    """What a job file says, by section."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        # pure: libyaml, where it is installed, knows no colon in a plain text within braces, as in {1000: topk:0.01}
        found = YAML(typ="safe", pure=True).load(job)
    except YAMLError as error:
        raise BadDeployment(what="job", reason=f"it is no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict):
        raise BadDeployment(what="job", reason="it is no job file: YAML with sections, as `embershard init` writes it")
    return found


def _check_strategy(sections: Object) -> None:
    """BadDeployment where workers would need more than shards to find each other, or no shards at all."""
    strategy, dense = sections.get("strategy") or "ps", sections.get("dense")
    mode = (dense.get("mode") if isinstance(dense, dict) else None) or "ps"
    for what, found in (("strategy", strategy), ("dense.mode", mode)):
        if found != "ps":
            reason = "workers in pods find the shards but not each other: use strategy ps with dense.mode ps"
            raise BadDeployment(what=f"{what} {found}", reason=reason)


def _checkpoint_folder(sections: Object, deployment: Deployment) -> str:
    """checkpoint.folder of a job, empty where it has none. BadDeployment where pods need one, or cannot share it."""
    checkpoint = sections.get("checkpoint")
    folder = str(checkpoint.get("folder") or "") if isinstance(checkpoint, dict) else ""
    if folder and "://" not in folder:
        reason = "pods do not share a folder: name a URL, as in s3://bucket/ads"
        raise BadDeployment(what=f"checkpoint.folder {folder}", reason=reason)
    if deployment.durability == "memory" and not folder:
        reason = (
            "shards that lose their rows need a checkpoint: give the job a checkpoint.folder, or choose log or fsync"
        )
        raise BadDeployment(what="durability memory", reason=reason)
    return folder


class _Names:
    """What the objects of a deployment are called, and how they find each other."""

    def __init__(self, deployment: Deployment, settings: KubernetesSettings) -> None:
        self.deployment, self.settings = deployment, settings
        self.namespace, self.tls = settings.namespace, bool(settings.issuer)
        self.job = f"{deployment.name}-job"
        self.service = f"{deployment.name}-shards"
        self.shard = f"{deployment.name}-shard"
        self.worker = f"{deployment.name}-worker"

    @property
    def addresses(self) -> str:
        """Addresses of all shards, as --ps takes them."""
        last = self.deployment.shards - 1
        return f"{self.shard}-[0-{last}].{self.service}.{self.namespace}.svc:{PORT}"

    @property
    def server_name(self) -> str:
        """The DNS name that the shards' certificates cover, which workers check (--tls-server-name)."""
        return f"{self.service}.{self.namespace}.svc"

    def identity(self, role: str) -> str:
        """SPIFFE id of a role's certificate."""
        return f"spiffe://embershard/{self.namespace}/{self.deployment.name}/{role}"

    def labels(self, role: str = "") -> dict[str, str]:
        """Labels of the objects, or of a role's pods."""
        labels = {"app.kubernetes.io/name": "embershard", "app.kubernetes.io/instance": self.deployment.name}
        return {**labels, "app.kubernetes.io/component": role} if role else labels

    def object(self, version: str, kind: str, name: str, **rest: Any) -> Object:
        """An object of this deployment."""
        metadata = {"name": name, "namespace": self.namespace, "labels": self.labels()}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _config_map(names: _Names, job: str) -> Object:
    data = {"job.yaml": job}
    if names.tls:
        data["access.yaml"] = f"- name: worker\n  role: train\n  certificate: {names.identity('worker')}\n"
    return names.object("v1", "ConfigMap", names.job, data=data)


def _certificate(names: _Names, role: str) -> Object:
    spec: Object = {
        "secretName": f"{names.deployment.name}-{role}-tls",
        "issuerRef": {"name": names.settings.issuer, "kind": "Issuer"},
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "usages": ["digital signature", "server auth", "client auth"],
        "uris": [names.identity(role)],
    }
    if role == "shard":
        spec["dnsNames"] = [names.server_name, f"*.{names.server_name}"]
    return names.object("cert-manager.io/v1", "Certificate", f"{names.deployment.name}-{role}", spec=spec)


def _service(names: _Names) -> Object:
    ports = [{"name": "shard", "port": PORT}, {"name": "metrics", "port": METRICS_PORT}]
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # workers find a shard that recovers, and are told how far it is
        "selector": names.labels("shard"),
        "ports": ports,
    }
    return names.object("v1", "Service", names.service, spec=spec)


def _stateful_set(names: _Names) -> Object:
    deployment, settings = names.deployment, names.settings
    words = deployment.shard_words(shard="auto", listen=f"0.0.0.0:{PORT}")
    has_log = deployment.durability != "memory"
    words += ["--log-dir", _STATE] if has_log else []
    words += ["--metrics", f"0.0.0.0:{METRICS_PORT}", "--log-format", "json"]
    words += ["--tls", _KEYS, "--access", f"{_ACCESS}/access.yaml"] if names.tls else ["--insecure"]
    volumes = [_SCRATCH_VOLUME, *([_Volume("state", _STATE, None, read_only=False)] if has_log else [])]
    volumes += [_keys(names, "shard"), _configured(names, "access", _ACCESS)] if names.tls else []
    index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    container: Object = {
        "image": settings.image,
        "args": words,
        "env": [{"name": "EMBERSHARD_INDEX", "valueFrom": index}],
        "ports": [{"name": "shard", "containerPort": PORT}, {"name": "metrics", "containerPort": METRICS_PORT}],
        "resources": _resources(deployment.cpus, deployment.memory),
        "startupProbe": _probe("/livez", failureThreshold=6 * _READY_MINUTES, periodSeconds=10),
        "livenessProbe": _probe("/livez", failureThreshold=3, periodSeconds=10),
        "readinessProbe": _probe("/readyz", failureThreshold=1, periodSeconds=5),
    }
    rest: Object = {"terminationGracePeriodSeconds": 60}  # a shard finishes what it has accepted, within 30 s
    if settings.spread:
        apart = {"labelSelector": {"matchLabels": names.labels("shard")}, "topologyKey": "kubernetes.io/hostname"}
        rest["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    claim = {
        "metadata": {"name": "state"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": settings.storage}}},
    }
    spec = {
        "serviceName": names.service,
        "replicas": deployment.shards,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": names.labels("shard")},
        "template": _pod_template(names, "shard", container, volumes, **rest),
        **({"volumeClaimTemplates": [claim]} if has_log else {}),
    }
    return names.object("apps/v1", "StatefulSet", names.shard, spec=spec)


def _worker_job(names: _Names, *, recovers: bool) -> Object:
    deployment, settings = names.deployment, names.settings
    words = ["worker", f"{_JOB}/job.yaml", "--ps", names.addresses, "--output", f"{_SCRATCH}/run"]
    words += ["--world-size", str(deployment.workers), "--local-rank", "0", "--local-world-size", "1"]
    words += ["--metrics", f"0.0.0.0:{METRICS_PORT}", "--log-format", "json"]
    words += ["--recover", "--join-timeout", str(60 * _WORKERS_MINUTES)] if recovers else []
    words += ["--tls", _KEYS, "--tls-server-name", names.server_name] if names.tls else []
    volumes = [_configured(names, "job", _JOB), _SCRATCH_VOLUME, *([_keys(names, "worker")] if names.tls else [])]
    if settings.data_claim:
        words += ["--data", _DATA]
        claim = {"claimName": settings.data_claim, "readOnly": True}
        volumes.append(_Volume("data", _DATA, {"persistentVolumeClaim": claim}))
    container = {
        "image": settings.worker_image or settings.image,
        "args": words,
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "resources": _resources(deployment.worker_cpus, deployment.worker_memory),
    }
    lost = {"containerName": "worker", "operator": "In", "values": [LOST_EXIT_CODE]}
    own = {"containerName": "worker", "operator": "In", "values": [_FAILED_EXIT_CODE, 2, NO_PROGRESS_EXIT_CODE]}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": own},  # an error of the job itself: it would come again
        # with --recover the first worker counts those without progress
        {"action": "Ignore" if recovers else "Count", "onExitCodes": lost},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": deployment.workers,
        "parallelism": deployment.workers,
        "backoffLimitPerIndex": 10,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": rules},
        "template": _pod_template(names, "worker", container, volumes, restartPolicy="Never"),
    }
    return names.object("batch/v1", "Job", names.worker, spec=spec)


def _disruption_budget(names: _Names) -> Object:
    """One shard at a time may be moved, which comes back from its log; none that has none, as it would end the run."""
    most = 0 if names.deployment.durability == "memory" else 1
    spec = {"maxUnavailable": most, "selector": {"matchLabels": names.labels("shard")}}
    return names.object("policy/v1", "PodDisruptionBudget", names.shard, spec=spec)


def _network_policy(names: _Names) -> Object:
    """Workers alone reach the shards; whoever collects metrics reaches their page."""
    spec = {
        "podSelector": {"matchLabels": names.labels("shard")},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{"podSelector": {"matchLabels": names.labels("worker")}}],
                "ports": [{"port": PORT, "protocol": "TCP"}],
            },
            {"from": [{"namespaceSelector": {}}], "ports": [{"port": METRICS_PORT, "protocol": "TCP"}]},
        ],
    }
    return names.object("networking.k8s.io/v1", "NetworkPolicy", names.shard, spec=spec)


_CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


class _Volume(NamedTuple):
    """A volume and where the container sees it; one without a source is a claim of the StatefulSet."""

    name: str
    path: str
    source: Object | None
    read_only: bool = True

    @property
    def mount(self) -> Object:
        """The entry for `volumeMounts` of the container that sees the volume."""
        return {"name": self.name, "mountPath": self.path, **({"readOnly": True} if self.read_only else {})}


_SCRATCH_VOLUME = _Volume("scratch", _SCRATCH, {"emptyDir": {}}, read_only=False)


def _keys(names: _Names, role: str) -> _Volume:
    """The certificate of a role's pods."""
    secret = {"secretName": f"{names.deployment.name}-{role}-tls", "defaultMode": 0o440}
    return _Volume("keys", _KEYS, {"secret": secret})


def _configured(names: _Names, name: str, path: str) -> _Volume:
    """One file of the deployment's ConfigMap."""
    file = f"{name}.yaml"
    return _Volume(name, path, {"configMap": {"name": names.job, "items": [{"key": file, "path": file}]}})


def _pod_template(names: _Names, role: str, container: Object, volumes: list[_Volume], **rest: Any) -> Object:
    """The pods of a role: one container, which has no rights on its node and writes to its volumes alone."""
    account = names.settings.service_account
    mounts = [volume.mount for volume in volumes]
    spec = {
        **rest,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
            "fsGroup": USER,  # so that it may read its key, and write its log
        },
        "automountServiceAccountToken": False,
        **({"serviceAccountName": account} if account else {}),
        "containers": [{"name": role, **container, "securityContext": _CONTAINER_SECURITY, "volumeMounts": mounts}],
        "volumes": [{"name": volume.name, **volume.source} for volume in volumes if volume.source is not None],
    }
    return {"metadata": {"labels": names.labels(role)}, "spec": spec}


def _resources(cpus: int, memory: int) -> Object:
    amount = {"cpu": str(cpus), "memory": f"{memory}Mi"}
    return {"requests": amount, "limits": dict(amount)}


def _probe(path: str, **times: int) -> Object:
    return {"httpGet": {"path": path, "port": "metrics"}, "timeoutSeconds": 5, **times}
