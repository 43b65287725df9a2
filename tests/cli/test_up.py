"""What `embershard up` refuses before it starts anything."""

import pytest
from typer.testing import CliRunner

from embershard.cli import up as command
from embershard.cli.app import app


@pytest.mark.parametrize(("port", "shards"), [(65535, 2), (65000, 537)])
def test_a_base_port_without_room_for_the_shards_is_wrong_usage(port, shards, monkeypatch):
    monkeypatch.setattr(command, "signal", None)  # whoever comes so far would change this process
    done = CliRunner().invoke(app, ["up", "--base-port", str(port), "--shards", str(shards)])
    assert done.exit_code == 2, done.output
    assert "--base-port" in done.output
    assert f"no {shards} ports" in done.output
