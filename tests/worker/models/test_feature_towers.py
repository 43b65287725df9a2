"""Two towers over features: the model by hand, what the correction for item frequency learns, and a whole job."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import embershard as es
from embershard.proto.errors import JobError
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.data.batch import Batch, Field, IdTable, Schema
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.models.list_losses import InBatchSoftmax
from embershard.worker.models.retrieval.feature_towers import FeatureTowers
from embershard.worker.trained.reading import remote_tables
from embershard.worker.training.trainer import Trainer

DIM = 4
SCHEMA = Schema(
    ("user", "taken", "item", "genres"),
    2,
    None,
    (
        Field("user", "users", 0),
        Field("taken", "items", 1, 3, "mean"),
        Field("item", "items", 4),
        Field("genres", "genres", 5, 2, "sum"),
    ),
    (IdTable("users", 5), IdTable("items", 9), IdTable("genres", 3)),
    numbers=("age", "price"),
)
IDS = torch.tensor([[0, 1, 2, -1, 3, 0, -1], [4, 8, -1, -1, 5, 1, 2], [2, -1, -1, -1, 3, 0, -1]])
DENSE = torch.tensor([[0.1, 0.5], [0.2, 0.9], [0.7, 0.5]])


def test_a_vector_is_of_the_features_of_its_side_alone():
    torch.manual_seed(1)
    model = FeatureTowers(SCHEMA, DIM, item=("item", "genres", "price"), hidden=(6,), temperature=0.5)
    users, items, genres = (model.embedding.get_submodule(name).weight for name in ("users", "items", "genres"))
    own, others = [], []
    for row, (age, price) in zip(IDS.tolist(), DENSE, strict=True):
        taken = [items[i] for i in row[1:4] if i >= 0]
        pooled = torch.stack(taken).mean(0) if taken else torch.zeros(DIM)
        own.append(model.user_tower(torch.cat([users[row[0]], pooled, age[None]])))
        genre = sum(genres[i] for i in row[5:] if i >= 0)
        others.append(model.item_tower(torch.cat([items[row[4]], genre, price[None]])))
    u, v = normalize(torch.stack(own), dim=1), normalize(torch.stack(others), dim=1)
    torch.testing.assert_close(model(IDS, DENSE), (u * v).sum(1) / 0.5)
    torch.testing.assert_close(model(IDS, DENSE, True), u @ v.T / 0.5)
    no_item, no_user = IDS.clone(), IDS.clone()
    no_item[:, 4:], no_user[:, :4] = -1, -1
    torch.testing.assert_close(model.user_vectors(no_item, DENSE), u)
    torch.testing.assert_close(model.item_vectors(no_user, DENSE), v)
    keys = model.batch_items(IDS)
    assert int(keys.min()) >= 0
    assert (keys[0] == keys[2], keys[0] == keys[1]) == (True, False)
    model(IDS, DENSE, True).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_with_the_correction_for_their_frequency_popular_items_rank_where_they_belong():
    generator = torch.Generator().manual_seed(0)
    popular = 1.0 / torch.arange(1.0, 31.0)
    taste = torch.rand(3, 30, generator=generator).square() + 0.05
    chance = popular * taste / (popular * taste).sum(1, keepdim=True)  # (groups of users, items)
    schema = Schema(("user", "item"), 0, None, (Field("user", "u", 0), Field("item", "i", 1)),
                    (IdTable("u", 3), IdTable("i", 30)))  # fmt: skip

    def trained(*, corrected):
        torch.manual_seed(1)
        model = FeatureTowers(schema, 8, item=("item",), normalize=False, temperature=1.0)
        loss = InBatchSoftmax(model.batch_items)
        if not corrected:
            loss._frequency.update = lambda items: torch.zeros(len(items))
        optimizer, draw = torch.optim.Adam(model.parameters(), lr=0.03), torch.Generator().manual_seed(2)
        for _ in range(200):
            users = torch.randint(3, (128,), generator=draw)
            items = torch.multinomial(chance[users], 1, generator=draw)
            loss(model, Batch(torch.cat([users[:, None], items], 1), None, torch.ones(128))).backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs = torch.cartesian_prod(torch.arange(3), torch.arange(30))
        top = model(pairs).view(3, 30).topk(5).indices
        return float(chance.gather(1, top).sum(1).mean())  # recall@5

    best = float(chance.topk(5).values.sum(1).mean())
    assert trained(corrected=True) > 0.95 * best
    assert trained(corrected=False) < 0.8 * best


JOB = """\
model: {name: feature_towers, item: [item, genre, price], hidden: [8]}
data:
  reader: tabular
  train: plays.csv
  test: later.csv
  label: []
  catalogue: items.csv
features:
  user: {}
  country: {}
  item: {}
  genre: {table: genres}
  price: {type: number, transform: standardise}
embedding: {dim: 4, optimizer: {name: adagrad, lr: 0.1}}
train: {epochs: 3, batch_size: 32}
evaluate: {top_k: 3}
"""
ITEM = {f"i{i}": (f"g{i % 3}", 1.0 + i) for i in range(12)}


@pytest.fixture
def folder(tmp_path):
    """Plays of the first ten items; the last two are in the catalogue alone."""
    rng = np.random.default_rng(0)
    header = "user,country,item,genre,price\n"
    for name, count in (("plays.csv", 200), ("later.csv", 40)):
        lines = []
        for _ in range(count):
            user = int(rng.integers(9))
            item = f"i{3 * int(rng.integers(3)) + user % 3}" if rng.random() < 0.8 else f"i{rng.integers(10)}"
            lines.append(f"u{user},c{user % 3},{item},{ITEM[item][0]},{ITEM[item][1]}\n")
        (tmp_path / name).write_text(header + "".join(lines))
    listed = [f"{item},{genre},{price}\n" for item, (genre, price) in ITEM.items()]
    (tmp_path / "items.csv").write_text("item,genre,price\n" + "".join(listed))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def rows_of(path):
    return [line.split(",") for line in path.read_text().splitlines()[1:]]


@pytest.mark.parametrize("user", [None, "user"])
def test_a_job_ranks_the_catalogue_for_each_row_as_torch_does(make_session, folder, user):
    (folder / "job.yaml").write_text(JOB.replace("top_k: 3", f"top_k: 3, user: {user or 'null'}"))
    job = load_job(folder / "job.yaml")
    data = job.data.fit(folder, 0)
    dataset = data.open(folder, 0)
    assert len(dataset.items[0]) == 12
    trainer = Trainer(job.model_copy(update={"data": data}), dataset, make_session(2), WorkerGroup())
    trainer.run()
    found = trainer._evaluator.evaluate()["test"]

    model, inputs = trainer.model, data.preprocessor()
    rows = rows_of(folder / "later.csv")

    def vectors(method, columns):
        ids, numbers = inputs({name: [row[i] for row in columns] for i, name in enumerate(job.features)})
        return getattr(model, method)(torch.from_numpy(ids), torch.from_numpy(numbers))

    users = vectors("user_vectors", [[*row[:4], float(row[4])] for row in rows])
    items = vectors("item_vectors", [["", "", item, *ITEM[item]] for item in ITEM])
    scores = users @ items.T
    own = scores[range(40), [list(ITEM).index(row[2]) for row in rows]].clone()
    if user is not None:
        taken = {(row[0], row[2]) for row in rows_of(folder / "plays.csv")}
        for row, place in ((row, place) for row in range(40) for place in range(12)):
            if (rows[row][0], list(ITEM)[place]) in taken:
                scores[row, place] = -torch.inf
        own[[(row[0], row[2]) in taken for row in rows]] = -torch.inf
    ranks = [int((row > score).sum()) if score > -torch.inf else 99 for row, score in zip(scores, own, strict=True)]
    assert found["users"] == 40
    assert found["recall@3"] == pytest.approx(np.mean([rank < 3 for rank in ranks]))
    assert found["ndcg@3"] == pytest.approx(np.mean([(rank < 3) / np.log2(rank + 2) for rank in ranks]))
    assert user is not None or found["recall@3"] > 0.5  # three of twelve at random
    assert found["recall@3"] > 0
    assert {*remote_tables(model)} == {"embedding.user", "embedding.country", "embedding.item", "embedding.genres"}


def test_what_a_user_took_before_is_left_out_of_the_users_ranking(tmp_path, caplog):
    parts = {"train": ["a,x", "a,y", "b,x", ",x"], "valid": ["a,z", "b,z"], "test": ["b,y", "a,v", ",y", "c,x", "a,x"]}
    for part, rows in parts.items():
        (tmp_path / f"{part}.csv").write_text("\n".join(["user,item", *rows, ""]))
    (tmp_path / "job.yaml").write_text(
        "model: {name: feature_towers, item: item}\nevaluate: {user: user}\nfeatures: {user: {}, item: {}}\n"
        "data: {reader: tabular, label: [], train: train.csv, valid: valid.csv, test: test.csv}\n"
        "embedding: {dim: 4, optimizer: {name: sgd, lr: 0.1}}\ntrain: {epochs: 1, batch_size: 4}\n"
    )
    dataset = load_job(tmp_path / "job.yaml").data.open(tmp_path, 0)
    ids, _ = dataset.items
    names = {es.feature_id("item", name): name for name in "vxyz"}
    items = [names[one] for one in ids[:, 1].tolist()]
    (valid,), (test,) = (dataset.users(split, 0, 1, 9) for split in ("valid", "test"))

    def seen(users):
        found = [""] * len(users.ids)
        for row, place in zip(users.seen_user, users.seen_item, strict=True):
            found[row] += items[place]
        return ["".join(sorted(own)) for own in found]

    assert seen(valid) == ["xy", "x"]
    assert seen(test) == ["xz", "xyz", "", "", "xyz"]  # of the row without a user nothing
    assert [items[place] for place in test.relevant_item] == ["y", "v", "y", "x", "x"]
    assert "of test, 1 of 5 items" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        (
            "top_k: 3",
            "user: genre",
            "evaluate.user: 'genre' is no category of the user, whose features are user, country",
        ),
        ("user: {}", "user: {min_count: 2}", "evaluate.user: users that share a row of table 'user' would be one user"),
        ("label: []", "label: price", "data.label: has no meaning for feature_towers"),
        ("label: []", "label: []\n  weight: price", "data.weight: has no meaning for feature_towers"),
        ("item: [item, genre, price]", "item: [item, what]", "model.item: names 'what', which is no feature"),
        ("item: [item, genre, price]", "item: [price]", "model.item: leaves no feature with an embedding to the item"),
        (
            "  country: {}",
            "  country: {column: item}",
            "model.item: names 'item', and not 'country', which reads column",
        ),
        ("embedding:", "loss: bpr\nembedding:", "loss: feature_towers is trained by sampled_softmax alone"),
        (
            "{name: feature_towers, item: [item, genre, price], hidden: [8]}",
            "{name: lr}",
            "data.catalogue: has a meaning",
        ),
        ("catalogue: items.csv", "catalogue: none.csv", "data.catalogue: no file"),
    ],
)
def test_what_contradicts_the_towers_is_refused(folder, old, new, want):
    job = JOB.replace("top_k: 3", "top_k: 3, user: user") if "min_count" in new else JOB
    (folder / "job.yaml").write_text(job.replace(old, new, 1))
    with pytest.raises(JobFileError) as found:
        load_job(folder / "job.yaml")
    assert want in str(found.value)


def test_a_catalogue_without_a_column_of_the_item_is_refused_before_training(folder):
    (folder / "items.csv").write_text("item,genre\ni0,g0\n")
    with pytest.raises(JobError, match=r"items\.csv.*price"):
        load_job(folder / "job.yaml").data.look(folder)
