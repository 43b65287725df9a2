"""What is said of made-up runs whose answer is known."""

from dataclasses import replace

import numpy as np
import pytest
from report_cases import FP16S, INT8, NONE, TOPK, fake_results
from scipy import stats

from embershard.compare.analysis.conclusions import (
    compared_with,
    conclude,
    has_lost,
    outcome_of,
    quality_verdict,
    speed_verdict,
)
from embershard.compare.analysis.statistics import estimate
from embershard.compare.report.summary import headline, summary
from embershard.compare.report.tables import short_table
from embershard.compare.results import Estimate, Quality, Results, Speed, Verdict, read_results, write_results


def verdict(results: Results, arm: str) -> Verdict:
    return next(verdict for verdict in results.verdicts if verdict.arm == arm)


def between(low: float, high: float) -> Estimate:
    return Estimate(mean=(low + high) / 2, low=low, high=high, seeds=5)


TINY = 1e-9


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.0005 + TINY, 0.0005 - TINY, "equivalent"),
        (0.0001, 0.0005 - TINY, "equivalent"),  # inside the margin counts before better
        (-0.0005 + TINY, -0.0001, "equivalent"),
        (-0.0005 + TINY, 0.0005, "not worse"),  # a bound on the margin is not inside it
        (-0.0005, 0.0005 - TINY, "undecided"),
        (-0.0005, 0.0, "undecided"),
        (-0.0005, -TINY, "worse"),
        (TINY, 0.0005, "better"),
        (0.0, 0.0005, "not worse"),
        (-0.001, 0.001, "undecided"),
        (0.0, 0.0, "equivalent"),
    ],
)
def test_a_verdict_on_a_model_is_read_off_the_interval(low, high, said):
    assert quality_verdict(between(low, high), True, 0.0005) == said
    assert quality_verdict(between(-high, -low), False, 0.0005) == said  # of a metric of which less is better


@pytest.mark.parametrize(
    ("low", "high", "said"), [(-1.0, -TINY, "worse"), (TINY, 1.0, "better"), (-TINY, TINY, "undecided")]
)
def test_without_a_margin_only_0_decides(low, high, said):
    assert quality_verdict(between(low, high), True, None) == said


def test_equivalent_means_that_both_one_sided_t_tests_hold_at_the_level_of_the_interval():
    random, seen = np.random.default_rng(0), set()
    for _ in range(300):
        differences = random.normal(random.uniform(-6e-4, 6e-4), 2e-4, 5)
        tests = [stats.ttest_1samp(differences, -0.0005, alternative="greater"),
                 stats.ttest_1samp(differences, 0.0005, alternative="less")]  # fmt: skip
        equivalent = max(test.pvalue for test in tests) < 0.025
        assert (quality_verdict(estimate(differences.tolist()), True, 0.0005) == "equivalent") == equivalent
        seen.add(equivalent)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1 + TINY, 2.0, "faster"),
        (1.0, 2.0, "same or undecided"),
        (0.5, 1.0, "same or undecided"),
        (0.5, 1 - TINY, "slower"),
    ],
)
def test_a_verdict_on_a_speed_is_read_off_the_interval(low, high, said):
    assert speed_verdict(between(low, high)) == said


def judged(quality: Estimate, *speed_ups: Estimate) -> Results:
    """A comparison of int8 with none, of which only these estimates are known."""
    links = {"100mbit": 1e8, "1gbit": 1e9}
    model = Quality(
        arm="int8", against="none", metric="auc", rate="fixed", value=quality, difference=quality,
        higher_is_better=True, margin=0.0005, verdict=quality_verdict(quality, True, 0.0005),
    )  # fmt: skip
    speeds = [
        Speed(arm="int8", against="none", bandwidth=link, samples_per_second=speed_up, speed_up=speed_up,
              verdict=speed_verdict(speed_up)) for link, speed_up in zip(links, speed_ups, strict=True)
    ]  # fmt: skip
    return fake_results((NONE, INT8), links=links).model_copy(update={"quality": (model,), "speeds": tuple(speeds)})


SAME, WORSE, UNSURE = between(-0.0001, 0.0001), between(-0.002, -0.001), between(-0.002, 0.002)
FASTER, EVEN, SLIGHTLY, SLOWER = between(1.1, 1.2), between(0.9, 1.2), between(1.01, 1.05 - TINY), between(0.8, 0.9)


@pytest.mark.parametrize(
    ("quality", "speed_ups", "said"),
    [
        (SAME, (FASTER, SLOWER), "paid"),
        (SAME, (EVEN, SLOWER), "undecided"),
        (UNSURE, (FASTER, FASTER), "undecided"),
        (WORSE, (FASTER, FASTER), "did not pay"),
        (SAME, (SLOWER, SLOWER), "did not pay"),
        (SAME, (SLIGHTLY, SLOWER), "did not pay"),
        (UNSURE, (SLIGHTLY, SLOWER), "did not pay"),
        (SAME, (between(1.01, 1.05), SLOWER), "paid"),
    ],
)
def test_whether_an_arm_paid_follows_from_the_verdicts(quality, speed_ups, said):
    assert outcome_of(judged(quality, *speed_ups), "int8", "none") == said


def test_an_arm_pays_on_the_links_where_its_interval_leaves_1_out_and_on_no_others():
    """By its means it is faster everywhere; on one link the interval holds 1."""
    kinds = (NONE, FP16S, replace(INT8, codec_ms=-0.05))
    results = fake_results(kinds)
    noisy = {1: 1.2, 2: 0.9, 3: 1.1, 4: 0.95, 5: 1.0}
    runs = tuple(
        run.model_copy(update={"samples_per_second": run.samples_per_second * noisy[run.seed]})
        if (run.arm, run.bandwidth) == ("int8", "unlimited") else run
        for run in results.runs if run.samples_per_second
    )  # fmt: skip
    results = conclude(results.model_copy(update={"runs": runs}))
    speeds = {speed.bandwidth: speed for speed in results.speeds_of("int8", "none")}
    assert all(speed.speed_up.mean > 1 for speed in speeds.values())
    assert speeds["unlimited"].speed_up.low < 1
    found = verdict(results, "int8")
    assert found.outcome == "paid"
    assert found.pays_on == ("100mbit", "1gbit")
    even = results.break_even_of("int8", "none")
    assert (even.measured, even.measured_says) == (None, "unknown")
    row = next(row for row in short_table(results).rows if row[0] == "int8")
    assert row[1:3] == ["paid", "100 Mbit/s, 1 Gbit/s"]
    assert "every measured link" not in " ".join(summary(results))


@pytest.mark.parametrize(("seeds", "cautions"), [(1, True), (2, True), (3, False)])
def test_fewer_than_3_seeds_are_a_caution_in_the_headline(seeds, cautions):
    results = fake_results(seeds=range(1, 1 + seeds))
    assert {verdict.seeds for verdict in results.verdicts} == {seeds}
    assert ("caution" in headline(results)) is cautions


def test_pairs_that_failures_left_count_as_seeds_of_the_caution():
    whole = fake_results((NONE, INT8), seeds=(1, 2, 3))
    for link in ("unlimited", "100mbit"):
        runs = tuple(
            run.model_copy(update={"ok": (run.arm, run.seed, run.bandwidth) != ("none", 1, link)}) for run in whole.runs
        )
        results = conclude(whole.model_copy(update={"runs": runs}))
        assert verdict(results, "int8").seeds == 2
        assert "caution" in headline(results)


def test_an_arm_as_good_and_faster_on_slow_links_paid():
    found = verdict(fake_results(), "int8")
    assert found.outcome == "paid"
    assert found.quality == "equivalent"
    assert found.faster_at == ("100mbit", "1gbit")
    assert found.slower_at == ("unlimited",)
    assert found.bytes_ratio == pytest.approx(3.0, abs=0.2)
    assert found.best_at == "100mbit"
    assert found.pays_on == ("100mbit", "1gbit")
    assert found.seeds == 5


def test_an_arm_that_lost_quality_did_not_pay_however_fast():
    found = verdict(fake_results((NONE, FP16S, replace(TOPK, pull=0.1))), "topk:0.01")
    assert found.quality == "worse"
    assert found.best_speed_up > 3
    assert found.outcome == "did not pay"
    assert found.faster_at
    assert found.pays_on == ()


def test_an_arm_that_is_nowhere_faster_did_not_pay():
    found = verdict(fake_results((NONE, INT8), links={"unlimited": None}), "int8")
    assert found.quality == "equivalent"
    assert found.outcome == "did not pay"


def test_one_seed_decides_nothing_and_says_so():
    results = fake_results(seeds=(1,))
    assert {verdict.outcome for verdict in results.verdicts} == {"undecided"}
    assert all("One seed gives no interval" in verdict.reasons[0] for verdict in results.verdicts)
    assert all(quality.difference.low is None for quality in results.quality)


def test_every_codec_is_compared_with_fp16s_too():
    results = fake_results((NONE, FP16S, INT8))
    assert compared_with(results) == [
        ("none", "none"), ("fp16s", "none"), ("int8", "none"), ("int8", "fp16s"),
    ]  # fmt: skip
    assert {(speed.arm, speed.against) for speed in results.speeds} == set(compared_with(results))


def test_failed_runs_are_in_no_figure_and_counted():
    results = fake_results(failed=[("int8", 2)])
    found = verdict(results, "int8")
    assert found.failed_runs == 1
    assert found.reasons[0] == "1 of its runs failed, and are in no figure."
    assert found.difference.seeds == 4
    assert verdict(results, "fp16s").difference.seeds == 5


def test_an_arm_that_lost_runs_is_not_said_to_have_paid_by_those_that_are_left():
    assert verdict(fake_results(failed=[("none", 2)]), "int8").outcome == "paid"
    results = fake_results(failed=[("int8", 2)])
    assert verdict(results, "int8").quality == "equivalent"
    assert verdict(results, "int8").outcome == "undecided"
    words = " ".join(summary(results))
    assert "as good where it ended well, but 1 of its runs failed" in words
    assert "no other arm is shown to be as good and faster" in words


@pytest.mark.parametrize(("failed_at", "lost"), [(0.5, True), (1.0, False)])
def test_an_arm_judged_at_its_own_rate_has_lost_runs_where_those_at_that_rate_failed(failed_at, lost):
    results = fake_results(multiples=(0.5, 1.0))
    assert results.tuned["topk:0.01"] == 0.5
    key = ("topk:0.01", "quality", failed_at, 2)
    runs = tuple(
        run.model_copy(update={"ok": (run.arm, run.kind, run.multiple, run.seed) != key}) for run in results.runs
    )
    results = conclude(results.model_copy(update={"runs": runs}))
    (quality,) = (
        q for q in results.quality if (q.arm, q.against, q.metric, q.rate) == ("topk:0.01", "none", "auc", "tuned")
    )
    assert has_lost(results, "topk:0.01", quality) is lost


def test_an_arm_of_which_all_runs_failed_is_said_to_be_unknown():
    found = verdict(fake_results((NONE, INT8), failed=[("int8", seed) for seed in range(1, 6)]), "int8")
    assert found.outcome == "undecided"
    assert "nothing can be said" in found.reasons[1]


def test_an_arm_is_judged_at_its_own_best_rate():
    results = fake_results(multiples=(0.5, 1.0, 2.0))
    assert results.tuned["topk:0.01"] == 0.5
    assert verdict(results, "topk:0.01").rate == "tuned"
    by_rate = {
        quality.rate: quality for quality in results.quality if (quality.arm, quality.metric) == ("topk:0.01", "auc")
    }
    assert by_rate["tuned"].difference.mean > by_rate["fixed"].difference.mean + 0.001


def test_lower_is_better_for_logloss():
    (found,) = (q for q in fake_results().quality if (q.arm, q.against, q.metric) == ("topk:0.01", "none", "logloss"))
    assert not found.higher_is_better
    assert found.difference.mean > 0
    assert found.verdict == "worse"


def test_a_margin_that_is_given_is_that_of_the_deciding_metric():
    results = conclude(fake_results(), margin=0.01)
    margins = {(quality.metric, quality.margin) for quality in results.quality}
    assert margins == {("auc", 0.01), ("logloss", 0.001)}
    assert verdict(results, "topk:0.01").quality == "equivalent"


def test_break_even_by_formula_and_by_measurement_agree_on_a_link_that_is_waited_for():
    (found,) = (even for even in fake_results((NONE, replace(FP16S, codec_ms=4.0))).break_even)
    assert found.measured == pytest.approx(found.formula, rel=0.2)


def test_a_measured_break_even_has_an_interval_and_one_of_few_seeds_a_wide_one():
    kinds = (NONE, replace(FP16S, codec_ms=1.0))
    (found,), (few,) = (fake_results(kinds, seeds=seeds).break_even for seeds in ((1, 2, 3, 4, 5), (1, 2)))
    assert 1e8 < found.low < found.measured < found.high
    assert few.low < found.low
    assert few.high is None  # what two seeds show without limit leaves open whether it is slower
    (one,) = fake_results(kinds, seeds=(1,)).break_even
    assert (one.low, one.high) == (None, None)


def test_a_pair_lost_on_one_link_is_left_out_of_the_interval_on_all():
    kinds = (NONE, replace(FP16S, codec_ms=1.0))
    whole, part = fake_results(kinds, seeds=(1, 2, 3)), fake_results(kinds, failed=[("fp16s", 4), ("fp16s", 5)])
    assert (part.break_even[0].low, part.break_even[0].high) == (whole.break_even[0].low, whole.break_even[0].high)


def test_without_measured_bytes_the_formula_is_unknown():
    results = fake_results()
    runs = tuple(run.model_copy(update={"bytes": (), "step": ()}) for run in results.runs)
    blind = conclude(results.model_copy(update={"runs": runs}))
    assert {even.formula_says for even in blind.break_even} == {"unknown"}
    assert {even.measured for even in blind.break_even} == {even.measured for even in results.break_even}
    assert not blind.volumes


def test_results_come_back_from_their_file(tmp_path):
    results = fake_results(failed=[("int8", 1)], multiples=(1.0, 2.0))
    assert read_results(write_results(results, tmp_path)) == results
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
