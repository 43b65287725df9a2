"""The check of a job's own code and data before anything starts, in a process that is ended with all that it began."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from embershard.deploy import sessions
from embershard.proto.errors import EmbershardError, from_wire, how_ended
from embershard.proto.user_modules import environment_for_child

LAST_LINES = 12  # of what it wrote to stderr
FIRST_NEWS_SECONDS, NEWS_SECONDS = 5.0, 10.0
_POLL_SECONDS = 0.2
_MODULE = "embershard.worker.training.check_job"


class CheckEnded(EmbershardError):
    """The process in which a job's code is tried ended without a result: the code ended or crashed it."""

    template = (
        "the job's code ended the process in which it was tried before training ({how}), while it was {doing} "
        "({where}); its last lines:\n{lines}"
    )


def check_job(
    job: Path,
    *,
    overrides: Sequence[str] = (),
    data: Path | None = None,
    imports: Sequence[str] = (),
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, str]:
    """Try the code and the data of a job on their first samples: what is wrong is raised, as the job's workers would.

    Returns the sha256 of each file of the user's code (`sha256_of_modules`). `overrides` and `data` are those of
    load_job, `imports` modules that are imported too. `say` is told what goes on where it takes long, and what is
    remarkable. CheckEnded where the code ends its process.
    """
    request = {
        "job": str(job.absolute()),
        "overrides": list(overrides),
        "data": None if data is None else str(data.absolute()),
        "imports": list(imports),
    }
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment_for_child(),
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            return _follow(process, process.stdout, stderr, say)
        finally:
            sessions.kill(process)
            process.stdin.close()
            process.stdout.close()


def _follow(
    process: subprocess.Popen[bytes], stdout: IO[bytes], stderr: IO[bytes], say: Callable[[str], object]
) -> dict[str, str]:
    began = time.monotonic()
    next_news, doing, where, rest = began + FIRST_NEWS_SECONDS, "starting", "", b""
    while True:
        ready = select.select([stdout], [], [], _POLL_SECONDS)[0]
        data = os.read(stdout.fileno(), 1 << 16) if ready else b""
        *lines, rest = (rest + data).split(b"\n")
        for line in map(json.loads, lines):
            if "error" in line:
                raise from_wire(json.dumps(line["error"]).encode(), "")
            if "started" in line:
                _remark(line, sessions.members(process.pid), say)
                code: dict[str, str] = line["code"]
                return code
            doing, where = line.get("doing", doing), line["at"] or where
        if not data and (ready or sessions.has_ended(process)):
            raise _ended(process, stderr, doing, where)
        if time.monotonic() >= next_news:
            next_news = time.monotonic() + NEWS_SECONDS
            at = f" ({where})" if where else ""
            say(f"checking the job: {doing}{at}, {time.monotonic() - began:.0f} s so far")


def _remark(line: dict[str, Any], left: Sequence[int], say: Callable[[str], object]) -> None:
    if line["printed"]:
        say(
            f"note: {line['printed']} prints when it is imported; what workers print goes to worker-*.log in the run's "
            "folder"
        )
    if line["started"] and left:
        where = ", ".join(dict.fromkeys(line["started"]))
        say(
            f"note: {where} starts processes that keep running (here {len(left)}); they are killed at the end of each "
            "worker"
        )


def _ended(process: subprocess.Popen[bytes], stderr: IO[bytes], doing: str, where: str) -> CheckEnded:
    sessions.kill(process)
    stderr.seek(0)
    text = stderr.read().decode(errors="replace")
    crash = text.rfind("Fatal Python error")  # of which the first lines tell, the innermost call first
    lines = text[crash:].splitlines()[:LAST_LINES] if crash >= 0 else text.splitlines()[-LAST_LINES:]
    return CheckEnded(
        how=how_ended(process.returncode),
        doing=doing,
        where=where or "?",
        lines="\n".join(lines) or "(nothing)",
    )
