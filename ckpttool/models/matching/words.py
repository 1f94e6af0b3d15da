"""What the names of modules say: which part of the attention or of the MLP a weight is, however it is spelt. Pure.

A word counts only if it means the same thing wherever it is used; some do so beside certain others only (`w1` beside
`w2` and `w3`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence

from ckpttool.models.matching.modules import Module

_ROLES = {
    "q": "q q_proj query wq w_q to_q q_lin query_proj linear_q q_linear",
    "k": "k k_proj key wk w_k to_k k_lin key_proj linear_k k_linear",
    "v": "v v_proj value wv w_v to_v v_lin value_proj linear_v v_linear",
    "o": "o o_proj w_o out_lin",
    "gate": "gate_proj w_gate wi_0",
    "up": "up_proj w_up wi_1 c_fc dense_h_to_4h",
    "down": "down_proj w_down dense_4h_to_h",
    "embedding": "embed_tokens wte tok_embeddings tok_embedding word_embeddings word_embedding token_embedding "
    "token_embeddings embed_in",
    "positions": "wpe embed_positions position_embeddings position_embedding pos_embed pos_emb positional_embedding",
    "head": "lm_head embed_out unembed",
    "qkv": "qkv qkv_proj c_attn query_key_value linear_qkv wqkv w_pack in_proj_qkv",
    "kv": "kv kv_proj to_kv",
    "gate_up": "gate_up_proj gate_up w13 gate_and_up_proj linear_fc1",
    "q_norm": "q_norm q_layernorm query_norm q_layer_norm",
    "k_norm": "k_norm k_layernorm key_norm k_layer_norm",
}
_ROLE_OF = {word: role for role, words in _ROLES.items() for word in words.split()}
PARTS = {"qkv": ("q", "k", "v"), "kv": ("k", "v"), "gate_up": ("gate", "up")}
# Words that mean something beside all the others of their row only.
_BESIDE = (
    {"gate": "gate", "up": "up", "down": "down"},
    {"fc1": "up", "fc2": "down"},
    {"fc_in": "up", "fc_out": "down"},
    {"linear1": "up", "linear2": "down"},
    {"lin1": "up", "lin2": "down"},
    {"linear_fc1": "gate_up", "linear_fc2": "down"},
    {"c_fc": "up", "c_proj": "down"},
    {"wi": "up", "wo": "down"},
    {"wi_0": "gate", "wi_1": "up", "wo": "down"},
    {"wq": "q", "wk": "k", "wv": "v", "wo": "o"},
    {"wqkv": "qkv", "wo": "o"},
    {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"},
    {"qkv_proj": "qkv", "out_proj": "o"},
    {"to_q": "q", "to_k": "k", "to_v": "v", "to_out": "o"},
    {"linear_qkv": "qkv", "linear_proj": "o"},
    {"c_attn": "qkv", "c_proj": "o"},
    {"query_key_value": "qkv", "dense": "o"},
    {"input_linear": "gate_up", "output_linear": "down"},
)
# The norms of a layer before the attention and before the MLP, where it has just these two.
_NORMS = (
    ("input_layernorm", "post_attention_layernorm"),
    ("input_layernorm", "pre_mlp_layernorm"),
    ("attention_norm", "ffn_norm"),
    ("attention_norm", "mlp_norm"),
    ("attn_norm", "ffn_norm"),
    ("attn_norm", "mlp_norm"),
    ("ln_1", "ln_2"),
    ("ln1", "ln2"),
    ("norm1", "norm2"),
    ("norm_1", "norm_2"),
)
_LAST_NORMS = ("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "final_norm")
# Fused weights that lie part by part, and those whose heads lie group by group.
_BY_PARTS = ("qkv_proj", "c_attn", "Wqkv", "W_pack", "gate_up_proj", "gate_up", "w13", "linear_fc1", "input_linear")
_BY_GROUPS = ("linear_qkv",)
_GROUPS_OF_TYPES = ("gpt_neox", "gpt_neox_japanese", "bloom", "falcon")
_GROUPS_OF_THEM = ("attention.query_key_value", "self_attention.query_key_value")
_UNUSUAL_TYPES = ("codegen", "gpt_bigcode", "gpt_oss")  # their parts lie in an order of their own
# Libraries that rotate the two halves of a head: what they call the attention, its queries and keys, and what they have
# beside them. No word tells it alone: torchtune's `attn.q_proj` and fairseq2's `self_attn.q_proj` are of neighbours.
_HALVES = (
    # transformers: `rotate_half` of Llama and most others
    ("self_attn", ("q_proj", "k_proj", "qkv_proj"), ("o_proj", "dense", "out_proj")),
    ("attention", ("query_key_value",), ("dense",)),  # GPT-NeoX, there and in its own library
    ("self_attention", ("query_key_value",), ("dense",)),  # Falcon
    ("attn", ("c_attn",), ("c_proj",)),  # Qwen
    ("self_attention", ("linear_qkv",), ("linear_proj",)),  # Megatron Core, without `--rotary-interleaved`
)
_SIDE_OF = {
    "encoder": "encoder",
    "decoder": "decoder",
    **dict.fromkeys(("vision", "visual", "image", "vit"), "vision"),
    **dict.fromkeys(("text", "language"), "text"),
    **dict.fromkeys(("audio", "speech"), "audio"),
    **dict.fromkeys(("selfattention", "selfattn"), "self"),
    **dict.fromkeys(("cross", "crossattention", "crossattn", "encdecattention", "encoderattn"), "cross"),
    **dict.fromkeys(("attn", "attention"), "attention"),
    **dict.fromkeys(("mlp", "ffn", "feedforward"), "mlp"),
}
_OPPOSED = ({"encoder", "decoder"}, {"vision", "text", "audio"}, {"self", "cross"}, {"attention", "mlp"})
_WHOLE = {
    "self_attn": "self",
    "self_attention": "self",
    "encoder_attn": "cross",
    "cross_attn": "cross",
    "crossattention": "cross",
    "cross_attention": "cross",
    "feed_forward": "mlp",
    "block_sparse_moe": "mlp",
    "multi_head_attention": "attention",
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def last(module: Module) -> str:
    """Return the last key of a module's name that is not a number."""
    return next((key for key in reversed(module.keys) if not (key.isdigit() or key == "{}")), "")


def spelling(module: Module) -> tuple[str, ...]:
    """Return how a library spells a module: the keys after the number of its layer, or the last two."""
    keys = [*module.keys]
    while keys and _is_number(keys[-1]):
        keys.pop()
    after = max((place for place, key in enumerate(keys) if _is_number(key)), default=len(keys) - 3)
    return tuple(keys[max(after, -1) + 1 :])


def _is_number(key: str) -> bool:
    return key.isdigit() or "{}" in key


def roles(modules: Sequence[Module]) -> dict[Module, str]:
    """Return what each module is, of those of which the name says so."""
    beside: dict[str, dict[str, list[Module]]] = defaultdict(lambda: defaultdict(list))
    for module in modules:
        beside[module.pattern.removesuffix(last(module))][last(module)].append(module)
    found: dict[Module, str] = {}
    for siblings in beside.values():
        for word, same in siblings.items():
            for module in same:
                role = _ROLE_OF.get(word.lower())
                if role is None and "{}" not in module.pattern:
                    role = "head" if word in ("output", "output_layer") else None
                    role = "last_norm" if word in _LAST_NORMS else role
                if module.pattern.endswith(("linear_qkv.layer_norm", "linear_fc1.layer_norm")):
                    role = "norm_1" if "linear_qkv" in module.pattern else "norm_2"
                if role is not None:
                    found[module] = role
        for row in _BESIDE:
            if row.keys() <= siblings.keys():
                found |= {module: role for word, role in row.items() for module in siblings[word]}
        found |= _of_three(siblings)
        norms = sorted(word for word in siblings if "norm" in word.lower() or re.fullmatch(r"ln_?\d", word))
        for pair in _NORMS:
            if norms == sorted(pair):
                found |= {m: f"norm_{k}" for k, word in enumerate(pair, 1) for m in siblings[word]}
    return found


def _of_three(siblings: Mapping[str, list[Module]]) -> dict[Module, str]:
    """Return what `w1`, `w2` and `w3` are: in some libraries `w3` is the way down, which shapes tell."""
    if not {"w1", "w2", "w3"} <= siblings.keys() or any(len(siblings[word]) != 1 for word in ("w1", "w2", "w3")):
        return {}
    one, two, three = (siblings[word][0] for word in ("w1", "w2", "w3"))
    shapes = [module.parameters[module.main][1] for module in (one, two, three)]
    if shapes[0] == shapes[2] != shapes[1]:
        return {one: "gate", two: "down", three: "up"}
    return {}


def meanings(module: Module) -> frozenset[str]:
    """Return where the name says that a module is: `encoder`, `vision`, `cross`, `mlp`, `shared`."""
    found = set()
    for key in module.keys[:-1]:
        lower = key.lower()
        words = [word.lower() for word in _WORD.findall(key)]
        for word in (*words, "".join(words)):
            if word in _SIDE_OF and lower not in _WHOLE:
                found.add(_SIDE_OF[word])
        if lower in _WHOLE:
            found.add(_WHOLE[lower])
        if "shared" in words:
            found.add("shared")
        if words and words[-1] in ("experts", "expert") and "shared" not in words:
            found.add("experts")
    if found & {"self", "cross"}:
        found.add("attention")
    return frozenset(found)


def opposed(one: frozenset[str], other: frozenset[str]) -> bool:
    """Return whether two modules cannot be the same by where they are."""
    for group in (*_OPPOSED, {"shared", "experts"}):
        a, b = one & group, other & group
        if a and b and not a & b:
            return True
    return False


def is_norm(module: Module) -> bool:
    """Return whether a module is a norm, whatever it is a part of."""
    return "norm" in last(module).lower() or last(module).lower().startswith("ln")


def layout(module: Module, model_type: str | None) -> str | None:
    """Return how the parts of a fused weight lie: `parts` one after the other, `groups` of heads; None if the name does
    not say."""
    word = last(module)
    if model_type in _UNUSUAL_TYPES:
        return None
    if word in _BY_GROUPS or (model_type in _GROUPS_OF_TYPES and ".".join(module.keys[-2:]) in _GROUPS_OF_THEM):
        return "groups"
    return "parts" if word in _BY_PARTS else None


def rotates_halves(module: Module, beside: Container[str]) -> bool:
    """Return whether queries and keys of this name, and with these others beside them, are of a library that rotates
    halves, not neighbours."""
    return any(
        module.keys[-2:-1] == (attention,) and last(module) in own and any(word in beside for word in output)
        for attention, own, output in _HALVES
    )
