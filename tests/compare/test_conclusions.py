"""What is said of made-up runs whose answer is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from embershard.compare.conclusions import compared_with
from embershard.compare.results import Results, Verdict, read_results, write_results

Make = Callable[..., Results]


def verdict(results: Results, arm: str) -> Verdict:
    return next(verdict for verdict in results.verdicts if verdict.arm == arm)


def test_an_arm_as_good_and_faster_on_slow_links_paid(make_results: Make):
    results = make_results()
    found = verdict(results, "int8")
    assert found.outcome == "paid"
    assert found.quality == "equivalent"
    assert found.faster_at == ("100mbit", "1gbit")
    assert found.bytes_ratio == pytest.approx(3.49, abs=0.01)
    assert found.best_at == "100mbit"
    assert found.from_bandwidth is not None
    assert found.from_bandwidth > 1e9


def test_an_arm_that_lost_quality_did_not_pay_however_fast(make_results: Make):
    found = verdict(make_results(), "topk:0.01")
    assert found.quality == "worse"
    assert found.best_speed_up is not None
    assert found.best_speed_up > 4
    assert found.outcome == "did not pay"
    assert found.from_bandwidth is None


def test_an_arm_that_is_nowhere_faster_did_not_pay(make_results: Make):
    found = verdict(make_results(("none", "int8"), bandwidths=("unlimited",)), "int8")
    assert found.quality == "equivalent"
    assert found.outcome == "did not pay"


def test_one_seed_decides_nothing_and_says_so(make_results: Make):
    results = make_results(seeds=1)
    assert {verdict.outcome for verdict in results.verdicts} == {"undecided"}
    assert all("One seed gives no interval" in verdict.reasons[0] for verdict in results.verdicts)
    assert all(quality.difference.low is None and quality.p_equivalent is None for quality in results.quality)


def test_every_codec_is_compared_with_fp16s_too(make_results: Make):
    results = make_results(("none", "fp16s", "int8"))
    assert compared_with(results) == [
        ("none", "none"), ("fp16s", "none"), ("int8", "none"), ("int8", "fp16s"),
    ]  # fmt: skip
    assert {(speed.arm, speed.against) for speed in results.speeds} == set(compared_with(results))


def test_failed_runs_are_in_no_figure_and_counted(make_results: Make):
    results = make_results(failed=("int8",))
    found = verdict(results, "int8")
    assert found.failed_runs == 3  # without limit, and on two links
    assert found.difference is not None
    assert found.difference.seeds == 4
    assert found.reasons[0] == "3 of its runs failed, and are in no figure."
    assert verdict(results, "fp16s").difference.seeds == 5  # type: ignore[union-attr]


def test_an_arm_of_which_all_runs_failed_is_said_to_be_unknown(make_results: Make):
    results = make_results(("none", "int8"), seeds=2, failed=("int8",))
    runs = tuple(run for run in results.runs if run.arm != "int8" or not run.ok)
    from embershard.compare.conclusions import conclude

    found = verdict(conclude(results.model_copy(update={"runs": runs})), "int8")
    assert found.outcome == "undecided"
    assert "nothing can be said" in found.reasons[1]


def test_an_arm_is_judged_at_its_own_best_rate(make_results: Make):
    results = make_results(multiples=(0.5, 1.0, 2.0))
    assert results.tuned["int8"] == 2.0
    assert verdict(results, "int8").rate == "tuned"
    rates = {(quality.rate, quality.arm) for quality in results.quality if quality.metric == "auc"}
    assert rates >= {("fixed", "int8"), ("tuned", "int8")}


def test_lower_is_better_for_logloss(make_results: Make):
    found = [q for q in make_results().quality if (q.arm, q.against, q.metric) == ("topk:0.01", "none", "logloss")]
    assert not found[0].higher_is_better
    assert found[0].difference.seeds == 5


def test_without_measured_bytes_the_formula_is_unknown(make_results: Make):
    results = make_results(measured=False)
    assert {even.formula_says for even in results.break_even} == {"unknown"}
    assert {even.measured_says for even in results.break_even} <= {"value", "always", "never", "unknown"}
    assert not results.volumes


def test_results_come_back_from_their_file(make_results: Make, tmp_path):
    results = make_results(failed=("int8",), multiples=(1.0, 2.0))
    assert read_results(write_results(results, tmp_path)) == results
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
