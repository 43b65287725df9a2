"""Samples in memory and from streams: in which order they come, and which worker has which."""

import errno
import gzip
import io
import itertools
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.proto.errors import JobError
from embershard.worker.data import files
from embershard.worker.data.batch import RowsDataset, Samples, Schema
from embershard.worker.data.columns import Columns
from embershard.worker.data.files import count_lines, line_starts, read_blocks, read_range, read_text
from embershard.worker.data.readers.ctr_csv import CtrCsvStream
from embershard.worker.data.stream import in_batches, shuffled
from embershard.worker.data.text import Layout, TextSource
from harness.raises import raises

GLOBAL = Columns(ids="global")


def numbered(*sizes):
    """Blocks of these sizes whose sample i has id, dense and label i."""
    rows = Samples(*(np.arange(sum(sizes), dtype=kind) for kind in (np.int64, np.float32, np.float32)))
    edges = itertools.pairwise(np.cumsum([0, *sizes]))
    return [Samples(rows.ids[a:b, None], rows.dense[a:b, None], rows.labels[a:b]) for a, b in edges]


def ids(parts):
    return [int(i) for part in parts for i in part.ids[:, 0]]


def dataset(count, **options):
    (rows,) = numbered(count)
    schema = Schema(("number",), 1, count)
    return RowsDataset(schema, {"train": rows, "valid": rows}, where="numbers.csv", seed=5, **options)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 20), st.integers(0, 3))
def test_shares_are_disjoint_and_cover_everything(count, world_size, batch_size, epoch):
    data = dataset(count)
    evaluated = [ids(data.evaluate("valid", rank, world_size, batch_size)) for rank in range(world_size)]
    assert sorted(itertools.chain(*evaluated)) == list(range(count))  # some may be empty
    if count < world_size:
        with pytest.raises(JobError, match=rf"numbers\.csv: {count} samples cannot be split over {world_size} workers"):
            data.train(epoch, 0, world_size, batch_size)
        return
    shares = [ids(data.train(epoch, rank, world_size, batch_size)) for rank in range(world_size)]
    assert sorted(itertools.chain(*shares)) == list(range(count))
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1


def test_batch_k_of_all_workers_is_batch_k_of_one_with_the_joint_size():
    data = dataset(103)
    parts = [list(data.train(2, rank, 3, 10)) for rank in range(3)]
    for k, batch in enumerate(data.train(2, 0, 1, 30)):
        assert sorted(ids([batch])) == sorted(ids([part[k] for part in parts if k < len(part)]))


def test_each_epoch_has_another_order_and_the_same_epoch_the_same():
    data = dataset(50)
    assert ids(data.train(0, 0, 1, 7)) == ids(data.train(0, 0, 1, 7))
    assert ids(data.train(0, 0, 1, 7)) != ids(data.train(1, 0, 1, 7))
    assert ids(dataset(50, shuffle=False).train(1, 0, 1, 7)) == list(range(50))
    for batch in data.train(0, 1, 2, 6):
        assert batch.ids[:, 0].tolist() == batch.dense[:, 0].tolist()  # every column moves with its sample


def test_a_share_or_split_that_makes_no_sense_is_refused():
    data = dataset(4)
    for share in ((2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)):
        for call in (data.train, data.evaluate):
            with pytest.raises(ValueError, match="must be"):
                call(0 if call == data.train else "valid", *share)
    with pytest.raises(JobError):
        data.evaluate("test", 0, 1, 1)


SIZES = st.lists(st.integers(0, 30), max_size=12)


@given(SIZES, st.integers(1, 40), st.integers(0, 5))
def test_the_buffer_gives_each_row_once_and_stays_bounded(sizes, buffer_rows, seed):
    parts = list(shuffled(iter(numbered(*sizes)), buffer_rows, np.random.default_rng(seed)))
    assert sorted(ids(parts)) == list(range(sum(sizes)))
    assert all(len(part) <= buffer_rows + max(sizes) for part in parts)
    assert all((part.ids[:, 0] == part.labels).all() for part in parts)


@given(SIZES, st.integers(1, 40))
def test_batches_keep_order_and_only_the_last_is_smaller(sizes, batch_size):
    parts = list(in_batches(iter(numbered(*sizes)), batch_size))
    assert ids(parts) == list(range(sum(sizes)))
    assert all(len(part) == batch_size for part in parts[:-1])
    assert all(0 < len(part) <= batch_size for part in parts[-1:])


@pytest.fixture(params=["plain", "gzip"])
def csv_file(request, tmp_path):
    text = "label,n\n" + "".join(f"{i % 2},{i}\n" for i in range(5000))
    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(text.encode()) if request.param == "gzip" else text.encode())
    return path


def small_blocks(data, block_bytes=2000):
    for name, source in data._sources.items():
        kept = {field: getattr(source, field) for field in ("paths", "layout", "to_rows", "has_header")}
        data._sources[name] = TextSource(**kept, block_bytes=block_bytes)
    return data


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("block_bytes", [700, 10**6])
def test_streamed_shares_are_disjoint_and_cover_the_file(csv_file, world_size, block_bytes):
    data = CtrCsvStream({"train": csv_file, "valid": csv_file}, GLOBAL, num_ids=5000, shuffle_rows=500)
    small_blocks(data, block_bytes)
    shares = [ids(data.train(0, rank, world_size, 64)) for rank in range(world_size)]
    assert sorted(itertools.chain(*shares)) == list(range(5000))
    assert min(map(len, shares)) > 0.8 * 5000 / world_size  # also of a gzipped file that is one block
    evaluated = [ids(data.evaluate("valid", rank, world_size, 64)) for rank in range(world_size)]
    assert sorted(itertools.chain(*evaluated)) == list(range(5000))
    assert world_size > 1 or evaluated[0] == list(range(5000))


def numbered_files(folder, sizes, *, gzipped):
    """Files of these sizes whose lines count on from one to the next."""
    paths = []
    for number, (a, b) in enumerate(itertools.pairwise(np.cumsum([0, *sizes]))):
        text = "".join(f"1,{i}\n" for i in range(a, b)).encode()
        paths.append(folder / f"{number}.{'gz' if gzipped else 'csv'}")
        paths[-1].write_bytes(gzip.compress(text, mtime=0) if gzipped else text)
    return paths


def source(paths):
    return TextSource(paths=paths, layout=Layout(columns={"label": "label", "n": "id"}), to_rows=GLOBAL.rows)


def test_gzipped_files_of_one_block_are_shared_out_evenly(tmp_path):
    packed = source(numbered_files(tmp_path, [100] * 6, gzipped=True))
    shares = [ids(packed.blocks(rank, 3, None)) for rank in range(3)]
    assert [len(share) for share in shares] == [200] * 3
    assert sorted(i for share in shares for i in share) == list(range(600))


@pytest.mark.parametrize("text", ["1,0\n1,1\n1,2\n1,3\n1,4\n", "1,0\r\n1,1\n1,2\n1,3\n1,4"])
def test_each_worker_has_as_many_lines_of_a_gzipped_block_with_their_true_numbers(tmp_path, text):
    (tmp_path / "a.gz").write_bytes(gzip.compress(text.encode()))
    for workers in range(1, 8):
        shares = [ids(source([tmp_path / "a.gz"]).blocks(rank, workers, None)) for rank in range(workers)]
        assert sorted(itertools.chain(*shares)) == list(range(5))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    (tmp_path / "a.gz").write_bytes(gzip.compress(text.replace("1,3", "1,x").encode()))
    with pytest.raises(JobError, match=r"a\.gz:4: column 'n': 'x' is not an integer"):
        [ids(source([tmp_path / "a.gz"]).blocks(rank, 3, None)) for rank in range(3)]


@pytest.mark.parametrize("has_header", [False, True])
@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], [900, 0, 0, 1], [0, 5000, 20, 0]])
def test_which_worker_has_samples_does_not_depend_on_the_epoch(tmp_path, lengths, has_header):
    blank = "\n" * 40
    lines = "".join(f"1,{i},{'x' * length}\n{blank * (i % 2)}" for i, length in enumerate(lengths))
    (tmp_path / "a.csv").write_text(("label,n,note\n" if has_header else "") + lines)
    layout = Layout(columns={"label": "label", "n": "id", "note": "skip"})
    few = TextSource(paths=[tmp_path / "a.csv"], layout=layout, to_rows=GLOBAL.rows, has_header=has_header)
    found = set()
    for epoch in range(30):
        shares = [ids(few.blocks(rank, 5, np.random.default_rng(epoch))) for rank in range(5)]
        assert sorted(itertools.chain(*shares)) == [0, 1, 2, 3]
        found.add(tuple(map(bool, shares)))
    assert found in ({(True, True, True, True, False)}, {(True, True, True, False, False)})


def test_streamed_epochs_differ_and_repeat(csv_file):
    data = small_blocks(CtrCsvStream({"train": csv_file}, GLOBAL, num_ids=5000, shuffle_rows=1000))
    first = ids(data.train(0, 0, 2, 64))
    assert ids(data.train(0, 0, 2, 64)) == first
    assert ids(data.train(1, 0, 2, 64)) != first
    assert first != sorted(first)
    assert data.num_samples("train") is None


def test_a_bad_line_in_any_block_has_its_true_number(csv_file):
    raw = csv_file.read_bytes()
    gzipped = raw[:2] == b"\x1f\x8b"
    lines = (gzip.decompress(raw) if gzipped else raw).split(b"\n")
    for bad in (1, 1700, 5000):
        broken = b"\n".join([*lines[:bad], b"1,oops", *lines[bad + 1 :]])
        csv_file.write_bytes(raw)  # good while it is looked at
        data = small_blocks(CtrCsvStream({"train": csv_file}, GLOBAL, num_ids=5000))
        csv_file.write_bytes(gzip.compress(broken, mtime=0) if gzipped else broken)
        with pytest.raises(JobError, match=rf"a\.csv:{bad + 1}: column 'n': 'oops' is not an integer"):
            list(data.train(0, 0, 1, 64))


def test_ids_over_the_bound_are_named(csv_file):
    with pytest.raises(JobError, match=r"a\.csv:4002: column 'n': id 4000 is not below num_ids = 4000"):
        CtrCsvStream({"train": csv_file}, GLOBAL, num_ids=4000)
    with pytest.raises(ValueError, match="global ids need num_ids"):
        CtrCsvStream({"train": csv_file}, GLOBAL)


@pytest.mark.parametrize("text", ["", "label,n\n", "label,n\n\n\n", "label,n\n1,2\n3,4\n"])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_every_file_of_every_split_is_looked_at_first(csv_file, split, text):
    bad = csv_file.with_name("b.csv")
    bad.write_text(text)
    with pytest.raises(JobError, match=r"b\.csv"):
        CtrCsvStream({"train": csv_file, split: bad}, GLOBAL, num_ids=5000)


@pytest.mark.parametrize("block_bytes", [1, 3, 7, 1000])
@pytest.mark.parametrize("text", [b"a\n", b"a", b"\n\n", b"ab\ncd\n\nef", b"one\r\ntwo\r\n"])
@pytest.mark.parametrize("gzipped", [False, True])
def test_blocks_are_whole_lines_with_their_true_numbers(tmp_path, text, block_bytes, gzipped):
    path = tmp_path / "a.txt"
    path.write_bytes(gzip.compress(text, mtime=0) if gzipped else text)
    blocks = list(read_blocks(path, block_bytes))
    assert b"".join(block.text for block in blocks) == text
    for before, block in itertools.pairwise(blocks):
        assert before.text.endswith(b"\n")
        assert block.first_line == before.first_line + before.text.count(b"\n")
    assert blocks[0].first_line == 1


@pytest.mark.parametrize("end", ["\n", ""])
def test_lines_that_are_not_empty_are_found_from_any_byte(tmp_path, end):
    path = tmp_path / "a.txt"
    path.write_text("ab\n\r\ncd\n\n\nefg" + end)
    want = [0, 5, 5, 5, 5, 5, 10, 10, 10, 10, 10]
    assert [line_starts(path, [at]) for at in range(15)] == [[start] for start in want] + [[]] * 4
    assert line_starts(path, range(20)) == [0, 5, 10]


GZIPPED = gzip.compress(b"".join(b"%d,%d\n" % (i, i * i) for i in range(5000)))


NO_TEXT = [
    ("a.csv", None, "no such file"),
    ("a.csv", b"", "the file is empty"),
    ("a.csv", gzip.compress(b"", mtime=0), "the file is empty"),
    ("a.csv.gz", b"label,user\n1,2\n", "is not gzipped"),
    ("a.gz", GZIPPED[: len(GZIPPED) // 2], "cut or broken"),
    ("a.gz", GZIPPED[:20] + bytes([GZIPPED[20] ^ 255]) + GZIPPED[21:], "cut or broken"),
    ("a.gz", GZIPPED[:-6], "cut or broken"),
    (".", None, "is a folder"),
]


@pytest.mark.parametrize(("name", "text", "reason"), NO_TEXT)
def test_a_file_that_is_none_is_named(tmp_path, name, text, reason):
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with raises(JobError, where=re.compile(re.escape(str(tmp_path / name))), reason=re.compile(reason)):
        read_text(tmp_path / name)


@pytest.mark.parametrize("gzipped", [False, True])
def test_what_the_system_says_while_a_file_is_read_is_an_error_that_names_it(tmp_path, monkeypatch, gzipped):
    class Failing(io.BytesIO):
        def read(self, size=-1):
            if size != 2:  # what is read to see whether it is gzipped
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(size)

    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(b"a\n" * 9, mtime=0) if gzipped else b"a\n" * 9)
    monkeypatch.setattr(gzip if gzipped else Path, "open", lambda *_, **__: Failing(b"a\n" * 9))
    calls = [lambda: list(read_blocks(path))]
    if not gzipped:
        calls += [lambda: read_range(path, 0, 9), lambda: count_lines(path, 9)]
    for call in calls:
        with raises(JobError, where=re.compile(r"a\.csv"), reason=re.compile(os.strerror(errno.EIO))):
            call()


def test_a_file_without_line_ends_is_not_read_into_memory_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(1000))
    with pytest.raises(JobError, match="is it a text file"):
        list(read_blocks(path, 50))
