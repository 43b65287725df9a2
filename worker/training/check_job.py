"""Try a job's code and data on the first samples, in a process of its own: `deploy/job_check.py` starts and ends it.

What a user's module starts, prints or breaks stays in this process. It says on a pipe, a line of JSON each, what it
does, and how it ends: with the error of what is wrong, or with what is only remarkable.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import io
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from embershard.proto.errors import EmbershardError, UserCodeFailed, to_wire
from embershard.proto.user_modules import members_of, search_from, sha256_of_modules, user_code, where_running

_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}  # audit events
_COPY_SECONDS = 1.0  # in which the copy that a fork made comes back from the code that forked
_NEWS_SECONDS = 2.0
_SAMPLES = 1024  # of each split, at most


class Progress:
    """Tells the parent process, through a pipe, what the check does now; notes prints and processes of user code."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._pid = pipe, os.getpid()
        self._copies = os.pipe()  # a copy of this process says here that it came back
        self._main = threading.get_ident()
        self.started: list[str] = []  # lines of the user that started processes
        self.printed = ""  # the first line that printed while its module was imported
        self._forked = ""

    def say(self, **what: object) -> None:
        """Send a record to the parent, as one line of JSON."""
        os.write(self._pipe, json.dumps(what).encode() + b"\n")

    @contextmanager
    def step(self, doing: str, at: str = "") -> Iterator[None]:
        """Say what is done now. UserCodeFailed where the user's code forks, and goes on in the copy too."""
        self.say(doing=doing, at=at)
        self._forked = ""
        try:
            yield
        finally:
            if os.getpid() != self._pid:
                os.write(self._copies[1], b".")
                os._exit(0)
        if self._forked and select.select([self._copies[0]], [], [], _COPY_SECONDS)[0]:
            reason = "forks this process and goes on in the copy: end the copy with os._exit, or use subprocess"
            raise UserCodeFailed(what=f"code of the job ({doing})", reason=reason, where=self._forked)

    def watch(self) -> None:
        """From here on, note who starts processes, and say from time to time in which line the user's code is."""
        sys.addaudithook(self._audit)
        threading.Thread(target=self._say_line, name="progress", daemon=True).start()

    def _audit(self, event: str, _: object) -> None:
        if event in _STARTS and (where := where_running(sys._getframe())):
            self.started.append(where)
            self._forked = where if event.startswith("os.fork") else self._forked

    def _say_line(self) -> None:
        while True:
            time.sleep(_NEWS_SECONDS)
            self.say(at=where_running(sys._current_frames().get(self._main)))


class _Stderr(io.TextIOWrapper):
    """stderr, which notes the line of a user's code that prints to it."""

    progress: Progress

    def write(self, text: str) -> int:
        """Write the text to stderr; note the line that prints, where it is a user's."""
        caller = sys._getframe(1)
        if not self.progress.printed and where_running(caller) == f"{caller.f_code.co_filename}:{caller.f_lineno}":
            self.progress.printed = where_running(caller)
        return super().write(text)


def check(request: Mapping[str, object], progress: Progress) -> None:
    """Import what the job names, open its data, read the first samples of each split, and try its model on them."""
    path, data, imports = Path(str(request["job"])), request["data"], request["imports"]
    assert isinstance(imports, list)
    overrides = request["overrides"]
    assert isinstance(overrides, list)
    with progress.step("importing embershard"):
        from embershard.worker.data.batch import Batch
        from embershard.worker.data.user_defined import first_batch
        from embershard.worker.job.checks import check_opened
        from embershard.worker.job.load import load_job
        from embershard.worker.training.try_model import try_model
    job = load_job(path, overrides, None if data is None else Path(str(data)))
    if imports:
        search_from(Path())
    progress.watch()
    modules = _modules(job.model_dump(), imports)
    for module in modules:
        with progress.step(f"importing {module}", _file(module)):
            members_of(module)
    printed, progress.printed = progress.printed, "-"
    with progress.step("opening the data"):
        dataset = job.data.first_rows().open(path.parent, job.train.seed)
        check_opened(job, dataset)
    batches: dict[str, Batch] = {}
    for split in ("train", *dataset.splits):
        size = min(_SAMPLES, job.train.batch_size if split == "train" else job.evaluate.batch_size)
        with progress.step(f"reading the first samples of {split}"):
            batches[split] = first_batch(dataset, split, size)
    with progress.step("trying the model on the first samples"), user_code("the job's model"):
        try_model(job, dataset.schema, batches)
    progress.say(started=progress.started, printed=printed, code=sha256_of_modules(modules))


def _modules(values: object, imports: list[str]) -> list[str]:
    """The modules that a job names as `module:name`, each once, and those of --import."""

    from embershard.worker.job.training import POINTWISE

    def names(value: object) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key in ("reader", "class") and isinstance(inner, str) and _CODE.fullmatch(inner):
                    module = inner.partition(":")[0]
                    yield from () if module in POINTWISE else (module,)  # a built-in metric of a label is no module
                yield from names(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                yield from names(inner)

    return list(dict.fromkeys([*imports, *names(values)]))


def _file(module: str) -> str:
    """The file of a module, which is not imported yet."""
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(module) if "." not in module else None
        return spec.origin or "" if spec is not None else ""
    return ""


def _end_with(control: int) -> None:
    """End this process, and what it started, once whoever holds the other end of a pipe is gone."""
    while os.read(control, 1024):
        pass
    os.killpg(0, signal.SIGKILL)


def _main() -> None:
    faulthandler.enable(all_threads=False)  # what crashes is named with its line
    pipe, control = os.dup(1), os.dup(0)
    os.dup2(2, 1)  # what anyone prints
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    with os.fdopen(os.dup(control), "rb", buffering=0) as lines:
        request = json.loads(lines.readline())
    threading.Thread(target=_end_with, args=(control,), name="parent", daemon=True).start()
    progress = Progress(pipe)
    sys.stderr = _Stderr(open(2, "wb", buffering=0, closefd=False), write_through=True)
    sys.stderr.progress = progress
    sys.stdout = sys.stderr
    try:
        check(request, progress)
    except EmbershardError as error:
        progress.say(error=json.loads(to_wire(error)[1]))
    os._exit(0)  # not by way of what a user's code registered, or waits for


if __name__ == "__main__":
    _main()
