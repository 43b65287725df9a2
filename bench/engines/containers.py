"""Containers on this machine by podman, with settings and a storage of their own: nothing of the system's own podman is
used. Root and Debian's podman, runc, CNI plugins and debootstrap are needed, and podman-compose from PyPI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("podman", "runc", "debootstrap", "dnsmasq")
PACKAGES = "podman runc containernetworking-plugins golang-github-containernetworking-plugin-dnsname debootstrap"
BASE = "localhost/python-base"
_SETTINGS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
log_driver = "k8s-file"

[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"

[network]
network_backend = "cni"
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "{folder}/run"
"""


def missing_tools() -> list[str]:
    """The programs that are needed and not installed."""
    return [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]


@dataclass
class Podman:
    """podman, with its files in a folder."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "containers.conf").write_text(_SETTINGS)
        (self.folder / "storage.conf").write_text(_STORAGE.format(folder=self.folder))

    @property
    def environment(self) -> dict[str, str]:
        """Of podman and podman-compose."""
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
        }

    def run(self, *words: str | Path, folder: Path | None = None, tool: str = "podman", seconds: float = 120) -> str:
        """What a command prints; SystemExit where it fails."""
        done = self.try_(*words, folder=folder, tool=tool, seconds=seconds)
        if done.returncode:
            raise SystemExit(f"{tool} {' '.join(map(str, words))}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
        return done.stdout

    def try_(
        self, *words: str | Path, folder: Path | None = None, tool: str = "podman", seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """A command, and what came of it."""
        command, environment = [tool, *map(str, words)], self.environment
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )

    def has_image(self, name: str) -> bool:
        """Whether it was built before."""
        return self.try_("image", "exists", name).returncode == 0

    def make_base(self) -> None:
        """An image of this machine's Debian with Python and venv, and nothing else."""
        root = self.folder / "base"
        shutil.rmtree(root, ignore_errors=True)
        uris = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages"],
            capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        include = "--include=python3,python3-venv,ca-certificates"
        self.run("--variant=minbase", include, uris[1], root, uris[0], tool="debootstrap", seconds=600)
        archive = self.folder / "base.tar"
        subprocess.run(["tar", "--create", f"--file={archive}", f"--directory={root}", "."], check=True)
        self.run("import", archive, BASE, seconds=300)
        archive.unlink()
        shutil.rmtree(root)

    def build(self, target: str, tag: str, wheels: Path) -> None:
        """An image of deploy/image/Containerfile, from wheels that are in a folder."""
        words = ["build", "--file", "deploy/image/Containerfile", "--target", target, "--tag", tag]
        words += ["--build-arg", f"BASE={BASE}", "--build-arg", "PIP_OPTIONS=--no-index --find-links /wheels"]
        words += ["--volume", f"{wheels}:/wheels:ro", "--layers", "--network", "none", "."]
        self.run(*words, folder=ROOT, seconds=1800)

    def megabytes(self, image: str) -> float:
        """Size of an image."""
        return int(self.run("image", "inspect", "--format", "{{.Size}}", image)) / 1e6

    def mount_point(self, volume: str) -> Path:
        """Where this machine sees a volume."""
        return Path(self.run("volume", "inspect", "--format", "{{.Mountpoint}}", volume).strip())

    def containers(self, project: str) -> dict[str, dict[str, object]]:
        """Those of a compose project, by service: State, ExitCode, Pid and others."""
        found = json.loads(self.run("ps", "--all", "--format", "json", "--filter", f"label={_PROJECT}={project}"))
        return {one["Labels"]["com.docker.compose.service"]: one for one in found}

    def process_of(self, container: dict[str, object]) -> psutil.Process | None:
        """The first process of a container, as this machine sees it; None where it does not run."""
        try:
            return psutil.Process(int(str(container["Pid"]))) if container["State"] == "running" else None
        except psutil.Error:
            return None


_PROJECT = "io.podman.compose.project"
