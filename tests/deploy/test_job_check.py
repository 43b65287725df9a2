"""The check of a job's code and data: what it names, with file and line, and what it leaves behind (nothing)."""

import hashlib
import re
from itertools import count

import pytest

from embershard.deploy.job_check import CheckEnded, check_job
from embershard.proto.errors import BadModule, JobError, UserCodeFailed
from harness.processes import marked
from harness.raises import raises

pytestmark = pytest.mark.integration
JOB = """\
model: {{name: fm}}
data: {{reader: "{module}:Logs"}}
embedding: {{optimizer: {{name: adagrad, lr: 0.1}}}}
train: {{batch_size: 8, epochs: 1}}
"""
HEAD = "import os, signal, subprocess, sys, time, numpy as np, embershard as es\n"
LOGS = """
class Logs(es.Reader):
    features, num_ids, splits = ("user", "item"), 100, ("valid",)
    def read(self, split):
        yield np.arange(80).reshape(40, 2), None, np.arange(40) % 2
"""
READ = LOGS.count("\n")  # the line of `yield`, with HEAD and without what stands between them
_names = count()


@pytest.fixture
def check(tmp_path):
    """Check a job whose reader's module begins with this code; what was said."""

    def check(begin="", logs=LOGS, job=JOB, **options):
        module = f"checked_{next(_names)}"
        (tmp_path / f"{module}.py").write_text(f"{HEAD}{begin}{logs}")
        (tmp_path / "job.yaml").write_text(job.format(module=module))
        said = []
        check_job(tmp_path / "job.yaml", say=said.append, **options)
        return said

    return check


def test_a_job_that_is_fine_passes_without_a_word(check):
    assert check() == []


def test_the_code_of_a_job_is_told_by_the_sha256_of_its_files(check, tmp_path):
    check()
    (module,) = tmp_path.glob("checked_*.py")
    assert check_job(tmp_path / "job.yaml") == {module.stem: hashlib.sha256(module.read_bytes()).hexdigest()}


def reads(code):
    return LOGS.replace("yield np.arange(80).reshape(40, 2), None, np.arange(40) % 2", code)


# (what the module begins with, its reader), the error, and fields of it; LINE is the line of what begins, or of `yield`
LINE = r"checked_\d+\.py:{}$"
BEGINS, YIELDS = re.compile(LINE.format(2)), re.compile(LINE.format(READ + 1))
BAD = [
    (("1 / 0\n", LOGS), BadModule, {"reason": re.compile(r"ZeroDivisionError.*checked_\d+\.py:2")}),
    (("sys.exit(3)\n", LOGS), BadModule, {"reason": re.compile(r"SystemExit: 3.*checked_\d+\.py:2")}),
    (("import no_such_module\n", LOGS), BadModule, {"reason": re.compile(r"no_such_module.*checked_\d+\.py:2")}),
    (("", "Logz = 3\n"), BadModule, {"reason": re.compile("did you mean Logz")}),
    (("os._exit(3)\n", LOGS), CheckEnded, {"how": "exit code 3", "doing": re.compile("importing checked_")}),
    (("os.kill(os.getpid(), 9)\n", LOGS), CheckEnded, {"how": "SIGKILL", "where": re.compile(r"checked_\d+\.py")}),
    (
        ("import faulthandler; faulthandler._sigsegv()\n", LOGS),
        CheckEnded,
        {"lines": re.compile(r"checked_\d+\.py\W+line 2 in")},
    ),
    (("os.fork()\n", LOGS), UserCodeFailed, {"where": BEGINS, "reason": re.compile("forks this process")}),
    (("", reads("os.fork(); yield np.ones((8, 2), int), None, np.ones(8)")), UserCodeFailed, {"where": YIELDS}),
    (("", reads("yield 1 / 0")), UserCodeFailed, {"where": YIELDS, "what": re.compile(r"\(train, epoch 1, batch 1\)")}),
    (("", reads("return iter(())")), UserCodeFailed, {"reason": "yielded no samples"}),
    (
        ("", reads("yield from [] if split == 'valid' else [(np.ones((8, 2), int), None, np.ones(8))]")),
        UserCodeFailed,
        {"reason": "yielded no samples", "what": re.compile(r"\(valid\)")},
    ),
    (
        ("EPOCHS = []\n", reads("EPOCHS.append(1); yield np.ones((8, 1 + (len(EPOCHS) == 1)), int), None, np.ones(8)")),
        UserCodeFailed,
        {"what": re.compile(r"epoch 2, batch 1"), "reason": re.compile("ids of 1 features")},
    ),
]


@pytest.mark.parametrize(("code", "error", "fields"), BAD)
def test_what_is_wrong_is_named_before_anything_starts(check, code, error, fields):
    with raises(error, **fields):
        check(*code)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("train.early_stop={patience: 1}", "train.early_stop"),
        ("train.lr_schedule={name: plateau}", "train.lr_schedule"),
        ("train.lr_schedule={name: cosine}", "train.lr_schedule.name"),
        ("strategy=local", "strategy"),
        ("model={name: neumf}", "model.name"),
        ("model={name: persia_dnn}", "model.name"),
        ("data.days=3", "data.days"),
        ("data.evaluation=candidates", "data.evaluation"),
    ],
)
def test_what_the_job_wants_of_a_reader_that_has_it_not_is_named_by_field(check, override, field):
    logs = LOGS.replace('num_ids, splits = ("user", "item"), 100, ("valid",)', '_ = ("user", "item", "other"), 1')
    logs = logs.replace("np.arange(80).reshape(40, 2)", "np.ones((40, 3), int)")
    with raises(JobError, where=field):
        check(logs=logs, overrides=[override])


@pytest.mark.parametrize("section", ["loss: checked_other:name", "callbacks: [checked_other:name]"])
def test_every_module_of_a_job_is_imported_in_a_step_that_names_it(check, tmp_path, section):
    (tmp_path / "checked_other.py").write_text("import os\nos._exit(3)\n")
    with raises(CheckEnded, doing="importing checked_other", where=str(tmp_path / "checked_other.py")):
        check(job=f"{JOB}{section}\n")


def test_a_module_that_prints_is_named(check):
    (said,) = check("print('hello')\n")
    assert re.search(r"note: .*checked_\d+\.py:2 prints", said)


STARTS = {
    "a process": "subprocess.Popen(['sleep', '1000'])\n",
    "one of another group": "subprocess.Popen(['sleep', '1000'], process_group=0)\n",
    "by multiprocessing": "import multiprocessing as m\nm.Process(target=time.sleep, args=(1000,)).start()\n",
}


@pytest.mark.parametrize("begin", STARTS.values(), ids=STARTS)
def test_processes_that_a_module_starts_are_named_and_ended(check, begin, monkeypatch, tmp_path):
    monkeypatch.setenv("CHECKED", str(tmp_path))
    (said,) = check(begin)
    assert re.search(r"note: .*checked_\d+\.py:[23] starts processes that keep running \(here 1\)", said)
    assert marked(str(tmp_path)) == []


def test_a_module_that_takes_long_is_named_with_its_line_and_may_be_interrupted(check, monkeypatch, tmp_path):
    monkeypatch.setattr("embershard.deploy.job_check.NEWS_SECONDS", 1.0)
    monkeypatch.setenv("CHECKED", str(tmp_path))

    def say(line):
        if re.search(r"importing checked_\d+ \(.*checked_\d+\.py:3\)", line):
            raise KeyboardInterrupt

    module = f"checked_{next(_names)}"
    (tmp_path / f"{module}.py").write_text(f"{HEAD}subprocess.Popen(['sleep', '1000'])\ntime.sleep(1000)\n")
    (tmp_path / "job.yaml").write_text(JOB.format(module=module))
    with pytest.raises(KeyboardInterrupt):
        check_job(tmp_path / "job.yaml", say=say)
    assert marked(str(tmp_path)) == []
