"""The addresses of shards, as a person writes them: "host:port,host:port"."""

from __future__ import annotations

from collections.abc import Sequence

from embershard.proto.errors import BadAddress

_FORM = "write host:port, with a port of 1..65535, or unix:/path"


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


def _mistake(address: str) -> str:
    if address.startswith("unix:"):
        return "" if address.removeprefix("unix:") else _FORM
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        return _FORM
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return "an IPv6 address stands in brackets, as in [::1]:7700"
    if "/" in host or any(c.isspace() for c in host):
        return _FORM
    return ""
