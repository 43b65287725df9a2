"""Addresses that are ranges, and shards that announce themselves in a folder."""

import json
import threading
import time
from contextlib import closing
from datetime import timedelta

import pytest

from embershard.deploy.authority import Authority, write_new
from embershard.proto.errors import BadAddress, CannotAnnounce, NotAnnounced
from embershard.proto.messages import GetStatus
from embershard.proto.security.tls import TLS
from embershard.proto.transport import announcements as announcing
from embershard.proto.transport.addresses import parse_addresses, shard_addresses, transport_for
from embershard.proto.transport.announcements import Announcement, announcements, current_address
from embershard.proto.transport.transport import Unreachable


def shard(number, of=2, address="127.0.0.1:7", instance="a", started=1.0):
    return Announcement(address, instance, number, of, started)


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("shard-[0-2].shards.ns.svc:7700", [f"shard-{i}.shards.ns.svc:7700" for i in range(3)]),
        ("127.0.0.1:[7700-7702]", ["127.0.0.1:7700", "127.0.0.1:7701", "127.0.0.1:7702"]),
        ("node[08-11]:7700", ["node08:7700", "node09:7700", "node10:7700", "node11:7700"]),
        ("grpc://shard-[3-3]:7700", ["grpc://shard-3:7700"]),
        ("[::1]:[7700-7701]", ["[::1]:7700", "[::1]:7701"]),
        ("a:1,b-[0-1]:2", ["a:1", "b-0:2", "b-1:2"]),
        ("unix:/run/shard-[0-1]", ["unix:/run/shard-0", "unix:/run/shard-1"]),
        ("file:/run/[0-1]", ["file:/run/[0-1]"]),
    ],
)
def test_a_range_stands_for_as_many_addresses(text, addresses):
    assert parse_addresses(text) == addresses


@pytest.mark.parametrize(
    "text",
    [
        "shard-[2-1]:7700",
        "shard-[0-4096]:7700",
        "shard-[0-1]-[0-1]:7700",
        "shard-[0-1],shard-[1-2]",
        "shard-[0-1]:7700,shard-1:7700",
        "127.0.0.1:[65535-65536]",
        "shard-[a-b]:7700",
        "file:",
    ],
)
def test_a_range_that_names_no_addresses_is_refused(text):
    with pytest.raises(BadAddress):
        parse_addresses(text)


def test_a_folder_stands_for_the_shards_that_it_announces(tmp_path):
    for number in range(2):
        shard(number, address=f"10.0.0.{number}:7700").write(tmp_path)
    addresses = shard_addresses(f"file:{tmp_path}")
    assert addresses == [f"file:{tmp_path}#0", f"file:{tmp_path}#1"]
    assert [current_address(one) for one in addresses] == ["10.0.0.0:7700", "10.0.0.1:7700"]
    assert shard_addresses(addresses) == addresses
    shard(1, address="10.0.0.9:7700", instance="b").write(tmp_path)
    assert current_address(addresses[1]) == "10.0.0.9:7700"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-0.json", "shard-1.json"]


def test_a_folder_is_named_alone(tmp_path):
    shard(0, of=1).write(tmp_path)
    with pytest.raises(BadAddress):
        shard_addresses(f"127.0.0.1:7700,file:{tmp_path}")


def test_shards_that_are_not_there_yet_are_waited_for(tmp_path):
    folder = tmp_path / "later"

    def announce():
        for number in range(3):
            time.sleep(0.1)
            shard(number, of=3).write(folder)

    thread = threading.Thread(target=announce)
    thread.start()
    assert len(shard_addresses(f"file:{folder}", timedelta(seconds=20))) == 3
    thread.join()


def not_written(folder):
    pass


def one_missing(folder):
    shard(0).write(folder)


def two_jobs(folder):
    shard(0).write(folder)
    shard(2, of=3).write(folder)


def no_json(folder):
    (folder / "shard-0.json").write_text("{")


def other_fields(folder):
    (folder / "shard-0.json").write_text(json.dumps({"address": "127.0.0.1:1"}))


def other_index(folder):
    shard(1).write(folder)
    (folder / "shard-1.json").rename(folder / "shard-0.json")


def of_a_billion(folder):
    shard(0, of=10**9).write(folder)


def with_infinity(folder):
    (folder / "shard-0.json").write_text('{"address":"a:1","instance":"a","shard":0,"of":1e999,"started":1}')


def nested_deeply(folder):
    (folder / "shard-0.json").write_text("[" * 4000)


WRONG = [
    not_written, one_missing, two_jobs, no_json, other_fields, other_index, of_a_billion, with_infinity, nested_deeply,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_folder_that_does_not_name_all_shards_of_one_job_is_an_error_that_names_it(wrong, tmp_path):
    wrong(tmp_path)
    with pytest.raises(NotAnnounced) as raised:
        shard_addresses(f"file:{tmp_path}")
    assert raised.value.fields["folder"] == str(tmp_path)


def test_a_wait_for_shards_that_are_not_announced_says_once_why(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(announcing, "_SILENT_SECONDS", 0.0)
    with pytest.raises(NotAnnounced):
        shard_addresses(f"file:{tmp_path}", timedelta(seconds=0.2))
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting for shards: {NotAnnounced(folder=str(tmp_path), reason='no shard is announced there')}"
    ]


@pytest.mark.parametrize(
    "address",
    [
        "rpc-executes-pickles://10.0.0.1:7800", "rpc://10.0.0.1:7800", "grpc://10.0.0.1:7700", "tcp://10.0.0.1:7700",
        "file:/run/shards#0", "host:notaport", "host:0", "host:65536", "host", ":7700", "unix:run", "a b:7700",
        "host\ud800:7700", "host\n:7700",
    ],
)  # fmt: skip
def test_an_announcement_names_a_host_and_port_or_a_unix_socket_and_chooses_no_transport(address, tmp_path):
    shard(0, of=1, address=address).write(tmp_path)
    with pytest.raises(NotAnnounced):
        shard_addresses(f"file:{tmp_path}")
    with pytest.raises(Unreachable):
        current_address(f"file:{tmp_path}#0")


def test_a_folder_may_have_a_hash_in_its_name(tmp_path):
    folder = tmp_path / "run #one"
    shard(0, of=1, address="[::1]:7700").write(folder)
    (address,) = shard_addresses(f"file:{folder}")
    assert current_address(address) == "[::1]:7700"


def test_with_tls_a_client_connects_to_no_unix_socket_that_a_folder_names(tmp_path):
    shard(0, of=1, address=f"unix:{tmp_path}/socket").write(tmp_path)
    folder = tmp_path / "keys"
    write_new(folder, Authority.create("a").issue("a", ["shards"], timedelta(days=1)))
    with closing(transport_for(f"file:{tmp_path}#0", tls=TLS(folder, "shards"))) as transport:
        with pytest.raises(Unreachable, match="shows no certificate"):
            transport.submit(GetStatus(), timedelta(seconds=10)).result()


def test_a_shard_whose_announcement_is_gone_is_one_to_wait_for(tmp_path):
    for wrong in (not_written, no_json):
        wrong(tmp_path)
        with pytest.raises(Unreachable):
            current_address(f"file:{tmp_path}#0")


def test_an_announcement_that_another_process_has_replaced_stays(tmp_path):
    first, second = shard(0, instance="a"), shard(0, instance="b")
    first.write(tmp_path)
    second.write(tmp_path)
    first.remove(tmp_path)
    assert announcements(tmp_path) == [second]
    second.remove(tmp_path)
    assert announcements(tmp_path) == []
    second.remove(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotAnnounce) as raised:
        shard(0).write(tmp_path / "file")
    assert raised.value.fields["folder"] == str(tmp_path / "file")


def test_with_tls_an_announced_shard_needs_the_name_of_its_certificate(tmp_path):
    with pytest.raises(BadAddress, match="--tls-server-name"):
        transport_for(f"file:{tmp_path}#0", tls=TLS(tmp_path))
