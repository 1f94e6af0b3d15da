"""Classifies keys into parts: model, optimizer, scheduler, rng, dataloader, scaler, progress, other.

By the names that training code uses, and by structure where a name says nothing: a dict with `state` and
`param_groups` is an optimizer whatever it is called. A part is found at any depth (`app.model`, `app.optim`); tensors
at the root beside known keys are the model (torchtitan). A value that every rank has under one name has the key of its
rank behind the key of its part: what rank 3 saved at `rng.torch` is `rng.rank3.torch` in the catalogue.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ckpttool.catalogue.entries import KINDS, OTHER, Catalogue, Object, Part, Path, Tensor, dotted
from ckpttool.errors import UsageError
from ckpttool.text import meant

_NAMES = (
    ("optimizer", r"(.*_)?(optim|optimizer|optimizers|opt)(_state(s|_dict)?)?(_\d+)?|optimizer_\w+|optim_\w+"),
    ("scheduler", r"(.*_)?(lr_)?schedulers?(_state(_dict)?)?|lr_scheduler\w*|sched|opt_param_scheduler"),
    ("rng", r"(.*_)?rng(_state(s|_dict)?)?|random_states?|rng_\w+|(torch|cuda|numpy|python)_rng\w*"),
    ("dataloader", r"(train_|val_)?(data_?loaders?|dl|samplers?|dataset)(_state(_dict)?)?|data_iter\w*"),
    ("scaler", r"(grad_|loss_)?scaler(_state(_dict)?)?"),
    (
        "progress",
        r"(global_|current_|train_|total_)?(step|steps|epoch|epochs|iteration|iter|iter_num|num_steps)"
        r"|progress|train_state|trainer_state|(num_)?tokens(_seen)?|consumed_\w+|best_\w+|loops",
    ),
    ("model", r"(.*_)?(model|models|network|net|module|ema|state_dict|model_state(_dict)?|params|weights)(_\d+)?"),
)
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _NAMES)
_ANY_NAME = re.compile("|".join(f"(?:{pattern})" for _, pattern in _NAMES), re.IGNORECASE)
_COUNTER = re.compile(r"(global_|current_|total_)?(step|epoch|iteration)s?", re.IGNORECASE)
_DEPTH = 4

PER_RANK = ("rng", "dataloader")
"""The kinds of which every rank has values of its own."""
# Keys of Megatron's torch_dist, which are whole names at the root: `optimizer.state.exp_avg.decoder.layers..`.
_WHOLE_NAMES = (
    ("optimizer", re.compile(r"(chained_\d+\.)?optimizer\.(state|distributed|param_to_group_meta)\..+")),
    ("rng", re.compile(r"rng_state/shard_.+")),
)
_RANK_KEY = re.compile(r"(?:dp_)?rank_?(\d+)")


def kind_of_key(key: object) -> str | None:
    """Return the kind that a key names, `optim_state_dict` -> `optimizer`; None for any other key."""
    if not isinstance(key, str):
        return None
    # What is before a dot can only be the `.*` of a pattern: of 100,000 names with few last keys few are looked at.
    above, dot, last = key.rpartition(".")
    return _kind_of_name(dot + last if "\n" not in above else key)


@lru_cache(4096)
def _kind_of_name(key: str) -> str | None:
    if not _ANY_NAME.fullmatch(key):  # as most names, of which there may be 200,000
        return None
    return next(kind for kind, pattern in _PATTERNS if pattern.fullmatch(key))


@dataclass(slots=True)
class _Node:
    children: dict[Any, _Node] = field(default_factory=dict)
    entry: Tensor | Object | None = None


def assign(catalogue: Catalogue) -> None:
    """Set `part` of every entry."""
    root = _Node()
    for path, entry in catalogue.entries.items():
        node = root
        for key in path:
            node = node.children.get(key) or node.children.setdefault(key, _Node())
        node.entry = entry
    for node, part in _parts_below(root, (), 0):
        for entry in _entries(node):
            entry.part = part
    for key, node in root.children.items():
        kind = _kind_of_whole_name(key)
        if kind is not None:
            for entry in _entries(node):
                entry.part = Part(kind)


def _kind_of_whole_name(key: object) -> str | None:
    if not isinstance(key, str) or ("." not in key and "/" not in key):
        return None
    return next((kind for kind, pattern in _WHOLE_NAMES if pattern.fullmatch(key)), None)


def _entries(node: _Node) -> Iterator[Tensor | Object]:
    todo = [node]
    while todo:
        node = todo.pop()
        if node.entry is not None:
            yield node.entry
        todo.extend(node.children.values())


def _has_tensor(node: _Node) -> bool:
    return any(isinstance(entry, Tensor) for entry in _entries(node))


def _shape_of(node: _Node) -> str | None:
    """Return the kind that a dict's own keys give away."""
    keys = node.children.keys()
    if {"state", "param_groups"} <= keys:
        return "optimizer"
    if keys and all(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in keys):
        # Flattened, as `flatten_optimizer_state_dict=True` makes it.
        return "optimizer" if any(key.startswith("param_groups.") for key in keys) else None
    if "last_epoch" in keys and ("_step_count" in keys or "base_lrs" in keys):
        return "scheduler"
    if {"scale", "growth_factor"} <= keys:
        return "scaler"
    return None


def _parts_below(node: _Node, path: Path, depth: int) -> Iterator[tuple[_Node, Part]]:
    """Yield the roots of the parts at and below `node`; a later one overrules what an earlier one marked."""
    kinds = {
        key: (_shape_of(child) if child.children else None) or kind_of_key(key) for key, child in node.children.items()
    }
    shape = _shape_of(node)
    if shape is not None:
        yield node, Part(shape, path)
        return
    telling = {key for key, kind in kinds.items() if kind and _tells(kind, node.children[key])}
    if all(isinstance(node.children[key].entry, Tensor) for key in telling):
        # A state dict whose buffer is called `tokens_seen` is a state dict.
        telling = set()
    deeper = {
        key
        for key, child in node.children.items()
        if key not in telling and depth < _DEPTH and child.children and _has_parts(child, depth + 1)
    }
    if not telling and not deeper:
        yield node, Part("model" if _has_tensor(node) else "other", path)
        return
    yield node, OTHER._replace(root=path)
    has_model = any(kinds[key] == "model" for key in telling)
    for key, child in node.children.items():
        below = (*path, key)
        kind = kinds[key] if key in telling else None
        if kind is not None:
            yield child, Part(kind, below)
        elif key in deeper:
            yield from _parts_below(child, below, depth + 1)
        elif not has_model and (isinstance(child.entry, Tensor) or (_has_tensor(child) and not deeper)):
            # Tensors beside the optimizer and no model of that name: they are the model (torchtitan).
            yield child, Part("model", path)


def _tells(kind: str, child: _Node) -> bool:
    """Return whether a key of a known name is a part here. A module called `net` or `module` is none unless it holds
    tensors below it, and a tensor called `scaler` in a model is no grad scaler."""
    if kind == "model":
        return bool(child.children) and _has_tensor(child)
    if kind in ("optimizer", "scheduler", "scaler"):
        return bool(child.children) or isinstance(child.entry, Object)
    if kind == "progress" and isinstance(child.entry, Tensor):
        # Beside the parameters of torchtitan, a tensor `tokens_seen` is a buffer of the model like any other.
        return bool(_COUNTER.fullmatch(str(child.entry.path[-1])))
    return True


def _has_parts(node: _Node, depth: int) -> bool:
    """Return whether this dict divides into parts of its own, as `{"app": {"model": ..., "optim": ...}}` does."""
    dicts = {k: c for k, c in node.children.items() if c.children}
    kinds = {_shape_of(c) or kind_of_key(k) for k, c in dicts.items()}
    if {"model", "optimizer"} <= kinds or _shape_of(node) is not None:
        return True
    return depth < _DEPTH and len(node.children) <= 16 and any(_has_parts(c, depth + 1) for c in dicts.values())


def parts(catalogue: Catalogue) -> list[Part]:
    """Return the parts in order of appearance, kinds in the order of `KINDS`."""
    seen = dict.fromkeys(entry.part for entry in catalogue.entries.values())
    return sorted(seen, key=lambda part: KINDS.index(part.kind))


def stop_at_absent(catalogue: Catalogue, only: Sequence[str]) -> None:
    """Raise the error of a part that could not be opened, unless `only` selects others."""
    for fault in catalogue.faults:
        root = fault.facts.get("absent")
        if root is not None and (not only or {root, root.partition(".")[0], kind_of_key(root)} & {*only}):
            raise fault


def stop_at_absent_below(catalogue: Catalogue, root: str) -> None:
    """Raise the error of a part that could not be opened, if it is what the name `root` stands for, around it, or below
    it; "" is the whole checkpoint."""
    for fault in catalogue.faults:
        absent = fault.facts.get("absent")
        if absent is not None and (not root or f"{absent}.".startswith(f"{root}.") or root.startswith(f"{absent}.")):
            raise fault


def matcher(names: Iterable[str], catalogue: Catalogue, other: Catalogue | None = None) -> Callable[[Part], bool]:
    """Return a predicate for the parts named on the command line: by kind (`model`) or by root key (`ema`). Raises
    UsageError for a name that is not a part of the catalogue, nor of the other, if there is one."""
    present, elsewhere = parts(catalogue), parts(other) if other else []
    chosen: set[Part] = set()
    for name in names:
        # A root key is the more exact name: `--only model` with `model` and `ema` there means `model`.
        matches = [p for p in present if dotted(p.root) == name] or [p for p in present if p.kind == name]
        if not matches and not any(name in (dotted(p.root), p.kind) for p in elsewhere):
            labels = [p.kind if not p.root else dotted(p.root) for p in present]
            known = list(dict.fromkeys([*labels, *(p.kind for p in present)]))
            hint = f"the parts are {', '.join(f'`{n}`' for n in labels)}"
            raise UsageError(f"there is no part `{name}`", hint=meant(name, known, hint))
        chosen.update(matches)
    return chosen.__contains__


# Values of one rank ---------------------------------------------------------------------------------------------------


def rank_key(rank: int) -> str:
    """Return the key of a rank: `rank3`."""
    return f"rank{rank}"


def with_rank(path: Path, rank: int) -> Path:
    """Return the path in the catalogue of the value that `rank` has at `path`: the key of the rank stands behind the
    last key of a kind in `PER_RANK`, else at the end."""
    depth = next((i for i in range(len(path), 0, -1) if kind_of_key(path[i - 1]) in PER_RANK), len(path))
    return (*path[:depth], rank_key(rank), *path[depth:])


def find_rank(path: Path) -> tuple[int, int] | None:
    """Return the depth and the number of the rank's key in a path: `("rng", "rank3", "torch")` is `(1, 3)`."""
    for depth, key in enumerate(path):
        match = _RANK_KEY.fullmatch(key) if isinstance(key, str) else None
        if match is not None:
            return depth, int(match[1])
    return None


def without_rank(path: Path) -> Path:
    """Return the path that the value has in the file of its own rank."""
    match = find_rank(path)
    return path if match is None else (*path[: match[0]], *path[match[0] + 1 :])
