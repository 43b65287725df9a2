"""Sections of a job file for tables of any columns: what its features, labels and splits are made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from embershard.proto.spec import MAX_FLOAT32
from embershard.worker.data.files import as_file
from embershard.worker.job.data_section import (
    SPLITS,
    DataSection,
    Delimiter,
    Encoding,
    Evaluation,
    FileFormat,
    Name,
    on_disk,
)
from embershard.worker.job.sections import ONE_OR_MORE, Count, Section, Share

if TYPE_CHECKING:  # a job is checked in a second, without torch and pyarrow
    from embershard.worker.data.batch import Dataset
    from embershard.worker.data.preprocess import Preprocessor
    from embershard.worker.data.readers.tabular import Tabular

_MEANT_FOR = {  # field -> the types of features that have it
    "of": ("cross",),
    "column": ("category", "list", "sequence", "number"),
    "pooling": ("list",),
    "max_length": ("list", "sequence"),
    "too_long": ("list", "sequence"),
    "separator": ("list", "sequence"),
    "weights": ("list",),
    "weight_separator": ("list",),
    "transform": ("number",),
    "bucketise": ("number",),
    "missing": ("number",),
}
_OF_IDS = ("table", "dim", "ids", "num_ids", "buckets", "vocabulary", "min_count")


def _of_float32(value: float) -> float:
    if abs(value) > MAX_FLOAT32:
        raise ValueError(f"{value:g} is infinite in float32, which models compute with; give a number below 3.4e38")
    return value


def _texts_of_labels(value: object) -> object:
    """YAML's numbers and truth values as the texts that files have."""
    if isinstance(value, list | tuple):
        return tuple(str(one).lower() if isinstance(one, bool) else str(one) for one in value)
    return {name: _texts_of_labels(one) for name, one in value.items()} if isinstance(value, dict) else value


LabelTexts = tuple[str, str]  # of 0 and of 1
_GivenText = str | bool | int | float
_GivenTexts = tuple[_GivenText, _GivenText]


class FeatureSection(Section):
    """One feature: the column that it reads, and how its values become ids or a number."""

    type: Literal["category", "list", "sequence", "number", "cross"] | None = None
    """category: one value; list: several, pooled; sequence: several in order; cross: the values of several columns."""
    column: Name | None = None
    """Name of the column; by default the feature's name."""
    of: tuple[Name, ...] = ()
    """The columns of a cross."""
    table: Name | None = None
    """Name of the embedding table, which several features may share; by default the feature's name."""
    dim: Count | None = None
    """Dim of the rows of the table; by default `embedding.dim`."""
    ids: Literal["hashed", "exact"] | None = None
    """hashed: any value, as a 62-bit hash of (table, value); exact: integers that are ids themselves."""
    num_ids: Count | None = None
    """Exact ids are 0 to num_ids - 1."""
    buckets: Count | None = None
    """Number of rows that the hashed values share."""
    vocabulary: Name | None = None
    """File of the known values, one per line; all other values share one extra row."""
    min_count: Count | None = None
    """Values that occur at least this often in the training data have their own rows; all others share one row."""
    pooling: Literal["mean", "sum", "max"] | None = None
    """How the rows of a list become one vector; by default mean."""
    max_length: Count | None = None
    """Maximum number of values of a list (default 20) or a sequence (default 50)."""
    too_long: Literal["error", "truncate"] = "error"
    """error: refuse longer ones; truncate: keep the first values of a list, the last ones of a sequence."""
    separator: Name | None = None
    """Separator of the values of a list that is text, such as | in a|b|c."""
    weights: Name | None = None
    """Column of lists with the weights of the list's values."""
    weight_separator: Name | None = None
    """Character before the weight of a value in text, such as : in a:0.5|b:1."""
    transform: Annotated[tuple[Literal["log", "standardise", "min_max", "quantile"], ...], ONE_OR_MORE] = ()
    """Transforms of a number, in this order; their parameters are computed from the training data."""
    bucketise: Annotated[int, Field(ge=2)] | tuple[float, ...] | None = None
    """Replace the number by a bucket, which has its own row: a list of boundaries, or a number of equally large
    buckets.
    """
    missing: Annotated[float, AfterValidator(_of_float32)] = 0.0
    """Value of a missing number, after the transforms."""

    def columns(self, name: str) -> set[str]:
        """The columns that it reads, where this is its name."""
        own = self.of if self.type == "cross" else (self.column or name,)
        return {*own, *([self.weights] if self.weights else [])}

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind, fields = self.type or "category", type(self).model_fields
        given = {name for name in self.model_fields_set if getattr(self, name) != fields[name].default}
        for name in given & _MEANT_FOR.keys():
            if kind not in _MEANT_FOR[name]:
                raise ValueError(
                    f"Feature: {name} has no meaning for type {kind}, but for {', '.join(_MEANT_FOR[name])}"
                )
        is_number = kind == "number" and self.bucketise is None
        for name in given & set(_OF_IDS):
            if is_number or (kind == "number" and name not in ("table", "dim")):
                raise ValueError(f"Feature: {name} has no meaning for type number{'; give bucketise' * is_number}")
        if kind == "cross" and len(self.of) < 2:
            raise ValueError("Feature: of names two columns or more")
        if self.bucketise is not None and self.transform:
            raise ValueError("Feature: transform has no meaning with bucketise")
        if isinstance(self.bucketise, tuple) and list(self.bucketise) != sorted(set(self.bucketise)):
            raise ValueError("Feature: bucketise must ascend")
        if "log" in self.transform[1:] or len(set(self.transform) - {"log"}) > 1:
            raise ValueError("Feature: transform is log, then one of the others, or one of them")
        if self.weights is not None and self.weight_separator is not None:
            raise ValueError("Feature: weights are in a column, or behind weight_separator, not both")
        if (self.weights or self.weight_separator) and self.pooling == "max":
            raise ValueError("Feature: pooling max has no weights")
        ways = [n for n in ("buckets", "vocabulary", "min_count") if getattr(self, n) is not None]
        ways += ["ids"] if self.ids == "exact" else []
        if len(ways) > 1:
            raise ValueError(f"Feature: {ways[1]} contradicts {ways[0]}: a table numbers its values in one way")
        if self.num_ids is not None and self.ids != "exact":
            raise ValueError("Feature: num_ids has a meaning with ids: exact; for hashed ids give buckets")
        return self


class SplitSection(Section):
    """Divide the rows of one table into the splits train, valid and test."""

    by: Literal["random", "user", "time"]
    """random: by a hash of the columns that the features read; user: all rows of a user in one split; time: the latest
    rows in test.
    """
    column: Name | None = None
    """Column of the user, or of the time."""
    valid: Share = 0.0  # share of the rows
    test: Share = 0.0  # share of the rows
    at: Annotated[tuple[Any, ...], Field(max_length=2)] = ()
    """Times at which valid and test begin (or only test), instead of shares."""
    seed: int = 0  # of the hash: another seed gives another split

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.by == "random") != (self.column is None):
            raise ValueError(f"Split: column {'has no meaning' if self.column else 'is missing'} with by: {self.by}")
        if self.at and (self.by != "time" or self.valid or self.test):
            raise ValueError("Split: at has a meaning with by: time alone, and in place of valid and test")
        if not self.at and not 0 < self.valid + self.test < 1:
            raise ValueError("Split: valid and test are shares of the rows that leave some to train on, as 0.1")
        return self


class NegativesSection(Section):
    """Add samples of other items to each row, which is an interaction of a user with an item."""

    count: Count
    """Number of negative samples per row; their labels are 0."""
    by: Literal["uniform", "popularity"] = "uniform"
    """uniform: all items with the same probability; popularity: by their frequency in the training rows."""
    features: Annotated[tuple[Name, ...], Field(min_length=1), ONE_OR_MORE]
    """The features of the item; in a negative sample they come from another item."""


class TabularSection(DataSection):
    """Tables: Parquet, CSV, TSV or lines of JSON, gzipped or zstd too, here or at URLs that fsspec reads.

    `train`, `valid` and `test` are files, folders or patterns with *. The features are in the job's section `features`.
    """

    reader: Literal["tabular"]
    train: Annotated[tuple[Name, ...], Field(min_length=1), ONE_OR_MORE]
    valid: Annotated[tuple[Name, ...], ONE_OR_MORE] = ()
    test: Annotated[tuple[Name, ...], ONE_OR_MORE] = ()
    format: FileFormat | None = None
    """Format of the files; by default the files' names show it."""
    delimiter: Delimiter | None = None
    """Character between the columns of text; by default a comma, or a tab in TSV."""
    encoding: Encoding = "utf-8"
    """Encoding of text, such as cp1252."""
    decimal: Literal[".", ","] = "."
    """Decimal separator of numbers in CSV."""
    missing: Annotated[tuple[str, ...], ONE_OR_MORE] = ("",)
    """Texts that mean a missing number, such as ["", "NA", "-999"]; a number that equals one is missing, too."""
    columns: tuple[Name, ...] = ()
    """Names of the columns, for CSV files without a header line."""
    label: Annotated[tuple[Name, ...], ONE_OR_MORE] = ("label",)
    """Column of the label, or list of columns of several labels, some of which may be missing; []: each row has label
    1.
    """
    label_range: tuple[float, float] | Literal["any"] = (0.0, 1.0)
    """Smallest and largest label. Others than 0..1 need a loss of your own."""
    label_values: Annotated[
        LabelTexts | dict[Name, LabelTexts] | None,
        BeforeValidator(_texts_of_labels, json_schema_input_type=_GivenTexts | dict[str, _GivenTexts] | None),
    ] = None
    """Texts of the labels 0 and 1, such as ["no", "yes"], for all labels, or by column."""
    weight: Name | None = None
    """Column with the weight of each sample in the loss and in the metrics of labels."""
    split: SplitSection | None = None
    """Divides the rows of `train` into splits, instead of files `valid` and `test`."""
    negatives: NegativesSection | None = None
    """Negative samples, for interactions without a label."""
    catalogue: Annotated[tuple[Name, ...], ONE_OR_MORE] = ()
    """Files with the features of more items, among which feature_towers is evaluated."""
    features: Mapping[Name, FeatureSection] = {}
    """Set by the job's section `features`."""
    fitted: Annotated[
        dict[str, Any] | None,
        BeforeValidator(lambda value: _stored(value), json_schema_input_type=str | dict[str, Any] | None),
    ] = None
    """What preprocessing has computed from the training data, or a file with it; a run stores it with its model."""
    _first_rows_only: bool = PrivateAttr(default=False)
    _paired: tuple[str, ...] = PrivateAttr(default=())
    _ranked: tuple[str, ...] = PrivateAttr(default=())
    _user: str | None = PrivateAttr(default=None)

    @property
    def evaluation(self) -> Evaluation:
        """All items ranked for each row, where the model has features of an item; else labels and logits."""
        return "ranking" if self._ranked else "pointwise"

    @property
    def labels_of_samples(self) -> tuple[str, ...]:
        """The names of a sample's labels."""
        return self.label or ("label",)

    @property
    def texts_of_labels(self) -> dict[str, LabelTexts]:
        """Label -> the texts that stand for 0 and for 1, of those that are no numbers."""
        given = self.label_values
        return dict.fromkeys(self.label, given) if isinstance(given, tuple) else given or {}

    @property
    def has_dense(self) -> bool:
        """Whether samples have dense features."""
        return any(f.type == "number" and f.bucketise is None for f in self.features.values())

    @property
    def single_valued(self) -> list[str]:
        """The features of which a sample has one id."""
        return [
            name
            for name, f in self.features.items()
            if f.type in (None, "category", "cross") or f.bucketise is not None or f.max_length == 1
        ]

    @property
    def hashed(self) -> bool:
        """Whether some ids are hashes, of which no table can hold all."""
        numbered: dict[str, bool] = {}  # by table
        for name, feature in self.features.items():
            if feature.type != "number":
                ways = (feature.buckets, feature.vocabulary, feature.min_count, feature.num_ids)
                table = feature.table or name
                numbered[table] = numbered.get(table, False) or any(way is not None for way in ways)
        return not all(numbered.values())

    @property
    def pairs(self) -> bool:  # type: ignore[override]
        """Whether each sample is a user and an item."""
        return len(self.features) == 2 and all(f.type in (None, "category") for f in self.features.values())

    @property
    def has_clicks(self) -> bool:
        """Whether samples have labels of both kinds."""
        return True

    @property
    def judged_on(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        split = self.split
        if split is None:
            return super().judged_on
        if split.at:
            return ("valid", "test") if len(split.at) == 2 else ("test",)
        return tuple(part for part in ("valid", "test") if getattr(split, part))

    @property
    def streams_text(self) -> bool:
        """Whether text is read anew in each epoch, which does not tell in advance how many samples there are."""
        is_parquet = self.format == "parquet" or (self.format is None and self.train[0].endswith(".parquet"))
        return self.split is None and not is_parquet and (self.fitted is None or "samples" not in self.fitted)

    @property
    def costs_cpu(self) -> bool:
        """Whether making a batch costs more than handing it over."""
        return True

    def files(self) -> dict[str, tuple[Path, ...]]:
        """Field -> the local files and folders that it names, under `root`."""
        return on_disk({part: getattr(self, part) for part in (*SPLITS, "catalogue")})

    def problem(self) -> tuple[str, str] | None:
        """A field that contradicts others, and why."""
        if self.split is not None and (self.valid or self.test):
            return "split", "makes valid and test of the rows of train: remove it, or these files"
        if not self.features:
            reason = f"{self.reader} needs the section features, which says what to read: features: {{user: {{}}}}"
            return "reader", reason
        if self.catalogue and not self._ranked:
            return "catalogue", "has a meaning for model feature_towers, which ranks all items"
        if self._ranked:
            for field in ("label", "negatives", "weight"):
                if getattr(self, field):
                    return field, "has no meaning for feature_towers, which learns from positives alone: label: []"
        elif not self.label and self.negatives is None:
            return "label", "names no column, so that each row has label 1: add negatives"
        if self.negatives is not None:
            if len(self.label) > 1:
                return "negatives", "have one label"
            for name in self.negatives.features:
                if name not in self.features:
                    return "negatives", f"names {name!r}, which is no feature (there are: {', '.join(self.features)})"
            for name, other, column in self.shared_columns(self.negatives.features):
                reason = f"names {name!r}, and not {other!r}, which reads column {column!r}, too: a negative"
                return "negatives", f"{reason} would have the values of two rows, which tells its label; remove one"
        texts = self.texts_of_labels
        for name, (zero, one) in texts.items():
            if name not in self.label:
                return "label_values", f"names {name!r}, which is no label (there are: {', '.join(self.label)})"
            if zero == one:
                return "label_values", f"gives 0 and 1 of {name!r} one text, {one!r}: name that of 0, then that of 1"
        if texts and "label_range" in self.model_fields_set:
            return "label_range", "has no meaning with label_values, which are 0 and 1; remove it"
        if self.label_range != "any" and not self.label_range[0] < self.label_range[1]:
            return "label_range", "is the least and the largest label, as [0, 1]"
        return None

    def shared_columns(self, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
        """Each of these features that reads a column which one beside them reads too, that one, and the column."""
        for name, other in product(names, self.features):
            common = self.features[name].columns(name) & self.features[other].columns(other)
            if common and other not in names:
                yield name, other, min(common)

    def tabular(self, folder: Path) -> Tabular:
        """Return the reader of the files under `folder`. BadFeature where features contradict each other."""
        from embershard.worker.data.negatives import NegativeSampling
        from embershard.worker.data.readers.tabular import LabelColumns, RowSplit, Tabular
        from embershard.worker.data.readers.tabular_files import TableFormat

        where = folder / self.root
        return Tabular(
            files={
                part: [as_file(where, name) for name in getattr(self, part)] for part in SPLITS if getattr(self, part)
            },
            preprocessor=self.preprocessor(),
            labels=LabelColumns(
                names=self.label,
                range=None if self.label_range == "any" else self.label_range,
                texts=self.texts_of_labels,
                weight=self.weight,
            ),
            how=TableFormat(
                format=self.format,
                delimiter=self.delimiter,
                encoding=self.encoding,
                decimal=self.decimal,
                missing=self.missing,
                columns=self.columns,
            ),
            split=None if self.split is None else RowSplit(**self.split.model_dump(), parts=("train", *self.judged_on)),
            vocabulary_folder=where,
            negatives=None if self.negatives is None else NegativeSampling(**self.negatives.model_dump()),
            ranked=self._ranked,
            user=self._user,
            catalogue=[as_file(where, name) for name in self.catalogue],
        )

    def preprocessor(self) -> Preprocessor:
        """Return the maker of ids and dense features of columns. BadFeature where features contradict each other."""
        from embershard.worker.data.preprocess import FeatureSpec, Preprocessor

        features = {name: FeatureSpec(**section.model_dump()) for name, section in self.features.items()}
        missing = [text.replace(self.decimal, ".") for text in self.missing if text]
        return Preprocessor(features, self.fitted, self.label, self._paired, missing)

    def for_model(
        self,
        features: Mapping[str, FeatureSection],
        paired: tuple[str, ...],
        ranked: tuple[str, ...] = (),
        user: str | None = None,
    ) -> Self:
        """This section with the features of the job, the sequences that its model reads place by place, the features
        of the items that it ranks, and that of the user for whom it does.
        """
        copy = self.model_copy(update={"features": features})
        copy._paired, copy._ranked, copy._user = paired, ranked, user
        return copy

    def first_rows(self) -> DataSection:
        """This section, whose features are fitted on the first rows alone."""
        copy = self.model_copy()
        copy._first_rows_only = True
        return copy

    def look(self, folder: Path) -> None:
        """Try the first rows of every file."""
        self.tabular(folder).look()

    def with_fitted(self, stored: object) -> Self:
        """This section with what was learnt before."""
        return self.model_copy(update={"fitted": stored})

    def fit(self, folder: Path, seed: int) -> Self:
        """This section with what its features need of the training data, which is read once if they need something."""
        tabular = self.tabular(folder)
        return self.with_fitted(tabular.fit(seed)) if tabular.needs_fit() else self

    def open(self, folder: Path, seed: int) -> Dataset:
        """Open the reader that this section describes."""
        tabular = self.tabular(folder)
        return tabular.open_first_rows(seed) if self._first_rows_only else tabular.open(seed=seed)


def _stored(value: object) -> object:
    """What a file holds; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        found: object = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{value} cannot be read: {error}") from None
    return found["fitted"] if isinstance(found, Mapping) and "fitted" in found else found
