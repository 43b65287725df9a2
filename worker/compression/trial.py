"""`compression: {..., unless_slower: true}`: try what the job says, and leave it on unless steps take longer."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np

from embershard.worker.compression.settings import Directions
from embershard.worker.session import Session

_log = logging.getLogger(__name__)

WARM_UP = 3  # steps that load and compile what later ones have, or are still under way as others travelled
STEPS = 10  # that are measured, with codecs and without
TURNS = 2  # of both: what else the machine does comes and goes
SLOWER = 1.03  # of a step's time without codecs: less is noise


class Trial:
    """Has tables travel with codecs and without by turns, and then in the way in which steps take less time.

    `wanted`: table -> its codecs, in use by now. All steps of a worker pass by `follow`.
    """

    def __init__(self, session: Session, wanted: Mapping[str, Directions]) -> None:
        self._session, self._wanted = session, dict(wanted)
        self._plain = {name: Directions() for name in wanted}
        self._coded = True  # whether the codecs are in use
        self._starts: list[float] = []  # of the steps of this turn
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # of steps with codecs, and without
        self.done = self._wanted == self._plain

    def follow(self, step: int) -> None:
        """Before a step: take its time, and change over when it is time."""
        if self.done:
            return
        self._starts.append(time.perf_counter())
        if len(self._starts) <= WARM_UP + STEPS:
            return
        self._seconds[self._coded] += np.diff(self._starts[WARM_UP:]).tolist()
        self._starts = []
        if len(self._seconds[False]) < TURNS * STEPS:
            self._use(not self._coded)
            return
        self.done = True
        coded, plain = (float(np.median(self._seconds[which])) for which in (True, False))
        self._use(coded <= SLOWER * plain)
        text = f"a step takes {1e3 * coded:.3g} ms with the job's codecs, and {1e3 * plain:.3g} without any"
        _log.warning("step %d: %s: they are %s", step, text, "left on" if self._coded else "switched off")

    def _use(self, coded: bool) -> None:
        self._coded = coded
        self._session.switching.switch(self._wanted if coded else self._plain)
