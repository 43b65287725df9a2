"""The public names are those of __init__.pyi, and each of them can be had."""

import subprocess
import sys

import pytest

import embershard


@pytest.mark.parametrize("name", embershard.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(embershard, name) is not None
    assert name in dir(embershard)


def test_a_star_import_gives_the_public_names_and_no_others():
    names: dict[str, object] = {}
    exec("from embershard import *", names)
    assert set(names) - {"__builtins__"} == set(embershard.__all__)
    assert {"connect", "wrap", "errors"} <= set(names)
    assert not {"use_onednn", "keep_freed_memory"} & set(names)


def test_a_name_that_is_none_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = embershard.no_such_name  # type: ignore[attr-defined]


def test_importing_the_package_loads_nothing_of_it():
    code = "import sys, embershard; print(*(m for m in sys.modules if m.startswith('embershard.') or m == 'torch'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
