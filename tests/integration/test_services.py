"""The commands `ps`, `up` and `status` as a person or a machine runs them: real processes, real signals."""

import json
import os
import signal
import socket
import subprocess
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from embershard.proto import spec
from embershard.proto.errors import ShardBusy
from embershard.proto.messages import SERVICE, Declare, GetStatus, Greeting, Hello, Pushed
from embershard.proto.protobuf import dumps
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.transport import Unreachable
from embershard.worker.client.client import Client
from harness.eventually import PATIENCE, eventually
from harness.processes import EMBERSHARD, marked, run_command
from harness.served import shard_process
from harness.shards import gradients
from harness.shards import push as push_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

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


class Peer:
    """A shard's process, and a gRPC transport to it, which retries nothing."""

    def __init__(self, process):
        self.popen, self.address = process.popen, process.address
        self.transport = transport_for(f"grpc://{self.address}")

    def submit(self, request):
        return self.transport.submit(request, timedelta(seconds=PATIENCE))

    def ask(self, request):
        return self.submit(request).result()

    def queued_bytes(self):
        return self.ask(GetStatus()).queued_bytes

    def end(self, signum=signal.SIGTERM):
        """Send a signal; exit code and log."""
        self.popen.send_signal(signum)
        return self.wait()

    def wait(self):
        _, log = self.popen.communicate(timeout=PATIENCE)
        return self.popen.returncode, log


@contextmanager
def shard(*options, **popen):
    with shard_process(*options, stderr=subprocess.PIPE, **popen) as process:
        peer = Peer(process)
        with closing(peer.transport):
            yield peer


@contextmanager
def slow_shard(folder, *options):
    (folder / "slow_rows.py").write_text(SLOW_ROWS)
    with shard("--import", "slow_rows", *options, cwd=folder) as peer:
        peer.ask(Declare(SLOW))
        yield peer


def push(seq, num_rows=1):
    return push_of(gradients(range(num_rows), dim=4), seq=seq)


@pytest.mark.cold_start
def test_a_served_shard_loads_no_torch_and_those_who_watch_its_health_see_the_end_and_do_not_delay_it():
    with shard() as peer, grpc.insecure_channel(peer.address) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        watching = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=10 * PATIENCE)
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        mapped = Path(f"/proc/{peer.popen.pid}/maps").read_text()
        assert [name in mapped for name in ("numba", "torch", "arrow")] == [True, False, False]
        peer.popen.send_signal(signal.SIGTERM)
        assert next(watching).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert peer.wait()[0] == 0


def test_a_shard_serves_at_a_unix_socket(tmp_path):
    with shard(listen=f"unix:{tmp_path}/shard.sock") as peer:
        assert isinstance(peer.ask(Hello()), Greeting)
        assert peer.end()[0] == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_finishes_what_was_accepted(tmp_path, signum, code):
    with slow_shard(tmp_path) as peer:
        size = len(dumps(push(1)))
        answers = []

        def all_accepted():
            status = peer.ask(GetStatus())
            return status.queued_bytes + status.pushed_rows * size >= len(answers) * size

        def some_wait():
            answers.extend(peer.submit(push(len(answers) + n)) for n in range(1, 11))
            assert eventually(all_accepted)
            return peer.queued_bytes() >= 3 * size

        assert eventually(some_wait)
        peer.popen.send_signal(signum)
        assert all(answer.result() == Pushed(duplicate=False, applied=1, skipped=0) for answer in answers)
        got, log = peer.wait()
        assert got == code, log
        assert "everything accepted was applied" in log


def test_a_full_queue_is_busy_and_a_second_signal_ends_at_once(tmp_path):
    with slow_shard(tmp_path, "--queue-bytes", "1") as peer:
        call = peer.submit(push(1, num_rows=100))  # ten seconds
        assert eventually(peer.queued_bytes)
        with pytest.raises(ShardBusy):
            peer.ask(push(2))
        peer.popen.send_signal(signal.SIGINT)
        assert any("SIGINT: finishing" in line for line in peer.popen.stderr)
        assert peer.end(signal.SIGINT)[0] == 130
        with pytest.raises(Unreachable):  # it was not finished
            call.result()


@pytest.mark.parametrize(
    ("place", "options", "code", "says"),
    [
        ("0/1", ("--listen", "127.0.0.1:{taken}"), 1, "port {taken} is in use"),
        ("0/1", ("--listen", "0.0.0.0:0"), 1, "--insecure"),
        ("2/2", (), 2, "--shard 2 --of 2"),
        ("0/1", ("--import", "no_such_module"), 1, "no_such_module"),
    ],
)
def test_a_shard_that_cannot_start_says_why(place, options, code, says):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        index, of = place.split("/")
        done = run_command("ps", "--shard", index, "--of", of, *(word.format(taken=taken) for word in options))
    assert done.returncode == code
    assert says.format(taken=taken) in done.stderr
    assert "Traceback" not in done.stderr


def test_with_insecure_any_address_serves_and_the_log_warns():
    with shard("--insecure", listen="0.0.0.0:0") as peer:
        code, log = peer.end()
        assert code == 0
        assert "anyone who reaches 0.0.0.0:0 can read and change the model" in log


@contextmanager
def running(*words, mark=""):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*EMBERSHARD, *words], env={**os.environ, "EMBERSHARD_TEST_RUN": mark}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def up(mark):
    """`embershard up` with two shards: its process, their addresses and their process ids."""
    with running("up", "--shards", "2", "--base-port", "0", mark=mark) as process:
        lines = [process.stdout.readline().split() for _ in range(3)]
        yield process, [words[4] for words in lines[:2]], [int(words[6].rstrip(")")) for words in lines[:2]]
        assert eventually(lambda: not marked(mark))  # its shards end with it


@pytest.mark.cold_start
@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 0, marks=pytest.mark.long), (signal.SIGKILL, -9)],
)
def test_up_restarts_and_reports_a_dead_shard_and_its_shards_end_with_it(tmp_path, signum, code):
    with up(str(tmp_path)) as (process, addresses, pids):
        os.kill(pids[1], signal.SIGKILL)
        with closing(Client.connect(addresses)) as client:
            assert [status.shard for status in client.status()] == [0, 1]
        process.send_signal(signum)
        _, log = process.communicate(timeout=PATIENCE)
        assert process.returncode == code
        assert "shard 1 at" in log
        assert "ended with SIGKILL" in log
        assert "Traceback" not in log


def test_status_shows_shards_and_what_is_down():
    table = spec.TableSpec(name="items", dim=4, optimizer=spec.SGD(lr=1.0))
    with shard() as peer:
        peer.ask(Declare(table))
        peer.ask(push(1, num_rows=1000))
        wide = {**os.environ, "COLUMNS": "120"}
        good = run_command("status", "--ps", peer.address, env=wide)
        assert good.returncode == 0
        for words in ("0/1", peer.address, "serving", "1,000", "items", "sgd"):
            assert words in good.stdout, good.stdout
        both = run_command("status", "--ps", f"{peer.address},127.0.0.1:1", "--json")
        assert both.returncode == 1
        serves, down = json.loads(both.stdout)["shards"]
        assert serves["serving"]
        assert serves["status"]["tables"][0]["rows"] == 1000
        assert serves["requests_per_second"] == 0.0
        assert not down["serving"]
        assert "check that it runs" in down["problem"]
        assert run_command("status", "--ps", f"{peer.address},127.0.0.1:1", env=wide).stdout.count("down") == 1


@pytest.mark.parametrize("options", [(), ("--json",)], ids=str)
def test_status_watch_ends_with_ctrl_c(options):
    with shard() as peer, running("status", "--ps", peer.address, "--watch", *options) as process:
        for _ in range(2):
            line = process.stdout.readline()
            assert not options or json.loads(line)["shards"][0]["serving"]  # an object a line
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130, err
        assert "Traceback" not in err
