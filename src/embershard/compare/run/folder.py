"""The folder of a comparison: experiment.json says which one it is, runs.jsonl holds a line per run that was made.

Arms, seeds and bandwidths may be added to it; experiment.json names all that it was ever asked for.

A line is written whole and synced before the next run begins; where a file ends in half a line, that run is made again.
The last line of a run counts. Nothing is ever deleted.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from embershard.compare.results import ArmRun
from embershard.compare.run.plan import Experiment
from embershard.proto.errors import CannotWrite, EmbershardError
from embershard.worker.reporting.log import OTHER_OUTPUT, make_folder

EXPERIMENT, RUNS = "experiment.json", "runs.jsonl"
REPEAT = "mend that and repeat the command, which keeps the runs there"  # in another folder it would make all anew


class OtherExperiment(EmbershardError):
    """The folder holds another comparison."""

    template = (
        "the folder {folder} holds another comparison; these differ:\n{difference}\n"
        "name another folder with --output, or undo these differences: only arms, seeds and bandwidths may change "
        "(`code_sha256` tells that the code of a module changed)"
    )


class NotAComparison(EmbershardError):
    """The folder holds something else."""

    template = "the folder {folder} holds other files and no comparison; name an empty or a new one with --output"


class NoRuns(EmbershardError):
    """The folder has no runs to report."""

    template = (
        "there are no runs in {folder} that this command can report; check --output and --arms, or make the runs with "
        "the same command without --report-only"
    )


class FolderInUse(EmbershardError):
    """Another process runs the same comparison."""

    template = "another process writes to {folder}; wait for it, or end it"


class Folder:
    """Keeps runs on disk by their keys, also those that earlier commands asked for.

    A context manager that keeps other processes out.

    Opening raises OtherExperiment, NotAComparison, FolderInUse or CannotWrite.
    """

    def __init__(self, path: Path, experiment: Experiment) -> None:
        self.path = path
        self._experiment = experiment
        self._lock = -1
        self._file = -1
        self.runs: dict[str, ArmRun] = {}

    def __enter__(self) -> Self:
        make_folder(self.path)
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it ends with this process, however that ends
            self._claim()
            self._open()
        except BlockingIOError:
            self.close()
            raise FolderInUse(folder=str(self.path)) from None
        except OSError as error:
            self.close()
            raise CannotWrite(path=str(self.path), reason=error.strerror or str(error), remedy=OTHER_OUTPUT) from None
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder to other processes."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    def add(self, run: ArmRun) -> None:
        """Write a run to disk before returning. CannotWrite where that fails."""
        line = run.model_dump_json().encode() + b"\n"
        try:
            written = os.write(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotWrite(path=str(self.path / RUNS), reason=reason, remedy=REPEAT) from None
        if written != len(line):  # the disk is full: what is there is half a line, which a reader leaves out
            reason = "only a part of the line was written"
            raise CannotWrite(path=str(self.path / RUNS), reason=reason, remedy=REPEAT)
        self.runs[run.key] = run

    def _claim(self) -> None:
        path = self.path / EXPERIMENT
        beside = path.with_suffix(".json.tmp")
        experiment = self._experiment
        if path.exists():
            try:
                found = Experiment.model_validate_json(path.read_text(encoding="utf-8"))
            except (ValidationError, UnicodeDecodeError):
                raise NotAComparison(folder=str(self.path)) from None
            difference = found.difference(self._experiment)
            if difference:
                raise OtherExperiment(folder=str(self.path), difference=difference)
            experiment = found.joined(experiment)
            if experiment == found:
                return
        elif any(found != beside for found in self.path.iterdir()):
            raise NotAComparison(folder=str(self.path))
        with beside.open("w", encoding="utf-8") as file:
            file.write(experiment.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)

    def _open(self) -> None:
        path = self.path / RUNS
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        data = path.read_bytes()
        self.runs = _parse(data)
        if data and not data.endswith(b"\n"):
            os.write(self._file, b"\n")
        os.fsync(self._lock)  # the names of both files


def read_runs(folder: Path) -> dict[str, ArmRun]:
    """Read the runs of a folder by their keys without changing it; empty where none can be read."""
    try:
        return _parse((folder / RUNS).read_bytes())
    except OSError:
        return {}


def _parse(data: bytes) -> dict[str, ArmRun]:
    runs = {}
    for line in data.splitlines():
        try:
            run = ArmRun.model_validate_json(line)
        except ValidationError:
            continue  # half a line, or one of an older version: that run is made again
        runs[run.key] = run
    return runs
