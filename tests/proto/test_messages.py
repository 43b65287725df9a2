import random

import numpy as np
import pytest

from embershard.proto import embershard_pb2 as pb
from embershard.proto import messages as m
from embershard.proto.errors import InvalidRequest
from embershard.proto.spec import Adam, Custom, TableSpec, Uniform

IDS = np.array([1, -2, 2**62], np.int64)
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
SPEC = TableSpec(name="t", dim=2, optimizer=Adam(lr=0.5), initializer=Uniform(), id_space="s", seed=7)


def with_codec(kind: str) -> pb.TableSpec:
    spec = pb.TableSpec()
    spec.CopyFrom(m.pack(m.Declare(SPEC)).spec)  # type: ignore[attr-defined]
    spec.pull_codec.kind = kind
    return spec


EXAMPLES: list[m.Message] = [
    m.Hello(3),
    m.Greeting(1, 2, 5, "0.1", "abc"),
    m.Declare(SPEC, 1, True),
    m.Declare(TableSpec(name="u", dim=1, optimizer=Custom(function="a:b", lr=0.1, settings={"z": 1.0, "a": 2.0}))),
    m.Declared(True, False),
    m.Load("t", 1, IDS, ROWS, 2, False, True),
    m.Loaded(3),
    m.Pull(1, (m.TableIds("t", IDS), m.TableIds("u", IDS[:0]))),
    m.Rows((ROWS, ROWS[:0])),
    m.Push(m.PushToken(1, 2, 3, 4), 5, 6, (m.TableGradients("t", IDS, ROWS, 0.5),)),
    m.Pushed(True, 3, 1),
    m.GetStatus(),
    m.ShardStatus(0, 1, 1, "0.1", "x", 1.5, 2, 3, 4, 5, 6, 7, 8, (m.TableStatus("t", 2, 3, 4, "adam", False),)),
]


def plain(value: object) -> object:
    """Arrays as flat lists, so that messages compare."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1).tolist()
    if isinstance(value, tuple):
        return tuple(plain(part) for part in value)
    if hasattr(value, "__slots__") and not isinstance(value, type):
        return (type(value), *(plain(getattr(value, name)) for name in value.__slots__))
    return value


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message: m.Message) -> None:
    assert plain(m.loads(type(message), m.dumps(message))) == plain(message)


def test_every_message_type_has_an_example() -> None:
    kinds = {kind for request, (_, reply) in m.METHODS.items() for kind in (request, reply)}
    assert kinds == {type(message) for message in EXAMPLES}


def test_arrays_travel_little_endian_in_c_order() -> None:
    proto = m.pack(m.Load("t", 1, np.array([1], np.int64), np.array([[1.0, -2.0]], np.float32)))
    assert isinstance(proto, pb.LoadRequest)
    assert proto.ids == b"\x01\0\0\0\0\0\0\0"
    assert proto.rows == b"\x00\x00\x80\x3f\x00\x00\x00\xc0"


def test_a_strided_array_travels_as_its_values() -> None:
    rows = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    back = m.loads(m.Rows, m.dumps(m.Rows((rows,))))
    assert back.tables[0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "proto",
    [
        pb.PullRequest(tables=[pb.PullRequest.TableIds(table="t", ids=b"1234567")]),
        pb.PushRequest(tables=[pb.PushRequest.TableGradients(table="t", ids=b"12345678", gradients=b"123")]),
        pb.DeclareRequest(spec=pb.TableSpec(name="t", dim=4, optimizer=pb.Optimizer(name="sgdd"))),
        pb.DeclareRequest(spec=pb.TableSpec(name="../t", dim=4)),
        pb.DeclareRequest(spec=with_codec("zip")),
    ],
)
def test_content_that_makes_no_sense_is_an_invalid_request(proto: object) -> None:
    kinds = {pb.PullRequest: m.Pull, pb.PushRequest: m.Push, pb.DeclareRequest: m.Declare}
    with pytest.raises(InvalidRequest):
        m.unpack(kinds[type(proto)], proto)


def test_any_bytes_give_a_message_or_an_invalid_request() -> None:
    rng = random.Random(0)
    for message in EXAMPLES:
        good = m.dumps(message)
        for _ in range(300):
            bad = bytearray(good[: rng.randrange(len(good) + 1)])
            for _ in range(rng.randrange(4)):
                if bad:
                    bad[rng.randrange(len(bad))] = rng.randrange(256)
            try:
                m.loads(type(message), bytes(bad))
            except InvalidRequest:
                pass


def test_bulk_bytes_counts_the_arrays() -> None:
    assert m.bulk_bytes(m.Push(m.PushToken(0, 0, 1, 1), 0, 1, (m.TableGradients("t", IDS, ROWS),))) == 24 + 24
    assert m.bulk_bytes(m.Pull(1, (m.TableIds("t", IDS),))) == 24
    assert m.bulk_bytes(m.Hello()) == 0
