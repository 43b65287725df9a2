"""Who a peer is, and what it may ask: the rules themselves, without a transport."""

import itertools
import os
import time

import pytest

from embershard.proto.errors import BadAccessFile, NotAllowed, NotAuthenticated
from embershard.proto.messages import (
    METHODS,
    Compress,
    Declare,
    GetStatus,
    Hello,
    Load,
    Pull,
    Push,
    Restore,
    TableCodecs,
)
from embershard.proto.messages import TableIds as Ids
from embershard.proto.security.tokens import new_token, token_digest
from embershard.ps.security import access as access_module
from embershard.ps.security.access import Access, Principal
from embershard.ps.security.access_file import AccessEntry
from embershard.ps.security.peers import Peer
from embershard.ps.security.roles import LEAST_ROLE, ROLES
from harness.hostile_peers import push
from harness.raises import raises
from harness.shards import ids_of, table

FAR = Peer("10.0.0.2:5000")
READS = {"Hello", "Status", "Pull", "Declare"}  # of a table that is there
TRAINS = {"Load", "Push", "Join", "Leave", "Heartbeat", "Rendezvous", "TakeSplit", "Snapshot", "Compress"}
TOKENS = {role: new_token() for role in ROLES}


def written(path, **changes):
    """An access.yaml with a token for every role."""
    lines = []
    for role, token in TOKENS.items():
        more = "".join(f"  {line}\n" for line in changes.get(role, ()))
        lines.append(f"- name: {role}er\n  role: {role}\n  token_sha256: '{token_digest(token).hex()}'\n{more}")
    path.write_text("".join(lines))
    path.chmod(0o600)
    return path


@pytest.fixture
def access(tmp_path):
    return Access(written(tmp_path / "access.yaml", read=["certificate: spiffe://prod/serve"]))


def allowed(access, principal, kind):
    try:
        access.check(principal, kind)
    except NotAllowed:
        return False
    return True


@pytest.mark.parametrize(("role", "kind"), list(itertools.product(ROLES, METHODS)))
def test_each_role_may_call_its_methods_and_no_others(access, role, kind):
    may = {"read": READS, "train": READS | TRAINS | {"Restore"}, "admin": READS | TRAINS | {"Restore"}}
    principal = access.identify(FAR, TOKENS[role])
    assert (principal.name, principal.role) == (f"{role}er", role)
    assert allowed(access, principal, kind) is (METHODS[kind][0] in may[role])


def test_every_method_has_a_role():
    assert set(LEAST_ROLE) == set(METHODS)


def test_nobody_may_call_anything(access):
    for kind in METHODS:
        with pytest.raises(NotAuthenticated):
            access.check(None, kind)


@pytest.mark.parametrize(
    "token",
    ["", "ember_", "x" * 64, new_token(), token_digest(TOKENS["admin"]).hex(), "\ufffd"],
    ids=["empty", "the prefix", "long", "another", "a digest", "no text"],
)
def test_a_token_that_is_not_known_is_nobodys_even_at_a_unix_socket(access, token):
    for peer in (FAR, Peer("uid:0", 0)):
        with raises(NotAuthenticated, who=peer.address):
            access.identify(peer, token)


def test_a_user_of_this_machine_that_is_admitted_is_an_admin(access):
    own = access.identify(Peer("uid:0", 0))
    assert (own.name, own.role) == ("uid:0", "admin")
    with pytest.raises(NotAuthenticated):
        access.identify(Peer("uid:4242", 4242))
    with pytest.raises(NotAuthenticated):
        access.identify(FAR)


def test_a_certificate_is_as_good_as_a_token_and_a_token_goes_first(access):
    assert access.identify(FAR, None, ["other", "spiffe://prod/serve"]).name == "reader"
    assert access.identify(FAR, TOKENS["train"], ["spiffe://prod/serve"]).name == "trainer"
    with pytest.raises(NotAuthenticated):
        access.identify(FAR, None, ["spiffe://prod/other"])


def test_the_owner_of_the_loopback_token_is_an_admin():
    access = Access(loopback_token=TOKENS["read"])
    assert access.identify(FAR, TOKENS["read"]).role == "admin"


class TestTables:
    def principal(self, *patterns):
        return Principal(AccessEntry(name="p", role="train", tables=patterns or None))

    @pytest.mark.parametrize(
        ("request_of", "tables"),
        [
            (lambda names: Pull(1, tuple(Ids(name, ids_of(1)) for name in names)), None),
            (lambda names: Declare(table(names[-1])), None),
            (lambda names: Load(names[-1], 1, ids_of(), ids_of()), None),
            (lambda names: push(table=names[-1]), None),
            (lambda names: Compress(tables=[TableCodecs(table=name) for name in names]), None),
            (lambda names: Restore(step="install"), "names"),
        ],
        ids=["pull", "declare", "load", "push", "compress", "restore"],
    )
    def test_a_principal_reaches_its_own_tables_alone(self, access, request_of, tables):
        limited, free = self.principal("ads_*", "users"), self.principal()
        for names, may in {("users", "ads_1"): True, ("users", "user"): False, ("ads", "Ads_1"): False}.items():
            of_restore = lambda _, names=names: list(names)  # noqa: E731
            access.admit(free, request_of(names), of_restore)
            if may:
                access.admit(limited, request_of(names), of_restore)
            else:
                with raises(NotAllowed, who="p"):
                    access.admit(limited, request_of(names), of_restore)

    def test_requests_about_no_table_are_not_limited(self, access):
        for request in (Hello(), GetStatus(), Compress()):
            access.admit(self.principal("none"), request, lambda _: [])

    def test_names_of_a_peers_choice_are_not_remembered_for_ever(self):
        principal = self.principal("ads_*")
        for number in range(10_000):
            assert principal.owns(f"ads_{number}")
        assert len(principal._known) <= 4096


class TestReload:
    def test_a_token_whose_entry_is_gone_is_of_no_use_and_others_stay_who_they_are(self, access, tmp_path):
        before = {role: access.identify(FAR, TOKENS[role]) for role in ROLES}
        text = written(tmp_path / "other").read_text()
        (tmp_path / "access.yaml").write_text(text[text.index("- name: trainer") :])
        assert access.reload()
        with pytest.raises(NotAuthenticated):
            access.identify(FAR, TOKENS["read"])
        with pytest.raises(NotAuthenticated):
            access.check(before["read"], Hello)
        assert access.identify(FAR, TOKENS["train"]) is before["train"]
        access.check(before["train"], Push)
        assert not access.reload()

    def test_an_entry_that_is_changed_is_somebody_else(self, access, tmp_path):
        before = access.identify(FAR, TOKENS["train"])
        written(tmp_path / "access.yaml", train=["tables: [x]"])
        assert access.reload()
        assert before.revoked
        assert access.identify(FAR, TOKENS["train"]).entry.tables == ("x",)

    def test_who_has_the_same_token_in_a_changed_entry_is_known_again(self, access, tmp_path):
        before = {role: access.identify(FAR, TOKENS[role]) for role in ("read", "train")}
        written(tmp_path / "access.yaml", train=["tables: [x]"])
        assert access.reload()
        assert access.known_again(before["train"]) is access.identify(FAR, TOKENS["train"])
        assert access.known_again(before["read"]) is before["read"]  # nothing has changed

    def test_who_had_a_certificate_and_a_token_has_to_have_both_still(self, access, tmp_path):
        """Else who has shown the certificate that was removed would stay."""
        path = tmp_path / "access.yaml"
        written(path, train=["certificate: spiffe://lab/trainer"])
        assert access.reload()
        before = access.identify(FAR, None, ["spiffe://lab/trainer"])
        written(path)
        assert access.reload()
        assert access.known_again(before) is before
        assert before.revoked

    def test_a_file_that_is_given_to_the_shard_later_is_read_then(self, access, tmp_path, monkeypatch):
        """As where root has written it: `chown` changes neither its time nor its size."""
        path = tmp_path / "access.yaml"
        written(path, read=["tables: [x]"])

        def refuse(path):
            raise BadAccessFile(mistakes=f"{path}: cannot be read: Permission denied", count=1)

        with monkeypatch.context() as patch:
            patch.setattr(access_module, "read_access_file", refuse)
            assert not access.reload()
        assert not access.reload()
        time.sleep(0.05)  # more than a tick of the file system's clock
        os.chown(path, os.geteuid(), os.getegid())
        assert access.reload()

    @pytest.mark.parametrize("text", ["", "- nonsense", None])
    def test_a_file_with_mistakes_leaves_things_as_they_are(self, access, tmp_path, text, caplog):
        path = tmp_path / "access.yaml"
        path.unlink() if text is None else path.write_text(text)
        assert not access.reload()
        assert "access.yaml" in caplog.text
        access.check(access.identify(FAR, TOKENS["read"]), Pull)
        written(path, read=["tables: [x]"])
        assert access.reload()
