"""A training job: the sections of a job file, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from embershard.proto import spec
from embershard.worker.job.compression import AnyCompression
from embershard.worker.job.data import AnyData
from embershard.worker.job.data_section import LOWER_IS_BETTER, METRICS, MORE_METRICS
from embershard.worker.job.readers.tabular import FeatureSection, TabularSection
from embershard.worker.job.readers.user_defined import UserReaderSection
from embershard.worker.job.sections import (
    AnyLoss,
    AnyModel,
    Code,
    CodeSection,
    DINSection,
    FeatureTowersSection,
    Section,
    SimpleXSection,
    TwoTowerSection,
    UserModelSection,
)
from embershard.worker.job.training import (
    DEFAULT_INITIALIZER,
    CheckpointSection,
    DenseMode,
    DenseSection,
    EmbeddingSection,
    EvaluateSection,
    Metric,
    NetworkSection,
    Pattern,
    StrategyName,
    TrainSection,
)

DEFAULT_DIM = 16


def _or_default(value: object) -> object:
    return {} if value is None else value


def _with_defaults(value: object) -> object:
    """YAML's `user:` for a feature without fields."""
    return {k: _or_default(v) for k, v in value.items()} if isinstance(value, dict) else value


def _number_of_shards(value: object) -> object:
    if isinstance(value, dict):
        raise ValueError("is a number; what else is said of shards stands beside it: `shards: 2` and `durability: log`")
    return value


Workers = Annotated[int, Field(ge=1, le=65_535)]  # the number behind the last one is of who only reads
Shards = Annotated[int, Field(ge=1, le=4096)]  # as `embershard ps --of` takes


class Job(Section):
    """A training job.

    `strategy` says where the weights are: ps: all on shards; hybrid: the rows on shards, the dense weights in the
    workers; local, dp, ddp: in torch, without shards, in one process, with DataParallel or with
    DistributedDataParallel.
    """

    strategy: StrategyName = "ps"
    model: AnyModel  # what is trained: a built-in model or yours (docs/models.md)
    data: AnyData  # reader and files (docs/data.md)
    features: Annotated[
        Mapping[str, FeatureSection],
        BeforeValidator(_with_defaults, json_schema_input_type=Mapping[str, FeatureSection | None]),
    ] = {}  # name -> the columns that it reads, for data.reader tabular and ray
    embedding: EmbeddingSection  # embedding tables: dim, optimizer, first values
    dense: DenseSection = DenseSection()  # all other weights
    train: TrainSection  # length of the run, batch size, staleness, ...
    loss: AnyLoss | None = None  # by default the loss of the model's paper
    metrics: tuple[Metric, ...] = ()  # metrics of an evaluation; by default those of the data (docs/models.md)
    callbacks: tuple[Code, ...] = ()  # your observers of the run (docs/howto/own-model.md)
    freeze: tuple[Pattern, ...] = ()  # patterns of parameters or modules that are not trained
    evaluate: EvaluateSection = EvaluateSection()  # when to evaluate, and which metric decides
    checkpoint: Annotated[
        CheckpointSection, BeforeValidator(_or_default, json_schema_input_type=CheckpointSection | None)
    ] = CheckpointSection()  # where, when and how many checkpoints
    compression: AnyCompression = None  # codecs of gradients and rows; auto: those that a measurement chooses
    network: NetworkSection = NetworkSection()  # emulated bandwidth
    workers: Workers = 1  # number of workers
    shards: Annotated[Shards, BeforeValidator(_number_of_shards, json_schema_input_type=Shards)] = 2
    """Number of shards that `train` starts."""
    durability: Literal["memory", "log", "fsync"] = "memory"
    """Which failures the rows survive, of shards that `train` starts (docs/durability.md)."""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][\w.\-/]*$|^$", max_length=100)] = ""
    """Text before the names of tables, for the models of several jobs on the same shards, which train one at a time."""
    output: Path | None = None
    """Folder of the run; by default runs/JOB-TIME."""

    @model_validator(mode="after")
    def _give_features(self) -> Self:
        """Let the data have the features, since whoever reads it needs them."""
        if isinstance(self.data, TabularSection):
            paired = self.model.history if isinstance(self.model, DINSection) else ()
            ranked = self.model.item if isinstance(self.model, FeatureTowersSection) else ()
            features = self.features or self.data.features
            object.__setattr__(self, "data", self.data.for_model(features, paired, ranked, self.evaluate.user))
        return self

    @property
    def has_shards(self) -> bool:
        """Whether shards hold its embeddings."""
        return self.strategy in ("ps", "hybrid")

    @property
    def dense_mode(self) -> DenseMode:
        """Return where the dense weights of a job with shards are: ps, ddp or fsdp."""
        return "ddp" if self.strategy == "hybrid" and self.dense.mode == "ps" else self.dense.mode

    def elastic(self, workers: int) -> bool:
        """Whether training goes on where one of several workers is lost: none of them holds what the others need."""
        return workers > 1 and self.has_shards and self.dense_mode == "ps"

    def num_splits(self, workers: int) -> int:
        """Parts in which an epoch is dealt out to the workers; 0 where each has its share of it."""
        if not self.elastic(workers) or self.data.splits is None:
            return 0
        return self.data.splits if isinstance(self.data.splits, int) else 8 * workers

    @property
    def recovers(self) -> bool:
        """Whether `embershard train` goes on by itself from the latest checkpoint after a shard or worker was lost."""
        return self.checkpoint.folder is not None and self.train.recover is not False

    @property
    def changes_codecs(self) -> bool:
        """Whether codecs may change while it runs: by measurement, or by a schedule."""
        section = self.compression
        return section is not None and bool(section.auto or section.unless_slower or section.steps)

    @property
    def all_reduces(self) -> bool:
        """Whether torch adds gradients up over its workers, which then make every step together."""
        return self.strategy == "ddp" or (self.has_shards and self.dense_mode != "ps")

    @property
    def dim(self) -> int:
        """Dim of the embeddings, where the model does not decide it."""
        return self.embedding.dim or DEFAULT_DIM

    def initializers(self) -> dict[str, spec.Initializer | None]:
        """Pattern -> first values of the embeddings that have none of their own."""
        # how far a step turns a vector that is normalised goes by its length: with 0.01 the first ones decide it
        towers = isinstance(self.model, TwoTowerSection | FeatureTowersSection) and self.model.normalize
        normalized = towers or isinstance(self.model, SimpleXSection)
        return self.embedding.initializers(spec.Normal(std=0.1) if normalized else DEFAULT_INITIALIZER)

    @property
    def top_k(self) -> int:
        """K of HR@K, NDCG@K and Recall@K."""
        return self.evaluate.top_k or (20 if self.data.evaluation == "ranking" else 10)

    @property
    def built_in_metrics(self) -> tuple[str, ...]:
        """The metrics that embershard itself computes on this data."""
        more = MORE_METRICS[self.data.evaluation]
        if self.evaluate.groups or isinstance(self.data, UserReaderSection):
            more = (*more, "gauc") if self.data.evaluation == "pointwise" else more
        labels = self.data.labels_of_samples
        names = (*self._shown_metrics, *(name.format(k=self.top_k) for name in more))
        return names if len(labels) == 1 else (*names, *(f"{name}:{label}" for label in labels for name in names))

    @property
    def _shown_metrics(self) -> tuple[str, ...]:
        """Those that are shown where a job names none."""
        shown = tuple(name.format(k=self.top_k) for name in METRICS[self.data.evaluation])
        return (*shown, "gauc") if self.evaluate.groups else shown

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that an evaluation computes."""
        named, labels = tuple(metric.short_name for metric in self.metrics), self.data.labels_of_samples
        if named or len(labels) == 1:
            return named or self._shown_metrics
        shown = [name for name in self._shown_metrics if name not in ("ne", "calibration")]
        return (*shown, *(f"{name}:{label}" for label in labels for name in shown))

    @property
    def lower_is_better(self) -> bool:
        """Whether the metric that decides is best where it is lowest."""
        return self.is_best_lowest(self.metric)

    def is_best_lowest(self, metric: str) -> bool:
        """Whether a metric of its evaluations is best where it is lowest."""
        own = {metric.short_name: metric.lower_is_better for metric in self.metrics if metric.is_custom}
        return own.get(metric, metric.partition(":")[0] in LOWER_IS_BETTER)

    @property
    def own_loss(self) -> CodeSection | None:
        """The loss that a user defined, if it is one."""
        return self.loss if isinstance(self.loss, CodeSection) else None

    @property
    def has_user_code(self) -> bool:
        """Whether it names a model, reader, loss, metric or callback of a user."""
        parts = (self.own_loss, *self.callbacks, *(metric for metric in self.metrics if metric.is_custom))
        return any(parts) or isinstance(self.model, UserModelSection) or self.data.has_code

    def worker_threads(self, local_workers: int) -> int:
        """Threads of torch in each of this machine's workers.

        Where the job does not say: half of the cores are theirs, for shards and readers need some too.
        """
        return self.train.threads or max(1, (os.cpu_count() or 1) // (2 * local_workers))

    def loader_processes(self, local_workers: int) -> int:
        """Processes that make the batches of each worker; `local_workers` share this machine with its shards, if any.

        Where the job does not say: 1 where making a batch costs CPU and each process can have a core of its own.
        """
        if self.data.loader_processes is not None:
            return self.data.loader_processes
        shards = self.shards if self.has_shards else 0
        return int(self.data.costs_cpu and (os.cpu_count() or 1) >= 2 * local_workers + shards)

    @property
    def metric(self) -> str:
        """The metric that decides which evaluation is the best."""
        return self.evaluate.metric or self.metric_names[0]
