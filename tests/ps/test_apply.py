"""The apply thread and its bounded queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from embershard.proto.errors import ShardBusy, ShuttingDown
from embershard.ps.apply import ApplyThread

FOREVER = float("inf")


class Gate:
    """Work that keeps the thread busy until it is opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self) -> bytes:
        self.entered.set()
        assert self.open.wait(10)
        return b"gate"


@pytest.fixture
def start() -> Iterator[Callable[..., ApplyThread]]:
    made: list[ApplyThread] = []

    def start(**bounds: int) -> ApplyThread:
        made.append(ApplyThread(**bounds))
        return made[-1]

    yield start
    for thread in made:
        thread.close()
        assert thread.join(10)


def occupy(thread: ApplyThread, num_bytes: int = 1) -> Gate:
    gate = Gate()
    thread.submit(gate, num_bytes, FOREVER)
    assert gate.entered.wait(10)
    return gate


def test_work_is_done_in_the_order_of_its_arrival(start: Callable[..., ApplyThread]):
    thread, done = start(), []
    gate = occupy(thread)
    futures = [thread.submit(lambda i=i: done.append(i) or b"", 1, FOREVER) for i in range(20)]
    gate.open.set()
    for future in futures:
        future.result(10)
    assert done == list(range(20))


def test_a_queue_full_of_bytes_is_busy_until_it_is_emptied(start: Callable[..., ApplyThread]):
    thread = start(max_bytes=100)
    gate = occupy(thread, 60)
    waiting = thread.submit(lambda: b"", 40, FOREVER)
    with pytest.raises(ShardBusy) as caught:
        thread.submit(lambda: b"", 1, FOREVER)
    assert caught.value.fields["queued_bytes"] == thread.queued_bytes == 100
    assert 5 <= caught.value.fields["retry_after_ms"] <= 1000  # type: ignore[operator]
    gate.open.set()
    waiting.result(10)
    assert thread.submit(lambda: b"again", 100, FOREVER).result(10) == b"again"


def test_a_queue_full_of_requests_is_busy(start: Callable[..., ApplyThread]):
    thread = start(max_requests=2)
    gate = occupy(thread)
    thread.submit(lambda: b"", 0, FOREVER)
    with pytest.raises(ShardBusy):
        thread.submit(lambda: b"", 0, FOREVER)
    gate.open.set()


def test_one_request_is_taken_however_large(start: Callable[..., ApplyThread]):
    assert start(max_bytes=10).submit(lambda: b"large", 1000, FOREVER).result(10) == b"large"


def test_nothing_is_queued_once_all_is_done(start: Callable[..., ApplyThread]):
    thread = start()
    for _ in range(5):
        thread.submit(lambda: b"", 10, FOREVER).result(10)
    thread.close()
    assert thread.join(10)
    assert thread.queued_bytes == 0


def test_work_whose_deadline_passed_in_the_queue_is_dropped(start: Callable[..., ApplyThread]):
    thread, done = start(), []
    gate = occupy(thread)
    late = thread.submit(lambda: done.append("late") or b"", 1, time.monotonic())
    early = thread.submit(lambda: done.append("early") or b"", 1, FOREVER)
    time.sleep(0.01)
    gate.open.set()
    early.result(10)
    assert late.cancelled()
    assert done == ["early"]


def test_cancelled_work_is_dropped(start: Callable[..., ApplyThread]):
    thread, done = start(), []
    gate = occupy(thread)
    thread.submit(lambda: done.append("cancelled") or b"", 1, FOREVER).cancel()
    gate.open.set()
    thread.submit(lambda: b"", 1, FOREVER).result(10)
    assert done == []


def test_work_that_fails_does_not_end_the_thread(start: Callable[..., ApplyThread]):
    thread = start()
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: bytes(1 // 0), 1, FOREVER).result(10)
    assert thread.submit(lambda: b"next", 1, FOREVER).result(10) == b"next"


def test_what_was_accepted_before_the_end_is_done_and_nothing_more_is_taken(start: Callable[..., ApplyThread]):
    thread, done = start(), []
    gate = occupy(thread)
    for i in range(3):
        thread.submit(lambda i=i: done.append(i) or b"", 1, FOREVER)
    thread.close()
    with pytest.raises(ShuttingDown):
        thread.submit(lambda: b"", 1, FOREVER)
    assert not thread.join(0.01)
    gate.open.set()
    assert thread.join(10)
    assert done == [0, 1, 2]


@pytest.mark.parametrize("bounds", [{"max_bytes": 0}, {"max_requests": 0}])
def test_a_queue_without_room_is_refused(bounds: dict[str, int]):
    with pytest.raises(ValueError, match="at least 1"):
        ApplyThread(**bounds)
