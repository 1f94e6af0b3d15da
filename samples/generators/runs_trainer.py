"""Samples of what the `Trainer` of transformers leaves, and of a model directory with all that goes with a model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import tokenizers
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from dcp import name_save
from runs import launched, rank, read_dcp, require_same, rng_by_rank, settle
from runs_accelerate import force_fsdp
from sample import sample
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from training import detached, seed

TRAINER = "transformers 5.23 `Trainer`"
VOCAB = 29


def tiny_llama() -> transformers.PreTrainedModel:
    """A random Llama of one layer with a tied head."""
    seed()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=13,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of as many words as the model has rows."""
    words = {word: number for number, word in enumerate(["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCAB - 3))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


class Capture(transformers.TrainerCallback):
    """Takes the reference at the moment of each save."""

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, Any]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Called on each rank after its files are written and before another number is drawn."""
        optimizer = objects["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)
        options = StateDictOptions(full_state_dict=True)
        model, optim = get_state_dict(objects["model"], optimizer, options=options)
        own = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        self.by_step[state.global_step] = detached(
            {
                "model": model,
                "optim": optim,
                "step": state.global_step,
                "scheduler": objects["lr_scheduler"].state_dict(),
                "rng_by_rank": rng_by_rank(own),
            }
        )


def train(folder: Path, save_steps: int = 2, **options: Any) -> Capture:
    """Four steps of the tiny Llama in `folder`, saved after two and after four."""
    name_save(folder)
    AcceleratorState._reset_state(reset_partial_state=True)
    model, capture = tiny_llama(), Capture()
    rows = torch.randint(VOCAB, (16, 6), generator=torch.Generator().manual_seed(5))
    with launched():
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "ckpt"),
            use_cpu=True,
            ddp_backend="gloo" if dist.is_initialized() else None,
            per_device_train_batch_size=2,
            max_steps=4,
            save_steps=save_steps,
            logging_steps=2,
            learning_rate=1e-2,
            weight_decay=0.1,
            warmup_steps=1,
            report_to="none",
            disable_tqdm=True,
            seed=7,
            **options,
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            processing_class=tiny_tokenizer(),
            data_collator=transformers.default_data_collator,
            callbacks=[capture],
        )
        trainer.train()
        settle()
    AcceleratorState._reset_state(reset_partial_state=True)
    return capture


@sample(
    "run/trainer_w4",
    what="output directory of 4 DDP ranks, `checkpoint-2` and `checkpoint-4`",
    trap="`rng_state_R.pth` by rank; the rest as `run/trainer`",
    writer=TRAINER,
    load=None,
    world=4,
)
@sample(
    "run/trainer_w2",
    what="output directory of 2 DDP ranks, `checkpoint-2` and `checkpoint-4`",
    trap="`rng_state_R.pth` by rank; the rest as `run/trainer`",
    writer=TRAINER,
    load=None,
    world=2,
)
@sample(
    "run/trainer",
    what="output directory of one process, `checkpoint-2` and `checkpoint-4`, a tokenizer",
    trap="the newest checkpoint is in `checkpoint-4`; the step is in `trainer_state.json`; `optimizer.pt` has integer "
    "ids in two groups; `training_args.bin` is a pickled object; `lm_head.weight` is tied and left out",
    writer=TRAINER,
    load=None,
)
def trainer_run(folder: Path) -> Any:
    """Two saves; what is at the root of the reference is the newest, `earlier` has the other by its step."""
    capture = train(folder)
    whole = capture.by_step.pop(4)
    if rank() == 0:
        for step, one in {4: whole, **capture.by_step}.items():
            found = safetensors.torch.load_file(folder / f"ckpt/checkpoint-{step}/model.safetensors")
            require_same(found, {k: v for k, v in one["model"].items() if k != "lm_head.weight"}, f"step {step}")
        name = "rng_state.pth" if not dist.is_initialized() else "rng_state_0.pth"
        found = torch.load(folder / "ckpt/checkpoint-4" / name, weights_only=False)
        require_same(found, whole["rng_by_rank"][0], "rng")
    for one in capture.by_step.values():
        del one["rng_by_rank"]
    notes = NOTES | {
        "model": "checkpoint-N/model.safetensors, same names; lm_head.weight is tied and left out",
        "optim": "checkpoint-N/optimizer.pt, integer ids in the order of the parameter groups",
        "earlier": "the other checkpoint, by its step",
    }
    return {**whole, "earlier": capture.by_step, "notes": notes}


NOTES = {
    "scheduler": "checkpoint-N/scheduler.pt",
    "rng_by_rank": "checkpoint-N/rng_state.pth of one process, rng_state_R.pth of several",
    "step": "global_step of checkpoint-N/trainer_state.json",
}


@sample(
    "run/trainer_fsdp2_w4",
    what="output directory of 4 FSDP2 ranks, `SHARDED_STATE_DICT`, one `checkpoint-4`",
    trap="accelerate's DCP directories inside a `checkpoint-N`; no safetensors, no `config.json`; SGD with momentum",
    writer=TRAINER,
    load=None,
    world=4,
)
@sample(
    "run/trainer_fsdp2_w2",
    what="output directory of 2 FSDP2 ranks, `SHARDED_STATE_DICT`, one `checkpoint-4`",
    trap="accelerate's DCP directories inside a `checkpoint-N`; no safetensors, no `config.json`; SGD with momentum",
    writer=TRAINER,
    load=None,
    world=2,
)
def trainer_fsdp2(folder: Path) -> Any:
    """FSDP put in place of the DDP that accelerate falls back to on the CPU."""
    config = {
        "version": 2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
    }
    with mock.patch("transformers.trainer.Accelerator", sharding_accelerator):
        options = {"optim": "sgd", "optim_args": "momentum=0.9"}  # one moment for each parameter: fewer DCP items
        capture = train(folder, save_steps=4, fsdp="full_shard auto_wrap", fsdp_config=config, **options)
    whole = capture.by_step.pop(4)
    newest = folder / "ckpt/checkpoint-4"
    if rank() == 0:
        require_same(read_dcp(newest / "pytorch_model_fsdp_0")["model"], whole["model"], "model")
        require_same(read_dcp(newest / "optimizer_0")["optimizer"], whole["optim"], "optim")
    notes = NOTES | {
        "model": "checkpoint-4/pytorch_model_fsdp_0/, DCP, as model.<name>",
        "optim": "checkpoint-4/optimizer_0/, DCP, as optimizer.state.<name>.*, optimizer.param_groups",
    }
    return {**whole, "notes": notes}


def sharding_accelerator(**options: Any) -> Accelerator:
    """An `Accelerator` that shards on the CPU."""
    one = Accelerator(**options)
    force_fsdp(one, options["fsdp_plugin"])
    return one


CUSTOM_CODE = """\
from transformers import LlamaConfig, LlamaForCausalLM


class TinyConfig(LlamaConfig):
    model_type = "tiny"


class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
"""


@sample(
    "run/hf_assets",
    what="a model directory with tokenizer, generation config, code of its own and a model card",
    trap="files beside the weights are to be carried along; several safetensors files under an index",
    writer="transformers 5.23 `save_pretrained`; `modeling_tiny.py`, `README.md` and `chat_template.jinja` by hand",
    load=None,
)
def hf_assets(folder: Path) -> Any:
    """Nothing of a training run but the weights, in bfloat16."""
    model = tiny_llama().bfloat16()
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(folder / "ckpt", max_shard_size=1000)
    tiny_tokenizer().save_pretrained(folder / "ckpt")
    (folder / "ckpt/modeling_tiny.py").write_text(CUSTOM_CODE)
    (folder / "ckpt/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}\n")
    (folder / "ckpt/README.md").write_text("---\nlicense: mit\n---\n\n# A tiny model\n")
    whole = dict(detached(model.state_dict()))
    found: dict[str, Any] = {}
    for path in (folder / "ckpt").glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    require_same(found, {k: v for k, v in whole.items() if k != "lm_head.weight"}, "model")
    notes = {"model": "model-0000N-of-0000M.safetensors, same names; lm_head.weight is tied and left out"}
    return {"model": whole, "notes": notes}
