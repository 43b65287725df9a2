"""The data loader's own process: it makes batches while this process trains, and sends them through a pipe.

The process opens the reader anew from the job's section, so nothing of this process has to be copied or pickled, and
goes through all epochs in order, so that it starts once per training. It is ahead by what the pipe holds (1 MiB on
Linux) and one batch. Where epochs are dealt out in splits it is told each of them. Where nobody reads the pipe any more
it ends, so it cannot outlive this process.

A batch is a head of seven little-endian int64 and the bytes of its tensors. torch's DataLoader opens a shared memory
file per tensor instead; bench/loader.py compares what both cost the training process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from embershard.proto.arrays import Bytes
from embershard.proto.errors import EmbershardError, from_wire, how_ended, to_wire
from embershard.proto.user_modules import environment_for_child
from embershard.worker.data.batch import Batch
from embershard.worker.job.data import AnyData

WAIT_TIMEOUT = timedelta(minutes=10)  # for one batch; a reader in this process has no limit
_NEWS = timedelta(seconds=1)  # between two messages of a loader that leaves batches out
_PIPE_BYTES = 1 << 20  # what Linux gives to everyone; the default holds a quarter of a batch
_F_SETPIPE_SZ = 1031
_EXIT_TIMEOUT = timedelta(seconds=10)

# kind, samples, columns of ids, dense features or -1, columns of labels or -1, whether there are groups, and weights
_HEAD = struct.Struct("<7q")
# kinds; an error's second number is the length of its JSON, and a message that batches are left out has none
_BATCH, _END, _ERROR, _SKIPS = range(4)


class LoaderLost(EmbershardError):
    """The data loader's process ended, or made no batch in time."""

    template = (
        "the data loader of worker {worker} (process {pid}) {how}; "
        "see what it wrote to stderr, and whether memory ran out, or train with --set data.loader_processes=0"
    )


class DataShare(BaseModel):
    """The data of one worker: a reader, and this worker's share of its train split."""

    model_config = ConfigDict(defer_build=True)  # most runs have no loader process

    data: AnyData
    folder: Path  # where the section's relative paths start
    seed: int
    rank: int
    world_size: int
    batch_size: int
    epoch: int = 0  # the first one
    skip: int = 0  # batches of it that are left out, unless it is dealt out
    splits: int = 0  # of each epoch, in place of a share of it, where they are dealt out


class LoaderProcess:
    """Batches of all epochs, made by a process of its own: those that the reader would give here, in the same order.

    A context manager that leaves no process behind. Not safe for several threads at once.
    """

    def __init__(self, share: DataShare, *, wait_timeout: timedelta = WAIT_TIMEOUT) -> None:
        self._share, self._wait_timeout = share, wait_timeout
        self._process: subprocess.Popen[bytes]  # inside the context
        self._epoch = share.epoch

    def __enter__(self) -> Self:
        command = [sys.executable, "-P", "-m", "embershard.worker.training.loader"]
        environment = environment_for_child()
        # a process group of its own: Ctrl-C at the terminal reaches this process, whose end is the loader's
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0, bufsize=0
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError, ImportError):  # only a smaller pipe
            import fcntl

            fcntl.fcntl(process.stdout, _F_SETPIPE_SZ, _PIPE_BYTES)
        with contextlib.suppress(BrokenPipeError):  # its end is noticed at the first batch
            process.stdin.write(self._share.model_dump_json().encode() + b"\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_group()  # it holds nothing that would be lost
        with self._process:  # closes the pipe and waits
            pass

    def train(self, epoch: int, split: int = -1) -> Iterator[Batch]:
        """This worker's batches of an epoch, or those of a split of it, each to its end.

        Where they are not dealt out, epochs come in order from the share's first; for another one the process is
        started anew. The reader's JobError, or LoaderLost.
        """
        assert (split >= 0) == (self._share.splits > 0)
        if split >= 0:
            self._ask(epoch, split)
        elif epoch != self._epoch:
            self.__exit__(None, None, None)
            self._share, self._epoch = self._share.model_copy(update={"epoch": epoch, "skip": 0}), epoch
            self.__enter__()
        while True:
            kind, samples, columns, dense, labels, groups, weights = _HEAD.unpack(
                self._read(np.empty(_HEAD.size, np.uint8))
            )
            if kind == _END:
                self._epoch = epoch + 1
                return
            if kind == _SKIPS:
                continue
            if kind == _ERROR:
                raise from_wire(bytes(self._read(np.empty(samples, np.uint8))), "")
            yield Batch(
                ids=self._tensor((samples, columns), torch.int64),
                dense=self._tensor((samples, dense), torch.float32) if dense >= 0 else None,
                labels=self._tensor((samples,) if labels < 0 else (samples, labels), torch.float32),
                groups=self._tensor((samples,), torch.int64) if groups else None,
                weights=self._tensor((samples,), torch.float32) if weights else None,
            )

    def _ask(self, epoch: int, split: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed at the first batch
            self._process.stdin.write(b"%d %d\n" % (epoch, split))

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self._read(tensor.numpy().reshape(-1).view(np.uint8))
        return tensor

    def _read(self, into: Bytes) -> memoryview:
        """Fill `into` from the pipe."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        rest = into.data
        while rest:
            if not poll.poll(self._wait_timeout.total_seconds() * 1e3):
                raise self._lost(f"made no batch within {self._wait_timeout.total_seconds():.0f} s")
            received = os.readv(pipe, [rest])
            if not received:
                raise self._lost(self._end())
            rest = rest[received:]
        return into.data

    def _end(self) -> str:
        end = time.monotonic() + _EXIT_TIMEOUT.total_seconds()
        while time.monotonic() < end:
            ended = not hasattr(os, "waitid")  # macOS, until Python 3.13: it is waited for at once
            if ended or os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._end_group()
                return f"ended with {how_ended(self._process.wait())}"
            time.sleep(0.01)
        return "closed its pipe"

    def _end_group(self) -> None:
        """End the process and all that a user's reader started in it, while its number is still its own."""
        if self._process.returncode is None:
            self._process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _lost(self, how: str) -> LoaderLost:
        return LoaderLost(worker=self._share.rank, pid=self._process.pid, how=how)


def send_batches(share: DataShare, asked: Iterable[str], pipe: IO[bytes]) -> None:
    """Write the batches of all epochs, without end, into the pipe, or of the splits that are asked for.

    An error of the data is the last thing in it.
    """
    try:
        dataset = share.data.open(share.folder, share.seed)
        for epoch, rank, world_size in _parts(share, asked):
            batches = dataset.train(epoch, rank, world_size, share.batch_size)
            if epoch == share.epoch and not share.splits:
                _leave_out(batches, share.skip, pipe)
            for batch in batches:
                _send(batch, pipe)
            pipe.write(_HEAD.pack(_END, *[0] * 6))
            pipe.flush()
    except EmbershardError as error:
        detail = to_wire(error)[1]
        pipe.write(_HEAD.pack(_ERROR, len(detail), *[0] * 5) + detail)
        pipe.flush()


def _leave_out(batches: Iterator[Batch], number: int, pipe: IO[bytes]) -> None:
    """Pass over the first batches, and say from time to time that this goes on: deep in an epoch it takes long."""
    said = time.monotonic()
    for _ in islice(batches, number):
        if time.monotonic() - said >= _NEWS.total_seconds():
            said = time.monotonic()
            pipe.write(_HEAD.pack(_SKIPS, *[0] * 6))
            pipe.flush()


def _parts(share: DataShare, asked: Iterable[str]) -> Iterator[tuple[int, int, int]]:
    """(epoch, rank, world_size) of what is to be read, one after the other."""
    if not share.splits:
        yield from ((epoch, share.rank, share.world_size) for epoch in count(share.epoch))
    for line in asked:
        epoch, split = map(int, line.split())
        yield epoch, split, share.splits


def _send(batch: Batch, pipe: IO[bytes]) -> None:
    dense = -1 if batch.dense is None else batch.dense.shape[1]
    labels = -1 if batch.labels.dim() == 1 else batch.labels.shape[1]
    has_groups, has_weights = batch.groups is not None, batch.weights is not None
    pipe.write(_HEAD.pack(_BATCH, *batch.ids.shape, dense, labels, has_groups, has_weights))
    for tensor in (batch.ids, batch.dense, batch.labels, batch.groups, batch.weights):
        if tensor is not None:
            pipe.write(tensor.contiguous().numpy().reshape(-1).view(np.uint8).data)
    pipe.flush()


def _main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody reads any more: end, without an error
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anyone prints must not get among the batches
    torch.set_num_threads(1)
    share = DataShare.model_validate_json(sys.stdin.readline())
    send_batches(share, sys.stdin, pipe)


if __name__ == "__main__":
    _main()
