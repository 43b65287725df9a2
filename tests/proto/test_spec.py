import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.spec import (
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    Constant,
    Custom,
    Initializer,
    Normal,
    Optimizer,
    TableSpec,
    Uniform,
    name_key,
)


@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_an_optimizer_survives_the_wire(cls):
    optimizer = cls(lr=0.125)
    assert Optimizer.of(optimizer.name, optimizer.params()) == optimizer
    assert next(iter(optimizer.params())) == "lr"


def test_a_custom_optimizer_keeps_the_order_of_its_settings():
    optimizer = Custom(function="my.module:prox", lr=0.1, settings={"zeta": 1.0, "alpha": 2.0})
    assert list(optimizer.params()) == ["lr", "zeta", "alpha", "clip_value", "clip_norm"]
    assert Optimizer.of(optimizer.name, optimizer.params()) == optimizer


@pytest.mark.parametrize("initializer", [Constant(value=0.5), Uniform(low=-1.0, high=1.0), Normal(std=0.01)])
def test_an_initializer_survives_the_wire(initializer):
    assert Initializer.of(initializer.kind, initializer.params()) == initializer


def spec(**changes):
    return TableSpec(**{"name": "t", "dim": 8, "optimizer": Adagrad(lr=0.1), **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(lr=-1.0), "lr must be >= 0, got -1.0"),
        (lambda: SGD(lr=float("nan")), "lr must be"),
        (lambda: SGD(lr=0.1, nesterov=True), "nesterov needs a momentum"),
        (lambda: Adam(lr=0.1, beta1=1.0), "beta1 must be below 1"),
        (lambda: Uniform(low=1.0, high=0.0), "low must be at most high"),
        (lambda: Normal(std=-1.0), "std must be >= 0"),
        (lambda: Custom(function="os.system", lr=0.1), "module:function"),
        (lambda: spec(name="bad name"), "name must be letters"),
        (lambda: spec(dim=0), "dim must be 1..65536, got 0"),
        (lambda: spec(seed=-1), "seed must be"),
        (lambda: Optimizer.of("rmsprop", {"lr": 1.0, "alpha": 1.5}), "RMSprop: alpha must be at most 1, got 1.5"),
        (lambda: Optimizer.of("sgdd", {"lr": 1.0}), "unknown optimizer 'sgdd'"),
        (lambda: Optimizer.of("sgd", {"lr": 1.0, "beta": 1.0}), "unknown setting beta"),
        (lambda: Optimizer.of("sgd", {}), "lr"),
        (lambda: Initializer.of("xavier", {}), "unknown initializer 'xavier'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_difference_names_every_setting_that_differs_but_not_how_rows_travel():
    theirs = spec(dim=16, optimizer=Adagrad(lr=0.2), seed=1)
    assert spec().difference(theirs) == "dim: 8, not 16, seed: 0, not 1, optimizer.lr: 0.1, not 0.2"
    packed = spec(push_codec=CodecName.parse("topk:0.01"), pull_codec=CodecName.parse("fp16s"))
    assert spec().difference(packed) == ""


def test_tables_of_one_id_space_share_its_key_but_not_their_first_values():
    a, b = spec(name="a", id_space="users"), spec(name="b", id_space="users")
    assert a.space_key == b.space_key == name_key("users") != name_key("a")
    assert a.row_seed != b.row_seed
