"""A request on its way over a stream, and its reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from embershard.proto.arrays import Array, Bytes, Floats
from embershard.proto.messages import Reply, Request, Rows
from embershard.proto.transport.transport import Unreachable

# A call ends at its deadline on the I/O thread. This much later we take the thread for dead: while it is alive,
# it might write into the arrays of a call that timed out here.
_GRACE_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class StreamCall:
    """A request under way, and its reply."""

    request: type[Request]
    head: bytes
    bulk: list[memoryview]
    into: Sequence[Array]
    seconds: float
    started: float = field(default_factory=time.monotonic)
    number: int = 0
    num_bytes: int = 0  # of its frames
    end: int = 0  # of its bytes among those sent on its connection
    gone: int = 0  # bytes of its connection that had arrived before it was sent
    places: Sequence[memoryview] | None = None  # where its reply arrives
    timer: asyncio.TimerHandle | None = None
    answer: Future[Reply] = field(default_factory=Future)

    def result(self) -> Reply:
        """Wait for the reply and return it; see PendingReply."""
        try:
            return self.answer.result(self.seconds + _GRACE_SECONDS)
        except FutureTimeout:
            raise Unreachable("no answer") from None

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.answer.done():
            self.answer.set_exception(error)

    def place(self, lengths: Sequence[int]) -> Sequence[memoryview]:
        """Where the arrays of its reply go: to the caller's own, as far as they fit."""
        if len(lengths) != len(self.into):
            self.into = [np.empty(length, np.uint8) for length in lengths]
        return [
            (array if array.nbytes == length else np.empty(length, np.uint8)).data
            for array, length in zip(self.into, lengths, strict=True)
        ]

    def finish(self, reply: Reply) -> None:
        """End with the reply, whose rows are the caller's own arrays where they came there, unless it has ended."""
        if isinstance(reply, Rows):
            reply = replace(reply, tables=tuple(map(_same, self.into, reply.tables)))
        if self.timer is not None:
            self.timer.cancel()
        if not self.answer.done():
            self.answer.set_result(reply)


def _same(array: Array, received: Floats | Bytes) -> Floats | Bytes:
    """The caller's own array, where it is what was received into, see place."""
    same = array.nbytes == received.nbytes and array.dtype == received.dtype
    return cast("Floats | Bytes", array) if same else received
