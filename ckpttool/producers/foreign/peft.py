"""Recognises adapters of PEFT, by `adapter_config.json` or the names of their tensors.

    adapter_config.json  adapter_model.safetensors        base_model.model.{module}.lora_A.weight, lora_B.weight, ..

Upstream: peft 0.21 `utils/save_and_load.py`, `tuners/lora/{layer,config}.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.warning import Warning
from ckpttool.producers.foreign.recognition import Recognition
from ckpttool.text import plural, some

CONFIG = "adapter_config.json"
_HALF = re.compile(r"(?P<module>.+)\.lora_(embedding_)?(?P<half>[AB])(\.[^.]+)*")


def describe(catalogue: Catalogue, config: Mapping[str, Any]) -> Recognition | None:
    """Return what an adapter is, from its tensors and the contents of `adapter_config.json`; None if it is none."""
    tensors = [t for t in catalogue.tensors if t.part.kind == "model"]
    halves: dict[str, set[str]] = {}
    for tensor in tensors:
        if (match := _HALF.fullmatch(tensor.name)) is not None:
            halves.setdefault(match["module"], set()).add(match["half"])
    kind = config.get("peft_type")
    is_adapter = isinstance(kind, str) or (bool(halves) and all("lora_" in t.name for t in tensors))
    if not is_adapter:
        return None
    variants = [name for name, key in (("DoRA", "use_dora"), ("rsLoRA", "use_rslora")) if config.get(key) is True]
    details: dict[str, str | int] = {}
    if halves:
        details["modules"] = len(halves)
    for title, key in (("rank", "r"), ("alpha", "lora_alpha"), ("base model", "base_model_name_or_path")):
        if isinstance(value := config.get(key), (str, int, float)):
            details[title] = value if isinstance(value, (str, int)) else f"{value:g}"
    targets = config.get("target_modules")
    if isinstance(targets, list) and all(isinstance(name, str) for name in targets):
        details["target modules"] = some(sorted(targets), 8)
    halved = [module for module, found in halves.items() if len(found) == 1]
    text = (
        f"{plural(len(halved), 'adapter module')} {'has' if len(halved) == 1 else 'have'} only one of lora_A and lora_B"
    )
    return Recognition(
        f"PEFT adapter, {' + '.join([kind if isinstance(kind, str) else 'LORA', *variants])}",
        parameters=sum(t.numel for t in tensors),
        details=details,
        can=("convert, diff and verify it", "export it: `ckpttool export`"),
        cannot=("merge it into the base model: PEFT's `merge_and_unload` does",),
        warnings=(Warning("missing-part", f"{text}: {some(halved)}"),) if halved else (),
    )
