"""What a manifest says survives, and nothing else is taken for one."""

import dataclasses
import hashlib

import msgpack
import numpy as np
import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.errors import BadSnapshotName, SnapshotDamaged, SnapshotTooNew
from embershard.proto.snapshot import manifest as module
from embershard.proto.spec import SGD, Custom, Normal, TableSpec, Uniform
from harness.raises import raises

GOLDEN = "dadbc712d5e3264d4d92e80af0ac390e71974baf47cf178d122d27ebfeccfa23"
GOLDEN_2 = "a7d0b9c823ff7255317dfe800f737f671d52f86d1e262cf18e6d355de4deab61"
GOLDEN_3 = "459a70a6912308e262dc22d5258dd62afe3988ba5969503837ef0a4df9387cbd"
FILE = "shard-{}-00000000000000ff/0-0.safetensors"
SPEC = TableSpec(name="a/b", dim=3, optimizer=SGD(lr=0.5, momentum=0.9, nesterov=True), initializer=Uniform(), seed=7)
OWN = TableSpec(
    name="own",
    dim=1,
    optimizer=Custom(function="mine:step", lr=0.1, settings={"z": 1.0, "a": 2.0}),
    initializer=Normal(std=0.5),
    id_space="items",
)


def part(shard, of=2, spec=SPEC, path=FILE) -> module.ShardPart:
    file = module.BlockFile(path.format(shard), 72, "ab" * 32, 3, 5, 9)
    window = module.WorkerWindow(3, 2**63, 17, ((17, 5, 0), (19, 4, 1)))
    return module.ShardPart(
        shard,
        of,
        1,
        12 + shard,
        (window,),
        (module.TableBlocks(spec, 3, 3, (file,)), module.TableBlocks(OWN, 0, 0, ())),
    )


def manifest(**changes) -> module.Manifest:
    made = module.Manifest(
        "monday", 1.5, "0.1", (part(0), part(1)), {"step": 9, "rng": b"\0\1", "names": ["a", {"b": None}]}
    )
    return dataclasses.replace(made, **changes)


GOOD = module.pack_manifest(manifest())


def sealed(version=1, form=module.FORMAT, body=None) -> bytes:
    envelope = msgpack.unpackb(GOOD)
    return msgpack.packb({**envelope, "version": version, "format": form, "body": body or envelope["body"]})


def plain(shard=0, of=1, **changes):
    """The plain form of a part, with these fields."""
    return module._plain_part(part(shard, of)) | changes


def with_table(**changes):
    """A sealed part whose first table has these fields."""
    return module._seal(plain(tables=[{**TABLE, **changes}]))


TABLE = plain()["tables"][0]


def test_a_manifest_survives_its_file():
    back = module.unpack_manifest(GOOD, "m")
    assert back == manifest()
    assert back.tables["a/b"].rows == 6
    assert [file.path for file in back.tables["a/b"].files] == [FILE.format(0), FILE.format(1)]
    assert (back.rows, back.bytes, back.clock, back.num_shards) == (6, 144, 12, 2)


def test_the_bytes_of_a_manifest_stay_what_version_1_wrote():
    assert hashlib.sha256(GOOD).hexdigest() == GOLDEN


def test_the_bytes_of_a_manifest_with_control_are_those_of_version_2():
    tables = [["a/b", None, True, ["int8", "none"]]]
    control = {"tables": tables, "lsn": 7, "nested": {"payload": b"\0", "seen": [1, 2]}}
    parts = tuple(dataclasses.replace(part(shard), control=control) for shard in range(2))
    data = module.pack_manifest(manifest(shards=parts))
    assert hashlib.sha256(data).hexdigest() == GOLDEN_2
    assert module.unpack_manifest(data, "m") == manifest(shards=parts)
    assert parts[0].table_flags() == {"a/b": (True, ("int8", "none"))}
    assert (msgpack.unpackb(data)["version"], msgpack.unpackb(GOOD)["version"]) == (2, 1)


def increment(path="../sunday", removed=(7, -(2**62)), **changes) -> module.Manifest:
    """A manifest of which one table of one shard is an increment."""
    gone = module.Increment(12, np.array(sorted(removed)))
    one = part(0)
    one = dataclasses.replace(one, tables=(dataclasses.replace(one.tables[0], increment=gone), *one.tables[1:]))
    return manifest(shards=(one, part(1)), id=2**63, parent=module.Parent(path, "cd" * 32), **changes)


def test_the_bytes_of_an_increment_are_those_of_version_3_which_older_readers_refuse():
    data = module.pack_manifest(increment())
    assert hashlib.sha256(data).hexdigest() == GOLDEN_3
    back = module.unpack_manifest(data, "m")
    assert back == increment()
    assert back.shards[0].tables[0].increment.removed.tolist() == [-(2**62), 7]
    assert (back.rows, back.tables["a/b"].rows, back.tables["a/b"].total_rows) == (15, 6, 15)
    with raises(SnapshotTooNew, got=3, want=2):
        dataclasses.replace(module._SEALED, version=2).unseal(data, "m")


def test_a_full_snapshot_that_may_have_increments_is_one_of_before():
    data = module.pack_manifest(manifest(id=7))
    assert module.unpack_manifest(data, "m") == manifest(id=7)
    assert msgpack.unpackb(data)["version"] == 1


@pytest.mark.parametrize("path", ["", "..", "../..", "../../a", "a", "/a", "../a/b", "../../../a/b", "../../../../etc"])
def test_a_parent_whose_path_leads_elsewhere_is_damaged(path):
    with pytest.raises(SnapshotDamaged):
        module.unpack_manifest(module.pack_manifest(increment(path)), "m")


def test_an_increment_of_nothing_is_damaged():
    with pytest.raises(SnapshotDamaged):
        module.unpack_manifest(module.pack_manifest(dataclasses.replace(increment(), parent=None)), "m")
    odd = module._plain_part(increment().shards[0])
    odd["tables"][0]["increment"]["removed"] = bytes(7)
    with pytest.raises(SnapshotDamaged):
        module.unpack_part(module._seal(odd), "p")


@pytest.mark.parametrize("codecs", [{}, {"push_codec": "topk:0.01+fp16s", "pull_codec": "mine:half"}])
def test_a_part_survives_its_file(codecs):
    spec = dataclasses.replace(SPEC, **{name: CodecName.parse(text) for name, text in codecs.items()})
    assert module.unpack_part(module.pack_part(part(1, spec=spec)), "p") == part(1, spec=spec)


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_anywhere_is_noticed(bit):
    for at in range(len(GOOD)):
        bad = bytearray(GOOD)
        bad[at] ^= 1 << bit
        with pytest.raises((SnapshotDamaged, SnapshotTooNew)):
            module.unpack_manifest(bytes(bad), "the/file")


def test_a_file_cut_anywhere_is_damaged():
    for end in range(len(GOOD)):
        with pytest.raises(SnapshotDamaged, match="the/file"):
            module.unpack_manifest(GOOD[:end], "the/file")


@pytest.mark.parametrize(
    "foreign",
    [b"\x80", b"\x90", b"{}", b"hello", b"\xc1", msgpack.packb({"format": "safetensors"}), sealed(form="other"),
     sealed(form=7), sealed(version=0), sealed(version=-1), msgpack.packb([1, 2])],
)  # fmt: skip
def test_other_peoples_files_are_no_manifest(foreign):
    with pytest.raises(SnapshotDamaged, match="damaged or not an embershard file"):
        module.unpack_manifest(foreign, "m")


def test_a_newer_version_says_upgrade_whatever_its_body_is():
    with raises(SnapshotTooNew, got=4, want=3):
        module.unpack_manifest(sealed(version=4, body=b"\xc1"), "m")


PATHS = ["../other/0-0.safetensors", "/etc/passwd", "shard-0-00000000000000ff/../../x.safetensors", ""]
PATHS += ["a.safetensors", f"{FILE.format(0)}\n", "shard-0-00000000000000FF/0-0.safetensors"]
SPECS = [{"dim": 0}, {"name": "../x"}, {"optimizer": {"name": "sgdd", "settings": []}}]
SPECS += [{"optimizer": {"name": "sgd", "settings": [["lr"]]}}, {"initializer": {"kind": "zeros", "params": {}}}]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        *[(module.pack_part(part(0, path=path)), "is no file of a snapshot") for path in PATHS],
        *[(with_table(spec={**TABLE["spec"], **spoil}), "spec") for spoil in SPECS],
        (with_table(rows=4), "another number"),
    ],
)
def test_a_part_with_a_path_or_a_table_that_cannot_be_is_damaged(data, words):
    with pytest.raises(SnapshotDamaged, match=words):
        module.unpack_part(data, "p")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shards": []}, "in order"),
        ({"shards": 7}, "list was expected, not int"),
        ({"shards": [7]}, "a map was expected, not int"),
        ({"shards": [plain(1, 2), plain(0, 2)]}, "in order"),
        ({"shards": [plain(0, 1), plain(1, 2)]}, "not parts of 2"),
        ({"shards": [plain(0, 2), module._plain_part(part(1, spec=dataclasses.replace(SPEC, dim=4)))]}, "3, not 4"),
        ({"shards": [plain(tables={})]}, "list"),
        ({"created": "now"}, "float was expected"),
        ({"extra": None}, "dict was expected"),
        ({"shards": [plain(clock=True)]}, "'clock': int was expected, not bool"),
        ({"shards": [plain(control=7)]}, "'control': dict was expected"),
        ({"shards": [plain(control={})]}, "'control'"),
        ({"shards": [plain(control={"tables": [["t"]]})]}, "'control'"),
    ],
)
def test_a_manifest_that_makes_no_sense_names_the_field(fields, words):
    with pytest.raises(SnapshotDamaged, match=words):
        module.unpack_manifest(module._seal({**msgpack.unpackb(msgpack.unpackb(GOOD)["body"]), **fields}), "m")


def test_extra_that_msgpack_cannot_say_is_refused():
    with pytest.raises(BadSnapshotName, match="msgpack says"):
        module.pack_manifest(manifest(extra={"set": {1}}))


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "-x", "a/b", "LATEST", "a b", "a\n", "x" * 101])
def test_a_name_that_no_folder_should_have_is_refused(name):
    with pytest.raises(BadSnapshotName):
        module.check_name(name)
