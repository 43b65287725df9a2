"""`embershard doctor`: the checks as such, and the command."""

import json
import os
import subprocess
import sys
import threading

import pytest
from doctor_cases import FAIL, NOBODY, OK, ROOT, WARN, finds
from standing_still import standing_still
from typer.testing import CliRunner

import embershard as es
from embershard.cli import app as cli
from embershard.cli import doctor as command
from embershard.deploy.supervisor import LocalShards
from embershard.doctor import job as clocks
from embershard.doctor import runs, shards
from embershard.doctor.case import open_case
from embershard.doctor.check import check, ok
from embershard.doctor.checks import SUBJECTS
from embershard.proto.spec import SGD, TableSpec

# ---- the checks as such


def test_the_page_lists_every_check_and_its_remedy():
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    listed = [f"| `{one.name}` | {one.asks} | {one.remedy} |" for checks in SUBJECTS.values() for one in checks]
    parts = [f"| `{name}` | {remedy} |" for name, remedy in runs.PARTS.items()]
    assert rows == [*listed, *parts]
    assert [line[3:].split()[0].lower() for line in page.splitlines() if line.startswith("## ")] == list(SUBJECTS)


def test_no_two_checks_have_one_name():
    names = [one.name for checks in SUBJECTS.values() for one in checks]
    assert len(names) == len(set(names))


def test_a_check_that_hangs_fails_at_its_deadline():
    release = threading.Event()
    one = check("slow", asks="", remedy="", seconds=0.05)(lambda _: ok("at last") if release.wait(60) else None)
    finds(one, NOBODY, FAIL, "hangs")
    release.set()


def test_a_check_that_breaks_says_so():
    def broken(_):
        raise ZeroDivisionError("by zero")

    finds(check("broken", asks="", remedy="")(broken), NOBODY, WARN, "could not be checked: ZeroDivisionError: by zero")


# ---- the command


def run(*words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and what each check found by its name."""
    done = CliRunner().invoke(cli.app, ["doctor", *words, "--json"])
    answers = json.loads(done.stdout)
    assert answers["ok"] is (done.exit_code == 0)
    return done.exit_code, {answer["check"]: answer for answer in answers["checks"]}


@pytest.fixture(autouse=True)
def no_shards_of_up(monkeypatch):
    """Whatever runs on this machine at the default port is not asked."""
    monkeypatch.setattr(command, "shards_of_up", lambda: [])


def test_without_shards_and_run_the_machine_is_checked():
    _, answers = run()
    assert {answer["subject"] for answer in answers.values()} == {"installation", "machine", "computing", "files"}


def test_what_a_server_says_does_not_steer_the_terminal(monkeypatch):
    rude = check("rude", asks="", remedy="")(lambda _: ok("\x1b[2J[red]\nline", "\x07do"))
    monkeypatch.setattr(command, "SUBJECTS", {"rudeness": [rude]})
    done = CliRunner().invoke(cli.app, ["doctor"])
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "[red]" in done.output
    assert "\x07" not in done.output


def test_a_failure_is_shown_with_its_remedy_and_ends_with_1(monkeypatch):
    monkeypatch.setattr(command, "SUBJECTS", {"shards": [shards.addresses]})
    done = CliRunner().invoke(cli.app, ["doctor", "nonsense"])
    assert done.exit_code == 1
    text = " ".join(done.output.split())
    assert "fail addresses 'nonsense' is not the address of a shard" in text
    assert f"-> {shards.addresses.remedy}" in text
    assert text.endswith("1 fail")


@pytest.mark.integration
def test_low_limits_are_found_where_they_are():
    program = "import sys; sys.argv = ['embershard', 'doctor', '--json']; from embershard.cli import main; main()"
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 128 && ulimit -v 20000000 && exec "$0" -c "$1"', sys.executable, program],
        capture_output=True,
        text=True,
        timeout=250,
    )
    answers = {answer["check"]: answer for answer in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert answers["open files"]["level"] == "fail"
    assert answers["open files"]["found"].startswith("128 ")
    if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 10 * 2**30:
        assert answers["address space"]["level"] == "warn"


@pytest.fixture(scope="module")
def two_placements():
    with LocalShards(2) as one, LocalShards(1) as other:
        yield one, other


@pytest.mark.integration
def test_shards_that_serve_are_found_well(two_placements):
    one, _ = two_placements
    _, answers = run(",".join(one.addresses))
    shown = {name: answer["level"] for name, answer in answers.items() if answer["subject"] == "shards"}
    assert shown.pop("latency") in ("ok", "warn")
    assert set(shown.values()) == {"ok"}, answers
    assert set(shown) >= {"ports", "stream", "gRPC", "versions", "placement", "instances", "Unix sockets"}


@pytest.mark.integration
@pytest.mark.parametrize("scheme", ["tcp://", "grpc://"])
def test_transports_are_those_of_the_addresses(scheme, two_placements):
    about = open_case(f"{scheme}{two_placements[1].addresses[0]}", None, None, None)
    finds(shards.stream, about, OK, "1 answered")
    finds(shards.placement, about, OK, "all of 1 shards")
    finds(shards.unix_sockets, about, WARN, "over TCP")


@pytest.mark.integration
def test_shards_of_two_jobs_are_not_one_placement(two_placements):
    one, other = two_placements
    finds(
        shards.placement,
        open_case(f"{one.addresses[0]},{other.addresses[0]}", None, None, None),
        FAIL,
        "2 and 1 shards",
    )
    finds(shards.placement, open_case(one.addresses[0], None, None, None), FAIL, "of 2 shards, 1 is not among")
    twice = f"{other.addresses[0]},{other.addresses[0].replace('127.0.0.1', 'localhost')}"
    finds(shards.instances, open_case(twice, None, None, None), FAIL, "one shard under several addresses")


@pytest.mark.integration
def test_a_shard_that_is_stopped_is_found_silent(two_placements):
    one, _ = two_placements
    with standing_still(one.pids[1]):
        about = open_case(",".join(one.addresses), None, None, None)
    finds(shards.stream, about, FAIL, f"{one.addresses[1]}: no answer")
    finds(shards.placement, about, FAIL, "of 2 shards, 1 did not answer")


@pytest.mark.integration
def test_the_workers_of_a_job_are_seen_from_outside(two_placements):
    one, _ = two_placements
    everybody = ",".join(one.addresses)
    spec = TableSpec(name="seen", dim=2, optimizer=SGD(lr=1.0))
    with (
        es.connect(everybody, worker=0, workers=2, staleness=0) as quick,
        es.connect(everybody, worker=1, workers=2, staleness=0) as slow,
    ):
        for session in (quick, slow):
            session.table(spec)
        finds(clocks.members, open_case(everybody, None, None, None), OK, "workers 0, 1")
        quick.step()
        about = open_case(everybody, None, None, None)
        finds(clocks.waited_for, about, WARN, "worker 1 (its lease has")
        finds(clocks.clock, about, OK, "0 (synchronous), not advancing")
        slow.step()
        finds(clocks.waited_for, open_case(everybody, None, None, None), OK, "nobody")
    finds(clocks.clock, open_case(everybody, None, None, None), OK, "no worker is a member")
