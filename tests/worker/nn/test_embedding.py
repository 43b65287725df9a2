"""Remote embeddings against torch's own modules: the same outputs, and the same weights after a step of SGD."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import embershard as es

ROWS, DIM = 12, 3
# one multiplication and one addition per float lie between both sides, in another order at most
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def remote_rows(module):
    return module.table.pull(torch.arange(ROWS))


def check_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, **CLOSE)


def both(module, use, **close):
    """`use` of the remote module and of torch's own, and a step of SGD; the weights are the same then."""
    theirs = copy.deepcopy(module)
    with es.local(shards=3) as session:
        ours = es.wrap(module, session, optimizer=es.SGD(lr=1.0))
        found = [use(side) for side in (ours, theirs)]
        session.step()
        torch.optim.SGD(theirs.parameters(), lr=1.0).step()
        torch.testing.assert_close(remote_rows(ours), theirs.weight.detach(), **{**CLOSE, **close})
    return found


def compare(module, calls):
    """Forward each of the calls (positional tensors, per_sample_weights), one backward, one step, on both sides."""

    def use(side):
        outs, leaves = [], []
        for arguments, per_sample in calls:
            leaves += [] if per_sample is None else [per_sample.clone().requires_grad_()]
            outs.append(side(*arguments, **({} if per_sample is None else {"per_sample_weights": leaves[-1]})))
        scales = [torch.randn(out.shape, generator=torch.Generator().manual_seed(i)) for i, out in enumerate(outs)]
        total = sum((out * scale).sum() for out, scale in zip(outs, scales, strict=True))
        if total.requires_grad:
            total.backward()
        return [*outs, *(leaf.grad for leaf in leaves)]

    torch.testing.assert_close(*both(module, use), **CLOSE)


EMBEDDING_CASES = [
    dict(zip(("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"), values, strict=True))
    for values in itertools.product([None, 2, -1], [None, 0.5], [2.0, 1.0], [False, True])
]


@pytest.mark.parametrize("arguments", EMBEDDING_CASES, ids=str)
def test_embedding_equals_torch(arguments):
    ids = torch.randint(ROWS, (5, 4))
    ids[0, :2] = 2
    compare(nn.Embedding(ROWS, DIM, **arguments), [((ids,), None)])


def test_a_sparse_embedding_is_wrapped_as_one_that_is_not():
    assert es.wrap(nn.Embedding(ROWS, DIM, sparse=True), es.local(), optimizer=es.SGD(lr=1.0)).sparse is False


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_embedding_takes_ids_of_any_shape(shape, dtype):
    compare(nn.Embedding(ROWS, DIM), [((torch.randint(ROWS, shape, dtype=dtype),), None)])


class Sequences(nn.Module):
    """Histories of any length, and how they are averaged."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ROWS, DIM, padding_idx=2)

    def forward(self, ids):
        rows = self.items(ids)
        return ((rows * ids.float().unsqueeze(-1)).values() * rows.values().sin()).sum()


@pytest.mark.parametrize("is_announced", [False, True])
def test_embedding_takes_jagged_ids(is_announced):
    theirs = Sequences()
    ids = torch.nested.nested_tensor_from_jagged(torch.randint(ROWS, (9,)), torch.tensor([0, 4, 4, 9]))
    with es.local(shards=3) as session:
        ours = copy.deepcopy(theirs)
        if is_announced:
            ours.embedding_inputs = lambda ids: {"items": ids}
        es.wrap(ours, session, optimizer=es.SGD(lr=1.0))
        for side in (ours, theirs):
            side(ids).backward()
        session.step()
        torch.optim.SGD(theirs.parameters(), lr=1.0).step()
        check_equal(remote_rows(ours.items), theirs.items.weight.detach())


BAG_CASES = [
    dict(zip(("mode", "padding_idx", "include_last_offset"), values, strict=True))
    for values in itertools.product(["sum", "mean", "max"], [None, 2, -1], [False, True])
]
IDS = torch.tensor([2, 5, 2, 2, 7, 0, 11, 5, 5, 3])
OFFSETS = torch.tensor([0, 3, 3, 4, 9, 10])  # bags of 3, 0, 1, 5, 1 and (without include_last_offset) 0 ids


@pytest.mark.parametrize(
    "bags", [(IDS, OFFSETS), (IDS.int(), OFFSETS.int()), (IDS.view(5, 2),)], ids=["int64", "int32", "one length"]
)
@pytest.mark.parametrize("arguments", BAG_CASES, ids=str)
def test_embedding_bag_equals_torch(arguments, bags):
    compare(nn.EmbeddingBag(ROWS, DIM, **arguments), [(bags, None)])


@pytest.mark.parametrize("padding_idx", [None, 5])
@pytest.mark.parametrize("flat", [True, False])
def test_per_sample_weights_and_their_gradients_equal_torch(flat, padding_idx):
    module = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=padding_idx)
    arguments = (IDS, OFFSETS) if flat else (IDS.view(5, 2),)
    compare(module, [(arguments, torch.randn(arguments[0].shape))])


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_scales_gradients_by_frequency_as_torch_documents_it(mode):
    # torch's own kernel divides by the count of another id, so the formula is the reference
    module = nn.EmbeddingBag(ROWS, DIM, mode=mode, scale_grad_by_freq=True)
    plain = nn.EmbeddingBag(ROWS, DIM, mode=mode, _weight=module.weight.detach().clone())
    plain(IDS, OFFSETS).pow(2).sum().backward()
    counts = torch.bincount(IDS, minlength=ROWS).clamp(min=1)
    expected = plain.weight.detach() - plain.weight.grad / counts.unsqueeze(1)
    with es.local(shards=3) as session:
        ours = es.wrap(module, session, optimizer=es.SGD(lr=1.0))
        ours(IDS, OFFSETS).pow(2).sum().backward()
        session.step()
        check_equal(remote_rows(ours), expected)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    ("max_norm", "bags"),
    [(0.5, (IDS, OFFSETS)), (2.0, (IDS, OFFSETS)), (None, (IDS[:0], torch.tensor([0, 0, 0])))],
    ids=["small", "large", "no id"],
)
def test_embedding_bag_renormalises_like_torch_and_gives_zeros_without_any_id(mode, max_norm, bags):
    compare(nn.EmbeddingBag(ROWS, DIM, mode=mode, max_norm=max_norm), [(bags, None)])


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_reading_a_table_several_times_in_a_step_sums_its_gradients(padding_idx):
    calls = [((torch.randint(ROWS, (4,)),), None) for _ in range(3)]
    compare(nn.Embedding(ROWS, DIM, padding_idx=padding_idx), calls)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("flat", [True, False])
def test_bags_have_torchs_bits_whatever_the_number_of_shards(mode, flat):
    ids = torch.from_numpy(np.random.default_rng(0).zipf(1.3, (400, 8)) % 500)
    arguments = (ids.view(-1), torch.arange(0, 3200, 8)) if flat else (ids,)
    scale = torch.randn(400, DIM)
    start = nn.EmbeddingBag(500, DIM, mode=mode, padding_idx=1)
    plain = copy.deepcopy(start)
    out = plain(*arguments)
    (out * scale).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    results = [(out.detach(), plain.weight.detach())]
    for shards in (1, 2, 4):
        with es.local(shards) as session:
            module = es.wrap(copy.deepcopy(start), session, optimizer=es.SGD(lr=1.0))
            out = module(*arguments)
            (out * scale).sum().backward()
            session.step()
            results.append((out.detach(), module.table.pull(torch.arange(500))))
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))


@st.composite
def bags(draw):
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    ids = draw(st.lists(st.integers(0, ROWS - 1), min_size=sum(lengths), max_size=sum(lengths)))
    last = draw(st.booleans())
    starts = np.concatenate([[0], np.cumsum(lengths)])[: None if last else -1]
    per_sample = torch.tensor(draw(st.lists(st.floats(-2, 2, width=32), min_size=len(ids), max_size=len(ids))))
    weighted = mode == "sum" and draw(st.booleans())
    arguments = {
        "mode": mode,
        "include_last_offset": last,
        "padding_idx": draw(st.none() | st.integers(-ROWS, ROWS - 1)),
    }
    flat = torch.tensor(ids, dtype=torch.int64)
    return arguments, flat, torch.tensor(starts), per_sample if weighted else None


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(bags())
def test_embedding_bag_equals_torch_on_random_bags(case):
    arguments, ids, offsets, per_sample = case
    torch.manual_seed(0)
    compare(nn.EmbeddingBag(ROWS, DIM, **arguments), [((ids, offsets), per_sample)])


@pytest.mark.parametrize(
    "optimizer", [es.Adam(lr=0.1), es.SGD(lr=0.1, momentum=0.9), es.Adagrad(lr=0.1, weight_decay=0.1)]
)
def test_the_padding_row_never_moves(optimizer):
    with es.local(shards=2) as session:
        module = es.wrap(nn.Embedding(ROWS, DIM, padding_idx=4), session, optimizer=optimizer)
        start = remote_rows(module)
        for number in range(1, 4):
            (module(torch.tensor([4, 1, 4])) + 1).pow(2).sum().backward()
            session.step()
            assert session.stats.pushed_rows == number
        moved = (remote_rows(module) != start).any(1)
        assert moved.nonzero().flatten().tolist() == [1]


def test_the_padding_row_of_one_reader_is_trained_by_another():
    model = nn.ModuleList([nn.Embedding(ROWS, DIM, padding_idx=4), nn.Embedding(ROWS, DIM)])
    model[1].weight = model[0].weight
    with es.local(shards=2) as session:
        es.wrap(model, session, optimizer=es.SGD(lr=1.0))
        ids = torch.tensor([4, 5])
        before = model[0].table.pull(ids)
        (model[0](ids).sum() + 2 * model[1](ids).sum()).backward()
        session.step()
        check_equal(model[0].table.pull(ids), before - torch.tensor([[2.0], [3.0]]))


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        (torch.tensor([1, 12]), IndexError, "table 'embedding': id 12 is out of range, ids must be 0 to 11"),
        (torch.tensor([1, -1]), IndexError, "id -1 is out of range"),
        (torch.tensor([1.0]), RuntimeError, "table 'embedding': ids must be int64 or int32, got torch.float32"),
        (torch.tensor([True]), RuntimeError, "got torch.bool"),
    ],
)
def test_wrong_ids_raise_what_torch_raises_and_name_the_table(ids, error, text):
    module = nn.Embedding(ROWS, DIM)
    with pytest.raises(error):
        module(ids)
    with es.local() as session, pytest.raises(error, match=text):
        es.wrap(module, session, optimizer=es.SGD(lr=1.0))(ids)


FLAT = torch.tensor([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("mode", "arguments", "extra", "error", "text"),
    [
        ("sum", (FLAT,), {}, ValueError, "1-D ids need 1-D offsets"),
        ("sum", (FLAT.view(2, 2), torch.tensor([0])), {}, ValueError, "offsets must be None"),
        ("sum", (FLAT.view(2, 2, 1),), {}, ValueError, "must be 1-D or 2-D, got 3-D"),
        ("sum", (FLAT.view(2, 2),), {"per_sample_weights": torch.ones(4)}, ValueError, "do not match"),
        ("mean", (FLAT.view(2, 2),), {"per_sample_weights": torch.ones(2, 2)}, NotImplementedError, "need mode 'sum'"),
        ("sum", (FLAT, torch.tensor([1, 2])), {}, RuntimeError, "offsets"),
    ],
)
def test_wrong_bags_raise_what_torch_raises_and_name_the_table(mode, arguments, extra, error, text):
    module = nn.EmbeddingBag(ROWS, DIM, mode=mode)
    with pytest.raises(error):
        module(*arguments, **extra)
    with es.local() as session, pytest.raises(error, match=text):
        es.wrap(module, session, optimizer=es.SGD(lr=1.0))(*arguments, **extra)


def any_table(session, optimizer=None):
    spec = es.TableSpec(name="any", dim=DIM, optimizer=optimizer or es.SGD(lr=1.0))
    return es.Embedding(session.table(spec))


def test_a_table_without_a_size_takes_any_64_bit_id():
    with es.local(shards=3) as session:
        module = any_table(session)
        ids = torch.tensor([-(2**63), -1, 0, 2**62, 2**63 - 1])
        before = module(ids)
        before.sum().backward()
        session.step()
        check_equal(module(ids), before.detach() - 1)
        assert sum(table.rows for status in session.client.status() for table in status.tables) == 5


class Shared(nn.Module):
    """Two readers of one table, of which the first one scales its rows down."""

    def __init__(self):
        super().__init__()
        self.scaled, self.plain = nn.Embedding(ROWS, DIM, max_norm=0.5), nn.Embedding(ROWS, DIM)
        self.plain.weight = self.scaled.weight

    def forward(self, ids):
        return self.scaled(ids).sum() + self.plain(ids.flip(0)).pow(2).sum()

    def embedding_inputs(self, ids):
        return {"scaled": ids, "plain": ids.flip(0)}


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_rows_that_max_norm_scales_down_are_so_for_the_next_reader_of_the_same_forward(reads_ahead):
    ours, theirs = Shared(), Shared()
    theirs.load_state_dict(ours.state_dict())
    batches = [torch.arange(ROWS)] * 3
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    with es.local(shards=2) as session:
        es.wrap(ours, session, optimizer=es.SGD(lr=0.1))
        for batch in session.prefetch(batches) if reads_ahead else batches:
            loss, expected = ours(batch), theirs(batch)
            torch.testing.assert_close(loss, expected, **CLOSE)
            loss.backward()
            expected.backward()
            session.step()
            optimizer.step()
            optimizer.zero_grad()


def test_max_norm_keeps_the_optimizers_state():
    plain = nn.Embedding(ROWS, DIM, max_norm=1.0)
    module = copy.deepcopy(plain)
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.5)
    with es.local(shards=2) as session:
        ours = es.wrap(module, session, optimizer=es.Adagrad(lr=0.5))
        for _ in range(4):
            for model in (plain, ours):
                model(IDS).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            check_equal(remote_rows(ours), plain.weight.detach())


def test_the_weight_of_a_remote_embedding_is_missed_with_a_reason():
    with es.local() as session:
        module = any_table(session)
        assert not hasattr(module, "weight")
        with pytest.raises(AttributeError, match="table 'any' takes any id"):
            _ = module.weight


def test_a_frozen_embedding_is_pulled_and_never_pushed(make_session):
    values = torch.randn(ROWS, DIM)
    session = make_session(2)
    module = es.wrap(nn.Embedding.from_pretrained(values), session, optimizer=es.Adam(lr=0.1))
    out = module(torch.arange(ROWS))
    check_equal(out, values)
    assert not out.requires_grad
    session.step()
    assert session.stats.pushed_rows == 0


LOSSES = {
    "plain": lambda out: (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(),
    "one gradient for all": lambda out: out.sum(),
    "transposed": lambda out: (out.transpose(0, 2) ** 2 * torch.linspace(-1, 1, len(out))).sum(),
    "half precision": lambda out: (out.half() ** 2).sum().float(),
    "no gradient at all": lambda out: (out * 0).sum(),
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("shape", [(40, 20, 5), (0, 7, 5), (1, 1, 5)])
def test_a_lookup_leaves_the_bits_of_torchs_own_gradient(shape, create_graph, loss, monkeypatch):
    ids = torch.from_numpy(np.random.default_rng(0).zipf(1.3, shape[:2]))
    with es.local(shards=2) as session:
        module = es.Embedding(session.table(es.TableSpec(name="any", dim=shape[2], optimizer=es.SGD(lr=1.0))))
        collected = []
        monkeypatch.setattr(session, "collect", collected.append)
        LOSSES[loss](module(ids)).backward(create_graph=create_graph)
        read = session.read(module.spec, ids, ids.device)
        rows = read.rows.requires_grad_()
        LOSSES[loss](nn.functional.embedding(read.index, rows)).backward()
        if not ids.numel():
            assert collected == []
        else:
            assert torch.equal(collected[0].gradients, rows.grad)


def test_a_lookup_under_autocast_gives_float32_rows_their_float32_gradient():
    layer = nn.Linear(DIM, 4)

    def use(side):
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(side(IDS))
        assert out.dtype == torch.bfloat16
        out.sum().backward()

    both(nn.Embedding(ROWS, DIM), use)


def test_a_lookup_is_differentiated_twice():
    def use(side):
        scale = torch.ones(DIM, requires_grad=True)
        loss = (side(IDS) * scale).pow(3).sum()
        (penalty,) = torch.autograd.grad(loss, scale, create_graph=True)
        (loss + penalty.pow(2).sum()).backward()

    both(nn.Embedding(ROWS, DIM), use, atol=1e-2)  # the penalty makes gradients of some thousands


def test_one_output_used_twice_and_backward_in_two_parts_sum_up():
    def use(side):
        out = side(IDS)
        (out.pow(2).sum() + out.sum()).backward(retain_graph=True)
        out.sum().backward()

    both(nn.Embedding(ROWS, DIM), use)
