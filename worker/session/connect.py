"""Opens a session with shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from embershard.proto.codec.user_defined import CodecRegistry
from embershard.proto.messages import READ_ONLY_WORKER
from embershard.proto.security.tls import TLS
from embershard.proto.security.tokens import TokenFile
from embershard.proto.transport.emulated_link import UNLIMITED, parse_bandwidth
from embershard.worker.client.client import DEFAULT_TIMEOUT, Client
from embershard.worker.client.connections import RECOVERY_TIMEOUT
from embershard.worker.client.membership import Terms
from embershard.worker.compression.settings import Compression
from embershard.worker.session.session import Session


def connect(
    addresses: str | Sequence[str],
    *,
    worker: int = 0,
    timeout: timedelta = DEFAULT_TIMEOUT,
    recovery_timeout: timedelta = RECOVERY_TIMEOUT,
    workers: int = 1,
    elastic: bool = False,
    staleness: int | None = None,
    lease: timedelta = Terms.lease,
    staleness_aware_lr: bool = False,
    wait_timeout: timedelta = Terms.wait_timeout,
    run: int = 0,
    local_steps: int | None = None,
    bandwidth: str = UNLIMITED,
    compression: Compression | None = None,
    imports: Sequence[str] = (),
    tls: TLS | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> Session:
    """A session with the shards at `addresses` ("host:port,host:port" or a list), in any order, or at "file:DIR".

    Waits for shards that start later; every later call, too, ends by `timeout`. A shard that recovers its
    rows from its log is waited for up to `recovery_timeout`. BadAddress where an address cannot be one.

    With several `workers`, or a `staleness`, this one (`worker` is its number) joins the clock of the job on the terms
    that membership.Terms describes, the same for all workers; ModeMismatch where they differ, StaleRun where its `run`
    is. So it does where the job is `elastic`: it begins with `workers`, and others may join it later. With
    `local_steps` it trains on copies of its own and pushes what so many steps have changed (local_steps.py). A
    `bandwidth`, as "100mbit", emulates a slower link to the shards (bandwidth.py); ValueError where it is none.
    `compression` says how tables travel; `imports` names modules of codecs, BadModule or BadCodec where one fails.
    With `tls`, nothing is sent over TCP that is not encrypted; BadCertificate where its files cannot be used.

    `token_file` holds the token to show to the shards: its first line, readable by nobody else (BadToken). On this
    machine the user's own shards need none. NotAuthenticated where a shard does not know it, NotAllowed where its role
    does not suffice.
    """
    terms = Terms(
        workers=workers,
        staleness=staleness,
        lease=lease,
        staleness_aware_lr=staleness_aware_lr,
        wait_timeout=wait_timeout,
        run=run,
    )
    if local_steps is not None and (local_steps < 1 or staleness_aware_lr):
        raise ValueError(
            "staleness_aware_lr has no meaning with local_steps, which push no gradients"
            if staleness_aware_lr
            else f"local_steps must be at least 1, got {local_steps}"
        )
    bits, codecs = parse_bandwidth(bandwidth), CodecRegistry(imports)
    client = Client.connect(
        addresses,
        worker=worker,
        timeout=timeout,
        recovery_timeout=recovery_timeout,
        bandwidth=bits,
        tls=tls,
        token=None if token_file is None else TokenFile(Path(token_file)),
    )
    client.compressor.find = codecs.find
    try:
        if workers > 1 or elastic or staleness is not None or staleness_aware_lr:
            client.join(terms)
        session = Session(client, local_steps=local_steps, compression=compression)
        if client.membership is None and worker != READ_ONLY_WORKER:
            session.switching.begin()
        return session
    except BaseException:
        client.close()
        raise
