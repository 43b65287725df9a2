"""The report of a comparison: one golden report, and the claims that it cannot show."""

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

from embershard.compare.report.drawing import Picture
from embershard.compare.report.page import Pictures
from embershard.compare.report.report import page_of, write_report
from embershard.compare.report.summary import headline, summary, warnings
from embershard.compare.report.tables import (
    BYTE_PARTS,
    STEP_PARTS,
    bytes_table,
    conditions_table,
    part_name,
    waiting_table,
)
from embershard.compare.report.terminal import print_summary
from embershard.compare.results import ArmBytes, Results, StepPart
from embershard.compare.units import metric_name

GOLDEN = Path(__file__).with_name("golden_report.md")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ONLY_UNLIMITED = {"unlimited": None}
DEFAULT = (NONE, FP16S, INT8, TOPK)
USUAL = "of 200 published set-ups only 6 sped up"
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</title><script>alert("1")</script>|`*_[x](y)&amp;'
AS_FAST_AS_FP16 = replace(INT8, push=FP16S.push, pull=FP16S.pull, codec_ms=FP16S.codec_ms)
SLOW_FP16 = replace(FP16S, codec_ms=30.0)
NOISY_FP16, NOISY = replace(FP16S, noise=0.004), replace(INT8, noise=0.004)


def written(results, folder):
    write_report(results, folder)
    return (folder / "report.html").read_text(), (folder / "report.md").read_text()


def picture(results, name):
    """The SVG of one picture."""
    blocks = [block for section in page_of(results).sections for block in section.blocks]
    found = (one for block in blocks if isinstance(block, Pictures) for one in block.pictures)
    return next(one.svg for one in found if one.name == name)


def hints(svg):
    """Texts where the mouse rests -> the shapes that show them."""
    found = {}
    for element in ElementTree.fromstring(svg).iter():
        title = element.find(f"{SVG}title")
        if title is not None and element.get("role") is None:
            found.setdefault(str(title.text), []).append(element)
    return found


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """The folder of a report with intervals."""
    folder = tmp_path_factory.mktemp("report")
    write_report(fake_results(), folder)
    return folder


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory):
    """The folder of a report without intervals, in which an earlier one had left a picture."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "auc-of-an-earlier-report.svg").write_text("<svg/>")
    write_report(fake_results((NONE, INT8), seeds=(1,), links=ONLY_UNLIMITED), folder)
    return folder


def test_the_report_is_the_golden_one(tmp_path, monkeypatch):
    """Arms of every outcome, tuned rates, a failed run, a codec that needs more bytes.

    Where a change of the report is meant, copy the new file over the golden one and read the difference.
    """
    kinds = (
        NONE, FP16S, INT8, TOPK, SLOW, STALE,
        replace(INT8, label="bf16", meaning="16-bit floats", push=0.6, pull=0.6),
        replace(TOPK, label="dgc:0.001", push=1.5),
        replace(INT8, label="push=int8/pull=fp16s", meaning="a codec per direction", noise=0.004),
    )  # fmt: skip
    links = {"100mbit": 1e8, "unlimited": None}
    results = fake_results(kinds, links=links, multiples=(0.5, 1.0), failed=[("dgc:0.001", 2)])
    monkeypatch.setattr(Picture, "svg", f'<svg xmlns="{SVG[1:-1]}" viewBox="0 0 1 1"/>')  # its text names them
    _, markdown = written(results, tmp_path)
    assert markdown == GOLDEN.read_text(), f"compare {tmp_path / 'report.md'} with {GOLDEN}"


@pytest.mark.parametrize(
    ("kinds", "more", "title", "says"),
    [
        ((NONE, INT8), {}, "`int8` paid", "No arm of fp16s ran."),
        ((NONE, FP16S, AS_FAST_AS_FP16), {}, "`fp16s` and `int8` paid", "`int8` is not shown to be as good and faster"),
        ((NONE, FP16S, SLOW), {}, "Only `fp16s`, the fp16 baseline, paid",
         "Did not pay: `powersgd:4`, not faster by 5 % on any link."),
        ((NONE, SLOW_FP16, SLOW), {}, "Compression did not pay", USUAL),
        ((NONE, SLOW_FP16, replace(TOPK, pull=0.1)), {}, "Compression did not pay", "but at a price: AUC -0.005"),
        ((NONE, NOISY_FP16, NOISY), {"seeds": (1, 2)}, "Undecided (caution: only 2 seeds)",
         "is too uncertain for the margin"),
        (DEFAULT, {"seeds": (1,)}, "Undecided (caution: one seed)", "so nothing is decided"),
        ((SYNC, STALE), {}, "`staleness=4` paid", "It is faster on every measured link."),
        (DEFAULT, {"links": ONLY_UNLIMITED}, "Compression did not pay",
         "by formula the break-even points are: `fp16s` "),
    ],
)  # fmt: skip
def test_headline_and_summary_quote_the_verdicts(kinds, more, title, says):
    results = fake_results(kinds, **more)
    words = " ".join(summary(results))
    assert headline(results) == title
    assert says in words
    if title.startswith("Undecided"):
        assert not re.search(r"\bpaid\b|significant", words)
    if SYNC in kinds:  # of a comparison without codecs
        assert not re.search(r"fp16|ompression|published", title + words)


def test_an_unfinished_comparison_says_so_first_and_one_without_dgc_nothing_of_its_warm_up():
    left_out = "its warm-up, which sends more, would take longer"
    assert [left_out in text for text in (GOLDEN.read_text(), str(page_of(fake_results((NONE, FP16S)))))] == [
        True,
        False,
    ]
    results = fake_results((NONE, INT8), seeds=(1, 2))
    assert len(warnings(results.model_copy(update={"complete": False}))) == len(warnings(results)) + 1


def test_what_was_sent_again_leaves_the_prediction_of_the_rest_in_the_sum():
    results = fake_results((NONE, INT8))
    again = ArmBytes(arm="int8", direction="other", part="other", sent=300.0, raw=300.0, predicted=None, ratio=None)
    rows = bytes_table(results.model_copy(update={"volumes": (*results.volumes, again)})).rows
    rows = [row for row in rows if row[0] == "int8"]
    assert rows[-2][1:4] == ["other", "other", "300 B"]
    assert (rows[-1][1], rows[-1][6]) == ("both", "+0.21 %")


def test_a_link_without_limit_is_not_said_to_be_limited():
    for links, limited in ((ONLY_UNLIMITED, False), ({"100mbit": 1e8, "unlimited": None}, True)):
        said = dict(conditions_table(fake_results(links=links)).rows)
        assert ("limited by a token bucket" in said["links"], "speed on limited links" in said) == (limited, limited)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("auc", "AUC"), ("auc:income", "AUC:income"), ("ndcg@10", "NDCG@10"), ("recall@20", "Recall@20"),
        ("logloss:b", "logloss:b"), ("brier", "brier"), ("my_gini", "my_gini"),
    ],
)  # fmt: skip
def test_a_metric_is_named_as_in_papers_and_labels_and_metrics_of_users_as_they_are(metric, said):
    assert metric_name(metric) == said


def test_intervals_wider_than_the_picture_are_cut_and_said_to_be():
    cut = "Some intervals reach beyond the picture."
    noisy = fake_results((NONE, FP16S, replace(INT8, noise=0.05)), seeds=(1, 2))
    assert cut in picture(noisy, "auc-difference")
    assert cut not in picture(fake_results(), "auc-difference")


def test_seeds_of_very_different_speed_leave_no_arm_out():
    results = fake_results(seeds=(1, 2), links=ONLY_UNLIMITED)
    runs = tuple(
        run.model_copy(
            update={"curve": [p.model_copy(update={"seconds": p.seconds * 50**run.seed}) for p in run.curve]}
        )
        for run in results.runs
    )
    drawn = hints(picture(results.model_copy(update={"runs": runs}), "auc-time-unlimited"))
    assert {f"{arm.label}: 95 % band" for arm in results.arms} <= drawn.keys()


def test_small_parts_of_a_step_are_drawn_as_other_and_tabled_by_name():
    results = fake_results((NONE, replace(FP16S, codec_ms=0.01)))
    drawn = " ".join(hints(picture(results, "step-100mbit")))
    assert [part in drawn for part in ("fp16s: wait ", "fp16s: other ", "encode")] == [True, True, False]
    assert "'encode'" in str(page_of(results))


def test_one_seed_has_neither_intervals_nor_bands(default, one_seed):
    html = (one_seed / "report.html").read_text()
    assert not re.search(r"\d \\?\[[+-]?\d", html + (one_seed / "report.md").read_text())
    assert "One seed: the curves have no bands." in html
    assert "95 % band" not in html
    with_intervals = (default / "report.html").read_text()
    assert "95 % band</title>" in with_intervals
    assert re.search(r"<title>int8: [\d.]+x \[[\d.]+, [\d.]+\]</title>", with_intervals)


def test_arms_without_any_run_left_are_told_of_and_not_drawn(tmp_path):
    results = fake_results((NONE, FP16S, INT8), seeds=(1, 2), failed=[("int8", 1), ("int8", 2)])
    assert "2 of its runs failed" in str(page_of(results).findings)
    assert "int8" not in picture(results, "auc-samples")
    results = fake_results((NONE, INT8), links=ONLY_UNLIMITED, seeds=(1,), failed=[("none", 1), ("int8", 1)])
    assert "Runs that failed twice" in written(results, tmp_path)[0]
    assert not list((tmp_path / "pictures").glob("auc*"))


@pytest.mark.parametrize("of", ["step", "bytes"])
def test_every_part_has_a_colour_of_its_own_in_light_and_in_dark(default, of):
    results = fake_results((NONE, INT8), links=ONLY_UNLIMITED)
    if of == "step":
        parts = (*STEP_PARTS[1:], "other")
        sizes = {"step": 30} | dict.fromkeys(parts, 2)
        step = [StepPart(name=n, p50_ms=ms, p99_ms=ms, mean_ms=ms, overlapped=False) for n, ms in sizes.items()]
        changed = {"runs": [run.model_copy(update={"step": step}) for run in results.runs]}
    else:
        parts = BYTE_PARTS
        named = [(way, part) for way in ("push", "pull") for part in ("ids", "rows", "dense", "residual", "other")]
        assert {part_name(*one) for one in named} >= set(parts)
        named.remove(("pull", "residual"))
        sizes = {"sent": 1e3, "raw": 1e3, "predicted": 1e3, "ratio": 1.0}
        changed = {"volumes": [ArmBytes(arm="none", direction=way, part=part, **sizes) for way, part in named]}
    svg = picture(results.model_copy(update=changed), "step-unlimited" if of == "step" else "bytes")
    colors = {}
    for hint, shapes in hints(svg).items():
        found = re.match(r"none(?:, \w+)?: ([a-z ]+) \d", hint)
        for element in (element for shape in shapes if found for element in shape.iter()):
            colors.setdefault(found[1], set()).update(re.findall(r"fill: var\(--(\w+)\)", element.get("style", "")))
    assert colors.keys() == set(parts)
    names = [name for names in colors.values() for name in names]
    assert len(names) == len(set(names)) == len(colors)
    assert all(len({palette[name] for name in names}) == len(names) for palette in palettes(default))


def test_every_picture_has_a_title_and_a_description_and_no_colour_of_its_own(default):
    """Each colour is a variable of the style sheet, which has one value for light and one for dark."""
    light, dark = palettes(default)
    pictures = list((default / "pictures").glob("*.svg"))
    assert len(pictures) >= 10
    for path in pictures:
        _, _, drawn = path.read_text().partition("</style>")
        assert "<text" in drawn
        assert not re.search(r"#[0-9a-fA-F]{3,6}\b(?!\")", re.sub(r'href="#\w+"|url\(#\w+\)', "", drawn))
        assert set(re.findall(r"var\(--(\w+)\)", drawn)) <= light.keys() & dark.keys()
        root = ElementTree.parse(path).getroot()
        title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
        assert root.get("role") == "img"
        assert title.text
        assert len(description.text) > 40
        assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"


class Outside(HTMLParser):
    """What a page would load or run from elsewhere, and the tags that it leaves open."""

    def __init__(self, html):
        super().__init__()
        self.found, self.open = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe", "object", "embed", "base", "form", "image"):
            self.found.append(tag)
        links = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
        self.found += [n for n, value in attrs if n.startswith("on") or (n in links and not value.startswith("#"))]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_from_elsewhere_and_what_it_refers_to_is_in_it(default):
    html = (default / "report.html").read_text()
    page = Outside(html)
    assert page.found == page.open == []
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    named = set(re.findall(r'href="#([^"]+)"', html)) | set(re.findall(r"url\(#([^)]+)\)", html))
    named |= {word for words in re.findall(r'aria-labelledby="([^"]+)"', html) for word in words.split()}
    assert named <= set(ids)


def test_what_users_named_is_shown_and_not_run(tmp_path):
    arm = replace(INT8, label=HOSTILE, meaning=HOSTILE)
    results = fake_results((NONE, FP16S, arm), name=HOSTILE, failed=[(HOSTILE, 1)], error=f"{HOSTILE}\n| next")
    html, markdown = written(results, tmp_path)
    assert Outside(html).found == []
    assert "<script" not in html
    assert html_text.escape(HOSTILE, quote=False)[:20] in html
    assert "<script" not in re.sub(r"(?s)```.*?```|(?<!\\)`[^`]*`", "", markdown)
    for path in (tmp_path / "pictures").glob("*.svg"):
        assert "<script" not in path.read_text()
    blocks = [block.splitlines() for block in re.split(r"\n\n+", markdown) if block.lstrip().startswith("|")]
    assert len(blocks) >= 10
    for lines in blocks:
        assert re.fullmatch(r"\|( -{3}:? \|)+", lines[1])
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


@pytest.mark.parametrize("label", ["$x$", "$x_{y$", "\\alpha$1$", "_hidden"])
def test_a_name_that_matplotlib_would_interpret_is_drawn_as_it_is(label):
    """Matplotlib sets text between two dollars as a formula, and leaves out of a legend names with a leading _."""
    results = fake_results((NONE, replace(INT8, label=label)), links=ONLY_UNLIMITED, seeds=(1, 2))
    for name in ("auc-samples", "bytes", "step-unlimited"):
        texts = [element.text for element in ElementTree.fromstring(picture(results, name)).iter(f"{SVG}text")]
        assert label in texts


def test_pictures_of_the_markdown_are_there_and_no_others(one_seed):
    named = set(re.findall(r"\]\(pictures/([\w.-]+\.svg)\)", (one_seed / "report.md").read_text()))
    assert named == {path.name for path in (one_seed / "pictures").iterdir()}


@pytest.mark.long
def test_equal_results_give_equal_bytes(default, tmp_path):
    write_report(Results.model_validate_json(json.dumps(fake_results().model_dump(mode="json"))), tmp_path)
    names = [path.relative_to(default) for path in default.rglob("*.*")]
    assert len(names) > 10
    assert [(default / name).read_bytes() for name in names] == [(tmp_path / name).read_bytes() for name in names]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_terminal_shows_every_arm_within_its_width(width):
    console = Console(width=width, record=True, file=io.StringIO())
    print_summary(fake_results(), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert all(any(line.startswith(arm) for line in lines) for arm in ("none", "fp16s", "int8", "topk:0.01"))


def test_the_terminal_folds_a_long_arm_and_cuts_no_figure():
    arm = replace(INT8, label="push=int8/pull=fp16s/dense.push=dgc:0.001")
    results = fake_results((NONE, FP16S, arm), links={"100mbit": 1e8, "unlimited": None})
    console = Console(width=80, record=True, file=io.StringIO())
    print_summary(results, console)
    text = console.export_text()
    assert f"{results.verdicts[-1].difference.mean:+.5f}" in text
    assert re.search(r"AUC\s.*difference", text, re.DOTALL)


def palettes(folder):
    """Colours by their names, in light and in dark."""
    parts = (folder / "report.html").read_text().split("@media screen and (prefers-color-scheme: dark)", 1)
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", text)) for text in parts]


def luminance(color):
    """Of WCAG 2.2."""
    shares = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1])
def test_lines_and_words_stand_out_from_their_ground(default, theme):
    light = {name: luminance(color) for name, color in palettes(default)[theme].items()}
    pairs = [(f"s{style}", "paper", 3.0) for style in range(8)]
    pairs += [(word, ground, 4.5) for word in ("ink", "soft", "good", "bad") for ground in ("paper", "shade")]
    for name, ground, least in pairs:
        low, high = sorted((light[name], light[ground]))
        assert (high + 0.05) / (low + 0.05) >= least, (name, ground)


WIDTHS = (390, 1440)
MEASURE = """
<script>
const found = []
function measure(frame) {
  const width = frame.width, inner = frame.contentDocument, wide = []
  for (const element of inner.body.querySelectorAll("*")) {
    if (element.parentElement.closest(".table, pre, svg")) continue
    const box = element.getBoundingClientRect()
    if (box.width && (box.right > width + 0.5 || box.left < -0.5)) wide.push(element.tagName + "." + element.className)
  }
  for (const text of inner.body.querySelectorAll("svg text")) {
    const box = text.getBoundingClientRect(), room = text.ownerSVGElement.getBoundingClientRect()
    if (box.right > room.right + 1 || box.left < room.left - 1) wide.push("text: " + text.textContent)
  }
  found.push([Number(width), inner.documentElement.scrollWidth <= width, wide])
  document.getElementById("found").textContent = JSON.stringify(found)
}
for (const frame of document.querySelectorAll("iframe")) {
  frame.onload = () => measure(frame)
  frame.srcdoc = PAGE
}
</script>
"""


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_nothing_is_wider_than_the_screen(tmp_path):
    arm = replace(INT8, label="push=dgc:0.001+fp16s/pull=int8", meaning="a codec per direction, with a long name")
    results = fake_results((NONE, FP16S, arm, TOPK, SLOW), failed=[("fp16s", 1)], error="x" * 300)
    page = json.dumps(written(results, tmp_path)[0]).replace("</", "<\\/").replace("<!--", "<\\!--")
    frames = "".join(f'<iframe style="border:0" width="{width}" height="900"></iframe>' for width in WIDTHS)
    outer = tmp_path / "frames.html"
    outer.write_text(f'<body style="margin:0"><pre id="found"></pre>{frames}{MEASURE.replace("PAGE", page)}')
    words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
             "--virtual-time-budget=5000", "--window-size=1440,900", "--dump-dom", outer.as_uri()]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=True)
    (text,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert sorted(json.loads(html_text.unescape(text))) == [[width, True, []] for width in WIDTHS]


def test_waiting_is_shown_by_what_was_waited_for_where_the_runs_say():
    results = fake_results(kinds=(NONE, FP16S), links=ONLY_UNLIMITED, seeds=(1, 2))
    assert waiting_table(results) is None  # runs of an earlier version
    parts = {"wait_share": 0.6, "wait_shards": 0.3, "wait_workers": 0.2, "wait_data": 0.1}
    told = [replace_run(run, parts, 2.0 if run.seed == 2 else 0.0) for run in results.runs if run.arm == NONE.label]
    others = [run for run in results.runs if run.arm != NONE.label]
    table = waiting_table(results.model_copy(update={"runs": tuple([*told, *others])}))
    assert [row[0] for row in table.rows] == [NONE.label]
    assert table.rows[0][2:] == ["60%", "30%", "20%", "10%"]  # the mean


def replace_run(run, parts, factor):
    return run.model_copy(update={name: factor * share for name, share in parts.items()})


def test_calibration_is_drawn_label_by_label_from_the_mean_of_the_seeds():
    results = fake_results((NONE, INT8), seeds=(1, 2), links=ONLY_UNLIMITED)
    bins = {1: ((0.1, 0.2, 50), (0.5, 0.4, 50)), 2: ((0.3, 0.4, 50), (0.7, 0.6, 50))}
    runs = [run.model_copy(update={"reliability": {"income": bins[run.seed]}}) for run in results.runs]
    svg = picture(results.model_copy(update={"runs": tuple(runs)}), "calibration-income")
    seen = {f"{arm}: {words}" for arm in ("none", "int8") for words in ("0.2 predicted, 0.3", "0.6 predicted, 0.5")}
    assert {f"{words} seen" for words in seen} <= set(hints(svg))
    one_bin = [run.model_copy(update={"reliability": {"": bins[1][: run.seed]}}) for run in results.runs]
    svg = picture(results.model_copy(update={"runs": tuple(one_bin)}), "calibration")  # not averaged with other bins
    assert "none: 0.1 predicted, 0.2 seen" in hints(svg)
