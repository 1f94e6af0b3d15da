"""verl: one torch.save file per rank of FSDP, to read and, of FSDP2, to resume from.

    global_step_20/{actor,critic}/{model,optim,extra_state}_world_size_8_rank_3.pt, fsdp_config.json
    global_step_20/actor/huggingface/, global_step_20/data.pt

        model {name: DTensor}  optim {"state": {0: ...}, ...}  extra_state {"lr_scheduler": ..., "rng": {...}}

Upstream: verl `utils/checkpoint/fsdp_checkpoint_manager.py` and `trainer/ppo/ray_trainer.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.catalogue.entries import Object, Part, Path
from ckpttool.errors import UsageError
from ckpttool.formats import documents
from ckpttool.producers.components import Layout, Pattern, Producer, WritableLayout, match_components
from ckpttool.serialization.directory import Directory

if TYPE_CHECKING:
    from ckpttool.producers.arrange import LayoutBuilder
    from ckpttool.producers.writer import OutputLayout

# Reading --------------------------------------------------------------------------------------------------------------

_OF_WORLD = r"_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt"
_RANK_FILE = rf"(model|optim|extra_state){_OF_WORLD}"
_PATTERNS = (
    Pattern(rf"model{_OF_WORLD}", "model", "rank files"),
    Pattern(rf"optim{_OF_WORLD}", "optimizer", "rank files"),
    Pattern(rf"extra_state{_OF_WORLD}", kind="rank files"),
    Pattern(r"data\.pt", "dataloader"),
    Pattern(r"fsdp_config\.json", kind="ignored"),
)


def _roles(directory: Directory) -> list[str]:
    """Return the folders with files of ranks: the models of a step, or the directory itself, which is ""."""
    if directory.has(_RANK_FILE):
        return [""]
    return [name for name in ("actor", "critic") if f"{name}/" in directory and directory.folder(name).has(_RANK_FILE)]


def _add_roles(directory: Directory, layout: Layout) -> None:
    roles = _roles(directory)
    if roles == [""]:
        _join_optimizer(directory, layout)
        return
    layout.unknown = [name for name in layout.unknown if name[:-1] not in roles]
    beside_roles, layout.components = layout.components, []
    for role in roles:
        folder = directory.folder(role)
        # A single model has the keys of any other checkpoint, without the name of its role.
        root: Path = (role,) if len(roles) > 1 else ()
        inner = match_components(folder, _PATTERNS, ("model", "optimizer"), root)
        _join_optimizer(folder, inner)
        layout.merge(inner, role)
    layout.components += beside_roles


def _join_optimizer(directory: Directory, layout: Layout) -> None:
    """Open model and optimizer as one set: the optimizer of FSDP1 is flat, and needs the model's parameters."""
    _check_world_size(directory, layout)
    sets = [c for c in layout.components if c.kind == "rank files" and c.root[-1:] in (("model",), ("optimizer",))]
    if len(sets) == 2 and sets[0].name.removeprefix("model") == sets[1].name.removeprefix("optim"):
        model, optim = sets
        end, files = model.name.removeprefix("model"), (*model.files, *optim.files)
        joint = replace(model, name=f"{{model,optim}}{end}", files=files, glob=f"[mo][op][dt]*{end}")
        layout.components = [replace(joint, root=model.root[:-1]), *(c for c in layout.components if c not in sets)]


def _check_world_size(directory: Directory, layout: Layout) -> None:
    if directory.leads_out("fsdp_config.json"):
        layout.missing.append("`fsdp_config.json` is a link that leaves the checkpoint")
    configured = directory.facts("fsdp_config.json").get("world_size")
    in_names = {int(m["world"]) for m in directory.matching(_RANK_FILE)}
    sizes = ", ".join(map(str, sorted(in_names)))
    if isinstance(configured, int) and in_names and in_names != {configured}:
        layout.missing.append(f"`fsdp_config.json` has world size {configured}, but the files are of {sizes}")
    elif len(in_names) > 1:
        layout.missing.append(f"files of worlds of {sizes} ranks are in one directory")


# Writing --------------------------------------------------------------------------------------------------------------

_RNG = {"python": "random", "numpy": "numpy", "torch": "cpu"}


def _write(builder: LayoutBuilder) -> OutputLayout:
    """Return a model of FSDP2 in one file per rank; the step is the name of the directory."""
    world_size, name = builder.world_size, builder.name
    if world_size == 1:
        raise UsageError(
            "verl's FSDP2 has DTensors on one rank too, and a world of one is written with plain tensors",
            hint="pass `--to-world 2`, or more",
        )
    folder = "" if (is_role := name in ("actor", "critic")) else "actor/"
    of_rank = f"_world_size_{world_size}_rank_{{rank}}.pt"
    for kind, stem in (("model", "model"), ("optimizer", "optim")):
        builder.add_part(builder.first(kind), f"{folder}{stem}{of_rank}", "rankfiles", (stem,))
    extra = builder.component(f"{folder}extra_state{of_rank}", "rankfiles")
    scheduler = builder.first("scheduler")
    builder.add_part_to(extra, scheduler, ("lr_scheduler",))
    if scheduler is None:
        # verl reads this key; its value may be None.
        builder.add_value(extra, Object(("lr_scheduler",), None, part=Part("scheduler", ("lr_scheduler",))))
    builder.add_generators(_RNG, lambda below: below == ("cuda",), lambda rank: (extra, ("rng", f"rank{rank}")))
    config = {"FSDP_version": 2, "world_size": world_size}
    builder.component(f"{folder}fsdp_config.json", documents.JSON, ("fsdp_config",), values=config)
    for part in [*builder.stateful_loaders()][:1] if not is_role else ():
        builder.add_part(part, "data.pt", "torch", ("dataloader",))
    step = builder.step()
    if not is_role and step is not None:
        if name == f"global_step_{step}":
            builder.fold_step(step)
        else:
            builder.notes.append(f"verl reads the step from the directory's name, which would be `global_step_{step}`")
    for entry in list(builder.remaining()):
        if entry.part.kind == "progress":
            builder.lose(entry, "verl reads the step from the directory's name, `global_step_N`")
        elif is_role and entry.part.kind == "dataloader":
            builder.lose(entry, f"`data.pt` is beside `{name}/`, in `global_step_N`")
    return builder.finish("verl stores no such value")


_FSDP2 = WritableLayout("verl", "id", _write, chunked=True, even=True, ordered=True, tensor_class="dtensor:cuda:fsdp")
VERL = Producer("verl", (), _PATTERNS, applies=lambda one: bool(_roles(one)), adjust=_add_roles, writes=(_FSDP2,))
