"""Checkpoints that contradict themselves, each made by changing one fact of a real one: never garbage for weights.

Holes, overlaps, ranges outside files, wrong sizes and dtypes, missing files, paths that leave the directory.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import CORRUPT, READ, check_words, model, out_folder, refused, run, save_dcp, save_safetensors
from support.paths import CHECKPOINTS
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

# torch.save -----------------------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]], **options: Any) -> Path:
    """A torch.save file whose records were changed; written by Python's `zipfile`."""
    torch.save(model(), path)
    with zipfile.ZipFile(path) as old:
        records = change({info.filename: old.read(info) for info in old.infolist()})
    with zipfile.ZipFile(path, "w", **options) as new:
        for name, data in records.items():
            new.writestr(name, data)
    return path


def test_a_plain_copy_of_an_archive_is_fine(tmp_path: Path) -> None:
    """Else the tests below would prove nothing."""
    path = rewritten(tmp_path / "ckpt.pt", lambda records: records)
    assert run("convert", path, tmp_path / "dst.pt").code == 0


def _data(name: str) -> str:
    return f"ckpt/data/{name}"


def test_a_missing_record(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "ckpt.pt", lambda r: {k: v for k, v in r.items() if k != _data("1")})
    refused(path, CORRUPT, path, "data/1")


def test_no_pickle(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "ckpt.pt", lambda r: {k: v for k, v in r.items() if not k.endswith("data.pkl")})
    refused(path, [READ, CORRUPT], path)


def test_a_short_record(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "ckpt.pt", lambda r: r | {_data("1"): r[_data("1")][:-4]})
    refused(path, CORRUPT, path, "data/1", 13 * 7 * 4, 13 * 7 * 4 - 4)


def test_records_that_were_compressed_again(tmp_path: Path) -> None:
    """Somebody unzipped it and zipped it again."""
    path = rewritten(tmp_path / "ckpt.pt", lambda r: r, compression=zipfile.ZIP_DEFLATED)
    refused(path, [READ, CORRUPT], path, "compressed")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "ckpt.pt", lambda r: r)
    with zipfile.ZipFile(path, "a") as more:
        more.writestr(_data("1"), bytes(13 * 7 * 4))
    refused(path, CORRUPT, path, "data/1")


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (b"FloatStorage", b"FlootStorage", "FlootStorage"),
        (b"BFloat16Storage", b"BFlout16Storage", "BFlout16Storage"),
        (b"K\x1dK\x0d\x86", b"K\x1eK\x0d\x86", "1508"),  # 30 rows in a storage of 29
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v3", "dtype"),
    ],
)
def test_a_pickle_that_lies(old: bytes, new: bytes, word: str, tmp_path: Path) -> None:
    def change(records: dict[str, bytes]) -> dict[str, bytes]:
        assert old in records["ckpt/data.pkl"]
        return records | {"ckpt/data.pkl": records["ckpt/data.pkl"].replace(old, new)}

    path = rewritten(tmp_path / "ckpt.pt", change)
    refused(path, CORRUPT, path, word)


def test_a_record_whose_bytes_are_those_of_another(tmp_path: Path) -> None:
    """The directory sends two records to the same bytes: the names in the local headers disagree, or the CRC does."""
    path = rewritten(tmp_path / "ckpt.pt", lambda r: r)
    data = bytearray(path.read_bytes())
    at, offsets = data.index(b"PK\1\2"), {}
    while data[at : at + 4] == b"PK\1\2":
        lengths = struct.unpack_from("<3H", data, at + 28)
        name = bytes(data[at + 46 : at + 46 + lengths[0]]).decode()
        offsets[name] = at + 42
        at += 46 + sum(lengths)
    data[offsets[_data("3")] : offsets[_data("3")] + 4] = data[offsets[_data("0")] : offsets[_data("0")] + 4]
    path.write_bytes(data)
    refused(path, CORRUPT, path, look=False)


def test_an_unknown_byte_order(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "ckpt.pt", lambda r: r | {"ckpt/byteorder": b"middle"})
    refused(path, CORRUPT, path, "middle")


def test_bytes_after_the_end(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "ckpt.pt", lambda r: r)
    with path.open("ab") as stream:
        stream.write(b"more")
    refused(path, CORRUPT, path)


# DCP ------------------------------------------------------------------------------------------------------------------


def changed(folder: Path, change: Callable[[Any], None]) -> Path:
    path = save_dcp(folder / "ckpt", {**model(), "lr": 0.1})
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index, 4))
    return path


def place(index: Any, name: str) -> Any:
    return next(info for where, info in index.storage_data.items() if where.fqn == name)


def chunks(index: Any, name: str = "embed.weight") -> Any:
    return index.state_dict_metadata[name].chunks


def halve(index: Any, first: tuple[int, int], second: tuple[int, int]) -> None:
    """Describe `embed.weight`, 29 rows, as two pieces: rows (begin, count) each, both in the same item."""
    whole = place(index, "embed.weight")
    key = next(where for where in index.storage_data if where.fqn == "embed.weight")
    del index.storage_data[key]
    del chunks(index)[:]
    for i, (begin, rows) in enumerate((first, second)):
        offsets = torch.Size((begin, 0))
        chunks(index).append(ChunkStorageMetadata(offsets, torch.Size((rows, 13))))
        index.storage_data[MetadataIndex("embed.weight", offsets, i)] = whole


DCP: dict[str, tuple[Callable[[Any], Any], tuple[object, ...]]] = {
    "a hole": (lambda i: halve(i, (0, 14), (15, 14)), ("embed.weight", "[29, 13]")),
    "an overlap": (lambda i: halve(i, (0, 15), (14, 15)), ("embed.weight", "[29, 13]")),
    "a chunk outside the tensor": (lambda i: halve(i, (0, 29), (29, 1)), ("embed.weight", "[29, 13]")),
    "no chunks": (lambda i: chunks(i).clear(), ("embed.weight",)),
    "a chunk that lies nowhere": (lambda i: i.storage_data.pop(MetadataIndex("embed.weight", torch.Size((0, 0)), 0)),
                                  ("embed.weight",)),
    "bytes that lie nowhere": (lambda i: i.storage_data.pop(MetadataIndex("lr")), ("lr",)),
    "no storage data": (lambda i: setattr(i, "storage_data", None), (".metadata",)),
    "a range behind the end": (lambda i: setattr(place(i, "steps"), "offset", 10**9), ("steps", "__0_0.distcp")),
    "a range across the end": (lambda i: setattr(place(i, "steps"), "length", 10**6), ("steps", "__0_0.distcp")),
    "a negative offset": (lambda i: setattr(place(i, "steps"), "offset", -5), ("steps",)),
    "an offset of 2**63": (lambda i: setattr(place(i, "steps"), "offset", 2**63), (".metadata",)),
    "an offset of 2**63 of bytes": (lambda i: setattr(place(i, "lr"), "offset", 2**63), ("lr",)),
    "an offset that is not a number": (lambda i: setattr(place(i, "steps"), "offset", "12"), ("steps",)),
    "a short item": (lambda i: setattr(place(i, "steps"), "length", 700), ("steps", "__0_0.distcp")),
    "an item of no bytes": (lambda i: setattr(place(i, "steps"), "length", 0), ("steps",)),
    "bytes of no length": (lambda i: setattr(place(i, "lr"), "length", 0), ("lr",)),
    "an item that begins elsewhere": (lambda i: setattr(place(i, "steps"), "offset", place(i, "steps").offset + 64),
                                      ("steps", "__0_0.distcp")),
    "the item of another tensor": (lambda i: vars(place(i, "steps")).update(vars(place(i, "embed.weight"))),
                                   ("steps", "int64 [6]", "float32 [29, 13]")),
    "another shape": (lambda i: setattr(i.state_dict_metadata["steps"], "size", torch.Size((7,))), ("steps", "[7]")),
    "another dtype": (lambda i: setattr(i.state_dict_metadata["steps"].properties, "dtype", torch.float32), ("steps",)),
    "a missing file": (lambda i: setattr(place(i, "steps"), "relative_path", "__7_0.distcp"),
                       ("__7_0.distcp", "steps")),
    "a file above": (lambda i: setattr(place(i, "steps"), "relative_path", "../x.distcp"), ("../x.distcp",)),
    "an absolute path": (lambda i: setattr(place(i, "steps"), "relative_path", "/etc/hostname"), ("/etc/hostname",)),
    "a path around": (lambda i: setattr(place(i, "steps"), "relative_path", "a/../../b"), ("a/../../b",)),
    "a Windows path": (lambda i: setattr(place(i, "steps"), "relative_path", "C:\\x"), ("C:",)),
    "the directory itself": (lambda i: setattr(place(i, "steps"), "relative_path", "."), ("a directory",)),
    "no path": (lambda i: setattr(place(i, "steps"), "relative_path", ""), ()),
    "a path with a zero": (lambda i: setattr(place(i, "steps"), "relative_path", "a\0b"), ()),
    "an unknown transform": (lambda i: setattr(place(i, "steps"), "transform_descriptors", ["stream.rot13"]),
                             ("stream.rot13",)),
    "a negative size": (lambda i: setattr(chunks(i)[0], "sizes", (-29, -13)), ("embed.weight",)),
    "a size of 2**62": (lambda i: setattr(i.state_dict_metadata["steps"], "size", torch.Size((2**62,))), ("steps",)),
    "a chunk of other dimensions": (lambda i: setattr(chunks(i)[0], "sizes", torch.Size((29,))), ("embed.weight",)),
    "a name is not a string": (lambda i: i.state_dict_metadata.update({3: i.state_dict_metadata.pop("steps")}), ()),
    "two names for one path": (lambda i: i.planner_data.update({"steps": ("lr",)}), ("lr",)),
    "a path through a value": (lambda i: i.planner_data.update({"steps": ("lr", "x")}), ("steps", "lr.x")),
    "an index of 10**9": (lambda i: i.planner_data.update({"steps": ("list", 10**9)}), ("steps", "list.1000000000")),
}  # fmt: skip


UNREADABLE = {"an unknown transform", "the directory itself"}


@pytest.mark.parametrize("what", DCP)
def test_dcp(what: str, tmp_path: Path) -> None:
    change, facts = DCP[what]
    path = changed(tmp_path, change)
    # Reading the index need not find what only the data files tell.
    shown = run("inspect", path)
    if shown.code:
        check_words(shown, [READ, CORRUPT])
    refused(path, [READ, CORRUPT] if what in UNREADABLE else CORRUPT, *facts, look=False)


def test_an_unknown_dtype(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "ckpt")
    data = (path / ".metadata").read_bytes()
    assert b"\x8c\x08bfloat16" in data
    (path / ".metadata").write_bytes(data.replace(b"\x8c\x08bfloat16", b"\x8c\x08bfloat17"))
    refused(path, CORRUPT, "layers.0.bias", "bfloat17")


def test_a_link_out_of_the_directory(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "ckpt")
    (path / "__0_0.distcp").rename(tmp_path / "elsewhere.distcp")
    (path / "__0_0.distcp").symlink_to("../elsewhere.distcp")
    refused(path, CORRUPT, "__0_0.distcp", "link")


def test_a_link_to_the_directory_is_fine(tmp_path: Path) -> None:
    """As `latest` often is one."""
    save_dcp(tmp_path / "step-100")
    (tmp_path / "latest").symlink_to("step-100")
    assert run("convert", tmp_path / "latest", tmp_path / "dst.pt").code == 0


def test_an_index_of_another_save(tmp_path: Path) -> None:
    one, other = save_dcp(tmp_path / "one"), save_dcp(tmp_path / "two", {"w": torch.ones(5), "v": torch.zeros(400)})
    shutil.copy(other / ".metadata", one / ".metadata")
    refused(one, CORRUPT, "__0_0.distcp", look=False)


def test_a_missing_data_file(tmp_path: Path) -> None:
    path = shutil.copytree(CHECKPOINTS / "dcp/fsdp2_w2" / "ckpt", tmp_path / "ckpt")
    (path / "__1_0.distcp").unlink()
    shown = run("inspect", path)
    assert shown.code == 0 and "`__1_0.distcp` is missing" in shown.out
    refused(path, CORRUPT, "__1_0.distcp", look=False)


def test_a_missing_index_of_one_rank(tmp_path: Path) -> None:
    path = shutil.copytree(CHECKPOINTS / "dcp/nocollectives_w2" / "ckpt", tmp_path / "ckpt")
    for gone in ("__0.metadata", "__1.metadata"):
        kept = (path / gone).read_bytes()
        (path / gone).unlink()
        refused(path, CORRUPT, look=False)
        (path / gone).write_bytes(kept)


# safetensors ----------------------------------------------------------------------------------------------------------

Header = dict[str, Any]


def edited(path: Path, change: Callable[[Header], Any]) -> Path:
    """A safetensors file whose header was changed; its payload stays."""
    save_safetensors(path)
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    made = change(header)
    text = made if isinstance(made, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    return path


def shift(header: Header, name: str, begin: int, end: int) -> None:
    header[name]["data_offsets"][0] += begin
    header[name]["data_offsets"][1] += end


HEADERS: dict[str, tuple[Callable[[Header], Any], tuple[object, ...]]] = {
    "a hole": (lambda h: h.pop("embed.weight") and None, ("hole",)),
    "an overlap": (lambda h: shift(h, "embed.weight", -4, -4), ("embed.weight",)),
    "a range too long": (lambda h: shift(h, "embed.weight", 0, 4), ("embed.weight", "1508")),
    "a range behind the end": (lambda h: shift(h, "embed.weight", 10**9, 10**9), ("hole",)),
    "a negative offset": (lambda h: shift(h, "embed.weight", -(10**6), -(10**6)), ("embed.weight",)),
    "a range backwards": (lambda h: h["embed.weight"]["data_offsets"].reverse(), ("embed.weight",)),
    "another shape": (lambda h: h["embed.weight"].update(shape=[29, 14]), ("embed.weight", "[29, 14]")),
    "a shape of 2**64": (lambda h: h["embed.weight"].update(shape=[2**63, 2]), ("embed.weight",)),
    "a negative shape": (lambda h: h["embed.weight"].update(shape=[-29, -13]), ("embed.weight",)),
    "a shape of words": (lambda h: h["embed.weight"].update(shape="29x13"), ("embed.weight",)),
    "an unknown dtype": (lambda h: h["embed.weight"].update(dtype="F33"), ("embed.weight", "F33")),
    "a dtype of another size": (lambda h: h["embed.weight"].update(dtype="F16"), ("embed.weight", "float16")),
    "no dtype": (lambda h: h["embed.weight"].pop("dtype"), ("embed.weight", "dtype")),
    "an entry that is a list": (lambda h: h.update({"embed.weight": []}), ("embed.weight",)),
    "no JSON": (lambda h: b'{"embed.weight": ', ()),
    "no JSON at all": (lambda h: b"<html>404 not found</html>", ()),
    "a list": (lambda h: b"[1, 2]", ()),
    "no UTF-8": (lambda h: b'{"\xff\xfe": 1}', ("UTF-8",)),
    "nesting without end": (lambda h: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ()),
    "NaN": (lambda h: json.dumps(h).replace("29", "NaN", 1).encode(), ()),
    "a number of 5000 digits": (lambda h: json.dumps(h).replace("29", "9" * 5000, 1).encode(), ()),
    "one name twice": (lambda h: json.dumps(h).encode()[:-1] + b', "steps": ' + json.dumps(h["steps"]).encode() + b"}",
                       ("steps",)),
    "metadata of numbers": (lambda h: h.update(__metadata__={"format": 3}), ("__metadata__",)),
}  # fmt: skip


@pytest.mark.parametrize("what", HEADERS)
def test_safetensors(what: str, tmp_path: Path) -> None:
    change, facts = HEADERS[what]
    path = edited(tmp_path / "model.safetensors", change)
    refused(path, [READ, CORRUPT] if what in ("no JSON at all", "a list") else CORRUPT, path, *facts)


@pytest.mark.parametrize("size", [100_000_001, 2**32, 2**63, 2**64 - 1])
def test_a_header_too_large(size: int, tmp_path: Path) -> None:
    path = edited(tmp_path / "model.safetensors", lambda h: None)
    data = bytearray(path.read_bytes())
    data[:8] = struct.pack("<Q", size)
    path.write_bytes(data)
    refused(path, [READ, CORRUPT], path)
    with path.open("r+b") as stream:  # and a file of that size, as far as that can be
        stream.truncate(min(size + 8, 1 << 40))
    refused(path, CORRUPT, path, size)


def test_bytes_after_the_tensors(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "model.safetensors")
    with path.open("ab") as stream:
        stream.write(b"more")
    refused(path, CORRUPT, path)


def indexed(folder: Path, change: Callable[[Any, Path], Any]) -> Path:
    path = shutil.copytree(CHECKPOINTS / "safetensors/indexed" / "ckpt", folder / "ckpt")
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    made = change(index, path)
    file.write_bytes(made if isinstance(made, bytes) else json.dumps(index).encode())
    return path


def first(index: Any) -> tuple[str, str]:
    return next(iter(index["weight_map"].items()))


def point(target: str) -> Callable[[Any, Path], None]:
    return lambda index, path: index["weight_map"].update({first(index)[0]: target})


INDEXES: dict[str, tuple[Callable[[Any, Path], Any], tuple[object, ...]]] = {
    "a missing file": (lambda i, p: (p / first(i)[1]).unlink(), (".safetensors",)),
    "a file of another name": (point("model-00009-of-00009.safetensors"), ("model-00009-of-00009.safetensors",)),
    "a tensor in no file": (lambda i, p: i["weight_map"].update(x=first(i)[1]), ("`x`",)),
    "a file above": (point("../x.safetensors"), ("../x.safetensors",)),
    "an absolute path": (point("/etc/hostname"), ("/etc/hostname",)),
    "a path with a zero": (point("a\0b"), ()),
    "a file that is a directory": (point("."), ()),
    "a number for a file": (lambda i, p: i["weight_map"].update({first(i)[0]: 3}), ()),
    "no map": (lambda i, p: i.pop("weight_map"), ("weight_map",)),
    "a map that is a list": (lambda i, p: i.update(weight_map=[]), ("weight_map",)),
    "no JSON": (lambda i, p: b'{"weight_map": ', ("model.safetensors.index.json",)),
    "an empty index": (lambda i, p: b"", ("model.safetensors.index.json",)),
    "one name twice": (lambda i, p: b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', ("`a`",)),
}


@pytest.mark.parametrize("what", INDEXES)
def test_a_safetensors_index(what: str, tmp_path: Path) -> None:
    change, facts = INDEXES[what]
    path = indexed(tmp_path, change)
    codes = [READ, CORRUPT] if what == "a file that is a directory" else CORRUPT
    refused(path, codes, *facts, look=False)
    shown = run("inspect", path)
    if shown.code:
        check_words(shown, codes, *facts)


def test_a_file_that_is_a_link_out(tmp_path: Path) -> None:
    path = indexed(tmp_path, lambda i, p: None)
    name = next(iter(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"].values()))
    (path / name).rename(tmp_path / name)
    (path / name).symlink_to(tmp_path / name)
    refused(path, CORRUPT, name, "link")


def test_the_cache_of_the_hub_is_made_of_links(tmp_path: Path) -> None:
    """Those lead from `snapshots/` to `blobs/`, inside one repository's folder."""
    made = indexed(tmp_path, lambda i, p: None)
    root = tmp_path / "models--org--name"
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for file in made.iterdir():
        file.rename(root / "blobs" / f"sha-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/sha-{file.name}")
    with out_folder() as folder:
        done = run("convert", snapshot, folder / "dst.pt")
        assert done.code == 0, done.err


# A whole state as safetensors and JSON --------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    torch.save({"model": model(), "step": 3, "lr": [0.1]}, tmp_path / "src.pt")
    assert run("convert", tmp_path / "src.pt", tmp_path / "whole", "--to", "safetensors").code == 0
    return tmp_path / "whole"


def test_a_state_without_a_file(whole: Path) -> None:
    for file in sorted(whole.iterdir()):
        kept = file.read_bytes()
        file.unlink()
        if file.suffix == ".safetensors":
            refused(whole, CORRUPT, file.name, look=False)
        file.write_bytes(kept)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', "\xff", "[" * 100_000])
def test_a_state_whose_json_is_damaged(text: str, whole: Path) -> None:
    (file,) = whole.glob("*.json")
    file.write_bytes(text.encode("latin1"))
    said = refused(whole, [READ, CORRUPT], look=False) if run("convert", whole, whole.parent / "x.pt").code else ""
    assert not said or "ckpttool.json" in said or "not a checkpoint" in said
    shutil.rmtree(whole.parent / "x.pt", ignore_errors=True)


def test_a_state_whose_json_is_cut(whole: Path) -> None:
    (file,) = whole.glob("*.json")
    data = file.read_bytes()
    for at in range(200, len(data) - 1, max(1, len(data) // 40)):
        file.write_bytes(data[:at])
        refused(whole, CORRUPT, file.name, to=["torch"])
    assert os.listdir(whole)
