"""Modules of users: what is found in them, and which of their lines an error names."""

import sys

import pytest

from embershard.proto import user_modules
from embershard.proto.errors import BadModule, UserCodeFailed
from embershard.proto.user_modules import files_of, find, members_of, user_code, version_of, where_defined

MODULE = """\
import torch
print("loading")
class Tower:
    def size(self):
        return torch.zeros(2).view(3)
def fails():
    return helper()
def helper():
    raise KeyError("user")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text=MODULE):
        (tmp_path / f"{name}.py").write_text(text)
        return tmp_path / f"{name}.py"

    return write


def test_a_member_is_found_and_what_the_module_prints_is_no_result(module, capsys):
    path = module("um_found")
    assert find("um_found:Tower").__name__ == "Tower"
    assert find("um_found:Tower.size").__name__ == "size"
    assert where_defined(find("um_found:Tower")) == f"{path}:3"
    assert capsys.readouterr() == ("", "loading\n")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("um_absent_module:Tower", None, "No module named"),
        ("um_a:Towre", MODULE, "did you mean Tower?"),
        ("um_a2:Nobody", MODULE, "it has: Tower, fails, helper"),
        ("um_b:Tower.depth", MODULE, "'Tower.depth'"),
        ("um_c:x", "x = 1\ny = (\n", "um_c.py:2"),
        ("um_d:x", "def f():\n    raise SystemExit(3)\nf()\n", "um_d.py:2"),
        ("um_e:x", "import json\njson.loads('{')\n", "um_e.py:2"),
    ],
)
def test_what_is_not_there_names_module_and_line(module, name, text, told):
    if text is not None:
        module(name.partition(":")[0], text)
    with pytest.raises(BadModule) as error:
        find(name)
    assert told in str(error.value)


@pytest.mark.parametrize(("call", "line"), [("fails", 9), ("Tower.size", 5)])
def test_an_error_names_the_users_last_line(module, call, line):
    name = f"um_line_{line}"
    path = module(name)
    member = find(f"{name}:{call}")
    with pytest.raises(UserCodeFailed) as error, user_code("loss um"):
        member(*[None] * call.count("."))
    assert error.value.fields["where"] == f"{path}:{line}"


@pytest.mark.parametrize("module", ["codecs.py", "my/codecs.py", "my/codecs"])
def test_a_file_in_place_of_a_module_is_told_how_it_is_named(module: str) -> None:
    with pytest.raises(BadModule, match=r"write its module, codecs, .* in PYTHONPATH"):
        members_of(module)


def test_packages_that_are_installed_in_the_folder_of_a_users_module_are_not_his(tmp_path, monkeypatch):
    """With the environment in .venv beside a module, its whole numpy and numba stood in the event log's list."""
    installed = tmp_path / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    (tmp_path / "mine_beside_venv.py").write_text("import his_of_venv, helper_beside_venv\n")
    (tmp_path / "helper_beside_venv.py").touch()
    (installed / "his_of_venv.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(user_modules, "INSTALLED", (f"{installed}/",))
    members_of("mine_beside_venv")
    try:
        assert files_of(["mine_beside_venv"]).keys() == {"mine_beside_venv", "helper_beside_venv"}
        assert files_of(["his_of_venv"]).keys() == {"his_of_venv"}
    finally:
        for name in ("mine_beside_venv", "his_of_venv", "helper_beside_venv"):
            del sys.modules[name]


def test_a_package_that_is_not_installed_has_an_unknown_version():
    assert (version_of("pytest"), version_of("no-such-package")) == (pytest.__version__, "unknown")
