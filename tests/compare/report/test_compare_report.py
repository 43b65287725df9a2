"""The report of a comparison: what it claims, that it stands alone, that it fits a phone."""

from __future__ import annotations

import html as html_text
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_cases import FP16S, INT8, NONE, SLOW, STALE, SYNC, TOPK, fake_results
from rich.console import Console

from embershard.compare.report.report import page_of, write_report
from embershard.compare.report.summary import headline, summary, warnings
from embershard.compare.report.terminal import print_summary
from embershard.compare.results import Results

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ONLY_UNLIMITED = {"unlimited": None}
USUAL = "of 200 published set-ups only 6 sped up"


def said(results: Results) -> str:
    return " ".join(summary(results))


def written(results: Results, folder: Path) -> tuple[str, str]:
    write_report(results, folder)
    return (folder / "report.html").read_text(), (folder / "report.md").read_text()


# what it claims


def test_a_codec_that_paid_is_named_with_its_gain_its_cost_and_its_limit():
    words = said(fake_results())
    assert words.startswith(
        "It paid: with `fp16s` and `int8` the job trained faster than with `none`, and the model is "
    )
    assert re.search(r"`int8` is 2\.\dx as fast at 100 Mbit/s and 1\.2\dx at 1 Gbit/s, and slower without limit", words)
    assert re.search(r"breaks even at \d\.\d Gbit/s per worker \(95 % interval \d\.\d Gbit/s to \d\d Gbit/s\)", words)
    assert re.search(r"The cost: AUC [+-]0\.000\d, equivalent within the margin of 0\.0005", words)
    assert re.search(r"Did not pay: `topk:0\.01` \(AUC -0\.00\d\d\), worse\.", words)
    assert USUAL not in words


def test_the_fp16_baseline_is_always_told():
    assert "Beside `fp16s`, the fp16 baseline" in said(fake_results())
    beaten = replace(INT8, label="bf16", push=0.6, pull=0.6)
    assert "Not shown to beat it: `bf16`." in said(fake_results((NONE, FP16S, INT8, beaten)))
    assert "No arm of fp16s ran" in said(fake_results((NONE, INT8)))


def test_an_arm_that_beats_floats_but_not_the_fp16_baseline_does_not_beat_it():
    as_fast = replace(INT8, push=FP16S.push, pull=FP16S.pull, codec_ms=FP16S.codec_ms)
    words = said(fake_results((NONE, FP16S, as_fast)))
    assert words.startswith("It paid: with `fp16s` and `int8`")
    assert "`int8` is not shown to be as good and faster." in words


def test_where_only_the_fp16_baseline_paid_the_headline_says_so():
    results = fake_results((NONE, FP16S, SLOW))
    assert headline(results) == "Only `fp16s`, the fp16 baseline, paid"
    assert "Did not pay: `powersgd:4`, not faster by 5 % on any link." in said(results)


def test_when_nothing_paid_it_says_so_first():
    results = fake_results((NONE, replace(FP16S, codec_ms=30.0), SLOW))
    assert headline(results) == "Compression did not pay"
    assert said(results).startswith("It did not pay: none of the 2 arms was at least 5 % faster than `none` on any ")
    assert USUAL in said(results)


def test_a_faster_arm_with_a_worse_model_names_the_price():
    results = fake_results((NONE, replace(FP16S, codec_ms=30.0), replace(TOPK, pull=0.1)))
    assert "`topk:0.01` is" in said(results)
    assert re.search(r"but at a price: AUC -0\.005\d, worse", said(results))


def test_what_is_undecided_stays_undecided():
    noisy = replace(INT8, noise=0.004)
    results = fake_results((NONE, replace(FP16S, noise=0.004), noisy), seeds=(1, 2))
    assert headline(results) == "Undecided (caution: only 2 seeds)"
    assert said(results).startswith("Undecided: no arm is shown to train faster than `none` and to a model as good.")
    assert not re.search(r"\bpaid\b|significant", said(results))


def test_an_undecided_arm_is_told_with_what_is_known_of_it():
    noisy = replace(INT8, noise=0.004)
    words = said(fake_results((NONE, FP16S, noisy), seeds=(1, 2)))
    assert re.search(
        r"`int8` is 2\.\dx as fast at 100 Mbit/s.*, but AUC [+-]\d.\d+ is too uncertain for the margin", words
    )
    assert "More seeds narrow the intervals." in words


def test_intervals_wider_than_the_picture_are_cut_and_said_to_be(tmp_path):
    noisy = replace(INT8, noise=0.05)
    write_report(fake_results((NONE, FP16S, noisy), seeds=(1, 2)), tmp_path)
    picture = (tmp_path / "pictures" / "auc-difference.svg").read_text()
    assert "Some intervals reach beyond the picture." in picture
    write_report(fake_results(), tmp_path)
    assert "beyond the picture." not in (tmp_path / "pictures" / "auc-difference.svg").read_text()


def test_seeds_of_very_different_speed_leave_no_arm_out(tmp_path):
    results = fake_results(seeds=(1, 2), links=ONLY_UNLIMITED)
    slow = [
        run.model_copy(update={"curve": tuple(p.model_copy(update={"seconds": p.seconds * 50}) for p in run.curve)})
        if run.seed == 2 else run
        for run in results.runs
    ]  # fmt: skip
    write_report(results.model_copy(update={"runs": tuple(slow)}), tmp_path)
    picture = (tmp_path / "pictures" / "auc-time-unlimited.svg").read_text()
    assert picture.count('class="band') == len(results.arms)


def test_small_parts_of_a_step_are_drawn_as_other_and_tabled_by_name(tmp_path):
    html, _ = written(fake_results((NONE, replace(FP16S, codec_ms=0.01))), tmp_path)
    picture = (tmp_path / "pictures" / "step-100mbit.svg").read_text()
    assert ">wait</text>" in picture
    assert ">other</text>" in picture
    assert ">encode</text>" not in picture
    assert ">encode</th>" in html


def test_one_seed_shows_no_interval_and_says_so(tmp_path):
    results = fake_results(seeds=(1,))
    assert headline(results) == "Undecided (caution: one seed)"
    assert "One seed gives no intervals, so nothing is decided" in said(results)
    html, markdown = written(results, tmp_path)
    assert not re.search(r"\d \[[+-]?\d", html + markdown)
    assert "Bands are 95 %" not in html
    assert "One seed: the curves have no bands." in html
    assert "one seed, hence no bands" in html
    assert 'class="band' not in html
    assert 'class="whisker' not in html


def test_several_seeds_show_intervals_and_bands(tmp_path):
    html, markdown = written(fake_results(), tmp_path)
    assert re.search(r"\d \[[+-]?\d", html)
    assert 'class="band' in html
    assert re.search(r"\| equivalent \|", markdown)


def test_failed_runs_are_listed_and_counted():
    results = fake_results(failed=[("int8", 3)])
    failed = next(section for section in page_of(results).sections if section.name == "failures")
    (table,) = failed.blocks
    assert table.rows == [["int8", "3", "unlimited", "quality", "2", "ShardLost: shard 1 at 127.0.0.1:7701 did not "
                           "answer within 30 s", "runs/int8-3-unlimited"]]  # fmt: skip
    assert any("1 of its runs failed" in sentence for one in page_of(results).findings for sentence in one.sentences)


def test_an_arm_without_any_run_left_is_told_of_and_not_drawn(tmp_path):
    results = fake_results((NONE, FP16S, INT8), seeds=(1, 2), failed=[("int8", 1), ("int8", 2)])
    html, _ = written(results, tmp_path)
    assert "2 of its runs failed" in html
    assert "int8" not in (tmp_path / "pictures" / "auc-samples.svg").read_text()


def test_a_comparison_where_everything_failed_still_makes_a_page(tmp_path):
    results = fake_results((NONE, INT8), links=ONLY_UNLIMITED, seeds=(1,), failed=[("none", 1), ("int8", 1)])
    html, _ = written(results, tmp_path)
    assert "What it said last" in html.replace("what", "What")
    assert not list((tmp_path / "pictures").glob("auc*"))


def test_a_comparison_without_codecs_does_not_speak_of_them():
    results = fake_results((SYNC, STALE))
    words = said(results)
    assert headline(results) == "`staleness=4` paid"
    assert "It is faster on every measured link" in words
    assert "fp16s" not in words
    assert "ompression" not in words
    slower = fake_results((STALE, SYNC))
    assert headline(slower) == "Nothing paid"
    assert USUAL not in said(slower)


def test_without_a_limited_link_it_says_that_none_was_measured():
    words = said(fake_results(links=ONLY_UNLIMITED))
    assert "Only a link without limit was measured, so nothing is shown about slower ones" in words
    assert re.search(r"by formula the break-even points are: `fp16s` \d", words)


def test_an_unfinished_comparison_is_preliminary():
    results = fake_results().model_copy(update={"complete": False})
    assert "not finished" in warnings(results)[0]


# that it stands alone


class Outside(HTMLParser):
    """What a page would load or run from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe", "object", "embed", "base", "form", "use", "image"):
            self.found.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster") and not value.startswith(
                "#"
            ):
                self.found.append(f"{tag} {name}={value}")
            if name.startswith("on"):
                self.found.append(f"{tag} {name}")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    html, _ = written(fake_results(), tmp_path)
    parser = Outside()
    parser.feed(html)
    assert parser.found == []
    assert parser.open == []
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}


def test_every_id_is_there_once_and_every_reference_has_one(tmp_path):
    html, _ = written(fake_results(), tmp_path)
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    named = set(re.findall(r'href="#([^"]+)"', html)) | set(re.findall(r"url\(#([^)]+)\)", html))
    named |= {word for words in re.findall(r'aria-labelledby="([^"]+)"', html) for word in words.split()}
    assert named <= set(ids)


def test_every_picture_has_a_title_and_a_description(tmp_path):
    write_report(fake_results(), tmp_path)
    pictures = list((tmp_path / "pictures").glob("*.svg"))
    assert len(pictures) >= 10
    for path in pictures:
        root = ElementTree.parse(path).getroot()
        space = "{http://www.w3.org/2000/svg}"
        assert root.get("role") == "img"
        assert root.find(f"{space}title").text
        assert len(root.find(f"{space}desc").text) > 40


HOSTILE = '</title><script>alert("1")</script>|`*_[x](y)&amp;'


def test_what_users_named_is_shown_and_not_run(tmp_path):
    arm = replace(INT8, label=HOSTILE, meaning=HOSTILE)
    results = fake_results((NONE, FP16S, arm), name=HOSTILE, failed=[(HOSTILE, 1)], error=f"{HOSTILE}\n| next")
    html, markdown = written(results, tmp_path)
    parser = Outside()
    parser.feed(html)
    assert parser.found == []
    assert "<script" not in html
    assert html_text.escape(HOSTILE, quote=False)[:20] in html
    assert "<script" not in re.sub(r"(?s)```.*?```|(?<!\\)`[^`]*`", "", markdown)
    for path in (tmp_path / "pictures").glob("*.svg"):
        assert "<script" not in path.read_text()


@pytest.mark.parametrize("label", ["int8", "push=a|b/pull=c", HOSTILE])
def test_tables_of_the_markdown_have_equal_rows(tmp_path, label):
    _, markdown = written(fake_results((NONE, FP16S, replace(INT8, label=label)), failed=[(label, 1)]), tmp_path)
    blocks = [block.splitlines() for block in re.split(r"\n\n+", markdown) if block.lstrip().startswith("|")]
    assert len(blocks) >= 10
    for lines in blocks:
        assert re.fullmatch(r"\|( -{3}:? \|)+", lines[1])
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_pictures_of_the_markdown_are_there_and_no_others(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "auc-of-an-earlier-report.svg").write_text("<svg/>")
    _, markdown = written(fake_results(), tmp_path)
    named = set(re.findall(r"\]\(pictures/([\w.-]+\.svg)\)", markdown))
    assert named == {path.name for path in (tmp_path / "pictures").iterdir()}


def test_equal_results_give_equal_bytes(tmp_path):
    results = fake_results()
    write_report(results, tmp_path / "a")
    again = Results.model_validate_json(json.dumps(results.model_dump(mode="json")))
    write_report(again, tmp_path / "b")
    names = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_terminal_shows_every_arm_within_its_width(width):
    console = Console(width=width, record=True, file=io.StringIO())
    print_summary(fake_results(), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    for arm in ("none", "fp16s", "int8", "topk:0.01"):
        assert any(line.startswith(arm) for line in lines)


def luminance(color: str) -> float:
    """Of WCAG 2.2."""
    shares = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_and_words_stand_out_from_their_ground(tmp_path, theme):
    html, _ = written(fake_results(), tmp_path)
    light, dark = html.split("@media screen and (prefers-color-scheme: dark)", 1)
    colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", light if theme == "light" else dark))
    for name, least in [(f"s{style}", 3.0) for style in range(8)] + [
        (name, 4.5) for name in ("ink", "soft", "good", "bad")
    ]:
        for ground in ("paper",) if least == 3 else ("paper", "shade"):
            low, high = sorted((luminance(colors[name]), luminance(colors[ground])))
            assert (high + 0.05) / (low + 0.05) >= least, (name, ground)


# in a browser

MEASURE = """
<script>
const frame = document.querySelector("iframe")
frame.onload = () => {
  const inner = frame.contentDocument, wide = []
  for (const element of inner.body.querySelectorAll("*")) {
    if (element.parentElement.closest(".table, pre, svg")) continue
    const box = element.getBoundingClientRect()
    if (box.width && (box.right > WIDTH + 0.5 || box.left < -0.5)) wide.push(element.tagName + "." + element.className)
  }
  for (const text of inner.body.querySelectorAll("svg text")) {
    const box = text.getBoundingClientRect(), room = text.ownerSVGElement.getBoundingClientRect()
    if (box.right > room.right + 1 || box.left < room.left - 1) wide.push("text: " + text.textContent)
  }
  const scrolls = inner.documentElement.scrollWidth
  document.body.innerHTML = "<pre id=found>" + JSON.stringify({scrolls, wide}).replace(/</g, "&lt;") + "</pre>"
}
frame.srcdoc = PAGE
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_wider_than_the_screen(tmp_path, width):
    arm = replace(INT8, label="push=dgc:0.001+fp16s/pull=int8", meaning="a codec per direction, with a long name")
    html, _ = written(fake_results((NONE, FP16S, arm, TOPK, SLOW), failed=[("fp16s", 1)], error="x" * 300), tmp_path)
    page = json.dumps(html).replace("</", "<\\/").replace("<!--", "<\\!--")
    script = MEASURE.replace("WIDTH", str(width)).replace("PAGE", page)
    frame = tmp_path / "frame.html"
    frame.write_text(f'<body style="margin:0"><iframe style="border:0;width:{width}px;height:900px"></iframe>{script}')
    words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
             "--virtual-time-budget=5000", f"--window-size={width},900", "--dump-dom", frame.as_uri()]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=True)
    match = re.search(r'<pre id="?found"?>(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stdout[-500:]
    found = json.loads(html_text.unescape(match[1]))
    assert found["wide"] == []
    assert found["scrolls"] <= width
