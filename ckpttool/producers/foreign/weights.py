"""Recognises weights that are no plain model: quantised ones, adapters of PEFT, and the updates that RL trainers send.

    adapter_config.json  adapter_model.safetensors        base_model.model.{module}.lora_A.weight, lora_B.weight, ..
    slime, miles, SGLang   index `metadata.delta_encoding` xor or overwrite; tensors U8, one zstd frame each
    TRL                    header `sparse`: {name}.indices int32, {name}.values
    slime, early           `__positions__` and `__values__`

Upstream: peft 0.21 `utils/save_and_load.py`, `tuners/lora/{layer,config}.py`; slime #1806, #2089; SGLang #30366;
ModelExpress `S3_DELTA_WEIGHT_REFIT.md`; TRL #5417.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.catalogue import quantization
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.shown import shown
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError
from ckpttool.producers.foreign.recognition import Recognition, picked
from ckpttool.text import plural, some

CONFIG = "adapter_config.json"
_HALF = re.compile(r"(?P<module>.+)\.lora_(embedding_)?(?P<half>[AB])(\.[^.]+)*")
_OF_ADAPTER = {"r": "rank", "lora_alpha": "alpha", "base_model_name_or_path": "base model"}
_OF_UPDATE = {"base_version": "base version", "compression_format": "compressed"}


def describe_adapter(catalogue: Catalogue, config: Mapping[str, Any]) -> Recognition | None:
    """Return what an adapter is, from its tensors and the contents of `adapter_config.json`; None if it is none."""
    tensors = [t for t in catalogue.tensors if t.part.kind == "model"]
    halves: dict[str, set[str]] = {}
    for tensor in tensors:
        if (match := _HALF.fullmatch(tensor.name)) is not None:
            halves.setdefault(match["module"], set()).add(match["half"])
    kind = config.get("peft_type")
    if not isinstance(kind, str) and not (halves and all("lora_" in t.name for t in tensors)):
        return None
    variants = [name for name, key in (("DoRA", "use_dora"), ("rsLoRA", "use_rslora")) if config.get(key) is True]
    details: dict[str, str | int] = {"modules": len(halves)} if halves else {}
    details |= picked(config, _OF_ADAPTER)
    targets = config.get("target_modules")
    if isinstance(targets, list) and all(isinstance(name, str) for name in targets):
        details["target modules"] = some(sorted(targets), 8)
    halved = [module for module, found in halves.items() if len(found) == 1]
    has = "has" if len(halved) == 1 else "have"
    text = f"{plural(len(halved), 'adapter module')} {has} only one of lora_A and lora_B: {some(halved)}"
    return Recognition(
        f"PEFT adapter, {' + '.join([kind if isinstance(kind, str) else 'LORA', *variants])}",
        parameters=sum(t.numel for t in tensors),
        details=details,
        can=("convert, diff and verify it", "export it: `ckpttool export`"),
        cannot=("merge it into the base model: PEFT's `merge_and_unload` does",),
        warnings=(Warning("missing-part", text),) if halved else (),
    )


def describe_update(catalogue: Catalogue, index: Mapping[str, Any]) -> Recognition | None:
    """Return what a weight update is, which has what changed, from its tensors and the `metadata` of its index; None
    for any other checkpoint."""
    header = catalogue.facts.get("metadata")
    metadata = {**(header if isinstance(header, dict) else {}), **index}
    names = {tensor.name for tensor in catalogue.tensors}
    details: dict[str, str | int]
    if isinstance(encoding := metadata.get("delta_encoding"), str):
        kind, version = "weight update", metadata.get("version")
        details = {"changed tensors": len(names), "encoding": encoding, **picked(metadata, _OF_UPDATE)}
    elif metadata.get("sparse") in ("True", "true", True):
        kind, version = "weight update of TRL", metadata.get("model_version")
        changed = {name for name in names if name.endswith(".indices")}
        details = {"changed tensors": len(changed), "encoding": "indices and values"}
    elif {"__positions__", "__values__"} <= names:
        kind, version, details = "weight update of slime", None, {"encoding": "positions"}
    else:
        return None
    return Recognition(
        kind,
        f"version {version}" if version else "",
        details=details,
        can=("inspect and verify its files",),
        cannot=("apply it to its base model: the trainer that wrote it does",),
    )


def describe_scales(catalogue: Catalogue, config: Mapping[str, Any], faults: Sequence[CkptError]) -> Recognition | None:
    """Return how the weights of a model are quantised; None if they are not. `config` is the `quantization_config` of
    its `config.json`, `faults` what is wrong with the scales."""
    found = quantization.analyse(catalogue, config)
    method = config.get("quant_method")
    if not found.schemes and not isinstance(method, str):
        return None
    others = [t for t in catalogue.tensors if t.part.kind == "model" and t.name not in found.companions]
    parameters = sum(found.elements.get(t.name, t.numel) for t in others)
    counts = Counter(scheme.name for scheme in found.schemes.values())
    details: dict[str, str | int] = {}
    if counts:
        details["quantised weights"] = ", ".join(f"{n:,} {name}" for name, n in counts.most_common())
    whole = len(found.schemes) - len(found.missing)
    if found.schemes:
        details["scales"] = f"found for {whole:,} of {len(found.schemes):,}"
    details |= picked(config, {"bits": "bits", "group_size": "group size"})
    if isinstance(block := config.get("weight_block_size"), list):
        details["block"] = " x ".join(map(shown, block[:2]))
    if isinstance(text := config.get("format"), str):
        details["compression"] = text
    name = method if isinstance(method, str) else counts.most_common(1)[0][0]
    return Recognition(
        f"quantised model, {name}",
        parameters=parameters,
        details=details,
        can=("convert, diff, verify and export it as it is stored, scales and all",),
        cannot=("dequantise it: the library that quantised it does",),
        warnings=tuple(Warning("missing-scale", error.message) for error in faults),
    )
