"""`embershard doctor`: what it finds about shards and the workers of a job."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from doctor_cases import FAIL, GREETING, NOBODY, OK, STATUS, TABLE, WARN, case, finds, job, probe

from embershard.doctor import job as clocks
from embershard.doctor import shards
from embershard.doctor.case import Case, open_case
from embershard.proto.messages import MemberStatus, ShardStatus, replace

# ---- the shards


@contextmanager
def listener(answer: bytes = b"") -> Iterator[str]:
    """The address of a port that says `answer` to whatever connects; nothing at all if it is empty."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                if answer:
                    connection.sendall(answer)
                    connection.close()

        if answer:
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_port_where_nothing_listens_fails():
    with listener() as address:
        pass
    about = open_case(address, None, None, None)
    finds(shards.addresses, about, OK, "1 named")
    finds(shards.names, about, OK, "1 resolved")
    finds(shards.ports, about, FAIL, f"{address}: connection refused")
    assert shards.stream.run(about) is None  # one failure is enough


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_another_service_on_the_port_fails(answer):
    with listener(answer) as address:
        about = open_case(address, None, None, None)
    finds(shards.ports, about, OK, "1 reachable")
    finds(shards.stream, about, FAIL, address)
    finds(shards.grpc, about, FAIL, address)
    assert shards.placement.run(about) is None


def test_a_silent_service_does_not_hold_the_doctor_up():
    with listener() as address:
        start = time.monotonic()
        about = open_case(f"{address},127.0.0.1:1", None, None, None)
        assert time.monotonic() - start < 30  # it is 3 s; a hang would last for ever
    finds(shards.stream, about, FAIL, f"{address}: no answer")
    finds(shards.grpc, about, FAIL, address)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h:70000", "port of 1..65535"),
        ("a:1,a:1", "named twice"),
        ("http://h:80", "write host:port"),
        (",", "name every"),
    ],
)
def test_what_is_no_address_fails(text, words):
    finds(shards.addresses, open_case(text, None, None, None), FAIL, words)


def test_a_name_without_address_fails():
    about = open_case("no-such-host.invalid:7700", None, None, None)
    finds(shards.names, about, FAIL, "'no-such-host.invalid' is unknown")
    assert shards.ports.run(about) is None


def test_a_socket_that_is_none_fails(tmp_path):
    finds(shards.names, open_case(f"unix:{tmp_path}/s", None, None, None), FAIL, "is no socket")


def test_a_name_server_that_hangs_does_not_hold_the_doctor_up(monkeypatch):
    release = threading.Event()

    def hang(*_, **__):
        release.wait(60)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    about = open_case("slow:7700", None, None, None)
    release.set()
    finds(shards.names, about, FAIL, "not looked up in time")


def test_rpc_is_not_asked_anything():
    with listener() as address:
        about = open_case(f"rpc://{address}", None, None, None)
    finds(shards.stream, about, OK, "executes pickles")


def test_slow_calls_and_tcp_on_one_machine_are_warnings():
    finds(shards.latency, Case(probes=[probe(call_seconds=1e-4)]), OK, "0.10 ms")
    finds(
        shards.latency, Case(probes=[probe(call_seconds=1e-4), probe(call_seconds=0.02)]), WARN, "20.00 ms, the slowest"
    )
    finds(shards.unix_sockets, Case(probes=[probe()]), OK, "by Unix sockets")
    finds(shards.unix_sockets, Case(probes=[probe(beside=False)]), WARN, "over TCP: shard 0 at h:1")
    finds(shards.unix_sockets, Case(probes=[probe(here=False, beside=False)]), OK, "no shard runs on this machine")


def test_another_version_fails():
    finds(shards.versions, Case(probes=[probe()]), OK, "everywhere")
    old = replace(GREETING, version="0.0.1")
    finds(shards.versions, Case(probes=[probe(stream_greeting=old)]), FAIL, "shard 0 at h:1 has 0.0.1")


def test_two_processes_behind_one_address_fail():
    other = replace(GREETING, instance="another")
    finds(shards.instances, Case(probes=[probe(grpc_greeting=other)]), FAIL, "two processes")


def test_tables_are_the_same_everywhere_and_loaded():
    finds(shards.tables, case(STATUS, STATUS), OK, "1 tables, 20 rows")
    finds(shards.tables, case(STATUS, replace(STATUS, tables=())), FAIL, "items")
    finds(shards.tables, case(replace(STATUS, tables=(replace(TABLE, loading=True),))), WARN, "being loaded: items")


def test_waiting_requests_and_skipped_gradients_are_warnings():
    full = replace(STATUS, queued_bytes=2**20)
    finds(shards.load, case(full), WARN, "1.0 MiB waiting")
    finds(shards.load, Case(probes=[probe(full, before=STATUS)]), OK, "no requests wait")  # a moment is no load
    held_back = replace(full, staleness=0, members=(member(0, 1),))
    finds(shards.load, case(held_back), OK, "no requests wait")  # pulls that wait for other workers
    finds(shards.gradients, case(STATUS), OK, "all finite")
    finds(shards.gradients, case(replace(STATUS, skipped_rows=7)), WARN, "7 gradient rows held NaN or Inf")


# ---- the workers


def member(worker: int, clock: int, lease: float = 8.0, paused: bool = False) -> MemberStatus:
    return MemberStatus(worker=worker, clock=clock, paused=paused, lease_seconds=lease)


def serving(clock: int, *members: MemberStatus, **fields: object) -> ShardStatus:
    return replace(STATUS, **{"clock": clock, "staleness": 0, "members": members, **fields})


def test_shards_without_members_have_no_clock_to_check():
    finds(clocks.clock, case(STATUS), OK, "no worker is a member")
    assert clocks.members.run(case(STATUS)) is None
    assert clocks.clock.run(NOBODY) is None


def test_a_shard_whose_clock_is_behind_is_named():
    ahead, behind = serving(20, member(0, 20)), serving(3, member(0, 3))
    finds(clocks.clock, case(ahead, ahead), OK, "20 (synchronous), not advancing")
    finds(clocks.clock, Case(probes=[probe(ahead, serving(18, member(0, 18)))]), OK, "moving")
    finds(clocks.clock, case(ahead, behind), WARN, "3 to 20")


def test_members_that_are_missing_are_named(tmp_path):
    both, one = serving(1, member(0, 1), member(1, 1, paused=True)), serving(1, member(0, 1))
    finds(clocks.members, case(both, both), OK, "workers 0, 1; paused: 1")
    finds(clocks.members, case(both, one), WARN, "not members on every shard: workers 1")
    about = job(tmp_path)
    finds(clocks.members, replace(about, probes=[probe(one)]), WARN, "workers 0; the job has 2")


def test_the_worker_that_the_others_wait_for_is_named():
    level = serving(5, member(0, 5), member(1, 5))
    finds(clocks.waited_for, case(level), OK, "nobody")
    lagging = serving(5, member(0, 6), member(1, 5, lease=1.5), member(2, 4, paused=True))
    finds(clocks.waited_for, case(lagging), WARN, "worker 1 (its lease has 1.5 s left)")
    finds(clocks.waited_for, case(serving(0, member(0, 1))), WARN, "not all workers of the job have joined")
    moved = serving(4, member(0, 5), member(1, 4))
    finds(clocks.waited_for, Case(probes=[probe(lagging, before=moved)]), OK, "at this moment: workers 1")


def test_leases_that_end_are_a_warning(tmp_path):
    finds(clocks.leases, case(serving(1, member(0, 1))), OK, "the shortest has 8.0 s left")
    finds(clocks.leases, case(serving(1, expired_leases=2)), WARN, "2 expired")
    about = replace(job(tmp_path, "train.lease=10"), probes=[probe(serving(1, member(0, 1, 2.0)))])
    finds(clocks.leases, about, WARN, "worker 0: 2.0 s left")


def test_rows_that_miss_many_updates_are_a_warning():
    assert clocks.staleness_seen.run(case(STATUS)) is None
    finds(clocks.staleness_seen, case(replace(STATUS, staleness_seen=(90, 10))), OK, "100 pushes: mean 0.1, p99 1")
    late = replace(STATUS, staleness_seen=(*[0] * 31, 50))
    finds(clocks.staleness_seen, case(late, late), OK, "at most 31 or more updates missed")  # of workers long gone
    late = replace(late, members=(member(0, 1), member(1, 1)))
    finds(clocks.staleness_seen, case(late, late), WARN, "at most 31 or more updates missed")
    finds(clocks.staleness_seen, case(replace(late, staleness=16)), OK, "mean 31.0")


def test_a_job_of_another_mode_than_the_shards_fails(tmp_path):
    probes = [probe(serving(1, member(0, 1)))]
    finds(clocks.job_and_workers, replace(job(tmp_path, "train.staleness=0"), probes=probes), OK, "staleness 0")
    finds(clocks.job_and_workers, replace(job(tmp_path), probes=probes), FAIL, "is off, the shards serve 0")
