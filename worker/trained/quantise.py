"""The linear layers of a model in int8: weights rounded once, activations as they come (dynamic quantisation).

By torch.ao.quantization.quantize_dynamic, which needs no calibration and no other package, and whose kernels are in
every build of torch for CPUs. The file holds for each layer NAME.weight (out, in) int8, NAME.scale () float64,
NAME.zero_point () int64 and NAME.bias (out,) float32: weight = (int8 - zero_point) * scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized.dynamic import Linear as Int8Linear
from torch.ao.quantization import default_dynamic_qconfig, quantize_dynamic


def quantise(model: nn.Module) -> int:
    """Put the linear layers of a model on the CPU into int8, in place; how many there were."""
    layers = {
        f"{parent}.{name}" if parent else name: default_dynamic_qconfig
        for parent, module in model.named_modules()
        if not isinstance(module, nn.TransformerEncoderLayer)  # which reads its layers' weights itself
        for name, layer in module.named_children()
        # neither a subclass, as of parametrizations, nor one whose weight a hook computes, as weight_norm's
        if type(layer) is nn.Linear and "weight" in layer._parameters and not layer._forward_pre_hooks
        if layer.weight.dtype == torch.float32  # what the int8 layer takes and gives
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces its successor, a package of its own
        quantize_dynamic(model, layers, torch.qint8, inplace=True)  # type: ignore[no-untyped-call]
    return len(layers)


def int8_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The int8 layers of a quantised model as plain tensors, by the names above."""
    tensors = {}
    for name, layer in _layers(model):
        weight, bias = layer._weight_bias()  # type: ignore[no-untyped-call]
        tensors[f"{name}.weight"] = weight.int_repr()
        tensors[f"{name}.scale"] = torch.tensor(weight.q_scale(), dtype=torch.float64, device="cpu")
        tensors[f"{name}.zero_point"] = torch.tensor(weight.q_zero_point(), device="cpu")
        if bias is not None:
            tensors[f"{name}.bias"] = bias.detach().clone()
    return tensors


def load_int8(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Quantise a model and give its linear layers what `int8_tensors` gave. KeyError where one is missing."""
    quantise(model)
    for name, layer in _layers(model):
        scale, zero_point = float(tensors[f"{name}.scale"]), int(tensors[f"{name}.zero_point"])
        weight = torch._make_per_tensor_quantized_tensor(tensors[f"{name}.weight"], scale, zero_point)
        layer.set_weight_bias(weight, tensors.get(f"{name}.bias"))
    return model


def _layers(model: nn.Module) -> Iterator[tuple[str, Int8Linear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Int8Linear))
