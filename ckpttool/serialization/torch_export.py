"""Reads the archives of torch.export, which have no pickle of their own.

    <root>/data/weights/<model>_weights_config.json      {"config": {name: {"path_name", "use_pickle", "tensor_meta"}}}
           data/weights/weight_0 ...                     raw elements, or a torch.save archive (`use_pickle`)
           data/constants/<model>_constants_config.json  the same for constants: `tensor_0` ..., `custom_obj_0` ...
           data/weights/<model>.pt                       instead, up to torch 2.8: one torch.save archive
           archive_format = pt2, models/<model>.json, data/sample_inputs/...
           data/aotinductor/<model>/...                  what AOTInductor has compiled, the weights mostly in it

Upstream: `torch/export/pt2_archive` and `torch/_export/serde/schema.py` of torch 2.7 to 2.15. Tensors that share a
weight record are tied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Extent, check_shape
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CorruptError, ReadError, in_one_line
from ckpttool.serialization import strict_json, torch_pickle, torch_zip
from ckpttool.serialization.torch_pickle import StorageRef, TensorRef
from ckpttool.serialization.torch_zip import Archive

FOLDERS = {"weights": "data/weights/", "constants": "data/constants/"}
COMPILED = "data/aotinductor/"

# `ScalarType` of the schema, not `c10::ScalarType`: from 1 on, and from 28 on.
_FROM_1 = "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16"
_FROM_28 = "uint16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint32 uint64"
_DTYPES = dict([*enumerate(_FROM_1.split(), 1), *enumerate(_FROM_28.split(), 28)])
_STRIDED = 7


def is_export(archive: Archive) -> bool:
    """Return whether this archive is one of torch.export's."""
    return "data.pkl" not in archive.records and "archive_format" in archive.records


class ProgramTree:
    """The tree of an exported program, `{name: tensor, ..., "constants": {...}}`, and where its tensors lie. With
    several models in the archive each has a dict of its own. `left_out` names what is not a tensor."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._inner: dict[str, tuple[Archive, str]] = {}
        self.left_out: list[str] = []
        self.nested: set[str] = set()  # records that are archives themselves
        if "byteorder" in archive.records:
            archive.swapped = archive.content("byteorder") == b"big"
        models = sorted({m for kind in FOLDERS for m in self._models(kind)})
        if not models and any(name.startswith(COMPILED) for name in archive.records):
            message = f"{archive.name}: a package that AOTInductor compiled, whose weights are part of its code"
            raise ReadError(message, hint="name the checkpoint or the program that it was compiled from")
        trees = {model: self._model(model) for model in models}
        self.tree: Any = next(iter(trees.values())) if len(trees) == 1 else trees

    def _models(self, kind: str) -> list[str]:
        folder = FOLDERS[kind]
        names = [r.removeprefix(folder) for r in self._archive.records if r.startswith(folder)]
        return [n.removesuffix(end) for n in names for end in (f"_{kind}_config.json", ".pt") if n.endswith(end)]

    def _model(self, model: str) -> dict[str, Any]:
        tree = self._part(model, "weights")
        constants = self._part(model, "constants")
        if constants and "constants" not in tree:
            tree["constants"] = constants
        return tree

    def _part(self, model: str, kind: str) -> dict[str, Any]:
        folder = FOLDERS[kind]
        whole = f"{folder}{model}.pt"
        if whole in self._archive.records:
            tree = self._load(whole)
            return tree if isinstance(tree, dict) else {}
        record = f"{folder}{model}_{kind}_config.json"
        if record not in self._archive.records:
            return {}
        try:
            config = strict_json.parse(self._archive.content(record), f"{self._archive.name}: `{record}`")["config"]
            items = [(name, folder + meta["path_name"], meta) for name, meta in config.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(
                f"{self._archive.name}: `{record}` is not a table of tensors: {in_one_line(error)}"
            ) from None
        refs = {
            name: self._load(path) if meta.get("use_pickle") else self._described(name, path, meta.get("tensor_meta"))
            for name, path, meta in items
        }
        self.left_out += [name for name, ref in refs.items() if not isinstance(ref, TensorRef)]
        return {name: ref for name, ref in refs.items() if isinstance(ref, TensorRef)}

    def _load(self, record: str) -> Any:
        """Return what a record that is itself a torch.save archive holds: a tensor, or a dict of them."""
        self.nested.add(record)
        at = self._archive.payload(record)
        name = f"{self._archive.name}: `{record}`"
        inner = torch_zip.open_archive(self._archive.read, at.offset, at.nbytes, name=name, file=at.file)
        tree = torch_zip.load_tree(inner)

        def renamed(value: Any) -> Any:
            if not isinstance(value, TensorRef):
                return value
            key = f"{record}:{value.storage.key}"
            self._inner[key] = inner, value.storage.key
            return replace(value, storage=replace(value.storage, key=key))

        return {key: renamed(value) for key, value in tree.items()} if isinstance(tree, dict) else renamed(tree)

    def _described(self, name: str, record: str, meta: Any) -> TensorRef | None:
        if not isinstance(meta, dict) or meta.get("layout") != _STRIDED:
            return None
        dtype = _DTYPES.get(meta.get("dtype", 0))
        where = f"{self._archive.name}: tensor `{name}`"
        if dtype is None:
            raise CorruptError(f"{where} has the unknown dtype {shown(meta.get('dtype'))}")
        shape, strides = _ints(meta, "sizes", name), _ints(meta, "strides", name)
        (offset,) = _ints({"storage_offset": [meta.get("storage_offset")]}, "storage_offset", name)
        listed = self._archive.records.get(record)
        storage = StorageRef(record.removeprefix("data/"), None, listed.nbytes if listed else 0)
        try:
            return torch_pickle.rebuild(storage, DTYPES[dtype], offset, shape, strides)
        except CorruptError as error:
            raise error.prefixed(f"{where}: record `{record}`", tensor=name) from None

    def extent(self, ref: TensorRef) -> Extent:
        """Return where the elements of a tensor lie."""
        archive, key = self._inner.get(ref.storage.key, (self._archive, ref.storage.key))
        return archive.extent(replace(ref, storage=replace(ref.storage, key=key)))


def _ints(meta: dict[str, Any], key: str, name: str) -> Ints:
    values = meta.get(key)
    if isinstance(values, list):
        numbers: tuple[Any, ...] = tuple(v.get("as_int") if isinstance(v, dict) else v for v in values)
        if all(type(n) is int and n >= 0 for n in numbers):
            check_shape(numbers)
            return numbers
    raise CorruptError(f"tensor `{name}`: its {key} is {shown(values)}, not integers", tensor=name)
