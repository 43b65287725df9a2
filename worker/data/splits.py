"""Epochs dealt out in splits: whoever is done takes the next one, and what a lost worker left is dealt again."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from embershard.worker.data.shuffle import permutation
from embershard.worker.session.session import Session


class SplitQueue:
    """This worker's side of the queue that shard 0 keeps."""

    def __init__(self, session: Session, num_splits: int) -> None:
        self.num_splits = num_splits
        self._session = session
        self._returned: dict[int, int] = {}  # epoch -> splits

    @property
    def returned(self) -> int:
        """Number of input splits that were assigned again, because their worker was lost."""
        return sum(self._returned.values())

    def deal(self, epoch: int, *, ahead: bool = False) -> Iterator[int]:
        """Splits of an epoch, one by one, until all of them are finished by somebody.

        Asking for the next says that the one before is finished: everything of it is pushed then, unless the asking
        runs `ahead` of the training. It must not where a job bounds the staleness, for its clock does not wait for a
        worker that waits for a split.
        """
        member = self._session.membership
        if member is None:
            yield from range(self.num_splits)
            return
        bounded = member.terms.staleness is not None
        done, lost_leases = -1, 0
        while True:
            if not ahead:
                self._session.flush()
            if bounded:
                member.pause()
            if done >= 0 and member.lost_leases != lost_leases:
                done = -1  # steps of it were dropped, maybe not by the shard that deals: it is this worker's once more
            split = member.take_split(epoch, self.num_splits, done)
            lost_leases = member.lost_leases
            self._returned[epoch] = split.returned
            done = split.index
            if done < 0:
                return
            if bounded:
                member.resume()
            yield done


class SplitSampler(Sampler[int]):
    """Sampler for a torch DataLoader that divides 0..num_samples-1 into input splits and assigns these to free workers.

    Every epoch has another order, the same for all workers, determined by (seed, epoch): call `set_epoch` before each
    epoch, on all workers. Each sample comes once per epoch if no worker is lost, or joins after all others have left
    (docs/training/workers.md says how to wait for all). An input split counts as finished when the loader of its worker
    asks for the next one. If a worker is lost, its unfinished input split is assigned again, but not the batches that
    its loader had read ahead (`prefetch_factor` times `num_workers` of a DataLoader). With a single worker the sampler
    yields all samples. ValueError if an epoch is iterated a second time, also with a single worker.

    ValueError for fewer samples than `splits`, and for a session with a bound on staleness, because a worker that waits
    for an input split would block the clock of the workers that still train theirs.
    """

    def __init__(self, session: Session, num_samples: int, *, splits: int, seed: int = 0) -> None:
        if not 1 <= splits <= num_samples:
            raise ValueError(f"splits must be 1..num_samples, got {splits} of {num_samples} samples")
        member = session.membership
        if member is not None and member.terms.staleness is not None:
            raise ValueError(
                f"SplitSampler deals to workers that do not wait for each other, and this session has staleness "
                f"{member.terms.staleness}; connect without it, or train with `embershard train` and data.splits"
            )
        self._queue = SplitQueue(session, splits)
        self._num_samples, self._seed, self._epoch = num_samples, seed, 0
        self._begun = -1  # the epoch that was iterated last

    @property
    def returned(self) -> int:
        """Number of input splits that were assigned again, because their worker was lost."""
        return self._queue.returned

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0; epochs must come in ascending order."""
        if epoch < self._epoch:
            raise ValueError(f"epochs come in order: {epoch} after {self._epoch}")
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self._epoch == self._begun:  # the others have it: this worker would be given nothing, or what they left
            raise ValueError(
                f"epoch {self._epoch} has already begun, and its input splits are assigned only once: "
                f"call set_epoch({self._epoch + 1}) on all workers before the next epoch"
            )
        self._begun = self._epoch
        order = permutation(self._num_samples, self._seed, self._epoch)
        for split in self._queue.deal(self._epoch, ahead=True):
            yield from order[split :: self._queue.num_splits].tolist()
