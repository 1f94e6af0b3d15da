"""Small random models of transformers, one of each family that is hard in its own way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

_SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, **_HEADS, tie_word_embeddings=False))


def _qwen3() -> Any:
    config = transformers.Qwen3Config(**_SMALL, **_HEADS, head_dim=8, tie_word_embeddings=True)
    return transformers.Qwen3ForCausalLM(config)


def _gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def _mixtral() -> Any:
    config = transformers.MixtralConfig(**_SMALL, **_HEADS, num_local_experts=3, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def _bert() -> Any:
    config = transformers.BertConfig(**_SMALL, num_attention_heads=4, max_position_embeddings=64)
    return transformers.BertForMaskedLM(config)


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama, "qwen3": _qwen3, "gpt2": _gpt2, "mixtral": _mixtral, "bert": _bert, "t5": _t5,
}  # fmt: skip
_BLOCKS = {"LlamaDecoderLayer", "Qwen3DecoderLayer", "GPT2Block", "MixtralDecoderLayer", "BertLayer", "T5Block"}
KINDS = ("dcp", "ranks", "accelerate")
BRIEF = ("gpt2", "t5")  # those that are trained when there is little time

Trained = Callable[[str], Path]


def made(family: str) -> Any:
    """A new model, of the same values in every process."""
    torch.manual_seed(7)
    return FAMILIES[family]().eval()


def inputs(family: str, step: int = 0) -> dict[str, torch.Tensor]:
    """What the model is trained and asked on."""
    tokens = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def blocks(model: Any) -> list[torch.nn.Module]:
    """The layers, which are wrapped one by one."""
    return [module for module in model.modules() if type(module).__name__ in _BLOCKS]
