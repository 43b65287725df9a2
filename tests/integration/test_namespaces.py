"""Shards and workers in network namespaces, with a wire between them that the kernel shapes."""

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest

from embershard.compare.run.netns import Namespaces, NoNamespaces

pytestmark = pytest.mark.integration

CONNECT = """\
import socket, sys
host, port = sys.argv[1].rsplit(":", 1)
socket.create_connection((host, int(port)), 10).close()
"""


def said(*words):
    return subprocess.check_output(words, text=True, timeout=60)


@contextmanager
def namespaces():
    with ExitStack() as stack:
        try:
            link = stack.enter_context(Namespaces())
        except NoNamespaces as error:
            pytest.skip(str(error))
        yield link
    assert not spaces(os.getpid())


def spaces(pid):
    """Those that a process made: another one may compare, too."""
    found = [line.split()[0] for line in said("ip", "netns", "list").splitlines()]
    return [name for name in found if name.startswith(f"embercompare-{pid}-")]


def test_workers_reach_shards_over_a_shaped_wire_and_nothing_is_left():
    with namespaces() as link:
        assert len(spaces(os.getpid())) == 2
        for bits in (5e6, None, 1e6):
            link.shape(bits)
        with link.shards(1, ()) as (address,):
            said(*link.worker_prefix, sys.executable, "-c", CONNECT, address)
        shaped = said(*link.worker_prefix, "tc", "qdisc")
        assert "tbf" in shaped
        assert "rate 1Mbit" in shaped


def test_what_a_killed_process_left_is_removed_by_the_next():
    with namespaces(), subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
        said("ip", "netns", "add", f"embercompare-{dead.pid}-s")
        assert spaces(dead.pid)
    with namespaces():
        assert not spaces(dead.pid)
