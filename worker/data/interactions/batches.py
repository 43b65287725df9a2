"""Batches of pairs and lists of interactions, with items that a user did not take."""

from __future__ import annotations

import numpy as np
import torch

from embershard.worker.data.batch import Batch
from embershard.worker.data.inputs.rows import PADDING, CategoricalInput, ListInput, RowInputs
from embershard.worker.data.interactions.tables import Names
from embershard.worker.data.readers.interactions import Interactions, Ints


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


def item_ids(data: Interactions, items: Ints) -> Ints:
    """Ids of items, which come behind the users'; PADDING stays."""
    ids: Ints = np.where(items == PADDING, PADDING, items + data.num_users)
    return ids
