"""Announce a shard's address in a folder (proto/transport/announcements.py), unless another process has its place."""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

from embershard.proto.errors import (
    AnnouncedTwice,
    CannotAnnounce,
    CannotListen,
    EmbershardError,
    NotAnnounced,
    NotAShard,
    ShardRecovering,
)
from embershard.proto.messages import READ_ONLY_WORKER, Greeting, Hello
from embershard.proto.security.tls import TLS
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.announcements import Announcement, announcements
from embershard.proto.transport.transport import Unreachable

_PROBE = timedelta(seconds=2)
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/,\[\]]+)(?::(\d{1,5}))?", re.ASCII)

_log = logging.getLogger("embershard.ps")


def check_advertise(advertise: str, listen: str, host: str, *, announces: bool) -> None:
    """CannotListen where `advertise` is no host or host:port, or where others need one: `host` is what is listened to.

    A shard that listens to all addresses of its machine (0.0.0.0) has to say which of them others shall use.
    """
    if advertise and listen.startswith("unix:"):
        raise CannotListen(address=listen, reason="a Unix socket is for this machine alone: leave out --advertise")
    if advertise:
        found = _HOST_PORT.fullmatch(advertise)
        if found is None or (found[2] and not 1 <= int(found[2]) <= 65535):
            raise CannotListen(address=listen, reason=f"--advertise {advertise!r} is neither HOST nor HOST:PORT")
    elif announces and host and ipaddress.ip_address(host).is_unspecified:
        reason = "others cannot connect to it as it is: say with --advertise HOST where they find this machine"
        raise CannotListen(address=listen, reason=reason)


def advertised(advertise: str, bound: str) -> str:
    """The address to announce: `bound`, or what --advertise says, with the port of `bound` where it has none."""
    found = _HOST_PORT.fullmatch(advertise)
    if found is None:
        return bound
    return advertise if found[2] else f"{advertise}:{bound.rpartition(':')[2]}"


@contextmanager
def announced(folder: Path | None, greeting: Greeting, address: str, tls: TLS | None) -> Iterator[None]:
    """Have a shard's address in a folder as long as it serves; nothing where there is no folder.

    AnnouncedTwice where another process that serves has announced the same shard there, or another job a shard of its
    own. CannotAnnounce.
    """
    if folder is None:
        yield
        return
    mine = Announcement(address, greeting.instance, greeting.shard, greeting.num_shards, time.time())
    try:
        _check_place(folder, mine, tls)
    except NotAnnounced as error:
        raise CannotAnnounce(folder=str(folder), reason=str(error.fields["reason"])) from None
    mine.write(folder)
    _log.info("announced as %s in %s", address, folder)
    try:
        yield
    finally:
        mine.remove(folder)


def _check_place(folder: Path, mine: Announcement, tls: TLS | None) -> None:
    """AnnouncedTwice where a process that serves has the same place, or another number of shards."""
    for other in announcements(folder):
        if other.address == mine.address or (other.of == mine.of and other.shard != mine.shard):
            continue
        if reason := _serves(other, tls):
            where = f"{reason} at {other.address}"
            raise AnnouncedTwice(index=mine.shard, of=mine.of, folder=str(folder), reason=where)
        if other.of != mine.of:
            other.remove(folder)  # of a job that has ended: clients would take it for one of this job


def _serves(other: Announcement, tls: TLS | None) -> str:
    """Whether the process that announced itself still serves: who answers there; empty where it is gone."""
    try:
        with closing(transport_for(other.address, tls=tls)) as transport:
            reply = transport.submit(Hello(worker=READ_ONLY_WORKER), _PROBE).result()
    except (Unreachable, NotAShard):
        return ""
    except ShardRecovering:
        return f"shard {other.shard} of {other.of}, which recovers its rows, answers"
    except EmbershardError as error:
        return f"a shard that does not say who it is ({type(error).__name__}) answers"
    is_other = isinstance(reply, Greeting) and reply.instance == other.instance
    return f"shard {other.shard} of {other.of} (instance {other.instance}) serves" if is_other else ""
