"""What is said of made-up runs whose answer is known, and of where they ran."""

from dataclasses import replace

import numpy as np
import pytest
from report_cases import FP16S, INT8, JOB, NONE, TOPK, fake_results, plan_of

from embershard.compare.analysis import conclusions as c
from embershard.compare.analysis.gather import gather
from embershard.compare.analysis.statistics import estimate
from embershard.compare.report.summary import headline, summary
from embershard.compare.report.tables import short_table
from embershard.compare.results import Estimate, Quality, Speed, read_results, write_results

TINY = 1e-9
ONLY_UNLIMITED = {"unlimited": None}


def verdict(results, arm="int8"):
    return next(verdict for verdict in results.verdicts if verdict.arm == arm)


def between(low, high):
    return Estimate(mean=(low + high) / 2, low=low, high=high, seeds=5)


def with_runs(results, update):
    """The conclusions from the same runs, each with the fields that `update` returns for it."""
    runs = tuple(run.model_copy(update=update(run)) for run in results.runs)
    return c.conclude(results.model_copy(update={"runs": runs}))


@pytest.mark.parametrize(
    ("low", "high", "margin", "said"),
    [
        (-0.0005 + TINY, 0.0005 - TINY, 0.0005, "equivalent"),
        (0.0001, 0.0005 - TINY, 0.0005, "equivalent"),  # inside the margin counts before better
        (-0.0005 + TINY, -0.0001, 0.0005, "equivalent"),
        (-0.0005 + TINY, 0.0005, 0.0005, "not worse"),  # a bound on the margin is not inside it
        (-0.0005, 0.0005 - TINY, 0.0005, "undecided"),
        (-0.0005, 0.0, 0.0005, "undecided"),
        (-0.0005, -TINY, 0.0005, "worse"),
        (TINY, 0.0005, 0.0005, "better"),
        (0.0, 0.0005, 0.0005, "not worse"),
        (-0.001, 0.001, 0.0005, "undecided"),
        (0.0, 0.0, 0.0005, "equivalent"),
        (-1.0, -TINY, None, "worse"),  # without a margin only 0 decides
        (TINY, 1.0, None, "better"),
        (-TINY, TINY, None, "undecided"),
    ],
)
def test_a_verdict_on_a_model_is_read_off_the_interval(low, high, margin, said):
    assert c.quality_verdict(between(low, high), True, margin) == said
    assert c.quality_verdict(between(-high, -low), False, margin) == said  # of a metric of which less is better


def test_equivalent_means_that_both_one_sided_t_tests_hold_at_the_level_of_the_interval():
    from scipy import stats  # every worker of xdist imports this file, and one runs it

    random, seen = np.random.default_rng(0), set()
    for _ in range(300):
        differences = random.normal(random.uniform(-6e-4, 6e-4), 2e-4, 5)
        tests = [stats.ttest_1samp(differences, -0.0005, alternative="greater"),
                 stats.ttest_1samp(differences, 0.0005, alternative="less")]  # fmt: skip
        equivalent = max(test.pvalue for test in tests) < 0.025
        assert (c.quality_verdict(estimate(differences.tolist()), True, 0.0005) == "equivalent") == equivalent
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
    assert c.speed_verdict(between(low, high)) == said


SAME, WORSE, UNSURE = between(-0.0001, 0.0001), between(-0.002, -0.001), between(-0.002, 0.002)
FASTER, EVEN, SLIGHTLY, SLOWER = between(1.1, 1.2), between(0.9, 1.2), between(1.01, 1.05 - TINY), between(0.8, 0.9)


@pytest.mark.parametrize(
    ("quality", "speed_up", "other_speed_up", "said"),
    [
        (SAME, FASTER, SLOWER, "paid"),
        (SAME, EVEN, SLOWER, "undecided"),
        (UNSURE, FASTER, FASTER, "undecided"),
        (WORSE, FASTER, FASTER, "did not pay"),
        (SAME, SLOWER, SLOWER, "did not pay"),
        (SAME, SLIGHTLY, SLOWER, "did not pay"),
        (UNSURE, SLIGHTLY, SLOWER, "did not pay"),
        (SAME, between(1.01, 1.05), SLOWER, "paid"),
    ],
)
def test_whether_an_arm_paid_follows_from_the_verdicts(quality, speed_up, other_speed_up, said):
    links = {"100mbit": 1e8, "1gbit": 1e9}
    model = Quality(
        arm="int8", against="none", metric="auc", rate="fixed", value=quality, difference=quality,
        higher_is_better=True, margin=0.0005, verdict=c.quality_verdict(quality, True, 0.0005),
    )  # fmt: skip
    speeds = tuple(
        Speed(arm="int8", against="none", bandwidth=link, samples_per_second=ratio, speed_up=ratio,
              verdict=c.speed_verdict(ratio)) for link, ratio in zip(links, (speed_up, other_speed_up), strict=True)
    )  # fmt: skip
    results = fake_results((NONE, INT8), links=links).model_copy(update={"quality": (model,), "speeds": speeds})
    assert c.outcome_of(results, "int8", "none") == said


def test_an_arm_pays_on_the_links_where_its_interval_leaves_1_out_and_on_no_others():
    """By its means it is faster everywhere; on one link the interval holds 1."""
    noisy = {1: 1.2, 2: 0.9, 3: 1.1, 4: 0.95, 5: 1.0}

    def noise(run):
        factor = noisy[run.seed] if (run.arm, run.bandwidth) == ("int8", "unlimited") else 1.0
        return {"samples_per_second": run.samples_per_second * factor}

    results = with_runs(fake_results((NONE, FP16S, replace(INT8, codec_ms=-0.05))), noise)
    speeds = {speed.bandwidth: speed for speed in results.speeds_of("int8", "none")}
    assert all(speed.speed_up.mean > 1 for speed in speeds.values())
    assert speeds["unlimited"].speed_up.low < 1
    assert verdict(results).outcome == "paid"
    assert verdict(results).pays_on == ("100mbit", "1gbit")
    even = results.break_even_of("int8", "none")
    assert (even.measured, even.measured_says) == (None, "unknown")
    row = next(row for row in short_table(results).rows if row[0] == "int8")
    assert row[1:3] == ["paid", "100 Mbit/s, 1 Gbit/s"]
    assert "every measured link" not in " ".join(summary(results))


@pytest.mark.parametrize(
    ("seeds", "lost_at", "left"),
    [((1,), None, 1), ((1, 2), None, 2), ((1, 2, 3), None, 3), ((1, 2, 3), "unlimited", 2), ((1, 2, 3), "100mbit", 2)],
)
def test_fewer_than_3_pairs_are_a_caution_in_the_headline_and_one_decides_nothing(seeds, lost_at, left):
    whole = fake_results((NONE, INT8), seeds=seeds)
    results = with_runs(whole, lambda run: {"ok": (run.arm, run.seed, run.bandwidth) != ("none", 1, lost_at)})
    assert verdict(results).seeds == left
    assert ("caution" in headline(results)) is (left < 3)
    if left == 1:
        assert verdict(results).outcome == "undecided"
        assert "One seed gives no interval" in verdict(results).reasons[0]
        assert all(quality.difference.low is None for quality in results.quality)


def test_an_arm_as_good_and_faster_on_slow_links_paid():
    found = verdict(fake_results())
    assert (found.outcome, found.quality, found.seeds) == ("paid", "equivalent", 5)
    assert found.faster_at == found.pays_on == ("100mbit", "1gbit")
    assert (found.slower_at, found.best_at) == (("unlimited",), "100mbit")
    assert found.bytes_ratio == pytest.approx(3.0, abs=0.2)


def test_an_arm_that_lost_quality_or_is_nowhere_faster_did_not_pay():
    found = verdict(fake_results((NONE, FP16S, replace(TOPK, pull=0.1))), "topk:0.01")
    assert (found.outcome, found.quality, found.pays_on) == ("did not pay", "worse", ())
    assert found.faster_at
    assert found.best_speed_up > 3
    found = verdict(fake_results((NONE, INT8), links=ONLY_UNLIMITED))
    assert (found.outcome, found.quality) == ("did not pay", "equivalent")


def test_every_codec_is_compared_with_fp16s_too():
    results = fake_results((NONE, FP16S, INT8))
    assert c.compared_with(results) == [("none", "none"), ("fp16s", "none"), ("int8", "none"), ("int8", "fp16s")]
    assert {(speed.arm, speed.against) for speed in results.speeds} == set(c.compared_with(results))


def test_failed_runs_are_in_no_figure_and_an_arm_that_lost_some_is_not_said_to_have_paid():
    assert verdict(fake_results(failed=[("none", 2)])).outcome == "paid"
    results = fake_results(failed=[("int8", 2)])
    found = verdict(results)
    assert (found.failed_runs, found.difference.seeds) == (1, 4)
    assert verdict(results, "fp16s").difference.seeds == 5
    assert (found.quality, found.outcome) == ("equivalent", "undecided")
    assert found.reasons[0] == "1 of its runs failed and is in no figure."
    words = " ".join(summary(results))
    assert "as good where it ended well, but 1 of its runs failed" in words
    assert "no other arm is shown to be as good and faster" in words
    found = verdict(fake_results((NONE, INT8), failed=[("int8", seed) for seed in range(1, 6)]))
    assert found.outcome == "undecided"
    assert "nothing can be said" in found.reasons[1]


def test_an_arm_whose_model_diverged_with_some_seeds_is_not_said_to_have_paid():
    """Runs that skip steps with NaN end well, without AUC: the pairs that are left are the lucky ones."""

    def diverged(*seeds):
        return lambda run: {} if (run.arm, run.seed in seeds) != ("int8", True) else {"metrics": {"auc": None}}

    whole = fake_results((NONE, INT8))
    assert verdict(whole).outcome == "paid"
    results = with_runs(whole, diverged(2, 3))
    found = verdict(results)
    assert (found.quality, found.outcome, found.failed_runs) == ("equivalent", "undecided", 0)
    assert found.reasons[0] == "2 of its runs ended without AUC, as where a model diverged, and are in no difference."
    assert "as good where it ended well, but 2 of its runs failed or have no AUC" in " ".join(summary(results))
    results = with_runs(whole, diverged(1, 2, 3, 4, 5))
    assert verdict(results).outcome == "undecided"
    assert "No run of it has AUC beside one of the baseline" in verdict(results).reasons[0]
    assert "has no run with AUC beside one of the baseline" in " ".join(summary(results))


def quality_of(results, arm, metric="auc", rate="fixed"):
    wanted = (arm, "none", metric, rate)
    return next(q for q in results.quality if (q.arm, q.against, q.metric, q.rate) == wanted)


def test_an_arm_is_judged_at_its_own_best_rate():
    results = fake_results(multiples=(0.5, 1.0))
    assert results.tuned["topk:0.01"] == 0.5
    assert verdict(results, "topk:0.01").rate == "tuned"
    tuned, fixed = (quality_of(results, "topk:0.01", rate=rate) for rate in ("tuned", "fixed"))
    assert tuned.difference.mean > fixed.difference.mean + 0.001
    for multiple, lost in ((0.5, True), (1.0, False)):  # runs at other rates are none of its own
        key = ("topk:0.01", "quality", multiple, 2)
        failed = with_runs(results, lambda run, key=key: {"ok": (run.arm, run.kind, run.multiple, run.seed) != key})
        assert c.lost_runs(failed, "topk:0.01", quality_of(failed, "topk:0.01", rate="tuned")) == lost


def test_a_metric_without_a_margin_says_that_no_model_counts_as_equally_good():
    """By default built-in metrics other than those of MARGINS, and all of users, have none."""
    results = with_runs(fake_results((NONE, INT8)), lambda run: {"metrics": {"mae": run.metrics.get("auc")}})
    results = c.conclude(results.model_copy(update={"metric": "mae"}))
    words = "no difference is shown, and without a margin (--margin) no model counts as equally good"
    assert verdict(results).outcome == "undecided"
    assert any(words in reason for reason in verdict(results).reasons)
    assert "but no difference of mae is shown, and without a margin (--margin)" in " ".join(summary(results))
    results = c.conclude(results, margin=0.0005)
    assert verdict(results).outcome == "paid"
    assert "margin (--margin)" not in " ".join([*verdict(results).reasons, *summary(results)])


def test_lower_is_better_for_logloss():
    found = quality_of(fake_results(), "topk:0.01", "logloss")
    assert (found.higher_is_better, found.verdict) == (False, "worse")
    assert found.difference.mean > 0


def test_a_margin_that_is_given_is_that_of_the_deciding_metric():
    results = c.conclude(fake_results(), margin=0.01)
    assert {(quality.metric, quality.margin) for quality in results.quality} == {("auc", 0.01), ("logloss", 0.001)}
    assert verdict(results, "topk:0.01").quality == "equivalent"


def test_break_even_by_formula_and_by_measurement_agree_on_a_link_that_is_waited_for():
    (found,) = fake_results((NONE, replace(FP16S, codec_ms=4.0))).break_even
    assert found.measured == pytest.approx(found.formula, rel=0.2)


def test_a_measured_break_even_has_an_interval_of_the_pairs_that_all_links_have_and_a_wide_one_of_few():
    kinds = (NONE, replace(FP16S, codec_ms=1.0))

    def even(seeds=(1, 2, 3, 4, 5), **failed):
        (found,) = fake_results(kinds, seeds=seeds, **failed).break_even
        return found

    found, three, few = even(), even(seeds=(1, 2, 3)), even(seeds=(1, 2))
    assert 1e8 < found.low < found.measured < found.high
    assert few.low < found.low
    assert few.high is None  # what two seeds show without limit leaves open whether it is slower
    assert (even(seeds=(1,)).low, even(seeds=(1,)).high) == (None, None)
    lost = even(failed=[("fp16s", 4), ("fp16s", 5)])
    assert (lost.low, lost.high) == (three.low, three.high)


def test_without_measured_bytes_the_formula_is_unknown():
    results = fake_results()
    blind = with_runs(results, lambda run: {"bytes": (), "step": ()})
    assert {even.formula_says for even in blind.break_even} == {"unknown"}
    assert {even.measured for even in blind.break_even} == {even.measured for even in results.break_even}
    assert not blind.volumes


def test_results_come_back_from_their_file(tmp_path):
    results = fake_results(failed=[("int8", 1)], multiples=(1.0, 2.0))
    assert read_results(write_results(results, tmp_path)) == results
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


MADE = fake_results((NONE, FP16S, INT8), links=ONLY_UNLIMITED, seeds=(1, 2)).runs


@pytest.fixture
def results_of(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    plan = plan_of(job, "none,int8", seeds=(1, 2))
    said = {"command": ("embershard",), "chosen": {}, "complete": True, "margin": None}
    return lambda *runs: gather(plan, {run.key: run for run in runs}, job_file=job, **said)


def test_more_of_a_metric_is_better_where_the_job_says_so(tmp_path):
    job = tmp_path / "job.yaml"
    own = "{class: 'mine:mae', lower_is_better: true}, {class: 'mine:hits'}"
    job.write_text(f"{JOB}evaluate: {{metric: mae}}\nmetrics: [auc, logloss, {own}]\n")
    plan = plan_of(job, "none,int8", seeds=(1, 2, 3, 4, 5))
    runs = fake_results((NONE, replace(INT8, quality=-0.01)), links=ONLY_UNLIMITED).runs
    made = {}
    for run in runs:
        auc, logloss = run.metrics["auc"], run.metrics["logloss"]
        metrics = {"mae": 1 - auc, "hits": auc, "auc:b": auc, "logloss:b": logloss, "calibration:b": auc}
        made[run.key] = run.model_copy(update={"metrics": metrics})
    found = gather(plan, made, job_file=job, command=(), chosen={}, complete=True, margin=None)
    judged = {one.metric: (one.higher_is_better, one.verdict) for one in found.quality if one.arm == "int8"}
    assert judged == {
        "mae": (False, "worse"),
        "hits": (True, "worse"),
        "auc:b": (True, "worse"),
        "logloss:b": (False, "worse"),
    }
    assert verdict(found).outcome == "did not pay"
    margins = {"mae": None, "hits": None, "auc:b": 0.0005, "logloss:b": 0.001}
    assert {one.metric: one.margin for one in found.quality} == margins


def test_versions_are_those_of_the_runs_and_changes_are_named(results_of):
    old = [run.model_copy(update={"versions": {"torch": "1.0", "python": "3.0.1"}}) for run in MADE]
    found = results_of(*old).conditions
    assert (found.versions["torch"], found.python, found.mixed) == ("1.0", "3.0.1", ())
    assert "python" not in found.versions
    newer = old[-1].model_copy(update={"versions": {"torch": "1.1", "python": "3.0.1"}})
    assert results_of(*old[:-1], newer).conditions.mixed == ("torch 1.0 and 1.1",)


def test_what_no_model_can_beat_is_the_mean_over_seeds_of_what_is_judged(results_of):
    known = [
        run.model_copy(update={"reachable": {"auc": 0.7 + 0.1 * run.seed, "samples": 3000.0, "calibration": 1.0}})
        for run in MADE
    ]
    assert results_of(*known).reachable == {"auc": pytest.approx(0.85)}


def test_runs_that_were_not_asked_for_are_counted_and_in_no_figure(results_of):
    others = [MADE[0].model_copy(update={"seed": 7}), MADE[1].model_copy(update={"arm": "topk:0.01", "ok": False})]
    asked, more = results_of(*MADE), results_of(*others, *MADE)
    assert more.runs == asked.runs == MADE
    (note,) = set(more.notes) - set(asked.notes)
    assert "(2)" in note
    assert (more.quality, more.speeds, more.verdicts) == (asked.quality, asked.speeds, asked.verdicts)


def test_the_quality_of_an_arm_that_chooses_by_the_link_is_said_to_be_that_without_limit(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(JOB)

    def chosen_by_the_link(*links):
        plan = plan_of(job, "none,int8,auto", links=links, seeds=(1, 2))
        notes = gather(plan, {}, job_file=job, command=(), chosen={}, complete=False, margin=None).notes
        return [note.partition(":")[0] for note in notes if "chooses by the link" in note]

    assert chosen_by_the_link("100mbit") == ["auto"]
    assert not chosen_by_the_link()
