"""A training step against the plain torch loop that it stands for."""

from __future__ import annotations

import copy
import importlib.util
import math
import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import embershard as es
from embershard.proto.errors import JobError
from embershard.proto.messages import Reply, Request
from embershard.proto.transport.local import LocalTransport
from embershard.ps.shard import Shard
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.data.batch import Batch
from embershard.worker.models.dlrm import DLRM
from embershard.worker.models.fm import DeepFM
from embershard.worker.models.loss import binary_cross_entropy
from embershard.worker.models.recommender import Recommender
from embershard.worker.nn import compile as compilation
from embershard.worker.nn.activations import checkpoint_activations
from embershard.worker.nn.compile import compile_dense
from embershard.worker.session.session import Session
from embershard.worker.strategy.protocol import StepBatch
from embershard.worker.training.step import MAX_SKIPS_IN_A_ROW, NonFiniteLoss, StepSettings, TrainStep, global_norm

MakeSession = Callable[..., Session]
ROWS, F, D = 30, 3, 2


class Shards:
    """Changes weights on shards."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.rows = es.ShardOptimizer(session)
        self.optimizers = [self.rows]

    def step(self, weight: float) -> None:
        self.rows.weight = weight
        self.rows.step()

    def skip(self) -> None:
        self.rows.skip()


class Here:
    """Changes weights by an optimizer of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers = [optimizer]

    def step(self, weight: float) -> None:
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()

    def skip(self) -> None:
        self.optimizers[0].zero_grad()


def model_of(**settings: object) -> Recommender:
    torch.manual_seed(0)
    return DeepFM(ROWS, F, 4, D, **{"hidden": (16, 8), **settings})


def batches(*sizes: int, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(
            torch.randint(ROWS, (size, F), generator=generator),
            torch.rand(size, D, generator=generator),
            torch.randint(2, (size,), generator=generator).float(),
        )
        for size in sizes
    ]


def joined(parts: Sequence[Batch]) -> Batch:
    return Batch(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.dense for part in parts if part.dense is not None]),
        torch.cat([part.labels for part in parts]),
    )


def turn(batch: Batch) -> StepBatch:
    return StepBatch(0, batch, len(batch), weight=len(batch))


def wrapped(model: nn.Module, session: Session, lr: float = 0.5) -> Recommender:
    result = es.wrap(copy.deepcopy(model), session, optimizer=es.SGD(lr=lr))
    assert isinstance(result, Recommender)
    return result


def weights(model: nn.Module, session: Session | None = None) -> dict[str, Tensor]:
    if session is not None:
        session.refresh()
        session.read_dense()
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, es.Embedding):
            found[f"{name}.weight"] = module.table.pull(torch.arange(ROWS))
    return found


def make_step(
    model: Recommender, session: Session, objective: Callable[..., Tensor] = binary_cross_entropy, **settings: object
) -> TrainStep:
    return TrainStep(model, objective, Shards(session), StepSettings(**settings))


def plainly(model: Recommender, parts: Sequence[Batch], *, clip: float | None = None, lr: float = 0.5) -> None:
    """What torch does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for batch in parts:
        optimizer.zero_grad()
        binary_cross_entropy(model, batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


# Accumulation


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (8, 5, 2, 7), (32, 1)], ids=str)
def test_a_step_of_several_batches_is_that_of_the_joint_one(make_session, sizes):
    plain, session = model_of(), make_session()
    model = wrapped(plain, session)
    step = make_step(model, session, accumulate=len(sizes))
    for seed in (1, 2, 3):
        parts = batches(*sizes, seed=seed)
        plainly(plain, [joined(parts)])
        for part in parts:
            step(turn(part))
    assert (session.clock, step.steps) == (3, 3)
    torch.testing.assert_close(weights(model, session), weights(plain), rtol=0, atol=1e-6)


def test_the_batches_left_over_at_the_end_make_a_step_of_their_own(make_session):
    plain, session = model_of(), make_session()
    model = wrapped(plain, session)
    parts = batches(8, 8, 8, 8, 3)
    step = make_step(model, session, accumulate=4)
    for part in parts:
        step(turn(part))
    step.finish()
    step.finish()
    plainly(plain, [joined(parts[:4]), parts[4]])
    assert session.clock == 2
    torch.testing.assert_close(weights(model, session), weights(plain), rtol=0, atol=1e-6)


def test_a_step_weighs_the_samples_of_all_its_batches(make_session):
    session = make_session()
    model = wrapped(model_of(), session)
    updater = Shards(session)
    step = TrainStep(model, binary_cross_entropy, updater, StepSettings(accumulate=3))
    for part in batches(8, 8, 5):
        step(turn(part))
    assert updater.rows.weight == 21


def test_accumulation_inside_prefetch_reads_what_the_last_step_left(make_session):
    plain, session = model_of(), make_session()
    model = wrapped(plain, session)
    step = make_step(model, session, accumulate=2)
    parts = batches(*[8] * 8)
    for batch in session.prefetch(parts, inputs=lambda batch: model.embedding_inputs(batch.ids)):
        step(turn(batch))
    plainly(plain, [joined(parts[at : at + 2]) for at in range(0, 8, 2)])
    torch.testing.assert_close(weights(model, session), weights(plain), rtol=0, atol=1e-6)


def test_batches_of_workers_that_step_together_weigh_by_the_samples_of_all(make_session):
    plain, session = model_of(), make_session()
    model = wrapped(plain, session)
    step = make_step(model, session, accumulate=2)
    first, second = batches(6, 2)
    step(StepBatch(0, first, 6, loss_scale=1.2, joint=10))  # the other worker has 4
    step(StepBatch(0, second, 2, loss_scale=0.5, joint=8))  # and 6
    loss = (10 * 1.2 * binary_cross_entropy(plain, first) + 8 * 0.5 * binary_cross_entropy(plain, second)) / 18
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    torch.testing.assert_close(weights(model, session), weights(plain), rtol=0, atol=1e-6)


# Clipping


@pytest.mark.parametrize("clip", [0.01, 0.3, 1e3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_is_that_of_torch_over_rows_and_dense_weights(make_session, clip, accumulate):
    plain, session = model_of(), make_session()
    model = wrapped(plain, session)
    step = make_step(model, session, clip_norm=clip, accumulate=accumulate)
    parts = batches(*[8] * 6)
    for part in parts:
        step(turn(part))
    plainly(plain, [joined(parts[at : at + accumulate]) for at in range(0, 6, accumulate)], clip=clip)
    torch.testing.assert_close(weights(model, session), weights(plain), rtol=1e-5, atol=1e-6)


def test_sparse_gradients_of_torch_are_clipped_like_dense_ones():
    torch.manual_seed(0)
    dense, sparse = nn.EmbeddingBag(ROWS, 4), nn.EmbeddingBag(ROWS, 4, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    results = []
    for model in (dense, sparse):
        updater = Here(torch.optim.SGD(model.parameters(), lr=0.5))
        step = TrainStep(model, lambda m, b: m(b.ids).square().sum(), updater, StepSettings(clip_norm=0.2))
        for part in batches(8, 8):
            step(turn(part))
        results.append(model.weight)
    torch.testing.assert_close(results[1], results[0])


def test_workers_that_agree_on_a_norm_clip_by_the_largest(make_session):
    plain, session = model_of(), make_session()
    model = wrapped(plain, session)
    norms: list[float] = []

    def agree(norm):
        norms.append(norm)
        return 2 * norm

    step = TrainStep(model, binary_cross_entropy, Shards(session), StepSettings(clip_norm=0.01), agree=agree)
    part = batches(8)[0]
    step(turn(part))
    binary_cross_entropy(plain, part).backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    assert norms == [pytest.approx(norm)]
    plain.zero_grad()
    plainly(plain, [part], clip=0.005)
    torch.testing.assert_close(weights(model, session), weights(plain), rtol=1e-3, atol=1e-6)


def test_the_norm_of_nothing_is_zero():
    assert global_norm([]) == 0.0
    assert global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == 5.0


# Mixed precision


def test_bf16_runs_the_layers_in_it_and_trains(make_session):
    session = make_session()
    model = wrapped(model_of(), session)
    kinds = set()
    model.get_submodule("deep.0").register_forward_hook(lambda _, __, out: kinds.add(out.dtype))
    step = make_step(model, session, amp="bf16")
    part = batches(64)[0]
    losses = [step(turn(part)) for _ in range(30)]
    assert kinds == {torch.bfloat16}
    assert losses[-1] < 0.7 * losses[0]
    assert {value.dtype for value in weights(model, session).values()} == {torch.float32}


def test_fp16_trains_as_float32_does(make_session):
    plain, session = model_of(), make_session()
    model = wrapped(plain, session)
    step = make_step(model, session, amp="fp16", accumulate=2)
    parts = batches(*[8] * 8)
    for part in parts:
        step(turn(part))
    plainly(plain, [joined(parts[at : at + 2]) for at in range(0, 8, 2)])
    assert (step.skipped, session.clock) == (0, 4)
    torch.testing.assert_close(weights(model, session), weights(plain), rtol=0, atol=5e-3)


def test_a_step_that_fp16_leaves_out_changes_nothing_and_halves_the_scale(make_session):
    session = make_session()
    model = wrapped(model_of(), session)
    overflowing = [True, True, False]

    def objective(model, batch):
        return binary_cross_entropy(model, batch) * (1e38 if overflowing.pop(0) else 1.0)

    step = make_step(model, session, objective, amp="fp16")
    before = weights(model, session)
    part = batches(8)[0]
    for _ in range(2):
        step(turn(part))
    assert (session.clock, step.steps, step.skipped, session.stats.pushed_rows) == (2, 2, 2, 0)
    assert step.state_dict()["scaler"]["scale"] == 2.0**14
    torch.testing.assert_close(weights(model, session), before, rtol=0, atol=0)
    step(turn(part))
    assert step.skipped == 2
    assert session.stats.pushed_rows > 0


def test_the_scale_grows_again_after_an_interval_of_steps_without_overflow(make_session):
    session = make_session()
    model = wrapped(model_of(), session)
    overflowing = [False, True, False, False]

    def objective(model, batch):
        return binary_cross_entropy(model, batch) * (1e38 if overflowing.pop(0) else 1.0)

    step = make_step(model, session, objective, amp="fp16")
    state = step.state_dict()
    step.load_state_dict({**state, "scaler": {**state["scaler"], "growth_interval": 2}})
    scales = []
    while overflowing:
        step(turn(batches(8)[0]))
        scales.append(step.state_dict()["scaler"]["scale"])
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**16]  # as torch.amp.GradScaler does


def test_a_worker_halves_its_scale_where_another_one_overflowed(make_session):
    session = make_session()
    model = wrapped(model_of(), session)
    updater, settings = Shards(session), StepSettings(amp="fp16")
    step = TrainStep(model, binary_cross_entropy, updater, settings, agree=lambda norm: math.inf)
    step(turn(batches(8)[0]))
    assert (step.skipped, step.state_dict()["scaler"]["scale"]) == (1, 2.0**15)


def test_the_scale_and_the_counters_survive_a_state_dict(make_session):
    session = make_session()
    model = wrapped(model_of(), session)
    step = make_step(model, session, lambda m, b: binary_cross_entropy(m, b) * 1e38, amp="fp16")
    step(turn(batches(8)[0]))
    other = make_step(model, session, amp="fp16")
    other.load_state_dict(step.state_dict())
    assert (other.steps, other.skipped, other.state_dict()["scaler"]["scale"]) == (1, 1, 2.0**15)


def test_what_an_objective_has_learnt_is_part_of_the_state(make_session):
    class Counting:
        calls = 0

        def __call__(self, model, batch):
            self.calls += 1
            return binary_cross_entropy(model, batch)

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    session = make_session()
    model = wrapped(model_of(), session)
    one, other = Counting(), Counting()
    step = make_step(model, session, one)
    step(turn(batches(8)[0]))
    make_step(model, session, other).load_state_dict(step.state_dict())
    assert other.calls == 1


class Pair:
    """Two workers of a synchronous job, driven by one thread: a push is accepted before its clock closes."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        terms = Terms(workers=2, staleness=0, lease=timedelta(hours=1))
        self.sessions = [self._session(number, terms) for number in range(2)]

    def _session(self, number: int, terms: Terms) -> Session:
        transports = [LocalTransport(lambda r, it=shard: self._handle(it, r), "local") for shard in self.shards]
        client = Client(transports, worker=number)
        client.join(terms)
        return Session(client)

    def _handle(self, shard: Shard, request: Request) -> Reply:
        return shard.handle(request)


@pytest.fixture
def pair(make_shards):
    pair = Pair(make_shards(2))
    yield pair
    for session in pair.sessions:
        session.close()


def test_synchronous_workers_count_by_the_samples_of_their_steps(pair):
    plain = model_of()
    parts = batches(8, 4, 3)
    models = [wrapped(plain, session) for session in pair.sessions]
    steps = [make_step(models[number], pair.sessions[number], accumulate=2 - number) for number in range(2)]
    for part in parts[:2]:
        steps[0](turn(part))
    steps[1](turn(parts[2]))
    plainly(plain, [joined(parts)])
    torch.testing.assert_close(weights(models[0], pair.sessions[0]), weights(plain), rtol=1e-5, atol=1e-6)


def test_a_left_out_step_moves_the_clock_of_a_synchronous_job_and_weighs_nothing(pair):
    plain = model_of()
    models = [wrapped(plain, session) for session in pair.sessions]
    part = batches(8)[0]
    steps = [
        make_step(models[0], pair.sessions[0], lambda m, b: binary_cross_entropy(m, b) * math.nan, non_finite="skip"),
        make_step(models[1], pair.sessions[1], non_finite="skip"),
    ]
    for step in steps:
        step(turn(part))
    assert [status.clock for status in pair.sessions[0].client.status()] == [1, 1]
    assert [step.skipped for step in steps] == [1, 0]
    plainly(plain, [part])
    torch.testing.assert_close(weights(models[0], pair.sessions[0]), weights(plain), rtol=1e-5, atol=1e-6)


# NaN and Inf


def poisoned(model: Recommender, batch: Batch) -> Tensor:
    """A loss that is finite, and gradients that are not."""
    loss = binary_cross_entropy(model, batch)
    return loss + (loss - loss.detach()).sqrt()  # d sqrt(x) at 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run(make_session, value):
    session = make_session()
    model = wrapped(model_of(), session)
    step = make_step(model, session, lambda m, b: binary_cross_entropy(m, b) * value)
    with pytest.raises(NonFiniteLoss, match=rf"worker 0: the loss of step 1 is {value}; lower the learning rate"):
        step(turn(batches(8)[0]))
    assert session.clock == 0


def test_gradients_that_are_no_numbers_end_the_run_where_their_norm_is_known(make_session):
    session = make_session()
    model = wrapped(model_of(), session)
    step = make_step(model, session, poisoned, clip_norm=1.0)
    with pytest.raises(NonFiniteLoss, match="the gradient norm of step 1 is inf"):
        step(turn(batches(8)[0]))
    assert session.stats.pushed_rows == 0


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "bad",
    [poisoned, lambda m, b: binary_cross_entropy(m, b) * math.nan, lambda m, b: binary_cross_entropy(m, b) + math.inf],
    ids=["gradient", "loss", "loss alone"],
)
def test_such_steps_are_left_out_and_counted(make_session, bad, accumulate):
    plain, session = model_of(), make_session()
    model = wrapped(plain, session)
    parts = batches(*[8] * 6)
    good = {id(part) for part in parts[:accumulate] + parts[2 * accumulate :]}
    step = make_step(
        model,
        session,
        lambda m, b: (binary_cross_entropy if id(b) in good else bad)(m, b),
        non_finite="skip",
        accumulate=accumulate,
    )
    for part in parts:
        step(turn(part))
    together = [joined(parts[at : at + accumulate]) for at in range(0, 6, accumulate)]
    plainly(plain, [part for number, part in enumerate(together) if number != 1])
    assert (step.skipped, step.steps, session.clock) == (1, len(together), len(together))
    assert session.stats.skipped_rows == 0  # none of it went to a shard
    torch.testing.assert_close(weights(model, session), weights(plain), rtol=1e-5, atol=1e-6)


def test_a_step_that_is_left_out_leaves_no_nan_in_running_statistics(make_session):
    session = make_session()
    model = wrapped(model_of(batch_norm=True), session)
    step = make_step(model, session, non_finite="skip", accumulate=2)
    good, bad = batches(8, 8)
    for part in (good, good):
        step(turn(part))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any("running_mean" in name for name in before)
    assert bad.dense is not None
    bad.dense[0, 0] = math.nan
    for part in (bad, good):
        step(turn(part))
    assert step.skipped == 1
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)
    for part in (good, good):
        step(turn(part))
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_company_repeats_the_last_batch_whose_step_was_made(make_session):
    session = make_session()
    model = wrapped(model_of(), session)
    seen: list[Batch] = []

    def objective(model, batch):
        seen.append(batch)
        return binary_cross_entropy(model, batch)

    step = make_step(model, session, objective, non_finite="skip")
    good, bad = batches(8, 8)
    assert bad.dense is not None
    bad.dense[0, 0] = math.nan
    company = StepBatch(0, bad, samples=0, weight=0.0, joint=8)
    for each in (turn(good), turn(bad), company):
        step(each)
    assert [batch is good for batch in seen] == [True, False, True]
    assert step.skipped == 1


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_company_without_anything_of_its_own_to_train_only_steps(make_session, amp):
    session = make_session()
    plain = model_of()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name.startswith("embedding"))
    model = wrapped(plain, session)
    (part,) = batches(8)
    step = make_step(model, session, amp=amp)
    step(turn(part))
    for module in model.modules():
        if isinstance(module, es.Embedding):
            module.frozen = True  # as ShardStrategy does for a turn that weighs nothing
    step(StepBatch(0, part, samples=0, weight=0.0, joint=8))
    assert (step.steps, session.clock) == (2, 2)


def test_a_run_in_which_every_step_is_left_out_ends(make_session):
    session = make_session(1)
    model = wrapped(model_of(), session)
    fails = [False]
    step = make_step(
        model, session, lambda m, b: binary_cross_entropy(m, b) * (math.nan if fails[0] else 1.0), non_finite="skip"
    )
    part = turn(batches(2)[0])
    fails[0] = True
    for _ in range(MAX_SKIPS_IN_A_ROW):
        step(part)
    fails[0] = False
    step(part)  # one that is well, and the count begins anew
    fails[0] = True
    for _ in range(MAX_SKIPS_IN_A_ROW):
        step(part)
    with pytest.raises(NonFiniteLoss, match="as were those of the 100 before"):
        step(part)


def test_a_worker_leaves_out_the_step_that_another_must_leave_out(make_session):
    session = make_session()
    model = wrapped(model_of(), session)
    updater = Shards(session)
    settings = StepSettings(non_finite="skip")
    step = TrainStep(model, binary_cross_entropy, updater, settings, agree=lambda norm: math.inf)
    step(turn(batches(8)[0]))
    assert (step.skipped, session.stats.pushed_rows) == (1, 0)


@pytest.mark.parametrize(
    "settings",
    [{"amp": "fp8"}, {"accumulate": 0}, {"clip_norm": 0.0}, {"clip_norm": math.nan}, {"non_finite": "ignore"}],
    ids=str,
)
def test_settings_out_of_range_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        StepSettings(**settings)


# Activations that are computed again


@pytest.mark.parametrize("kind", ["deepfm", "dlrm"])
def test_recomputed_activations_train_to_the_same_weights(make_session, kind):
    torch.manual_seed(0)
    settings = {"batch_norm": True, "dropout": 0.3}
    plain = model_of(**settings) if kind == "deepfm" else DLRM(ROWS, F, 4, D, bottom=(8,), hidden=(16,), **settings)
    results = []
    for recomputed in (False, True):
        session = make_session()
        model = wrapped(plain, session)
        runs: list[object] = []
        linear = next(m for m in model.modules() if isinstance(m, nn.Linear))
        linear.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        if recomputed:
            assert checkpoint_activations(model) == (1 if kind == "deepfm" else 2)
        torch.manual_seed(7)
        step = make_step(model, session)
        for part in batches(*[8] * 4):
            step(turn(part))
        pulled = session.stats.pulled_rows
        results.append((weights(model, session), dict(model.named_buffers()), pulled, session.stats.pushed_rows))
        assert len(runs) == (8 if recomputed else 4)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_without_gradients_nothing_is_computed_again(make_session):
    session = make_session()
    model = wrapped(model_of(), session)
    part = batches(8)[0]
    with torch.no_grad():
        expected = model(part.ids, part.dense)
    checkpoint_activations(model)
    with torch.no_grad():
        torch.testing.assert_close(model(part.ids, part.dense), expected, rtol=0, atol=0)


# torch.compile


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_a_compiled_model_trains_to_the_same_weights(make_session, monkeypatch, backend):
    graphs = CompileCounterWithBackend(backend)  # the same graphs as inductor has, in seconds
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    results = []
    for compiled in (False, True):
        session = make_session()
        model = wrapped(model_of(), session)
        if compiled:
            compile_dense(model)
        step = make_step(model, session)
        for part in batches(8, 8, 8, 5):
            step(turn(part))
        made = graphs.frame_count
        for part in batches(7, 6, 8):  # a clock more is no reason to compile again
            step(turn(part))
        assert graphs.frame_count == made
        assert (made > 0) == compiled
        results.append(weights(model, session))
        assert session.clock == 7
    assert not any("Embedding" in str(graph) for graph in graphs.graphs)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(JobError, match=r"train.compile: torch.compile needs a C\+\+ compiler.*install g\+\+"):
        compile_dense(nn.Linear(1, 1))


@pytest.mark.parametrize("found", ["CC", "gcc", "clang", None])
def test_triton_is_known_to_need_a_c_compiler(monkeypatch, found):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/it" if name == found else None)
    monkeypatch.delenv("CC", raising=False)
    if found == "CC":
        monkeypatch.setenv("CC", "/opt/cc")
    missing = compilation._missing(torch.device("cuda"))
    assert missing is None if found else "install gcc" in str(missing)
