"""The public names are those of __init__.pyi, and each of them can be had."""

import subprocess
import sys

import pytest

import embershard


def test_a_star_import_gives_the_public_names_each_of_which_is_there_and_no_others():
    names = {}
    exec("from embershard import *", names)
    assert set(names) - {"__builtins__"} == set(embershard.__all__) <= set(dir(embershard))
    assert None not in names.values()
    assert {"connect", "wrap", "errors"} <= set(names)
    assert not {"use_onednn", "keep_freed_memory"} & set(names)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = embershard.no_such_name


def test_importing_the_package_loads_nothing_of_it():
    code = "import sys, embershard; print(*(m for m in sys.modules if m.startswith('embershard.') or m == 'torch'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
