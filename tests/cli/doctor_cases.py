"""What a doctor is shown, and what is claimed of its findings."""

from importlib import metadata
from pathlib import Path

from embershard.doctor.case import Case
from embershard.doctor.check import Check, Level
from embershard.doctor.probe import Probe
from embershard.proto.messages import Greeting, ShardStatus, TableStatus
from embershard.worker.job.load import load_job

ROOT = Path(__file__).resolve().parents[2]
NOBODY = Case()
JOB = """
model: {name: lr}
data: {reader: clicks, samples: 1000}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 10, epochs: 1}
workers: 2
"""
GREETING = Greeting(
    shard=0,
    num_shards=1,
    placement_epoch=1,
    version=metadata.version("embershard"),
    instance="an instance",
    max_message_bytes=64 * 2**20,
)
TABLE = TableStatus(name="items", dim=4, rows=10, bytes=1000, optimizer="sgd", loading=False)
STATUS = ShardStatus(
    shard=0,
    num_shards=1,
    placement_epoch=1,
    version="1",
    instance="an instance",
    uptime_seconds=1.0,
    resident_bytes=1,
    requests=1,
    pulled_rows=1,
    pushed_rows=1,
    duplicate_pushes=0,
    skipped_rows=0,
    queued_bytes=0,
    tables=(TABLE,),
    staleness=-1,
)


def probe(status: ShardStatus | None = STATUS, before: ShardStatus | None = None, **fields: object) -> Probe:
    """A shard that answers well, but for what is given."""
    well = {f"{name}_problem": "" for name in ("resolve", "port", "stream", "grpc")}
    greetings = {"stream_greeting": GREETING, "grpc_greeting": GREETING}
    return Probe(
        "h:1",
        **{**well, **greetings, "here": True, "beside": True, "status": status, "before": before or status, **fields},
    )


def case(*statuses: ShardStatus, **fields: object) -> Case:
    return Case(probes=[probe(status) for status in statuses], **fields)


def job(tmp_path: Path, *overrides: str) -> Case:
    (tmp_path / "job.yaml").write_text(JOB)
    return Case(job=load_job(tmp_path / "job.yaml", overrides))


def found(one: Check, about: Case = NOBODY) -> tuple[Level, str]:
    finding = one.run(about)
    assert finding is not None, "the check did not apply"
    return finding.level, finding.text


def finds(one: Check, about: Case, level: Level, words: str) -> None:
    got, text = found(one, about)
    assert (got, words in text) == (level, True), (got, text)


OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL
