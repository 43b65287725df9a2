"""Find shards by a folder: each shard announces its address there, and clients look again whenever they connect.

The folder `DIR` of `--announce DIR` is that of `--ps file:DIR`. It is for clusters whose addresses nobody knows before
a job starts, and where a shard that is started again may be on another machine. In it `shard-2.json` holds

    {"address": "10.0.0.7:41234", "instance": "6f3a...", "shard": 2, "of": 4, "started": 1767225600.0}

Whoever may write to the folder decides where clients connect.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from embershard.proto.errors import CannotAnnounce, NotAnnounced
from embershard.proto.transport.transport import Unreachable

SCHEME = "file:"
_MOST_SHARDS = 4096  # as `embershard ps --of` takes
# nothing else: whoever may write to the folder must not choose a transport, such as one that executes pickles
_ADDRESS = re.compile(r"unix:/[ -~]+|(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})", re.ASCII)
_PLACE = re.compile(r"#\d{1,5}$", re.ASCII)
_NAME = re.compile(r"shard-(\d{1,5})\.json", re.ASCII)
_MOST_BYTES = 4096  # of an announcement
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between looks for shards that start
_SILENT_SECONDS = 3.0  # waiting for longer than this is logged, once

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Tell the address and the process of a shard."""

    address: str  # as host:port or unix:/path
    instance: str
    shard: int
    of: int
    started: float  # in seconds since 1970

    @classmethod
    def read(cls, folder: Path, shard: int) -> Announcement | None:
        """Return the announcement of a shard; None where there is none. NotAnnounced where it cannot be read."""
        path = _path(folder, shard)
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(_MOST_BYTES))
            one = cls(
                address=str(found["address"]),
                instance=str(found["instance"]),
                shard=int(found["shard"]),
                of=int(found["of"]),
                started=float(found["started"]),
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NotAnnounced(folder=str(folder), reason=f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise NotAnnounced(folder=str(folder), reason=f"{path} is no announcement of a shard: remove it") from None
        if one.shard != shard or not one.shard < one.of <= _MOST_SHARDS or not _is_address(one.address):
            raise NotAnnounced(folder=str(folder), reason=f"{path} is no announcement of shard {shard}")
        return one

    def write(self, folder: Path) -> None:
        """Put it in place of the one before, whole and on the disk. CannotAnnounce."""
        path = _path(folder, self.shard)
        new = path.with_name(f"{path.name}.{self.instance}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with new.open("w") as file:
                json.dump(asdict(self), file)
                file.flush()
                os.fsync(file.fileno())
            new.rename(path)
        except OSError as error:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise CannotAnnounce(folder=str(folder), reason=error.strerror or str(error)) from None

    def remove(self, folder: Path) -> None:
        """Take it away, unless another process has announced itself since."""
        with suppress(OSError, NotAnnounced):
            if self.read(folder, self.shard) == self:
                _path(folder, self.shard).unlink(missing_ok=True)


def folder_of(address: str) -> Path | None:
    """The folder of "file:DIR"; None for another address."""
    if not address.startswith(SCHEME):
        return None
    return Path(_PLACE.sub("", address.removeprefix(SCHEME)))


def is_announced_shard(address: str) -> bool:
    """Whether this is "file:DIR#2", one shard of a folder, and not all of them."""
    return address.startswith(SCHEME) and _PLACE.search(address) is not None


def announced_addresses(folder: Path, timeout: timedelta = timedelta(0)) -> list[str]:
    """The addresses of all shards that a folder announces, as file:DIR#0, file:DIR#1 and so on.

    Waits until all are there. NotAnnounced where they are not by the timeout.
    """
    end, pause = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE
    logged_at = time.monotonic() + _SILENT_SECONDS
    while True:
        try:
            of = _number_of_shards(folder)
        except NotAnnounced as error:
            if time.monotonic() + pause > end:
                raise
            if time.monotonic() >= logged_at:
                logged_at = math.inf
                _log.warning("waiting for shards: %s", error)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            return [f"{SCHEME}{folder}#{shard}" for shard in range(of)]


def current_address(address: str) -> str:
    """The host:port, or unix:/path, at which a shard is now; Unreachable where its folder does not say it."""
    folder = folder_of(address)
    if folder is None:
        return address
    shard = int(address.rpartition("#")[2])
    try:
        found = Announcement.read(folder, shard)
    except NotAnnounced as error:
        raise Unreachable(str(error)) from None
    if found is None:
        raise Unreachable(f"shard {shard} is not announced in {folder}")
    return found.address


def announcements(folder: Path) -> list[Announcement]:
    """All that a folder holds, by shard; none where there is no folder. NotAnnounced where one cannot be read."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NotAnnounced(folder=str(folder), reason=error.strerror or str(error)) from None
    shards = sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))
    return [one for shard in shards if (one := Announcement.read(folder, shard)) is not None]


def _number_of_shards(folder: Path) -> int:
    """The number of shards that all announcements agree on, which are all there."""
    found = announcements(folder)
    if not found:
        raise NotAnnounced(folder=str(folder), reason="no shard is announced there")
    counts = sorted({one.of for one in found})
    if len(counts) > 1:
        reason = f"shards of two jobs are announced there, of {' and of '.join(map(str, counts))} shards"
        raise NotAnnounced(folder=str(folder), reason=reason)
    missing = sorted(set(range(counts[0])) - {one.shard for one in found})
    if missing:
        reason = f"it has {len(found)} of {counts[0]} shards; missing: {', '.join(map(str, missing[:10]))}"
        raise NotAnnounced(folder=str(folder), reason=reason)
    return counts[0]


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and (found[2] is None or 1 <= int(found[2]) <= 65535)


def _path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard}.json"
