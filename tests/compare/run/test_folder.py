"""The folder of a comparison: what is kept, and who may use it."""

import errno
import os

import pytest
from report_cases import INT8, NONE, fake_results

from embershard.compare.run.folder import RUNS, Folder, FolderInUse, NotAComparison, OtherExperiment
from embershard.compare.run.plan import Experiment
from embershard.proto.errors import CannotWrite

EXPERIMENT = Experiment(
    job={"train": {"batch_size": 256}}, overrides=(), imports=(), bandwidths=("unlimited",), seeds=(0, 1),
    arms=(("none", ("compression=null",)), ("int8", ())), multiples=(1.0,), speed_steps=100, link="token bucket",
)  # fmt: skip
FIRST, SECOND, *_ = MADE = fake_results((NONE, INT8), seeds=(1, 2)).runs


def kept(path, *runs, experiment=EXPERIMENT):
    """Add some runs; those that are there when it is opened again."""
    with Folder(path, experiment) as folder:
        for run in runs:
            folder.add(run)
    with Folder(path, experiment) as folder:
        return folder.runs


def test_runs_are_there_when_the_folder_is_opened_again_each_by_its_last_line(tmp_path):
    assert kept(tmp_path / "out", FIRST.model_copy(update={"ok": False}), *MADE) == {run.key: run for run in MADE}


def test_half_a_line_is_left_out_and_written_past(tmp_path):
    kept(tmp_path, FIRST, SECOND)
    path = tmp_path / RUNS
    path.write_bytes(path.read_bytes()[:-100])
    assert list(kept(tmp_path)) == [FIRST.key]
    assert list(kept(tmp_path, SECOND)) == [FIRST.key, SECOND.key]


def test_a_run_counts_once_its_line_is_synced(tmp_path, monkeypatch):
    with Folder(tmp_path, EXPERIMENT) as folder:
        seen = []

        def fsync(descriptor):
            same = os.fstat(descriptor).st_ino == (tmp_path / RUNS).stat().st_ino
            seen.append((same, (tmp_path / RUNS).read_text(), dict(folder.runs)))

        monkeypatch.setattr(os, "fsync", fsync)
        folder.add(FIRST)
        assert seen == [(True, FIRST.model_dump_json() + "\n", {})]
        assert folder.runs == {FIRST.key: FIRST}


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_named_and_the_run_does_not_count(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Folder(tmp_path, EXPERIMENT) as folder:
        monkeypatch.setattr(os, call, full)
        with pytest.raises(CannotWrite, match=rf"{tmp_path}/runs\.jsonl: No space left on device; mend that"):
            folder.add(FIRST)
        assert not folder.runs


def test_a_folder_takes_more_and_fewer_seeds_and_keeps_the_settings_of_arms_that_it_had(tmp_path):
    more = EXPERIMENT.model_copy(update={"seeds": (0, 1, 2), "arms": (("none", ("compression=null",)),)})
    for experiment in (EXPERIMENT, more, EXPERIMENT):
        kept(tmp_path, FIRST, experiment=experiment)
    both = Experiment.model_validate_json((tmp_path / "experiment.json").read_text())
    assert both == EXPERIMENT.model_copy(update={"seeds": (0, 1, 2)})
    other = more.model_copy(update={"arms": (("int8", ("compression=auto",)), ("fp16s", ()))})
    with pytest.raises(OtherExperiment, match=r'  arms\.int8: \[\] there, \["compression=auto"\] now'):
        kept(tmp_path, experiment=other)


def test_a_folder_refuses_runs_of_other_code_and_takes_those_of_more_modules(tmp_path):
    def coded(**code):
        return kept(tmp_path, FIRST, experiment=EXPERIMENT.model_copy(update={"code_sha256": code}))

    coded(mine="a1")
    coded(mine="a1", theirs="b2")
    coded()  # a report alone imports nothing
    with pytest.raises(OtherExperiment, match=r'  code_sha256\.theirs: "b2" there, "b3" now\n'):
        coded(theirs="b3")


@pytest.mark.parametrize("name", ["notes.txt", "experiment.json"])
def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(NotAComparison):
        kept(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_two_processes_do_not_share_a_folder(tmp_path):
    with Folder(tmp_path, EXPERIMENT), pytest.raises(FolderInUse):
        kept(tmp_path)
    kept(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="file/out"):
        kept(tmp_path / "file" / "out")
