"""The profile of a training run: the split of its steps, and a trace of some of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity

from embershard.proto.timing import Recorder

SPLIT_FILE, TRACE_FILE = "profile.json", "trace.json"
WARM_UP_STEPS = 20  # compile, grow tables and fill caches
TRACED_STEPS = 20


class Profile(Recorder):
    """Splits the steps of a run while it is installed, and writes profile.json and trace.json into `folder`.

    After a warm-up some steps are traced by torch.profiler (open the file in a browser's chrome://tracing or
    ui.perfetto.dev); all the following ones, which it does not slow down, make up the split.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._seen = 0  # steps
        self._torch: torch.profiler.profile | None = None  # while it traces

    def end(self) -> None:
        """End a step; start or end the trace where it is due."""
        self._seen += 1
        if self._seen > WARM_UP_STEPS + TRACED_STEPS:
            super().end()
            return
        if self._seen == WARM_UP_STEPS:
            self._start_trace()
        elif self._seen == WARM_UP_STEPS + TRACED_STEPS:
            self._end_trace()
        self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._end_trace()
        text = json.dumps(dataclasses.asdict(self.split()), indent=2)
        (self._folder / SPLIT_FILE).write_text(text + "\n", encoding="utf-8")

    def summary(self) -> str:
        """The split as a table, and where the files are."""
        needed = WARM_UP_STEPS + TRACED_STEPS
        if self._seen <= needed:
            return f"profile: {self._seen} steps are too few; parts of steps are timed after {needed} steps"
        traced = self._folder / TRACE_FILE
        return f"{self.split()}\nprofile: {self._folder / SPLIT_FILE}, trace of {TRACED_STEPS} steps: {traced}"

    def _start_trace(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        config = None
        with contextlib.suppress(TypeError):  # an older torch traces the training thread alone
            # the threads that pull, push and move bytes are half of the picture
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._torch = torch.profiler.profile(activities=activities, experimental_config=config)
        self._torch.start()

    def _end_trace(self) -> None:
        if self._torch is not None:
            self._torch.stop()
            self._torch.export_chrome_trace(str(self._folder / TRACE_FILE))
            self._torch = None
