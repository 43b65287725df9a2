"""A job whose workers come while they pay, and leave once they wait: by itself, with each sample trained once."""

import pytest

from harness.eventually import PATIENCE
from harness.growing_job import SAMPLES, GrowingJob

pytestmark = [pytest.mark.integration, pytest.mark.timeout(4 * PATIENCE)]


@pytest.mark.parametrize("staleness", ["8", pytest.param("off", marks=pytest.mark.long)])
def test_workers_come_while_they_pay_and_leave_once_they_wait(tmp_path, staleness):
    job = GrowingJob(tmp_path, "--set", f"train.staleness={staleness}")
    assert job.changes == [(2, 3), (3, 2)]
    assert "worker 2 has left" in job.said
    assert (job.result["record"], job.result["samples"], job.result["expired_leases"]) == ("result", SAMPLES, 0)
