"""Directories of the step that trainers of libraries write, and what people's own scripts add to them."""

from __future__ import annotations

import base64
import json
import random

import numpy as np
import torch

from support.layouts import configs, networks, pointers, roles
from support.layouts.layout import layout
from support.layouts.own_directories import language
from support.layouts.step import Step
from support.layouts.trained import (
    Trained,
    adam,
    decayed,
    lambda_rate,
    loader_state,
    rng_states,
    sampler_order,
    sgd,
    stairs,
    trained,
)


def trainer_files(step: Step, one: Trained) -> None:
    """Write what the Trainer of transformers writes."""
    step.json("config.json", roles.config({"architectures": ["Language"], "model_type": "gpt2", "n_layer": 2}))
    step.safetensors("model.safetensors", roles.model(one.model.state_dict()), {"format": "pt"})
    step.torch("optimizer.pt", roles.optimizer(one.optimizer.state_dict()))
    step.torch("scheduler.pt", roles.scheduler(one.scheduler.state_dict()))
    states = rng_states()
    step.torch("rng_state.pth", roles.rng({**states, "cpu": states.pop("torch"), "cuda": states["cuda"][0]}))
    step.torch("training_args.bin", roles.config(configs.TrainingArguments()))
    log = [{"epoch": 0.5, "step": step.number, "loss": 2.25}]
    state = {"epoch": 0.5, "global_step": step.number, "max_steps": 1000, "log_history": log, "best_metric": None}
    step.json("trainer_state.json", roles.progress(state))


@layout("transformers Trainer with an EMA callback", "directory", "checkpoint-{step}")
def trainer_and_ema(step: Step) -> None:
    one = trained(networks.Language(), step.number, groups=decayed, scheduler=lambda_rate)
    step.count("model", one.model)
    trainer_files(step, one)
    step.torch("ema.pt", roles.ema(one.ema.state_dict()))


@layout("UKPLab/sentence-transformers", "directory", "checkpoint-{step}")
def sentence_transformers(step: Step) -> None:
    one = trained(networks.Language(), step.number)
    dense = networks.Perceptron()
    step.count("model", one.model)
    step.count("2_Dense", dense)
    trainer_files(step, one)
    step.json("modules.json", roles.config([{"idx": 0, "name": "0", "path": ""}, {"idx": 1, "path": "1_Pooling"}]))
    step.json("1_Pooling/config.json", roles.config({"word_embedding_dimension": 8}))
    step.json("2_Dense/config.json", roles.config({"in_features": 5, "out_features": 3}))
    step.safetensors("2_Dense/model.safetensors", roles.model(dense.state_dict(), "2_Dense"))


def accelerate_files(step: Step, one: Trained) -> None:
    """Write what `Accelerator.save_state` writes beside the model."""
    step.torch("optimizer.bin", roles.optimizer(one.optimizer.state_dict()))
    step.torch("scheduler.bin", roles.scheduler(one.scheduler.state_dict()))
    step.torch("sampler.bin", roles.dataloader(sampler_order(step.number)))
    step.torch("scaler.pt", roles.scaler(one.scaler.state_dict()))
    step.torch(
        "random_states_0.pkl",
        roles.rng(
            {
                "step": 0,
                "random_state": random.getstate(),
                "numpy_random_seed": np.random.get_state(),
                "torch_manual_seed": torch.get_rng_state(),
                "torch_cuda_manual_seed": rng_states()["cuda"],
            }
        ),
    )


@layout("huggingface/accelerate with a custom object", "directory", "checkpoints/checkpoint_{epoch}")
def accelerate_custom(step: Step) -> None:
    step.has(step=None, epoch=step.epoch)
    one = language(step)
    step.safetensors("model.safetensors", roles.model(one.model.state_dict()), {"format": "pt"})
    accelerate_files(step, one)
    step.torch("custom_checkpoint_0.pkl", roles.ema(one.ema.state_dict()))
    step.torch("custom_checkpoint_1.pkl", roles.progress({"epoch": step.epoch, "seen": torch.tensor(step.number)}))


@layout("huggingface/diffusers text_to_image", "directory", "checkpoint-{step}")
def diffusers(step: Step) -> None:
    one = trained(networks.Denoiser(), step.number)
    step.count("unet", one.model)
    settings = {"_class_name": "UNet2DConditionModel", "in_channels": 3}
    average = {"decay": 0.999, "optimization_step": step.number, "update_after_step": 0}
    step.json("unet/config.json", roles.config(settings))
    step.safetensors("unet/diffusion_pytorch_model.safetensors", roles.model(one.model.state_dict(), "unet"))
    step.json("unet_ema/config.json", roles.config(settings | average))
    step.safetensors("unet_ema/diffusion_pytorch_model.safetensors", roles.ema(one.ema.state_dict(), "unet"))
    accelerate_files(step, one)


@layout("kohya-ss/sd-scripts", "directory", "out-step{step:08d}-state")
def kohya(step: Step) -> None:
    one = trained(networks.Perceptron(), step.number)
    step.count("network", one.model)
    names = {"lora_unet_down_blocks_0_" + n: v for n, v in one.model.state_dict().items()}
    step.safetensors("model.safetensors", roles.model(names), {"format": "pt"})
    accelerate_files(step, one)
    step.json("train_state.json", roles.progress({"current_epoch": 1, "current_step": step.number}))


@layout("huggingface/lerobot", "directory", "checkpoints/{step:06d}", pointers.link("checkpoints/last"))
def lerobot(step: Step) -> None:
    one = language(step)
    step.json("pretrained_model/config.json", roles.config({"type": "act", "n_obs_steps": 1}))
    step.json("pretrained_model/train_config.json", roles.config({"batch_size": 8, "steps": 1000}))
    step.safetensors("pretrained_model/model.safetensors", roles.model(one.model.state_dict()))
    state = one.optimizer.state_dict()
    flat = {f"state/{i}/{name}": value for i, below in state["state"].items() for name, value in below.items()}
    step.safetensors("training_state/optimizer_state.safetensors", roles.optimizer(flat))
    step.json("training_state/optimizer_param_groups.json", roles.optimizer(state["param_groups"]))
    python, array = random.getstate(), np.random.get_state()
    states = {
        "py_rng_version": torch.tensor([python[0]]),
        "py_rng_state": torch.tensor(python[1], dtype=torch.int64),
        "np_rng_state_values": torch.tensor(array[1].astype(np.int64)),
        "np_rng_state_index": torch.tensor([array[2]]),
        "np_rng_has_gauss": torch.tensor([array[3]]),
        "np_rng_cached_gaussian": torch.tensor([array[4]], dtype=torch.float32),
        "torch_rng_state": torch.get_rng_state(),
    }
    step.safetensors("training_state/rng_state.safetensors", roles.rng(states))
    step.json("training_state/scheduler_state.json", roles.scheduler(one.scheduler.state_dict()))
    step.json("training_state/training_step.json", roles.progress({"step": step.number}))


@layout("loose/flat optimizer in safetensors", "directory", "step_{step}")
def flat_optimizer(step: Step) -> None:
    one = language(step)
    state = one.optimizer.state_dict()
    flat = {f"state.{i}.{name}": value for i, below in state["state"].items() for name, value in below.items()}
    step.safetensors("model.safetensors", roles.model(one.model.state_dict()))
    step.safetensors("optimizer.safetensors", roles.optimizer(flat))
    step.json("optimizer.json", {"param_groups": roles.optimizer(state["param_groups"])})
    states = {"torch": torch.get_rng_state().tolist(), "python": list(random.getstate()[1])}
    step.json("rng_state.json", roles.rng(states))
    step.json("meta.json", roles.progress({"iteration": step.number}))


@layout("huggingface/nanotron", "directory", "{step}", pointers.text("latest.txt", "{step}"))
def nanotron(step: Step) -> None:
    one = language(step)
    step.yaml("config.yaml", roles.config({"general": {"run": "a"}, "optimizer": {"zero_stage": 0}}))
    step.json("model_config.json", roles.config({"hidden_size": 8, "num_hidden_layers": 2}))
    step.json(
        "checkpoint_metadata.json", roles.progress({"version": "1.4", "tp": 1, "dp": 1, "last_train_step": step.number})
    )
    for name, value in one.model.state_dict().items():
        folder, _, last = name.rpartition(".")
        file = f"model/model/{folder.replace('.', '/')}/model_{last}_pp-rank-0-of-1_tp-rank-0-of-1.safetensors"
        step.safetensors(file, roles.model({"data": value}), {"version": "1.4"})
    tail = "pp-0-of-1_tp-0-of-1"
    step.torch(f"optimizer/optimizer_{tail}.pt", roles.optimizer(one.optimizer.state_dict()))
    step.json("optimizer/optimizer_config.json", roles.config({"type": "AdamW", "parallelism": {"tp_size": "1"}}))
    step.torch(f"lr_scheduler/lr_scheduler_{tail}.pt", roles.scheduler(one.scheduler.state_dict()))
    step.torch("random/tp-0-of-1_dp-0-of-1_pp-0-of-1.pt", roles.rng(rng_states()))


@layout("huggingface/picotron", "directory", "{step}")
def picotron(step: Step) -> None:
    one = language(step)
    step.torch(
        "weights_tp_rank_world_size=0_1_pp_rank_world_size=0_1.pth",
        model=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        trained_steps=roles.progress(step.number),
        trained_tokens=roles.progress(step.number * 96),
    )


@layout("facebookresearch/fairseq2", "directory", "checkpoints/step_{step}")
def fairseq2(step: Step) -> None:
    one = language(step)
    for rank in range(2):
        torch.manual_seed(step.number + rank)
        state = {
            "step_nr": roles.progress(step.number),
            "data_epoch_nr": roles.progress(1),
            "rng_bag": {"generator_states": roles.rng([torch.get_rng_state()])},
            "lr_scheduler": roles.scheduler(one.scheduler.state_dict()),
            "loss_scaler": roles.scaler(one.scaler.state_dict()),
        }
        step.torch(f"trainer/rank_{rank:02d}.pt", state)
        step.torch(
            f"data_reader/dp_{rank:02d}.pt", roles.dataloader({"position": step.number * 2 + rank, "buffer": [1, 2]})
        )
    step.torch("model/pp_00/tp_00/sdp_00.pt", roles.model(one.model.state_dict()))
    step.torch("optimizer/pp_00/tp_00/sdp_00.pt", roles.optimizer(one.optimizer.state_dict()))


@layout("mlfoundations/open_clip by DCP", "directory", "epoch_{epoch}")
def open_clip_dcp(step: Step) -> None:
    one = language(step)
    step.has(step=step.number, epoch=step.epoch)
    step.dcp(
        ".", {"model": roles.model(one.model.state_dict()), "optimizer": roles.optimizer(one.optimizer.state_dict())}
    )
    step.torch(
        "_metadata_extra.pt",
        {
            "epoch": roles.progress(step.epoch),
            "name": roles.config("run"),
            "scaler": roles.scaler(one.scaler.state_dict()),
            "global_step": roles.progress(step.number),
        },
    )


@layout("facebookresearch/lingua", "directory", "checkpoints/{step:010d}")
def lingua(step: Step) -> None:
    one = language(step)
    step.dcp(".", {"model": roles.model(one.model.state_dict()), "optim": roles.optimizer(one.optimizer.state_dict())})
    step.json("params.json", roles.config({"dim": 8, "n_layers": 2, "optim": configs.options()}))
    for rank in range(2):
        step.json(
            f"train_state_{rank:05d}.json",
            {
                "step": roles.progress(step.number),
                "acc_step": roles.progress(0),
                "data_loader_state": roles.dataloader({"it_state": {"start_token": 7 * rank}, "seq_len": 6}),
                "scheduler": roles.scheduler(
                    {"last_epoch": step.number, "base_lrs": [1e-3], "_step_count": step.number}
                ),
            },
        )


@layout("foundation-model-stack/fms-fsdp", "directory", "checkpoints/step_{step}_ckp")
def fms_fsdp(step: Step) -> None:
    one = language(step)
    state = {
        "model_state": roles.model(one.model.state_dict()),
        "optimizer_state": roles.optimizer(one.optimizer.state_dict()),
    }
    step.dcp(".", state)
    step.torch("metadata.pth", roles.progress({"step": step.number, "ntok": step.number * 96, "loss": 2.5}))
    for rank in range(2):
        step.torch(f"loader_state_{rank}.pth", roles.dataloader({"ScalableShardDataset.current_reader": rank, "it": 7}))


@layout("ByteDance-Seed/VeOmni", "directory", "checkpoints/global_step_{step}")
def veomni(step: Step) -> None:
    one = language(step)
    step.dcp("model/ckpt", {"model": roles.model(one.model.state_dict())})
    step.dcp("model/optimizer", {"optimizer": roles.optimizer(one.optimizer.state_dict())})
    step.torch("model/lr_scheduler.pt", roles.scheduler(one.scheduler.state_dict()))
    for rank in range(2):
        torch.manual_seed(step.number + rank)
        step.torch(f"loader/rank_{rank}.pt", roles.dataloader(loader_state(step.number, rank)))
        extra = {"global_step": roles.progress(step.number), "torch_rng_state": roles.rng(torch.get_rng_state())}
        step.torch(f"extra_state/rank_{rank}.pt", extra)
    step.json("hf_ckpt/config.json", roles.config({"model_type": "gpt2", "n_layer": 2}))
    step.safetensors("hf_ckpt/model.safetensors", roles.model(one.model.state_dict()))
    step.json("checkpoint_manifest.json", roles.progress({"version": 1, "global_step": step.number, "complete": True}))


def _with_prefix(step: Step, prefix: str) -> None:
    one = language(step)
    state = {"model": roles.model(one.model.state_dict()), "optim": roles.optimizer(one.optimizer.state_dict())}
    step.dcp_with_prefix(".", state, prefix)


@layout("awslabs/s3torchconnector, binary prefixes", "directory", "step_{step}")
def s3torchconnector_binary(step: Step) -> None:
    _with_prefix(step, "0000000000/")


@layout("awslabs/s3torchconnector, prefixes with epochs", "directory", "step_{step}")
def s3torchconnector_epochs(step: Step) -> None:
    _with_prefix(step, "ckpt-a/epoch_3/")


@layout("ColossalAI booster", "directory", "epoch{epoch}-global_step{step}")
def colossalai(step: Step) -> None:
    one = language(step)
    step.has(step=step.number, epoch=step.epoch)
    names = list(one.model.state_dict())
    half = len(names) // 2
    for index, chosen in enumerate((names[:half], names[half:]), 1):
        state = {name: one.model.state_dict()[name] for name in chosen}
        step.safetensors(f"model/model-{index:05d}-of-00002.safetensors", roles.model(state), {"format": "pt"})
    files = {name: f"model-{1 if name in names[:half] else 2:05d}-of-00002.safetensors" for name in names}
    step.json("model/model.safetensors.index.json", roles.other({"metadata": {"total_size": 1}, "weight_map": files}))
    step.torch("ema.pt", roles.ema(one.ema.state_dict()))
    state = one.optimizer.state_dict()
    step.torch("optimizer/pytorch_optim_group.bin", roles.optimizer(state["param_groups"]))
    ids = list(state["state"])
    for index, chosen in enumerate((ids[:9], ids[9:]), 1):
        below = {i: state["state"][i] for i in chosen}
        step.torch(f"optimizer/pytorch_optim-{index:05d}-of-00002.bin", roles.optimizer(below))
    places = {str(i): f"pytorch_optim-{1 if i in ids[:9] else 2:05d}-of-00002.bin" for i in ids}
    index = {"metadata": {"param_groups": "pytorch_optim_group.bin"}, "weight_map": places}
    step.json("optimizer/pytorch_optim.bin.index.json", roles.other(index))
    step.torch("lr_scheduler", roles.scheduler(one.scheduler.state_dict()))
    step.json(
        "running_states.json", roles.progress({"epoch": step.epoch, "step": step.number, "sample_start_index": 800})
    )


@layout("speechbrain/speechbrain", "directory", "save/CKPT+2026-01-02+03-04-{epoch:02d}+00")
def speechbrain(step: Step) -> None:
    one = trained(networks.Recurrent(), step.number, optimizer=adam)
    step.count("model", one.model)
    step.has(step=step.number, epoch=step.epoch)
    step.yaml("CKPT.yaml", roles.metrics({"end-of-epoch": True, "unixtime": 1767322993.5, "WER": 17.5}))
    step.torch("model.ckpt", roles.model(one.model.state_dict()))
    step.torch("optimizer.ckpt", roles.optimizer(one.optimizer.state_dict()))
    step.torch("scheduler_model.ckpt", roles.scheduler({"losses": [2.5, 2.25], "n_steps": step.number}))
    step.text("counter.ckpt", roles.progress(str(step.epoch)))
    step.yaml("brain.ckpt", roles.progress({"avg_train_loss": 2.5, "optimizer_step": step.number, "step": step.number}))
    step.text("dataloader-TRAIN.ckpt", roles.dataloader(str(step.number)))
    glob = {"glob_mean": torch.randn(5), "glob_std": torch.rand(5), "count": step.number, "spk_dict_mean": {}}
    step.torch("normalizer.ckpt", roles.other(glob))


@layout(
    "NovaSky-AI/SkyRL",
    "directory",
    "ckpts/global_step_{step}",
    pointers.text("ckpts/latest_ckpt_global_step.txt", "{step}"),
)
def skyrl(step: Step) -> None:
    for folder, network in (("policy", networks.Language()), ("critic", networks.Perceptron())):
        one = trained(network, step.number)
        step.count(folder, one.model)
        step.torch(f"{folder}/model_state.pt", roles.model(one.model.state_dict(), folder))
        step.torch(f"{folder}/optimizer_state.pt", roles.optimizer(one.optimizer.state_dict(), folder))
        step.torch(f"{folder}/lr_scheduler_state.pt", roles.scheduler(one.scheduler.state_dict(), folder))
    step.torch("data.pt", roles.dataloader(loader_state(step.number)))
    step.torch("trainer_state.pt", global_step=roles.progress(step.number), config=roles.config(configs.options()))


@layout("Lightning-AI/litgpt", "directory", "out/step-{step:08d}")
def litgpt(step: Step) -> None:
    one = language(step)
    step.torch(
        "lit_model.pth",
        model=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        train_dataloader=roles.dataloader(loader_state(step.number)),
        iter_num=roles.progress(step.number * 4),
        step_count=roles.progress(step.number),
    )
    step.yaml("hyperparameters.yaml", roles.config({"model_name": "pythia-14m", "train": configs.options()}))
    step.yaml("model_config.yaml", roles.config({"n_layer": 2, "n_embd": 8}))


@layout("pytorch/torchtune", "directory", "epoch_{epoch}")
def torchtune(step: Step) -> None:
    one = language(step)
    step.has(step=None, epoch=step.epoch)
    step.safetensors("model-00001-of-00001.safetensors", roles.model(one.model.state_dict()), {"format": "pt"})
    step.json("config.json", roles.config({"model_type": "llama", "num_hidden_layers": 2}))
    step.torch(
        "recipe_state.pt",
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        seed=roles.config(42),
        epochs_run=roles.progress(step.epoch),
        total_epochs=roles.config(3),
        max_steps_per_epoch=roles.config(None),
        dataloader=roles.dataloader(loader_state(step.number)),
    )


@layout("loose/random state in JSON", "directory", "ckpt_{step}")
def encoded_state(step: Step) -> None:
    """A JSON with a random state in base64, beside weights and an optimizer."""
    one = trained(networks.Classifier(), step.number, optimizer=sgd, scheduler=stairs)
    step.count("model", one.model)
    step.torch("model.pt", roles.model(one.model.state_dict()))
    step.torch("optimizer.pt", roles.optimizer(one.optimizer.state_dict()))
    generator = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    step.text("progress.json", roles.progress(json.dumps({"global_step": step.number, "generator": generator})))
