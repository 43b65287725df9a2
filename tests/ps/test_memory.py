"""The memory budget of a shard: its default."""

import pytest

import embershard as es
from embershard.proto.monitoring import memory
from embershard.proto.monitoring.memory import physical_memory
from embershard.ps.memory import MemoryBudget


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Sets the limit of the control group that this process seems to be in."""
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text("0::/pod\n")
    (tmp_path / "pod").mkdir()
    return lambda text: (tmp_path / "pod" / "memory.max").write_text(f"{text}\n")


@pytest.mark.parametrize("text", ["max", str(2**62)])
def test_the_default_is_of_the_machine_where_a_container_has_no_limit_below_it(container, text):
    container(text)
    assert MemoryBudget().limit == int(0.8 * physical_memory())


def test_the_default_is_of_a_containers_limit_and_shared_by_the_shards_of_a_process(container):
    container(2**28)
    assert MemoryBudget().limit == int(0.8 * 2**28)
    with es.local(shards=2) as session:
        budgets = [status.budget_bytes for status in session.client.status()]
    assert budgets == [int(0.8 * 2**28) // 2] * 2
