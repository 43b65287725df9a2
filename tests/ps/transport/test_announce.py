"""A shard that announces itself: under which address, and not in the place of another one that serves."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from embershard.proto.errors import AnnouncedTwice, CannotAnnounce, CannotListen
from embershard.proto.messages import Greeting
from embershard.proto.transport.announcements import Announcement, announcements
from embershard.ps.transport.announce import advertised, announced, check_advertise
from harness.served import ServedShard


@pytest.mark.parametrize(
    ("advertise", "bound", "address"),
    [
        ("", "127.0.0.1:7700", "127.0.0.1:7700"),
        ("node7", "0.0.0.0:41234", "node7:41234"),
        ("node7.cluster:80", "0.0.0.0:41234", "node7.cluster:80"),
        ("[fe80::1]", "[::]:41234", "[fe80::1]:41234"),
        ("[fe80::1]:80", "[::]:41234", "[fe80::1]:80"),
    ],
)
def test_what_is_announced_has_the_port_that_was_bound_unless_it_names_one(advertise, bound, address):
    check_advertise(advertise, bound, bound.rpartition(":")[0].strip("[]"), announces=True)
    assert advertised(advertise, bound) == address


@pytest.mark.parametrize("advertise", ["a b", "a:0", "a:65536", ":7700", "a:b", "fe80::1", "http://a", "a,b", "a:1:2"])
def test_an_address_that_others_cannot_use_is_refused(advertise):
    with pytest.raises(CannotListen):
        check_advertise(advertise, "0.0.0.0:0", "0.0.0.0", announces=False)


def test_a_unix_socket_is_not_advertised():
    with pytest.raises(CannotListen):
        check_advertise("host", "unix:/run/shard", "", announces=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_of_a_machine_are_none_to_announce(host):
    with pytest.raises(CannotListen, match="--advertise"):
        check_advertise("", "0.0.0.0:7700", host, announces=True)
    check_advertise("", "0.0.0.0:7700", host, announces=False)


@pytest.fixture
def served():
    served = ServedShard()
    yield served
    served.stop()


def greeting(shard=0, of=1, instance="mine"):
    return Greeting(shard=shard, num_shards=of, instance=instance)


def of_served(served, of=1):
    return Announcement(served.address.removeprefix("tcp://"), served.shard.greeting.instance, 0, of, 1.0)


def test_an_address_is_announced_while_the_shard_serves(tmp_path):
    with announced(tmp_path / "run", greeting(), "127.0.0.1:1", None):
        (one,) = announcements(tmp_path / "run")
        assert (one.address, one.instance, one.shard, one.of) == ("127.0.0.1:1", "mine", 0, 1)
    assert announcements(tmp_path / "run") == []
    with announced(None, greeting(), "127.0.0.1:1", None):
        pass


def test_a_file_is_no_folder_to_announce_in(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CannotAnnounce, match="Not a directory; name a folder"),
        announced(tmp_path / "file", greeting(), "127.0.0.1:1", None),
    ):
        pass


@pytest.mark.parametrize("of", [1, 2])
def test_the_place_of_a_shard_that_serves_is_not_taken(of, served, tmp_path):
    of_served(served).write(tmp_path)
    with pytest.raises(AnnouncedTwice), announced(tmp_path, greeting(of=of), "127.0.0.1:1", None):
        raise AssertionError
    assert announcements(tmp_path) == [of_served(served)]


def test_the_place_of_a_process_that_is_gone_is_taken(served, tmp_path):
    gone = of_served(served)
    served.run(closed(served))
    for of in (1, 2):
        gone.write(tmp_path)
        with announced(tmp_path, greeting(of=of, shard=of - 1), "127.0.0.1:1", None):
            assert [one.instance for one in announcements(tmp_path)] == ["mine"]


async def closed(served):
    served._listener.close()


def test_a_port_that_another_shard_has_now_is_not_a_place_that_is_taken(served, tmp_path):
    Announcement(served.address.removeprefix("tcp://"), "an earlier one", 0, 1, 1.0).write(tmp_path)
    with announced(tmp_path, greeting(), "127.0.0.1:1", None):
        assert [one.instance for one in announcements(tmp_path)] == ["mine"]


def test_a_port_that_a_program_of_another_kind_has_now_is_not_a_place_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:
        other.settimeout(60)
        answered = pool.submit(answer_as_a_web_server, other)
        Announcement(f"127.0.0.1:{other.getsockname()[1]}", "an earlier one", 0, 1, 1.0).write(tmp_path)
        with announced(tmp_path, greeting(), "127.0.0.1:1", None):
            assert [one.instance for one in announcements(tmp_path)] == ["mine"]
        answered.result()


def answer_as_a_web_server(listener):
    connection, _ = listener.accept()
    with connection, suppress(ConnectionError):
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
