"""Small random models of any family of transformers, made of the defaults of their config classes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

_LAYERS = r"num_hidden_layers(_.*)?|n_layers?|num_layers|(num_)?(en|de)coder_(num_)?layers|depth|num_blocks"
_WIDTHS = (
    r"hidden_size|d_model|n_embd|(model_|emb(ed)?_|hidden_|projection_|text_embed_)?dim|embedding_size"
    r"|(encoder|decoder|vision|audio|projector|out)_hidden_size|word_embed_proj_dim"
)
_HEADS = r"((en|de)coder_)?(num_)?attention_heads|n_heads?|num_heads|heads|(en|de)coder_num_attention_heads"
_GROUPS = r"num_(key_value|kv|global_key_value)_heads|n_kv_heads"
_HEAD_SIZES = r"((global|attention|linear_key|linear_value|mamba)_)?head_dim|d_kv|kv_channels|mamba_d_head"
_INNER = (
    r"(moe_|shared_|decoder_|encoder_|shared_expert_|moe_shared_expert_)?intermediate_(size|dim)(_mlp)?|d_ff|n_inner"
    r"|((en|de)coder_)?ffn_dim|((moe|expert)_)?ffn_hidden_size|feed_forward_hidden_size|mlp_dim"
)
_EXPERTS = r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts"
_CHOSEN = r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|num_selected_experts|experts_top_k"
_POSITIONS = r"max_position_embeddings|n_positions|max_(source|target)_positions|seq_length|max_seq_len"
_SPECIAL = r"(image|video|audio|vision|boi|eoi|vision_start|vision_end)_token_(id|index)"
# The most that a number of a config may be, by its name; a smaller default stays.
_MOST = [
    (re.compile(pattern), most)
    for pattern, most in (
        (r"(text_|audio_)?vocab_size(_per_layer_input)?", 128),
        (_LAYERS, 2),
        (_WIDTHS, 32),
        (_HEADS, 4),
        (_GROUPS, 2),
        (_HEAD_SIZES, 8),
        (_INNER, 48),
        (_EXPERTS, 4),
        (_CHOSEN, 2),
        (r"n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers", 1),
        (r"(kv|q|attn)_lora_rank|lora_rank_.*", 16),
        (r"qk_(nope|rope)_head_dim|v_head_dim", 8),
        (_POSITIONS, 64),
        (r"linear_num_(key|value)_heads|mamba_num_heads", 4),
        (r"num_queries|patch_size|num_filters", 8),
        (r"image_size", 32),
    )
]


def _small(config: Any, layers: int) -> dict[str, Any]:
    """The fields of a config that make it small."""
    found: dict[str, Any] = {}
    for key, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            found[key] = {"model_type": value.model_type, **_small(value, layers)}
        elif isinstance(value, int) and not isinstance(value, bool) and not key.startswith("_"):
            most = next((most for pattern, most in _MOST if pattern.fullmatch(key)), None)
            if key == "mamba_n_heads":
                found[key] = 8
            elif re.fullmatch(r"(pad|bos|eos|decoder_start|forced_eos)_token_id", key):
                found[key] = 1
            elif re.fullmatch(_SPECIAL, key):
                found[key] = 100 + sum(map(ord, key)) % 27
            elif most is not None:
                found[key] = min(value, layers if re.fullmatch(_LAYERS, key) else most)
    return found


def config(model_type: str, layers: int = 2, **given: Any) -> Any:
    """A small config of a family, with these fields as they are given."""
    kind = transformers.CONFIG_MAPPING[model_type]
    fields = {**_small(kind(), layers), **given}
    fields.pop("model_type", None)
    return kind(**fields)


def classes() -> Iterator[tuple[str, Any]]:
    """Each model type with a class of a model of it, as the automatic classes know them."""
    names: dict[str, dict[str, None]] = {}
    for listed, mapping in vars(modeling_auto).items():
        if listed.endswith("_MAPPING_NAMES"):
            for model_type, chosen in mapping.items():
                several = [chosen] if isinstance(chosen, str) else chosen
                names.setdefault(model_type, {}).update(dict.fromkeys(several))
    for model_type in sorted(names.keys() & {*transformers.CONFIG_MAPPING.keys()}):
        for name in names[model_type]:
            with suppress(ImportError, AttributeError):  # some need a library that is not installed
                kind = getattr(transformers, name)
                if kind.config_class is transformers.CONFIG_MAPPING[model_type]:
                    yield model_type, kind


def written(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model that `save_pretrained` writes, under the names in memory."""
    left = {*(getattr(model, "all_tied_weights_keys", None) or ()), *(model._keys_to_ignore_on_save or ())}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in left}


# The class of a model of each family that is compared whole, and how many layers make one of each kind.
FAMILIES = {
    "albert": "AlbertForMaskedLM",
    "bamba": "BambaForCausalLM",
    "bart": "BartForConditionalGeneration",
    "beit": "BeitForImageClassification",
    "bert": "BertLMHeadModel",
    "blip-2": "Blip2ForConditionalGeneration",
    "bloom": "BloomForCausalLM",
    "clip": "CLIPForImageClassification",
    "codegen": "CodeGenForCausalLM",
    "cohere": "CohereForCausalLM",
    "deberta-v2": "DebertaV2ForMaskedLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deit": "DeiTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    "dinov3_vit": "DINOv3ViTModel",
    "distilbert": "DistilBertForMaskedLM",
    "electra": "ElectraForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "hrm_text": "HrmTextForCausalLM",
    "hubert": "HubertForCTC",
    "idefics3": "Idefics3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "jamba": "JambaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "longt5": "LongT5ForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "mamba": "MambaForCausalLM",
    "marian": "MarianForCausalLM",
    "mbart": "MBartForConditionalGeneration",
    "minimax": "MiniMaxForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "mllama": "MllamaForConditionalGeneration",
    "modernbert": "ModernBertForMaskedLM",
    "molmo2_text": "Molmo2TextModel",
    "mpnet": "MPNetForMaskedLM",
    "mpt": "MptForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nomic_bert": "NomicBertForMaskedLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "roberta": "RobertaForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "sapiens2": "Sapiens2Model",
    "segformer": "SegformerForImageClassification",
    "siglip": "SiglipForImageClassification",
    "smollm3": "SmolLM3ForCausalLM",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "swin": "SwinForImageClassification",
    "t5": "T5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
    "videomae": "VideoMAEForPreTraining",
    "vit": "ViTForImageClassification",
    "vit_mae": "ViTMAEForPreTraining",
    "wav2vec2": "Wav2Vec2ForCTC",
    "wavlm": "WavLMForCTC",
    "whisper": "WhisperForConditionalGeneration",
    "xlm-roberta": "XLMRobertaForCausalLM",
    "yolos": "YolosModel",
}
_LAYERS_OF = {"bamba": 5, "jamba": 5, "lfm2": 5, "nemotron_h": 5, "qwen3_next": 5, "recurrent_gemma": 5}
# Families that cannot be asked anything with fields as small as these, or with one tensor alone.
SILENT = {
    "bamba",
    "blip-2",
    "codegen",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "gptj",
    "hubert",
    "nemotron_h",
    "qwen2_5_vl",
    "qwen2_vl",
    "swin",
    "videomae",
    "vit_mae",
    "wav2vec2",
    "wavlm",
    "whisper",
}


def made(model_type: str) -> Any:
    """A new model of one of the families, with values of its own in each tensor."""
    name = FAMILIES[model_type]
    chosen = config(model_type, _LAYERS_OF.get(model_type, 2))
    model = getattr(transformers, name)(chosen).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() and (parameter == parameter.flatten()[0]).all():
                parameter.normal_(0.5, 0.05)
    model.tie_weights()
    return model


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """What a model is asked: tokens, or an image."""
    chosen, generator = model.config, torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        towers = chosen, getattr(chosen, "vision_config", None)
        sizes = [getattr(one, "image_size", None) for one in towers]
        size = next((size for size in sizes if isinstance(size, int)), 64)
        channels = getattr(chosen, "num_channels", 3)
        return {"pixel_values": torch.randn(2, channels, size, size, generator=generator)}
    asked = {"input_ids": torch.randint(3, 90, (2, 9), generator=generator)}
    if getattr(chosen, "is_encoder_decoder", False):
        asked["decoder_input_ids"] = asked["input_ids"]
    return asked
