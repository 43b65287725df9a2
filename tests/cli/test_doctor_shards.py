"""`embershard doctor`: what it finds about shards and the workers of a job."""

import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from doctor_cases import FAIL, GREETING, NOBODY, OK, STATUS, TABLE, WARN, case, finds, job, member, probe

from embershard.doctor import job as clocks
from embershard.doctor import monitoring, shards
from embershard.doctor.case import Case, open_case
from embershard.proto.messages import replace
from embershard.proto.monitoring.exporter import MetricsServer
from embershard.proto.monitoring.metrics import SHARD_METRICS, Sample
from embershard.proto.security.tokens import new_token, token_digest, write_private
from embershard.proto.transport.addresses import use_token_file
from embershard.ps.journal.progress import RecoveryProgress
from embershard.ps.security.access import Access
from harness.served import ServedShard

# ---- the pages for Prometheus


class Shown:
    """A process whose state a test sets."""

    dead, unready = "", ""

    def samples(self):
        return [Sample("embershard_shard_uptime_seconds", 1.0)]

    def not_live(self):
        return self.dead

    def not_ready(self):
        return self.unready


@pytest.fixture
def page():
    with MetricsServer(":0", SHARD_METRICS, {"shard": "0"}) as server:
        server.monitored = Shown()
        yield server


@contextmanager
def another_web_server():
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_pages_for_prometheus_that_answer_are_counted(page):
    finds(monitoring.metrics, open_case("", None, None, None, metrics=[page.address, page.address]), OK, "2 answer, 2")
    finds(monitoring.metrics, NOBODY, None)


@pytest.mark.parametrize(
    ("dead", "unready", "level", "words"),
    [
        ("the apply thread hangs", "", FAIL, "not live: the apply thread hangs"),
        ("", "it recovers", WARN, "is not ready: it recovers"),
    ],
)
def test_a_process_that_is_not_well_says_why_to_the_doctor(page, dead, unready, level, words):
    page.monitored.dead, page.monitored.unready = dead, unready
    finds(monitoring.metrics, Case(metrics=[page.address]), level, words)


def test_a_process_that_is_starting_is_not_taken_for_another_program(page):
    page.monitored = None
    finds(monitoring.metrics, Case(metrics=[page.address]), WARN, "is not ready: it is starting")


def test_an_address_without_a_page_is_named(page):
    with listener() as silent, another_web_server() as other, closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{bound.getsockname()[1]}"
        finding = monitoring.metrics.run(Case(metrics=[silent, other, closed, "nowhere"]))
    assert finding.level == FAIL
    wanted = (f"{silent}: no answer", f"{other}: another", f"{closed}: Connection refused", "nowhere: write host:port")
    for text in wanted:
        assert text in finding.text
    finds(monitoring.metrics, Case(metrics=[page.address, closed]), FAIL, closed)


# ---- the shards


@pytest.mark.parametrize(
    ("ahead", "level", "words"),
    [
        (0.0, OK, "as here"),
        (3600.0, WARN, "3,600 s ahead"),
        (-60.0, WARN, "60 s behind"),
        (-400.0, FAIL, "400 s behind: a shard that is 5 minutes behind refuses"),
    ],
)
def test_a_shard_whose_machine_has_another_time_is_named(ahead, level, words, monkeypatch):
    served = ServedShard()
    try:
        monkeypatch.setattr(served.shard.system, "since_1970", lambda: time.time() + ahead)
        finds(shards.system_times, seen(served.address), level, words)
    finally:
        served.stop()


def test_a_shard_that_recovers_is_told_from_one_that_does_not_answer(monkeypatch):
    served, progress = ServedShard(), RecoveryProgress()
    try:
        finds(shards.recovery, seen(served.address), OK, "no shard recovers")
        monkeypatch.setattr(served.dispatch, "_recovery", progress)
        about = seen(served.address)
        progress.waits_for_room = "No space left on device"
        waiting = seen(served.address)
    finally:
        served.stop()
    finds(shards.stream, about, OK)
    finds(shards.recovery, about, WARN, f"{served.address}: the shard is recovering its rows")
    assert shards.placement.run(about) is None
    finds(shards.recovery, waiting, FAIL, "No space left on device; it waits for room")
    assert "free disk space" in shards.recovery.run(waiting).remedy


@contextmanager
def listener(answer=b""):
    """The address of a port that says `answer` to whatever connects; nothing at all if it is empty."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(ConnectionError):
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        if answer:
            thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        if answer:
            # A thread that still waited in accept() could take a connection of a later socket with the same descriptor.
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def seen(addresses):
    return open_case(addresses, None, None, None)


def test_a_port_where_nothing_listens_fails():
    with listener() as address:
        pass
    about = seen(address)
    finds(shards.addresses, about, OK, "1 named")
    finds(shards.names, about, OK, "1 resolved")
    finds(shards.ports, about, FAIL, f"{address}: connection refused")
    assert shards.stream.run(about) is None  # one failure is enough


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_another_service_on_the_port_fails(answer):
    with listener(answer) as address:
        about = seen(address)
    finds(shards.ports, about, OK, "1 reachable")
    finds(shards.stream, about, FAIL, address)
    assert [check.run(about) for check in (shards.grpc, shards.placement)] == [None, None]  # one failure is enough


def test_a_silent_service_does_not_hold_the_doctor_up(monkeypatch):
    monkeypatch.setattr("embershard.doctor.probe._STEP", timedelta(seconds=0.2))
    with listener() as address:
        start = time.monotonic()
        about = seen(f"{address},127.0.0.1:1")
        assert time.monotonic() - start < 30  # it is 3 s; a hang would last for ever
        finds(shards.stream, seen(f"rpc://{address}"), OK, "executes pickles")  # it is not asked anything
    finds(shards.stream, about, FAIL, f"{address}: no answer")
    assert shards.grpc.run(about) is None


def test_a_name_server_that_hangs_does_not_hold_the_doctor_up(monkeypatch):
    monkeypatch.setattr("embershard.doctor.probe.DEADLINE", timedelta(seconds=0.2))
    release = threading.Event()

    def hang(*_, **__):
        release.wait(60)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    about = seen("slow:7700")
    release.set()
    finds(shards.names, about, FAIL, "not looked up in time")


def test_what_is_no_address_or_has_no_place_fails(tmp_path):
    finds(shards.addresses, seen("h:70000"), FAIL, "port of 1..65535")
    about = seen("no-such-host.invalid:7700")
    finds(shards.names, about, FAIL, "'no-such-host.invalid' is unknown")
    assert shards.ports.run(about) is None
    finds(shards.names, seen(f"unix:{tmp_path}/s"), FAIL, "is no socket")


FULL = replace(STATUS, queued_bytes=2**20)
OLD, OTHER = replace(GREETING, version="0.0.1"), replace(GREETING, instance="another")
LOADING = replace(STATUS, tables=(replace(TABLE, loading=True),))


@pytest.mark.parametrize(
    ("check", "probes", "level", "words"),
    [
        (shards.latency, [probe(call_seconds=1e-4)], OK, "0.10 ms"),
        (shards.latency, [probe(call_seconds=1e-4), probe(call_seconds=0.02)], WARN, "20.00 ms, the slowest"),
        (shards.unix_sockets, [probe()], OK, "by Unix sockets"),
        (shards.unix_sockets, [probe(beside=False)], WARN, "over TCP: shard 0 at h:1"),
        (shards.unix_sockets, [probe(here=False, beside=False)], OK, "no shard runs on this machine"),
        (shards.versions, [probe()], OK, "everywhere"),
        (shards.versions, [probe(stream_greeting=OLD)], FAIL, "shard 0 at h:1 has 0.0.1"),
        (shards.instances, [probe(grpc_greeting=OTHER)], FAIL, "two processes"),
        (shards.tables, [probe(), probe()], OK, "1 tables, 20 rows"),
        (shards.tables, [probe(), probe(replace(STATUS, tables=()))], FAIL, "items"),
        (shards.tables, [probe(LOADING)], WARN, "being loaded: items"),
        (shards.load, [probe(FULL)], WARN, "1.0 MiB waiting"),
        (shards.load, [probe(FULL, before=STATUS)], OK, "no requests wait"),  # a moment is no load
        # pulls that wait for other workers
        (shards.load, [probe(replace(FULL, staleness=0, members=(member(0, 1),)))], OK, "no requests wait"),
        (shards.gradients, [probe()], OK, "all finite"),
        (shards.gradients, [probe(replace(STATUS, skipped_rows=7))], WARN, "7 gradient rows held NaN or Inf"),
    ],
)
def test_what_shards_say_of_themselves_is_judged(check, probes, level, words):
    finds(check, Case(probes=probes), level, words)


# ---- the workers


def serving(clock, *members, **fields):
    return replace(STATUS, **{"clock": clock, "staleness": 0, "members": members, **fields})


AHEAD, BEHIND = serving(20, member(0, 20)), serving(3, member(0, 3))
BOTH, ONE = serving(1, member(0, 1), member(1, 1, paused=True)), serving(1, member(0, 1))
LAGGING = serving(5, member(0, 6), member(1, 5, lease=1.5), member(2, 4, paused=True))
MOVED = serving(4, member(0, 5), member(1, 4))
LATE = replace(STATUS, staleness_seen=(*[0] * 31, 50))
OF_TWO = replace(LATE, members=(member(0, 1), member(1, 1)))


@pytest.mark.parametrize(
    ("check", "about", "level", "words"),
    [
        (clocks.clock, case(STATUS), OK, "no worker is a member"),
        (clocks.clock, case(AHEAD, AHEAD), OK, "20 (synchronous), not advancing"),
        (clocks.clock, Case(probes=[probe(AHEAD, serving(18, member(0, 18)))]), OK, "moving"),
        (clocks.clock, case(AHEAD, BEHIND), WARN, "3 to 20"),
        (clocks.members, case(BOTH, BOTH), OK, "workers 0, 1; paused: 1"),
        (clocks.members, case(BOTH, ONE), WARN, "not members on every shard: workers 1"),
        (clocks.waited_for, case(serving(5, member(0, 5), member(1, 5))), OK, "nobody"),
        (clocks.waited_for, case(LAGGING), WARN, "worker 1 (its lease has 1.5 s left)"),
        (clocks.waited_for, case(serving(0, member(0, 1))), WARN, "not all workers of the job have joined"),
        (clocks.waited_for, Case(probes=[probe(LAGGING, before=MOVED)]), OK, "at this moment: workers 1"),
        (clocks.leases, case(ONE), OK, "the shortest has 8.0 s left"),
        (clocks.leases, case(serving(1, expired_leases=2)), WARN, "2 expired"),
        (clocks.staleness_seen, case(replace(STATUS, staleness_seen=(90, 10))), OK, "100 pushes: mean 0.1, p99 1"),
        (clocks.staleness_seen, case(LATE, LATE), OK, "at most 31 or more updates"),  # of workers long gone
        (clocks.staleness_seen, case(OF_TWO, OF_TWO), WARN, "at most 31 or more updates"),
        (clocks.staleness_seen, case(replace(OF_TWO, staleness=16)), OK, "mean 31.0"),
    ],
)
def test_what_shards_say_of_their_workers_is_judged(check, about, level, words):
    finds(check, about, level, words)


def test_shards_without_members_have_nothing_to_check():
    assert clocks.members.run(case(STATUS)) is None
    assert clocks.clock.run(NOBODY) is None
    assert clocks.staleness_seen.run(case(STATUS)) is None


def test_the_workers_that_are_there_are_held_against_the_job(tmp_path):
    about = replace(job(tmp_path), probes=[probe(ONE)])
    finds(clocks.members, about, WARN, "workers 0; the job has 2")
    finds(clocks.job_and_workers, about, FAIL, "is off, the shards serve 0")
    about = replace(job(tmp_path, "train.staleness=0"), probes=[probe(ONE)])
    finds(clocks.job_and_workers, about, OK, "staleness 0")
    about = replace(job(tmp_path, "train.lease=10"), probes=[probe(serving(1, member(0, 1, 2.0)))])
    finds(clocks.leases, about, WARN, "worker 0: 2.0 s left")


def test_a_shard_that_asks_nobody_who_they_are_is_a_warning(tmp_path):
    token = new_token()
    write_private(tmp_path / "token", token)
    write_private(tmp_path / "access.yaml", f"- {{name: a, role: read, token_sha256: '{token_digest(token).hex()}'}}")
    for access, level, text in ((None, WARN, "nobody"), (Access(tmp_path / "access.yaml"), OK, "they ask")):
        served = ServedShard(access=access)
        use_token_file(tmp_path / "token")
        try:
            finds(shards.access, seen(served.address), level, text)
        finally:
            use_token_file(None)
            served.stop()
