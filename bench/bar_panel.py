"""The panel in a real Chromium: how soon a sample is seen, what leaves the page, and what it costs the browser.

Shards serve in this process, over TCP as they would elsewhere, except in `job`; Chromium is driven by Playwright. Six
rounds:

- `latency`: two shards, which are pulled from, sampled twice a second. From the moment that they are asked until the
  frame after the page has shown the sample: p95 <= 250 ms.
- `heap`: ten thousand samples, fifty a second; the heap after a garbage collection grows by at most 2 MiB over the
  second half.
- `hundred`: 100 shards, the first one, of 1,000 tables, opened; scrolled up and down. No task of the page's main thread
  takes over 100 ms, and p99 of the script of a frame is at most 8 ms. Both are CPU time of that thread, from a trace,
  since the machine may be busy.
- `rare`: shards that are down, never answered and lost their rows, a worker that waits for many, large and small
  counts: each is shown whole, and as what it is. Nothing is wider than a window of 320 pixels. A page that is hidden
  ends its stream, and makes it anew when it is shown.
- `silent`: nobody pulls any more; the last latencies are greyed, as what they are: numbers of the past.
- `job`: the page is opened while `embershard train --dash` begins; it shows each sample, the loss and the metric, and
  once more after the run has ended, from its folder.

In all of them: no request off the page's origin, no error on its console. Prints one JSON line; exits 1 below the bar,
and where there is no Chromium (apt-get install chromium).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from embershard.dash import server
from embershard.dash.run_log import FollowedLog
from embershard.dash.sampler import INTERVAL_SECONDS, PanelSample, Sampler
from embershard.dash.shards import ShardRow
from embershard.dash.workers import WorkerRow
from embershard.proto.messages import Pull, TableIds
from embershard.proto.transport.addresses import transport_for
from timing import finish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from harness.eventually import eventually
from harness.processes import EMBERSHARD
from harness.served import ServedShard
from harness.shards import make_shard, table

ROOT = Path(__file__).resolve().parent.parent
LATE_SECONDS, HIDDEN_SECONDS = 3, 10  # as of charts.js and panel.js
LATENCY_MS, HEAP_GROWTH_MIB, TASK_MS, SCRIPT_MS = 250.0, 2.0, 100.0, 8.0
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--js-flags=--expose-gc"]
SCRIPT = {"FireAnimationFrame", "FunctionCall", "EventDispatch", "RunMicrotasks", "TimerFire", "EvaluateScript"}
# when each sample was seen: the frame after the one in which the page marked it as shown
WATCH = """
window.seen = {};
new MutationObserver(() => {
  const number = document.body.dataset.shown;
  requestAnimationFrame(() => setTimeout(() => { window.seen[number] ??= Date.now() / 1000; }));
}).observe(document, {subtree: true, attributes: true, attributeFilter: ["data-shown"]});
"""


Changes = Callable[[PanelSample], PanelSample]


@contextlib.contextmanager
def shards(count: int, tables: int = 1) -> Iterator[list[str]]:
    """So many shards, each as one of its own; the first has so many tables."""
    with contextlib.ExitStack() as stack:
        served = []
        for k in range(count):
            more = [table(f"t{one}", dim=16) for one in range(1, 1 if k else tables)]
            served.append(ServedShard(shard=make_shard(table(dim=16), *more)))
            stack.callback(served[-1].stop)
        yield [one.address for one in served]


@contextlib.contextmanager
def panel(
    addresses: list[str], interval: float, run: FollowedLog | None = None, change: Changes = replace
) -> Iterator[tuple[str, dict[int, float]]]:
    """A panel of these shards and this run; its address, and when each sample was made. `change` changes samples."""
    sampler, made = Sampler(addresses, run, interval=interval), {}
    sample = sampler.sample

    def noted() -> Any:
        one = sampler.last = change(sample())
        made[one.number] = one.time
        return one

    sampler.sample = noted  # type: ignore[method-assign]
    sock = server.listen("127.0.0.1:0")
    running = server.PanelServer(uvicorn.Config(server.make_app(sampler), log_level="warning"))
    thread = threading.Thread(target=running.run, args=([sock],))
    thread.start()
    try:
        yield server.url_of(sock), made
    finally:
        running.should_exit = True
        thread.join(20)


@contextlib.contextmanager
def pulled(addresses: list[str]) -> Iterator[None]:
    """Someone pulls rows from the shards, a hundred times a second."""
    stop = threading.Event()

    def pull() -> None:
        transports = [transport_for(address) for address in addresses]
        request = Pull(1, (TableIds("items", np.arange(1000)),))
        while not stop.wait(0.01):
            for transport in transports:
                transport.submit(request, timedelta(seconds=20)).result()
        for transport in transports:
            transport.close()

    thread = threading.Thread(target=pull)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Watched:
    """A page that is watched for what leaves it and what goes wrong."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.context = browser.new_context(viewport={"width": 1400, "height": 900})
        self.page: Page = self.context.new_page()
        self.strangers: list[str] = []
        self.errors: list[str] = []
        self.page.on(
            "request", lambda asked: None if self._is_own(asked.url, url) else self.strangers.append(asked.url)
        )
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.add_init_script(WATCH)
        self.page.goto(url)
        eventually(lambda: self.shown() >= 0, 60)
        self.devtools: CDPSession = self.context.new_cdp_session(self.page)

    @staticmethod
    def _is_own(asked: str, url: str) -> bool:
        return asked.startswith((url, "data:"))

    def heap_mib(self) -> float:
        """What the page holds after a collection."""
        self.devtools.send("HeapProfiler.collectGarbage")
        return float(self.devtools.send("Runtime.getHeapUsage")["usedSize"]) / 2**20

    def shown(self) -> int:
        return int(self.page.evaluate("document.body.dataset.shown ?? -1"))

    def close(self) -> dict[str, list[str]]:
        self.context.close()
        return {"off_origin": self.strangers, "console_errors": self.errors}


def latency(browser: Browser, seconds: float) -> dict[str, object]:
    with shards(2) as addresses, pulled(addresses), panel(addresses, INTERVAL_SECONDS) as (url, made):
        page = Watched(browser, url)
        time.sleep(seconds)
        seen = {int(number): at for number, at in page.page.evaluate("window.seen").items()}
        waits = [1e3 * (at - made[number]) for number, at in seen.items() if number in made][2:]
        p50, p95 = np.percentile(waits, [50, 95])
        return {"samples": len(waits), "p50_ms": round(p50, 1), "p95_ms": round(p95, 1), **page.close()}


def heap(browser: Browser, samples: int) -> dict[str, object]:
    with shards(2) as addresses, pulled(addresses), panel(addresses, 0.02) as (url, _):
        page = Watched(browser, url)
        page.page.evaluate("window.seen = new Proxy({}, {set: () => true})")  # its own growth is not the page's
        sizes = []
        for goal in (samples // 2, samples):
            while page.shown() < goal:
                time.sleep(0.5)
            sizes.append(page.heap_mib())
        return {"samples": page.shown(), "mib": [round(size, 2) for size in sizes], **page.close()}


def hundred(browser: Browser, seconds: float) -> dict[str, object]:
    with shards(100, tables=1000) as addresses, pulled(addresses[:4]), panel(addresses, INTERVAL_SECONDS) as (url, _):
        page = Watched(browser, url)
        page.page.locator("#shards tr[tabindex]").first.click()
        time.sleep(5)
        browser.start_tracing(page=page.page, categories=["toplevel", "devtools.timeline", "__metadata"])
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for way in (400, 400, 400, -400, -400, -400):
                page.page.mouse.wheel(0, way)
                time.sleep(0.1)
        tasks, scripts = main_thread(json.loads(browser.stop_tracing())["traceEvents"])
        rows = page.page.locator("#shards tr[tabindex]").count()
        figures = {
            "rows": rows,
            "frames": len(scripts),
            "script_p50_ms": round(float(np.percentile(scripts, 50)), 2),
            "script_p99_ms": round(float(np.percentile(scripts, 99)), 2),
            "longest_task_ms": round(max(tasks), 1),
        }
        return {**figures, **page.close()}


def silent(browser: Browser) -> dict[str, object]:
    numbers = "#chart-latency .legend b"
    with shards(2) as addresses, panel(addresses, INTERVAL_SECONDS) as (url, _):
        with pulled(addresses):
            page = Watched(browser, url)
            time.sleep(5)
            fresh = page.page.locator(f"{numbers}:not(.old)").count()
        time.sleep(LATE_SECONDS + 5)  # latencies are those of the last two seconds, and are drawn in steps of more
        old = page.page.locator(f"{numbers}.old").count()  # of pulls alone: there was no push
        return {"numbers": fresh, "greyed": old, **page.close()}


def rare(browser: Browser) -> dict[str, object]:
    held = {"rows": 123_456_789, "used_bytes": 100 << 30, "budget_bytes": 200 << 30, "stale": False, "age": 0.1}
    rows = [ShardRow(address=f"tcp://10.0.0.{k}:7700", shard=k, health="serving", **held) for k in range(5)]
    rows[1] = replace(rows[1], health="down", stale=True, age=3700.0)
    rows[2] = replace(rows[2], health="rows lost")
    rows[3] = ShardRow(address="tcp://10.0.0.3:7700", health="down", problem="no route")
    workers = [WorkerRow(worker=k, state="trains", clock=1_000_000 + k, lease=9.5) for k in range(50)]
    workers[0] = replace(workers[0], state="waits", seconds=12.0, waits_for=list(range(1, 50)))

    def change(sample: PanelSample) -> PanelSample:
        return replace(sample, shards=rows, workers=workers, staleness=[10, *[0] * 31])

    wanted = {
        "#fact-shards .note": "down: 2, rows lost: 1",
        "#chart-staleness .legend": "staleness of 10 pushes, in updates",
        "#shards tr:nth-child(2) td:nth-child(2)": "down, 1 h 1 min ago",
        "#shards tr:nth-child(4) td:nth-child(1)": "10.0.0.3:7700",
        "#shards tr:nth-child(4) td:nth-child(3)": "\u2013",
        "#workers tr:nth-child(1) td:nth-child(2)": "waits for 49 workers, 12 s",
        "#workers tr:nth-child(1) td:nth-child(3)": "1,000,000",
    }
    with panel([], INTERVAL_SECONDS, change=change) as (url, _):
        page = Watched(browser, url)
        time.sleep(2)
        places = [(where, page.page.locator(where)) for where in wanted]
        wrong = [f"{where}: {at.inner_text()}" for where, at in places if at.inner_text() != wanted[where]]
        cut = "node => node.scrollWidth > node.clientWidth"
        wrong += [f"{where} is cut" for where, at in places if at.evaluate(cut)]
        page.page.keyboard.press("w")
        time.sleep(0.5)
        below = "document.querySelector('#title-workers').getBoundingClientRect().top >= "
        if not page.page.evaluate(below + "document.querySelector('header').getBoundingClientRect().bottom"):
            wrong.append("the key W: the title is behind the header")
        page.page.set_viewport_size({"width": 320, "height": 700})
        if page.page.evaluate("document.documentElement.scrollWidth") > 320:
            wrong.append("the page is wider than 320 pixels")
        wrong += hidden(page)
        return {"wrong": wrong, **page.close()}


def hidden(page: Watched) -> Iterator[str]:
    """What a page does wrong that is hidden and shown again."""
    hide = "Object.defineProperty(document, 'hidden', {get: () => %s, configurable: true});"
    tell = "document.dispatchEvent(new Event('visibilitychange'));"
    page.page.evaluate(hide % "true" + tell)
    time.sleep(HIDDEN_SECONDS + 2)
    shown = page.shown()
    time.sleep(LATE_SECONDS + 2)
    if page.shown() != shown:
        yield "a page that is hidden has its stream still"
    page.page.evaluate(hide % "false" + tell)
    time.sleep(2)
    if page.shown() == shown or page.page.locator("#banner").is_visible():
        yield "a page that is shown again shows no new sample"


def job(browser: Browser) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        words = [*EMBERSHARD, "train", str(ROOT / "examples/demo.yaml"), "--dash", "--output", folder]
        words += ["--set", "train.samples=1_000_000", "--set", "evaluate.every=100_000"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as train:
            assert train.stdout is not None
            try:
                url = next(found[0] for line in train.stdout if (found := re.search(r"http://[\d.:]+/", line)))
                page = Watched(browser, url)
                threading.Thread(target=train.stdout.read, daemon=True).start()  # a full pipe would stop the job
                eventually(lambda: any(map(str.isdigit, facts(page)[2])), 60)
                shown = page.shown()
                eventually(lambda: page.shown() > shown + 10, 60)
                training = facts(page)
                watched = page.close()
                train.wait(250)
            finally:
                train.terminate()
        (run,) = (path.parent for path in Path(folder).rglob("log.jsonl"))
        with panel([], INTERVAL_SECONDS, FollowedLog(run)) as (url, _):
            page = Watched(browser, url)
            time.sleep(2)
            ended, last = facts(page), page.close()
    return {"training": training, "ended": ended, **{what: seen + last[what] for what, seen in watched.items()}}


def facts(page: Watched) -> list[str]:
    """The job's state, its loss and its metric, as the page shows them."""
    return [page.page.locator(place).inner_text() for place in ("#state", "#fact-loss b", "#fact-figure b")]


def main_thread(events: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """CPU milliseconds of each task of the page's main thread, and of each frame's script, from a trace."""
    frames = [event for event in events if event["name"] == "FireAnimationFrame"]
    thread = Counter((event["pid"], event["tid"]) for event in frames).most_common(1)[0][0]
    own = [event for event in events if (event["pid"], event["tid"]) == thread and event.get("ph") == "X"]
    tasks = [event.get("tdur", event["dur"]) / 1e3 for event in own if event["name"].endswith("RunTask")]
    starts = sorted({event["ts"] for event in frames})
    spent = [0.0] * (len(starts) + 1)
    end = 0.0
    for event in sorted((event for event in own if event["name"] in SCRIPT), key=lambda event: event["ts"]):
        if event["ts"] >= end:  # else it is inside the one before
            end = event["ts"] + event["dur"]
            spent[bisect(starts, event["ts"])] += event.get("tdur", event["dur"]) / 1e3
    return tasks, spent[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the rounds latency and hundred")
    parser.add_argument("--samples", type=int, default=10_000, help="of the round heap")
    parser.add_argument("--only", choices=("latency", "heap", "hundred", "silent", "rare", "job"))
    given = parser.parse_args()
    if shutil.which(given.chromium) is None:
        sys.exit(f"bar-panel: there is no Chromium at {given.chromium}: apt-get install chromium")
    rounds = {
        "latency": lambda browser: latency(browser, given.seconds),
        "heap": lambda browser: heap(browser, given.samples),
        "hundred": lambda browser: hundred(browser, given.seconds),
        "silent": silent,
        "rare": rare,
        "job": job,
    }
    figures: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.chromium, args=FLAGS)
        for name, run in rounds.items():
            if given.only in (None, name):
                figures[name] = run(browser)
                print(json.dumps({name: figures[name]}), file=sys.stderr, flush=True)
        browser.close()
    finish(figures, below(figures))


def below(figures: dict[str, Any]) -> list[str]:
    """What misses the bar."""
    failures = []
    for name, found in figures.items():
        wrong = [what for what in ("off_origin", "console_errors") if found[what]]
        failures += [f"{name}: {len(found[what])} {what}: {found[what][:3]}" for what in wrong]
    if "latency" in figures and not figures["latency"]["p95_ms"] <= LATENCY_MS:
        failures.append(f"p95 from sample to pixel: {figures['latency']['p95_ms']} ms")
    if "heap" in figures and figures["heap"]["mib"][1] - figures["heap"]["mib"][0] > HEAP_GROWTH_MIB:
        failures.append(f"the heap grew: {figures['heap']['mib']} MiB")
    if "silent" in figures and figures["silent"]["greyed"] != 2:
        failures.append(f"of the last p50 and p99 of pulls, {figures['silent']['greyed']} are greyed")
    failures += figures.get("rare", {}).get("wrong", [])
    states = {figures["job"][when][0] for when in ("training", "ended")} if "job" in figures else set()
    if states not in (set(), {"training", "ended well"}, {"evaluating", "ended well"}):
        failures.append(f"a job is shown as {figures['job']['training']}, and ended as {figures['job']['ended']}")
    if "hundred" in figures:
        found = figures["hundred"]
        failures += [f"{found['rows']} rows of 100"] if found["rows"] != 100 else []
        failures += [f"script of a frame: {found['script_p99_ms']} ms"] if found["script_p99_ms"] > SCRIPT_MS else []
        failures += [f"longest task: {found['longest_task_ms']} ms"] if found["longest_task_ms"] > TASK_MS else []
    return failures


if __name__ == "__main__":
    main()
