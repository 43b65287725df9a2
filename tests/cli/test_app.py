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
sys.argv = ["embershard", *{arguments!r}]
from embershard.cli import main
try:
    main()
except SystemExit:
    pass
print("heavy:", sorted({{"torch", "pyarrow", "torchmetrics"}} & set(sys.modules)))
"""


def modules_of(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(arguments=arguments)], capture_output=True, text=True, timeout=250
    )
    return done.stdout.splitlines()[-1]


def test_the_list_of_commands_imports_none_of_them():
    assert modules_of("--help") == "heavy: []"


def test_a_shard_imports_no_trainer():
    assert modules_of("ps", "--shard", "0", "--of", "1", "--listen", "nonsense") == "heavy: []"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_help_page(name):
    done = CliRunner().invoke(cli.app, [name, "--help"])
    assert done.exit_code == 0, done.output
    assert f"{name} [OPTIONS]" in done.output


def test_an_unknown_command_is_wrong_usage():
    done = CliRunner().invoke(cli.app, ["serve"])
    assert done.exit_code == 2
    assert "serve" in done.output


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
