"""`embershard keys` and `embershard audit`: tokens with their entries, and whether a log is whole."""

import pytest
from typer.testing import CliRunner

from embershard.cli.audit import audit
from embershard.cli.keys import keys
from embershard.proto.errors import AuditDamaged, BadAccessFile, CannotWrite
from embershard.proto.security.tokens import TokenFile, token_digest
from embershard.ps.security.access_file import parse_access
from embershard.ps.security.audit import AuditLog, verify


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(app, *words):
    done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_a_token_is_in_a_file_and_its_entry_on_stdout(folder):
    done = run(keys, "token", "trainer", "--role", "train", "--table", "ads_*", "--table", "users?")
    token = TokenFile(folder / "trainer.token").token()
    (entry,) = parse_access(done.stdout, "f")
    assert (entry.name, entry.role, entry.tables) == ("trainer", "train", ("ads_*", "users?"))
    assert entry.token_sha256 == token_digest(token)
    assert token not in done.output


def test_a_token_that_exists_is_not_replaced(folder):
    run(keys, "token", "a", "--role", "read")
    before = (folder / "a.token").read_text()
    with pytest.raises(CannotWrite) as caught:
        run(keys, "token", "a", "--role", "read")
    assert "--out" in str(caught.value.fields["remedy"]).split()
    assert (folder / "a.token").read_text() == before


@pytest.mark.parametrize(
    "words", [("a", "--role", "root"), ("a b", "--role", "read"), ("a", "--role", "read", "--table", " ")]
)
def test_an_entry_that_would_not_be_taken_makes_no_token(folder, words):
    with pytest.raises(BadAccessFile):
        run(keys, "token", *words)
    assert list(folder.iterdir()) == []


def test_entries_are_shown_without_what_checks_their_tokens(folder):
    done = run(keys, "token", "trainer", "--role", "train")
    (folder / "access.yaml").write_text(done.stdout)
    (folder / "access.yaml").chmod(0o644)
    text = run(keys, "show", "access.yaml").stdout
    assert "trainer" in text
    assert token_digest(TokenFile(folder / "trainer.token").token()).hex()[:8] not in text


def test_an_access_file_that_is_not_there_is_named_with_what_belongs_there(folder):
    with pytest.raises(BadAccessFile, match=r"nofile: cannot be read: No such file.*embershard keys token"):
        run(keys, "show", "nofile")


def test_a_log_that_is_whole_is_said_to_be_and_another_is_not(folder):
    AuditLog(folder / "audit.jsonl").close()
    _, last, _ = verify(folder / "audit.jsonl")
    assert last in run(audit, "verify", "audit.jsonl").stdout
    assert run(audit, "verify", "audit.jsonl", "--expect", last).exit_code == 0
    assert run(audit, "verify", "audit.jsonl", "--expect", "0" * 64).exit_code == 1
    (folder / "audit.jsonl").write_text((folder / "audit.jsonl").read_text().replace("done", "gone", 1))
    with pytest.raises(AuditDamaged):
        run(audit, "verify", "audit.jsonl")


def test_an_audit_log_that_cannot_be_read_is_not_said_to_be_changed(folder):
    done = run(audit, "verify", "nothere.jsonl")
    assert done.exit_code == 1
    assert "nothere.jsonl cannot be read: No such file" in done.output
