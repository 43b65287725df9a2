"""`embershard doctor`: the checks as such, and the command."""

import json
import threading

import pytest
from doctor_cases import FAIL, NOBODY, OK, ROOT, WARN, finds
from typer.testing import CliRunner

from embershard.cli import app as cli
from embershard.cli import doctor as command
from embershard.deploy.supervisor import LocalShards
from embershard.doctor import runs, shards
from embershard.doctor.case import open_case
from embershard.doctor.check import check, ok
from embershard.doctor.checks import SUBJECTS
from harness.processes import paused


def test_the_page_lists_every_check_and_its_remedy():
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    checks = [one for checks in SUBJECTS.values() for one in checks]
    listed = [f"| `{one.name}` | {one.asks} | {one.remedy} |" for one in checks]
    assert rows == [*listed, *(f"| `{name}` | {remedy} |" for name, remedy in runs.PARTS.items())]
    assert [line[3:].split()[0].lower() for line in page.splitlines() if line.startswith("## ")] == list(SUBJECTS)
    assert len({one.name for one in checks}) == len(checks)


def test_a_check_that_hangs_or_breaks_says_so():
    release = threading.Event()
    hangs = check("slow", asks="", remedy="", seconds=0.05)(lambda _: ok("at last") if release.wait(60) else None)
    finds(hangs, NOBODY, FAIL, "hangs")
    release.set()
    breaks = check("broken", asks="", remedy="")(lambda _: 1 // 0)
    finds(breaks, NOBODY, WARN, "could not be checked: ZeroDivisionError")


def invoke(*words, code=0):
    done = CliRunner().invoke(cli.app, ["doctor", *words])
    assert done.exit_code == code
    return done.output


def answers_of(*words):
    """What each check found by its name."""
    done = CliRunner().invoke(cli.app, ["doctor", *words, "--json"])
    answers = json.loads(done.stdout)
    assert answers["ok"] is (done.exit_code == 0)
    return {answer["check"]: answer for answer in answers["checks"]}


@pytest.fixture(autouse=True)
def no_shards_of_up(monkeypatch):
    """Whatever runs on this machine at the default port is not asked."""
    monkeypatch.setattr(command, "shards_of_up", lambda: [])


def test_without_shards_and_run_the_machine_is_checked():
    subjects = {answer["subject"] for answer in answers_of().values()}
    assert subjects == {"installation", "machine", "computing", "files"}


def test_what_a_server_says_does_not_steer_the_terminal(monkeypatch):
    rude = check("rude", asks="", remedy="")(lambda _: ok("\x1b[2J[red]\nline", "\x07do"))
    monkeypatch.setattr(command, "SUBJECTS", {"rudeness": [rude]})
    output = invoke()
    assert [part in output for part in ("\x1b", "\x07", "[red]")] == [False, False, True]


def test_a_failure_is_shown_with_its_remedy_and_ends_with_1(monkeypatch):
    monkeypatch.setattr(command, "SUBJECTS", {"shards": [shards.addresses]})
    text = " ".join(invoke("--ps", "nonsense", code=1).split())
    assert "fail addresses 'nonsense' is not the address of a shard" in text
    assert f"-> {shards.addresses.remedy}" in text
    assert text.endswith("1 fail")


@pytest.fixture(scope="module")
def placements():
    """The shards of a job of two, and that of another."""
    with LocalShards(2) as two, LocalShards(1) as one:
        yield two, one.addresses[0]


def seen(addresses):
    return open_case(addresses if isinstance(addresses, str) else ",".join(addresses), None, None, None)


@pytest.mark.integration
def test_shards_that_serve_are_found_well(placements):
    answers = answers_of("--ps", ",".join(placements[0].addresses))
    shown = {name: answer["level"] for name, answer in answers.items() if answer["subject"] == "shards"}
    assert shown.pop("latency") in ("ok", "warn")
    assert set(shown.values()) == {"ok"}, answers
    assert set(shown) >= {"ports", "stream", "gRPC", "versions", "placement", "instances", "Unix sockets"}


@pytest.mark.integration
def test_shards_are_asked_as_their_addresses_say(placements):
    two, one = placements
    for scheme in ("tcp://", "grpc://"):
        about = seen(f"{scheme}{one}")
        finds(shards.stream, about, OK, "1 answered")
        finds(shards.placement, about, OK, "all of 1 shards")
        finds(shards.unix_sockets, about, WARN, "over TCP")
    finds(shards.placement, seen([two.addresses[0], one]), FAIL, "2 and 1 shards")
    finds(shards.placement, seen(two.addresses[0]), FAIL, "of 2 shards, 1 is not among")
    twice = seen([one, one.replace("127.0.0.1", "localhost")])
    finds(shards.instances, twice, FAIL, "one shard under several addresses")
    with paused(two.pids[1]):
        about = seen(two.addresses)
    finds(shards.stream, about, FAIL, f"{two.addresses[1]}: no answer")
    # one failure is enough
    assert [check.run(about) for check in (shards.grpc, shards.placement)] == [shards.ok("1 answered"), None]
