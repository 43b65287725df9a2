"""A click stream shaped like Criteo's, made up as it is read: nothing to download, and the best AUC is known.

Ids follow the cardinalities and the skew of criteo_statistics.py. Labels are drawn from a planted model: each id has an
effect, a few pairs of columns interact through latent vectors, and dense features add their part. The planted logits
rank the samples as well as anything can, so their AUC on a split is the best that a trained model could reach there.

Sample i of a split (and epoch) is a function of (seed, split, epoch, i) alone: SplitMix64 started at a hash of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, sqrt

import numpy as np
import numpy.typing as npt
import torch
from numba import from_dtype, types, uint64

from embershard.proto.compiled.jit import compiled
from embershard.proto.errors import JobError
from embershard.proto.routing import mix64
from embershard.worker.data.batch import Batch, Evaluation, Schema
from embershard.worker.data.inputs.rows import CategoricalInput, NumericInput, RowInputs
from embershard.worker.data.readers.criteo_statistics import CATEGORICAL, NUMERIC
from embershard.worker.data.shuffle import check_enough, check_share
from embershard.worker.metrics import Pointwise

NUM_SLOTS = 4096  # 26 columns of them stay in the L2 cache
NUM_HEAD = 2048  # ranks with a bin of their own; behind them a bin spans at most 0.5 % of its rank per Criteo column

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bins:
    """Ranks 0..n-1 in ranges, with each range's probability; inside a range ranks are drawn evenly."""

    starts: Ints  # (M,) first rank
    widths: Ints  # (M,) 1 for the head
    probabilities: Floats  # (M,) sum to 1


def zipf_bins(cardinality: int, s: float, q: float, missing: float) -> Bins:
    """p(rank) ~ (rank + 1 + q)**-s for rank = 0, 1, ...; one rank stands for the missing value.

    That is the rank whose share the law puts nearest to `missing`; it gets exactly that share, and the others theirs
    of the rest. (The law was fitted with the missing value counted as one value.)
    """
    edges = np.arange(min(cardinality, NUM_SLOTS) + 1, dtype=np.int64)
    if cardinality > NUM_SLOTS:
        tail = np.geomspace(NUM_HEAD, cardinality, NUM_SLOTS - NUM_HEAD + 1)
        edges = np.unique(np.r_[edges[:NUM_HEAD], np.round(tail).astype(np.int64)])
    starts, widths = edges[:-1], np.diff(edges)
    mass = (starts + 1 + q) ** -s
    wide = widths > 1
    # the integral from half a rank before to half a rank behind: exact to 1e-7 where ranks are above 2,000
    low, high = starts[wide] + 0.5 + q, starts[wide] + widths[wide] + 0.5 + q
    mass[wide] = (low ** (1 - s) - high ** (1 - s)) / (s - 1)
    shares = mass / mass.sum()
    if missing:
        rank = int(np.argmin(np.abs(shares[~wide] - missing)))
        shares *= (1 - missing) / (1 - shares[rank])
        shares[rank] = missing
    return Bins(starts, widths, shares)


def alias_table(probabilities: Floats, num_slots: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32]]:
    """Walker's alias method (Vose 1991): slot k gives k below its 32-bit threshold, else its alias."""
    scaled = np.zeros(num_slots)
    scaled[: len(probabilities)] = probabilities * num_slots
    alias = np.arange(num_slots, dtype=np.int32)
    small = [k for k in range(num_slots) if scaled[k] < 1]
    large = [k for k in range(num_slots) if scaled[k] >= 1]
    while small and large:
        low, high = small.pop(), large[-1]
        alias[low] = high
        scaled[high] -= 1 - scaled[low]
        if scaled[high] < 1:
            small.append(large.pop())
    for k in small + large:  # 1 but for rounding
        scaled[k] = 1.0
    return np.minimum(scaled * 2.0**32, 2.0**32 - 1).astype(np.uint32), alias


def spread_step(cardinality: int) -> int:
    """A step near n's golden section and coprime to n: rank -> rank * step mod n spreads hot ids, one to one."""
    step = max(1, round(cardinality * 0.6180339887498949))
    while gcd(step, cardinality) != 1:
        step += 1
    return step


CTR = 0.25
# Standard deviations of the logit's parts (id effects, pair interactions, dense): with a CTR of 0.25 the best AUC is
# near 0.80, as on Criteo, where the best published models reach 0.81.
STRENGTHS = (0.95, 0.60, 0.75)
PAIRS = ((13, 16), (22, 19), (0, 16), (13, 1))  # columns C14 x C17, C23 x C20, C1 x C17, C14 x C2: short heads
LATENT_DIM = 4
HALVING_RANK = 64  # an id's effect shrinks as (1 + rank / 64)**-0.25, since rare ids are seen too rarely to be learnt
_CALIBRATION = 1 << 16  # samples that set the bias and the strengths

_Column = np.dtype([("offset", "<i8"), ("cardinality", "<i8"), ("step", "<i8"), ("first", "<i4"), ("shift", "<i4")])
_Slot = np.dtype([("threshold", "<u4"), ("alias", "<i4")])
_Bin = np.dtype([("rank", "<i8"), ("width", "<u4"), ("effect", "<f4")])
_TABLES = types.Tuple(
    (
        *(types.Array(from_dtype(kind), 1, "C") for kind in (_Column, _Slot, _Bin)),
        types.int64[:, ::1],
        types.float32[:, :, :, ::1],
        types.float64[:, ::1],
    )
)
_DRAW_SAMPLES = types.void(
    *(types.uint64, types.int64, types.int64, _TABLES, types.float64[::1]),
    *(types.int64[:, ::1], types.float32[:, ::1], types.float32[::1], types.float32[::1]),
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything that the kernel reads."""

    columns: npt.NDArray[np.void]  # (26,)
    slots: npt.NDArray[np.void]  # alias tables, one column after the other
    bins: npt.NDArray[np.void]  # ranges of ranks, likewise
    pairs: npt.NDArray[np.int64]  # (P, 2)
    latent: npt.NDArray[np.float32]  # (P, 2, NUM_SLOTS, LATENT_DIM)
    dense: npt.NDArray[np.float64]  # (13, 4): mean, std, missing, weight


class ClickStream:
    """Criteo-shaped samples without end or in epochs of `samples`; splits "valid" and "test" of `eval_samples` each."""

    def __init__(self, *, samples: int | None = None, eval_samples: int = 100_000, seed: int = 0) -> None:
        for name, value in (("samples", samples), ("eval_samples", eval_samples)):
            if value is not None and value < 1:
                raise ValueError(f"ClickStream: {name} must be at least 1, got {value}")
        self._samples, self._eval_samples, self._seed = samples, eval_samples, seed
        self._plan = _make_plan(seed)
        self._weights = np.zeros(4)  # bias, then the strength of each part
        self._calibrate()

    @property
    def schema(self) -> Schema:
        """26 id features and 13 dense ones."""
        num_ids = sum(column.cardinality for column in CATEGORICAL)
        return Schema(tuple(f"C{i + 1}" for i in range(len(CATEGORICAL))), len(NUMERIC), num_ids)

    @property
    def inputs(self) -> RowInputs:
        """Columns C1 to C26, with the numbers of their values from 0 on, and I1 to I13."""
        sizes = [column.cardinality for column in CATEGORICAL]
        firsts = np.cumsum([0, *sizes]).tolist()
        return RowInputs(
            categorical=tuple(
                CategoricalInput(name=name, ids="global", num_ids=size, first=first)
                for name, size, first in zip(self.schema.features, sizes, firsts, strict=False)
            ),
            numeric=tuple(NumericInput(name=f"I{i + 1}") for i in range(len(NUMERIC))),
        )

    @property
    def evaluation(self) -> Evaluation:
        """Labels and logits, one by one."""
        return "pointwise"

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that can be evaluated: valid and test."""
        return ("valid", "test")

    def num_samples(self, split: str) -> int | None:
        """Samples of an epoch (None for an endless one) or of an evaluation split."""
        if split == "train":
            return self._samples
        self._check(split)
        return self._eval_samples

    def train(self, epoch: int, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Fresh samples of an epoch; without end if `samples` is None."""
        check_share(rank, world_size, batch_size)
        if self._samples is not None:
            check_enough("clicks", self._samples, world_size)
        return self._batches("train", epoch, self._samples, (rank, world_size, batch_size))

    def evaluate(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """The same samples each time, none of them in training."""
        check_share(rank, world_size, batch_size)
        self._check(split)
        return self._batches(split, 0, self._eval_samples, (rank, world_size, batch_size))

    def planted(self, split: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """(N,) labels and the logits that they were drawn from, of a whole evaluation split."""
        self._check(split)
        _, _, labels, logits = self._draw(self._key(split, 0), 0, 1, self._eval_samples)
        return labels, logits

    def best(self, split: str) -> dict[str, float]:
        """Figures of the planted logits on a split, auc and logloss among them: what no model can beat but by luck."""
        labels, logits = self.planted(split)
        figures = Pointwise()
        figures.update(logits, labels)
        return figures.compute()

    def _batches(self, split: str, epoch: int, count: int | None, share: tuple[int, int, int]) -> Iterator[Batch]:
        rank, world_size, batch_size = share
        key = self._key(split, epoch)
        position = rank
        while count is None or position < count:
            size = batch_size if count is None else min(batch_size, -(-(count - position) // world_size))
            ids, dense, labels, _ = self._draw(key, position, world_size, size)
            yield Batch(torch.from_numpy(ids), torch.from_numpy(dense), torch.from_numpy(labels))
            position += size * world_size

    def _draw(
        self, key: int, first: int, stride: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        ids = np.empty((count, len(CATEGORICAL)), np.int64)
        dense = np.empty((count, len(NUMERIC)), np.float32)
        labels, logits = np.empty(count, np.float32), np.empty(count, np.float32)
        p = self._plan
        tables = (p.columns, p.slots, p.bins, p.pairs, p.latent, p.dense)
        out = (ids, dense, labels, logits)
        _draw_samples(np.uint64(key), first, stride, tables, self._weights, *out)  # type: ignore[no-untyped-call]
        return out

    def _calibrate(self) -> None:
        """Scale each part of the logit to its strength and set the bias for the CTR, on samples of no split."""
        key = self._key("calibration", 0)
        parts = np.empty((3, _CALIBRATION))
        for part in range(3):
            self._weights[:] = 0
            self._weights[1 + part] = 1
            parts[part] = self._draw(key, 0, 1, _CALIBRATION)[3]
        scale = np.array(STRENGTHS) / parts.std(axis=1)
        logits = scale @ parts
        low, high = -20.0, 20.0
        for _ in range(60):
            bias = (low + high) / 2
            clicks = float(np.mean(1 / (1 + np.exp(-(logits + bias)))))
            low, high = (bias, high) if clicks < CTR else (low, bias)
        self._weights[:] = bias, *scale

    def _key(self, split: str, epoch: int) -> int:
        purpose = ("train", "valid", "test", "calibration").index(split)
        return int(np.random.SeedSequence((self._seed, purpose, epoch)).generate_state(1, np.uint64)[0])

    def _check(self, split: str) -> None:
        if split not in self.splits:
            raise JobError(where="clicks", reason=f"no split {split!r} (known: train, valid, test)")


def _make_plan(seed: int) -> _Plan:
    rng = np.random.default_rng((seed, 0xC11C))
    columns = np.zeros(len(CATEGORICAL), _Column)
    slots, bins = [], []
    offset = first = 0
    for i, spec in enumerate(CATEGORICAL):
        parts = zipf_bins(*spec)
        num_slots = max(2, 1 << (len(parts.starts) - 1).bit_length())
        slot, bin_ = np.zeros(num_slots, _Slot), np.zeros(num_slots, _Bin)
        slot["threshold"], slot["alias"] = alias_table(parts.probabilities, num_slots)
        used = bin_[: len(parts.starts)]
        used["rank"], used["width"] = parts.starts, parts.widths
        used["effect"] = rng.standard_normal(len(used)) * (1 + parts.starts / HALVING_RANK) ** -0.25
        shift = 64 - (num_slots.bit_length() - 1)
        columns[i] = (offset, spec.cardinality, spread_step(spec.cardinality), first, shift)
        slots.append(slot)
        bins.append(bin_)
        offset += spec.cardinality
        first += num_slots
    latent = rng.standard_normal((len(PAIRS), 2, NUM_SLOTS, LATENT_DIM)).astype(np.float32)
    dense = np.array(
        [(n.mean, n.std, n.missing, w) for n, w in zip(NUMERIC, rng.normal(size=len(NUMERIC)), strict=True)]
    )
    return _Plan(columns, np.concatenate(slots), np.concatenate(bins), np.array(PAIRS), latent, dense)


@compiled(_DRAW_SAMPLES)
def _draw_samples(key, first, stride, tables, weights, ids, dense, labels, logits):  # type: ignore[no-untyped-def]
    """Fill ids (N, 26), dense (N, 13), labels (N,) and logits (N,) of samples first, first + stride, ..."""
    columns, slots, bins, pairs, latent, numeric = tables
    golden, zero, low32 = uint64(0x9E3779B97F4A7C15), uint64(0), uint64(0xFFFFFFFF)
    chosen = np.empty(len(columns), np.int64)
    irwin_hall = sqrt(3.0) / 65536.0  # four 16-bit uniforms summed: mean 2, variance 1/3
    for n in range(len(labels)):
        state = mix64(uint64(first + n * stride), key)
        effects = 0.0
        for c in range(len(columns)):
            column = columns[c]
            state += golden
            word = mix64(state, zero)
            slot = np.int64(word >> uint64(column.shift))
            # the 32 bits under the slot's decide between it and its alias, the 32 lowest place the rank in its bin
            if ((word << uint64(64 - column.shift)) >> uint64(32)) >= slots[column.first + slot].threshold:
                slot = np.int64(slots[column.first + slot].alias)
            found = bins[column.first + slot]
            chosen[c] = slot
            rank = found.rank + np.int64(((word & low32) * uint64(found.width)) >> uint64(32))
            effect = found.effect
            if found.width > 1:  # a rank of the tail has its own effect: the bin's, with a sign of its own
                effect = effect if mix64(uint64(rank), uint64(column.offset)) & uint64(1) else -effect
            effects += effect
            ids[n, c] = column.offset + (rank * column.step) % column.cardinality
        crossed = 0.0
        for p in range(len(pairs)):
            left, right = latent[p, 0, chosen[pairs[p, 0]]], latent[p, 1, chosen[pairs[p, 1]]]
            for d in range(LATENT_DIM):
                crossed += left[d] * right[d]
        measured = 0.0
        spare = zero
        for d in range(len(numeric)):
            if d % 4 == 0:
                state += golden
                spare = mix64(state, zero)
            state += golden
            word = mix64(state, zero)
            total = (word & uint64(0xFFFF)) + ((word >> uint64(16)) & uint64(0xFFFF))
            total += ((word >> uint64(32)) & uint64(0xFFFF)) + (word >> uint64(48))
            value = numeric[d, 0] + numeric[d, 1] * (np.float64(total) - 131070.0) * irwin_hall
            if value < 0 or np.float64(spare & uint64(0xFFFF)) < numeric[d, 2] * 65536.0:
                value = 0.0
            spare >>= uint64(16)
            dense[n, d] = value
            measured += numeric[d, 3] * (value - numeric[d, 0]) / numeric[d, 1]
        logit = weights[0] + weights[1] * effects + weights[2] * crossed + weights[3] * measured
        logits[n] = logit
        state += golden
        chance = np.float64(mix64(state, zero) >> uint64(11)) * (1.0 / 9007199254740992.0)
        labels[n] = 1.0 if chance < 1.0 / (1.0 + np.exp(-logit)) else 0.0
