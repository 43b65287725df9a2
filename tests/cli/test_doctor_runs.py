"""`embershard doctor`: what it finds about a run, and why its workers wait."""

import json
import re

import pytest
from doctor_cases import FAIL, OK, ROOT, STATUS, WARN, finds, probe

from embershard.doctor import runs
from embershard.doctor.case import Case
from embershard.doctor.check import Finding
from embershard.doctor.checks import SUBJECTS
from embershard.doctor.run_record import read_run
from embershard.proto.messages import replace


@pytest.fixture
def a_run(tmp_path):
    """Writes the log and the profile of a run that went well, but for what is given; its case."""

    def write(
        parts=None, *, overlapped=(), p99=110.0, speeds=(100.0,) * 20, train=(), evaluating=1.0, result=(), **interval
    ):
        interval = {"wait_share": 0.0, "loss": None, **interval}
        end = {"steps": 20, "samples_per_second": 100.0, "seconds": 21.0, "wait_share": interval["wait_share"]}
        lines = [
            {"record": "config", "workers": 2, "job": {"train": dict(train)}},
            *({"record": "train", "step": at, "samples_per_second": s, **interval} for at, s in enumerate(speeds)),
            {"record": "eval", "seconds": 20.0, "evaluation_seconds": evaluating},
            *([] if result is None else [{"record": "result", **end, "expired_leases": 0, **dict(result)}]),
        ]
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if parts is not None:
            split = {"steps": 200, "step": {"p50_ms": 100.0, "p99_ms": p99, "share": 1.0}}
            for threads, shares in (("parts", parts), ("overlapped", dict(overlapped))):
                times = {name: dict.fromkeys(("p50_ms", "p99_ms"), 100 * share) for name, share in shares.items()}
                split[threads] = {name: {**times[name], "share": share} for name, share in shares.items()}
            (tmp_path / "profile.json").write_text(json.dumps(split))
        return Case(run=read_run(tmp_path))

    return write


@pytest.mark.parametrize("name", runs.PARTS)
def test_the_part_that_dominates_a_step_comes_with_what_to_try(name, a_run):
    finding = runs.step.run(a_run({"other": 0.1, "route": 0.1, name: 0.7}))
    assert finding.text.startswith(f"{name} takes 70% of 100.0 ms (")
    assert finding.remedy == runs.PARTS[name]
    assert finding.level is (OK if name in ("forward", "backward") else WARN)


def test_waiting_for_a_batch_is_told_from_waiting_for_shards(a_run):
    finding = runs.step.run(a_run({"wait": 0.7, "forward": 0.3}, overlapped={"wait": 0.1, "data": 0.8}))
    assert finding.text.endswith("meanwhile another thread spends 80% on data")
    assert finding.remedy == runs.PARTS["data"]


def test_every_part_that_a_step_has_is_known():
    text = (ROOT / "proto" / "timing.py").read_text().partition('"""')[2].partition('"""')[0]
    named = set(re.findall(r"`(\w+)`", text.partition("The parts:")[2].partition("Spans nest")[0]))
    assert named == set(runs.PARTS) - {"other"}


def test_a_run_without_profile_says_how_to_get_one(a_run):
    assert runs.step.run(a_run()) == Finding(OK, "not known: there is no profile.json", "run it with --profile")


ASYNC, SYNC, ALONE = ({"prefetch": p, "staleness": s} for p, s in ((2, None), (0, 0), (0, None)))


@pytest.mark.parametrize(
    ("check", "run", "level", "words"),
    [
        (runs.even_steps, {"parts": {"forward": 0.9}}, OK, "p50 100.0 ms"),
        (runs.even_steps, {"parts": {"forward": 0.9}, "p99": 900.0}, WARN, "p99 900.0 ms"),
        (runs.ended, {}, OK, "20 steps, 100 samples/s"),
        (runs.ended, {"result": None}, WARN, "after step 19"),
        (runs.ended, {"result": {"expired_leases": 2}}, WARN, "2 times a worker was evicted"),
        (runs.waiting, {"wait_share": 0.05}, OK, "5% of the training time"),
        (runs.waiting, {"wait_share": 0.6, "train": ASYNC}, WARN, "60% of the training time"),
        (
            runs.waiting,
            {"wait_share": 0.6, "train": ASYNC, "result": {"wait_data": 0.4, "wait_shards": 0.2}},
            WARN,
            "(for data 40%, for shards 20%, for other workers 0%)",
        ),
        (runs.waiting, {"wait_share": 0.6, "train": SYNC}, WARN, "synchronous workers wait for the slowest"),
        (runs.waiting, {"wait_share": 0.6, "train": ALONE}, WARN, "no step is computed while pushes are on their way"),
        (runs.speed_over_time, {}, OK, "100 samples/s at first"),
        (runs.speed_over_time, {"speeds": [*[100.0] * 10, *[20.0] * 10]}, WARN, "100 samples/s at first, 20 at last"),
        (runs.speed_over_time, {"speeds": [100.0, 1.0]}, None, ""),  # too short to tell
        (runs.evaluation, {}, OK, "1.0 of 21.0 s in 1 evaluations"),
        (runs.evaluation, {"evaluating": 15.0}, WARN, "15.0 of 21.0 s"),
        (runs.cache, {}, None, ""),
        (runs.cache, {"cached_share": 0.5}, OK, "50% of the rows"),
        (runs.cache, {"cached_share": 0.01}, WARN, "1% of the rows"),
    ],
)
def test_what_a_log_says_of_its_run_is_judged(a_run, check, run, level, words):
    finds(check, a_run(**run), level, words)


def test_who_waits_for_busy_shards_or_a_slow_network_is_told(a_run):
    busy = [probe(replace(STATUS, queued_bytes=2**20), call_seconds=0.03)]
    about = replace(a_run(wait_share=0.6, train=SYNC), probes=busy)
    finds(runs.waiting, about, WARN, "the network: a small call takes 30.0 ms")
    finds(runs.waiting, about, WARN, "the shards are busy: shard 0 at h:1")


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "No such file"), ("", "no `config` line"), ('[]\n{"a"\n\x00\x1b[2J\n', "no `config` line")],
)
def test_a_folder_without_a_run_fails(text, words, tmp_path):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    finds(runs.ended, Case(run=read_run(tmp_path)), FAIL, words)


def test_damaged_lines_of_a_log_are_counted(a_run, tmp_path):
    a_run()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"record":"train","samples_per')
    finds(runs.ended, Case(run=read_run(tmp_path)), WARN, "1 damaged lines")


@pytest.mark.parametrize("text", ["{", "[]", '{"parts": 1, "step": []}', '{"parts": {"wait": {"share": "much"}}}'])
def test_a_damaged_profile_breaks_nothing(text, a_run, tmp_path):
    a_run()
    (tmp_path / "profile.json").write_text(text)
    findings = [one.run(Case(run=read_run(tmp_path))) for one in SUBJECTS["run"]]
    assert not any(finding and "could not be checked" in finding.text for finding in findings)


def moved(direction, part, wire, raw):
    return {"direction": direction, "part": part, "wire": wire, "raw": raw, "predicted": None}


PULL, PUSH = moved("pull", "rows", 100.0, 200.0), moved("push", "rows", 90.0, 900.0)


@pytest.mark.parametrize(
    ("parts", "level", "words"),
    [
        ([], None, ""),
        ([moved("push", "rows", 101.0, 100.0)], None, ""),
        ([PULL, PUSH], OK, "push 10.00 times fewer bytes, pull 2.00 times fewer bytes"),
        ([PULL, PUSH, moved("push", "residual", 9.0, 0.0)], OK, "push 9.09 times"),
        (
            [PULL, PUSH, moved("push", "residual", 30.0, 0.0)],
            WARN,
            "25% of those pushed are rows that were held back and",
        ),
        (
            [moved("push", "rows", 1.0, 100.0), moved("push", "residual", 105.0, 0.0)],
            WARN,
            "push 1.06 times more bytes, 99% of those pushed",
        ),
        ([PULL, moved("push", "rows", 200.0, 100.0)], WARN, "push 2.00 times more bytes"),
    ],
)
def test_rows_without_room_in_the_residuals_are_a_warning(a_run, parts, level, words):
    finds(runs.compression, a_run(result={"bytes": parts}), level, words)
