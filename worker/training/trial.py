"""Codecs on trial: used and not by turns, and left on if the time that steps take is right.

With `compression: {..., unless_slower: true}` those of the job; with `auto` what was chosen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np

from embershard.worker.compression.settings import Directions
from embershard.worker.session.session import Session

_log = logging.getLogger(__name__)

WARM_UP = 3  # steps that load and compile what later ones have, or are still under way as others travelled
STEPS = 10  # that are measured, with codecs and without
TURNS = (True, False, False, True)  # what goes on beside, and grows or shrinks, falls on both sides
ROUNDS = 3  # of these turns at most
SLOWER = 1.03  # of a step's time without codecs at most: less is noise
UNSURE = 0.05  # so near to the bound another round decides


class Trial:
    """Has tables travel as wanted and otherwise by turns, and then as wanted if steps do not take too long with it.

    `wanted`: table -> its codecs, in use by now. `otherwise`: without any, unless it is given. `bound`: what a step may
    take as wanted, of its time otherwise. All steps of a worker pass by `follow`. It ends where somebody else changes
    how tables travel.
    """

    def __init__(
        self,
        session: Session,
        wanted: Mapping[str, Directions],
        otherwise: Mapping[str, Directions] | None = None,
        bound: float = SLOWER,
    ) -> None:
        self._session, self._wanted, self._bound = session, dict(wanted), bound
        self._otherwise = {name: Directions() for name in wanted} if otherwise is None else dict(otherwise)
        self._turn = 0
        self._starts: list[float] = []  # of the steps of this turn
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # of steps with codecs, and without
        self.left_on: bool | None = None  # once that is decided

    def follow(self, step: int) -> None:
        """Before a step: take its time, and change over when it is time."""
        if self.left_on is not None:
            return
        self._starts.append(time.perf_counter())
        if len(self._starts) <= WARM_UP + STEPS:
            return
        coded = TURNS[self._turn % len(TURNS)]
        now = self._session.client.compressor.directions()
        if {name: now[name] for name in self._wanted} != self._directions(coded):
            self.left_on = True  # as it was set
            _log.warning("step %d: the trial of codecs ends, for others were set", step)
            return
        self._seconds[coded] += np.diff(self._starts[WARM_UP:]).tolist()
        self._turn += 1
        if self._turn % len(TURNS) == 0 and self._decide(step):
            return
        self._use(TURNS[self._turn % len(TURNS)])
        self._starts = [time.perf_counter()]

    def state_dict(self) -> Mapping[str, object]:
        """What was decided, and of which codecs."""
        return {"left_on": self.left_on, "wanted": self._texts()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on as it was decided; a trial that was not, or of other codecs, is made anew."""
        self.left_on = None if state["left_on"] is None else bool(state["left_on"])
        if self.left_on is not None and state.get("wanted") != self._texts():
            self.left_on = None
        if self.left_on is not None:
            self._use(self.left_on)
            how = "left on" if self.left_on else "switched off"
            _log.warning("codecs are %s, as was decided before the run was resumed", how)

    def _texts(self) -> dict[str, list[str]]:
        return {name: [str(way.push), str(way.pull)] for name, way in self._wanted.items()}

    def _decide(self, step: int) -> bool:
        """Whether these turns are enough; what they say is done then."""
        coded, plain = (float(np.median(self._seconds[which])) for which in (True, False))
        if abs(coded / plain - self._bound) < UNSURE and self._turn < ROUNDS * len(TURNS):
            return False
        self.left_on = coded <= self._bound * plain
        self._use(self.left_on)
        text = f"a step takes {1e3 * coded:.3g} ms with these codecs, and {1e3 * plain:.3g} without"
        _log.warning("step %d: %s: they are %s", step, text, "left on" if self.left_on else "switched off")
        return True

    def _use(self, coded: bool) -> None:
        self._session.switching.switch(self._directions(coded))

    def _directions(self, coded: bool) -> dict[str, Directions]:
        return self._wanted if coded else self._otherwise
