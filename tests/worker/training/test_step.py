"""A training step against the plain torch loop that it stands for."""

import copy
import importlib.util
import math
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import embershard as es
from embershard.proto.errors import JobError
from embershard.worker.data.batch import Batch
from embershard.worker.job.training import StepSection
from embershard.worker.models.ctr.dlrm import DLRM
from embershard.worker.models.ctr.fm import DeepFM
from embershard.worker.models.loss import bce, loss_of, weight_by
from embershard.worker.models.sequence.sasrec import SASRec
from embershard.worker.nn import compile as compilation
from embershard.worker.nn.activations import checkpoint_activations
from embershard.worker.nn.compile import compile_dense
from embershard.worker.strategy.allreduce import all_reduced
from embershard.worker.strategy.dense import _shard
from embershard.worker.strategy.protocol import StepBatch, step_batches
from embershard.worker.training.step import MAX_SKIPS_IN_A_ROW, NonFiniteLoss, TrainStep

ROWS, F, D = 30, 3, 2


def model_of(**settings):
    torch.manual_seed(0)
    return DeepFM(ROWS, F, 4, D, **{"hidden": (16, 8), **settings})


def batches(*sizes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(
            torch.randint(ROWS, (size, F), generator=generator),
            torch.rand(size, D, generator=generator),
            torch.randint(2, (size,), generator=generator).float(),
        )
        for size in sizes
    ]


def joined(parts):
    return Batch(*(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "dense", "labels")))


def by(count, parts):
    return [joined(parts[at : at + count]) for at in range(0, len(parts), count)]


def binary_cross_entropy(model, batch):
    return nn.functional.binary_cross_entropy_with_logits(model(batch.ids, batch.dense), batch.labels)


def weighed_loss(model, batch):
    return bce(model(batch.ids, batch.dense), batch.labels, batch.weights)


def turn(batch):
    return StepBatch(0, batch, len(batch), weight=len(batch))


class OnShards:
    """A model whose copy trains on shards."""

    def __init__(self, session, loss=binary_cross_entropy, *, plain=None, agree=None, **settings):
        self.session, self.plain = session, plain or model_of()
        self.model = es.wrap(copy.deepcopy(self.plain), session, optimizer=es.SGD(lr=0.5))
        rows = es.ShardOptimizer(session)

        def update(weight):
            rows.weight = weight
            rows.step()

        self.updater = SimpleNamespace(rows=rows, optimizers=[rows], skip=rows.skip, step=update)
        self.step = TrainStep(self.model, loss, self.updater, StepSection(**settings), agree=agree)

    def train(self, parts):
        return [self.step(turn(part)) for part in parts]

    def train_plainly(self, parts, clip=None):
        """What torch does."""
        optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.5)
        for batch in parts:
            optimizer.zero_grad()
            binary_cross_entropy(self.plain, batch).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(self.plain.parameters(), clip)
            optimizer.step()

    def weights(self):
        self.session.refresh()
        self.session.read_dense()
        found = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        for name, module in self.model.named_modules():
            if isinstance(module, es.Embedding):
                found[f"{name}.weight"] = module.table.pull(torch.arange(ROWS))
        return found

    def check(self, rtol=0.0, atol=1e-6):
        """Both models have the same weights."""
        torch.testing.assert_close(self.weights(), dict(self.plain.named_parameters()), rtol=rtol, atol=atol)


@pytest.fixture
def make(make_session):
    return lambda *args, **settings: OnShards(make_session(), *args, **settings)


@pytest.mark.parametrize(
    ("sizes", "settings", "close"),
    [
        ([8] * 12, {"accumulate": 4}, {}),
        ([8, 5, 2, 7] * 3, {"accumulate": 4}, {}),
        ([32, 1] * 3, {"accumulate": 2}, {}),
        ([8, 8, 8, 8, 3], {"accumulate": 4}, {}),  # what is left over makes a step of its own
        *(([8] * 6, {"accumulate": n, "clip_norm": clip}, {"rtol": 1e-5}) for n in (1, 2) for clip in (0.01, 0.3, 1e3)),
        ([8] * 8, {"accumulate": 2, "amp": "fp16"}, {"atol": 5e-3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_of_several_batches_is_that_of_torch_on_the_joint_one(make, sizes, settings, close, ahead):
    run, parts = make(**settings), batches(*sizes)
    inputs = lambda batch: run.model.embedding_inputs(batch.ids)  # noqa: E731
    run.train(run.session.prefetch(parts, inputs=inputs) if ahead else parts)
    run.step.finish()
    run.step.finish()
    wholes = by(settings["accumulate"], parts)
    run.train_plainly(wholes, clip=settings.get("clip_norm"))
    assert run.session.clock == run.step.steps == len(wholes)
    assert (run.updater.rows.weight, run.step.skipped) == (len(wholes[-1]), 0)
    run.check(**close)


def test_batches_of_a_step_count_by_the_weights_of_their_samples(make):
    run, parts = make(weighed_loss, accumulate=3), batches(4, 4, 4)
    weights = torch.tensor([0.0] * 4 + [1.0, 0.0, 2.0, 5.0] + [0.1] * 4)  # those of the first batch are nothing
    parts = [replace(part, weights=some) for part, some in zip(parts, weights.split(4), strict=True)]
    for one in step_batches(((0, part) for part in parts), weight_by(run.model, own_loss=False)):
        run.step(one)
    assert run.updater.rows.weight == pytest.approx(8.4)
    whole = joined(parts)
    weighed_loss(run.plain, replace(whole, weights=weights)).backward()
    torch.optim.SGD(run.plain.parameters(), lr=0.5).step()
    run.check()


def test_batches_of_histories_count_by_the_actions_that_their_loss_is_a_mean_over(make_session):
    length, plain = 6, SASRec(ROWS, 4, 6, blocks=1, dropout=0.0)
    loss = loss_of(plain, plain)
    run = OnShards(make_session(), loss, plain=plain, accumulate=2)
    places = torch.arange(length) < torch.tensor([[6], [5], [1], [2]])
    ids = torch.randint(ROWS, (4, 3, length), generator=torch.Generator().manual_seed(2)).where(places.unsqueeze(1), -1)
    ids = torch.cat([ids[:, 0], ids[:, 1:].transpose(1, 2).flatten(1)], 1)  # histories, then item and negative of each
    parts = [Batch(part, None, torch.ones(2)) for part in ids.split(2)]
    for one in step_batches(((0, part) for part in parts), weight_by(run.model, own_loss=False)):
        run.step(one)
    assert run.updater.rows.weight == 14
    loss(plain, Batch(ids, None, torch.ones(4))).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    run.check(atol=1e-5)


def test_batches_of_workers_that_step_together_weigh_by_the_samples_of_all(make):
    run, (first, second) = make(accumulate=2), batches(6, 2)
    run.step(StepBatch(0, first, 6, loss_scale=1.2, joint=10))  # the other worker has 4
    run.step(StepBatch(0, second, 2, loss_scale=0.5, joint=8))  # and 6
    losses = [binary_cross_entropy(run.plain, batch) for batch in (first, second)]
    ((10 * 1.2 * losses[0] + 8 * 0.5 * losses[1]) / 18).backward()
    torch.optim.SGD(run.plain.parameters(), lr=0.5).step()
    run.check()


def test_sparse_gradients_of_torch_are_clipped_like_dense_ones():
    dense, sparse = nn.EmbeddingBag(ROWS, 4), nn.EmbeddingBag(ROWS, 4, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    for model in (dense, sparse):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        updater = SimpleNamespace(optimizers=[optimizer], step=lambda weight, it=optimizer: (it.step(), it.zero_grad()))
        step = TrainStep(model, lambda m, b: m(b.ids).square().sum(), updater, StepSection(clip_norm=0.2))
        for part in batches(8, 8):
            step(turn(part))
    torch.testing.assert_close(sparse.weight, dense.weight)


def test_workers_that_agree_on_a_norm_clip_by_the_largest(make):
    norms = []
    run, parts = make(clip_norm=0.01, agree=lambda norm: (norms.append(norm), 2 * norm)[1]), batches(8)
    run.train(parts)
    binary_cross_entropy(run.plain, parts[0]).backward()
    assert norms == [pytest.approx(float(nn.utils.clip_grad_norm_(run.plain.parameters(), 1e9)))]
    run.train_plainly(parts, clip=0.005)
    run.check(rtol=1e-3)


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, 1)
        self.layer.forward = lambda batch: nn.functional.linear(batch.dense, self.layer.weight)

    def forward(self, batch):
        return self.layer(batch)


@pytest.mark.parametrize(
    "joined",
    [lambda model: all_reduced(model, views=True), lambda model: (_shard(model, torch.device("cpu")), model)[1]],
    ids=["ddp", "fsdp"],
)
def test_a_parameter_without_a_gradient_that_workers_would_sum_ends_the_run_at_once(joined):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        updater = SimpleNamespace(optimizers=[])
        step = TrainStep(joined(HalfUsed()), lambda module, batch: module(batch).mean(), updater, StepSection())
        with pytest.raises(JobError, match=r"a batch left layer\.bias without a gradient, for which the other workers"):
            step(turn(batches(4)[0]))
    finally:
        dist.destroy_process_group()


def test_bf16_runs_the_layers_in_it_and_trains(make):
    run, kinds = make(amp="bf16"), set()
    run.model.get_submodule("deep.0").register_forward_hook(lambda _, __, out: kinds.add(out.dtype))
    losses = run.train(batches(64) * 30)
    assert kinds == {torch.bfloat16}
    assert losses[-1] < 0.7 * losses[0]
    assert {value.dtype for value in run.weights().values()} == {torch.float32}


def times(*factors):
    """A loss that is multiplied by these, batch after batch, and then by 1."""
    factors = iter(factors)
    return lambda model, batch: binary_cross_entropy(model, batch) * next(factors, 1.0)


def scale(step):
    return step.state_dict()["scaler"]["scale"]


def test_a_step_that_fp16_leaves_out_changes_nothing_and_halves_the_scale(make):
    run, parts = make(times(1e38, 1e38), amp="fp16"), batches(8)
    before = run.weights()
    run.train(parts * 2)
    assert (run.session.clock, run.step.steps, run.step.skipped, run.session.stats.pushed_rows) == (2, 2, 2, 0)
    assert scale(run.step) == 2.0**14
    torch.testing.assert_close(run.weights(), before, rtol=0, atol=0)
    other = make(amp="fp16")
    other.step.load_state_dict(run.step.state_dict())  # the scale and the counters survive
    assert (other.step.steps, other.step.skipped, scale(other.step)) == (2, 2, 2.0**14)
    run.train(parts)
    assert run.step.skipped == 2
    assert run.session.stats.pushed_rows > 0


def test_a_worker_leaves_out_the_step_that_another_must_leave_out(make):
    halved = make(agree=lambda norm: math.inf, amp="fp16")
    halved.train(batches(8))
    assert (halved.step.skipped, scale(halved.step)) == (1, 2.0**15)
    run = make(agree=lambda norm: math.inf, non_finite="skip")
    run.train(batches(8))
    assert (run.step.skipped, run.session.stats.pushed_rows) == (1, 0)


def test_what_a_loss_has_learnt_is_part_of_the_state(make):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, model, batch):
            self.calls += 1
            return binary_cross_entropy(model, batch)

    run, other = make(Counting()), Counting()
    run.train(batches(8))
    make(other).step.load_state_dict(run.step.state_dict())
    assert other.calls == 1


def poisoned(model, batch):
    """A loss that is finite, and gradients that are not."""
    loss = binary_cross_entropy(model, batch)
    return loss + (loss - loss.detach()).sqrt()  # d sqrt(x) at 0


@pytest.mark.parametrize(
    ("loss", "clip", "words"),
    [
        (times(math.nan), None, "worker 0: the loss of step 1 is nan"),
        (times(math.inf), None, "worker 0: the loss of step 1 is inf"),
        (poisoned, 1.0, "the gradient norm of step 1 is inf"),
    ],
    ids=["nan", "inf", "norm"],
)
def test_a_loss_or_a_norm_that_is_no_number_ends_the_run(make, loss, clip, words):
    run = make(loss, clip_norm=clip)
    with pytest.raises(NonFiniteLoss, match=words):
        run.train(batches(8))
    assert run.session.clock == run.session.stats.pushed_rows == 0


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "bad",
    [poisoned, lambda m, b: binary_cross_entropy(m, b) * math.nan, lambda m, b: binary_cross_entropy(m, b) + math.inf],
    ids=["gradient", "loss", "loss alone"],
)
def test_such_steps_are_left_out_and_counted(make, bad, accumulate):
    parts = batches(*[8] * 6)
    good = {id(part) for part in parts[:accumulate] + parts[2 * accumulate :]}
    run = make(
        lambda m, b: (binary_cross_entropy if id(b) in good else bad)(m, b), non_finite="skip", accumulate=accumulate
    )
    run.train(parts)
    together = by(accumulate, parts)
    run.train_plainly([together[0], *together[2:]])
    assert (run.step.skipped, run.step.steps, run.session.clock) == (1, len(together), len(together))
    assert run.session.stats.skipped_rows == 0  # none of it went to a shard
    run.check(rtol=1e-5)


def good_and_bad():
    good, bad = batches(8, 8)
    bad.dense[0, 0] = math.nan
    return good, bad


def test_a_step_that_is_left_out_leaves_no_nan_in_running_statistics(make):
    run, (good, bad) = make(plain=model_of(batch_norm=True), non_finite="skip", accumulate=2), good_and_bad()
    run.train([good, good])
    before = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    assert any("running_mean" in name for name in before)
    run.train([bad, good])
    assert run.step.skipped == 1
    torch.testing.assert_close(dict(run.model.named_buffers()), before, rtol=0, atol=0)
    run.train([good, good])
    assert all(buffer.isfinite().all() for buffer in run.model.buffers())


def test_company_repeats_the_last_batch_whose_step_was_made(make):
    seen = []
    run = make(lambda model, batch: (seen.append(batch), binary_cross_entropy(model, batch))[1], non_finite="skip")
    good, bad = good_and_bad()
    run.train([good, bad])
    run.step(StepBatch(0, bad, samples=0, weight=0.0, joint=8))
    assert [batch is good for batch in seen] == [True, False, True]
    assert run.step.skipped == 1


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_company_without_anything_of_its_own_to_train_only_steps(make, amp):
    plain = model_of()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name.startswith("embedding"))
    run, (part,) = make(plain=plain, amp=amp), batches(8)
    run.train([part])
    for module in run.model.modules():
        if isinstance(module, es.Embedding):
            module.frozen = True  # as ShardStrategy does for a turn that weighs nothing
    run.step(StepBatch(0, part, samples=0, weight=0.0, joint=8))
    assert (run.step.steps, run.session.clock) == (2, 2)


def test_a_run_in_which_every_step_is_left_out_ends(make):
    skips = [math.nan] * MAX_SKIPS_IN_A_ROW
    run = make(times(*skips, 1.0, *skips, math.nan), non_finite="skip")  # one that is well: the count begins anew
    run.train(batches(2) * (2 * MAX_SKIPS_IN_A_ROW + 1))
    with pytest.raises(NonFiniteLoss, match=f"as were those of the {MAX_SKIPS_IN_A_ROW} before"):
        run.train(batches(2))


@pytest.mark.parametrize("kind", ["deepfm", "dlrm"])
def test_recomputed_activations_train_to_the_same_weights(make, kind):
    settings = {"batch_norm": True, "dropout": 0.3}
    plain = model_of(**settings) if kind == "deepfm" else DLRM(ROWS, F, 4, D, bottom=(8,), hidden=(16,), **settings)
    results = []
    for recomputed in (False, True):
        run, runs = make(plain=plain), []
        linear = next(m for m in run.model.modules() if isinstance(m, nn.Linear))
        linear.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        if recomputed:
            assert checkpoint_activations(run.model) == (1 if kind == "deepfm" else 2)
        torch.manual_seed(7)
        run.train(batches(*[8] * 4))
        stats = run.session.stats.pulled_rows, run.session.stats.pushed_rows
        results.append((run.weights(), dict(run.model.named_buffers()), stats))
        assert len(runs) == (8 if recomputed else 4)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_a_compiled_model_trains_to_the_same_weights(make, monkeypatch, backend):
    from torch._dynamo.testing import CompileCounterWithBackend  # a second that collecting tests need not take

    graphs = CompileCounterWithBackend(backend)  # the same graphs as inductor has, in seconds
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    results = []
    for compiled in (False, True):
        run = make()
        if compiled:
            compile_dense(run.model)
        run.train(batches(8, 8, 8, 5))
        made = graphs.frame_count
        run.train(batches(7, 6, 8))  # a clock more is no reason to compile again
        assert graphs.frame_count == made
        assert (made > 0) == compiled
        results.append(run.weights())
        assert run.session.clock == 7
    assert not any("Embedding" in str(graph) for graph in graphs.graphs)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(JobError, match=r"train.compile: .*install g\+\+"):
        compile_dense(nn.Linear(1, 1))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # Triton
    assert "install gcc" in compilation._missing(torch.device("cuda"))
    monkeypatch.setenv("CC", "/opt/cc")
    assert compilation._missing(torch.device("cuda")) is None


@pytest.mark.parametrize(
    "settings",
    [{"amp": "fp8"}, {"accumulate": 0}, {"clip_norm": 0.0}, {"clip_norm": math.nan}, {"non_finite": "ignore"}],
    ids=str,
)
def test_settings_out_of_range_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        StepSection(**settings)
