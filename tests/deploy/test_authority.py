"""A certificate authority for labs, and the files that it writes."""

import resource
import shutil
import stat
from contextlib import contextmanager
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.deploy.authority import Authority, CannotIssue, general_name
from embershard.proto.security.credentials import Credentials, identity_of
from embershard.proto.security.tokens import write_private


def keys(*args):
    result = CliRunner().invoke(cli.app, ["keys", *map(str, args)])
    if isinstance(result.exception, CannotIssue):
        raise result.exception
    return result


@pytest.fixture
def lab(tmp_path):
    assert keys("init", tmp_path / "lab").exit_code == 0
    return tmp_path / "lab"


def test_what_is_issued_is_a_folder_that_tls_takes(lab):
    assert keys("issue", "shard-0", "-a", lab, "--name", "localhost", "--name", "10.0.0.2").exit_code == 0
    issued = Credentials.load(lab / "shard-0").leaf
    names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.2"]
    assert identity_of(issued) == "shard-0"


def test_an_identity_may_be_a_spiffe_uri_or_an_address(lab, tmp_path):
    assert keys("issue", "w", "-a", lab, "--name", "spiffe://lab/w", "--output", tmp_path / "out").exit_code == 0
    assert identity_of(Credentials.load(tmp_path / "out").leaf) == "spiffe://lab/w"


def test_keys_are_readable_by_their_owner_alone(lab):
    keys("issue", "shard-0", "-a", lab)
    for key in (lab / "ca.key", lab / "shard-0" / "tls.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_nothing_is_overwritten(lab):
    keys("issue", "shard-0", "-a", lab)
    before = {path: path.read_bytes() for path in lab.rglob("*.*")}
    with pytest.raises(CannotIssue):
        keys("init", lab)
    with pytest.raises(CannotIssue):
        keys("issue", "shard-0", "-a", lab)
    assert before == {path: path.read_bytes() for path in lab.rglob("*.*")}


def test_a_folder_without_an_authority_is_named(tmp_path):
    with pytest.raises(CannotIssue) as caught:
        keys("issue", "shard-0", "-a", tmp_path)
    assert caught.value.fields["path"] == str(tmp_path)


@pytest.mark.parametrize("name", ["a b", "host:7700", "", "a/b"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="is no host name"):
        general_name(name)


def test_a_name_that_no_certificate_takes_is_refused(lab):
    with pytest.raises(ValueError, match="is not ASCII"):
        general_name("caf\u00e9.example")
    with pytest.raises(CannotIssue, match="1 to 64 bytes"):
        keys("issue", "n" * 65, "-a", lab, "--name", "localhost", "--output", lab / "out")
    assert not (lab / "out").exists()


def test_a_key_of_another_authority_signs_nothing(lab, tmp_path):
    keys("init", tmp_path / "other")
    shutil.copy(tmp_path / "other" / "ca.key", lab / "ca.key")
    with pytest.raises(CannotIssue, match="is not the elliptic-curve key of"):
        keys("issue", "shard-0", "-a", lab)


def test_a_full_disk_leaves_no_file(lab, tmp_path):
    with no_room(), pytest.raises(CannotIssue, match="cannot be written"):
        keys("init", tmp_path / "other")
    with no_room(), pytest.raises(OSError, match="File too large"):
        write_private(tmp_path / "a.token", "secret")
    keys("issue", "a", "-a", lab)
    with no_room(), pytest.raises(CannotIssue, match="cannot be written"):
        keys("revoke", lab / "a", "-a", lab)
    assert not [path for path in (tmp_path / "other").iterdir()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lab", "other"]
    assert sorted(path.name for path in lab.iterdir()) == ["a", "ca.crt", "ca.key"]


@contextmanager
def no_room():
    """Have every write to a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_damaged_revocation_list_is_not_replaced(lab):
    keys("issue", "a", "-a", lab)
    (lab / "crl.pem").write_text("damaged")
    with pytest.raises(CannotIssue, match="no revocation list can be read"):
        keys("revoke", lab / "a", "-a", lab)
    assert (lab / "crl.pem").read_text() == "damaged"


def test_revoked_certificates_add_up(lab):
    for name in ("a", "b"):
        keys("issue", name, "-a", lab)
        assert keys("revoke", lab / name, "-a", lab).exit_code == 0
    listed = x509.load_pem_x509_crl((lab / "crl.pem").read_bytes())
    serials = {Credentials.load(lab / name).leaf.serial_number for name in ("a", "b")}
    assert {entry.serial_number for entry in listed} == serials


@pytest.mark.parametrize("name", ["another", "embershard lab"])
def test_a_certificate_of_another_authority_is_not_revoked_here(lab, tmp_path, name):
    keys("init", tmp_path / "other", "--name", name)
    keys("issue", "a", "-a", tmp_path / "other")
    with pytest.raises(CannotIssue):
        keys("revoke", tmp_path / "other" / "a", "-a", lab)


def test_what_holds_no_certificate_is_not_revoked_and_the_error_says_what_does(lab, tmp_path):
    with pytest.raises(CannotIssue, match=r"No such file.*embershard keys issue"):
        keys("revoke", tmp_path / "nothing", "-a", lab)


def test_an_authority_signs_with_p_256():
    authority = Authority.create("lab", timedelta(days=1))
    assert isinstance(authority.key.curve, ec.SECP256R1)


def test_a_certificate_ends_with_its_authority_at_the_latest(tmp_path):
    authority = Authority.create("lab", timedelta(days=30))
    authority.save(tmp_path / "lab")
    ends = authority.certificate.not_valid_after_utc
    result = keys("issue", "shard-0", "-a", tmp_path / "lab", "--days", "365")
    assert f"valid until {ends:%Y-%m-%d}" in result.stdout
    assert Credentials.load(tmp_path / "lab" / "shard-0").leaf.not_valid_after_utc == ends


def test_an_authority_that_has_ended_issues_nothing(tmp_path):
    Authority.create("lab", timedelta(minutes=1)).save(tmp_path / "lab")  # clocks differ: it began five minutes ago
    with pytest.raises(CannotIssue, match="was valid until"):
        keys("issue", "shard-0", "-a", tmp_path / "lab")
    assert not (tmp_path / "lab" / "shard-0").exists()
