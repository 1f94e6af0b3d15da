"""Selects what is compared of two checkpoints, and under which names: parts, optimizer keys, prefixes, rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Part, Path, dotted
from ckpttool.catalogue.patterns import any_of, renamer
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout import select as layout
from ckpttool.layout.optimizer import parse, respell
from ckpttool.layout.rename import rename_entries, strip_wrappers, without_root
from ckpttool.operations.arguments import Selection
from ckpttool.producers import open
from ckpttool.text import meant

Catalogues = tuple[Catalogue, Catalogue]


def select(sources: tuple[Source, Source], paths: tuple[str, str], options: Selection, notes: list[str]) -> Catalogues:
    """Return what is compared of both; each tensor has its origin. Sentences for people are added to `notes`.

    A part may be in one of both; `--rename` changes names of the first. Patterns see the names that are compared.
    Raises UsageError for a part, a prefix or a pattern that is on neither side, and CorruptError for what is wrong with
    what is compared.
    """
    originals = sources[0].catalogue, sources[1].catalogue
    for path, catalogue in zip(paths, originals, strict=True):
        with open.naming(path):
            parts.stop_at_absent(catalogue, options.only)
        unsafe = [f"`{path}`: {warning}" for warning in catalogue.warnings if warning.kind == "unsafe-global"]
        notes += [text for text in unsafe if text not in notes]
    selected = _same_optimizer_keys(_selected_parts(originals, options), originals, paths, notes)
    if options.only:
        selected = _each(selected, _without_root)
    selected = _matching(_renamed(selected, paths, options), options)
    for path, original, catalogue in zip(paths, originals, selected, strict=True):
        with open.naming(path):
            validate(original, respell.origins(catalogue))
    return selected


def _each(catalogues: Catalogues, step: Callable[[Catalogue], Catalogue]) -> Catalogues:
    return step(catalogues[0]), step(catalogues[1])


def _selected_parts(catalogues: Catalogues, options: Selection) -> Catalogues:
    kept, dropped = _parts_called(options.only, catalogues), _parts_called(options.drop, catalogues)

    def select_parts(i: int) -> Catalogue:
        catalogue = layout.start(catalogues[i])
        if not options.only and not options.drop:
            return catalogue
        return layout.select(catalogue, lambda e: (not options.only or e.part in kept[i]) and e.part not in dropped[i])

    return select_parts(0), select_parts(1)


def _parts_called(names: Sequence[str], catalogues: Catalogues) -> tuple[set[Part], set[Part]]:
    """Return the parts of each catalogue with these names. Raises UsageError for a name that is on neither side."""
    result: tuple[set[Part], set[Part]] = (set(), set())
    for name in names:
        errors: list[UsageError] = []
        for catalogue, matching in zip(catalogues, result, strict=True):
            try:
                matching |= set(filter(parts.matcher([name], catalogue), parts.parts(catalogue)))
            except UsageError as error:
                errors.append(error)
        if len(errors) == 2:
            raise errors[0]
    return result


def _without_root(catalogue: Catalogue) -> Catalogue:
    remaining = parts.parts(catalogue)
    return without_root(catalogue, remaining[0]) if len(remaining) == 1 else catalogue


def _same_optimizer_keys(
    catalogues: Catalogues, originals: Catalogues, paths: tuple[str, str], notes: list[str]
) -> Catalogues:
    """Return optimizers keyed by FQN where their keys are ids, or of two styles, and both have names."""
    try:
        styles = [{optimizer.spelling for optimizer in parse.optimizers(catalogue)} for catalogue in catalogues]
        if not all(styles) or (styles[0] == styles[1] and styles[0] <= {"fqn", "flat"}):
            return catalogues
        a, b = (respell.respell(one, "fqn", original) for one, original in zip(catalogues, originals, strict=True))
    except CkptError as error:
        notes.append(f"the optimizers are compared by the keys that they have: {error.message}")
        return catalogues
    for path, catalogue, before in zip(paths, (a, b), catalogues, strict=True):
        notes += [f"`{path}`: {warning}" for warning in catalogue.warnings if warning not in before.warnings]
    return a, b


def _renamed(catalogues: Catalogues, paths: tuple[str, str], options: Selection) -> Catalogues:
    if options.strip_wrappers:
        catalogues = _each_named(catalogues, paths, strip_wrappers)
    if options.strip_prefix:
        prefix = options.strip_prefix.rstrip(".") + "."
        if not any(tensor.fqn.startswith(prefix) for one in catalogues for tensor in one.tensors):
            raise UsageError(f"`--strip-prefix {options.strip_prefix}`: no tensor of either has this prefix")
        catalogues = _each_named(catalogues, paths, lambda name: name.removeprefix(prefix))
    a, b = catalogues
    for text in options.rename:
        new_name = renamer([text])
        if all(new_name(entry.name) == entry.name for entry in a.entries.values()):
            raise UsageError(f"`--rename {text}` changes no name of `{paths[0]}`", hint=_example(a))
    return _named(a, paths[0], renamer(options.rename)) if options.rename else a, b


def _each_named(catalogues: Catalogues, paths: tuple[str, str], new_name: Callable[[str], str]) -> Catalogues:
    a, b = (_named(one, path, new_name, within_parts=True) for one, path in zip(catalogues, paths, strict=True))
    return a, b


def _named(catalogue: Catalogue, path: str, new_name: Callable[[str], str], *, within_parts: bool = False) -> Catalogue:
    try:
        return rename_entries(catalogue, new_name, within_parts=within_parts)
    except UsageError as error:
        raise error.prefixed(f"`{path}`") from None


def _matching(catalogues: Catalogues, options: Selection) -> Catalogues:
    names = [entry.name for catalogue in catalogues for entry in catalogue.entries.values()]
    for flag, patterns in (("--tensors", options.tensors), ("--exclude", options.exclude)):
        for pattern in patterns:
            if not any(map(any_of([pattern]), names)):
                hint = meant(pattern, names, _example(catalogues[0]))
                raise UsageError(f"`{flag} {pattern}` matches nothing", hint=hint)
    if options.tensors or options.exclude:
        matches = layout.matching(options.tensors, options.exclude)
        catalogues = _each(catalogues, lambda catalogue: layout.select(catalogue, matches))
    if not catalogues[0].entries and not catalogues[1].entries:
        raise UsageError("nothing is left to compare", hint="`ckpttool inspect` lists what is in a checkpoint")
    return catalogues


def _example(catalogue: Catalogue) -> str:
    names = [entry.name for entry in catalogue.entries.values()]
    return f"names are like `{names[len(names) // 2]}`" if names else "nothing of it is left"


def advice(catalogues: Catalogues) -> str | None:
    """Return what to type if names of both would be the same but for a root, wrappers or a key, else None. Pure."""
    models = [{e.fqn for e in one.entries.values() if e.part.kind == "model"} for one in catalogues]
    both = models[0] & models[1]
    roots = _roots(catalogues, "model")
    if both and not roots[0] & roots[1] and () in roots[0] | roots[1]:
        return "the models have the same names below their keys: `--only model`"
    if not both and set.intersection(*({strip_wrappers(name) for name in names} for names in models)):
        return "without the wrappers of DDP and `torch.compile` the names are the same: `--strip-wrappers`"
    for kind in ("optimizer", "model"):
        roots = _roots(catalogues, kind)
        if len(roots[0]) == len(roots[1]) == 1 and roots[0] != roots[1]:
            old, new = dotted(roots[0].pop()), dotted(roots[1].pop())
            if old and new:
                return f"what is under `{old}` in one is under `{new}` in the other: `--rename {old}={new}`"
    return None


def _roots(catalogues: Catalogues, kind: str) -> list[set[Path]]:
    return [{e.part.root for e in one.entries.values() if e.part.kind == kind} for one in catalogues]
