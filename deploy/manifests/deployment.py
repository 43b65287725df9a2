"""Describe the shards and workers of a job once, for the manifests of every engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from embershard.proto.errors import EmbershardError, Status
from embershard.proto.messages import READ_ONLY_WORKER

PORT = 7700  # of a shard, or of the first one on a machine
METRICS_PORT = 7790
USER = 10001  # of the image
Durability = Literal["memory", "log", "fsync"]
_MOST_MIB = 2**30  # a PiB: engines count bytes in 64 bits
_MOST_CPUS = 4096
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # a label of DNS, with room for what is put behind it


class BadDeployment(EmbershardError):
    """Shards and workers that an engine cannot start as they are described."""

    status = Status.INVALID_ARGUMENT
    template = "{what}: {reason}"


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The shards and workers of one job. BadDeployment where no engine could start them.

    `memory` is what each shard's process may take, in MiB, and `worker_memory` what each worker's may. `snapshots` are
    the folders and URLs at or below which checkpoints may lie, which all shards and workers see.
    """

    name: str
    shards: int
    workers: int = 0
    memory: int = 4096
    cpus: int = 2  # of each shard
    worker_cpus: int = 2
    worker_memory: int = 4096
    durability: Durability = "log"
    snapshots: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            reason = "a name has at most 40 of a-z, 0-9 and -, and begins with a letter"
            raise BadDeployment(what=f"name {self.name!r}", reason=reason)
        for url in self.snapshots:
            if not url or any(ord(c) < 32 for c in url):
                raise BadDeployment(what=f"snapshots {url!r}", reason="it is no folder or URL")
            if "://" not in url and not url.startswith("/"):
                reason = "the shards run in another folder: name the whole path, as /mnt/snapshots, or a URL"
                raise BadDeployment(what=f"snapshots {url!r}", reason=reason)
        for what, number, least, most in (
            ("shards", self.shards, 1, 4096),
            ("workers", self.workers, 0, READ_ONLY_WORKER),
            ("memory", self.memory, 256, _MOST_MIB),
            ("worker_memory", self.worker_memory, 256, _MOST_MIB),
            ("cpus", self.cpus, 1, _MOST_CPUS),
            ("worker_cpus", self.worker_cpus, 1, _MOST_CPUS),
        ):
            if not least <= number <= most:
                raise BadDeployment(what=f"{what} {number}", reason=f"it is {least} to {most}")

    @property
    def memory_of_tables(self) -> int:
        """MiB that a shard's tables may take: the rest of its memory is for requests, copies and the process itself."""
        return self.memory * 5 // 6

    def shard_words(self, *, shard: str, listen: str) -> list[str]:
        """The words of `embershard ps` that are the same on every engine."""
        words = ["ps", "--shard", shard, "--of", str(self.shards), "--listen", listen]
        words += ["--memory", f"{self.memory_of_tables}MiB", "--durability", self.durability]
        for url in self.snapshots:
            words += ["--snapshots", url]
        return words


def check_image(*images: str) -> None:
    """BadDeployment where one cannot be the name of an image."""
    for image in images:
        if not (image and image.isascii() and image.isprintable()) or " " in image:
            raise BadDeployment(what=f"image {image!r}", reason="name an image, as registry/embershard:1")
