"""`embershard evaluate` as it prints its figures."""

import contextlib
import json
import math

from typer.testing import CliRunner

from embershard.cli import evaluate as command
from embershard.cli.app import app

JOB = """\
model: {name: dlrm}
data: {reader: clicks, eval_samples: 500}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 128, samples: 1280}
"""


class Blind:
    """A live evaluation whose split has one class alone."""

    def __init__(self, *_: object) -> None: ...

    def evaluate(self) -> tuple[int, dict[str, dict[str, float]]]:
        return 7, {"valid": {"auc": math.nan, "logloss": 0.5}}


def test_a_figure_that_is_not_defined_is_null(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LiveEvaluator", Blind)
    monkeypatch.setattr(command, "connect", lambda *_, **__: contextlib.nullcontext())
    (tmp_path / "job.yaml").write_text(JOB)
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "job.yaml"), "--ps", "127.0.0.1:1"])
    assert done.exit_code == 0, done.output

    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    line = json.loads(done.output, parse_constant=refuse)
    assert line["valid"] == {"auc": None, "logloss": 0.5}
