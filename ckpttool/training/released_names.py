"""Models of transformers whose parameters have other names in memory than in the files of released weights.

    in files     vit.encoder.layer.0.attention.attention.query.weight      as released, and as `save_pretrained` writes
    in memory    vit.layers.0.attention.q_proj.weight                      of transformers 5

A key map of the model's class says how one becomes the other: `models.key_maps`. Whether a checkpoint has the names of
files is told by the names themselves: those that the model lacks have to become fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ckpttool.catalogue.entries import Catalogue, Part, dotted
from ckpttool.errors import UsageError
from ckpttool.layout import select
from ckpttool.layout.key_maps import KeyMap
from ckpttool.layout.optimizer.map_state import apply_to_state
from ckpttool.layout.rename import rename_entries, strip_wrappers
from ckpttool.layout.views import Viewed
from ckpttool.models import key_maps
from ckpttool.training.sharded_values import names_of

SameBytes = Callable[[Any, Any], bool]


def in_memory(
    catalogue: Catalogue, part: Part, model: nn.Module, prefix: str, viewed: Viewed, same: SameBytes
) -> Catalogue | None:
    """Return a model of a checkpoint under the names that it has in memory, with the optimizers there; None where
    names are no other, or nothing says how. `prefix` is removed from the names, and `same` says whether two tensors
    have the same bytes.

    Raises UsageError if the tensors of the checkpoint do not make those of the model.
    """
    chosen = key_map(model)
    if chosen is None or not (lacking := _lacking(model, catalogue, part, prefix)):
        return None
    keymap, config = chosen
    alone = select.select(catalogue, lambda entry: entry.part == part or entry.part.kind == "optimizer")
    alone = rename_entries(alone, strip_wrappers, within_parts=True)
    names = [entry.fqn for entry in alone.entries.values() if entry.part == part]
    facts = key_maps.facts(config, key_maps.head_dim(config))
    own = [*_names(model)]
    # One map is for several classes, of which one has in memory what another has in files.
    of_model = [rule for rule in keymap.rules if any(name.is_one_of(own) for name in rule.sources)]
    for one in (replace(keymap, rules=tuple(of_model)).inverse, keymap):
        begin = (name for rule in one.rules if rule.sources != rule.targets for name in rule.sources)
        if not any(name.is_one_of(names) for name in begin):
            continue
        try:
            mapped = apply_to_state(one, alone, viewed, facts, same).catalogue
        except UsageError as error:
            if one is keymap:
                continue
            error.hint = "`from_pretrained` of transformers says more about incomplete files"
            raise
        if len(_lacking(model, mapped, part, prefix)) < len(lacking):
            return mapped
    return None


def key_map(model: nn.Module) -> tuple[KeyMap, dict[str, Any]] | None:
    """Return the key map of a model's class, from its names in memory to those of files, and the model's config."""
    root: Any = model
    while isinstance(inner := getattr(root, "module", getattr(root, "_orig_mod", None)), nn.Module):
        root = inner
    # FSDP2 makes a class of its own of each.
    kinds = [kind.__name__ for kind in type(root).__mro__ if kind.__module__.startswith("transformers.")]
    config: Any = getattr(root, "config", None)
    if not kinds or not hasattr(config, "to_dict"):
        return None
    data = config.to_dict()
    keymap = next(key_maps.of_config({**data, "architectures": kinds[:1]}), None)
    return None if keymap is None else (keymap, data)


def advice(catalogue: Catalogue, part: Part, model: nn.Module, prefix: str, path: str) -> str | None:
    """Return the command that gives a checkpoint of transformers the names that a model of another library has, if it
    seems to have them; the order of rows is what names do not tell, so that it is for the user to say."""
    keymap = next(key_maps.of_config(catalogue.facts), None) if key_map(model) is None else None
    if keymap is None or not (lacking := _lacking(model, catalogue, part, prefix)):
        return None
    names = [dotted(path[len(part.root) :]) for path, entry in catalogue.entries.items() if entry.part == part]
    changing = [rule for rule in keymap.rules if rule.sources != rule.targets]
    is_released = any(name.is_one_of(names) for rule in changing for name in rule.targets)
    if not is_released or not any(name.is_one_of(lacking) for rule in changing for name in rule.sources):
        return None
    return f"`ckpttool convert {path} DST --map {keymap.name}` gives it the names of transformers 5 in memory"


def _lacking(model: nn.Module, catalogue: Catalogue, part: Part, prefix: str) -> set[str]:
    """Return the names of a model that a checkpoint does not have."""
    depth = len(part.root)
    names = {
        strip_wrappers(dotted(path[depth:]).removeprefix(prefix))
        for path, entry in catalogue.entries.items()
        if entry.part == part
    }
    return {name for name in _names(model) if name not in names}


def _names(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield from names_of(name, parameter)
    yield from map(strip_wrappers, dict(model.named_buffers(remove_duplicate=False)))
