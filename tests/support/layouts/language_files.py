"""Trainers of language and speech models that write one file for a step."""

from __future__ import annotations

import torch

from support.layouts import configs, networks, pointers, roles
from support.layouts.layout import layout
from support.layouts.own_directories import language
from support.layouts.step import Step
from support.layouts.trained import adam, half, prefixed, rng_states, sampler_order, sgd, trained, warm_up


@layout("karpathy/nanoGPT", "file", "out/ckpt.pt")
def nanogpt(step: Step) -> None:
    one = trained(networks.Language(tied=True), step.number)
    step.count("model", one.model)
    step.torch(
        "out/ckpt.pt",
        model=roles.model(prefixed(one.model, "_orig_mod.")),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        model_args=roles.config({"n_layer": 2, "n_embd": 8, "bias": False}),
        iter_num=roles.progress(step.number),
        best_val_loss=roles.metrics(torch.tensor(2.25)),
        config=roles.config(configs.options()),
    )


@layout("jzhang38/TinyLlama", "file", "out/iter-{step:06d}-ckpt.pth")
def tinyllama(step: Step) -> None:
    one = language(step)
    step.torch(
        f"out/iter-{step.number:06d}-ckpt.pth",
        model=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        hparams=roles.config(configs.options()),
        iter_num=roles.progress(step.number),
        step_count=roles.progress(step.number // 4),
    )


@layout("KellerJordan/modded-nanogpt", "file", "logs/a1b2/state_step{step:06d}.pt")
def modded_nanogpt(step: Step) -> None:
    one = language(step)
    parameters = list(one.model.parameters())
    muon = torch.optim.SGD([p for p in parameters if p.dim() == 2], 0.02, momentum=0.95)
    for p in parameters:
        p.grad = torch.randn_like(p)
    muon.step()
    step.torch(
        f"logs/a1b2/state_step{step.number:06d}.pt",
        step=roles.progress(step.number),
        code=roles.config("import torch\nprint(torch)\n"),
        model=roles.model(prefixed(one.model, "_orig_mod.")),
        optimizers=[roles.optimizer(one.optimizer.state_dict()), roles.optimizer(muon.state_dict())],
    )


@layout("mosaicml/composer", "file", "ep1-ba{step}-rank0.pt", pointers.link("latest-rank0.pt"))
def composer(step: Step) -> None:
    one = language(step)
    states = rng_states()
    batches = {"epoch": 1, "batch": step.number, "sample": step.number * 8, "token": 0, "batch_in_epoch": step.number}
    step.torch(
        f"ep1-ba{step.number}-rank0.pt",
        state={
            "model": roles.model({f"module.{n}": v for n, v in one.model.state_dict().items()}),
            "optimizers": {"AdamW": roles.optimizer(one.optimizer.state_dict())},
            "schedulers": {"LambdaLR": roles.scheduler(one.scheduler.state_dict())},
            "timestamp": {"Timestamp": roles.progress(batches)},
            "scaler": roles.scaler({}),
            "callbacks": roles.metrics({"SpeedMonitor": {"total_eval_wct": 0.0}}),
            "dataset_state": roles.dataloader({"train": {"epoch": 1, "sample_in_epoch": step.number * 8}}),
            "integrations": roles.config({"huggingface": {}}),
        },
        rng=roles.rng([{key: states[key] for key in ("python", "numpy", "torch", "cuda")}]),
    )


@layout("facebookresearch/fairseq", "file", "checkpoint_1_{step}.pt", pointers.copy("checkpoint_last.pt"))
def fairseq(step: Step) -> None:
    one = trained(networks.Translation(), step.number, optimizer=adam)
    step.count("model", one.model)
    history = {"criterion_name": "CrossEntropy", "optimizer_name": "FairseqAdam", "num_updates": step.number}
    step.torch(
        f"checkpoint_1_{step.number}.pt",
        args=roles.config(None),
        cfg=roles.config({"task": {"_name": "translation"}, "optimization": configs.options()}),
        model=roles.model(half(one.model.state_dict())),
        criterion=roles.other({}),
        optimizer_history=[roles.progress({**history, "lr_scheduler_state": {"best": 2.5}})],
        task_state=roles.other({}),
        extra_state={
            "train_iterator": roles.dataloader({"epoch": 1, "iterations_in_epoch": step.number, "shuffle": True}),
            "val_loss": roles.metrics(2.5),
            "best": roles.metrics(2.25),
            "ema": roles.ema(one.ema.state_dict()),
            "metrics": roles.metrics([("default", {"loss": 2.5})]),
            "previous_training_time": roles.progress(12.5),
        },
        last_optimizer_state=roles.optimizer({**one.optimizer.state_dict(), "loss_scale": 128.0}),
    )


@layout("OpenNMT/OpenNMT-py", "file", "model_step_{step}.pt")
def opennmt(step: Step) -> None:
    one = trained(networks.Translation(), step.number, optimizer=adam)
    step.count("model", one.model)
    state = one.model.state_dict()
    generator = {n.removeprefix("generator."): v for n, v in state.items() if n.startswith("generator.")}
    step.torch(
        f"model_step_{step.number}.pt",
        model=roles.model({n: v for n, v in state.items() if not n.startswith("generator.")}),
        generator=roles.model(generator),
        vocab=roles.dataloader({"src": ["the", "a"], "tgt": ["le", "un"]}),
        opt=roles.config(configs.arguments(model_type="text")),
        optim={
            "training_step": roles.progress(step.number),
            "decay_step": roles.progress(step.number),
            "optimizer": roles.optimizer(one.optimizer.state_dict()),
        },
    )


@layout("k2-fsa/icefall", "file", "exp/checkpoint-{step}.pt", pointers.copy("exp/best-train-loss.pt", best=True))
def icefall(step: Step) -> None:
    one = trained(networks.Recurrent(), step.number, optimizer=adam, scheduler=warm_up)
    step.count("model", one.model)
    step.torch(
        f"exp/checkpoint-{step.number}.pt",
        model=roles.model(one.model.state_dict()),
        model_avg=roles.ema(half(one.ema.state_dict(), torch.float64)),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        scheduler=roles.scheduler(one.scheduler.state_dict()),
        grad_scaler=roles.scaler(one.scaler.state_dict()),
        sampler=roles.dataloader({"epoch": 1, "diagnostics": {"current_epoch": 1}, "batches": step.number}),
        best_train_loss=roles.metrics(2.5),
        best_valid_loss=roles.metrics(float("inf")),
        batch_idx_train=roles.progress(step.number),
        log_interval=roles.config(50),
        feature_dim=roles.config(5),
        env_info=roles.config({"torch-version": "2.13.0", "hostname": "a"}),
        parameters=roles.config(["conv.weight", "conv.bias"]),
    )


@layout("facebookresearch/audiocraft", "file", "checkpoint_{step}.th", pointers.copy("checkpoint.th"))
def audiocraft(step: Step) -> None:
    one = language(step)
    step.has(step=None, epoch=step.number)
    best = {name: value + 1 if value.is_floating_point() else value for name, value in one.model.state_dict().items()}
    step.torch(
        f"checkpoint_{step.number}.th",
        {
            "best_state": {"model": roles.ema(best)},
            "xp.cfg": roles.config(configs.options()),
            "xp.sig": roles.config("a1b2c3"),
            "history": roles.metrics([{"train": {"loss": 2.5}}, {"train": {"loss": 2.25}}]),
            "model": roles.model(one.model.state_dict()),
            "optimizer": roles.optimizer(one.optimizer.state_dict()),
            "lr_scheduler": roles.scheduler(one.scheduler.state_dict()),
            "scaler": roles.scaler(one.scaler.state_dict()),
            "ema": roles.ema({"state": {"model": one.ema.state_dict()}, "count": step.number}),
        },
    )


@layout("SWivid/F5-TTS", "file", "model_{step}.pt", pointers.copy("model_last.pt"))
def f5_tts(step: Step) -> None:
    one = trained(networks.Denoiser(), step.number, scheduler=warm_up)
    step.count("model", one.model)
    averaged = {"initted": torch.tensor(True), "step": torch.tensor(step.number)}
    averaged |= prefixed(one.ema, "ema_model.")
    step.torch(
        f"model_{step.number}.pt",
        model_state_dict=roles.model(one.model.state_dict()),
        optimizer_state_dict=roles.optimizer(one.optimizer.state_dict()),
        ema_model_state_dict=roles.ema(averaged),
        scheduler_state_dict=roles.scheduler(one.scheduler.state_dict()),
        update=roles.progress(step.number),
    )


@layout("NVIDIA/tacotron2", "file", "outdir/checkpoint_{step}")
def tacotron2(step: Step) -> None:
    one = trained(networks.Recurrent(), step.number, optimizer=adam)
    step.count("model", one.model)
    step.torch(
        f"outdir/checkpoint_{step.number}",
        iteration=roles.progress(step.number),
        state_dict=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        learning_rate=roles.config(1e-3),
    )


@layout("coqui-ai/Trainer", "file", "checkpoint_{step}.pth", pointers.copy("best_model.pth", best=True))
def coqui(step: Step) -> None:
    one = trained(networks.Recurrent(), step.number)
    step.count("model", one.model)
    step.torch(
        f"checkpoint_{step.number}.pth",
        config=roles.config({"model": "vits", "audio": {"sample_rate": 22050}}),
        model=roles.model(one.model.state_dict()),
        optimizer=[roles.optimizer(one.optimizer.state_dict())],
        scaler=[roles.scaler(one.scaler.state_dict())],
        step=roles.progress(step.number),
        epoch=roles.progress(1),
        date=roles.metrics("January 02, 2026"),
        model_loss=roles.metrics({"train_loss": 2.5, "eval_loss": None}),
    )


@layout("own transcription script with a scheduler object", "file", "checkpoint_{epoch}.pt")
def scheduler_object(step: Step) -> None:
    one = trained(networks.Recurrent(), step.number, optimizer=sgd)
    step.count("model", one.model)
    step.has(step=None, epoch=step.epoch)
    step.torch(
        f"checkpoint_{step.epoch}.pt",
        epoch=roles.progress(step.epoch),
        model_state_dict=roles.model(one.model.state_dict()),
        optimizer_state_dict=roles.optimizer(one.optimizer.state_dict()),
        loss=roles.metrics(torch.tensor(2.5)),
        scheduler=roles.scheduler(one.scheduler),
    )


@layout(
    "own script with a sampler's order",
    "file",
    "runs/a/ckpt-{step:08d}.pt",
    pointers.text("runs/a/latest.txt", "{name}"),
)
def samplers_order(step: Step) -> None:
    one = language(step)
    states = rng_states()
    step.torch(
        f"runs/a/ckpt-{step.number:08d}.pt",
        model=roles.model(one.model.state_dict()),
        optim=roles.optimizer(one.optimizer.state_dict()),
        sampler=roles.dataloader(sampler_order(step.number)),
        torch_rng_state=roles.rng(states["torch"]),
        cuda_rng_state_all=roles.rng(states["cuda"]),
        numpy_rng_state=roles.rng(states["numpy"]),
        python_rng_state=roles.rng(states["python"]),
        it=roles.progress(step.number),
    )
