"""What `embershard ps` makes of its options."""

import pytest
import typer

from embershard.cli.ps import memory_bytes
from embershard.doctor import machine as cgroup
from embershard.ps.memory import physical_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 2**20), ("4GiB", 4 * 2**30), ("500MB", 500 * 10**6), (" 1.5 gib ", 3 * 2**29), ("2TB", 2 * 10**12)],
)
def test_a_size_has_a_unit_of_1000_or_of_1024(text, size):
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4 giga", "nan", "10", "1e9", "99999999999TiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(typer.BadParameter):
        memory_bytes(text)


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(2**30)}, 2**30),
        ("0::/a/b\n", {"a/b/memory.max": str(2**28), "a/memory.max": str(2**30)}, 2**28),
        ("5:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(2**29)}, 2**29),
        ("5:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ("", {}, None),
    ],
    ids=["v2", "v2 nested", "v1", "v1 without", "none"],
)
def test_a_part_is_of_the_containers_limit_or_else_of_the_machine(tmp_path, monkeypatch, membership, files, limit):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "cgroup").write_text(membership)
    monkeypatch.setattr(cgroup, "CGROUPS", tmp_path)
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "cgroup")
    assert memory_bytes("40%") == int(40 * 0.01 * (limit or physical_memory()))
