"""A map of msgpack in an envelope with its format, version and sha256; and a map of JSON with its sha256.

So a reader knows damage, other people's files and newer versions before it looks inside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import msgpack

from embershard.proto.errors import EmbershardError

T = TypeVar("T")

_SEAL = b',\n "sha256": "%s"\n}'


def seal_json(text: bytes) -> bytes:
    """An object of JSON, indented by 1, with `sha256` as its last field: that of all bytes before it."""
    head = text.removesuffix(b"\n}")
    return head + _SEAL % hashlib.sha256(head).hexdigest().encode()


def check_json(data: bytes, values: Mapping[str, object]) -> None:
    """ValueError where a file, in which `values` are, is not as it was written; one without `sha256` is older."""
    if "sha256" in values and data != seal_json(data[: -len(_SEAL % bytes(64))] + b"\n}"):
        raise ValueError("its sha256 is not that of its other values")


@dataclass(frozen=True, slots=True)
class SealedFormat:
    """A kind of sealed files. `damaged` makes the error of a file by its name and a reason."""

    name: str
    version: int
    damaged: Callable[[str, str], EmbershardError]
    too_new: type[EmbershardError]  # its fields are path, got and want

    def seal(self, plain: object, version: int = 0) -> bytes:
        """The bytes of a file, of the newest version or an older one that has all of `plain`.

        TypeError, ValueError or OverflowError where `plain` is nothing for msgpack.
        """
        body = msgpack.packb(plain, strict_types=False)
        sha256 = hashlib.sha256(body).digest()
        envelope = {"format": self.name, "version": version or self.version, "sha256": sha256, "body": body}
        return cast(bytes, msgpack.packb(envelope))

    def unseal(self, data: bytes, where: str) -> Fields:
        """The map in a file that is named `where`."""
        envelope = self._fields(data, where)
        if envelope.get("format", str) != self.name:
            raise envelope.wrong("format", f"it says {envelope.get('format', str)[:50]!r}")
        version = envelope.get("version", int)
        if version < 1:
            raise envelope.wrong("version", "they begin at 1")
        if version > self.version:
            raise self.too_new(path=where, got=version, want=self.version)
        body = envelope.get("body", bytes)
        if hashlib.sha256(body).digest() != envelope.get("sha256", bytes):
            raise envelope.wrong("sha256", "it is not that of the body")
        return self._fields(body, where)

    def _fields(self, data: bytes, where: str) -> Fields:
        def damaged(reason: str) -> EmbershardError:
            return self.damaged(where, reason)

        try:
            # msgpack checks lengths against the data: it takes no memory that a small file only announces
            return Fields(msgpack.unpackb(data, strict_map_key=False), damaged)
        except EmbershardError:
            raise
        except Exception as error:  # msgpack's own, and what its parts raise: ValueError, UnicodeDecodeError, ...
            raise damaged(f"no msgpack: {type(error).__name__} {error}".rstrip(".")) from None


class Fields:
    """A map of a sealed file, read field by field; what is not as it must be is an error that names it."""

    def __init__(self, plain: object, damaged: Callable[[str], EmbershardError]) -> None:
        self._damaged = damaged
        if not isinstance(plain, dict):
            raise damaged(f"a map was expected, not {type(plain).__name__}")
        self._plain = plain

    def __contains__(self, name: str) -> bool:
        return name in self._plain

    def get(self, name: str, kind: type[T]) -> T:
        """The value of a field of this type; no number is negative."""
        value = self._plain.get(name)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        other = isinstance(value, bool) and kind is not bool  # to Python it is an int
        if not isinstance(value, kind) or other or (is_number and cast(int, value) < 0):
            raise self.wrong(name, f"{kind.__name__} was expected, not {type(value).__name__}")
        return value

    def lists(self, name: str) -> list[list[object]]:
        """The value of a field that is a list of lists."""
        value = self.get(name, list)
        if not all(isinstance(one, list) for one in value):
            raise self.wrong(name, "a list of lists was expected")
        return value

    def map(self, name: str) -> Fields:
        """The value of a field that is a map."""
        return Fields(self.get(name, dict), self._damaged)

    def maps(self, name: str) -> list[Fields]:
        """The value of a field that is a list of maps."""
        return [Fields(value, self._damaged) for value in self.get(name, list)]

    def wrong(self, name: str, reason: str) -> EmbershardError:
        """The error about a field."""
        return self._damaged(f"field {name!r}: {reason}")
