"""The best weights: kept when an evaluation is the best, put back at the end, known to a run that goes on."""

import os

import pytest

from embershard.proto.errors import SnapshotNotWritten
from embershard.proto.snapshot.storage import Storage
from embershard.worker.checkpoint.checkpoint import (
    SNAPSHOT,
    BadCheckpoint,
    Checkpoint,
    best_checkpoint,
    find_checkpoint,
)
from embershard.worker.checkpoint.snapshots import restore_snapshot
from embershard.worker.client.worker_group import WorkerGroup
from embershard.worker.session.session import Session
from embershard.worker.training.saver import BestNotRestored
from embershard.worker.training.trainer import Trainer
from harness.clicks import Notes, click_data, click_job
from harness.eventually import eventually

DATA = {"train": 300, "valid": 200}  # three steps per epoch, of samples that are soon known by heart


def job(folder, strategy="ps", **sections):
    deepfm = {"hidden": [16], "batch_norm": True, **sections.pop("model", {})}
    embedding = {"optimizer": {"name": "adam", "lr": 0.1}, **sections.pop("embedding", {})}
    kept = {"folder": str(folder), "keep": 1, **sections.pop("checkpoint", {})}
    return click_job(
        "deepfm",
        strategy,
        model=deepfm,
        embedding=embedding,
        checkpoint=kept,
        evaluate={"metric": "logloss", **sections.pop("evaluate", {})},
        train={"epochs": 6, "linear": "torch", **sections.pop("train", {})},
        **sections,
    )


class Run:
    """A run to its end, and what may be asked of it afterwards."""

    def __init__(self, job, session=None, *, resume=None, data=None, **settings):
        if job.has_shards and job.train.local_steps:
            session = Session(session.client, local_steps=job.train.local_steps)
        if resume is not None and job.has_shards:
            restore_snapshot(session.client, resume.url, SNAPSHOT)
        self.notes = Notes()
        self.trainer = Trainer(
            job,
            data or click_data(**DATA),
            session if job.has_shards else None,
            WorkerGroup(),
            [self.notes],
            resume=resume,
            **settings,
        )
        self.result = self.trainer.run()
        self.best = self.result.best_weights

    def figures_now(self):
        return self.trainer._evaluator.evaluate()


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "OWNER")


CASES = {
    "on shards": {},
    "early stop": {"train": {"epochs": 50, "early_stop": {"patience": 3}}},
    "average": {"train": {"average": {"decay": 0.5}}},
    "local steps": {"train": {"staleness": "local(2)"}},
    "cache": {"embedding": {"cache": {"rows": 50, "staleness": 3}}},
    "codecs": {"compression": {"push": "int8", "pull": "int8", "dense": {"pull": "delta"}}},
    "hybrid": {"strategy": "hybrid"},
    "no shards": {"strategy": "local"},
}


@pytest.mark.parametrize("restored", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", CASES)
def test_a_run_ends_with_the_weights_of_its_best_evaluation_unless_told_not_to(make_session, tmp_path, case, restored):
    run = Run(job(tmp_path, **CASES[case], checkpoint={"restore_best": restored}), make_session(2))
    result, evaluations = run.result, run.notes.evaluations
    assert result.best_step < result.steps
    assert (run.best.restored, run.best.current) == (restored, restored)
    assert run.figures_now() == (result.figures if restored else evaluations[-1].figures)
    found = best_checkpoint(str(tmp_path))
    assert (found.url, found.manifest.step) == (run.best.checkpoint, result.best_step)
    assert names(tmp_path) == ["BEST", f"step-{result.best_step:09d}", f"step-{result.steps:09d}"]
    assert found.shared()["report"]["best"]["figures"] == result.figures


def test_nothing_is_put_back_where_the_last_evaluation_is_the_best(make_session, tmp_path):
    run = Run(job(tmp_path, evaluate={"metric": "auc"}, train={"epochs": 2}), make_session(1))
    assert run.result.best_step == run.result.steps
    assert (run.best.restored, run.best.current) == (False, True)
    assert names(tmp_path) == ["BEST", "step-000000006"]  # one and the same


def test_no_best_one_is_kept_where_the_job_wants_none(make_session, tmp_path):
    run = Run(job(tmp_path, checkpoint={"best": False}), make_session(1))
    assert (run.best.checkpoint, run.best.current) == (None, False)
    assert names(tmp_path) == ["step-000000018"]
    with pytest.raises(BadCheckpoint):
        find_checkpoint("best", job(tmp_path))


@pytest.mark.parametrize("moved", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_run_that_goes_on_knows_the_best_of_before(make_session, tmp_path, moved):
    folder = tmp_path / "before"
    first = Run(job(folder), make_session(2))
    if moved:
        folder = folder.rename(tmp_path / "moved")
    kept = job(folder, train={"epochs": 8})
    run = Run(kept, make_session(1), resume=find_checkpoint("latest", kept))
    assert run.best.checkpoint == str(folder / f"step-{first.result.best_step:09d}")
    assert (run.best.restored, run.result.steps) == (True, 24)
    assert run.figures_now() == run.result.figures == first.result.figures
    again = Run(kept, make_session(1), resume=find_checkpoint("best", kept))  # and is marked once it is written
    assert again.notes.plan.resumed_step == first.result.best_step


def test_a_run_that_goes_on_with_another_metric_forgets_the_best_by_the_one_before(make_session, tmp_path):
    Run(job(tmp_path, evaluate={"metric": "logloss"}), make_session(1))
    other = job(tmp_path, train={"epochs": 8}, evaluate={"metric": "ne"})  # above any logloss, and lower is better
    run = Run(other, make_session(1), resume=find_checkpoint("latest", other))
    assert run.notes.evaluations[0].improved
    assert run.best.checkpoint is not None
    assert run.result.best_step > run.notes.plan.resumed_step


def test_a_run_that_went_back_marks_its_own_best_one_and_says_where_none_is_left(make_session, tmp_path):
    whole = Run(job(tmp_path, checkpoint={"keep": 9}), make_session(1))
    best = whole.result.best_step
    (tmp_path / f"step-{best:09d}" / "checkpoint.json").unlink()
    kept = job(tmp_path, checkpoint={"keep": 9})
    run = Run(kept, make_session(1), resume=Checkpoint.open(str(tmp_path / f"step-{best + 3:09d}")))
    assert run.best.checkpoint is None
    assert (run.best.current, run.result.best_step) == (False, best)
    assert best_checkpoint(str(tmp_path)) is None


def test_without_a_folder_the_best_one_alone_is_kept_in_the_runs_own(make_session, tmp_path, monkeypatch):
    plain, folder = job("", checkpoint={"folder": None}), tmp_path / "out" / "best"
    for _ in range(2):  # a later run takes the earlier one's place
        run = Run(plain, make_session(1), best_folder=folder, restore_best=False)
        assert (run.best.restored, run.best.current) == (False, False)
        assert run.best.checkpoint == best_checkpoint(str(folder)).url
        assert names(folder) == ["BEST", os.path.basename(run.best.checkpoint)]
    assert Run(plain, make_session(1)).best.checkpoint is None  # and nowhere without one

    def full(self, path, data):
        raise SnapshotNotWritten(path=self.at(path), reason="OSError: No space left on device")

    monkeypatch.setattr(Storage, "replace", full)
    run = Run(plain, make_session(1), best_folder=tmp_path / "full")
    assert (run.best.checkpoint, run.result.steps) == (None, 18)
    assert "No space left" in run.best.not_kept


def test_what_cannot_be_put_back_is_named_once_the_result_is_told(make_session, tmp_path, monkeypatch):
    session, kept = make_session(1), job(tmp_path)
    restore = Trainer._restore_best

    def damaged(trainer):
        file = tmp_path / f"step-{trainer._report._best.step:09d}" / "shards" / "manifest.msgpack"
        file.write_bytes(b"")
        return restore(trainer)

    monkeypatch.setattr(Trainer, "_restore_best", damaged)
    notes = Notes()
    with pytest.raises(BestNotRestored):
        Trainer(kept, click_data(**DATA), session, WorkerGroup(), [notes]).run()
    assert (notes.result.best_weights.current, notes.result.steps) == (False, 18)


def test_where_the_best_one_was_never_finished_the_next_evaluation_takes_its_place(make_session, tmp_path):
    class Killed(Notes):
        """As a writer that is killed: of what it has begun there is no manifest."""

        def evaluating(self):
            super().evaluating()
            if len(self.evaluations) == 1:
                manifest = tmp_path / "step-000000003" / "checkpoint.json"
                assert eventually(manifest.exists)
                manifest.unlink()

    first_is_best = {"early_stop": {"patience": 9, "min_delta": 9.0}}
    kept, notes = job(tmp_path, train=first_is_best), Killed()
    trainer = Trainer(kept, click_data(**DATA), make_session(1), WorkerGroup(), [notes])
    result = trainer.run()
    assert (result.best_step, result.best_weights.restored) == (6, True)
    assert trainer._evaluator.evaluate() == result.figures == notes.evaluations[1].figures


def test_where_no_evaluation_has_a_figure_the_reason_is_told(make_session, tmp_path):
    data = click_data(**DATA)
    for split in data.splits:
        data._split(split).labels[:] = 0
    run = Run(job(tmp_path, evaluate={"metric": "auc"}), make_session(1), data=data)
    assert (run.best.checkpoint, run.best.not_kept.partition(" ")[0]) == (None, "auc")
