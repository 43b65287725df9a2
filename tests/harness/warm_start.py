"""Start `python -m embershard...` in milliseconds: fork it from a process that has imported torch and the kernels.

While `install()` is in force, subprocess.Popen forks such commands from a *template*, a process of one thread, in place
of starting an interpreter; the commands do the same for those that they start. A forked process is a child of the one
that asked for it, with the words, environment, folder, streams, session and signals that it would have had. Everything
else, and every process of a test marked `cold_start`, starts as it always does. Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

TESTS = Path(__file__).resolve().parents[1]
MODULES = (
    "embershard.cli",
    "embershard.worker.training.check_job",
    "embershard.worker.training.loader",
    "embershard.benchmark.child",
)
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WITH_CHILDREN = frozenset({"train", "up", "worker", "compare", "bench"})  # commands that start processes themselves
# what a shard, a worker (torch.optim: torch._dynamo) and their commands import, but for pyarrow, which starts a thread
IMPORTS = """
    torch torch._dynamo torch.distributed grpc.aio grpc_health.v1.health grpc_reflection.v1alpha.reflection uvloop
    embershard.cli.app embershard.cli.evaluate embershard.cli.ps embershard.cli.status embershard.cli.train
    embershard.cli.up embershard.cli.worker embershard.proto.snapshot.storage embershard.ps.dispatch
    embershard.ps.apply_thread embershard.ps.transport.grpc embershard.ps.transport.stream
    embershard.ps.transport.torch_rpc embershard.worker.training.loader embershard.worker.training.trainer
    embershard.worker.training.try_model
""".split()
NAME = "(template of warm starts)"  # what a template's command line says
_PADDING = 16_384  # bytes of a template's words and environment, in which those of a forked process are written
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_OF_A_START = ("PYTHON", "OMP_", "MKL_", "NUMBA_", "LD_")  # variables that are read as an interpreter starts

Request = dict[str, Any]  # a process to fork: words (of sys.orig_argv), cwd, env, new_session, group (-1: as is)
_cold = subprocess.Popen


class Template:
    """The side of a template that asks for processes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    @classmethod
    def start(cls) -> Template:
        """A new interpreter, which imports everything first."""
        ours, theirs = socket.socketpair()
        words = [sys.executable, "-P", __file__, str(theirs.fileno()), "-" * _PADDING]
        env = {**os.environ, "PADDING": "-" * _PADDING, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with theirs:
            _cold(words, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        return cls(ours)

    def fork(self, request: Request, streams: list[int]) -> int:
        """The process id of a new child of this process, whose stdin, stdout and stderr these are."""
        message = json.dumps(request).encode()
        with self._lock:
            _adopt_orphans(True)  # the new process is one, of a grandchild of this one
            try:
                socket.send_fds(self._sock, [struct.pack("<I", len(message))], streams)
                self._sock.sendall(message)
                (pid,) = struct.unpack("<I", _read(self._sock, 4))
            finally:
                _adopt_orphans(False)
        return int(pid)


class WarmPopen(subprocess.Popen[Any]):
    """subprocess.Popen that has its process forked from a template, where that makes no difference but of time."""

    template: Template | None = None
    cold = False  # whether every process starts cold now
    started: ClassVar[weakref.WeakSet[WarmPopen]] = weakref.WeakSet()

    def _execute_child(self, *positional: Any) -> None:
        given = inspect.signature(_cold._execute_child).bind(self, *positional).arguments
        if WarmPopen.cold or not _starts_warm(given):
            super()._execute_child(*positional)
            return
        if WarmPopen.template is None:
            WarmPopen.template = Template.start()
        request = {
            "words": [os.fspath(word) for word in given["args"]],
            "cwd": os.path.abspath(given["cwd"] or os.getcwd()),
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "new_session": bool(given["start_new_session"]),
            "group": given.get("process_group", -1),
        }
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = WarmPopen.template.fork(request, [own if fd < 0 else fd for own, fd in enumerate(streams)])
        self._child_created = True
        WarmPopen.started.add(self)
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))


def install() -> None:
    """From here on, processes start warm."""
    if sys.platform == "linux":
        subprocess.Popen = WarmPopen


def kill_all() -> None:
    """End the processes that were started warm and still run."""
    for process in list(WarmPopen.started):
        if process.poll() is None:
            process.kill()
            process.wait()


def _starts_warm(given: dict[str, Any]) -> bool:
    args = given["args"]
    if isinstance(args, (str, bytes)) or given["shell"] or given["preexec_fn"] or given["pass_fds"]:
        return False
    words = [str(word) for word in args]
    if words[0] != sys.executable or given["executable"] not in (None, sys.executable):
        return False
    env = os.environ if given["env"] is None else given["env"]
    names = {name for name in {*env, *os.environ} if name.startswith(_OF_A_START) and name != "PYTHONPATH"}
    if any(env.get(name) != os.environ.get(name) for name in names):
        return False
    rest = words[2:] if words[1:2] == ["-P"] else words[1:]
    if rest[:1] == ["-m"]:
        return rest[1] in MODULES
    return bool(rest) and rest[0].endswith(".py") and Path(rest[0]).is_relative_to(TESTS)


def _serve(sock: socket.socket) -> Request:
    """Fork what is asked for until nobody asks any more; returns in a forked process only, with what it is to run."""
    # they are for the commands beside it; and one for a process that is just forked waits until that can take it
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _rewrite([NAME], {})
    gc.collect()
    gc.freeze()  # collections in forked processes leave shared pages alone
    while True:
        head, streams, _, _ = socket.recv_fds(sock, 4, 3)
        if not head:
            os._exit(0)
        request: Request = json.loads(_read(sock, struct.unpack("<I", head)[0]))
        assert len(os.listdir("/proc/self/task")) == 1, "a template must have one thread"
        pid = _fork_orphan()
        if pid == 0:
            sock.close()
            for own, fd in enumerate(streams):
                os.dup2(fd, own)
            for fd in streams:
                os.close(fd)
            return request
        for fd in streams:
            os.close(fd)
        sock.sendall(struct.pack("<I", pid))


def _fork_orphan() -> int:
    """As os.fork, but the new process is by now a child of the ancestor that adopts orphans."""
    said, says = os.pipe()
    waits, go = os.pipe()
    parent = os.fork()
    if parent == 0:
        pid = os.fork()
        if pid:
            os.write(says, struct.pack("<I", pid))
            os._exit(0)
        for fd in (said, says, go):
            os.close(fd)
        os.read(waits, 1)  # until it has its new parent
        os.close(waits)
        return 0
    os.waitpid(parent, 0)
    (pid,) = struct.unpack("<I", os.read(said, 4))
    for fd in (said, says, waits, go):
        os.close(fd)
    return int(pid)


def _run(request: Request, base: list[str]) -> NoReturn:
    """Be the process that was asked for, to its end; `base` is the module path without anybody's PYTHONPATH."""
    if request["new_session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _rewrite(request["words"], request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    safe_path = request["words"][1] == "-P"
    words = request["words"][2 if safe_path else 1 :]
    module = words[1] if words[0] == "-m" else ""
    first = [] if safe_path else [request["cwd"] if module else os.path.dirname(os.path.abspath(words[0]))]
    extra = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = list(dict.fromkeys([*first, *extra, *base]))
    importlib.invalidate_caches()
    sys.orig_argv[:] = request["words"]
    if module and WITH_CHILDREN & set(words[2:3]):
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(nothing, fd)
            _run(_serve(theirs), base)
        theirs.close()
        WarmPopen.template = Template(ours)
        install()
    _open_streams()
    sys.modules["numpy"].random.seed()
    sys.argv[:] = words[1 if module else 0 :]
    _exit(lambda: _run_module(module) if module else runpy.run_path(words[0], run_name="__main__"))


def _run_module(name: str) -> object:
    sys.modules.pop(name if name in IMPORTS else "", None)  # it runs as __main__, and once
    return runpy.run_module(name, run_name="__main__", alter_sys=True)


def _exit(program: Callable[[], object]) -> NoReturn:
    """Run a program and end as an interpreter does, but for taking down hundreds of megabytes of modules."""
    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):  # as Python does
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # wait for its threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _open_streams() -> None:
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _rewrite(words: list[str], env: dict[str, str]) -> None:
    """Show these words and this environment in /proc, in the place of those that the interpreter was started with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    areas = [int(field) for field in fields[45:49]]  # arg_start, arg_end, env_start, env_end
    lines = [words, [f"{name}={value}" for name, value in env.items()]]
    for start, end, texts in zip(areas[::2], areas[1::2], lines, strict=True):
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start - 1]
        ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def _adopt_orphans(adopt: bool) -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, int(adopt), 0, 0, 0)


def _read(sock: socket.socket, size: int) -> bytes:
    data = sock.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise RuntimeError("the template of warm starts has ended")
    return data


def _main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    extra = {path for path in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if path}
    for module in IMPORTS:
        importlib.import_module(module)
    os.environ.clear()  # none of it may stay where the environments of others are written
    _run(_serve(sock), [path for path in sys.path if path not in extra])


if __name__ == "__main__":
    _main()
