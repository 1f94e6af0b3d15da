"""Makes the small checkpoints of `samples/checkpoints/other`, with the tools whose formats ckpttool recognises.

    torchrun --nproc-per-node 2 samples/generators/other_tools.py deepspeed      DeepSpeed 0.19.8, DS_ACCELERATOR=cpu
    torchrun --nproc-per-node 2 samples/generators/other_tools.py megatron       megatron-core 0.16.1
    python samples/generators/other_tools.py quantized    transformers 5.23, bitsandbytes 0.50.2, torchao 0.18,
                                                          compressed-tensors 0.20, peft 0.21.2
    python samples/generators/other_tools.py peft         peft 0.21.2, transformers 5.23
    python samples/generators/other_tools.py gguf         gguf 0.19
    python samples/generators/other_tools.py orbax        orbax-checkpoint 0.12.8, jax 0.10.2
    python samples/generators/other_tools.py paddle       paddlepaddle 3.3.1

None of these packages is among the requirements of the project: `pip install` them in an environment of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "checkpoints" / "other"


def deepspeed() -> None:
    """ZeRO stages 0 to 3 of a model with tied and frozen parameters and two groups; and a universal one."""
    import deepspeed as ds
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(29, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 29, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("seen", torch.zeros(3))
            self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(ids)
            for layer in self.layers:
                hidden = torch.relu(layer(hidden))
            return self.head(self.norm(hidden))

    for stage in range(4):
        torch.manual_seed(0)
        model = Model()
        trained = [p for p in model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        zero: dict[str, Any] = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        }
        engine, *_ = ds.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config)
        for _ in range(2):
            ids = torch.randint(0, 29, (2, 4))
            loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
            engine.backward(loss)
            engine.step()
        folder = HERE / f"deepspeed_zero{stage}_w2"
        engine.save_checkpoint(str(folder), client_state={"iteration": 2})
        if engine.global_rank == 0:
            for script in ("zero_to_fp32.py", "zero_to_torch.py"):
                (folder / script).unlink(missing_ok=True)
            if stage == 2:
                step, universal = folder / "global_step2", HERE / "deepspeed_universal"
                options = ["--input_folder", str(step), "--output_folder", str(universal / "global_step2_universal")]
                command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *options]
                command.append("--inject_missing_state")
                subprocess.run(command, check=True)


def megatron() -> None:
    """torch_dist of two tensor-parallel ranks with the optimizer by names, and the same in the legacy format.

    megatron-core writes the former; the files of the latter are an emulation of `save_checkpoint` of Megatron-LM.
    """
    import threading

    import torch
    import torch.distributed as dist

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # A fork of a process with torch's threads can hang: threads write instead.
    context = filesystem_async.mp.get_context("fork")

    class Threads:
        def __getattr__(self, name: str) -> Any:
            return getattr(context, name)

        def Process(self, target: Any, kwargs: Any) -> threading.Thread:  # noqa: N802
            return threading.Thread(target=target, kwargs=kwargs)

    multiprocessing = filesystem_async.mp
    filesystem_async.mp = Namespace(**vars(multiprocessing) | {"get_context": lambda _: Threads()})

    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(24, 8, generator=generator).bfloat16() for _ in range(2)]
    embedding = torch.randn(32, 8, generator=generator).bfloat16()
    arguments = Namespace(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=world,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        swiglu=False,
        padded_vocab_size=32,
    )
    state: dict[str, Any] = {"args": arguments, "iteration": 10, "checkpoint_version": 3.0}
    state["optimizer"] = {"param_groups": [{"lr": 1e-3, "step": 10}]}
    name = "embedding.word_embeddings.weight"
    state[name] = ShardedTensor.from_rank_offsets(name, embedding.chunk(world)[rank].clone(), (0, rank, world))
    key = "decoder.layers.self_attention.linear_qkv.weight"
    for i, weight in enumerate(layers):
        mine = weight.chunk(world)[rank]
        for name, value in [(key, mine), *((f"optimizer.state.{n}.{key}", mine.float()) for n in ("param", "exp_avg"))]:
            place = ((0, i, len(layers)), (1, rank, world))
            sharded = ShardedTensor.from_rank_offsets(name, value.clone(), *place, prepend_axis_num=1)
            state[f"{name}{i}"] = sharded
        extra = key.replace("weight", "_extra_state")
        empty = torch.empty(0, dtype=torch.uint8)
        state[f"extra{i}"] = ShardedObject(extra, empty, (len(layers),), (i,), replica_id=rank)
    state["rng"] = ShardedObject("rng_state", [{"random_rng_state": (3, (1, 2), None)}], (1, world), (0, rank))
    folder = HERE / "megatron_torch_dist_tp2" / "iter_0000010"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    dist_checkpointing.save(state, str(folder), content_metadata=metadata)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("10")
    legacy = HERE / "megatron_legacy_tp2" / "iter_0000010" / f"mp_rank_{rank:02d}"
    legacy.mkdir(parents=True, exist_ok=True)
    stage = f"{key.replace('layers', 'layers.0')}"
    model = {"language_model": {"encoder": {stage: layers[0].chunk(world)[rank].clone()}}}
    common = {"args": arguments, "iteration": 10, "checkpoint_version": 3.0, "model": model}
    torch.save(common, legacy / "model_optim_rng.pt")
    (legacy.parents[1] / "latest_checkpointed_iteration.txt").write_text("10")
    dist.destroy_process_group()


def quantized() -> None:
    """One tiny Llama in seven ways: quantised by four libraries, and as an adapter of PEFT."""
    import torch
    import transformers
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from peft import LoraConfig, get_peft_model
    from torchao.quantization import Int8WeightOnlyConfig

    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    base = HERE / "base"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).bfloat16().save_pretrained(base)

    def load(**options: Any) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(base, **options)

    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    configs = {
        "bitsandbytes_nf4": transformers.BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=torch.bfloat16),
        "bitsandbytes_int8": transformers.BitsAndBytesConfig(load_in_8bit=True),
        "torchao_int8": transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2)),
    }
    for name, config in configs.items():
        load(quantization_config=config, device_map="cpu").save_pretrained(HERE / name)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_dora=True)
    get_peft_model(load(), adapter).save_pretrained(HERE / "peft_dora")
    schemes: dict[str, dict[str, Any]] = {
        "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        "nvfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    }
    for layout, scheme in schemes.items():
        groups = {"group": {"targets": ["Linear"], "weights": {**scheme, "symmetric": True}}}
        config = QuantizationConfig.model_validate({"config_groups": groups, "ignore": ["lm_head"], "format": layout})
        model = load()
        apply_quantization_config(model, config)
        for module in (m for m in model.modules() if hasattr(m, "weight_scale")):
            size, largest = scheme.get("group_size", module.weight.shape[1]), {8: 448, 4: 7}[scheme["num_bits"]]
            blocks = module.weight.reshape(module.weight.shape[0], -1, size).abs().amax(2)
            factor = 100.0 if hasattr(module, "weight_global_scale") else 1.0
            if factor > 1:
                module.weight_global_scale.data.fill_(factor)
            module.weight_scale.data = (blocks / largest * factor).to(module.weight_scale.dtype)
            module.quantization_status = QuantizationStatus.FROZEN
        compressor = ModelCompressor.from_pretrained_model(model, quantization_format=layout)
        compressor.compress_model(model)
        folder = HERE / f"compressed_tensors_{layout.removesuffix('-quantized').replace('-', '_')}"
        model.save_pretrained(folder)
        compressor.update_config(folder)
    shutil.rmtree(base)


def peft() -> None:
    """Ten kinds of adapters: the whole state dict of the model in training, and what `save_pretrained` makes of it."""
    import peft as library
    import torch
    import transformers

    two, causal = ["q_proj", "v_proj"], "CAUSAL_LM"
    dora = {"use_dora": True, "modules_to_save": ["lm_head"], "rank_pattern": {"layers.1.self_attn.v_proj": 3}}
    three = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    ada = {"init_r": 3, "target_r": 2, "target_modules": two, "total_step": 100, "tinit": 1, "tfinal": 10}
    configs = {
        "lora_dora_bias_mts": library.LoraConfig(r=2, target_modules=two, **dora),
        "lora_embed": library.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
        "lora_tokens": library.LoraConfig(r=2, target_modules=two, trainable_token_indices=[1, 3]),
        "adalora": library.AdaLoraConfig(**ada),
        "ia3": library.IA3Config(**three),
        "loha": library.LoHaConfig(r=2, target_modules=two),
        "vera": library.VeraConfig(r=2, target_modules=two),
        "oft": library.OFTConfig(r=0, oft_block_size=4, target_modules=two),
        "prompt": library.PromptTuningConfig(task_type=causal, num_virtual_tokens=3),
        "ptuning": library.PromptEncoderConfig(task_type=causal, num_virtual_tokens=3, encoder_hidden_size=6),
    }
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    for name, config in configs.items():
        torch.manual_seed(0)
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        model = library.get_peft_model(base, config)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(HERE / "peft" / name)
        (HERE / "peft" / name / "README.md").unlink()
        torch.save({"model": model.state_dict(), "step": 3}, HERE / "peft" / name / "state.pt")


def gguf() -> None:
    """A GGUF file with tensors of three types."""
    import gguf as library
    import numpy as np

    HERE.mkdir(parents=True, exist_ok=True)
    writer = library.GGUFWriter(HERE / "tiny.gguf", "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(32)])
    values = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", values.standard_normal((32, 64), dtype=np.float32).astype(np.float16))
    kind = library.GGMLQuantizationType.Q4_0
    for i in range(2):
        blocks = library.quants.quantize(values.standard_normal((64, 64), dtype=np.float32), kind)
        writer.add_tensor(f"blk.{i}.attn_q.weight", blocks, raw_dtype=kind)
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def orbax() -> None:
    """A step of Orbax's checkpoint manager."""
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    dense = {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4, jnp.bfloat16)}
    with ocp.CheckpointManager(HERE / "orbax") as manager:
        manager.save(10, args=ocp.args.Composite(state=ocp.args.StandardSave({"params": {"dense": dense}, "step": 10})))


def paddle() -> None:
    """A distributed checkpoint of one process."""
    import paddle as pd

    pd.distributed.save_state_dict({"w": pd.ones([4, 8]), "b": pd.zeros([3])}, str(HERE / "paddle"))


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    makers = (deepspeed, megatron, quantized, peft, gguf, orbax, paddle)
    {maker.__name__: maker for maker in makers}[sys.argv[1]]()
