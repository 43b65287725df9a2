"""Checks between the fields of a job: each yields the fields that contradict others, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from embershard.proto.errors import JobError
from embershard.proto.spec import LOCAL_OPTIMIZERS
from embershard.proto.transport.emulated_link import parse_bandwidth
from embershard.worker.job.compression_checks import check_compression
from embershard.worker.job.job import Job
from embershard.worker.job.readers.tabular import FeatureSection, TabularSection
from embershard.worker.job.sections import (
    BceSection,
    DINSection,
    FeatureTowersSection,
    OptimizerSection,
    SASRecSection,
    SimpleXSection,
    TwoTowerSection,
)
from embershard.worker.job.yaml import Location, Problems

if TYPE_CHECKING:
    from embershard.worker.data.batch import Dataset

# what torch.optim has for dense gradients, and for the sparse ones of its own tables
DENSE_OPTIMIZERS = ("sgd", "adagrad", "rmsprop", "adam", "adamw")
SPARSE_OPTIMIZERS = ("sgd", "adagrad", "adam", "adamw")

# models that learn from positives, beside which a sample may have other items
_LISTS = ("two_tower", "simplex")

# fields of a job that a strategy without shards sets aside, so that a job can be compared with itself
_OF_SHARDS = (
    "shards",
    "durability",
    "dense.mode",
    "embedding.cache",
    "train.staleness",
    "train.staleness_aware_lr",
    "train.lease",
    "train.recovery_timeout",
    "train.prefetch",
    "train.restart_workers",
    "data.splits",
    "compression",
    "network.bandwidth",
)
IGNORED_BY_STRATEGY = {"local": ("workers", *_OF_SHARDS), "dp": ("workers", *_OF_SHARDS), "ddp": _OF_SHARDS}


def check_strategy(job: Job) -> Problems:
    """Yield each contradiction of these fields: (field, reason)."""
    yield from _strategy(job)
    yield from _dense(job)
    yield from _network(job)
    yield from _consistency(job)
    yield from _torch_optimizers(job)


def _given(job: Job, *path: str) -> bool:
    """Whether the job itself says it."""
    section: object = job
    for name in path[:-1]:
        section = getattr(section, name)
    return path[-1] in getattr(section, "model_fields_set", ())


def _strategy(job: Job) -> Problems:
    name = job.strategy
    if job.has_shards:
        return
    if name in ("local", "dp") and job.workers > 1:
        yield ("workers",), f"strategy {name} trains in one process; set it to 1, or use strategy ddp"
    for field in ("shards", "durability"):
        if _given(job, field):
            yield (field,), f"strategy {name} has no shards; remove it"
    for name_of_field in ("staleness", "staleness_aware_lr", "lease", "recovery_timeout", "prefetch"):
        path = ("train", name_of_field)
        # 0, which equals False, says what is true of them: nothing is stale
        if _given(job, *path) and getattr(job.train, path[1]) not in (None, False):
            yield path, f"has no meaning for strategy {name}, which has no shards to wait for; remove it"
    if job.embedding.cache is not None:
        yield ("embedding", "cache"), f"has no meaning for strategy {name}, whose rows are in the worker; remove it"
    for at, optimizer in _optimizers(job, "embedding"):
        if optimizer.name not in SPARSE_OPTIMIZERS:
            reason = f"strategy {name} trains by torch, which has no {optimizer.name} for sparse gradients"
            yield (*at, "name"), f"{reason}; use {_either(SPARSE_OPTIMIZERS)}, or strategy ps"
        elif getattr(optimizer, "momentum", 0.0):
            reason = f"strategy {name} trains by torch, whose momentum would move every row that was ever read"
            yield (*at, "momentum"), f"{reason}; set it to 0, or use strategy ps"
        elif optimizer.name in ("adam", "adamw") and not getattr(optimizer, "eps", 0.0):
            reason = f"strategy {name} trains by torch, whose SparseAdam takes none of 0"
            yield (*at, "eps"), f"{reason}; set it to 1e-8, or use strategy ps"
    if job.data.hashed:
        reason = f"strategy {name} needs tables in memory, and hashed ids have 2**62 rows"
        others = "set data.ids to global, or " if "ids" in type(job.data).model_fields else ""
        if isinstance(job.data, TabularSection):
            others = "give each table buckets, vocabulary, min_count or ids: exact, or "
        yield ("strategy",), f"{reason}; {others}use strategy ps"
    if name == "dp":
        yield from _data_parallel(job)


def _data_parallel(job: Job) -> Problems:
    import torch  # only here: a job is checked without it

    if not torch.cuda.is_available():
        yield ("strategy",), "dp (DataParallel) splits a batch over GPUs, and this machine has none; use local or ddp"
    elif job.train.device == "cpu":
        yield ("train", "device"), "strategy dp needs GPUs; remove it"
    if job.model.name in ("two_tower", "feature_towers"):
        reason = f"{job.model.name} compares each sample with the whole batch, which strategy dp splits; use ddp"
        yield ("model", "name"), reason


def _dense(job: Job) -> Problems:
    mode = job.dense.mode
    if not _given(job, "dense", "mode"):
        return
    if not job.has_shards and not job.strategy == mode == "ddp":
        yield ("dense", "mode"), f"has no meaning for strategy {job.strategy}, which has no shards; remove it"
    elif job.strategy == "hybrid" and mode == "ps":
        yield ("dense", "mode"), "strategy hybrid keeps dense weights in the workers: set it to ddp or fsdp, or use ps"


def _network(job: Job) -> Problems:
    at, bandwidth = ("network", "bandwidth"), job.network.bandwidth
    if parse_bandwidth(bandwidth) is None:
        return
    if not job.has_shards:
        yield at, f"limits the link to the shards, but strategy {job.strategy} has no shards; remove it"
    elif job.dense_mode != "ps":
        reason = f"{bandwidth} limits the link to the shards, but not torch's own links"
        yield at, f"{reason}, over which dense weights are all-reduced; keep them on the shards, or remove it"


def _consistency(job: Job) -> Problems:
    train, staleness = job.train, job.train.staleness
    if not job.has_shards:
        return
    if train.staleness_aware_lr and (train.bound == 0 or train.local_steps):
        why = "no push is stale" if train.bound == 0 else "a difference has no learning rate"
        yield ("train", "staleness_aware_lr"), f"with train.staleness {staleness} {why}; remove it"
    if train.local_steps:
        if job.dense_mode != "ps":
            at = ("strategy",) if job.strategy == "hybrid" else ("dense", "mode")
            yield at, f"all-reduces dense weights at every step, but train.staleness is {staleness}; use strategy ps"
        if train.prefetch:
            yield ("train", "prefetch"), f"train.staleness {staleness} reads copies of its own; set it to 0"
        if job.embedding.cache is not None:
            yield ("embedding", "cache"), f"train.staleness {staleness} reads copies of its own; remove it"
        yield from _local_optimizers(job)
    elif train.bound is not None:
        if (train.prefetch or 0) > train.bound:
            yield ("train", "prefetch"), f"pulls {train.prefetch} clocks ahead, beyond train.staleness {staleness}"
        elif job.embedding.cache is not None and (train.prefetch or 0) + job.embedding.cache.staleness > train.bound:
            age = (train.prefetch or 0) + job.embedding.cache.staleness
            reason = f"its copies may be {age} clocks old (train.prefetch included), beyond train.staleness {staleness}"
            yield ("embedding", "cache"), f"{reason}; remove it, or raise the bound"


def _local_optimizers(job: Job) -> Problems:
    for path, optimizer in (*_optimizers(job, "embedding"), *_optimizers(job, "dense")):
        if optimizer.name not in LOCAL_OPTIMIZERS:
            reason = f"train.staleness {job.train.staleness} trains copies of rows, which knows no {optimizer.name}"
            yield (*path, "name"), f"{reason}; use {_either(LOCAL_OPTIMIZERS)}"


def _torch_optimizers(job: Job) -> Problems:
    """The dense optimizers, where torch applies them."""
    if job.has_shards and job.dense_mode == "ps":
        return
    named = [(path, optimizer.name, optimizer) for path, optimizer in _optimizers(job, "dense")]
    if job.dense.optimizer is None:
        inherited = job.embedding.optimizer
        # row-wise Adagrad as wrap takes it; what the tables of torch cannot have is refused there already
        known = inherited.name in DENSE_OPTIMIZERS or (inherited.name != "rowwise_adagrad" and job.has_shards)
        named.append((("embedding", "optimizer"), inherited.name if known else "adagrad", inherited))
    for path, name, optimizer in named:
        if name not in DENSE_OPTIMIZERS:
            reason = f"torch applies it to the dense weights, and has no {name}"
            yield (*path, "name"), f"{reason}; give dense.optimizer one of {', '.join(DENSE_OPTIMIZERS)}"
        elif getattr(optimizer, "clip_norm", 0.0):
            reason = "bounds a block of 1024 dense floats on a shard, and torch applies this optimizer to them"
            yield (*path, "clip_norm"), f"{reason}; give dense.optimizer without it"


def _optimizers(job: Job, name: Literal["embedding", "dense"]) -> list[tuple[Location, OptimizerSection]]:
    """Where the optimizers of a section stand: its own, if it has one, and those of its groups."""
    section = job.embedding if name == "embedding" else job.dense
    own: list[tuple[Location, OptimizerSection]] = []
    if section.optimizer is not None:
        own.append(((name, "optimizer"), section.optimizer))
    return own + [
        ((name, "groups", number, "optimizer"), group.optimizer) for number, group in enumerate(section.groups)
    ]


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def check_workers(job: Job) -> Problems:
    """Yield each contradiction of these fields: (field, reason)."""
    mode = f"strategy {job.strategy}" if not job.has_shards else f"dense.mode {job.dense_mode}"
    survives = job.has_shards and job.dense_mode == "ps"
    if job.train.restart_workers and not survives:
        yield ("train", "restart_workers"), f"has no meaning for {mode}, which ends with the first worker that is lost"
    if job.train.restart_workers and survives and job.workers == 1:
        reason = (
            "restarts lost workers while the others continue; a run with one worker continues from a checkpoint, by "
            "--resume"
        )
        yield ("train", "restart_workers"), reason
    if job.data.splits is None:
        return
    at = ("data", "splits")
    if not survives:
        yield at, f"gives workers different numbers of steps, but with {mode} all workers make every step together"
    if job.train.budget is not None and job.train.budget[0] != "epochs":
        reason = f"divides whole epochs into input splits: set train.epochs instead of train.{job.train.budget[0]}"
        yield at, f"{reason}, or remove it"
    if isinstance(job.data.splits, int) and job.data.splits < job.workers:
        yield at, f"must be at least as many as workers, which are {job.workers}"
    gzipped = [str(file) for file in job.data.files().get("train", ()) if file.suffix == ".gz"]
    if gzipped and job.data.streams_text:
        reason = f"{gzipped[0]} would be read from its start for every input split"
        yield at, f"{reason}; decompress it, or remove data.splits"


def check_step(job: Job) -> Problems:
    """Yield each contradiction of these fields: (field, reason)."""
    train = job.train
    if train.compile and train.checkpoint_activations:
        reason = "torch.compile decides itself what backward computes again; remove it, or train.compile"
        yield ("train", "checkpoint_activations"), reason
    if train.linear == "onednn" and (train.compile or train.amp != "off"):
        why = "train.compile" if train.compile else f"train.amp {train.amp}"
        yield ("train", "linear"), f"with {why} torch computes the linear layers; use auto"
    for name in ("compile", "checkpoint_activations"):
        if job.strategy == "dp" and getattr(train, name):
            yield ("train", name), "DataParallel copies the model for every batch; use strategy ddp"
    for name in ("compile", "average"):
        if job.has_shards and job.dense_mode == "fsdp" and getattr(train, name):
            yield ("train", name), "with fsdp a worker holds but a part of each dense weight; use ddp or ps"
    yield from _patterns(job)
    in_blocks = job.has_shards and job.dense_mode == "ps"
    for position, group in enumerate(job.dense.groups if in_blocks else ()):
        if group.optimizer.name == "rowwise_adagrad":
            reason = "keeps one accumulator per row, and dense weights have no rows; use adagrad"
            yield ("dense", "groups", position, "optimizer", "name"), reason


def _patterns(job: Job) -> Problems:
    for section, groups in (("embedding", job.embedding.groups), ("dense", job.dense.groups)):
        matches = [group.match for group in groups]
        for position, match in enumerate(matches):
            at = (section, "groups", position, "match")
            if match in matches[:position]:
                yield at, f"{match!r} is the pattern of an earlier group"
            elif match == "*":
                yield at, f"'*' matches all of them: use {section}.optimizer instead"


def check_job(job: Job, folder: Path) -> Problems:
    """Find every field of a job that contradicts another one, and every data file below `folder` that is not there."""
    yield from _model_and_data(job)
    yield from _length(job)
    yield from _judging(job)
    yield from check_strategy(job)
    yield from check_step(job)
    yield from check_workers(job)
    yield from check_compression(job)
    yield from _checkpoints(job)
    for field, files in job.data.files().items():
        for file in (folder / job.data.root / file for file in files):
            problem = _absent(file)
            if problem is not None:
                yield ("data", field), problem


def check_opened(job: Job, dataset: Dataset) -> None:
    """JobError where the job contradicts its data in what only the open reader of a user tells."""
    for at, reason in _opened(job, dataset):
        raise JobError(where=".".join(map(str, at)), reason=reason)


def _groups(job: Job, single: Sequence[str]) -> Problems:
    groups = job.evaluate.groups
    if groups is not None and groups not in single:
        reason = f"{groups!r} is no feature of one value; data.reader {job.data.reader} has {', '.join(single)}"
        yield ("evaluate", "groups"), reason


def _opened(job: Job, dataset: Dataset) -> Problems:
    schema, reader, model = dataset.schema, job.data.reader, job.model.name
    single = [field.name for field in schema.fields if field.width == 1] if schema.fields else schema.features
    yield from _groups(job, single)
    yield from _several_labels(job, schema.labels)
    if job.model.needs == "pairs" and len(schema.features) != 2 and (model not in _LISTS or len(schema.features) < 2):
        reason = f"{model} needs a user and an item per sample, but data.reader {reader} has {len(schema.features)}"
        yield ("model", "name"), f"{reason} features: {', '.join(schema.features)}"
    if job.model.needs == "dense" and not schema.num_dense:
        yield ("model", "name"), f"{model} needs dense features, of which data.reader {reader} has none"
    if schema.is_hashed and not job.has_shards:
        reason = f"strategy {job.strategy} needs tables in memory, and ids without num_ids have 2**62 rows"
        yield ("strategy",), f"{reason}; give the reader num_ids, or use strategy ps"
    if not dataset.splits:
        yield from _unjudged(job, f", which data.reader {reader} has not: give it a split beside train")
    schedule, train = job.train.lr_schedule.name, job.train
    # a built-in reader of whole files may be opened for their first rows alone, and tells later
    knows = ":" not in reader or dataset.num_samples("train") is not None
    if train.epochs and schedule in ("linear", "cosine") and not knows:
        reason = f"{schedule} needs the number of steps, which num_samples of data.reader {reader} does not tell"
        yield ("train", "lr_schedule", "name"), f"{reason}: give train.steps in place of train.epochs"


def _absent(file: Path) -> str | None:
    """Why a file or folder cannot be had."""
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name with a zero character
        return f"no file {file}; check data.root (or pass --data), or the name"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}; check data.root (or pass --data), or the name"
    return None


def _model_and_data(job: Job) -> Problems:
    name, reader = job.model.name, job.data.reader
    of_rows = name in _LISTS and isinstance(job.data, TabularSection)
    if of_rows:
        reason = f"{name} learns from lists of items, and data.reader tabular has rows with labels: use reader lists"
        reason = f"{reason}, which reads tables with columns: {{user: ..., item: ..., time: ...}}"
        yield ("model", "name"), f"{reason}; for features of users and items take feature_towers"
    elif job.model.needs == "pairs" and not job.data.pairs:
        yield ("model", "name"), f"{name} needs a user and an item per sample, but data.reader {reader} reads features"
    if job.model.needs == "dense" and not job.data.has_dense:
        yield ("model", "name"), f"{name} needs dense features, but data.reader {reader} has none here"
    if (job.model.needs == "sequences") != job.data.sequences:
        reason = "sasrec" if job.data.sequences else "reader sequences"
        yield ("model", "name"), f"{name} and data.reader {reader} do not fit together: take {reason}"
    if name in _LISTS and job.data.has_clicks and not of_rows:
        yield ("model", "name"), f"{name} learns from positives alone: set data.negatives to 0, or use reader lists"
    if isinstance(job.model, FeatureTowersSection):
        yield from _towers(job, job.model)
    elif name not in _LISTS and job.data.evaluation == "ranking":
        yield ("model", "name"), f"data.reader {reader} ranks all items for each user, which takes two_tower or simplex"
    if name == "simplex" and job.data.evaluation != "ranking" and not of_rows:
        yield ("model", "name"), f"simplex takes lists of items, and data.reader {reader} has none: use reader lists"
    elif name == "simplex" and not of_rows and not getattr(job.data, "negatives", False):
        yield ("data", "negatives"), "simplex learns from items that a user did not take: set it to 1 or more"
    if name != "simplex" and getattr(job.data, "history", False):
        yield ("data", "history"), f"has no meaning for {name}; remove it, or take simplex"
    if isinstance(job.model, SASRecSection) and job.dim % job.model.heads:
        yield ("model", "heads"), f"must divide embedding.dim, which is {job.dim}: each head has an equal part of it"
    yield from _loss(job)
    yield from _features(job)
    yield from _labels(job)
    problem = job.data.problem()
    if problem is not None:
        yield ("data", problem[0]), problem[1]
    if job.embedding.dim is not None and not job.model.takes_dim:
        other = "model.factors decides it" if "factors" in type(job.model).model_fields else "it has only weights"
        yield ("embedding", "dim"), f"has no meaning for {name} ({other}); remove it"
    if getattr(job.model, "batch_norm", job.model.needs == "dense") and job.train.batch_size == 1:
        yield ("train", "batch_size"), "batch norm needs at least 2 samples"


def _towers(job: Job, model: FeatureTowersSection) -> Problems:
    """What the features of two towers contradict."""
    if not isinstance(job.data, TabularSection):
        yield ("model", "name"), f"{model.name} needs features: take data.reader tabular, not {job.data.reader}"
        return
    features, at = job.data.features, ("model", "item")
    for name in model.item:
        if name not in features:
            yield at, f"names {name!r}, which is no feature (there are: {', '.join(features)})"
    if set(model.item) <= features.keys():
        for name, other, column in job.data.shared_columns(model.item):
            reason = f"names {name!r}, and not {other!r}, which reads column {column!r}, too: the user's tower would"
            yield at, f"{reason} see the item that it has to find; remove one"
        embedded = {name for name, one in features.items() if one.type != "number" or one.bucketise is not None}
        for of, names in (("item", embedded & set(model.item)), ("user", embedded - set(model.item))):
            if not names:
                yield at, f"leaves no feature with an embedding to the {of}'s tower; declare one"
    if job.loss is not None and job.own_loss is None and job.loss.code != "sampled_softmax":
        yield ("loss",), f"{model.name} is trained by sampled_softmax alone; remove it"
    if (user := job.evaluate.user) is not None:
        yield from _user_of_towers(user, model, features)


def _user_of_towers(user: str, model: FeatureTowersSection, features: Mapping[str, FeatureSection]) -> Problems:
    at, of_user = ("evaluate", "user"), [name for name in features if name not in model.item]
    if user not in of_user or features[user].type not in (None, "category", "cross"):
        yield at, f"{user!r} is no category of the user, whose features are {', '.join(of_user)}"
        return
    table = features[user].table or user
    for name, one in features.items():
        for field in ("buckets", "vocabulary", "min_count"):
            if (one.table or name) == table and getattr(one, field) is not None:
                reason = f"users that share a row of table {table!r} would be one user: remove {field} of {name!r}"
                yield at, f"{reason}, or evaluate.user"


def _loss(job: Job) -> Problems:
    if job.loss is None or job.own_loss is not None:
        return
    name, model = job.loss.code, job.model
    lists = isinstance(model, TwoTowerSection | SimpleXSection | SASRecSection)
    if name != "bce" and not lists and not isinstance(model, FeatureTowersSection):
        reason = f"{name} compares items of lists, which two_tower and sasrec are trained on, {model.name} is not"
        yield ("loss",), reason
    if lists and isinstance(job.loss, BceSection) and job.loss.label_weights:
        reason = f"weigh several labels, and {model.name} learns from lists of items; remove them"
        yield ("loss", "label_weights"), reason
    towers = isinstance(model, TwoTowerSection) and model.normalize and model.temperature == 1.0
    cosines = towers or isinstance(model, SimpleXSection)
    if name == "ccl" and lists and not cosines:
        yield ("loss",), "ccl is one of cosines: it takes simplex, or two_tower with normalize: true and temperature: 1"


def _features(job: Job) -> Problems:
    if not isinstance(job.data, TabularSection):
        if isinstance(job.model, DINSection):
            reason = f"din needs a sequence, which data.reader {job.data.reader} has not: take tabular"
            yield ("model", "name"), reason
        if job.features:
            yield ("features",), f"has a meaning for data.reader tabular, and not for {job.data.reader}"
        return
    if not job.data.features:
        return
    from embershard.worker.data.preprocess import MAX_LENGTH
    from embershard.worker.data.values import BadFeature

    try:
        job.data.preprocessor()
    except BadFeature as error:
        yield ("features", error.name), error.reason
    if isinstance(job.model, DINSection):
        for field, types in (("target", (None, "category")), ("history", ("sequence",))):
            for name in getattr(job.model, field):
                if name not in job.data.features or job.data.features[name].type not in types:
                    reason = f"{name!r} is no feature of type {types[-1]}, as each {field} must be"
                    yield ("model", field), reason
        found = [(name, job.data.features[name]) for name in job.model.history if name in job.data.features]
        for name, feature in found[1:]:
            first = found[0][1].max_length or MAX_LENGTH["sequence"]
            if (feature.max_length or MAX_LENGTH["sequence"]) != first:
                reason = f"must be that of {found[0][0]!r}, whose values {job.model.name} weighs together with these"
                yield ("features", name, "max_length"), reason
    for name, feature in job.data.features.items():
        if feature.type == "sequence" and not job.model.reads_sequences:
            reason = f"{job.model.name} reads no sequences: use type list, whose rows are pooled"
            yield ("features", name, "type"), reason


def _labels(job: Job) -> Problems:
    """What a table's labels contradict; those of other readers are known once they are open."""
    data = job.data
    if not isinstance(data, TabularSection):
        return
    low, high = (-math.inf, math.inf) if data.label_range == "any" else data.label_range
    if (low < 0 or high > 1) and job.own_loss is None:
        reason = "labels outside 0..1 have no binary cross-entropy: name a loss of your own (loss: my_losses:squared)"
        yield ("data", "label_range"), f"{reason}, or write labels as 0 and 1"
    yield from _several_labels(job, data.labels_of_samples)
    for position, name in enumerate(data.label):
        if name in data.label[:position]:
            yield ("data", "label"), f"names {name!r} twice"
    for name, feature in data.features.items():
        columns = (*feature.of, feature.weights) if feature.of else (feature.column or name, feature.weights)
        found = next((column for column in columns if column in data.label), None)
        if found is not None:
            reason = f"reads column {found!r}, which is the label, so the model would see what it must predict"
            yield ("features", name), f"{reason}; remove it"


def _several_labels(job: Job, labels: Sequence[str]) -> Problems:
    """What the names of a sample's labels contradict."""
    if len(labels) > 1 and not job.model.labels:
        reason = f"{job.model.name} has one logit, and samples have labels {', '.join(labels)}: take mmoe or ple"
        yield ("model", "name"), reason
    weights = getattr(job.loss, "label_weights", ())
    if weights and len(weights) != len(labels):
        reason = f"has {len(weights)} weights for labels {', '.join(labels)}: give one of each"
        yield ("loss", "label_weights"), reason


def _length(job: Job) -> Problems:
    train = job.train
    if train.budget is None:
        yield ("train",), "give exactly one of epochs, steps and samples"
        return
    unit, length = train.budget
    if unit == "steps" and train.lr_schedule.warmup_steps >= length:
        yield ("train", "lr_schedule", "warmup_steps"), f"must be below train.steps, which is {length}"
    if unit == "epochs" and job.data.endless:
        yield ("train", "epochs"), "the data has no end: give data.samples, or train.samples instead"
    schedule = train.lr_schedule.name
    if unit == "epochs" and schedule in ("linear", "cosine") and job.data.streams_text:
        reason = f"{schedule} needs the number of steps, which is not known for streamed text"
        yield ("train", "lr_schedule", "name"), f"{reason}: give train.steps in place of train.epochs"
    if unit == "samples" and length < job.workers:
        yield ("workers",), f"{job.workers} workers cannot share {length} samples"
    if job.evaluate.every is not None and job.evaluate.every > length:
        yield ("evaluate", "every"), f"must be at most train.{unit}, which is {length}"
    if job.checkpoint.every is not None and job.checkpoint.every > length:
        yield ("checkpoint", "every"), f"must be at most train.{unit}, which is {length}"


def _judging(job: Job) -> Problems:
    names = job.metric_names
    for position, metric in enumerate(job.metrics):
        if not metric.is_custom and metric.code not in job.built_in_metrics:
            known = ", ".join(job.built_in_metrics)
            reason = f"is no metric of data.reader {job.data.reader}, which has {known}; one of your own is module:name"
            is_gauc = metric.code.partition(":")[0] == "gauc"
            if is_gauc and job.data.evaluation == "pointwise" and not job.evaluate.groups:
                reason = "needs evaluate.groups, a feature such as the user"
            yield ("metrics", position), f"{metric.code!r} {reason}"
        elif names.index(metric.short_name) < position:
            reason = f"{metric.short_name!r} is the name of an earlier one; rename one of them"
            yield ("metrics", position), reason
    if job.metrics and job.data.evaluation == "ranking" and any(metric.is_custom for metric in job.metrics):
        yield ("metrics",), f"data.reader {job.data.reader} ranks all items, of which no metric of your own is computed"
    if job.metric not in names:
        reason = f"is not computed on data.reader {job.data.reader}; it has {', '.join(names)}"
        yield ("evaluate", "metric"), f"{job.metric!r} {reason}"
    if job.metric == "calibration":
        yield ("evaluate", "metric"), "calibration is best near 1, not at an end; choose another metric"
    if job.metric.startswith("coverage@"):
        reason = f"{job.metric} is high for random scores, too: it cannot tell which evaluation is the best"
        yield ("evaluate", "metric"), f"{reason}; choose another metric, or list another one first"
    if job.evaluate.groups is not None and job.data.evaluation != "pointwise":
        yield ("evaluate", "groups"), f"has no meaning for data.reader {job.data.reader}; remove it"
    if job.evaluate.user is not None and not isinstance(job.model, FeatureTowersSection):
        reason = f"has a meaning for feature_towers, and not for {job.model.name}; remove it"
        yield ("evaluate", "user"), reason
    if isinstance(job.data, TabularSection):
        yield from _groups(job, job.data.single_valued)
    if job.evaluate.top_k is not None and job.data.evaluation == "pointwise":
        yield ("evaluate", "top_k"), f"has no meaning for data.reader {job.data.reader}; remove it"
    if not job.data.judged_on:
        yield from _unjudged(job, ": name a file in data.valid or data.test")


def _unjudged(job: Job, remedy: str) -> Problems:
    needs = (
        (("train", "early_stop"), job.train.early_stop is not None),
        (("train", "lr_schedule"), job.train.lr_schedule.name == "plateau"),
        (("checkpoint", "best"), job.checkpoint.best and _given(job, "checkpoint", "best")),
    )
    for at, given in needs:
        if given:
            yield at, f"needs something to evaluate on{remedy}"


def _checkpoints(job: Job) -> Problems:
    section = job.checkpoint
    if section.folder is None and job.train.recover:
        yield ("train", "recover"), "continues from checkpoints: set checkpoint.folder, or remove it"
    for name in ("every", "keep"):
        if section.folder is None and _given(job, "checkpoint", name):
            yield ("checkpoint", name), "has no meaning without checkpoint.folder; name one, or remove it"
    if not section.best and section.restore_best and _given(job, "checkpoint", "restore_best"):
        yield ("checkpoint", "restore_best"), "the best weights are not kept: remove it, or set checkpoint.best to true"
