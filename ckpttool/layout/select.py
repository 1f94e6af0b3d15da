"""Selects entries of a catalogue; `--only` and `--drop` choose them by `catalogue.parts.matcher`. Pure.

Each step of a layout returns a new catalogue whose tensors know their `origin` in the source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ckpttool.catalogue import models as catalogue_models
from ckpttool.catalogue import parts
from ckpttool.catalogue.aliases import find_aliases, one_moment_for_two
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Path, Tensor, above
from ckpttool.catalogue.flatten import flatten, links
from ckpttool.catalogue.patterns import any_of
from ckpttool.catalogue.values import Link
from ckpttool.layout.move import close_gaps, derived, embedded_owners, rebuilt, retied


def start(source: Catalogue) -> Catalogue:
    """Return a catalogue with all entries of the source, for the functions below."""
    result = Catalogue(source.format, [], {}, dict(source.containers), dict(source.facts), [])
    aliases = find_aliases(source.tensors)
    for entry in source.entries.values():
        result.add(derived(entry, alias=aliases.get(entry.path)) if isinstance(entry, Tensor) else entry)
    result.warnings += one_moment_for_two(source, aliases)
    return result


def spread(source: Catalogue) -> Catalogue:
    """Return a catalogue in which the elements of a tuple that is the whole state are entries, as those of a list are;
    any other as it is."""
    state = source.entries.get(())
    if (
        not isinstance(state, Object)
        or type(state.value) is not tuple
        or any(one.storage for one in links(state.value))
    ):
        return source
    result = rebuilt(source, (), {})

    def make(link: Link, path: Path, embedded: bool) -> Tensor:
        tensor = source.entries[link.path]
        assert isinstance(tensor, Tensor)
        return derived(tensor, path=path, embedded=embedded)

    flatten([*state.value], result, Link, make)
    parts.assign(result)
    return result


def select(catalogue: Catalogue, keep: Callable[[Entry], bool]) -> Catalogue:
    """Return the entries for which `keep` is true, and the tensors embedded in them.

    A tied tensor whose first name goes keeps its bytes under the next one; what follows in a list moves up.
    """
    owners = embedded_owners(catalogue)
    kept = [e for e in catalogue.entries.values() if keep(catalogue.entries[owners.get(e.path, e.path)])]
    around = {path for entry in kept for path in (*above(entry.path), entry.path)}
    containers = {path: c for path, c in catalogue.containers.items() if not path or path in around}
    return close_gaps(rebuilt(catalogue, retied(kept), containers))


def matching(tensors: Sequence[str], exclude: Sequence[str], *catalogues: Catalogue) -> Callable[[Entry], bool]:
    """For `select`: tensors that match one of `tensors` (all, when there is none; objects stay) and nothing that
    matches one of `exclude`. What matches by its name in the source goes by its name here in all catalogues."""
    included, excluded = matched(tensors or ["*"], *catalogues), matched(exclude, *catalogues)
    return lambda entry: entry.name not in excluded and (not isinstance(entry, Tensor) or entry.name in included)


def matched(patterns: Sequence[str], *catalogues: Catalogue) -> set[str]:
    """Return the names of the entries that match one of the patterns. One that matches none is tried with the names
    that the entries have in the source."""
    entries = [entry for catalogue in catalogues for entry in catalogue.entries.values()]
    names: set[str] = set()
    for pattern in patterns:
        is_match = any_of([pattern])
        own = {entry.name for entry in entries if is_match(entry.name)}
        names |= own or {entry.name for entry in entries if is_match(entry.source_name)}
    return names


def models(catalogue: Catalogue) -> list[tuple[Path, list[Entry]]]:
    """Return the root of each model with its entries: the one called `model` first, averages (EMA) last."""
    by_root, averages = _by_root(catalogue)
    return [(root, by_root[root]) for root in sorted(by_root, key=lambda root: (root in averages, not is_called(root)))]


def rivals(catalogue: Catalogue) -> list[Path]:
    """Return the models that "the model" may mean: the one that is called so, else all that are not averages."""
    by_root, averages = _by_root(catalogue)
    trained = [root for root in by_root if root not in averages] or [*by_root]
    return [root for root in trained if is_called(root)] or trained


def _by_root(catalogue: Catalogue) -> tuple[dict[Path, list[Entry]], set[Path]]:
    by_root: dict[Path, list[Entry]] = defaultdict(list)
    for entry in catalogue.entries.values():
        if entry.part.kind == "model" and not entry.embedded:
            by_root[entry.part.root].append(entry)
    every = catalogue_models.models(catalogue).models if len(by_root) > 1 else ()
    return by_root, {model.part.root for model in every if model.is_average}


def is_called(root: Path) -> bool:
    """Return whether a model is called `model`, or is all there is."""
    return not root or str(root[-1]).lower() == "model"


def interchangeable(catalogue: Catalogue, aliases: Mapping[Path, Path] | None = None) -> dict[Path, Path]:
    """Return, for `relinked`, one path for tensors that are the same inside an object: tied ones (by `alias`, or by the
    given `aliases`), and embedded ones of one dtype and shape without elements."""
    if aliases is None:
        aliases = {t.path: catalogue.first(t).path for t in catalogue.tensors if t.alias is not None}
    return {**aliases, **{t.path: (t.dtype.name, *t.shape) for t in catalogue.tensors if t.embedded and not t.numel}}
