"""deploy/demo holds what `embershard manifests` prints for examples/demo.yaml."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from embershard.cli.app import app

ROOT = Path(__file__).resolve().parents[3]
IMAGES = "--image embershard:1 --worker-image embershard-worker:1"
PRINTED = {
    "kubernetes.yaml": f"kubernetes --name demo --job examples/demo.yaml {IMAGES}",
    "compose.yaml": f"compose --name demo --job ../../examples/demo.yaml {IMAGES}",
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_files_of_the_demo_are_what_the_command_prints(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["manifests", *PRINTED[name].split()])
    assert done.exit_code == 0, done.output
    kept = (ROOT / "deploy" / "demo" / name).read_text()
    assert kept == done.stdout, f"embershard manifests {PRINTED[name]} > deploy/demo/{name}"
