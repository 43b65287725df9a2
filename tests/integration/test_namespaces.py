"""Shards and workers in network namespaces, with a wire between them that the kernel shapes."""

import os
import subprocess
import sys

import pytest

from embershard.compare.run.netns import Namespaces, NoNamespaces

pytestmark = pytest.mark.integration

PING = """\
import socket, sys
host, port = sys.argv[1].rsplit(":", 1)
socket.create_connection((host, int(port)), 10).close()
"""


def spaces(pid: int) -> list[str]:
    """Those that a process made: another one may compare, too."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=60, check=True).stdout
    return [line.split()[0] for line in found.splitlines() if line.startswith(f"embercompare-{pid}-")]


def test_workers_reach_shards_over_a_shaped_wire_and_nothing_is_left():
    try:
        with Namespaces() as link:
            assert len(spaces(os.getpid())) == 2
            link.shape(5e6)
            link.shape(None)
            link.shape(1e6)
            with link.shards(1, ()) as (address,):
                words = [*link.worker_prefix, sys.executable, "-c", PING, address]
                assert subprocess.run(words, timeout=60, check=False).returncode == 0
            shaped = subprocess.check_output([*link.worker_prefix, "tc", "qdisc"], text=True, timeout=60)
            assert "tbf" in shaped
            assert "rate 1Mbit" in shaped
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert not spaces(os.getpid())


def test_what_a_killed_process_left_is_removed_by_the_next():
    try:
        with Namespaces():
            dead = subprocess.Popen([sys.executable, "-c", ""])
            dead.wait()
            left = f"embercompare-{dead.pid}-s"
            subprocess.run(["ip", "netns", "add", left], timeout=60, check=True)
            assert spaces(dead.pid)
        with Namespaces():
            assert not spaces(dead.pid)
    except NoNamespaces as error:
        pytest.skip(str(error))
