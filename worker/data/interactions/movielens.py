"""MovieLens as the Neural Collaborative Filtering paper splits it (He et al., WWW 2017), and any data of that form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from embershard.proto.errors import JobError
from embershard.worker.data.batch import Batch, Evaluation, Schema
from embershard.worker.data.inputs.rows import RowInputs
from embershard.worker.data.interactions.batches import draw_key, pair_batch, pair_inputs
from embershard.worker.data.interactions.files import read_actions, read_candidates
from embershard.worker.data.readers.interactions import Interactions, check_numbering
from embershard.worker.data.shuffle import batches, check_enough, check_share, permutation


class NcfData:
    """Leave-one-out implicit feedback: `<prefix>.train.pairs`, `<prefix>.test.rating`, `<prefix>.test.negative`.

    Ids: user u is u, item i is num_users + i. Training gives each pair with label 1 and `negatives` items that the
    user did not take with label 0, sampled anew each epoch. Evaluation ("test") gives each user's held-out item
    with its listed negatives as one group. An item that is listed twice is ranked once, as in the authors' code,
    which keeps scores in a dict keyed by item (in MovieLens-1M 156 users have their test item among the negatives).
    """

    def __init__(self, prefix: Path, *, negatives: int = 4, by_popularity: bool = False, seed: int = 0) -> None:
        if negatives < 0:
            raise ValueError(f"negatives must be >= 0, got {negatives}")
        self._negatives, self._seed = negatives, seed
        self._where = f"{prefix}.train.pairs"
        users, items = read_actions(Path(self._where), delimiter="\t")
        test_users, test_items, test_labels = read_candidates(prefix)
        num_users = int(max(users.max(), test_users.max())) + 1
        num_items = int(max(items.max(), test_items.max())) + 1
        check_numbering(self._where, num_users, num_items)
        self.train_set = Interactions.of(users, items, num_users, num_items, by_popularity=by_popularity)
        if negatives:
            self.train_set.check_negatives(self._where)
        self._users = self.train_set.users()
        self._test = Batch(
            torch.from_numpy(np.stack([test_users, test_items + num_users], axis=1)),
            None,
            torch.from_numpy(test_labels),
            torch.from_numpy(test_users),
        )
        self._test_starts = np.flatnonzero(np.diff(test_users, prepend=-1, append=-1))

    @property
    def schema(self) -> Schema:
        """The schema: two features, user and item."""
        return Schema(("user", "item"), 0, self.train_set.num_users + self.train_set.num_items)

    @property
    def inputs(self) -> RowInputs:
        """Columns user and item, with the numbers of the files."""
        return pair_inputs(self.train_set)

    @property
    def evaluation(self) -> Evaluation:
        """HR@K and NDCG@K over each user's candidates."""
        return "candidates"

    @property
    def splits(self) -> tuple[str, ...]:
        """The split that can be evaluated: test."""
        return ("test",)

    def num_samples(self, split: str) -> int | None:
        """Pairs with their negatives, or candidates of all users."""
        if split == "train":
            return len(self._users) * (1 + self._negatives)
        self._check(split)
        return len(self._test)

    def train(self, epoch: int, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Positives and fresh negatives in one shuffled order."""
        check_share(rank, world_size, batch_size)
        count = len(self._users) * (1 + self._negatives)
        check_enough(self._where, count, world_size)
        key = draw_key(self._seed, epoch)
        for samples in batches(permutation(count, self._seed, epoch), rank, world_size, batch_size):
            yield pair_batch(self.train_set, self._users, samples.astype(np.int64), self._negatives, key)

    def evaluate(self, split: str, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """Whole users: worker r takes users r, r + world_size, ..., as many as fit into batch_size (at least one)."""
        check_share(rank, world_size, batch_size)
        self._check(split)
        bounds = self._test_starts
        mine = np.arange(rank, len(bounds) - 1, world_size)
        sizes = (bounds[1:] - bounds[:-1])[mine]
        per_batch = max(1, batch_size // int(sizes.max(initial=1)))
        for start in range(0, len(mine), per_batch):
            part = mine[start : start + per_batch]
            rows = torch.from_numpy(np.concatenate([np.arange(bounds[u], bounds[u + 1]) for u in part]))
            groups = self._test.groups
            assert groups is not None
            yield Batch(self._test.ids[rows], None, self._test.labels[rows], groups[rows])

    def _check(self, split: str) -> None:
        if split not in self.splits:
            raise JobError(where=self._where, reason=f"no split {split!r} (known: train, test)")
