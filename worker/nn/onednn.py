"""Linear layers that multiply by oneDNN instead of MKL, on processors where MKL leaves half of the machine unused."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

# multiplications of a layer's forward from which on oneDNN's fixed cost of some 50 us is paid back
_WORTH_IT = 2**22


def use_onednn(model: nn.Module) -> int:
    """Have the large linear layers of a model on the CPU multiply by oneDNN, in float32 as before; how many could.

    torch multiplies float32 matrices by MKL, which on other processors than Intel's leaves AVX-512 unused: there oneDNN
    takes half the time (`make bench-linear`), forward and backward. Results differ from torch's by float rounding.
    Layers of exactly the class nn.Linear are changed, in place; what they are given decides at each call: small
    batches, other devices and types, autocast and torch.compile go torch's way, and so does what needs no gradient:
    oneDNN chooses the order of a sum by the number of rows, and a score is to be the same in any batch. It is 0 where
    torch was built without oneDNN. A second derivative through such a layer raises RuntimeError.
    """
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = OneDnnLinear
    return len(layers)


def onednn_is_faster() -> bool:
    """Whether this processor is one on which MKL is slow: it has AVX-512 and is not Intel's."""
    return "avx512f" in cpu_flags() and _cpuinfo("vendor_id") not in ("", "GenuineIntel")


def cpu_flags() -> set[str]:
    """The instruction sets of this processor, by Linux's names: avx2, avx512f, avx512_bf16; none on other systems."""
    return set(_cpuinfo("flags").split())  # older versions of torch have no torch.cpu.get_capabilities


def _cpuinfo(name: str) -> str:
    """A field of the first processor, as Linux tells it; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


class OneDnnLinear(nn.Linear):
    """nn.Linear whose large products are oneDNN's."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if _fits(x, self.weight):
            rows: Tensor = _Linear.apply(x.reshape(-1, self.in_features), self.weight, self.bias)  # type: ignore[no-untyped-call]
            return rows.view(*x.shape[:-1], self.out_features)
        return super().forward(x)


def _fits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.numel() * weight.shape[0] >= _WORTH_IT
        and x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None  # type: ignore[attr-defined]
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors  # type: ignore[attr-defined]
        of_x, of_weight, of_bias = ctx.needs_input_grad  # type: ignore[attr-defined]
        return (
            _product(gradient, weight.t()) if of_x else None,
            _product(gradient.t(), x.t()) if of_weight else None,
            gradient.sum(0) if of_bias and ctx.has_bias else None,  # type: ignore[attr-defined]
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The op behind torch.compile's own linear layers on CPUs; torch has no public name for it on float32 tensors."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
