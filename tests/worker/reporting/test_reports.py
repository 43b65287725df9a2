"""What people and log readers see of a run."""

import dataclasses
import io
import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from embershard.proto.codec.name import CodecName
from embershard.proto.routing import make_route
from embershard.proto.spec import SGD, TableSpec
from embershard.proto.timing import begin_step, end_step, span
from embershard.worker.client.connections import ClientStats
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.compression.settings import Directions, describe_codecs
from embershard.worker.nn.lr_schedule import Schedule
from embershard.worker.reporting.advice import first_warning, waiting_advice
from embershard.worker.reporting.log import JsonLog, TensorBoardLog
from embershard.worker.reporting.profile import TRACED_STEPS, WARM_UP_STEPS, Profile
from embershard.worker.reporting.records import BestWeights, Evaluation, Interval, RunMode, RunPlan, RunResult
from embershard.worker.reporting.report import Report, mode_of
from embershard.worker.reporting.terminal import Terminal, result_table
from embershard.worker.reporting.throughput import Throughput, Waited
from embershard.worker.training.evaluate import Best
from harness.job import make_job

MODE = RunMode(
    strategy="ps", workers=2, shards=2, staleness="at most 4", prefetch="1", codecs="push int8, pull float32"
)
PLAN = RunPlan(
    job={"model": {"name": "fm"}}, name="fm on clicks", workers=2, shards=2, device="cpu", dense_parameters=1234,
    total_samples=1000, metric="auc", split="valid", mode=MODE,
)  # fmt: skip
INTERVAL = Interval(
    step=5, epoch=1, samples=500, seconds=1.5, loss=0.5, samples_per_second=333.3, wait_share=0.25, lr_scale=1.0,
    wait_shards=0.05, wait_workers=0.2,
)  # fmt: skip
EVALUATION = Evaluation(
    step=5, epoch=1, samples=500, seconds=2.0, improved=True, evaluation_seconds=0.5,
    figures={"valid": {"auc": 0.75, "logloss": 0.5, "samples": 100.0}, "test": {"auc": math.nan}},
    warnings=("it is bad",),
)  # fmt: skip
RESULT = RunResult(
    metric="auc", split="valid", figures={"valid": {"auc": 0.75, "hr@10": 0.5, "samples": 12345.0}},
    reachable={"valid": {"auc": 0.8}}, best_epoch=1, best_step=5, stopped_early=True, epochs=2, steps=10, samples=1000,
    seconds=3725.0, train_seconds=60.0, samples_per_second=16.7, wait_share=0.251, skipped_rows=3, skipped_steps=2,
    table_rows={"embedding": 4321, "dense": 2}, mode=MODE, evaluations=3, warnings=("it is bad",),
    advice=("wait less",), wait_shards=0.051, wait_workers=0.2,
)  # fmt: skip


def show(observer):
    observer.started(PLAN)
    observer.trained(INTERVAL)
    observer.evaluating()
    observer.evaluated(EVALUATION)
    observer.trained(dataclasses.replace(INTERVAL, step=10, seconds=30.0))
    observer.finished(RESULT)
    observer.close()


def screen(run, terminal=False):
    """What a person sees of what `run` tells."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, color_system=None)
    run(Terminal(console))
    return console.file.getvalue()


def test_a_terminal_gets_a_bar_and_a_file_plain_lines_with_a_table_of_what_was_reached():
    text = screen(show)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert "strategy ps, staleness at most 4, prefetch 1, push int8, pull float32" in lines[0]
    assert "by auc on valid" in lines[0]
    assert [line.split("  ")[0] for line in lines[1:5]] == ["0:00:02", "0:00:02", "warning: it is bad", "0:00:30"]
    for part in ("333 samples/s", "loss 0.5000", "AUC 0.7500", "test: AUC undefined"):
        assert part in text
    assert "waiting 25% (other workers 20%, shards 5%)" in text
    assert lines[-2] == "wait less"
    assert text.count("warning: ") == 1
    rows = dict(map(str.strip, line.split("│")[1:3]) for line in text.splitlines() if "│" in line)
    assert rows["valid AUC"] == "0.7500  (best reachable 0.8000)"
    assert rows["mode"] == "2 workers x 2 shards, strategy ps, staleness at most 4, prefetch 1"
    assert rows["codecs"] == "push int8, pull float32"
    assert rows["waiting"] == "25.1% of the training time (other workers 20%, shards 5%)"
    assert {"valid HR@10", "best at", "skipped", "left out", "table dense", "table embedding"} <= set(rows)
    assert "staleness" not in rows
    on_screen = screen(show, terminal=True)
    for part in ("\x1b[", "━", "50%", "333 samples/s", "AUC 0.7500", "evaluating"):
        assert part in on_screen


@pytest.mark.parametrize(
    ("best", "shown"),
    [
        ({"checkpoint": "{cwd}/best/step-1", "current": True, "restored": True}, "best/step-1, restored at the end"),
        ({"checkpoint": "s3://b/step-1", "current": True}, "s3://b/step-1"),
        ({"checkpoint": "{cwd}/step-1"}, "step-1; not restored: the run ended with those of the last step"),
        ({"current": True}, "those of the last step, not kept"),
        ({}, "not kept; not restored: the run ended with those of the last step"),
        ({"not_kept": "a full disk"}, "not kept: a full disk"),
    ],
)
def test_the_last_line_says_where_the_best_weights_are(best, shown):
    given = {key: value.format(cwd=Path.cwd()) if isinstance(value, str) else value for key, value in best.items()}
    result = dataclasses.replace(RESULT, best_weights=BestWeights(**given))
    assert screen(lambda terminal: terminal.finished(result)).splitlines()[-1] == f"best weights: {shown}"


def test_lines_between_evaluations_come_now_and_then():
    def run(terminal):
        terminal.started(PLAN)
        for second in range(25):
            terminal.trained(dataclasses.replace(INTERVAL, seconds=float(second), cached_share=0.271))

    assert screen(run).count("cached 27%") == 3


def rows_of(**fields):
    """The rows of the last table."""
    table = result_table(dataclasses.replace(RESULT, **fields))
    return dict(zip(*(column.cells for column in table.columns), strict=True))


@pytest.mark.parametrize(
    ("split", "evaluations", "rows"),
    [
        ("valid", 1, set()),
        ("valid", 12, {"chosen"}),
        ("test", 1, set()),  # nothing was chosen
        ("test", 2, {"chosen", "CHOSEN ON TEST"}),
    ],
)
def test_the_table_says_on_which_split_the_model_was_chosen(split, evaluations, rows):
    found = rows_of(split=split, evaluations=evaluations)
    assert {name for name in found if name.lower().startswith("chosen")} == rows
    assert "chosen" not in rows or f"{evaluations} evaluations by auc on {split}" in found["chosen"]


def directions(push="none", pull="none"):
    return Directions(CodecName.parse(push), CodecName.parse(pull))


CODECS = [
    (({}, {}), ""),
    (({"a": Directions()}, {"dense": Directions()}), "float32"),
    (({"a": directions("int8")}, {}), "push int8, pull float32"),
    (({"a": directions("int8")}, {"dense": Directions()}), "push int8, pull float32; dense float32"),
    (({}, {"dense": directions("int8")}), "dense push int8, pull float32"),
    (({"a": directions("int8", "fp16s"), "b": directions("none", "fp16s")}, {"dense": directions("none", "delta")}),
     "push int8 or float32, pull fp16s; dense push float32, pull delta"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), CODECS)
def test_codecs_are_named_by_direction(given, text):
    assert describe_codecs(*given) == text


@pytest.mark.parametrize(
    ("strategy", "fields", "strategy_text", "staleness", "prefetch"),
    [
        ("ps", {}, "ps", "unbounded (asynchronous)", "0"),
        ("ps", {"train": {"staleness": 0, "prefetch": None}}, "ps", "0 (synchronous)", "off"),
        ("ps", {"train": {"staleness": 4, "prefetch": 2}}, "ps", "at most 4", "2"),
        ("ps", {"train": {"staleness": "local(8)"}}, "ps", "local(8)", "0"),
        ("ps", {"dense": {"mode": "fsdp"}}, "ps (dense weights by fsdp)", "unbounded (asynchronous)", "0"),
        ("hybrid", {}, "hybrid (dense weights by ddp)", "unbounded (asynchronous)", "0"),
        ("ddp", {}, "ddp", "0 (synchronous)", ""),
        ("local", {}, "local", "", ""),
    ],
)
def test_the_mode_of_a_job(strategy, fields, strategy_text, staleness, prefetch):
    found = mode_of(make_job(strategy, **fields), workers=2, shards=3, codecs="float32")
    assert (found.strategy, found.staleness, found.prefetch) == (strategy_text, staleness, prefetch)


@pytest.mark.parametrize(
    ("figures", "warns"),
    [
        ({"auc": 0.7, "ne": 0.9}, False),
        ({"ne": 1.0}, False),
        ({"hr@10": 0.5}, False),
        ({"ne": 1.01, "calibration": 3.0}, True),
        ({"ne": math.inf}, True),
        ({"ne": math.nan, "logloss": 0.1, "samples": 10.0}, True),  # labels of one class
        ({"ne": math.nan, "logloss": math.nan, "samples": 10.0}, True),
        ({"ne": math.nan, "samples": 0.0}, True),
    ],
)
def test_a_model_worse_than_the_mean_label_is_warned_of(figures, warns):
    assert (first_warning(figures, "valid", 5) is not None) == warns


def bare_report(observers=(), splits=("valid", "test"), group=None):
    """A report of one worker that has trained nothing."""
    strategy = SimpleNamespace(
        stats=ClientStats(skipped_rows=8), predicted=lambda moved: {}, expired_leases=lambda: 0,
        staleness_seen=lambda: (), table_rows=lambda: {}, codecs=lambda: "", num_shards=0,
    )  # fmt: skip
    meter = Throughput(strategy, 2)
    job = make_job(data={"reader": "clicks"}, train={"samples": 1000})
    data = SimpleNamespace(splits=splits)
    return Report(job, data, strategy, group or WorkerGroup(), meter, observers), meter


def test_the_first_evaluation_alone_is_warned_of_on_the_split_that_decides_and_after_a_resume_none(tmp_path):
    log = JsonLog(tmp_path)
    report, _ = bare_report([log])

    def evaluate(to, ne, step):
        figures = {"valid": {"auc": 0.5, "ne": ne}, "test": {"auc": 0.5, "ne": 9.0}}
        to.evaluated(figures, step=step, epoch=1, improved=step == 1, seconds=0.0)

    evaluate(report, 2.0, 1)
    evaluate(report, 2.0, 2)
    result = report.finished(0, step=2, epoch=1, stopped_early=False)
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [len(line["warnings"]) for line in lines] == [1, 0, 1]
    assert (result.evaluations, len(result.warnings)) == (2, 1)
    resumed, _ = bare_report([log])
    resumed.load_state_dict(report.state_dict())
    evaluate(resumed, 2.0, 3)
    assert json.loads(log.path.read_text().splitlines()[-1])["warnings"] == []
    assert resumed.finished(0, step=2, epoch=1, stopped_early=False).evaluations == 3
    good, _ = bare_report([log])
    evaluate(good, 0.9, 1)
    assert json.loads(log.path.read_text().splitlines()[-1])["warnings"] == []


WAITS = [
    ({}, {}, Waited(0.19, 0.19, 0.19), []),
    ({}, {}, Waited(shards=0.21), ["train.prefetch"]),
    ({"prefetch": 1}, {}, Waited(shards=0.9), ["shards: 4"]),  # what it has already is not proposed
    ({"staleness": 0}, {}, Waited(shards=0.9), ["shards: 4"]),  # prefetch 1 would be refused
    ({"staleness": 4}, {"embedding": {"cache": {"staleness": 4}}}, Waited(shards=0.9), ["shards: 4"]),  # likewise
    ({"staleness": 4}, {"embedding": {"cache": {"staleness": 3}}}, Waited(shards=0.9), ["train.prefetch: 1"]),
    ({"staleness": 0}, {}, Waited(workers=0.3), ["train.staleness"]),
    ({}, {"dense": {"mode": "ddp"}}, Waited(workers=0.3), ["dense.mode"]),
    ({}, {}, Waited(data=0.3), ["data.loader_processes: 1"]),
    ({}, {"data": {"reader": "clicks", "loader_processes": 1}}, Waited(data=0.3), ["Parquet"]),
    (
        {},
        {"data": {"reader": "ray", "train": "mine:rows"}, "features": {"user": {}, "price": {"type": "number"}}},
        Waited(data=0.3),
        ["data.reader tabular"],
    ),
    ({}, {}, Waited(0.3, 0.3, 0.3), ["train.prefetch", "train.staleness", "data.loader_processes: 1"]),
]


@pytest.mark.parametrize(("train", "fields", "shares", "named"), WAITS)
def test_a_long_wait_is_answered_with_what_helps(train, fields, shares, named):
    sections = {"data": {"reader": "clicks", "loader_processes": 0}, **fields}
    lines = waiting_advice(make_job(train={"samples": 1000, **train}, **sections), 2, shares)
    assert len(lines) == len(named)
    assert all(name in line for name, line in zip(named, lines, strict=True))
    assert ("train.prefetch" in "".join(lines)) == any("train.prefetch" in name for name in named)


@pytest.mark.parametrize(
    ("seen", "shown"),
    [
        ((7, 0, 0), None),
        ((50, 49, 0, 1, 0), "median 0, p99 1, at most 3 updates"),
        ((49, 49, 0, 2), "median 1, p99 3, at most 3 or more updates"),
    ],
)
def test_the_table_says_how_stale_pushes_were_where_they_were(seen, shown):
    assert rows_of(staleness_seen=seen).get("staleness") == shown


def test_the_log_is_one_json_object_per_line_flushed_at_once(tmp_path):
    log = JsonLog(tmp_path / "new" / "folder")
    log.started(PLAN)
    assert json.loads(log.path.read_text())["record"] == "config"  # before close: flushed
    log.close()
    again = JsonLog(tmp_path / "new" / "folder")
    show(again)
    records = [json.loads(line) for line in again.path.read_text().splitlines()]
    assert [r["record"] for r in records] == ["config", "config", "train", "eval", "train", "result"]
    config, _, train, evaluation, _, result = records
    assert config["job"] == {"model": {"name": "fm"}}
    assert set(config["versions"]) == {"embershard", "torch", "numpy"}
    assert (train["step"], train["loss"], train["wait_share"]) == (5, 0.5, 0.25)
    assert evaluation["figures"]["valid"]["auc"] == 0.75
    assert evaluation["figures"]["test"]["auc"] is None  # NaN is no JSON
    assert result["table_rows"] == {"embedding": 4321, "dense": 2}


def test_tensorboard_gets_every_figure(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoardLog.open(tmp_path)
    show(board)
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert {"train/loss", "train/samples_per_second", "valid/auc", "valid/logloss"} <= set(events.Tags()["scalars"])
    assert [(e.step, e.value) for e in events.Scalars("valid/auc")] == [(500, 0.75)]


def test_the_meter_counts_no_pauses_and_what_training_waits_for(make_session, monkeypatch):
    session, now = make_session(1), [100.0]
    monkeypatch.setattr("embershard.worker.reporting.throughput.time.perf_counter", lambda: now[0])
    meter = Throughput(session, 2)

    def train(seconds, waited, workers=0.0, data=0.0):
        now[0] += seconds
        session._waited += waited
        session._waited_for_workers += workers
        session._waited_for_data += data
        session.client.connections.stats.wait_seconds += 7.0  # of threads that pull ahead
        meter.add(10, 0.5)

    meter.resume(0)
    train(1.0, 0.25, workers=0.125, data=0.0625)
    assert meter.due()
    first = meter.interval(1, 1, 1.0)
    assert (first.samples, first.samples_per_second, first.wait_share) == (20, 20.0, 0.25)
    assert (first.wait_shards, first.wait_workers, first.wait_data) == (0.0625, 0.125, 0.0625)
    train(0.5, 0.5)
    meter.pause(2)
    now[0] += 50.0  # an evaluation
    session._waited += 9.0
    meter.resume(2)
    assert not meter.due()
    train(0.5, 0.0)
    second = meter.interval(3, 1, 1.0)
    assert (second.samples_per_second, second.wait_share, second.seconds) == (40.0, 0.5, 52.0)
    assert (second.wait_shards, second.wait_workers, second.wait_data) == (0.5, 0.0, 0.0)
    assert (meter.trained, meter.waited, meter.samples) == (2.0, Waited(0.5625, 0.125, 0.0625), 30)
    again = Throughput(session, 2)
    again.load_state_dict(meter.state_dict())
    assert again.waited == meter.waited
    again.load_state_dict({**meter.state_dict(), "all_samples": 61})
    assert again.all_samples == 61  # which two workers cannot have trained alike


def test_batches_that_the_training_thread_makes_are_waited_for_and_others_only_as_the_session_says(
    make_session, monkeypatch
):
    session, now = make_session(1), [100.0]
    monkeypatch.setattr("embershard.worker.reporting.throughput.time.perf_counter", lambda: now[0])
    meter = Throughput(session, 1)

    def slow():
        for number in range(3):
            now[0] += 1.0
            yield number

    meter.resume(0)
    assert list(meter.timed(slow())) == [0, 1, 2]
    with ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(lambda: list(meter.timed(slow()))).result() == [0, 1, 2]
    meter.pause(3)
    assert (meter.trained, meter.waited) == (6.0, Waited(data=3.0))


def test_the_meter_gives_bytes_per_step_without_those_of_evaluations(make_session):
    session = make_session(1)
    spec = TableSpec(name="items", dim=4, optimizer=SGD(lr=1.0))
    session.client.declare(spec)
    meter = Throughput(session, 1)

    def pull(count):
        session.client.pull([(spec.name, make_route(np.arange(count), spec.space_key, session.placement))])

    pull(100)  # before training
    meter.resume(7)  # a checkpoint's steps were another process's
    pull(20)
    meter.pause(9)
    pull(500)  # an evaluation
    meter.resume(9)
    pull(40)
    meter.pause(10)
    found = {(part.direction, part.part): (part.wire, part.raw) for part in meter.bytes_per_step({})}
    assert found["pull", "rows"] == (16 * 20, 16 * 20)
    assert found["pull", "ids"] == (8 * 20, 8 * 20)


def test_the_samples_of_all_workers_follow_their_number(make_session):
    meter = Throughput(make_session(1), 2)
    meter.resume(0)
    meter.add(10, 0.5)
    assert meter.all_samples == 20
    assert meter.interval(1, 1, 1.0).samples == 20
    meter.workers = 5
    meter.add(10, 0.5)
    assert meter.interval(2, 1, 1.0).samples == 70
    meter.workers = 1
    meter.add(10, 0.5)
    assert meter.interval(3, 1, 1.0).samples == 80
    meter.agree(WorkerGroup(), {0: 25, 3: 7})  # the fourth worker has left
    assert meter.all_samples == 37
    meter.agree(WorkerGroup(), {3: 6})
    assert meter.all_samples == 37


class WithLateCounter(WorkerGroup):
    """This worker, and one whose counters began when three quarters were over."""

    def collect(self, values):
        return {0: values, 1: (values / 4).astype(values.dtype)}


def test_the_training_time_is_that_of_the_worker_that_counted_longest():
    report, meter = bare_report(splits=(), group=WithLateCounter())
    meter.samples, meter.trained, meter.waited = 800, 40.0, Waited(5.0, 3.0, 2.0)
    result = report.finished(0, step=16, epoch=1, stopped_early=False)
    assert (result.train_seconds, result.samples, result.samples_per_second) == (40.0, 1000, 25.0)
    assert result.wait_share == pytest.approx(0.25)
    assert (result.wait_shards, result.wait_workers, result.wait_data) == pytest.approx((0.125, 0.075, 0.05))
    assert result.skipped_rows == 10


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        (Schedule(), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (Schedule(warmup_steps=2), [0.5, 1.0, 1.0, 1.0, 1.0]),
        (Schedule(shape="linear", total_steps=4), [1.0, 0.75, 0.5, 0.25, 0.0]),
        (Schedule(shape="linear", total_steps=4, end=0.5, warmup_steps=2), [0.5, 1.0, 1.0, 0.75, 0.5]),
        (Schedule(shape="cosine", total_steps=4), [1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0.0]),
        (Schedule(shape="linear", total_steps=2, end=0.2), [1.0, 0.6, 0.2, 0.2, 0.2]),
        (Schedule(shape="step", every=2, factor=0.1), [1.0, 1.0, 0.1, 0.1, 0.01]),
        (Schedule(shape="step", every=2, factor=0.1, warmup_steps=1), [1.0, 1.0, 1.0, 0.1, 0.1]),
        (Schedule(shape="plateau", factor=0.5), [1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_schedules(schedule, want):
    assert [schedule.scale(step) for step in range(5)] == pytest.approx(want)


def test_a_plateau_is_patience_evaluations_in_a_row():
    schedule = Schedule(shape="plateau", factor=0.5, patience=2)
    scales = []
    for improved in (True, False, True, False, False, False, False, False):
        schedule.observe(improved)
        scales.append(schedule.scale(0))
    assert scales == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]


def test_the_best_knows_which_way_is_better():
    best = Best(min_delta=0.01)
    assert [best.observe(v) for v in (math.nan, 0.5, 0.505, 0.52, 0.4)] == [False, True, False, True, False]
    assert (best.value, best.worse_in_a_row) == (0.52, 1)
    best = Best(lower_is_better=True)
    assert [best.observe(v) for v in (0.5, 0.6, 0.4)] == [True, False, True]


def train(steps: int) -> None:
    begin_step()
    for _ in range(steps):
        with span("forward"), span("wait"):
            pass
        with span("backward"):
            pass
        end_step()


def test_a_profile_splits_the_steps_behind_warm_up_and_trace(tmp_path):
    with Profile(tmp_path) as profile:
        train(WARM_UP_STEPS + TRACED_STEPS + 7)
    written = json.loads((tmp_path / "profile.json").read_text())
    assert written["steps"] == 7
    assert set(written["parts"]) == {"forward", "wait", "backward", "other"}
    assert sum(part["share"] for part in written["parts"].values()) == pytest.approx(1)
    assert written["overlapped"] == {}
    assert str(tmp_path / "trace.json") in profile.summary()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = Counter(event.get("name") for event in events if event.get("cat") == "user_annotation")
    assert {ranges[name] for name in ("forward", "wait", "backward")} == {TRACED_STEPS}

    with Profile(tmp_path) as short:
        train(WARM_UP_STEPS + 3)
    assert "too few" in short.summary()
