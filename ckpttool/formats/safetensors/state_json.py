"""Reads and writes `ckpttool.json`, the part of a training state that is not in its safetensors files.

    {"schema": "ckpttool/state/1", "writer": "ckpttool 0.1.0",
     "containers": [{"path": [..], "kind": "list" | "dict" | "OrderedDict", "attributes": {..}}, ..],
     "entries": [{"path": ["model", "w"], "file": "model.safetensors", "name": "w"},
                 {"path": ["z"], "file": "other.safetensors", "name": "z", "dtype": "complex128", "shape": [2]},
                 {"path": ["optim", "state", 0], "value": ..}, ..],
     "files": {"model.safetensors": 305419896, ..}, "crc32": 19088743}

Entries are in the order in which they were saved, one to a line. Keys of a path and values are encoded by `typed_json`.
A tensor of a dtype that safetensors does not have is stored as U8, with its dtype and shape in this file. Tied tensors
have the same file and name; `"embedded": true` marks a tensor that an object's value refers to. `files` are the CRC-32
of the checksums in each file, `crc32` is that of all else in this one; see `checksums`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from ckpttool.catalogue import dtypes, flatten, typed_json
from ckpttool.catalogue.entries import Catalogue, Chunks, Container, Object, Path, Tensor, dotted
from ckpttool.catalogue.key_hashes import Alike
from ckpttool.catalogue.shown import shown, spelt
from ckpttool.catalogue.values import attributes_of
from ckpttool.errors import CorruptError, ReadError
from ckpttool.formats.safetensors import checksums
from ckpttool.serialization import strict_json, torch_pickle, unpickler
from ckpttool.serialization.safetensors_header import HeaderEntry

_FUNCTIONS = {**unpickler.REAL, **torch_pickle.KNOWN}

NAME = "ckpttool.json"
_FAMILY = "ckpttool/state/"
SCHEMA = f"{_FAMILY}1"
# `recognise` looks for them at the start of the file only. The others tell a file whose schema was damaged: without it
# the tensors beside it would be a checkpoint of their own, and what only it has would be lost in silence.
_MARK = f'"schema": "{_FAMILY}'.encode()
_OTHER_MARKS = (b'"writer": "ckpttool ', b'"containers": [')


class TensorPlace(NamedTuple):
    """The place of a tensor: `TensorPlace("model.safetensors", "w")`. `raw`: stored as bytes."""

    file: str
    name: str
    raw: bool = False


def looks_like(head: bytes) -> bool:
    """Return whether a file of this name with these first bytes is a state file of any version, damaged or not: what is
    no JSON object at all, such as one of zeros, is no other file either."""
    is_object = head.lstrip().startswith(b"{")
    return not is_object or _MARK in head[:256] or all(mark in head[:256] for mark in _OTHER_MARKS)


# Writing --------------------------------------------------------------------------------------------------------------


def build(catalogue: Catalogue, places: Mapping[Path, TensorPlace], writer: str) -> bytes:
    """Return the state file of a catalogue. Raises LossError for a value that JSON cannot represent. Pure."""
    sharing = typed_json.Sharing()
    lines = ["{", f'"schema": {_line(SCHEMA)},', f'"writer": {_line(writer)},']
    lines += _array("containers", (_container(p, c, sharing) for p, c in catalogue.containers.items()), ",")
    lines += _array("entries", (_entry(e, places, sharing) for e in catalogue.entries.values()), "")
    return "\n".join([*lines, "}", ""]).encode()


def sealed(data: bytes, sums: Mapping[str, int]) -> bytes:
    """Return a state file with its checksum, and with those of the files that it names. Pure."""
    files = dict(sorted(sums.items()))
    crc = checksums.of_state(json.loads(data) | {"files": files})
    end = b"\n}\n"
    return data.removesuffix(end) + f',\n"files": {_line(files)},\n"{checksums.IN_STATE}": {crc}'.encode() + end


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _array(key: str, items: Iterator[dict[str, Any]], end: str) -> list[str]:
    lines = ",\n".join(f"  {_line(item)}" for item in items)
    return [f"{_line(key)}: [", *([lines] if lines else ()), f"]{end}"]


def _path(path: Path) -> list[Any]:
    return [typed_json.encode(key, name=dotted(path)) for key in path]


def _container(path: Path, container: Container, sharing: typed_json.Sharing) -> dict[str, Any]:
    data = {"path": _path(path), "kind": container.kind}
    if container.attrs:
        data["attributes"] = typed_json.encode(container.attrs, name=dotted(path), sharing=sharing)
    return data


def _entry(entry: Tensor | Object, places: Mapping[Path, TensorPlace], sharing: typed_json.Sharing) -> dict[str, Any]:
    data: dict[str, Any] = {"path": _path(entry.path)}
    if isinstance(entry, Object):
        return data | {"value": typed_json.encode(entry.value, name=entry.name, sharing=sharing)}
    place = places[entry.path]
    data |= {"file": place.file, "name": place.name}
    if place.raw:
        data |= {"dtype": entry.dtype.name, "shape": list(entry.shape)}
    if entry.embedded:
        data["embedded"] = True
    return data


# Reading --------------------------------------------------------------------------------------------------------------


def parse(
    text: bytes, catalogue: Catalogue, find: Callable[[str, str], tuple[int, HeaderEntry]], name: str
) -> dict[str, int] | None:
    """Add the entries of a state file to the catalogue; `find(file, name)` returns a tensor's file and header entry.
    Returns the checksums of the files, if it has some.

    Raises CorruptError if the file is not valid, ReadError if it is of a later version.
    """
    state = strict_json.parse(text, name)
    schema = state.get("schema") if isinstance(state, dict) else None
    if schema != SCHEMA:
        if isinstance(state, dict) and not str(schema).startswith(_FAMILY):
            _check(state, name)
        found = "it has no schema" if schema is None else f"its schema is `{schema}`"
        message = f"{name}: {found}, not `{SCHEMA}`"
        raise ReadError(message, hint="it was written by a later ckpttool: update yours")
    _check(state, name)
    alike = Alike()
    for item in _items(state, "containers", name):
        alike.add((path := _read_path(item, name),))
        catalogue.containers[path] = _read_container(item, path, name)
    for item in _items(state, "entries", name):
        alike.add((path := _read_path(item, name),))
        if "value" in item:
            value = typed_json.decode(item["value"], name=f"{name}: `{dotted(path)}`", functions=_FUNCTIONS)
            catalogue.add(Object(path, value, nbytes=_length(item["value"], path, name)))
        else:
            catalogue.add(_read_tensor(item, path, catalogue, find, name))
    for entry in catalogue.objects:
        for link in flatten.links(entry.value):
            if not isinstance(catalogue.entries.get(link.path), Tensor):
                missing = f"{name}: `{entry.name}` needs the tensor `{dotted(link.path)}`, which is missing"
                raise CorruptError(missing, tensor=dotted(link.path))
    return state.get("files") if checksums.IN_STATE in state else None


def _check(state: Mapping[str, Any], name: str) -> None:
    """Raise CorruptError for a state that does not have its checksum, if it has one."""
    expected, files = state.get(checksums.IN_STATE), state.get("files")
    if expected is None:
        return
    actual = checksums.of_state(state)
    if actual != expected or not isinstance(files, dict):
        text = f"{name} has CRC-32 {actual}, but the writer recorded {shown(expected)}: something in it has changed"
        hint = f"use another copy; if you have edited it, remove the line `{checksums.IN_STATE}`"
        raise CorruptError(text, hint=hint, found=actual, expected=expected)


def _length(value: Any, path: Path, name: str) -> int:
    try:
        return len(_line(value))
    except ValueError:
        # Python reads 1e999 as infinity.
        raise CorruptError(f"{name}: `{dotted(path)}`: a number that is too large for a float") from None


def _items(state: Mapping[str, Any], key: str, name: str) -> list[dict[str, Any]]:
    items = state.get(key)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise CorruptError(f"{name}: `{key}` is not a list of objects")
    return items


def _read_path(item: Mapping[str, Any], name: str) -> Path:
    path = typed_json.decode(item.get("path"), name=name, functions=_FUNCTIONS)
    with suppress(TypeError):
        if isinstance(path, list):
            hash(tuple(path))
            return tuple(path)
    raise CorruptError(f"{name}: {shown(item.get('path'))} is not a path")


def _read_container(item: Mapping[str, Any], path: Path, name: str) -> Container:
    kind = item.get("kind")
    attributes = typed_json.decode(item.get("attributes", {}), name=name, functions=_FUNCTIONS)
    with suppress(TypeError):
        if kind in ("list", "dict", "OrderedDict"):
            return Container(kind, attributes_of(attributes) or None)
    raise CorruptError(f"{name}: `{dotted(path)}` is an unknown container: {shown(kind)} with {shown(attributes)}")


def _read_tensor(
    item: Mapping[str, Any],
    path: Path,
    catalogue: Catalogue,
    find: Callable[[str, str], tuple[int, HeaderEntry]],
    name: str,
) -> Tensor:
    file, stored, shape = item.get("file"), item.get("name"), item.get("shape")
    if not isinstance(file, str) or not isinstance(stored, str):
        raise CorruptError(f"{name}: `{dotted(path)}` is neither a value nor a tensor", tensor=dotted(path))
    is_raw = "dtype" in item
    if is_raw and (not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape)):
        raise CorruptError(f"{name}: tensor `{dotted(path)}`: its shape is {shown(shape)}", tensor=dotted(path))
    raw_dtype = dtypes.dtype(spelt(item["dtype"])) if is_raw else None
    number, entry = find(file, stored)
    dtype, sizes = entry.dtype, entry.shape
    if raw_dtype is not None:
        dtype, sizes = raw_dtype, tuple(shape or ())
        nbytes = prod(sizes) * dtype.itemsize
        if entry.dtype.name != "uint8" or entry.shape != (nbytes,):
            actual, expected = f"{entry.dtype} {list(entry.shape)}", f"{nbytes} bytes of a {dtype} {list(sizes)}"
            text = f"`{catalogue.files[number].location}`: tensor `{stored}` is {actual}, not the {expected}"
            raise CorruptError(text, tensor=dotted(path))
    chunks = Chunks.single(sizes, checksums.extent(number, entry))
    return Tensor(path, dtype, sizes, chunks, embedded=item.get("embedded") is True)
