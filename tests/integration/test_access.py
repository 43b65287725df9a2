"""Commands with tokens of access.yaml, on shards that are processes."""

import json
import random

import pytest

from embershard.proto.security.tokens import new_token, token_digest, write_private
from harness.processes import run_command
from harness.served import shard_process

JOB = """\
model: {name: deepfm, hidden: [8]}
data: {reader: ctr_csv, train: train.csv, valid: valid.csv}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.1}}
train: {batch_size: 50, epochs: 1}
shards: 2
"""


def write_access(folder, **roles):
    """access.yaml, and the file of a token for each name: (role, more fields)."""
    entries = []
    for name, role in roles.items():
        write_private(folder / f"{name}.token", token := new_token())
        entries.append(f"- {{name: {name}, role: {role}, token_sha256: '{token_digest(token).hex()}'}}")
    write_private(folder / "access.yaml", "\n".join(entries))


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """The addresses of two shards that go by access.yaml."""
    monkeypatch.chdir(tmp_path)
    write_access(tmp_path, trainer="train", reader="read")
    options = ("--access", "access.yaml")
    with shard_process(*options, of=2) as first, shard_process(*options, shard=1, of=2) as second:
        yield f"{first.address},{second.address}"


def write_clicks(path, seed):
    draw = random.Random(seed)
    lines = [f"{int(draw.random() < 0.5)},{draw.randrange(10)},{draw.randrange(10)}" for _ in range(300)]
    path.write_text("\n".join(["label,user,item", *lines, ""]))


def embershard(command, shards, token, *words):
    return run_command(command, "job.yaml", *words, "--ps", shards, "--token-file", f"{token}.token")


def test_a_token_of_role_read_evaluates_what_another_one_trained(shards, tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    for seed, name in enumerate(("train.csv", "valid.csv")):
        write_clicks(tmp_path / name, seed)
    trained = embershard("train", shards, "trainer", "--output", "out")
    assert trained.returncode == 0, trained.stderr
    done = embershard("evaluate", shards, "reader")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["valid"]["samples"] > 0
    again = embershard("evaluate", shards, "trainer")
    assert json.loads(again.stdout)["valid"] == json.loads(done.stdout)["valid"]
