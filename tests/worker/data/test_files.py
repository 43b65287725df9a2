import errno
import gzip
import io
import itertools
import os
import re
from pathlib import Path

import pytest

from embershard.proto.errors import JobError
from embershard.worker.data import files
from embershard.worker.data.files import count_lines, line_starts, read_blocks, read_range, read_text
from harness.raises import raises


@pytest.mark.parametrize("block_bytes", [1, 3, 7, 1000])
@pytest.mark.parametrize("text", [b"a\n", b"a", b"\n\n", b"ab\ncd\n\nef", b"one\r\ntwo\r\n"])
@pytest.mark.parametrize("gzipped", [False, True])
def test_blocks_are_whole_lines_with_their_true_numbers(tmp_path, text, block_bytes, gzipped):
    path = tmp_path / "a.txt"
    path.write_bytes(gzip.compress(text) if gzipped else text)
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


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.csv", None, "no such file"),
        ("a.csv", b"", "the file is empty"),
        ("a.csv", gzip.compress(b""), "the file is empty"),
        ("a.csv.gz", b"label,user\n1,2\n", "it is named .gz but is not gzipped"),
        ("a.gz", GZIPPED[: len(GZIPPED) // 2], "the gzip file is cut or broken"),
        ("a.gz", GZIPPED[:20] + bytes([GZIPPED[20] ^ 255]) + GZIPPED[21:], "the gzip file is cut or broken"),
        ("a.gz", GZIPPED[:-6], "the gzip file is cut or broken"),
        (".", None, "cannot be read"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, name, text, error):
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with raises(JobError, where=re.compile(re.escape(str(tmp_path / name))), reason=re.compile(error)):
        read_text(tmp_path / name)


@pytest.mark.parametrize("gzipped", [False, True])
def test_what_the_system_says_while_a_file_is_read_is_an_error_that_names_it(tmp_path, monkeypatch, gzipped):
    class Failing(io.BytesIO):
        def read(self, size=-1):
            if size != 2:  # what is read to see whether it is gzipped
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(size)

    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(b"a\n" * 9) if gzipped else b"a\n" * 9)
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
