"""Selects, renames and casts the entries of a catalogue. Pure; nothing is read.

Each step returns a new catalogue whose tensors know their `origin` in the source. Names in the optimizer follow the
model's: renaming a parameter renames its optimizer state and its mention in `param_groups`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from ckpttool.catalogue.aliases import find_aliases, one_moment_for_two
from ckpttool.catalogue.dtypes import ALIASES, DTYPES, Dtype
from ckpttool.catalogue.entries import Catalogue, Container, Entry, Object, Part, Path, Tensor, dotted
from ckpttool.catalogue.patterns import any_of, compile_pattern, rule
from ckpttool.catalogue.values import Link, Stub
from ckpttool.errors import UsageError
from ckpttool.layout.optimizer.keys import parse_key
from ckpttool.text import meant

WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def start(source: Catalogue) -> Catalogue:
    """Return a catalogue with all entries of the source, for the functions below. Pure."""
    result = Catalogue(source.format, [], {}, dict(source.containers), dict(source.facts), [])
    aliases = find_aliases(source.tensors)
    for entry in source.entries.values():
        result.add(again(entry, alias=aliases.get(entry.path)) if isinstance(entry, Tensor) else entry)
    result.warnings += one_moment_for_two(source, aliases)
    return result


def again(tensor: Tensor, **changes: Any) -> Tensor:
    """Return a copy of a tensor with other attributes and its origin. Pure."""
    # `dataclasses.replace` takes as long again, and a large model has every tensor changed several times.
    changed = Tensor(
        tensor.path,
        tensor.dtype,
        tensor.shape,
        tensor.chunks,
        tensor.part,
        tensor.embedded,
        tensor.origin or tensor,
        tensor.alias,
    )
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def rebuilt(catalogue: Catalogue, entries: Iterable[Entry], containers: dict[Path, Container]) -> Catalogue:
    """Return a copy of a catalogue with other entries and containers. Pure."""
    result = Catalogue(catalogue.format, [], {}, containers, catalogue.facts, catalogue.warnings)
    for entry in entries:
        result.entries[entry.path] = entry
    return result


def select(catalogue: Catalogue, keep: Callable[[Entry], bool]) -> Catalogue:
    """Return the entries for which `keep` is true, and the tensors embedded in them. Pure.

    A tied tensor whose first name goes keeps its bytes under the next one; what follows in a list moves up.
    """
    owners = _owners(catalogue)
    kept = [e for e in catalogue.entries.values() if keep(catalogue.entries[owners[e.path]] if e.path in owners else e)]
    names = {e.path for e in kept}
    heirs: dict[Path, Path] = {}
    entries: list[Entry] = []
    for entry in kept:
        if isinstance(entry, Tensor) and entry.alias is not None and entry.alias not in names:
            heir = heirs.setdefault(entry.alias, entry.path)
            entry = again(entry, alias=None if heir == entry.path else heir)
        entries.append(entry)
    containers = {p: c for p, c in catalogue.containers.items() if not p or any(n[: len(p)] == p for n in names)}
    return _closed_up(rebuilt(catalogue, entries, containers))


def _closed_up(catalogue: Catalogue) -> Catalogue:
    """What is left of each list under the indexes that it has in a list without gaps, as it will be written."""
    places: dict[Path, dict[Hashable, int]] = {p: {} for p, c in catalogue.containers.items() if c.kind == "list"}
    moved: dict[Path, Path] = {}
    for path, entry in catalogue.entries.items() if places else ():
        if isinstance(entry, Tensor) and entry.embedded:
            continue
        above = [places.get(path[:depth]) for depth in range(len(path))]
        moved[path] = tuple(
            key if there is None else there.setdefault(key, len(there)) for key, there in zip(path, above, strict=True)
        )
    return move(catalogue, moved) if any(new != path for path, new in moved.items()) else catalogue


def _owners(catalogue: Catalogue) -> dict[Path, Path]:
    """Of each embedded tensor, the object that links to it: the entry that its path begins with."""
    owners: dict[Path, Path] = {}
    for tensor in catalogue.tensors:
        if tensor.embedded:
            prefixes = (tensor.path[:depth] for depth in range(len(tensor.path)))
            owners[tensor.path] = next(p for p in prefixes if isinstance(catalogue.entries.get(p), Object))
    return owners


def matching(tensors: Sequence[str], exclude: Sequence[str]) -> Callable[[Entry], bool]:
    """For `select`: tensors that match one of `tensors` (all, when there is none; objects stay) and nothing that
    matches one of `exclude`."""
    included, excluded = any_of(tensors), any_of(exclude)

    def keep(entry: Entry) -> bool:
        if excluded(entry.name):
            return False
        return not tensors or not isinstance(entry, Tensor) or included(entry.name)

    return keep


# Names ----------------------------------------------------------------------------------------------------------------


def rename(catalogue: Catalogue, new_name: Callable[[str], str], *, within_parts: bool = False) -> Catalogue:
    """Return the catalogue with every entry under its new name. Raises UsageError if two would have the same.

    `new_name` is asked for the dotted full name; or, with `within_parts`, for the name below the part's root (of
    models only). What the model's parameters are called is then changed wherever the optimizer mentions them. Pure.
    """
    moved: dict[Path, Path] = {}
    for path, entry in catalogue.entries.items():
        if isinstance(entry, Tensor) and entry.embedded:
            continue
        depth = len(entry.part.root) if entry.part.kind == "model" else 0
        if within_parts and entry.part.kind != "model":
            continue
        prefix, tail = (path[:depth], path[depth:]) if within_parts else ((), path)
        moved[path] = (*prefix, *_repath(tail, new_name(dotted(tail))))
    return _closed_up(move(_follow_in_optimizer(catalogue, _new_parameters(catalogue, moved), moved), moved))


def _new_parameters(catalogue: Catalogue, moved: dict[Path, Path]) -> dict[str, str]:
    """What the model's parameters were called and are called now, each below the root of its part.

    Where several models have a name, the optimizer follows the first in `models`, even if that one keeps it.
    """
    parameters: dict[str, str] = {}
    for root, entries in models(catalogue):
        new_root = moved_root(root, moved)
        for entry in entries:
            path = entry.path
            new = moved.get(path, path)
            # A rule may take some of the part away from under its root: those go by their full names.
            depth = len(root) if new == path else len(new_root) if new[: len(new_root)] == new_root else 0
            parameters.setdefault(entry.fqn, dotted(new[depth:]))
    return {name: new for name, new in parameters.items() if name != new}


def models(catalogue: Catalogue) -> list[tuple[Path, list[Entry]]]:
    """Return the root of each model with its entries: the one called `model` first, averaged weights (EMA) last."""
    by_root: dict[Path, list[Entry]] = defaultdict(list)
    for entry in catalogue.entries.values():
        if entry.part.kind == "model" and not (isinstance(entry, Tensor) and entry.embedded):
            by_root[entry.part.root].append(entry)
    return [(root, by_root[root]) for root in sorted(by_root, key=model_rank)]


def model_rank(root: Path) -> int:
    """Return the rank of a model among those that the optimizer may be about; the lowest is first. Pure."""
    key = str(root[-1]).lower() if root else "model"
    return 0 if key == "model" else 2 if re.search(r"(^|_)ema(_|$)", key) else 1


def _repath(path: Path, name: str) -> Path:
    """The path of a new dotted name that keeps the keys of `path` at both ends where they are still the same."""
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
    if not parameters:
        return catalogue
    entries = dict(catalogue.entries)
    for path, entry in catalogue.entries.items():
        if entry.part.kind != "optimizer" or (isinstance(entry, Tensor) and entry.embedded):
            continue
        new = moved.get(path, path)
        key = parse_key(new, max(len(entry.part.root) + len(new) - len(path), 0))
        if key is not None and key.parameter in parameters:
            new = key._replace(owner=parameters[key.parameter]).path
        if new != path:
            moved[path] = new
        if isinstance(entry, Object) and str(path[-1]).rpartition(".")[2] in ("params", "param_names"):
            entries[path] = _with_params(entry, parameters)
    return rebuilt(catalogue, entries.values(), catalogue.containers)


def _with_params(entry: Object, parameters: dict[str, str]) -> Object:
    def renamed(value: Any) -> Any:
        return [parameters.get(v, v) if isinstance(v, str) else v for v in value] if isinstance(value, list) else value

    return entry.at(entry.path, change=renamed)


def move(catalogue: Catalogue, moved: dict[Path, Path]) -> Catalogue:
    """Entries, containers, aliases, links and part roots under their new paths; what `moved` does not have stays.

    Raises UsageError when two entries would have the same name, or one would stand where another needs a dict. Pure.
    """
    owners = _owners(catalogue)
    moved = moved | {path: moved.get(owner, owner) + path[len(owner) :] for path, owner in owners.items()}
    result = Catalogue(catalogue.format, [], {}, {}, catalogue.facts, catalogue.warnings)
    taken: dict[Path, Path] = {}
    names: dict[str, Path] = {}
    roots: dict[Path, Path] = {}
    linking = set(owners.values())
    for path, entry in catalogue.entries.items():
        new = moved.get(path, path)
        clash = taken.get(new, names.get(dotted(new)))
        # Two names that only look the same may stay: `("a.b",)` and `("a", "b")`.
        if clash is not None and (new in taken or new != path or moved.get(clash, clash) != clash):
            raise UsageError(
                f"`{dotted(clash)}` and `{dotted(path)}` would both be called `{dotted(new)}`",
                hint="leave one of them out with `--exclude`, or give it another name with `--rename`",
            )
        taken[new] = path
        names[dotted(new)] = path
        root = entry.part.root
        if root not in roots:
            roots[root] = moved_root(root, moved)
        result.entries[new] = _moved_entry(entry, new, Part(entry.part.kind, roots[root]), moved, linking)
    _check_leaves(result, taken)
    for path, container in catalogue.containers.items():
        result.containers[moved_root(path, moved)] = container
    return result


def _check_leaves(moved: Catalogue, taken: dict[Path, Path]) -> None:
    for path, entry in moved.entries.items():
        if isinstance(entry, Tensor) and entry.embedded:
            continue
        above = next((path[:depth] for depth in range(len(path)) if path[:depth] in moved.entries), None)
        if above is not None:
            raise UsageError(
                f"`{dotted(taken[above])}` would be called `{dotted(above)}`, but `{dotted(taken[path])}` needs a dict "
                "of that name",
                hint="give it another name with `--rename`, or leave one of them out with `--exclude`",
            )


def _moved_entry(entry: Entry, new: Path, part: Part, moved: dict[Path, Path], linking: set[Path]) -> Entry:
    if isinstance(entry, Tensor):
        alias = moved.get(entry.alias, entry.alias) if entry.alias is not None else None
        return again(entry, path=new, part=part, alias=alias)
    linked = entry.path in linking
    return entry.at(new, part=part, change=(lambda value: relinked(value, moved)) if linked else None)


def moved_root(root: Path, moved: dict[Path, Path]) -> Path:
    """Where a dict went, seen from what went with it: the prefix that everything below `root` got. Pure."""
    if not root:
        return root
    for path, new in moved.items():
        if path[: len(root)] == root and len(path) > len(root):
            tail = path[len(root) :]
            if new[-len(tail) :] == tail:
                return new[: len(new) - len(tail)]
            return new[: len(root)] if len(new) > len(root) else new[:-1]
    return root


def relinked(value: Any, moved: Mapping[Path, Path]) -> Any:
    """Return an object's value with its links to tensors under their new paths. Pure."""
    if isinstance(value, Link):
        return Link(moved.get(value.path, value.path), value.storage)
    if isinstance(value, dict):
        result = type(value)((k, relinked(v, moved)) for k, v in value.items())
        if getattr(value, "__dict__", None):
            vars(result).update(vars(value))
        return result
    if isinstance(value, (list, set, frozenset)):
        return type(value)(relinked(v, moved) for v in value)
    if type(value) is tuple:
        return tuple(relinked(v, moved) for v in value)
    if isinstance(value, Stub):
        stub = object.__new__(type(value))
        stub.how, stub.kwargs = value.how, relinked(value.kwargs, moved)
        stub.target = relinked(value.target, moved)
        stub.args, stub.state = relinked(value.args, moved), relinked(value.state, moved)
        stub.values = relinked(value.values, moved)
        stub.pairs = [(k, relinked(v, moved)) for k, v in value.pairs]
        return stub
    return value


def interchangeable(catalogue: Catalogue, aliases: Mapping[Path, Path] | None = None) -> dict[Path, Path]:
    """Return, for `relinked`, one path for tensors that are the same inside an object: tied ones (by `alias`, or by the
    given `aliases`), and embedded ones of one dtype and shape without elements. Pure."""
    if aliases is None:
        aliases = {t.path: catalogue.first(t).path for t in catalogue.tensors if t.alias is not None}
    empty: dict[Path, Path] = {
        t.path: (t.dtype.name, *t.shape) for t in catalogue.tensors if t.embedded and not t.numel
    }
    return {**aliases, **empty}


def strip_wrappers(name: str) -> str:
    """`module._orig_mod.layers.0._checkpoint_wrapped_module.w` -> `layers.0.w`. Pure."""
    return WRAPPERS.sub("", name)


def without_root(catalogue: Catalogue, part: Part) -> Catalogue:
    """One part alone, its root key off every name: `model.w` -> `w`. A part that is one value, such as `step`, keeps
    its key: without it nothing would be left of the name. Pure."""
    if not part.root or part.root in catalogue.entries:
        return catalogue
    depth = len(part.root)
    moved = {path: path[depth:] for path in catalogue.entries if path[:depth] == part.root}
    result = move(catalogue, moved)
    result.containers = {p[depth:]: c for p, c in catalogue.containers.items() if p[:depth] == part.root}
    for entry in result.entries.values():
        entry.part = Part(part.kind, ())
    return result


_FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


# Dtypes ---------------------------------------------------------------------------------------------------------------


def caster(rules: Sequence[str]) -> Callable[[Tensor], Dtype | None]:
    """The dtype that `--dtype` rules give a tensor; None to leave it.

    A rule is `PATTERN=DTYPE` over full names, the first that matches, or a bare `DTYPE` for the floating-point tensors
    of models that match none (8-bit floats stay). Integers and bools are never cast. Raises UsageError for a dtype
    that is none. Pure.
    """
    compiled: list[tuple[re.Pattern[str] | None, Dtype]] = []
    if sum("=" not in text for text in rules) > 1:
        raise UsageError("`--dtype` without a pattern is given more than once")
    # The bare one is the general case, wherever it stands.
    for text in sorted(rules, key=lambda text: "=" not in text):
        pattern, name = rule(text, "--dtype") if "=" in text else (None, text)
        short = name.removeprefix("torch.")
        kind = DTYPES.get(ALIASES.get(short, short))
        if kind is None or kind.kind != "float" or kind.name.startswith("float4"):
            raise UsageError(
                f"`--dtype {text}`: `{name}` is not a floating-point dtype",
                hint=meant(short, _FLOATS, f"one of {', '.join(_FLOATS)}"),
            )
        compiled.append((compile_pattern(pattern) if pattern else None, kind))

    def cast_to(tensor: Tensor) -> Dtype | None:
        # Nothing converts the 4-bit floats, and torch has no other names for them.
        if tensor.dtype.kind != "float" or tensor.embedded or tensor.dtype.name.startswith("float4"):
            return None
        for pattern, kind in compiled:
            if pattern is None:
                if tensor.part.kind == "model" and tensor.dtype.itemsize > 1:
                    return kind
            elif pattern.fullmatch(tensor.name):
                return kind
        return None

    return cast_to


def cast(catalogue: Catalogue, cast_to: Callable[[Tensor], Dtype | None]) -> Catalogue:
    """Return the catalogue with the new dtypes. Tied tensors that get different dtypes are untied. Pure."""
    entries: list[Entry] = []
    firsts: dict[tuple[Path, Dtype], Path] = {}
    for entry in catalogue.entries.values():
        if isinstance(entry, Tensor):
            kind = cast_to(entry) or entry.dtype
            first = firsts.setdefault((entry.alias or entry.path, kind), entry.path)
            entry = again(entry, dtype=kind, alias=None if first == entry.path else first)
        entries.append(entry)
    return rebuilt(catalogue, entries, catalogue.containers)
