"""What is fuzzed: each parser of bytes that anybody may have written. It may raise a CkptError and nothing else."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import side_files
import torch
from support.paths import CHECKPOINTS

from ckpttool.catalogue import flatten as nesting
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.values import Stub, walk
from ckpttool.errors import CorruptError
from ckpttool.formats.safetensors import index
from ckpttool.serialization import numpy_arrays, pickle_opcodes, pickle_payloads, plain_yaml, unpickler
from ckpttool.serialization import safetensors_header as stheader
from ckpttool.serialization import torch_pickle as torchpickle
from ckpttool.serialization import torch_tree as torchtree
from ckpttool.serialization import torch_zip as torchzip
from ckpttool.serialization import unsafe_globals as harm
from ckpttool.serialization.dcp import metadata as dcpmetadata
from ckpttool.storage import files

_LARGEST_SEED = 10_000


class Target(NamedTuple):
    """A parser, inputs to begin with, and words that its inputs are made of."""

    run: Callable[[bytes], object]
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[bytes, ...]


def _reader(data: bytes) -> torchzip.Read:
    def read(offset: int, nbytes: int) -> bytes:
        # As `files.Pool.read` does.
        if offset < 0 or offset + nbytes > len(data):
            raise CorruptError(f"ends at byte {len(data)}")
        return data[offset : offset + nbytes]

    return read


def _pickle(data: bytes) -> None:
    tree = torchpickle.load(data, "p")
    harm.harmful_names(tree)
    nesting.flatten([tree], Catalogue("torch"), (), lambda *args: None)  # type: ignore[arg-type, return-value]


def _zip(data: bytes) -> None:
    archive = torchzip.open_archive(_reader(data), 0, len(data), name="z")
    for record in archive.records:
        try:
            archive.payload(record)
        except CorruptError:
            continue
    catalogue = Catalogue("torch")
    torchtree.fill(catalogue, torchzip.load_tree(archive), archive.extent)


def _header(data: bytes) -> None:
    stheader.read_header(_reader(data), 0, len(data), name="s")
    side_files.look_at(data)


def _metadata(data: bytes) -> None:
    dcpmetadata.read(io.BytesIO(data), ".metadata")


def _large_metadata(data: bytes) -> None:
    """As an index of more than a megabyte is read."""
    limits = (dcpmetadata, "_LARGE"), (pickle_opcodes, "_GUARDED")
    before = [getattr(module, name) for module, name in limits]
    for module, name in limits:
        setattr(module, name, 0)
    try:
        _metadata(data)
    finally:
        for (module, name), limit in zip(limits, before, strict=True):
            setattr(module, name, limit)


def _index(data: bytes) -> None:
    weight_map, _ = index.parse(data, "i")
    for name in list(weight_map.values())[:4]:
        files.inside("/nowhere", name)


def _found(pattern: str) -> list[bytes]:
    found = sorted((p.stat().st_size, str(p)) for p in CHECKPOINTS.rglob(pattern) if p.is_file())
    assert found and found[0][0] <= _LARGEST_SEED, f"no sample is a small {pattern}: nothing to begin with"
    return [Path(path).read_bytes() for size, path in found if size <= _LARGEST_SEED][:4]


def _zips() -> list[bytes]:
    return [data for data in _found("ckpt.pt") + _found("*.pt") if data[:2] == b"PK"]


def _pickles() -> list[bytes]:
    made = []
    for data in _zips():
        archive = torchzip.open_archive(_reader(data), 0, len(data), name="z")
        made.append(archive.content("data.pkl"))
    return [*made, b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01K\x02\x86q\x02h\x02h\x02\x86q\x03K\x05u."]


def _headers() -> list[bytes]:
    table = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}
    text = json.dumps(table).encode()
    return [*_found("*.safetensors"), struct.pack("<Q", len(text)) + text + bytes(24)]


def _indexes() -> list[bytes]:
    made = {"metadata": {"total_size": 24}, "weight_map": {"w": "a.safetensors", "x": "b.safetensors"}}
    return [*_found("*.index.json"), json.dumps(made).encode()]


def _bare_pickle(data: bytes) -> None:
    pickle_payloads.is_pickle(_reader(data), len(data))
    code = pickle_payloads.without_payloads(_reader(data), len(data))
    tree = unpickler.load(code, what="p", known=torchpickle.KNOWN, persistent=pickle_payloads.answer)
    for value in walk(tree):
        if isinstance(value, Stub):
            numpy_arrays.array_of(value)


def _bare_pickles() -> list[bytes]:
    value = {"a": np.arange(3.0), "s": np.float32(1), "b": bytearray(b"xyz"), "t": torch.ones(2), "n": [1, (2, None)]}
    return [pickle.dumps(value, protocol=protocol) for protocol in range(6)]


def _npy(data: bytes) -> None:
    numpy_arrays.read_header(data[: numpy_arrays.MAX_HEADER], "n")


def _npys() -> list[bytes]:
    made = []
    for array in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 2), ">i4")), np.array(["x"])):
        np.save(stream := io.BytesIO(), array)
        made.append(stream.getvalue())
    return made


def _yaml(data: bytes) -> None:
    plain_yaml.parse(data, "y")


_OPCODES = tuple(bytes((n,)) for n in b"()]}tRQbuesa0.\x80\x81\x85\x86\x87\x8c\x8f\x90\x91\x93\x94\x95hqcX\x8a\x8bJ")
_MACHINE = (
    *_OPCODES,
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ccollections\nOrderedDict\n",
    b"X\x01\0\0\0a",
    b"h\x00",
    b"q\x00",
)
_JSON = (b"{", b"}", b"[", b"]", b'"', b",", b":", b"-", b"1e9", b"NaN", b"null", b"true", b"\\u0000", b"\\ud800")

_SIDE_WORDS = (*_JSON, b'"path"', b'"value"', b'"$tuple"', b'"$dict"', b'"$int"', b'"$tensor"', b'"files"', b'"rules"')
_INDEX_WORDS = (*_MACHINE, b"MetadataIndex", b"\x8c\x06offset")
_YAML = (b"a: &a [1, *b]\nb: {<<: *a, c: !!int 1:2}\n", b"- {x: 1.5, y: 2020-01-01}\n")
TARGETS: dict[str, Target] = {
    "pickle": Target(_pickle, _pickles, _MACHINE),
    "zip": Target(_zip, _zips, (b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"data.pkl", b"\xff" * 4)),
    "safetensors": Target(_header, _headers, (*_JSON, b'"dtype"', b'"shape"', b'"data_offsets"', b'"F4"', b'"F32"')),
    "metadata": Target(_metadata, lambda: _found(".metadata"), _INDEX_WORDS),
    "large-metadata": Target(_large_metadata, lambda: _found(".metadata"), _INDEX_WORDS),
    "index": Target(_index, _indexes, (*_JSON, b'"weight_map"', b"../", b"://", b"C:")),
    "bare-pickle": Target(_bare_pickle, _bare_pickles, (*_MACHINE, b"C\x01x", b"B\1\0\0\0x", b"\x96\1" + bytes(7))),
    "npy": Target(_npy, _npys, (b"'descr'", b"'shape'", b"<f4", b"|O", b"(", b")", b"-1", b"\x93NUMPY", b"9" * 30)),
    "yaml": Target(_yaml, lambda: list(_YAML), (b"&a ", b"*a", b"<<: ", b"? ", b": ", b"- ", b"!!set", b"|\n", b"0x")),
    "json": Target(side_files.read, side_files.seeds, _SIDE_WORDS),
}  # fmt: skip
