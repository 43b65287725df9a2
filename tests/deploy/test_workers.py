"""Workers as child processes, of which some end: what the parent makes of it. They are plain scripts here."""

import contextlib
import sys
from pathlib import Path

import pytest

from embershard.deploy import workers
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
AGAIN = "and was started again; training goes on with the others meanwhile"


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Workers that do these lines, in place of the command."""
    script, launch = tmp_path / "worker.py", workers.subprocess.Popen
    monkeypatch.setattr(workers.subprocess, "Popen", lambda _, **options: launch([sys.executable, script], **options))

    def start(*lines, **options):
        script.write_text(SCRIPT.format(lines=lines))
        running = LocalWorkers(len(lines), [], tmp_path, say=lambda line: running.said.append(line), **options)
        running.said = []
        return running

    return start


@pytest.mark.parametrize(
    ("lines", "restarts", "signals", "said"),
    [
        ((KILL, WORK, WORK), 0, 1, ["worker 0 ended (SIGKILL); training goes on with the others"]),
        ((f"STARTS < 3 and {KILL}", "await_starts(0, 3)"), 2, 2, [f"worker 0 ended (SIGKILL) {AGAIN}"] * 2),
        (
            (KILL, "await_starts(0, 2)"),
            1,
            2,
            [f"worker 0 ended (SIGKILL) {AGAIN}", "worker 0 ended (SIGKILL); training goes on with the others"],
        ),
    ],
    ids=["not started again", "started again", "no more often than the job allows"],
)
def test_elastic_training_goes_on_without_a_worker_that_a_signal_ended(start, lines, restarts, signals, said):
    with start(*lines, elastic=True, restarts=restarts) as running:
        running.wait()
    assert (running.lost, running.said) == ({0: ["SIGKILL"] * signals}, said)


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


def test_a_worker_that_was_started_again_too_late_does_not_keep_the_job(start, monkeypatch):
    monkeypatch.setattr(workers, "STOP_TIMEOUT", workers.timedelta(seconds=0.1))
    again = f"STARTS == 1 and {KILL}; time.sleep(60)"
    with start("await_starts(1, 2)", again, elastic=True, restarts=1) as running:
        running.wait()
        (pid,) = (process.pid for process in running._processes if process.poll() is None)
    assert not Path(f"/proc/{pid}").exists()


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
