"""Features with tables of their own: pooled as a slow reference pools them, and the same over shards as in torch."""

import copy

import pytest
import torch

import embershard as es
from embershard.worker.models.ctr.dlrm import DLRM
from embershard.worker.models.ctr.fm import FM, LR, DeepFM
from embershard.worker.models.ctr.wide_deep import WideDeep
from embershard.worker.models.layers import embed_features

DIM, B = 4, 5
FIELDS = (
    es.Field("user", "user", 0),
    es.Field("tags", "tag", 1, 3, "mean"),
    es.Field("item", "item", 4),
    es.Field("history", "item", 5, 4, "sequence"),
    es.Field("colours", "tag", 9, 2, "sum", weights=2),
    es.Field("words", "word", 11, 2, "max"),
    es.Field("cart", "item", 13, 2, "mean", weights=4),
)
TABLES = (es.IdTable("user", 10), es.IdTable("tag", 6), es.IdTable("item", 8, dim=3), es.IdTable("word", 5))
SCHEMA = es.Schema(tuple(f.name for f in FIELDS), 2, None, FIELDS, TABLES)


def batch():
    """Lists of 0 to all of their columns, and weights, those of the first list all 0."""
    generator = torch.Generator().manual_seed(1)
    sizes = {table.name: table.num_ids for table in TABLES}
    columns, weights = [], torch.rand(B, 4, generator=generator)
    for field in FIELDS:
        ids = torch.randint(0, sizes[field.table], (B, field.width), generator=generator)
        if field.pooling != "none":
            lengths = torch.arange(B) % (field.width + 1)
            ids[torch.arange(field.width) >= lengths.unsqueeze(1)] = es.PADDING
        columns.append(ids)
    weights[2, :] = 0
    return torch.cat(columns, 1), torch.cat([torch.rand(B, 2, generator=generator), weights], 1)


def one_by_one(module, ids, dense):
    """(B, F, dim) by loops over samples and features."""
    out = []
    for b in range(B):
        vectors = []
        for field in FIELDS:
            if field.pooling == "sequence":
                continue
            own = [int(i) for i in ids[b, field.start : field.start + field.width] if i != es.PADDING]
            weight = dense[b, field.weights : field.weights + field.width] if field.weights is not None else [1.0] * 9
            table = getattr(module, field.table)
            rows = [table.weight[i] if table.embedding_dim == DIM else module.item_map(table.weight[i]) for i in own]
            summed = sum((w * row for w, row in zip(weight, rows, strict=False)), torch.zeros(DIM))
            total = float(sum(weight[: len(own)]))
            if field.pooling == "mean":
                summed = summed / total if total else torch.zeros(DIM)
            if field.pooling == "max" and rows:
                summed = torch.stack(rows).max(0).values
            vectors.append(summed)
        out.append(torch.stack(vectors))
    return torch.stack(out)


def test_vectors_are_those_of_loops_over_samples_and_features():
    ids, dense = batch()
    module = es.FeatureEmbedding(SCHEMA, DIM)
    torch.testing.assert_close(module(ids, dense), one_by_one(module, ids, dense))
    rows, mask = module.sequence("history", ids)
    history = ids[:, 5:9]
    assert torch.equal(mask, history != es.PADDING)
    want = torch.where(mask.unsqueeze(2), module.item_map(module.item(history.clamp(min=0))), 0.0)
    torch.testing.assert_close(rows, want)


def test_padding_has_no_gradient_and_nothing_but_what_is_read_has_one():
    ids, dense = batch()
    module = es.FeatureEmbedding(SCHEMA, DIM)
    module(ids, dense).square().sum().backward()
    read = {int(i) for i in ids[:, 11:13].flatten() if i != es.PADDING}
    assert {i for i in range(5) if module.word.weight.grad[i].any()} == read


def test_a_schema_without_fields_gives_one_plain_table():
    assert type(embed_features(es.Schema(("user", "item"), 0, 10), 3, None)) is torch.nn.Embedding
    assert next(n for n, _ in LR(10).named_parameters()) == "linear.weight"


def test_tables_have_modules_of_names_that_modules_may_have():
    tables = tuple(es.IdTable(name, 3) for name in ("type", "a.b", "a b", "items"))
    fields = tuple(es.Field(table.name, table.name, i) for i, table in enumerate(tables))
    module = es.FeatureEmbedding(es.Schema(tuple(f.name for f in fields), 0, None, fields, tables), 2)
    assert [name for name, _ in module.named_children()] == ["type_", "a_b", "a_b_", "items"]
    assert module(torch.zeros(2, 4, dtype=torch.int64)).shape == (2, 4, 2)


MODELS = {
    "lr": lambda: LR(SCHEMA, 2),
    "fm": lambda: FM(SCHEMA, DIM, 2),
    "deepfm": lambda: DeepFM(SCHEMA, SCHEMA.num_vectors, DIM, 2, hidden=(4,)),
    "wide_deep": lambda: WideDeep(SCHEMA, SCHEMA.num_vectors, DIM, 2, hidden=(4,)),
    "dlrm": lambda: DLRM(SCHEMA, SCHEMA.num_vectors, DIM, 2, bottom=(4,), hidden=(4,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_over_shards_makes_the_steps_of_plain_torch(name, make_wires):
    torch.manual_seed(0)
    ids, dense = batch()
    plain = MODELS[name]()
    session = make_wires(2).session()
    remote = es.wrap(copy.deepcopy(plain), session, optimizer=es.SGD(lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for model in (plain, remote):
            model(ids, dense).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step()
    torch.testing.assert_close(remote(ids, dense), plain(ids, dense))
    spaces, inputs = remote.embedding_id_spaces, remote.embedding_inputs(ids, dense)
    assert set(spaces) == set(inputs) == {n for n, m in plain.named_modules() if isinstance(m, torch.nn.Embedding)}
    assert all(int(i.min()) >= 0 for i in inputs.values() if len(i))


def test_a_batch_of_empty_lists_alone_makes_a_step_over_shards(make_wires):
    schema = es.Schema(("tags",), 0, None, (es.Field("tags", "tag", 0, 2, "mean"),), (es.IdTable("tag", None),))
    session = make_wires(2).session()
    model = es.wrap(FM(schema, DIM, device="meta"), session, optimizer=es.SGD(lr=0.1))
    ids = torch.full((3, 2), es.PADDING)
    for _ in range(2):
        logits = model(ids)
        logits.square().mean().backward()
        session.step()
    assert logits.tolist() == [0, 0, 0]
