"""Renames entries. Names in the optimizer follow the model's: renaming a parameter renames its optimizer state and its
mention in `param_groups`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Object, Part, Path, dotted
from ckpttool.catalogue.warning import Warning
from ckpttool.layout.move import close_gaps, move, moved_root, rebuilt
from ckpttool.layout.optimizer.parse import parse_key
from ckpttool.layout.select import models

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

# What only wrappers are called, and `module` where nothing but wrappers stands before it.
_SURE_WRAPPERS = re.compile(
    r"^(?:(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+"
    r"|(?<=\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)


def rename_entries(catalogue: Catalogue, new_name: Callable[[str], str], *, within_parts: bool = False) -> Catalogue:
    """Return the catalogue with every entry under its new name. Raises UsageError if two would have the same.

    `new_name` is asked for the dotted full name; or, with `within_parts`, for the name below the part's root (of
    models only). What the model's parameters are called is then changed wherever the optimizer mentions them.
    """
    moved: dict[Path, Path] = {}
    for path, entry in catalogue.entries.items():
        if entry.embedded or (within_parts and entry.part.kind != "model"):
            continue
        depth = len(entry.part.root) if within_parts else 0
        moved[path] = (*path[:depth], *_repath(path[depth:], new_name(dotted(path[depth:]))))
    return close_gaps(move(_follow_in_optimizer(catalogue, _new_parameters(catalogue, moved), moved), moved))


def _new_parameters(catalogue: Catalogue, moved: dict[Path, Path]) -> dict[str, str]:
    """Return what the model's parameters were called and are called now, each below the root of its part.

    Where several models have a name, the optimizer follows the first in `models`, even if that one keeps it.
    """
    parameters: dict[str, str] = {}
    for root, entries in models(catalogue):
        new_root = moved_root(root, moved)
        for entry in entries:
            new = moved.get(entry.path, entry.path)
            # A rule may take some of the part away from under its root: those go by their full names.
            depth = len(root) if new == entry.path else len(new_root) if new[: len(new_root)] == new_root else 0
            parameters.setdefault(entry.fqn, dotted(new[depth:]))
    return {name: new for name, new in parameters.items() if name != new}


def _repath(path: Path, name: str) -> Path:
    """Return the path of a new dotted name that keeps the keys of `path` at both ends where they are still the same."""
    if dotted(path) == name:
        return path
    head = 0
    while head < len(path) - 1 and name.startswith(dotted(path[: head + 1]) + "."):
        head += 1
    rest = name[len(dotted(path[:head])) + 1 :] if head else name
    tail = len(path)
    while tail > head + 1 and rest.endswith("." + dotted(path[tail - 1 :])):
        tail -= 1
    middle = rest[: len(rest) - len(dotted(path[tail:])) - 1] if tail < len(path) else rest
    return (*path[:head], middle, *path[tail:])


def _follow_in_optimizer(catalogue: Catalogue, parameters: dict[str, str], moved: dict[Path, Path]) -> Catalogue:
    """Return the catalogue with the new names in lists of parameters, and add the new paths of state to `moved`."""

    def renamed(value: Any) -> Any:
        return [parameters.get(v, v) if isinstance(v, str) else v for v in value] if isinstance(value, list) else value

    if not parameters:
        return catalogue
    entries = dict(catalogue.entries)
    for path, entry in catalogue.entries.items():
        if entry.part.kind != "optimizer" or entry.embedded:
            continue
        new = moved.get(path, path)
        key = parse_key(new, max(len(entry.part.root) + len(new) - len(path), 0))
        if key is not None and key.parameter in parameters:
            moved[path] = key._replace(owner=parameters[key.parameter]).path
        if isinstance(entry, Object) and str(path[-1]).rpartition(".")[2] in ("params", "param_names"):
            entries[path] = entry.at(path, change=renamed)
    return rebuilt(catalogue, entries.values(), catalogue.containers)


def strip_wrappers(name: str) -> str:
    """Return `layers.0.w` for `module._orig_mod.layers.0._checkpoint_wrapped_module.w`."""
    return _WRAPPERS.sub("", name)


def strip_sure_wrappers(name: str) -> str:
    """Return `layers.0.module.w` for `module.layers.0._orig_mod.module.w`, of a model with a `module` of its own."""
    return _SURE_WRAPPERS.sub("", name)


def rooted(catalogue: Catalogue) -> Catalogue:
    """Return a model with the keys around it that it had before it was written in a format without them, the fact
    `root`, and a warning that says so."""
    root = catalogue.facts.get("root", ())
    if not root or any(entry.part.root for entry in catalogue.entries.values()):
        return catalogue
    result = move(catalogue, {path: (*root, *path) for path in catalogue.entries})
    result.files = catalogue.files
    text = f"the names are below `{dotted(root)}` again, as before they were written as safetensors"
    result.warnings = [*result.warnings, Warning("names", text)]
    for entry in result.entries.values():
        entry.part = Part(entry.part.kind, root)
    return result


def without_root(catalogue: Catalogue, part: Part) -> Catalogue:
    """Return one part alone, its root key off every name: `model.w` -> `w`. A part that is one value, such as `step`,
    keeps its key: without it nothing would be left of the name."""
    if not part.root or part.root in catalogue.entries:
        return catalogue
    depth = len(part.root)
    moved = {path: path[depth:] for path in catalogue.entries if path[:depth] == part.root}
    result = move(catalogue, moved)
    result.containers = {p[depth:]: c for p, c in catalogue.containers.items() if p[:depth] == part.root}
    for entry in result.entries.values():
        entry.part = Part(part.kind, ())
    return result
