"""A job on secured shards ends, and says why, when its token or its certificate is revoked while it trains."""

import pytest

from harness.certificates import issue, revoke
from harness.eventually import PATIENCE
from harness.processes import all_end, descendants
from harness.served import shard_process
from integration.test_access import write_access
from integration.test_tls import JOB

pytestmark = pytest.mark.integration

SLOW = pytest.mark.long  # shards look at access.yaml every five seconds, at certificates every ten


def revoke_token(folder):
    write_access(folder, somebody="read")


def revoke_certificate(folder):
    revoke(folder / "shard", folder / "worker")


@pytest.mark.parametrize(
    ("scheme", "act", "causes", "remedy"),
    [
        ("tcp", revoke_token, ("was removed from access.yaml", "was revoked"), "--token-file"),
        pytest.param("grpc", revoke_token, ("was revoked",), "--token-file", marks=SLOW),
        pytest.param("tcp", revoke_certificate, ("lists it as revoked",), "Issue it a new one", marks=SLOW),
        pytest.param("grpc", revoke_certificate, ("lists it as revoked",), "Issue it a new one", marks=SLOW),
    ],
)
def test_a_job_whose_token_or_certificate_is_revoked(start, tmp_path, scheme, act, causes, remedy):
    shard, _ = issue(tmp_path / "shard"), issue(tmp_path / "worker")
    write_access(tmp_path, trainer="train")
    options = ("--tls", str(shard.path), "--access", str(tmp_path / "access.yaml"))
    with shard_process(*options, of=2) as first, shard_process(*options, shard=1, of=2) as second:
        shards = ",".join(f"{scheme}://{one.address}" for one in (first, second))
        job = start(JOB, "--workers", "2", "--ps", shards, "--tls", "worker", "--token-file", "trainer.token")
        said = []
        assert any("samples/s" in line for line in job.stdout if said.append(line) is None), "".join(said)
        family = descendants(job.pid)
        act(tmp_path)
        text, _ = job.communicate(timeout=PATIENCE)
        assert job.returncode == 1, text
        text = " ".join(text.split())
        assert "Traceback" not in text
        assert any(cause in text for cause in causes), text
        assert remedy in text
        assert all_end(family)
        for one in (first, second):  # they serve on: the others' tokens and certificates still count
            assert one.popen.poll() is None
