"""Settings: which codec each of a session's tables uses, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from embershard.proto.codec.name import CodecName
from embershard.proto.spec import TableSpec
from embershard.worker.patterns import first_match

# what divides a step by the size of the gradients that it has seen
ADAPTIVE = frozenset({"adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl", "rmsprop"})


def advice(optimizer: str, push: CodecName) -> str:
    """Return why a codec suits an optimizer badly, by name (docs/compression.md); "" where it suits it."""
    if optimizer in ADAPTIVE and push.has_feedback:
        return (
            f"{push} with {optimizer} changes the size of its steps, because it delays gradients: use int8, "
            "which does not, or sgd (docs/compression.md)"
        )
    if optimizer == "sgd" and push.select == "all" and not push.is_plain and not push.has_feedback:
        return (
            f"{push} with sgd sends far more than topk:0.01+fp16s, which delays gradients and loses none "
            "(docs/compression.md)"
        )
    return ""


WARMUP_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)  # Lin et al. 2018, section 3.3


def warmup_density(ratio: float, steps: int, steps_per_density: int) -> float:
    """The part of the gradient that `dgc:ratio` sends after so many steps: the ratio itself once it is warm."""
    above = [density for density in WARMUP_DENSITIES if density > ratio]
    stage = steps // steps_per_density if steps_per_density else len(above)
    return above[stage] if stage < len(above) else ratio


RESIDUAL_ROWS = 1_000_000  # of a table: with a dim of 16 about 100 MB
PLAIN = CodecName()


class Directions(NamedTuple):
    """Name the codecs of a table: of its gradients to the shards, and of its rows back."""

    push: CodecName = PLAIN
    pull: CodecName = PLAIN


def describe_codecs(tables: Mapping[str, Directions], dense: Mapping[str, Directions]) -> str:
    """Return how gradients and rows travel: `float32`, or the codecs of embedding tables, then of dense weights."""
    if not tables and not dense:
        return ""
    parts = ([_both(tables)] if tables else []) + ([f"dense {_both(dense)}"] if dense else [])
    return "float32" if parts in (["float32"], ["float32", "dense float32"]) else "; ".join(parts)


def _both(directions: Mapping[str, Directions]) -> str:
    """The codecs of some tables by direction; several where tables differ."""
    if all(codec.is_plain for one in directions.values() for codec in one):
        return "float32"
    pushes = dict.fromkeys("float32" if one.push.is_plain else str(one.push) for one in directions.values())
    pulls = dict.fromkeys("float32" if one.pull.is_plain else str(one.pull) for one in directions.values())
    return f"push {' or '.join(pushes)}, pull {' or '.join(pulls)}"


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Choose the codecs of a session's tables; docs/compression.md lists them and says when each saves time.

    `push` and `pull` are the codecs of embedding tables, `dense` ({"push": ..., "pull": ...}) those of dense
    weights. `tables` maps patterns to the codecs of the tables (embedding or dense) whose name matches; the first
    match applies. A direction that is missing there is as set by the other arguments. `residual_rows`: maximum
    number of rows of a table whose unsent gradients a worker keeps; beyond it, the least recently used are sent.
    `warmup_steps`: pushes of dgc at each of the densities 25 %, 6.25 %, 1.56 % and 0.4 %. `momentum` and
    `clip_norm` (for each table's gradient of one worker; None: no limit) apply to dgc. ValueError for settings that
    contradict each other.
    """

    push: str | CodecName = PLAIN
    pull: str | CodecName = PLAIN
    dense: Mapping[str, str | CodecName] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, str | CodecName]] = field(default_factory=dict)
    residual_rows: int = RESIDUAL_ROWS
    warmup_steps: int = 100
    momentum: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.residual_rows < 1:
            raise ValueError(f"Compression: residual_rows must be at least 1, got {self.residual_rows}")
        if self.warmup_steps < 0:
            raise ValueError(f"Compression: warmup_steps must be at least 0, got {self.warmup_steps}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Compression: momentum must be at least 0 and below 1, got {self.momentum}")
        if self.clip_norm is not None and not (self.clip_norm > 0 and math.isfinite(self.clip_norm)):
            raise ValueError(f"Compression: clip_norm must be above 0, got {self.clip_norm}")
        for where, given in (("dense", self.dense), *self.tables.items()):
            if unknown := sorted(given.keys() - {"push", "pull"}):
                raise ValueError(f"Compression: {where} has no {unknown[0]!r} (known: push, pull)")
        _check(Directions(codec_of(self.push), codec_of(self.pull)), dense=False)
        _check(_read(self.dense, Directions()), dense=True)
        for given in self.tables.values():  # which of them are dense is known with the tables
            _read(given, Directions())

    def of(self, table: str, dense: bool) -> Directions:
        """Return the codecs of a table. ValueError where they cannot serve it."""
        own = Directions(codec_of(self.push), codec_of(self.pull))
        directions = _read(self.dense, Directions()) if dense else own
        pattern = first_match(table, self.tables)
        if pattern is not None:
            directions = _read(self.tables[pattern], directions)
        _check(directions, dense)
        return directions


def codec_of(text: str | CodecName) -> CodecName:
    """A codec that may be given as its text. ValueError where it cannot be."""
    return text if isinstance(text, CodecName) else CodecName.parse(text)


def check_momentum(spec: TableSpec, push: CodecName, momentum: float) -> None:
    """ValueError where a gradient would be given momentum twice: by dgc, and by the table's optimizer."""
    if push.select != "dgc":
        return
    params = spec.optimizer.params()
    if params.get("momentum", 0.0) > 0:
        raise ValueError(
            f"table {spec.name!r}: {push} keeps the momentum in the worker, so that of its optimizer must be 0, not "
            f"{params['momentum']:g}; give it to Compression(momentum=...) instead"
        )
    if momentum > 0 and params.get("beta1", 0.0) > 0:
        raise ValueError(
            f"table {spec.name!r}: {push} with momentum {momentum:g} and {spec.optimizer.name}, which has one "
            "of its own (beta1), would count gradients twice; leave Compression(momentum=0)"
        )


def uses_row_age(spec: TableSpec) -> bool:
    """Whether a table's optimizer takes a row of several pushes for something else than one large gradient."""
    return spec.optimizer.name != "sgd" or spec.optimizer.params().get("weight_decay", 0.0) > 0


def _read(given: Mapping[str, str | CodecName], otherwise: Directions) -> Directions:
    push, pull = given.get("push", otherwise.push), given.get("pull", otherwise.pull)
    return Directions(codec_of(push), codec_of(pull))


def _check(directions: Directions, dense: bool) -> None:
    directions.push.check("push", dense)
    directions.pull.check("pull", dense)
