"""Row optimizers against torch.optim where torch has them, and against the paper's formula where not."""

from __future__ import annotations

from collections.abc import Callable

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

Torch = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
IN_TORCH: list[tuple[spec.Optimizer, Torch]] = [
    (spec.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (spec.SGD(lr=0.1, weight_decay=0.03), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.03)),
    (spec.SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (
        spec.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.03),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.03),
    ),
    (spec.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    (
        spec.Adagrad(lr=0.1, initial_accumulator=0.2, eps=1e-3, weight_decay=0.03),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2, eps=1e-3, weight_decay=0.03),
    ),
    (spec.Adam(lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
    (
        spec.Adam(lr=0.1, beta1=0.7, beta2=0.9, eps=1e-3, weight_decay=0.03),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.03),
    ),
    (spec.AdamW(lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1)),
    (
        spec.AdamW(lr=0.1, beta1=0.7, beta2=0.9, eps=1e-3, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.3),
    ),
    (spec.RMSprop(lr=0.01), lambda p: torch.optim.RMSprop(p, lr=0.01)),
    (
        spec.RMSprop(lr=0.01, alpha=0.9, eps=1e-3, momentum=0.5, weight_decay=0.03),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-3, momentum=0.5, weight_decay=0.03),
    ),
]
NAMES = [f"{optimizer.name}{number}" for number, (optimizer, _) in enumerate(IN_TORCH)]


def make_table(optimizer: spec.Optimizer, dim: int, registry: OptimizerRegistry = REGISTRY) -> Table:
    return Table(spec.TableSpec(name="t", dim=dim, optimizer=optimizer), registry.find(optimizer))


def close(optimizer: spec.Optimizer, ours: np.ndarray, theirs: np.ndarray) -> None:
    if isinstance(optimizer, spec.SGD):
        assert np.array_equal(ours, theirs)
    else:  # torch's vector sqrt is off by a bit now and then, ours is not
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("optimizer", "make_torch"), IN_TORCH, ids=NAMES)
class TestAgainstTorch:
    @pytest.mark.parametrize("dim", [1, 5, 16, 64])
    def test_rows_pushed_at_every_step_equal_a_dense_parameter(self, optimizer, make_torch, dim):
        table, ids, rng = make_table(optimizer, dim), np.arange(40), np.random.default_rng(dim)
        weight = torch.nn.Parameter(torch.from_numpy(table.gather(ids)))
        theirs = make_torch([weight])
        for _ in range(12):
            gradients = rng.standard_normal((len(ids), dim)).astype(np.float32)
            table.apply(ids, gradients)
            weight.grad = torch.from_numpy(gradients)
            theirs.step()
            close(optimizer, table.gather(ids), weight.detach().numpy())

    def test_a_row_counts_its_own_pushes_alone(self, optimizer, make_torch):
        table, rng = make_table(optimizer, 8), np.random.default_rng(3)
        weights = [torch.nn.Parameter(row) for row in torch.from_numpy(table.gather(np.arange(10)))]
        theirs = [make_torch([weight]) for weight in weights]
        for _ in range(15):
            ids = np.flatnonzero(rng.random(10) < 0.4)
            gradients = rng.standard_normal((len(ids), 8)).astype(np.float32)
            table.apply(ids, gradients)
            for id_, gradient in zip(ids, gradients, strict=True):
                weights[id_].grad = torch.from_numpy(gradient)
                theirs[id_].step()
        close(optimizer, table.gather(np.arange(10)), torch.stack([w.detach() for w in weights]).numpy())


def push_all(optimizer: spec.Optimizer, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last weights of one row after pushing (steps, dim) gradients."""
    table = make_table(optimizer, gradients.shape[1])
    first = table.gather(np.array([9]))[0]
    for gradient in gradients:
        table.apply(np.array([9]), gradient[None])
    return first.astype(np.float64), table.gather(np.array([9]))[0]


class TestAgainstThePaper:
    @pytest.mark.parametrize("decay", [0.0, 0.05])
    def test_rowwise_adagrad_divides_by_the_root_of_the_summed_mean_square(self, decay):
        gradients = np.random.default_rng(0).standard_normal((9, 7)).astype(np.float32)
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
        gradients = np.random.default_rng(0).standard_normal((9, 7)).astype(np.float32)
        alpha, beta = 0.2, 0.7
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

    def test_ftrl_waits_while_the_learning_rate_is_zero(self):
        table = make_table(spec.FTRL(lr=0.1), 3)
        before = table.gather(np.arange(2))
        table.apply(np.arange(2), np.ones((2, 3), np.float32), lr_scale=0.0)
        assert np.array_equal(table.gather(np.arange(2)), before)


class TestAges:
    """A row that stands for the n gradients which a worker kept back, of which it holds the sum c."""

    AGES = (1, 5, 20, 2)

    def push(self, optimizer: spec.Optimizer, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        table = make_table(optimizer, sums.shape[1])
        first = table.gather(np.array([9]))[0]
        for c, n in zip(sums, self.AGES, strict=True):
            table.apply(np.array([9]), c[None], 1.0, np.array([n], np.float32))
        return first.astype(np.float64), table.gather(np.array([9]))[0]

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_adam_moves_its_moments_by_n_pushes_and_its_weights_by_n_steps(self, decoupled):
        lr, b1, b2, eps, decay = 0.1, 0.9, 0.99, 1e-3, 0.05
        made = spec.AdamW if decoupled else spec.Adam
        sums = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
        weights, last = self.push(made(lr=lr, beta1=b1, beta2=b2, eps=eps, weight_decay=decay), sums)
        m, v, step = np.zeros(6), np.zeros(6), 0
        for c, n in zip(sums.astype(np.float64), self.AGES, strict=True):
            if decoupled:
                weights *= (1 - lr * decay) ** n
            else:
                c = c + n * decay * weights
            step += n
            m = b1**n * m + (1 - b1**n) * c / n
            v = b2**n * v + (1 - b2**n) * c**2 / n
            weights -= lr * n * m / (1 - b1**step) / (np.sqrt(v / (1 - b2**step)) + eps)
        np.testing.assert_allclose(last, weights, rtol=2e-5, atol=2e-6)

    def test_rmsprop_moves_its_mean_square_by_n_pushes(self):
        sums = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
        weights, last = self.push(spec.RMSprop(lr=0.1, alpha=0.9, eps=1e-3), sums)
        v = np.zeros(6)
        for c, n in zip(sums.astype(np.float64), self.AGES, strict=True):
            v = 0.9**n * v + (1 - 0.9**n) * c**2 / n
            weights -= 0.1 * c / (np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(last, weights, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("rowwise", [False, True])
    def test_adagrad_grows_by_the_square_over_the_root_of_n(self, rowwise):
        made = spec.RowWiseAdagrad if rowwise else spec.Adagrad
        sums = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
        weights, last = self.push(made(lr=0.1, eps=1e-3, initial_accumulator=0.5), sums)
        total = np.full(6, 0.5)
        for c, n in zip(sums.astype(np.float64), self.AGES, strict=True):
            total += ((c**2).mean() if rowwise else c**2) / n**0.5
            weights -= 0.1 * c / (np.sqrt(total) + 1e-3)
        np.testing.assert_allclose(last, weights, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "rmsprop", "ftrl"])
    def test_weight_decay_counts_n_times(self, kind):
        table = make_table(spec.Optimizer.of(kind, {"lr": 0.1, "weight_decay": 0.02}), 4)
        other = make_table(spec.Optimizer.of(kind, {"lr": 0.1}), 4)
        first, c, n = table.gather(np.array([9])), np.ones((1, 4), np.float32), np.float32(7)
        table.apply(np.array([9]), c, 1.0, np.array([n]))
        other.apply(np.array([9]), c + n * np.float32(0.02) * first, 1.0, np.array([n]))
        np.testing.assert_allclose(table.gather(np.array([9])), other.gather(np.array([9])), rtol=1e-5, atol=1e-7)


class TestEveryOptimizer:
    @pytest.mark.parametrize("kind", BUILTIN)
    def test_the_function_reads_its_settings_in_the_spec_s_order(self, kind):
        optimizer = spec.Optimizer.of(kind, {"lr": 0.5})
        assert list(BUILTIN[kind].params(optimizer).items()) == list(optimizer.params().items())

    def test_every_spec_has_its_function(self):
        assert BUILTIN.keys() == spec.OPTIMIZERS.keys()

    @pytest.mark.parametrize("kind", BUILTIN)
    @pytest.mark.parametrize("dim", [1, 17])
    @pytest.mark.parametrize("aged", [False, True])
    def test_the_compiled_function_says_the_same_as_plain_python(self, kind, dim, aged):
        optimizer = spec.Optimizer.of(kind, {"lr": 0.1, "weight_decay": 0.02, "clip_value": 1.5, "clip_norm": 3.0})
        fast = make_table(optimizer, dim)
        plain = ReferenceTable(fast.spec, REGISTRY.find(optimizer))
        rng = np.random.default_rng(1)
        for _ in range(5):
            ids = rng.integers(0, 20, 25)
            gradients = rng.standard_normal((25, dim)).astype(np.float32) * 2
            ages = rng.integers(1, 40, 25).astype(np.float32) if aged else None
            fast.apply(ids, gradients, 0.5, ages)
            plain.apply(ids, gradients, 0.5, ages)
        # plain Python's fma rounds twice, which shows in the last bit, rarely
        np.testing.assert_allclose(fast.gather(np.arange(20)), plain.gather(np.arange(20)), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("kind", BUILTIN)
    def test_weights_do_not_depend_on_how_ids_are_spread_over_shards(self, kind):
        optimizer = spec.Optimizer.of(kind, {"lr": 0.1})
        whole, parts = make_table(optimizer, 6), [make_table(optimizer, 6) for _ in range(3)]
        rng = np.random.default_rng(1)
        for _ in range(4):
            ids = rng.integers(0, 300, 200)
            gradients = rng.standard_normal((200, 6)).astype(np.float32)
            whole.apply(ids, gradients)
            for number, part in enumerate(parts):
                part.apply(ids[ids % 3 == number], gradients[ids % 3 == number])
        for number, part in enumerate(parts):
            ids = np.arange(number, 300, 3)
            assert np.array_equal(whole.gather(ids), part.gather(ids))

    @pytest.mark.parametrize("kind", BUILTIN)
    def test_rows_of_age_one_have_the_bits_of_rows_without_an_age(self, kind):
        optimizer = spec.Optimizer.of(kind, {"lr": 0.1, "weight_decay": 0.02, "clip_norm": 3.0})
        tables = [make_table(optimizer, 9) for _ in range(2)]
        rng = np.random.default_rng(1)
        for _ in range(6):
            ids = rng.integers(0, 20, 25)
            gradients = rng.standard_normal((25, 9)).astype(np.float32)
            tables[0].apply(ids, gradients, 0.5)
            tables[1].apply(ids, gradients, 0.5, np.ones(25, np.float32))
        records = [next(table.scan()) for table in tables]
        assert [part.tobytes() for part in records[0]] == [part.tobytes() for part in records[1]]

    @pytest.mark.parametrize("kind", BUILTIN)
    def test_an_age_holds_for_its_own_row_alone(self, kind):
        optimizer = spec.Optimizer.of(kind, {"lr": 0.1, "weight_decay": 0.02})
        together, apart = make_table(optimizer, 3), make_table(optimizer, 3)
        gradients = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
        together.apply(np.arange(4), gradients, 1.0, np.array([1, 7, 1, 2], np.float32))
        together.apply(np.arange(4), gradients)
        for i, age in enumerate([1, 7, 1, 2]):
            apart.apply(np.array([i]), gradients[i : i + 1], 1.0, np.array([age], np.float32))
            apart.apply(np.array([i]), gradients[i : i + 1])
        assert together.gather(np.arange(4)).tobytes() == apart.gather(np.arange(4)).tobytes()

    def test_sgd_without_momentum_keeps_no_state(self):
        assert len(BUILTIN["sgd"].initial(16, spec.SGD(lr=0.1).params())) == 0
        assert len(BUILTIN["sgd"].initial(16, spec.SGD(lr=0.1, momentum=0.9).params())) == 16
        assert len(BUILTIN["rowwise_adagrad"].initial(16, spec.RowWiseAdagrad(lr=0.1).params())) == 1


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


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Write a module of this name and text where it can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


class TestUserDefined:
    def test_a_function_of_five_lines_is_an_optimizer(self, user_module):
        registry = OptimizerRegistry([user_module("mine_works", MODULE)])
        custom = spec.Custom(function="mine_works:my_adagrad", lr=0.1, settings={"eps": 1e-10})
        ours, builtin = make_table(custom, 5, registry), make_table(spec.Adagrad(lr=0.1), 5)
        gradients = np.random.default_rng(0).standard_normal((30, 5)).astype(np.float32)
        for table in (ours, builtin):
            table.apply(np.arange(30) % 10, gradients)
        np.testing.assert_allclose(ours.gather(np.arange(10)), builtin.gather(np.arange(10)), rtol=1e-5, atol=1e-6)

    def test_it_is_kept_by_its_own_file(self, user_module, tmp_path):
        OptimizerRegistry([user_module("mine_cached", MODULE)])
        assert list((tmp_path / "__pycache__").glob("mine_cached.my_adagrad*.nbi"))

    def test_settings_left_out_have_the_declared_defaults(self):
        @row_optimizer(settings={"a": 1.0, "b": 2.0})
        def probe(row, state, grad, hyper):
            for j in range(row.size):
                row[j] = hyper[j]

        params = probe.params(spec.Custom(function="m:probe", lr=7, settings={"b": 5}, clip_norm=9))
        assert list(params.values()) == [7, 1, 5, 0, 9]

    def test_a_setting_that_the_function_does_not_have_is_named(self, user_module):
        registry = OptimizerRegistry([user_module("mine_settings", MODULE)])
        with pytest.raises(BadOptimizer, match=r"no setting epsilon .it has: lr, eps"):
            registry.find(spec.Custom(function="mine_settings:my_adagrad", lr=0.1, settings={"epsilon": 1}))

    def test_the_last_float_of_hyper_is_the_age_of_the_row(self):
        @row_optimizer(settings={"a": 4.0})
        def probe(row, state, grad, hyper):
            row[0], row[1] = hyper.size, hyper[hyper.size - 1]

        custom = spec.Custom(function="m:probe", lr=1, settings={"a": 4})
        table = Table(spec.TableSpec(name="t", dim=2, optimizer=custom), probe)
        table.apply(np.array([1, 2]), np.ones((2, 2), np.float32), 1.0, np.array([3, 1], np.float32))
        table.apply(np.array([3]), np.ones((1, 2), np.float32))
        assert table.gather(np.array([1, 2, 3])).tolist() == [[5, 3], [5, 1], [5, 1]]

    def test_state_may_depend_on_the_settings_and_start_at_one_of_them(self):
        @row_optimizer(
            settings={"copies": 2.0, "start": 0.5},
            state_per_dim=lambda settings: int(settings["copies"]),
            state_per_row=1,
            initial_state="start",
        )
        def probe(row, state, grad, hyper):
            row[0] = state.size

        custom = spec.Custom(function="m:probe", lr=1, settings={"copies": 3, "start": 0.25})
        table = Table(spec.TableSpec(name="t", dim=4, optimizer=custom), probe)
        table.apply(np.array([1]), np.ones((1, 4), np.float32))
        ((_, weights, state),) = table.scan()
        assert weights[0, 0] == 13
        assert np.array_equal(state, np.full((1, 13), 0.25))

    def test_an_exception_in_it_names_the_optimizer_and_the_table(self):
        @row_optimizer()
        def picky(row, state, grad, hyper):
            if grad[0] > 1:
                raise ValueError("too large")

        table = Table(spec.TableSpec(name="t", dim=1, optimizer=spec.Custom(function="m:picky", lr=1)), picky)
        table.apply(np.array([1]), np.ones((1, 1), np.float32))
        with pytest.raises(BadOptimizer, match=r"m:picky.*table 't'"):
            table.apply(np.array([1]), np.full((1, 1), 2, np.float32))

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
    def test_a_bad_module_is_refused_at_the_start(self, user_module, name, text, reason):
        with pytest.raises((BadModule, BadOptimizer), match=reason):
            OptimizerRegistry([user_module(name, text)])

    def test_a_module_that_is_not_there_is_named(self):
        with pytest.raises(BadModule, match=r"^module 'no_such_module_at_all' cannot be imported: Modul"):
            OptimizerRegistry(["no_such_module_at_all"])

    def test_an_optimizer_of_another_module_is_unknown_and_the_message_says_what_to_do(self):
        with pytest.raises(UnknownOptimizer, match=r"'other:mine'.*known: sgd, .*--import MODULE"):
            REGISTRY.find(spec.Custom(function="other:mine", lr=0.1))
