"""User-defined codecs and optimizers that are missing or broken: said before a shard or a run is started."""

import importlib
import sys

import pytest
from half_codec import HALF_CODEC
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli import train as train_command
from embershard.compare.run import runs
from embershard.proto.errors import EmbershardError

JOB = """\
model: {name: dlrm, bottom: [16], hidden: [16]}
data: {reader: clicks, eval_samples: 3000}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 10_000}
"""
OPTIMIZER = """
import embershard as es

@es.row_optimizer(settings={"scale": 1.0})
def plain(row, state, grad, hyper):
    row[:] -= hyper[0] * hyper[1] * grad
"""
NO_CODEC = "no codec 'mine_none:half' here (known: none, fp16s, bf16, int8, onebit); a user-defined one needs `--import"
CUSTOM = "{name: 'mine_optimizer:plain', lr: 0.1}"
SIZED = "{name: 'mine_optimizer:plain', lr: 0.1, settings: {size: 2}}"


class Started(Exception):
    """A shard or a run was about to be started."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A job and some modules here; nothing can be started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = {"mine_codec": HALF_CODEC, "mine_optimizer": OPTIMIZER, "mine_broken": "raise ValueError('sad')"}
    for name, text in modules.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    (tmp_path / "job.yaml").write_text(JOB)

    def start(*_, **__):
        raise Started

    monkeypatch.setattr(train_command, "LocalShards", start)
    monkeypatch.setattr(runs.subprocess, "Popen", start)


def said(*words: str) -> str:
    """What a command ended with, on one line."""
    error = CliRunner().invoke(cli.app, list(words)).exception
    assert isinstance(error, EmbershardError | Started)
    assert "\n" not in str(error)
    return "started" if isinstance(error, Started) else str(error)


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (["none,mine_none:half"], NO_CODEC),
        (["none,topk:0.1+mine_none:half"], NO_CODEC),
        (["none,int8", "--import", "mine_broken"], "module 'mine_broken' cannot be imported: ValueError: sad; `python"),
        (["none,int8", "--import", "nothing_here"], "module 'nothing_here' cannot be imported: ModuleNotFoundError"),
        (["none,int8", "--import", "sys"], "module 'sys' has no function decorated with @row_optimizer or"),
        (["none,mine_codec:half", "--import", "mine_codec"], "started"),
    ],
)
def test_a_comparison_looks_for_user_code_before_its_first_run(arms, message, tmp_path):
    text = said("compare", "job.yaml", "--output", "out", "--arms", *arms)
    assert text.startswith(message)
    assert (tmp_path / "out").exists() is (message == "started")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "compression.push=mine_none:half"], NO_CODEC),
        (["--set", "compression={auto: true, allow: ['mine_none:half']}"], NO_CODEC),
        (["--import", "mine_broken"], "module 'mine_broken' cannot be imported: ValueError: sad; `python"),
        (["--set", "compression.push=mine_codec:half", "--import", "mine_codec"], "started"),
        (["--set", f"embedding.optimizer={CUSTOM}"], "no optimizer 'mine_optimizer:plain' here"),
        (["--set", f"dense.optimizer={CUSTOM}"], "no optimizer 'mine_optimizer:plain' here"),
        (["--set", f"embedding.optimizer={CUSTOM}", "--import", "mine_optimizer"], "started"),
        (
            ["--import", "mine_optimizer", "--set", f"embedding.groups=[{{match: a, optimizer: {SIZED}}}]"],
            "row optimizer 'mine_optimizer:plain': it has no setting size (it has: lr, scale",
        ),
    ],
)
def test_training_looks_for_user_code_before_its_shards_start(words, message, tmp_path):
    text = said("train", "job.yaml", "--output", "out", *words)
    assert text.startswith(message)
    assert (tmp_path / "out").exists() is (message == "started")


def test_an_optimizer_of_shards_that_run_already_is_theirs(monkeypatch):
    monkeypatch.setattr(train_command, "_meet_shards", lambda ps, checkpoint, replace: None)
    monkeypatch.setattr(train_command, "LocalWorkers", train_command.LocalShards)
    words = ["train", "job.yaml", "--output", "out", "--set", f"embedding.optimizer={CUSTOM}"]
    assert said(*words, "--ps", "127.0.0.1:7700,127.0.0.1:7701") == "started"


def test_a_module_that_is_gone_does_not_keep_a_report_from_being_written(tmp_path):
    words = ["compare", "job.yaml", "--output", "out", "--arms", "none,mine_none:half", "--report-only"]
    assert said(*words).startswith("there are no runs in out")
