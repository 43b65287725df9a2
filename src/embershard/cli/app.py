"""The `embershard` command: finds the module of a command, and turns errors into messages and exit codes."""

from __future__ import annotations

import errno
import gc
import importlib
import io
import keyword
import logging
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from embershard.proto.errors import EmbershardError, Status
from embershard.proto.monitoring.logs import log_as_json, logs_json

# in the order of the help; each is the function, or the group of commands, of that name in the module of that name
COMMANDS = {
    "init": "Write a job file for a data file, from its first rows.",
    "train": "Train a job on this machine, or on running shards (--ps).",
    "up": "Run supervised shards on this machine.",
    "ps": "Serve one shard.",
    "worker": "Run one worker of a job.",
    "compare": "Train several variants of a job (arms) with the same seeds, and report which of them pay.",
    "evaluate": "Evaluate a trained model: a checkpoint, or the weights on running shards.",
    "status": "Show health, rows, bytes and requests of every shard.",
    "dash": "Serve the panel, a web page that shows shards, workers and a run.",
    "top": "Show shards, workers and a run in the terminal.",
    "compression": "Show or switch the codecs of tables while workers train.",
    "doctor": "Check this machine, shards, a job or a run, and print remedies.",
    "compile": "Compile the kernels of shards and workers before they start.",
    "export": "Write a trained model to files for torch, ONNX and others.",
    "import": "Load a model that was trained elsewhere into running shards.",
    "snapshot": "Take a snapshot of all shards, to a folder or remote storage, while they serve.",
    "restore": "Restore a snapshot onto running shards, of any number.",
    "inspect": "Show the contents of a snapshot; --verify checks every file.",
    "manifests": "Print the files with which Kubernetes, Slurm, compose or systemd runs shards and workers.",
    "keys": "Create certificates and tokens, and show access rules.",
    "log": "Show or truncate the event log of a shard.",
    "audit": "Check an audit log of a shard.",
    "bench": "Measure pull and push, training, and how their cost scales.",
}
_MARKUP = re.compile(r"\[(?=[a-zA-Z#/@])")
OF_TRAINING = ("torch", "pyarrow")  # packages of the extra `train`, without which shards serve
# what a machine may say to any write, at any moment; everything else is a defect, and shows its traceback
_NOT_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)  # of a place that a user named
# what a limit on this process refuses it, of which the system names neither a file nor the limit
_LIMITS = {
    errno.EAGAIN: "processes: raise the limit on processes (ulimit -u, TasksMax= in systemd, pids of the container)",
    errno.ENOMEM: "memory: raise the limit on memory (ulimit -v, MemoryMax= in systemd, memory of the container)",
    errno.EMFILE: "open files: raise the limit on files (ulimit -n 65536, LimitNOFILE= in systemd)",
}
_NO_THREAD = re.compile("can't start new thread|Failed to launch worker thread")  # of Python, of pyarrow


_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])  # for which typer has no name


class LazyCommands(TyperGroup):
    """Commands that are imported when they are called: neither a shard nor a help page waits for torch."""

    def __init__(self, **settings):  # type: ignore[no-untyped-def]  # the types are of a click that typer hides
        super().__init__(**settings)
        # with its help for the list of commands; of these typer suggests one for a name that none has
        self.commands = {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]  # the types are of a click that typer hides
        """The command that is called, whole."""
        name, command, rest = super().resolve_command(ctx, args)
        if name == "worker":
            _end_with_launcher(rest)
        return name, command and _load(str(command.name)), rest

    def invoke(self, ctx):  # type: ignore[no-untyped-def]  # as above
        """Run the command; wrong usage is a line of JSON where the log is."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if not logs_json():
                if "--log-format=json" not in sys.argv and ("--log-format", "json") not in pairwise(sys.argv):
                    raise
                log_as_json(sys.stderr)  # the command was not reached, which would have done so
            fail(error.format_message(), 2)


def _load(name: str) -> TyperCommand:
    word = f"{name}_" if keyword.iskeyword(name) else name
    found = getattr(importlib.import_module(f"embershard.cli.{word}"), word)
    if not gc.isenabled():  # see main: what was imported is left out of every later search for garbage
        gc.freeze()
        gc.enable()
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command(name)(function)
    command: TyperCommand = typer.main.get_command(found)  # type: ignore[assignment]
    _escape_brackets(command)
    return command


def _end_with_launcher(words: Sequence[str]) -> None:
    """Have a worker end with whoever started it from here on: its imports take seconds."""
    from embershard.cli.signals import end_with_parent
    from embershard.deploy.sessions import kill_own

    pid = next((value for word, value in pairwise(words) if word == "--parent-pid"), "0")
    if pid.isdecimal():  # else it is refused
        end_with_parent(int(pid), kill_own)


def _escape_brackets(command: TyperCommand) -> None:
    """Have the help of options show brackets, as in "[default: all]", which rich would take for markup."""
    for param in command.params:
        if text := getattr(param, "help", None):
            param.help = _MARKUP.sub(r"\\[", text)  # type: ignore[attr-defined]
    for one in getattr(command, "commands", {}).values():
        _escape_brackets(one)


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from embershard.proto.user_modules import version_of

        typer.echo(f"embershard {version_of()}")
        raise typer.Exit


@app.callback()
def _embershard(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """A sharded parameter server for recommender models in PyTorch."""


def run() -> None:
    """Run the command line; a named error, a place that cannot be written, or a limit ends it with exit code 1."""
    _open_closed_streams()
    # torch's C++ warnings bring stack frames along, and what they warn of reaches us as an exception
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for stream in (sys.stdout, sys.stderr):  # a locale without the characters of a name must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS") == "0":  # as programs without a terminal may export it: rich would print empty lines
        del os.environ["COLUMNS"]
    try:
        _choose_shared_memory(os.environ.get("EMBERSHARD_SHARED_MEMORY", "on"))
        app()
    except EmbershardError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        if (missing := (error.name or "").partition(".")[0]) not in OF_TRAINING:
            raise
        fail(f"this command needs {missing}, which is not installed: pip install 'embershard[train]' (README.md)")
    except OSError as error:
        if _has_no_folder():
            fail("the current folder was removed; change to another one, and run the command again")
        if error.errno in _LIMITS and not hasattr(error, "characters_written"):  # of an output that does not block
            fail(f"the system gives this command no more {_LIMITS[error.errno]} ({error.strerror})")
        if error.errno in _NO_ACCESS and error.filename:
            fail(f"cannot use {error.filename}: {error.strerror}; name another place, or correct that")
        if error.errno not in _NOT_OURS:
            raise
        remedy = "; raise the limit on files' size (ulimit -f, LimitFSIZE= in systemd)" * (error.errno == errno.EFBIG)
        fail(f"cannot write to {error.filename or 'the output'}: {error.strerror}{remedy}")
    except Exception as error:
        if not _NO_THREAD.search(str(error)):
            raise
        fail(f"the system gives this command no more threads and {_LIMITS[errno.EAGAIN]}, or on memory (ulimit -v)")
    finally:
        _end_children()


def _open_closed_streams() -> None:
    """Open /dev/null where the caller has closed stdin, stdout or stderr, for this process and its children.

    Else an event loop's own file gets that number, and uvloop aborts or hangs at its end.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
        if getattr(sys, name) is None:  # as Python leaves it
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


def _has_no_folder() -> bool:
    """Whether somebody has removed the current folder."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


class BadEnvironment(EmbershardError):
    """An environment variable with a value that it cannot have."""

    status = Status.INVALID_ARGUMENT
    template = "{variable} is {value!r} in the environment: {remedy}"


def _choose_shared_memory(value: str) -> None:
    if value.lower() in ("off", "false", "no", "0"):
        from embershard.proto.shared_memory import switch_off

        switch_off()
    elif value.lower() not in ("", "on", "true", "yes", "1"):
        raise BadEnvironment(variable="EMBERSHARD_SHARED_MEMORY", value=value, remedy="write on or off, or unset it")


def _end_children() -> None:
    """End what a user's code started by multiprocessing, for which Python would wait at its exit."""
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing is not None else ():
        child.terminate()


def printable(text: str) -> str:
    """Replace control characters in a text of a server or a file, which could change the terminal's state."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def fail(text: str, code: int = 1) -> NoReturn:
    """End the command with an error message."""
    shown = printable(text)
    if logs_json():
        logging.getLogger("embershard.cli").error(shown)
    else:
        typer.echo(f"error: {shown}", err=True)
    sys.exit(code)
