"""A client in another language, made from the .proto and docs/wire.md, trains on two shards."""

import json
import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.served import shard_process

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.integration


@pytest.mark.skipif(
    shutil.which("node") is None or not os.environ.get("EMBERSHARD_NODE_MODULES"),
    reason="needs node, and in EMBERSHARD_NODE_MODULES the folder with @grpc/grpc-js, @grpc/proto-loader and blakejs",
)
def test_a_node_client_trains_on_two_shards():
    with ExitStack() as stack:
        addresses = [stack.enter_context(shard_process(shard=shard, of=2)).address for shard in range(2)]
        done = subprocess.run(
            ["node", str(ROOT / "examples" / "client.js"), *addresses],
            env={**os.environ, "NODE_PATH": os.environ["EMBERSHARD_NODE_MODULES"]},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert sum(said["shards"]) == 100
    assert min(said["shards"]) > 0
    assert said["worst"] < 1e-5
