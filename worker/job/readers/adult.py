"""Settings of the reader `adult`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from embershard.worker.job.data_section import DataSection

if TYPE_CHECKING:  # a job is checked in a second, without torch; a reader is imported when it is opened
    from embershard.worker.data.batch import Dataset


class AdultSection(DataSection):
    """Reads the files of the Adult census data."""

    reader: Literal["adult"]
    train: Path  # file to train on (adult.data)
    test: Path | None = None  # file to evaluate on (adult.test)
    standardise: bool = False  # scale each number to mean 0 and standard deviation 1
    shuffle: bool = True  # train in another order in each epoch; false: in the order of the file
    labels: Annotated[tuple[Literal["income", "never_married"], ...], Field(min_length=1)] = ("income",)
    """The labels that a sample has."""
    skip: tuple[str, ...] = ()
    """Categorical features that are left out."""

    @property
    def labels_of_samples(self) -> tuple[str, ...]:
        """The names of a sample's labels."""
        return self.labels

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        if "never_married" in self.labels and not {"marital_status", "relationship"} <= set(self.skip):
            return "skip", "must name marital_status and relationship, which tell the label never_married"
        return None

    @property
    def has_dense(self) -> bool:
        """Whether samples have dense features."""
        return True

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        from embershard.worker.data.readers.adult import look

        look(paths[0] for paths in self.paths(folder).values())

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        from embershard.worker.data.readers.adult import Adult

        paths = {split: found[0] for split, found in self.paths(folder).items()}
        return Adult(
            paths["train"],
            paths.get("test"),
            standardise=self.standardise,
            shuffle=self.shuffle,
            labels=self.labels,
            skip=self.skip,
            seed=seed,
        )
