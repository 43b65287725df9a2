"""What each user took, in the order of time.

Read from a table, or from a line `user item` per action, as SASRec's authors prepare their data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Batch, Evaluation, Field, IdTable, Schema
from embershard.worker.data.inputs.rows import PADDING, ListInput, RowInputs
from embershard.worker.data.interactions.batches import draw_key
from embershard.worker.data.interactions.files import read_actions
from embershard.worker.data.interactions.tables import Names, Pairs
from embershard.worker.data.readers.interactions import Interactions, check_numbering
from embershard.worker.data.shuffle import batches, check_enough, check_share, permutation

Ints = npt.NDArray[np.int64]
_log = logging.getLogger(__name__)
_EARLIEST = 3  # actions of a user who is evaluated: one to learn from, one for valid, one for test
_NO_EPOCH = 2**32 - 1  # keys the draws for evaluation, which are the same in every epoch


class ActionSequences:
    """Sequences in memory, split by leaving the last action out: it is test, the one before valid.

    Users with fewer than 3 actions are trained on only. A sample of "train" is a user with at least two actions there:
    ids (B, L + L * (1 + negatives)) hold the last actions but the newest one, oldest first, filled from the left, and
    then for each of these L places the item that came next and `negatives` items that the user does not have in train,
    drawn anew in each epoch, uniformly or `by_popularity`. For evaluation `users` of all are drawn once (0: all of
    them): ids (B, L + 1 + candidates) hold what a user took before, the item that came next, and `candidates` items,
    uniform among those that the user never took; labels (B, 1 + candidates) are 1 for the first. `names` are the texts
    of the numbers; items that have none share one more id, which nothing trains.
    """

    def __init__(
        self,
        actions: Pairs,
        *,
        where: str = "actions",
        names: Names | None = None,
        max_length: int = 50,
        negatives: int = 1,
        by_popularity: bool = False,
        candidates: int = 100,
        users: int = 10_000,
        seed: int = 0,
    ) -> None:
        for name, value, least in (("max_length", max_length, 1), ("negatives", negatives, 1), ("users", users, 0)):
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        self._length, self._negatives, self._candidates = max_length, negatives, candidates
        self._where, self._seed, self._names = where, seed, names
        user, item = actions
        num_users, self.num_items = int(user.max()) + 1, int(item.max()) + 1
        check_numbering(self._where, num_users, self.num_items)
        by_user = np.argsort(user, kind="stable")
        self._items = item[by_user]
        self._starts: Ints = np.searchsorted(user[by_user], np.arange(num_users + 1)).astype(np.int64)
        counts = np.diff(self._starts)
        held_out = np.where(counts >= _EARLIEST, 2, 0)
        self._ends = {"test": self._starts[1:] - 1, "valid": self._starts[1:] - 2, "train": self._starts[1:] - held_out}
        position = np.arange(len(item)) - np.repeat(self._starts[:-1], counts)
        known = position < np.repeat(counts - held_out, counts)
        taken = user[by_user][known], self._items[known]
        self._known = Interactions.of(*taken, num_users, self.num_items, by_popularity=by_popularity)
        self._all = Interactions.of(user, item, num_users, self.num_items)
        for taken_items in (self._known, self._all):
            taken_items.check_negatives(self._where, None if names is None else names.users)
        self._trained = np.flatnonzero(counts - held_out >= 2)
        judged = np.flatnonzero(counts >= _EARLIEST)
        if users and users < len(judged):
            judged = np.sort(np.random.default_rng((seed, 2)).choice(judged, users, replace=False))
        self._judged = judged
        if not len(self._trained):
            reason = "no user has two actions to learn from: the last two of users with 3 or more are held out"
            raise JobError(where=where, reason=reason)
        if not len(judged):
            _log.warning("%s: no user has %d actions, so that nobody is evaluated", where, _EARLIEST)

    @classmethod
    def read(cls, path: Path, *, delimiter: str = " ", **settings: Any) -> Self:
        """Read a file of actions. JobError names file:line of what is wrong."""
        return cls(read_actions(path, delimiter), where=str(path), **settings)

    @property
    def schema(self) -> Schema:
        """A history, and the items to be scored behind it; one table of items."""
        length, wanted = self._length, self._length * (1 + self._negatives)
        fields = (
            Field("history", "items", 0, length, "sequence"),
            Field("items", "items", length, wanted, "sequence"),
        )
        num_ids = self.num_items + (self._names is not None)
        return Schema(("history", "items"), 0, num_ids, fields, (IdTable("items", num_ids),))

    @property
    def log_q(self) -> torch.Tensor | None:
        """(num_items,) the log of how often each item is drawn as a negative in training; None where all are alike."""
        log_q = self._known.log_q()
        return log_q if log_q is None or self._names is None else torch.cat([log_q, log_q.new_zeros(1)])

    @property
    def inputs(self) -> RowInputs:
        """Columns history, what a user took, oldest first, and items, as many to be scored for each user."""
        values = () if self._names is None else self._names.items
        history = ListInput(name="history", num_ids=self.num_items, width=self._length, values=values)
        return RowInputs(lists=(history, ListInput(name="items", num_ids=self.num_items, values=values)))

    @property
    def evaluation(self) -> Evaluation:
        """HR@K and NDCG@K over each user's candidates."""
        return "candidates"

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return ("valid", "test")

    def num_samples(self, split: str) -> int | None:
        """Users that are trained on, or evaluated."""
        return len(self._trained if split == "train" else self._judged_of(split))

    def train(self, epoch: int, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Shuffled users, with fresh negatives."""
        check_share(rank, world_size, batch_size)
        check_enough(self._where, len(self._trained), world_size)
        key = draw_key(self._seed, epoch)
        for part in batches(permutation(len(self._trained), self._seed, epoch), rank, world_size, batch_size):
            users = self._trained[part]
            window, valid = self._window(self._starts[users], self._ends["train"][users] - 1)
            following = np.where(valid, self._items[window + valid], PADDING)
            row, place = valid.nonzero()
            draws = (users[row] * self._length + place)[:, None] * self._negatives + np.arange(self._negatives)
            items = np.full((*valid.shape, 1 + self._negatives), PADDING, np.int64)
            items[:, :, 0] = following
            items[row, place, 1:] = self._known.sample_negatives(
                np.repeat(users[row], self._negatives), draws.reshape(-1), key
            ).reshape(-1, self._negatives)
            ids = np.concatenate([self._history(window, valid), items.reshape(len(users), -1)], axis=1)
            yield Batch(torch.from_numpy(ids), None, torch.ones(len(users), device="cpu"))

    def evaluate(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Users with their candidates, of which `batch_size` make a batch (of one user at least)."""
        check_share(rank, world_size, batch_size)
        judged, count = self._judged_of(split), self._candidates
        labels = torch.zeros(1 + count, device="cpu")
        labels[0] = 1.0
        for part in batches(np.arange(len(judged)), rank, world_size, max(1, batch_size // (1 + count))):
            users = judged[part]
            ends = self._ends[split][users]
            draws = np.arange(count) + (users[:, None] * 2 + self.splits.index(split)) * count
            others = self._all.sample_negatives(
                np.repeat(users, count), draws.reshape(-1), draw_key(self._seed, _NO_EPOCH)
            )
            history = self._history(*self._window(self._starts[users], ends))
            ids = np.concatenate([history, self._items[ends][:, None], others.reshape(len(users), count)], axis=1)
            yield Batch(torch.from_numpy(ids), None, labels.expand(len(users), -1), torch.from_numpy(users))

    def _window(self, starts: Ints, ends: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Positions (B, L) of the last actions of starts..ends-1, 0 where there are fewer, and (B, L): where not."""
        first = np.maximum(starts, ends - self._length)
        window = first[:, None] + np.arange(self._length)
        valid = window < ends[:, None]
        return np.where(valid, window, 0), valid

    def _history(self, window: Ints, valid: npt.NDArray[np.bool_]) -> Ints:
        found: Ints = np.where(valid, self._items[window], PADDING)
        return found

    def _judged_of(self, split: str) -> Ints:
        if split not in self.splits:
            raise JobError(where=self._where, reason=f"no split {split!r} (known: train, {', '.join(self.splits)})")
        return self._judged
