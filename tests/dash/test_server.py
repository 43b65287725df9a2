"""The panel's server: one offline page, its samples as events, and nothing for strangers."""

import contextlib
import hashlib
import http.client
import json
import re
import socket
import threading
import time
from urllib.parse import urlencode

import pytest
import uvicorn

from embershard.dash import server
from embershard.dash.page import build_page
from embershard.dash.sampler import Sampler
from harness.eventually import eventually
from harness.served import ServedShard
from harness.shards import make_shard, table

# of uplot-1.6.32.tgz, from the npm registry
UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


@pytest.fixture(scope="module")
def shard():
    made = ServedShard()
    yield made
    made.stop()


@pytest.fixture
def panel(shard):
    """A panel that serves; its port."""
    with served(shard) as port:
        yield port


@pytest.fixture
def many_tables():
    """A panel of a shard with 60 tables; its port, and the shard's address."""
    made = ServedShard(shard=make_shard(*(table(f"user-{k}") for k in range(60))))
    with served(made) as port:
        yield port, made.address
    made.stop()


@contextlib.contextmanager
def served(shard):
    sock = server.listen("127.0.0.1:0")
    config = uvicorn.Config(server.make_app(Sampler([shard.address], interval=0.02)), log_level="warning")
    running = server.PanelServer(config)
    thread = threading.Thread(target=running.run, args=([sock],))
    thread.start()
    assert eventually(lambda: running.started)
    yield sock.getsockname()[1]
    running.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def ask(port, path="/", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    return connection.getresponse()


def events(reply):
    """The events of a stream: (name, value)."""
    while True:
        name, data, _ = (reply.readline().decode().rstrip("\n") for _ in range(3))
        yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_the_library_of_charts_is_the_published_one():
    from importlib.resources import files

    folder = files("embershard.dash.page")
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in UPLOT} == UPLOT
    assert "MIT License" in (folder / "uPlot.LICENSE").read_text()
    assert (folder / "uPlot.LICENSE").read_text() in build_page().html.decode()


def test_the_page_names_no_address_that_a_browser_would_load():
    html = build_page().html.decode()
    assert not re.search(r"""(?:src|href|action)\s*=\s*["'](?!data:)""", html)
    assert not re.search(r"""@import|url\((?!data:)|fetch\((?!`tables)|XMLHttpRequest|sendBeacon|WebSocket""", html)


def test_the_policy_allows_what_the_page_holds_and_nothing_else(panel):
    reply = ask(panel)
    policy = reply.getheader("Content-Security-Policy")
    assert reply.read() == build_page().html
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 4


def test_tables_are_sent_to_who_opens_a_shard_and_a_few_at_once(many_tables):
    port, address = many_tables
    stream = events(ask(port, "/stream"))
    next(stream)
    _, sample = next(stream)
    (row,) = sample["shards"]
    assert (row["num_tables"], "tables" in row) == (60, False)

    def tables(query):
        found = json.load(ask(port, f"/tables.json?{urlencode(query)}"))
        return found["matching"], [table["name"] for table in found["tables"]]

    assert tables({"shard": address}) == (60, [f"user-{k}" for k in range(50)])
    assert tables({"shard": address, "match": "R-5"}) == (11, ["user-5", *(f"user-{k}" for k in range(50, 60))])
    assert tables({"shard": "tcp://10.0.0.1:1"}) == tables({}) == (0, [])
    state = json.load(ask(port, "/state.json"))
    assert [len(shard["tables"]) for shard in state["shards"]] == [60]


def test_a_stream_begins_with_all_until_now_and_goes_on_with_each_sample(panel):
    stream = events(ask(panel, "/stream"))
    name, hello = next(stream)
    assert name == "hello"
    assert set(hello) >= {"tracks", "events", "last", "interval"}
    numbers = []
    while len(numbers) < 3:
        name, sample = next(stream)
        assert name == "sample"
        numbers.append(sample["number"])
        assert sample["shards"][0]["health"] in ("serving", "starting")
    assert numbers == list(range(numbers[0], numbers[0] + 3))


def test_one_sampler_serves_many_pages_the_same(panel):
    streams = [events(ask(panel, "/stream")) for _ in range(5)]
    firsts = [[next(stream) for _ in range(50)] for stream in streams]
    samples = [{value["number"]: value["time"] for name, value in first if name == "sample"} for first in firsts]
    shared = set.intersection(*(set(part) for part in samples))
    assert shared
    assert all(len({part[number] for part in samples}) == 1 for number in shared)


def test_a_browser_that_goes_away_or_does_not_read_disturbs_no_other(panel):
    gone = ask(panel, "/stream")
    gone.close()
    with socket.create_connection(("127.0.0.1", panel)) as deaf:
        deaf.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        stream = events(ask(panel, "/stream"))
        assert [name for name, _ in (next(stream) for _ in range(60))][1:] == ["sample"] * 59


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:7780", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("", 421),
    ],
)
def test_a_name_that_is_not_its_own_is_refused(panel, host, code):
    for path in ("/", "/state.json"):
        assert ask(panel, path, host=host).status == code


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_written(panel, method):
    for path in ("/", "/stream", "/state.json"):
        assert ask(panel, path, method).status == 405


@pytest.mark.parametrize("address", ["7780", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999", "256.0.0.1:80", ":80"])
def test_an_address_that_cannot_be_is_an_error(address):
    with pytest.raises(server.PanelCannotListen):
        server.listen(address)


def test_a_port_in_use_is_an_error_and_a_job_takes_a_free_one():
    with contextlib.closing(server.listen("127.0.0.1:0")) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(server.PanelCannotListen) as caught:
            server.listen(address)
        assert caught.value.fields["address"] == address
        assert caught.value.fields["reason"] == f"port {taken.getsockname()[1]} is in use"
        with contextlib.closing(server.listen(address, or_free_port=True)) as free:
            assert server.is_loopback(free)
            assert free.getsockname()[1] != taken.getsockname()[1]


def test_only_so_many_pages_are_served(panel, monkeypatch):
    monkeypatch.setattr(server, "_MOST_PAGES", 1)
    open_page = ask(panel, "/stream")
    open_page.readline()
    assert ask(panel, "/stream").read().splitlines()[1:3] == [b"event: full", b"data: 1"]
    open_page.close()
    deadline = time.monotonic() + 20
    while ask(panel, "/stream").readline().startswith(b"retry") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline
