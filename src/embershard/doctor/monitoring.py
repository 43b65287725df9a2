"""Check of the pages that shards and workers serve for Prometheus and for probes."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from embershard.doctor.case import Case
from embershard.doctor.check import Finding, check, fail, ok, some, warn
from embershard.proto.errors import CannotListen
from embershard.proto.monitoring.exporter import parse_address
from embershard.proto.timing import Deadline

_SECONDS = 2.5  # for all pages of all addresses
_SLOW_SCRAPE_SECONDS = 1.0  # Prometheus gives up after 10
_MOST_BYTES = 64 * 2**20  # what is longer is no page of ours
_SERIES = re.compile(rb"^embershard_\w+[{ ]", re.MULTILINE)


@dataclass(slots=True)
class _Pages:
    """What one address serves."""

    address: str
    problem: str = f"no answer within {_SECONDS} s"
    not_ready: str = ""
    series: int = 0
    scrape_seconds: float = 0.0

    def ask(self) -> None:
        try:
            self.problem = self._asked()
        except CannotListen:
            self.problem = "write host:port"
        except http.client.HTTPException:
            self.problem = "another program answers there"
        except TimeoutError:
            pass  # as at first: no answer
        except OSError as error:
            self.problem = error.strerror or str(error)

    def _asked(self) -> str:
        """What is wrong with it; empty where nothing is."""
        start = time.perf_counter()
        status, body = self._get("/metrics")
        self.scrape_seconds, self.series = time.perf_counter() - start, len(_SERIES.findall(body))
        if status != http.client.OK:
            return f"/metrics: {status}, {_line(body)}"
        status, body = self._get("/livez")
        if status != http.client.OK:
            return f"not live: {_line(body)}"
        status, body = self._get("/readyz")
        self.not_ready = "" if status == http.client.OK else _line(body)
        return ""

    def _get(self, path: str) -> tuple[int, bytes]:
        host, port = parse_address(self.address)
        connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            if not response.getheader("Server", "").startswith("embershard"):
                raise http.client.HTTPException
            return response.status, response.read(_MOST_BYTES)
        finally:
            connection.close()


@check(
    "metrics",
    asks="whether each address of --metrics answers Prometheus and probes, and whether the process is live and ready",
    remedy="start the shard or worker with --metrics HOST:PORT, and open that port for Prometheus; restart a process "
    "that is not live, and see the output of one that stays not ready",
)
def metrics(case: Case) -> Finding | None:
    """Ask for /metrics, /livez and /readyz as Prometheus and Kubernetes do, at all addresses at once."""
    if not case.metrics:
        return None
    pages = _ask(case.metrics)
    problems = [f"{its.address}: {its.problem}" for its in pages if its.problem]
    if problems:
        return fail(some(problems))
    waiting = [f"{its.address} is not ready: {its.not_ready}" for its in pages if its.not_ready]
    slow = [
        f"{its.address}: a scrape took {its.scrape_seconds:.1f} s"
        for its in pages
        if its.scrape_seconds > _SLOW_SCRAPE_SECONDS
    ]
    if waiting or slow:
        return warn(some([*waiting, *slow]))
    slowest = max(its.scrape_seconds for its in pages)
    return ok(f"{len(pages)} answer, {sum(its.series for its in pages):,} series, in {slowest * 1e3:.0f} ms at most")


def _ask(addresses: Sequence[str]) -> list[_Pages]:
    pages = [_Pages(address) for address in addresses]
    limit = Deadline(timedelta(seconds=_SECONDS))
    threads = [threading.Thread(target=its.ask, daemon=True) for its in pages]  # a name server may hang
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, limit.seconds))
    return pages


def _line(body: bytes) -> str:
    return body.decode(errors="replace").strip()[:200]


CHECKS = (metrics,)
