import importlib
import pickle
import pkgutil
import re
import signal
import string
import subprocess
import sys
from pathlib import Path

import pytest

import embershard as es
from embershard import proto
from embershard.proto import errors
from embershard.proto.errors import EmbershardError, InternalError, WrongDim


def every_error():
    found = [EmbershardError]
    for cls in found:
        found += cls.__subclasses__()
    return found


WRONG = WrongDim(table="t", what="gradients", got=3, ids=2, dim=4, want=8)


def test_an_error_crosses_the_wire_and_the_border_of_a_process_with_type_fields_and_message():
    status, detail = errors.to_wire(WRONG)
    back = errors.from_wire(detail, "shard 1 at host:7700")
    assert status is errors.Status.INVALID_ARGUMENT
    assert (type(back), back.fields, str(back)) == (WrongDim, WRONG.fields, f"shard 1 at host:7700: {WRONG}")
    back = pickle.loads(pickle.dumps(WRONG))  # what multiprocessing does to an exception
    assert (type(back), str(back)) == (WrongDim, str(WRONG))


@pytest.mark.parametrize(
    "detail", [b"", b"\xff", b"[]", b"{}", b'{"name": "NoSuch", "fields": {}}', b'{"name": "WrongDim", "fields": {}}']
)
def test_any_detail_bytes_give_an_embershard_error(detail):
    assert type(errors.from_wire(detail, "shard 0")) is InternalError


@pytest.mark.parametrize("cls", every_error())
def test_every_error_has_a_wire_status_a_docstring_and_a_message_of_its_fields(cls):
    assert isinstance(cls.status, errors.Status)
    assert cls.__doc__
    if cls.__module__ == errors.__name__:
        names = [name for _, name, _, _ in string.Formatter().parse(cls.template) if name]
        assert str(cls(**dict.fromkeys(names, 1)))


def test_the_tree_in_the_docstring_names_every_error_of_the_module():
    tree = errors.__doc__.partition("    EmbershardError\n")[2].partition("\n\n")[0]
    here = [cls for cls in every_error() if vars(errors).get(cls.__name__) is cls]
    assert sorted(re.findall(r"[A-Z]\w+", tree)) == sorted(cls.__name__ for cls in here if cls is not EmbershardError)
    below = re.search(r"InvalidRequest \(([^)]*)\)", tree)[1]
    assert set(re.split(r",\s+", below)) == {cls.__name__ for cls in here if cls.__base__ is errors.InvalidRequest}


def test_the_page_says_of_what_errors_a_client_sends_the_same_again():
    page = (Path(__file__).resolve().parents[2] / "docs" / "wire.md").read_text()
    table = page.partition("| error | what to do |\n|---|---|\n")[2].partition("\n\n")[0]
    advice = {
        getattr(errors, name): what
        for names, what in (line.strip("| ").split(" | ") for line in table.splitlines())
        for name in re.findall(r"\b[A-Z]\w+", names.partition(";")[0])
    }
    of_shards = [cls for cls in every_error() if vars(errors).get(cls.__name__) is cls]
    again = {cls for cls, what in advice.items() if re.search(r"send it again|see \[Pushes", what)}
    assert again == {cls for cls in of_shards if cls.retryable}
    waits = {cls for cls, what in advice.items() if "retry_after_ms" in what}
    assert waits == {cls for cls in of_shards if issubclass(cls, errors.ShardBusy) and cls.retryable}


def test_a_second_error_of_one_name_is_refused():
    with pytest.raises(TypeError):
        type("WrongDim", (EmbershardError,), {"__module__": "somewhere.other"})
    assert type(errors.from_wire(errors.to_wire(WRONG)[1], "")) is WrongDim


def test_users_find_every_error_that_crosses_the_wire_in_one_place():
    for found in pkgutil.walk_packages(proto.__path__, "embershard.proto."):
        importlib.import_module(found.name)
    known = [cls for cls in every_error() if cls.__module__.startswith("embershard.proto.")]
    assert len(known) > 50
    assert [cls for cls in known if getattr(es.errors, cls.__name__, None) is not cls] == []


def test_a_module_with_an_error_runs_as_a_program_where_it_is_imported_too(tmp_path):
    (tmp_path / "own.py").write_text(
        "from embershard.proto.errors import EmbershardError\nclass OnlyHere(EmbershardError): pass\n"
    )
    program = "import runpy, own; runpy.run_module('own', run_name='__main__', alter_sys=True)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


def test_a_process_has_ended_by_its_exit_code_or_by_a_signal_which_may_have_no_name():
    told = [errors.how_ended(code) for code in (0, 3, -signal.SIGKILL, -signal.SIGRTMIN - 1)]
    assert told == ["exit code 0", "exit code 3", "SIGKILL", f"signal {signal.SIGRTMIN + 1}"]
