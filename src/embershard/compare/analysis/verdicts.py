"""Did it pay: one verdict per arm, with its reasons in plain words."""

from __future__ import annotations

from collections.abc import Iterator

from embershard.compare.results import UNLIMITED, BreakEven, Estimate, Outcome, Quality, Results, Speed, Verdict
from embershard.compare.units import link_text, metric_name

NO_GAIN = 1.05  # a speed-up whose interval stays below is none that anyone would change a job for
KEPT = ("equivalent", "not worse", "better")


def verdicts_of(results: Results) -> tuple[Verdict, ...]:
    """Of every arm but the baseline; the results' estimates are there already."""
    return tuple(_verdict(results, arm.label) for arm in results.arms if arm.label != results.baseline)


def _verdict(results: Results, arm: str) -> Verdict:
    quality = _quality(results, arm)
    speeds = [speed for speed in results.speeds if (speed.arm, speed.against) == (arm, results.baseline)]
    best = max(speeds, key=lambda speed: speed.speed_up.mean, default=None)
    failed = sum(run.arm == arm and not run.ok for run in results.runs)
    sent = {label: sum(v.sent for v in results.volumes if v.arm == label) for label in (arm, results.baseline)}
    outcome = _outcome(quality, speeds, has_lost(results, arm, quality))
    return Verdict(
        arm=arm,
        outcome=outcome,
        quality="undecided" if quality is None else quality.verdict,
        rate="fixed" if quality is None else quality.rate,
        difference=None if quality is None else quality.difference,
        faster_at=tuple(speed.bandwidth for speed in speeds if speed.verdict == "faster"),
        slower_at=tuple(speed.bandwidth for speed in speeds if speed.verdict == "slower"),
        undecided_at=tuple(speed.bandwidth for speed in speeds if speed.verdict == "same or undecided"),
        best_speed_up=None if best is None else best.speed_up.mean,
        best_at="" if best is None else best.bandwidth,
        bytes_ratio=sent[results.baseline] / sent[arm] if all(sent.values()) else None,
        from_bandwidth=_from_bandwidth(results, arm) if outcome == "paid" else None,
        failed_runs=failed,
        reasons=tuple(_reasons(results, quality, speeds, failed)),
    )


def _quality(results: Results, arm: str) -> Quality | None:
    """Of the metric that decides: each arm at its own best rate, where these were looked for."""
    found = {
        judged.rate: judged
        for judged in results.quality
        if (judged.arm, judged.against, judged.metric) == (arm, results.baseline, results.metric)
    }
    return found.get("tuned", found.get("fixed"))


def has_lost(results: Results, arm: str, quality: Quality | None) -> bool:
    """Whether runs that its quality is to be judged by failed: those that are left may be the lucky ones."""
    multiple = results.tuned.get(arm, 1.0) if quality is not None and quality.rate == "tuned" else 1.0
    key = (arm, "quality", multiple, False)
    return any((run.arm, run.kind, run.multiple, run.ok) == key for run in results.runs)


def _outcome(quality: Quality | None, speeds: list[Speed], lost: bool) -> Outcome:
    if quality is not None and quality.verdict == "worse":
        return "did not pay"
    if speeds and all((speed.speed_up.high or NO_GAIN) < NO_GAIN for speed in speeds):
        return "did not pay"
    faster = any(speed.verdict == "faster" for speed in speeds)
    return "paid" if faster and not lost and quality is not None and quality.verdict in KEPT else "undecided"


def _from_bandwidth(results: Results, arm: str) -> float | None:
    found: list[BreakEven] = [
        even for even in results.break_even if (even.arm, even.against) == (arm, results.baseline)
    ]
    return found[0].measured if found else None


def _reasons(results: Results, quality: Quality | None, speeds: list[Speed], failed: int) -> Iterator[str]:
    if failed:
        yield f"{failed} of its runs failed, and are in no figure."
    if quality is None or not speeds:
        yield "It has no run that ended well beside one of the baseline, so nothing can be said of it."
        return
    if quality.difference.seeds < 2:
        yield "One seed gives no interval: what follows may be chance."
    yield _of_quality(quality)
    links = {link.label: link_text(link) for link in results.bandwidths}
    for speed in speeds:
        where = "Without limit" if speed.bandwidth == UNLIMITED else f"At {links[speed.bandwidth]}"
        yield f"{where} it is {speed.speed_up.mean:.2f} times as fast{_interval(speed.speed_up, '.2f')}."


def _of_quality(quality: Quality) -> str:
    name, rate = metric_name(quality.metric), " at its own best learning rate" if quality.rate == "tuned" else ""
    moved = f"{name} differs by {quality.difference.mean:+.5f}{_interval(quality.difference, '+.5f')}{rate}"
    margin = "" if quality.margin is None else f" of {quality.margin:g}"
    said = {
        "equivalent": f"within the margin{margin}",
        "not worse": f"not worse than the margin{margin} allows",
        "better": "which is better",
        "worse": "which is worse",
        "undecided": f"too uncertain to hold it to the margin{margin}" if margin else "no difference that shows",
    }
    return f"{moved}: {said[quality.verdict]}."


def _interval(found: Estimate, form: str) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" (95 % interval {found.low:{form}} to {found.high:{form}})"
