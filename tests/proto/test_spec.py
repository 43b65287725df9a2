import copy
import pickle

import numpy as np
import pytest

from embershard.proto import spec
from embershard.proto.codec.name import CodecName


@pytest.mark.parametrize("cls", spec.OPTIMIZERS.values())
def test_an_optimizer_survives_the_wire(cls):
    optimizer = cls(lr=0.125)
    assert spec.Optimizer.of(optimizer.name, optimizer.params()) == optimizer
    assert next(iter(optimizer.params())) == "lr"


def test_a_custom_optimizer_keeps_the_order_of_its_settings():
    optimizer = spec.Custom(function="my.module:prox", lr=0.1, settings={"zeta": 1.0, "alpha": 2.0})
    assert list(optimizer.params()) == ["lr", "zeta", "alpha", "clip_value", "clip_norm"]
    assert spec.Optimizer.of(optimizer.name, optimizer.params()) == optimizer


@pytest.mark.parametrize(
    "initializer", [spec.Constant(value=0.5), spec.Uniform(low=-1.0, high=1.0), spec.Normal(std=0.01)]
)
def test_an_initializer_survives_the_wire(initializer):
    assert spec.Initializer.of(initializer.kind, initializer.params()) == initializer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"betas": (0.9, 0.999)}, r"Adam: no setting 'betas' .known: lr, beta1, beta2, .*; give beta1 and beta2"),
        ({"maximize": True}, "'maximize' .*; minimise the negative loss"),
        ({"foreach": False}, "'foreach' .*; it only says how torch computes"),
        ({"amsgrad": True}, "'amsgrad' .*; leave it out"),
    ],
)
def test_a_setting_of_torch_alone_is_refused_with_what_to_give_instead(settings, message):
    with pytest.raises(TypeError, match=message):
        spec.Adam(lr=0.1, **settings)


def test_settings_have_names_and_no_parameters_before_them():
    with pytest.raises(TypeError, match=r"SGD: takes settings by their names alone; .* as SGD.lr=0.1."):
        spec.SGD([np.zeros(1)], lr=0.1)


@pytest.mark.parametrize("made", [spec.Adam, lambda **its: spec.Custom(function="a:b", **its)])
def test_a_rate_in_an_array_is_taken_as_a_number_which_does_not_change_with_it(made):
    rate = np.full(1, 0.5, np.float32)[0:1].reshape(())
    optimizer = made(lr=rate)
    rate.fill(9.0)
    assert type(optimizer.lr) is float
    assert optimizer == made(lr=0.5) == copy.deepcopy(pickle.loads(pickle.dumps(optimizer)))


def table(**changes):
    return spec.TableSpec(**{"name": "t", "dim": 8, "optimizer": spec.Adagrad(lr=0.1), **changes})


def test_whole_numbers_of_numpy_are_those_of_python():
    made = table(dim=np.int64(4), seed=np.uint8(7))
    assert made == table(dim=4, seed=7)
    assert (type(made.dim), type(made.seed)) == (int, int)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spec.SGD(lr=-1.0), "lr must be >= 0, got -1.0"),
        (lambda: spec.SGD(lr=float("nan")), "lr must be"),
        (lambda: spec.SGD(lr=1e39), "lr must be a finite float32"),
        (lambda: spec.SGD(lr=0.1, nesterov=True), "nesterov needs a momentum"),
        (lambda: spec.Adam(lr=0.1, beta1=1.0), "beta1 must be below 1"),
        (lambda: spec.Uniform(low=1.0, high=0.0), "low must be at most high"),
        (lambda: spec.Normal(std=-1.0), "std must be a finite float32 >= 0"),
        (lambda: spec.Constant(value=1e39), "value must be a finite float32"),
        (lambda: spec.Uniform(low=-1e39, high=1.0), "low must be a finite float32"),
        (lambda: spec.Uniform(low=1.0, high=float("inf")), "high must be a finite float32"),
        (lambda: spec.Normal(mean=-1e39), "mean must be a finite float32"),
        (lambda: spec.Custom(function="os.system", lr=0.1), "module:function"),
        (lambda: table(name="bad name"), "name must be 1 to 200 letters"),
        (lambda: table(dim=0), "dim must be a whole number in 1..65536, got 0"),
        (lambda: table(dim=8 / 2), "dim must be a whole number in 1..65536, got 4.0"),
        (lambda: table(seed=1.5), "seed must be"),
        (lambda: table(seed=-1), "seed must be"),
        (lambda: spec.Optimizer.of("rmsprop", {"lr": 1.0, "alpha": 1.5}), "RMSprop: alpha must be at most 1, got 1.5"),
        (lambda: spec.Optimizer.of("sgdd", {"lr": 1.0}), "unknown optimizer 'sgdd'"),
        (lambda: spec.Optimizer.of("sgd", {"lr": 1.0, "beta": 1.0}), "unknown setting beta"),
        (lambda: spec.Optimizer.of("sgd", {}), r"SGD: setting lr is missing \(known: lr, momentum, "),
        (lambda: spec.Initializer.of("xavier", {}), "unknown initializer 'xavier'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_difference_names_every_setting_that_differs_but_not_how_rows_travel():
    theirs = table(dim=16, optimizer=spec.Adagrad(lr=0.2), seed=1)
    assert table().difference(theirs) == "dim: 8, not 16, seed: 0, not 1, optimizer.lr: 0.1, not 0.2"
    packed = table(push_codec=CodecName.parse("topk:0.01"), pull_codec=CodecName.parse("fp16s"))
    assert table().difference(packed) == ""


def test_tables_of_one_id_space_share_its_key_but_not_their_first_values():
    a, b = table(name="a", id_space="users"), table(name="b", id_space="users")
    assert a.space_key == b.space_key == spec.name_key("users") != spec.name_key("a")
    assert a.row_seed != b.row_seed
