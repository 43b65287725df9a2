"""A client in another language, made from the .proto and docs/wire.md, trains on two shards."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.served import shard_process

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "client.js"
MODULES = os.environ.get("EMBERSHARD_NODE_MODULES")
pytestmark = pytest.mark.integration


@pytest.mark.skipif(
    shutil.which("node") is None or not MODULES,
    reason="needs node, and in EMBERSHARD_NODE_MODULES the folder with @grpc/grpc-js, @grpc/proto-loader and blakejs",
)
def test_a_node_client_trains_on_two_shards():
    with shard_process(shard=0, of=2) as one, shard_process(shard=1, of=2) as other:
        line = ["node", str(CLIENT), one.address, other.address]
        said = json.loads(subprocess.check_output(line, env={**os.environ, "NODE_PATH": MODULES}, timeout=120))
    assert sum(said["shards"]) == 100
    assert min(said["shards"]) > 0
    assert said["worst"] < 1e-5
