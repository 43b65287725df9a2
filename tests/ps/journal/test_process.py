"""Logs of real processes: one folder for two, kill -9 while events are acknowledged, a sync that fails."""

import os
import random
import signal
import subprocess
import sys

import pytest

from embershard.proto.errors import LogLocked
from harness.eventually import PATIENCE
from harness.logs import open_log, plain, read, record

pytestmark = pytest.mark.integration

# appends events as fast as they are written, and says which are safe
WRITER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from harness.logs import begin, open_log, record
from embershard.ps.journal.log_thread import LogThread

journal = begin(open_log(None, Path(sys.argv[2])), sys.argv[3], 2**16)
thread = LogThread(journal)
print("ready", flush=True)
sys.stdin.readline()
while True:
    lsn = journal.last_lsn + 1
    journal.check_room(1000)
    journal.append(record(lsn))
    journal.when_safe(lsn, lambda lsn=lsn: os.write(1, b"%d\\n" % lsn))
    while journal.waiting_bytes > 20_000:
        pass
"""


class Writer:
    def __init__(self, folder, mode, code=WRITER):
        words = [sys.executable, "-c", code, os.path.dirname(os.path.dirname(__file__)) + "/..", str(folder), mode]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdout.readline() == b"ready\n", self.process.communicate()

    def __enter__(self):
        return self.process

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


def test_a_folder_serves_one_process_at_a_time(tmp_path):
    with Writer(tmp_path, "log") as process:
        with pytest.raises(LogLocked) as raised:
            open_log(None, tmp_path)
        assert str(process.pid) in raised.value.fields["holder"]
    open_log(None, tmp_path).close()  # the lock ends with its process


@pytest.mark.parametrize("mode", ["log", "fsync"])
def test_nothing_that_was_acknowledged_is_lost_by_kill_9(mode, tmp_path):
    chooser = random.Random(mode)
    terms = {}
    acknowledged = 0
    for term in range(1, 5):
        with Writer(tmp_path, mode) as process:
            process.stdin.write(b"go\n")
            process.stdin.flush()
            for _ in range(chooser.randint(1, 300)):
                acknowledged = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read()
        if rest.endswith(b"\n"):
            acknowledged = int(rest.split()[-1])
        records, end = read(None, tmp_path)
        assert end.position.lsn == len(records) + 1 > acknowledged
        terms = {lsn: terms.get(lsn, term) for lsn in range(1, len(records) + 1)}
        assert records == [plain(record(lsn), lsn, terms[lsn]) for lsn in range(1, len(records) + 1)]


def test_a_process_whose_disk_fails_to_sync_ends_at_once_and_says_why(tmp_path):
    broken = """
from embershard.ps.journal import disk
def sync(self):
    raise OSError(5, "Input/output error")
"""
    code = WRITER.replace("thread = LogThread", broken + "disk._LocalFile.sync = sync\nthread = LogThread")
    with Writer(tmp_path, "fsync", code) as process:
        out, errors = process.communicate(b"go\n", timeout=PATIENCE)
    assert (process.returncode, out) == (1, b"")
    assert b"Input/output error" in errors
