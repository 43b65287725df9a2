"""When a job goes on from its latest checkpoint, and when it is given up: one row for each course of events."""

import pytest

from embershard.deploy.attempts import (
    AttemptPolicy,
    Attempts,
    AttemptStarted,
    CheckpointSeen,
    ErrorKind,
    GiveUp,
    Interrupted,
    Restart,
    ShardEnded,
    WorkerEnded,
)

KILLED, LOST, OWN = ErrorKind.KILLED, ErrorKind.LOST, ErrorKind.OWN
HOUR = 3600.0


def at(step):
    return CheckpointSeen(f"checkpoints/step-{step}", step)


def killed(step, seconds=HOUR, end=ShardEnded, kind=KILLED):
    """An attempt of so many seconds that ends behind the checkpoint of a step; 0: there is none yet."""
    return [AttemptStarted(0.0), *([at(step)] if step else []), end(seconds, kind)]


def decisions(events, **policy):
    attempts = Attempts(AttemptPolicy(**policy))
    return [decision for event in events if (decision := attempts.on(event)) is not None]


def from_step(step, pause=0.0):
    return (at(step) if step else None, pause)


def shown(decision):
    """A Restart as (checkpoint, seconds of its pause)."""
    return (decision.checkpoint, decision.pause.total_seconds()) if isinstance(decision, Restart) else decision


@pytest.mark.parametrize(
    ("events", "policy", "expected"),
    [
        (killed(20), {}, [from_step(20)]),
        (killed(20, end=WorkerEnded), {}, [from_step(20)]),
        (killed(20, end=WorkerEnded, kind=LOST), {}, [from_step(20)]),
        (killed(20, end=WorkerEnded, kind=OWN), {}, [GiveUp.OWN_ERROR]),
        (killed(20, kind=OWN), {}, [GiveUp.OWN_ERROR]),  # a shard that refuses to start
        (killed(0), {}, [from_step(0)]),  # fresh shards begin anew
        (killed(0), {"owns_shards": False}, [GiveUp.NO_CHECKPOINT]),
        (killed(20), {"owns_shards": False}, [from_step(20)]),
        (killed(20), {"recovers": False}, [GiveUp.OFF]),
        ([*killed(20), *killed(40), *killed(60)], {}, [from_step(20), from_step(40), from_step(60)]),
        ([*killed(20), *killed(20)], {}, [from_step(20), GiveUp.NO_PROGRESS]),
        ([*killed(0), *killed(0)], {}, [from_step(0), GiveUp.NO_PROGRESS]),
        ([*killed(0), *killed(20), *killed(20)], {}, [from_step(0), from_step(20), GiveUp.NO_PROGRESS]),
        ([*killed(20), *killed(40, end=WorkerEnded, kind=OWN)], {}, [from_step(20), GiveUp.OWN_ERROR]),
        ([AttemptStarted(0.0), at(20), Interrupted()], {}, [GiveUp.INTERRUPTED]),
        ([*killed(20), Interrupted()], {}, [from_step(20), GiveUp.INTERRUPTED]),  # in the pause
        ([*killed(20), WorkerEnded(HOUR, LOST), ShardEnded(HOUR, KILLED)], {}, [from_step(20)]),  # ended by us
        ([AttemptStarted(0.0), Interrupted(), WorkerEnded(1.0, KILLED)], {}, [GiveUp.INTERRUPTED]),
    ],
)
def test_a_course_of_events_has_these_decisions(events, policy, expected):
    assert list(map(shown, decisions(events, **policy))) == expected


def test_pauses_grow_while_attempts_are_short_and_begin_anew_after_a_long_one():
    lengths = [5.0, 5.0, 5.0, 5.0, 2 * HOUR, 5.0]
    events = [event for number, seconds in enumerate(lengths, start=1) for event in killed(20 * number, seconds)]
    assert [shown(decision)[1] for decision in decisions(events)] == [0, 1, 2, 4, 0, 1]
    assert AttemptPolicy().pause(30) == AttemptPolicy().longest_pause


@pytest.mark.parametrize(("code", "kind"), [(-9, KILLED), (-15, KILLED), (75, LOST), (1, OWN), (2, OWN)])
def test_an_exit_code_says_whether_a_restart_may_help(code, kind):
    assert ErrorKind.of(code) is kind
