import copy
import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrize import register_parametrization

import embershard as es
from embershard.proto.errors import OtherRows, TableMismatch
from embershard.worker.client.membership import Terms
from embershard.worker.nn import compile as compilation
from embershard.worker.nn.wrap import OtherParameters
from embershard.worker.session.session import Session
from harness.models import SumModel, random_pairs
from harness.raises import raises

BATCHES = random_pairs(8, 16, 40, seed=7)


class Net(nn.Module):
    """Embeddings at several depths, a bag, batch norm, and parameters of its own."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(40, 4, padding_idx=0)
        self.items = nn.ModuleDict({"a b": nn.Embedding(40, 4), "bag": nn.EmbeddingBag(40, 4, mode="mean")})
        self.norm = nn.BatchNorm1d(12)
        self.tower = nn.Sequential(nn.Linear(12, 400), nn.ReLU(), nn.Linear(400, 1))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        vectors = [self.users(x[:, 0]), self.items["a b"](x[:, 1]), self.items["bag"](x)]
        out = self.scale * self.tower(self.norm(torch.cat(vectors, 1))).squeeze(1)
        return out


def losses(model, step, device="cpu"):
    curve = []
    for x, y in BATCHES:
        loss = (model(x.to(device)) - y.to(device)).pow(2).mean()
        loss.backward()
        step()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (es.SGD(lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
        (es.Adagrad(lr=0.05), lambda p: torch.optim.Adagrad(p, lr=0.05)),
    ],
    ids=["sgd", "adagrad"],
)
def test_a_wrapped_model_has_the_loss_curve_of_the_unwrapped_one(make_session, shards, ours, theirs):
    reference = Net()
    session = make_session(shards)
    model = es.wrap(copy.deepcopy(reference), session, optimizer=ours)
    optimizer = theirs(reference.parameters())
    expected = losses(reference, lambda: (optimizer.step(), optimizer.zero_grad()))
    torch.testing.assert_close(losses(model, session.step), expected, rtol=1e-4, atol=1e-6)
    model.eval()
    reference.eval()
    torch.testing.assert_close(model(BATCHES[0][0]), reference(BATCHES[0][0]), rtol=1e-4, atol=1e-5)


def test_a_loop_that_draws_random_numbers_draws_those_of_plain_torch(make_session):
    net = Net()
    before = random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())
    session = make_session(2)
    losses(es.wrap(net, session, optimizer=es.SGD(lr=0.05)), session.step)
    assert (random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())) == before


def test_weights_are_bit_identical_whatever_the_number_of_shards(make_session):
    start = Net()
    results = []
    for shards in (1, 2, 4):
        session = make_session(shards)
        model = es.wrap(copy.deepcopy(start), session, optimizer=es.SGD(lr=0.05, momentum=0.9))
        losses(model, session.step)
        session.refresh()
        model(BATCHES[0][0])
        rows = model.users.table.pull(torch.arange(40))
        results.append([rows, *(p.detach().clone() for p in model.parameters())])
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))


def test_wrap_returns_the_model_itself_with_its_tables_named(make_session):
    session = make_session(2)
    net = Net()
    assert es.wrap(net, session, optimizer=es.SGD(lr=0.1), prefix="net/") is net
    names = {table.name for table in session.client.status()[0].tables}
    assert names == {"net/users", "net/items.a_b", "net/items.bag", "net/dense"}
    assert isinstance(net.users, es.Embedding)
    assert isinstance(net.items["bag"], es.EmbeddingBag)
    assert set(net.state_dict()) == {
        "scale", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
        "tower.0.weight", "tower.0.bias", "tower.2.weight", "tower.2.bias",
        "users.weight", "items.a b.weight", "items.bag.weight",
    }  # fmt: skip


def test_a_module_reached_twice_is_one_table(make_session):
    def loss_of(model, x):
        return model["parts"][1](model["query"](x) + model["parts"][0](x + 1)).sum()

    query = nn.Embedding(20, 3)
    reference = nn.ModuleDict({"query": query, "parts": nn.ModuleList([query, nn.Linear(3, 1)])})
    session = make_session(2)
    model = es.wrap(copy.deepcopy(reference), session, optimizer=es.SGD(lr=0.1))
    assert model["query"] is model["parts"][0]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randint(19, (8,))
        loss_of(model, x).backward()
        session.step()
        optimizer.zero_grad()
        loss_of(reference, x).backward()
        optimizer.step()
    torch.testing.assert_close(model["query"].table.pull(torch.arange(20)), query.weight.detach())


def test_two_modules_that_share_a_weight_are_one_table(make_session):
    reference = nn.ModuleDict({"a": nn.Embedding(10, 3), "b": nn.Embedding(10, 3)})
    reference["b"].weight = reference["a"].weight
    session = make_session(2)
    model = es.wrap(copy.deepcopy(reference), session, optimizer=es.SGD(lr=1.0))
    assert model["a"].table is model["b"].table
    for module in (model, reference):
        (module["a"](torch.tensor([1, 2])).sum() + module["b"](torch.tensor([2, 3])).sum()).backward()
    session.step()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    torch.testing.assert_close(model["a"].table.pull(torch.arange(10)), reference["a"].weight.detach())


def test_a_meta_table_is_never_materialised_and_starts_from_its_initializer(make_session):
    session = make_session(2)
    model = nn.Sequential(nn.Embedding(2**57, 8, device="meta", padding_idx=3))
    es.wrap(model, session, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.5), seed=1)
    out = model(torch.tensor([0, 2**57 - 1, 3]))
    torch.testing.assert_close(out.detach()[:, 0], torch.tensor([0.5, 0.5, 0.0]))
    out.sum().backward()
    session.step()
    torch.testing.assert_close(model(torch.tensor([2**57 - 1, 3])).detach()[:, 0], torch.tensor([-0.5, 0.0]))
    with pytest.raises(IndexError, match="out of range"):
        model(torch.tensor([2**57]))


@pytest.mark.parametrize("kind", [es.Adam(lr=0.1), es.SGD(lr=0.1, momentum=0.9, weight_decay=0.1)])
def test_a_parameter_without_a_gradient_takes_no_step(make_session, kind):
    session = make_session(2)
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    es.wrap(model, session, optimizer=kind)
    for name in ("unused", "used", "used"):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        model[name](torch.ones(1, 3)).sum().backward()
        session.step()
        model["used"](torch.ones(1, 3))
        changed = {
            key.split(".")[0] for key, value in model.state_dict().items() if not torch.equal(value, before[key])
        }
        assert changed == {name}


def test_frozen_dense_parameters_are_shared_and_not_trained_until_unfrozen(make_session):
    session = make_session(2)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    start = copy.deepcopy(model)
    es.wrap(model, session, optimizer=es.SGD(lr=0.1, weight_decay=0.1))

    def step():
        model(torch.ones(1, 3)).sum().backward()
        session.step()
        model(torch.ones(1, 3))

    step()
    assert torch.equal(model[0].weight, start[0].weight)
    assert not torch.equal(model[1].weight, start[1].weight)
    before = session.stats.pulled_rows
    step()
    assert session.stats.pulled_rows - before == 2  # blocks of model[1]'s weight and bias
    model[0].requires_grad_(True)
    step()
    assert not torch.equal(model[0].weight, start[0].weight)


def test_a_parameter_that_is_frozen_after_its_backward_takes_that_step_and_is_read_anew(make_session):
    plain = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    session = make_session(2)
    model = es.wrap(copy.deepcopy(plain), session, optimizer=es.SGD(lr=0.1))
    for net, optimizer in ((plain, torch.optim.SGD(plain.parameters(), lr=0.1)), (model, session)):
        for is_trained in (False, True):
            net(torch.arange(4)).pow(2).sum().backward()
            net[1].requires_grad_(is_trained)
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())


def test_a_parameter_that_is_frozen_in_a_loop_has_its_last_steps_there(make_session, monkeypatch):
    session = make_session(2)
    model = es.wrap(nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 1)), session, optimizer=es.SGD(lr=0.1))
    push, weight = session._source.push, model[1].weight
    monkeypatch.setattr(session._source, "push", lambda *args, **its: time.sleep(0.02) or push(*args, **its))
    loop = session.prefetch([torch.arange(4)] * 8, staleness=2, inputs=lambda ids: {"0": ids})
    for number, ids in enumerate(loop):
        model(ids).mean().backward()
        if number == 3:
            weight.requires_grad_(False)
        time.sleep(0.06)  # until the next batch is here, as of before this step
        session.step()
        if number == 6:
            model(ids)
            here = weight.detach().clone()
    assert torch.equal(here, model.state_dict()["1.weight"])  # read anew behind the loop


def test_a_part_that_is_called_on_its_own_reads_current_weights(make_session):
    session = make_session(2)
    model = nn.ModuleDict({"tower": nn.Linear(2, 1, bias=False)})
    es.wrap(model, session, optimizer=es.SGD(lr=1.0))
    x = torch.ones(1, 2)
    before = model["tower"](x)
    before.sum().backward()
    session.step()
    torch.testing.assert_close(model["tower"](x), before - 2)


def test_row_wise_adagrad_gives_dense_weights_elementwise_adagrad(make_session):
    session = make_session(1)
    es.wrap(Net(), session, optimizer=es.RowWiseAdagrad(lr=0.1, eps=1e-4))
    kinds = {table.name: table.optimizer for table in session.client.status()[0].tables}
    assert (kinds["users"], kinds["dense"]) == ("rowwise_adagrad", "adagrad")
    with pytest.raises(ValueError, match="use Adagrad for dense weights"):
        es.wrap(Net(), session, optimizer=es.SGD(lr=1.0), dense_optimizer=es.RowWiseAdagrad(lr=0.1), prefix="x/")


class Doubled(nn.Parameter):
    """A parameter with functions of its own, as quantised ones have."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs or {})
            return 2 * out if func is nn.functional.linear else out


def with_doubled(layer, requires_grad=True):
    layer.weight = Doubled(layer.weight.detach().clone(), requires_grad)
    return layer


class Tied(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.embedding, self.output = nn.Embedding(10, 4, device=device), nn.Linear(4, 10, bias=False)
        self.output.weight = self.embedding.weight


def small(change):
    """An embedding in a model that `change` makes one that cannot be wrapped."""
    model = nn.Sequential(nn.Embedding(5, 2))
    change(model)
    return model


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:Complex modules", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Tied(device="meta"), "'output.weight' is the weight of embedding 'embedding' too"),
        (lambda: nn.Sequential(nn.Embedding(5, 2).double()), "'0.weight' is torch.float64; shards hold float32"),
        (lambda: nn.Linear(2, 2).half(), "'weight' is torch.float16"),
        (
            lambda: nn.Linear(2, 2).to(torch.complex64),
            r"'weight' is torch.complex64.* make torch.view_as_real\(values\)",
        ),
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device; only embeddings may stay there"),
        (lambda: nn.Sequential(nn.Embedding(5, 2), nn.LazyLinear(2)), "has no shape yet; run one forward before wrap"),
        (
            lambda: small(lambda it: register_parametrization(it[0], "weight", nn.Identity())),
            "module '0' is parametrized",
        ),
        (lambda: small(lambda it: it[0].register_forward_hook(print)), "module '0' has hooks"),
        (lambda: small(lambda it: it[0].register_full_backward_hook(print)), "module '0' has hooks"),
        (lambda: small(lambda it: it[0].register_full_backward_pre_hook(print)), "module '0' has hooks"),
        (lambda: small(lambda it: it[0].register_state_dict_pre_hook(print)), "module '0' has hooks"),
        (lambda: small(lambda it: it[0].register_load_state_dict_pre_hook(print)), "module '0' has hooks"),
        (lambda: small(lambda it: it[0].register_load_state_dict_post_hook(print)), "module '0' has hooks"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), r"wrap torch.nn.Sequential\(model\)"),
        (lambda: small(lambda it: it[0].weight.register_hook(print)), "the weight of module '0' has hooks"),
        (
            lambda: small(lambda it: it[0].weight.register_post_accumulate_grad_hook(print)),
            "the weight of module '0' has hooks",
        ),
        (lambda: nn.ModuleDict({"a b": nn.Embedding(2, 2), "a_b": nn.Embedding(2, 2)}), "would be named a_b"),
        (lambda: with_doubled(nn.Linear(2, 2)), "'weight' is a Doubled, .* make it a torch.nn.Parameter"),
        (lambda: with_doubled(nn.Embedding(2, 2), requires_grad=False), "'weight' is a Doubled"),
    ],
)
def test_what_cannot_be_wrapped_is_named_before_anything_is_declared(make_session, build, text):
    session = make_session(2)
    with pytest.raises(ValueError, match=text):
        es.wrap(build(), session, optimizer=es.SGD(lr=0.1))
    assert not session.client.status()[0].tables


def test_wrapping_twice_and_unknown_id_spaces_are_refused(make_session):
    session = make_session(1)
    with pytest.raises(ValueError, match=r"id_space names nope, which is no embedding \(known: items.a b"):
        es.wrap(Net(), session, optimizer=es.SGD(lr=0.1), id_space={"nope": "x"})
    net = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    with pytest.raises(ValueError, match="wrapped already"):
        es.wrap(net, session, optimizer=es.SGD(lr=0.1))


@pytest.mark.parametrize("part", ["users", "tower"])
def test_a_model_with_a_part_of_a_wrapped_one_is_refused(make_session, part):
    first, second = Net(), Net()
    setattr(second, part, getattr(first, part))
    es.wrap(first, make_session(1), optimizer=es.SGD(lr=0.1))
    session = make_session(1)
    with pytest.raises(ValueError, match=rf"parameter '{part}\..*' is on the shards already"):
        es.wrap(second, session, optimizer=es.SGD(lr=0.1))
    assert not session.client.status()[0].tables


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("script", [torch.jit.script, lambda part: torch.jit.trace(part, torch.ones(2, 12))])
def test_a_scripted_part_trains_to_the_loss_curve_of_torch(make_session, script):
    plain = Net()
    net, session = copy.deepcopy(plain), make_session(2)
    net.tower = script(net.tower)
    es.wrap(net, session, optimizer=es.SGD(lr=0.05))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    theirs = losses(plain, lambda: (optimizer.step(), optimizer.zero_grad()))
    assert losses(net, session.step) == pytest.approx(theirs, rel=1e-5)


def test_a_model_with_other_dense_shapes_is_refused(make_session):
    session = make_session(2)
    es.wrap(nn.Linear(3, 2), session, optimizer=es.SGD(lr=0.1))
    other = Session(session.client)  # another worker, with the same shards
    with pytest.raises(OtherParameters, match="table 'dense' holds the dense weights of a model with other parameters"):
        es.wrap(nn.Linear(2, 3), other, optimizer=es.SGD(lr=0.1))


def test_what_held_a_tables_weight_before_wrap_reads_the_shards(make_session):
    net = Net()
    held = [net.users.weight]
    session = make_session(2)
    es.wrap(net, session, optimizer=es.SGD(lr=0.5))
    before = held[0].detach().clone()
    held[0].square().sum().backward()
    session.step()
    assert torch.equal(held[0], before - 0.5 * 2 * before)


def test_a_module_on_meta_that_a_model_keeps_in_a_list_reads_the_shards(make_session):
    net = nn.Sequential(nn.Embedding(40, 4, device="meta"), nn.Linear(4, 1))
    net.kept = [net[0]]
    session = make_session(2)
    model = es.wrap(net, session, optimizer=es.SGD(lr=0.1))
    kept, ids = model.kept[0], torch.arange(8)
    assert torch.equal(kept(ids), model[0](ids))
    kept(ids).sum().backward()
    session.step()
    assert session.stats.pushed_rows == 8


def test_gradients_from_before_wrap_are_pushed_neither_of_rows_nor_of_dense_weights(make_session):
    net, session = Net(), make_session(2)
    net(BATCHES[0][0]).sum().backward()
    model = es.wrap(net, session, optimizer=es.SGD(lr=0.1))
    session.step()
    assert session.stats.pushed_rows == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_wrapped_model_cannot_be_scripted_and_says_what_can(make_session):
    model = es.wrap(nn.Sequential(nn.Linear(2, 2)), make_session(1), optimizer=es.SGD(lr=0.1))
    with pytest.raises(AttributeError, match=r"torch.jit.script .* load model.state_dict\(\) into a model"):
        torch.jit.script(model)


def test_a_subclass_with_a_forward_of_its_own_is_trained_as_a_dense_parameter(make_session):
    class Positions(nn.Embedding):
        def forward(self, x):
            return super().forward(torch.arange(x.shape[1]))

    session = make_session(2)
    model = es.wrap(nn.Sequential(Positions(6, 2)), session, optimizer=es.SGD(lr=1.0))
    before = model(torch.zeros(1, 4))
    before.sum().backward()
    session.step()
    torch.testing.assert_close(model(torch.zeros(1, 4)), before - 1)


def test_a_moved_model_keeps_training(make_session):
    session = make_session(2)
    model = es.wrap(nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1)), session, optimizer=es.SGD(lr=0.1))
    for parameter in model[1].parameters():  # what .to() does: new memory under the same parameter
        parameter.data = parameter.data.clone()
    before = model(torch.tensor([1])).detach()
    for _ in range(2):
        model(torch.tensor([1])).sum().backward()
        session.step()
    assert not torch.equal(model(torch.tensor([1])), before)
    with pytest.raises(TypeError, match="float32"):
        model.double()
    model[1].double()
    with pytest.raises(ValueError, match=r"became torch\.float64"):
        session.step()


def test_a_wrapped_model_has_the_buffers_of_the_unwrapped_one(make_session):
    """Averages of a teacher go through the buffers of both side by side."""
    plain = nn.Sequential(nn.Embedding(5, 2), nn.EmbeddingBag(5, 2), nn.BatchNorm1d(2))
    model = es.wrap(copy.deepcopy(plain), make_session(1), optimizer=es.SGD(lr=0.1))
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]


def test_a_model_of_embeddings_alone_is_compiled_for_their_device(make_session, monkeypatch):
    model = es.wrap(nn.Sequential(nn.Embedding(5, 2)), make_session(1), optimizer=es.SGD(lr=0.1), dense="ddp")
    devices = []
    monkeypatch.setattr(compilation, "_missing", devices.append)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch.compiler, "disable", lambda function: function)
    es.compile_dense(model)
    assert devices == [torch.device("cpu")]


def test_embedding_inputs_that_name_no_embedding_are_refused(make_session):
    model = Net()
    model.embedding_inputs = lambda x: {"nope": x}
    es.wrap(model, make_session(1), optimizer=es.SGD(lr=0.1))
    with pytest.raises(ValueError, match="embedding_inputs names 'nope', which is no embedding"):
        model(BATCHES[0][0])


def test_a_default_device_of_torch_changes_nothing_of_a_model_that_lies_elsewhere(make_session):
    start, curves = Net(), []
    for device in ("cpu", "meta"):  # where whatever follows the default has no values
        torch.set_default_device(device)
        try:
            session = make_session(2)
            model = es.wrap(copy.deepcopy(start), session, optimizer=es.Adagrad(lr=0.05))
            curve = losses(model, session.step)
            curves.append([*curve, model.items["bag"].weight.sum().item()])
        finally:
            torch.set_default_device(None)  # "cpu" would stay, and each call of torch go through Python
    assert curves[0] == curves[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_default_dtype_of_torch_changes_nothing_of_a_model_of_float32(make_session, dtype):
    start, curves = Net(), []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            model = es.wrap(copy.deepcopy(start), session := make_session(2), optimizer=es.Adagrad(lr=0.05)).to("cpu")
            curve = []
            for x, y in BATCHES:
                # the table is read by ids twice, and as a whole
                again = model.users(x[:, 1]).square().sum() + model.users.weight.sum() * 1e-3
                loss = (model(x) - y).square().mean() + again
                loss.backward()
                session.step()
                curve.append(loss.item())
            assert model.users.weight.dtype == torch.float32
            curves.append([*curve, model.users.weight.sum().item()])
        finally:
            torch.set_default_dtype(torch.float32)
    assert curves[0] == curves[1]


def test_a_weight_that_moves_with_its_model_is_no_change_of_its_values(make_session):
    model = es.wrap(nn.Sequential(nn.Embedding(5, 2)), make_session(), optimizer=es.SGD(lr=0.1))
    before = model[0].weight.sum()
    model[0].weight.move(torch.device("cpu"))  # what .to() does with another device, of which this machine has none
    assert model[0].weight.sum() == before


@pytest.mark.cuda
def test_training_on_a_gpu_follows_the_cpu(make_session, gpu):
    start, curves = Net(), []
    for device in (torch.device("cpu"), gpu):
        session = make_session(2)
        model = es.wrap(copy.deepcopy(start), session, optimizer=es.SGD(lr=0.05)).to(device)
        curves.append(losses(model, session.step, device))
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-3, atol=1e-5)


def test_a_second_model_of_a_session_needs_names_of_its_own():
    with es.local() as session:
        first = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1))
        second = copy.deepcopy(first)
        es.wrap(first, session, optimizer=es.SGD(lr=0.1))
        with pytest.raises(ValueError, match="this session has a table '0' already; give this model a prefix"):
            es.wrap(copy.deepcopy(second), session, optimizer=es.SGD(lr=0.1))
        with pytest.raises(ValueError, match="a table 'dense' already"):
            es.wrap(nn.Linear(2, 1), session, optimizer=es.SGD(lr=0.1))
        es.wrap(second, session, optimizer=es.SGD(lr=0.1), prefix="second/")
        assert session.table_names == {"0", "dense", "second/0", "second/dense"}


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_loop_with_an_optimizer_of_torch_is_the_same_loop_without_shards(make_session, mode):
    torch.manual_seed(3)
    plain = SumModel(10)
    torch.manual_seed(3)
    session = make_session()
    remote = es.wrap(SumModel(10), session, optimizer=es.SGD(lr=0.1), dense=mode)
    local = torch.optim.SGD(plain.rows.parameters(), lr=0.1)
    optimizers = [torch.optim.Adam(model.head.parameters(), lr=0.01) for model in (plain, remote)]
    assert [name for name, _ in remote.named_parameters()] == ["head.weight", "head.bias"]
    batches = [torch.randint(0, 10, (6, 3)) for _ in range(5)]
    for ids, ahead in zip(batches, session.prefetch(batches), strict=True):
        for model, optimizer in zip((plain, remote), optimizers, strict=True):
            model(ids if model is plain else ahead).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        local.step()
        local.zero_grad()
        session.step()
    ids = torch.arange(10).unsqueeze(1)
    torch.testing.assert_close(remote(ids), plain(ids))
    assert {table.spec.name for table in session.tables} == {"rows"}


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_dense_weights_of_other_types_train_in_the_worker_as_in_torch(make_session, dtype):
    models = [SumModel(10) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.head.to(dtype)
        model.head.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(dtype),))
    session = make_session()
    remote = es.wrap(models[1], session, optimizer=es.SGD(lr=0.1), dense="ddp")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for ids in [torch.randint(0, 10, (6, 3)) for _ in range(3)]:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(ids).abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.step()
    torch.testing.assert_close(remote(torch.arange(10).unsqueeze(1)), models[0](torch.arange(10).unsqueeze(1)))
    assert torch.equal(remote.head.weight, models[0].head.weight)


def test_dense_weights_in_the_worker_can_be_loaded(make_session):
    remote = es.wrap(SumModel(10), make_session(), optimizer=es.SGD(lr=0.1), dense="ddp")
    weights = {"head.weight": torch.ones(1, 4), "head.bias": torch.zeros(1)}
    remote.load_state_dict(weights)
    assert torch.equal(remote.state_dict()["head.weight"], weights["head.weight"])


@pytest.mark.parametrize("name", ["optimizer", "dense_optimizer"])
def test_an_optimizer_of_torch_is_refused_before_anything_moves(make_session, name):
    model, session = torch.nn.Linear(2, 1), make_session(1)
    of_torch = {name: torch.optim.Adam(model.parameters())}
    with pytest.raises(TypeError, match=rf"^{name} is a torch\.optim\.adam\.Adam, and the shards .* as es.Adam.lr="):
        es.wrap(model, session, **{"optimizer": es.SGD(lr=0.1), **of_torch})
    assert not session.tables


def test_an_optimizer_for_dense_weights_that_nobody_would_use_is_refused(make_session):
    with pytest.raises(ValueError, match="with dense 'ddp' torch's own optimizer trains the dense weights"):
        es.wrap(SumModel(10), make_session(), optimizer=es.SGD(lr=0.1), dense_optimizer=es.SGD(lr=0.1), dense="ddp")
    with pytest.raises(ValueError, match="dense must be ps, ddp or fsdp, got 'dpp'"):
        es.wrap(SumModel(10), make_session(), optimizer=es.SGD(lr=0.1), dense="dpp")


def test_a_model_whose_wrap_ended_with_an_error_has_to_be_built_anew(make_session):
    def build(dim):
        return nn.ModuleDict({"first": nn.Embedding(10, 4), "second": nn.Embedding(10, dim)})

    session = make_session(1)
    es.wrap(build(5), session, optimizer=es.SGD(lr=0.1))
    model, other = build(4), Session(session.client)
    with pytest.raises(TableMismatch):
        es.wrap(model, other, optimizer=es.SGD(lr=0.1))
    with pytest.raises(ValueError, match="after a wrap that ended with an error, build the model anew"):
        es.wrap(model, other, optimizer=es.SGD(lr=0.1), prefix="mine/")
    es.wrap(build(4), other, optimizer=es.SGD(lr=0.1), prefix="mine/")


def test_workers_whose_tables_have_different_numbers_of_rows_are_refused(make_session):
    session = make_session(2)
    session.client.join(Terms(workers=2, staleness=None))
    es.wrap(nn.Sequential(nn.Embedding(10, 4)), session, optimizer=es.SGD(lr=0.1))
    with raises(OtherRows, table="0", want=10, got=9):
        es.wrap(nn.Sequential(nn.Embedding(9, 4)), Session(session.client), optimizer=es.SGD(lr=0.1))


def test_nothing_is_read_from_a_file_that_a_model_keeps_open(make_session, tmp_path):
    np.savez(tmp_path / "features.npz", features=np.ones((3, 4), np.float32))
    model = SumModel(10)
    model.features = np.load(tmp_path / "features.npz")
    model.features.close()
    es.wrap(model, make_session(), optimizer=es.SGD(lr=0.1))


@pytest.mark.parametrize(
    "kept",
    [
        lambda w: w.data,
        lambda w: [w.detach()[1:]],
        lambda w: {"first": (w.detach(),)},
        lambda w: nn.Buffer(w.data.view(-1)),
    ],
)
@pytest.mark.parametrize("of", ["table", "linear"])
def test_a_tensor_in_the_memory_of_a_parameter_would_keep_its_first_values(make_session, kept, of):
    def build(keep):
        net = nn.Module()
        net.table, net.linear = nn.Embedding(10, 4), nn.Linear(4, 4)
        net.kept = keep(getattr(net, of).weight)
        net.register_forward_pre_hook(lambda *_: None)  # which does not compute it anew
        return net

    with pytest.raises(ValueError, match=f"kept shares memory with parameter '{of}.weight'"):
        es.wrap(build(kept), make_session(1), optimizer=es.SGD(lr=0.1))
    if of == "linear":  # which stays with torch
        es.wrap(build(kept), make_session(1), optimizer=es.SGD(lr=0.1), dense="ddp")
    es.wrap(build(lambda weight: weight.detach().clone()), make_session(1), optimizer=es.SGD(lr=0.1))


def share(tie):
    """A table, and two layers of its shape; `tie` gives some of them one memory."""
    net = nn.Module()
    net.table, net.a, net.b = nn.Embedding(10, 4), nn.Linear(4, 10), nn.Linear(4, 10)
    tie(net)
    return net


@pytest.mark.parametrize(
    ("tie", "names", "dense"),
    [
        (lambda it: setattr(it.a.weight, "data", it.table.weight.data), {"table.weight", "a.weight"}, "ddp"),
        (lambda it: setattr(it.b.bias, "data", it.a.weight.data.view(-1)[30:]), {"a.weight", "b.bias"}, "ps"),
        (
            lambda it: setattr(it, "copy", nn.Embedding.from_pretrained(it.table.weight.data)),
            {"table.weight", "copy.weight"},
            "ps",
        ),
    ],
)
def test_two_parameters_in_one_memory_would_be_trained_apart(make_session, tie, names, dense):
    with pytest.raises(ValueError, match="share memory, and would be trained apart") as error:
        es.wrap(share(tie), make_session(1), optimizer=es.SGD(lr=0.1), dense=dense)
    assert all(repr(name) in str(error.value) for name in names)


@pytest.mark.parametrize(
    "tie",
    [
        lambda it: setattr(it.a, "weight", it.table.weight),
        lambda it: [setattr(its.weight, "data", torch.ones(10, 4)) for its in (it.a.requires_grad_(False), it.b)],
        lambda it: [its.requires_grad_(False).weight.set_(it.table.weight.data) for its in (it.a, it.b, it.table)],
        lambda it: [setattr(its.weight, "data", w) for its, w in zip((it.a, it.b), torch.ones(2, 10, 4), strict=True)],
        lambda it: [
            setattr(its.weight, "data", w)
            for its, w in zip((it.a, it.b, it.table), torch.ones(10, 12).chunk(3, 1), strict=True)
        ],
    ],
    ids=["one parameter", "each its own", "frozen", "parts of one storage", "columns of one matrix"],
)
def test_parameters_that_torch_trains_as_the_shards_do_may_lie_in_one_storage(make_session, tie):
    es.wrap(share(tie), make_session(1), optimizer=es.SGD(lr=0.1))


def test_dense_weights_of_fully_shard_may_lie_beside_tables(make_session):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = share(lambda it: None)
        fully_shard(net.a, mesh=init_device_mesh("cpu", (1,)))
        es.wrap(net, make_session(1), optimizer=es.SGD(lr=0.1), dense="fsdp")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("change", [nn.Module.half, with_doubled])
def test_frozen_weights_that_stay_here_compute_what_they_did_and_are_named_once_unfrozen(make_session, change, caplog):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    change(net[1]).requires_grad_(False)
    plain = copy.deepcopy(net)
    model = es.wrap(net, make_session(1), optimizer=es.SGD(lr=0.1))
    x = torch.ones(1, 2)
    for side in (plain, model):
        side[0].register_forward_hook(lambda _, args, out: out.to(plain[1].weight.dtype))
    assert torch.equal(model(x), plain(x))
    assert not caplog.records
    model[1].requires_grad_()
    model(x)
    assert "'1.weight' is not on the shards" in caplog.text


@pytest.mark.parametrize("is_new", [True, False])
def test_a_layer_that_came_after_wrap_is_named_once(make_session, caplog, is_new):
    session = make_session()
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    if is_new:
        model.tower[2] = nn.Linear(400, 1)
    model.buffered, model.frozen = torch.zeros(3), nn.Parameter(torch.zeros(3), requires_grad=False)
    losses(model, session.step)
    torch.func.functional_call(model, {"scale": torch.tensor(2.0)}, (BATCHES[0][0],))
    told = [record.getMessage() for record in caplog.records if "came after wrap" in record.getMessage()]
    assert len(told) == is_new
    assert all("'tower.2.weight'" in line for line in told)
