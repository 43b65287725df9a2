"""The ways in which compiled code is kept."""

import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numba
import numpy as np
import pytest
from numba.core import caching, types

from embershard.proto import routing
from embershard.proto.compiled import intrinsics, jit


class Counts(NamedTuple):
    """What numba finds the type of in Python, where another thread may run meanwhile."""

    values: np.ndarray


class TestCompiled:
    def test_it_works_where_no_cache_can_be_kept(self, monkeypatch):
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
        with pytest.raises(RuntimeError, match="cannot cache"):
            numba.njit(cache=True)(lambda: None)
        half = jit.compiled(numba.float64(numba.float64))(lambda x: x / 2)
        assert half(3.0) == 1.5

    def test_what_was_kept_is_taken_again_until_a_part_changes(self, tmp_path, monkeypatch):
        (tmp_path / "kept.py").write_text("def double(x):\n    return x + x\n")
        (tmp_path / "part.py").write_text("one = 1\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        kept, part = importlib.import_module("kept"), importlib.import_module("part")

        def compile_it():
            stats = jit.load(jit.compiled(numba.int64(numba.int64), part)(kept.double)).stats
            return sum(stats.cache_hits.values()), sum(stats.cache_misses.values())

        assert compile_it() == (0, 1)
        assert compile_it() == (1, 0)
        (tmp_path / "part.py").write_text("one = 2\n")
        assert compile_it() == (0, 1)

    def test_what_was_kept_beside_the_file_is_taken_where_that_folder_cannot_be_written(self, tmp_path, monkeypatch):
        (tmp_path / "installed.py").write_text("def double(x):\n    return x + x\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        double = importlib.import_module("installed").double

        def compile_it(argument=numba.int64):
            stats = jit.load(jit.compiled(argument(argument))(double)).stats
            return sum(stats.cache_hits.values()), sum(stats.cache_misses.values())

        assert compile_it() == (0, 1)
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])  # root writes to every folder
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert compile_it() == (1, 0)
        assert compile_it(numba.float64) == (0, 1)  # and kept nowhere
        assert compile_it() == (1, 0)

    def test_code_kept_by_a_version_whose_classes_had_other_names_is_compiled_anew(self, tmp_path, monkeypatch):
        module = "import typing\nclass {0}(typing.NamedTuple):\n    x: int\ndef of(pair):\n    return pair.x\n"
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in ("Before", "After"):
            (tmp_path / "renamed.py").write_text(module.format(name))
            sys.modules.pop("renamed", None)
            importlib.invalidate_caches()
            renamed = importlib.import_module("renamed")
            pair = numba.types.NamedTuple((numba.int64,), getattr(renamed, name))
            assert jit.load(jit.compiled(numba.int64(pair))(renamed.of)).stats.cache_misses.total() == 1

    def test_a_call_with_another_signature_is_not_compiled_at_run_time(self):
        half = jit.compiled(numba.int64(numba.int64))(lambda x: x // 2)
        for _ in range(2):  # before it is loaded, and after
            with pytest.raises(TypeError):
                half("three")
        assert half(7) == 3

    def test_the_digest_depends_on_every_part(self):
        parts = [(), (intrinsics,), (intrinsics, routing), (routing.__file__,)]
        assert len({jit.sources(*some) for some in parts}) == 4

    def test_the_address_of_a_function_that_was_not_called_yet_is_one(self):
        half = jit.compiled(numba.float64(numba.float64))(lambda x: x / 2)
        assert intrinsics.address_of(half) != 0

    def test_one_that_calls_another_one_is_compiled_with_that_ones_signature(self):
        half = jit.compiled(numba.float64(numba.float64))(lambda x: x / 2)
        quarter = jit.compiled(numba.float64(numba.int64))(lambda x: half(x) / 2)
        assert quarter(3) == 0.75
        assert [str(signature) for signature in half.signatures] == ["(float64,)"]

    def test_threads_may_call_a_function_first_at_the_same_time(self, monkeypatch):
        readonly = types.Array(types.int64, 1, "C", readonly=True)

        @jit.compiled(types.int64(readonly, types.NamedUniTuple(types.int64[::1], 1, Counts)))
        def total(ids, counts):
            return ids[0] + counts.values[0]

        ids, counts = np.ones(3, np.int64), Counts(np.full(2, 5))  # which can be written: one to convert
        type_of = total.typeof_pyval

        def type_of_while_another_calls(value):
            monkeypatch.setattr(total, "typeof_pyval", type_of)
            with ThreadPoolExecutor() as pool:
                assert pool.submit(total, ids, counts).result() == 6
            return type_of(value)

        monkeypatch.setattr(total, "typeof_pyval", type_of_while_another_calls)
        assert total(ids, counts) == 6

    def test_other_types_than_the_declared_ones_are_refused(self):
        half = jit.compiled(numba.float64(numba.float64))(lambda x: x / 2)
        for _ in range(2):  # the first call too
            with pytest.raises(TypeError, match="No matching definition for argument type"):
                half("3")


KERNELS = """
import importlib, logging, pkgutil, sys
logging.basicConfig(level=logging.INFO)
import embershard.proto.codec, embershard.proto.codec.values
from embershard.proto.compiled import intrinsics, jit

for folder in (embershard.proto.codec, embershard.proto.codec.values):
    for found in pkgutil.iter_modules(folder.__path__, folder.__name__ + "."):
        importlib.import_module(found.name)
jit.compile_missing(everything=True)
before = set(sys.modules)
for kernel in list(jit._pending):
    jit.load(kernel)
print(sorted({"scipy.linalg", "numba.np.arraymath"} & (set(sys.modules) - before)))
"""


@pytest.mark.integration
class TestProcesses:
    @pytest.mark.long
    def test_processes_that_start_at_once_compile_each_function_once(self, tmp_path):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", KERNELS]
        pipes = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        both = [subprocess.Popen(command, **pipes) for _ in range(2)]
        said = [process.communicate(timeout=250)[1] for process in both]
        assert [process.returncode for process in both] == [0, 0], said
        compiled = [line.split()[-1] for line in "".join(said).splitlines() if ":compiling " in line]
        assert compiled
        assert len(compiled) == len(set(compiled))
        assert ":waiting for another process" in "".join(said)

        third = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=True)
        assert "compiling" not in third.stderr
        assert third.stdout.strip() == "[]"  # loading code imports none of what compiling it needs
