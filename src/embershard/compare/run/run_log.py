"""Read the log of a run (worker/reporting/log.py) while it grows, and its figures at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embershard.compare.results import CurvePoint, MeanStepBytes, Metrics, RunFigures, StepPart
from embershard.compare.run.plan import SKIPPED_SHARE

_Line = dict[str, Any]
_WAITS = ("wait_share", "wait_shards", "wait_workers", "wait_data")


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Hold how far a run is."""

    share: float | None  # of its samples; None where nobody knows how many there are
    text: str  # "epoch 3, 45,120 samples/s, auc 0.9812"


@dataclass(slots=True)
class RunLog:
    """Reads log.jsonl from an offset on."""

    path: Path
    offset: int
    _lines: list[_Line] = field(default_factory=list)

    @staticmethod
    def after(path: Path) -> RunLog:
        """Open a log at its present end."""
        return RunLog(path, path.stat().st_size if path.exists() else 0)

    def read(self) -> bool:
        """Read the new whole lines; tell whether there were any."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        self._lines += [json.loads(line) for line in whole.splitlines() if line.strip()]
        return bool(whole)

    @property
    def trouble(self) -> str:
        """The reason why the run does not count; empty where it does."""
        result = self._last("result")
        if not result:
            return "it wrote no result"
        lost = result.get("expired_leases", 0)
        return f"workers were evicted ({lost}), so others trained without them" if lost else ""

    def progress(self) -> RunProgress:
        """Return how far the run is."""
        config, interval, evaluation = (self._last(record) for record in ("config", "train", "eval"))
        if not interval:
            return RunProgress(0.0, "begins to train" if config else "starting")
        total, metric = config.get("total_samples"), config.get("metric", "")
        figure = evaluation.get("figures", {}).get(config.get("split"), {}).get(metric)
        words = [f"epoch {interval['epoch']}", f"{interval['samples_per_second'] or 0:,.0f} samples/s"]
        words += [f"{metric} {figure:.4f}"] if figure is not None else []
        return RunProgress(min(1.0, interval["samples"] / total) if total else None, ", ".join(words))

    def figures(self) -> RunFigures:
        """Collect the figures of a run that ended well."""
        config, result, evaluations = self._last("config"), self._last("result"), self._all("eval")
        judged = _judged_split(list(result["figures"]))
        speed, waits = _speed(self._all("train"), result)
        improved = [record["samples"] for record in evaluations if record["improved"]]
        return RunFigures(
            steps=result["steps"],
            samples=result["samples"],
            train_seconds=result["train_seconds"],
            samples_per_second=speed,
            wait_share=waits["wait_share"],
            wait_shards=waits["wait_shards"],
            wait_workers=waits["wait_workers"],
            wait_data=waits["wait_data"],
            metrics=result["figures"].get(judged, {}),
            decided=result["figures"].get(result["split"], {}).get(result["metric"]),
            best_samples=improved[-1] if improved else result["samples"],
            stopped_early=result["stopped_early"],
            skipped_rows=result.get("skipped_rows", 0),
            curve=tuple(_curve(evaluations)),
            reliability=_reliability(evaluations, judged),
            bytes=tuple(_bytes(result)),
            step=tuple(_step(result)),
            reachable=result["reachable"].get(judged, {}),
            splits=(judged, result["split"] or ""),
            versions={**config["versions"], "python": config["python"]},
        )

    def _all(self, record: str) -> list[_Line]:
        return [line for line in self._lines if line["record"] == record]

    def _last(self, record: str) -> _Line:
        return next((line for line in reversed(self._lines) if line["record"] == record), {})


def _judged_split(splits: Sequence[str]) -> str:
    """The split on which arms are judged: test, or else the first."""
    return "test" if "test" in splits else next(iter(splits), "")


def _speed(intervals: Sequence[_Line], result: _Line) -> tuple[float | None, dict[str, float | None]]:
    """Compute samples per second of all workers and the shares of waiting, without the beginning of the run."""
    first = SKIPPED_SHARE * result["steps"]
    seconds = samples = 0.0
    waited = dict.fromkeys(_WAITS, 0.0)
    before = began = 0
    for record in intervals:
        new, before = record["samples"] - before, record["samples"]
        is_beginning, began = began < first, record["step"]  # of a short run an interval may be a third
        if is_beginning or new <= 0 or not record["samples_per_second"]:
            continue
        took = new / record["samples_per_second"]
        samples, seconds = samples + new, seconds + took
        waited = {name: waited[name] + took * (record.get(name) or 0.0) for name in _WAITS}
    if not seconds:  # a run of a second or two
        return result["samples_per_second"], {name: result.get(name) for name in _WAITS}
    return samples / seconds, {name: waited[name] / seconds if name in result else None for name in _WAITS}


def _curve(evaluations: Sequence[_Line]) -> Iterator[CurvePoint]:
    evaluating = 0.0
    for record in evaluations:
        evaluating += record["evaluation_seconds"]
        figures: dict[str, Metrics] = record["figures"]
        seconds = max(0.0, record["seconds"] - evaluating)
        yield CurvePoint(samples=record["samples"], seconds=seconds, figures=figures)


def _reliability(evaluations: Sequence[_Line], split: str) -> dict[str, tuple[tuple[float, float, int], ...]]:
    """The reliability of the best evaluation on a split, by label; that of the only label has no name."""
    best = next((record for record in reversed(evaluations) if record["improved"]), {})
    found = {}
    for name, bins in best.get("reliability", {}).items():
        own, _, label = name.partition(" ")
        if own == split:
            found[label] = tuple((mean, rate, samples) for mean, rate, samples in bins)
    return found


def _bytes(result: _Line) -> Iterator[MeanStepBytes]:
    for part in result.get("bytes", ()):
        yield MeanStepBytes(
            direction=part["direction"],
            part=part["part"],
            sent=part["wire"],
            raw=part["raw"],
            predicted=part["predicted"],
        )


def _step(result: _Line) -> Iterator[StepPart]:
    return (StepPart(**part) for part in result.get("step", ()))
