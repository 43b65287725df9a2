"""What a manifest says survives, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import hashlib

import msgpack
import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.errors import BadSnapshotName, SnapshotDamaged, SnapshotTooNew
from embershard.proto.snapshot import manifest as module
from embershard.proto.snapshot.manifest import (
    BlockFile,
    Manifest,
    ShardPart,
    TableBlocks,
    WorkerWindow,
    check_name,
    pack_manifest,
    pack_part,
    unpack_manifest,
    unpack_part,
)
from embershard.proto.spec import SGD, Custom, Normal, TableSpec, Uniform

GOLDEN = "dadbc712d5e3264d4d92e80af0ac390e71974baf47cf178d122d27ebfeccfa23"
FILE = "shard-{}-00000000000000ff/0-0.safetensors"
SPEC = TableSpec(name="a/b", dim=3, optimizer=SGD(lr=0.5, momentum=0.9, nesterov=True), initializer=Uniform(), seed=7)
OWN = TableSpec(
    name="own",
    dim=1,
    optimizer=Custom(function="mine:step", lr=0.1, settings={"z": 1.0, "a": 2.0}),
    initializer=Normal(std=0.5),
    id_space="items",
)


def part(shard: int, of: int = 2, spec: TableSpec = SPEC, path: str = FILE, rows: int = 3) -> ShardPart:
    file = BlockFile(path.format(shard), 72, "ab" * 32, rows, 5, 9)
    window = WorkerWindow(3, 2**63, 17, ((17, 5, 0), (19, 4, 1)))
    tables = (TableBlocks(spec, 3, rows, (file,)), TableBlocks(OWN, 0, 0, ()))
    return ShardPart(shard, of, 1, 12 + shard, (window,), tables)


def manifest(**changes: object) -> Manifest:
    made = Manifest("monday", 1.5, "0.1", (part(0), part(1)), {"step": 9, "rng": b"\0\1", "names": ["a", {"b": None}]})
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def sealed(version: int = 1, form: object = module.FORMAT, body: bytes | None = None) -> bytes:
    envelope = msgpack.unpackb(pack_manifest(manifest()))
    return msgpack.packb({**envelope, "version": version, "format": form, "body": body or envelope["body"]})


def altered(**fields: object) -> bytes:
    """A manifest with these fields in the body, sealed as it should be."""
    plain = msgpack.unpackb(msgpack.unpackb(pack_manifest(manifest()))["body"])
    return module._seal({**plain, **fields})


def test_a_table_that_travels_compressed_survives():
    spec = dataclasses.replace(
        SPEC, push_codec=CodecName.parse("topk:0.01+fp16s"), pull_codec=CodecName.parse("mine:half")
    )
    assert unpack_part(pack_part(part(0, spec=spec)), "file").tables[0].spec == spec


def test_a_manifest_survives_its_file():
    back = unpack_manifest(pack_manifest(manifest()), "m")
    assert back == manifest()
    assert back.tables["a/b"].rows == 6
    assert [file.path for file in back.tables["a/b"].files] == [FILE.format(0), FILE.format(1)]
    assert (back.rows, back.bytes, back.clock, back.num_shards) == (6, 144, 12, 2)


def test_the_bytes_of_a_manifest_stay_what_version_1_wrote():
    assert hashlib.sha256(pack_manifest(manifest())).hexdigest() == GOLDEN


def test_a_part_survives_its_file():
    assert unpack_part(pack_part(part(1)), "p") == part(1)


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_anywhere_is_noticed(bit):
    good = pack_manifest(manifest())
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << bit
        with pytest.raises((SnapshotDamaged, SnapshotTooNew)):
            unpack_manifest(bytes(bad), "the/file")


def test_a_file_cut_anywhere_is_damaged():
    good = pack_manifest(manifest())
    for end in range(len(good)):
        with pytest.raises(SnapshotDamaged, match="the/file"):
            unpack_manifest(good[:end], "the/file")


@pytest.mark.parametrize(
    "foreign",
    [b"\x80", b"\x90", b"{}", b"hello", b"\xc1", msgpack.packb({"format": "safetensors"}), sealed(form="other"),
     sealed(form=7), sealed(version=0), sealed(version=-1), msgpack.packb([1, 2])],
)  # fmt: skip
def test_other_peoples_files_are_no_manifest(foreign):
    with pytest.raises(SnapshotDamaged, match="damaged or not ours"):
        unpack_manifest(foreign, "m")


def test_a_newer_version_says_upgrade_whatever_its_body_is():
    with pytest.raises(SnapshotTooNew, match=r"version 2 .* reads up to 1; upgrade"):
        unpack_manifest(sealed(version=2, body=b"\xc1"), "m")


@pytest.mark.parametrize(
    "path",
    ["../other/0-0.safetensors", "/etc/passwd", "shard-0-00000000000000ff/../../x.safetensors", "", "a.safetensors",
     "shard-0-00000000000000ff/0-0.safetensors\n", "shard-0-00000000000000FF/0-0.safetensors"],
)  # fmt: skip
def test_no_path_leads_out_of_the_snapshot(path):
    with pytest.raises(SnapshotDamaged, match="is no file of a snapshot"):
        unpack_part(pack_part(part(0, path=path)), "p")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shards": []}, "in order"),
        ({"shards": 7}, "list was expected, not int"),
        ({"shards": [7]}, "a map was expected, not int"),
        ({"shards": [module._plain_part(part(1)), module._plain_part(part(0))]}, "in order"),
        ({"shards": [module._plain_part(part(0, of=1)), module._plain_part(part(1))]}, "not parts of 2"),
        (
            {"shards": [module._plain_part(part(0, of=1, spec=dataclasses.replace(SPEC, dim=4))) | {"tables": {}}]},
            "list",
        ),
        ({"created": "now"}, "float was expected"),
        ({"extra": None}, "dict was expected"),
        ({"shards": [{**module._plain_part(part(0, of=1)), "clock": True}]}, "'clock': int was expected, not bool"),
    ],
)
def test_a_manifest_that_makes_no_sense_names_the_field(fields, words):
    with pytest.raises(SnapshotDamaged, match=words):
        unpack_manifest(altered(**fields), "m")


def test_shards_that_know_a_table_apart_make_no_snapshot():
    both = (part(0), part(1, spec=dataclasses.replace(SPEC, dim=4)))
    with pytest.raises(SnapshotDamaged, match="dim: 3, not 4"):
        unpack_manifest(pack_manifest(manifest(shards=both)), "m")


@pytest.mark.parametrize("spoil", [{"dim": 0}, {"name": "../x"}, {"optimizer": {"name": "sgdd", "settings": []}},
                                   {"optimizer": {"name": "sgd", "settings": [["lr"]]}},
                                   {"initializer": {"kind": "zeros", "params": {}}}])  # fmt: skip
def test_a_table_that_cannot_be_is_damage(spoil):
    plain = module._plain_part(part(0, of=1))
    table = plain["tables"][0]  # type: ignore[index]
    with pytest.raises(SnapshotDamaged, match="spec"):
        unpack_part(module._seal({**plain, "tables": [{**table, "spec": {**table["spec"], **spoil}}]}), "p")


def test_rows_that_the_files_do_not_have_are_damage():
    plain = module._plain_part(part(0, of=1))
    table = plain["tables"][0]  # type: ignore[index]
    with pytest.raises(SnapshotDamaged, match="another number"):
        unpack_part(module._seal({**plain, "tables": [{**table, "rows": 4}]}), "p")


def test_extra_that_msgpack_cannot_say_is_refused():
    with pytest.raises(BadSnapshotName, match="msgpack says"):
        pack_manifest(manifest(extra={"set": {1}}))


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "-x", "a/b", "LATEST", "a b", "a\n", "x" * 101])
def test_a_name_that_no_folder_should_have_is_refused(name):
    with pytest.raises(BadSnapshotName):
        check_name(name)
