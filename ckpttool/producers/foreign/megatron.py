r"""Recognises checkpoints of Megatron: torch_dist (a DCP directory), Megatron-FSDP's, and the legacy one per rank.

    latest_checkpointed_iteration.txt                                "10", or "release"
    iter_0000010/.metadata __0_0.distcp common.pt metadata.json      torch_dist: opened, as any DCP directory
    iter_0000010/mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/model_optim_rng.pt [distrib_optim.pt]       legacy

Upstream: Megatron-LM core_v0.16 to 0.19 `core/dist_checkpointing/strategies/torch.py`, `training/checkpointing.py`
(`get_checkpoint_name`), `core/optimizer/distrib_optimizer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.values import Stub, stub_name
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError
from ckpttool.producers.directory import Directory
from ckpttool.producers.foreign.recognition import Recognition, contents_of, ranks
from ckpttool.text import is_or_are, some

_TRACKER = "latest_checkpointed_iteration.txt"
_RANK = r"mp_rank_(?P<tp>\d{2})(_(?P<pp>\d{3}))?(_(?P<ep>\d{3}))?/"
_FILE = "model_optim_rng.pt"
_PARALLEL = (
    ("tensor_model_parallel_size", "tensor"),
    ("pipeline_model_parallel_size", "pipeline"),
    ("context_parallel_size", "context"),
    ("expert_model_parallel_size", "expert"),
    ("data_parallel_size", "data"),
)
_MODEL = (
    ("num_layers", "layers"),
    ("hidden_size", "hidden size"),
    ("num_attention_heads", "attention heads"),
    ("num_query_groups", "query groups"),
    ("num_experts", "experts"),
    ("swiglu", "SwiGLU"),
)
_OPTIMIZERS = {
    "fully_reshardable": "by parameter names",
    "fully_sharded_model_space": "flattened by parameter",
    "dp_reshardable": "in buckets without parameter names",
}
_DESCRIPTIVE = ("args", "content_metadata.distrib_optim_sharding_type")
_BRIDGE = "give Hugging Face names to it, or split its stacked layers: Megatron-Bridge does"


def recognise(directory: Directory) -> Recognition | None:
    """Return what a legacy directory is, or that which the tracker beside it names; None for any other directory."""
    if any(_FILE in directory.folder(m.string) for m in directory.matching(_RANK)):
        return _legacy(directory)
    newest = directory.text(_TRACKER)
    name = f"iter_{int(newest):07d}" if newest.isascii() and newest.isdecimal() else newest
    return recognise(directory.folder(name)) if name and f"{name}/" in directory else None


def describe(catalogue: Catalogue) -> Recognition:
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
        cannot=(_BRIDGE,),
    )


def _legacy(directory: Directory) -> Recognition:
    found = [m for m in directory.matching(_RANK) if _FILE in directory.folder(m.string)]
    first = directory.at(found[0].string.rstrip("/")) / _FILE
    warnings: list[Warning] = []
    values: dict[str, Any] = {}
    try:
        values = contents_of(first).values
    except CkptError as error:
        warnings.append(Warning("damaged", f"damaged: {error.message}", file=_FILE))
    arguments = _arguments(values.get("args"))
    details = _details(arguments)
    if isinstance(iteration := values.get("iteration"), int):
        details["step"] = iteration
    version = values.get("checkpoint_version")
    degrees = [arguments.get(name) for name, _ in _PARALLEL[:2]]
    tp, pp = (degree if isinstance(degree, int) and degree > 0 else 1 for degree in degrees)
    if tp * pp <= 1 << 16:
        present = {(int(m["tp"]), int(m["pp"] or 0)) for m in found}
        absent = [
            f"mp_rank_{i:02d}{f'_{j:03d}' if pp > 1 else ''}"
            for i in range(tp)
            for j in range(pp)
            if (i, j) not in present
        ]
        if absent:
            text = f"{some(absent)} {is_or_are(absent)} missing"
            warnings.append(Warning("missing-file", text))
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
    degrees = ((arguments.get(name), what) for name, what in _PARALLEL)
    return " x ".join(f"{n} {what}-parallel" for n, what in degrees if isinstance(n, int) and n > 1)


def _details(arguments: Mapping[str, Any]) -> dict[str, str | int]:
    known = ((what, arguments.get(name)) for name, what in _MODEL)
    return {what: str(value) if isinstance(value, bool) else value for what, value in known if isinstance(value, int)}
