"""Mistakes in job files: each is named with its line, or its override, and its field, and says why."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch

from embershard.worker.data.text import Layout
from embershard.worker.job.load import JobFileError, load_job
from harness.job_files import CODECS, GOOD, MODES, NCF, SPLITS, changed, load, mistakes, write


def test_an_unknown_schedule_is_refused_in_one_line_with_all_that_there_are(folder):
    assert mistakes(folder, GOOD, "train.lr_schedule.name=nope") == [
        "--set train.lr_schedule.name=nope: train.lr_schedule.name: "
        "input should be 'constant', 'linear', 'cosine', 'step', 'plateau' or 'torch', got 'nope'"
    ]


def test_all_mistakes_are_named_at_once_each_with_line_and_field(folder):
    text = GOOD.replace("hidden: [8, 4]", "hiden: [8, 4]").replace("dim: 4", "dim: four")
    text = text.replace("lr: 1e-3", "lr: -1").replace("  batch_size: 32\n", "").replace("name: normal", "name: norml")
    found = mistakes(folder, text + "workrs: 2\n")
    assert found == [
        "job.yaml:3: model.hiden: unknown field; did you mean hidden?",
        "job.yaml:10: embedding.dim: input should be a valid integer, unable to parse string as an integer, got 'four'",
        "job.yaml:11: embedding.optimizer.lr: must be >= 0, got -1.0",
        "job.yaml:12: embedding.initializer.name: unknown 'norml'; did you mean normal?",
        "job.yaml:13: train.batch_size: is missing",
        "job.yaml:17: workrs: unknown field; did you mean workers?",
    ]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("model: [", "job.yaml:1: not YAML: while parsing a flow node expected the node content"),
        ("- 1\n", "job.yaml:1: a job is a mapping of sections (model, data, train, ...)"),
        ("", "job.yaml:1: a job is a mapping of sections (model, data, train, ...)"),
        ("a: 1\na: 2\n", 'job.yaml:2: not YAML: while constructing a mapping found duplicate key "a"'),
        ("a: &x 1\nb: *x\n", "job.yaml:2: the alias *x: write its value out"),
        ("a: 1\n? [1]\n: 2\n", "job.yaml:2: not YAML: a key must be a word"),
        ("a: !!python/object/apply:os.system [ls]\n", "job.yaml:1: a: unknown field"),
    ],
)
def test_what_is_no_mapping_of_sections_is_refused(folder, text, want):
    assert any(line.startswith(want) for line in mistakes(folder, text)), mistakes(folder, text)


def test_a_missing_section_or_choice_is_named(folder):
    assert mistakes(
        folder, "model: {factors: 8}\ndata: 3\ntrain: {batch_size: 1}\nembedding: {optimizer: {lr: 1}}\n"
    ) == [
        "job.yaml:1: model.name: is missing",
        "job.yaml:2: data: is a section of fields, got 3",
        "job.yaml:4: embedding.optimizer.name: is missing",
    ]


def test_a_missing_or_binary_file_is_named(folder):
    with pytest.raises(JobFileError, match=r"no\.yaml: cannot be read: No such file"):
        load_job(folder / "no.yaml")
    (folder / "job.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobFileError, match="not UTF-8"):
        load_job(folder / "job.yaml")


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENAMETOOLONG, errno.ESTALE])
def test_data_that_cannot_be_looked_at_is_named_with_its_line(folder, monkeypatch, code):
    stat = Path.stat

    def fails(path, **options):
        if path.name == "valid.csv":
            raise OSError(code, os.strerror(code))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", fails)
    assert mistakes(folder, GOOD) == [
        f"job.yaml:8: data.valid: data/valid.csv cannot be read: {os.strerror(code)}; "
        "check data.root (or pass --data), or the name"
    ]


def test_a_name_that_no_file_can_have_is_named_with_its_line(folder):
    for name in ('"a\\0b"', "x" * 300):
        (mistake,) = mistakes(folder, changed(("valid: valid.csv", f"valid: {name}")))
        assert mistake.startswith("job.yaml:8: data.valid: ")


def test_a_data_root_where_there_is_no_section_is_named(folder):
    (folder / "job.yaml").write_text(GOOD.replace("data:\n", "data: 3\nold:\n"))
    with pytest.raises(JobFileError, match=r"--data .*nowhere: data\.root: data holds no fields, but 3"):
        load_job(folder / "job.yaml", data_root=folder / "nowhere")


@pytest.mark.parametrize("text", ["§", "", "::", '"', "\r", "\n"])
def test_a_delimiter_that_parsers_do_not_take_is_refused(folder, text):
    reason = f"must be one ASCII character, no quote or line end, got {text!r}"
    given = GOOD.replace("  root: data\n", f"  root: data\n  delimiter: {json.dumps(text)}\n")
    assert mistakes(folder, given) == [f"job.yaml:7: data.delimiter: {reason}"]
    with pytest.raises(ValueError, match=re.escape(f"delimiter {reason}")):
        Layout(columns={"label": "label"}, delimiter=text)


@pytest.mark.parametrize(
    ("section", "want"),
    [
        ("reader: clicks", "train.epochs: the data has no end: give data.samples, or train.samples instead"),
        ("reader: ncf, prefix: p", "model.name: two_tower learns from positives alone: set data.negatives to 0"),
        ("reader: ctr_csv, train: train.csv, num_ids: 3", "data.num_ids: has no meaning for hashed ids; remove it"),
        ("reader: ctr_csv, train: train.csv, ids: global, stream: true", "data.num_ids: must be given"),
        ("reader: ctr_csv, train: train.csv, halve_valid_by: a", "data.halve_valid_by: makes a test split"),
        ("reader: ctr_csv, train: train.csv, skip: [a], numeric: [a]", "data.numeric: column 'a' is named twice"),
        ("reader: parquet, train: []", "data.train: tuple should have at least 1 item"),
    ],
)
def test_contradictions_of_the_data_are_refused(folder, section, want):
    write(folder, {"data/" + name: text for name, text in NCF.items()})
    model = "two_tower" if "ncf" in section else "fm"
    text = f"model: {{name: {model}}}\ndata: {{root: data, {section}}}\n"
    text += "embedding: {optimizer: {name: sgd, lr: 1}}\ntrain: {batch_size: 2, epochs: 1}\n"
    assert any(want in line for line in mistakes(folder, text)), mistakes(folder, text)


# (the file, what overrides it, the beginning of each mistake or a part of it)
OF_FIELDS = [
    (
        changed(("name: deepfm\n  hidden: [8, 4]", "name: gmf"), ("  dim: 4\n", "")),
        ["job.yaml:2: model.name: gmf needs a user and an item per sample, but data.reader ctr_csv reads features"],
    ),
    (
        changed(("name: deepfm\n  hidden: [8, 4]", "name: lr")),
        ["job.yaml:9: embedding.dim: has no meaning for lr (it has only weights); remove it"],
    ),
    (
        changed(("name: deepfm\n  hidden: [8, 4]", "name: persia_dnn")),
        ["job.yaml:2: model.name: persia_dnn needs dense features, but data.reader ctr_csv has none here"],
    ),
    (changed(("  epochs: 3\n", "")), ["job.yaml:13: train: give exactly one of epochs, steps and samples"]),
    (
        changed(("epochs: 3", "epochs: 3\n  steps: 4")),
        ["job.yaml:13: train: give exactly one of epochs, steps and samples"],
    ),
    (
        changed(("epochs: 3", "steps: 3"), ("factor: 0.1", "warmup_steps: 3")),
        ["job.yaml:16: train.lr_schedule.warmup_steps: must be below train.steps, which is 3"],
    ),
    (
        changed(("factor: 0.1", "end: 0.1")),
        ["job.yaml:16: train.lr_schedule.end: has no meaning for plateau; remove it"],
    ),
    (
        changed(("name: plateau", "name: step")),
        ["job.yaml:16: train.lr_schedule.every: must say after how many steps the rate falls"],
    ),
    (GOOD + "evaluate: {every: 4}\n", ["job.yaml:18: evaluate.every: must be at most train.epochs, which is 3"]),
    (
        GOOD + "evaluate: {metric: hr@10}\n",
        [
            "job.yaml:18: evaluate.metric: 'hr@10' is not computed on data.reader ctr_csv; "
            "it has auc, logloss, ne, calibration"
        ],
    ),
    (
        GOOD + "evaluate: {top_k: 5}\n",
        ["job.yaml:18: evaluate.top_k: has no meaning for data.reader ctr_csv; remove it"],
    ),
    (
        changed(("  valid: valid.csv\n", "")),
        [
            "job.yaml:15: train.lr_schedule: needs something to evaluate on: name a file in data.valid or data.test",
            "job.yaml:16: train.early_stop: needs something to evaluate on: name a file in data.valid or data.test",
        ],
    ),
    (changed(("epochs: 3", "samples: 3")) + "workers: 4\n", ["job.yaml:18: workers: 4 workers cannot share 3 samples"]),
    (
        changed(("hidden: [8, 4]", "batch_norm: true"), ("batch_size: 32", "batch_size: 1")),
        ["job.yaml:14: train.batch_size: batch norm needs at least 2 samples"],
    ),
    (
        changed(("valid: valid.csv", "valid: walid.csv")),
        ["job.yaml:8: data.valid: no file data/walid.csv; check data.root (or pass --data), or the name"],
    ),
    (
        changed(("train: train.csv", "train: train.csv\n  stream: true"), ("plateau, factor: 0.1", "cosine")),
        [
            "job.yaml:17: train.lr_schedule.name: cosine needs the number of steps, which streamed text does not tell: "
            "give train.steps in place of train.epochs"
        ],
    ),
]

IN_FILE = [
    (
        CODECS + "compression:\n  push: topk:1.5\n",
        "job.yaml:6: compression.push: codec 'topk:1.5': its ratio must be above 0 and at most 1, got 1.5",
    ),
    (CODECS + "compression:\n  pull: topk:0.5\n", "job.yaml:6: compression.pull: codec 'topk:0.5'"),
    (
        CODECS + "compression:\n  push: onebit\n",
        "job.yaml:6: compression.push: codec 'onebit' on the push of rows: it serves dense weights: a row that is",
    ),
    (
        CODECS + "compression:\n  push: powersgd:2\n",
        "job.yaml:6: compression.push: codec 'powersgd:2' on the push of rows",
    ),
    (CODECS + "compression:\n  pull: delta\n", "job.yaml:6: compression.pull: codec 'delta' on the pull of rows"),
    (
        CODECS + "compression:\n  tables:\n    linear: {push: onebit}\n",
        "job.yaml:7: compression.tables.linear.push: codec 'onebit' on the push of rows",
    ),
    (CODECS + "compression:\n  push: gzip\n", "job.yaml:6: compression.push: codec 'gzip': there is no 'gzip' ("),
    (
        CODECS + "compression:\n  push: 3\n",
        "job.yaml:6: compression.push: must be the text of a codec, as int8 or topk:0.01, got 3",
    ),
    (CODECS + "compression:\n  pushh: int8\n", "job.yaml:6: compression.pushh: unknown field; did you mean push?"),
    (
        CODECS + "compression:\n  push:\n    at: {0: none,\n      10: topk:0}\n",
        "job.yaml:8: compression.push.at.10: codec 'topk:0': its ratio must be above 0 and at most 1, got 0",
    ),
    (
        CODECS + "compression:\n  push:\n    at: {10: int8}\n",
        "job.yaml:7: compression.push.at: a schedule of codecs begins",
    ),
]

MODES_IN_FILE = [
    (MODES + "strategy: ddp\n", ["job.yaml:6: shards: strategy ddp has no shards; remove it"]),
    (
        MODES + "strategy: local\n",
        [
            "job.yaml:5: workers: strategy local trains in one process; set it to 1, or use strategy ddp",
            "job.yaml:6: shards: strategy local has no shards; remove it",
        ],
    ),
]
OF_MODES = [
    (["strategy=ddp", "shards=2"], "shards: strategy ddp has no shards"),
    (["strategy=local", "workers=2"], "workers: strategy local trains in one process"),
    (["strategy=ddp", "train.staleness=4"], "train.staleness: has no meaning for strategy ddp"),
    (["strategy=ddp", "train.lease=4"], "train.lease: has no meaning for strategy ddp"),
    (["strategy=ddp", "train.staleness_aware_lr=true"], "train.staleness_aware_lr: has no meaning for strategy ddp"),
    (["strategy=ddp", "train.prefetch=2"], "train.prefetch: has no meaning for strategy ddp"),
    (["strategy=ddp", "embedding.cache={rows: 9}"], "embedding.cache: has no meaning for strategy ddp"),
    (["strategy=ddp", "train.staleness=0", "train.prefetch=1"], "train.prefetch: has no meaning for strategy ddp"),
    (["strategy=ddp", "dense.mode=fsdp"], "dense.mode: has no meaning for strategy ddp"),
    (["strategy=local", "dense.mode=ddp"], "dense.mode: has no meaning for strategy local"),
    (["strategy=ddp", "data.ids=hashed"], "strategy: strategy ddp needs tables in memory, and hashed ids have 2**62"),
    (["strategy=ddp", "embedding.optimizer.name=rmsprop"], "embedding.optimizer.name: strategy ddp trains by torch"),
    (["strategy=ddp", "embedding.optimizer={name: ftrl, lr: 1}"], "embedding.optimizer.name: strategy ddp trains by"),
    (
        [
            "strategy=ddp",
            "embedding={optimizer: {name: ftrl, lr: 1}, groups: [{match: x, optimizer: {name: sgd, lr: 1}}]}",
        ],
        "embedding.optimizer.name: strategy ddp trains by torch",
    ),
    (
        ["strategy=ddp", "embedding.optimizer={name: sgd, lr: 1, momentum: 0.9}"],
        "embedding.optimizer.momentum: strategy ddp trains by torch",
    ),
    (["strategy=ddp", "dense.optimizer={name: ftrl, lr: 1}"], "dense.optimizer.name: torch applies it to the dense"),
    (["dense.mode=ddp", "dense.optimizer={name: ftrl, lr: 1}"], "dense.optimizer.name: torch applies it to the dense"),
    (["dense.mode=ddp", "embedding.optimizer.name=ftrl"], "embedding.optimizer.name: torch applies it to the dense"),
    (
        ["strategy=ddp", "embedding.groups=[{match: linear, optimizer: {name: ftrl, lr: 1}}]"],
        "embedding.groups.0.optimizer.name: strategy ddp trains by torch",
    ),
    (
        ["train.staleness=local(2)", "embedding.optimizer.name=ftrl"],
        "embedding.optimizer.name: train.staleness local(2)",
    ),
    (
        ["train.staleness=local(2)", "dense.optimizer={name: ftrl, lr: 1}"],
        "dense.optimizer.name: train.staleness local(2)",
    ),
    (
        ["dense.mode=ddp", "dense.groups=[{match: first_order, optimizer: {name: ftrl, lr: 1}}]"],
        "dense.groups.0.optimizer.name: torch applies it",
    ),
    (
        ["dense.mode=ddp", "dense.optimizer={name: sgd, lr: 1, clip_norm: 1}"],
        "dense.optimizer.clip_norm: bounds a block of 1024 dense floats",
    ),
    (["strategy=hybrid", "dense.mode=ps"], "dense.mode: strategy hybrid keeps dense weights in the workers"),
    (["strategy=hybrid", "train.staleness=local(2)"], "strategy: all-reduces dense weights at every step"),
    (["dense.mode=fsdp", "train.staleness=local(2)"], "dense.mode: all-reduces dense weights at every step"),
    (["train.staleness=local(2)", "train.prefetch=1"], "train.prefetch: train.staleness local(2) reads copies of its"),
    (["train.staleness=local(2)", "embedding.cache={rows: 9}"], "embedding.cache: train.staleness local(2) reads cop"),
    (
        ["train.staleness=local(2)", "embedding.optimizer={name: ftrl, lr: 0.1}"],
        "train.staleness local(2) trains copies of rows, which knows no ftrl; use sgd, adagrad, rowwise_adagrad",
    ),
    (
        ["train.staleness=local(2)", "train.staleness_aware_lr=true"],
        "train.staleness_aware_lr: with train.staleness local(2)",
    ),
    (
        ["train.staleness=0", "train.staleness_aware_lr=true"],
        "train.staleness_aware_lr: with train.staleness 0 no push is stale",
    ),
    (["train.staleness=0", "train.prefetch=1"], "train.prefetch: pulls 1 clocks ahead, beyond train.staleness 0"),
    (["train.staleness=0", "embedding.cache={staleness: 1}"], "embedding.cache: its copies may be 1 clocks old"),
    (["train.staleness=4", "train.prefetch=5"], "train.prefetch: pulls 5 clocks ahead, beyond train.staleness 4"),
    (
        ["train.staleness=4", "train.prefetch=4", "embedding.cache={staleness: 1}"],
        "embedding.cache: its copies may be 5 clocks old",
    ),
    (["train.lease=0"], "train.lease: input should be greater than or equal to 0.1"),
]

OF_CODECS = [
    (["strategy=local", "compression={push: int8}"], "compression: strategy local has no shards to send anything to"),
    (
        ["dense.mode=ddp", "compression={dense: {push: int8}}"],
        "compression.dense: torch all-reduces the dense weights (dense.mode ddp), past the shards; remove it",
    ),
    (
        ["embedding.optimizer.momentum=0.9", "compression={push: dgc:0.01}"],
        "compression.push: dgc:0.01 applies momentum before it selects, and the optimizer's 0.9 would again",
    ),
    (
        ["dense.optimizer={name: sgd, lr: 1, momentum: 0.5}", "compression={dense: {push: dgc:0.01}}"],
        "compression.dense.push: dgc:0.01 applies momentum before it selects, and the optimizer's 0.5 would again",
    ),
    (
        ["train.staleness=local(4)", "compression={push: dgc:0.1}"],
        "compression.push: dgc:0.1 keeps a momentum of gradients, and train.staleness local(4) pushes differences of",
    ),
    (
        ["compression={push: int8, residual_rows: 9}"],
        "compression.residual_rows: no codec of an embedding table leaves anything for later; remove it",
    ),
    (
        ["compression={dense: {push: onebit}, residual_rows: 9}"],
        "compression.residual_rows: no codec of an embedding table leaves anything for later; remove it",
    ),
    (["compression={push: topk:0.1, warmup_steps: 9}"], "compression.warmup_steps: only dgc has it, and no push"),
    (["compression={push: topk:0.1, momentum: 0.9}"], "compression.momentum: only dgc has it, and no push travels so"),
    (["compression={auto: true, push: int8}"], "compression.push: auto chooses it; remove it, or name tables under"),
    (
        ["compression={auto: true, allow: [int8, powersgd:2]}"],
        "compression.allow.1: what powersgd:2 sends is not known before it does; name it under compression.tables",
    ),
    (
        ["compression={auto: true, allow: [dgc:0.01]}"],
        "compression.allow.0: dgc begins with a quarter of all elements, which later steps do not send; set warmup",
    ),
    (
        ["train.staleness=local(4)", "compression=auto"],
        "compression.auto: most steps send nothing with train.staleness local(4), and auto judges by steps",
    ),
    (["compression={allow: [int8]}"], "compression.allow: says what auto may choose; add auto: true"),
    (["compression={auto: true, unless_slower: true}"], "compression.unless_slower: auto tries what it chooses anyway"),
    (
        ["train.staleness=local(4)", "compression={push: int8, unless_slower: true}"],
        "compression.unless_slower: most steps send nothing with train.staleness local(4); remove either",
    ),
    (["compression={push: none, unless_slower: true}"], "compression.unless_slower: there is no codec to try; remove"),
    (
        ["compression={push: {at: {0: none, 9: int8}}, unless_slower: true}"],
        "compression.unless_slower: codecs are tried in the first steps, and a schedule changes them later; remove",
    ),
    (
        ["compression={push: dgc:0.01, unless_slower: true}"],
        "compression.unless_slower: dgc begins with a quarter of all elements, which later steps do not send; set warm",
    ),
]

OF_WORKERS = [
    (("dense.mode=ddp",), "data.splits: gives workers uneven numbers of steps, but dense.mode ddp makes"),
    (("train.steps=10",), "data.splits: deals out whole epochs: give train.epochs in place of train.steps"),
    (("data.splits=2",), "data.splits: must be at least as many as workers, which are 3"),
    (("data.splits=0",), "data.splits: must be a number of parts, auto or null, got 0"),
    (("data.splits=null", "dense.mode=fsdp", "train.restart_workers=1"), "train.restart_workers: has no meaning for"),
    (
        ("strategy=ddp", "workers=1", "data.splits=null", "train.restart_workers=1"),
        "train.restart_workers: has no meaning for strategy ddp, which ends",
    ),
    (("strategy=ddp", "data.splits=4"), "data.splits: gives workers uneven numbers of steps, but strategy ddp makes"),
    (("train.samples=10",), "data.splits: deals out whole epochs: give train.epochs in place of train.samples"),
    (("workers=1", "train.restart_workers=1"), "train.restart_workers: starts workers again beside others"),
]

CASES = [
    *((text, (), wants) for text, wants in [*OF_FIELDS, *MODES_IN_FILE]),
    *((text, (), [want]) for text, want in IN_FILE),
    *((MODES, overrides, [want]) for overrides, want in OF_MODES),
    *((CODECS, overrides, [want]) for overrides, want in OF_CODECS),
    *((SPLITS, overrides, [want]) for overrides, want in OF_WORKERS),
]


@pytest.mark.parametrize(("text", "overrides", "wants"), CASES)
def test_fields_that_contradict_each_other_are_refused(folder, text, overrides, wants):
    found = mistakes(folder, text, *overrides)
    assert all(want in line for want, line in zip(wants, found, strict=True)), found


@pytest.mark.parametrize("word", ["-1", "true", "local", "local(0)", "1.5", "[1]"])
def test_another_staleness_is_refused(folder, word):
    (line,) = mistakes(folder, MODES, f"train.staleness={word}")
    assert "train.staleness: must be 0, a number of clocks, off or local(steps), got" in line


def test_data_parallel_needs_a_gpu(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = mistakes(folder, MODES, "strategy=dp")
    assert "strategy: dp (DataParallel) splits a batch over GPUs, and this machine has none; use local or ddp" in line
    assert len(mistakes(folder, MODES, "strategy=dp", "train.device=cpu")) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load(folder, MODES, "strategy=dp").workers == 1
    (line,) = mistakes(folder, MODES, "strategy=dp", "workers=2")
    assert "workers: strategy dp trains in one process; set it to 1" in line
    want = "model.name: two_tower compares each sample with the whole batch, which strategy dp splits; use ddp"
    assert any(want in line for line in mistakes(folder, MODES, "strategy=dp", "model.name=two_tower"))
    (line,) = mistakes(folder, MODES, "strategy=dp", "train.device=cpu")
    assert "train.device: strategy dp needs GPUs" in line


def test_gzipped_text_is_not_dealt_out_where_it_streams(folder):
    (folder / "a.csv.gz").write_bytes(b"")
    with pytest.raises(JobFileError, match=r"data.splits: a.csv.gz would be read from its start for every split"):
        load(folder, SPLITS, "data={reader: ctr_csv, train: a.csv.gz, stream: true, splits: 8}")
    load(folder, SPLITS, "data={reader: ctr_csv, train: a.csv.gz, splits: 8}")  # read once, into memory
    (folder / "a.csv").write_text("label,a\n1,2\n")
    load(folder, SPLITS, "data={reader: ctr_csv, train: a.csv, stream: true, splits: 8}")
