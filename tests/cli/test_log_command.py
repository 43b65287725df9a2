"""`embershard log`: what it shows of logs, and what it cuts."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.proto.errors import EmbershardError, LogDamaged, LogLocked, LogUnusable, UnknownTable
from embershard.proto.messages import Declare
from embershard.proto.routing import Placement
from embershard.ps.journal.folder import LogFolder
from embershard.ps.journal.manifest import MANIFEST
from embershard.ps.journal.reader import NO_COPY
from embershard.ps.recovery import recover
from embershard.ps.restore import Contents
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from harness.logged_shard import install
from harness.logs import Written, begin, open_log, read
from harness.shards import gradients, join, push, table

GOLDEN = Path(__file__).parents[1] / "golden" / "log-2"


@pytest.fixture
def logs(tmp_path):
    """A folder with the logs of two shards, of 20 events each."""
    for shard in (0, 1):
        written = Written(None, "log", 2048, tmp_path / f"shard-{shard}", shard=shard, num_shards=2, lineage=7)
        written.write([3, 17])
        written.end()
    return tmp_path


def run(*words, code=0, answer=None):
    done = CliRunner().invoke(cli.app, ["log", *map(str, words)], input=answer)
    if isinstance(done.exception, EmbershardError):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


def inspected(*words):
    return [json.loads(line) for line in run("inspect", *words, "--json").splitlines()]


def test_inspect_shows_every_log_of_a_folder(logs):
    first, second = inspected(logs)
    assert (first["shard"], second["shard"], first["num_shards"], first["lineage"]) == (0, 1, 2, f"{7:016x}")
    assert (first["term"], first["first_lsn"], first["last_lsn"], first["end"]) == (1, 1, 20, "clean")
    assert sum(kind["records"] for kind in first["events"].values()) == 20
    assert sum(segment["records"] for segment in first["segments"]) == 20
    assert sum(segment["bytes"] for segment in first["segments"]) == sum(k["bytes"] for k in first["events"].values())
    assert first["segments"][0]["synced"] is False
    assert inspected(logs / "shard-1") == [second]


def test_inspect_prints_segments_and_events_by_their_names(logs):
    text = run("inspect", logs)
    (one, _) = inspected(logs)
    for segment in one["segments"]:
        assert segment["name"] in text
    assert {"Declare", "Pull", "Push"} <= set(text.split()) & set(one["events"])


def test_inspect_reads_the_bases_of_a_log_and_names_the_damage_of_one(tmp_path):
    folder = tmp_path / "shard-0"
    shutil.copytree(GOLDEN, folder)
    (found,) = inspected(folder)
    (base,) = found["bases"]
    name = base.pop("name")
    assert base == {"lsn": 9, "redo_lsn": 8, "rows": 6, "bytes": 604}
    assert name in run("inspect", folder)
    path = folder / name / "1-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    done = CliRunner().invoke(cli.app, ["log", "inspect", str(folder), "--json"])
    assert isinstance(done.exception, LogDamaged)
    assert done.exception.fields["path"] == str(path)
    assert json.loads(done.stdout)["bases"] == [{"name": name, "lsn": 9, "redo_lsn": 8}]


def test_inspect_names_the_events_that_no_request_is(tmp_path):
    shard = Shard(0, Placement.even(1), OptimizerRegistry())
    log = recover(shard, open_log(None, tmp_path), "log", segment_bytes=2**16)
    shard.handle(Declare(table()))
    shard.handle(join(lease_ms=1))
    with pytest.raises(UnknownTable):
        shard.handle(push(gradients([1], name="other"), worker=1))
    shard.advance(shard.system.now() + 1)
    install(shard, log, Contents([shard.core.tables.entry("items").table], [], 7, {}))
    while log.journal.write_group():
        pass
    (found,) = inspected(tmp_path)
    own = {"Term", "Settled", "Expired", "RestoredRows", "TablesRestored"}
    assert set(found["events"]) == own | {"Declare", "Join"}
    assert own <= set(run("inspect", tmp_path).split())


def test_inspect_shows_what_lies_before_damage_and_ends_with_the_error(logs):
    damage(logs / "shard-0", 5)
    done = CliRunner().invoke(cli.app, ["log", "inspect", str(logs), "--json"])
    assert isinstance(done.exception, LogDamaged)
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["damage"]["lsn"], first["end"], second["end"]) == (5, None, "clean")
    assert sum(kind["records"] for kind in first["events"].values()) == 4


def damage(folder, lsn):
    log = LogFolder.existing(folder)
    position = log.reader.find(lsn)
    log.close()
    path = folder / str(position.segment)
    content = bytearray(path.read_bytes())
    content[position.offset + 20] ^= 1
    path.write_bytes(content)


def test_inspect_needs_no_lock_and_changes_nothing(logs):
    files = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    held = open_log(None, logs / "shard-0", num_shards=2)
    assert inspected(logs)[0]["last_lsn"] == 20
    held.close()
    now = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file() and path.name != "LOCK"}
    assert now == {path: data for path, data in files.items() if path.name != "LOCK"}


def test_truncate_says_what_would_be_lost_and_cuts_only_after_a_yes(logs):
    folder = logs / "shard-0"
    run("truncate", folder, "--at", 15, answer="n\n", code=1)
    assert inspected(folder)[0]["last_lsn"] == 20
    text = run("truncate", folder, "--at", 15, answer="y\n")
    assert {"6", "20,"} <= set(text.split())
    assert inspected(folder)[0]["last_lsn"] == 14
    run("truncate", folder, "--at", 3, "--yes")
    assert inspected(folder)[0]["last_lsn"] == 2
    assert inspected(logs / "shard-1")[0]["last_lsn"] == 20


def test_truncate_mends_a_damaged_log(logs):
    folder = logs / "shard-0"
    damage(folder, 5)
    with pytest.raises(LogDamaged):
        run("truncate", folder, "--at", 6, "--yes")
    run("truncate", folder, "--at", 5, "--yes")
    records, end = read(None, folder, num_shards=2)
    assert ([one[0] for one in records], end.state) == ([1, 2, 3, 4], "clean")


def test_truncate_gives_up_events_whose_files_are_gone(logs):
    folder = logs / "shard-0"
    log = open_log(None, folder, num_shards=2)
    begin(log).segments.close()
    log.close()
    for path in folder.glob("log-*"):
        path.unlink()
    with pytest.raises(LogDamaged) as raised:
        read(None, folder, num_shards=2)
    assert raised.value.fields["lsn"] == 1
    run("truncate", folder, "--at", 1, answer="n\n", code=1)
    with pytest.raises(LogDamaged):
        read(None, folder, num_shards=2)
    assert {"1", "20"} <= set(run("truncate", folder, "--at", 1, "--yes").split())
    assert read(None, folder, num_shards=2)[0] == []


def test_truncate_behind_the_end_cuts_nothing(logs):
    files = {path: path.stat().st_size for path in (logs / "shard-0").glob("log-*")}
    run("truncate", logs / "shard-0", "--at", 21)
    assert {path: path.stat().st_size for path in (logs / "shard-0").glob("log-*")} == files


def test_a_log_that_is_in_use_is_not_cut_and_what_is_no_log_is_named(logs, tmp_path):
    held = open_log(None, logs / "shard-0", num_shards=2)
    with pytest.raises(LogLocked):
        run("truncate", logs / "shard-0", "--at", 2, "--yes")
    held.close()
    for words in (["inspect", tmp_path / "none"], ["truncate", logs, "--at", 1]):
        with pytest.raises(LogUnusable):
            run(*words)


def test_a_log_with_a_base_is_not_cut_at_or_before_it(tmp_path):
    folder = tmp_path / "shard-0"
    shutil.copytree(GOLDEN, folder)
    before = inspected(folder)
    for lsn in (3, 9):
        with pytest.raises(LogUnusable):
            run("truncate", folder, "--at", lsn, "--yes")
    assert inspected(folder) == before


def test_damage_that_no_cut_mends_has_another_remedy(tmp_path):
    folder = tmp_path / "shard-0"
    shutil.copytree(GOLDEN, folder)
    damage(folder, 9)
    done = CliRunner().invoke(cli.app, ["log", "inspect", str(folder), "--json"])
    assert isinstance(done.exception, LogDamaged)
    assert (done.exception.fields["lsn"], done.exception.fields["remedy"]) == (9, NO_COPY)


def unmanifested(folder):
    (folder / MANIFEST).unlink()


def emptied(folder):
    for path in folder.iterdir():
        path.unlink()


def with_a_folder_for_a_segment(folder):
    (folder / f"log-{21:020}-{5:016x}").mkdir()


@pytest.mark.parametrize(
    ("spoil", "error"),
    [(unmanifested, LogDamaged), (emptied, LogUnusable), (with_a_folder_for_a_segment, LogUnusable)],
)
def test_inspect_shows_the_other_logs_where_one_cannot_be_read(logs, spoil, error):
    spoil(logs / "shard-0")
    done = CliRunner().invoke(cli.app, ["log", "inspect", str(logs), "--json"])
    assert isinstance(done.exception, error)
    assert done.exception.fields["path"].startswith(str(logs / "shard-0"))
    assert json.loads(done.stdout)["shard"] == 1
