"""Qwen3-0.6B on the test Hub: the files, names, dtypes and shapes of the real one, and few values."""

from __future__ import annotations

import json
from math import prod

from support.hub_server import Hub

NAME = "Qwen/Qwen3-0.6B"
_LAYERS, _HIDDEN, _INTERMEDIATE, _VOCABULARY = 28, 1024, 3072, 151936
_HEADS, _GROUPS, _HEAD = 16, 8, 128
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": _LAYERS,
    "hidden_size": _HIDDEN,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_LAYER = {
    "input_layernorm": (_HIDDEN,),
    "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
    "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
    "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
    "post_attention_layernorm": (_HIDDEN,),
    "self_attn.k_norm": (_HEAD,),
    "self_attn.k_proj": (_GROUPS * _HEAD, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD),
    "self_attn.q_norm": (_HEAD,),
    "self_attn.q_proj": (_HEADS * _HEAD, _HIDDEN),
    "self_attn.v_proj": (_GROUPS * _HEAD, _HIDDEN),
}
_REST = ("LICENSE", "README.md", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json")


def add(hub: Hub) -> None:
    """Add the repository. The file of weights has a hole in place of its values, but for a few of the head and of the
    embedding, which are the same."""
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (_VOCABULARY, _HIDDEN)}
    shapes["model.embed_tokens.weight"] = (_VOCABULARY, _HIDDEN)
    for i in range(_LAYERS):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in _LAYER.items()}
    shapes["model.norm.weight"] = (_HIDDEN,)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = 2 * _VOCABULARY * _HIDDEN
    size, oid = 8 + len(text) + end, "0" * 64
    with (hub.store / oid).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(size)
        for begin in range(0, 2 * head, head):
            for at in (0, head // 2 - 2048, head - 2048):
                file.seek(8 + len(text) + begin + at)
                file.write(bytes(i * i % 251 for i in range(at, at + 4096))[: head - at])
    small = {name: b"{}" if name.endswith(".json") else b"" for name in (*_REST, "vocab.json")}
    hub.make(NAME)
    hub.commit(
        NAME, {**small, "config.json": json.dumps(_CONFIG).encode(), "model.safetensors": hub.pointer(oid, size)}
    )
