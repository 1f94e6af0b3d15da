"""Trainers of classifiers, detectors and self-supervised vision models that write one file for a step."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn

from support.layouts import configs, networks, pointers, roles
from support.layouts.layout import layout
from support.layouts.step import Step
from support.layouts.trained import (
    Trained,
    decayed,
    half,
    lambda_rate,
    milestones,
    prefixed,
    sgd,
    stairs,
    trained,
    warm_up,
)


def classifier(step: Step) -> Trained:
    """A classifier of images that SGD trained."""
    one = trained(networks.Classifier(), step.number, optimizer=sgd, scheduler=stairs)
    step.count("model", one.model)
    step.has(step=None, epoch=step.epoch)
    return one


def patches(step: Step) -> Trained:
    """A vision transformer in two groups."""
    one = trained(networks.Patches(), step.number, groups=decayed)
    step.count("model", one.model)
    step.has(step=None, epoch=step.epoch)
    return one


@layout("facebookresearch/moco", "file", "checkpoint_{epoch:04d}.pth.tar")
def moco(step: Step) -> None:
    one = classifier(step)
    step.count("model", one.model, one.ema)
    state = prefixed(one.model, "module.encoder_q.") | prefixed(one.ema, "module.encoder_k.")
    state |= {"module.queue": torch.randn(4, 12), "module.queue_ptr": torch.tensor([4])}
    step.torch(
        f"checkpoint_{step.epoch:04d}.pth.tar",
        epoch=roles.progress(step.epoch),
        arch=roles.config("resnet50"),
        state_dict=roles.model(state),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
    )


@layout("facebookresearch/dino", "file", "checkpoint{epoch:04d}.pth", pointers.copy("checkpoint.pth"))
def dino(step: Step) -> None:
    one = patches(step)
    step.torch(
        f"checkpoint{step.epoch:04d}.pth",
        student=roles.model(prefixed(one.model, "module.")),
        teacher=roles.ema(prefixed(one.ema, "module.")),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        epoch=roles.progress(step.epoch),
        args=roles.config(configs.arguments(arch="vit_tiny")),
        dino_loss=roles.other({"center": torch.randn(1, 6)}),
        fp16_scaler=roles.scaler(one.scaler.state_dict()),
    )


@layout("facebookresearch/mae", "file", "checkpoint-{epoch}.pth")
def mae(step: Step) -> None:
    one = patches(step)
    step.torch(
        f"checkpoint-{step.epoch}.pth",
        model=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        epoch=roles.progress(step.epoch),
        scaler=roles.scaler(one.scaler.state_dict()),
        args=roles.config(configs.arguments()),
    )


@layout("facebookresearch/ijepa", "file", "jepa-ep{epoch}.pth.tar", pointers.copy("jepa-latest.pth.tar"))
def ijepa(step: Step) -> None:
    encoder, predictor = networks.Patches(), networks.Perceptron(6, 6)
    one, two = trained(encoder, step.number), trained(predictor, step.number)
    step.count("encoder", encoder)
    step.count("predictor", predictor)
    step.has(step=None, epoch=step.epoch)
    chained = torch.optim.AdamW([{"params": encoder.parameters()}, {"params": predictor.parameters()}])
    for index, state in enumerate([*one.optimizer.state.values(), *two.optimizer.state.values()]):
        parameter = [*encoder.parameters(), *predictor.parameters()][index]
        chained.state[parameter] = state
    step.torch(
        f"jepa-ep{step.epoch}.pth.tar",
        encoder=roles.model(prefixed(encoder, "module."), "encoder"),
        predictor=roles.model(prefixed(predictor, "module."), "predictor"),
        target_encoder=roles.ema(prefixed(one.ema, "module."), "encoder"),
        opt=roles.optimizer(chained.state_dict()),
        scaler=roles.scaler(one.scaler.state_dict()),
        epoch=roles.progress(step.epoch),
        loss=roles.metrics(0.5),
        batch_size=roles.config(8),
        world_size=roles.config(2),
        lr=roles.config(1e-3),
    )


@layout("mlfoundations/open_clip", "file", "checkpoints/epoch_{epoch}.pt", pointers.copy("checkpoints/epoch_latest.pt"))
def open_clip(step: Step) -> None:
    one = patches(step)
    step.has(step=step.number, epoch=step.epoch)
    step.torch(
        f"checkpoints/epoch_{step.epoch}.pt",
        {
            "epoch": roles.progress(step.epoch),
            "name": roles.config("2026_01_02-model_ViT"),
            "state_dict": roles.model(prefixed(one.model, "module.")),
            "state_dict_ema": roles.ema(one.ema.state_dict()),
            "optimizer": roles.optimizer(one.optimizer.state_dict()),
            "scaler": roles.scaler(one.scaler.state_dict()),
            "global_step": roles.progress(step.number),
        },
    )


@layout(
    "huggingface/pytorch-image-models",
    "file",
    "checkpoint-{epoch}.pth.tar",
    pointers.copy("last.pth.tar"),
    pointers.copy("model_best.pth.tar", best=True),
)
def timm(step: Step) -> None:
    one = patches(step)
    step.torch(
        f"checkpoint-{step.epoch}.pth.tar",
        epoch=roles.progress(step.epoch),
        arch=roles.config("vit_tiny_patch16_224"),
        state_dict=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        version=roles.config(2),
        args=roles.config(configs.arguments(model="vit_tiny")),
        amp_scaler=roles.scaler(one.scaler.state_dict()),
        state_dict_ema=roles.ema(one.ema.state_dict()),
        metric=roles.metrics(77.5),
    )


@layout("microsoft/Swin-Transformer", "file", "ckpt_epoch_{epoch}.pth")
def swin(step: Step) -> None:
    one = patches(step)
    step.torch(
        f"ckpt_epoch_{step.epoch}.pth",
        model=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        lr_scheduler=roles.scheduler(one.scheduler.state_dict()),
        max_accuracy=roles.metrics(77.5),
        scaler=roles.scaler(one.scaler.state_dict()),
        epoch=roles.progress(step.epoch),
        config=roles.config(configs.CfgNode(configs.options())),
    )


@layout("HobbitLong/SupContrast", "file", "ckpt_epoch_{epoch}.pth", pointers.copy("last.pth"))
def supcontrast(step: Step) -> None:
    one = classifier(step)
    step.torch(
        f"ckpt_epoch_{step.epoch}.pth",
        opt=roles.config(configs.arguments(method="SupCon")),
        model=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        epoch=roles.progress(step.epoch),
    )


@layout("pytorch/examples imagenet", "file", "checkpoint.pth.tar", pointers.copy("model_best.pth.tar"))
def imagenet(step: Step) -> None:
    one = classifier(step)
    step.torch(
        "checkpoint.pth.tar",
        epoch=roles.progress(step.epoch),
        arch=roles.config("resnet18"),
        state_dict=roles.model(prefixed(one.model, "module.")),
        best_acc1=roles.metrics(torch.tensor(77.5)),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        scheduler=roles.scheduler(one.scheduler.state_dict()),
    )


@layout("pytorch/examples ddp-tutorial-series", "file", "snapshot.pt")
def ddp_tutorial(step: Step) -> None:
    one = classifier(step)
    state = {"MODEL_STATE": roles.model(one.model.state_dict()), "EPOCHS_RUN": roles.progress(step.epoch)}
    step.torch("snapshot.pt", state)


@layout("pytorch/examples minGPT-ddp", "file", "gpt_snapshot.pt")
def mingpt_ddp(step: Step) -> None:
    one = trained(networks.Language(), step.number, groups=decayed)
    step.count("model", one.model)
    step.has(step=None, epoch=step.epoch)
    step.torch(
        "gpt_snapshot.pt",
        model_state=roles.model(one.model.state_dict()),
        optimizer_state=roles.optimizer(one.optimizer.state_dict()),
        finished_epoch=roles.progress(step.epoch),
    )


@layout(
    "facebookresearch/detectron2",
    "file",
    "model_{step:07d}.pth",
    pointers.text("last_checkpoint", "{name}"),
    pointers.beside("metrics.json", '{"iteration": 100}\n'),
)
def detectron2(step: Step) -> None:
    one = trained(networks.Classifier(), step.number, optimizer=sgd, scheduler=milestones)
    step.count("model", one.model)
    step.torch(
        f"model_{step.number:07d}.pth",
        model=roles.model(one.model.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        scheduler=roles.scheduler(one.scheduler.state_dict()),
        iteration=roles.progress(step.number),
    )


@layout(
    "open-mmlab/mmengine",
    "file",
    "epoch_{epoch}.pth",
    pointers.text("last_checkpoint", "/other/machine/{name}"),
    pointers.copy("best_coco_bbox_mAP_epoch_1.pth", best=True),
)
def mmengine(step: Step) -> None:
    one = classifier(step)
    step.has(step=step.number, epoch=step.epoch)
    meta = {"epoch": step.epoch, "iter": step.number, "cfg": "model = dict(type='A')\n", "seed": 7, "time": "20260102"}
    hub = {"log_scalars": {"train/loss": [2.5, 2.25]}, "runtime_info": {"iter": step.number}, "resumed_keys": {}}
    averaged = {"steps": torch.tensor(step.number)} | prefixed(one.ema, "module.")
    step.torch(
        f"epoch_{step.epoch}.pth",
        meta=roles.progress(meta),
        state_dict=roles.model(one.model.state_dict()),
        message_hub=roles.metrics(hub),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        param_schedulers=[roles.scheduler(one.scheduler.state_dict())],
        ema_state_dict=roles.ema(averaged),
    )


@layout(
    "ultralytics/yolov5",
    "file",
    "weights/epoch{epoch}.pt",
    pointers.copy("weights/last.pt"),
    pointers.copy("weights/best.pt", best=True),
)
def yolov5(step: Step) -> None:
    one = classifier(step)
    step.torch(
        f"weights/epoch{step.epoch}.pt",
        epoch=roles.progress(step.epoch),
        best_fitness=roles.metrics(0.5),
        model=roles.model(copy.deepcopy(one.model).half()),
        ema=roles.ema(copy.deepcopy(one.ema).half()),
        updates=roles.progress(step.number),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        opt=roles.config(vars(configs.arguments(weights="yolov5s.pt"))),
        git=roles.config({"remote": None, "branch": None, "commit": None}),
        date=roles.metrics("2026-01-02T03:04:05"),
    )
    step.has(step=step.number, epoch=step.epoch)


@layout("lyuwenyu/RT-DETR", "file", "checkpoint{epoch:04d}.pth", pointers.copy("last.pth"))
def rt_detr(step: Step) -> None:
    one = classifier(step)
    step.torch(
        f"checkpoint{step.epoch:04d}.pth",
        date=roles.metrics("2026-01-02T03:04:05"),
        last_epoch=roles.progress(step.epoch),
        model=roles.model(one.model.state_dict()),
        criterion=roles.other({}),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        lr_scheduler=roles.scheduler(one.scheduler.state_dict()),
        lr_warmup_scheduler=roles.scheduler({"last_step": step.number}),
        ema=roles.ema({"module": one.ema.state_dict(), "updates": step.number}),
        scaler=roles.scaler(one.scaler.state_dict()),
    )
    step.has(step=step.number, epoch=step.epoch)


@layout("Megvii-BaseDetection/YOLOX", "file", "epoch_{epoch}_ckpt.pth", pointers.copy("latest_ckpt.pth"))
def yolox(step: Step) -> None:
    one = classifier(step)
    step.torch(
        f"epoch_{step.epoch}_ckpt.pth",
        start_epoch=roles.progress(step.epoch),
        model=roles.model(one.ema.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        best_ap=roles.metrics(0.5),
        curr_ap=roles.metrics(None),
    )


@layout(
    "mit-han-lab/efficientvit",
    "file",
    "checkpoint/checkpoint.pt",
    pointers.text("checkpoint/latest.txt", "{path}"),
    pointers.copy("checkpoint/model_best.pt"),
)
def efficientvit(step: Step) -> None:
    one = classifier(step)
    step.torch(
        "checkpoint/checkpoint.pt",
        state_dict=roles.model(one.model.state_dict()),
        epoch=roles.progress(step.epoch),
        best_val=roles.metrics(77.5),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        lr_scheduler=roles.scheduler(one.scheduler.state_dict()),
        ema=roles.ema({"average": one.ema.state_dict()}),
        scaler=roles.scaler(one.scaler.state_dict()),
    )


@layout(
    "MIC-DKFZ/nnUNet", "file", "fold_0/checkpoint_latest.pth", pointers.copy("fold_0/checkpoint_best.pth", best=True)
)
def nnunet(step: Step) -> None:
    one = classifier(step)
    step.torch(
        "fold_0/checkpoint_latest.pth",
        network_weights=roles.model(one.model.state_dict()),
        optimizer_state=roles.optimizer(one.optimizer.state_dict()),
        grad_scaler_state=roles.scaler(one.scaler.state_dict()),
        logging=roles.metrics({"mean_fg_dice": [0.5, 0.75], "ema_fg_dice": [0.5, 0.5]}),
        _best_ema=roles.metrics(0.5),
        current_epoch=roles.progress(step.epoch),
        init_args=roles.config({"configuration": "2d", "fold": 0}),
        trainer_name=roles.config("nnUNetTrainer"),
        inference_allowed_mirroring_axes=roles.config((0, 1)),
    )


@layout("torch.optim.swa_utils", "file", "swa_{epoch}.pt")
def swa(step: Step) -> None:
    one = classifier(step)
    averaged = torch.optim.swa_utils.AveragedModel(one.model)
    averaged.update_parameters(one.ema)
    averaged.update_parameters(one.model)
    rate = torch.optim.swa_utils.SWALR(one.optimizer, 0.05)
    step.torch(
        f"swa_{step.epoch}.pt",
        epoch=roles.progress(step.epoch),
        model=roles.model(one.model.state_dict()),
        swa_model=roles.ema(averaged.state_dict()),
        optimizer=roles.optimizer(one.optimizer.state_dict()),
        swa_scheduler=roles.scheduler(rate.state_dict()),
    )


@layout("facebookresearch/vissl, a model in a list", "file", "model_phase{epoch}.torch")
def list_of_models(step: Step) -> None:
    one = classifier(step)
    trunk = {n: v for n, v in one.model.state_dict().items() if not n.startswith("fc.")}
    heads = {n: v for n, v in one.model.state_dict().items() if n.startswith("fc.")}
    step.torch(
        f"model_phase{step.epoch}.torch",
        phase_idx=roles.progress(step.epoch),
        iteration=roles.progress(step.number),
        loss=roles.other({}),
        type=roles.config("checkpoint"),
        classy_state_dict={
            "base_model": {"model": {"trunk": roles.model(trunk), "heads": roles.model(heads)}},
            "optimizer": {"optim": roles.optimizer(one.optimizer.state_dict()), "lr": roles.config(0.1)},
        },
    )
    step.has(step=step.number, epoch=step.epoch)


@layout("PyTorchLightning with averaged weights in a callback", "file", "checkpoints/epoch={epoch}-step={step}.ckpt")
def lightning_average(step: Step) -> None:
    one = trained(networks.Language(), step.number, scheduler=warm_up)
    step.count("model", one.model)
    step.has(step=step.number, epoch=step.epoch)
    average = {name: value for name, value in prefixed(one.ema, "model.").items() if name[-8:] != "bias"}
    step.torch(
        f"checkpoints/epoch={step.epoch}-step={step.number}.ckpt",
        {
            "epoch": roles.progress(step.epoch),
            "global_step": roles.progress(step.number),
            "pytorch-lightning_version": roles.config("2.5.0"),
            "state_dict": roles.model(prefixed(one.model, "model.")),
            "loops": roles.progress({"fit_loop": {"epoch_progress": {"current": {"completed": step.epoch}}}}),
            "callbacks": {"EMA": {"ema_weights": roles.ema(average)}, "Checkpoint": roles.metrics({"best": 2.5})},
            "optimizer_states": [roles.optimizer(one.optimizer.state_dict())],
            "lr_schedulers": [roles.scheduler(one.scheduler.state_dict())],
            "hparams_name": roles.config("kwargs"),
            "hyper_parameters": roles.config({"lr": 1e-3}),
        },
    )


@layout("aqlaboratory/openfold", "file", "checkpoints/{epoch}-{step}.ckpt")
def openfold(step: Step) -> None:
    one = trained(networks.Patches(), step.number, scheduler=lambda_rate)
    step.count("model", one.model)
    step.has(step=step.number, epoch=step.epoch)
    step.torch(
        f"checkpoints/{step.epoch}-{step.number}.ckpt",
        {
            "epoch": roles.progress(step.epoch),
            "global_step": roles.progress(step.number),
            "pytorch-lightning_version": roles.config("1.6.5"),
            "state_dict": roles.model(prefixed(one.model, "model.")),
            "callbacks": roles.metrics({}),
            "optimizer_states": [roles.optimizer(one.optimizer.state_dict())],
            "lr_schedulers": [roles.scheduler(one.scheduler.state_dict())],
            "ema": roles.ema({"params": one.ema.state_dict(), "decay": 0.999}),
        },
    )


@layout("model in bytes of another file", "file", "bundle_{step}.pt")
def nested_bytes(step: Step) -> None:
    """A best model that was saved to memory and kept as bytes, as some early-stopping callbacks do."""
    one = classifier(step)
    step.has(step=step.number)
    data = io.BytesIO()
    torch.save(half(one.ema.state_dict()), data)
    step.torch(
        f"bundle_{step.number}.pt",
        net=roles.model(nn.Sequential(one.model).state_dict()),
        optim=roles.optimizer(one.optimizer.state_dict()),
        best=roles.other(data.getvalue()),
        step=roles.progress(step.number),
    )
