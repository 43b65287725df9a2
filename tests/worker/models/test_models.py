"""The models' formulas against slow plain references, and that every parameter learns."""

import copy
import itertools

import pytest
import torch

from embershard.worker.data.batch import Batch
from embershard.worker.job.registry import MODELS
from embershard.worker.models.ctr.dcn import DCNV2, CrossLayers
from embershard.worker.models.ctr.dlrm import DLRM
from embershard.worker.models.ctr.fm import FM, LR, DeepFM
from embershard.worker.models.ctr.persia import PersiaDNN
from embershard.worker.models.ctr.wide_deep import WideDeep
from embershard.worker.models.ctr.xdeepfm import CIN, XDeepFM
from embershard.worker.models.list_losses import FrequencyEstimator, candidates, sampled_softmax
from embershard.worker.models.multitask.mmoe import MMoE
from embershard.worker.models.multitask.ple import PLE
from embershard.worker.models.retrieval.ncf import GMF, MLP, NeuMF
from embershard.worker.models.retrieval.two_tower import TwoTower
from embershard.worker.models.user_defined import forward_of, in_whole_rows
from embershard.worker.nn import onednn

B, F, D, DIM, IDS = 6, 4, 3, 5, 40

BUILD = {
    "lr": lambda d, n=IDS, on=None: LR(n, d, device=on),
    "fm": lambda d, n=IDS, on=None: FM(n, DIM, d, device=on),
    "wide_deep": lambda d, n=IDS, on=None: WideDeep(n, F, DIM, d, hidden=(8,), batch_norm=True, dropout=0.1, device=on),
    "deepfm": lambda d, n=IDS, on=None: DeepFM(n, F, DIM, d, hidden=(8,), batch_norm=True, dropout=0.1, device=on),
    "dcn_v2 parallel": lambda d, n=IDS, on=None: DCNV2(n, F, DIM, d, hidden=(8, 7), device=on),
    "dcn_v2 stacked": lambda d, n=IDS, on=None: DCNV2(n, F, DIM, d, hidden=(8, 7), structure="stacked", device=on),
    "dlrm dot": lambda d, n=IDS, on=None: DLRM(n, F, DIM, d, bottom=(8,), hidden=(9,), device=on),
    "dlrm cat": lambda d, n=IDS, on=None: DLRM(n, F, DIM, d, bottom=(8,), hidden=(9,), interaction="cat", device=on),
    "xdeepfm": lambda d, n=IDS, on=None: XDeepFM(n, F, DIM, d, cin=(6, 3), hidden=(8,), device=on),
    "mmoe": lambda d, n=IDS, on=None: MMoE(n, F, DIM, d, 1, expert=(8,), tower=(6,), device=on),
    "ple": lambda d, n=IDS, on=None: PLE(n, F, DIM, d, 1, expert=(8,), tower=(6,), device=on),
    "persia_dnn": lambda d, n=IDS, on=None: PersiaDNN(n, F, DIM, d, device=on),
    "gmf": lambda d, n=IDS, on=None: GMF(n, device=on),
    "mlp": lambda d, n=IDS, on=None: MLP(n, device=on),
    "neumf": lambda d, n=IDS, on=None: NeuMF(n, device=on),
    "two_tower": lambda d, n=IDS, on=None: TwoTower(n, DIM, hidden=(8,), device=on),
}
OTHERS = {"din", "sasrec", "simplex", "feature_towers"}  # have batches of another form, and tests of their own
PAIRS = ("gmf", "mlp", "neumf", "two_tower")


def batch(name, num_dense):
    torch.manual_seed(1)
    ids = torch.randint(0, IDS, (B, 2 if name in PAIRS else F))
    return ids, torch.rand(B, num_dense) if num_dense and name not in PAIRS else None


def test_every_registered_model_is_tested_here():
    assert {name.split()[0] for name in BUILD} == set(MODELS) - OTHERS


@pytest.mark.parametrize(("name", "num_dense"), [(n, d) for n in BUILD for d in (0, D) if d or n != "persia_dnn"])
def test_a_model_gives_one_logit_per_sample_and_every_parameter_a_gradient(name, num_dense):
    ids, dense = batch(name, num_dense)
    model, read = BUILD[name](num_dense), {}
    for key, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_pre_hook(lambda _, args, key=key: read.update({key: args[0]}))
    logits = model(ids, dense)
    assert logits.shape == (B,)
    logits.square().sum().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # what stands before a batch norm, or only shifts everything, may have none
    assert not [n for n in silent if not n.endswith("bias")]
    inputs = model.embedding_inputs(ids, dense)  # what the modules read
    assert set(read) == set(inputs) == set(model.embedding_id_spaces)
    assert all(torch.equal(read[key], inputs[key]) for key in read)


@pytest.mark.parametrize("name", BUILD)
def test_tables_on_the_meta_device_take_no_memory_and_any_number_of_rows(name):
    model = BUILD[name](D, 2**62, "meta")
    tables = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Embedding)}
    assert set(tables) == set(model.embedding_id_spaces)
    assert all(m.num_embeddings == 2**62 and m.weight.is_meta for m in tables.values())
    assert not [n for n, p in model.named_parameters() if p.is_meta and n.removesuffix(".weight") not in tables]


def test_fm_is_the_papers_equation():
    ids, dense = batch("fm", D)
    model = FM(IDS, DIM, D)
    torch.nn.init.normal_(model.first_order.dense_weight)
    torch.nn.init.constant_(model.first_order.bias, 0.5)
    first = model.first_order.dense_weight
    want = []
    for b in range(B):
        logit = 0.5 + dense[b] @ first.flatten() + sum(model.linear.weight[i, 0] for i in ids[b])
        pairs = itertools.combinations(model.embedding.weight[ids[b]], 2)
        want.append(logit + sum(one @ other for one, other in pairs))
    torch.testing.assert_close(model(ids, dense), torch.stack(want))


def test_deepfm_is_fm_plus_the_mlp():
    ids, dense = batch("deepfm", D)
    model = DeepFM(IDS, F, DIM, D, hidden=(8,))
    fm = FM(IDS, DIM, D)
    fm.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith(("deep", "output"))})
    deep = model.output(model.deep(torch.cat([model.embedding(ids).flatten(1), dense], 1))).squeeze(1)
    torch.testing.assert_close(model(ids, dense), fm(ids, dense) + deep)


def test_cross_layers_are_the_papers_equation():
    cross = CrossLayers(7, 3)
    x0 = torch.randn(B, 7)
    for b in range(B):
        x = x0[b]
        for layer in cross.layers:
            x = x0[b] * (layer.weight @ x + layer.bias) + x
        torch.testing.assert_close(cross(x0)[b], x)


def test_dlrm_interactions_are_all_pairs_of_dots_behind_the_bottom_mlp():
    ids, dense = batch("dlrm dot", D)
    model = DLRM(IDS, F, DIM, D, bottom=(8,), hidden=(9,))
    seen = []
    model.top.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(ids, dense)
    head = model.bottom(dense)
    for b in range(B):
        vectors = [head[b], *model.embedding(ids[b])]
        dots = [vectors[i] @ vectors[j] for i in range(F + 1) for j in range(i)]
        torch.testing.assert_close(seen[0][b], torch.cat([head[b], torch.stack(dots)]))


def test_neumf_has_the_papers_shapes():
    mlp = MLP(IDS, factors=8)
    assert [tuple(m.weight.shape) for m in mlp.tower if isinstance(m, torch.nn.Linear)] == [(32, 64), (16, 32), (8, 16)]
    assert mlp.embedding.weight.shape == (IDS, 32)
    assert GMF(IDS, factors=8).output.weight.shape == (1, 8)
    assert NeuMF(IDS, factors=8).output.weight.shape == (1, 16)


def test_two_tower_scores_each_user_with_every_item_of_the_batch():
    model = TwoTower(IDS, DIM, hidden=(8,))
    ids = torch.randint(0, IDS, (B, 4))
    items = candidates(ids)
    assert items.tolist() == ids[:, 1].tolist() + ids[:, 2:].flatten().tolist()
    scores = model(ids, None, True)
    assert scores.shape == (B, 3 * B)
    for k, item in enumerate(items.tolist()):
        pairs = torch.stack([ids[:, 0], torch.full((B,), item)], 1)
        torch.testing.assert_close(scores[:, k], model(pairs))
    vectors = model.user_vectors(ids[:, 0]) @ model.item_vectors(items).T / model.temperature
    torch.testing.assert_close(vectors, scores)


def test_sampled_softmax_is_the_corrected_softmax_without_accidental_hits():
    logits = torch.randn(3, 4, dtype=torch.float64)
    items = torch.tensor([7, 8, 7, 9])
    log_q = torch.randn(4, dtype=torch.float64)
    want = 0.0
    for row in range(3):
        others = [c for c in range(4) if c == row or items[c] != items[row]]
        total = sum(float((logits[row, c] - log_q[c]).exp()) for c in others)
        want -= float(logits[row, row] - log_q[row]) - torch.tensor(total, dtype=torch.float64).log().item()
    torch.testing.assert_close(sampled_softmax(logits, items, log_q), torch.tensor(want / 3, dtype=torch.float64))


def test_the_frequency_estimator_finds_each_items_rate():
    torch.manual_seed(0)
    estimator = FrequencyEstimator(slots=64, first_interval=10.0)
    rare, common = [], []
    for step in range(600):
        log_q = estimator.update(torch.tensor([1, 2]) if step % 20 == 0 else torch.tensor([1]))
        common.append(log_q[0])
        if len(log_q) == 2:
            rare.append(log_q[1])
    assert common[-1].exp().item() == pytest.approx(1.0, rel=0.05)
    assert rare[-1].exp().item() == pytest.approx(1 / 20, rel=0.25)


def test_the_frequency_estimator_counts_an_item_as_often_as_it_is_in_a_batch():
    generator = torch.Generator().manual_seed(0)
    share = 1.0 / torch.arange(1.0, 41.0)
    share /= share.sum()
    estimator, found = FrequencyEstimator(slots=64, first_interval=10.0), []
    for _ in range(1000):
        items = torch.multinomial(share, 64, replacement=True, generator=generator)
        found.append(torch.full((40,), float("nan")).scatter(0, items, estimator.update(items)))
    mean = torch.stack(found[200:]).nanmean(0)
    torch.testing.assert_close(mean, (64 * share).log(), rtol=0, atol=0.2)
    again, state = FrequencyEstimator(slots=64), copy.deepcopy(estimator.state_dict())
    again.load_state_dict(state)
    assert torch.equal(again.update(items), estimator.update(items))


def test_cin_is_the_papers_sum_over_pairs():
    torch.manual_seed(1)
    x0 = torch.rand(2, 3, DIM)
    cin = CIN(3, (4, 2))
    maps, want = x0, []
    for layer, size in zip(cin.layers, (4, 2), strict=True):
        weight = layer.weight.view(size, maps.shape[1], 3)  # W^{k,h}_{ij} of section 3.1
        maps = torch.stack(
            [
                sum(weight[h, i, j] * maps[:, i] * x0[:, j] for i in range(maps.shape[1]) for j in range(3))
                for h in range(size)
            ],
            1,
        )
        want.append(maps.sum(2))
    torch.testing.assert_close(cin(x0), torch.cat(want, 1))


@pytest.mark.parametrize(
    "build",
    [
        lambda: DeepFM(IDS, F, 8, 4, hidden=(256, 64), batch_norm=True),
        lambda: DCNV2(IDS, F, 8, 4, hidden=(256, 64)),
        lambda: MMoE(IDS, F, 8, 4, 1, expert=(256,), tower=(64,)),
    ],
)
@pytest.mark.parametrize("linear", ["torch", "onednn"])
def test_a_logit_is_the_same_in_any_batch(build, linear, monkeypatch):
    monkeypatch.setattr(onednn, "_WORTH_IT", 2**16)
    torch.manual_seed(1)
    model = build().eval()
    if linear == "onednn":
        onednn.use_onednn(model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    rows = 3000
    ids, dense, labels = torch.randint(0, IDS, (rows, F)), torch.rand(rows, 4), torch.zeros(rows)
    forward = in_whole_rows(forward_of(model))
    with torch.no_grad():
        want = forward(model, Batch(ids, dense, labels))
        assert float(want.abs().max()) > 3  # where float32 has steps of 2.4e-7 and more
        for size in (1, 3, 7, 100):
            parts = [slice(i, i + size) for i in range(0, 20 * size, size)]
            found = torch.cat([forward(model, Batch(ids[p], dense[p], labels[p])) for p in parts])
            torch.testing.assert_close(found, want[: len(found)], rtol=0, atol=1e-6)
