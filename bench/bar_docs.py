"""What README.md and docs/ tell a reader to type, typed; and the site as a reader sees it.

blocks    the Python and bash blocks of every page, from top to bottom, each page in a folder and a process of its own
          (tests/harness/pages.py says which words behind a block's language mean what)
tutorial  its blocks, within 15 minutes
schema    every job of examples/ and every whole job of a page against docs/job.schema.json, by jsonschema
links     every link and anchor of the built site leads somewhere; those to other sites are counted, not opened
browser   every page in Chromium, 1,400 and 390 pixels wide: nothing is wider than the window, no error is written to
          the console, every picture is there. Screenshots lie in the folder that is printed

`make docs` has built the site before. Prints a line per check and one JSON line; exits 1 with what failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ruamel.yaml import YAML

from timing import finish

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from harness.pages import PAGES, Block, blocks, run_page  # noqa: E402

SITE, SCREENSHOTS = ROOT / "build" / "docs", ROOT / "build" / "docs-screenshots"
DOCS_PYTHON = ROOT / ".venv-docs" / "bin" / "python"
PAGE_SECONDS, TUTORIAL_SECONDS = 1800.0, 15 * 60.0
WIDTHS = (1400, 390)


def run_here(page: Path) -> None:
    """Run a page in this process and folder, with shards for its name `addresses`."""
    with contextlib.ExitStack() as stack:

        def run(block: Block) -> None:
            if "usage" in block.words:
                return
            if "service" in block.words:
                for line in block.text.splitlines():
                    stack.enter_context(_service(line))
                time.sleep(15)  # until it serves
                return
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True)

        names: dict[str, object] = {}
        if "addresses" in page.read_text():
            from embershard.deploy.supervisor import LocalShards

            names["addresses"] = stack.enter_context(LocalShards(1)).addresses
        run_page(page, names, slow=True, run_commands=run)


@contextlib.contextmanager
def _service(line: str) -> Iterator[None]:
    process = subprocess.Popen(["bash", "-c", f"exec {line}"], start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def check_blocks(pages: Sequence[Path], failed: list[str]) -> dict[str, float]:
    """Run each page in a process of its own; its seconds by page."""
    seconds = {}
    for page in pages:
        if not any(block.language in ("python", "bash") for block in blocks(page)):
            continue
        name, start = str(page.relative_to(ROOT)), time.monotonic()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        with tempfile.TemporaryDirectory() as folder:
            python_path = os.pathsep.join([str(ROOT / "src"), folder, *sys.path[:1]])
            environment = {**os.environ, "PATH": path, "PYTHONPATH": python_path, "ROOT": str(ROOT)}
            environment.pop("EMBERSHARD_PS", None)
            command = [sys.executable, __file__, "--page", str(page)]
            try:
                done = subprocess.run(
                    command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PAGE_SECONDS
                )
                said = "" if done.returncode == 0 else (done.stdout + done.stderr)[-3000:]
            except subprocess.TimeoutExpired:
                said = f"not over after {PAGE_SECONDS:.0f} s"
        seconds[name] = round(time.monotonic() - start, 1)
        print(f"{name}: {seconds[name]} s{', FAILED' if said else ''}", flush=True)
        if said:
            failed.append(f"{name}: {said}")
    return seconds


_VALIDATE = """
import json, sys
import jsonschema
schema, jobs = json.load(open(sys.argv[1])), json.load(sys.stdin)
check = jsonschema.Draft202012Validator(schema)
wrong = [f"{name}: {error.message[:300]}" for name, job in jobs.items() for error in check.iter_errors(job)]
assert list(check.iter_errors({"model": {"name": "fm"}})), "a job without data fits the schema"
sys.exit("\\n".join(wrong) or 0)
"""


def check_schema(failed: list[str]) -> int:
    """Compare whole jobs with the schema; how many."""
    load = YAML(typ="safe").load
    jobs = {str(path.relative_to(ROOT)): load(path) for path in (ROOT / "examples").rglob("*.yaml")}
    of_pages = (block for page in PAGES for block in blocks(page) if block.language == "yaml")
    jobs |= {str(block): load(block.text) for block in of_pages if "job" in block.words}
    command = [str(DOCS_PYTHON), "-c", _VALIDATE, str(ROOT / "docs" / "job.schema.json")]
    done = subprocess.run(command, input=json.dumps(jobs), text=True, capture_output=True)
    if done.returncode:
        failed.append(f"schema: {done.stderr}")
    return len(jobs)


class _Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        self.links += [value for key in ("href", "src") if (value := given.get(key)) and tag != "link"]


def check_links(failed: list[str]) -> tuple[int, int]:
    """Follow the links of every built page; how many lead into the site, and out of it."""
    pages = {path: _Page(path) for path in SITE.rglob("*.html")}
    inside = outside = 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                outside += parts.scheme in ("http", "https")
                continue
            inside += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                failed.append(f"{path.relative_to(SITE)}: {link} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                failed.append(f"{path.relative_to(SITE)}: {link} has no such anchor")
    if inside < 100:
        failed.append(f"links: only {inside} in the site; was it built?")
    return inside, outside


_LOOK = """
import json, sys
from pathlib import Path
from playwright.sync_api import sync_playwright
site, out, chromium, widths = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
wrong = []
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    for width in widths:
        page = browser.new_page(viewport={"width": width, "height": 900})
        said = []
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        for path in sorted(site.rglob("*.html")):
            name = str(path.relative_to(site))
            page.goto(path.as_uri())
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            broken = page.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
            page.screenshot(path=str(out / f"{name.replace('/', '-').removesuffix('.html')}-{width}.png"))
            wrong += [f"{name} at {width}: {wide} pixels wider than the window"] if wide > 0 else []
            wrong += [f"{name} at {width}: no picture {source}" for source in broken]
            wrong += [f"{name} at {width}: console: {text}" for text in said]
            said.clear()
    browser.close()
sys.exit("\\n".join(wrong) or 0)
"""


def check_browser(failed: list[str]) -> int:
    """Look at every page; how many screenshots there are."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        failed.append("browser: there is no chromium; apt-get install chromium")
        return 0
    shutil.rmtree(SCREENSHOTS, ignore_errors=True)
    SCREENSHOTS.mkdir(parents=True)
    command = [str(DOCS_PYTHON), "-c", _LOOK, str(SITE), str(SCREENSHOTS), chromium, json.dumps(WIDTHS)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=1200)
    if done.returncode:
        failed.append(f"browser: {done.stderr[-3000:]}")
    print(f"screenshots: {SCREENSHOTS}")
    return len(list(SCREENSHOTS.iterdir()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="run the blocks of this page here, and nothing else")
    parser.add_argument("--only", nargs="*", default=[], help="pages whose names have one of these words")
    parser.add_argument("--site", action="store_true", help="look at the site alone, and run no blocks")
    words = parser.parse_args()
    if words.page is not None:
        run_here(words.page)
        return
    failed: list[str] = []
    pages = [page for page in PAGES if not words.only or any(word in str(page) for word in words.only)]
    seconds = {} if words.site else check_blocks(pages, failed)
    if seconds.get("docs/tutorial.md", 0.0) > TUTORIAL_SECONDS:
        failed.append(f"the tutorial took {seconds['docs/tutorial.md']} s")
    jobs, (inside, outside), screenshots = check_schema(failed), check_links(failed), check_browser(failed)
    figures = {"seconds": seconds, "jobs": jobs, "links": inside, "links_out": outside, "screenshots": screenshots}
    finish({"bar": "docs", **figures}, failed)


if __name__ == "__main__":
    main()
