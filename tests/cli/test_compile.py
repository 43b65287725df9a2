"""`embershard compile`."""

import subprocess
import sys

import pytest


@pytest.mark.long
def test_what_was_compiled_is_loaded_by_all_that_start():
    command = [sys.executable, "-m", "embershard", "compile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "compiled\n"
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "from embershard.cli.compile import compile\n"
        "compile()"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert again.stdout == "compiled\n"
