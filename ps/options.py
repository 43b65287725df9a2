"""The options that one shard's process is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from embershard.proto.monitoring.logs import LogFormat
from embershard.proto.security.tls import TLS

Durability = Literal["memory", "log", "fsync"]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options that one shard's process is started with.

    `listen` is "host:port" (port 0: any free one), or "unix:/path". `imports` are modules with row optimizers
    and codecs. `memory` bytes are what the tables may take, by default 80 % of the container's or else of the
    machine's. More than `connections` at a time are refused. `parent_pid`, if not 0, is the process without which this
    one ends. `rpc` is "host:port" for torch.distributed.rpc, which is not served without it; `rpc_executes_pickles`
    allows it to be an address that other machines reach. `durability` says when a change is acknowledged: "memory" at
    once; "log" once the kernel has its record in `log_dir`, "fsync" once the disk has. By default it is "log" with a
    `log_dir`, else "memory". `log_bytes` is what the shard's folder there may take, where that is enough for two images
    of its state and a few segments.
    `restarts` is how often its supervisor has started it again, for its status. `metrics` is "host:port" for /metrics
    and the probes; port 0: any free one. `log_format` is that of its log, on stderr. `trace` is the URL
    of the OpenTelemetry collector that gets the spans of traced requests.
    With `tls`, whoever comes over TCP has to have a certificate of an authority that its folder names.
    `snapshots` are the folders and URLs at or below which snapshots may lie; without one they may lie nowhere, or,
    where no other machine reaches the shard, anywhere. `access` is the file that says who may do what. On loopback the
    shard's own user needs no line in it, but for other users of the machine only `insecure_loopback` opens it. In the
    folder `audit` it keeps a log of who came, and what they did. In the folder `announce` it tells clients its address,
    which is the one that it listens to, or `advertise`, as HOST or HOST:PORT.
    """

    shard: int
    of: int
    listen: str = "127.0.0.1:7700"
    imports: tuple[str, ...] = ()
    insecure: bool = False
    queue_bytes: int = 256 * 2**20
    memory: int | None = None
    connections: int = 10_000
    parent_pid: int = 0
    rpc: str = ""
    rpc_executes_pickles: bool = False
    durability: Durability | None = None
    log_dir: Path | None = None
    log_bytes: int | None = None
    restarts: int = 0
    metrics: str = ""
    log_format: LogFormat = "text"
    trace: str = ""
    tls: TLS | None = None
    snapshots: tuple[str, ...] = ()
    access: Path | None = None
    insecure_loopback: bool = False
    audit: Path | None = None
    announce: Path | None = None
    advertise: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.of:
            raise ValueError(f"shard must be 0..of-1, got shard {self.shard} of {self.of}")
        if self.connections < 1:
            raise ValueError(f"connections must be at least 1, got {self.connections}")
        if self.queue_bytes < 1:
            raise ValueError(f"queue_bytes must be at least 1, got {self.queue_bytes}")
        check_durability(self.durability, self.log_dir)


def check_durability(durability: Durability | None, log_dir: Path | None) -> Durability:
    """The mode of a shard; ValueError where it has no folder for its log, or one that it would not use."""
    mode = durability or ("memory" if log_dir is None else "log")
    if mode != "memory" and log_dir is None:
        raise ValueError(f"durability {mode} needs a folder for the log: log_dir")
    if mode == "memory" and log_dir is not None:
        raise ValueError("durability memory writes no log: leave out log_dir, or choose log or fsync")
    return mode
