"""The folder of a comparison: what is kept, and who may use it."""

import errno
import os

import pytest
from report_cases import INT8, NONE, fake_results

from embershard.compare.run.folder import RUNS, Folder, FolderInUse, NotAComparison, OtherExperiment
from embershard.compare.run.plan import Experiment
from embershard.proto.errors import CannotWrite

EXPERIMENT = Experiment(
    job={"train": {"batch_size": 256}},
    overrides=(),
    imports=(),
    arms=(("none", ("compression=null",)), ("int8", ())),
    bandwidths=("unlimited",),
    seeds=(0, 1),
    multiples=(1.0,),
    speed_steps=100,
    link="token bucket",
)
RUNS_MADE = fake_results((NONE, INT8), seeds=(1, 2)).runs


def test_runs_are_there_when_the_folder_is_opened_again(tmp_path):
    runs = RUNS_MADE
    with Folder(tmp_path / "out", EXPERIMENT) as folder:
        for run in runs:
            folder.add(run)
    with Folder(tmp_path / "out", EXPERIMENT) as folder:
        assert folder.runs == {run.key: run for run in runs}


def test_a_run_counts_once_its_line_is_synced(tmp_path, monkeypatch):
    run = RUNS_MADE[0]
    with Folder(tmp_path, EXPERIMENT) as folder:
        seen = []

        def fsync(descriptor):
            same = os.fstat(descriptor).st_ino == (tmp_path / RUNS).stat().st_ino
            seen.append((same, (tmp_path / RUNS).read_text(), dict(folder.runs)))

        monkeypatch.setattr(os, "fsync", fsync)
        folder.add(run)
        assert seen == [(True, run.model_dump_json() + "\n", {})]
        assert folder.runs == {run.key: run}


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_named_and_the_run_does_not_count(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Folder(tmp_path, EXPERIMENT) as folder:
        monkeypatch.setattr(os, call, full)
        with pytest.raises(CannotWrite, match=rf"{tmp_path}/runs\.jsonl: No space left on device"):
            folder.add(RUNS_MADE[0])
        assert not folder.runs


def test_half_a_line_is_left_out_and_written_past(tmp_path):
    first, second, *_ = RUNS_MADE
    with Folder(tmp_path, EXPERIMENT) as folder:
        folder.add(first)
        folder.add(second)
    path = tmp_path / RUNS
    path.write_bytes(path.read_bytes()[:-100])
    with Folder(tmp_path, EXPERIMENT) as folder:
        assert list(folder.runs) == [first.key]
        folder.add(second)
    with Folder(tmp_path, EXPERIMENT) as folder:
        assert list(folder.runs) == [first.key, second.key]


def test_a_run_that_was_made_again_counts_by_its_last_line(tmp_path):
    run = RUNS_MADE[0]
    with Folder(tmp_path, EXPERIMENT) as folder:
        folder.add(run.model_copy(update={"ok": False}))
        folder.add(run)
    with Folder(tmp_path, EXPERIMENT) as folder:
        assert folder.runs[run.key].ok


def test_a_folder_of_another_experiment_is_refused_with_the_difference(tmp_path):
    with Folder(tmp_path, EXPERIMENT):
        pass
    other = EXPERIMENT.model_copy(update={"speed_steps": None, "job": {"train": {"batch_size": 512}}})
    with pytest.raises(OtherExperiment) as caught, Folder(tmp_path, other):
        pass
    assert "  speed_steps: 100 there, null now" in str(caught.value)
    assert "  job.train.batch_size: 256 there, 512 now" in str(caught.value)


def test_a_folder_takes_more_and_fewer_seeds_and_keeps_the_settings_of_arms_that_it_had(tmp_path):
    run = RUNS_MADE[0]
    more = EXPERIMENT.model_copy(update={"seeds": (0, 1, 2), "arms": (("none", ("compression=null",)),)})
    for experiment in (EXPERIMENT, more, EXPERIMENT):
        with Folder(tmp_path, experiment) as folder:
            folder.add(run)
    both = Experiment.model_validate_json((tmp_path / "experiment.json").read_text())
    assert both == EXPERIMENT.model_copy(update={"seeds": (0, 1, 2)})
    other = more.model_copy(update={"arms": (("int8", ("compression=auto",)), ("fp16s", ()))})
    with pytest.raises(OtherExperiment, match=r'arms\.int8: \[\] there, \["compression=auto"\] now'):
        Folder(tmp_path, other).__enter__()


@pytest.mark.parametrize("name", ["notes.txt", "experiment.json"])
def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(NotAComparison, match="holds other files"), Folder(tmp_path, EXPERIMENT):
        pass
    assert (tmp_path / name).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_two_processes_do_not_share_a_folder(tmp_path):
    with Folder(tmp_path, EXPERIMENT):
        with pytest.raises(FolderInUse), Folder(tmp_path, EXPERIMENT):
            pass
    with Folder(tmp_path, EXPERIMENT):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="file/out"), Folder(tmp_path / "file" / "out", EXPERIMENT):
        pass
