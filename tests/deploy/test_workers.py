"""Workers as child processes, of which some end: what the parent makes of it. They are plain scripts here."""

import contextlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from embershard.deploy import workers
from embershard.deploy.engine import LocalEngine, Place
from embershard.deploy.workers import LocalWorkers, WorkerFailed
from harness.eventually import eventually
from harness.processes import marked
from harness.raises import raises

pytestmark = pytest.mark.integration

# a line of Python for each worker, which may look at RANK and at STARTS, how often it was started
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
RANK = int(os.environ['RANK'])
starts = Path(__file__).with_name(f'starts-{{RANK}}')
starts.open('a').write('x')
STARTS = len(starts.read_text())
def await_starts(rank, count):
    of_other = starts.with_name(f"starts-{{rank}}")
    for _ in range(6000):
        if of_other.exists() and len(of_other.read_text()) == count:
            return
        time.sleep(0.01)
    sys.exit(f"worker {{rank}} was not started {{count}} times")
exec({lines!r}[RANK])
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
WORK = "time.sleep(0.5)"
FAIL = "print('it broke', file=sys.stderr); sys.exit(1)"
LOST = "print('worker 0 of 2 lost another worker: gone', file=sys.stderr); sys.exit(1)"
AGAIN = "and was restarted; the others continue training meanwhile"


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Workers that do these lines, in place of the command."""
    script, launch = tmp_path / "worker.py", workers.subprocess.Popen
    monkeypatch.setattr(workers.subprocess, "Popen", lambda _, **options: launch([sys.executable, script], **options))

    def start(*lines, least=0, **options):
        script.write_text(SCRIPT.format(lines=lines))
        running = LocalWorkers(least or len(lines), [], tmp_path, say=lambda line: running.said.append(line), **options)
        running.said = []
        return running

    return start


@pytest.mark.parametrize(
    ("lines", "restarts", "signals", "said"),
    [
        ((KILL, WORK, WORK), 0, 1, ["worker 0 ended (SIGKILL); the others continue training"]),
        ((f"STARTS < 3 and {KILL}", "await_starts(0, 3)"), 2, 2, [f"worker 0 ended (SIGKILL) {AGAIN}"] * 2),
        (
            (KILL, "await_starts(0, 2)"),
            1,
            2,
            [f"worker 0 ended (SIGKILL) {AGAIN}", "worker 0 ended (SIGKILL); the others continue training"],
        ),
    ],
    ids=["not started again", "started again", "no more often than the job allows"],
)
def test_elastic_training_goes_on_without_a_worker_that_a_signal_ended(start, lines, restarts, signals, said):
    with start(*lines, elastic=True, restarts=restarts) as running:
        running.wait()
    assert (running.lost, running.said) == ({0: ["SIGKILL"] * signals}, said)


def test_training_goes_on_where_no_process_can_be_started_any_more(start, monkeypatch):
    with start(KILL, "await_starts(0, 1); time.sleep(1)", elastic=True, restarts=1, most=3) as running:

        def none_left(*_, **__):
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(workers.subprocess, "Popen", none_left)
        running.resize(3)
        running.wait()
    why, others = "Resource temporarily unavailable", "the others continue training"
    assert running.said == [
        f"no further worker can be started: {why}; {others}",
        f"worker 0 ended (SIGKILL, and cannot be restarted: {why}); {others}",
    ]


@pytest.mark.parametrize(
    ("lines", "elastic", "error"),
    [
        ((WORK, KILL), False, {"worker": 1, "how": "SIGKILL", "code": -9}),
        ((KILL, KILL), True, {"how": "SIGKILL"}),
        (("time.sleep(60)", FAIL), True, {"worker": 1, "how": "exit code 1", "code": 1, "lines": "it broke"}),
        ((LOST, f"await_starts(0, 1); time.sleep(0.5); {FAIL}"), False, {"worker": 1, "lines": "it broke"}),
    ],
    ids=["lost", "nobody left", "an error of its own", "whom the others lost, though it ends after them"],
)
def test_other_training_ends_with_the_worker_that_is_to_blame(start, lines, elastic, error):
    with start(*lines, elastic=elastic) as running, raises(WorkerFailed, **error):
        running.wait()
    assert all(not Path(f"/proc/{pid}").exists() for pid in running.pids)


def test_a_worker_whose_log_had_no_room_is_reported_with_its_full_disk(start, monkeypatch):
    full = SimpleNamespace(free=0)
    monkeypatch.setattr(workers.shutil, "disk_usage", lambda folder: full)
    with (
        start("sys.exit(1)") as running,
        raises(WorkerFailed, lines=re.compile("no space is left on the disk of this log")),
    ):
        running.wait()


def test_a_worker_that_was_started_again_too_late_does_not_keep_the_job(start, monkeypatch):
    monkeypatch.setattr(workers, "STOP_TIMEOUT", workers.timedelta(seconds=0.1))
    again = f"STARTS == 1 and {KILL}; time.sleep(60)"
    with start("await_starts(1, 2)", again, elastic=True, restarts=1) as running:
        running.wait()
        (pid,) = (process.pid for process in running._processes if process.poll() is None)
    assert not Path(f"/proc/{pid}").exists()


def test_a_worker_that_runs_on_behind_the_end_of_the_job_is_named_once(start, monkeypatch):
    monkeypatch.setattr(workers, "_LATE_SECONDS", 0.1)
    with start("pass", WORK) as running:
        running.wait()
        (said,) = running.said
    assert f"worker 1 (pid {running.pids[1]}) still runs" in said


@pytest.mark.parametrize("trains", [True, False])
def test_only_a_worker_that_has_trained_since_it_was_started_again_goes_on_alone(start, tmp_path, trains):
    record = f"Path({str(tmp_path / '0.json')!r}).write_text('{{}}')"
    again = f"STARTS == 1 and {KILL}; {record if trains else 'pass'}; starts.with_name('ready').touch(); time.sleep(1)"
    waits = "[time.sleep(0.01) for _ in range(6000) if not starts.with_name('ready').exists()]"
    with start(again, f"STARTS == 1 and ({waits}, {KILL})", elastic=True, restarts=2, records=tmp_path) as running:
        with contextlib.nullcontext() if trains else raises(WorkerFailed, worker=1, how="SIGKILL"):
            running.wait()
    assert (tmp_path / "starts-1").read_text() == ("xx" if trains else "x")


LEAVE = (
    "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0)); starts.with_name(f'ready-{RANK}').touch(); time.sleep(60)"
)
UNTIL = "[time.sleep(0.01) for _ in range(6000) if not os.path.exists(starts.with_name('over'))]"


class Changes:
    """What is done to workers while they are waited for, one step after the other, each once its condition holds."""

    def __init__(self, running, *steps):
        self.running, self.steps = running, list(steps)

    def __call__(self):
        if self.steps and self.steps[0][0]():
            self.steps.pop(0)[1]()


def test_workers_come_and_leave_while_others_train(start, tmp_path):
    with start(UNTIL, LEAVE, LEAVE, least=1, most=3, elastic=True) as running:
        ready = [tmp_path / f"ready-{rank}" for rank in range(3)]
        assert (running.ranks, len(running.pids)) == ((0,), 1)
        running.resize(9)
        assert running.ranks == (0, 1, 2)
        changes = Changes(
            running,
            (lambda: ready[1].exists() and ready[2].exists(), lambda: running.resize(2)),
            (lambda: running.said == ["worker 2 has left"], lambda: (ready[2].unlink(), running.resize(3))),
            (ready[2].exists, lambda: running.resize(0)),
            (lambda: running.ranks == (0,) and len(running.said) == 3, (tmp_path / "over").touch),
        )
        running.wait(changes)
        assert not changes.steps
    assert sorted(running.said) == ["worker 1 has left", "worker 2 has left", "worker 2 has left"]
    assert (running.lost, (tmp_path / "starts-2").read_text()) == ({}, "xx")


@pytest.mark.parametrize(("ends", "how"), [(FAIL, "exit code 1: it broke"), (KILL, "SIGKILL")])
def test_training_goes_on_without_a_worker_that_came_later_whatever_ends_it(start, tmp_path, ends, how):
    with start(UNTIL, ends, least=1, most=2, elastic=True, restarts=3) as running:
        running.resize(2)
        running.wait(Changes(running, (lambda: running.said, (tmp_path / "over").touch)))
    assert running.said == [f"worker 1 ended ({how}); the others continue training"]
    assert running.ranks == (0,)


def test_the_place_of_a_lost_worker_is_taken_first(start, tmp_path):
    again = f"STARTS == 1 and {KILL}; {UNTIL}"
    with start(again, UNTIL, UNTIL, least=2, most=3, elastic=True) as running:
        start_again = (lambda: running.ranks == (1,), lambda: running.resize(2))
        running.wait(Changes(running, start_again, (lambda: running.ranks == (0, 1), (tmp_path / "over").touch)))
    assert [len((tmp_path / f"starts-{rank}").read_text()) for rank in range(2)] == [2, 1]
    assert not (tmp_path / "starts-2").exists()


def test_the_place_of_a_worker_that_has_left_is_given_back(start, tmp_path):
    class Engine(LocalEngine):
        held: ClassVar[list[Place]] = []

        def another_worker(self, rank, most):
            self.held.append(super().another_worker(rank, most))
            return self.held[-1]

        def give_back(self, place):
            self.held.remove(place)

    with start(UNTIL, LEAVE, least=1, most=2, elastic=True, engine=Engine()) as running:
        running.resize(2)
        assert Engine.held == [Place(number=1, of=2)]
        end = (lambda: not Engine.held, (tmp_path / "over").touch)
        running.wait(Changes(running, ((tmp_path / "ready-1").exists, lambda: running.resize(1)), end))


SPAWN = "import subprocess; subprocess.Popen(['sleep', '1000']); subprocess.Popen(['sleep', '1000'], process_group=0)"
FORK = "import multiprocessing; multiprocessing.Process(target=time.sleep, args=(1000,), daemon=True).start()"


@pytest.mark.parametrize("begins", [SPAWN, FORK], ids=["processes", "a fork of itself"])
@pytest.mark.parametrize("ends", [WORK, KILL, FAIL, "time.sleep(1000)"], ids=["done", "killed", "failed", "ended"])
def test_what_the_code_of_a_worker_started_ends_with_it(start, monkeypatch, tmp_path, begins, ends):
    monkeypatch.setenv("MARK", str(tmp_path))
    started = 1 + (begins.count("Popen") or 1)
    go = tmp_path / "go"
    waits = f"[time.sleep(0.01) for _ in range(10_000) if not os.path.exists({str(go)!r})]"
    with contextlib.suppress(WorkerFailed), start(f"{begins}; {waits}; {ends}") as running:
        assert eventually(lambda: len(marked(str(tmp_path))) == started)
        go.touch()
        if ends in (WORK, KILL, FAIL):
            running.wait()
            assert marked(str(tmp_path)) == []
    assert marked(str(tmp_path)) == []
