"""Who took which item, and items that a user did not take: the data of implicit-feedback recommenders."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from numba import types

from embershard.proto.compiled.jit import compiled
from embershard.proto.errors import JobError
from embershard.proto.routing import mix64
from embershard.worker.data.batch import Batch
from embershard.worker.data.inputs.rows import PADDING, CategoricalInput, ListInput, RowInputs
from embershard.worker.data.interactions.tables import Names


def draw_key(seed: int, epoch: int) -> int:
    """64-bit key of an epoch's random draws."""
    return int(np.random.SeedSequence((seed, epoch, 1)).generate_state(1, np.uint64)[0])


def pair_batch(data: Interactions, users: Ints, samples: Ints, negatives: int, key: int) -> Batch:
    """(user, item) pairs of sample numbers: sample p * (1 + negatives) is pair p itself, the next ones its negatives.

    A negative is decided by (key, sample number) alone, so that it does not depend on batch size or worker count.
    """
    pair, draw = np.divmod(samples, 1 + negatives)
    user, item = users[pair], data.items[pair]
    fake = np.flatnonzero(draw)
    if len(fake):
        item[fake] = data.sample_negatives(user[fake], samples[fake], key)
    ids = np.stack([user, item + data.num_users], axis=1)
    return Batch(torch.from_numpy(ids), None, torch.from_numpy((draw == 0).astype(np.float32)))


def list_batch(data: Interactions, users: Ints, pairs: Ints, negatives: int, key: int, *, history: int = 0) -> Batch:
    """(user, positive, negative, negative, ..., history) of pair numbers, for losses over a list; all labels are 1.

    The history has other items that the user took, with PADDING behind them.
    """
    user = users[pairs]
    draws = pairs[:, None] * (1 + negatives) + np.arange(1, 1 + negatives)
    sampled = data.sample_negatives(np.repeat(user, negatives), draws.reshape(-1), key).reshape(draws.shape)
    ids = np.concatenate([user[:, None], data.items[pairs][:, None] + data.num_users, sampled + data.num_users], axis=1)
    if history:
        turns = (pairs * 0x9E3779B1 + key % (1 << 31)) >> 8  # another start for each pair and epoch
        ids = np.concatenate([ids, item_ids(data, data.histories(user, history, turns, data.items[pairs]))], axis=1)
    return Batch(torch.from_numpy(ids), None, torch.ones(len(pairs), device="cpu"))


def pair_inputs(data: Interactions, history: int = 0, names: Names | None = None) -> RowInputs:
    """Columns of the user and the item, numbers or `names`, and `history`: lists of the items that a user took."""
    first, values = data.num_users, () if names is None else names.items
    if names is None:
        users = CategoricalInput(name="user", ids="global", num_ids=first)
        items = CategoricalInput(name="item", ids="global", num_ids=data.num_items, first=first)
    else:  # with an id for those that have none, see InteractionLists
        users = CategoricalInput(name=names.user_column, ids="vocabulary", values=names.users, num_ids=first)
        items = CategoricalInput(
            name=names.item_column, ids="vocabulary", values=values, num_ids=data.num_items + 1, first=first
        )
    taken = ListInput(name="history", num_ids=data.num_items, first=first, width=history, keep="spread", values=values)
    ignored = (names.time_column,) if names is not None and names.time_column is not None else ()
    return RowInputs(categorical=(users, items), lists=(taken,) if history else (), ignored=ignored)


def tell_of_repeats(where: str, split: str, taken: Interactions, users: Ints, items: Ints) -> None:
    """Warn of items to be found, (N,) with their users (N,), that these had `taken` before: a ranking has none."""
    before = taken.users() * taken.num_items + taken.items
    if again := int(np.isin(users * taken.num_items + items, before).sum()):
        _log.warning(
            "%s: of %s, %d of %d items are among those that their users took before, and count as not found: a ranking "
            "leaves these out", where, split, again, len(items)
        )  # fmt: skip


def item_ids(data: Interactions, items: Ints) -> Ints:
    """Ids of items, which come behind the users'; PADDING stays."""
    ids: Ints = np.where(items == PADDING, PADDING, items + data.num_users)
    return ids


_log = logging.getLogger(__name__)
Ints = npt.NDArray[np.int64]
MAX_COUNT = 1 << 28  # users or items: an array of that length still fits, and user * num_items + item stays below 2**63
_INTS = types.int64[::1]
_SAMPLE_NEGATIVES = types.void(_INTS, _INTS, types.uint64, types.boolean, _INTS, _INTS, types.uint64, _INTS)


def check_numbering(where: str, num_users: int, num_items: int) -> None:
    """JobError if ids are too large to be numbers counted from 0."""
    for what, count in (("user", num_users), ("item", num_items)):
        if count > MAX_COUNT:
            reason = f"{what} {count - 1} is too large: {what}s must be numbered from 0, up to {MAX_COUNT - 1}"
            raise JobError(where=where, reason=reason)


@dataclass(frozen=True, slots=True)
class Interactions:
    """The items of each user, ascending: items[starts[u]:starts[u + 1]].

    `by_popularity`: negatives are drawn as often as items were taken, in place of each as often as another.
    """

    starts: Ints  # (num_users + 1,)
    items: Ints  # (N,)
    num_items: int
    by_popularity: bool = False

    @classmethod
    def of(cls, users: Ints, items: Ints, num_users: int, num_items: int, *, by_popularity: bool = False) -> Self:
        """From pairs in any order; a pair that occurs twice counts once."""
        keys = np.unique(users * num_items + items)
        starts = np.searchsorted(keys, np.arange(num_users + 1, dtype=np.int64) * num_items)
        return cls(starts.astype(np.int64), keys % num_items, num_items, by_popularity)

    @property
    def num_users(self) -> int:
        """Users, those without an item included."""
        return len(self.starts) - 1

    def log_q(self) -> torch.Tensor | None:
        """(num_items,) float32 the log of how often each item is drawn; None where each is as often as another."""
        if not self.by_popularity:
            return None
        counts = np.bincount(self.items, minlength=self.num_items)
        return torch.from_numpy(np.log(np.maximum(counts, 1) / len(self.items)).astype(np.float32))

    def users(self) -> Ints:
        """(N,) the user of each entry of `items`."""
        return np.repeat(np.arange(self.num_users), np.diff(self.starts))

    def of_users(self, users: Ints) -> tuple[Ints, Ints]:
        """(R,) positions in `users`, ascending, and (R,) items: everything that these users took."""
        counts = self.starts[users + 1] - self.starts[users]
        ends = np.cumsum(counts)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        return np.repeat(np.arange(len(users)), counts), self.items[np.repeat(self.starts[users], counts) + within]

    def histories(self, users: Ints, length: int, turns: Ints, without: Ints | None = None) -> Ints:
        """(B, length) items that each user took, PADDING where there are fewer, but for the item `without` (B,).

        Where a user has more, they are spread evenly over all of them, from another start with each turn (B,).
        """
        begin, count = self.starts[users], self.starts[users + 1] - self.starts[users]
        shown = np.minimum(count, length)
        place = np.arange(length)
        step = place * count[:, None] // np.maximum(shown, 1)[:, None] + turns[:, None]
        items = self.items[np.minimum(begin[:, None] + step % np.maximum(count, 1)[:, None], len(self.items) - 1)]
        keep = place < shown[:, None]
        if without is not None:
            keep &= items != without[:, None]
        order = np.argsort(~keep, axis=1, kind="stable")
        return np.take_along_axis(np.where(keep, items, PADDING), order, axis=1)

    def check_negatives(self, where: str, names: Names | None = None) -> None:
        """JobError if a user took every item that can be drawn, so that no negative exists; `names` has its text."""
        items = len(np.unique(self.items)) if self.by_popularity else self.num_items
        full = np.flatnonzero(np.diff(self.starts) >= items)
        if len(full):
            user = full[0] if names is None else repr(names.users[full[0]])
            raise JobError(where=where, reason=f"user {user} took all {items} items: no negatives to sample")

    def sample_negatives(self, users: Ints, draws: Ints, key: int) -> Ints:
        """(B,) one item per user, of those that the user did not take, uniform or by popularity.

        `draws` ((B,) int64) numbers the random draws: the same (key, draw, user) gives the same item, in any batch.
        """
        out = np.empty(len(users), np.int64)
        choices = len(self.items) if self.by_popularity else self.num_items
        _sample_negatives(
            self.starts, self.items, np.uint64(choices), self.by_popularity, users, draws, np.uint64(key), out
        )
        return out


@compiled(_SAMPLE_NEGATIVES)
def _sample_negatives(
    starts: Ints,
    items: Ints,
    choices: np.uint64,
    by_popularity: bool,
    users: Ints,
    draws: Ints,
    key: np.uint64,
    out: Ints,
) -> None:
    for i in range(len(users)):
        begin, end = starts[users[i]], starts[users[i] + 1]
        state = mix64(np.uint64(draws[i]), key)
        while True:
            # the high 32 bits scaled to 0..choices-1 (Lemire 2016); the bias is below choices / 2**32
            item = np.int64(((state >> np.uint64(32)) * choices) >> np.uint64(32))
            if by_popularity:
                item = items[item]
            low, high = begin, end
            while low < high:
                middle = (low + high) >> 1
                if items[middle] < item:
                    low = middle + 1
                else:
                    high = middle
            if low == end or items[low] != item:
                out[i] = item
                break
            state = mix64(state + np.uint64(0x9E3779B97F4A7C15), key)
