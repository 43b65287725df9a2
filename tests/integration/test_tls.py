"""Certificates from the command line to the shard: `keys`, `ps`, `status`, and a job that trains over TCP."""

import json
import signal
import subprocess

import psutil
import pytest

from harness.certificates import issue
from harness.eventually import PATIENCE
from harness.processes import EMBERSHARD, all_end, descendants, words
from harness.served import shard_process

pytestmark = pytest.mark.integration

JOB = """\
model: {name: lr}
data: {reader: clicks, eval_samples: 1000, loader_processes: 0}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 64, samples: 1_000_000_000}
"""


def embershard(*words, **environment):
    import os

    return subprocess.run(
        [*EMBERSHARD, *map(str, words)], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


def test_a_shard_beyond_loopback_starts_with_certificates_and_serves_those_who_have_some(tmp_path):
    shard, worker = issue(tmp_path / "shard"), issue(tmp_path / "worker")
    with shard_process("--tls", str(shard.path), listen="0.0.0.0:0") as process:
        address = f"tcp://127.0.0.1:{process.address.rpartition(':')[2]}"
        without = embershard("status", "--ps", address, "--json")
        assert without.returncode == 1
        assert "TLS" in json.loads(without.stdout)["shards"][0]["problem"]
        for given in (["--tls", worker.path], []):
            done = embershard("status", "--ps", address, "--json", *given, EMBERSHARD_TLS=str(worker.path))
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["shards"][0]["serving"]


def test_a_command_names_what_is_wrong_with_its_certificates(tmp_path):
    done = embershard("status", "--ps", "127.0.0.1:1", "--tls", tmp_path)
    assert done.returncode == 1
    assert "tls.crt" in done.stderr
    assert "Traceback" not in done.stderr
    done = embershard("ps", "--shard", 0, "--of", 1, "--listen", "127.0.0.1:0", "--tls", tmp_path)
    assert done.returncode == 1
    assert "tls.crt" in done.stderr
    assert "Traceback" not in done.stderr


def check_encrypted(address, tls):
    """The shard there serves over TCP those who have certificates, and nobody else."""
    without = embershard("status", "--ps", f"tcp://{address}", "--json")
    assert without.returncode == 1
    assert "TLS" in json.loads(without.stdout)["shards"][0]["problem"]
    done = embershard("status", "--ps", f"tcp://{address}", "--json", "--tls", tls.path)
    assert done.returncode == 0, done.stderr


def test_up_starts_shards_with_certificates(tmp_path):
    tls = issue(tmp_path / "keys")
    line = [*EMBERSHARD, "up", "--shards", "2", "--base-port", "0", "--tls", "keys"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, cwd=tmp_path, **pipes) as process:
        try:
            said = [process.stdout.readline().split() for _ in range(2)]
            family = descendants(process.pid)
            for line in said:
                check_encrypted(line[4], tls)
        finally:
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, rest
    assert all_end(family)


def listens(process):
    """The port of a shard's process."""
    (port,) = {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return port


@pytest.mark.parametrize("durability", ["memory", "log"])
def test_train_starts_shards_with_its_certificates_and_its_workers_reach_them_by_tls(start, tmp_path, durability):
    tls = issue(tmp_path / "keys")
    # an emulated link is one of TCP
    options = ["--tls", "keys", "--shards", "1", "--bandwidth", "1gbit", "--set", f"durability={durability}"]
    process = start(JOB, *options)
    said = []
    assert any("samples/s" in line for line in process.stdout if said.append(line) is None), "".join(said)
    family = descendants(process.pid)
    (shard,) = (one for one in family if "--shard" in words(one))
    assert ("--log-dir" in words(shard)) == (durability == "log")
    check_encrypted(f"127.0.0.1:{listens(shard)}", tls)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, text
    assert all_end(family)


def test_train_names_what_is_wrong_with_its_certificates(start, tmp_path):
    process = start(JOB, "--tls", "nothing")
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "nothing/tls.crt" in text
    assert "Traceback" not in text
