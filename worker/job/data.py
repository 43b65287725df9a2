"""The section `data` of a job file: that of its reader, which its field `reader` names."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Tag

from embershard.worker.job.readers.adult import AdultSection
from embershard.worker.job.readers.clicks import ClicksSection
from embershard.worker.job.readers.columns import CtrCsvSection, ParquetSection
from embershard.worker.job.readers.criteo import CriteoSection
from embershard.worker.job.readers.interactions import ListsSection, SequencesSection
from embershard.worker.job.readers.ncf import NcfFilesSection
from embershard.worker.job.readers.ray import RaySection
from embershard.worker.job.readers.tabular import TabularSection
from embershard.worker.job.readers.user_defined import UserReaderSection
from embershard.worker.job.sections import CUSTOM


def reader(value: object) -> str | None:
    """The section of a reader; named like its field, as mistakes are."""
    name = value.get("reader") if isinstance(value, dict) else getattr(value, "reader", None)
    return CUSTOM if ":" in str(name) else name


AnyData = Annotated[
    Annotated[NcfFilesSection, Tag("ncf")]
    | Annotated[ListsSection, Tag("lists")]
    | Annotated[SequencesSection, Tag("sequences")]
    | Annotated[CtrCsvSection, Tag("ctr_csv")]
    | Annotated[ParquetSection, Tag("parquet")]
    | Annotated[CriteoSection, Tag("criteo")]
    | Annotated[AdultSection, Tag("adult")]
    | Annotated[ClicksSection, Tag("clicks")]
    | Annotated[TabularSection, Tag("tabular")]
    | Annotated[RaySection, Tag("ray")]
    | Annotated[UserReaderSection, Tag(CUSTOM)],
    Discriminator(reader),
]
