"""The addresses of shards, as a person writes them: "host:port,host:port"; the scheme chooses the transport."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from embershard.proto.errors import BadAddress
from embershard.proto.security.client_token import ClientToken
from embershard.proto.security.tokens import TokenFile
from embershard.proto.transport.emulated_link import EmulatedLink
from embershard.proto.transport.transport import Transport

if TYPE_CHECKING:
    from embershard.proto.security.tls import TLS
    from embershard.proto.transport.client_tls import ClientTLS

_FORM = "write host:port, with a port of 1..65535, or unix:/path; tcp:// or grpc:// before it choose the transport"

_token = ClientToken()  # of this process


def use_token_file(path: Path | None, *, asked_for: bool = True) -> None:
    """Show the token in this file to the shards that this process connects to from here on; None: no longer.

    Unless it was `asked_for`, the user's own shards on this machine are shown theirs.
    """
    global _token
    _token = ClientToken(None if path is None else TokenFile(path), asked_for)


def parse_addresses(given: str | Sequence[str]) -> list[str]:
    """The addresses of a text with commas, or of a list. BadAddress where there is none, or one that cannot be."""
    parts = given.split(",") if isinstance(given, str) else given
    addresses = [part.strip() for part in parts if part.strip()]
    if not addresses:
        raise BadAddress(address=str(given), reason=f"name every shard; {_FORM}")
    for address in addresses:
        reason = "it is named twice; every shard has its own" if addresses.count(address) > 1 else _mistake(address)
        if reason:
            raise BadAddress(address=address, reason=reason)
    return addresses


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


def _mistake(address: str) -> str:
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
    if "/" in host or any(c.isspace() for c in host):
        return _FORM
    return ""
