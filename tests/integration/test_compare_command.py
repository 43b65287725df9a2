"""`embershard compare` as people run it: killed in the middle, started again, reported, and over a shaped wire."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager

import pytest

from embershard.cli.snapshot import CONNECT_TIMEOUT
from embershard.compare.results import read_results
from embershard.compare.run.netns import Namespaces, NoNamespaces
from embershard.deploy.supervisor import LocalShards
from embershard.worker.client.client import Client
from harness.eventually import eventually
from harness.processes import marked, said

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

JOB = """\
model: {name: dlrm, bottom: [8], hidden: [8]}
data: {reader: clicks, eval_samples: 1000, loader_processes: 0}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.05}}
train: {batch_size: 256, samples: 4_096}
workers: 1
shards: 1
"""


@pytest.fixture
def compare(start):
    return lambda *words: start(JOB, "--seeds", "2", "--arms", *words, command="compare")


def lines(folder):
    path = folder / "out" / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_comparison_goes_on_where_it_was(compare, tmp_path):
    killed = compare("none,fp16s")
    assert eventually(lambda: lines(tmp_path) and len(marked(str(tmp_path))) > 1)
    killed.kill()
    killed.wait()
    assert eventually(lambda: not marked(str(tmp_path)))  # its run, shards and workers end with it
    there = len(lines(tmp_path))
    text = said(compare("none,fp16s"))
    assert f"{there} of 4 runs are there already" in text
    assert "4 of 4: none, seed 1, unlimited: auc" in text
    assert "report.html" in text
    found = lines(tmp_path)
    assert len(found) == len({(run["arm"], run["seed"]) for run in found}) == 4
    results = read_results(tmp_path / "out" / "results.json")
    assert results.complete
    assert all(run.ok and run.samples == 4096 and run.metrics["auc"] for run in results.runs)
    (verdict,) = results.verdicts
    assert verdict.difference.low is not None
    assert 1.5 < verdict.bytes_ratio < 3
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


def test_ctrl_c_ends_everything_and_says_how_to_go_on(compare, tmp_path):
    process = compare("strategy=ps,local", "--set", "train.samples=1_000_000_000")
    assert eventually((tmp_path / "out/runs/quality-strategy_ps-seed0-unlimited/log.jsonl").exists)
    process.send_signal(signal.SIGINT)
    assert "the same command continues with the first missing run: embershard compare" in said(process, 130)
    assert not marked(str(tmp_path))
    assert not lines(tmp_path)


def tables(addresses):
    with closing(Client.connect(addresses, timeout=CONNECT_TIMEOUT)) as client:
        return [table.name for status in client.status() for table in status.tables]


@pytest.mark.long
def test_arms_are_trained_on_shards_that_run_already_as_on_their_own(compare, start, tmp_path):
    words = ("none,fp16s", "--seeds", "1")
    with LocalShards(2) as shards:
        ps = ("--ps", ",".join(shards.addresses))
        said(compare(*words, *ps))
        on_these = lines(tmp_path)
        assert read_results(tmp_path / "out" / "results.json").shards == 2
        assert not tables(shards.addresses)
        said(start(JOB, *ps))
        assert tables(shards.addresses)
        assert "already hold tables (dense, embedding)" in said(compare(*words, *ps, "--seeds", "2"), 1)
        said(compare(*words, *ps, "--seeds", "2", "--replace"))
        assert not tables(shards.addresses)
    assert [run["seed"] for run in lines(tmp_path)] == [0, 0, 1, 1]
    (tmp_path / "out").rename(tmp_path / "before")
    said(compare(*words, "--set", "shards=2"))  # each on two of its own
    assert [run["metrics"] for run in lines(tmp_path)] == [run["metrics"] for run in on_these]


CONNECT = """\
import socket, sys
host, port = sys.argv[1].rsplit(":", 1)
socket.create_connection((host, int(port)), 10).close()
"""


def output(*words):
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
    found = [line.split()[0] for line in output("ip", "netns", "list").splitlines()]
    return [name for name in found if name.startswith(f"embercompare-{pid}-")]


def test_workers_reach_shards_over_a_shaped_wire_and_nothing_is_left():
    with namespaces() as link:
        assert len(spaces(os.getpid())) == 2
        for bits in (5e6, None, 1e6):
            link.shape(bits)
        with link.shards(1, ()) as (address,):
            output(*link.worker_prefix, sys.executable, "-c", CONNECT, address)
        shaped = output(*link.worker_prefix, "tc", "qdisc")
        assert "tbf" in shaped
        assert "rate 1Mbit" in shaped


def test_what_a_killed_process_left_is_removed_by_the_next():
    with namespaces(), subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
        output("ip", "netns", "add", f"embercompare-{dead.pid}-s")
        assert spaces(dead.pid)
    with namespaces():
        assert not spaces(dead.pid)
