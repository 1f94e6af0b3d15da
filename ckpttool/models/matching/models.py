"""How a model is made into a reference: by names and shapes, and by the key maps that come with ckpttool."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue
from ckpttool.layout.key_maps import FORMAT
from ckpttool.layout.views import Viewed
from ckpttool.models import key_maps
from ckpttool.models.matching import decide, solve
from ckpttool.models.matching.solution import ConfigFacts, Solution
from ckpttool.models.reference import Reference

# Models without a rotary embedding, whose configs do not say so.
_NOT_ROTARY = re.compile(
    "albert|bart|beit|bert|bloom|camembert|clip|deberta.*|deit|dinov2|distilbert|electra|gpt2|gpt_bigcode|gpt_neo|hubert"
    "|mbart|mpnet|mpt|mt5|opt|pegasus|roberta|segformer|siglip|swin|t5|umt5|vit|vit_mae|wav2vec2|whisper|xlm-roberta|xlnet"
)


def solved(
    model: Catalogue, viewed: Viewed, reference: Reference, config: Mapping[str, Any] | None, head_dim: int | None
) -> Solution:
    """Return how the tensors of a reference are made of those of a model, whose config is that of either."""
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    wanted = untied(reference, shapes)
    solution = solve.solve(shapes, wanted, _facts(config, head_dim))
    keymap = key_maps.chosen(None, [*shapes], config, reference=[*reference.known])
    if keymap is not None:
        decide.by_map(solution, keymap, model.tensors, viewed, wanted, key_maps.facts(config, head_dim))
    return solution


def untied(reference: Reference, shapes: Mapping[str, Ints]) -> dict[str, Ints]:
    """Return the shapes of the tensors of a reference that are not another of it, unless a model has such a name."""
    return {
        name: known.shape
        for name, known in reference.known.items()
        if known.tied_to is None or known.tied_to not in reference.known or name in shapes
    }


def key_map(solution: Solution, title: str, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what is found as a key map, as its file has it."""
    kind = (config or {}).get("model_type")
    types = {"model_types": [kind]} if isinstance(kind, str) else {}
    return {"format": FORMAT, "name": "matched", "title": title, **types, "rules": solution.rules}


def counts(solution: Solution) -> dict[str, int]:
    """Return how many tensors were found, by what decided."""
    return dict(Counter(one.by for one in solution.found for _ in one.names))


def _facts(config: Mapping[str, Any] | None, head_dim: int | None) -> ConfigFacts:
    config = config or {}
    inner = config.get("text_config")
    configs = [config, inner] if isinstance(inner, Mapping) else [config]
    kind = config.get("model_type")
    rotary = None
    if _NOT_ROTARY.fullmatch(str(kind)):
        rotary = False
    elif any(key.startswith(("rope_", "rotary_")) for each in configs for key in each):
        rotary = True
    numbers = key_maps.facts(config, head_dim)
    heads = numbers.get("num_attention_heads"), numbers.get("num_key_value_heads")
    return ConfigFacts(kind if isinstance(kind, str) else None, head_dim, rotary, *heads)
