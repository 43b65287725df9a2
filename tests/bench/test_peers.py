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


@pytest.mark.parametrize(
    ("onednn", "layer"), [pytest.param("", "Linear", marks=pytest.mark.long), (".with_onednn", "OneDnnLinear")]
)
def test_a_relative_folder_of_peers_is_found_from_where_programs_run_with_its_linear_layers_or_ours(
    onednn, layer, tmp_path
):
    folder = tmp_path / "given" / "peers"
    folder.mkdir(parents=True)
    (folder / "dlrm_torch.py").write_text(DENSE)
    (folder / "own.py").write_text(PROGRAM)
    code = f"import json\nfrom peers import Program\nprint(json.dumps(Program('own', 'own.py'){onednn}.run([])))"
    environment = {**os.environ, "EMBERSHARD_PEERS": "peers", "PYTHONPATH": str(BENCH)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["folder"], said["layer"]) == (str(folder), layer)
