"""How many of our files a training step passes through, and how many requests it sends, over shards in this process.

A model of one Embedding and one Linear, wrapped, takes a few steps to warm up; then a profile hook follows every Python
call of one forward, and of one backward with session.step(). Compiled functions are seen too, because Numba reports
their calls to a profile hook. Threads are included.

files      source files of worker/, ps/, proto/ and src/embershard/ of which a function ran
crossings  calls into a file by a caller in another file: functions of other packages in between are left out, so a
           call from torch counts once, as it enters our code
requests   calls of Shard.handle, of the shard that had most

`PYTHONPATH=<another tree>/src python bench/way.py` measures another tree by the same script. Exits 1 above a bar.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import embershard as es
from timing import finish, print_table

ROOT = Path(es.__file__).resolve().parents[2]
FOLDERS = ("worker", "ps", "proto", "src/embershard")
WARM_UP = 3  # steps
ROWS, DIM, BATCH = 1000, 8, 32
BARS = {
    "forward": {"files": 20, "crossings": 70, "requests": 1},
    "backward + step": {"files": 20, "crossings": 60, "requests": 1},
}


@cache
def file_of(code: CodeType) -> str:
    """Path of a function's file below the root, or "" where it is not one of ours."""
    path = Path(code.co_filename).resolve()
    if not any(path.is_relative_to(ROOT / folder) for folder in FOLDERS):
        return ""
    return str(path.relative_to(ROOT))


@dataclass
class Way:
    """The calls of one part of a step."""

    calls: Counter[str] = field(default_factory=Counter)  # by file
    crossings: Counter[tuple[str, str]] = field(default_factory=Counter)  # by file of the caller ("": none), by file
    requests: Counter[int] = field(default_factory=Counter)  # by id of a Shard
    # by thread: the file that each function on the stack stands for. f_back will not do: Numba's frames have none.
    stacks: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def follow(self, frame: FrameType, event: str) -> None:
        """One event of the profile hook."""
        stack = self.stacks[threading.get_ident()]
        if event == "return":
            if stack:  # not so for functions that were called before the recording began
                stack.pop()
        elif event == "call":
            caller = stack[-1] if stack else ""
            file = file_of(frame.f_code)
            stack.append(file or caller)
            if file:
                self.calls[file] += 1
                if file != caller:
                    self.crossings[caller, file] += 1
                if frame.f_code.co_qualname == "Shard.handle":
                    self.requests[id(frame.f_locals["self"])] += 1

    def figures(self) -> dict[str, int]:
        if not self.requests:
            raise SystemExit("no call of Shard.handle was seen: the shard's entry has another name in this tree")
        return {
            "files": len(self.calls),
            "crossings": self.crossings.total(),
            "requests": max(self.requests.values()),
        }


class Recorder:
    """Follows the calls of every thread that starts after it, while `record` is open."""

    def __init__(self) -> None:
        self._way: Way | None = None
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def _hook(self, frame: FrameType, event: str, _: Any) -> None:
        if self._way is not None:
            self._way.follow(frame, event)

    @contextmanager
    def record(self, way: Way) -> Iterator[None]:
        self._way = way
        try:
            yield
        finally:
            self._way = None


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(ROWS, DIM)
        self.out = torch.nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.items(ids))  # type: ignore[no-any-return]


def measure(num_shards: int) -> dict[str, Way]:
    """The ways of the parts of one step."""
    gc.collect()  # what ends later, as an earlier session, is none of this one's calls
    recorder = Recorder()  # before the session: it may start threads
    torch.manual_seed(0)
    session = es.local(shards=num_shards)
    model = es.wrap(Model(), session, optimizer=es.Adagrad(lr=0.1))
    ways = {name: Way() for name in BARS}
    for step in range(WARM_UP + 1):
        ids = torch.randint(0, ROWS, (BATCH,))
        recorded = ways if step == WARM_UP else {name: Way() for name in BARS}
        with recorder.record(recorded["forward"]):
            out = model(ids)
        loss = out.sum()
        with recorder.record(recorded["backward + step"]):
            loss.backward()
            session.step()
    sys.setprofile(None)
    threading.setprofile(None)
    return ways


def judged(figures: dict[str, dict[str, int]]) -> list[str]:
    """What is above its bar."""
    return [
        f"{name}: {its[c]} {c}, at most {bar}"
        for name, its in figures.items()
        for c, bar in BARS[name].items()
        if its[c] > bar
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1, help="the bars are for one")
    parser.add_argument("--verbose", action="store_true", help="list files, and which file calls into which")
    options = parser.parse_args()
    ways = measure(options.shards)
    print(f"tree {ROOT}, {options.shards} shards")
    figures = {name: way.figures() for name, way in ways.items()}
    columns = ("files", "crossings", "requests")
    print_table(
        ["", *columns],
        [[name, *(f"{its[c]} (bar {BARS[name][c]})" for c in columns)] for name, its in figures.items()],
    )
    if options.verbose:
        for name, way in ways.items():
            entered = Counter[str]()
            for (_, file), count in way.crossings.items():
                entered[file] += count
            print(f"\n{name}: crossings into each file")
            print_table(["", "crossings", "calls"], [[f, n, way.calls[f]] for f, n in entered.most_common()])
            print(f"\n{name}: crossings from file to file (-: from outside)")
            print_table(["", "to", "crossings"], [[a or "-", b, n] for (a, b), n in way.crossings.most_common()])
    finish({"bench": "way", "shards": options.shards, **figures}, judged(figures))


if __name__ == "__main__":
    main()
