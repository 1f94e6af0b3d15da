"""Recognises checkpoints of Orbax (JAX, Flax, MaxText).

    10/_CHECKPOINT_METADATA            JSON: the handler of each item
    10/state/_METADATA                 JSON: the tree, with the type of each leaf
    10/state/manifest.ocdbt d/..       the arrays, in a key-value store of TensorStore; else a Zarr folder for each

Upstream: orbax-checkpoint 0.12 `_src/metadata/{tree,checkpoint}.py`, `_src/path/atomicity.py`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.catalogue.warning import Warning
from ckpttool.producers.directory import Directory
from ckpttool.producers.foreign.recognition import Recognition
from ckpttool.text import plural, some

_CHECKPOINT, _TREE, _MARK = "_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint"
_UNFINISHED = ".orbax-checkpoint-tmp"


def recognise(directory: Directory) -> Recognition | None:
    """Return what a directory of Orbax is, or the newest step in it; None for any other directory."""
    found = _step(directory)
    numbers = [name for name in directory.folders if name.isascii() and name.isdecimal()]
    if found is None and numbers:
        newest = max(numbers, key=int)
        found = _step(directory.folder(newest))
        found = found and replace(found, details={"step": int(newest), **found.details})
    return found


def _step(directory: Directory) -> Recognition | None:
    if _CHECKPOINT in directory or _MARK in directory:
        return _checkpoint(directory)
    if _TREE in directory and ("manifest.ocdbt" in directory or "_sharding" in directory):
        return _recognition(directory, {"": directory.facts(_TREE)})
    return None


def _checkpoint(directory: Directory) -> Recognition:
    trees = {name: directory.folder(name).facts(_TREE) for name in directory.folders if _TREE in directory.folder(name)}
    return _recognition(directory, trees)


def _recognition(directory: Directory, trees: dict[str, dict[str, Any]]) -> Recognition:
    leaves = [leaf for tree in trees.values() for leaf in _leaves(tree)]
    arrays = [leaf for leaf in leaves if leaf.get("value_type") in ("jax.Array", "np.ndarray")]
    shapes = [leaf.get("write_shape") for leaf in arrays]
    known = [s for s in shapes if isinstance(s, list) and all(type(n) is int and n >= 0 for n in s)]
    details: dict[str, str | int] = {}
    if trees.keys() - {""}:
        details["items"] = some(sorted(trees), 8)
    details["arrays"] = len(arrays)
    if known:
        details["elements"] = sum(map(prod, known))
    stores = {
        ("OCDBT" if tree.get("use_ocdbt") else "folders") + (", Zarr 3" if tree.get("use_zarr3") else ", Zarr 2")
        for tree in trees.values()
    }
    if stores:
        details["store"] = "; ".join(sorted(stores))
    unfinished = [n for n in [directory.name, *directory.names] if _UNFINISHED in n]
    text = f"the save did not end: `{unfinished[0]}`" if unfinished else ""
    return Recognition(
        "Orbax (JAX)",
        details=details,
        can=("inspect it",),
        cannot=(f"read its {plural(len(arrays), 'array')}",),
        hint="restore it with orbax, and save it with safetensors",
        warnings=(Warning("missing-part", text),) if unfinished else (),
    )


def _leaves(tree: dict[str, Any]) -> list[dict[str, Any]]:
    metadata = tree.get("tree_metadata")
    leaves = metadata.values() if isinstance(metadata, dict) else ()
    values = [leaf.get("value_metadata") for leaf in leaves if isinstance(leaf, dict)]
    return [value for value in values if isinstance(value, dict)]
