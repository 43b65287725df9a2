"""The loader's process: the reader's batches, its errors, and no process that is left behind."""

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from embershard.proto.errors import JobError
from embershard.worker.job.readers.clicks import ClicksSection
from embershard.worker.job.readers.columns import CtrCsvSection
from embershard.worker.job.readers.interactions import ListsSection
from embershard.worker.job.readers.tabular import TabularSection
from embershard.worker.training.loader import DataShare, LoaderLost, LoaderProcess, send_batches
from harness.eventually import eventually
from harness.processes import descendants

pytestmark = pytest.mark.integration
CLICKS = ClicksSection(reader="clicks", samples=300)


def share(data, folder, batch_size=100, rank=0, world_size=1):
    return DataShare(data=data, folder=folder, seed=3, rank=rank, world_size=world_size, batch_size=batch_size)


def assert_equal(batches, others):
    for one, other in zip(batches, others, strict=True):
        for name in ("ids", "dense", "labels", "groups", "weights"):
            left, right = getattr(one, name), getattr(other, name)
            assert (left is None) == (right is None)
            assert left is None or (left.dtype == right.dtype and torch.equal(left, right)), name


def pairs(folder):
    (folder / "train.txt").write_text("".join(f"{user} {user + 10} {user + 20}\n" for user in range(40)))
    (folder / "test.txt").write_text("0 5\n")
    return ListsSection(reader="lists", train=Path("train.txt"), test=Path("test.txt"))


def labels_and_weights(folder):
    lines = [f"u{i},a|b,{i % 2},{i % 3 / 2},{i / 40}" for i in range(40)]
    (folder / "t.csv").write_text("\n".join(["user,tags,click,buy,weight", *lines]))
    features = {"user": {"min_count": 1}, "tags": {"type": "list", "separator": "|"}}
    section = TabularSection(
        reader="tabular", train=("t.csv",), label=("click", "buy"), weight="weight", features=features
    )
    return section.fit(folder, 0)


def only_child():
    """The process that this one has started, once it is there: a warm start takes a moment to hand it over."""
    assert eventually(lambda: len(descendants(os.getpid())) == 1)
    (process,) = descendants(os.getpid())
    return process


@pytest.mark.parametrize(
    "section",
    [lambda folder: CLICKS, pairs, labels_and_weights],
    ids=["with dense features", "without", "labels and weights"],
)
def test_the_loader_gives_the_readers_batches_in_their_order(section, tmp_path):
    data = section(tmp_path)
    reader = data.open(tmp_path, seed=3)
    with LoaderProcess(share(data, tmp_path, 64, 1, 2)) as loader:
        for epoch in range(2):
            expected = list(reader.train(epoch, 1, 2, 64))
            batches = list(loader.train(epoch))
            assert len(batches) == len(expected) > 0
            assert_equal(batches, expected)
            assert len(batches[-1]) < 64


def test_the_loader_gives_the_splits_that_it_is_asked_for(tmp_path):
    reader = CLICKS.open(tmp_path, seed=3)
    dealt = {"splits": 4, "skip": 1}  # what a run without splits had read of epoch 0
    with LoaderProcess(share(CLICKS, tmp_path, 50).model_copy(update=dealt)) as loader:
        process = only_child()
        for epoch, split in ((0, 2), (0, 0), (3, 1)):
            expected = list(reader.train(epoch, split, 4, 50))
            batches = list(loader.train(epoch, split))
            assert len(batches) == len(expected) == 2
            assert_equal(batches, expected)
    assert not process.is_running()


def test_a_mistake_in_the_data_is_the_readers_error_behind_the_batches_before_it(tmp_path):
    lines = [f"{i % 2},a{i}" for i in range(1000)]
    (tmp_path / "t.csv").write_text("\n".join(["label,c", *lines, "1,a,b,c"]) + "\n")
    data = CtrCsvSection(reader="ctr_csv", train=Path("t.csv"), stream=True, categorical=("c",))
    with pytest.raises(JobError) as expected:
        list(data.open(tmp_path, 3).train(0, 0, 1, 100))
    with LoaderProcess(share(data, tmp_path)) as loader, pytest.raises(JobError) as found:
        list(loader.train(0))
    assert str(found.value) == str(expected.value)
    assert "t.csv:1002" in str(found.value)


@pytest.mark.parametrize(("by", "how"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, "signal [0-9]+")])
def test_a_killed_loader_is_named(by, how, tmp_path):
    with LoaderProcess(share(CLICKS, tmp_path)) as loader:
        process = only_child()
        batches = loader.train(0)
        next(batches)
        process.send_signal(by)
        words = rf"process {process.pid}\) ended with {how}; .*loader_processes=0"
        with pytest.raises(LoaderLost, match=words):
            list(chain(batches, *map(loader.train, range(1, 1000))))  # what the pipe still holds comes first


def test_a_loader_without_an_answer_is_given_up(tmp_path):
    with (
        LoaderProcess(share(CLICKS, tmp_path), wait_timeout=timedelta(seconds=0.01)) as loader,
        pytest.raises(LoaderLost, match="made no batch within 0"),
    ):
        next(loader.train(0))


class Slow:
    """A reader, and its section, that makes a batch in a tenth of a second."""

    def open(self, folder, seed):
        return self

    def train(self, epoch, rank, world_size, batch_size):
        for batch in CLICKS.open(Path(), 3).train(epoch, rank, world_size, batch_size):
            time.sleep(0.1)
            yield batch


def test_a_loader_that_leaves_many_batches_out_is_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr("embershard.worker.training.loader._NEWS", timedelta(seconds=0.2))
    deep = DataShare.model_construct(**{**dict(share(CLICKS, tmp_path, 5)), "data": Slow(), "skip": 40})
    (out, into), loader = os.pipe(), LoaderProcess(deep, wait_timeout=timedelta(seconds=2))

    def sends():
        with suppress(BrokenPipeError), open(into, "wb") as pipe:
            send_batches(deep, (), pipe)

    sender = threading.Thread(target=sends)
    with open(out, "rb", buffering=0) as pipe:
        loader._process = SimpleNamespace(stdout=pipe, pid=0)
        sender.start()
        expected = list(CLICKS.open(tmp_path, 3).train(0, 0, 1, 5))[40:]
        assert_equal(loader.train(0), expected)
    sender.join()


def test_the_loader_ends_with_its_reader_and_when_nobody_reads(tmp_path):
    with LoaderProcess(share(CLICKS, tmp_path)):
        process = only_child()
    assert not process.is_running()

    with LoaderProcess(share(CLICKS, tmp_path)) as loader:
        process = only_child()
        next(loader.train(0))
        loader._process.stdout.close()  # as the kernel does when this process is killed
        assert loader._process.wait(30) == -signal.SIGPIPE
