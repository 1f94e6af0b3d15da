"""Frameworks that leave one torch.save file for each rank.

    verl      global_step_20/{actor,critic}/{model,optim,extra_state}_world_size_8_rank_3.pt, fsdp_config.json,
              global_step_20/actor/huggingface/, global_step_20/data.pt
    DINOv2    model_0009999.rank_3.pth ..             several steps in one directory; LOCAL flat parameters

Upstream: verl `utils/checkpoint/fsdp_checkpoint_manager.py` and `trainer/ppo/ray_trainer.py`, DINOv2
`fsdp/__init__.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckpttool.catalogue.entries import Path
from ckpttool.producers.directory import Listing
from ckpttool.producers.pieces import ASSET, KNOWN, SET, Layout, Piece, Producer, lay_out

_OF_WORLD = r"_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt"
_VERL = (
    Piece(rf"model{_OF_WORLD}", "model", SET),
    Piece(rf"optim{_OF_WORLD}", "optimizer", SET),
    Piece(rf"extra_state{_OF_WORLD}", how=SET),
    Piece(r"data\.pt", "dataloader"),
    Piece(r"huggingface/|lora_adapter/|lora_train_meta\.json", how=ASSET),
    Piece(r"fsdp_config\.json", how=KNOWN),
)
_ROLE_FILE = rf"(model|optim|extra_state){_OF_WORLD}"
DINO_FILE = r"(?P<name>.+)\.rank_(?P<rank>\d+)\.pth"
_DINO = (
    Piece(DINO_FILE, how=SET),
    Piece(r"last_checkpoint\.rank_\d+", how=KNOWN),
)


def _roles(listing: Listing) -> list[str]:
    """The models of a step of verl, each a directory of its own."""
    if listing.has(_ROLE_FILE):
        return []
    return [name for name in ("actor", "critic") if f"{name}/" in listing and listing.folder(name).has(_ROLE_FILE)]


def _is_verl(listing: Listing) -> bool:
    return listing.has(_ROLE_FILE) or bool(_roles(listing))


def _verl(listing: Listing) -> Layout:
    roles = _roles(listing)
    made = lay_out(listing, (*(Piece(f"{role}/", how=KNOWN) for role in roles), *_VERL))
    if not roles:
        return _joint(listing, made)
    outer = made.mounts
    made.mounts = []
    for role in roles:
        inner = listing.folder(role)
        # One model needs no name of its own; the keys are then those of any other checkpoint.
        root: Path = (role,) if len(roles) > 1 else ()
        laid = lay_out(inner, _VERL, ("model", "optimizer"), root)
        made.merge(_joint(inner, laid), role)
    made.mounts += outer
    return made


def _joint(listing: Listing, made: Layout) -> Layout:
    """Model and optimizer as one set: FSDP1's optimizer is flat, and only the model says what its pieces are."""
    _check_config(listing, made)
    sets = [m for m in made.mounts if m.how == SET and m.root[-1:] in (("model",), ("optimizer",))]
    if len(sets) == 2 and sets[0].name.removeprefix("model") == sets[1].name.removeprefix("optim"):
        model, optim = sets
        end = model.name.removeprefix("model")
        joint = replace(
            model, name=f"{{model,optim}}{end}", root=model.root[:-1], names=(*model.names, *optim.names),
            glob=f"[mo][op][dt]*{end}",
        )  # fmt: skip
        made.mounts = [joint, *(m for m in made.mounts if m not in sets)]
    return made


def _check_config(listing: Listing, made: Layout) -> None:
    said = listing.facts("fsdp_config.json").get("world_size")
    worlds = {int(m["world"]) for m in listing.matching(_ROLE_FILE)}
    if isinstance(said, int) and worlds and worlds != {said}:
        found = ", ".join(map(str, sorted(worlds)))
        made.missing.append(f"`fsdp_config.json` says a world of {said} ranks, but the files are of {found}")
    elif len(worlds) > 1:
        found = ", ".join(map(str, sorted(worlds)))
        made.missing.append(f"files of worlds of {found} ranks lie in one directory")


def dino_names(listing: Listing) -> dict[str, list[str]]:
    """The files of each checkpoint in a directory of DINOv2: `{"model_0009999": ["model_0009999.rank_0.pth", ...]}`."""
    found: dict[str, list[str]] = {}
    for match in listing.matching(DINO_FILE):
        found.setdefault(match["name"], []).append(match.string)
    return found


def _dino(listing: Listing) -> Layout:
    return lay_out(listing, _DINO)


def step_of_dino(name: str) -> int | None:
    """`model_0009999` -> 9999; None for a name without a number. Pure."""
    found = re.search(r"(\d+)$", name)
    return int(found[1]) if found else None


PRODUCERS = (
    Producer("verl", "a `global_step_N` of verl, or a model in it", _is_verl, _verl),
    Producer(
        "DINOv2", "files `<name>.rank_R.pth` of DINOv2",
        lambda listing: len(dino_names(listing)) == 1, _dino,
    ),
)  # fmt: skip
