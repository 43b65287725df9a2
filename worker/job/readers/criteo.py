"""Settings of the reader `criteo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from embershard.worker.job.data_section import DataSection, Paths, SomePaths

if TYPE_CHECKING:  # a job is checked in a second, without torch; a reader is imported when it is opened
    from embershard.worker.data.batch import Dataset


class CriteoSection(DataSection):
    """Criteo's files as published, in memory or (stream) read anew in each epoch."""

    reader: Literal["criteo"]
    train: SomePaths  # files to train on
    valid: Paths = ()  # files to evaluate on
    test: Paths = ()  # other files to evaluate on
    stream: bool = False  # read the files anew in each epoch, instead of keeping all samples in memory

    @property
    def has_dense(self) -> bool:
        """Whether samples have dense features."""
        return True

    @property
    def hashed(self) -> bool:
        """Whether ids are hashes of feature and value."""
        return True

    @property
    def streams_text(self) -> bool:
        """Whether text is read anew in each epoch."""
        return self.stream

    def first_rows(self) -> DataSection:
        """Return this section as a stream, which opens without reading whole files."""
        return self.model_copy(update={"stream": True})

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        from embershard.worker.data.readers.criteo import look

        look(self.paths(folder))

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.readers.criteo import CriteoTsv, CriteoTsvStream

        return (CriteoTsvStream if self.stream else CriteoTsv)(self.paths(folder), seed=seed)
