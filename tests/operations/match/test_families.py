"""`match` on models of transformers: names in memory and those that `save_pretrained` writes are made of each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import tiny_models
from support.random_models import State, applied

from ckpttool.models.matching.solution import ConfigFacts
from ckpttool.models.matching.solve import solve

FAMILIES = [
    *("bart", "bert", "deepseek_v3", "dinov2", "gemma3", "glm4_moe", "gpt2", "gpt_neox", "jamba", "llama", "mixtral"),
    *("nemotron_h", "olmoe", "phi3", "phimoe", "qwen2_moe", "qwen2_vl", "qwen3_moe", "qwen3_next", "segformer", "t5"),
    *("vit", "whisper"),
]
KINDS = ("CausalLM", "ConditionalGeneration", "LMHead", "MaskedLM", "ImageClassification")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_in_memory_and_written_are_made_of_each_other(family: str, tmp_path: Path) -> None:
    kind = next(
        kind for name, kind in tiny_models.classes() if name == family and any(k in kind.__name__ for k in KINDS)
    )
    torch.manual_seed(0)
    model = kind(tiny_models.config(family))
    memory = {name: tensor.detach().float().normal_() for name, tensor in tiny_models.written(model).items()}
    model.load_state_dict(memory, strict=False)
    model.save_pretrained(tmp_path)
    sides: list[State] = [
        {name: tensor.float().numpy() for name, tensor in state.items()}
        for state in (memory, load_file(tmp_path / "model.safetensors"))
    ]
    for source, target in (sides, sides[::-1]):
        shapes = ({name: array.shape for name, array in side.items()} for side in (source, target))
        solution = solve(*shapes, ConfigFacts(family))
        assert not solution.unmatched
        # Of SegFormer, queries and keys have other names, and its config does not say that nothing is rotated.
        assert not solution.ambiguous or family == "segformer"
        for one in solution.found:
            made: State = {}
            for rule in one.rules:
                made |= applied(rule, source)
            for name in one.names:
                assert (made[name] == target[name]).all(), (name, one.rules)
