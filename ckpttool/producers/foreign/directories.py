r"""Recognises directories of other tools: Megatron's, also the one that is opened, Orbax's and Paddle's.

    latest_checkpointed_iteration.txt                                "10", or "release"
    iter_0000010/.metadata __0_0.distcp common.pt metadata.json      Megatron torch_dist: opened, as any DCP directory
    iter_0000010/mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/model_optim_rng.pt [distrib_optim.pt]       Megatron, legacy
    10/_CHECKPOINT_METADATA            Orbax (JAX, Flax, MaxText): JSON with the handler of each item
    10/state/_METADATA                 JSON: the tree, with the type of each leaf
    10/state/manifest.ocdbt d/..       the arrays, in a key-value store of TensorStore; else a Zarr folder for each
    0.metadata  0_0.distcp  1_0.distcp        Paddle: {id}.metadata, {rank}_{id}.distcp

Upstream: Megatron-LM core_v0.16 to 0.19 `core/dist_checkpointing/strategies/torch.py`, `training/checkpointing.py`
(`get_checkpoint_name`), `core/optimizer/distrib_optimizer.py`; orbax-checkpoint 0.12 `_src/path/atomicity.py`,
`_src/metadata/{tree,checkpoint}.py`; Paddle 3.3 `distributed/flex_checkpoint/dcp/save_state_dict.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.values import Stub, stub_name
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError
from ckpttool.formats import torchsave
from ckpttool.producers.foreign.recognition import Recognition, ranks
from ckpttool.serialization.directory import Directory
from ckpttool.text import is_or_are, plural, some

# Megatron -------------------------------------------------------------------------------------------------------------

_TRACKER = "latest_checkpointed_iteration.txt"
_RANK = r"mp_rank_(?P<tp>\d{2})(_(?P<pp>\d{3}))?(_(?P<ep>\d{3}))?/"
_FILE = "model_optim_rng.pt"
_PARALLEL = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "data_parallel_size": "data",
}
_MODEL = {
    "num_layers": "layers",
    "hidden_size": "hidden size",
    "num_attention_heads": "attention heads",
    "num_query_groups": "query groups",
    "num_experts": "experts",
    "swiglu": "SwiGLU",
}
_OPTIMIZERS = {
    "fully_reshardable": "by parameter names",
    "fully_sharded_model_space": "flattened by parameter",
    "dp_reshardable": "in buckets without parameter names",
}
_DESCRIPTIVE = ("args", "content_metadata.distrib_optim_sharding_type")


def megatron(directory: Directory) -> Recognition | None:
    """Return what a legacy directory is, or that which the tracker beside it names; None for any other directory."""
    if any(_FILE in directory.folder(m.string) for m in directory.matching(_RANK)):
        return _legacy(directory)
    newest = directory.text(_TRACKER)
    name = f"iter_{int(newest):07d}" if newest.isascii() and newest.isdecimal() else newest
    return megatron(directory.folder(name)) if name and f"{name}/" in directory else None


def describe_megatron(catalogue: Catalogue) -> Recognition:
    """Return what an open DCP directory of Megatron is."""
    values = {entry.name: entry.value for entry in catalogue.objects if entry.name in _DESCRIPTIVE}
    arguments = _arguments(values.get("args"))
    model = [t for t in catalogue.tensors if t.part.kind == "model" and "_extra_state" not in t.name]
    is_fsdp = any(t.name.startswith("model.module.") for t in model)
    details = _details(arguments)
    kind = values.get("content_metadata.distrib_optim_sharding_type")
    if isinstance(kind, str):
        details["optimizer"] = f"{kind}, {_OPTIMIZERS.get(kind, 'not named in its keys')}"
    elif any(".gbuf_idx_" in t.name for t in catalogue.tensors):
        details["optimizer"] = f"dp_reshardable, {_OPTIMIZERS['dp_reshardable']}"
    if any(re.search(r"\.layers\.\D", t.name) for t in model):
        details["stacked"] = "axis 0 of `decoder.layers.*` is the layer"
    return Recognition(
        "Megatron-FSDP (fsdp_dtensor)" if is_fsdp else "Megatron torch_dist",
        parallelism=_parallelism(arguments),
        parameters=sum(t.numel for t in model),
        details=details,
        can=("inspect, show, verify and diff it", "convert it under Megatron's own names, shapes and all state"),
        cannot=("give Hugging Face names to it, or split its stacked layers: Megatron-Bridge does",),
    )


def _legacy(directory: Directory) -> Recognition:
    found = [m for m in directory.matching(_RANK) if _FILE in directory.folder(m.string)]
    first = directory.at(found[0].string.rstrip("/")) / _FILE
    warnings: list[Warning] = []
    values: dict[str, Any] = {}
    try:
        with closing(torchsave.FORMAT.open(first)) as source:
            values = {one.name: one.value for one in source.catalogue.objects}
    except CkptError as error:
        warnings.append(Warning("damaged", f"damaged: {error.message}", file=_FILE))
    arguments = _arguments(values.get("args"))
    details = _details(arguments)
    if isinstance(iteration := values.get("iteration"), int):
        details["step"] = iteration
    version = values.get("checkpoint_version")
    degrees = [arguments.get(name) for name in [*_PARALLEL][:2]]
    tp, pp = (degree if isinstance(degree, int) and degree > 0 else 1 for degree in degrees)
    if tp * pp <= 1 << 16:
        present = {(int(m["tp"]), int(m["pp"] or 0)) for m in found}
        absent = [(i, j) for i in range(tp) for j in range(pp) if (i, j) not in present]
        if names := [f"mp_rank_{i:02d}{f'_{j:03d}' if pp > 1 else ''}" for i, j in absent]:
            warnings.append(Warning("missing-file", f"{some(names)} {is_or_are(names)} missing"))
    return Recognition(
        "Megatron legacy",
        f"checkpoint version {version}" if isinstance(version, (int, float)) else "",
        _parallelism(arguments) or ranks(len(found), "model-parallel"),
        None,
        {"files": f"{len(found)} of model-parallel ranks", **details},
        (f"inspect, show, diff and convert each rank's file: `ckpttool inspect {first}`",),
        ("merge the tensor- and pipeline-parallel ranks: Megatron's `tools/checkpoint/convert.py` does",),
        f"open the file of one rank: `{first}`",
        tuple(warnings),
    )


def _arguments(value: Any) -> Mapping[str, Any]:
    """Return the attributes of the `argparse.Namespace` of the run."""
    if isinstance(value, Stub) and stub_name(value) == "argparse.Namespace":
        state = value.state[0] if value.state and isinstance(value.state[0], dict) else {}
        return {**value.kwargs, **state}
    return {}


def _parallelism(arguments: Mapping[str, Any]) -> str:
    degrees = ((arguments.get(name), what) for name, what in _PARALLEL.items())
    return " x ".join(f"{n} {what}-parallel" for n, what in degrees if isinstance(n, int) and n > 1)


def _details(arguments: Mapping[str, Any]) -> dict[str, str | int]:
    known = ((what, arguments.get(name)) for name, what in _MODEL.items())
    return {what: str(value) if isinstance(value, bool) else value for what, value in known if isinstance(value, int)}


# Orbax ----------------------------------------------------------------------------------------------------------------

_TREE = "_METADATA"
_UNFINISHED = ".orbax-checkpoint-tmp"


def orbax(directory: Directory) -> Recognition | None:
    """Return what a directory of Orbax is, or the newest step in it; None for any other directory."""
    found = _step(directory)
    numbers = [name for name in directory.folders if name.isascii() and name.isdecimal()]
    if found is None and numbers:
        newest = max(numbers, key=int)
        found = _step(directory.folder(newest))
        found = found and replace(found, details={"step": int(newest), **found.details})
    return found


def _step(directory: Directory) -> Recognition | None:
    if "_CHECKPOINT_METADATA" in directory or "orbax.checkpoint" in directory:
        items = {name: directory.folder(name) for name in directory.folders}
        trees = {name: item.facts(_TREE) for name, item in items.items() if _TREE in item}
    elif _TREE in directory and ("manifest.ocdbt" in directory or "_sharding" in directory):
        trees = {"": directory.facts(_TREE)}
    else:
        return None
    arrays = [leaf for t in trees.values() for leaf in _leaves(t) if leaf.get("value_type") in _ARRAYS]
    shapes = [leaf.get("write_shape") for leaf in arrays]
    known = [s for s in shapes if isinstance(s, list) and all(type(n) is int and n >= 0 for n in s)]
    details: dict[str, str | int] = {"items": some(sorted(trees), 8)} if trees.keys() - {""} else {}
    details["arrays"] = len(arrays)
    if known:
        details["elements"] = sum(map(prod, known))
    store, kind = {True: "OCDBT", False: "folders"}, {True: "Zarr 3", False: "Zarr 2"}
    stores = {f"{store[bool(t.get('use_ocdbt'))]}, {kind[bool(t.get('use_zarr3'))]}" for t in trees.values()}
    if stores:
        details["store"] = "; ".join(sorted(stores))
    unfinished = [n for n in [directory.name, *directory.names] if _UNFINISHED in n]
    return Recognition(
        "Orbax (JAX)",
        details=details,
        can=("inspect it",),
        cannot=(f"read its {plural(len(arrays), 'array')}",),
        hint="restore it with orbax, and save it with safetensors",
        warnings=tuple(Warning("missing-part", f"the save did not end: `{name}`") for name in unfinished[:1]),
    )


_ARRAYS = ("jax.Array", "np.ndarray")


def _leaves(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    metadata = tree.get("tree_metadata")
    for leaf in metadata.values() if isinstance(metadata, dict) else ():
        if isinstance(leaf, dict) and isinstance(value := leaf.get("value_metadata"), dict):
            yield value


# Paddle ---------------------------------------------------------------------------------------------------------------


def paddle(directory: Directory) -> Recognition | None:
    """Return what a directory of Paddle is, whose files end with `.distcp` too; None for any other directory."""
    files = [*directory.matching(r"(?P<rank>\d+)_\d+\.distcp")]
    if not files or ".metadata" in directory:
        return None
    saved = {int(m["rank"]) for m in files}
    warnings = []
    if not directory.has(r"\d+\.metadata"):
        warnings.append(Warning("missing-file", "there is no `*.metadata`, which is the index of its tensors"))
    if absent := sorted({*range(min(max(saved) + 1, 1 << 16))} - saved):
        warnings.append(Warning("missing-file", f"the file of rank {absent[0]} is missing"))
    return Recognition(
        "PaddlePaddle distributed",
        parallelism=ranks(max(saved) + 1),
        details={"files": len(files)},
        can=("inspect it",),
        cannot=("read its tensors",),
        hint="load it with Paddle, and save it with safetensors",
        warnings=tuple(warnings),
    )
