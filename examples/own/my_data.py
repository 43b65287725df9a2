"""A reader of our own: clicks that are made here, so that there is nothing to download."""

import numpy as np

import embershard as es

USERS, ITEMS, TAGS = 500, 300, 40  # ids are unique across features: users come first, then items, then tags


def clicks(samples=40_000, eval_samples=4_000, seed=0):
    """Users click on items that are like them; `seed` is the job's train.seed."""
    random = np.random.default_rng(seed)
    tastes, kinds = random.normal(size=(USERS, 4)), random.normal(size=(ITEMS, 4))
    tags_of = random.integers(0, TAGS, (ITEMS, 3))

    def made(count):
        user, item = random.integers(0, USERS, count), random.integers(0, ITEMS, count)
        dense = random.normal(size=(count, 2)).astype(np.float32)
        logit = (tastes[user] * kinds[item]).sum(1) + 0.5 * dense[:, 0] - 1.0
        labels = random.random(count) < 1 / (1 + np.exp(-logit))
        ids = np.column_stack([user, USERS + item, USERS + ITEMS + tags_of[item]])
        return es.Samples.of(ids, dense, labels)

    splits = {"train": made(samples), "valid": made(eval_samples), "test": made(eval_samples)}
    features = ("user", "item", "tag1", "tag2", "tag3")
    return es.RowsDataset(es.Schema(features, num_dense=2, num_ids=USERS + ITEMS + TAGS), splits)
