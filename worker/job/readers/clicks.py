"""Settings of the reader `clicks`, the built-in stream."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from embershard.worker.job.data_section import DataSection
from embershard.worker.job.sections import Count

if TYPE_CHECKING:  # a job is checked in a second, without torch; a reader is imported when it is opened
    from embershard.worker.data.batch import Dataset


class ClicksSection(DataSection):
    """The built-in click stream; `samples` is the length of an epoch, without which the stream is endless."""

    reader: Literal["clicks"]
    samples: Count | None = None
    eval_samples: Count = 100_000  # samples of valid, and of test

    @property
    def has_dense(self) -> bool:
        """Whether samples have dense features."""
        return True

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return ("valid", "test")

    @property
    def endless(self) -> bool:
        """Whether an epoch never ends."""
        return self.samples is None

    @property
    def costs_cpu(self) -> bool:
        """Whether making a batch costs more than handing it over."""
        return True

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.readers.clicks import ClickStream

        return ClickStream(samples=self.samples, eval_samples=self.eval_samples, seed=seed)
