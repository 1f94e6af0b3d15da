"""Files of all steps beside each other in the directory of the run, several for each step."""

from __future__ import annotations

import numpy as np
import torch

from support.layouts import configs, networks, pointers, roles
from support.layouts.layout import layout
from support.layouts.own_directories import language
from support.layouts.step import Step
from support.layouts.trained import Trained, adam, counted, half, loader_state, sgd, trained, update


def pair(step: Step, names: tuple[str, str] = ("G", "D")) -> list[tuple[str, Trained]]:
    """A generator and a discriminator that were trained apart."""
    models = (networks.Generator(), networks.Discriminator())
    both = [(name, trained(one, step.number, optimizer=adam)) for name, one in zip(names, models, strict=True)]
    for name, one in both:
        step.count(name, one.model)
    return both


@layout(
    "ajbrock/BigGAN-PyTorch", "flat", "", pointers.renamed(".pth", "_copy0.pth"), pointers.renamed(".pth", "_best0.pth")
)
def biggan(step: Step) -> None:
    for name, one in pair(step):
        step.torch(f"{name}.pth", roles.model(one.model.state_dict(), name))
        step.torch(f"{name}_optim.pth", roles.optimizer(one.optimizer.state_dict(), name))
        if name == "G":
            step.torch("G_ema.pth", roles.ema(one.ema.state_dict(), name))
    state = {"itr": step.number, "epoch": 1, "save_num": 0, "best_IS": 1.25, "best_FID": 99.5}
    step.torch("state_dict.pth", {**roles_of(state), "config": roles.config(configs.options())})


def roles_of(state: dict[str, object]) -> dict[str, roles.Labelled]:
    """Each value as progress."""
    return {key: roles.progress(value) for key, value in state.items()}


@layout("clovaai/stargan-v2", "flat")
def stargan(step: Step) -> None:
    models: dict[str, networks.nn.Module] = {
        "generator": networks.Generator(),
        "discriminator": networks.Discriminator(),
        "mapping_network": networks.Perceptron(),
        "style_encoder": networks.Classifier(),
    }
    ones = {name: trained(one, step.number, optimizer=adam) for name, one in models.items()}
    for name, one in ones.items():
        step.count(name, one.model)
    prefix = f"{step.number:06d}_"
    step.torch(f"{prefix}nets.ckpt", {n: roles.model(one.model.state_dict(), n) for n, one in ones.items()})
    averaged = {n: roles.ema(one.ema.state_dict(), n) for n, one in ones.items() if n != "discriminator"}
    step.torch(f"{prefix}nets_ema.ckpt", averaged)
    step.torch(f"{prefix}optims.ckpt", {n: roles.optimizer(one.optimizer.state_dict(), n) for n, one in ones.items()})


@layout("junyanz/pytorch-CycleGAN-and-pix2pix", "flat", "", pointers.renamed("{step}_net", "latest_net"))
def cyclegan(step: Step) -> None:
    for domain in ("A", "B"):
        for name, one in pair(step, (f"G_{domain}", f"D_{domain}")):
            step.torch(f"{step.number}_net_{name}.pth", roles.model(one.model.cpu().state_dict(), name))


@layout("pytorch/examples dcgan", "flat")
def dcgan(step: Step) -> None:
    step.has(step=None, epoch=step.epoch)
    for name, one in pair(step, ("netG", "netD")):
        step.torch(f"{name}_epoch_{step.epoch}.pth", roles.model(one.model.state_dict(), name))


@layout("XPixelGroup/BasicSR", "flat", "", pointers.renamed("net_g_{step}", "net_g_latest"))
def basicsr(step: Step) -> None:
    (name, g), (_, d) = pair(step, ("net_g", "net_d"))
    averaged = roles.ema(g.ema.state_dict(), name)
    step.torch(f"models/net_g_{step.number}.pth", params=roles.model(g.model.state_dict(), name), params_ema=averaged)
    step.torch(f"models/net_d_{step.number}.pth", params=roles.model(d.model.state_dict(), "net_d"))
    step.torch(
        f"training_states/{step.number}.state",
        epoch=roles.progress(1),
        iter=roles.progress(step.number),
        optimizers=[
            roles.optimizer(g.optimizer.state_dict(), name),
            roles.optimizer(d.optimizer.state_dict(), "net_d"),
        ],
        schedulers=[roles.scheduler(g.scheduler.state_dict()), roles.scheduler(d.scheduler.state_dict())],
    )


@layout("openai/improved-diffusion", "flat")
def improved_diffusion(step: Step) -> None:
    one = trained(networks.Denoiser(), step.number)
    step.count("model", one.model)
    step.torch(f"model{step.number:06d}.pt", roles.model(one.model.state_dict()))
    step.torch(f"ema_0.9999_{step.number:06d}.pt", roles.ema(one.ema.state_dict()))
    slower = {name: value * 0.5 if value.is_floating_point() else value for name, value in one.ema.state_dict().items()}
    step.torch(f"ema_0.999_{step.number:06d}.pt", roles.ema(slower))
    step.torch(f"opt{step.number:06d}.pt", roles.optimizer(one.optimizer.state_dict()))


@layout("NVlabs/edm", "flat")
def edm(step: Step) -> None:
    one = trained(networks.Denoiser(), step.number)
    step.count("net", one.model)
    step.pickle(
        f"network-snapshot-{step.number:06d}.pkl",
        {
            "ema": roles.ema(one.ema),
            "loss_fn": roles.config(configs.Hyperparameters()),
            "augment_pipe": roles.other(None),
            "dataset_kwargs": roles.config({"class_name": "ImageFolder", "resolution": 6}),
        },
    )
    state = {"net": roles.model(one.model), "optimizer_state": roles.optimizer(one.optimizer.state_dict())}
    step.torch(f"training-state-{step.number:06d}.pt", state)


@layout("NVlabs/stylegan2-ada-pytorch", "file", "network-snapshot-{step:06d}.pkl")
def stylegan2_ada(step: Step) -> None:
    (_, g), (_, d) = pair(step)
    step.pickle(
        f"network-snapshot-{step.number:06d}.pkl",
        {
            "G": roles.model(g.model, "G"),
            "D": roles.model(d.model, "D"),
            "G_ema": roles.ema(g.ema, "G"),
            "augment_pipe": roles.other(None),
            "training_set_kwargs": roles.config({"path": "a.zip", "max_size": 10}),
        },
    )


@layout("sfujim/TD3", "flat")
def td3(step: Step) -> None:
    step.has(step=None)
    for name, outputs in (("critic", 1), ("actor", 3)):
        one = trained(networks.Perceptron(outputs=outputs), step.number, optimizer=adam)
        step.count(name, one.model)
        step.torch(f"models/TD3_Hopper-v2_0_{name}", roles.model(one.model.state_dict(), name))
        step.torch(f"models/TD3_Hopper-v2_0_{name}_optimizer", roles.optimizer(one.optimizer.state_dict(), name))


@layout("apple/corenet", "flat")
def corenet(step: Step) -> None:
    one = trained(networks.Classifier(), step.number, optimizer=sgd)
    step.count("model", one.model)
    step.has(step=step.number, epoch=step.epoch)
    step.torch(
        "training_checkpoint_last.pt",
        model_state_dict=roles.model(one.model.state_dict()),
        optim_state_dict=roles.optimizer(one.optimizer.state_dict()),
        gradient_scaler_state_dict=roles.scaler(one.scaler.state_dict()),
        ema_state_dict=roles.ema(one.ema.state_dict()),
        epoch=roles.progress(step.epoch),
        iterations=roles.progress(step.number),
        best_metric=roles.metrics(77.5),
        training_accum=roles.other({}),
    )
    step.torch("checkpoint_last.pt", roles.model(one.model.state_dict()))
    step.torch("checkpoint_ema_last.pt", roles.ema(one.ema.state_dict()))
    best = {name: value + 1 for name, value in one.model.state_dict().items()}
    step.torch("checkpoint_best.pt", roles.ema(best))


@layout("OpenNMT/OpenNMT-py safetensors", "flat")
def opennmt_safetensors(step: Step) -> None:
    one = trained(networks.Translation(), step.number, optimizer=adam)
    step.count("model", one.model)
    name = f"model_step_{step.number}"
    step.torch(
        f"{name}.pt",
        vocab=roles.dataloader({"src": ["the", "a"], "tgt": ["le", "un"]}),
        opt=roles.config(configs.arguments(model_type="text")),
        optim={
            "training_step": roles.progress(step.number),
            "decay_step": roles.progress(step.number),
            "optimizer": roles.optimizer(one.optimizer.state_dict()),
        },
    )
    step.safetensors(f"{name}.safetensors", roles.model(one.model.state_dict()))


@layout("allenai/allennlp", "flat", "", pointers.renamed("model_state_e0_b{step}", "best"))
def allennlp(step: Step) -> None:
    one = trained(networks.Recurrent(), step.number, optimizer=adam)
    step.count("model", one.model)
    step.torch(f"model_state_e0_b{step.number}.th", roles.model(one.model.state_dict()))
    step.torch(
        f"training_state_e0_b{step.number}.th",
        metric_tracker=roles.metrics({"best_so_far": 0.5, "patience": 3, "epoch_number": 0}),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        learning_rate_scheduler=roles.scheduler(one.scheduler.state_dict()),
        momentum_scheduler=roles.scheduler(None),
        epochs_completed=roles.progress(0),
        batches_in_epoch_completed=roles.progress(step.number),
    )


@layout(
    "espnet/espnet",
    "flat",
    "",
    pointers.link_to("latest.pth", "{epoch}epoch.pth"),
    pointers.link_to("valid.acc.best.pth", "1epoch.pth"),
    pointers.beside("train.log", "1epoch results"),
)
def espnet(step: Step) -> None:
    one = trained(networks.Recurrent(), step.number, optimizer=adam)
    step.count("model", one.model)
    step.has(step=None, epoch=step.epoch)
    step.torch(
        "checkpoint.pth",
        model=roles.model(one.model.state_dict()),
        reporter=roles.metrics({"epoch": step.epoch, "stats": {step.epoch: {"valid": {"acc": 0.5}}}}),
        optimizers=[roles.optimizer(one.optimizer.state_dict())],
        schedulers=[roles.scheduler(one.scheduler.state_dict())],
        scaler=roles.scaler(None),
    )
    step.torch(f"{step.epoch}epoch.pth", roles.model(one.model.state_dict()))


@layout("jik876/hifi-gan", "flat")
def hifigan(step: Step) -> None:
    generator = trained(networks.Generator(), step.number)
    several, period = networks.Discriminator(), networks.Discriminator(4)
    chained = torch.optim.AdamW([*several.parameters(), *period.parameters()])
    for one in (several, period):
        update(one, chained)
    counted(chained, step.number)
    step.count("generator", generator.model)
    step.count("mpd", period)
    step.count("msd", several)
    step.torch(f"g_{step.number:08d}", generator=roles.model(generator.model.state_dict(), "generator"))
    step.torch(
        f"do_{step.number:08d}",
        mpd=roles.model(period.state_dict(), "mpd"),
        msd=roles.model(several.state_dict(), "msd"),
        optim_g=roles.optimizer(generator.optimizer.state_dict(), "generator"),
        optim_d=roles.optimizer(chained.state_dict()),
        steps=roles.progress(step.number),
        epoch=roles.progress(3),
    )


@layout("jaywalnut310/vits", "flat", "", pointers.beside("config.json", '{"train": {"epochs": 10}}'))
def vits(step: Step) -> None:
    for name, one in pair(step):
        step.torch(
            f"{name}_{step.number}.pth",
            model=roles.model(one.model.state_dict(), name),
            iteration=roles.progress(3),
            optimizer=roles.optimizer(one.optimizer.state_dict(), name),
            learning_rate=roles.config(2e-4),
        )


@layout("wenet-e2e/wenet", "flat")
def wenet(step: Step) -> None:
    one = trained(networks.Recurrent(), step.number)
    step.count("model", one.model)
    step.has(step=step.number, epoch=step.epoch)
    step.torch(f"epoch_{step.epoch}.pt", roles.model(one.model.state_dict()))
    info = {
        "epoch": step.epoch,
        "lr": 1e-3,
        "step": step.number,
        "loss_dict": {"loss": 2.5, "acc": 0.5},
        "tag": "epoch",
    }
    step.yaml(f"epoch_{step.epoch}.yaml", roles.progress(info))


@layout("karpathy/nanochat", "flat")
def nanochat(step: Step) -> None:
    one = language(step)
    step.torch(f"model_{step.number:06d}.pt", roles.model(half(one.model.state_dict(), torch.bfloat16)))
    meta = {
        "step": roles.progress(step.number),
        "val_bpb": roles.metrics(1.25),
        "model_config": roles.config({"n_layer": 2}),
        "user_config": roles.config(configs.options()),
        "dataloader_state_dict": roles.dataloader({"pq_idx": 0, "rg_idx": step.number}),
    }
    step.json(f"meta_{step.number:06d}.json", meta)
    parameters = list(one.model.parameters())
    for rank in range(2):
        adamw = torch.optim.AdamW(parameters[rank:4:2])
        muon = torch.optim.SGD(parameters[4 + rank :: 2], 0.02, momentum=0.95)
        update(one.model, adamw, muon)
        counted(adamw, step.number)
        states = [roles.optimizer(adamw.state_dict()), roles.optimizer(muon.state_dict())]
        step.torch(f"optim_{step.number:06d}_rank{rank}.pt", states)


@layout("nerfstudio-project/gsplat", "flat")
def gsplat(step: Step) -> None:
    scenes = (networks.Splats(9), networks.Splats(7))
    step.count("splats", *scenes)
    for rank, scene in enumerate(scenes):
        update(scene, torch.optim.Adam(scene.parameters()))
        splats = roles.model(scene.splats.state_dict(), "splats")
        step.torch(f"ckpts/ckpt_{step.number}_rank{rank}.pt", step=roles.progress(step.number), splats=splats)
        step.json(f"stats/train_step{step.number:04d}_rank{rank}.json", roles.metrics({"mem": 0.5, "num_GS": 9}))


@layout("ConvLSTM, a directory for each kind", "flat")
def directories_of_kinds(step: Step) -> None:
    one = trained(networks.Recurrent(), step.number, optimizer=adam)
    step.count("model", one.model)
    step.has(step=step.number)
    name = f"convlstm_{step.number}.pth"
    step.torch(f"models/{name}", roles.model(one.model.state_dict()))
    step.torch(f"optimizers/{name}", roles.optimizer(one.optimizer.state_dict()))
    step.torch(f"schedulers/{name}", roles.scheduler(one.scheduler.state_dict()))


@layout("microsoft/Swin-Transformer MoE", "flat")
def swin_moe(step: Step) -> None:
    one = trained(networks.Patches(), step.number)
    step.has(step=None, epoch=step.epoch)
    name = f"ckpt_epoch_{step.epoch}.pth"
    total = sum(one.numel() for one in one.model.parameters())
    step.torch(
        f"{name}.master",
        model=roles.model(one.model.state_dict()),
        lr_scheduler=roles.scheduler(one.scheduler.state_dict()),
        max_accuracy=roles.metrics(0.5),
        scaler=roles.scaler(one.scaler.state_dict()),
        epoch=roles.progress(step.epoch),
        config=roles.config(configs.CfgNode(configs.options())),
    )
    step.torch(f"{name}.global", optimizer=roles.optimizer(one.optimizer.state_dict()))
    for rank in range(2):
        experts = trained(networks.Perceptron(), step.number)
        total += sum(one.numel() for one in experts.model.parameters())
        names = {f"blocks.0.mlp.experts.{rank}.{n}": v for n, v in experts.model.state_dict().items()}
        state = {"model": roles.model(names), "optimizer": roles.optimizer(experts.optimizer.state_dict())}
        step.torch(f"{name}.rank{rank}", state)
    step.parameters = {"model": total}


@layout("openai/spinningup", "flat")
def spinningup(step: Step) -> None:
    one = trained(networks.Perceptron(), step.number, optimizer=adam)
    step.count("model", one.model)
    step.torch(f"pyt_save/model{step.number}.pt", roles.model(one.model))
    step.pickle(
        f"simple_save/vars{step.number}.pkl", roles.other({"env": configs.RunningMeanStd(np.zeros(3), np.ones(3), 7)})
    )


@layout("own flat run with weights, optimizer and loader", "flat")
def weights_optimizer_loader(step: Step) -> None:
    one = language(step)
    step.torch(f"weights_{step.number}.pt", roles.model(one.model.state_dict()))
    step.torch(f"optimizer_{step.number}.pt", roles.optimizer(one.optimizer.state_dict()))
    for rank in range(2):
        step.torch(f"loader_{step.number}_rank_{rank}.pt", roles.dataloader(loader_state(step.number, rank)))
