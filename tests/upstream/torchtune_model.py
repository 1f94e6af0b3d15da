"""Makes what a torchtune recipe needs to train a small llama2 in the current folder, without a download.

    base/         weights and config.json in the form of transformers, and a tokenizer trained on the words of data.json
    data.json     instructions of words that no model can guess
    full.yaml     a configuration for full_finetune_*; lora.yaml the same for lora_finetune_*

Of the configuration that comes with torchtune all components are kept, and the sizes are small.
"""

import json
import random
from pathlib import Path

import sentencepiece
import torch
from safetensors.torch import save_file
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.llama2 import llama2

SIZES = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 256}
LORA = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 4, "lora_alpha": 8}

base = Path("base")
base.mkdir()
draw = random.Random(0)
lines = [" ".join(f"w{draw.randrange(80)}" for _ in range(12)) for _ in range(64)]
Path("data.json").write_text(json.dumps([{"instruction": line, "input": "", "output": line[:20]} for line in lines]))
Path("lines.txt").write_text("\n".join(lines))
sentencepiece.SentencePieceTrainer.train(
    input="lines.txt", model_prefix="base/tokenizer", vocab_size=200, hard_vocab_limit=False
)
words = sentencepiece.SentencePieceProcessor(model_file="base/tokenizer.model").vocab_size()
torch.manual_seed(0)
weights = tune_to_hf(llama2(vocab_size=words, **SIZES).state_dict(), num_heads=2, num_kv_heads=2, dim=32)
save_file({name: one.contiguous() for name, one in weights.items()}, "base/model-00001-of-00001.safetensors")
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32}
(base / "config.json").write_text(json.dumps({"model_type": "llama", **heads}))

config = {
    "output_dir": "/nowhere",
    "tokenizer": {
        "_component_": "torchtune.models.llama2.llama2_tokenizer",
        "path": "base/tokenizer.model",
        "max_seq_len": 64,
    },
    "dataset": {
        "_component_": "torchtune.datasets.alpaca_dataset",
        "source": "json",
        "data_files": "data.json",
        "split": "train",
    },
    "model": {"_component_": "torchtune.models.llama2.llama2", "vocab_size": words, **SIZES},
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "base",
        "checkpoint_files": {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00001"},
        "recipe_checkpoint": None,
        "output_dir": "${output_dir}",
        "model_type": "LLAMA2",
    },
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    "lr_scheduler": {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 2,
    },
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "${output_dir}/logs"},
    **dict.fromkeys(("seed", "max_steps_per_epoch", "clip_grad_norm")),
    **dict.fromkeys(("resume_from_checkpoint", "optimizer_in_bwd", "compile", "log_peak_memory_stats"), False),
    **dict.fromkeys(("epochs", "gradient_accumulation_steps"), 1),
    "batch_size": 2,
    "shuffle": True,
    "device": "cpu",
    "dtype": "fp32",
}
Path("full.yaml").write_text(json.dumps(config))  # which is YAML, too
adapted = {**config["model"], **LORA, "_component_": "torchtune.models.llama2.lora_llama2"}
Path("lora.yaml").write_text(json.dumps({**config, "model": adapted, "save_adapter_weights_only": False}))
