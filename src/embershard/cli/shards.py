"""`--ps`: the shards of a command. The environment variable EMBERSHARD_PS stands in where it is not given."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer

from embershard.proto.errors import EmbershardError
from embershard.proto.messages import GetStatus
from embershard.proto.monitoring.exporter import loopback_host, show_address
from embershard.proto.transport.addresses import shard_addresses, transport_for
from embershard.proto.transport.transport import Unreachable

ENVIRONMENT = "EMBERSHARD_PS"
DEFAULT_PORT = 7700  # of the first shard of `embershard up`
_TIMEOUT = timedelta(seconds=2)


def shards_option(more: str = "") -> Any:
    """Return the option --ps, whose help goes on with `more`."""
    said = "host:port of every shard, separated by commas, or file:DIR, in which they announce their addresses."
    return typer.Option("--ps", metavar="ADDRESSES", envvar=ENVIRONMENT, help=f"{said} {more}".strip())


# of commands about running shards, and of those that can do without
RunningShards = Annotated[str | None, shards_option(" [default: the shards of `embershard up` on this machine]")]
NamedShards = Annotated[str | None, shards_option()]


class NoShards(EmbershardError):
    """A command needs shards, none are named, and `embershard up` does not run here."""

    template = (
        "no shards are named, and no `embershard up` serves at {address}; name them with --ps host:port,host:port, or "
        "in EMBERSHARD_PS"
    )


def find_shards(ps: str | None) -> list[str]:
    """Return the addresses of --ps; without it those of `embershard up` on this machine.

    BadAddress, NotAnnounced, NoShards.
    """
    addresses = shard_addresses(ps) if ps is not None else shards_of_up()
    if not addresses:
        raise NoShards(address=first_of_up())
    return addresses


def first_of_up() -> str:
    """Return the address of the first shard of `embershard up` with its default port."""
    return show_address(loopback_host(), DEFAULT_PORT)


def shards_of_up() -> list[str]:
    """Return the addresses of `embershard up` with its default port, as its first shard says; none if it is silent."""
    transport = transport_for(first_of_up())
    try:
        status = transport.submit(GetStatus(), _TIMEOUT).result()  # which a shard answers that recovers, too
        count = getattr(status, "num_shards", 0)
    except (Unreachable, EmbershardError):
        count = 0
    finally:
        transport.close()
    return [show_address(loopback_host(), DEFAULT_PORT + i) for i in range(count)]


def is_from_environment(context: typer.Context) -> bool:
    """Tell whether the command's --ps comes from EMBERSHARD_PS, which any option of the command line overrides."""
    source = context.get_parameter_source("ps")
    return source is not None and source.name == "ENVIRONMENT"
