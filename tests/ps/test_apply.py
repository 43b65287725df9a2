"""The apply thread, its bounded queue, and the leases of a shard behind it."""

import itertools
import threading
import time

import pytest

from embershard.proto.errors import ClockAhead, ShardBusy, ShuttingDown
from embershard.proto.messages import Heartbeat, Pull, Rows
from embershard.ps import apply_thread as apply
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.dispatch import Dispatch
from harness.eventually import eventually
from harness.shards import gradients, join, make_shard, push, table


@pytest.fixture
def start():
    made = []

    def start(**bounds):
        made.append(ApplyThread(**bounds))
        return made[-1]

    yield start
    for thread in made:
        thread.close()
        assert thread.join(60)


def submit(thread, work=lambda: b"", num_bytes=1, deadline=float("inf")):
    return thread.submit(work, num_bytes, deadline)


def occupy(thread, num_bytes=1):
    """Keep the thread busy until the event that is returned is set."""
    entered, go = threading.Event(), threading.Event()
    submit(thread, lambda: entered.set() or (go.wait(60) and b""), num_bytes)
    assert entered.wait(60)
    return go


def idle(thread):
    """Until all that was submitted has been tried."""
    submit(thread, num_bytes=0).result(60)


@pytest.mark.parametrize(("bounds", "num_bytes"), [({"max_bytes": 100}, 50), ({"max_requests": 2}, 0)])
def test_a_full_queue_is_busy_until_it_is_emptied(start, bounds, num_bytes):
    thread = start(**bounds)
    gate = occupy(thread, num_bytes)
    waiting = submit(thread, num_bytes=num_bytes)
    with pytest.raises(ShardBusy) as caught:
        submit(thread)
    assert caught.value.fields["queued_bytes"] == thread.queued_bytes == 2 * num_bytes
    assert 5 <= caught.value.fields["retry_after_ms"] <= 1000
    gate.set()
    waiting.result(60)
    assert submit(thread, lambda: b"one request, however large", 1000).result(60)
    idle(thread)
    assert thread.queued_bytes == 0


def test_work_that_was_cancelled_or_whose_deadline_passed_in_the_queue_is_dropped(start):
    thread, done = start(), []
    gate = occupy(thread)
    late = submit(thread, lambda: done.append("late"), deadline=time.monotonic())
    submit(thread, lambda: done.append("cancelled")).cancel()
    early = submit(thread, lambda: done.append("early"))
    time.sleep(0.01)
    gate.set()
    early.result(60)
    assert late.cancelled()
    assert done == ["early"]


def test_work_that_fails_also_once_it_has_waited_does_not_end_the_thread(start):
    thread, clock = start(), Clock()
    thread.watch(clock)
    for moves in (0, 2):
        failing = submit(thread, clock.after(moves, then=lambda: bytes(1 // 0)))
        submit(thread, clock.move)
        with pytest.raises(ZeroDivisionError):
            failing.result(60)
    assert submit(thread, lambda: b"next").result(60) == b"next"


def test_what_was_accepted_before_the_end_is_done_in_order_and_nothing_more_is_taken(start):
    thread, done = start(), []
    gate = occupy(thread)
    for i in range(20):
        submit(thread, lambda i=i: done.append(i))
    thread.close()
    with pytest.raises(ShuttingDown):
        submit(thread)
    assert not thread.join(0.01)
    gate.set()
    assert thread.join(60)
    assert done == list(range(20))


@pytest.mark.parametrize("bounds", [{"max_bytes": 0}, {"max_requests": 0}])
def test_a_queue_without_room_is_refused(bounds):
    with pytest.raises(ValueError, match="at least 1"):
        ApplyThread(**bounds)


class Clock:
    """What parked work waits for."""

    def __init__(self) -> None:
        self.generation, self.times, self.extended, self.num_members = 0, [], 0.0, 0

    def advance(self, now):
        self.times.append(now)

    def extend_leases(self, seconds):
        self.extended += seconds

    def when_may_leave(self, end, refuse):
        end()

    def move(self):
        self.generation += 1
        return b"moved"

    def after(self, moves, then=lambda: b"done"):
        """Work that can be done once the clock has moved so often."""

        def work():
            if self.generation < moves:
                raise ClockAhead(clock=1, workers="2", seconds=0.5)
            return then()

        return work


class TestParking:
    @pytest.fixture
    def clock(self):
        return Clock()

    @pytest.fixture
    def thread(self, start, clock):
        made = start(max_bytes=100, max_requests=4)
        made.watch(clock)
        return made

    def test_work_that_must_wait_is_done_when_what_it_waits_for_has_moved(self, thread, clock):
        second, first = (submit(thread, clock.after(moves)) for moves in (2, 1))
        idle(thread)
        assert not first.done()
        submit(thread, clock.move)
        first.result(60)
        assert not second.done()
        submit(thread, clock.move)
        second.result(60)
        assert thread.queued_bytes == 0

    def test_work_that_waits_may_move_the_clock_for_other_work_that_waits(self, thread, clock):
        first = submit(thread, clock.after(2))
        submit(thread, clock.after(1, then=clock.move))
        submit(thread, clock.move)
        first.result(60)

    @pytest.mark.parametrize(("num_bytes", "waiting"), [(50, 2), (0, 4)], ids=["bytes", "requests"])
    def test_what_waits_is_bounded_and_does_not_keep_out_what_it_waits_for(self, thread, clock, num_bytes, waiting):
        futures = []
        for _ in range(waiting + 1):
            futures.append(submit(thread, clock.after(1), num_bytes))
            idle(thread)
        with pytest.raises(ClockAhead):
            futures.pop().result(60)
        assert not any(future.done() for future in futures)
        submit(thread, clock.move, 100)
        assert {future.result(60) for future in futures} == {b"done"}

    def test_a_pull_and_a_push_of_every_member_may_wait(self, thread, clock):
        clock.num_members = 3
        futures = []
        for _ in range(6):
            futures.append(submit(thread, clock.after(1), 0))
            idle(thread)
        assert not any(future.done() for future in futures)  # all are parked
        gate = occupy(thread, 0)
        queued = [submit(thread, num_bytes=0) for _ in range(5)]
        with pytest.raises(ShardBusy):
            submit(thread, num_bytes=0)
        clock.move()
        gate.set()
        assert {future.result(60) for future in (*futures, *queued)} == {b"done", b""}

    def test_work_that_waits_in_vain_fails_before_its_deadline_with_its_last_error(self, thread):
        tries = itertools.count()

        def work():
            raise ClockAhead(clock=next(tries), workers="2", seconds=0.5)

        with pytest.raises(ClockAhead) as caught:
            submit(thread, work, deadline=time.monotonic() + 1.0).result(60)
        assert caught.value.fields["clock"] == next(tries) - 1 == 1
        assert thread.queued_bytes == 0

    def test_what_waits_is_put_back_when_the_thread_ends(self, thread, clock):
        future = submit(thread, clock.after(1))
        idle(thread)
        thread.close()
        assert thread.join(60)
        with pytest.raises(ShuttingDown):
            future.result(60)

    def test_work_sees_when_it_arrived_also_when_it_is_tried_again(self, thread, clock):
        seen, before = [], time.monotonic()
        future = submit(thread, lambda: seen.append(thread.arrived) or clock.after(1)())
        idle(thread)
        after = time.monotonic()
        submit(thread, clock.move)
        future.result(60)
        assert seen == [seen[0]] * 2
        assert before <= seen[0] <= after

    def test_time_passes_while_nothing_is_asked_and_not_while_a_request_may_be_waiting(self, thread, clock):
        assert eventually(lambda: len(clock.times) >= 3)
        gate = occupy(thread)
        seen = len(clock.times)
        submit(thread, lambda: time.sleep(0.3))
        then = submit(thread, lambda: len(clock.times))
        gate.set()
        assert then.result(60) == seen
        assert clock.times == sorted(clock.times)

    def test_leases_are_extended_by_the_time_that_one_request_took(self, thread, clock, monkeypatch):
        monkeypatch.setattr(apply, "_STEP_SECONDS", 0.05)
        submit(thread, lambda: time.sleep(0.2)).result(60)
        idle(thread)
        assert clock.extended >= 0.1


def run_now(thread, work=threading.get_ident, deadline=float("inf")):
    """The future of work that this thread did, once the other one does not happen to look at the time."""
    while (future := thread.run_now(work, 1, deadline)) is None:
        time.sleep(0.001)
    return future


class TestRunNow:
    @pytest.fixture
    def clock(self):
        return Clock()

    @pytest.fixture
    def thread(self, start, clock):
        made = start()
        made.watch(clock)
        return made

    def test_work_is_done_by_the_caller_where_nothing_else_runs(self, thread):
        assert run_now(thread).result(0) == threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            run_now(thread, lambda: 1 // 0).result(0)
        assert run_now(thread, deadline=time.monotonic() - 1).cancelled()

    def test_work_is_left_to_the_thread_while_other_work_runs(self, thread):
        gate, done = occupy(thread), []
        assert thread.run_now(lambda: done.append("now"), 1, float("inf")) is None
        gate.set()
        idle(thread)
        assert done == []

    def test_work_that_is_not_quick_is_left_to_the_thread(self, thread):
        assert thread.run_now(bytes, 1, float("inf"), is_quick=lambda: False) is None

    def test_quick_work_that_waits_is_done_before_it_and_other_work_is_not(self, thread):
        done = []
        with thread._working:  # as run_now has it
            for is_quick in (True, True, False, True):
                thread.submit(lambda: done.append(threading.get_ident()), 1, float("inf"), lambda quick=is_quick: quick)
            assert not thread._run_quick()
            assert done == [threading.get_ident()] * 2
        idle(thread)
        assert len(done) == 4
        assert done[2:] == [thread._thread.ident] * 2

    def test_work_that_is_submitted_meanwhile_comes_after_it(self, thread):
        done = []

        def work():
            done.append(submit(thread, lambda: done.append("behind")))
            time.sleep(0.05)
            done.append("first")

        run_now(thread, work)
        done[0].result(60)
        assert done[1:] == ["first", "behind"]

    def test_what_it_lets_be_answered_is_answered_and_what_has_to_wait_waits(self, thread, clock):
        parked = run_now(thread, clock.after(1))
        assert not parked.done()
        assert run_now(thread, clock.move).result(0) == b"moved"
        assert parked.result(60) == b"done"

    def test_what_waits_is_put_back_before_its_deadline(self, thread, clock):
        with pytest.raises(ClockAhead):
            run_now(thread, clock.after(1), deadline=time.monotonic() + 0.3).result(60)

    def test_nothing_is_taken_once_it_is_closed(self, thread):
        thread.close()
        assert thread.run_now(bytes, 1, float("inf")) is None


class TestLeases:
    @pytest.fixture
    def shard(self):
        return make_shard(table())

    @pytest.fixture
    def thread(self, start):
        return start()

    @pytest.fixture
    def send(self, thread, shard):
        dispatch, deadline = Dispatch(shard, thread), time.monotonic() + 100
        return lambda r: dispatch.submit(type(r), lambda: r, lambda reply: reply, num_bytes=10, deadline=deadline)

    def test_a_small_pull_of_a_synchronous_job_is_answered_by_the_caller_once_its_clock_is_closed(self, thread, shard):
        deadline, dispatch = time.monotonic() + 100, Dispatch(shard, thread)

        def send(request, **more):
            done = dispatch.submit(
                type(request), lambda: request, lambda _: threading.get_ident(), num_bytes=10, deadline=deadline, **more
            )
            idle(thread)
            return done

        wanted = Pull(1, (), 0, 1, required_clock=1)
        for request in (join(0, workers=2), join(1, workers=2), push(gradients([1]), worker=0)):
            send(request)
        early = send(wanted, is_small=True)
        assert not early.done()
        send(push(gradients([1]), worker=1))
        assert early.result(60) == thread._thread.ident
        assert eventually(lambda: send(wanted, is_small=True).result(60) == threading.get_ident())

    def test_a_wait_ends_with_the_lease_of_the_one_waited_for(self, shard, send):
        for request in (join(0, workers=2), join(1, workers=2, lease_ms=300), push(gradients([1]))):
            send(request)
        assert isinstance(send(Pull(1, (), 0, 1, required_clock=1)).result(60), Rows)
        assert shard.status().expired_leases == 1

    def test_a_lease_does_not_run_while_requests_of_its_worker_wait_behind_others(self, shard, thread, send):
        for worker in range(2):
            send(join(worker, workers=2, staleness=-1, lease_ms=1000))
        idle(thread)
        assert shard.num_members == 2
        gate, begin, beats = occupy(thread), time.monotonic(), []
        while time.monotonic() - begin < 1.5:
            time.sleep(0.1)
            beats += [send(Heartbeat(worker=worker, epoch=1)) for worker in range(2)]
        gate.set()
        for beat in beats:
            beat.result(60)
        assert shard.status().expired_leases == 0
