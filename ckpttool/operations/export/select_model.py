"""Selects the one model of a checkpoint to export, strips wrappers and applies the user's names. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Part, dotted
from ckpttool.catalogue.validation import validate
from ckpttool.errors import UsageError
from ckpttool.layout import select
from ckpttool.layout.move import again, move, rebuilt
from ckpttool.layout.rename import rename_entries, strip_wrappers, without_root
from ckpttool.operations import arguments, write
from ckpttool.operations.arguments import Selection
from ckpttool.text import some

_MODEL = Part("model")


def model_of(source: Catalogue, only: Sequence[str]) -> Catalogue:
    """Return the tensors of the selected model, each with a path of one key.

    Raises UsageError when there is no model, or more than one; CorruptError when it is damaged.
    """
    is_selected = parts.matcher(only, source) if only else lambda part: part.kind == "model"
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
            raise UsageError("no model in this checkpoint", hint=hint)
        raise UsageError(
            f"there are {len(models)} models, and one can be exported: {some(names, 5)}",
            hint=f"pass `--only {names[0]}`, or `--only {names[1]}`",
            found=names,
        )
    part = models[0]
    own = {tensor.path for tensor in source.tensors if tensor.part == part and not tensor.embedded}
    model = select.select(select.start(source), lambda entry: entry.path in own)
    if not model.entries:
        raise UsageError(f"part `{part}` has no tensors", hint="look at what is there with `ckpttool inspect`")
    validate(source, set(model.entries))
    return _flat(without_root(model, part))


def _flat(catalogue: Catalogue) -> Catalogue:
    """Give each tensor a path of one key, as in files of safetensors."""
    flat = move(catalogue, {path: (dotted(path),) for path in catalogue.entries})
    # Indexes of a list without its prefix, `layers`, stay as they are.
    return rebuilt(flat, [again(tensor, part=_MODEL) for tensor in flat.tensors], {})


def renamed(planned: Catalogue, selection: Selection) -> Catalogue:
    """Strip wrappers at any depth, exclude tensors, strip the prefix and apply the renaming rules, in this order.

    Raises UsageError for a rule that does nothing, or names that collide.
    """
    model = rename_entries(planned, strip_wrappers)
    (kept,) = arguments.matching(selection, model)
    write.check_not_empty(kept)
    kept = rename_entries(kept, arguments.stripper(selection, kept))
    return _flat(arguments.renamed(kept, selection.rename))
