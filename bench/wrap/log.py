"""A made-up interaction log: what all models of the bar are trained on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

STEPS, BATCH, USERS, ITEMS, LENGTH = 80, 64, 400, 900, 6
SAMPLES = STEPS * BATCH


def columns() -> dict[str, np.ndarray]:
    """Users, items, histories that 0 fills up, prices, and clicks that depend on users, items and prices."""
    rng = np.random.default_rng(0)
    user = rng.zipf(1.3, SAMPLES) % USERS
    item = 1 + rng.zipf(1.2, SAMPLES) % (ITEMS - 1)
    history = 1 + rng.zipf(1.2, (SAMPLES, LENGTH)) % (ITEMS - 1)
    length = rng.integers(1, LENGTH + 1, SAMPLES)
    history[np.arange(LENGTH) >= length[:, None]] = 0
    price = rng.normal(size=SAMPLES).astype(np.float32)
    liking = 2 * rng.normal(size=USERS)[user] + 2 * rng.normal(size=ITEMS)[item] + price
    click = (liking + rng.normal(size=SAMPLES) > 0).astype(np.float32)
    return {
        "user": user,
        "item": item,
        "other_item": 1 + rng.integers(0, ITEMS - 1, SAMPLES),
        "other_items": 1 + rng.integers(0, ITEMS - 1, (SAMPLES, 5)),
        "hist_item": history,
        "length": length,
        "price": price,
        "click": click,
    }


COLUMNS = columns()


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """The log in batches."""
    for start in range(0, SAMPLES, BATCH):
        yield {name: torch.from_numpy(column[start : start + BATCH]) for name, column in COLUMNS.items()}
