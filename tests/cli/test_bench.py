"""`embershard bench`: what it measures, what it refuses, and that it leaves nothing behind."""

import json
import os
import signal
import subprocess

import numpy as np
import pytest
from typer.testing import CliRunner

from embershard.benchmark.fleet import BenchFailed, Fleet
from embershard.benchmark.ids import ZipfIds
from embershard.benchmark.measure import steps_within
from embershard.benchmark.settings import Lap, Order, PullPush
from embershard.benchmark.sweep import Axis, Sweep, plan
from embershard.cli import app as cli
from embershard.cli import bench
from harness.eventually import eventually
from harness.processes import EMBERSHARD, marked

SMALL = ("--rows", "1000", "--dim", "4", "--warmup", "1", "--steps", "3", "--rounds", "2")


def run(*words, code=0):
    done = CliRunner().invoke(cli.app, ["bench", *words])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def draw(seed, rows, skew):
    return ZipfIds(rows, skew).draw(np.random.default_rng(seed), (20_000,))


@pytest.mark.parametrize("rows", [1, 2, 4097, 3_000_000])
@pytest.mark.parametrize("skew", [0.0, 0.9, 1.0, 1.2, 10.0])
def test_ids_stay_within_the_id_space_and_are_the_same_for_the_same_seed(rows, skew):
    ids = draw(0, rows, skew)
    assert ids.min() >= 0
    assert ids.max() < rows
    assert np.array_equal(draw(0, rows, skew), ids)
    assert np.array_equal(draw(1, rows, skew), ids) == (rows == 1)


def test_shares_follow_the_law():
    for skew in (0.0, 1.0, 1.5):
        counts = np.sort(np.bincount(draw(0, 4, skew), minlength=4))[::-1] / 20_000
        law = np.arange(1, 5) ** -skew
        assert np.allclose(counts, law / law.sum(), atol=0.02)  # 20,000 draws: a standard deviation of 0.004


def test_speed_counts_what_was_done_while_all_workers_ran():
    lap = Lap(start=0.0, ends=[1.0, 2.0, 4.0], cpu=0.0, parts={}, bytes=0, rows=0)
    assert steps_within(lap, 0.0, 4.0) == 3
    assert steps_within(lap, 0.5, 3.0) == 0.5 + 1 + 0.5


def test_each_curve_of_a_sweep_changes_its_own_setting_only():
    curves = plan(Sweep(shards=(1, 2), ids=(8, 16)))
    assert set(curves) == {"rows", "messages", "shards", "workers", "batch"}
    for name, changed in {"rows": {"rows"}, "messages": {"shards", "ids"}, "shards": {"shards"}}.items():
        first, *others = (point.model_dump() for point in curves[name])
        assert all({key for key in first if first[key] != other[key]} <= changed for other in others)
    assert len(curves["messages"]) == 4
    assert set(plan(Sweep(axes=(Axis.BATCH,)))) == {"batch"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ps", "--optimizer", "magic"], "there is no optimizer 'magic' (known: sgd, adagrad"),
        (["ps", "--transport", "local", "--workers", "2"], "workers must be 1, not 2"),
        (["ps", "--transport", "pigeon"], "'pigeon' is not one of"),
        (["ps", "--dim", "70000"], "--dim: Input should be less than or equal to 65536; got 70000"),
        (["ps", "--ps", "127.0.0.1:1", "--shards", "2"], "leave out --shards and --transport"),
        (["train", "--prefetch", "-1"], "--prefetch must be a staleness of 0 or more, or off; got '-1'"),
        (["scale", "--batch", "1,b"], "--batch must be numbers separated by commas, got '1,b'"),
        (["scale", "--workers", "1,9999"], "--workers: Input should be less than or equal to 1024; got 9999"),
    ],
)
def test_wrong_options_say_what_is_wrong(words, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert said in run(*words, code=2)


@pytest.mark.integration
def test_ps_writes_what_it_measured(tmp_path):
    words = ("--transport", "local", "--ids", "500", "--skew", "0", "--fill", "--output", str(tmp_path))
    run("ps", *SMALL, *words)
    found = json.loads((tmp_path / "ps.json").read_text())
    assert set(found["parts"]) == {"step", "route", "pull", "push"}
    assert (found["settings"]["ids"], found["settings"]["shards"]) == (500, 2)
    # 500 uniform ids of 1000: 394 unique ones are expected; the very same in every run
    assert 360 < found["rows_per_step"] < 420
    assert found["conditions"]["cores"] >= 1
    # 8 bytes of id once: a push names its route; 4 floats of row, and 4 of gradient
    per_step = found["mb_per_second"] * 1e6 / found["steps_per_second"]
    assert per_step == pytest.approx(found["rows_per_step"] * (8 + 16 + 16), rel=0.02)
    picture = (tmp_path / "ps.svg").read_text()
    assert "<text" in picture  # not outlines
    assert "<dc:date>" not in picture


@pytest.mark.integration
@pytest.mark.parametrize("transport", ["stream", "tcp", "grpc", "rpc"])
def test_shards_that_it_starts_are_reached_by_any_transport(transport, tmp_path):
    words = ("--transport", transport, "--shards", "1", "--ids", "50", "--output", str(tmp_path))
    run("ps", *SMALL, *words)
    assert json.loads((tmp_path / "ps.json").read_text())["settings"]["transport"] == transport


@pytest.mark.integration
@pytest.mark.parametrize("prefetch", ["off", "1"])
def test_train_compares_itself_with_torch(prefetch, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "can_draw", lambda: False)
    words = ("--transport", "local", "--batch", "16", "--prefetch", prefetch, "--output", str(tmp_path))
    assert "no chart: it needs matplotlib" in run("train", *SMALL, *words)
    assert not (tmp_path / "train.svg").exists()
    found = json.loads((tmp_path / "train.json").read_text())
    assert found["ratio_to_torch"] > 0
    assert {"step", "forward", "backward", "wait", "push"} <= set(found["parts"])
    assert ("route" in found["overlapped"]) == (prefetch != "off")


@pytest.mark.integration
def test_a_worker_that_cannot_go_on_ends_the_bench_with_its_last_lines():
    order = Order(settings=PullPush(), addresses=(), rank=0)
    with pytest.raises(BenchFailed, match=r"worker 0 of the bench ended with exit code 1.*\n(.*\n)*.*name every shard"):
        Fleet([order]).__enter__()


@pytest.mark.integration
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_process_is_left_behind(number, code, tmp_path):
    command = [*EMBERSHARD, "bench", "ps", "--workers", "2", "--steps", "1000000"]
    env, mark = {**os.environ, "EMBERSHARD_TEST_RUN": str(tmp_path)}, str(tmp_path)
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as started:
        try:
            assert eventually(lambda: len(marked(mark)) >= 5)  # the command, two shards, two workers
            started.send_signal(number)
            assert started.wait(250) == code
            assert eventually(lambda: not marked(mark))
        finally:
            for process in marked(mark):
                process.kill()
