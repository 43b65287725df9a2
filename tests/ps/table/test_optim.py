"""Row optimizers against torch.optim where torch has them, and against the paper's formula where not."""

import sys

import numpy as np
import pytest
import torch

from embershard.proto import spec
from embershard.proto.errors import BadModule, BadOptimizer, UnknownOptimizer
from embershard.proto.optim.formulas import BUILTIN
from embershard.ps.table.optimizers import OptimizerRegistry, row_optimizer
from embershard.ps.table.reference import ReferenceTable
from embershard.ps.table.table import Table

REGISTRY = OptimizerRegistry()
NINE = np.array([9])
# (name here and in torch, settings of ours; torch gets the same)
IN_TORCH = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.03}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.03}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator": 0.2, "eps": 1e-3, "weight_decay": 0.03}),
    ("Adam", {"lr": 0.1}),
    ("Adam", {"lr": 0.1, "beta1": 0.7, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.03}),
    ("Adam", {"lr": 0.1, "beta1": 0.0, "beta2": 0.0}),
    ("Adam", {"lr": 0.1, "beta1": 0.5, "beta2": 0.9}),
    ("Adam", {"lr": 0.1, "beta1": 0.3, "beta2": 0.9, "eps": 0.0}),
    ("AdamW", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "beta1": 0.0, "beta2": 0.9, "weight_decay": 0.3}),
    ("AdamW", {"lr": 0.1, "beta1": 0.7, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "alpha": 0.9, "eps": 1e-3, "momentum": 0.5, "weight_decay": 0.03}),
]


def make_table(optimizer, dim, registry=REGISTRY):
    return Table(spec.TableSpec(name="t", dim=dim, optimizer=optimizer), registry.find(optimizer))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def in_torch(name, settings, *parameters):
    theirs = dict(settings)
    if "beta1" in theirs:
        theirs["betas"] = theirs.pop("beta1"), theirs.pop("beta2")
    if "initial_accumulator" in theirs:
        theirs["initial_accumulator_value"] = theirs.pop("initial_accumulator")
    return getattr(torch.optim, name)(parameters, **theirs)


def close(name, ours, theirs):
    if name == "SGD":
        assert np.array_equal(ours, theirs)
    else:  # torch's vector sqrt is off by a bit now and then, ours is not
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "settings"), IN_TORCH, ids=[f"{name}{i}" for i, (name, _) in enumerate(IN_TORCH)])
class TestAgainstTorch:
    @pytest.mark.parametrize("dim", [1, 5, 16, 64])
    def test_a_row_is_a_dense_parameter_that_counts_its_own_pushes_alone(self, name, settings, dim):
        table, rng, all_ids = make_table(getattr(spec, name)(**settings), dim), np.random.default_rng(3), np.arange(10)
        weights = [torch.nn.Parameter(row) for row in torch.from_numpy(table.gather(all_ids))]
        theirs = [in_torch(name, settings, weight) for weight in weights]
        for step in range(10):
            ids = np.flatnonzero(rng.random(10) < 0.4)
            gradients = normal(len(ids), dim, seed=step)
            table.apply(ids, gradients)
            for id_, gradient in zip(ids, gradients, strict=True):
                weights[id_].grad = torch.from_numpy(gradient)
                theirs[id_].step()
            close(name, table.gather(all_ids), torch.stack([w.detach() for w in weights]).numpy())


def test_adam_without_momentum_forgets_a_large_gradient_at_the_next_one():
    settings = {"lr": 0.1, "beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.0}
    for name in ("Adam", "AdamW"):
        table, weight = make_table(getattr(spec, name)(**settings), 1), torch.nn.Parameter(torch.zeros(1))
        theirs = in_torch(name, settings, weight)
        table.load(NINE, np.zeros((1, 1), np.float32))
        for gradient in (1.0, 1e-9, -2e-9):  # each step is as long as lr
            weight.grad = torch.tensor([gradient])
            theirs.step()
            table.apply(NINE, np.array([[gradient]], np.float32))
        assert weight.item() == pytest.approx(-0.1)
        assert table.gather(NINE).item() == pytest.approx(-0.1)


def push_all(optimizer, gradients, ages=None):
    """First and last weights of one row after pushing (steps, dim) gradients, each of this age."""
    table = make_table(optimizer, gradients.shape[1])
    first = table.gather(NINE)[0]
    for gradient, age in zip(gradients, ages or [1] * len(gradients), strict=True):
        table.apply(NINE, gradient[None], 1.0, np.array([age], np.float32) if ages else None)
    return first.astype(np.float64), table.gather(NINE)[0]


class TestAgainstThePaper:
    @pytest.mark.parametrize("decay", [0.0, 0.05])
    def test_rowwise_adagrad_divides_by_the_root_of_the_summed_mean_square(self, decay):
        gradients = normal(9, 7)
        optimizer = spec.RowWiseAdagrad(lr=0.1, eps=1e-3, initial_accumulator=0.5, weight_decay=decay)
        weights, last = push_all(optimizer, gradients)
        total = 0.5
        for gradient in gradients.astype(np.float64):
            g = gradient + decay * weights
            total += (g**2).mean()
            weights -= 0.1 * g / (np.sqrt(total) + 1e-3)
        np.testing.assert_allclose(last, weights, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(("l1", "l2", "decay"), [(0.0, 0.0, 0.0), (0.6, 0.0, 0.0), (0.4, 0.3, 0.05)])
    def test_ftrl_is_the_closed_form_of_its_z_and_n(self, l1, l2, decay):
        gradients, alpha, beta = normal(9, 7), 0.2, 0.7
        weights, last = push_all(spec.FTRL(lr=alpha, beta=beta, l1=l1, l2=l2, weight_decay=decay), gradients)
        z, n = np.zeros(7), np.zeros(7)
        for gradient in gradients.astype(np.float64):
            g = gradient + decay * weights
            sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / alpha
            z += g - sigma * weights
            n += g**2
            weights = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2)
            weights[np.abs(z) <= l1] = 0
        assert l1 < 0.5 or (weights == 0).any()
        np.testing.assert_allclose(last, weights, rtol=1e-4, atol=1e-6)

    def test_ftrl_without_beta_is_finite_where_the_square_of_a_gradient_is_zero(self):
        first, last = push_all(spec.FTRL(lr=0.1, beta=0.0), np.full((1, 3), 1e-24, np.float32))
        assert np.array_equal(last, first)
        _, last = push_all(spec.FTRL(lr=0.1, beta=0.0), np.array([[1e-24], [0.5]], np.float32))
        np.testing.assert_allclose(last, first[:1] - 0.1, rtol=1e-5)  # as of the first gradient: lr along its sign

    def test_ftrl_waits_while_the_learning_rate_is_zero(self):
        table = make_table(spec.FTRL(lr=0.1), 3)
        before = table.gather(NINE)
        table.apply(NINE, np.ones((1, 3), np.float32), lr_scale=0.0)
        assert np.array_equal(table.gather(NINE), before)


class TestAges:
    """A row that stands for the n gradients which a worker kept back, of which it holds the sum c."""

    SUMS, AGES = normal(4, 6), (1, 5, 20, 2)

    @property
    def steps(self):
        return zip(self.SUMS.astype(np.float64), self.AGES, strict=True)

    def push(self, optimizer):
        return push_all(optimizer, self.SUMS, self.AGES)

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_adam_moves_its_moments_by_n_pushes_and_its_weights_by_n_steps(self, decoupled):
        lr, b1, b2, eps, decay = 0.1, 0.9, 0.99, 1e-3, 0.05
        made = spec.AdamW if decoupled else spec.Adam
        weights, last = self.push(made(lr=lr, beta1=b1, beta2=b2, eps=eps, weight_decay=decay))
        m, v, step = np.zeros(6), np.zeros(6), 0
        for c, n in self.steps:
            if decoupled:
                weights *= (1 - lr * decay) ** n
            else:
                c = c + n * decay * weights
            step += n
            m = b1**n * m + (1 - b1**n) * c / n
            v = b2**n * v + (1 - b2**n) * c**2 / n
            weights -= lr * n * m / (1 - b1**step) / (np.sqrt(v / (1 - b2**step)) + eps)
        np.testing.assert_allclose(last, weights, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("made", [spec.RMSprop, spec.Adagrad, spec.RowWiseAdagrad])
    def test_rmsprop_moves_its_mean_square_by_n_pushes_and_adagrad_grows_by_the_square_over_the_root_of_n(self, made):
        own = {"alpha": 0.9} if made is spec.RMSprop else {"initial_accumulator": 0.5}
        weights, last = self.push(made(lr=0.1, eps=1e-3, **own))
        v = np.full(6, own.get("initial_accumulator", 0.0))
        for c, n in self.steps:
            square = (c**2).mean() if made is spec.RowWiseAdagrad else c**2
            v = 0.9**n * v + (1 - 0.9**n) * square / n if made is spec.RMSprop else v + square / n**0.5
            weights -= 0.1 * c / (np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(last, weights, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "rmsprop", "ftrl"])
    def test_weight_decay_counts_n_times(self, kind):
        decaying, other = (
            make_table(spec.Optimizer.of(kind, {"lr": 0.1, **own}), 4) for own in ({"weight_decay": 0.02}, {})
        )
        first, c, n = decaying.gather(NINE), np.ones((1, 4), np.float32), np.float32(7)
        decaying.apply(NINE, c, 1.0, np.array([n]))
        other.apply(NINE, c + n * np.float32(0.02) * first, 1.0, np.array([n]))
        np.testing.assert_allclose(decaying.gather(NINE), other.gather(NINE), rtol=1e-5, atol=1e-7)


def test_every_spec_has_its_function_which_reads_its_settings_in_the_spec_s_order():
    assert BUILTIN.keys() == spec.OPTIMIZERS.keys()
    for kind, function in BUILTIN.items():
        optimizer = spec.Optimizer.of(kind, {"lr": 0.5})
        assert list(function.params(optimizer).items()) == list(optimizer.params().items())


@pytest.mark.parametrize("kind", BUILTIN)
class TestEveryOptimizer:
    @pytest.mark.parametrize("dim", [1, 3, 16, 17])
    @pytest.mark.parametrize("aged", [False, True])
    def test_the_compiled_function_says_the_same_as_plain_python(self, kind, dim, aged):
        optimizer = spec.Optimizer.of(kind, {"lr": 0.1, "weight_decay": 0.02, "clip_value": 1.5, "clip_norm": 3.0})
        fast, rng = make_table(optimizer, dim), np.random.default_rng(1)
        plain = ReferenceTable(fast.spec, REGISTRY.find(optimizer))
        for gradients in 2 * normal(5, 25, dim):
            ids, ages = rng.integers(-10, 10, 25), rng.integers(1, 40, 25).astype(np.float32) if aged else None
            gradients[rng.random(25) < 0.05, 0] = np.nan
            assert fast.apply(ids, gradients, 0.5, ages) == plain.apply(ids, gradients, 0.5, ages)
        # plain Python's fma rounds twice, which shows in the last bit, rarely
        everything = np.arange(-15, 15)
        np.testing.assert_allclose(fast.gather(everything), plain.gather(everything), rtol=2e-6, atol=1e-7)
        assert {id_ for block in fast.scan() for id_ in block[0]} == {id_ for block in plain.scan() for id_ in block[0]}

    def test_rows_of_age_one_have_the_bits_of_rows_without_an_age(self, kind):
        optimizer = spec.Optimizer.of(kind, {"lr": 0.1, "weight_decay": 0.02, "clip_norm": 3.0})
        tables, rng = [make_table(optimizer, 9) for _ in range(2)], np.random.default_rng(1)
        for gradients in normal(6, 25, 9):
            ids = rng.integers(0, 20, 25)
            tables[0].apply(ids, gradients, 0.5)
            tables[1].apply(ids, gradients, 0.5, np.ones(25, np.float32))
        records = [next(table.scan()) for table in tables]
        assert [part.tobytes() for part in records[0]] == [part.tobytes() for part in records[1]]

    def test_an_age_holds_for_its_own_row_alone(self, kind):
        optimizer = spec.Optimizer.of(kind, {"lr": 0.1, "weight_decay": 0.02})
        together, apart, ids = make_table(optimizer, 3), make_table(optimizer, 3), np.arange(4)
        gradients, ages = normal(4, 3), np.array([1, 7, 1, 2], np.float32)
        for own in (ages, None):
            together.apply(ids, gradients, 1.0, own)
            for i in range(4):
                at = slice(i, i + 1)
                apart.apply(ids[at], gradients[at], 1.0, None if own is None else own[at])
        assert together.gather(ids).tobytes() == apart.gather(ids).tobytes()


def test_sgd_without_momentum_keeps_no_state():
    optimizers = [spec.SGD(lr=0.1), spec.SGD(lr=0.1, momentum=0.9), spec.RowWiseAdagrad(lr=0.1)]
    assert [len(BUILTIN[one.name].initial(16, one.params())) for one in optimizers] == [0, 16, 1]


MODULE = """
import numpy as np
from embershard.ps.table.optimizers import row_optimizer

@row_optimizer(state_per_dim=1, settings={"eps": 1e-10})
def my_adagrad(row, state, grad, hyper):
    lr, eps = hyper[0], hyper[1]
    for j in range(row.size):
        state[j] += grad[j] * grad[j]
        row[j] -= lr * grad[j] / (np.sqrt(state[j]) + eps)
"""


class TestUserDefined:
    @pytest.fixture
    def load(self, tmp_path, monkeypatch):
        """A registry that has imported a module of this name and text."""
        monkeypatch.syspath_prepend(str(tmp_path))

        def write(name, text=MODULE):
            (tmp_path / f"{name}.py").write_text(text)
            return OptimizerRegistry([name])

        return write

    def test_a_function_of_five_lines_is_an_optimizer_and_kept_by_its_own_file(self, load, tmp_path):
        registry = load("mine_works")
        custom = spec.Custom(function="mine_works:my_adagrad", lr=0.1, settings={"eps": 1e-10})
        ours, builtin = make_table(custom, 5, registry), make_table(spec.Adagrad(lr=0.1), 5)
        for table in (ours, builtin):
            table.apply(np.arange(30) % 10, normal(30, 5))
        np.testing.assert_allclose(ours.gather(np.arange(10)), builtin.gather(np.arange(10)), rtol=1e-5, atol=1e-6)
        assert list((tmp_path / "__pycache__").glob("mine_works.my_adagrad*.nbc"))
        with pytest.raises(BadOptimizer, match=r"no setting epsilon .it has: lr, eps"):
            registry.find(spec.Custom(function="mine_works:my_adagrad", lr=0.1, settings={"epsilon": 1}))

    def test_it_has_the_settings_that_are_left_out_a_state_as_they_say_and_the_age_of_the_row_last(self):
        @row_optimizer(
            settings={"copies": 2.0, "start": 0.5, "kept": 4.0},
            state_per_dim=lambda settings: int(settings["copies"]),
            state_per_row=1,
            initial_state="start",
        )
        def probe(row, state, grad, hyper):
            row[0], row[1], row[2], row[3] = state.size, hyper.size, hyper[3], hyper[hyper.size - 1]

        custom = spec.Custom(function=probe.name, lr=1.0, settings={"copies": 3, "start": 0.25}, clip_norm=9)
        table, ids = Table(spec.TableSpec(name="t", dim=4, optimizer=custom), probe), np.arange(3)
        assert list(probe.params(custom).values()) == [1, 3, 0.25, 4, 0, 9]
        table.apply(ids[:2], np.ones((2, 4), np.float32), 1.0, np.array([3, 1], np.float32))
        table.apply(ids[2:], np.ones((1, 4), np.float32))
        ((_, weights, state),) = table.scan()
        assert weights.tolist() == [[13, 7, 4, age] for age in (3, 1, 1)]
        assert (state == 0.25).all()

    @pytest.mark.parametrize(
        ("name", "text", "reason"),
        [
            ("mine_broken", "import nothing_of_this_name", "cannot be imported: ModuleNotFoundError"),
            ("mine_syntax", "def f(:", "cannot be imported: SyntaxError"),
            ("mine_exit", "import sys; sys.exit(0)", "cannot be imported: SystemExit: 0"),
            ("mine_empty", "x = 1", "no function decorated with @row_optimizer"),
            ("mine_untyped", MODULE.replace("np.sqrt", "np.no_such_root"), "mine_untyped.py:5 does not compile"),
            ("mine_returns", MODULE + "    return row", "does not compile"),
            ("mine_three", MODULE.replace(", hyper)", ")"), "must take .row, state, grad, hyper."),
            ("mine_lr", MODULE.replace('"eps"', '"lr"'), "every optimizer has 'lr'"),
        ],
    )
    def test_a_bad_module_is_refused_at_the_start(self, load, name, text, reason):
        with pytest.raises((BadModule, BadOptimizer), match=reason):
            load(name, text)

    def test_a_module_that_is_not_there_or_not_imported_is_named(self):
        with pytest.raises(BadModule, match=r"^module 'no_such_module_at_all' cannot be imported: Modul"):
            OptimizerRegistry(["no_such_module_at_all"])
        with pytest.raises(UnknownOptimizer, match=r"'other:mine'.*known: sgd, .*--import MODULE"):
            REGISTRY.find(spec.Custom(function="other:mine", lr=0.1))


CONSTANTS = """
import json
from pathlib import Path
import numba
import numpy as np
from embershard.ps.table.optimizers import row_optimizer
import constants_beside
import constants_in.module
FACTOR, LESS, constants_in.module.MORE, last = json.loads(Path(__file__).with_suffix(".json").read_text())
ARRAYS = (np.arange(2000.0), np.append(np.zeros(1500), last))
@numba.njit
def scaled(x):
    return FACTOR * x
@row_optimizer()
def scaling(row, state, grad, hyper):
    for j in range(row.size):
        row[j] -= scaled(grad[j]) + constants_beside.OFFSET + constants_in.module.MORE + sum([LESS for _ in range(1)])
        row[j] -= ARRAYS[1][1500]
"""


def test_what_was_compiled_with_other_constants_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_scales.py").write_text(CONSTANTS)
    (tmp_path / "constants_in").mkdir()
    (tmp_path / "constants_in" / "module.py").touch()
    for step, offset in enumerate((0.0, 0.0, 0.0, 0.0, 0.0, 0.25)):  # as of a new process each, one constant changed
        given = [number * (step >= first) for first, number in enumerate((1.0, 2.0, -0.5, 0.25, 8.0))]
        (tmp_path / "mine_scales.json").write_text(str([given[0] + given[1], *given[2:]]))
        (tmp_path / "constants_beside.py").write_text(f"OFFSET = {offset}\n")
        custom = spec.Custom(function="mine_scales:scaling", lr=1.0)
        function = OptimizerRegistry(["mine_scales"]).find(custom).compiled
        row, none = np.zeros(2, np.float32), np.empty(0, np.float32)
        function(row, none, np.ones(2, np.float32), np.ones(3))
        assert row.tolist() == [-sum(given) - offset] * 2
        for name in ("mine_scales", "constants_beside", "constants_in.module", "constants_in"):
            del sys.modules[name]
