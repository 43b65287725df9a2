"""`embershard train --dash`: a page of the job while it trains, which ends with the job however that ends."""

import http.client
import json
import signal
from urllib.parse import urlsplit

import pytest

from harness.eventually import PATIENCE, eventually
from harness.processes import all_end, descendants, lives, words

pytestmark = pytest.mark.integration

JOB = """\
model: {name: lr}
data: {reader: clicks, eval_samples: 1000, loader_processes: 0}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 64, samples: 1_000_000_000}
"""
TRAIN = ("--dash", "--shards", "1")


def panel_of(process):
    """The page's address, once the job trains and has printed it."""
    said = []
    for line in process.stdout:
        said.append(line)
        if "samples/s" in line:
            break
    (address,) = (line.split("panel: ")[1].split()[0] for line in said if "panel: " in line)
    return urlsplit(address).netloc


def ask(address, path):
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("GET", path)
    return connection.getresponse()


def events(reply):
    """The events of a stream: (name, value), until it ends."""
    while name := reply.readline().decode().rstrip("\n"):
        data, _ = (reply.readline().decode().rstrip("\n") for _ in range(2))
        yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def serving(sample):
    return [row["health"] for row in sample["shards"]] == ["serving"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_page_shows_the_job_while_it_trains_and_ends_with_it(start, signum, code):
    process = start(JOB, *TRAIN)
    address = panel_of(process)
    family = descendants(process.pid)
    assert len([one for one in family if "dash" in words(one)]) == 1
    page = ask(address, "/")
    assert (page.status, page.getheader("Content-Type").partition(";")[0]) == (200, "text/html")
    stream = events(ask(address, "/stream"))
    assert next(stream)[0] == "hello"
    # a job's first samples are of its start
    assert any(name == "sample" and serving(one) and one["run"] is not None for name, one in stream)
    process.send_signal(signum)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert all_end(family)
    with pytest.raises(OSError, match="refused"):
        ask(address, "/")


def test_a_panel_that_is_killed_leaves_the_job_training(start, tmp_path):
    process = start(JOB, *TRAIN)
    panel_of(process)
    family = descendants(process.pid)
    (panel,) = (one for one in family if "dash" in words(one))
    panel.kill()
    assert any("the panel ended" in line and "training continues" in line for line in process.stdout)
    assert eventually(lambda: not lives(panel))
    log = tmp_path / "out" / "log.jsonl"
    before = log.stat().st_size
    assert eventually(lambda: log.stat().st_size > before)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert all_end(family)
