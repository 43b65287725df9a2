"""Tokens as text, as bytes of a stream, and in files."""

import os
import re

import pytest

from embershard.proto.errors import BadToken
from embershard.proto.security import loopback
from embershard.proto.security.tokens import (
    RECORD_BYTES,
    TokenFile,
    new_token,
    pack_token,
    token_digest,
    unpack_token,
    write_private,
)
from harness.raises import raises


def test_a_token_has_32_random_bytes_and_a_prefix():
    assert re.fullmatch(r"ember_[A-Za-z0-9_-]{43}", new_token())
    assert len({new_token() for _ in range(1000)}) == 1000
    assert token_digest("ember_x").hex() == "e7ed12f0c98d063c8568d54ea8898bcdac1bb18b5ddd6a29e2b264f5513b7579"


@pytest.mark.parametrize("token", [new_token(), None], ids=["a token", "none"])
def test_a_token_travels_in_a_record_of_one_size(token):
    record = pack_token(token)
    assert len(record) == RECORD_BYTES
    assert unpack_token(record) == token


def test_any_record_is_some_text():
    assert isinstance(unpack_token(bytes(range(256))[:RECORD_BYTES]), str)
    assert isinstance(unpack_token(b"\xff" * RECORD_BYTES), str)


@pytest.fixture
def path(tmp_path):
    write_private(tmp_path / "token", "ember_" + "a" * 43 + "\na comment\n")
    return tmp_path / "token"


def test_a_token_is_the_first_line_of_a_file_that_is_its_owners_alone(path):
    assert path.stat().st_mode & 0o777 == 0o600
    assert TokenFile(path).token() == "ember_" + "a" * 43
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


def test_a_file_is_read_again_when_it_changes(path):
    file = TokenFile(path)
    before = file.token()
    assert file.token() is before
    write_private(path, other := new_token())
    assert file.token() == other


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666, 0o777, 0o610])
def test_a_token_that_others_can_read_or_write_is_refused(path, mode):
    path.chmod(mode)
    with raises(BadToken, path=str(path)):
        TokenFile(path).token()


@pytest.mark.parametrize(("mode", "taken"), [(0o440, True), (0o640, True), (0o460, False), (0o444, False)])
def test_root_may_give_a_token_to_a_group(path, monkeypatch, mode, taken):
    """As Kubernetes mounts a secret for a user that is not root."""
    if os.geteuid() != 0:
        pytest.skip("only root has files of root")
    path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if taken:
        TokenFile(path).token()
    else:
        with pytest.raises(BadToken):
            TokenFile(path).token()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_token_of_another_user_is_refused(path):
    os.chown(path, 65534, -1)
    with pytest.raises(BadToken):
        TokenFile(path).token()


@pytest.mark.parametrize("text", ["", "\n", "ember_short", "x" * 49, "ember_" + "a" * 44, "\0", "\xff\xfe"])
def test_what_is_no_token_is_refused_without_being_shown(path, text):
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BadToken) as caught:
        TokenFile(path).token()
    assert text.strip("\0\n") == "" or text not in str(caught.value)


def test_a_folder_or_nothing_is_no_token(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)  # of which nothing may wait
    for path in (tmp_path, tmp_path / "none", tmp_path / "fifo"):
        with pytest.raises(BadToken):
            TokenFile(path).token()


class TestLoopback:
    @pytest.fixture(autouse=True)
    def folders(self, monkeypatch, tmp_path):
        folders = tmp_path / "missing" / "embershard", tmp_path / "embershard"
        monkeypatch.setattr(loopback, "runtime_folders", lambda: folders)
        return folders

    def test_clients_of_a_user_find_the_token_of_a_shard_by_its_address(self, folders):
        token, path = loopback.write_loopback_token("127.0.0.1", 7700)
        assert path == folders[1] / "127.0.0.1:7700.token"
        assert loopback.find_loopback_token("127.0.0.1", 7700) == token
        assert loopback.find_loopback_token("127.0.0.1", 7701) is None
        assert loopback.find_loopback_token("127.0.0.2", 7700) is None
        assert loopback.find_loopback_token("10.0.0.1", 7700) is None

    def test_a_shard_that_starts_again_has_another_token(self):
        before, _ = loopback.write_loopback_token("::1", 7700)
        after, path = loopback.write_loopback_token("::1", 7700)
        assert loopback.find_loopback_token("::1", 7700) == after != before
        loopback.remove_loopback_token(path, before)
        assert path.exists()
        loopback.remove_loopback_token(path, after)
        assert not path.exists()

    @pytest.mark.parametrize("made", ["others may enter it", "a link", "a file"])
    def test_a_folder_that_another_user_may_have_made_is_not_used(self, folders, tmp_path, made):
        if made == "a link":
            (tmp_path / "theirs").mkdir(mode=0o700)
            folders[1].symlink_to(tmp_path / "theirs")
            write_private(tmp_path / "theirs/127.0.0.1:7700.token", new_token())
        elif made == "a file":
            folders[1].touch()
        else:
            folders[1].mkdir()
            folders[1].chmod(0o711)
            write_private(tmp_path / "of another shard", new_token())  # which would be shown to who listens there
            (folders[1] / "127.0.0.1:7700.token").symlink_to(tmp_path / "of another shard")
        with pytest.raises(BadToken):
            loopback.write_loopback_token("127.0.0.1", 7700)
        assert loopback.find_loopback_token("127.0.0.1", 7700) is None
