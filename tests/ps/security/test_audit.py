"""The audit log of a shard: what is in it, that it survives, and that nobody changes it without being found."""

import errno
import json
import os
import select
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from embershard.proto.errors import (
    AuditDamaged,
    CannotWrite,
    InternalError,
    NotAllowed,
    NotAuthenticated,
    TableMismatch,
)
from embershard.proto.messages import Compress, Declare, Hello, Load, Restore, Snapshot, TableCodecs
from embershard.proto.security.tokens import new_token, token_digest, write_private
from embershard.proto.wire import Feature
from embershard.ps.security import audit
from embershard.ps.security.access import Access
from embershard.ps.security.audit import FIRST, REFUSALS_PER_MINUTE, Act, AuditLog, verify
from embershard.ps.security.peers import Peer
from harness.eventually import eventually
from harness.hostile_peers import Peer as Connection
from harness.hostile_peers import framed, pull, push
from harness.raises import raises
from harness.served import ServedShard
from harness.shards import table


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "audit.jsonl"


@pytest.fixture
def serve():
    with ExitStack() as stack:

        def start(access):
            served = ServedShard(access=access)
            stack.callback(served.stop)
            return served

        yield start


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path, count=5):
    log = AuditLog(path)
    for number in range(count):
        log.write(Act("Declare", "done", "trainer", "train", "10.0.0.2:1", f"t{number}"))
    log.close()
    return lines(path)


def test_each_line_has_the_hash_of_the_one_before(path):
    found = written(path)
    assert [line["n"] for line in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["verb"] for line in found] == ["start", *["Declare"] * 5, "stop"]
    assert [line["before"] for line in found] == [FIRST, *[line["hash"] for line in found[:-1]]]
    assert verify(path) == (7, found[-1]["hash"], True)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_shard_that_starts_again_goes_on_with_its_log(path):
    first = written(path)
    written(path)
    assert verify(path, first[-1]["hash"]) == (14, lines(path)[-1]["hash"], True)


def test_every_single_change_of_the_file_is_found(path):
    written(path, 1)
    whole = path.read_bytes()
    for at in range(len(whole)):
        for change in (bytes([whole[at] ^ 1]), b"", bytes([whole[at]]) * 2):
            if change * 2 == bytes([whole[at]]) * 2:
                continue
            with path.open("r+b") as file:  # file systems write out at once what replaces an emptied file
                file.write(whole[:at] + change + whole[at + 1 :])
                file.truncate()
            with pytest.raises(AuditDamaged):
                verify(path)


def test_lines_that_were_removed_added_or_swapped_are_found(path):
    written(path)
    rows = path.read_bytes().splitlines(keepends=True)
    last = lines(path)[-1]["hash"]
    for number in range(len(rows)):
        for changed in (rows[:number] + rows[number + 1 :], rows[:number] + rows[number : number + 1] + rows[number:]):
            path.write_bytes(b"".join(changed))
            if changed == rows[:-1]:  # the end alone was cut off
                assert verify(path, last)[2] is False
                continue
            with pytest.raises(AuditDamaged):
                verify(path)


def test_a_line_that_a_killed_process_had_begun_is_cut_off_and_said(path):
    written(path)
    with path.open("ab") as file:
        file.write(b'{"n":8,"time')
    written(path)
    assert verify(path)[0] == 14
    assert "12 bytes" in lines(path)[7]["outcome"]


def test_a_log_whose_last_line_was_changed_is_not_gone_on_with(path):
    written(path)
    path.write_text(path.read_text().replace('"stop"', '"stap"'))
    with raises(AuditDamaged, path=str(path), line=7):
        AuditLog(path)


def test_two_shards_do_not_write_one_log(path):
    """Their lines would not follow one another, as if somebody had changed them."""
    first = AuditLog(path)
    with raises(CannotWrite, path=str(path), reason="another shard writes it"):
        AuditLog(path)
    first.close()
    written(path)
    assert verify(path)[0] == 9


def test_a_file_that_cannot_be_is_named_with_the_option_that_says_where(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match="--audit"):
        AuditLog(tmp_path / "file" / "audit.jsonl")


def test_refusals_are_sampled(path):
    log = AuditLog(path)
    for number in range(1000):
        log.refuse(Act("login", "NotAuthenticated", peer=f"10.0.0.2:{number}"))
    log.close()
    assert REFUSALS_PER_MINUTE <= len(lines(path)) <= 2 * REFUSALS_PER_MINUTE + 5
    assert num_refused(path) == 1000  # though no refusal came after them


def test_refusals_that_were_not_written_are_counted_by_the_next_line_of_any_kind(path, monkeypatch):
    log = AuditLog(path)
    for number in range(50):
        log.refuse(Act("login", "NotAuthenticated", peer=f"10.0.0.2:{number}"))
    now = time.monotonic()
    monkeypatch.setattr(audit.time, "monotonic", lambda: now + 60)
    log.write(Act("login", "done", "trainer"))
    assert eventually(lambda: any(line["principal"] == "trainer" for line in lines(path)))
    assert num_refused(path) == 50
    log.close()
    assert num_refused(path) == 50


def num_refused(path):
    """How many refusals a log tells of, one by one and as a number."""
    found = lines(path)
    counts = [int(line["outcome"].split()[0]) for line in found if line["verb"] == "refusals"]
    return sum(counts) + sum(line["outcome"] == "NotAuthenticated" for line in found)


def test_lines_that_a_full_disk_did_not_take_are_counted_by_the_next_one(path, monkeypatch):
    log, write = AuditLog(path), os.write

    def full(file, line):
        if file == log._file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, line)

    def wait_until_done():
        done = threading.Event()
        log.when_safe(done.set)
        assert done.wait(60)

    wait_until_done()
    with monkeypatch.context() as disk:
        disk.setattr(audit.os, "write", full)
        for name in "ab":
            log.write(Act("Declare", "done", table=name, safe=True))
        wait_until_done()
    log.close()
    told = [(line["verb"], line["outcome"].partition(":")[0]) for line in lines(path)]
    assert told == [("start", "done"), ("lost", "2 lines"), ("stop", "done")]


def test_a_name_of_a_peers_choice_is_one_line_and_short(path):
    log = AuditLog(path)
    log.write(Act("Declare", "done", table='x\n{"n":9}\u2028' + "y" * 10_000))
    log.close()
    assert verify(path)[0] == 3
    assert len(lines(path)[1]["table"]) == 200


class Disk:
    """Every write and sync of a log, in their order with the answers; `held`: syncs that do not end yet."""

    def __init__(self, monkeypatch):
        self.order, self.free = [], threading.Event()
        self.free.set()
        write, sync = os.write, os.fsync

        def noted_write(file, data):
            if data.startswith(b'{"n"'):
                self.order.append(f"write {json.loads(data)['verb']}")
            return write(file, data)

        def noted_sync(file):
            if not os.readlink(f"/proc/self/fd/{file}").endswith("audit.jsonl"):  # a snapshot's
                return sync(file)
            assert self.free.wait(60)
            sync(file)
            return self.order.append("sync")

        monkeypatch.setattr(audit.os, "write", noted_write)
        monkeypatch.setattr(audit.os, "fsync", noted_sync)


@pytest.fixture
def admin(path, tmp_path, serve, monkeypatch):
    """A connection of an admin, and the disk of its shard's log; and one of somebody who trains."""
    disk, tokens = Disk(monkeypatch), {role: new_token() for role in ("admin", "train")}
    entries = (f"- {{name: {r}, role: {r}, token_sha256: '{token_digest(t).hex()}'}}" for r, t in tokens.items())
    write_private(tmp_path / "access.yaml", "\n".join(entries))
    access = Access(tmp_path / "access.yaml", audit=AuditLog(path))
    served = serve(access)
    peers = [Connection(served.address, Feature.TOKEN, token=token) for token in tokens.values()]
    peers[1].ask(Declare(table("items", 4)))
    assert eventually(lambda: "write Declare" in disk.order)
    yield *peers, disk
    for peer in peers:
        peer.sock.close()
    access.close()


def acts(tmp_path):
    return {
        "Declare": Declare(table("more", 4)),
        "Load": Load("items", 1, np.arange(3), np.ones((3, 4), np.float32)),
        "Compress": Compress(tables=[TableCodecs(table="items", push="fp16s")]),
        "Snapshot begin": Snapshot(url=str(tmp_path), name="s", id=3, step="begin"),
        "Restore begin": Restore(step="begin", id=1, replace=True),
    }


@pytest.mark.parametrize("verb", acts(""))
def test_what_an_admin_does_is_on_the_disk_before_its_answer_leaves(admin, tmp_path, verb):
    peer, trainer, disk = admin
    disk.order.clear()
    disk.free.clear()
    peer.send(framed(acts(tmp_path)[verb], call=9))
    assert eventually(lambda: disk.order == [f"write {verb}"])
    trainer.ask(push())  # training goes on beside it
    readable, _, _ = select.select([peer.sock], [], [], 0.1)
    assert not readable
    disk.order.append("released")
    disk.free.set()
    peer.reply()
    disk.order.append("answer")
    assert disk.order == [f"write {verb}", "released", "sync", "answer"]


def test_a_refused_act_of_an_admin_is_on_the_disk_before_its_answer_too(admin):
    peer, _, disk = admin
    disk.order.clear()
    with pytest.raises(TableMismatch):
        peer.ask(Declare(table("items", 5)))
    assert disk.order == ["write Declare", "sync"]


def test_what_others_do_waits_for_no_disk(admin):
    _, trainer, disk = admin
    disk.free.clear()
    for _ in range(3):
        trainer.ask(Declare(table("items", 4)))
    disk.free.set()


def test_a_log_that_is_closed_holds_nobody_up(path):
    log, ended = AuditLog(path), []
    log.when_safe(lambda: ended.append(1))
    log.close()
    log.when_safe(lambda: ended.append(2))
    assert ended == [1, 2]


def test_acts_of_admins_are_not_lost_where_too_many_lines_wait(path, monkeypatch):
    disk = Disk(monkeypatch)
    monkeypatch.setattr(audit, "_MOST_WAITING", 3)
    log = AuditLog(path)
    assert eventually(lambda: "sync" in disk.order)
    disk.free.clear()
    for number in range(10):
        log.write(Act("Declare", "done", "trainer", "train", table=f"t{number}"))
        log.write(Act("Restore begin", "done", "ops", "admin", table=f"t{number}", safe=True))
    disk.free.set()
    log.close()
    found = [line["verb"] for line in lines(path)]
    assert found.count("Restore begin") == 10
    assert found.count("Declare") < 10
    assert "lost" in found


def test_a_shard_notes_who_came_who_was_refused_and_what_changed_but_no_secret(path, tmp_path, serve):
    token, other = new_token(), new_token()
    entry = f"- {{name: trainer, role: train, token_sha256: '{token_digest(token).hex()}', tables: ['items', 'wide']}}"
    write_private(tmp_path / "access.yaml", entry)
    access = Access(tmp_path / "access.yaml", audit=AuditLog(path))
    served = serve(access)
    peer = Connection(served.address, Feature.TOKEN, token=token)
    stranger = Connection(served.address, Feature.TOKEN, token=other)
    with pytest.raises(NotAuthenticated):
        stranger.reply()
    peer.ask(Hello())
    peer.ask(Declare(table("items", 4)))
    for _ in range(3):
        peer.ask(push())
        peer.ask(pull())
    with pytest.raises(NotAllowed):
        peer.ask(Declare(table("theirs", 4)))
    peer.ask(Compress(tables=[TableCodecs(table="items", push="fp16s")]))
    peer.ask(Restore(step="begin", id=1, replace=True))
    peer.ask(Snapshot(url=str(tmp_path), name="s", id=3, step="begin"))
    for one in (peer, stranger):
        one.sock.close()
    access.close()
    (tmp_path / "access.yaml").write_text("")
    seen = [(line["verb"], line["principal"], line["table"], line["outcome"]) for line in lines(path)]
    for wanted in (
        ("login", "trainer", "", "done"),
        ("login", "", "", "NotAuthenticated"),
        ("Declare", "trainer", "items", "done"),
        ("Declare", "trainer", "", "NotAllowed"),
        ("Compress", "trainer", "items", "done"),
        ("Restore begin", "trainer", "", "done"),
        ("Snapshot begin", "trainer", "", "done"),
    ):
        assert seen.count(wanted) == 1, (wanted, seen)
    assert not [verb for verb, *_ in seen if verb in ("Push", "Pull", "Hello")]
    text = path.read_text()
    for secret in (token, other, token_digest(token).hex(), token_digest(other).hex()):
        assert secret not in text
        assert secret[6:20] not in text


def test_an_act_that_met_a_defect_is_not_noted_as_done(path, serve, monkeypatch):
    access = Access(loopback_token=(token := new_token()), audit=AuditLog(path))
    served = serve(access)

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(served.dispatch._shard, "handle", fail)
    with pytest.raises(InternalError):
        Connection(served.address, Feature.TOKEN, token=token).ask(Declare(table("items", 4)))
    access.close()
    assert ("Declare", "ZeroDivisionError") in [(line["verb"], line["outcome"]) for line in lines(path)]


def test_calls_of_one_grpc_connection_are_one_login(path, tmp_path):
    access = Access(loopback_token=(token := new_token()), audit=AuditLog(path))
    for _ in range(5):
        access.identify(Peer("127.0.0.1:5"), token)
    access.identify(Peer("127.0.0.1:6"), token)
    access.close()
    assert [line["verb"] for line in lines(path)].count("login") == 2


def test_a_reload_is_noted(path, tmp_path):
    write_private(tmp_path / "access.yaml", f"- {{name: a, role: read, token_sha256: '{'a' * 64}'}}")
    access = Access(tmp_path / "access.yaml", audit=AuditLog(path))
    write_private(tmp_path / "access.yaml", "broken: 1")
    access.reload()
    write_private(tmp_path / "access.yaml", f"- {{name: a, role: admin, token_sha256: '{'a' * 64}'}}")
    access.reload()
    assert eventually(lambda: len(lines(path)) == 3)
    access.close()
    assert [line["outcome"] for line in lines(path) if line["verb"] == "reload"] == ["BadAccessFile", "done"]
