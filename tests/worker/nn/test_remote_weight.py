"""The weight of a wrapped embedding gives what torch's gives, or an error that says what to write instead."""

import copy
import io
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import embershard as es
from embershard.worker.nn.remote_weight import NoRowsRead, RemoteWeight
from embershard.worker.nn.rows_gradient import TableTooLarge
from embershard.worker.session import gradients
from embershard.worker.session.dense import ParameterChanged

IDS = torch.tensor([[3, 1, 3], [0, 7, 1]])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(12, 4, padding_idx=0)
        self.bag = nn.EmbeddingBag(9, 4, mode="sum")
        self.out = nn.Linear(4, 1)

    def forward(self, ids):
        return self.out(self.items(ids).sum(1) + self.bag(ids))


class TiedSoftmax(Net):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 12, bias=False)
        self.scores.weight = self.items.weight


class Scaled(nn.Embedding):
    def __init__(self, scale):
        super().__init__(12, 4)
        self.scale = scale

    def decay(self):
        return self.scale * self.weight.square().sum()


class OfOneKind(Net):
    """A class derived from torch's, and modules found by their class."""

    def __init__(self):
        super().__init__()
        self.extra = Scaled(0.5)

    def loss(self, ids):
        kinds = nn.Embedding | nn.EmbeddingBag
        decay = sum(module.weight.square().sum() for module in self.modules() if isinstance(module, kinds))
        return self(ids).mean() + 0.1 * decay + self.extra.decay()


class Scores(torch.autograd.Function):
    """Scores of all rows, with a backward of its own: torch gives the weight itself the gradient."""

    @staticmethod
    def forward(ctx, users, weight):
        ctx.save_for_backward(users, weight)
        return users @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        users, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ users


def squares(parameters):
    return sum(parameter.square().sum() for parameter in parameters)


def of_torch_func(model):
    loss = torch.func.grad(lambda weights, ids: torch.func.functional_call(model, weights, (ids,)).square().sum())
    return loss(dict(model.named_parameters()), IDS)


def hidden(model):
    return model.items(IDS).sum(1) + model.bag(IDS)


LOSSES = {
    "linear": lambda m: F.cross_entropy(F.linear(hidden(m), m.items.weight), IDS[:, 1]),
    "matmul": lambda m: F.cross_entropy(hidden(m) @ m.items.weight.T, IDS[:, 1]),
    "whole first": lambda m: F.cross_entropy((m.items.weight @ m.items(IDS).sum(1).T).T, IDS[:, 1]),
    "three lookups": lambda m: (m.items(IDS) * m.items(IDS.flip(0))).sum() + m.items.weight.square().sum(),
    "propagation": lambda m: torch.cat([m.items.weight, m.bag.weight]).relu().mean(0).square().sum(),
    "regulariser": lambda m: m(IDS).mean() + 0.1 * squares(m.parameters()),
    "regulariser of a part": lambda m: m(IDS).mean() + 0.1 * squares(m.items.parameters()),
    "norm": lambda m: m(IDS).mean() + 0.1 * m.items.weight.norm(),
    "index": lambda m: m.items.weight[IDS].square().sum(),
    "negative index": lambda m: m.items.weight[torch.tensor([-1, 2])].square().sum(),
    "slice": lambda m: m.items.weight[2:5].square().sum(),
    "index_select": lambda m: m.items.weight.index_select(0, IDS[0]).square().sum(),
    "columns": lambda m: torch.index_select(m.items.weight, 1, torch.tensor([1])).square().sum(),
    "F.embedding": lambda m: F.embedding(IDS, m.items.weight, 3).square().sum(),
    "F.embedding_bag": lambda m: F.embedding_bag(IDS, m.bag.weight, mode="mean").square().sum(),
    "einsum": lambda m: torch.einsum("bd,nd->bn", hidden(m), m.items.weight).square().sum(),
    "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (IDS,)).sum(),
    "autograd.Function": lambda m: F.cross_entropy(Scores.apply(hidden(m), m.items.weight), IDS[:, 1]),
    "checkpoint": lambda m: checkpoint(F.linear, hidden(m), m.items.weight, use_reentrant=True).square().sum(),
    "vmap": lambda m: torch.vmap(lambda x: m.items.weight @ x)(hidden(m)).square().sum(),
    "torch.func.grad": lambda m: torch.func.grad(lambda x: (m.items.weight @ x).square().sum())(m.out.weight[0]).sum(),
    "torch.func.grad by weights": lambda m: m(IDS).mean() + squares(of_torch_func(m).values()).detach(),
    "torch.func.vmap of weights": lambda m: torch.func.vmap(torch.square)(m.items.weight).sum() + m(IDS).sum(),
    "another tensor in its place": lambda m: torch.func.functional_call(
        m, {"items.weight": torch.ones(12, 4) * m.out.weight}, (IDS,)
    ).sum(),
}


def torch_and_ours(make_session, build=Net, shards=2, **settings):
    torch.manual_seed(3)
    plain = build()
    session = make_session(shards)
    model = es.wrap(copy.deepcopy(plain), session, optimizer=es.SGD(lr=0.1), **settings)
    return plain, torch.optim.SGD(plain.parameters(), lr=0.1), model, session


def test_torch_func_has_the_weights_of_a_model_that_says_which_ids_it_will_read(make_session):
    class Announced(Net):
        def embedding_inputs(self, ids):
            return {"items": ids, "bag": ids}

    plain, _, model, _ = torch_and_ours(make_session, build=Announced)
    for theirs, mine in zip(of_torch_func(plain).values(), of_torch_func(model).values(), strict=True):
        assert torch.equal(theirs, mine)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_any_use_of_a_weight_trains_to_the_bits_of_torch(make_session, name, shards):
    plain, optimizer, model, session = torch_and_ours(make_session, shards=shards)
    for _ in range(3):
        theirs, mine = LOSSES[name](plain), LOSSES[name](model)
        assert torch.equal(theirs, mine)
        theirs.backward()
        optimizer.step()
        optimizer.zero_grad()
        mine.backward()
        session.step()
    state = model.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_a_tied_layer_trains_to_the_bits_of_torch(make_session):
    plain, optimizer, model, session = torch_and_ours(make_session, TiedSoftmax)
    for _ in range(3):
        for net, step in ((plain, optimizer.step), (model, session.step)):
            F.cross_entropy(net.scores(hidden(net)), IDS[:, 1]).backward()
            step()
            net.zero_grad()
    assert torch.equal(plain.scores.weight, model.scores.weight)


@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.to(torch.float32)])
def test_a_tied_model_may_be_moved(make_session, move):
    plain, optimizer, model, session = torch_and_ours(make_session, TiedSoftmax)
    for _ in range(2):
        for net, step in ((plain, optimizer.step), (move(model), session.step)):
            F.cross_entropy(net.scores(hidden(net)), IDS[:, 1]).backward()
            step()
            net.zero_grad()
    assert torch.equal(plain.items.weight, move(model).items.weight)


def test_values_that_somebody_keeps_over_a_step_are_not_the_old_ones(make_session):
    _, _, model, session = torch_and_ours(make_session)
    kept = [parameter.detach() for parameter in model.parameters()]
    model(IDS).sum().backward()
    session.step()
    assert all(value.isnan().all() for value in kept)


def test_every_tensor_of_a_state_dict_has_a_storage_of_its_own(make_session):
    _, _, model, session = torch_and_ours(make_session)
    model(IDS).sum().backward()
    session.step()
    state = model.state_dict()
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)
    assert all(value.untyped_storage().nbytes() == 4 * value.numel() for value in state.values())


def test_modules_are_what_they_were_for_the_model(make_session):
    plain, optimizer, model, session = torch_and_ours(make_session, OfOneKind)
    for _ in range(3):
        losses = [net.loss(IDS) for net in (plain, model)]
        assert torch.equal(*losses)
        for loss, step in zip(losses, (optimizer.step, session.step), strict=True):
            loss.backward()
            step()
        optimizer.zero_grad()
    assert torch.equal(plain.extra.weight, model.extra.weight)
    assert torch.equal(plain.items.weight, model.items.weight)


@pytest.mark.parametrize("kind", [2.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("name", ["regulariser", "F.embedding", "linear"])
def test_clipping_all_parameters_clips_rows_too(make_session, name, kind, foreach):
    plain, optimizer, model, session = torch_and_ours(make_session)
    for _ in range(3):
        norms = []
        for net, step in ((plain, optimizer.step), (model, session.step)):
            LOSSES[name](net).backward()
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5, kind, foreach=foreach))
            step()
            net.zero_grad()
        torch.testing.assert_close(*norms)
    torch.testing.assert_close(plain.state_dict(), dict(model.state_dict()))


def test_two_backwards_and_a_scaled_gradient_count_as_in_torch(make_session):
    plain, optimizer, model, session = torch_and_ours(make_session)
    for net, step in ((plain, optimizer.step), (model, session.step)):
        for name in ("index", "norm"):
            LOSSES[name](net).backward()
        net.items.weight.grad.mul_(0.5)
        assert torch.isfinite(net.items.weight.grad).all()
        step()
    torch.testing.assert_close(plain.items.weight, model.items.weight)


@pytest.mark.parametrize("of", [nn.Embedding, partial(nn.EmbeddingBag, mode="sum")])
def test_a_checkpointed_lookup_is_repeated_as_it_was_though_the_whole_is_read_after_it(make_session, of):
    class Regularised(nn.Module):
        def __init__(self):
            super().__init__()
            self.items, self.out = of(100_000, 4), nn.Linear(4, 1)

        def forward(self, ids):
            found = checkpoint(lambda ids: self.out(self.items(ids)).pow(2).mean(), ids, use_reentrant=False)
            return found + 0.1 * self.items.weight.pow(2).mean()

    plain, optimizer, model, session = torch_and_ours(make_session, Regularised)
    for _ in range(3):
        for net, step in ((plain, optimizer.step), (model, session.step)):
            net(torch.tensor([[3, 99_999], [7, 3]])).backward()
            step()
            net.zero_grad()
    torch.testing.assert_close(plain.state_dict(), dict(model.state_dict()))


def test_gradients_are_summed_once_however_often_a_loop_asks_for_them(make_session, monkeypatch):
    plain, _, model, _ = torch_and_ours(make_session)
    summed = []
    merge = gradients.merge
    monkeypatch.setattr(gradients, "merge", lambda parts, *rest: summed.append(len(parts)) or merge(parts, *rest))
    for _ in range(2):  # the second backward adds to what was asked for
        for net in (plain, model):
            LOSSES["three lookups"](net).backward()
        for _ in range(3):
            assert torch.equal(plain.items.weight.grad, model.items.weight.grad.clone())
    assert len(summed) == 2
    model.items.weight.grad = None
    assert model.items.weight.grad is None
    assert len(summed) == 2


def halve(parameter):
    parameter.grad *= 0.5


CHANGES_OF_GRADIENTS = {
    "by value": lambda p: nn.utils.clip_grad_value_([p], 0.01),
    "by value, at once": lambda p: nn.utils.clip_grad_value_([p], 0.01, foreach=True),
    "data": lambda p: p.grad.data.clamp_(-0.01, 0.01),
    "detached": lambda p: p.grad.detach().mul_(0.5),
    "operator": halve,
    "zeros": lambda p: torch._foreach_zero_([p.grad]),
    "zeros, after detach_": lambda p: (p.grad.detach_(), p.grad.zero_()),
    "a result": lambda p: (p.grad.view(-1) + 1).mul_(2),  # which changes nothing
}


@pytest.mark.parametrize("loss", ["index", "regulariser"])
@pytest.mark.parametrize("change", CHANGES_OF_GRADIENTS)
def test_a_changed_gradient_is_pushed_as_it_is(make_session, change, loss):
    plain, optimizer, model, session = torch_and_ours(make_session)
    for net, step in ((plain, optimizer.step), (model, session.step)):
        LOSSES[loss](net).backward()
        assert net.items.weight.grad.numel() == 48
        CHANGES_OF_GRADIENTS[change](net.items.weight)
        step()
    torch.testing.assert_close(plain.items.weight, model.items.weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda gradient: gradient[3].zero_(),
        lambda gradient: gradient.data[3].zero_(),
        lambda gradient: gradient.__setitem__(3, 0.0),
        lambda gradient: gradient[:, 1:].T.mul_(0.5),
        lambda gradient: [row.mul_(0.5) for row in gradient],
        lambda gradient: gradient.cpu().numpy().__imul__(0.5),
        lambda gradient: torch.from_dlpack(gradient).mul_(0.5),
        lambda gradient: gradient.untyped_storage().fill_(0),
        lambda gradient: F.dropout(gradient, 0.5, inplace=True),
        lambda gradient: F.hardtanh(gradient, -0.01, 0.01, True),
        lambda gradient: gradient.set_(torch.zeros(12, 4)),
        lambda gradient: gradient.view(-1).set_(torch.zeros(12, 4)),
        lambda gradient: setattr(gradient, "data", gradient.data * 0.5),
    ],
)
def test_a_changed_part_of_a_gradient_would_be_lost_and_is_an_error(make_session, change):
    _, _, model, _ = torch_and_ours(make_session)
    LOSSES["index"](model).backward()
    with pytest.raises((NotImplementedError, ValueError), match=r"table|pushed|read-only"):
        change(model.items.weight.grad)
    before = copy.deepcopy(model.items.weight.grad)
    assert type(before) is torch.Tensor
    assert torch.equal(before.mul_(2), model.items.weight.grad * 2)


MEASURES = {
    "least": lambda gradient: gradient.norm(-math.inf),
    "negative order": lambda gradient: torch.linalg.vector_norm(gradient, -1),
    "negative order, at once": lambda gradient: torch._foreach_norm([gradient], -1.0)[0],
    "absolute, at once": lambda gradient: torch._foreach_abs([gradient])[0].mean(),
    "finite": torch.isfinite,
    "finite, by name": lambda gradient: torch.isfinite(input=gradient),
    "infinite": torch.isinf,
    "NaN": torch.isnan,
}


@pytest.mark.parametrize("measure", MEASURES)
def test_a_measure_of_a_gradient_counts_the_zeros_of_unread_rows(make_session, measure):
    plain, _, model, _ = torch_and_ours(make_session)
    for net in (plain, model):
        net.items(torch.tensor([1, 3])).sum().backward()
    measured = [MEASURES[measure](net.items.weight.grad) for net in (plain, model)]
    torch.testing.assert_close(*measured)


def test_a_gradient_beyond_the_limit_is_looked_through_for_values_that_are_not_finite(make_session):
    _, _, model, _ = torch_and_ours(make_session, whole_limit=100)
    model.items(IDS).sum().backward()
    assert torch.isfinite(model.items.weight.grad).all()
    model.items.weight.grad.mul_(math.inf)
    assert torch.isinf(model.items.weight.grad).any()


def of_all_rows(model):
    return model.items.weight[torch.arange(12)].square().sum()  # in the order of their route


@pytest.mark.parametrize(
    ("loss", "change"),
    [
        (LOSSES["index"], lambda gradient: gradient.clamp_(min=0.01)),
        (LOSSES["index"], lambda gradient: gradient.clamp_max_(torch.tensor(-0.01))),
        (LOSSES["index"], lambda gradient: torch._foreach_clamp_min_([gradient, gradient], 0.01)),
        (of_all_rows, lambda gradient: torch._foreach_mul_([gradient], [torch.arange(48.0).view(12, 4)])),
        (of_all_rows, lambda gradient: torch._foreach_div_([gradient], [torch.arange(1.0, 13.0)[:, None]])),
        (of_all_rows, lambda gradient: torch._foreach_clamp_max_([gradient], [torch.arange(12.0)[:, None]])),
    ],
)
def test_a_clamp_of_unread_rows_and_a_change_by_a_list_of_tensors_are_errors(make_session, loss, change):
    _, _, model, _ = torch_and_ours(make_session)
    loss(model).backward()
    before = model.items.weight.grad.clone()
    with pytest.raises(NotImplementedError, match="would change gradients of rows that nobody read"):
        change(model.items.weight.grad)
    torch._foreach_mul_([model.items.weight.grad], [torch.tensor(2.0)])
    assert torch.equal(model.items.weight.grad, 2 * before)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("use", ["three lookups", "index", "norm"])
def test_a_penalty_on_gradients_trains_to_the_bits_of_torch(make_session, use):
    plain, optimizer, model, session = torch_and_ours(make_session)
    for _ in range(3):
        for net, step in ((plain, optimizer.step), (model, session.step)):
            (LOSSES[use](net) * net.out.bias).sum().backward(create_graph=True)
            penalty = net.items.weight.grad.square().sum() + net.out.bias.grad.square().sum()
            net.zero_grad()
            penalty.backward()
            step()
            net.zero_grad()
    assert torch.equal(plain.items.weight, model.items.weight)
    assert torch.equal(plain.out.bias, model.out.bias)


def test_autograd_differentiates_by_a_weight_or_refuses_to(make_session):
    plain, _, model, _ = torch_and_ours(make_session)
    mine, theirs = (torch.autograd.grad(net.items.weight.norm(), [net.items.weight]) for net in (model, plain))
    assert torch.equal(*mine, *theirs)
    out = model.bag(IDS).sum()  # by rows: what follows would be None, and None is what allow_unused allows
    with pytest.raises(NotImplementedError, match="by ids"):
        torch.autograd.grad(out, model.bag.weight, allow_unused=True)


def test_a_gradient_is_that_of_the_whole_table(make_session):
    plain, _, model, _ = torch_and_ours(make_session)
    for net in (plain, model):
        assert net.items.weight.grad is None
        LOSSES["index"](net).backward()
    mine, theirs = model.items.weight.grad, plain.items.weight.grad
    assert mine.shape == theirs.shape
    assert torch.equal(mine + 0, theirs)
    assert torch.equal(mine[IDS], theirs[IDS])
    torch.testing.assert_close(mine.norm(dim=1), theirs.norm(dim=1))
    with pytest.raises(NotImplementedError, match="add_"):
        mine.add_(torch.ones(12, 4))
    model.zero_grad()
    assert model.items.weight.grad is None


@pytest.mark.parametrize("name", ["index", "norm", "linear"])
def test_frozen_after_wrap_is_frozen(make_session, name):
    plain, optimizer, model, session = torch_and_ours(make_session)
    for net, step in ((plain, optimizer.step), (model, session.step)):
        net.items.weight.requires_grad_(False)
        (LOSSES[name](net) + squares(net.out.parameters())).backward()
        step()
    assert torch.equal(plain.items.weight, model.items.weight)
    assert torch.equal(plain.out.weight, model.out.weight)


LOOKS = {
    "state_dict": lambda m: m.state_dict(),
    "no_grad": torch.no_grad()(lambda m: F.linear(m.items(IDS), m.items.weight)),
    "detach": lambda m: m.items.weight.detach().norm(),
    "data": lambda m: m.items.weight.data.norm(),
    "grad": lambda m: m.items.weight.grad,
}


def test_a_look_at_a_weight_does_not_change_which_rows_are_trained(make_session):
    states = []
    for look in (lambda m: None, *LOOKS.values()):
        torch.manual_seed(3)
        session = make_session(2)
        model = es.wrap(Net(), session, optimizer=es.Adam(lr=0.1))  # which moves every row that is pushed
        for ids in (IDS, IDS + 1):
            look(model)
            model(ids).sum().backward()
            look(model)
            session.step()
        states.append(model.state_dict())
    for state in states:
        assert all(torch.equal(value, state[key]) for key, value in states[0].items())


def test_freezing_counts_from_the_next_use_on(make_session):
    plain, optimizer, model, session = torch_and_ours(make_session)
    for trained in (True, False, False, True, True):
        for net, step in ((plain, optimizer.step), (model, session.step)):
            net.items.weight.norm()  # read before, as a checkpoint does
            net.items.weight.requires_grad_(trained)
            LOSSES["regulariser"](net).backward()
            step()
            net.zero_grad()
    assert torch.equal(plain.items.weight, model.items.weight)


class Bundled(Net):
    """Its bag comes in a bundle."""

    def embedding_inputs(self, ids):
        return {"bag": ids}


@pytest.mark.parametrize("build", [Net, Bundled])
@pytest.mark.parametrize("name", ["index", "regulariser", "F.embedding_bag"])
def test_a_weight_that_is_frozen_before_backward_takes_no_gradient(make_session, build, name):
    plain, optimizer, model, session = torch_and_ours(make_session, build)
    for _ in range(2):
        for net, step in ((plain, optimizer.step), (model, session.step)):
            loss = LOSSES[name](net) + net(IDS).square().mean()
            net.items.weight.requires_grad_(False)
            net.bag.weight.requires_grad_(False)
            loss.backward()
            net.requires_grad_(True)
            step()
            net.zero_grad()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


def test_an_evaluation_sees_what_others_pushed(make_shards, make_session):
    shards = make_shards(2)
    sessions = [make_session(shards=shards, worker=number) for number in range(2)]
    torch.manual_seed(3)
    models = [
        es.wrap(net, session, optimizer=es.SGD(lr=0.1)) for net, session in zip((Net(), Net()), sessions, strict=True)
    ]
    with torch.no_grad():
        before = models[0].items.weight.clone()
    models[1].items.weight.square().sum().backward()
    sessions[1].step()
    sessions[0].refresh()
    with torch.inference_mode():
        torch.testing.assert_close(models[0].items.weight + 0, before * 0.8)


@pytest.mark.parametrize("use", ["linear", "norm", "regulariser", "slice"])
def test_a_table_beyond_the_limit_is_not_read_as_a_whole(make_session, use):
    _, _, model, _ = torch_and_ours(make_session, whole_limit=4 * 12 * 4 - 1)
    with pytest.raises(TableTooLarge) as caught:
        LOSSES[use](model)
    assert caught.value.fields == {"table": "items", "nbytes": 192, "limit": 191}
    LOSSES["index"](model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(TableTooLarge):
        model.items.weight.grad + 1


def test_a_regulariser_beyond_the_limit_is_over_the_rows_of_the_batch_where_the_user_says_so(make_session):
    plain, optimizer, model, session = torch_and_ours(make_session, whole_limit=100, beyond_limit="batch_rows")
    assert 4 * plain.items.weight.numel() > 100
    with pytest.raises(NoRowsRead):
        model.items.weight.square().sum()
    for ids in (IDS, IDS[:1]):
        rows = plain.items.weight[ids.unique()]
        (plain.items(ids).sin().sum() + 0.1 * rows.square().sum()).backward()
        loss = model.items(ids).sin().sum()
        (loss + 0.1 * sum(w.square().sum() for w in model.items.parameters())).backward()
        for end in (optimizer.step, optimizer.zero_grad, session.step):
            end()
    with torch.no_grad():
        every = torch.arange(len(plain.items.weight))
        torch.testing.assert_close(model.items(every), plain.items(every), rtol=0, atol=1e-7)
    with pytest.raises(TableTooLarge):
        model.state_dict()


CHANGES = {
    "method": lambda w: w.normal_(),
    "initializer": nn.init.xavier_uniform_,
    "data": lambda w: w.data.normal_(),
    "other data": lambda w: setattr(w, "data", torch.zeros(12, 4)),
    "item": lambda w: w.__setitem__(0, 1.0),
    "operator": lambda w: w.__iadd__(1),
    "out": lambda w: torch.add(torch.ones(12, 4), 1, out=w),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "detached": lambda w: w.detach().zero_(),
    "numpy": lambda w: w.detach().numpy().fill(1.0),
    "numpy of data": lambda w: w.data.numpy().__setitem__(0, 1.0),
    "numpy outside of a graph": lambda w: w.numpy().fill(1.0),
    "array": lambda w: np.asarray(w).fill(1.0),
    "storage": lambda w: w.untyped_storage().fill_(1),
    "storage in a graph": lambda w: w.untyped_storage().fill_(1),
    "set_": lambda w: w.set_(torch.zeros(12, 4)),
    "in place by name": lambda w: F.hardtanh(w, -0.1, 0.1, inplace=True),
    "numpy of a frozen one": lambda w: (w.requires_grad_(False).numpy().fill(1.0), w.requires_grad_()),
    "dlpack of a frozen one": lambda w: (torch.from_dlpack(w.requires_grad_(False)).fill_(1.0), w.requires_grad_()),
    "optimizer": lambda w: (w.square().sum().backward(), torch.optim.Adam([w]).step()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_is_an_error(make_session, change):
    _, _, model, session = torch_and_ours(make_session)
    before = model.items(torch.arange(12)).detach()  # the weight itself was not looked at
    grad = change in ("optimizer", "storage in a graph")
    with torch.set_grad_enabled(grad), pytest.raises(ParameterChanged):
        _ = CHANGES[change](model.items.weight), session.step()
    session.zero_grad()
    assert torch.equal(model.items.weight, before)


@pytest.mark.parametrize("grad", [False, True])
def test_an_evaluation_may_have_other_values_of_a_table_for_a_while(make_session, grad):
    plain, _, model, session = torch_and_ours(make_session)
    own = model(IDS).detach()
    weights = [(net.items.weight, net.items.weight.data.clone()) for net in (plain, model)]
    for weight, values in weights:
        weight.data.copy_(2 * values)
    with torch.set_grad_enabled(grad):
        assert torch.equal(model(IDS), plain(IDS))
    for weight, values in weights:
        weight.data.copy_(values)
    assert torch.equal(model(IDS), own)
    session.step()  # no ParameterChanged
    assert torch.equal(model(IDS), own)


@pytest.mark.parametrize("assigned", [False, True])
def test_an_attack_on_the_rows_trains_as_in_torch(make_session, assigned):
    """Miyato et al. 2017: a second backward at rows that went along the gradient, and then the own rows again."""
    plain, optimizer, model, session = torch_and_ours(make_session)
    for _ in range(3):
        for net, step in ((plain, optimizer.step), (model, session.step)):
            net.zero_grad()
            net(IDS).sin().sum().backward()
            weight, own = net.items.weight, net.items.weight.data.clone()
            weight.data.add_(weight.grad / weight.grad.norm())
            net(IDS).sin().sum().backward()
            if assigned:
                weight.data = own
            else:
                weight.data.copy_(own)
            step()
    for name, values in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], values, rtol=0, atol=1e-6)


def test_rows_with_max_norm_are_not_read_past_other_values(make_session):
    model = nn.Embedding.from_pretrained(torch.full((12, 4), 0.1), freeze=False, max_norm=1.0)
    model = es.wrap(model, make_session(1), optimizer=es.SGD(lr=0.1))
    model.weight.data.mul_(2.0)  # still within the norm
    with torch.no_grad(), pytest.raises(ParameterChanged):
        model(IDS)


REFUSED = {
    "copy": (copy.deepcopy, TypeError),
    "pickle": (pickle.dumps, TypeError),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), TypeError),
    "half": (lambda m: m.half(), TypeError),
    "load_state_dict": (lambda m: m.load_state_dict(Net().state_dict(), assign=True), RuntimeError),
    "copy_ in a graph": (lambda m: m.items.weight.copy_(torch.ones(12, 4)), RuntimeError),
    "hook": (lambda m: m.items.weight.register_hook(print), NotImplementedError),
    "vmap over ids": (lambda m: torch.func.vmap(m.items)(IDS), NotImplementedError),
    "lookup inside vmap": (lambda m: torch.func.vmap(lambda x: m.items(IDS) * x)(torch.ones(2)), NotImplementedError),
    "ids inside grad": (
        lambda m: torch.func.grad(lambda x: (m.items(torch.arange(3)) * x).sum())(torch.ones(4)),
        NotImplementedError,
    ),
    "trace": (lambda m: torch.jit.trace(m.items.eval().requires_grad_(False), IDS), NotImplementedError),
    "trace after a whole read": (
        lambda m: (m.state_dict(), torch.jit.trace(m.items.eval().requires_grad_(False), IDS)),
        NotImplementedError,
    ),
    "trace of a whole read": (
        lambda m: torch.jit.trace(lambda h: h @ m.items.weight.T, torch.ones(4)),
        NotImplementedError,
    ),
    "gradient": (lambda m: setattr(m.items.weight, "grad", torch.ones(12, 4)), ValueError),
    "another weight": (lambda m: setattr(m.items, "weight", nn.Parameter(torch.ones(12, 4))), ParameterChanged),
    "parametrization": (lambda m: register_parametrization(m.items, "weight", nn.Tanh()), NotImplementedError),
    "wrapped twice": (lambda m: es.wrap(m, m.items.table.session, optimizer=es.SGD(lr=0.1)), ValueError),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_our_words(make_session, name):
    _, _, model, _ = torch_and_ours(make_session)
    action, error = REFUSED[name]
    with pytest.raises(error, match=r"shard|wrap|session|table|no_grad"):
        action(model)


def test_what_a_weight_says_of_itself_reads_nothing(make_session):
    _, _, model, session = torch_and_ours(make_session)
    before = session.stats.pulled_rows
    weight = model.items.weight
    said = (
        weight.shape,
        len(weight),
        weight.size(0),
        weight.numel(),
        weight.dtype,
        weight.device,
        weight.requires_grad,
    )
    assert said == (torch.Size([12, 4]), 12, 12, 48, torch.float32, torch.device("cpu"), True)
    assert isinstance(weight, RemoteWeight)
    assert "items" in repr(weight)
    assert sum(parameter.numel() for parameter in model.parameters()) == 48 + 36 + 5
    assert session.stats.pulled_rows == before


def test_the_storage_of_a_weight_has_its_values_where_its_strides_say(make_session):
    """As torch.export.save writes them."""
    _, _, model, _ = torch_and_ours(make_session)
    weight = model.items.weight
    assert weight.is_contiguous()
    assert (weight.stride(), weight.stride(0), weight.stride(dim=-1)) == ((4, 1), 4, 1)
    read = torch.empty(0).set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())
    assert torch.equal(read, weight)


def test_a_table_of_hashed_ids_has_a_weight_that_is_too_large_to_read(make_session):
    net = nn.Sequential(nn.EmbeddingBag(2**40, 16, device="meta"))
    model = es.wrap(net, make_session(1), optimizer=es.SGD(lr=0.1))
    model(IDS).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
    with pytest.raises(TableTooLarge):
        squares(model.parameters())


def test_only_what_a_parallel_model_of_torch_can_train_is_among_its_parameters(make_session):
    _, _, model, _ = torch_and_ours(make_session, dense="ddp")
    assert {name for name, _ in model.named_parameters()} == {"out.weight", "out.bias"}
    assert torch.equal(model.items.weight[1:2], model.items(torch.tensor([1])))


def test_a_compiled_model_and_a_compiled_step_train_to_the_bits_of_torch(make_session):
    plain, optimizer, model, session = torch_and_ours(make_session, TiedSoftmax)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")  # what the session does would not survive tracing

    @torch.compile(backend="eager")
    def step(net, update):
        F.cross_entropy(net.scores(hidden(net)), IDS[:, 1]).backward()
        update()

    try:
        for _ in range(3):
            for net, called, update in ((plain, plain, optimizer.step), (model, compiled, session.step)):
                called(IDS).square().mean().backward()
                update()
                net.zero_grad()
            step(model, session.step)
            F.cross_entropy(plain.scores(hidden(plain)), IDS[:, 1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch._dynamo.reset()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
