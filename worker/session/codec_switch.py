"""Changes how the tables of a session travel while it trains: by hand, by a job's schedule, or as the shards were told.

`embershard compression set` tells the shards; the revision of what they were told comes with every reply.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from embershard.proto.codec.name import CodecName
from embershard.proto.errors import InvalidRequest, UnknownCodec
from embershard.proto.messages import Compress, Compressed
from embershard.worker.client.client import Client
from embershard.worker.compression.settings import Directions

_log = logging.getLogger(__name__)


class Switching:
    """`settle` waits until no push is in flight: what is sent by one codec is acknowledged before another is used.

    `say` is given the lines of the log, for people who do not read it.
    """

    def __init__(self, client: Client, settle: Callable[[], None]) -> None:
        self._client = client
        self.settle = settle
        self.say: Callable[[str], object] = lambda line: None
        self.revision = 0  # of the shards' settings, as far as they were followed

    def begin(self) -> None:
        """Have the shards forget what they were told for an earlier job; a member's first join has them do so."""
        told = settings_of(self._client)
        if told.tables:
            with suppress(InvalidRequest):  # somebody told them anew just now
                self._client.ask_all(Compress(revision=told.revision + 1))

    def switch(self, wanted: Mapping[str, Directions]) -> None:
        """Have tables travel so from the next push and pull on, and tell the shards.

        ValueError, or UnknownCodec of this process or a shard, where one of them cannot; nothing has changed then.
        """
        compressor, now = self._client.compressor, self._client.compressor.directions()
        changed = {name: directions for name, directions in wanted.items() if directions != now[name]}
        if not changed:
            return
        for name, directions in changed.items():
            compressor.check(name, *directions)
            for codec in directions:
                compressor.find(codec.values)
        for name, directions in changed.items():
            spec = dataclasses.replace(self._client.spec(name), push_codec=directions.push, pull_codec=directions.pull)
            self._client.declare(spec, dense=compressor.is_dense(name))
        self.settle()
        compressor.switched |= changed.keys() & {part.table for part in self._client.stats.volume}
        for name, directions in changed.items():
            compressor.choose(name, *directions)

    def follow(self, clock: int) -> None:
        """Before a step: switch as the shards were told since the last one, and say so in the log.

        A table that this session cannot have travel so stays as it is.
        """
        self.revision = self._client.connections.settings_revision
        now = self._client.compressor.directions()
        for said in settings_of(self._client).tables:
            before = now.get(said.table)
            if before is None:  # a table of others
                continue
            try:
                wanted = Directions(
                    CodecName.parse(said.push) if said.push else before.push,
                    CodecName.parse(said.pull) if said.pull else before.pull,
                )
                self.switch({said.table: wanted})
            except (ValueError, UnknownCodec) as error:
                self._tell(f"step {clock}: table {said.table} keeps its codecs: {error}")
                continue
            if wanted != before:
                how = f"push={wanted.push} pull={wanted.pull}"
                self._tell(f"step {clock}: table {said.table} uses {how}, as set on the shards")

    def _tell(self, line: str) -> None:
        _log.warning("%s", line)
        self.say(line)


def settings_of(client: Client) -> Compressed:
    """Return the codecs that were set last on the shards: the newest, where some shards have older ones."""
    replies = [reply for reply in client.ask_all(Compress()) if isinstance(reply, Compressed)]
    return max(replies, key=lambda reply: reply.revision)
