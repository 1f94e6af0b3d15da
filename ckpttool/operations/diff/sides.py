"""The two checkpoints with the names under which they are compared: parts, optimizers, prefixes, rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Entry, Part, dotted
from ckpttool.catalogue.patterns import any_of, renamer
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout import select as layout
from ckpttool.layout.optimizer import parse as found
from ckpttool.layout.optimizer import respell as optimkeys
from ckpttool.producers import open as opening
from ckpttool.text import meant


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is compared, under which names: `Chosen(only=("model",), rename=("blocks=layers",))`. The fields are the
    options of `ckpttool diff`."""

    only: Sequence[str] = ()
    drop: Sequence[str] = ()
    tensors: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Sequence[str] = ()
    strip_wrappers: bool = False
    strip_prefix: str | None = None


Two = tuple[Catalogue, Catalogue]


def lay_out(sources: tuple[Source, Source], paths: tuple[str, str], chosen: Chosen, notes: list[str]) -> Two:
    """What of both is compared, each tensor knowing its origin. What people should know is added to `notes`.

    A part is chosen where it is; `--rename` changes names of the first. Patterns see the names that are compared.
    Raises UsageError for a part, a prefix or a pattern that is on neither side, and CorruptError for what is wrong with
    what is compared.
    """
    one, other = (source.catalogue for source in sources)
    for path, catalogue in zip(paths, (one, other), strict=True):
        with opening.naming(path):
            parts.stop_at_absent(catalogue, chosen.only)
        harmful = [f"`{path}`: {warning}" for warning in catalogue.warnings if warning.kind == "unsafe-global"]
        notes += [text for text in harmful if text not in notes]
    laid = _selected((one, other), chosen)
    laid = _spelt_alike(laid, (one, other), paths, notes)
    if chosen.only:
        laid = _each(laid, _without_root)
    laid = _renamed(laid, paths, chosen)
    laid = _matching(laid, chosen)
    for path, source, made in zip(paths, sources, laid, strict=True):
        with opening.naming(path):
            validate(source.catalogue, optimkeys.origins(made))
    return laid


def _each(laid: Two, step: Callable[[Catalogue], Catalogue]) -> Two:
    return step(laid[0]), step(laid[1])


# Parts ----------------------------------------------------------------------------------------------------------------


def _selected(catalogues: Two, chosen: Chosen) -> Two:
    wanted, unwanted = _of_parts(chosen.only, catalogues), _of_parts(chosen.drop, catalogues)

    def select(i: int) -> Catalogue:
        # A part is told from the catalogue as it was opened.
        keep, leave = wanted[i], unwanted[i]
        made = layout.start(catalogues[i])
        if not chosen.only and not chosen.drop:
            return made
        return layout.select(made, lambda e: (not chosen.only or e.part in keep) and e.part not in leave)

    return select(0), select(1)


def _of_parts(names: Sequence[str], catalogues: Two) -> tuple[set[Part], set[Part]]:
    """The parts of either catalogue that have these names. Raises UsageError for a name that is on neither side."""
    made: tuple[set[Part], set[Part]] = (set(), set())
    for name in names:
        unknown: list[UsageError] = []
        for catalogue, those in zip(catalogues, made, strict=True):
            try:
                matches = parts.matcher([name], catalogue)
            except UsageError as error:
                unknown.append(error)
            else:
                those |= {part for part in parts.parts(catalogue) if matches(part)}
        if len(unknown) == 2:
            raise unknown[0]
    return made


def _without_root(laid: Catalogue) -> Catalogue:
    left = parts.parts(laid)
    return layout.without_root(laid, left[0]) if len(left) == 1 else laid


# The optimizer --------------------------------------------------------------------------------------------------------


def _spelt_alike(laid: Two, sources: Two, paths: tuple[str, str], notes: list[str]) -> Two:
    """Optimizers whose keys are ids, or are spelt in two ways, by the names of the parameters, if both have them."""
    try:
        spellings = [{optimizer.spelling for optimizer in found.optimizers(made)} for made in laid]
        if not all(spellings) or (spellings[0] == spellings[1] and spellings[0] <= {"fqn", "flat"}):
            return laid
        spelt = tuple(optimkeys.respell(made, "fqn", source) for made, source in zip(laid, sources, strict=True))
    except CkptError as error:
        notes.append(f"the optimizers are compared by the keys that they have: {error.message}")
        return laid
    for path, made, before in zip(paths, spelt, laid, strict=True):
        notes += [f"`{path}`: {warning}" for warning in made.warnings if warning not in before.warnings]
    return spelt[0], spelt[1]


# Names ----------------------------------------------------------------------------------------------------------------


def _renamed(laid: Two, paths: tuple[str, str], chosen: Chosen) -> Two:
    made = list(laid)
    if chosen.strip_wrappers:
        made = [_named(made[i], paths[i], layout.strip_wrappers, within_parts=True) for i in (0, 1)]
    if chosen.strip_prefix:
        prefix = chosen.strip_prefix.rstrip(".") + "."
        if not any(t.fqn.startswith(prefix) for side in made for t in side.tensors):
            raise UsageError(f"`--strip-prefix {chosen.strip_prefix}`: no tensor of either has this prefix")
        made = [_named(made[i], paths[i], lambda name: name.removeprefix(prefix), within_parts=True) for i in (0, 1)]
    for text in chosen.rename:
        step = renamer([text])
        if all(step(entry.name) == entry.name for entry in made[0].entries.values()):
            raise UsageError(f"`--rename {text}` changes no name of `{paths[0]}`", hint=_like(made[0]))
    if chosen.rename:
        made[0] = _named(made[0], paths[0], renamer(chosen.rename))
    return made[0], made[1]


def _named(laid: Catalogue, path: str, new_name: Callable[[str], str], *, within_parts: bool = False) -> Catalogue:
    with _told_of(path):
        return layout.rename(laid, new_name, within_parts=within_parts)


@contextmanager
def _told_of(path: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"`{path}`: {error.message}", hint=error.hint, **error.facts) from None


def _matching(laid: Two, chosen: Chosen) -> Two:
    for flag, patterns in (("--tensors", chosen.tensors), ("--exclude", chosen.exclude)):
        for pattern in patterns:
            matches = any_of([pattern])
            if not any(matches(entry.name) for made in laid for entry in made.entries.values()):
                names = [entry.name for made in laid for entry in made.entries.values()]
                raise UsageError(f"`{flag} {pattern}` matches nothing", hint=meant(pattern, names, _like(laid[0])))
    if chosen.tensors or chosen.exclude:
        laid = _each(laid, lambda made: layout.select(made, layout.matching(chosen.tensors, chosen.exclude)))
    if not laid[0].entries and not laid[1].entries:
        raise UsageError("nothing is left to compare", hint="look at what is there with `ckpttool inspect`")
    return laid


def _like(laid: Catalogue) -> str:
    names = [entry.name for entry in laid.entries.values()]
    return f"names are like `{names[len(names) // 2]}`" if names else "nothing of it is left"


# When they do not fit -------------------------------------------------------------------------------------------------


def advice(laid: Two) -> str | None:
    """What to type when names of both would be the same but for a root, wrappers or a key. Pure."""
    models = [_below(made, "model") for made in laid]
    both = models[0] & models[1]
    roots = [{e.part.root for e in made.entries.values() if e.part.kind == "model"} for made in laid]
    if both and not roots[0] & roots[1] and () in roots[0] | roots[1]:
        return "the models have the same names below their keys: `--only model`"
    if not both and set.intersection(*({layout.strip_wrappers(name) for name in names} for names in models)):
        return "without the wrappers of DDP and `torch.compile` the names are the same: `--strip-wrappers`"
    for kind in ("optimizer", "model"):
        roots = [{e.part.root for e in made.entries.values() if e.part.kind == kind} for made in laid]
        if all(len(found) == 1 for found in roots) and roots[0] != roots[1]:
            old, new = (dotted(found.pop()) for found in roots)
            if old and new:
                return f"what is under `{old}` in one is under `{new}` in the other: `--rename {old}={new}`"
    return None


def _below(laid: Catalogue, kind: str) -> set[str]:
    """Names of a kind of part below its root."""
    return {_tail(entry) for entry in laid.entries.values() if entry.part.kind == kind}


def _tail(entry: Entry) -> str:
    return entry.fqn
