"""Directories of loose files, as people's own scripts and small projects write them for each step."""

from __future__ import annotations

import pickle

import torch

from support.layouts import configs, networks, pointers, roles
from support.layouts.layout import layout
from support.layouts.step import Step
from support.layouts.trained import (
    Trained,
    adam,
    half,
    loader_state,
    rng_states,
    sampler_order,
    sgd,
    stairs,
    trained,
    warm_up,
)


def language(step: Step) -> Trained:
    """The one model of a step."""
    result = trained(networks.Language(), step.number)
    step.count("model", result.model)
    return result


@layout(
    "loose/parts.pt",
    "directory",
    "checkpoint_epoch_{epoch:04d}",
    pointers.text("latest", "{name}"),
    pointers.copy("best", best=True),
)
def parts(step: Step) -> None:
    one = language(step)
    step.has(step=None, epoch=step.epoch)
    step.torch("model.pt", roles.model(one.model.state_dict()))
    step.torch("ema.pt", roles.ema(one.ema.state_dict()))
    step.torch("optimizer.pt", roles.optimizer(one.optimizer.state_dict()))
    step.torch("scheduler.pt", roles.scheduler(one.scheduler.state_dict()))
    step.torch("rng.pt", roles.rng(rng_states()))


@layout("loose/parts with config", "directory", "step_{step}", pointers.link("latest"))
def parts_with_config(step: Step) -> None:
    one = trained(networks.Classifier(), step.number, optimizer=sgd, scheduler=stairs)
    step.count("model", one.model)
    step.torch("model.pt", roles.model(one.model.state_dict()))
    step.torch("optimizer.pt", roles.optimizer(one.optimizer.state_dict()))
    step.torch("scheduler.pt", roles.scheduler(one.scheduler.state_dict()))
    step.torch("scaler.pt", roles.scaler(one.scaler.state_dict()))
    step.yaml("config.yaml", roles.config({"model": {"width": 4}, "optim": configs.options()}))
    step.json("meta.json", roles.progress({"step": step.number, "epoch": 1, "best_acc": 0.77}))


@layout("loose/safetensors and state.json", "directory", "checkpoints/step-{step}")
def safetensors_and_json(step: Step) -> None:
    one = language(step)
    step.safetensors("model.safetensors", roles.model(one.model.state_dict()), {"format": "pt"})
    step.torch("optimizer.pt", roles.optimizer(one.optimizer.state_dict()))
    step.json("state.json", roles.progress({"step": step.number, "tokens": step.number * 96, "best_loss": 2.25}))


@layout("loose/state and rng of ranks", "directory", "step_{step:06d}")
def state_and_rng_of_ranks(step: Step) -> None:
    one = language(step)
    step.torch(
        "state.pt",
        model=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        step=roles.progress(step.number),
    )
    for rank in range(2):
        torch.manual_seed(step.number + rank)
        step.torch(f"rng_{rank}.pt", roles.rng(rng_states(rank)))


@layout("loose/pair of networks", "directory", "epoch_{epoch}")
def pair_of_networks(step: Step) -> None:
    step.has(step=None, epoch=step.epoch)
    for key, network in (("G", networks.Generator()), ("D", networks.Discriminator())):
        one = trained(network, step.number, optimizer=adam)
        step.count(f"net{key}", one.model)
        step.torch(f"net{key}.pth", roles.model(one.model.state_dict(), f"net{key}"))
        step.torch(f"opt{key}.pth", roles.optimizer(one.optimizer.state_dict(), f"net{key}"))


@layout("loose/ranks' loaders", "directory", "checkpoint_{step}")
def loaders_of_ranks(step: Step) -> None:
    one = language(step)
    step.torch("model.pth", roles.model(one.model.state_dict()))
    step.torch("optimizer.pth", roles.optimizer(one.optimizer.state_dict()))
    for rank in range(2):
        step.torch(f"dataloader_rank_{rank}.pth", roles.dataloader(loader_state(step.number, rank)))


@layout("loose/folders of parts", "directory", "ckpt_{step}")
def folders_of_parts(step: Step) -> None:
    one = language(step)
    step.torch("model/x.pt", roles.model(one.model.state_dict()))
    step.torch("optim/x.pt", roles.optimizer(one.optimizer.state_dict()))
    step.torch("sched/x.pt", roles.scheduler(one.scheduler.state_dict()))
    for rank in range(2):
        torch.manual_seed(step.number + rank)
        step.torch(f"rng/rank_{rank}.pt", roles.rng(rng_states(rank)))


@layout("loose/one state overwritten", "directory", "state")
def one_state_overwritten(step: Step) -> None:
    one = trained(networks.Perceptron(), step.number)
    step.count("lora", one.model)
    names = {f"base_model.model.layers.0.{n}": value for n, value in one.model.state_dict().items()}
    step.safetensors("lora.safetensors", roles.model(names))
    step.torch("optimizer.pt", roles.optimizer(one.optimizer.state_dict()))
    step.torch("ema.pt", roles.ema({f"base_model.model.layers.0.{n}": v for n, v in one.ema.state_dict().items()}))
    states = rng_states()
    step.torch("rng.pt", torch_rng_state=roles.rng(states["torch"]), cuda_rng_state=roles.rng(states["cuda"]))
    step.json("state.json", roles.progress({"global_step": step.number, "epoch": 0}))


@layout("loose/ranks' states beside a model", "directory", "step{step}")
def states_of_ranks(step: Step) -> None:
    one = language(step)
    step.safetensors("model.safetensors", roles.model(one.model.state_dict()), {"format": "pt"})
    for rank in range(2):
        torch.manual_seed(step.number + rank)
        other = trained(networks.Language(), step.number)
        step.torch(f"optimizer_{rank}.pt", roles.optimizer((one if rank == 0 else other).optimizer.state_dict()))
        step.torch(f"rng_state_{rank}.pt", roles.rng(rng_states(rank)))
        step.torch(f"grad_scaler_{rank}.pt", roles.scaler(one.scaler.state_dict()))
    step.json("training_state.json", roles.progress({"step": step.number, "epoch": 3, "best_metric": None}))


@layout("loose/several optimizers in one state", "directory", "step_{step}")
def several_optimizers(step: Step) -> None:
    one = language(step)
    heads = trained(networks.Perceptron(), step.number, optimizer=sgd)
    step.count("heads", heads.model)
    model = {f"trunk.{n}": v for n, v in one.model.state_dict().items()}
    model |= {f"heads.{n}": v for n, v in heads.model.state_dict().items()}
    step.parameters = {"model": sum(step.parameters.values())}
    step.torch("model.pt", roles.model(model))
    step.torch(
        "training_state.pt",
        optimizer_states={
            "trunk": roles.optimizer(one.optimizer.state_dict()),
            "heads": roles.optimizer(heads.optimizer.state_dict()),
        },
        scheduler_states={
            "trunk": roles.scheduler(one.scheduler.state_dict()),
            "heads": roles.scheduler(heads.scheduler.state_dict()),
        },
        step=roles.progress(step.number),
    )
    step.yaml("config.yaml", roles.config(configs.options()))


@layout("loose/save_pretrained and training_state.pt", "directory", "step_{step}")
def pretrained_and_state(step: Step) -> None:
    one = trained(networks.Language(tied=True), step.number, scheduler=warm_up)
    step.count("model", one.model)
    step.json("config.json", roles.config({"architectures": ["Language"], "hidden_size": 8, "num_hidden_layers": 2}))
    step.json("generation_config.json", roles.config({"eos_token_id": 2}))
    step.safetensors("model.safetensors", roles.model(one.model.state_dict()), {"format": "pt"})
    step.torch(
        "training_state.pt",
        step=roles.progress(step.number),
        optimizer_state_dict=roles.optimizer(one.optimizer.state_dict()),
        scheduler_state_dict=roles.scheduler(one.scheduler.state_dict()),
        rng=roles.rng(rng_states()),
    )


@layout("loose/adapter", "directory", "checkpoint-{step}")
def adapter(step: Step) -> None:
    one = trained(networks.Perceptron(), step.number)
    step.count("adapter", one.model)
    names = {f"base_model.model.model.layers.0.q_proj.{n}": v for n, v in one.model.state_dict().items()}
    step.safetensors("adapter_model.safetensors", roles.model(names), {"format": "pt"})
    step.json("adapter_config.json", roles.config({"peft_type": "LORA", "r": 8, "base_model_name_or_path": "x/y"}))
    step.torch("optimizer.pt", roles.optimizer(one.optimizer.state_dict()))
    step.json("trainer_state.json", roles.progress({"step": step.number, "epoch": 0.5}))


@layout("loose/arrays and pickles", "directory", "step_{step}")
def arrays_and_pickles(step: Step) -> None:
    one = language(step)
    step.torch("weights.pth", roles.model(half(one.model.state_dict(), torch.bfloat16)))
    step.torch("opt.pth", roles.optimizer(one.optimizer.state_dict()))
    step.pickle("rng.pkl", roles.rng({key: value for key, value in rng_states().items() if key in ("python", "numpy")}))
    step.npz("normalizer.npz", roles.other({"mean": torch.randn(5).numpy(), "std": torch.rand(5).numpy()}))
    step.pickle("sampler.pkl", roles.dataloader(sampler_order(step.number) | {"order": [3, 1, 2, 0]}))
    step.text("step.txt", roles.progress(f"{step.number}\n"))


@layout("loose/index and step texts", "directory", "checkpoint-{step}")
def texts(step: Step) -> None:
    one = language(step)
    step.torch("pytorch_model.bin", roles.model(one.model.state_dict()))
    step.json("config.json", roles.config({"model_type": "gpt2", "n_layer": 2}))
    step.torch("optimizer.pt", roles.optimizer(one.optimizer.state_dict()))
    step.torch("scheduler.pt", roles.scheduler(one.scheduler.state_dict()))
    step.text("idx_file.txt", roles.dataloader(str(step.number * 4)))
    step.text("step_file.txt", roles.progress(str(step.number)))


@layout("loose/run_squad", "directory", "checkpoint-{step}")
def run_squad(step: Step) -> None:
    one = language(step)
    step.torch("pytorch_model.bin", roles.model(one.model.state_dict()))
    step.json("config.json", roles.config({"model_type": "bert", "num_hidden_layers": 2}))
    step.text("vocab.txt", roles.other("[PAD]\n[UNK]\nthe\n"))
    step.torch("training_args.bin", roles.config(configs.arguments()))
    step.torch("optimizer.pt", roles.optimizer(one.optimizer.state_dict()))
    step.torch("scheduler.pt", roles.scheduler(one.scheduler.state_dict()))


@layout("loose/module and disabled scaler", "directory", "ckpt-{step}", pointers.text("latest.txt", "{path}"))
def module_and_disabled_scaler(step: Step) -> None:
    one = trained(networks.Classifier(), step.number, optimizer=sgd)
    step.count("model", one.model)
    step.torch("model.pt", roles.model(one.model))
    step.torch("optimizer.pt", roles.optimizer(one.optimizer.state_dict()))
    step.torch("scaler.pt", roles.scaler(torch.amp.GradScaler("cpu", enabled=False).state_dict()))
    step.torch("args.pt", roles.config(configs.arguments()))
    step.torch("progress.pt", step=roles.progress(torch.tensor([step.number])), history=roles.metrics([1.5, 1.25]))


@layout("loose/files without suffix", "directory", "{step}")
def no_suffix(step: Step) -> None:
    one = language(step)
    step.torch("model", roles.model(one.model.state_dict()))
    step.torch("optimizer", roles.optimizer(one.optimizer.state_dict()))
    step.torch("lr_scheduler", roles.scheduler(one.scheduler.state_dict()))
    step.pickle("meta", roles.progress({"step": step.number}))


@layout("loose/old serialization", "directory", "step_{step}")
def old_serialization(step: Step) -> None:
    one = language(step)
    legacy, newest = {"_use_new_zipfile_serialization": False}, {"pickle_protocol": pickle.HIGHEST_PROTOCOL}
    step.torch("model.pth", roles.model(one.model.state_dict()), saved_with=legacy)
    step.torch("optim.pth", roles.optimizer(one.optimizer.state_dict()), saved_with=newest)
    step.torch("state.pth", roles.progress({"it": step.number}), saved_with=legacy)


@layout("OneTrainer", "directory", "backup/date-backup-{step}-1-0")
def onetrainer(step: Step) -> None:
    one = trained(networks.Denoiser(), step.number)
    step.count("unet", one.model)
    step.json("unet/config.json", roles.config({"_class_name": "UNet2DConditionModel", "in_channels": 3}))
    step.safetensors("unet/diffusion_pytorch_model.safetensors", roles.model(one.model.state_dict()))
    step.torch("optimizer/optimizer.pt", roles.optimizer(one.optimizer.state_dict()))
    ema = {str(i): value for i, value in enumerate(one.ema.state_dict().values())}
    step.torch("ema/ema.pt", roles.ema(ema))
    step.json(
        "meta.json", roles.progress({"train_progress": {"epoch": 1, "epoch_step": 0, "global_step": step.number}})
    )


@layout(
    "descriptinc/descript-audio-codec", "directory", "{step}", pointers.copy("latest"), pointers.copy("best", best=True)
)
def dac(step: Step) -> None:
    for folder, network in (("dac", networks.Recurrent()), ("discriminator", networks.Discriminator())):
        one = trained(network, step.number)
        step.count(folder, one.model)
        metadata = {"kwargs": {"width": 6}}
        step.torch(
            f"{folder}/weights.pth",
            state_dict=roles.model(one.model.state_dict(), folder),
            metadata=roles.config(metadata),
        )
        step.torch(f"{folder}/package.pth", roles.model(one.model, folder))
        step.torch(f"{folder}/optimizer.pth", roles.optimizer(one.optimizer.state_dict(), folder))
        step.torch(f"{folder}/scheduler.pth", roles.scheduler(one.scheduler.state_dict(), folder))
        step.torch(f"{folder}/tracker.pth", roles.metrics({"history": {"loss": [1.5, 1.25]}, "step": step.number}))
        step.torch(f"{folder}/metadata.pth", roles.metrics({"best": {"loss": 1.25}}))


@layout("Ray Train", "directory", "checkpoint_{step:06d}")
def ray_train(step: Step) -> None:
    stages = (networks.Language(), networks.Perceptron())
    step.count("model", *stages)
    for rank, stage in enumerate(stages):
        one = trained(stage, step.number)
        step.torch(
            f"model-rank={rank}.pt",
            model=roles.model(one.model.state_dict()),
            optimizer=roles.optimizer(one.optimizer.state_dict()),
            epoch=roles.progress(step.epoch),
        )
    step.has(step=step.number, epoch=step.epoch)


@layout("Ray Train, one model", "directory", "checkpoint_{step:06d}")
def ray_train_one_model(step: Step) -> None:
    one = language(step)
    step.torch("model.pt", roles.model(one.model.state_dict()))
    step.torch(
        "extra_state.pt", optimizer=roles.optimizer(one.optimizer.state_dict()), epoch=roles.progress(step.epoch)
    )
    step.has(step=step.number, epoch=step.epoch)
