"""Keep the codecs of a shard's tables as they were set; workers read them and switch (worker/compression)."""

from __future__ import annotations

from collections.abc import Callable

from embershard.proto.codec.name import CodecName
from embershard.proto.errors import InvalidRequest
from embershard.proto.messages import Compress, Compressed, TableCodecs
from embershard.ps.coordination.clock import Plain
from embershard.ps.coordination.outcome import Outcome
from embershard.ps.table.tables import Tables

MAX_AHEAD = 2**32  # of a revision; one near 2^64 would leave none for whoever comes next


class CompressionSettings:
    """The codecs that were asked for by table, until the job ends, and their revision, which only grows.

    `check` raises UnknownCodec for a codec that this shard cannot read or write.
    """

    def __init__(self, tables: Tables, check: Callable[[CodecName], None]) -> None:
        self.revision = 0
        self._tables = tables
        self._check = check
        self._said: dict[str, TableCodecs] = {}

    def forget(self) -> None:
        """Another job begins, or other tables are here: nothing was said of them."""
        if self._said:
            self._said, self.revision = {}, self.revision + 1

    def answer(self, request: Compress, *, job_goes_on: bool) -> Outcome:
        """Take new settings, all of them or none, and say what holds; at revision 0 they are only checked.

        Without tables all is forgotten, unless a job goes on, whose workers may join late.
        UnknownTable, UnknownCodec; InvalidRequest for what is no codec, or cannot serve its table, and for a revision
        that somebody else was faster with, or that no count leads to. The same request again is answered as before.
        """
        said = dict(self._said) if request.tables or job_goes_on else {}
        for part in request.tables:
            said[part.table] = self._merged(part, said.get(part.table, TableCodecs(table=part.table)))
        changed = False
        if request.revision:
            again = request.revision == self.revision and said == self._said
            if request.revision <= self.revision and not again:
                reason = f"revision {request.revision} of the compression settings is taken, they are at "
                raise InvalidRequest(reason=f"{reason}{self.revision}; somebody else switched them just now: try again")
            if request.revision > self.revision + MAX_AHEAD:
                reason = f"revision {request.revision} of the compression settings is too far ahead: they are at "
                raise InvalidRequest(reason=f"{reason}{self.revision}, and the next one is {self.revision + 1}")
            self._said, self.revision, changed = said, request.revision, not again
        return Outcome(Compressed(revision=self.revision, tables=tuple(self._said.values())), changed)

    def control(self) -> Plain:
        """All of it in plain values."""
        return {"revision": self.revision, "tables": [[one.table, one.push, one.pull] for one in self._said.values()]}

    def restore(self, control: Plain) -> None:
        """Replace the state by what `control` returned."""
        self.revision = control["revision"]
        self._said = {table: TableCodecs(table=table, push=push, pull=pull) for table, push, pull in control["tables"]}

    def _merged(self, part: TableCodecs, before: TableCodecs) -> TableCodecs:
        """Merge the settings of a table with new ones, which are checked."""
        entry = self._tables.entry(part.table)
        texts = {"push": part.push, "pull": part.pull}
        for direction, text in texts.items():
            if not text:
                continue
            try:
                codec = CodecName.parse(text)
                codec.check(direction, entry.dense)
                if codec.select == "dgc" and entry.table.spec.optimizer.params().get("momentum", 0.0) > 0:
                    raise ValueError(f"{codec} keeps the momentum in the worker, so that of its optimizer must be 0")
            except ValueError as error:
                raise InvalidRequest(reason=f"table {part.table!r}: {error}") from None
            self._check(codec)
        return TableCodecs(table=part.table, push=part.push or before.push, pull=part.pull or before.pull)
