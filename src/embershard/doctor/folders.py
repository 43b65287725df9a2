"""Checks of the job file and of the folders that a run reads and writes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from embershard.doctor.case import Case
from embershard.doctor.check import Finding, check, fail, ok, size, warn
from embershard.proto.errors import BadSnapshotName
from embershard.proto.snapshot.storage import Storage
from embershard.worker.checkpoint.snapshots import MOST_SHARE

_LITTLE_SPACE = 2**30
_NO_SPACE = 2**26


@check(
    "job file",
    asks="whether the job has mistakes, contradictions, or missing data files",
    remedy="correct the lines in the message; --data names the folder of the data",
)
def job_file(case: Case) -> Finding | None:
    """Check that load_job accepts the file."""
    if case.job_mistake:
        return fail(case.job_mistake)
    return ok(f"{case.job.model.name} on {case.job.data.reader}") if case.job is not None else None


@check(
    "job data",
    asks="whether the job's code and data work: its reader and model are tried on the first samples of every split",
    remedy="correct the file and line in the message; `embershard train` would report the same",
)
def job_data(case: Case) -> Finding | None:
    """Check that the job's reader and model work on the first samples, as `embershard train` does before it starts."""
    if case.job is None:
        return None
    return fail(case.data_mistake) if case.data_mistake else ok("the first samples of every split")


@check(
    "run folder",
    asks="whether the run's folder is writable, and has space for logs",
    remedy="choose another folder with --output, or make space",
)
def run_folder(case: Case) -> Finding:
    """--run, the job's output, or `runs` here."""
    output = case.job.output if case.job is not None else None
    return _folder(case.run.folder if case.run is not None else output or Path("runs"), 0)


@check(
    "checkpoint folder",
    asks="whether the job's checkpoint folder is writable, and has space for the checkpoints that are kept",
    remedy="choose a folder that all workers and shards see and can write, lower checkpoint.keep, or make space",
)
def checkpoint_folder(case: Case) -> Finding | None:
    """checkpoint.folder, against what the tables of the running shards hold.

    One more is written beside those kept, which are the newest ones and the best one; each with its increments.
    """
    section = case.job.checkpoint if case.job is not None else None
    if section is None or section.folder is None:
        return None
    if "://" in section.folder:
        try:
            Storage(section.folder)
        except BadSnapshotName as error:
            return fail(str(error))
        return ok(f"{section.folder}: remote storage, in which nothing is tried")
    held = sum(table.bytes for _, status in case.statuses for table in status.tables)
    of_each = 1 + MOST_SHARE * section.incremental
    return _folder(Path(section.folder), int(held * ((section.keep + section.best) * of_each + 1)))


@check(
    "temporary folder",
    asks="whether the temporary folder is writable: shards put their private sockets there",
    remedy="set TMPDIR to a writable folder, or make space",
)
def temporary_folder(_: Case) -> Finding:
    """Check the folder that tempfile would use."""
    try:
        return _folder(Path(tempfile.gettempdir()), 0)
    except FileNotFoundError as error:
        return fail(str(error))


CHECKS = (job_file, job_data, run_folder, checkpoint_folder, temporary_folder)


def nearest(path: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _folder(path: Path, wanted: int) -> Finding:
    """Whether files can be made in a folder, or in the nearest one above it that exists, and `wanted` bytes fit."""
    there = nearest(path)
    text = str(path) if there == path.absolute() else f"{path} (to be made in {there})"
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return fail(f"{text} cannot be written: {error.strerror or error}")
    free = shutil.disk_usage(there).free
    text = f"{text}: {size(free)} free"
    if free < max(_NO_SPACE, wanted):
        return fail(f"{text}, {size(wanted)} wanted" if wanted else text)
    return (warn if free < max(_LITTLE_SPACE, 2 * wanted) else ok)(text)
