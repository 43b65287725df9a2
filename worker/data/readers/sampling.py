"""Training samples from interactions: positives with freshly sampled negatives."""

from __future__ import annotations

import numpy as np
import torch

from embershard.worker.data.batch import Batch
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


def list_batch(data: Interactions, users: Ints, pairs: Ints, negatives: int, key: int) -> Batch:
    """(user, positive, negative, negative, ...) of pair numbers, for losses over a list; all labels are 1."""
    user = users[pairs]
    draws = pairs[:, None] * (1 + negatives) + np.arange(1, 1 + negatives)
    sampled = data.sample_negatives(np.repeat(user, negatives), draws.reshape(-1), key).reshape(draws.shape)
    ids = np.concatenate([user[:, None], data.items[pairs][:, None] + data.num_users, sampled + data.num_users], axis=1)
    return Batch(torch.from_numpy(ids), None, torch.ones(len(pairs)))
