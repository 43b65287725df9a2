"""Settings of the reader `ncf`: the files of the NCF paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from embershard.worker.job.data_section import DataSection, DrawnBy, Evaluation, Negatives

if TYPE_CHECKING:  # a job is checked in a second, without torch; a reader is imported when it is opened
    from embershard.worker.data.batch import Dataset


class NcfFilesSection(DataSection):
    """The three files of the NCF paper; `prefix` is their common name, such as ncf-ml-1m/ml-1m."""

    reader: Literal["ncf"]
    prefix: Path
    negatives: Negatives = 4  # negative samples for each interaction, drawn again in each epoch
    negatives_by: DrawnBy = "uniform"  # popularity: in proportion to how often each item was taken
    pairs = True

    @property
    def evaluation(self) -> Evaluation:
        """Each user's held-out item among its candidates."""
        return "candidates"

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return ("test",)

    @property
    def has_clicks(self) -> bool:
        """Whether samples have labels of both kinds."""
        return self.negatives > 0

    def files(self) -> dict[str, tuple[Path, ...]]:
        """Field -> the files that it names, under `root`."""
        return {"prefix": tuple(Path(f"{self.prefix}.{e}") for e in ("train.pairs", "test.rating", "test.negative"))}

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        from embershard.worker.data.interactions.files import look_at_ncf

        look_at_ncf(folder / self.root / self.prefix)

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.interactions.movielens import NcfData

        popular = self.negatives_by == "popularity"
        return NcfData(folder / self.root / self.prefix, negatives=self.negatives, by_popularity=popular, seed=seed)
