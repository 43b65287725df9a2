"""load_state_dict, and copy_ under no_grad, assign the weights of a wrapped model on the shards."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import embershard as es
from embershard.proto.messages import Pull
from embershard.worker.client.membership import Terms
from embershard.worker.session.session import Session
from harness.eventually import eventually

BATCHES = [torch.randint(50, (16, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(12)]


class Net(nn.Module):
    """Scores of all items, by the weight that is looked up, too; dense weights of more blocks than one."""

    def __init__(self, *, is_tied=True):
        super().__init__()
        self.items = nn.Embedding(50, 8)
        self.users = nn.EmbeddingBag(50, 8, mode="sum")
        self.hidden = nn.Linear(8, 200, bias=False)
        self.norm = nn.BatchNorm1d(200, affine=False)
        self.back = nn.Linear(200, 8, bias=False)
        self.scores = nn.Linear(8, 50)
        if is_tied:
            self.scores.weight = self.items.weight

    def forward(self, ids):
        hidden = self.items(ids).mean(1) + self.users(ids)
        return self.scores(self.back(self.norm(self.hidden(hidden)).tanh())).logsumexp(1).mean()

    def embedding_inputs(self, ids):
        return {"items": ids, "users": ids}


def trained(model, step, zero_grad, batches=BATCHES):
    """The losses of a training that goes back to an earlier state once, as one that stops early does; and its end."""
    losses, kept = [], {}
    for number, ids in enumerate(batches):
        loss = model(ids)
        loss.backward()
        step()
        zero_grad()
        losses.append(loss.item())
        if number == 4:
            kept = copy.deepcopy(model.state_dict())
        if number == 8:
            assert str(model.load_state_dict(kept)) == "<All keys matched successfully>"
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("how", ["step", "prefetch", "local steps", "untied"])
def test_a_training_that_goes_back_is_torchs_and_keeps_the_optimizers_state(how):
    torch.manual_seed(0)
    plain = Net(is_tied=how not in ("untied", "local steps"))
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.05)
    with Session(es.local(2).client, local_steps=3 if how == "local steps" else None) as session:
        model = es.wrap(copy.deepcopy(plain), session, optimizer=es.Adagrad(lr=0.05))
        want = trained(plain, optimizer.step, optimizer.zero_grad)
        batches = session.prefetch(BATCHES) if how == "prefetch" else BATCHES
        got = trained(model, session.step, session.zero_grad, batches)
    torch.testing.assert_close(got, want, atol=5e-6, rtol=0)


def test_local_steps_keep_no_copies_of_rows_that_this_worker_does_not_read():
    with Session(es.local(1).client, local_steps=3) as session:
        model, wanted = es.wrap(Net(is_tied=False), session, optimizer=es.SGD(lr=1e-30)), Net(is_tied=False)
        model(BATCHES[0]).backward()
        session.step()
        model.load_state_dict(wanted.state_dict())
        read = BATCHES[0].unique().tolist()
        assert sorted(session.local_steps._copies["items"].index.ids.tolist()) == read
        for ids in BATCHES[:2]:
            torch.testing.assert_close(model.eval()(ids), wanted.eval()(ids))


@pytest.mark.parametrize("is_restored", [False, True])
@pytest.mark.parametrize("staleness", [1, 2])
def test_batches_that_were_pulled_before_have_the_values_too(make_session, make_shards, staleness, is_restored):
    shards, wanted = make_shards(2), Net(is_tied=False).eval()
    session = make_session(shards=shards)
    other = es.wrap(Net(is_tied=False), make_session(shards=shards, worker=1), optimizer=es.SGD(lr=0.0))
    model = es.wrap(Net(is_tied=False), session, optimizer=es.SGD(lr=0.0)).eval()
    for number, ids in enumerate(session.prefetch(BATCHES, staleness=staleness)):
        if number == 4:
            model(ids).backward()
            session.step()
            time.sleep(0.1)  # the next batches are pulled meanwhile
            (other if is_restored else model).load_state_dict(wanted.state_dict())
            if is_restored:
                session.client.restored()
        if number > 4:
            torch.testing.assert_close(model(ids), wanted(ids))


def test_another_workers_forwards_have_the_values(make_session):
    session = make_session(2)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    other = Session(session.client)
    theirs = es.wrap(Net(), other, optimizer=es.SGD(lr=0.1))
    wanted = Net()
    model.load_state_dict(wanted.state_dict())
    other.refresh()
    for one in (model.eval(), theirs.eval()):
        torch.testing.assert_close(one(BATCHES[0]), wanted.eval()(BATCHES[0]))


@pytest.mark.parametrize("local_steps", [None, 1])
def test_what_all_workers_of_a_synchronous_job_load_is_what_each_of_them_reads_next(make_wires, local_steps):
    job, wanted = make_wires(2), Net(is_tied=False).eval()
    sessions = [job.session(worker, Terms(workers=2, staleness=0), local_steps=local_steps) for worker in (0, 1)]
    first, second = (es.wrap(Net(is_tied=False).eval(), session, optimizer=es.SGD(lr=10.0)) for session in sessions)
    first(BATCHES[0]).backward()
    second(BATCHES[1]).backward()
    sessions[0].step()

    def load_and_read():
        first.load_state_dict(wanted.state_dict())
        return first(BATCHES[2]).item()

    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(load_and_read)
        assert eventually(lambda: any(isinstance(one, Pull) and one.required_clock == 1 for _, one in job.heard))
        sessions[1].step()  # the first worker has loaded, or is about to, before this push closes the clock
        assert read.result() == pytest.approx(wanted(BATCHES[2]).item(), rel=1e-6)
    second.load_state_dict(wanted.state_dict())
    assert second(BATCHES[2]).item() == pytest.approx(wanted(BATCHES[2]).item(), rel=1e-6)


def test_frozen_layers_have_the_values_in_batches_that_were_pulled_before(make_session):
    session = make_session(1)
    model, wanted = Net(is_tied=False).eval(), Net(is_tied=False).eval()
    for layer in (model.hidden, model.scores, model.back):
        layer.requires_grad_(False)
    model = es.wrap(model, session, optimizer=es.SGD(lr=1e-30))
    for number, ids in enumerate(session.prefetch(BATCHES, staleness=3)):
        if number == 1:
            # pulled with all weights, before their first use
            assert eventually(lambda: len(session._prefetcher._ready) == 3)
            model.load_state_dict(wanted.state_dict())
        if number > 4:
            torch.testing.assert_close(model(ids), wanted(ids))
        model(ids).backward()
        session.step()


def test_copies_of_rows_are_dropped(make_session):
    session = make_session(2)
    session.cache_rows(100, staleness=100)
    model, wanted = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1)), Net()
    model(BATCHES[0]).backward()
    session.step()
    model.load_state_dict(wanted.state_dict())
    torch.testing.assert_close(model.eval()(BATCHES[0]), wanted.eval()(BATCHES[0]))


def test_a_state_dict_that_was_not_copied_has_the_current_dense_weights_and_no_rows(make_session):
    session = make_session(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    current = model.state_dict()
    before = {name: value.clone() for name, value in current.items()}
    model.load_state_dict(current)
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)
    held = model.state_dict()
    model(BATCHES[0]).backward()
    session.step()
    now = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"all values are NaN.*copy\.deepcopy\(model\.state_dict\(\)\)"):
        model.load_state_dict(held)
    torch.testing.assert_close(dict(model.state_dict()), now, atol=0, rtol=0)


def test_a_state_dict_that_was_not_copied_is_pulled_once_for_all_dense_weights(make_session, monkeypatch):
    session = make_session(1)
    model = es.wrap(Net(is_tied=False), session, optimizer=es.SGD(lr=0.1))
    held = {name: value for name, value in model.state_dict().items() if name not in ("items.weight", "users.weight")}
    pulls, pull = [], session.client.pull
    monkeypatch.setattr(session.client, "pull", lambda *args, **settings: pulls.append(1) or pull(*args, **settings))
    model.load_state_dict(held, strict=False)
    assert not pulls
    model(BATCHES[0]).backward()
    session.step()
    pulls.clear()
    model.load_state_dict(held, strict=False)
    assert len(pulls) == 1


def test_copy_assigns_values_that_torch_would_spread_and_convert(make_session):
    session = make_session(1)
    model = es.wrap(Net(is_tied=False), session, optimizer=es.SGD(lr=0.1), whole_limit=1599)
    with torch.no_grad():
        assert model.hidden.weight.copy_(torch.arange(8)) is model.hidden.weight
        model.items.weight.copy_(torch.full((50, 8), 3, dtype=torch.int32))
        with pytest.raises(ValueError, match="50 rows, too many"):  # a hashed table has 2^62
            model.users.weight.copy_(torch.tensor(1.0))
        with pytest.raises(RuntimeError, match="expand"):
            model.items.weight.copy_(torch.ones(50, 7))
        assert torch.equal(model.hidden.weight, torch.arange(8.0).expand(200, 8))
        assert torch.equal(model.items(torch.arange(50)), torch.full((50, 8), 3.0))


def test_a_load_that_would_replace_the_parameters_is_refused(make_session):
    model = es.wrap(Net(), make_session(1), optimizer=es.SGD(lr=0.1))
    with pytest.raises(RuntimeError, match="with assign=True would take the weights"):
        model.load_state_dict(Net().state_dict(), assign=True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match="set_swap_module_params_on_conversion"):
            model.load_state_dict(Net().state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model.load_state_dict(Net().state_dict())


def test_an_error_names_what_does_not_fit_as_torch_does(make_session):
    model = es.wrap(Net(), make_session(1), optimizer=es.SGD(lr=0.1))
    state = copy.deepcopy(model.state_dict())
    state["hidden.weight"], state["more"] = torch.ones(3, 3), state.pop("back.weight")
    with pytest.raises(RuntimeError, match=r"(?s)back\.weight.*more.*size mismatch for hidden\.weight"):
        model.load_state_dict(state)


def test_a_graph_of_the_old_values_has_no_backward(make_session):
    session = make_session(1)
    model = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1))
    for loss in (lambda: model.items.weight.square().sum(), lambda: model.back.weight.square().sum()):
        before = loss()
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
