"""wrap(dense="ddp"): the embeddings move to the shards, all other weights stay torch's."""

import pytest
import torch
from torch import nn

import embershard as es


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.linear = nn.Linear(4, 1)

    def embedding_inputs(self, ids):
        return {"embedding": ids}

    def forward(self, ids):
        return self.linear(self.embedding(ids)).squeeze(1)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_loop_with_an_optimizer_of_torch_is_the_same_loop_without_shards(make_session, mode):
    torch.manual_seed(3)
    plain = Net()
    torch.manual_seed(3)
    session = make_session()
    remote = es.wrap(Net(), session, optimizer=es.SGD(lr=0.1), dense=mode)
    local = torch.optim.SGD(plain.embedding.parameters(), lr=0.1)
    optimizers = [torch.optim.Adam(model.linear.parameters(), lr=0.01) for model in (plain, remote)]
    assert [name for name, _ in remote.named_parameters()] == ["linear.weight", "linear.bias"]
    batches = [torch.randint(0, 10, (6,)) for _ in range(5)]
    for ids, ahead in zip(batches, session.prefetch(batches), strict=True):
        for model, optimizer in zip((plain, remote), optimizers, strict=True):
            model(ids if model is plain else ahead).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        local.step()
        local.zero_grad()
        session.step()
    ids = torch.arange(10)
    torch.testing.assert_close(remote(ids), plain(ids))
    assert {table.spec.name for table in session.tables} == {"embedding"}


def test_dense_weights_in_the_worker_can_be_loaded(make_session):
    remote = es.wrap(Net(), make_session(), optimizer=es.SGD(lr=0.1), dense="ddp")
    weights = {"linear.weight": torch.ones(1, 4), "linear.bias": torch.zeros(1)}
    remote.load_state_dict(weights)
    assert torch.equal(remote.state_dict()["linear.weight"], weights["linear.weight"])


def test_an_optimizer_for_dense_weights_that_nobody_would_use_is_refused(make_session):
    with pytest.raises(ValueError, match="with dense 'ddp' torch's own optimizer trains the dense weights"):
        es.wrap(Net(), make_session(), optimizer=es.SGD(lr=0.1), dense_optimizer=es.SGD(lr=0.1), dense="ddp")
    with pytest.raises(ValueError, match="dense must be ps, ddp or fsdp, got 'dpp'"):
        es.wrap(Net(), make_session(), optimizer=es.SGD(lr=0.1), dense="dpp")
