"""Commands with tokens of access.yaml, on shards that are processes."""

import json
import random

import pytest

from embershard.compare.results import read_results
from embershard.proto.security.tokens import new_token, token_digest, write_private
from harness.certificates import issue
from harness.processes import run_command
from harness.served import shard_process

pytestmark = pytest.mark.integration

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
def job(tmp_path, monkeypatch):
    """A job, its data, access.yaml and two tokens, here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    for seed, name in enumerate(("train.csv", "valid.csv")):
        write_clicks(tmp_path / name, seed)
    write_access(tmp_path, trainer="train", reader="read")


@pytest.fixture
def shards(job):
    """The addresses of two shards that go by access.yaml."""
    options = ("--access", "access.yaml")
    with shard_process(*options, of=2) as first, shard_process(*options, shard=1, of=2) as second:
        yield f"{first.address},{second.address}"


def write_clicks(path, seed):
    draw = random.Random(seed)
    lines = [f"{int(draw.random() < 0.5)},{draw.randrange(10)},{draw.randrange(10)}" for _ in range(300)]
    path.write_text("\n".join(["label,user,item", *lines, ""]))


def embershard(command, shards, token, *words):
    return run_command(command, "job.yaml", *words, "--ps", shards, "--token-file", f"{token}.token")


def test_a_token_of_role_read_evaluates_what_another_one_trained(shards):
    trained = embershard("train", shards, "trainer", "--output", "out")
    assert trained.returncode == 0, trained.stderr
    done = embershard("evaluate", shards, "reader")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["valid"]["samples"] > 0
    again = embershard("evaluate", shards, "trainer")
    assert json.loads(again.stdout)["valid"] == json.loads(done.stdout)["valid"]


def test_workers_show_the_token_that_their_command_was_given(shards):
    """On this machine they would be admins without one, as the user that the shards run as."""
    refused = embershard("train", shards, "reader", "--output", "refused")
    assert refused.returncode != 0
    assert "reader may not make" in " ".join((refused.stdout + refused.stderr).split())


def test_a_comparison_reaches_its_shards_by_certificates_and_a_token(tmp_path, job):
    issue(tmp_path / "worker")
    shard = issue(tmp_path / "shard")
    words = ("--arms", "none,fp16s", "--seeds", "1", "--output", "out")
    with shard_process("--access", "access.yaml", "--tls", str(shard.path)) as process:
        address = f"tcp://{process.address}"
        without = embershard("compare", address, "trainer", *words)
        assert without.returncode == 1
        assert "TLS" in without.stderr
        reader = embershard("compare", address, "reader", *words, "--tls", "worker")
        assert reader.returncode == 1
        assert "reader may not make" in " ".join(reader.stderr.split())
        done = embershard("compare", address, "trainer", *words, "--tls", "worker")
        assert done.returncode == 0, done.stdout + done.stderr
    runs = read_results(tmp_path / "out" / "results.json").runs
    assert len(runs) == 2
    assert all(run.ok for run in runs)
