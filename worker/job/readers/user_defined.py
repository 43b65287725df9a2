"""Settings of a reader of a user's own, `module:name`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field

from embershard.proto.errors import JobError
from embershard.worker.job.data_section import DataSection, Evaluation

if TYPE_CHECKING:  # a job is checked in a second, without torch; a reader is imported when it is opened
    from embershard.worker.data.batch import Dataset


class UserReaderSection(DataSection):
    """A reader of a user, `module:name`; fields that are not named here are its arguments.

    Whether a model fits its samples is checked when it is opened.
    """

    model_config = ConfigDict(extra="allow", serialize_by_alias=True)

    reader: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
    evaluates: Annotated[Literal["pointwise", "candidates"], Field(alias="evaluation")] = "pointwise"
    """pointwise: of labels; candidates: of ranked lists, for a reader whose batches have groups."""
    labels: Literal["probability", "any"] | None = None
    """probability: in 0..1, as binary cross-entropy needs them. Without it: any where the job has a loss of its own."""
    pairs = True

    @property
    def evaluation(self) -> Evaluation:
        """Return how the job evaluates the data: pointwise or candidates; `open` compares it with the reader's."""
        return self.evaluates

    @property
    def has_dense(self) -> bool:
        """Whether samples may have dense features."""
        return True

    @property
    def has_clicks(self) -> bool:
        """Whether samples must have labels of both kinds."""
        return False

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that it may have."""
        return ("valid", "test")

    def files(self) -> dict[str, tuple[Path, ...]]:
        """None: the reader alone knows which of its arguments are files."""
        return {}

    def takes(self, argument: str) -> bool:
        """Whether the reader can be called with an argument of that name."""
        from embershard.worker.data.user_defined import takes_argument

        return takes_argument(self.reader, argument)

    def open(self, folder: Path, seed: int) -> Dataset:
        """Call the reader. JobError where the job contradicts it; UserCodeFailed names file:line where it fails."""
        from embershard.worker.data.user_defined import open_reader

        root = (folder / self.root).resolve()
        dataset = open_reader(
            self.reader, self.model_extra or {}, root=root, seed=seed, any_labels=self.labels == "any"
        )
        if dataset.evaluation != self.evaluation:
            reason = f"is {self.evaluation}, but {self.reader} says {dataset.evaluation}: give both the same"
            raise JobError(where="data.evaluation", reason=reason)
        return dataset
