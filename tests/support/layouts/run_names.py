"""What the checkpoints of a run are called: directories of small files, of which one step is the newest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import ckpttool
from ckpttool.errors import CkptError


@dataclass(frozen=True, slots=True)
class RunNames:
    """A run: the files of each step, oldest first, and what lies beside them.

    `step` and `epoch` are what the names of the newest say, None where they say nothing. Of `beside`, a text is
    written as it is, one that begins with `->` is a link, and None is a file of tensors that are of no step.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    step: int | None
    epoch: int | None
    beside: dict[str, str | None]

    def write(self, directory: Path) -> None:
        """Write the files: each tensor has the number of its step."""
        directory.mkdir(parents=True)
        for number, names in enumerate(self.steps, 1):
            for name in names:
                _write(directory / name, number)
        for name, text in self.beside.items():
            if text is None:
                _write(directory / name, -1)
            elif text.startswith("->"):
                (directory / name).symlink_to(text.removeprefix("->"))
            else:
                (directory / name).write_text(text)

    def outcome(self, directory: Path) -> str:
        """Write the run and return `newest`, or what is opened in its place, by the numbers in the tensors."""
        self.write(directory)
        expected = _of_ranks(self.steps[-1])
        try:
            with ckpttool.open(str(directory)) as ckpt:
                numbers = {int(tensor.torch().flatten()[0]) for tensor in ckpt.tensors()}
            catalogue = ckpttool.inspect(str(directory))
        except CkptError as error:
            return f"refused: {error}".split("\n")[0].replace(str(directory), "RUN")
        if numbers != {len(self.steps)}:
            return f"opened those of {sorted(numbers)}, the newest is {len(self.steps)}"
        files = _of_ranks(file.name for file in catalogue.files)
        if files != expected:
            return f"opened {', '.join(sorted(files))}"
        shown = [one["step"] for one in catalogue.facts.get("run", ()) if one["taken"]]
        if len(self.steps) == 1 and shown:
            return f"one checkpoint is a run, at {shown[0]}"
        step = self.epoch if self.step is None else self.step
        return "newest" if shown in ([], [step]) else f"step {shown[0]}, not {step}"


def _of_ranks(names: Iterable[str]) -> set[str]:
    """The names of files of tensors; those of ranks have the same here, so that one of them is read."""
    return {re.sub(r"rank_?\d", "rank", name.rpartition("/")[2]) for name in names if not name.endswith(".json")}


def _write(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps({"number": number}))
    else:
        torch.save({"weight": torch.full((2, 3), float(number)), "bias": None}, path)


def _run(
    name: str,
    *templates: str,
    steps: Sequence[int] = (200, 900, 1000),
    says: str = "s",
    beside: dict[str, str | None] | None = None,
) -> RunNames:
    """A run of some steps; an epoch is a hundred of them. `says` is what the names say: s, e, both or nothing."""
    files = tuple(tuple(one.format(s=s, e=s // 100, loss=100 / s) for one in templates) for s in steps)
    step, epoch = steps[-1] if "s" in says else None, steps[-1] // 100 if "e" in says else None
    return RunNames(name, files, step, epoch, beside or {})


def _listed(name: str, *steps: str, step: int | None = None, epoch: int | None = None) -> RunNames:
    return RunNames(name, tuple(tuple(one.split()) for one in steps), step, epoch, {})


_IN_EPOCHS = ((1, 100), (1, 200), (2, 50), (2, 100))
RUNS = (
    # A step or an epoch, by a word.
    _run("step_N.pt", "step_{s}.pt"),
    _run("ckpt_NNNNNNN.pth", "ckpt_{s:07d}.pth"),
    _run("checkpoint-N/", "checkpoint-{s}/model.pt", "checkpoint-{s}/optimizer.pt"),
    _run("epoch=E-step=S.ckpt", "epoch={e}-step={s}.ckpt", says="se"),
    _run("epoch_E_step_S.pt", "epoch_{e}_step_{s}.pt", says="se"),
    _run("epoch_E_step_S.pt within an epoch", "epoch_{e}_step_{s}.pt", steps=(310, 320, 390), says="se"),
    _run("step_S_epoch_E.pt", "step_{s}_epoch_{e}.pt", steps=(310, 320, 390), says="se"),
    _run("epochE-global_stepS/", "epoch{e}-global_step{s}/model.pt", "epoch{e}-global_step{s}/optim.pt", says="se"),
    _run("eE.pt", "e{e}.pt", says="e"),
    _run("epE.pt", "ep{e}.pt", says="e"),
    _run("jepa-epE.pth.tar", "jepa-ep{e}.pth.tar", says="e"),
    _run("Eepoch.pth", "{e}epoch.pth", says="e"),
    _run("netE_epoch_E.pth, two networks", "netG_epoch_{e}.pth", "netD_epoch_{e}.pth", says="e"),
    _run("iter_N/", "iter_{s}/model.pt", "iter_{s}/rng.pt"),
    _run("iter-NNNNNN-ckpt.pth", "iter-{s:06d}-ckpt.pth"),
    _run("step_N_ckp/", "step_{s}_ckp/model.pt", "step_{s}_ckp/loader.pt"),
    _run("it_N.pt", "it_{s}.pt"),
    _run("itN.pt", "it{s}.pt"),
    _run("update_N.pt", "update_{s}.pt"),
    _run("model_N_steps.pt", "model_{s}_steps.pt"),
    _run("batch_N.pt", "batch_{s}.pt"),
    _run("round_E.pt", "round_{e}.pt", says="e"),
    _run("checkpoint_E_S.pt", "checkpoint_{e}_{s}.pt", says="s"),
    _run("checkpoint_E_S/", "checkpoint_{e}_{s}/a.pt", "checkpoint_{e}_{s}/b.pt", steps=(310, 320, 400), says="s"),
    _run("checkpoint_E_S.pt within an epoch", "checkpoint_{e}_{s}.pt", steps=(310, 320, 390), says="se"),
    _run("E-S.ckpt", "{e}-{s}.ckpt", says="se"),
    _listed("epoch_E_iter_S.pt, counted anew in each epoch", *(f"epoch_{e}_iter_{i}.pt" for e, i in _IN_EPOCHS)),
    _listed("eE_bS.th, counted anew in each epoch", *(f"w_e{e}_b{i}.th t_e{e}_b{i}.th" for e, i in _IN_EPOCHS)),
    _run("model_state_eE_bS.th", "model_state_e{e}_b{s}.th", "training_state_e{e}_b{s}.th", says="se"),
    _run("date-backup-S-E-0/", "date-backup-{s}-{e}-0/model.pt", "date-backup-{s}-{e}-0/opt.pt", says="se"),
    # A number alone.
    _run("N.pt", "{s}.pt"),
    _run("NNNNNN.tar", "{s:06d}.tar"),
    _run("NNNNNN/", "{s:06d}/model.pt", "{s:06d}/optimizer.pt"),
    _run("N/", "{s}/model.pt", "{s}/optimizer.pt", steps=(100, 200, 300)),
    _run("step_N/ and step_N_ema/", "step_{s}/a.pt", "step_{s}/b.pt", beside={"step_1000_ema/a.pt": None}),
    _run("chkpntN.pth", "chkpnt{s}.pth"),
    _run("network-snapshot-NNNNNN.pkl", "network-snapshot-{s:06d}.pkl"),
    _run("G_N.pth D_N.pth", "G_{s}.pth", "D_{s}.pth"),
    _run("g_N do_N without a suffix", "g_{s:08d}", "do_{s:08d}"),
    _run("N_net_G.pth", "{s}_net_G.pth", "{s}_net_D.pth", beside={"latest_net_G.pth": None, "latest_net_D.pth": None}),
    _run("model_N.pt with settings", "model_{s}.pt", "model_{s}.json"),
    _listed("NNNk.pt", "model_200k.pt", "model_900k.pt", "model_1000k.pt", step=1_000_000),
    _run("modelN, optN and an average", "ema_0.9999_{s:06d}.pt", "model{s:06d}.pt", "opt{s:06d}.pt"),
    _run("folders by a number", "weights-{s}/a.pt", "weights-{s}/b.pt"),
    _run("folders by an epoch and a step", "{e}-{s}/a.pt", "{e}-{s}/b.pt", steps=(310, 320, 390)),
    # Numbers that are not steps.
    _run("a model's size", "resnet50_epoch_{e}.pth", says="e"),
    _run("a model's sizes", "vit_b_16_384_{s}.pth"),
    _run("parameters", "llama-7b-step-{s}/model.pt", "llama-7b-step-{s}/optimizer.pt"),
    _run("a learning rate", "model_lr0.001_step{s}.pt"),
    _run("a learning rate with an exponent", "model_lr_1e-4_{s}.pt"),
    _run("a port", "ckpt_port29500_{s}.pt"),
    _run("an environment and a seed", "TD3_Hopper-v2_0_{s}.pt"),
    _run("a seed behind the step", "ckpt_{s}_seed_4242.pt"),
    _run("a seed before a word", "run_1_seed_4242_ckpt_{s}.pt"),
    _run("a size of batches", "bs4096_step_{s}.pt"),
    _run("a size of batches behind it", "step_{s}_bs4096.pt"),
    _run("a loss", "weights.{e:02d}-{loss:.4f}.pt", says="e"),
    _run("a loss by a word", "epoch={e}-val_loss={loss:.2f}.ckpt", says="e", beside={"last.ckpt": None}),
    _run("an accuracy", "model_{e}_accuracy={loss:.4f}.pt", says="e"),
    _run("a size of pictures", "mp3d_512_{s}.pt"),
    _run("a number behind it that is larger", "model_{e}_20480.pt", says="e"),
    _run("optimizers of steps", "model_{s}.pt", "optimizer_{s}.pt"),
    _run("optimizers of epochs", "model_{e}.pt", "optimizer_{e}.pt", steps=(100, 200, 300), says="e"),
    _run("experts of steps", "expert_1_{s}.pt", "expert_2_{s}.pt"),
    _run("ranks", "ckpt_{s}_rank0.pt", "ckpt_{s}_rank1.pt"),
    _run("ranks before it", "rank0_step{s}.pt", "rank1_step{s}.pt"),
    _run("ranks in folders", "step_{s}/rank_0.pt", "step_{s}/rank_1.pt"),
    _run("a version of a save", "epoch={e}-step={s}-v1.ckpt", says="se"),
    # Times.
    _listed("times", "2024-05-01_12-30-00/model.pt", "2024-05-02_08-00-00/model.pt", "2024-10-01_07-00-00/model.pt"),
    _listed("times of files", "2024-05-01_12-30-00.pt", "2024-05-02_08-00-00.pt", "2024-10-01_07-00-00.pt"),
    _listed("times without hyphens", "m_20240501_123000.pt", "m_20240502_080000.pt", "m_20241001_070000.pt"),
    _listed("CKPT and times", "CKPT+2026-01-02+03-04-01+00/brain.pt", "CKPT+2026-01-02+03-14-01+00/brain.pt"),
    _listed("a day before the step", "2024-05-01_step_900.pt", "2024-05-02_step_1000.pt", step=1000),
    _listed("one day before the step", "2024-05-01_step_900.pt", "2024-05-01_step_1000.pt", step=1000),
    _listed("one day before the number", "a_2024-05-01_900.pt", "a_2024-05-01_1000.pt", step=1000),
    _listed("seconds since 1970", "ckpt_1714561800.pt", "ckpt_1714569999.pt", "ckpt_1714570001.pt"),
    # Copies and pointers.
    _run("a copy of the best", "step_{s}.pt", beside={"best.pt": None}),
    _run("a copy that is the last", "epoch_{e}.pth", says="e", beside={"last.pth": None, "model_best.pth": None}),
    _run("a link", "step_{s}/a.pt", "step_{s}/b.pt", beside={"latest": "->step_1000", "best": "->step_200"}),
    _run("a link to a file", "step_{s}.pt", beside={"last.pt": "->step_1000.pt"}),
    _run("a text", "step_{s}/a.pt", "step_{s}/b.pt", beside={"latest": "step_1000\n"}),
    _run("a text with a path", "model_{s:07d}.pth", beside={"last_checkpoint": "/home/a/model_0001000.pth"}),
    _run("a text in JSON", "step_{s}.pt", beside={"latest.json": '{"step": 1000, "path": "step_1000.pt"}'}),
    RunNames(
        "a text alone says it", (("one/a.pt",), ("two/a.pt",), ("three/a.pt",)), None, None, {"latest": "three\n"}
    ),
    RunNames("a link alone says it", (("a.pt",), ("c.pt",), ("b.pt",)), None, None, {"latest.pt": "->b.pt"}),
    _listed("the best by their steps", "best_model_9_accuracy=0.77.pt", "best_model_12_accuracy=0.81.pt", step=12),
    # One checkpoint, no run.
    _listed("layers", "layer_0.pt layer_1.pt layer_2.pt"),
    _listed("layers from 1", "layer_1.pt layer_2.pt layer_3.pt"),
    _listed("optimizers", "model.pt optimizer_0.pt optimizer_1.pt"),
    _listed("optimizers from 1", "model.pt optimizer_1.pt optimizer_2.pt"),
    _listed("experts", "expert_1/a.pt expert_2/a.pt expert_3/a.pt"),
    _listed("stages", "stage_1.pt stage_2.pt"),
    _listed("critics beside an actor", "actor.pt critic_1.pt critic_2.pt"),
    _listed("networks beside an optimizer", "net_1.pt net_2.pt net_3.pt optimizer.pt"),
    _listed("agents", "agent_1.pt agent_2.pt"),
    _listed("blocks", "block1.pt block2.pt head.pt"),
)
