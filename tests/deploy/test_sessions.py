"""Processes that are started here, and an interrupt that meets their start."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from embershard.deploy import sessions
from embershard.deploy.supervisor import LocalShards
from embershard.deploy.workers import LocalWorkers


@pytest.mark.parametrize("kind", ["shards", "workers"])
def test_an_interrupt_that_meets_the_start_of_a_process_leaves_none_behind(kind, monkeypatch, tmp_path):
    started, popen = [], subprocess.Popen

    def interrupted(_, **options):  # an srun, say, which does not end with its parent
        started.append(popen([sys.executable, "-c", "import time; time.sleep(3600)"], **options))
        os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    local = LocalShards(2) if kind == "shards" else LocalWorkers(2, [], tmp_path)
    try:
        with pytest.raises(KeyboardInterrupt), local:
            pass
        assert started
        assert all(process.returncode is not None for process in started)
    finally:
        for process in started:
            process.kill()


def test_an_interrupt_that_meets_the_start_of_a_lost_worker_leaves_none_behind(monkeypatch, tmp_path):
    started, popen = [], subprocess.Popen

    def interrupted(_, **options):
        lost = len(started) == 1
        code = "import os; os.kill(os.getpid(), 9)" if lost else "import time; time.sleep(3600)"
        started.append(popen([sys.executable, "-c", code], **options))
        if len(started) == 3:  # worker 1 for the second time
            os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt), LocalWorkers(2, [], tmp_path, elastic=True, restarts=1) as running:
            running.wait()
        assert len(started) == 3
        assert all(process.returncode is not None for process in started)
    finally:
        for process in started:
            process.kill()


def test_an_interrupt_that_meets_the_start_of_the_starting_thread_waits_for_it(monkeypatch):
    start_thread, started = threading.Thread.start, []

    def start_slowly(thread):
        start_thread(thread)
        time.sleep(0.1)

    def start():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        started.append(1)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    with pytest.raises(KeyboardInterrupt):
        sessions.start_each([start])
    assert started
