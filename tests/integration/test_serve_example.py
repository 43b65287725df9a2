"""From a job file to scores over HTTP: the example's app answers what the trainer's last evaluation computed."""

import csv
import http.client
import json
import random
import runpy
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import embershard as es
from embershard.cli.app import app as embershard
from harness.eventually import eventually
from harness.processes import said

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
uvicorn = pytest.importorskip("uvicorn")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "serve" / "app.py"

CTR_CSV = """\
data: {reader: ctr_csv, train: clicks.csv, valid: clicks.csv, numeric: [age], skip: [tags, day], log: true}
"""
FEATURES = """\
data: {reader: tabular, train: clicks.csv, valid: clicks.csv, label: label}
features:
  user: {}
  item: {min_count: 12}
  tags: {type: list, separator: "|"}
  age: {type: number, transform: [log, quantile], missing: 0.5}
"""
JOB = """\
model: {name: dcn_v2, hidden: [16]}
embedding: {dim: 8, optimizer: {name: adagrad, lr: 0.1}}
train: {batch_size: 32, epochs: 2}
metrics: ["my_metrics:keep"]
checkpoint: {folder: checkpoints}
workers: 1
shards: 2
"""
METRICS = """\
import numpy as np
def keep(labels, logits):
    np.savetxt("logits.txt", logits, fmt="%.9g")
    return float(np.mean(logits))
"""


@pytest.fixture(params=[CTR_CSV, FEATURES], ids=["ctr_csv", "features"])
def served(start, tmp_path, monkeypatch, request):
    """The app over what a run with two shard processes trained; a function that asks it, and the columns to ask for."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    rows = {
        "user": [f"ü{draw.randrange(20)}" for _ in range(300)],
        "item": [int(draw.expovariate(0.1)) for _ in range(300)],
        "tags": ["|".join(draw.sample("abcdefg", draw.randrange(4))) for _ in range(300)],
        "age": [draw.choice([None, draw.randrange(80)]) for _ in range(300)],
    }
    with open("clicks.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", *rows, "day"])
        writer.writerows((draw.randrange(2), *row, 1) for row in zip(*rows.values(), strict=True))
    Path("my_metrics.py").write_text(METRICS)
    said(start(request.param + JOB))
    done = CliRunner().invoke(embershard, ["export", "job.yaml", "checkpoints", "export", "--latest"])
    assert done.exit_code == 0, done.output
    server = uvicorn.Server(
        uvicorn.Config(runpy.run_path(str(EXAMPLE))["make_app"]("export"), port=0, log_level="warning")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    assert eventually(lambda: server.started)
    (port,) = (socket.getsockname()[1] for one in server.servers for socket in one.sockets)

    def ask(method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(
            method, path, None if body is None else json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    if request.param == CTR_CSV:
        del rows["tags"]
    yield ask, rows
    server.should_exit = True
    thread.join()


def test_a_score_that_is_no_number_is_answered_by_422_and_its_row(monkeypatch):
    scores = np.array([0.5, np.inf, np.nan], np.float32)
    monkeypatch.setattr(
        es, "load_exported", lambda folder, dense: SimpleNamespace(score=lambda rows: scores[: len(rows["x"])])
    )
    example = runpy.run_path(str(EXAMPLE))
    (score,) = (route.endpoint for route in example["make_app"]("export").routes if route.path == "/score")
    assert score(example["ScoreRequest"](rows={"x": [1]})).status_code == 200
    answer = score(example["ScoreRequest"](rows={"x": [1, 2, 3]}))
    assert (answer.status_code, json.loads(answer.body)["row"]) == (422, 1)


def test_a_folder_that_is_no_export_is_named_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["app.py", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE))["main"]()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: cannot serve {tmp_path}/none: no such folder\n"


def test_scores_over_http_are_those_of_the_trainers_evaluation(served):
    ask, rows = served
    status, answer = ask("POST", "/score", {"rows": rows})
    assert status == 200
    np.testing.assert_allclose(answer["scores"], np.loadtxt("logits.txt"), rtol=1e-6, atol=1e-6)
    assert ask("GET", "/health") == (200, {"status": "ok", "model": "dcn_v2", "features": list(rows)})
    one = {name: column[:1] for name, column in rows.items()}
    for change, feature, value in (
        ({"x": [1]}, "x", None),
        ({"age": ["old"]}, "age", "'old'"),
        ({"user": [7.5]}, "user", "7.5"),
        ({"user": ["\ud800"]}, "user", "'\\ud800'"),
        ({"age": [float("inf")]}, "age", "inf"),
    ):
        status, answer = ask("POST", "/score", {"rows": {**one, **change}})
        assert (status, answer["feature"], answer["value"]) == (422, feature, value)
    assert ask("POST", "/score", {"rows": {"user": ["a"] * 10_001}})[0] == 413
    assert ask("POST", "/score", [])[0] == 422
