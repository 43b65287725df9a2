"""The committed protobuf code must be what the schema generates."""

from pathlib import Path

import pytest

from embershard.proto import embershard_pb2 as pb
from embershard.proto.messages import METHODS, SERVICE

PROTO = Path(__file__).resolve().parents[2] / "proto"


def test_the_generated_code_is_current(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools (pip install embershard[dev])")
    folder = tmp_path / "embershard" / "proto"
    folder.mkdir(parents=True)
    (folder / "embershard.proto").write_bytes((PROTO / "embershard.proto").read_bytes())
    options = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    assert protoc.main(["protoc", f"-I{tmp_path}", *options, "embershard/proto/embershard.proto"]) == 0
    for name in ("embershard_pb2.py", "embershard_pb2.pyi"):
        assert (folder / name).read_text() == (PROTO / name).read_text(), f"{name} is stale: run `make proto`"


def test_the_service_has_exactly_the_methods_of_the_contract():
    service = pb.DESCRIPTOR.services_by_name["Shard"]
    assert service.full_name == SERVICE
    assert {method.name for method in service.methods} == {name for name, _ in METHODS.values()}


def test_every_message_of_the_schema_is_documented():
    lines = (PROTO / "embershard.proto").read_text().splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith("rpc "):
            assert lines[number - 1].strip().startswith("//"), f"line {number + 1}: an rpc without a comment"
