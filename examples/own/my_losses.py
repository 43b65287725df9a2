"""A loss of our own. One whose first parameter is called `model` would get (model, batch) in place of the logits."""

import torch
from torch.nn import functional


class Focal:
    """Binary cross-entropy that weighs samples less which are classified well (Lin et al. 2017)."""

    def __init__(self, gamma=2.0):
        self.gamma = gamma

    def __call__(self, logits, labels):
        """The mean loss of a batch: logits and labels are (B,) float32."""
        loss = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (loss * (1 - torch.exp(-loss)) ** self.gamma).mean()
