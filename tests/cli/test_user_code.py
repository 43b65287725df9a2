"""User-defined codecs and optimizers that are missing or broken: said before a shard or a run is started."""

import importlib
import sys

import pytest
from half_codec import HALF_CODEC
from report_cases import JOB
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli import local_job
from embershard.compare.run import runs
from embershard.proto.errors import EmbershardError

OPTIMIZER = """
import embershard as es

@es.row_optimizer(settings={"scale": 1.0})
def plain(row, state, grad, hyper):
    for j in range(row.size):  # a slice would take seconds to compile
        row[j] -= hyper[0] * hyper[1] * grad[j]
"""
NO_CODEC = "no codec 'mine_none:half' here (known: none, fp16s, bf16, int8, onebit); a user-defined one needs `--import"
BROKEN = "module 'mine_broken' cannot be imported: ValueError: sad ("
NO_OPTIMIZER = "no optimizer 'mine_optimizer:plain' here"
CUSTOM = "{name: 'mine_optimizer:plain', lr: 0.1}"
SIZED = "embedding.groups=[{match: a, optimizer: {name: 'mine_optimizer:plain', lr: 0.1, settings: {size: 2}}}]"


class Started(Exception):
    """A shard or a run was about to be started."""


MODULES = {"mine_codec": HALF_CODEC, "mine_optimizer": OPTIMIZER, "mine_broken": "raise ValueError('sad')"}


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """A folder of modules, which are compiled once."""
    folder = tmp_path_factory.mktemp("modules")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, modules):
    """A job here, and some modules that can be imported; nothing can be started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(modules), *sys.path])
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    (tmp_path / "job.yaml").write_text(JOB)

    def start(*_, **__):
        raise Started("started")

    monkeypatch.setattr(local_job, "LocalShards", start)
    monkeypatch.setattr(runs.subprocess, "Popen", start)


def said(command, *words):
    """What a command ended with, on one line."""
    error = CliRunner().invoke(cli.app, [command, "job.yaml", "--output", "out", *words]).exception
    assert isinstance(error, EmbershardError | Started)
    assert "\n" not in str(error)
    return str(error)


COMPARE, TRAIN = ("compare", "--arms"), ("train", "--set")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*COMPARE, "none,mine_none:half"), NO_CODEC),
        ((*COMPARE, "none,topk:0.1+mine_none:half"), NO_CODEC),
        ((*COMPARE, "none,int8", "--import", "mine_broken"), BROKEN),
        ((*COMPARE, "none,int8", "--import", "nothing_here"), "module 'nothing_here' cannot be imported: ModuleNotF"),
        ((*COMPARE, "none,int8", "--import", "sys"), "module 'sys' has no function decorated with @row_optimizer or"),
        ((*COMPARE, "none,mine_codec:half", "--import", "mine_codec"), "started"),
        ((*TRAIN, "compression.push=mine_none:half"), NO_CODEC),
        ((*TRAIN, "compression={auto: true, allow: ['mine_none:half']}"), NO_CODEC),
        (("train", "--import", "mine_broken"), BROKEN),
        ((*TRAIN, "compression.push=mine_codec:half", "--import", "mine_codec"), "started"),
        ((*TRAIN, f"embedding.optimizer={CUSTOM}"), NO_OPTIMIZER),
        ((*TRAIN, f"dense.optimizer={CUSTOM}"), NO_OPTIMIZER),
        ((*TRAIN, f"embedding.optimizer={CUSTOM}", "--import", "mine_optimizer"), "started"),
        (
            (*TRAIN, SIZED, "--import", "mine_optimizer"),
            "row optimizer 'mine_optimizer:plain': it has no setting size (it has: lr, scale",
        ),
        # a module that is gone does not keep a report from being written
        ((*COMPARE, "none,mine_none:half", "--report-only"), "there are no runs in out"),
    ],
)
def test_user_code_is_looked_for_before_anything_starts(words, message, tmp_path):
    assert said(*words).startswith(message)
    assert (tmp_path / "out").exists() is (message == "started")


def test_an_optimizer_of_shards_that_run_already_is_theirs(monkeypatch):
    monkeypatch.setattr(local_job, "_meet_shards", lambda *_, **__: None)
    monkeypatch.setattr(local_job, "LocalWorkers", local_job.LocalShards)
    assert said(*TRAIN, f"embedding.optimizer={CUSTOM}", "--ps", "127.0.0.1:7700,127.0.0.1:7701") == "started"
