"""Dense weights come with the first lookup of a step, or before anything else uses them, wherever that is."""

import copy
import pickle
import sys
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import embershard as es
from embershard.proto.errors import ClientClosed
from embershard.proto.messages import Pull
from embershard.worker.session.dense import DenseWeights, ParameterChanged, may_be_compiled

IDS = torch.tensor([3, 1, 3])


class Net(nn.Module):
    """`use` reaches the weights in its own way before the first lookup."""

    def __init__(self, use=None):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.use = use

    def forward(self, ids):
        before = 0.0 if self.use is None else self.use(self)
        return self.linear(self.embedding(ids)) * self.scale + before


class Other(nn.Module):
    """Dense weights of another model, inside a forward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.items = nn.Embedding(10, 4)
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, ids):
        return self.inner(ids) + self.bias + self.items(ids)


class Passes(TorchFunctionMode):
    """A mode of the user."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


USES = {
    "function": lambda net: F.linear(torch.ones(4), net.linear.weight, net.linear.bias).sum(),
    "method": lambda net: net.scale.sum(),
    "operator": lambda net: (net.scale * 3).sum(),
    "reflected": lambda net: (torch.ones(4) + net.scale).sum(),
    "list": lambda net: torch.cat([net.scale, net.linear.bias]).sum(),
    "keyword": lambda net: torch.sum(input=net.scale),
    "index": lambda net: net.scale[2],
    "view": lambda net: net.linear.weight.data.view(-1)[3],
    "item": lambda net: torch.tensor(net.scale.tolist()).sum(),
    "numpy": lambda net: torch.from_numpy(net.scale.detach().numpy().copy()).sum(),
    "copy": lambda net: torch.zeros(4).copy_(net.scale.detach()).sum(),
    "part": lambda net: net.linear(torch.ones(4)).sum(),
    "autograd": lambda net: Double.apply(net.scale).sum(),
    "aten": lambda net: torch.ops.aten.sum(net.scale),
    "vmap": lambda net: torch.vmap(lambda row: row.sum())(net.linear.weight).sum(),
    "vmap of a part": lambda net: torch.vmap(net.linear)(torch.ones(2, 4)).sum(),
    "torch.func.grad": lambda net: torch.func.grad(lambda x: net.linear(x).square().sum())(torch.ones(4)).sum(),
    "jvp": lambda net: torch.func.jvp(net.linear, (torch.ones(4),), (torch.ones(4),))[1].sum(),
    "checkpoint": lambda net: torch.utils.checkpoint.checkpoint(lambda w: w.sum(), net.scale, use_reentrant=False),
    "parameters": lambda net: torch.stack([p.sum() for p in net.parameters()]).sum(),
    "functional_call": lambda net: torch.func.functional_call(
        net.linear, dict(net.linear.named_parameters()), (torch.ones(4),)
    ).sum(),
    "under a mode": lambda net: _under_a_mode(net),
}


def _under_a_mode(net):
    with Passes():
        return net.embedding(IDS).detach().sum() * 0 + net.scale.sum()


@pytest.fixture
def counted(make_wires):
    """A session over so many shards, and the requests that the first one gets."""

    def make(shards):
        wires = make_wires(shards)
        return wires.session(), wires.wires[0].seen

    return make


def pulls(heard):
    found = sum(isinstance(request, Pull) for request in heard)
    heard.clear()
    return found


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    """As in a process of its own: other tests of this one may have compiled functions."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    monkeypatch.setattr(torch.jit._state, "_python_cu", torch.jit.CompilationUnit())


@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_sends_one_pull_to_each_shard(counted, grad):
    session, heard = counted(2)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    heard.clear()
    for _ in range(3):
        with nullcontext() if grad else torch.no_grad():
            out = model(IDS)
        assert pulls(heard) == 1
        if grad:
            out.sum().backward()
        session.step()


@pytest.mark.parametrize("use", USES)
def test_weights_that_are_used_before_the_first_lookup_are_those_of_the_clock(counted, use, monkeypatch):
    """The same bits as with a read at the start of each forward."""
    results = []
    for defers in (True, False):
        monkeypatch.setattr("embershard.worker.nn.hooks.may_be_compiled", lambda defers=defers: not defers)
        torch.manual_seed(5)
        session, heard = counted(2)
        model = es.wrap(Net(USES[use]), session, optimizer=es.SGD(lr=0.1, momentum=0.9))
        outs = []
        for _ in range(4):
            heard.clear()
            outs.append(model(IDS))
            assert pulls(heard) == 2 + (use == "under a mode" and not defers)  # it looks rows up, too
            outs[-1].square().mean().backward()
            session.step()
        session.read_dense()
        results.append([*outs, *model.parameters(), model.embedding.table.pull(torch.arange(10))])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_the_shape_of_a_weight_is_no_use_of_it(counted):
    session, heard = counted(1)
    model = es.wrap(
        Net(lambda net: torch.zeros(net.scale.shape, device=net.scale.device)), session, optimizer=es.SGD(lr=0.1)
    )
    heard.clear()
    model(IDS)
    assert pulls(heard) == 1


@pytest.mark.parametrize("use", USES)
def test_a_method_that_is_not_forward_computes_what_torch_computes(counted, use):
    torch.manual_seed(5)
    plain = Net()
    start = copy.deepcopy(plain)
    session, heard = counted(2)
    model = es.wrap(start, session, optimizer=es.SGD(lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        heard.clear()
        losses = [
            USES[use](net) + net.embedding(IDS).square().mean() + net.scale.square().sum() for net in (model, plain)
        ]
        assert pulls(heard) == 2
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        session.step()
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(plain.named_parameters())
    for name, mine in model.named_parameters():
        assert torch.equal(mine, expected[name]), name


CHANGES = {
    "an optimizer of torch": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "a fused optimizer": lambda model: torch.optim.Adam([model.scale], lr=0.1, fused=True).step(),
    "an initializer": lambda model: nn.init.ones_(model.scale),
    "data": lambda model: model.scale.data.mul_(2),
    "another data": lambda model: setattr(model.scale, "data", torch.zeros(4)),
    "detached": lambda model: model.linear.weight.detach().zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_change_here_that_a_pull_would_undo_is_an_error(counted, change, fresh):
    session, _ = counted(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    model(IDS).sum().backward()
    if not fresh:
        session.step()
        model(IDS).sum().backward()
    before = model.embedding(IDS).detach().clone(), model.scale.detach().clone(), model.linear.weight.detach().clone()
    with pytest.raises(ParameterChanged):  # at once, or where it would be lost
        _ = CHANGES[change](model), session.step()
    with suppress(ParameterChanged):
        session.refresh()
    now = model.embedding(IDS), model.scale, model.linear.weight
    assert all(map(torch.equal, before, now))  # it is said once, and the next use reads the shards


@pytest.mark.parametrize("change", ["an optimizer of torch", "a fused optimizer", "an initializer", "detached"])
def test_a_change_here_is_an_error_in_a_loop_that_never_calls_step(counted, change):
    session, _ = counted(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    model(IDS).sum().backward()
    model.embedding.weight.requires_grad_(False)
    with pytest.raises(ParameterChanged, match=r"copy_\(values\) under torch.no_grad"):
        _ = CHANGES[change](model), model(IDS)


def test_an_evaluation_may_have_other_values_for_a_while(counted):
    session, _ = counted(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1)).eval()
    own = model(IDS).detach()
    values = model.scale.detach().clone()
    assert torch.equal(torch.func.functional_call(model, {"scale": 2 * values}, (IDS,)), 2 * own)
    model.scale.data.copy_(2 * values)
    assert torch.equal(model(IDS), 2 * own)
    model.scale.data.copy_(values)
    session.step()  # no ParameterChanged
    assert torch.equal(model(IDS), own)


@pytest.mark.parametrize("name", ["scale", "embedding.weight"])
def test_a_change_that_the_shards_never_get_is_named_as_the_session_is_closed(counted, caplog, name):
    for changed in (False, True):
        session, _ = counted(1)
        weight = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1)).get_parameter(name)
        if changed:
            weight.detach()[:] = 7.0  # as averages that a callback puts in place after the last step
        session.close()
        session.close()  # as `with` does after a call of one's own
        assert caplog.text.count(f"parameter {name.removesuffix('.weight')!r} was changed") == changed
    assert bool((weight.detach() == 7.0).all())  # still there, to be saved


def test_a_session_is_closed_though_its_weights_cannot_be_looked_at(counted, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    session, _ = counted(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    model.scale.data.mul_(1.0)
    monkeypatch.setattr(torch, "equal", fail)
    session.close()
    with pytest.raises(ClientClosed):
        model.embedding(IDS)


def test_a_step_of_torch_looks_once_at_all_weights(counted, monkeypatch):
    session, _ = counted(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    optimizer, looks = torch.optim.SGD(model.parameters(), lr=0.1), []
    session.read_dense()
    monkeypatch.setattr(DenseWeights, "check_unchanged", lambda weights: looks.append(weights))
    optimizer.add_param_group({"params": [torch.zeros(1)]})  # of its own
    optimizer.step()  # without a gradient: it changes nothing
    assert len(looks) == 1


def test_a_step_of_torch_after_that_of_the_session_trains_nothing_and_is_an_error(counted):
    session, _ = counted(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    optimizer = torch.optim.Adam(model.linear.parameters())
    model(IDS).sum().backward()
    session.step()
    with pytest.raises(RuntimeError, match="has changed nothing"):
        optimizer.step()


def test_data_of_weights_that_are_nan_may_be_read(counted):
    session, _ = counted(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=100.0, weight_decay=1.0))
    for _ in range(2):  # -inf, and then inf - inf
        model.scale.grad = torch.full((4,), 3e38)
        session.step()
    assert model.scale.data.isnan().all()
    session.step()  # no ParameterChanged: nobody has changed it


def test_the_sign_of_a_zero_is_no_change(counted):
    session, _ = counted(1)
    net = Net()
    torch.nn.init.constant_(net.scale, -0.0)
    model = es.wrap(net, session, optimizer=es.SGD(lr=0.1))
    model.scale.data.add_(0.0)
    session.step()  # no ParameterChanged


@pytest.mark.parametrize("read_since", [True, False])
def test_an_old_graph_has_no_backward_after_a_step(counted, read_since):
    session, _ = counted(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    old = model(IDS).square().sum()
    model(IDS).sum().backward()
    session.step()
    if read_since:
        model(IDS)
    with pytest.raises(RuntimeError, match="modified by an inplace"):  # as after a step of torch's optimizer
        old.backward()


def pickled(part):
    return pickle.loads(pickle.dumps(part))


@pytest.mark.parametrize("copied_by", [copy.deepcopy, pickled])
def test_a_copy_of_a_part_is_one_of_torch(counted, copied_by):
    session, _ = counted(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=1.0))
    model(IDS).sum().backward()
    before = model.scale.detach().clone()
    session.step()
    copied = copied_by(model.linear)
    assert type(copied.weight) is nn.Parameter
    copied.load_state_dict(model.linear.state_dict())
    assert torch.equal(copied.weight, model.linear.weight)
    assert not torch.equal(model.scale, before)


def test_a_parameter_that_was_trained_and_is_frozen_has_its_last_step(counted):
    session, _ = counted(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=1.0))
    before = model.scale.detach().clone()
    model.scale.sum().backward()
    session.step()
    model.scale.requires_grad_(False)
    assert torch.equal(model.scale, before - 1)


def test_a_model_around_another_one_shares_its_request(counted):
    session, heard = counted(2)
    inner = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    outer = es.wrap(Other(nn.Identity()), session, optimizer=es.SGD(lr=0.1), prefix="outer/")
    outer.inner = inner
    start = [weight.detach().clone() for weight in (inner.scale, outer.bias)]
    outer(IDS).sum().backward()
    session.step()
    heard.clear()
    outer(IDS)
    assert pulls(heard) == 2  # one for each table of rows, the first with the dense weights of both
    assert not torch.equal(inner.scale, start[0])
    assert not torch.equal(outer.bias, start[1])


def test_compiled_code_reads_the_weights_at_once(counted):
    assert not may_be_compiled()
    compiled = torch.compile(lambda weight: weight.sum(), backend="eager")
    try:
        session, heard = counted(1)
        model = es.wrap(Net(lambda net: compiled(net.scale)), session, optimizer=es.SGD(lr=1.0))
        heard.clear()
        assert may_be_compiled()
        model(IDS).sum().backward()
        assert pulls(heard) == 2
        session.step()
        assert torch.equal(model(IDS), model(IDS))
    finally:
        torch._dynamo.reset()


def test_scripted_code_reads_the_weights_at_once(counted, monkeypatch):
    scripted = torch.jit.CompilationUnit("def total(weight):\n    return weight.sum()\n")
    monkeypatch.setattr(torch.jit._state, "_python_cu", scripted)  # where torch.jit.script would put it
    session, heard = counted(1)
    model = es.wrap(Net(lambda net: scripted.total(net.scale)), session, optimizer=es.SGD(lr=1.0))
    model(IDS).sum().backward()
    session.step()
    heard.clear()
    after = model(IDS)
    assert pulls(heard) == 2
    assert torch.equal(model(IDS), after)


def test_prefetched_batches_bring_the_weights(counted):
    session, heard = counted(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    heard.clear()
    for ids in session.prefetch([IDS, IDS + 1], inputs=lambda batch: {"embedding": batch}):
        heard.clear()
        model(ids).sum().backward()
        assert not any(isinstance(request, Pull) for request in heard if request.tables[0].table == "dense")
        session.step()
