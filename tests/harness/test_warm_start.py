"""A process that starts warm is, for all that can be seen of it, the one that would have started cold."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness import warm_start
from harness.processes import EMBERSHARD, all_end, descendants

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="processes start warm on Linux only"),
]

SCRIPT = """
import json, os, signal, sys, torch
signals = {name: str(signal.getsignal(getattr(signal, name))) for name in ("SIGINT", "SIGTERM", "SIGPIPE")}
print(json.dumps([__name__, sys.argv, sys.path[:2], os.getcwd(), os.getppid(), os.getsid(0) == os.getpid(),
                  dict(os.environ), signals, torch.get_num_threads(), sys.stdin.read(), sys.stdout.isatty()]))
print("heard", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("new_session", [False, True])
def test_a_script_sees_the_same_as_one_that_starts_cold(tmp_path, monkeypatch, new_session):
    script, saw = tmp_path / "script.py", []
    script.write_text(SCRIPT)
    monkeypatch.setattr(warm_start, "TESTS", tmp_path)  # scripts there start warm
    command, env = (
        [sys.executable, str(script), "one", "two words"],
        {"MARK": "here", "PYTHONPATH": f"{tmp_path}/other"},
    )
    options = {"cwd": tmp_path, "env": {**os.environ, **env}, "start_new_session": new_session, "timeout": 250}
    for cold in (False, True):
        monkeypatch.setattr(warm_start.WarmPopen, "cold", cold)
        done = subprocess.run(command, input="text", capture_output=True, text=True, **options)
        saw.append((done.returncode, json.loads(done.stdout), done.stderr))
    assert saw[0] == saw[1]
    assert (saw[0][0], saw[0][2]) == (3, "heard\n")


def test_others_see_its_words_its_environment_and_its_parent_and_all_that_run_can_be_ended():
    words = [*EMBERSHARD, "ps", "--shard", "0", "--of", "1", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(words, env={**os.environ, "MARK": "there"}, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        seen = psutil.Process(process.pid)
        assert [word for word in seen.cmdline() if word] == words
        assert (seen.environ()["MARK"], seen.ppid()) == ("there", os.getpid())
        assert "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()  # it did start warm
        warm_start.kill_all()
        assert process.returncode == -signal.SIGKILL


def test_what_it_starts_is_its_own_child_and_ends_with_it():
    up = [*EMBERSHARD, "up", "--shards", "2", "--base-port", "0"]
    with subprocess.Popen(up, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while "Ctrl-C ends them" not in process.stdout.readline():
            assert process.poll() is None
        shards = descendants(process.pid)
        templates = [child for child in psutil.Process(process.pid).children() if child not in shards]
        assert len(shards) == 2
        assert {shard.ppid() for shard in shards} == {process.pid}
        assert all("libtorch" in Path(f"/proc/{shard.pid}/maps").read_text() for shard in shards)
        process.kill()
    assert all_end([*shards, *templates])
