"""The commands `ps`, `up` and `status` as a person or a machine runs them: real processes, real signals."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from embershard.proto import spec
from embershard.proto.errors import ShardBusy, from_wire
from embershard.proto.messages import (
    METHODS,
    SERVICE,
    Declare,
    Declared,
    GetStatus,
    Greeting,
    Hello,
    Pull,
    Push,
    Pushed,
    PushToken,
    Reply,
    Request,
    ShardStatus,
    TableGradients,
    TableIds,
)
from embershard.proto.protobuf import dumps, loads
from embershard.proto.routing import Placement, make_route
from harness.eventually import PATIENCE, eventually
from harness.processes import EMBERSHARD, run_command

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TABLE = spec.TableSpec(name="items", dim=4, optimizer=spec.SGD(lr=1.0), initializer=spec.Constant(value=0.0))
SLOW = spec.TableSpec(name="items", dim=4, optimizer=spec.Custom(function="slow_rows:step", lr=1.0))
# about 0.1 s for a row on any machine of today, without the GIL
SLOW_ROWS = """
from embershard.ps.table.optimizers import row_optimizer

@row_optimizer()
def step(row, state, grad, hyper):
    x = 1.0
    for i in range(3_000_000):
        x = (x * 1.0000001) % 1.7
    row[0] -= hyper[0] * grad[0] * (x + 1.0) / (x + 1.0)
"""


class Command:
    """A running `embershard` command."""

    def __init__(self, *arguments: str, cwd: Path | None = None) -> None:
        self.popen = subprocess.Popen(
            [*EMBERSHARD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd
        )

    def line(self) -> str:
        return self.popen.stdout.readline()

    def await_log(self, words: str) -> None:
        """Read stderr up to a line with these words."""
        assert any(words in line for line in self.popen.stderr)

    def end(self, signum: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; exit code and stderr."""
        if self.popen.poll() is None:
            self.popen.send_signal(signum)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, err = self.popen.communicate(timeout=PATIENCE)
        return self.popen.returncode, err


@contextmanager
def command(*arguments: str, cwd: Path | None = None) -> Iterator[Command]:
    running = Command(*arguments, cwd=cwd)
    try:
        yield running
    finally:
        if running.popen.poll() is None:
            running.popen.kill()
        running.popen.communicate()


class Peer:
    """A channel to one shard, without the client."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address)

    def submit(self, request: Request) -> "Call":
        name, reply = METHODS[type(request)]
        stub = self.channel.unary_unary(f"/{SERVICE}/{name}")
        return Call(stub.future(dumps(request), timeout=PATIENCE, wait_for_ready=True), reply)

    def ask(self, request: Request) -> Reply:
        return self.submit(request).result()


class Call:
    """A request that is under way."""

    def __init__(self, future: grpc.Future, reply: type[Reply]) -> None:
        self._future, self._reply = future, reply
        self.done = future.done

    def result(self) -> Reply:
        try:
            return loads(self._reply, self._future.result())
        except grpc.RpcError as error:
            detail = dict(error.trailing_metadata() or ()).get("embershard-error-bin")
            raise (error if detail is None else from_wire(detail, "")) from None


@contextmanager
def shard(*arguments: str, cwd: Path | None = None) -> Iterator[tuple[Command, Peer]]:
    """A served shard, 0 of 1 unless `arguments` say otherwise."""
    chosen = arguments if "--shard" in arguments else ("--shard", "0", "--of", "1", *arguments)
    listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
    with command("ps", *chosen, *listen, cwd=cwd) as running:
        first = running.line()
        assert first, running.wait()
        peer = Peer(json.loads(first)["address"])
        with peer.channel:
            yield running, peer


def push(seq: int, ids: np.ndarray) -> Push:
    part = TableGradients("items", ids, np.ones((len(ids), 4), np.float32))
    return Push(PushToken(0, 1, seq, 1), 0, 1, (part,))


def status_of_shard(peer: Peer) -> ShardStatus:
    status = peer.ask(GetStatus())
    return status


def children_of(pid: int) -> list[int]:
    """Shards that name `pid` as their parent, whoever is their parent now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--parent-pid" in words and words[words.index(b"--parent-pid") + 1] == str(pid).encode():
                found.append(int(entry.name))
    return found


@pytest.fixture
def slow_rows(tmp_path):
    (tmp_path / "slow_rows.py").write_text(SLOW_ROWS)
    return tmp_path


def test_two_shards_hold_a_table_together():
    placement = Placement.even(2)
    route = make_route(np.arange(100, dtype=np.int64), TABLE.space_key, placement)
    with shard("--shard", "0", "--of", "2") as (_, first), shard("--shard", "1", "--of", "2") as (_, second):
        for index, peer in enumerate((first, second)):
            ids = route.ids[route.slice_of(index)]
            greeting = peer.ask(Hello())
            assert (greeting.shard, greeting.num_shards) == (index, 2)
            assert peer.ask(Declare(TABLE)) == Declared(created=True, loading=False)
            assert peer.ask(push(1, ids)) == Pushed(duplicate=False, applied=len(ids), skipped=0)
            assert peer.ask(push(1, ids)) == Pushed(duplicate=True, applied=len(ids), skipped=0)
            rows = peer.ask(Pull(1, (TableIds("items", ids),)))
            assert rows.tables[0].tolist() == [-1.0] * 4 * len(ids)


@pytest.mark.cold_start
def test_a_served_shard_is_healthy_and_loads_no_torch():
    with shard() as (running, peer):
        checked = health_pb2_grpc.HealthStub(peer.channel).Check(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=PATIENCE
        )
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        mapped = Path(f"/proc/{running.popen.pid}/maps").read_text()
        assert "numba" in mapped
        assert "torch" not in mapped
        assert "arrow" not in mapped


def test_a_shard_serves_at_a_unix_socket(tmp_path):
    with shard("--listen", f"unix:{tmp_path}/shard.sock") as (running, peer):
        assert isinstance(peer.ask(Hello()), Greeting)
        assert running.end()[0] == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_finishes_what_was_accepted(slow_rows, signum, code):
    with shard("--import", "slow_rows", cwd=slow_rows) as (running, peer):
        peer.ask(Declare(SLOW))
        one = np.arange(1, dtype=np.int64)
        size = len(dumps(push(1, one)))
        answers: list[Call] = []

        def all_accepted():
            status = status_of_shard(peer)
            return status.queued_bytes + status.pushed_rows * size >= len(answers) * size

        def some_wait():
            answers.extend(peer.submit(push(len(answers) + n, one)) for n in range(1, 11))
            assert eventually(all_accepted)
            return status_of_shard(peer).queued_bytes >= 3 * size

        assert eventually(some_wait)
        running.popen.send_signal(signum)
        assert all(answer.result() == Pushed(duplicate=False, applied=1, skipped=0) for answer in answers)
        got, log = running.wait()
        assert got == code, log
        assert "everything accepted was applied" in log


def test_those_who_watch_its_health_see_the_end_and_do_not_delay_it():
    with shard() as (running, peer):
        watching = health_pb2_grpc.HealthStub(peer.channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=10 * PATIENCE
        )
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        running.popen.send_signal(signal.SIGTERM)
        assert next(watching).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert running.wait()[0] == 0


def test_a_second_signal_ends_at_once(slow_rows):
    with shard("--import", "slow_rows", cwd=slow_rows) as (running, peer):
        peer.ask(Declare(SLOW))
        call = peer.submit(push(1, np.arange(100, dtype=np.int64)))  # ten seconds
        assert eventually(lambda: status_of_shard(peer).queued_bytes > 0)
        running.popen.send_signal(signal.SIGINT)
        running.await_log("SIGINT: finishing")
        assert running.end(signal.SIGINT)[0] == 130
        with pytest.raises(grpc.RpcError):  # it was not finished
            call.result()


def test_a_full_queue_is_busy_and_the_shard_stays_healthy(slow_rows):
    with shard("--import", "slow_rows", "--queue-bytes", "1", cwd=slow_rows) as (_, peer):
        peer.ask(Declare(SLOW))
        first = peer.submit(push(1, np.arange(15, dtype=np.int64)))
        assert eventually(lambda: status_of_shard(peer).queued_bytes > 0)
        with pytest.raises(ShardBusy) as busy:
            peer.ask(push(2, np.arange(1, dtype=np.int64)))
        assert busy.value.fields["retry_after_ms"]
        assert isinstance(peer.ask(Hello()), Greeting)
        assert not first.done()
        assert first.result() == Pushed(duplicate=False, applied=15, skipped=0)


def test_a_port_in_use_is_named_and_the_exit_code_is_not_0():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with command("ps", "--shard", "0", "--of", "1", "--listen", f"127.0.0.1:{port}") as running:
            code, err = running.wait()
            assert code == 1
            assert f"port {port} is in use" in err
            assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--shard", "0", "--of", "1", "--listen", "0.0.0.0:0"), 1, "--insecure"),
        (("--shard", "2", "--of", "2"), 2, "--shard 2 --of 2"),
        (("--shard", "0", "--of", "1", "--import", "no_such_module"), 1, "no_such_module"),
    ],
    ids=["open address", "index", "import"],
)
def test_a_shard_that_cannot_start_says_why(arguments, code, words):
    with command("ps", *arguments) as running:
        got, err = running.wait()
        assert got == code
        assert words in err
        assert "Traceback" not in err


def test_with_insecure_any_address_serves_and_the_log_warns():
    with shard("--listen", "0.0.0.0:0", "--insecure") as (running, _):
        code, err = running.end()
        assert code == 0
        assert "anyone who reaches 0.0.0.0:0 can read and change the model" in err


def start_up(running: Command, shards: int) -> tuple[list[str], list[int]]:
    """Addresses and process ids that `up` prints."""
    lines = [running.line().split() for _ in range(shards)]
    running.line()
    return [words[4] for words in lines], [int(words[6].rstrip(")")) for words in lines]


@pytest.mark.cold_start
def test_up_restarts_and_reports_a_dead_shard_and_ends_with_ctrl_c():
    with command("up", "--shards", "2", "--base-port", "0") as running:
        addresses, pids = start_up(running, 2)
        os.kill(pids[1], signal.SIGKILL)
        assert eventually(lambda: len(set(children_of(running.popen.pid)) - {pids[1]}) == 2)
        peer = Peer(addresses[1])
        with peer.channel:
            assert isinstance(peer.ask(Hello()), Greeting)
        left = children_of(running.popen.pid)
        code, err = running.end(signal.SIGINT)
        assert code == 130
        assert "shard 1 at" in err
        assert "ended with SIGKILL" in err
        assert "Traceback" not in err
        assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]


def test_shards_end_with_a_supervisor_that_was_killed():
    with command("up", "--shards", "2", "--base-port", "0") as running:
        start_up(running, 2)
        assert len(children_of(running.popen.pid)) == 2
        running.popen.kill()
        running.popen.wait(PATIENCE)
        assert eventually(lambda: not children_of(running.popen.pid))


@pytest.mark.cold_start
@pytest.mark.parametrize("count", [0, 1, 2])
def test_ctrl_c_while_starting_leaves_nothing_behind(count):
    with command("up", "--shards", "2", "--base-port", "0") as running:
        pid = running.popen.pid
        assert eventually(lambda: catches(pid, signal.SIGTERM) and len(children_of(pid)) >= count)
        code, err = running.end(signal.SIGINT)
        assert code == 130, err
        assert eventually(lambda: not children_of(pid))  # one that was just born sees soon that its parent is gone


def catches(pid: int, signum: int) -> bool:
    """Whether a process has its own handler of a signal, as `up` has from its begin on."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) & 1 << (signum - 1))


def test_up_ends_with_sigterm():
    with command("up", "--shards", "1", "--base-port", "0") as running:
        start_up(running, 1)
        assert running.end(signal.SIGTERM)[0] == 0
        assert not children_of(running.popen.pid)


def test_status_shows_shards_and_what_is_down():
    with shard() as (_, peer):
        peer.ask(Declare(TABLE))
        peer.ask(push(1, np.arange(1000, dtype=np.int64)))
        good = status_of(peer)
        assert good.returncode == 0
        for words in ("0/1", peer.address, "serving", "1,000", "items", "sgd"):
            assert words in good.stdout, good.stdout
        both = status_of(peer, "--json", also="127.0.0.1:1")
        assert both.returncode == 1
        up, down = json.loads(both.stdout)["shards"]
        assert up["serving"]
        assert up["status"]["tables"][0]["rows"] == 1000
        assert up["requests_per_second"] == 0.0
        assert not down["serving"]
        assert "check that it runs" in down["problem"]
        assert status_of(peer, also="127.0.0.1:1").stdout.count("down") == 1


def status_of(peer: Peer, *options: str, also: str = "") -> subprocess.CompletedProcess[str]:
    addresses = ",".join(filter(None, (peer.address, also)))
    return run_command("status", addresses, *options, env={**os.environ, "COLUMNS": "120"})


def test_status_watch_prints_an_object_a_line_as_json():
    with shard() as (_, peer), command("status", peer.address, "--watch", "--json") as running:
        for _ in range(2):
            assert json.loads(running.line())["shards"][0]["serving"]
        code, err = running.end(signal.SIGINT)
        assert code == 130, err


def test_status_watch_ends_with_ctrl_c():
    with shard() as (_, peer), command("status", peer.address, "--watch") as running:
        assert running.line()  # it shows the shard
        code, err = running.end(signal.SIGINT)
        assert code == 130, err
        assert "Traceback" not in err
