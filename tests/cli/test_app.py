"""The `embershard` command itself: what it imports, and how it exits."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli import main
from embershard.proto.errors import UnknownTable

RUN = """
import sys
sys.argv = ["embershard", *{words!r}]
from embershard.cli import main
try:
    main()
except SystemExit:
    pass
print("heavy:", sorted({{"torch", "pyarrow", "torchmetrics"}} & set(sys.modules)))
"""
SERVE_NOWHERE = ("ps", "--shard", "0", "--of", "1", "--listen", "nonsense")


@pytest.mark.parametrize("words", [("--help",), SERVE_NOWHERE], ids=["the list of commands", "a shard"])
def test_what_trains_is_not_imported_by_what_does_not(words):
    said = subprocess.check_output([sys.executable, "-c", RUN.format(words=words)], text=True, timeout=250)
    assert said.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_help_page(name):
    done = CliRunner().invoke(cli.app, [name, "--help"])
    assert done.exit_code == 0, done.output
    assert f"{name} [OPTIONS]" in done.output


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [(UnknownTable(table="t", known="none"), 1, "error: no table 't' here"), (KeyboardInterrupt(), 130, "")],
)
def test_errors_are_messages_and_exit_codes(raised, code, words, monkeypatch, capsys):
    def fail():
        raise raised

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    assert words in capsys.readouterr().err
