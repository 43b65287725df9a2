import importlib
import pickle
import pkgutil

import pytest

import embershard as es
from embershard import proto
from embershard.proto import errors
from embershard.proto.errors import EmbershardError, InternalError, WrongDim


def every_error() -> list[type[EmbershardError]]:
    found, todo = [], [EmbershardError]
    while todo:
        cls = todo.pop()
        found.append(cls)
        todo += cls.__subclasses__()
    return found


WRONG = WrongDim(table="t", what="gradients", got=3, ids=2, dim=4, want=8)


def test_an_error_crosses_the_wire_with_type_fields_and_message() -> None:
    status, detail = errors.to_wire(WRONG)
    back = errors.from_wire(detail, "shard 1 at host:7700")
    assert status is errors.Status.INVALID_ARGUMENT
    assert type(back) is WrongDim
    assert back.fields == WRONG.fields
    assert str(back) == f"shard 1 at host:7700: {WRONG}"


@pytest.mark.parametrize(
    "detail", [b"", b"\xff", b"[]", b"{}", b'{"name": "NoSuch", "fields": {}}', b'{"name": "WrongDim", "fields": {}}']
)
def test_any_detail_bytes_give_an_embershard_error(detail: bytes) -> None:
    assert type(errors.from_wire(detail, "shard 0")) is InternalError


@pytest.mark.parametrize("cls", every_error())
def test_every_error_has_a_wire_status_and_a_docstring(cls: type[EmbershardError]) -> None:
    assert isinstance(cls.status, errors.Status)
    assert cls.__doc__


def test_an_error_survives_a_process_boundary() -> None:
    back = pickle.loads(pickle.dumps(WRONG))  # what multiprocessing does to an exception
    assert type(back) is WrongDim
    assert str(back) == str(WRONG)


def test_users_find_every_error_that_crosses_the_wire_in_one_place() -> None:
    for found in pkgutil.walk_packages(proto.__path__, "embershard.proto."):
        importlib.import_module(found.name)
    known = [cls for cls in every_error() if cls.__module__.startswith("embershard.proto.")]
    assert len(known) > 50
    assert [cls for cls in known if getattr(es.errors, cls.__name__, None) is not cls] == []
