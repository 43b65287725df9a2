"""The run's record on disk: log.jsonl, one JSON object per line, and TensorBoard's event files beside it.

Every line of log.jsonl has `record` and `time` (seconds since 1970, UTC). The other keys are the fields of
worker/reporting/records.py: `config` holds a RunPlan and versions, `train` an Interval, `eval` an Evaluation, `result`
a RunResult. Where another worker goes on for one that was lost, `takeover` holds the RunPlan again. `recovery` (its
fields are in src/embershard/cli/recovery.py) says that `embershard train` started the job again. A number that is not
defined (the AUC of one class, say) is null. A run that ends without a `result` line did not end well. Runs into one
folder follow one another in the file; each begins with its `config`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import platform
import re
import tempfile
import time
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from embershard.proto.errors import CannotWrite
from embershard.proto.user_modules import version_of
from embershard.worker.reporting.records import Evaluation, Interval, Observer, RunPlan, RunResult

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE_NAME = "log.jsonl"

_log = logging.getLogger(__name__)


OTHER_OUTPUT = "choose another folder with --output"  # the remedy of each command that writes a run
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # the last are bytes of a name that is no UTF-8


def make_folder(path: Path) -> Path:
    """The folder of --output, made where there was none. CannotWrite where no file can be made in it.

    A name that is no UTF-8, which TensorBoard cannot open, or with control characters, which the terminal would obey,
    is refused, too.
    """
    if _UNPRINTABLE.search(str(path)):
        raise CannotWrite(path=str(path), reason="it has control characters, or is no UTF-8", remedy=OTHER_OUTPUT)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise CannotWrite(path=str(path), reason=error.strerror or str(error), remedy=OTHER_OUTPUT) from None


class RunEvents(Observer):
    """Logs what happens to a run, with the fields of log.jsonl, for programs that collect logs."""

    def started(self, plan: RunPlan) -> None:
        """Log that the run begins, or that another worker reports from here on."""
        self._write("config" if plan.reporter is None else "takeover", dataclasses.asdict(plan))

    def trained(self, interval: Interval) -> None:
        """Log the steps since the last call."""
        self._write("train", dataclasses.asdict(interval))

    def evaluated(self, evaluation: Evaluation) -> None:
        """Log the figures of an evaluation."""
        self._write("eval", dataclasses.asdict(evaluation))

    def finished(self, result: RunResult) -> None:
        """Log the result of the run."""
        self._write("result", dataclasses.asdict(result))

    def _write(self, record: str, fields: dict[str, object]) -> None:
        _log.info(record, extra={"fields": finite(fields)})


class JsonLog(RunEvents):
    """Writes log.jsonl, a line at a time, flushed; the first one also tells the versions of packages."""

    def __init__(self, folder: Path) -> None:
        self.path = make_folder(folder) / FILE_NAME
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise CannotWrite(path=str(self.path), reason=error.strerror or str(error), remedy=OTHER_OUTPUT) from None

    def close(self) -> None:
        """Close the file of the log."""
        self._file.close()

    def _write(self, record: str, fields: dict[str, object]) -> None:
        if record in ("config", "takeover"):
            versions = {name: version_of(name) for name in ("embershard", "torch", "numpy")}
            fields = {**fields, "python": platform.python_version(), "versions": versions}
        line = {"record": record, "time": round(time.time(), 3), **fields}
        self._file.write(json.dumps(finite(line), separators=(",", ":")) + "\n")
        self._file.flush()


def finite(value: object) -> object:
    """The same with None for every float that JSON does not know."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


class TensorBoardLog(Observer):
    """Scalars over the number of samples."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plan: RunPlan | None = None

    @classmethod
    def open(cls, folder: Path) -> TensorBoardLog | None:
        """Events in `folder`; None where tensorboard is not installed (`pip install embershard[tensorboard]`)."""
        return cls(folder) if find_spec("tensorboard") is not None else None

    def started(self, plan: RunPlan) -> None:
        """Keep the job, which is written as text with the first figures."""
        self._plan = plan

    def trained(self, interval: Interval) -> None:
        """Loss, speed, waiting, learning rate, and what a cache gave."""
        waits = ("wait_share", "wait_shards", "wait_workers", "wait_data")
        for name in ("loss", "samples_per_second", *waits, "lr_scale"):
            self._add(f"train/{name}", getattr(interval, name), interval.samples)
        if interval.cached_share is not None:
            self._add("train/cached_share", interval.cached_share, interval.samples)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Every figure of every split."""
        for split, figures in evaluation.figures.items():
            for name, value in figures.items():
                self._add(f"{split}/{name}", value, evaluation.samples)
        self._writer.flush()

    def close(self) -> None:
        """Close the file of the events."""
        if "_writer" in self.__dict__:
            self._writer.close()

    @cached_property
    def _writer(self) -> SummaryWriter:
        # with the first figures: the first step need not wait for the import of tensorboard
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self._folder))
        if self._plan is not None:
            writer.add_text("job", f"```\n{json.dumps(self._plan.job, indent=2)}\n```")
        return writer

    def _add(self, name: str, value: float, samples: int) -> None:
        self._writer.add_scalar(name, value, samples)
