"""Shards as child processes: real ones, for that is what is supervised."""

import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from embershard.deploy import supervisor
from embershard.deploy.supervisor import LocalShards, RestartPolicy, ShardSettings, _ShardProcess
from embershard.proto import spec
from embershard.proto.errors import ShardFailed
from embershard.proto.messages import METHODS, SERVICE, Declare, Declared, Hello
from embershard.proto.protobuf import dumps, loads
from harness.eventually import eventually

pytestmark = pytest.mark.integration


def ask(address, request):
    name, reply = METHODS[type(request)]
    with grpc.insecure_channel(address) as channel:
        data = channel.unary_unary(f"/{SERVICE}/{name}")(dumps(request), timeout=250, wait_for_ready=True)
        return loads(reply, data)


def alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_pauses_grow_to_the_longest_and_a_shard_is_given_up_after_the_last_quick_death():
    policy = RestartPolicy(first_pause=timedelta(seconds=1), longest_pause=timedelta(seconds=5), max_quick_deaths=3)
    assert [policy.pause(n).total_seconds() for n in range(1, 6)] == [0, 1, 2, 4, 5]
    assert [policy.gives_up(n) for n in range(1, 5)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (LocalShards, {"num_shards": 0}),
        (LocalShards, {"num_shards": 2, "base_port": 65535}),
        (ShardSettings, {"durability": "log"}),
    ],
)
def test_arguments_without_sense_are_refused(kind, arguments):
    with pytest.raises(ValueError, match=r"must|log_dir"):
        kind(**arguments)


def test_a_shard_finds_the_modules_that_its_parent_finds(tmp_path, monkeypatch):
    (tmp_path / "their_rows.py").write_text(
        "from embershard.ps.table.optimizers import row_optimizer\n\n"
        "print('a module may print')\n\n"
        "@row_optimizer()\n"
        "def step(row, state, grad, hyper):\n"
        "    for j in range(row.size):\n"
        "        row[j] -= hyper[0] * grad[j]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = spec.TableSpec(name="t", dim=2, optimizer=spec.Custom(function="their_rows:step", lr=0.1))
    with LocalShards(1, ShardSettings(imports=["their_rows"], options=["--insecure-loopback"])) as shards:
        assert ask(shards.addresses[0], Declare(made)) == Declared(created=True, loading=False)


@pytest.mark.parametrize(
    ("module", "seconds", "words"),
    [
        ("raise ValueError('no rows today')", 250, "shard 0 ended with exit code 1 before it served.*no rows today"),
        ("import time\ntime.sleep(60)\n", 1, "SIGKILL before it served.*did not serve within 1 s"),
    ],
)
def test_a_shard_that_does_not_start_is_an_error_with_its_last_words(module, seconds, words, tmp_path, monkeypatch):
    (tmp_path / f"rows_{seconds}.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    shards = LocalShards(2, ShardSettings(imports=[f"rows_{seconds}"]), start_timeout=timedelta(seconds=seconds))
    with pytest.raises(ShardFailed, match=f"(?s){words}"), shards:
        pass
    assert alive(shards.pids) == []


def test_a_port_in_use_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ShardFailed, match=f"port {port} is in use"), LocalShards(1, base_port=port):
            pass


def test_a_shard_that_died_is_reported_and_restarted_at_its_address_and_none_is_left_outside():
    reports, soon = [], RestartPolicy(first_pause=timedelta(seconds=0.01), max_quick_deaths=3)
    settings = ShardSettings(options=["--insecure-loopback"], metrics=[":0", ":0"])
    with LocalShards(2, settings, restart=soon, report=reports.append) as shards:
        before = [ask(address, Hello()) for address in shards.addresses]
        assert [(greeting.shard, greeting.num_shards) for greeting in before] == [(0, 2), (1, 2)]
        addresses, metrics, (victim, other) = shards.addresses, shards.metrics_addresses, shards.pids
        os.kill(victim, signal.SIGKILL)
        assert eventually(lambda: any("serves again" in line for line in reports))
        assert (shards.addresses, shards.metrics_addresses, shards.pids[1]) == (addresses, metrics, other)
        assert shards.pids[0] != victim
        after = [ask(address, Hello()) for address in shards.addresses]
        assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]
        # the last are lines of its log
        for words in ("shard 0 at", "ended with SIGKILL", "optimizer states that it held are lost", "serving at"):
            assert words in reports[0]
        pids = (*shards.pids, victim)
        assert alive(pids) == list(shards.pids)
    assert alive(pids) == []


def test_a_shard_is_restarted_where_nobody_reads_what_is_reported():
    def unread(line):
        raise BrokenPipeError(32, "Broken pipe")

    with LocalShards(1, restart=RestartPolicy(), report=unread, forward=unread) as shards:
        (victim,) = shards.pids
        os.kill(victim, signal.SIGKILL)
        assert eventually(lambda: shards.pids[0] != victim and shards.pids[0] in alive(shards.pids))


def test_a_shard_that_cannot_be_restarted_is_a_failure(monkeypatch):
    def none_left(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with LocalShards(1, restart=RestartPolicy()) as shards:
        monkeypatch.setattr(supervisor.subprocess, "Popen", none_left)
        os.kill(shards.pids[0], signal.SIGKILL)
        assert eventually(lambda: shards.failure)
    assert "cannot be restarted: Resource temporarily unavailable" in str(shards.failure)


def test_a_shard_that_hangs_at_the_end_is_killed_and_that_is_no_good_end(monkeypatch):
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.5)
    reports = []
    with LocalShards(2, report=reports.append) as shards:
        pids = shards.pids
        os.kill(pids[1], signal.SIGSTOP)
    assert not shards.ended_well
    assert any(str(pids[1]) in line for line in reports)
    assert alive(pids) == []


def test_a_shard_that_dies_again_and_again_is_given_up():
    reports = []
    with LocalShards(1, restart=RestartPolicy(max_quick_deaths=2), report=reports.append) as shards:
        os.kill(shards.pids[0], signal.SIGKILL)
        assert eventually(lambda: len(reports) == 2)
        assert "serves again" in reports[1]
        assert shards.failure is None
        os.kill(shards.pids[0], signal.SIGKILL)
        assert shards.wait(timedelta(seconds=250)) is shards.failure
        assert "not restarted after 2 deaths" in str(shards.failure)


def test_without_restart_a_death_is_the_failure():
    with LocalShards(1, report=lambda line: None) as shards:
        assert shards.wait(timedelta(0)) is None
        os.kill(shards.pids[0], signal.SIGKILL)
        assert "ended with SIGKILL" in str(shards.wait(timedelta(seconds=60)))


def test_a_shard_that_logs_while_it_compiles_is_waited_for():
    lines = "import sys, time\nfor _ in range(9):\n    time.sleep(0.5)\n"
    lines += "    print('compiling', file=sys.stderr, flush=True)\n"
    lines += """print('{"event": "serving", "address": "127.0.0.1:1"}', flush=True)"""
    process = _ShardProcess([sys.executable, "-S", "-c", lines], dict(os.environ), lambda line: None)
    assert process.wait_until_serving(3.0)
    assert process.ended() == "exit code 0"


@pytest.mark.parametrize("serves", [True, False])
def test_what_a_shards_module_started_ends_with_the_shard(tmp_path, monkeypatch, serves):
    module = "their_helper" if serves else "their_broken_helper"
    (tmp_path / f"{module}.py").write_text(
        "import pathlib, subprocess, sys\n"
        "from embershard.ps.table.optimizers import row_optimizer\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path)!r}, f'pid-{{child.pid}}').touch()\n"
        + serves
        * "@row_optimizer()\ndef step(row, state, grad, hyper):\n    row[0] = 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    restart = RestartPolicy(first_pause=timedelta(0), longest_pause=timedelta(0))

    def started():
        return [int(path.name[4:]) for path in tmp_path.glob("pid-*")]

    if not serves:
        with pytest.raises(ShardFailed, match="no function"):
            LocalShards(1, ShardSettings(imports=[module])).__enter__()
        eventually(lambda: not alive(started()))
        return
    with LocalShards(1, ShardSettings(imports=[module]), restart=restart) as shards:
        (first,) = started()
        os.kill(shards.pids[0], signal.SIGKILL)
        eventually(lambda: len(started()) == 2 and not alive([first]))
    assert eventually(lambda: not alive(started()))  # once the system's first process has waited for them
