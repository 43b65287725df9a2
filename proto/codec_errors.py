"""The errors of codecs: one that is not here, one that does not work, bytes that no codec wrote."""

from __future__ import annotations

from embershard.proto.errors import EmbershardError, InvalidRequest, Status


class UnknownCodec(EmbershardError):
    """A values codec that this process was not started with."""

    status = Status.NOT_FOUND
    template = (
        "no codec {codec!r} here (known: {known}); a user-defined one needs `--import MODULE` on every shard and worker"
    )


class BadCodec(EmbershardError):
    """A user-defined codec, or its module, that does not load, raises, or gives what it should not."""

    status = Status.INVALID_ARGUMENT
    template = "codec {codec!r}: {reason}"


class DamagedPayload(InvalidRequest):
    """Bytes that its codec cannot have written; nothing of the message is applied."""

    template = "a payload of codec {codec!r}: {reason}; both sides need the same version of embershard"


def check_size(codec: str, got: int, shape: tuple[int, ...], want: int) -> None:
    """DamagedPayload unless a payload of (rows, dim) floats has the bytes that its codec writes."""
    if got != want:
        raise DamagedPayload(codec=codec, reason=f"{got} bytes, where {shape[0]} rows of dim {shape[1]} take {want}")
