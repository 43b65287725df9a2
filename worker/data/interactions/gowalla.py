"""What each user took, to train on and to be found: ranked among all items.

Read from a table, or from lists as LightGCN's authors split them: a line per user, `user item item ...`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Batch, Evaluation, Field, IdTable, Schema
from embershard.worker.data.inputs.rows import RowInputs
from embershard.worker.data.interactions.batches import draw_key, item_ids, list_batch, pair_batch, pair_inputs
from embershard.worker.data.interactions.files import read_lists
from embershard.worker.data.interactions.tables import Names, Pairs
from embershard.worker.data.readers.interactions import Interactions, Ints, check_numbering, tell_of_repeats
from embershard.worker.data.shuffle import batches, check_enough, check_share, permutation
from embershard.worker.metrics import Users


class InteractionLists:
    """Pairs of train, valid and test in memory; evaluated by ranking all items that a user did not take before.

    A ranking leaves out the user's items of train, and on test those of valid, where `pairs` have this split.

    Ids: user u is u, item i is num_users + i. `names` are the texts of these numbers; users and items that have none
    share two more ids, which nothing trains: the one behind the last user, and the one behind the last item.

    With layout "pairs" a sample is (user, item) with label 1, or 0 for each of `negatives` sampled items; with "lists"
    it is (user, item, negative, negative, ...) and labels are 1, as losses over a softmax want it. Negatives are items
    that the user did not take, sampled anew in each epoch. `history` adds columns with as many other items of the
    user's train set, with which the user is evaluated too.
    """

    def __init__(
        self,
        pairs: Mapping[str, Pairs],
        *,
        where: str = "interactions",
        names: Names | None = None,
        negatives: int = 0,
        history: int = 0,
        by_popularity: bool = False,
        layout: Literal["pairs", "lists"] = "lists",
        seed: int = 0,
    ) -> None:
        if negatives < 0:
            raise ValueError(f"negatives must be >= 0, got {negatives}")
        if layout not in ("pairs", "lists"):
            raise ValueError(f"layout must be 'pairs' or 'lists', got {layout!r}")
        if history and layout == "pairs":
            raise ValueError("history needs the layout 'lists'")
        self._negatives, self._history, self._layout, self._seed, self._where = (
            negatives,
            history,
            layout,
            seed,
            where,
        )
        self._names = names
        if not len(pairs["train"][0]):
            raise JobError(where=where, reason="no user has an item")
        num_users = 1 + max(int(users.max(initial=-1)) for users, _ in pairs.values()) + (names is not None)
        num_items = 1 + max(int(items.max(initial=-1)) for _, items in pairs.values())
        check_numbering(self._where, num_users, num_items)
        self.train_set = Interactions.of(*pairs["train"], num_users, num_items, by_popularity=by_popularity)
        self._to_find = {
            split: Interactions.of(*pairs[split], num_users, num_items) for split in ("valid", "test") if split in pairs
        }
        if negatives:
            self.train_set.check_negatives(self._where, None if names is None else names.users)
        self._users = self.train_set.users()
        self._taken = dict.fromkeys(self._to_find, self.train_set)  # before each split
        if len(self._to_find) > 1:
            users, items = (np.concatenate([pairs["train"][side], pairs["valid"][side]]) for side in (0, 1))
            self._taken["test"] = Interactions.of(users, items, num_users, num_items)
        for split, own in self._to_find.items():
            tell_of_repeats(where, split, self._taken[split], own.users(), own.items)

    @classmethod
    def read(cls, train: Path, test: Path, valid: Path | None = None, **settings: Any) -> Self:
        """Read a file of lists for each split. JobError names file:line of what is wrong."""
        files = {"train": train, "valid": valid, "test": test}
        pairs = {split: read_lists(file) for split, file in files.items() if file is not None}
        return cls(pairs, where=str(train), **settings)

    @property
    def schema(self) -> Schema:
        """Features user and item; lists repeat the item for each negative."""
        extra = self._negatives if self._layout == "lists" else 0
        features = ("user", "item", *(f"negative{i + 1}" for i in range(extra)))
        num_ids = self.train_set.num_users + self.train_set.num_items + (self._names is not None)
        if not self._history:
            return Schema(features, 0, num_ids)
        fields = [Field(name, "ids", column) for column, name in enumerate(features)]
        fields.append(Field("history", "ids", len(features), self._history, "sequence"))
        return Schema((*features, "history"), 0, num_ids, tuple(fields), (IdTable("ids", num_ids),))

    @property
    def log_q(self) -> torch.Tensor | None:
        """(num_ids,) the log of how often each item's id is drawn as a negative; None where all are alike."""
        of_items = self.train_set.log_q()
        if of_items is None:
            return None
        unknown = of_items.new_zeros(0 if self._names is None else 1)
        return torch.cat([of_items.new_zeros(self.train_set.num_users), of_items, unknown])

    @property
    def inputs(self) -> RowInputs:
        """Columns of the user and the item, and history where the model reads some."""
        return pair_inputs(self.train_set, self._history, self._names)

    @property
    def evaluation(self) -> Evaluation:
        """Recall@K and NDCG@K over all items."""
        return "ranking"

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that can be evaluated: test, and valid where there is one."""
        return tuple(self._to_find)

    @property
    def item_ids(self) -> torch.Tensor:
        """(I,) int64: the id of each item."""
        return torch.arange(self.train_set.num_items, device="cpu") + self.train_set.num_users

    @property
    def items(self) -> tuple[torch.Tensor, None]:
        """`item_ids`, and no dense features."""
        return self.item_ids, None

    def num_samples(self, split: str) -> int | None:
        """Samples of an epoch, or pairs to be found."""
        if split == "train":
            return len(self._users) * (1 + self._negatives if self._layout == "pairs" else 1)
        return len(self._of(split).items)

    def train(self, epoch: int, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Shuffled pairs or lists, with fresh negatives."""
        check_share(rank, world_size, batch_size)
        count = self.num_samples("train")
        assert count is not None
        check_enough(self._where, count, world_size)
        make = pair_batch if self._layout == "pairs" else partial(list_batch, history=self._history)
        key = draw_key(self._seed, epoch)
        order = permutation(count, self._seed, epoch)
        return (
            make(self.train_set, self._users, samples.astype(np.int64), self._negatives, key)
            for samples in batches(order, rank, world_size, batch_size)
        )

    def evaluate(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """The pairs to be found, grouped by user; metrics over all items need `users`."""
        check_share(rank, world_size, batch_size)
        users, items = self._of(split).users(), self._of(split).items
        for part in batches(np.arange(len(items)), rank, world_size, batch_size):
            ids = np.stack([users[part], items[part] + self.train_set.num_users], axis=1)
            ids = np.concatenate([ids, self._histories(users[part])], axis=1)
            yield Batch(torch.from_numpy(ids), None, torch.ones(len(part), device="cpu"), torch.from_numpy(users[part]))

    def users(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Users]:
        """Users with something to be found; worker r takes the r-th, (r + world_size)-th, ... of them."""
        check_share(rank, world_size, batch_size)
        to_find = self._of(split)
        some = np.flatnonzero(np.diff(to_find.starts))
        for part in batches(some, rank, world_size, batch_size):
            users = part.astype(np.int64)
            seen, relevant = self._taken[split].of_users(users), to_find.of_users(users)
            ids = np.concatenate([users[:, None], self._histories(users)], axis=1) if self._history else users
            yield Users(torch.from_numpy(ids), *seen, *relevant)

    def _histories(self, users: Ints) -> Ints:
        """(B, history) ids of items that users took in training."""
        return item_ids(self.train_set, self.train_set.histories(users, self._history, np.zeros_like(users)))

    def _of(self, split: str) -> Interactions:
        """The items of a split that are to be found."""
        if split not in self._to_find:
            raise JobError(where=self._where, reason=f"no split {split!r} (known: train, {', '.join(self.splits)})")
        return self._to_find[split]
