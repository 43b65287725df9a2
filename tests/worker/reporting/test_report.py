"""What a run's result says of several workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embershard.worker.client.connections import ClientStats
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.job.job import Job
from embershard.worker.reporting.report import Report
from embershard.worker.reporting.throughput import Throughput

JOB = Job.model_validate(
    {
        "model": {"name": "fm"},
        "data": {"reader": "clicks"},
        "embedding": {"dim": 4, "optimizer": {"name": "sgd", "lr": 0.1}},
        "train": {"batch_size": 50, "samples": 1000},
    }
)


class WithLateCounter(WorkerGroup):
    """This worker, and one whose counters began when three quarters were over."""

    def collect(self, values: np.ndarray[Any, Any]) -> dict[int, np.ndarray[Any, Any]]:
        return {0: values, 1: (values / 4).astype(values.dtype)}


def test_the_training_time_is_that_of_the_worker_that_counted_longest():
    strategy: Any = SimpleNamespace(
        stats=ClientStats(skipped_rows=8),
        predicted=lambda moved: {},
        expired_leases=lambda: 0,
        staleness_seen=lambda: (),
        table_rows=lambda: {},
    )
    meter = Throughput(strategy, 2)
    meter.samples, meter.trained, meter.waited = 800, 40.0, 10.0
    dataset: Any = SimpleNamespace(splits=())
    report = Report(JOB, dataset, strategy, WithLateCounter(), meter, ())
    result = report.finished(0, step=16, epoch=1, stopped_early=False)
    assert result.train_seconds == 40.0
    assert result.samples == 1000
    assert result.samples_per_second == 25.0
    assert result.wait_share == pytest.approx(0.25)
    assert result.skipped_rows == 10
