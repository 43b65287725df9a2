"""Files of compiled functions: which are taken, and what happens to those that are not."""

import importlib
import os
import shutil
import subprocess
import sys

import numba
import pytest

from embershard.proto.compiled import jit, kept

DOUBLE = "def double(x):\n    return x + x\n"


@pytest.fixture
def double(tmp_path, monkeypatch):
    """A function in a file of its own."""
    (tmp_path / "kept_double.py").write_text(DOUBLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("kept_double", None)
    importlib.invalidate_caches()
    return importlib.import_module("kept_double").double


def compile_it(function):
    """Whether it was compiled, as by a process that starts now."""
    loaded = jit.load(jit.compiled(numba.int64(numba.int64))(function))
    assert loaded(21) == 42
    return sum(loaded.stats.cache_misses.values()) == 1


def file_of(folder):
    (file,) = (folder / "__pycache__").glob("kept_double.double*.nbc")
    return file


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[:500] + bytes([data[500] ^ 128]) + data[501:],
    ],
    ids=["empty", "its head", "cut", "last byte", "a byte within"],
)
def test_a_damaged_file_is_compiled_anew_and_replaced(double, tmp_path, caplog, damage):
    assert compile_it(double)
    file = file_of(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    kept._warned.clear()
    assert compile_it(double)
    assert caplog.text.count("is damaged") == 1
    assert not compile_it(double)


def test_a_file_that_numba_cannot_load_is_compiled_anew(double, tmp_path, caplog, monkeypatch):
    assert compile_it(double)
    monkeypatch.setattr(kept, "dumps", lambda reduced: b"not a pickle")
    file_of(tmp_path).unlink()
    assert compile_it(double)  # and is written with a digest that is right
    monkeypatch.undo()
    kept._warned.clear()
    assert compile_it(double)
    assert caplog.text.count("cannot be loaded") == 1
    assert not compile_it(double)


def test_a_file_that_cannot_be_read_or_written_is_said_once(double, tmp_path, caplog):
    assert compile_it(double)
    file = file_of(tmp_path)
    file.unlink()
    file.mkdir()  # root reads and writes all files
    kept._warned.clear()
    for _ in range(2):
        assert compile_it(double)
    assert caplog.text.count("cannot be read") == 1
    assert not [path for path in file.parent.iterdir() if path.suffix not in (".nbc", ".lock", ".pyc")]


def test_a_process_waits_for_none_where_locks_are_not_to_be_had(double, monkeypatch):
    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    assert compile_it(double)
    assert not compile_it(double)


SHIP = """
import logging, sys
from pathlib import Path
from embershard.proto.compiled import kept

logging.basicConfig(stream=sys.stdout, format="%(message)s")
kept.SHIPPED, mode = Path(sys.argv[1]), sys.argv[2]
if mode == "here":
    kept.compile_here()
elif mode != "run":
    kept.compile_for_wheel(mode)
import numba
from embershard.proto.compiled import jit
sys.path.insert(0, sys.argv[3])
from kept_double import double

loaded = jit.load(jit.compiled(numba.int64(numba.int64))(double))
assert loaded(21) == 42
print("compiled" if loaded.stats.cache_misses else "taken")
"""


@pytest.mark.integration
class TestShipped:
    @pytest.fixture
    def run(self, tmp_path):
        """Load the function in a process, from a copy of its file with a time of its own; what the process says."""

        def start(mode="run", copy="a", text=DOUBLE, **environment):
            (tmp_path / copy).mkdir(exist_ok=True)
            (tmp_path / copy / "kept_double.py").write_text(text)
            names = {"NUMBA_CACHE_DIR": str(tmp_path / "cache" / copy), **environment}
            command = [sys.executable, "-c", SHIP, str(tmp_path / "shipped"), mode, str(tmp_path / copy)]
            done = subprocess.run(command, env={**os.environ, **names}, capture_output=True, text=True, timeout=100)
            assert not done.returncode, done.stderr
            return done.stdout.splitlines()

        return start

    def test_what_a_wheel_brings_is_taken_by_processors_that_it_is_for_and_no_others(self, run, tmp_path):
        cpu = kept.BASELINES[os.uname().machine][-1]  # the least of them
        assert run(cpu) == ["compiled"]
        (file,) = (tmp_path / "shipped").glob("*.nbc")
        assert f".{cpu}-" in file.name
        assert run() == ["taken"]
        assert run(copy="installed") == ["taken"]  # whatever the time of its file
        assert run("here", copy="own") == ["compiled"]  # `embershard compile` compiles for this very processor
        assert run(copy="changed", text=DOUBLE.replace("x + x", "2 * x")) == ["compiled"]
        assert run(copy="old", NUMBA_CPU_NAME="x86-64", NUMBA_CPU_FEATURES="+sse2") == ["compiled"]
        assert not list(tmp_path.glob("cache/installed/*/*.nbc"))
        file.write_bytes(file.read_bytes()[:-1])
        damaged, compiled = run(copy="damaged")
        assert "is damaged" in damaged
        assert compiled == "compiled"

    def test_what_is_compiled_for_another_processor_is_kept_beside_ours(self, run):
        assert run() == ["compiled"]
        assert run(NUMBA_CPU_NAME="generic") == ["compiled"]
        assert run() == ["taken"]
        assert run(NUMBA_CPU_NAME="generic") == ["taken"]

    @pytest.mark.skipif(os.getuid() == 0 and shutil.which("setpriv") is None, reason="root writes to every folder")
    def test_where_nothing_can_be_written_what_is_beside_the_file_is_taken_and_the_rest_compiled(self, tmp_path):
        folder = tmp_path / "installed"
        folder.mkdir()
        (folder / "kept_double.py").write_text(DOUBLE)
        python = [sys.executable, "-c", SHIP, str(tmp_path / "none"), "run", str(folder)]
        as_others = ["setpriv", "--bounding-set", "-dac_override", *python] if os.getuid() == 0 else python
        names = {"NUMBA_CACHE_DIR": "", "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}

        def start(command, **more):
            environment = {**os.environ, **names, **more}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
            return done.stdout.splitlines()

        assert start(python) == ["compiled"]
        for path in (folder / "__pycache__", folder):
            path.chmod(0o555)
        assert start(as_others) == ["taken"]
        for _ in range(2):
            assert start(as_others, NUMBA_CPU_NAME="generic") == ["compiled"]
        for path in (folder, folder / "__pycache__"):
            path.chmod(0o755)
