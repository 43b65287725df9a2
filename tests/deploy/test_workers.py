"""Workers as child processes, of which some end: what the parent makes of it. They are plain scripts here."""

import sys
from pathlib import Path

import pytest

from embershard.deploy import workers
from embershard.deploy.workers import LocalWorkers, WorkerFailed
from harness.raises import raises

pytestmark = pytest.mark.integration

AWAIT_STARTS = """
def await_starts(rank, count):
    of_other = starts.with_name(f"starts-{rank}")
    for _ in range(6000):
        if of_other.exists() and len(of_other.read_text()) == count:
            return
        time.sleep(0.01)
    sys.exit(f"worker {rank} was not started {count} times")
"""


class Scripts(LocalWorkers):
    """Workers that do what a line of Python says, by their number and how often they were started."""

    def __init__(self, folder: Path, *lines: str, **options: object) -> None:
        self.said: list[str] = []
        script = folder / "worker.py"
        program = "import os, signal, sys, time\nfrom pathlib import Path\nRANK = int(os.environ['RANK'])\n"
        program += f"starts = Path({str(folder)!r}) / f'starts-{{RANK}}'\n"
        program += "starts.open('a').write('x')\nSTARTS = len(starts.read_text())\n"
        program += AWAIT_STARTS
        program += f"exec({list(lines)!r}[RANK])\n"
        script.write_text(program)
        super().__init__(len(lines), [], folder, say=self.said.append, **options)
        self.script = script


@pytest.fixture(autouse=True)
def _plain_scripts(monkeypatch, tmp_path):
    """In place of the command: the script."""
    launch = workers.subprocess.Popen

    def popen(command, **options):
        return launch([sys.executable, str(tmp_path / "worker.py")], **options)

    monkeypatch.setattr(workers.subprocess, "Popen", popen)


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
WORK = "time.sleep(0.5)"


def test_elastic_training_goes_on_without_a_worker_that_a_signal_ended(tmp_path):
    with Scripts(tmp_path, KILL, WORK, WORK, elastic=True) as running:
        running.wait()
    assert running.lost == {0: ["SIGKILL"]}
    assert running.said == ["worker 0 ended (SIGKILL); training goes on with the others"]


def test_other_training_ends_with_the_first_worker_that_is_lost(tmp_path):
    with Scripts(tmp_path, WORK, KILL) as running, raises(WorkerFailed, worker=1, how="SIGKILL"):
        running.wait()


def test_an_error_of_a_workers_own_ends_all(tmp_path):
    error = "print('it broke', file=sys.stderr); sys.exit(1)"
    with (
        Scripts(tmp_path, "time.sleep(60)", error, elastic=True) as running,
        raises(WorkerFailed, worker=1, how="exit code 1", lines="it broke"),
    ):
        running.wait()
    assert all(not Path(f"/proc/{pid}").exists() for pid in running.pids)


def test_whom_the_others_lost_is_named_also_where_it_ends_after_them(tmp_path):
    lost = "print('worker 0 of 2 lost another worker: gone', file=sys.stderr); sys.exit(1)"
    error = "await_starts(0, 1); time.sleep(0.5); print('it broke', file=sys.stderr); sys.exit(1)"
    with Scripts(tmp_path, lost, error) as running, raises(WorkerFailed, worker=1, lines="it broke"):
        running.wait()


def test_it_fails_when_nobody_is_left(tmp_path):
    with Scripts(tmp_path, KILL, KILL, elastic=True) as running, raises(WorkerFailed, how="SIGKILL"):
        running.wait()
    assert len(running.lost) == 2


def test_a_lost_worker_is_started_again(tmp_path):
    with Scripts(tmp_path, f"STARTS < 3 and {KILL}", "await_starts(0, 3)", elastic=True, restarts=2) as running:
        running.wait()
    assert running.lost == {0: ["SIGKILL", "SIGKILL"]}
    assert all("was started again; training goes on with the others meanwhile" in line for line in running.said)


def test_a_lost_worker_is_not_started_again_more_often_than_the_job_allows(tmp_path):
    with Scripts(tmp_path, KILL, "await_starts(0, 2)", elastic=True, restarts=1) as running:
        running.wait()
    assert [line.partition(")")[2] for line in running.said] == [
        " and was started again; training goes on with the others meanwhile",
        "; training goes on with the others",
    ]


def test_a_worker_that_was_started_again_too_late_does_not_keep_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "STOP_TIMEOUT", workers.timedelta(seconds=0.1))
    again = f"STARTS == 1 and {KILL}; time.sleep(60)"
    with Scripts(tmp_path, "await_starts(1, 2)", again, elastic=True, restarts=1) as running:
        running.wait()
        (pid,) = (process.pid for process in running._processes if process.poll() is None)
    assert not Path(f"/proc/{pid}").exists()
