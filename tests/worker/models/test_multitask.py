"""Models and the loss of several labels, against the papers' formulas one sample at a time."""

import math

import pytest
import torch

from embershard.worker.models.loss import bce
from embershard.worker.models.multitask.mmoe import MMoE
from embershard.worker.models.multitask.ple import PLE

B, F, DIM, LABELS = 5, 3, 4, 2
IDS = torch.arange(B * F).view(B, F)
DENSE = torch.linspace(-1, 1, B * 2).view(B, 2)


def inputs(model):
    return [torch.cat([model.embedding.weight[row].flatten(), dense]) for row, dense in zip(IDS, DENSE, strict=True)]


def test_mmoe_mixes_shared_experts_by_a_gate_of_each_label():
    torch.manual_seed(1)
    model = MMoE(B * F, F, DIM, 2, LABELS, experts=3, expert=(6,), tower=(5,))
    rows = []
    for x in inputs(model):
        logits = []
        for gate, tower in zip(model.gates, model.towers, strict=True):
            weights = (gate.gate.weight @ x).exp()
            mixed = sum(w / weights.sum() * expert(x) for w, expert in zip(weights, model.experts, strict=True))
            logits.append(tower(mixed).squeeze())
        rows.append(torch.stack(logits))
    torch.testing.assert_close(model(IDS, DENSE), torch.stack(rows))


def test_ple_keeps_a_labels_experts_from_other_labels_and_passes_levels_on():
    torch.manual_seed(1)
    model = PLE(B * F, F, DIM, 2, LABELS, levels=2, experts=2, shared_experts=1, expert=(6,), tower=(5,))
    rows = []
    for x in inputs(model):
        below = [x] * (LABELS + 1)
        for number, level in enumerate(model.levels):
            out = [[expert(x) for expert in group] for x, group in zip(below, level.experts, strict=True)]
            assert [len(group) for group in out] == [2, 2, 1]
            gates = [*level.gates, *([level.shared_gate] if number == 0 else [])]
            seen = [[*out[0], *out[2]], [*out[1], *out[2]], [*out[0], *out[1], *out[2]]]
            below = [
                sum(w * o for w, o in zip((gate.gate.weight @ x).softmax(0), outputs, strict=True))
                for gate, x, outputs in zip(gates, below, seen, strict=False)
            ]
        rows.append(torch.stack([tower(x).squeeze() for tower, x in zip(model.towers, below, strict=True)]))
    torch.testing.assert_close(model(IDS, DENSE), torch.stack(rows))


@pytest.mark.parametrize("model", [MMoE, PLE])
def test_every_part_learns_and_one_label_gives_one_logit(model):
    found = model(B * F, F, DIM, 2, LABELS, batch_norm=True, dropout=0.1)
    found(IDS, DENSE).square().sum().backward()
    assert not [n for n, p in found.named_parameters() if p.grad is None]
    assert model(B * F, F, DIM, 2, 1)(IDS, DENSE).shape == (B,)


@pytest.mark.parametrize("levels", [1, 2])
def test_ple_whose_experts_have_no_layers_mixes_its_input(levels):
    model = PLE(B * F, F, DIM, 2, LABELS, levels=levels, expert=(), tower=(5,))
    want = [torch.cat([tower(x) for tower in model.towers]) for x in inputs(model)]
    torch.testing.assert_close(model(IDS, DENSE), torch.stack(want))


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]])
def test_missing_labels_have_no_loss_and_each_label_its_own_mean(weights):
    logits = torch.tensor([[0.5, -1.0], [2.0, 3.0], [-0.3, 0.1]], requires_grad=True)
    labels = [[1.0, math.nan], [0.0, 1.0], [math.nan, 0.0]]
    want = 0.0
    for column, share in ((0, 1.0), (1, 0.25)):
        terms = [
            (
                (weights or [1.0] * 3)[row],
                -math.log(torch.sigmoid(logits[row, column] * (1 if labels[row][column] else -1)).item()),
            )
            for row in range(3)
            if not math.isnan(labels[row][column])
        ]
        want += share * sum(w * loss for w, loss in terms) / sum(w for w, _ in terms)
    given = None if weights is None else torch.tensor(weights)
    loss = bce(logits, torch.tensor(labels), given, label_weights=(1.0, 0.25))
    assert loss.item() == pytest.approx(want, rel=1e-5)
    loss.backward()
    assert torch.equal(logits.grad != 0, ~torch.tensor(labels).isnan())


def test_weights_of_samples_are_those_of_torch():
    logits, labels, weights = torch.randn(6), torch.tensor([0.0, 1, 1, 0, 1, 0]), torch.rand(6)
    want = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
    torch.testing.assert_close(bce(logits, labels, weights), want / weights.sum())
