"""The tensors that transformers and diffusers load as float32 whatever the dtype of the model, by its class.

Routers of experts choose others when the bias of their scores is rounded. Made from the classes of transformers 5.23.0
and diffusers 0.42.1, of default configs on the meta device; what a class itself says is there for those that cannot be
built so, too. Where the libraries are installed, they are asked themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# Names of classes without what begins with `For` or is `Model` at the end: what stays float32, and what does in a model
# of float16 only.
_TRANSFORMERS = (
    (
        (
            "AXK1 DeepseekV3 ExaoneMoe Glm4Moe Glm4MoeLite Glm4vMoe Kimi_K25 MiMoV2Flash NemotronHForCausalLM "
            "NemotronHModel SolarOpen"
        ),
        "e_score_correction_bias",
        "",
    ),
    ("AXK2 DeepseekV32 GlmMoeDsa", "e_score_correction_bias", "indexer.weights_proj"),
    (
        "Afmoe",
        "",
        (
            "expert_bias|input_layernorm|k_norm|norm|post_attention_layernorm|post_mlp_layernorm|"
            "pre_mlp_layernorm|q_norm"
        ),
    ),
    ("BailingHybrid", r"A_log|conv1d|dt_bias|e_score_correction_bias|gate\.expert_bias$", ""),
    ("Beam", "e_score_correction_bias|mlp.gate.weight", ""),
    ("Blip2 Blip2TextModelWithProjection Blip2VisionModelWithProjection", "", "qformer|query_tokens"),
    ("ClvpModel", r"rotary_pos_emb\.inv_freq$", ""),
    ("Csm Mimi", r"codebook\.initialized$", ""),
    ("DFine Deimv2", r"encoder_attn\.num_points_scale$", ""),
    ("Deberta", r"self\.q_bias$|self\.v_bias$", ""),
    (
        "DeepseekV4",
        (
            r"attn\.attn_sink$|attn_hc|compressor\.ape$|e_score_correction_bias|ffn_hc|gate\.bias$|"
            "hc_attn_base$|hc_attn_fn$|hc_attn_scale$|hc_ffn_base$|hc_ffn_fn$|hc_ffn_scale$|hc_head|"
            "input_layernorm|kv_norm|norm|position_bias|post_attention_layernorm|q_a_norm|sinks"
        ),
        (
            "self_attn.compressor.gate_proj|self_attn.compressor.indexer.gate_proj|"
            "self_attn.compressor.indexer.kv_proj|self_attn.compressor.indexer.scorer.weights_proj|"
            "self_attn.compressor.kv_proj"
        ),
    ),
    ("Dots3Note", r"e_score_correction_bias|mlp\.router_bias$", ""),
    (
        (
            "Ernie4_5_Moe Ernie4_5_VLMoe Ernie4_5_VLMoeVisionTransformerPretrained Ernie4_5_VL_Moe "
            "Ernie4_5_VL_MoeVisionTransformerPretrained"
        ),
        "gate.weight|moe_statics",
        "",
    ),
    (
        "EsmFold2",
        (
            "boundaries|distogram_head|fourier|norm.bias|norm.weight|norm_mix|norm_single|norm_start|"
            r"parcae\.log_delta$"
        ),
        "",
    ),
    ("Evolla", r"rotary_embeddings\.inv_freq$", ""),
    ("Flint", r"gate.weight|self_attn\.softmax_offset$|sinks", ""),
    (
        "Glm5Next",
        (
            "A_log|attn_hc.base|attn_hc.scale|conv1d|dt_bias|e_score_correction_bias|ffn_hc.base|"
            "ffn_hc.scale|hc_attn_base$|hc_attn_scale$|hc_ffn_base$|hc_ffn_scale$"
        ),
        "",
    ),
    ("GptOss", "", "input_layernorm|norm|post_attention_layernorm"),
    (
        "GradiumPhononTTSForConditionalGeneration",
        r"flow_lm\.emb_mean$|flow_lm\.emb_std$|freqs|latent_mean|latent_std",
        "",
    ),
    ("GraniteSpeech5 GraniteSpeech5Encoder", "conv.norm", ""),
    ("HYV3", r"e_score_correction_bias|mlp\.expert_bias$", ""),
    (
        "HYV4",
        (
            "base|e_score_correction_bias|fn|hc_base|hc_fn|hc_scale|k_norm|lm_head|scale|"
            r"self_attn\.learnable_sink_param$|sinks|weights_proj"
        ),
        "",
    ),
    ("Inkling", r"attn_sconv|e_score_correction_bias|gate.global_scale|gate\.bias$|k_sconv|mlp_sconv|v_sconv", ""),
    (
        "Inkling2",
        (
            "attention_input|e_score_correction_bias|final_input|k_sconv.conv1d|mlp.gate.weight|mlp_input|"
            "post_attention_convolution|post_mlp_convolution|v_sconv.conv1d"
        ),
        "",
    ),
    ("InstructBlip InstructBlipVideo", "", "query_tokens"),
    ("Kolibri1", r"e_score_correction_bias|router\.expert_bias$", ""),
    ("KyutaiSpeechToText", "codec_model", ""),
    ("LongcatFlash", "", "classifier.weight"),
    ("MT5 MT5Encoder Musicgen MusicgenMelody Pop2Piano T5 T5Encoder UMT5 UMT5Encoder Udop UdopEncoder", "", "wo"),
    ("MistralLarge4", r"gate\.weight$|lerope\.alpha$|mlp.gate.weight|rotary_emb", "indexer.weights_proj"),
    (
        "MuseSpark",
        ("e_score_correction_bias|mlp.gate.weight|post_attention_residual_gate|post_feedforward_residual_gate"),
        "",
    ),
    ("Nemotron3_5Transcribe", "audio_tower|e_score_correction_bias|multi_modal_projector", ""),
    ("OlmoHybrid", r"linear_attn\.A_log$", ""),
    ("OpenAIPrivacyFilter", "sinks", ""),
    ("PocketTTSForConditionalGeneration", "freqs|latent_mean|latent_std", ""),
    ("RTDetrV2", r"encoder_attn\.n_points_scale$", ""),
    ("Reformer", r"weights\.0$|weights\.1$", ""),
    ("Rwkv", "", "time_decay|time_first"),
    ("SLANeXt SLANeXtBackbone SLANeXtSLAHead", "structure_attention_cell|structure_generator", ""),
    ("UniSpeech Wav2Vec2 Wav2Vec2Conformer", r"quantizer\.codevectors$", ""),
    ("UniSpeechSat", r"label_embeddings_concat$|quantizer\.codevectors$", ""),
    ("VideoPrism VideoPrismClip", r"embeddings\.position_embedding$", ""),
    ("Voxtral", "embed_positions", ""),
    (
        "XLNet",
        (
            r"mask_emb$|rel_attn\.k$|rel_attn\.o$|rel_attn\.q$|rel_attn\.r$|rel_attn\.r_r_bias$|"
            r"rel_attn\.r_s_bias$|rel_attn\.r_w_bias$|rel_attn\.seg_embed$|rel_attn\.v$|transformer\.mask_emb$"
        ),
        "",
    ),
    ("Zamba", r"mamba\.A_log$", ""),
    ("Zaya", r"gate\.balancing_biases$", ""),
)
# Parts of names.
_DIFFUSERS = (
    (
        "AnyFlowFARTransformer3DModel AnyFlowTransformer3DModel ChronoEditTransformer3DModel",
        "norm1 norm2 norm3 scale_shift_table time_embedder",
    ),
    ("AutoencoderKLMiniMaxH3", "encoder norm1 norm2 norm_out quant_conv scale1 scale2"),
    ("AutoencoderKLMiniMaxH3Audio", "dec_in_proj decoder encoder logs_proj mean_proj pre_block"),
    ("Cosmos3OmniTransformer", "time_embedder"),
    ("CosmosControlNetModel CosmosTransformer3DModel", "learnable_pos_embed"),
    ("Flux3Transformer2DModel", "norm_k norm_q"),
    ("HeliosTransformer3DModel", "history_key_scale norm1 norm2 norm3 scale_shift_table time_embedder"),
    ("JoyImageEditPlusTransformer3DModel JoyImageEditTransformer3DModel", "norm1 norm2 norm_out time_embedder"),
    ("Kandinsky5Transformer3DModel", "modulation text_modulation time_embeddings visual_modulation"),
    ("Kandinsky6SRTransformer3DModel", "modulation pooled_bias time_embeddings"),
    ("Kandinsky6Transformer3DModel", "modulation time_embeddings"),
    ("Krea2Transformer2DModel", "norm norm1 norm2 norm_k norm_q"),
    ("MiniMaxH3Transformer3DModel", "audio_proj_in audio_proj_out proj_in proj_out rope time_embedder"),
    ("RFD4ProteinaAutoencoder", "latent_decoder_mean_n_log_scale norm"),
    ("RFD4ProteinaTransformer", "cond_factory ln_out norm"),
    (
        "SkyReelsV2Transformer3DModel WanTransformer3DModel WanVACETransformer3DModel",
        "norm1 norm2 norm3 rope scale_shift_table time_embedder",
    ),
    ("WanAnimate2Transformer3DModel", "modulation norm1 norm2 norm3 scale_shift_table time_embedding time_projection"),
    ("WanAnimateTransformer3DModel", "motion_synthesis_weight norm1 norm2 norm3 rope scale_shift_table time_embedder"),
)
_UNKNOWN = "e_score_correction_bias"
_HEAD = re.compile(r"(?<=[a-z0-9])(For[A-Z]\w*|(Text|Vision|Audio)?(LMHead)?Model)$")


def kept(architecture: str | None, dtype: str) -> Callable[[str], bool]:
    """Return whether the tensor of a name stays float32 in a model of this class and dtype. Of other classes, the bias
    of the scores of experts does. Pure."""
    family = _HEAD.sub("", architecture or "")
    words = next((words for names, words in _DIFFUSERS if architecture in names.split()), "")
    rules, half = next(
        ((rules, half) for names, rules, half in _TRANSFORMERS if family in names.split()),
        ("" if words else _UNKNOWN, ""),
    )
    patterns = [rules] if rules else []
    patterns += [half] if half and dtype == "float16" else []
    patterns += [rf"(^|\.)({'|'.join(words.split())})(\.|$)"] if words else []
    pattern = re.compile("|".join(patterns)) if patterns else None
    return lambda name: pattern is not None and pattern.search(name) is not None
