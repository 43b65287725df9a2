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
    """Connect to the shards at `addresses` ("host:port,host:port" or a list), in any order, or at "file:DIR".

    Returns a Session. Waits up to `timeout` until all shards answer; every later call ends by `timeout` too. A call
    to a shard that recovers its rows from its event log, or has no room to write it, waits up to `recovery_timeout`.
    BadAddress for a malformed address.

    With several `workers`, or a `staleness`, this worker (number `worker`) joins the clock of the job. Give all workers
    the same values of these arguments (membership.Terms describes them); ModeMismatch if `staleness`,
    `staleness_aware_lr` or, at the start, `workers` differ; StaleRun if workers with a higher `run` (the run number, a
    fencing token) have joined. An `elastic` job begins with `workers`, and others may join later. With `local_steps`
    the worker trains that number of steps on its own copies of the rows, and then pushes the change. `bandwidth`, such
    as "100mbit", emulates a slower link to the shards; ValueError if it is malformed. `compression` sets the codecs of
    tables; `imports` names modules of user-defined codecs, BadModule or BadCodec if one fails. With `tls`, nothing is
    sent unencrypted over TCP; BadCertificate if its files cannot be used.

    `token_file` names a file with the token for the shards in its first line; other users must not be able to read
    it (BadToken). Your own shards on this machine need no token. NotAuthenticated if a shard does not know the
    token, NotAllowed if its role is not sufficient.
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
