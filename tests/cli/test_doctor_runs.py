"""`embershard doctor`: what it finds about a run, and why its workers wait."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from doctor_cases import FAIL, OK, ROOT, STATUS, WARN, finds, found, probe

from embershard.doctor import runs
from embershard.doctor.case import Case
from embershard.doctor.check import Finding
from embershard.doctor.checks import SUBJECTS
from embershard.doctor.run_record import read_run
from embershard.proto.messages import replace

# ---- a run


def part(share: float) -> dict[str, float]:
    return {"p50_ms": 100 * share, "p99_ms": 100 * share, "share": share}


def a_run(
    folder: Path,
    parts: Mapping[str, float] | None = None,
    *,
    wait_share: float = 0.0,
    speeds: tuple[float, ...] = (100.0,) * 20,
    result: bool = True,
    p99: float = 110.0,
    train: Mapping[str, object] = {},
    overlapped: Mapping[str, float] = {},
    **interval: float,
) -> Case:
    """The case of a run that left this behind."""
    lines: list[dict[str, object]] = [{"record": "config", "workers": 2, "job": {"train": dict(train)}}]
    for at, speed in enumerate(speeds):
        lines.append(
            {
                "record": "train",
                "step": at,
                "samples_per_second": speed,
                "wait_share": wait_share,
                "loss": None,
                **interval,
            }
        )
    lines.append({"record": "eval", "seconds": 20.0, "evaluation_seconds": interval.get("evaluating", 1.0)})
    if result:
        lines.append(
            {
                "record": "result",
                "steps": 20,
                "samples_per_second": 100.0,
                "seconds": 21.0,
                "wait_share": wait_share,
                "expired_leases": interval.get("expired_leases", 0),
            }
        )
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if parts is not None:
        split: dict[str, object] = {"steps": 200, "step": {"p50_ms": 100.0, "p99_ms": p99, "share": 1.0}}
        for threads, shares in (("parts", parts), ("overlapped", overlapped)):
            split[threads] = {name: part(share) for name, share in shares.items()}
        (folder / "profile.json").write_text(json.dumps(split))
    return Case(run=read_run(folder))


@pytest.mark.parametrize("name", runs.PARTS)
def test_the_part_that_dominates_a_step_comes_with_what_to_try(name, tmp_path):
    about = a_run(tmp_path, {"other": 0.1, "route": 0.1, name: 0.7})
    finding = runs.step.run(about)
    assert finding.text.startswith(f"{name} takes 70% of 100.0 ms (")
    assert finding.remedy == runs.PARTS[name]
    assert finding.level is (OK if name in ("forward", "backward") else WARN)


def test_waiting_for_a_batch_is_told_from_waiting_for_shards(tmp_path):
    about = a_run(tmp_path, {"wait": 0.7, "forward": 0.3}, overlapped={"wait": 0.1, "data": 0.8})
    finding = runs.step.run(about)
    assert finding.text.endswith("meanwhile another thread spends 80% on data")
    assert finding.remedy == runs.PARTS["data"]


def test_every_part_that_a_step_has_is_known():
    text = (ROOT / "proto" / "timing.py").read_text().partition('"""')[2].partition('"""')[0]
    named = set(re.findall(r"`(\w+)`", text.partition("The parts:")[2].partition("Spans nest")[0]))
    assert named == set(runs.PARTS) - {"other"}


def test_a_run_without_profile_says_how_to_get_one(tmp_path):
    finding = runs.step.run(a_run(tmp_path))
    assert finding == Finding(OK, "not known: there is no profile.json", "run it with --profile")


def test_steps_that_differ_much_are_a_warning(tmp_path):
    finds(runs.even_steps, a_run(tmp_path, {"forward": 0.9}), OK, "p50 100.0 ms")
    finds(runs.even_steps, a_run(tmp_path, {"forward": 0.9}, p99=900.0), WARN, "p99 900.0 ms")


def test_a_run_that_did_not_end_is_a_warning(tmp_path):
    finds(runs.ended, a_run(tmp_path), OK, "20 steps, 100 samples/s")
    finds(runs.ended, a_run(tmp_path, result=False), WARN, "after step 19")
    finds(runs.ended, a_run(tmp_path, expired_leases=2), WARN, "2 times a worker was evicted")


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "No such file"), ("", "no `config` line"), ('[]\n{"a"\n\x00\x1b[2J\n', "no `config` line")],
)
def test_a_folder_without_a_run_fails(text, words, tmp_path):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    finds(runs.ended, Case(run=read_run(tmp_path)), FAIL, words)


def test_damaged_lines_of_a_log_are_counted(tmp_path):
    a_run(tmp_path)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"record":"train","samples_per')
    finds(runs.ended, Case(run=read_run(tmp_path)), WARN, "1 damaged lines")


@pytest.mark.parametrize("text", ["{", "[]", '{"parts": 1, "step": []}', '{"parts": {"wait": {"share": "much"}}}'])
def test_a_damaged_profile_breaks_nothing(text, tmp_path):
    a_run(tmp_path)
    (tmp_path / "profile.json").write_text(text)
    about = Case(run=read_run(tmp_path))
    for one in SUBJECTS["run"]:
        finding = one.run(about)
        assert finding is None or "could not be checked" not in finding.text


def test_why_workers_wait_is_said(tmp_path):
    finds(runs.waiting, a_run(tmp_path, wait_share=0.05), OK, "5% of the training time")
    asynchronous = {"prefetch": 2, "staleness": None}
    assert found(runs.waiting, a_run(tmp_path, wait_share=0.6, train=asynchronous)) == (
        WARN,
        "60% of the training time",
    )
    about = a_run(tmp_path, wait_share=0.6, train={"prefetch": 0, "staleness": 0})
    finds(runs.waiting, about, WARN, "synchronous workers wait for the slowest")
    alone = a_run(tmp_path, wait_share=0.6, train={"prefetch": 0, "staleness": None})
    finds(runs.waiting, alone, WARN, "no step is computed while pushes are on their way")
    busy = [probe(replace(STATUS, queued_bytes=2**20), call_seconds=0.03)]
    finds(runs.waiting, replace(about, probes=busy), WARN, "the network: a small call takes 30.0 ms")
    finds(runs.waiting, replace(about, probes=busy), WARN, "the shards are busy: shard 0 at h:1")


def test_a_run_that_slows_down_is_a_warning(tmp_path):
    finds(runs.speed_over_time, a_run(tmp_path), OK, "100 samples/s at first")
    slow = a_run(tmp_path, speeds=(*[100.0] * 10, *[20.0] * 10))
    finds(runs.speed_over_time, slow, WARN, "100 samples/s at first, 20 at last")
    assert runs.speed_over_time.run(a_run(tmp_path, speeds=(100.0, 1.0))) is None  # too short to tell


def moved(direction: str, part: str, wire: float, raw: float) -> dict[str, object]:
    return {"direction": direction, "part": part, "wire": wire, "raw": raw, "predicted": None}


def test_rows_without_room_in_the_residuals_are_a_warning(tmp_path):
    def finding(*parts):
        case = a_run(tmp_path)
        return replace(case, run=replace(case.run, result={**(case.run.result or {}), "bytes": list(parts)}))

    assert runs.compression.run(a_run(tmp_path)) is None
    assert runs.compression.run(finding(moved("push", "rows", 101.0, 100.0))) is None
    pull = moved("pull", "rows", 100.0, 200.0)
    push = moved("push", "rows", 90.0, 900.0)
    finds(runs.compression, finding(pull, push), OK, "push 10.00 times fewer bytes, pull 2.00 times fewer bytes")
    finds(runs.compression, finding(pull, push, moved("push", "held", 9.0, 0.0)), OK, "push 9.09 times")
    held = finding(pull, push, moved("push", "held", 30.0, 0.0))
    finds(runs.compression, held, WARN, "25% of those pushed are rows that were held back and sent whole")
    alone = finding(moved("push", "rows", 1.0, 100.0), moved("push", "held", 105.0, 0.0))
    finds(runs.compression, alone, WARN, "push 1.06 times more bytes, 99% of those pushed")
    finds(runs.compression, finding(pull, moved("push", "rows", 200.0, 100.0)), WARN, "push 2.00 times more bytes")


def test_long_evaluations_and_a_cache_without_hits_are_warnings(tmp_path):
    finds(runs.evaluation, a_run(tmp_path), OK, "1.0 of 21.0 s in 1 evaluations")
    finds(runs.evaluation, a_run(tmp_path, evaluating=15.0), WARN, "15.0 of 21.0 s")
    assert runs.cache.run(a_run(tmp_path)) is None
    finds(runs.cache, a_run(tmp_path, cached_share=0.5), OK, "50% of the rows")
    finds(runs.cache, a_run(tmp_path, cached_share=0.01), WARN, "1% of the rows")
