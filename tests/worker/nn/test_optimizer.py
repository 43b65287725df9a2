"""A session as an optimizer of torch, and the learning rates of a run, against torch's own on an unwrapped twin."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import embershard as es
from embershard.proto.errors import BadLearningRate
from embershard.worker.nn.lr_schedule import LearningRates, Schedule, check_scheduler
from embershard.worker.nn.optimizer import gradients
from harness.models import random_pairs

IDS = torch.arange(12)
BATCHES = random_pairs(6, 8, 12, seed=1)


class Net(nn.Module):
    """Reads one table twice, the second time by other ids."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(12, 4), nn.Embedding(12, 4)
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.output = nn.Linear(16, 1)

    def forward(self, x):
        users = self.users(x[:, 0]) + 0.5 * self.users(x[:, 2])
        logits = self.output(self.tower(torch.cat([users, self.items(x[:, 1])], 1)))
        return logits.squeeze(1)

    def embedding_inputs(self, x):
        return {"items": x[:, 1]}


def loss_of(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def twins(make_session, lr=0.1, **settings):
    """An unwrapped model and a wrapped one with the same values."""
    plain = Net()
    session = make_session(2)
    wrapped = es.wrap(copy.deepcopy(plain), session, **{"optimizer": es.SGD(lr=lr), **settings})
    assert isinstance(wrapped, Net)
    return plain, wrapped, session


def weights(model, session=None):
    """All weights by name, those on the shards included."""
    if session is not None:
        session.refresh()
        session.read_dense()
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, es.Embedding):
            found[f"{name}.weight"] = module.table.pull(IDS)
    return found


def assert_equal_weights(plain, wrapped, session):
    torch.testing.assert_close(weights(wrapped, session), weights(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, eta_min=1e-3),
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=10, cycle_momentum=False),
        lambda o: lr_scheduler.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.9**t]),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
    ids=["step", "restarts", "one-cycle", "lambda-per-group", "sequential"],
)
def test_a_scheduler_of_torch_gives_the_weights_of_the_unwrapped_twin(make_session, schedule):
    plain, wrapped, session = twins(make_session, dense_optimizer=es.SGD(lr=0.02))
    tables = [plain.users.weight, plain.items.weight]
    dense = [p for p in plain.parameters() if all(p is not table for table in tables)]
    optimizers = [
        torch.optim.SGD([{"params": tables, "lr": 0.1}, {"params": dense, "lr": 0.02}]),
        es.ShardOptimizer(session),
    ]
    for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
        scheduler = schedule(optimizer)
        for batch in BATCHES:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            scheduler.step()
    assert_equal_weights(plain, wrapped, session)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -0.1, 1e300])
def test_a_rate_that_is_none_is_refused_before_anything_is_pushed(make_session, rate):
    _, wrapped, session = twins(make_session)
    optimizer = es.ShardOptimizer(session)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: rate if step else 1.0)
    optimizer.step()
    scheduler.step()
    loss_of(wrapped, BATCHES[0]).backward()
    with pytest.raises(BadLearningRate, match=r"group 'users, items' became .* at step 1.*correct the schedule"):
        optimizer.step()
    assert (session.clock, session.stats.pushed_rows) == (1, 0)


def test_a_session_without_tables_has_no_optimizer(make_session):
    with pytest.raises(ValueError, match="wrap a model with it first"):
        es.ShardOptimizer(make_session(1))


def test_a_rate_of_zero_moves_nothing_and_cannot_be_raised(make_session):
    _, wrapped, session = twins(make_session, lr=0.0)
    optimizer = es.ShardOptimizer(session)
    before = weights(wrapped, session)
    loss_of(wrapped, BATCHES[0]).backward()
    optimizer.step()
    torch.testing.assert_close(weights(wrapped, session), before, rtol=0, atol=0)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(BadLearningRate, match="no factor raises a rate that began as 0"):
        optimizer.step()


@pytest.mark.parametrize(
    "setting", [{"weight_decay": 0.1}, {"momentum": 0.9}, {"betas": (0.9, 0.99)}, {"maximize": True}]
)
def test_a_setting_that_would_have_no_effect_is_refused(make_session, setting):
    _, wrapped, session = twins(make_session)
    optimizer = es.ShardOptimizer(session)
    loss_of(wrapped, BATCHES[0]).backward()
    optimizer.param_groups[0].update(setting)
    with pytest.raises(ValueError, match=f"{next(iter(setting))}, which would have no effect"):
        optimizer.step()
    optimizer.param_groups[0].popitem()
    optimizer.step()


def test_there_is_a_group_for_each_optimizer_of_the_tables(make_session):
    _, _, session = twins(
        make_session,
        optimizer={"users": es.Adam(lr=0.1), "*": es.SGD(lr=0.5)},
        dense_optimizer={"output": es.SGD(lr=0.3), "*": es.Adagrad(lr=0.2)},
    )
    groups = es.ShardOptimizer(session).param_groups
    assert [(group["name"], group["tables"], group["lr"]) for group in groups] == [
        ("embedding", ["users"], 0.1),
        ("embedding", ["items"], 0.5),
        ("dense", ["dense.1"], 0.3),
        ("dense", ["dense"], 0.2),
    ]
    with pytest.raises(TypeError, match="a table has its optimizer from the start"):
        es.ShardOptimizer(session).add_param_group({"params": []})


def plainly(model, optimizer, batches=BATCHES):
    losses = []
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.8)
    for batch in batches:
        losses.append(loss_of(model, batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def clipped(model, optimizer, max_norm):
    norms = []
    for batch in BATCHES[:3]:
        loss_of(model, batch).backward()
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norms.append(nn.utils.clip_grad_norm_(weights, max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def scaled(model, optimizer, unscale):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in BATCHES[:3]:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale()]


def by_closure(model, optimizer):
    def closure():
        loss = loss_of(model, BATCHES[0])
        loss.backward()
        return loss.item()

    with torch.no_grad():
        return [optimizer.step(closure)]


LOOPS = {
    "clipped": partial(clipped, max_norm=0.05),
    "not clipped": partial(clipped, max_norm=1e6),
    "scaled": partial(scaled, unscale=False),
    "unscaled": partial(scaled, unscale=True),
    "closure": by_closure,
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_of_torch_gives_the_weights_of_the_unwrapped_twin(make_session, loop):
    plain, wrapped, session = twins(make_session)
    theirs = loop(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    torch.testing.assert_close(loop(wrapped, es.ShardOptimizer(session)), theirs)
    assert_equal_weights(plain, wrapped, session)


def test_it_steps_inside_prefetch(make_session):
    plain, wrapped, session = twins(make_session)
    theirs = plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    torch.testing.assert_close(plainly(wrapped, es.ShardOptimizer(session), session.prefetch(BATCHES)), theirs)
    assert_equal_weights(plain, wrapped, session)


def test_gradients_are_one_per_table_with_equal_ids_summed(make_session):
    plain, wrapped, session = twins(make_session)
    loss_of(plain, BATCHES[0]).backward()
    loss_of(wrapped, BATCHES[0]).backward()
    optimizer = es.ShardOptimizer(session)
    users, items = optimizer.param_groups[0]["params"]
    assert users.grad.shape == items.grad.shape == (12, 4)
    torch.testing.assert_close(users.grad.norm(), plain.users.weight.grad.norm())
    found = gradients(optimizer)
    assert len(found) == 2 + 4
    assert found[0].shape == (len(plain.users.weight.grad.abs().sum(1).nonzero()), 4)
    optimizer.zero_grad()
    assert gradients(optimizer) == []


def test_the_groups_have_the_parameters_of_the_model(make_session):
    plain, wrapped, session = twins(make_session)
    optimizer = es.ShardOptimizer(session)
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    assert own == set(wrapped.parameters())  # by identity: trainers look them up
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in BATCHES[:3]:
        for model, (users, items) in (
            (plain, (plain.users.weight, plain.items.weight)),
            (wrapped, optimizer.param_groups[0]["params"]),
        ):
            users.requires_grad_(requires_grad=batch is BATCHES[1])  # as what freezes a part for some epochs
            (loss_of(model, batch) + 0.1 * items.square().sum()).backward()
        theirs.step()
        theirs.zero_grad()
        optimizer.step()
    assert_equal_weights(plain, wrapped, session)


def test_parameters_of_rows_are_the_same_at_every_step_and_lose_a_gradient_as_torchs_do(make_session):
    plain, wrapped, session = twins(make_session)
    optimizer = es.ShardOptimizer(session)
    users, items = optimizer.param_groups[0]["params"]
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in BATCHES[:3]:
        assert users.grad is None
        for model, own in ((plain, plain.items.weight), (wrapped, items)):
            loss_of(model, batch).backward()
            own.grad *= 0.5
        plain.users.weight.grad, users.grad = None, None
        theirs.step()
        theirs.zero_grad()
        optimizer.step()
    assert_equal_weights(plain, wrapped, session)


@pytest.mark.parametrize(
    "use",
    [
        lambda rows: rows.square().sum(),
        lambda rows: rows.data.clamp_(-1, 1),
        lambda rows: rows.detach().clone(),
        lambda rows: torch.ones(1).add_(rows, alpha=0.1),
        lambda rows: torch._foreach_lerp_([rows], [torch.ones(1)], 0.5),
        lambda rows: rows.requires_grad_(False),
        lambda rows: setattr(rows, "requires_grad", False),
        lambda rows: rows.register_hook(print),
    ],
)
def test_what_stands_for_a_table_without_a_model_has_no_values(make_session, use):
    session = make_session(2)
    session.table(es.TableSpec(name="users", dim=4, optimizer=es.SGD(lr=0.1)))
    rows = es.ShardOptimizer(session).param_groups[0]["params"][0]
    with pytest.raises(NotImplementedError, match="a table that no wrapped model has"):
        use(rows)
    with pytest.raises(ValueError, match="the gradient of rows on the shards cannot be replaced"):
        rows.grad = torch.ones(1, 4)


def test_a_step_that_gradscaler_leaves_out_pushes_nothing_and_the_clock_moves(make_session):
    _, wrapped, session = twins(make_session)
    optimizer = es.ShardOptimizer(session)
    before = weights(wrapped, session)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(100 * loss_of(wrapped, BATCHES[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (session.clock, session.stats.pushed_rows, optimizer.skipped_steps) == (1, 0, 1)
    assert scaler.get_scale() == 2.0**126
    torch.testing.assert_close(weights(wrapped, session), before, rtol=0, atol=0)
    assert gradients(optimizer) == []


def test_two_that_step_by_turns_would_each_train_all_tables_and_are_refused(make_session):
    _, wrapped, session = twins(make_session)
    first, second = es.ShardOptimizer(session), es.ShardOptimizer(session)
    for optimizer in (first, first, second, second):  # one after the other, as in a second fit
        loss_of(wrapped, BATCHES[0]).backward()
        optimizer.step()
    before = weights(wrapped, session)
    loss_of(wrapped, BATCHES[0]).backward()
    with pytest.raises(RuntimeError, match="a session of its own"):
        first.step()
    torch.testing.assert_close(weights(wrapped, session), before, rtol=0, atol=0)


def test_learning_rates_survive_a_state_dict(make_session):
    _, _, session = twins(make_session)
    optimizer = es.ShardOptimizer(session)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    other = es.ShardOptimizer(session)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr"] for group in other.param_groups] == [0.05, 0.05]
    _, _, elsewhere = twins(make_session, prefix="other/")
    with pytest.raises(ValueError, match="other tables"):
        es.ShardOptimizer(elsewhere).load_state_dict(optimizer.state_dict())


def rates(scheduler, arguments, warmup, steps, left_out=(), **shape):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    made = LearningRates([optimizer], Schedule(warmup_steps=warmup, **shape), scheduler, arguments)
    seen = []
    for step in sorted({*range(steps)} - {*left_out}):
        made.set(step)
        seen.append(optimizer.param_groups[0]["lr"])
        assert made.scale == pytest.approx(seen[-1] / 0.5)
    return seen


def test_a_scheduler_of_torch_begins_after_the_warm_up():
    assert rates("StepLR", {"step_size": 2, "gamma": 0.1}, 2, 7) == pytest.approx(
        [0.25, 0.5, 0.5, 0.5, 0.05, 0.05, 0.005]
    )


def test_a_worker_that_was_away_at_the_end_of_the_warm_up_has_the_rates_of_the_others():
    away = rates("ExponentialLR", {"gamma": 0.5}, 4, 8, left_out=range(1, 6))
    assert away[1:] == rates("ExponentialLR", {"gamma": 0.5}, 4, 8)[6:]


@pytest.mark.parametrize(
    ("shape", "scheduler", "arguments"),
    [({"shape": "step", "factor": 0.5}, None, {}), ({}, "ExponentialLR", {"gamma": 0.5})],
    ids=["ours", "torch"],
)
def test_a_schedule_taken_up_at_a_later_step_moves_the_rates_of_all_groups(shape, scheduler, arguments):
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (0.5, 4.0)]
    optimizers = [torch.optim.SGD(groups), torch.optim.SGD([torch.zeros(1)], lr=1.0)]
    LearningRates(optimizers, Schedule(**shape), scheduler, arguments).set(2)
    found = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    assert found == [[0.125, 1.0], [0.25]]


def test_a_schedule_whose_rate_turns_negative_is_refused():
    with pytest.raises(BadLearningRate, match="became -"):
        rates("LinearLR", {"start_factor": 1.0, "end_factor": 0.5, "total_iters": 1}, 0, 3, shape="step", factor=-1.0)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("StepLR", {"step_size": 1, "gama": 2}, "StepLR takes no 'gama'; it takes step_size, gamma"),
        ("StepLR", {}, "missing 1 required positional argument: 'step_size'"),
        ("CosineAnnealingWarmRestarts", {"T_0": 0}, "Expected positive integer T_0"),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 5}, "must support momentum"),
        ("Cosine", {}, "has no class 'Cosine'"),
        ("Optimizer", {}, "has no class 'Optimizer'"),
        ("LambdaLR", {"lr_lambda": "x"}, "cannot be written in a job file"),
        ("ReduceLROnPlateau", {}, "cannot be written in a job file"),
    ],
)
def test_a_scheduler_that_cannot_be_made_is_named(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        check_scheduler(name, arguments)


def test_the_loop_of_the_docs_trains(make_session):
    session, plain = make_session(), Clicks()
    before = plain(IDS.view(6, 2)).item()
    loader = [torch.randint(12, (8, 2)) for _ in range(64)]
    model = es.wrap(
        plain,
        session,
        optimizer={"user_*": es.Adam(lr=1e-3), "*": es.Adagrad(lr=0.05)},
        dense_optimizer=es.Adam(lr=1e-3),
    )
    optimizer = es.ShardOptimizer(session)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20, cycle_momentum=False)
    scaler = torch.amp.GradScaler("cpu")
    average = es.WeightAverage(model.parameters(), decay=0.5, read=session.read_dense)
    for number, batch in enumerate(session.prefetch(loader)):
        with torch.autocast("cpu", torch.float16):
            loss = model(batch) / 4
        average.observe()
        scaler.scale(loss).backward()
        if number % 4 == 3:
            scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            average.stepped()
    assert (session.clock, average.steps) == (16, 15)
    with average.applied():
        assert model(IDS.view(6, 2)).item() < 0.9 * before
    assert average.steps == 16


class Clicks(nn.Module):
    """A model that gives its loss."""

    def __init__(self):
        super().__init__()
        self.user_id, self.item_id = nn.Embedding(12, 4), nn.Embedding(12, 4)
        self.top = nn.Linear(8, 1)

    def embedding_inputs(self, x):
        return {"user_id": x[:, 0], "item_id": x[:, 1]}

    def forward(self, x):
        return self.top(torch.cat([self.user_id(x[:, 0]), self.item_id(x[:, 1])], 1)).square().mean()
