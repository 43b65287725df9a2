"""The average of dense weights against torch's own."""

import copy
from math import nan
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import embershard as es
from embershard.worker.job.training import StepSection
from embershard.worker.nn.averaging import WeightAverage
from embershard.worker.session.session import Session
from embershard.worker.strategy.protocol import StepBatch
from embershard.worker.training.step import TrainStep


class Net(nn.Module):
    """An embedding that is not averaged, and layers that are."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids):
        out = self.layers(self.embedding(ids)).squeeze(1)
        return out


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(10, (8,), generator=generator) for _ in range(count)]


def loss_of(model, ids):
    return (model(ids) - ids / 10).square().mean()


def trained(session, steps, *, decay=0.8, each=lambda *_: None, loss=loss_of, **settings):
    """A wrapped model with its average, and torch's average of the unwrapped twin, after some steps."""
    plain = Net()
    model = es.wrap(copy.deepcopy(plain), session, optimizer=es.SGD(lr=0.5))
    average = WeightAverage(model.parameters(), decay=decay, read=session.read_dense)
    rows = es.ShardOptimizer(session)
    updater = SimpleNamespace(optimizers=[rows], skip=rows.skip, step=lambda weight: rows.step())
    step = TrainStep(model, loss, updater, StepSection(**settings), average=average)
    expected = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for ids in batches(steps):
        step(StepBatch(0, ids, len(ids)))
        optimizer.zero_grad()
        loss_of(plain, ids).backward()
        optimizer.step()
        expected.update_parameters(plain)
        each(model, average, expected)
    return model, average, expected, step


def layers(model):
    return {name: value.detach().clone() for name, value in model.named_parameters() if name.startswith("layers")}


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("decay", [0.0, 0.8, 0.99])
def test_it_is_the_average_of_torch_on_the_unwrapped_twin(make_session, steps, decay):
    session = make_session()
    model, average, expected, _ = trained(session, steps, decay=decay)
    session.refresh()
    with average.applied():
        torch.testing.assert_close(layers(model), layers(expected.module), rtol=1e-5, atol=1e-6)
    assert average.steps == steps


def test_the_weights_are_their_own_again_afterwards(make_session):
    session = make_session()
    model, average, _, step = trained(session, 3)
    session.refresh()
    session.read_dense()
    own = layers(model)
    ids = batches(1)[0]
    with torch.no_grad():
        expected = model(ids)
        with average.applied():
            assert not torch.equal(model(ids), expected)  # a forward reads what was put there, not the shards
        torch.testing.assert_close(model(ids), expected, rtol=0, atol=0)
    torch.testing.assert_close(layers(model), own, rtol=0, atol=0)
    with pytest.raises(KeyError), average.applied():
        raise KeyError
    torch.testing.assert_close(layers(model), own, rtol=0, atol=0)
    step(StepBatch(0, ids, len(ids)))
    assert average.steps == 3  # the next step is taken in by the forward after it


def test_other_workers_read_the_weights_themselves_meanwhile_and_their_pushes_stay(make_session):
    session = make_session()
    model, average, _, _ = trained(session, 3)
    session.refresh()
    session.read_dense()
    own, other = layers(model), Session(session.client)
    theirs = es.wrap(Net(), other, optimizer=es.SGD(lr=0.5))
    with average.applied():
        assert not torch.equal(layers(model)["layers.0.bias"], own["layers.0.bias"])
        torch.testing.assert_close(layers(theirs), own, rtol=0, atol=0)
        loss_of(theirs, batches(1)[0]).backward()
        other.step()
    pushed = layers(theirs)
    assert not torch.equal(pushed["layers.0.bias"], own["layers.0.bias"])
    session.refresh()
    torch.testing.assert_close(layers(model), pushed, rtol=0, atol=0)


def test_an_evaluation_in_between_counts_no_step_twice(make_session):
    session = make_session()

    def evaluate(model, average, expected):
        session.refresh()
        for _ in range(2):
            with average.applied():
                torch.testing.assert_close(layers(model), layers(expected.module), rtol=1e-5, atol=1e-6)

    trained(session, 4, each=evaluate)


def test_batches_without_a_step_and_steps_that_are_left_out_are_not_taken_in(make_session):
    _, average, _, step = trained(make_session(), 6, accumulate=3)
    assert (step.steps, average.steps) == (2, 1)
    _, average, _, step = trained(make_session(), 2, loss=lambda *of: loss_of(*of) * nan, non_finite="skip")
    assert (step.skipped, average.steps) == (2, 0)


def test_before_the_first_step_it_is_the_weights(make_session):
    session = make_session()
    model, average, _, _ = trained(session, 0)
    before = layers(model)
    with average.applied():
        torch.testing.assert_close(layers(model), before, rtol=0, atol=0)
    with average.applied(lambda values: [value.fill_(7.0) for value in values]):  # another worker's
        pass
    torch.testing.assert_close(layers(model), before, rtol=0, atol=0)


def test_workers_share_the_values_of_one(make_session):
    session = make_session()
    model, average, _, _ = trained(session, 3)
    session.refresh()
    with average.applied(lambda values: [value.fill_(7.0) for value in values]):
        assert {float(value.min()) for value in layers(model).values()} == {7.0}


def test_it_goes_on_from_a_state_dict(make_session):
    session = make_session()
    model, _, expected, step = trained(session, 3)
    other = WeightAverage(model.parameters(), decay=0.8, read=session.read_dense)
    other.load_state_dict(copy.deepcopy(step.state_dict())["average"])
    session.refresh()
    with other.applied():
        torch.testing.assert_close(layers(model), layers(expected.module), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay", [-0.1, 1.1])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match="decay"):
        WeightAverage([], decay=decay)
