"""Selects what is compared of two checkpoints, and under which names: parts, optimizer keys, prefixes, rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Path, dotted
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout import select as layout
from ckpttool.layout.optimizer import parse, respell
from ckpttool.layout.rename import rename_entries, strip_wrappers, without_root
from ckpttool.layout.selection import Selection, filtered, renamed_by, stripper
from ckpttool.producers import open

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
        selected = _without_root(selected[0]), _without_root(selected[1])
    a, b = filtered(options, *_renamed(selected, paths, options))
    if not a.entries and not b.entries:
        raise UsageError("nothing is left to compare", hint="`ckpttool inspect` lists what is in a checkpoint")
    for path, original, catalogue in zip(paths, originals, (a, b), strict=True):
        with open.naming(path):
            validate(original, respell.origins(catalogue))
    return a, b


def _selected_parts(catalogues: Catalogues, options: Selection) -> Catalogues:
    a, b = map(layout.start, catalogues)
    if not options.only and not options.drop:
        return a, b
    is_wanted, is_wanted_too = options.wanted_parts(*catalogues), options.wanted_parts(*catalogues[::-1])
    return layout.select(a, lambda e: is_wanted(e.part)), layout.select(b, lambda e: is_wanted_too(e.part))


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
        notes.append(f"the optimizers are compared by their own keys: {error.message}")
        return catalogues
    for path, catalogue, before in zip(paths, (a, b), catalogues, strict=True):
        notes += [f"`{path}`: {warning}" for warning in catalogue.warnings if warning not in before.warnings]
    return a, b


def _renamed(catalogues: Catalogues, paths: tuple[str, str], options: Selection) -> Catalogues:
    if options.strip_wrappers or options.strip_prefix:
        new_name = stripper(options, *catalogues)
        with _naming(paths[0]):
            a = rename_entries(catalogues[0], new_name, within_parts=True)
        with _naming(paths[1]):
            catalogues = a, rename_entries(catalogues[1], new_name, within_parts=True)
    with _naming(paths[0]):
        return renamed_by(catalogues[0], options.rename), catalogues[1]


@contextmanager
def _naming(path: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise error.prefixed(f"`{path}`") from None


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
