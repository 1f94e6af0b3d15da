"""What torchtitan and verl resume from.

    torchtitan   step-3/{.metadata, __R_0.distcp}      keys of the model at the root, beside them
        optimizer.state.<name>.exp_avg  optimizer.param_groups.<name>.lr  lr_scheduler.*
        train_state.{step, ntokens_seen}  dataloader.{dp_rank_R, world_size}
    verl         global_step_3/actor/{model,optim,extra_state}_world_size_W_rank_R.pt, fsdp_config.json; data.pt
        model {name: DTensor}  optim {"state": {0: ...}, ...}  extra_state {"lr_scheduler": ..., "rng": {...}}

Upstream: torchtitan `components/checkpoint.py` and `trainer.py`; verl `utils/checkpoint/fsdp_checkpoint_manager.py` and
`trainer/ppo/ray_trainer.py`, FSDP2.
"""

from __future__ import annotations

import re

from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Object, Part
from ckpttool.errors import UsageError
from ckpttool.formats import named
from ckpttool.producers.arrange import Arranging
from ckpttool.producers.names import step_in
from ckpttool.producers.writer import Arranged, Component, Constant

_TORCH, _DCP, _RANKS = named("torch"), named("dcp"), named("rankfiles")
_VERL_RNG = {"python": "random", "numpy": "numpy", "torch": "cpu"}


def torchtitan(a: Arranging) -> Arranged:
    """One DCP directory of everything."""
    model, optimizer, scheduler = a.one("model"), a.one("optimizer"), a.one("scheduler")
    made = _train_state(a, training=optimizer is not None)
    piece = a.piece(Component("", _DCP, made=made))
    for part, root in ((model, ()), (optimizer, ("optimizer",)), (scheduler, ("lr_scheduler",))):
        if part is not None:
            a.take(part, piece, root)
    for entry in list(a.left()):
        titans = entry.part.root == ("dataloader",) and re.fullmatch(r"dp_rank_\d+|world_size", str(entry.path[-1]))
        if titans or entry.path[:1] == ("train_state",):
            a.put(entry, piece, entry.path)
    if optimizer is not None and not any(e.part.kind == "dataloader" for e in a.laid.entries.values()):
        a.notes.append(
            'no state of torchtitan\'s data loader: set `exclude_from_loading = ["dataloader"]` of its checkpoint'
        )
    return a.done("torchtitan keeps no such value")


def _train_state(a: Arranging, *, training: bool) -> list[Constant]:
    """The step and the tokens seen, as tensors. Its own are taken, of another's the step."""
    own = any(path[:2] == ("train_state", "step") for path in a.laid.entries)
    step = a.step()
    step = step_in(a.wanted.name) if step is None else step
    if training and step is None:
        raise UsageError(
            "torchtitan goes on from the step in `train_state`, and nothing here says which it is",
            hint="call the destination `step-N`",
        )
    if training and a.wanted.name != f"step-{step}":
        a.notes.append(f"torchtitan finds a checkpoint by its name, which would be `step-{step}`")
    if own or not training or step is None:
        return []
    a.fold_step(step)
    a.notes.append(f"`train_state` is made with step {step} and no tokens seen")
    made = [
        Constant(("train_state", "step"), DTYPES["int32"], step.to_bytes(4, "little")),
        Constant(("train_state", "ntokens_seen"), DTYPES["int64"], bytes(8)),
    ]
    return [constant for constant in made if constant.path not in a.laid.entries]


def verl(a: Arranging) -> Arranged:
    """A model of FSDP2 in files of each rank; the step is the name of the directory."""
    world, name = a.wanted.world, a.wanted.name
    if world == 1:
        raise UsageError(
            "verl's FSDP2 has DTensors on one rank too, and a world of one is written with plain tensors",
            hint="pass `--to-world 2`, or more",
        )
    alone = name in ("actor", "critic")
    folder = "" if alone else "actor/"
    of_rank = f"_world_size_{world}_rank_{{rank}}.pt"
    for kind, stem in (("model", "model"), ("optimizer", "optim")):
        part = a.one(kind)
        if part is not None:
            a.take(part, a.piece(Component(f"{folder}{stem}{of_rank}", _RANKS, (stem,))), (stem,))
    extra = a.piece(Component(f"{folder}extra_state{of_rank}", _RANKS))
    scheduler = a.one("scheduler")
    if scheduler is not None:
        a.take(scheduler, extra, ("lr_scheduler",))
    else:
        # What it asks for there may be None, but not missing.
        a.add(extra, Object(("lr_scheduler",), None, part=Part("scheduler", ("lr_scheduler",))))
    a.generators(
        _VERL_RNG, lambda inside: len(inside) == 1 and inside[0] == "cuda", lambda rank: (extra, ("rng", f"rank{rank}"))
    )
    a.piece(
        Component(f"{folder}fsdp_config.json", None, ("fsdp_config",), plain={"FSDP_version": 2, "world_size": world})
    )
    for part in [*a.stateful_loaders()][:1] if not alone else ():
        a.take(part, a.piece(Component("data.pt", _TORCH, ("dataloader",))), ("dataloader",))
    step = a.step()
    if not alone and step is not None:
        if name == f"global_step_{step}":
            a.fold_step(step)
        else:
            a.notes.append(f"verl knows the step by the name of the directory, which would be `global_step_{step}`")
    for entry in list(a.left()):
        if entry.part.kind == "progress":
            a.lose(entry, "verl knows the step by the name of the directory, `global_step_N`")
        elif alone and entry.part.kind == "dataloader":
            a.lose(entry, f"`data.pt` lies beside `{name}/`, in `global_step_N`")
    return a.done("verl keeps no such value")
