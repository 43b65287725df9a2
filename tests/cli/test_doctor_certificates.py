"""What the doctor says of certificates: this side's, and the shards'."""

import pytest
from doctor_cases import FAIL, NOBODY, OK, WARN, finds

from embershard.doctor import certificates
from embershard.doctor.case import open_case
from embershard.proto.security import credentials
from embershard.proto.security.tls import TLS
from harness.certificates import DAY, issue, replace
from harness.secure_shard import SecureShard


@pytest.fixture
def worker(tmp_path):
    tls = issue(tmp_path / "worker", "worker-1")
    (tls.path / "tls.key").chmod(0o600)
    return tls


@pytest.fixture
def serve(tmp_path):
    shards = []

    def start(**certificate):
        shards.append(SecureShard(issue(tmp_path / "shard", **certificate)))
        return shards[-1]

    yield start
    for shard in shards:
        shard.stop()


def about(tls, address=""):
    return open_case(address, None, None, None, tls=tls)


def test_nothing_is_said_without_certificates():
    assert certificates.own.run(NOBODY) is None
    assert certificates.of_shards.run(NOBODY) is None


def test_own_certificates_are_read(worker):
    finds(certificates.own, about(worker), OK, "worker-1")
    (worker.path / "tls.key").chmod(0o644)
    finds(certificates.own, about(worker), WARN, "can read")
    replace(worker.path, {"tls.key": b"?"})
    finds(certificates.own, about(worker), FAIL, "tls.key")


def test_one_that_expires_within_a_week_is_warned_of(tmp_path):
    tls = issue(tmp_path, days=7)
    (tmp_path / "tls.key").chmod(0o600)
    finds(certificates.own, about(tls), WARN, "valid until")


def test_one_that_has_expired_or_is_not_valid_yet_fails_with_what_this_machine_says_the_time_is(tmp_path):
    finds(certificates.own, about(issue(tmp_path, start=-9 * DAY, days=7)), FAIL, "expired at")
    finds(certificates.own, about(issue(tmp_path, start=DAY)), FAIL, "correct the clock")


def test_certificates_of_shards_that_are_not_valid_yet_fail_with_the_clock(serve, worker, monkeypatch):
    monkeypatch.setattr(credentials, "_check_dates", lambda path, leaf: None)  # by the shard's own clock it is valid
    finds(certificates.of_shards, about(worker, serve(start=DAY).tcp), FAIL, "correct the clock")


def test_the_certificates_of_shards_are_looked_at(serve, worker):
    finds(certificates.of_shards, about(worker, serve().tcp), OK, "1 trusted")
    finds(certificates.of_shards, about(worker, serve(days=7).tcp), WARN, "1 trusted")


def test_a_shard_whose_certificate_does_not_cover_its_address_fails(serve, worker):
    shard = serve(covered=["ads.shards"])
    finds(certificates.of_shards, about(worker, shard.tcp), FAIL, "does not cover the name '127.0.0.1'")
    finds(certificates.of_shards, about(TLS(worker.folder, "ads.shards"), shard.tcp), OK, "1 trusted")
