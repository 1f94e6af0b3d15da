"""OLMo and OLMo-core: three layouts.

    OLMo-core, OLMo   step10/{config.json, .metadata.json, train/rank0.pt, model_and_optim/.metadata}
    OLMo, unsharded   step10-unsharded/{model,optim,train}.pt, config.yaml
    OLMo, old         step10/rank0.pt, config.yaml                   FSDP1, one file per rank

Upstream: OLMo-core `train/checkpoint.py`, OLMo `checkpoint.py`.
"""

from __future__ import annotations

from ckpttool.catalogue.warning import Warning
from ckpttool.producers.components import Layout, Pattern, Producer, match_components
from ckpttool.producers.directory import Directory

_BY_RANK = (Pattern(r"rank(?P<rank>\d+)\.pt", kind="rank files"),)
_CONFIG = Pattern(r"config\.yaml", kind="asset")
_CORE = (
    Pattern(r"model_and_optim/"),
    Pattern(r"config\.(json|yaml)|\.metadata\.json|data_paths\.txt", kind="asset"),
    Pattern(r"train/", kind="ignored"),
)
_UNSHARDED = (
    Pattern(r"model\.(pt|safetensors)", "model"),
    Pattern(r"optim\.(pt|safetensors)", "optim"),
    Pattern(r"train\.pt"),
    _CONFIG,
)


def _is_core(directory: Directory) -> bool:
    return "model_and_optim/" in directory


def _core(directory: Directory) -> Layout:
    layout = match_components(directory, _CORE)
    if "train/" in directory:
        layout.merge(match_components(directory.folder("train"), _BY_RANK), "train")
    else:
        text = "there is no `train/` in it: no progress, no data loader, no random states"
        layout.warnings.append(Warning("missing-part", text))
    return layout


def _is_unsharded(directory: Directory) -> bool:
    return "config.yaml" in directory and directory.has(r"model\.(pt|safetensors)")


def _unsharded(directory: Directory) -> Layout:
    layout = match_components(directory, _UNSHARDED, ("model", "optim"))
    if "train.pt" not in directory:
        text = "there is no `train.pt` in it: no progress, no random states"
        layout.warnings.append(Warning("missing-part", text))
    return layout


def _is_old(directory: Directory) -> bool:
    return "config.yaml" in directory and directory.has(r"rank\d+\.pt")


def _old(directory: Directory) -> Layout:
    return match_components(directory, (*_BY_RANK, _CONFIG))


CORE = Producer("OLMo-core", "a `stepN` of OLMo-core, or of OLMo in its new form", _is_core, _core)
UNSHARDED = Producer("OLMo", "a `stepN-unsharded` of OLMo", _is_unsharded, _unsharded)
OLD = Producer("OLMo, old", "a `stepN` of OLMo in its old form", _is_old, _old)
