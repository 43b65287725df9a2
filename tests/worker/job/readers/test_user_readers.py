"""Jobs that name a reader of their own: which of their fields are the reader's, and where its module is found."""

import re
import sys
from itertools import count

import pytest

from embershard.proto.errors import BadModule, JobError, UserCodeFailed
from embershard.worker.job.job import Job
from embershard.worker.job.readers.user_defined import UserReaderSection
from embershard.worker.training.loader import DataShare, LoaderLost, LoaderProcess
from harness.eventually import eventually
from harness.job_files import load, mistakes
from harness.processes import marked, words
from harness.raises import raises

JOB = """\
model: {{name: fm}}
data:
  reader: "{module}:Logs"
  root: data
  days: 3
  where: {{a: [1, null]}}
embedding: {{optimizer: {{name: adagrad, lr: 0.1}}}}
train: {{batch_size: 8, epochs: 1}}
"""
LOGS = """\
import numpy as np, embershard as es
class Logs(es.Reader):
    features, num_ids, splits = ("user", "item"), 100, ("valid",)
    def __init__(self, root, days, where):
        self.given = (root, days, where)
    def read(self, split):
        yield np.arange(80).reshape(40, 2), None, np.arange(40) % 2
        if split == "broken":
            raise OSError("the disk is gone")
"""
_names = count()


@pytest.fixture
def job(folder, monkeypatch):
    """A job with a reader in a module of its own, beside the job file."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def job(*overrides, code=LOGS):
        module = f"my_data_{next(_names)}"
        (folder / f"{module}.py").write_text(code)
        return load(folder, JOB.format(module=module), *overrides)

    return job


def test_fields_that_are_not_the_sections_own_are_the_readers_arguments(job, folder):
    loaded = job("data.splits=4")
    assert isinstance(loaded.data, UserReaderSection)
    assert (loaded.has_user_code, loaded.data.splits, loaded.metric) == (True, 4, "auc")
    assert Job.model_validate_json(loaded.model_dump_json()) == loaded
    dataset = loaded.data.open(folder, 1)
    assert dataset._dataset.given == ((folder / "data").resolve(), 3, {"a": [1, None]})
    assert len(list(dataset.train(0, 0, 1, 8))) == 5


def test_what_an_evaluation_computes_is_that_of_the_reader(job, folder):
    loaded = job("data.evaluation=candidates")
    assert loaded.metric == "hr@10"
    with raises(JobError, where="data.evaluation", reason=re.compile("candidates, but .*:Logs says pointwise")):
        loaded.data.open(folder, 1)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.evaluation=ranking", "data.evaluation: input should be 'pointwise' or 'candidates', got 'ranking'"),
        ("data.reader='my data:x'", "data.reader: string should match pattern"),
        ("data.loader_processes=7", "data.loader_processes: input should be less than or equal to 1, got 7"),
        ("data.reader=ctrcsv", "data.reader: unknown 'ctrcsv'; did you mean ctr_csv?"),
        ("data.reader=null", "data.reader: is missing"),
    ],
)
def test_mistakes_beside_a_reader_are_named_by_field(folder, override, expected):
    (found,) = mistakes(folder, JOB.format(module="m"), override)
    assert expected in found


def test_a_loss_of_the_jobs_own_takes_any_labels_unless_the_job_says_otherwise(job, folder):
    code = LOGS.replace("np.arange(40) % 2", "np.full(40, 2.5)")
    for overrides in ([], ["loss=my:loss", "data.labels=probability"]):
        with raises(UserCodeFailed, reason=re.compile("label of 2.5")):
            next(job(*overrides, code=code).data.open(folder, 1).train(0, 0, 1, 8))
    assert next(job("loss=my:loss", code=code).data.open(folder, 1).train(0, 0, 1, 8)).labels[0] == 2.5


def test_a_module_in_the_jobs_folder_hides_no_installed_one(job, folder):
    (folder / "json.py").write_text("1 / 0")
    job()
    assert sys.path[-1] == str(folder.resolve())


def share(job, folder):
    return DataShare(data=job.data, folder=folder, seed=1, rank=0, world_size=1, batch_size=8)


@pytest.mark.integration
def test_the_loaders_process_names_the_line_of_a_reader_that_raises(job, folder):
    loaded = job(code=LOGS.replace('"broken"', '"train"'))
    where = re.compile(r"my_data_\d+\.py:9$")
    with LoaderProcess(share(loaded, folder)) as loader:
        with raises(UserCodeFailed, where=where, what=re.compile("epoch 1, batch 1"), reason=re.compile("the disk is")):
            list(loader.train(0))
    with LoaderProcess(share(job(code="import nothing_of_this_name"), folder)) as loader:
        with raises(BadModule, reason=re.compile("nothing_of_this_name")):
            list(loader.train(0))


@pytest.mark.integration
@pytest.mark.parametrize("ends", ["the loader's parent is done", "the loader ends"])
def test_what_a_reader_starts_ends_with_the_loaders_process(job, folder, monkeypatch, ends):
    monkeypatch.setenv("MARK", str(folder))
    dies = "os._exit(3)" if ends == "the loader ends" else "pass"
    start = f"        import os, subprocess; subprocess.Popen(['sleep', '1000']); {dies}\n"
    loaded = job(code=LOGS.replace("        yield", f"{start}        yield"))
    with LoaderProcess(share(loaded, folder)) as loader:
        if dies == "pass":
            next(loader.train(0))
            assert any("sleep" in words(process) for process in marked(str(folder)))
        else:
            with raises(LoaderLost, how="ended with exit code 3"):
                next(loader.train(0))
            assert marked(str(folder)) == []
    assert eventually(lambda: marked(str(folder)) == [])  # killed, and some of them soon dead
