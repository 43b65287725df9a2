"""All checks, by subject, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from embershard.doctor import certificates, compute, folders, installation, logs, machine, monitoring, runs, shards
from embershard.doctor import job as clocks
from embershard.doctor.check import Check

SUBJECTS: Mapping[str, Sequence[Check]] = {
    "installation": installation.CHECKS,
    "machine": machine.CHECKS,
    "computing": compute.CHECKS,
    "files": [*folders.CHECKS, *logs.CHECKS],
    "shards": shards.CHECKS,
    "certificates": certificates.CHECKS,
    "monitoring": monitoring.CHECKS,
    "workers": clocks.CHECKS,
    "run": runs.CHECKS,
}
