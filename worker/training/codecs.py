"""Has the tables of a session travel as a job says, from step to step."""

from __future__ import annotations

import logging

from embershard.proto.codec.name import CodecName
from embershard.proto.errors import JobError
from embershard.worker.compression.settings import Directions, advice
from embershard.worker.job.compression import Direction
from embershard.worker.job.job import Job
from embershard.worker.patterns import choose, first_match
from embershard.worker.session.session import Session
from embershard.worker.training.autotune import CodecTuner, Trial

_log = logging.getLogger(__name__)


class JobCodecs:
    """The codecs of a job and their schedule. JobError where a table cannot travel as the job wants."""

    def __init__(self, job: Job, session: Session | None) -> None:
        self._section = job.compression
        self._session = session if job.compression is not None else None
        self._prefix = job.prefix
        self._wanted: dict[str, Directions] = {}
        self._next: list[int] = []  # steps at which something changes
        self._auto: CodecTuner | None = None
        self.trial: Trial | None = None  # its state is a worker's own
        self._followed = -1
        if self._session is not None and self._section is not None:
            self._session.client.compressor.settings = self._section.settings()

    def begin(self, step: int) -> None:
        """Switch the tables, which all exist by now, to the codecs of a step, and say which are no good choice."""
        if self._session is None or self._section is None:
            return
        names = sorted(table.spec.name.removeprefix(self._prefix) for table in self._session.tables)
        try:
            choose(names, {**self._section.tables, "*": None}, "compression.tables")
        except ValueError as error:
            where, _, reason = str(error).partition(": ")
            raise JobError(where=where, reason=reason) from None
        self._next = [change for change in self._section.steps if change > step]
        self._switch(step)
        if self._section.auto:
            allow = [CodecName.parse(text) for text in self._section.allow]
            self._auto = CodecTuner(self._session, allow, self._pinned(names))
        elif self._section.unless_slower:
            self.trial = Trial(self._session, self._wanted)
        for table in self._session.tables if self._session.client.worker == 0 else ():
            if line := advice(table.spec.optimizer.name, self._wanted[table.spec.name].push):
                _log.warning("table %s: %s", table.spec.name, line)

    def before_step(self, step: int) -> None:
        """Before a batch of a step: change what the schedule changes, or what was found to pay."""
        if step == self._followed:  # several batches make one step
            return
        self._followed = step
        if self._next and step >= self._next[0]:
            self._next = [change for change in self._next if change > step]
            self._switch(step)
        for measuring in (self._auto, self.trial):
            if measuring is not None:
                measuring.before_step(step)

    def _pinned(self, names: list[str]) -> frozenset[tuple[str, Direction]]:
        """Tables and directions of which the job itself says how they travel."""
        assert self._section is not None
        tables = self._section.tables
        found = {name: first_match(name, tables) for name in names}
        return frozenset(
            (self._prefix + name, direction)
            for name, pattern in found.items()
            for direction, _ in (tables[pattern].given() if pattern is not None else ())
        )

    def _switch(self, step: int) -> None:
        """Only what the schedule changes: what was switched by hand stays."""
        assert self._session is not None
        assert self._section is not None
        settings, compressor = self._section.settings(step), self._session.client.compressor
        for table in self._session.tables:
            name = table.spec.name
            before = self._wanted.get(name, Directions())
            try:
                want = settings.of(name.removeprefix(self._prefix), compressor.is_dense(name))
                if want != before:
                    self._session.switching.switch({name: want})
            except ValueError as error:
                raise JobError(where="compression", reason=f"table {name!r}: {error}") from None
            if name in self._wanted and want != before:
                how = f"push={want.push} pull={want.pull}"
                _log.warning("step %d: table %s uses %s, by the job's schedule", step, name, how)
            self._wanted[name] = want
