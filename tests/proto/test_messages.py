import random
from pathlib import Path

import numpy as np
import pytest

from embershard.proto import embershard_pb2 as pb
from embershard.proto import messages as m
from embershard.proto.codec.ids import encode_ids
from embershard.proto.codec.name import CodecName
from embershard.proto.errors import DamagedPayload, InvalidRequest
from embershard.proto.protobuf import dumps, head_bytes, loads, read
from embershard.proto.spec import Adam, Custom, TableSpec, Uniform

IDS = np.array([1, -2, 2**62], np.int64)
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
PAYLOAD = np.arange(5, dtype=np.uint8)
ASCENDING = np.array([1, 5, 2**62], np.int64)
PACKED = encode_ids(ASCENDING)
SPEC = TableSpec(name="t", dim=2, optimizer=Adam(lr=0.5), initializer=Uniform(), id_space="s", seed=7)
TOKEN = m.PushToken(1, 2, 3, 4)
GRADIENTS = m.TableGradients("t", IDS, ROWS)
COUNTS = "requests pulled_rows pushed_rows duplicate_pushes skipped_rows queued_bytes resident_bytes".split()
STATUS = {name: number for number, name in enumerate(COUNTS, 2)}
STATUS |= {"shard": 0, "num_shards": 1, "placement_epoch": 1, "version": "0.1", "instance": "x", "uptime_seconds": 1.5}
TABLES = (m.TableStatus(name="t", dim=2, rows=3, bytes=4, optimizer="adam", loading=False),)
MEMBERS = (m.MemberStatus(worker=1, clock=2, paused=True, lease_seconds=0.5),)
CODED = TableSpec(
    name="t",
    dim=2,
    optimizer=Custom(function="a:b", lr=0.1, settings={"z": 1.0, "a": 2.0}),
    push_codec=CodecName.parse("topk:0.01+fp16s"),
    pull_codec=CodecName.parse("mine:half"),
)
CODED_PARTS = (
    m.TableGradients("t", ASCENDING, PAYLOAD, codec=m.PACKED, packed=PACKED),
    m.TableGradients("t", ASCENDING, ROWS, packed=PACKED),
    m.TableGradients("u", IDS[:0], PAYLOAD, route=9, codec="mine:half"),
)
BUNDLE = m.TableGradients("", IDS, ROWS, 0.5, members=("t", "u"), counts=(1, len(IDS) - 1))
CODECS = (m.TableCodecs(table="t", push="topk:0.01", pull="int8"), m.TableCodecs(table="u", push="", pull="fp16s"))
GREETING = {"shard": 1, "num_shards": 2, "placement_epoch": 5, "version": "0.1", "instance": "abc"}


def with_codec(kind):
    spec = pb.DeclareRequest.FromString(dumps(m.Declare(SPEC))).spec
    spec.pull_codec = kind
    return spec


EXAMPLES = [
    m.Hello(worker=3),
    m.Greeting(**GREETING, lineage=2**64 - 1, max_message_bytes=64 * 2**20),
    m.Declare(SPEC, 1, True, lineage=7, begins_lineage=True, num_rows=2**62),
    m.Declare(CODED),
    m.Declared(created=True, loading=False, lineage=2**63),
    m.Load("t", 1, IDS, ROWS, 2, False, True, m.PushToken(2, 2**63, 5, 4)),
    m.Load("t", 1, IDS, ROWS, 2, term=2),
    m.Loaded(3),
    m.Pull(1, (m.TableIds("t", IDS), m.TableIds("u", IDS[:0], 9)), 4, 5),
    m.Pull(1, (), 4, 5, 6, 7),
    m.Pull(1, (m.TableIds("", IDS, 9, members=("t", "u", "v"), counts=(len(IDS) - 1, 0, 1)), m.TableIds("w", IDS))),
    m.Pull(1, (m.TableIds("t", ASCENDING, 9, "int8", packed=PACKED), m.TableIds("u", IDS, codec="delta", since=7))),
    m.Rows((ROWS, ROWS[:0]), 7),
    m.Rows((PAYLOAD, ROWS), 7, ("int8", ""), 3, 0.25, 0.5, 2**63),
    m.Push(TOKEN, 5, 6, (m.TableGradients("t", IDS, ROWS, 0.5), m.TableGradients("u", IDS[:0], ROWS, route=9))),
    m.Push(TOKEN, 5, 6, (BUNDLE, m.TableGradients("w", IDS, ROWS), m.TableGradients("x", IDS[:0], ROWS, route=9))),
    m.Push(TOKEN, 5, 6, (), False, 2.5, 7, True, True, 2),
    m.Push(TOKEN, 5, 6, CODED_PARTS),
    m.Pushed(True, 3, 1, 4, 0.25, True, 2**63),
    m.GetStatus(),
    m.ShardStatus(**STATUS, tables=TABLES, staleness=-1),
    m.ShardStatus(**STATUS, tables=(), clock=9, staleness=-1, members=MEMBERS, staleness_seen=(3, 0), expired_leases=1),
    m.Join(worker=1, epoch=2, clock=3, staleness=-1, workers=4, lease_ms=500, staleness_aware_lr=True, run=2**63 - 1),
    m.Joined(member=True, clock=3, started=False, members=(0, 2)),
    m.Leave(worker=1, epoch=2, pause=True),
    m.LeaveAck(),
    m.Heartbeat(worker=1, epoch=2, flush=True, term=3, first_incomplete=4),
    m.HeartbeatAck(clock=4, members=(0, 3), acknowledged=5),
    m.Rendezvous(1, 2, "evaluation 3", PAYLOAD, False, (0, 1)),
    m.RendezvousResult((0, 3), (PAYLOAD, PAYLOAD[:0])),
    m.TakeSplit(worker=1, epoch=2, data_epoch=3, num_splits=4, done=-1),
    m.Split(index=-1, returned=2),
    m.Snapshot(url="s3://bucket/snapshots", name="monday", id=2**64 - 1, at_clock=7, step="cancel"),
    m.Snapshotted(
        state="done", clock=7, rows=3, total_rows=4, bytes=5, files=6, path="shard-0", sha256="ab", stall_ms=0.25
    ),
    m.Restore(url="/snapshots", name="monday", id=2**63, sha256="cd", replace=True, step="install"),
    m.Restored(state="ready", rows=3, bytes=4),
    m.Compress(revision=3, tables=CODECS),
    m.Compressed(revision=4, tables=CODECS[:1]),
]


def plain(value):
    """Arrays as flat lists, so that messages compare."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1).tolist()
    if isinstance(value, tuple):
        return tuple(plain(part) for part in value)
    if hasattr(value, "__slots__") and not isinstance(value, type):
        return (type(value), *(plain(getattr(value, name)) for name in value.__slots__))
    return value


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire_also_with_its_arrays_beside_its_head(message):
    assert plain(loads(type(message), dumps(message))) == plain(message)
    bulk = [memoryview(np.ascontiguousarray(array).tobytes()) for array in m.arrays(message)]
    assert plain(read(type(message), head_bytes(message), bulk)) == plain(message)
    assert m.bulk_bytes(message) == sum(part.nbytes for part in bulk)


def test_ids_do_not_travel_with_a_push_that_names_a_route():
    push = m.Push(TOKEN, 0, 1, (m.TableGradients("t", IDS, ROWS, route=7),))
    assert len(m.arrays(push)) == 1
    assert loads(m.Push, dumps(push)).tables[0].ids.size == 0


@pytest.mark.parametrize("bulk", [[], [b"12345678"], [b"12345678"] * 3])
def test_a_head_with_other_arrays_than_its_tables_need_is_an_invalid_request(bulk):
    push = m.Push(TOKEN, 0, 1, (GRADIENTS,))
    with pytest.raises(InvalidRequest):
        read(m.Push, head_bytes(push), bulk)
    with pytest.raises(InvalidRequest):
        read(m.Load, head_bytes(m.Load("t", 1, IDS, ROWS)), [*bulk, b""] if len(bulk) != 1 else bulk)
    with pytest.raises(InvalidRequest):
        read(m.Rows, head_bytes(m.Rows((ROWS,), codecs=("",))), [*bulk, b"", b""])
    with pytest.raises(InvalidRequest):
        read(m.Pull, dumps(m.Pull(1, (m.TableIds("t", IDS),))), [b""])


def test_packed_ids_travel_in_place_of_the_ids():
    assert m.arrays(m.Pull(1, (m.TableIds("t", ASCENDING, packed=PACKED),))) == [PACKED]


def test_packed_ids_take_no_more_memory_than_a_message_of_ids():
    coded = encode_ids(np.arange(2**20))
    parts = [pb.PullRequest.TableIds(table="t", ids=coded.tobytes(), packed_ids=True)] * 9  # 8 MiB of ids each
    with pytest.raises(DamagedPayload):
        loads(m.Pull, pb.PullRequest(tables=parts).SerializeToString())


def test_messages_without_codecs_say_nothing_of_them():
    assert head_bytes(m.Pull(1, (m.TableIds("t", IDS, 9),), 4, 5)).hex() == "080112050a0174180918042005"
    push = m.Push(TOKEN, 5, 6, (m.TableGradients("t", IDS, ROWS, 0.5),))
    assert head_bytes(push).hex() == "0801100218032004280530063a0e0a017421000000000000e03f400140014d0000803f"
    assert head_bytes(m.Rows((ROWS,), 7)).hex() == "1007"
    assert head_bytes(m.Pushed(True, 3, 1)).hex() == "080110031801"


def test_the_times_of_a_reply_travel_with_it():
    rows = loads(m.Rows, dumps(m.Rows((ROWS,), 7, coding_seconds=0.25, held_seconds=0.5)))
    assert (rows.coding_seconds, rows.held_seconds) == (0.25, 0.5)
    assert loads(m.Rows, dumps(m.Rows((ROWS,), 7))).held_seconds == 0.0  # as of a shard that does not know it


def test_every_message_type_has_an_example():
    kinds = {kind for request, (_, reply) in m.METHODS.items() for kind in (request, reply)}
    assert kinds == {type(message) for message in EXAMPLES}


def test_a_push_that_leaves_fields_out_has_an_lr_scale_of_1_and_may_repeat_ids():
    tables = [pb.PushRequest.TableGradients(table=name, ids=bytes(8), gradients=bytes(4)) for name in "ab"]
    tables[1].lr_scale = 0.0
    push = loads(m.Push, pb.PushRequest(worker=1, epoch=1, seq=1, tables=tables).SerializeToString())
    assert not any(part.unique for part in push.tables)
    assert [part.lr_scale for part in push.tables] == [1.0, 0.0]


def test_arrays_travel_little_endian_in_c_order():
    rows = np.asfortranarray([[1.0, -2.0], [0.0, 1.0]]).astype(np.float32, order="F")
    proto = pb.LoadRequest.FromString(dumps(m.Load("t", 1, np.array([1, 0], np.int64), rows)))
    assert proto.ids == b"\x01" + bytes(15)
    assert proto.rows == b"\x00\x00\x80\x3f\x00\x00\x00\xc0" + bytes(4) + b"\x00\x00\x80\x3f"


@pytest.mark.parametrize(
    "proto",
    [
        pb.PullRequest(tables=[pb.PullRequest.TableIds(table="t", ids=b"1234567")]),
        pb.PushRequest(tables=[pb.PushRequest.TableGradients(table="t", ids=b"12345678", gradients=b"123")]),
        pb.DeclareRequest(spec=pb.TableSpec(name="t", dim=4, optimizer=pb.Optimizer(name="sgdd"))),
        pb.DeclareRequest(spec=pb.TableSpec(name="../t", dim=4)),
        pb.DeclareRequest(spec=with_codec("zip")),
        pb.DeclareRequest(spec=with_codec("topk:0")),
        pb.PullRequest(tables=[pb.PullRequest.TableIds(table="t", ids=b"\xff" * 9, packed_ids=True)]),
        *(
            kind(tables=[part(**{"members": ["t", "u"], "counts": [1, 0], **wrong})])
            for kind, part in (
                (pb.PullRequest, pb.PullRequest.TableIds),
                (pb.PushRequest, pb.PushRequest.TableGradients),
            )
            for wrong in (
                {"table": "v"},
                {"codec": "int8"},
                {"packed_ids": True, "ids": encode_ids(np.array([1])).tobytes()},
                {"counts": [1]},
                {"counts": [1, 0, 0]},
                {"members": []},
                {"members": ["t"] * 2049, "counts": [0] * 2049},
            )
        ),
    ],
)
def test_content_that_makes_no_sense_is_an_invalid_request(proto):
    kinds = {pb.PullRequest: m.Pull, pb.PushRequest: m.Push, pb.DeclareRequest: m.Declare}
    with pytest.raises(InvalidRequest):
        loads(kinds[type(proto)], proto.SerializeToString())


def test_any_bytes_give_a_message_or_an_invalid_request():
    rng = random.Random(0)
    for message in EXAMPLES:
        good = dumps(message)
        for _ in range(150):
            bad = bytearray(good[: rng.randrange(len(good) + 1)])
            for _ in range(rng.randrange(4)):
                if bad:
                    bad[rng.randrange(len(bad))] = rng.randrange(256)
            try:
                loads(type(message), bytes(bad))
            except InvalidRequest:
                pass


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
    assert service.full_name == m.SERVICE
    assert {method.name for method in service.methods} == {name for name, _ in m.METHODS.values()}
