"""bench/peers.py runs other people's programs, wherever EMBERSHARD_PEERS says that they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
COMMON = "DIM, BATCH, NDENSE, NCAT = 16, 2048, 13, 26\n"
DENSE = """
import torch
torch.set_num_threads(1)
class Dense(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
loss_fn = torch.nn.functional.mse_loss
"""
PROGRAM = """
import json, torch
from common import BATCH
from dlrm_torch import Dense
said = {"peer": "own", "layer": type(Dense().layer).__name__, "batch": BATCH, "threads": torch.get_num_threads()}
print(json.dumps(said))
"""


@pytest.mark.parametrize(
    ("changes", "layer", "threads"),
    [
        pytest.param("", "Linear", 1, marks=pytest.mark.long),
        (".with_onednn", "OneDnnLinear", 1),
        pytest.param(".on_two_threads", "Linear", 2, marks=pytest.mark.long),
    ],
)
def test_programs_of_a_relative_folder_run_with_the_batch_threads_and_linear_layers_that_are_wanted(
    changes, layer, threads, tmp_path
):
    folder = tmp_path / "given" / "peers"
    folder.mkdir(parents=True)
    for name, text in (("common.py", COMMON), ("dlrm_torch.py", DENSE), ("own.py", PROGRAM)):
        (folder / name).write_text(text)
    code = f"import json\nfrom peers import Program\nprint(json.dumps(Program('own', 'own.py'){changes}.run([], 512)))"
    environment = {**os.environ, "EMBERSHARD_PEERS": "peers", "PYTHONPATH": str(BENCH)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"peer": "own", "layer": layer, "batch": 512, "threads": threads}
