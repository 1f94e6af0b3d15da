"""Keys that all have one hash, however they are spelt: refused before the first of them are compared."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lying_files import HALF, integer, many, pairs_of_one_hash, pickled
from support.lying_shards import items
from support.pickle_payloads import call, named
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import ckpttool
from ckpttool.catalogue import key_hashes, work_limit
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.flatten import flatten
from ckpttool.catalogue.work_limit import working
from ckpttool.errors import CorruptError
from ckpttool.formats.safetensors import state_json
from ckpttool.serialization import pickle_opcodes, unpickler
from ckpttool.serialization.dcp import metadata

MANY = 3_500  # six million comparisons
PAIRS = pairs_of_one_hash(MANY)
WORK = "far more work"


def pair(one: tuple[int, int]) -> bytes:
    return integer(one[0]) + integer(one[1]) + b"\x86"


def number(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def put(keys: Iterable[bytes]) -> bytes:
    return b"}(" + b"".join(key + b"N" for key in keys) + b"u"


MULTIPLES = [n * HALF for n in range(MANY)]
# 1,000,003 is what the hash of an imaginary part is multiplied by.
COMPLEX = [complex(10**12 - 1_000_003 * n, n) for n in range(MANY)]
KEYS: dict[str, list[bytes]] = {
    "pairs": [pair(one) for one in PAIRS],
    "pairs within": [b"X\1\0\0\0a" + pair(one) + b"\x86" for one in PAIRS],
    "marked pairs": [many(*map(integer, one)) for one in PAIRS],
    "LONG1": [integer(n) for n in MULTIPLES],
    "LONG4": [b"\x8b" + struct.pack("<I", 10) + n.to_bytes(10, "little") for n in MULTIPLES],
    "INT": [b"I%d\n" % n for n in MULTIPLES],
    "LONG": [b"L%dL\n" % n for n in MULTIPLES],
    "complex": [call(named("builtins", "complex"), number(n.real), number(n.imag)) for n in COMPLEX],
    "frozensets": [b"(" + pair(one) + b"\x91" for one in PAIRS],
    "torch.Size": [call(named("torch", "Size"), pair(one)) for one in PAIRS],
}  # fmt: skip
PUT: dict[str, Callable[[list[bytes]], bytes]] = {
    "at once": put,
    "one by one": lambda keys: b"}" + b"".join(key + b"Ns" for key in keys),
    "in small batches": lambda keys: b"}" + b"".join(b"(" + key + b"Nu" for key in keys),
    "DICT": lambda keys: b"(" + b"".join(key + b"N" for key in keys) + b"d",
    "a set": lambda keys: b"\x8f(" + b"".join(keys) + b"\x90",
    "a frozenset": lambda keys: b"(" + b"".join(keys) + b"\x91",
    "set()": lambda keys: call(named("builtins", "set"), items(keys)),
    "OrderedDict()": lambda keys: call(named("collections", "OrderedDict"), items(key + b"N\x86" for key in keys)),
    "an OrderedDict": lambda keys: call(named("collections", "OrderedDict")) + put(keys)[1:],
}


def refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match=WORK):
        unpickler.load(data, what="x")


@pytest.mark.parametrize("spelling", KEYS)
def test_however_the_keys_are_spelt(spelling: str) -> None:
    refused(pickled(put(KEYS[spelling]), 4))


@pytest.mark.parametrize("way", PUT)
def test_however_they_are_put(way: str) -> None:
    refused(pickled(PUT[way](KEYS["pairs"]), 4))


@pytest.mark.parametrize("way", ["at once", "one by one", "in small batches"])
@pytest.mark.parametrize("size", [b"", b"h\0"])
def test_in_an_index_that_is_guarded(way: str, size: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_opcodes, "_GUARDED", 0)
    keys = [size + key + b"\x85R" * bool(size) for key in KEYS["pairs"]]
    data = b"\x80\x02ctorch\nSize\nq\x000" + PUT[way](keys) + b"."
    found = pickle_opcodes.guarded(data)
    assert found is not None
    known = {("torch", "Size"): ().__add__}
    with pytest.raises(CorruptError, match=WORK), working(len(data)):
        unpickler._Unpickler(unpickler._Pieces(found.pieces), known, None, calls=found.calls).load()


def test_states_of_objects_do_not_hide_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dict that is the state of each object, and gets a key more each time."""
    monkeypatch.setattr(pickle_opcodes, "_GUARDED", 0)
    state = b"c__main__\nX\nq\x010}q\x020" + b"".join(b"h\1)\x81h\2(" + key + b"Nub0" for key in KEYS["pairs"])
    found = pickle_opcodes.guarded(b"\x80\x02" + state + b"N.")
    assert found is not None
    assert found.calls.count(b"u") == MANY


def _index(count: int) -> bytes:
    """A tensor of many empty chunks, of which one is in a file."""
    offsets = [(first, abs(second)) for first, second in pairs_of_one_hash(2 * count) if second >= 0][:count]
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size((0, 3))) for at in offsets]
    described = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((2**60, 0)), chunks)
    info = torch.distributed.checkpoint.filesystem._StorageInfo("__0_0.distcp", 0, 1)
    storage = {MetadataIndex("w", chunks[0].offsets, 0): info}
    return pickle.dumps(Metadata({"w": described}, None, storage), 4)


def test_offsets_of_chunks() -> None:
    data = _index(MANY)
    with pytest.raises(CorruptError, match=WORK), working():
        metadata.read(io.BytesIO(data), ".metadata")
    with working():
        assert len(metadata.read(io.BytesIO(_index(100)), ".metadata").entries) == 1


def _no_file(file: str, name: str) -> Any:
    raise AssertionError


def test_paths_of_nested_dicts() -> None:
    """Each dict has one key, and the paths have one hash."""
    with pytest.raises(CorruptError, match=WORK), working():
        flatten({a: {b: None} for a, b in PAIRS}, Catalogue("torch"), (), _no_file)  # type: ignore[arg-type]


@pytest.mark.parametrize("tag", ["$dict", "$OrderedDict", "$set", "$frozenset", "paths"])
def test_in_json(tag: str) -> None:
    keys = [{"$tuple": list(one)} for one in PAIRS]
    value = keys if "set" in tag else [[key, 0] for key in keys]
    whole = [{"path": ["x"], "value": {tag: value}}]
    entries = [{"path": list(one), "value": 0} for one in PAIRS] if tag == "paths" else whole
    text = json.dumps({"schema": state_json.SCHEMA, "containers": [], "entries": entries}).encode()
    with pytest.raises(CorruptError, match=WORK), working():
        state_json.parse(text, Catalogue("safetensors"), _no_file, "x")


def test_other_keys_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many, with hashes of their own: hardly any work."""
    left: list[int] = []

    class Used(work_limit.WorkLimit):
        __slots__ = ()

        def charge(self, count: int) -> None:
            super().charge(count)
            left.append(count)

    monkeypatch.setattr(work_limit, "WorkLimit", Used)
    honest = [(n, n + 1) for n in range(MANY)]
    made = unpickler.load(pickled(put(map(pair, honest)), 4), what="x")
    assert list(made) == honest and sum(left) < 10


def test_a_file_with_such_keys(tmp_path: Path) -> None:
    torch.save(dict.fromkeys(PAIRS), tmp_path / "x.pt")
    with pytest.raises(CorruptError, match=WORK):
        ckpttool.open(tmp_path / "x.pt")


def test_equal_shares_of_the_limit_are_left_alone() -> None:
    """A thousand keys of one hash cost no more than a thousand others."""
    assert key_hashes.MANY < MANY
    few = dict.fromkeys(PAIRS[: key_hashes.MANY])
    assert unpickler.load(pickled(put(map(pair, few)), 4), what="x") == few
