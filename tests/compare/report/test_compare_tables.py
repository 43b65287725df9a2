"""The tables of a comparison's report."""

from __future__ import annotations

import re
from dataclasses import replace

from report_cases import FP16S, INT8, NONE, SLOW, STALE, SYNC, TOPK, fake_results

from embershard.compare.report.report import page_of
from embershard.compare.results import ArmBytes


def test_retuned_rates_stand_beside_the_fixed_ones():
    tuned = fake_results(multiples=(0.5, 1.0, 2.0))
    page = page_of(tuned)
    quality = next(section for section in page.sections if section.name == "quality")
    tables = {block.title: block for block in quality.blocks if block.kind == "table"}
    assert {row[2] for row in tables["Quality beside none"].rows} == {"fixed", "tuned"}
    rows = tables["Learning rates that were tried"].rows
    assert [row[-1] for row in rows] == ["1x", "1x", "1x", "0.5x"]
    # what the choice was made by: that of the fixed rate would be a mean over other seeds beside it
    assert rows[0][2] == f"{next(run.decided for run in tuned.runs if (run.kind, run.multiple) == ('tune', 1.0)):.4f}"


def test_predicted_bytes_stand_beside_counted_ones():
    page = page_of(fake_results((NONE, INT8)))
    (table,) = (block for section in page.sections if section.name == "bytes" for block in section.blocks
                if block.kind == "table")  # fmt: skip
    row = next(row for row in table.rows if row[:3] == ["int8", "push", "gradients"])
    assert row == ["int8", "push", "gradients", "55.8 kB", "180 kB", "56.0 kB", "+0.40 %", "3.23x"]


def test_what_was_sent_again_leaves_the_prediction_of_the_rest_in_the_sum():
    results = fake_results((NONE, INT8))
    again = ArmBytes(arm="int8", direction="other", part="other", sent=300.0, raw=300.0, predicted=None, ratio=None)
    page = page_of(results.model_copy(update={"volumes": (*results.volumes, again)}))
    (table,) = (block for section in page.sections if section.name == "bytes" for block in section.blocks
                if block.kind == "table")  # fmt: skip
    rows = [row for row in table.rows if row[0] == "int8"]
    assert rows[-2][1:4] == ["other", "other", "300 B"]
    assert rows[-1][1] == "both"
    assert rows[-1][6] == "+0.21 %"


def test_an_arm_faster_on_every_link_has_no_break_even_point():
    page = page_of(fake_results((SYNC, STALE)))
    speed = next(section for section in page.sections if section.name == "speed")
    table = next(block for block in speed.blocks if block.kind == "table" and block.title == "Break-even bandwidth")
    assert table.rows[0][2] == "none: faster on all links"


def test_wall_time_on_a_slow_link_says_what_it_leaves_out_of_dgc():
    left_out = "its warm-up, which sends more, would take longer"
    assert left_out not in str(page_of(fake_results((NONE, FP16S))))
    assert left_out in str(page_of(fake_results((NONE, FP16S, replace(TOPK, label="dgc:0.001")))))


def test_a_break_even_point_outside_the_links_is_not_called_a_gain():
    page = page_of(fake_results((NONE, FP16S, SLOW), links={"1gbit": 1e9, "unlimited": None}))
    speed = next(section for section in page.sections if section.name == "speed")
    table = next(block for block in speed.blocks if block.kind == "table" and block.title == "Break-even bandwidth")
    assert table.rows[1][:3] == ["powersgd:4", "none", "below all measured links"]
    assert re.fullmatch(r"13\.\d Mbit/s", table.rows[1][3])
    assert table.rows[2][3] == "saves no bytes"


def test_a_codec_that_needs_more_bytes_shows_as_a_loss():
    page = page_of(fake_results((NONE, replace(TOPK, push=1.5))))
    (table,) = (block for section in page.sections if section.name == "bytes" for block in section.blocks
                if block.kind == "table")  # fmt: skip
    assert next(row for row in table.rows if row[:3] == ["topk:0.01", "push", "gradients"])[-1] == "0.67x"
