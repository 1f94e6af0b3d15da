"""Selects the one model of a checkpoint to export, strips wrappers and applies the user's names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckpttool.catalogue import parts
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Part, Path, Tensor, dotted
from ckpttool.catalogue.models import models as every
from ckpttool.catalogue.validation import validate
from ckpttool.errors import UsageError
from ckpttool.layout import select
from ckpttool.layout.move import derived, move, rebuilt
from ckpttool.layout.rename import rename_entries, strip_sure_wrappers, strip_wrappers, without_root
from ckpttool.layout.select import models
from ckpttool.layout.selection import Selection, check_not_empty, filtered, renamed_by, stripper
from ckpttool.text import plural, some

_MODEL = Part("model")


def model_of(source: Catalogue, only: Sequence[str]) -> Catalogue:
    """Return the tensors of the selected model, each with a path of one key.

    Raises UsageError when there is no model, or more than one; CorruptError when it is damaged.
    """
    is_selected = parts.matcher(only, source) if only else {model.part for model in every(source).trained}.__contains__
    models = [part for part in parts.parts(source) if is_selected(part)]
    for fault in source.faults:
        # A part that could not be opened may be the model.
        root = fault.facts.get("absent")
        if root is not None and (not models or parts.kind_of_key(root.partition(".")[0]) == "model"):
            raise fault
    if len(models) != 1:
        names = [dotted(part.root) or part.kind for part in models]
        if not models:
            listed = some([str(part) for part in parts.parts(source)], 5)
            hint = f"the parts are {listed}; `--only PART` takes one of them"
            raise UsageError("there is no model in this checkpoint", hint=hint)
        raise UsageError(
            f"there are {len(models)} models, and one can be exported: {some(names, 5)}",
            hint=f"pass `--only {names[0]}`, or `--only {names[1]}`",
            found=names,
        )
    part = models[0]
    if part.kind not in ("model", "other"):
        hint = f"`ckpttool convert SRC DST --only {only[0]}` writes it"
        raise UsageError(f"`--only {only[0]}`: only a model can be exported, and `{part}` is not one", hint=hint)
    own = {tensor.path for tensor in source.tensors if tensor.part == part and not tensor.embedded}
    model = select.select(select.start(source), lambda entry: entry.path in own)
    if not model.entries:
        raise UsageError(f"part `{part}` has no tensors", hint="`ckpttool inspect` lists what there is")
    validate(source, set(model.entries))
    return _flat(without_root(model, part))


def tree_of(source: Catalogue, name: str, notes: list[str], *, strict: bool) -> Catalogue:
    """Return the tensors of the tree called `name`, such as `ema`, under the names of the model.

    Raises UsageError when there is no such tree, or several, or with `strict` when it lacks tensors of the model;
    otherwise, this is noted.
    """
    known = models(source)
    if not known:
        raise UsageError("there is no model in this checkpoint whose names a tree could have")
    root, entries = known[0]
    own = {strip_wrappers(entry.fqn): entry.shape for entry in entries if isinstance(entry, Tensor)}
    trees = _trees(source, own)
    trees.pop(dotted(root), None)
    bare = strip_wrappers(f"{name}.").rstrip(".")
    of_name = [tree for tree in trees if tree in (name, bare)] or [
        tree for tree in trees if tree.startswith(f"{name}.") or tree.rpartition(".")[2] == name
    ]
    if len(of_name) != 1:
        listed = [f"`{tree}` ({len(names):,} of {len(own):,} tensors)" for tree, names in trees.items()]
        known_trees = f"; there are: {'; '.join(listed)}" if listed else ", and no other tree has them"
        what = f"no tree `{name}` with the names of the model" if not of_name else f"`{name}` is {len(of_name)} trees"
        hint = f"pass one of their full names: `--take {(of_name or [*trees])[0]}`" if trees else None
        raise UsageError(f"`--take {name}`: {what}{known_trees}", hint=hint, found=[*trees])
    tree = trees[of_name[0]]
    missing = [one for one in own if one not in tree]
    if missing:
        text = f"tree `{of_name[0]}` lacks {plural(len(missing), 'tensor')} of the model: {some(missing)}"
        if strict:
            hint = "`--like REF --fill-from SRC` takes them from the model; `--no-strict` leaves them out"
            raise UsageError(text, hint=hint, missing=missing)
        notes.append(text)
    paths: dict[Path, Path] = {path: (one,) for one, path in tree.items()}
    validate(source, set(paths))
    chosen = move(select.select(select.start(source), lambda entry: entry.path in paths), paths)
    by_name = {tensor.name: tensor for tensor in chosen.tensors}
    return rebuilt(chosen, [derived(by_name[one], part=_MODEL) for one in own if one in by_name], {})


def _trees(source: Catalogue, own: Mapping[str, Ints]) -> dict[str, dict[str, Path]]:
    """Return the dicts with at least half of the model's tensors, by their dotted names: the path of each tensor."""
    trees: dict[str, dict[str, Path]] = {}
    for tensor in source.tensors:
        keys = tensor.name.split(".") if tensor.part.kind != "optimizer" and not tensor.embedded else []
        for depth in range(len(keys)):
            name = strip_wrappers(".".join(keys[depth:]))
            if own.get(name) == tensor.shape:
                trees.setdefault(".".join(keys[:depth]), {})[name] = tensor.path
                break
    return {root: names for root, names in trees.items() if 2 * len(names) >= len(own)}


def _flat(catalogue: Catalogue) -> Catalogue:
    """Give each tensor a path of one key, as in files of safetensors."""
    flat = move(catalogue, {path: (dotted(path),) for path in catalogue.entries})
    # Indexes of a list without its prefix, `layers`, stay as they are.
    return rebuilt(flat, [derived(tensor, part=_MODEL) for tensor in flat.tensors], {})


def renamed(planned: Catalogue, selection: Selection, known: Iterable[str] = ()) -> Catalogue:
    """Strip wrappers at any depth, exclude tensors, strip the prefix and apply the renaming rules, in this order. Where
    `known` names of the model have a `module` inside, only a leading one is a wrapper.

    Raises UsageError for a rule that does nothing, or names that collide.
    """
    has_module = any(".module." in name for name in known)
    model = rename_entries(planned, strip_sure_wrappers if has_module else strip_wrappers)
    (kept,) = filtered(selection, model)
    check_not_empty(kept, planned)
    kept = rename_entries(kept, stripper(selection, kept))
    return _flat(renamed_by(kept, selection.rename))
