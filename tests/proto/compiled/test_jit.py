"""The ways in which compiled code is kept."""

from __future__ import annotations

import importlib
import sys

import numba
import pytest
from numba.core import caching

from embershard.proto import routing
from embershard.proto.compiled import intrinsics, jit


class TestCompiled:
    """`compiled` keeps code where it can, works where it cannot, and compiles anew what has changed."""

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
        import kept  # type: ignore[import-not-found]
        import part  # type: ignore[import-not-found]

        def compile_it() -> tuple[int, int]:
            stats = jit.compiled(numba.int64(numba.int64), part)(kept.double).stats
            return sum(stats.cache_hits.values()), sum(stats.cache_misses.values())

        assert compile_it() == (0, 1)
        assert compile_it() == (1, 0)
        (tmp_path / "part.py").write_text("one = 2\n")
        assert compile_it() == (0, 1)

    def test_code_kept_by_a_version_whose_classes_had_other_names_is_compiled_anew(self, tmp_path, monkeypatch):
        module = "import typing\nclass {0}(typing.NamedTuple):\n    x: int\ndef of(pair):\n    return pair.x\n"
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in ("Before", "After"):
            (tmp_path / "renamed.py").write_text(module.format(name))
            sys.modules.pop("renamed", None)
            importlib.invalidate_caches()
            import renamed  # type: ignore[import-not-found]

            pair = numba.types.NamedTuple((numba.int64,), getattr(renamed, name))
            assert jit.compiled(numba.int64(pair))(renamed.of).stats.cache_misses.total() == 1

    def test_a_call_with_another_signature_is_not_compiled_at_run_time(self):
        half = jit.compiled(numba.int64(numba.int64))(lambda x: x // 2)
        with pytest.raises(TypeError):
            half("three")

    def test_the_digest_depends_on_every_part(self):
        digests = {
            jit.sources(),
            jit.sources(intrinsics),
            jit.sources(intrinsics, routing),
            jit.sources(routing.__file__),
        }
        assert len(digests) == 4
