"""The strategy that a job names."""

from __future__ import annotations

import torch

from embershard.worker.job.job import Job
from embershard.worker.models.recommender import Recommender
from embershard.worker.session.session import Session
from embershard.worker.strategy.protocol import Strategy
from embershard.worker.strategy.shards import ShardStrategy
from embershard.worker.strategy.torch_only import TorchStrategy


def choose_strategy(job: Job, model: Recommender, session: Session | None, device: torch.device) -> Strategy:
    """The strategy of a job over `model`, whose tables are on the meta device until then.

    `session` is the connection to the shards, for a job that has some.
    """
    if not job.has_shards:
        return TorchStrategy(job, model, device)
    assert session is not None
    return ShardStrategy(job, model, session, device)
