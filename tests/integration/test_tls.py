"""Certificates from the command line to the shard: `keys`, `ps`, `status`, and a job that trains over TCP."""

import json
import subprocess

import pytest

from harness.certificates import issue
from harness.processes import EMBERSHARD
from harness.served import shard_process

pytestmark = pytest.mark.integration


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
