from transformers import LlamaConfig, LlamaForCausalLM


class TinyConfig(LlamaConfig):
    model_type = "tiny"


class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
