"""The addresses of shards, as a person writes them: "host:port,host:port"; the scheme chooses the transport.

A range of whole numbers in brackets stands for as many addresses: "shard-[0-3].shards:7700", "10.0.0.1:[7700-7703]".
"file:DIR" stands for the shards that a folder announces (announcements.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

from embershard.proto.errors import BadAddress
from embershard.proto.security.client_token import ClientToken
from embershard.proto.security.tokens import TokenFile
from embershard.proto.transport.announcements import SCHEME, announced_addresses, folder_of, is_announced_shard
from embershard.proto.transport.emulated_link import EmulatedLink
from embershard.proto.transport.transport import Transport

if TYPE_CHECKING:
    from embershard.proto.security.tls import TLS
    from embershard.proto.transport.client_tls import ClientTLS

_FORM = (
    "write host:port, with a port of 1..65535, or unix:/path, or file:DIR for what --announce DIR wrote; tcp:// or "
    "grpc:// before host:port choose the transport"
)
_RANGE = re.compile(r"\[(\d+)-(\d+)\]", re.ASCII)
_MOST_SHARDS = 4096  # as `embershard ps --of` takes

_token = ClientToken()  # of this process


def use_token_file(path: Path | None, *, asked_for: bool = True) -> None:
    """Show the token in this file to the shards that this process connects to from here on; None: no longer.

    Unless it was `asked_for`, the user's own shards on this machine are shown theirs.
    """
    global _token
    _token = ClientToken(None if path is None else TokenFile(path), asked_for)


def parse_addresses(given: str | Sequence[str]) -> list[str]:
    """The addresses of a text with commas, or of a list, their ranges written out.

    BadAddress where there is none, or one that cannot be.
    """
    parts = given.split(",") if isinstance(given, str) else given
    addresses = [address for part in parts if part.strip() for address in _written_out(part.strip())]
    if not addresses:
        raise BadAddress(address=str(given), reason=f"name every shard; {_FORM}")
    for address in addresses:
        reason = "it is named twice; every shard has its own" if addresses.count(address) > 1 else _mistake(address)
        if reason:
            raise BadAddress(address=address, reason=reason)
    return addresses


def shard_addresses(given: str | Sequence[str], timeout: timedelta = timedelta(0)) -> list[str]:
    """The addresses of a text or a list, one for each shard, also where a folder announces them; waits for these.

    BadAddress; NotAnnounced where they are not all there by the timeout.
    """
    addresses = parse_addresses(given)
    folders = [address for address in addresses if address.startswith(SCHEME) and not is_announced_shard(address)]
    if folders and len(addresses) > 1:
        raise BadAddress(address=folders[0], reason="a folder announces all shards; name it alone")
    return announced_addresses(cast(Path, folder_of(folders[0])), timeout) if folders else addresses


def transport_for(
    address: str, link: EmulatedLink | None = None, tls: TLS | None = None, token: TokenFile | None = None
) -> Transport:
    """The transport that an address asks for: `stream`, unless its scheme says another.

    `token` is shown to the shard, by default that of the file that `use_token_file` named. BadAddress for another
    transport with an emulated `link`, which would not slow it down, and for one that cannot use `tls`; BadCertificate
    where the certificates of `tls` cannot be used.
    """
    shown = _token if token is None else ClientToken(token, asked_for=True)
    scheme = address.partition("://")[0].partition("+")[0]
    if link is not None and scheme in ("grpc", "rpc", "rpc-executes-pickles"):
        raise BadAddress(
            address=address, reason=f"a bandwidth is emulated in the stream transport, not in {scheme}: write host:port"
        )
    if folder_of(address) is not None and tls is not None and not tls.server_name:
        reason = "with TLS, name what the shards' certificates must say (--tls-server-name): their hosts are not known"
        raise BadAddress(address=address, reason=reason)
    if address.startswith(("grpc://", "grpc+")):
        from embershard.proto.transport.grpc import GrpcTransport  # half a second that the others need not wait

        bare = address.removeprefix("grpc://").removeprefix("grpc+")
        return GrpcTransport(bare, tls=_client_tls(address, tls), token=shown)
    if address.startswith(("rpc://", "rpc-executes-pickles://")):
        if tls is not None:
            raise BadAddress(address=address, reason="torch.distributed.rpc is not encrypted here: write host:port")
        from embershard.proto.transport.torch_rpc import RpcTransport

        return RpcTransport(address)
    from embershard.proto.transport.stream import StreamTransport

    return StreamTransport(address, link=link, tls=_client_tls(address, tls), token=shown)


def _client_tls(address: str, tls: TLS | None) -> ClientTLS | None:
    if tls is None or address.removeprefix("grpc+").startswith("unix:"):
        return None  # a Unix socket's peers are of this machine, and the system says who they are
    from embershard.proto.transport.client_tls import ClientTLS

    return ClientTLS(tls, address)


def _written_out(address: str) -> list[str]:
    """The addresses of one with a range; itself where it has none."""
    found = _RANGE.search(address)
    if found is None or folder_of(address) is not None:
        return [address]
    first, last = int(found[1]), int(found[2])
    before, after = address[: found.start()], address[found.end() :]
    if last < first or last - first >= _MOST_SHARDS or _RANGE.search(after):
        reason = f"it has one range, of at most {_MOST_SHARDS} numbers that ascend, as in shard-[0-3].shards:7700"
        raise BadAddress(address=address, reason=reason)
    width = len(found[1]) if found[1].startswith("0") else 0  # host-[00-15] as Slurm writes it
    return [f"{before}{number:0{width}}{after}" for number in range(first, last + 1)]


def _mistake(address: str) -> str:
    if (folder := folder_of(address)) is not None:
        return "" if folder.name else "write file:DIR, the folder of --announce DIR"
    bare = address.removeprefix("grpc+")
    if bare.startswith("unix:"):
        return "" if bare.removeprefix("unix:") else _FORM
    scheme, _, bare = address.rpartition("://")
    if scheme not in ("", "tcp", "grpc", "rpc", "rpc-executes-pickles"):
        return _FORM
    host, _, port = bare.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        return _FORM
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return "an IPv6 address stands in brackets, as in [::1]:7700"
    if "/" in host or any(c.isspace() for c in host) or ("[" in host and not host.startswith("[")):
        return _FORM
    return ""
