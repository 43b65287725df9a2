"""Callbacks of users: objects that are told how a run goes, by the methods of an Observer that they have."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from embershard.proto.errors import UserCodeFailed
from embershard.proto.user_modules import find, user_code, where_defined
from embershard.worker.models.user_defined import call
from embershard.worker.reporting.records import Evaluation, Interval, RunPlan, RunResult

_log = logging.getLogger(__name__)

METHODS = ("started", "trained", "evaluating", "evaluated", "finished", "close")


class Callback:
    """A user's `module:name`, called with `args`; the object that it gives is told what its methods are there for.

    Only the worker that reports makes one. UserCodeFailed, which ends the run, where a method raises, and here where it
    cannot be made or has none of the methods.
    """

    def __init__(self, name: str, args: Mapping[str, object]) -> None:
        self._what, found = f"callback {name}", find(name)
        self._user = call(self._what, found, args)
        if not any(callable(getattr(self._user, method, None)) for method in METHODS):
            reason = f"gave {self._user!r}, which has none of the methods {', '.join(METHODS)}"
            raise UserCodeFailed(what=self._what, reason=reason, where=where_defined(found))

    def started(self, plan: RunPlan) -> None:
        """Tell it that the run begins."""
        self._tell("started", plan)

    def trained(self, interval: Interval) -> None:
        """Tell it of the steps since the last call, about once a second."""
        self._tell("trained", interval)

    def evaluating(self) -> None:
        """Tell it that an evaluation begins."""
        self._tell("evaluating")

    def evaluated(self, evaluation: Evaluation) -> None:
        """Tell it the figures of an evaluation."""
        self._tell("evaluated", evaluation)

    def finished(self, result: RunResult) -> None:
        """Tell it the result, once it is in the log and shown."""
        self._tell("finished", result)

    def close(self) -> None:
        """Tell it that nothing more will come. What it raises does not hide the error that ended the run."""
        failing = sys.exc_info()[0] is not None
        try:
            self._tell("close")
        except UserCodeFailed as error:
            if not failing:
                raise
            _log.warning("%s", error)

    def _tell(self, method: str, *facts: object) -> None:
        told = getattr(self._user, method, None)
        if callable(told):
            with user_code(self._what):
                told(*facts)
