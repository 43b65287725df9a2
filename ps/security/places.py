"""Where a shard reads and writes snapshots: below which folders and URLs, and by which protocols."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from embershard.proto.errors import PlaceNotAllowed

if TYPE_CHECKING:
    from embershard.proto.snapshot.storage import Storage

# Never those that let a peer have this process call a server of its choice: http, ftp, sftp, ssh, github, ...
REMOTE_PROTOCOLS = ("s3", "gs", "abfs")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_ODD = re.compile(r"[\x00-\x1f\x7f\\]")
_ODD_IN_KEYS = re.compile(r"[%?#*\[\]]")  # escapes, queries and patterns, which a storage's package may act on


class SnapshotPlaces:
    """The roots at or below which snapshots may lie. None: anywhere that a known protocol reaches; (): nowhere.

    A root is a folder, or a URL of one of REMOTE_PROTOCOLS; PlaceNotAllowed where it cannot be one.
    """

    def __init__(self, roots: Sequence[str] | None = None) -> None:
        self.roots = None if roots is None else tuple(map(_parse, roots))

    def check(self, url: str) -> None:
        """PlaceNotAllowed where a request names a place that it may not, as far as that needs no file system."""
        if url:  # a restore of nothing has none
            self._check(url)

    def _check(self, url: str) -> tuple[str, PurePosixPath]:
        scheme, path = place = _parse(url)
        if self.roots is not None:
            if not self.roots:
                raise PlaceNotAllowed(
                    url=url,
                    why="this shard was started without a place for them; start it with --snapshots FOLDER_OR_URL",
                )
            same = [root for kind, root in self.roots if kind == scheme]
            # those of folders may be links: see open
            if not (any(path.is_relative_to(root) for root in same) if scheme else same):
                raise self._outside(url)
        return place

    def open(self, url: str, name: str = "") -> Storage:
        """The storage of a place, whose folder may have links; it may take as long as the file system does.

        PlaceNotAllowed where the place itself, or the folder `name` in it, leads elsewhere.
        """
        from embershard.proto.snapshot.storage import Storage  # fsspec takes a while

        scheme, path = self._check(url)
        if scheme:
            return Storage(url)
        real = os.path.realpath(path)
        if self.roots is not None:
            roots = [os.path.realpath(root) for kind, root in self.roots if not kind]
            for inner in (real, os.path.realpath(os.path.join(real, name))):
                if not any(PurePosixPath(inner).is_relative_to(root) for root in roots):
                    raise self._outside(url)
        return Storage(real)

    def _outside(self, url: str) -> PlaceNotAllowed:
        roots = ", ".join(f"{kind}://{root}" if kind else str(root) for kind, root in self.roots or ())
        return PlaceNotAllowed(url=url, why=f"this shard keeps them below {roots} alone (--snapshots)")


class AnyPlace(SnapshotPlaces):
    """Every place that fsspec reaches: of a shard in the process of who asks it."""

    def check(self, url: str) -> None:
        """Accept every URL: the client is this process, and could write there itself."""

    def open(self, url: str, name: str = "") -> Storage:
        """The storage of a place."""
        from embershard.proto.snapshot.storage import Storage

        return Storage(url)


def _parse(url: str) -> tuple[str, PurePosixPath]:
    """Protocol and path of a place; the protocol of a folder is empty. PlaceNotAllowed where it cannot be one."""
    if _ODD.search(url) or "::" in url:
        raise PlaceNotAllowed(url=url, why="it has control characters, backslashes or '::'; name one folder or URL")
    found = _SCHEME.match(url)
    scheme, rest = (found[1], url[found.end() :]) if found else ("", url)
    if scheme == "file":
        scheme, rest = "", rest[2:] if rest.startswith("//") else rest
    if not scheme:
        if not rest.startswith("/"):
            raise PlaceNotAllowed(url=url, why="a folder is named by its whole path, from / on")
        return "", PurePosixPath(rest)
    if scheme not in REMOTE_PROTOCOLS or not rest.startswith("//"):
        known = ", ".join(f"{name}://" for name in REMOTE_PROTOCOLS)
        raise PlaceNotAllowed(url=url, why=f"a shard reads and writes folders, {known}, and nothing else")
    parts = rest[2:].split("/")
    if not parts[0] or {".", ".."} & set(parts) or _ODD_IN_KEYS.search(rest):
        raise PlaceNotAllowed(url=url, why="it has no bucket, or '.', '..' or one of %?#*[] in it")
    return scheme, PurePosixPath(rest[2:])
