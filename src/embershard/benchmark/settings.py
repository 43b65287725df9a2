"""Settings of the benches, as data: the same settings give the same ids in every run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from embershard.proto.spec import MAX_DIM, OPTIMIZERS

Count = Annotated[int, Field(ge=1)]
MAX_ROWS = 1 << 31
Shards = Annotated[int, Field(ge=1, le=4096)]
Workers = Annotated[int, Field(ge=1, le=1024)]
Rows = Annotated[int, Field(ge=1, le=MAX_ROWS)]
Dim = Annotated[int, Field(ge=1, le=MAX_DIM)]
Ids = Annotated[int, Field(ge=1, le=1 << 24)]
Batch = Annotated[int, Field(ge=1, le=1 << 20)]
Seed = Annotated[int, Field(ge=0)]
Staleness = Annotated[int, Field(ge=0)]
POOL = 32  # batches; a run goes through them again and again
FIELDS, NUM_DENSE = 26, 13  # Criteo's


class TransportName(StrEnum):
    """Choose how requests reach the shards of a bench; `stream` is a Unix socket on one machine, `tcp` never is."""

    STREAM = "stream"
    TCP = "tcp"
    GRPC = "grpc"
    RPC = "rpc"
    LOCAL = "local"


class Setup(BaseModel):
    """Settings that every bench has: shards, workers, ids, and how often it measures."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    transport: TransportName = TransportName.STREAM
    ps: tuple[str, ...] = ()  # addresses of shards that run already; without them `shards` are started
    tls: str = ""  # folder of certificates of shards and workers; they use them over TCP
    shards: Shards = 2
    workers: Workers = 1
    rows: Rows = 1_000_000  # ids are 0..rows - 1
    skew: Annotated[float, Field(ge=0, le=10)] = 1.2  # p(rank) ~ rank ** -skew; 0: uniform
    dim: Dim = 16
    warmup: Annotated[int, Field(ge=0)] = POOL  # steps: every batch once, so that measured ones create no rows
    steps: Count = 50  # per round and worker
    rounds: Count = 3
    seed: Seed = 0

    @model_validator(mode="after")
    def _local_is_one_process(self) -> Self:
        if self.transport is TransportName.LOCAL and self.workers > 1:
            raise ValueError(
                f"with the local transport a worker has shards of its own: workers must be 1, not {self.workers}"
            )
        return self


class PullPush(Setup):
    """Pull the rows of some ids and push a gradient for each, again and again."""

    work: Literal["ps"] = "ps"
    ids: Ids = 65_536  # per step, duplicates included
    dim: Dim = 64
    optimizer: str = "adagrad"
    fill: bool = False  # every id has a row before it begins

    @model_validator(mode="after")
    def _known_optimizer(self) -> Self:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"there is no optimizer {self.optimizer!r} (known: {', '.join(OPTIMIZERS)})")
        return self


class Train(Setup):
    """Train DLRM on Criteo's shape (26 features, 13 dense) with every weight on the shards."""

    work: Literal["train"] = "train"
    rows: Annotated[int, Field(ge=FIELDS, le=MAX_ROWS)] = 2_600_000
    skew: Annotated[float, Field(ge=0, le=10)] = 1.15
    batch: Batch = 2048  # samples per step and worker
    prefetch: Staleness | None = 0  # its staleness; None: without
    steps: Count = 20
    beside_torch: bool = True  # the same model in one process, in the same run


class TorchTrain(Train):
    """The same training without shards: torch alone, in one process."""

    work: Literal["torch"] = "torch"  # type: ignore[assignment]


AnyWork = Annotated[PullPush | Train | TorchTrain, Field(discriminator="work")]


class Order(BaseModel):
    """The settings that one worker process gets at its start."""

    settings: AnyWork
    addresses: tuple[str, ...]
    rank: int


class Lap(BaseModel):
    """The times that one worker process reports of one round."""

    start: float  # time.monotonic(), which all processes of a machine share
    ends: list[float]  # of every step
    cpu: float  # seconds of the process, all threads
    parts: dict[str, list[float]]  # seconds, per step
    bytes: int  # sent and received
    rows: int  # unique ids of all steps
    split: dict[str, dict[str, tuple[float, float, float]]] = {}  # of all rounds until now; see proto/timing.py
