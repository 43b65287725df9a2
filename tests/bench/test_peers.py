"""bench/peers.py runs other people's programs, wherever EMBERSHARD_PEERS says that they are."""

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


BY_HAND = """
def adagrad_rows(w, s, ids, g, lr):
    sr = s.index_select(0, ids).addcmul_(g, g)
    w.index_add_(0, ids, g / sr.sqrt_().add_(1e-10), alpha=-lr)
"""


def test_adagrad_by_hand_scales_a_step_before_it_is_added_and_gives_the_same_weights(monkeypatch, tmp_path):
    for name, text in (("common.py", COMMON), ("dlrm_torch.py", DENSE), ("inproc.py", BY_HAND)):
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(BENCH))
    peers = importlib.import_module("peers")
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    (tmp_path / "copy").mkdir()
    copy = peers._copied(tmp_path / "copy", 512, peers.Program("own", "inproc.py")) / "inproc.py"
    assert "alpha=" not in copy.read_text()
    weights, gradient = torch.ones(2, 3), torch.tensor([[0.5, -1.0, 2.0]])
    for script in (tmp_path / "inproc.py", copy):
        given = gradient.clone()
        update = runpy.run_path(str(script))["adagrad_rows"]
        update(weights, torch.zeros(2, 3), torch.tensor([1]), given, 0.25)
        assert torch.equal(given, gradient)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1, 1], [0.5, 1.5, 0.5]]))


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
