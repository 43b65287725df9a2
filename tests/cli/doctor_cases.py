"""What a doctor is shown, and what is claimed of its findings."""

from importlib import metadata
from pathlib import Path

from embershard.doctor.case import Case
from embershard.doctor.check import Level
from embershard.doctor.probe import Probe
from embershard.proto.messages import Greeting, MemberStatus, ShardStatus, TableStatus
from embershard.worker.job.load import load_job

ROOT = Path(__file__).resolve().parents[2]
NOBODY = Case()
OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL
JOB = """
model: {name: lr}
data: {reader: clicks, samples: 1000}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 10, epochs: 1}
workers: 2
"""
_PLACE = {"shard": 0, "num_shards": 1, "placement_epoch": 1, "instance": "an instance"}
GREETING = Greeting(**_PLACE, version=metadata.version("embershard"), max_message_bytes=64 * 2**20)
TABLE = TableStatus(name="items", dim=4, rows=10, bytes=1000, optimizer="sgd", loading=False)
_COUNTS = dict.fromkeys(("resident_bytes", "requests", "pulled_rows", "pushed_rows"), 1)
_NOTHING = dict.fromkeys(("duplicate_pushes", "skipped_rows", "queued_bytes"), 0)
STATUS = ShardStatus(
    **_PLACE, **_COUNTS, **_NOTHING, version="1", uptime_seconds=1.0, tables=(TABLE,), staleness=-1
)  # fmt: skip


def member(worker, clock, lease=8.0, paused=False):
    return MemberStatus(worker=worker, clock=clock, paused=paused, lease_seconds=lease)


def probe(status=STATUS, before=None, **fields):
    """A shard that answers well, but for what is given."""
    well = {f"{name}_problem": "" for name in ("resolve", "port", "stream", "grpc")}
    well |= {"stream_greeting": GREETING, "grpc_greeting": GREETING, "here": True, "beside": True}
    return Probe("h:1", **{**well, "status": status, "before": before or status, **fields})


def case(*statuses, **fields):
    return Case(probes=[probe(status) for status in statuses], **fields)


def job(folder, *overrides):
    (folder / "job.yaml").write_text(JOB)
    return Case(job=load_job(folder / "job.yaml", overrides))


def finds(check, about, level, words=""):
    """A check finds this, or with no level, does not apply."""
    finding = check.run(about)
    assert (finding and finding.level, level is None or words in finding.text) == (level, True), finding
