"""Trainers of generative models, scenes and molecules that write one file for a step."""

from __future__ import annotations

import numpy as np
import torch

from support.layouts import configs, networks, pointers, roles
from support.layouts.flat_directories import pair
from support.layouts.layout import layout
from support.layouts.step import Step
from support.layouts.trained import Trained, adam, counted, prefixed, stairs, trained, update


def denoiser(step: Step) -> Trained:
    """A network of a diffusion model."""
    one = trained(networks.Denoiser(), step.number)
    step.count("model", one.model)
    return one


@layout("rosinality/stylegan2-pytorch", "file", "checkpoint/{step:06d}.pt")
def stylegan2(step: Step) -> None:
    (_, g), (_, d) = pair(step, ("g", "d"))
    step.torch(
        f"checkpoint/{step.number:06d}.pt",
        g=roles.model(g.model.state_dict(), "g"),
        d=roles.model(d.model.state_dict(), "d"),
        g_ema=roles.ema(g.ema.state_dict(), "g"),
        g_optim=roles.optimizer(g.optimizer.state_dict(), "g"),
        d_optim=roles.optimizer(d.optimizer.state_dict(), "d"),
        args=roles.config(configs.arguments(size=8)),
        ada_aug_p=roles.other(0.0),
    )


@layout("lucidrains/denoising-diffusion-pytorch", "file", "results/model-{epoch}.pt")
def denoising_diffusion(step: Step) -> None:
    one = trained(networks.Diffusion(), step.number, optimizer=adam)
    step.count("model", one.model)
    averaged = {"initted": torch.tensor(True), "step": torch.tensor(step.number)}
    averaged |= prefixed(one.model, "online_model.") | prefixed(one.ema, "ema_model.")
    step.torch(
        f"results/model-{step.epoch}.pt",
        step=roles.progress(step.number),
        model=roles.model(one.model.state_dict()),
        opt=roles.optimizer(one.optimizer.state_dict()),
        ema=roles.ema(averaged),
        scaler=roles.scaler(one.scaler.state_dict()),
        version=roles.config("2.2.5"),
    )


@layout(
    "facebookresearch/DiT",
    "file",
    "000-DiT/checkpoints/{step:07d}.pt",
    pointers.beside("000-DiT/log.txt", "(step=1)\n"),
)
def dit(step: Step) -> None:
    one = denoiser(step)
    step.torch(
        f"000-DiT/checkpoints/{step.number:07d}.pt",
        model=roles.model(one.model.state_dict()),
        ema=roles.ema(one.ema.state_dict()),
        opt=roles.optimizer(one.optimizer.state_dict()),
        args=roles.config(configs.arguments(image_size=256)),
    )


@layout("yang-song/score_sde_pytorch", "file", "checkpoints/checkpoint_{step}.pth")
def score_sde(step: Step) -> None:
    one = denoiser(step)
    shadows = [one.detach().clone() for one in one.ema.parameters()]
    step.torch(
        f"checkpoints/checkpoint_{step.number}.pth",
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        model=roles.model(prefixed(one.model, "module.")),
        ema=roles.ema({"decay": 0.999, "num_updates": step.number, "shadow_params": shadows}),
        step=roles.progress(step.number),
    )


@layout("fadel/pytorch_ema", "file", "ckpt_{step}.pt")
def torch_ema(step: Step) -> None:
    one = denoiser(step)
    shadows = [one.detach().clone() for one in one.ema.parameters()]
    collected = [one.detach().clone() for one in one.model.parameters()]
    step.torch(
        f"ckpt_{step.number}.pt",
        net=roles.model(one.model.state_dict()),
        ema=roles.ema(
            {"decay": 0.995, "num_updates": step.number, "shadow_params": shadows, "collected_params": collected}
        ),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        global_step=roles.progress(step.number),
    )


@layout("lucidrains/DALLE2-pytorch", "file", "prior.step_{step}.pth")
def dalle2(step: Step) -> None:
    one = trained(networks.Diffusion(), step.number, scheduler=stairs)
    step.count("model", one.model)
    step.torch(
        f"prior.step_{step.number}.pth",
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        scheduler=roles.scheduler(one.scheduler.state_dict()),
        warmup_scheduler=roles.scheduler({"last_step": step.number}),
        model=roles.model(one.model.state_dict()),
        version=roles.config(configs.Version("1.14.2")),
        step=roles.progress(torch.tensor([step.number])),
        ema=roles.ema({"initted": torch.tensor([True]), "step": torch.tensor([7])} | prefixed(one.ema, "ema_model.")),
        ema_model=roles.ema(one.ema.state_dict()),
    )


@layout("lucidrains/audiolm-pytorch", "file", "results/soundstream.{step}.pt")
def audiolm(step: Step) -> None:
    (_, g), (_, d) = pair(step, ("model", "discriminator"))
    whole = prefixed(g.model, "") | prefixed(d.model, "discriminator.")
    step.parameters = {"model": sum(step.parameters.values())}
    step.torch(
        f"results/soundstream.{step.number}.pt",
        model=roles.model(whole),
        optim=roles.optimizer(g.optimizer.state_dict(), "model"),
        config=roles.config(b"\\x80\\x04pickled"),
        discr_optim=roles.optimizer(d.optimizer.state_dict(), "discriminator"),
        version=roles.config("2.2.0"),
        ema_model=roles.ema({f"ema_model.{n}": v for n, v in g.ema.state_dict().items()}),
    )


@layout("exercise mnist-gan, four parts in one file", "file", "model_epoch{epoch}.pth")
def mnist_gan(step: Step) -> None:
    (_, g), (_, d) = pair(step, ("netG", "netD"))
    step.has(step=None, epoch=step.epoch)
    step.torch(
        f"model_epoch{step.epoch}.pth",
        netG=roles.model(g.model.state_dict(), "netG"),
        netD=roles.model(d.model.state_dict(), "netD"),
        optimG=roles.optimizer(g.optimizer.state_dict(), "netG"),
        optimD=roles.optimizer(d.optimizer.state_dict(), "netD"),
        fixedNoise=roles.other(torch.randn(16, 4, 1, 1)),
    )


@layout("nerfstudio-project/nerfstudio", "file", "nerfstudio_models/step-{step:09d}.ckpt")
def nerfstudio(step: Step) -> None:
    fields = trained(networks.Perceptron(3, 4), step.number, optimizer=adam)
    proposals = trained(networks.Perceptron(3, 1), step.number, optimizer=adam)
    step.count("pipeline", fields.model, proposals.model)
    pipeline = prefixed(fields.model, "_model.field.") | prefixed(proposals.model, "_model.proposal_networks.0.")
    step.torch(
        f"nerfstudio_models/step-{step.number:09d}.ckpt",
        step=roles.progress(step.number),
        pipeline=roles.model(pipeline),
        optimizers={
            "fields": roles.optimizer(fields.optimizer.state_dict()),
            "proposal_networks": roles.optimizer(proposals.optimizer.state_dict()),
        },
        schedulers={"fields": roles.scheduler(fields.scheduler.state_dict())},
        scalers=roles.scaler(fields.scaler.state_dict()),
    )


@layout(
    "yenchenlin/nerf-pytorch", "file", "logs/fern/{step:06d}.tar", pointers.beside("logs/fern/args.txt", "lr = 1\n")
)
def nerf(step: Step) -> None:
    coarse, fine = networks.Perceptron(3, 4), networks.Perceptron(3, 4)
    chained = torch.optim.Adam([*coarse.parameters(), *fine.parameters()])
    for one in (coarse, fine):
        update(one, chained)
    counted(chained, step.number)
    step.count("network_fn", coarse)
    step.count("network_fine", fine)
    step.torch(
        f"logs/fern/{step.number:06d}.tar",
        global_step=roles.progress(step.number),
        network_fn_state_dict=roles.model(coarse.state_dict(), "network_fn"),
        network_fine_state_dict=roles.model(fine.state_dict(), "network_fine"),
        optimizer_state_dict=roles.optimizer(chained.state_dict()),
    )


@layout("graphdeco-inria/gaussian-splatting", "file", "output/chkpnt{step}.pth")
def gaussian_splatting(step: Step) -> None:
    scene = trained(networks.Splats(), step.number, optimizer=adam)
    step.count("gaussians", scene.model)
    s = scene.model.splats
    capture = (
        roles.other(3),
        *(roles.model(s[name], "gaussians") for name in ("means", "sh0", "shN", "scales", "quats", "opacities")),
        roles.other(torch.rand(9)),
        roles.other(torch.rand(9, 1)),
        roles.other(torch.ones(9, 1)),
        roles.optimizer(scene.optimizer.state_dict()),
        roles.other(4.5),
    )
    step.torch(f"output/chkpnt{step.number}.pth", (capture, roles.progress(step.number)))


@layout("ACEsuit/mace", "file", "checkpoints/MACE_run-1_epoch-{epoch}.pt")
def mace(step: Step) -> None:
    one = trained(networks.Perceptron(), step.number, optimizer=adam)
    step.count("model", one.model)
    step.has(step=None, epoch=step.epoch)
    step.torch(
        f"checkpoints/MACE_run-1_epoch-{step.epoch}.pt",
        model=roles.model(one.model.double().state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        lr_scheduler=roles.scheduler(one.scheduler.state_dict()),
    )


@layout("eldadHaber/Pfold", "file", "checkpoint.pt")
def pfold(step: Step) -> None:
    one = trained(networks.Recurrent(), step.number, optimizer=adam)
    step.count("net", one.model)
    step.torch(
        "checkpoint.pt",
        ite=roles.progress(step.number),
        net=roles.model(one.model.state_dict()),
        opt=roles.optimizer(one.optimizer.state_dict()),
    )


@layout("pytorch/ignite", "file", "training_checkpoint_{step}.pt", pointers.copy("best_model_1_accuracy=0.7700.pt"))
def ignite(step: Step) -> None:
    one = trained(networks.Classifier(), step.number)
    step.count("model", one.model)
    step.torch(
        f"training_checkpoint_{step.number}.pt",
        trainer=roles.progress({"epoch_length": 50, "max_epochs": 10, "iteration": step.number}),
        model=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        lr_scheduler=roles.scheduler(one.scheduler.state_dict()),
    )


@layout("catalyst-team/catalyst", "file", "checkpoints/model.{epoch:04d}.pth")
def catalyst(step: Step) -> None:
    (_, g), (_, d) = pair(step, ("generator", "discriminator"))
    step.has(step=step.number, epoch=step.epoch)
    state: dict[str, roles.Labelled] = {
        "global_epoch_step": roles.progress(step.epoch),
        "global_batch_step": roles.progress(step.number),
        "checkpoint_data": roles.config({"stage": "train"}),
    }
    for key, one in (("generator", g), ("discriminator", d)):
        state[f"model_{key}_state_dict"] = roles.model(one.model.state_dict(), key)
        state[f"optimizer_{key}_state_dict"] = roles.optimizer(one.optimizer.state_dict(), key)
        state[f"scheduler_{key}_state_dict"] = roles.scheduler(one.scheduler.state_dict(), key)
    step.torch(f"checkpoints/model.{step.epoch:04d}.pth", state)


@layout("a statistics file by numpy in the dict", "file", "train_{step}.pth")
def numpy_statistics(step: Step) -> None:
    one = trained(networks.Perceptron(), step.number, optimizer=adam)
    step.count("model", one.model)
    step.torch(
        f"train_{step.number}.pth",
        params=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        normalizer=roles.other({"mean": np.zeros(5), "std": np.ones(5, np.float32)}),
        num_updates=roles.progress(step.number),
    )
