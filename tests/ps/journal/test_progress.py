"""How far a recovery is, and what the next one would take."""

import pytest

from embershard.proto.clock import SystemClock
from embershard.proto.errors import ShardRecovering
from embershard.ps.journal.progress import RecoveryProgress, RecoveryRate

MIB = 2**20


class SetClock(SystemClock):
    """A clock that the test sets."""

    def __init__(self):
        self.time = 100.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


def test_what_is_left_is_told_by_the_rate_until_now():
    clock = SetClock()
    recovery = RecoveryProgress(clock)
    recovery.total_bytes, recovery.done_bytes = 40 * MIB, 10 * MIB
    clock.time = 102.0
    assert recovery.seconds_left == pytest.approx(6.0)
    recovery.done_bytes = 41 * MIB  # the total is an estimate
    assert recovery.seconds_left == 0.0


def test_pauses_grow_with_the_time_that_a_recovery_has_taken_and_have_a_limit():
    clock = SetClock()
    recovery, pauses = RecoveryProgress(clock), []
    for clock.time in (100.0, 101.0, 150.0):
        error = recovery.error()
        assert type(error) is ShardRecovering
        pauses.append(error.fields["retry_after_ms"])
    assert pauses == [20, 250, 1000]


def test_the_wait_for_room_on_the_disk_is_told_and_is_no_time_of_the_recovery():
    clock = SetClock()
    recovery = RecoveryProgress(clock)
    clock.time = 102.0
    recovery.total_bytes = recovery.done_bytes = MIB
    recovery.wait_for_room("No space left on device", 3600.0)
    assert recovery.elapsed == 2.0
    error = recovery.error()
    assert "cannot go on: No space left on device; it waits for room" in str(error)
    assert "are left" not in str(error)
    assert error.fields["retry_after_ms"] == 1000
    recovery.waits_for_room = ""
    assert "about 0 s are left" in str(recovery.error())


def test_a_recovery_takes_the_start_of_the_process_and_what_its_events_took():
    rate = RecoveryRate(start_seconds=0.5)
    rate.add(0, 2.0)  # an empty log
    assert rate.seconds(0) == 0.5
    rate.add(10 * MIB, 1.0)
    rate.add(30 * MIB, 1.0)
    assert rate.seconds(80 * MIB) == pytest.approx(4.5)


def test_later_events_count_for_more_and_bases_load_at_a_rate_of_their_own():
    rate = RecoveryRate()
    for seconds in (1.0, 0.1):
        for _ in range(40):
            rate.add(100 * MIB, seconds)
    assert rate.seconds(1000 * MIB) == pytest.approx(1.0, rel=0.02)
    rate.add_bases(0, 3.0)
    assert rate.seconds(0, 2 * 10**9) == pytest.approx(2.0)
    rate.add_bases(10**9, 0.5)
    assert rate.seconds(1000 * MIB, 2 * 10**9) == pytest.approx(2.0, rel=0.02)
