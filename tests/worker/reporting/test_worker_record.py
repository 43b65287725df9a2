"""Each worker says in the run's folder where its steps go."""

import json
import time

from embershard.proto.timing import Recorder, begin_step, end_step, span
from embershard.worker.reporting.records import Interval, StepBytes
from embershard.worker.reporting.worker_record import WorkerRecord, worker_records

INTERVAL = Interval(
    step=3,
    epoch=1,
    samples=30,
    seconds=1.0,
    loss=0.5,
    samples_per_second=20.0,
    wait_share=0.0,
    lr_scale=1.0,
    wait_workers=0.25,
)


def test_the_parts_of_the_last_steps_add_up_to_the_step(tmp_path):
    with Recorder():
        begin_step()
        for _ in range(3):
            with span("forward"):
                time.sleep(0.002)
            end_step()
        WorkerRecord(tmp_path, 4).write(INTERVAL, 10.0, [StepBytes("push", "rows", 8.0, 32.0, None)])
    record = worker_records(tmp_path)[4]
    assert record["step"] == 3
    assert record["parts_ms"]["forward"] >= 2
    assert abs(sum(record["parts_ms"].values()) - record["step_ms"]) < 1e-6
    assert record["waits"]["workers"] == 0.25
    assert record["bytes"][0]["wire"] == 8.0


def test_a_disk_that_refuses_it_disturbs_nobody(tmp_path):
    (tmp_path / "workers").write_text("no folder")
    WorkerRecord(tmp_path, 0).write(INTERVAL, 10.0, [])
    assert worker_records(tmp_path) == {}


def test_what_is_no_record_is_left_out(tmp_path):
    (tmp_path / "workers").mkdir()
    for name, text in (("0", "{"), ("1", "[]"), ("2", json.dumps({"worker": "2"}))):
        (tmp_path / "workers" / f"{name}.json").write_text(text)
    assert worker_records(tmp_path) == {}
