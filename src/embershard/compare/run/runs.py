"""Make one run: `embershard train` as a process of its own, followed by its log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from embershard.compare.results import ArmRun, RunFigures
from embershard.compare.run.plan import Task
from embershard.compare.run.run_log import RunLog, RunProgress
from embershard.proto.errors import how_ended
from embershard.proto.security.tls import TLS
from embershard.proto.user_modules import environment_for_child
from embershard.worker.reporting.log import FILE_NAME

COMMAND = (sys.executable, "-P", "-m", "embershard.cli", "train")
ATTEMPTS = 2
LAST_LINES = 12  # of a run that failed
QUIET_SECONDS = 1800.0  # without a line in the log, a run counts as hung: an evaluation is the longest silence
STOP_SECONDS = 60.0  # `embershard train` gives its shards 40 to end
_POLL_SECONDS = 0.1
SAID = "said.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """The job, data and folder of all runs, and how their commands are started."""

    job: Path
    data: Path | None
    folder: Path  # of the comparison
    prefix: Sequence[str] = ()  # words before the command, which put it into a network namespace
    # shards of one attempt that the command does not name: a failed one leaves what it trained in its shards
    shards: Callable[[], AbstractContextManager[Sequence[str]]] = lambda: nullcontext(())
    tls: TLS | None = None  # to shards that run already
    words: Sequence[str] = ()  # options of a run on such shards: who asks, and by which certificates


def make_run(task: Task, setup: RunSetup, watch: Callable[[RunProgress], None]) -> ArmRun:
    """Make a run, once more where it fails, and return its figures; `watch` receives its progress."""
    began, load, seconds = time.strftime("%Y-%m-%d %H:%M:%S %z"), os.getloadavg()[0], 0.0
    folder = setup.folder / task.folder
    folder.mkdir(parents=True, exist_ok=True)
    words = (*task.words, *setup.words, *(() if setup.data is None else ("--data", str(setup.data))))
    log, error, attempts = RunLog.after(folder / FILE_NAME), "", 0
    while attempts < ATTEMPTS:
        attempts += 1
        with setup.shards() as shards:
            log, start = RunLog.after(folder / FILE_NAME), time.monotonic()
            error = _attempt(folder, words, setup, shards, log, watch)
            seconds = time.monotonic() - start
        if not error:
            break
    return ArmRun(
        arm=task.arm,
        seed=task.seed,
        bandwidth=task.bandwidth,
        kind=task.kind,
        multiple=task.multiple,
        ok=not error,
        error=error,
        attempts=attempts,
        words=words,
        folder=task.folder,
        began=began,
        total_seconds=round(seconds, 3),
        load_average=round(load, 2),
        **dict(log.figures() if not error else RunFigures()),
    )


def _attempt(
    folder: Path,
    words: Sequence[str],
    setup: RunSetup,
    shards: Sequence[str],
    log: RunLog,
    watch: Callable[[RunProgress], None],
) -> str:
    """Make the run once; return its last output where it failed, else an empty string."""
    command = [*setup.prefix, *COMMAND, str(setup.job), *words]
    command += ["--output", str(folder), "--parent-pid", str(os.getpid())]
    command += ["--ps", ",".join(shards)] if shards else []
    with (folder / SAID).open("ab+") as said:
        begin, heard = said.tell(), time.monotonic()
        with _process(command, said) as process:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                if log.read():
                    heard = time.monotonic()
                    watch(log.progress())
                elif time.monotonic() - heard > QUIET_SECONDS:
                    return f"it was ended: its run log had no new line for {QUIET_SECONDS:.0f} s"
        log.read()
        if process.returncode == 0:
            return log.trouble
        said.seek(begin)
        lines = said.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([f"it ended with {how_ended(process.returncode)}", *lines])


@contextmanager
def _process(command: Sequence[str], said: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that ends with the block: SIGTERM, so that it ends its children, then SIGKILL."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=subprocess.STDOUT,
        env=environment_for_child(),
        start_new_session=True,  # Ctrl-C at the terminal reaches this process only, which then ends the run
    )
    try:
        yield process
    finally:
        try:
            if process.poll() is None:
                process.terminate()
                process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:  # a second Ctrl-C, too, leaves nothing behind: what a run starts ends with it
            process.kill()
            process.wait()
