"""The contract of the `rpc` transport: what torch.distributed.rpc calls in a shard, and how a worker finds a shard.

torch pickles a function by its name, so the one that workers call is here, where both sides import it; beside its name
only strings, bytes, numbers and tensors travel. torch rpc knows groups whose members all know each other, and a member
that is killed blocks all later joins. So every process is a group of its own, and a worker learns of a shard from the
shard: whoever connects to its address and sends QUESTION is told, in one line, where its agent listens.

Importing this imports torch: a shard does it only where rpc was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.rpc import TensorPipeAgent
from torch.distributed.rpc.api import _init_rpc_states

from embershard.proto.arrays import Bytes, Floats, Ids
from embershard.proto.wire import VERSION

# asked first: what listens there instead says so, or closes the connection
QUESTION = f"embershard rpc {VERSION}?\n".encode()
# and the answer: this, the URL of the shard's agent, and a line's end
GREETING = f"embershard rpc {VERSION} ".encode()
MAX_GREETING_BYTES = 256

_INTERFACE = "TP_SOCKET_IFNAME"  # where TensorPipe reads on which interface it shall listen; it has no argument for it

# (failed?, the head of the reply or an error's detail, the arrays of the reply)
Answer = tuple[bool, bytes, list[torch.Tensor]]
Handler = Callable[[str, bytes, Sequence[torch.Tensor], float], "torch.futures.Future[Answer]"]
_handler: Handler | None = None


def serve_with(handler: Handler | None) -> None:
    """Have this process's calls answered by `handler`."""
    global _handler
    _handler = handler


def call(method: str, head: bytes, bulk: Sequence[torch.Tensor], seconds: float) -> torch.futures.Future[Answer]:
    """Run in the shard: a method of the gRPC service, its message in parts, and for how long the worker waits."""
    if _handler is None:
        raise RuntimeError("no shard is served by this process")
    return _handler(method, head, bulk, seconds)


# what rpc.functions.async_execution does, without a wrapper, which could not be pickled by this name
call.__dict__["_wrapped_async_rpc_function"] = call


def start_agent(name: str, interface: str) -> TensorPipeAgent:
    """This process's agent, alone in its group, listening on a network interface."""
    before = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = interface
    try:
        # TCP alone: the other transports listen in more places than the interface
        options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
        # what rpc.init_rpc does, but for the store, which is of this process alone, and a call to itself
        dist_autograd._init(0)
        agent = TensorPipeAgent(dist.HashStore(), name, 0, None, options, {}, [])
        _init_rpc_states(agent)  # type: ignore[no-untyped-call]
    finally:
        if before is None:
            del os.environ[_INTERFACE]
        else:
            os.environ[_INTERFACE] = before
    return agent


def addresses_of(agent: TensorPipeAgent) -> dist.Store:
    """Return the mapping in which an agent looks up the URLs of its group's members, by name."""
    return dist.PrefixStore("addrs", agent.store)


def tensor(array: Ids | Floats | Bytes) -> torch.Tensor:
    """An array's memory as a tensor; a copy where it is not contiguous, or not to be written to."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
