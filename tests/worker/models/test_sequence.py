"""SASRec and DIN against computations that take one user at a time."""

import math

import pytest
import torch

from embershard.worker.data.batch import Field, IdTable, Schema
from embershard.worker.models.sequence.din import DIN
from embershard.worker.models.sequence.sasrec import SASRec

ITEMS, LENGTH, DIM = 30, 12, 6
HISTORIES = [[3, 4, 5], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [9, 3, 9, 20], []]


def by_hand(model, history):
    """States (len(history), DIM), by nn.MultiheadAttention's formula, one head after the other."""
    weights = model.embedding.weight[torch.tensor(history)]
    x = weights * math.sqrt(DIM) + model.position[LENGTH - len(history) :]
    for block in model.blocks:
        query = block.attention_norm(x)
        memory = query if block.pre_norm else x
        size = DIM // block.heads
        heads = []
        for head in range(block.heads):
            part = slice(head * size, (head + 1) * size)
            q, k, v = (
                layer(given)[:, part]
                for layer, given in ((block.query, query), (block.key, memory), (block.value, memory))
            )
            scores = q @ k.T / math.sqrt(size)
            scores[torch.ones(len(x), len(x)).triu(1).bool()] = -math.inf
            heads.append(scores.softmax(1) @ v)
        x = (x if block.pre_norm else query) + block.out(torch.cat(heads, 1))
        normed = block.forward_norm(x)
        hidden, _, _, output, _ = block.feed_forward
        x = (x if block.pre_norm else normed) + output(hidden(normed).relu())
    return model.norm(x)


def padded(rows, width):
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_states_are_the_papers_whatever_the_lengths_beside_them(pre_norm, heads):
    torch.manual_seed(1)
    model = SASRec(ITEMS, DIM, LENGTH, heads=heads, pre_norm=pre_norm).eval()
    candidates = torch.randint(0, ITEMS, (len(HISTORIES), 3))
    logits = model(torch.cat([padded(HISTORIES, LENGTH), candidates], 1))
    want = [
        model.embedding.weight[items] @ by_hand(model, row)[-1] if row else torch.zeros(3)
        for row, items in zip(HISTORIES, candidates, strict=True)
    ]
    torch.testing.assert_close(logits, torch.stack(want))


def test_users_of_whom_none_took_anything_are_scored():
    model = SASRec(ITEMS, DIM, LENGTH).eval()
    assert torch.equal(
        model(torch.cat([padded([[], []], LENGTH), torch.ones(2, 3, dtype=torch.long)], 1)), torch.zeros(2, 3)
    )


def test_a_list_scores_what_came_next_at_each_place_in_the_order_of_the_batch():
    torch.manual_seed(1)
    model = SASRec(ITEMS, DIM, LENGTH).eval()
    lists = torch.randint(0, ITEMS, (len(HISTORIES), LENGTH, 2))
    valid = padded(HISTORIES, LENGTH) >= 0
    lists[~valid] = -1
    ids = torch.cat([padded(HISTORIES, LENGTH), lists.flatten(1)], 1)
    want = [
        (model.embedding.weight[pair] * state).sum(1)
        for row, pairs in zip(HISTORIES, lists, strict=True)
        if row
        for state, pair in zip(by_hand(model, row), pairs, strict=False)
    ]
    scores = model(ids, None, True)
    torch.testing.assert_close(scores, torch.stack(want))
    own, others = model.split_lists(scores, ids)
    assert own.shape == (20,)
    assert others.shape == (20, 1)


def test_padding_is_not_looked_up_and_every_parameter_learns():
    model, read = SASRec(ITEMS, DIM, LENGTH), []
    model.embedding.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    ids = torch.cat([padded(HISTORIES, LENGTH), torch.randint(0, ITEMS, (len(HISTORIES), 3))], 1)
    model(ids).square().sum().backward()
    assert torch.equal(read[0], model.embedding_inputs(ids)["embedding"])
    assert int(read[0].min()) >= 0
    assert len(read[0]) == 20 + 15
    # a key's bias shifts all scores of a query alike
    learning = {n: p for n, p in model.named_parameters() if not n.endswith("key.bias")}
    assert not [n for n, p in learning.items() if p.grad is None or not p.grad.any()]


def test_din_weighs_a_history_by_its_target_without_a_softmax():
    torch.manual_seed(1)
    fields = (
        Field("user", "users", 0),
        Field("item", "items", 1),
        Field("shop", "shops", 2),
        Field("items", "items", 3, 4, "sequence"),
        Field("shops", "shops", 7, 4, "sequence"),
    )
    tables = (IdTable("users", 5), IdTable("items", 9), IdTable("shops", 6))
    schema = Schema(tuple(f.name for f in fields), 2, None, fields, tables)
    model = DIN(schema, 3, DIM, 2, target=("item", "shop"), history=("items", "shops"), attention=(7,), hidden=(8,))
    ids = torch.tensor(
        [[1, 3, 2, 4, 5, 6, -1, 1, 2, 3, -1], [2, 8, 0] + [-1] * 8, [0, 1, 5, 7, -1, -1, -1, 4, -1, -1, -1]]
    )
    dense = torch.rand(3, 2)
    users, items, shops = (model.embedding.get_submodule(name).weight for name in ("users", "items", "shops"))
    rows = []
    for row, numbers in zip(ids.tolist(), dense, strict=True):
        target = torch.cat([items[row[1]], shops[row[2]]])
        interest = torch.zeros(2 * DIM)
        for item, shop in zip(row[3:7], row[7:], strict=True):
            if item >= 0:
                taken = torch.cat([items[item], shops[shop]])
                pair = torch.cat([taken, target, taken - target, taken * target])
                interest = interest + model.unit.layers(pair) * taken
        rows.append(torch.cat([users[row[0]], target, interest, numbers]))
    want = model.output(model.tower(torch.stack(rows))).squeeze(1)
    torch.testing.assert_close(model(ids, dense), want)
    want.sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == set()
