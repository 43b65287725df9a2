"""bench/peers.py runs other people's programs, wherever EMBERSHARD_PEERS says that they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
DENSE = """
import torch
class Dense(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
loss_fn = torch.nn.functional.mse_loss
"""
PROGRAM = """
import json, os
from dlrm_torch import Dense
print(json.dumps({"peer": "own", "layer": type(Dense().layer).__name__, "folder": os.environ["EMBERSHARD_PEERS"]}))
"""


@pytest.fixture
def peers(tmp_path):
    folder = tmp_path / "given" / "peers"
    folder.mkdir(parents=True)
    (folder / "dlrm_torch.py").write_text(DENSE)
    (folder / "own.py").write_text(PROGRAM)
    return folder


def run(program: str, cwd: Path, folder: str) -> dict[str, str]:
    """What a program of bench/peers.py printed."""
    code = f"import json\nfrom peers import Program\nprint(json.dumps({program}.run([])))"
    environment = {**os.environ, "EMBERSHARD_PEERS": folder, "PYTHONPATH": str(BENCH)}
    said = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return dict(json.loads(said.stdout))


def test_a_relative_folder_of_peers_is_found_from_where_programs_run(peers):
    said = run("Program('own', 'own.py')", peers.parent, "peers")
    assert said["folder"] == str(peers)
    assert said["layer"] == "Linear"


def test_a_program_on_torch_gets_the_linear_layers_of_use_onednn(peers):
    said = run("Program('own', 'own.py').with_onednn", peers.parent, "peers")
    assert said["layer"] == "OneDnnLinear"
