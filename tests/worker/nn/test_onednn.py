"""Linear layers by oneDNN."""

import copy

import pytest
import torch
from torch import nn

from embershard.worker.nn import onednn
from embershard.worker.nn.onednn import OneDnnLinear, use_onednn


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(onednn, "_WORTH_IT", 1)


def gradients(layer, x, expand=False):
    x = x.clone().requires_grad_()
    y = layer(x)
    (y.sum() if expand else (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()).backward()
    found = [y.detach(), x.grad, layer.weight.grad, *([layer.bias.grad] if layer.bias is not None else [])]
    layer.zero_grad()
    return found


@pytest.mark.parametrize("shape", [(7, 5), (1, 5), (3, 4, 5), (0, 5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("expand", [True, False])
def test_forward_and_backward_are_those_of_torch(shape, bias, expand):
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 11, bias=bias), torch.randn(shape)
    want = gradients(layer, x, expand)
    assert use_onednn(layer) == 1
    for got, expected in zip(gradients(layer, x, expand), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_layer_takes_the_way_of_its_input(monkeypatch):
    layer = nn.Linear(8, 8)
    use_onednn(layer)
    used = []
    product = onednn._product
    monkeypatch.setattr(onednn, "_product", lambda x, *rest: used.append(tuple(x.shape)) or product(x, *rest))
    layer(torch.randn(4, 8))
    assert used == [(4, 8)]
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, 8)).dtype == torch.bfloat16
    layer.to(torch.float64)(torch.randn(4, 8, dtype=torch.float64))
    with torch.no_grad():
        layer.to(torch.float32)(torch.randn(4, 8))
    monkeypatch.setattr(onednn, "_WORTH_IT", 2**22)
    layer(torch.randn(4, 8))
    assert used == [(4, 8)]


def test_a_changed_model_copies_saves_and_loads():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    want = model(torch.ones(2, 3))
    assert use_onednn(model) == 2
    twin = copy.deepcopy(model)
    assert isinstance(twin[0], OneDnnLinear)
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(twin(torch.ones(2, 3)), want)


def test_subclasses_with_a_forward_of_their_own_are_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(3, 3))
    assert use_onednn(model) == 0
    assert type(model[0]) is Doubled


def test_a_second_derivative_is_refused():
    layer = nn.Linear(3, 3)
    use_onednn(layer)
    x = torch.randn(2, 3, requires_grad=True)
    (first,) = torch.autograd.grad((layer(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("vendor", "avx512", "faster"),
    [("AuthenticAMD", True, True), ("GenuineIntel", True, False), ("AuthenticAMD", False, False), ("", True, False)],
)
def test_auto_means_avx512_that_mkl_leaves_unused(monkeypatch, vendor, avx512, faster):
    fields = {"vendor_id": vendor, "flags": "fpu avx2" + " avx512f" * avx512}
    monkeypatch.setattr(onednn, "_cpuinfo", lambda name: fields[name])
    assert onednn.onednn_is_faster() is faster
