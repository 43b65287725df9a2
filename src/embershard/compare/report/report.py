"""Write the report of a comparison: report.html, which stands alone, and report.md with its pictures."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from io import StringIO
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from ruamel.yaml import YAML

from embershard.compare.report.charts import (
    byte_picture,
    calibration_pictures,
    quality_pictures,
    speed_pictures,
    step_pictures,
)
from embershard.compare.report.drawing import Picture, picture_style
from embershard.compare.report.page import Code, Page, PageBlock, PageSection, Pictures, Prose
from embershard.compare.report.summary import about, findings, headline, summary, warnings
from embershard.compare.report.tables import (
    arms_table,
    break_even_table,
    bytes_table,
    conditions_table,
    failures_table,
    fp16_baseline,
    quality_table,
    rates_table,
    short_table,
    speed_table,
    step_table,
    tables,
    waiting_table,
)
from embershard.compare.results import FILE_NAME, Results
from embershard.compare.units import link_text

_UNIT = re.compile(r"(\d) (?=(?:[TGMk]?bit/s|[GMk]?B|ms|s|min|h)\b|%)")  # a figure and its unit stay in one line
HTML, MARKDOWN, PICTURES = "report.html", "report.md", "pictures"


def page_of(results: Results) -> Page:
    """Build the whole report as data."""
    return Page(
        title=headline(results),
        about=about(results),
        summary=summary(results),
        warnings=warnings(results),
        findings=findings(results),
        sections=[section for section in _sections(results) if section.blocks],
    )


def write_report(results: Results, folder: Path) -> None:
    """Write report.html, report.md and its pictures to a folder, in place of an earlier report."""
    page = page_of(results)
    files = {HTML: html_of(page), MARKDOWN: markdown_of(page)}
    files |= {f"{PICTURES}/{picture.name}.svg": picture.alone() for picture in _pictures(page)}
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        beside = folder / f"{name}.tmp"
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, folder / name)
    for old in (folder / PICTURES).glob("*.svg"):
        if f"{PICTURES}/{old.name}" not in files:
            old.unlink()


def html_of(page: Page) -> str:
    """Render a page as HTML that stands alone: its style and its pictures are inside."""
    environment = _environment(autoescape=True)
    environment.filters["inline"] = _inline
    template = environment.get_template("report.html.j2")
    styles = Markup(picture_style() + _template("report.css"))
    return template.render(page=page, style=styles, svg=lambda picture: Markup(picture.svg))


def markdown_of(page: Page) -> str:
    """Render a page as Markdown; its pictures are files in `pictures`."""
    environment = _environment(autoescape=False)
    environment.filters["md"] = _markdown
    environment.filters["prose"] = _prose_markdown
    environment.filters["fence"] = _fence
    return environment.get_template("report.md.j2").render(page=page, pictures=PICTURES)


def _sections(results: Results) -> list[PageSection]:
    beside = fp16_baseline(results)
    against = [results.baseline, *([beside] if beside else [])]
    links = [(link.label, link_text(link)) for link in results.bandwidths]
    return [
        PageSection(title="In short", name="short", blocks=[short_table(results)]),
        PageSection(
            title="Speed",
            name="speed",
            blocks=[
                *_grid(speed_pictures(results, against)),
                *tables(speed_table(results), waiting_table(results), break_even_table(results)),
            ],
        ),
        PageSection(
            title="Quality",
            name="quality",
            blocks=[
                *_grid([*quality_pictures(results), *calibration_pictures(results)]),
                *_prose(_curve_notes(results)),
                *tables(*(quality_table(results, other) for other in against), rates_table(results)),
            ],
        ),
        PageSection(title="Bytes", name="bytes", blocks=[*_grid(byte_picture(results)), bytes_table(results)]),
        PageSection(
            title="Time of a step",
            name="steps",
            blocks=[
                *_grid(step_pictures(results)),
                *tables(*(step_table(results, label, words) for label, words in links)),
            ],
        ),
        PageSection(title="Failed runs", name="failures", blocks=[*tables(failures_table(results))]),
        PageSection(
            title="Settings",
            name="settings",
            blocks=[
                arms_table(results),
                conditions_table(results),
                Code(title="The job", text=_job(results), folded=True),
            ],
        ),
        PageSection(title="Reproduce", name="reproduce", blocks=_reproduce(results)),
    ]


def _curve_notes(results: Results) -> Iterable[str]:
    if len(results.seeds) < 2:
        yield "One seed: the curves have no bands."
    else:
        yield "Bands are 95 % intervals of the mean over seeds, point by point; wall time is the mean over seeds."
    if not results.full and any(link.bits_per_second is not None for link in results.bandwidths):
        yield (
            "Wall time on a limited link is samples over the arm's speed there: quality was measured once, without "
            "limit, because a link changes when a step ends, not what it computes."
        )
        if any("dgc:" in setting for arm in results.arms for setting in arm.settings):
            yield "For dgc this is the speed at its last density; its warm-up, which sends more, would take longer."
    if len(results.multiples) > 1:
        yield "Curves, bytes and times are those of the job's own learning rates."
    if any(run.stopped_early for run in results.runs):
        yield "A curve ends where the first of its seeds was stopped early."


def _reproduce(results: Results) -> list[PageBlock]:
    blocks: list[PageBlock] = [
        Prose(text="This command makes the whole comparison. Started again, it continues where it stopped:"),
        Code(title="The command", text=shlex.join(results.command)),
    ]
    if results.runs:
        run = results.runs[0]
        blocks += [
            Prose(text=f"This command makes one run, here the first one (`{run.key.replace('`', '')}`):"),
            Code(title="One run", text=shlex.join(["embershard", "train", results.job_file, *run.words])),
        ]
    return [*blocks, Prose(text=f"`{FILE_NAME}` holds every run with its command line, its curve and its figures.")]


def _job(results: Results) -> str:
    yaml, text = YAML(), StringIO()
    yaml.width = 100
    yaml.dump(_plain(results.job), text)
    return text.getvalue()


def _plain(value: object) -> object:
    """Replace tuples by lists and mappings by dicts, which YAML knows."""
    if hasattr(value, "items"):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _grid(pictures: Iterable[Picture]) -> list[PageBlock]:
    found = list(pictures)
    return [Pictures(pictures=found)] if found else []


def _prose(sentences: Iterable[str]) -> list[PageBlock]:
    return [Prose(text=" ".join(sentences))]


def _pictures(page: Page) -> list[Picture]:
    blocks = [block for section in page.sections for block in section.blocks]
    return [picture for block in blocks if isinstance(block, Pictures) for picture in block.pictures]


def _environment(autoescape: bool) -> Environment:
    return Environment(
        loader=PackageLoader("embershard.compare"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _template(name: str) -> str:
    return (Path(__file__).parents[1] / "templates" / name).read_text(encoding="utf-8")


def _inline(text: str) -> Markup:
    """Escape text for HTML; text in backticks becomes code."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if is_code else escape(_UNIT.sub("\\1\N{NO-BREAK SPACE}", part))
        for part, is_code in _parts(text)
    )


def _prose_markdown(text: str) -> str:
    return "".join(f"`{part}`" if is_code else _markdown(part) for part, is_code in _parts(text))


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Split text into (words, whether they stood in backticks); a lone backtick stays one."""
    for place, piece in enumerate(re.split("`([^`]+)`", text)):
        if piece:
            yield piece, place % 2 == 1


def _markdown(text: str) -> str:
    """Escape plain text for Markdown, also for a table's cell."""
    line = re.sub(r"\s+", " ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", line)


def _fence(text: str) -> str:
    """Make a fence longer than any run of backticks in the text."""
    return "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
