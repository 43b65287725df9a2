"""Which thread reads what arrives, and what becomes of replies that nobody, or several threads, wait for."""

import os
import random
import signal
import threading
import time
from contextlib import closing, contextmanager, suppress
from datetime import timedelta

import numpy as np
import pytest

from embershard.proto import messages as m
from embershard.proto.transport.io_thread import io_poller
from embershard.proto.transport.stream import StreamCall, StreamTransport
from embershard.proto.transport.stream_connection import StreamConnection
from embershard.proto.transport.transport import Unreachable
from harness.eventually import eventually
from harness.served import ServedShard
from harness.shards import table

PATIENCE = timedelta(seconds=60)


@pytest.fixture
def shard():
    served = ServedShard()
    yield served
    served.stop()


@pytest.fixture
def transport(shard):
    with closing(StreamTransport(shard.address)) as made:
        made.submit(m.Declare(table(dim=2)), PATIENCE).result()
        yield made


@pytest.fixture
def readers(monkeypatch):
    """The threads that have read replies, in order."""
    threads, finish = [], StreamCall.finish

    def noting(call, reply):
        threads.append(threading.get_ident())
        finish(call, reply)

    monkeypatch.setattr(StreamCall, "finish", noting)
    return threads


@contextmanager
def reading():
    """This thread is about to wait for replies."""
    io_poller().begin()
    try:
        yield
    finally:
        io_poller().end()


def pull(num_rows=4) -> m.Pull:
    return m.Pull(1, (m.TableIds("items", np.arange(num_rows, dtype=np.int64)),))


def test_a_thread_that_has_said_that_it_waits_reads_its_own_replies(transport, readers):
    with reading():
        pending = [transport.submit(pull(n), PATIENCE) for n in (1, 1000, 100_000)]
        assert [answer.result().tables[0].size for answer in pending] == [2, 2000, 200_000]
    assert readers == [threading.get_ident()] * 3


def test_a_reply_that_nobody_waits_for_is_read_by_the_io_thread(transport, readers):
    answer = transport.submit(pull(), PATIENCE)
    assert eventually(answer.is_done)
    assert threading.get_ident() not in readers
    with reading():
        answer.result()
    later = transport.submit(pull(), PATIENCE)  # nor after a thread has read
    assert eventually(later.is_done)


def test_threads_that_wait_at_the_same_time_each_get_their_reply(transport):
    failures = []

    def work(num_rows):
        try:
            for _ in range(100):
                into = np.full((num_rows, 2), np.nan, np.float32)
                with reading():
                    reply = transport.submit(pull(num_rows), PATIENCE, [into]).result()
                assert reply.tables[0] is into
                assert np.isfinite(into).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 10, 300, 5000, 40_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_thread_that_waits_reads_also_for_other_connections(shard, transport, readers):
    with closing(StreamTransport(shard.address)) as other:
        other.submit(m.Hello(), PATIENCE).result()
        readers.clear()
        with reading():
            first, second = other.submit(pull(), PATIENCE), transport.submit(pull(), PATIENCE)
            second.result()
            first.result()
    assert readers == [threading.get_ident()] * 2


def test_an_interrupt_while_it_reads_ends_the_connection_and_the_next_call_makes_another(transport, monkeypatch):
    received = StreamConnection.buffer_updated

    def interrupted(connection, num_bytes):
        monkeypatch.setattr(StreamConnection, "buffer_updated", received)
        raise KeyboardInterrupt

    with reading():
        answer = transport.submit(pull(), PATIENCE)
        monkeypatch.setattr(StreamConnection, "buffer_updated", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer.result()
    with pytest.raises(Unreachable):
        answer.result()
    transport.submit(m.Hello(worker=0), PATIENCE).result()
    assert transport.submit(pull(), PATIENCE).result().tables[0].size == 8


def test_a_request_after_a_lost_connection_waits_for_a_hello(transport):
    transport.submit(pull(), PATIENCE).result()
    transport._loop.call_soon_threadsafe(transport._connection.drop, "the shard ended")
    assert eventually(lambda: transport._connection is None)
    transport.submit(m.GetStatus(), PATIENCE).result()  # whoever asks it is not told whose rows are there
    with pytest.raises(Unreachable, match="was lost"):
        transport.submit(pull(), PATIENCE).result()
    transport.submit(m.Hello(worker=0), PATIENCE).result()
    assert transport.submit(pull(), PATIENCE).result().tables[0].size == 8


def test_closing_a_transport_ends_the_wait_of_a_thread_that_reads(shard, transport):
    gate = threading.Event()
    shard.apply.submit(gate.wait, 1, float("inf"))
    answer = transport.submit(pull(), PATIENCE)
    threading.Timer(0.1, transport.close).start()
    with pytest.raises(Unreachable, match="closed by this worker"):
        answer.result()
    gate.set()


def test_a_thread_that_was_to_read_and_does_not_holds_nobody_up(transport):
    thread = threading.Thread(target=io_poller().begin)  # as if Ctrl-C had kept it from the end
    thread.start()
    thread.join()
    started = time.monotonic()
    for _ in range(3):
        assert transport.submit(pull(), PATIENCE).result().tables[0].size == 8
    assert time.monotonic() - started < 10
    later = transport.submit(pull(), PATIENCE)  # the loop reads again, too
    assert eventually(later.is_done)


def test_a_thread_whose_reply_another_one_reads_is_woken(shard, transport):
    poller, sizes = io_poller(), []
    started = time.monotonic()
    for _ in range(20):
        gate = threading.Event()
        shard.apply.submit(gate.wait, 1, float("inf"))
        answer = transport.submit(pull(), PATIENCE)
        thread = threading.Thread(target=lambda answer=answer: sizes.append(answer.result().tables[0].size))
        thread.start()
        assert eventually(lambda: poller._is_polling)
        threading.Timer(0.01, gate.set).start()
        while not answer.is_done():
            poller._read(0.001)  # at the same time
        thread.join()
    assert sizes == [8] * 20
    assert time.monotonic() - started < 20  # and not a deadline


def test_threads_whose_calls_are_interrupted_at_any_moment_leave_no_call_without_a_reply(transport):
    main, failures, ended = threading.get_ident(), [], threading.Event()

    def ask(timeout=PATIENCE):
        transport.submit(m.Hello(worker=0), timeout).result()  # the connection may be lost
        return transport.submit(pull(), timeout).result().tables[0].size

    def others():
        while not ended.is_set():
            try:
                assert ask(timedelta(seconds=20)) == 8
            except BaseException as error:
                failures.append(error)

    thread = threading.Thread(target=others)
    thread.start()
    interrupts = 0
    try:
        while interrupts < 60:
            timer = threading.Timer(random.uniform(0.0, 0.01), signal.pthread_kill, (main, signal.SIGINT))
            with suppress(KeyboardInterrupt):
                timer.start()
                while timer.is_alive():
                    with reading(), suppress(Unreachable):
                        ask()
                time.sleep(0.1)
            interrupts += 1
    finally:
        ended.set()
        thread.join(60)
    assert not thread.is_alive()
    assert not [error for error in failures if "no answer" in str(error)]
    assert ask() == 8


def test_a_forked_child_takes_no_reply_of_its_parent(transport):
    answer = transport.submit(pull(), PATIENCE)
    child = os.fork()
    if not child:
        io_poller().begin()
        os._exit(0)
    os.waitpid(child, 0)
    assert answer.result().tables[0].size == 8
