"""Gather the facts that the doctor's checks read, once: every check reads them, none changes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embershard.deploy.job_check import check_job
from embershard.doctor.probe import Probe, probe_all
from embershard.doctor.run_record import RunRecord, read_run
from embershard.proto.errors import BadAddress, EmbershardError, JobError, NotAnnounced
from embershard.proto.messages import ShardStatus
from embershard.proto.security.tls import TLS
from embershard.proto.transport.addresses import shard_addresses
from embershard.proto.transport.announcements import current_address
from embershard.proto.transport.transport import Unreachable

if TYPE_CHECKING:
    from embershard.worker.job.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The shards, the job and the run that were named, and what is wrong with the names themselves."""

    probes: Sequence[Probe] = ()
    address_mistake: str = ""
    job: Job | None = None
    job_mistake: str = ""
    data_mistake: str = ""
    run: RunRecord | None = None
    log_dir: Path | None = None
    tls: TLS | None = None
    metrics: Sequence[str] = ()  # host:port of pages for Prometheus

    @property
    def log_folder(self) -> Path | None:
        """Return the folder of the shards' logs: as named, or as the job says; None where none is known."""
        if self.log_dir is not None or self.job is None or self.job.durability == "memory":
            return self.log_dir
        return self.job.output or Path("runs")

    @property
    def statuses(self) -> list[tuple[Probe, ShardStatus]]:
        """The shards that said how they are."""
        return [(probe, probe.status) for probe in self.probes if probe.status is not None]

    @property
    def workers(self) -> int:
        """Workers of the job: as it says, or as many as the shards know."""
        if self.job is not None:
            return self.job.workers
        return max((len(status.members) for _, status in self.statuses), default=0) or 1

    @property
    def shards(self) -> int:
        """Shards of the placement, as they or the job say."""
        counts = [probe.greeting.num_shards for probe in self.probes if probe.greeting is not None]
        return max(counts, default=self.job.shards if self.job is not None else 1)


def open_case(
    addresses: str,
    job: Path | None,
    data: Path | None,
    run: Path | None,
    log_dir: Path | None = None,
    tls: TLS | None = None,
    metrics: Sequence[str] = (),
) -> Case:
    """Look at what was named; a dead address takes `probe.DEADLINE`, however many there are."""
    probes: Sequence[Probe] = ()
    address_mistake = job_mistake = data_mistake = ""
    found = None
    if addresses:
        try:
            named = [current_address(one) for one in shard_addresses(addresses)]
            probes = probe_all(named, tls=tls)
        except (BadAddress, NotAnnounced, Unreachable) as error:
            address_mistake = str(error)
    if job is not None:
        from embershard.worker.job.load import load_job  # half a second that the others need not wait

        try:
            found = load_job(job, (), data)
        except JobError as error:
            job_mistake = str(error)
        data_mistake = "" if found is None else _try_data(found, job, data)
    return Case(
        probes=probes,
        address_mistake=address_mistake,
        job=found,
        job_mistake=job_mistake,
        data_mistake=data_mistake,
        run=read_run(run) if run is not None else None,
        log_dir=log_dir,
        tls=tls,
        metrics=metrics,
    )


def _try_data(job: Job, path: Path, data: Path | None) -> str:
    """What is wrong with a job's code or data; empty where nothing is."""
    try:
        if job.has_user_code:
            check_job(path, data=data, say=lambda line: print(line, file=sys.stderr))
        else:
            job.data.look(path.parent)
    except EmbershardError as error:
        return str(error)
    return ""
