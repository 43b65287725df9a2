"""The apply thread and its bounded queue."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from embershard.proto.errors import ClockAhead, ShardBusy, ShuttingDown
from embershard.ps import apply_thread as apply
from embershard.ps.apply_thread import ApplyThread

FOREVER = float("inf")
AHEAD = ClockAhead(clock=1, workers="2", seconds=0.5)


class Gate:
    """Work that keeps the thread busy until it is opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self) -> bytes:
        self.entered.set()
        assert self.open.wait(60)
        return b"gate"


@pytest.fixture
def start():
    made: list[ApplyThread] = []

    def start(**bounds):
        made.append(ApplyThread(**bounds))
        return made[-1]

    yield start
    for thread in made:
        thread.close()
        assert thread.join(60)


def occupy(thread: ApplyThread, num_bytes: int = 1) -> Gate:
    gate = Gate()
    thread.submit(gate, num_bytes, FOREVER)
    assert gate.entered.wait(60)
    return gate


def test_work_is_done_in_the_order_of_its_arrival(start):
    thread, done = start(), []
    gate = occupy(thread)
    futures = [thread.submit(lambda i=i: done.append(i) or b"", 1, FOREVER) for i in range(20)]
    gate.open.set()
    for future in futures:
        future.result(60)
    assert done == list(range(20))


def test_a_queue_full_of_bytes_is_busy_until_it_is_emptied(start):
    thread = start(max_bytes=100)
    gate = occupy(thread, 60)
    waiting = thread.submit(lambda: b"", 40, FOREVER)
    with pytest.raises(ShardBusy) as caught:
        thread.submit(lambda: b"", 1, FOREVER)
    assert caught.value.fields["queued_bytes"] == thread.queued_bytes == 100
    assert 5 <= caught.value.fields["retry_after_ms"] <= 1000  # type: ignore[operator]
    gate.open.set()
    waiting.result(60)
    assert thread.submit(lambda: b"again", 100, FOREVER).result(60) == b"again"


def test_a_queue_full_of_requests_is_busy(start):
    thread = start(max_requests=2)
    gate = occupy(thread)
    thread.submit(lambda: b"", 0, FOREVER)
    with pytest.raises(ShardBusy):
        thread.submit(lambda: b"", 0, FOREVER)
    gate.open.set()


def test_one_request_is_taken_however_large(start):
    assert start(max_bytes=10).submit(lambda: b"large", 1000, FOREVER).result(60) == b"large"


def test_nothing_is_queued_once_all_is_done(start):
    thread = start()
    for _ in range(5):
        thread.submit(lambda: b"", 10, FOREVER).result(60)
    thread.close()
    assert thread.join(60)
    assert thread.queued_bytes == 0


def test_work_whose_deadline_passed_in_the_queue_is_dropped(start):
    thread, done = start(), []
    gate = occupy(thread)
    late = thread.submit(lambda: done.append("late") or b"", 1, time.monotonic())
    early = thread.submit(lambda: done.append("early") or b"", 1, FOREVER)
    time.sleep(0.01)
    gate.open.set()
    early.result(60)
    assert late.cancelled()
    assert done == ["early"]


def test_cancelled_work_is_dropped(start):
    thread, done = start(), []
    gate = occupy(thread)
    thread.submit(lambda: done.append("cancelled") or b"", 1, FOREVER).cancel()
    gate.open.set()
    thread.submit(lambda: b"", 1, FOREVER).result(60)
    assert done == []


def test_work_that_fails_does_not_end_the_thread(start):
    thread = start()
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: bytes(1 // 0), 1, FOREVER).result(60)
    assert thread.submit(lambda: b"next", 1, FOREVER).result(60) == b"next"


def test_what_was_accepted_before_the_end_is_done_and_nothing_more_is_taken(start):
    thread, done = start(), []
    gate = occupy(thread)
    for i in range(3):
        thread.submit(lambda i=i: done.append(i) or b"", 1, FOREVER)
    thread.close()
    with pytest.raises(ShuttingDown):
        thread.submit(lambda: b"", 1, FOREVER)
    assert not thread.join(0.01)
    gate.open.set()
    assert thread.join(60)
    assert done == [0, 1, 2]


@pytest.mark.parametrize("bounds", [{"max_bytes": 0}, {"max_requests": 0}])
def test_a_queue_without_room_is_refused(bounds):
    with pytest.raises(ValueError, match="at least 1"):
        ApplyThread(**bounds)


class Clock:
    """What parked work waits for."""

    def __init__(self) -> None:
        self.generation = 0
        self.times: list[float] = []
        self.excused = 0.0

    def advance(self, now: float) -> None:
        self.times.append(now)

    def extend_leases(self, seconds: float) -> None:
        self.excused += seconds

    def move(self) -> bytes:
        self.generation += 1
        return b"moved"

    def after(self, moves: int) -> Callable[[], bytes]:
        """Work that can be done once the clock has moved so often."""

        def work():
            if self.generation < moves:
                raise AHEAD
            return b"after %d" % moves

        return work


@pytest.fixture
def clock():
    return Clock()


def idle(thread: ApplyThread) -> None:
    """Until all that was submitted has been tried."""
    thread.submit(lambda: b"", 0, FOREVER).result(60)


class TestParking:
    @pytest.fixture
    def thread(self, start, clock):
        made = start(max_bytes=100, max_requests=4)
        made.watch(clock)
        return made

    def test_work_that_must_wait_is_done_when_what_it_waits_for_has_moved(self, thread, clock):
        second, first = (thread.submit(clock.after(moves), 1, FOREVER) for moves in (2, 1))
        idle(thread)
        assert not first.done()
        thread.submit(clock.move, 1, FOREVER)
        assert first.result(60) == b"after 1"
        assert not second.done()
        thread.submit(clock.move, 1, FOREVER)
        assert second.result(60) == b"after 2"
        assert thread.queued_bytes == 0

    def test_work_that_waits_may_move_the_clock_for_other_work_that_waits(self, thread, clock):
        def work():
            clock.after(1)()
            return clock.move()

        first = thread.submit(clock.after(2), 1, FOREVER)
        thread.submit(work, 1, FOREVER)
        thread.submit(clock.move, 1, FOREVER)
        assert first.result(60) == b"after 2"

    def test_what_waits_does_not_keep_out_what_it_waits_for(self, thread, clock):
        waiting = [thread.submit(clock.after(1), 50, FOREVER) for _ in range(2)]
        idle(thread)
        assert thread.queued_bytes == 100
        thread.submit(clock.move, 100, FOREVER)
        assert [future.result(60) for future in waiting] == [b"after 1"] * 2

    @pytest.mark.parametrize(("num_bytes", "waiting"), [(50, 2), (0, 4)], ids=["bytes", "requests"])
    def test_what_waits_is_bounded_too(self, thread, clock, num_bytes, waiting):
        futures = []
        for _ in range(waiting + 1):
            futures.append(thread.submit(clock.after(1), num_bytes, FOREVER))
            idle(thread)
        with pytest.raises(ClockAhead):
            futures[-1].result(60)
        assert not any(future.done() for future in futures[:-1])

    def test_work_that_waits_in_vain_fails_before_its_deadline_with_its_last_error(self, thread, clock):
        tries = itertools.count()

        def work():
            raise ClockAhead(clock=next(tries), workers="2", seconds=0.5)

        deadline = time.monotonic() + 1.0
        future = thread.submit(work, 1, deadline)
        with pytest.raises(ClockAhead) as caught:
            future.result(60)
        assert caught.value.fields["clock"] == next(tries) - 1 == 1
        assert thread.queued_bytes == 0

    def test_an_error_ends_the_waiting(self, thread, clock):
        def work():
            clock.after(1)()
            raise ZeroDivisionError

        future = thread.submit(work, 1, FOREVER)
        thread.submit(clock.move, 1, FOREVER)
        with pytest.raises(ZeroDivisionError):
            future.result(60)

    def test_what_waits_is_put_back_when_the_thread_ends(self, thread, clock):
        future = thread.submit(clock.after(1), 1, FOREVER)
        idle(thread)
        thread.close()
        assert thread.join(60)
        with pytest.raises(ShuttingDown):
            future.result(60)

    def test_work_sees_when_it_arrived_also_when_it_is_tried_again(self, thread, clock):
        seen = []

        def work():
            seen.append(thread.arrived)
            return clock.after(1)()

        before = time.monotonic()
        future = thread.submit(work, 1, FOREVER)
        idle(thread)
        after = time.monotonic()
        thread.submit(clock.move, 1, FOREVER)
        future.result(60)
        assert seen == [seen[0]] * 2
        assert before <= seen[0] <= after

    def test_time_passes_while_nothing_is_asked(self, thread, clock):
        end = time.monotonic() + 60
        while len(clock.times) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(clock.times) >= 3
        assert clock.times == sorted(clock.times)

    def test_time_does_not_pass_while_a_request_may_be_waiting(self, thread, clock):
        gate = occupy(thread)
        seen = len(clock.times)
        thread.submit(lambda: time.sleep(0.3) or b"", 1, FOREVER)
        then = thread.submit(lambda: len(clock.times), 1, FOREVER)
        gate.open.set()
        assert then.result(60) == seen

    def test_members_are_excused_for_the_time_that_one_request_took(self, thread, clock, monkeypatch):
        monkeypatch.setattr(apply, "_STEP_SECONDS", 0.05)
        thread.submit(lambda: time.sleep(0.2) or b"", 1, FOREVER).result(60)
        idle(thread)
        assert clock.excused >= 0.1
