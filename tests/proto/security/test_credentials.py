"""What a folder of certificates must hold, and what is said where it does not."""

import base64
import random
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtensionOID

from embershard.deploy.authority import Authority
from embershard.proto.errors import BadCertificate, UntrustedCertificate
from embershard.proto.security import credentials
from embershard.proto.security.credentials import CertificateFolder, Credentials, identity_of
from embershard.proto.security.problems import explain
from embershard.proto.security.tls import TLS
from harness.certificates import AUTHORITY, DAY, issue, replace, revoke


def problem_of(folder):
    with pytest.raises(BadCertificate) as caught:
        Credentials.load(folder)
    return caught.value.fields["problem"], caught.value.fields["path"]


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize(("data", "problem"), [(None, "missing"), (b"", "unreadable"), (b"-----BEGIN", "unreadable")])
def test_a_file_that_is_missing_or_is_none_is_named(tmp_path, name, data, problem):
    issue(tmp_path)
    (tmp_path / name).unlink()
    if data is not None:
        (tmp_path / name).write_bytes(data)
    assert problem_of(tmp_path) == (problem, str(tmp_path / name))


def test_a_file_in_place_of_its_folder_is_named(tmp_path):
    issue(tmp_path)
    assert problem_of(tmp_path / "tls.crt") == ("missing", str(tmp_path / "tls.crt"))


@pytest.mark.parametrize(
    ("certificate", "problem"),
    [({"start": -2 * DAY, "days": 1}, "expired"), ({"start": timedelta(hours=1)}, "not_yet_valid")],
)
def test_a_certificate_is_refused_outside_its_time(tmp_path, certificate, problem):
    assert problem_of(issue(tmp_path, **certificate).path) == (problem, str(tmp_path / "tls.crt"))


def test_a_key_of_another_certificate_is_refused(tmp_path):
    issue(tmp_path)
    other = issue(tmp_path / "other")
    replace(tmp_path, {"tls.key": (other.path / "tls.key").read_bytes()})
    assert problem_of(tmp_path) == ("wrong_key", str(tmp_path / "tls.key"))


@pytest.mark.parametrize("names", [b"\x30\x05\x82\x09abc", b"\x30\x06\x82\x04a\xe9bb"], ids=["cut short", "latin1"])
def test_a_certificate_whose_names_cannot_be_read_is_refused(tmp_path, monkeypatch, names):
    malformed = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, names)
    monkeypatch.setattr(x509, "SubjectAlternativeName", lambda _: malformed)
    issue(tmp_path)
    monkeypatch.undo()
    assert problem_of(tmp_path) == ("unreadable", str(tmp_path / "tls.crt"))


def test_a_malformed_certificate_of_the_other_side_is_said_to_be_one():
    error = explain(UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "invalid"), "the client at 10.0.0.1:7")
    assert isinstance(error, UntrustedCertificate)
    assert error.fields["problem"] == "unreadable"


def test_a_chain_that_openssl_would_not_receive_is_refused(tmp_path):
    issue(tmp_path)
    certificate = (tmp_path / "tls.crt").read_bytes()
    replace(tmp_path, {"tls.crt": certificate * 50})
    Credentials.load(tmp_path)
    replace(tmp_path, {"tls.crt": certificate * 500})
    assert problem_of(tmp_path) == ("other", str(tmp_path / "tls.crt"))


def test_an_encrypted_key_is_refused_and_no_terminal_is_asked(tmp_path):
    from cryptography.hazmat.primitives import serialization as s

    issue(tmp_path)
    key = s.load_pem_private_key((tmp_path / "tls.key").read_bytes(), None)
    encrypted = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"word"))
    replace(tmp_path, {"tls.key": encrypted})
    assert problem_of(tmp_path) == ("unreadable", str(tmp_path / "tls.key"))


def test_a_comment_beside_the_authorities_may_be_in_any_language(tmp_path):
    folder = CertificateFolder(issue(tmp_path))
    replace(tmp_path, {"ca.crt": "\ufeff# Autorität\n".encode() + (tmp_path / "ca.crt").read_bytes()})
    assert folder.refresh()
    assert folder.current.authorities.startswith(b"# Autorit")


def test_a_revocation_list_must_be_of_a_trusted_authority(tmp_path):
    issue(tmp_path)
    revoke(tmp_path, tmp_path, authority=Authority.create("another"))
    assert problem_of(tmp_path) == ("foreign", str(tmp_path / "crl.pem"))
    for data in (b"nothing", b""):
        replace(tmp_path, {"crl.pem": data})
        assert problem_of(tmp_path) == ("unreadable", str(tmp_path / "crl.pem"))
    (tmp_path / "crl.pem").unlink()
    (tmp_path / "crl.pem").symlink_to(tmp_path / "not mounted")
    assert problem_of(tmp_path) == ("unreadable", str(tmp_path / "crl.pem"))
    replace(tmp_path, {"crl.pem": b"\n"})  # of a service for which there is no file
    assert not Credentials.load(tmp_path).revoked


def test_a_folder_is_read_again_when_a_link_of_it_is_swapped(tmp_path):
    """As Kubernetes replaces a secret: the files are links through one folder link, which is replaced."""
    for name in ("first", "second"):
        issue(tmp_path / name)
    (tmp_path / "..data").symlink_to("first")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    folder = CertificateFolder(TLS(tmp_path))
    before = folder.current
    assert not folder.refresh()
    (tmp_path / "..next").symlink_to("second")
    (tmp_path / "..next").rename(tmp_path / "..data")
    assert folder.refresh()
    assert folder.current.leaf != before.leaf


@pytest.mark.parametrize("bad", [{"tls.crt": b"?"}, {"tls.key": b"?"}, {"ca.crt": b"?"}, {"crl.pem": b"?"}])
def test_bad_files_are_reported_once_and_those_of_before_stay_in_use(tmp_path, caplog, bad):
    folder = CertificateFolder(issue(tmp_path))
    before = folder.current
    replace(tmp_path, bad)
    assert not folder.refresh()
    assert not folder.refresh()
    assert folder.current is before
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "ERROR"
    (tmp_path / "crl.pem").unlink(missing_ok=True)
    issue(tmp_path)
    assert folder.refresh()


@pytest.mark.parametrize("name", ["tls.crt", "ca.crt", "crl.pem"])
def test_a_damaged_file_is_a_bad_certificate_wherever_its_bytes_are_wrong(tmp_path, name):
    issue(tmp_path)
    revoke(tmp_path, issue(tmp_path / "other").path)
    before, begin, text, *end = (tmp_path / name).read_bytes().split(b"-----")
    bytes_at = random.Random(1)
    refused = 0
    for _ in range(100):
        data = bytearray(base64.b64decode(text))
        data[bytes_at.randrange(len(data))] ^= bytes_at.randrange(1, 256)
        damaged = b"-----".join([before, begin, b"\n" + base64.encodebytes(data), *end])
        (tmp_path / name).write_bytes(damaged)
        try:
            Credentials.load(tmp_path)
        except BadCertificate:
            refused += 1
    assert refused


@pytest.mark.parametrize("name", [bytes([0x87, 3, 127, 0, 1]), bytes([0xA3, 0])], ids=["three bytes of IP", "X.400"])
def test_a_certificate_with_a_name_that_cannot_be_read_names_nobody(tmp_path, name):
    issue(tmp_path)
    leaf = Credentials.load(tmp_path).leaf
    assert identity_of(leaf) == "worker"
    names = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, bytes([0x30, len(name)]) + name)
    builder = x509.CertificateBuilder(leaf.issuer, leaf.subject, leaf.public_key(), 1)
    builder = builder.not_valid_before(leaf.not_valid_before_utc).not_valid_after(leaf.not_valid_after_utc)
    odd = builder.add_extension(names, critical=False).sign(AUTHORITY.key, hashes.SHA256())
    assert identity_of(odd) == ""
    (tmp_path / "tls.crt").write_bytes(odd.public_bytes(serialization.Encoding.PEM))
    if name[0] == 0xA3:  # it is whole, and OpenSSL takes it
        assert Credentials.load(tmp_path).leaf == odd
    else:
        assert problem_of(tmp_path) == ("unreadable", str(tmp_path / "tls.crt"))


def test_a_certificate_that_is_not_valid_yet_is_used_once_it_is(tmp_path, caplog, monkeypatch):
    """As where the clock of who issues it is ahead: nobody writes the files again."""
    folder = CertificateFolder(issue(tmp_path))
    before = folder.current
    issue(tmp_path, start=timedelta(hours=1))
    for _ in range(3):
        assert not folder.refresh()
    assert folder.current is before
    assert len(caplog.records) == 1
    monkeypatch.setattr(credentials, "_now", lambda: datetime.now(UTC) + timedelta(hours=2))
    assert folder.refresh()
    assert folder.current.leaf != before.leaf
    assert not folder.refresh()


def test_a_certificate_that_expires_within_a_week_is_warned_of(tmp_path, caplog):
    CertificateFolder(issue(tmp_path, days=9))
    assert "expires" not in caplog.text
    CertificateFolder(issue(tmp_path, days=7))
    assert "expires" in caplog.text


def test_a_process_that_runs_for_long_warns_once_before_its_certificate_expires_and_once_after(
    tmp_path, caplog, monkeypatch
):
    folder = CertificateFolder(issue(tmp_path, days=30))
    for days, said in ((20, []), (23, ["WARNING"]), (24, ["WARNING"]), (31, ["WARNING", "ERROR"])):
        now = datetime.now(UTC) + days * DAY
        monkeypatch.setattr(credentials, "_now", lambda now=now: now)
        for _ in range(3):
            assert not folder.refresh()
        assert [record.levelname for record in caplog.records] == said
