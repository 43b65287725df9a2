"""access.yaml: what it may say, and that every mistake is named with its line."""

import pytest

from embershard.proto.errors import BadAccessFile
from embershard.ps.security.access_file import AccessEntry, Quotas, TableLimits, parse_access, read_access_file, shown

DIGEST, OTHER = "a" * 64, "b" * 64
WHOLE = f"""
# workers
- name: trainer
  role: train
  token_sha256: "{DIGEST}"
  tables: [ads_*, users]
  quotas: {{rows_per_second: 1_000_000, connections: 64}}
- {{name: serving, role: read, certificate: spiffe://prod/ns/serve}}
- {{name: me@example.org, role: admin, token_sha256: {OTHER}, certificate: me@example.org}}
"""


def mistakes(text):
    with pytest.raises(BadAccessFile) as caught:
        parse_access(text, "f")
    found = caught.value.fields["mistakes"].split("\n")
    assert caught.value.fields["count"] == len(found)
    return found


def test_a_file_says_who_may_do_what():
    trainer, serving, me = parse_access(WHOLE, "access.yaml")
    assert trainer == AccessEntry(
        name="trainer",
        role="train",
        token_sha256=bytes.fromhex(DIGEST),
        tables=("ads_*", "users"),
        quotas=Quotas(rows_per_second=1_000_000, connections=64),
    )
    assert serving == AccessEntry(name="serving", role="read", certificate="spiffe://prod/ns/serve")
    assert (me.role, me.token_sha256, me.certificate) == ("admin", bytes.fromhex(OTHER), "me@example.org")


@pytest.mark.parametrize(
    ("change", "line", "what"),
    [
        (("role: train", "role: trainer"), 4, "trainer"),
        (("role: train", "role: [read]"), 4, "role"),
        (("  role: train\n", ""), 3, "role is missing"),
        (("name: trainer", "name: 'a b'"), 3, "name"),
        (("name: trainer", "name: serving"), 8, "line 3"),
        ((f'"{DIGEST}"', DIGEST[:63]), 5, "token_sha256"),
        ((f'"{DIGEST}"', "1" * 64), 5, "quotes"),
        ((f'"{DIGEST}"', DIGEST.upper()), 5, "token_sha256"),
        ((OTHER, DIGEST), 9, "line 5"),
        ((f'"{DIGEST}"', "ember_" + "s" * 43), 5, "another"),
        (("spiffe://prod/ns/serve", "'spiffe:// x'"), 8, "certificate"),
        (("certificate: spiffe://prod/ns/serve", "certificates: spiffe://prod/ns/serve"), 8, "unknown field"),
        ((", certificate: spiffe://prod/ns/serve", ""), 8, "neither"),
        (("spiffe://prod/ns/serve", "'10.0.0.1:7700'"), 8, "common name (letters, digits, . and -), but an address"),
        (("spiffe://prod/ns/serve", "'[::1]'"), 8, "but an address; name what is in the client's certificate"),
        (("spiffe://prod/ns/serve", "https://a.example"), 8, "but an address; name"),
        (("spiffe://prod/ns/serve", "'spiffe://'"), 8, "is not a spiffe:// id, an email address, or a common name"),
        (("spiffe://prod/ns/serve", "two words"), 8, "is not a spiffe:// id, an email address, or a common name"),
        (("[ads_*, users]", "[]"), 6, "tables"),
        (("[ads_*, users]", "ads_*"), 6, "tables"),
        (("[ads_*, users]", "['', users]"), 6, "''"),
        (("[ads_*, users]", "[' ads', users]"), 6, "' ads'"),
        (("[ads_*, users]", "[7, users]"), 6, "'7'"),
        (("[ads_*, users]", "[ads_*, 'user s']"), 6, "'user s' matches no table"),
        (("[ads_*, users]", "['ads_[ab]', users]"), 6, "'ads_[ab]' matches no table"),
        (("[ads_*, users]", "['.ads', users]"), 6, "'.ads' matches no table"),
        (("[ads_*, users]", "[ads_*, " + "u" * 201 + "]"), 6, "matches no table"),
        (("name: trainer", "name: 7"), 3, "write it in quotes"),
        (("rows_per_second: 1_000_000", "rows: 1"), 7, "unknown quota"),
        (("rows_per_second: 1_000_000", "rows_per_second: -1"), 7, "rows_per_second"),
        (("rows_per_second: 1_000_000", "rows_per_second: true"), 7, "rows_per_second"),
        (("rows_per_second: 1_000_000", "rows_per_second: many"), 7, "rows_per_second"),
        (("quotas: {rows_per_second: 1_000_000, connections: 64}", "quotas: 7"), 7, "quotas"),
        (("connections: 64", "tables: 7"), 7, "patterns with limits"),
        (("connections: 64", "tables: {a: {}}"), 7, "have fields (rows_held, bytes_held)"),
        (("connections: 64", "tables: {' a': {rows_held: 1}}"), 7, "matches no table"),
        (("connections: 64", "tables: {a: {rows: 1}}"), 7, "unknown quota 'rows' (known: rows_held, bytes_held)"),
        (("connections: 64", "tables: {a: {rows_held: 0.5}}"), 7, "rows_held is a whole number"),
        (("role: train", "role: train\n  role: admin"), 5, "not YAML"),
        (("- name: trainer", "- name: &a trainer"), None, None),
        (("role: admin", "role: *a"), 9, "alias"),
        (("# workers", "- 7"), 2, "fields"),
        (("# workers", "\t- x"), 2, "not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_shows_no_secret(change, line, what):
    text = WHOLE.replace(*change)
    assert text != WHOLE
    if line is None:
        parse_access(text, "f")
        return
    (said,) = [one for one in mistakes(text) if what in one]
    assert said.startswith(f"f:{line}: ")
    assert "s" * 10 not in said
    assert DIGEST not in said


@pytest.mark.parametrize("text", ["", "# nothing", "[]", "7", "name: x", "null", "!!python/object:os.system x", "\0"])
def test_what_is_no_list_of_entries_is_refused(text):
    assert len(mistakes(text)) == 1


def test_two_entries_in_one_line_do_not_share_a_token():
    entry = f"{{name: NAME, role: read, token_sha256: '{DIGEST}'}}"
    assert len(mistakes(f"[{entry.replace('NAME', 'a')}, {entry.replace('NAME', 'b')}]")) == 1


@pytest.mark.parametrize("pattern", ["*", "?*", "a/b-c.d", "_x", "*.ads", "ads_*_v?"])
def test_a_pattern_of_what_tables_are_named_by_is_taken(pattern):
    trainer, *_ = parse_access(WHOLE.replace("[ads_*, users]", f"['{pattern}']"), "f")
    assert trainer.tables == (pattern,)


def test_all_mistakes_are_shown_at_once():
    assert len(mistakes(WHOLE.replace("role: train", "role: x").replace("role: read", "role: y"))) == 2


@pytest.mark.parametrize(("mode", "taken"), [(0o600, True), (0o644, True), (0o664, False), (0o602, False)])
def test_a_file_that_others_can_write_is_refused(tmp_path, mode, taken):
    (tmp_path / "access.yaml").write_text(WHOLE)
    (tmp_path / "access.yaml").chmod(mode)
    if taken:
        assert len(read_access_file(tmp_path / "access.yaml")) == 3
    else:
        with pytest.raises(BadAccessFile):
            read_access_file(tmp_path / "access.yaml")


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path):
    (tmp_path / "large").write_text("#" * 2**21)
    (tmp_path / "large").chmod(0o600)
    for name in ("none", "large", "."):
        with pytest.raises(BadAccessFile):
            read_access_file(tmp_path / name)


def test_quotas_of_tables_are_read_and_shown():
    limits = "rows_held: 5_000, tables: {ads_*: {rows_held: 1, bytes_held: 2}, b: {bytes_held: 3}}"
    trainer, *_ = parse_access(WHOLE.replace("connections: 64", limits), "f")
    ads, b = TableLimits(pattern="ads_*", rows_held=1, bytes_held=2), TableLimits(pattern="b", bytes_held=3)
    assert trainer.quotas == Quotas(rows_per_second=1_000_000, rows_held=5_000, tables=(ads, b))
    assert trainer.quotas.of_tables == (TableLimits(rows_held=5_000), ads, b)
    want = "rows_per_second 1,000,000, rows_held 5,000, rows_held 1 of ads_*, bytes_held 2 of ads_*, bytes_held 3 of b"
    assert dict(shown(trainer))["quotas"] == want


def test_an_entry_is_shown_without_what_checks_its_token():
    trainer, *_ = parse_access(WHOLE, "f")
    text = str(dict(shown(trainer)))
    assert DIGEST[:8] not in text
    assert "ads_*" in text
