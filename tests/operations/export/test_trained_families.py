"""Families of transformers trained under FSDP2 on two ranks: exported like what `save_pretrained` wrote, and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import tiny_models
from support.upstream_readers import dcp_whole

import ckpttool

pytestmark = pytest.mark.long

# Dense, mixtures of experts, tied, multimodal, encoder-decoder, state-space, vision and speech.
TRAINED = (
    *("albert", "bart", "beit", "bert", "bloom", "cohere", "deberta-v2", "deit", "dinov2", "distilbert"),
    *("electra", "falcon", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite"),
    *("granitemoe", "jamba", "lfm2", "llama", "mamba", "mbart", "minimax", "mistral", "mixtral", "modernbert"),
    *("olmo2", "olmoe", "opt", "phi3", "phimoe", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "roberta"),
    *("segformer", "t5", "vit", "yolos", "llava", "idefics3", "qwen3_vl", "paligemma"),
)
SCRIPT = Path(__file__).with_name("train_families.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks wrote of all families."""
    folder = tmp_path_factory.mktemp("families")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT), str(folder), *TRAINED]
    subprocess.run(words, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600)
    return folder


@pytest.mark.parametrize("family", TRAINED)
def test_a_trained_model_is_exported_like_a_reference_and_back(family: str, trained: Path, tmp_path: Path) -> None:
    folder = trained / family
    assert not (folder / "why_not").exists(), (folder / "why_not").read_text()
    expected, out = folder / "expected", tmp_path / "out"
    ckpttool.export(folder / "dcp", out, like=expected, check=True)
    ours, theirs = load_file(out / "model.safetensors"), load_file(expected / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert [n for n, value in theirs.items() if value.dtype != ours[n].dtype or not torch.equal(value, ours[n])] == []
    kind = getattr(transformers, tiny_models.FAMILIES[family])
    asked = tiny_models.inputs(tiny_models.made(family))
    with torch.no_grad():
        one, other = (kind.from_pretrained(each).eval() for each in (out, expected))
        assert torch.equal(next(iter(one(**asked).values())), next(iter(other(**asked).values())))

    ckpttool.convert(expected, tmp_path / "start", to="dcp", like=folder / "dcp", check=True)
    start, state = dcp_whole(tmp_path / "start")["model"], dcp_whole(folder / "dcp")["model"]
    assert start.keys() == state.keys()
    assert [n for n, value in state.items() if value.dtype != start[n].dtype or not torch.equal(value, start[n])] == []
