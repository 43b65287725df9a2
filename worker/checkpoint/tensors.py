"""A nested state as one file: its tensors as safetensors, the rest as JSON in the file's metadata.

A state is a dict of dicts, lists, numbers, texts, None and tensors, as `state_dict()` of torch's classes gives it; keys
are texts or whole numbers. An array comes back as a tensor. Nothing in the file is executed when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

State = dict[str, object]

_TREE = "state"
# no text of ours begins so: marks of what JSON has no word for
_TENSOR, _ITEMS = "$tensor", "$items"


class Stateful(Protocol):
    """A part of a run that a checkpoint holds; torch's modules, optimizers and scalers are such."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that `load_state_dict` restores: data and tensors."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Restore the state that `state_dict` returned."""


def is_stateful(thing: object) -> TypeGuard[Stateful]:
    """Whether it is such a part, be it by `__getattr__`, of which isinstance() sees nothing from Python 3.12 on."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def pack(state: Mapping[str, object]) -> bytes:
    """The bytes of a file. TypeError names what is neither data nor a tensor."""
    tensors: dict[str, torch.Tensor] = {}
    tree = _encode(state, tensors, "state")
    return save(tensors, {_TREE: json.dumps(tree, separators=(",", ":"))})


def unpack(data: bytes) -> State:
    """The state in the bytes of a file, its tensors on the host. ValueError says what is wrong with them."""
    try:
        tensors = load(data)
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        state = _decode(json.loads(head["__metadata__"][_TREE]), tensors)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it holds no state of a worker ({type(error).__name__}: {error})") from None
    if not isinstance(state, dict):
        raise ValueError("it holds no state of a worker")
    return state


def _encode(value: object, tensors: dict[str, torch.Tensor], path: str) -> object:
    match value:
        case torch.Tensor():
            # a copy: tensors that share memory, as views of one buffer do, cannot be saved
            tensors[path] = value.detach().to("cpu", copy=True).contiguous()
            return {_TENSOR: path}
        case np.ndarray():
            tensors[path] = torch.from_numpy(value.copy())
            return {_TENSOR: path}
        case Mapping() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encode(part, tensors, f"{path}/{key}") for key, part in value.items()}
        case Mapping() if all(isinstance(key, str | int) for key in value):
            return {_ITEMS: [[key, _encode(part, tensors, f"{path}/{key}")] for key, part in value.items()]}
        case list() | tuple():
            return [_encode(part, tensors, f"{path}/{number}") for number, part in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise TypeError(f"{path} is a {type(value).__name__}, which a state cannot hold")


def _decode(value: object, tensors: Mapping[str, torch.Tensor]) -> object:
    if isinstance(value, list):
        return [_decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _ITEMS in value:
        return {key: _decode(part, tensors) for key, part in value[_ITEMS]}
    return {key: _decode(part, tensors) for key, part in value.items()}
