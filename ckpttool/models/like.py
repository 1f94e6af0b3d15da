"""The model as a reference has it: names, dtypes, order and files. What the checkpoint lacks is filled from a base.

reference   embed, layers.0.w, layers.1.w, lm_head          as its headers say
checkpoint  embed, layers.0.w, lm_head is embed             layers.1.w is missing: an error, or taken from the base
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue, Chunks, Part, Tensor
from ckpttool.catalogue.patterns import any_of, renamer
from ckpttool.errors import CkptError, CorruptError, LossError, UsageError
from ckpttool.layout.index_operations import Pad, Trim
from ckpttool.layout.key_maps import KeyMap, Rule, apply, matches, parse
from ckpttool.layout.move import derived, rebuilt
from ckpttool.layout.optimizer.names_of_ids import trained_parameters
from ckpttool.layout.rename import strip_wrappers
from ckpttool.layout.selection import Selection
from ckpttool.layout.views import Viewed
from ckpttool.models import key_maps, ties
from ckpttool.models import reference as references
from ckpttool.producers.combined import CombinedSource
from ckpttool.storage.files import Pool
from ckpttool.text import is_or_are, literal, plural, some
from ckpttool.transfer.numbers import Array
from ckpttool.transfer.read import read_box

_MODEL = Part("model")
_NUMBERED = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")
_SHOWN = 5


@dataclass(slots=True)
class Base:
    """The model from which missing tensors are taken: its path, and its tensors by name as ones of the source."""

    path: str
    tensors: Mapping[str, Tensor]
    patterns: Sequence[str]

    @property
    def wanted(self) -> Callable[[str], bool]:
        """Whether `--fill` names a tensor, or is not given."""
        return any_of(self.patterns or ["*"])


@dataclass(slots=True)
class Fitted:
    """A model as its reference has it. `filled` are names of tensors of the base, `twins` names that were left out
    because the reference has their bytes under another."""

    catalogue: Catalogue
    filled: list[str] = field(default_factory=list)
    twins: list[tuple[str, str]] = field(default_factory=list)


def base(whole: CombinedSource, reference: references.Reference, patterns: Sequence[str]) -> Base:
    """Add the files of a base to those of the source. Raises UsageError for a base without weights, or a pattern that
    matches nothing in it."""
    if reference.source is None:
        hint = "name a checkpoint instead of its config"
        raise UsageError(f"`--fill-from {reference.path}` has no weights", hint=hint)
    for pattern in patterns:
        if not any(map(any_of([pattern]), reference.known)):
            raise UsageError(
                f"`--fill {pattern}` matches nothing in `{reference.path}`",
                hint=f"names there are like `{next(iter(reference.known), '')}`",
            )
    for file in reference.source.catalogue.own_files:
        if (store := getattr(file.location, "store", None)) is not None:
            store.in_ranges = True
    attached = {tensor.path: tensor for tensor in whole.attach(reference.source)}
    tensors = {name: attached[(tensor.origin or tensor).path] for name, tensor in reference.tensors.items()}
    return Base(reference.path, tensors, patterns)


# Names ----------------------------------------------------------------------------------------------------------------


def mapped(
    planned: Catalogue,
    viewed: Viewed,
    reference: references.Reference,
    name: str | None,
    config: Mapping[str, Any] | None,
    head_dim: int | None,
    notes: list[str],
) -> tuple[Catalogue, KeyMap | None]:
    """Return a model under the names by which most of its tensors fit the reference, and the key map of them: none if
    they fit as they are; that called `name`, or those of ckpttool for such a model, in either direction; where none of
    these fits all, that which `match` finds, if it leaves nothing open. The map is noted.

    Raises UsageError for a map that does nothing here.
    """
    wanted = {one: known.shape for one, known in reference.known.items()}
    best, by, most = planned, None, _fitting(planned, wanted)
    if name == "none" or (name is None and most == len(wanted)):
        return best, None
    facts = key_maps.facts(config, head_dim)
    undecided: dict[str, UsageError] = {}
    for candidate in _candidates(name, config, [tensor.name for tensor in planned.tensors], [*wanted]):
        keymap = _ending_in(candidate, wanted)
        try:
            model = apply(keymap, planned, viewed, facts)[0]
        except UsageError as error:
            if name is not None and not keymap.name.endswith(_REVERSED):
                raise
            if "unknown" in error.facts:
                undecided[keymap.name] = error
            continue
        if (fitting := _fitting(model, wanted)) > most:
            best, by, most = model, keymap, fitting
    if undecided:
        # That a map cannot be applied for want of a number of the config does not say that another one is right.
        raise _undecided(undecided, reference)
    if by is None and name is not None:
        raise UsageError(
            f"`--map {name}` gives no tensor a name of `{reference.path}`, in either direction",
            hint=f"names here are like `{next(iter(planned.tensors)).name}`, there like `{next(iter(wanted), '')}`",
        )
    found = _matched(planned, best, viewed, reference, config, head_dim) if name is None else None
    if found is not None:
        best, by, counts, assumed = found
        if resized := [rule.targets[0].text for rule in by.rules if any(isinstance(o, Trim) for o in rule.operations)]:
            notes.append(f"padding rows at the end are dropped: {some(resized)}")
        if assumed:
            notes.append(f"assumed not to be transposed, which neither names nor shapes show: {some(assumed)}")
        notes.append(
            f"the names are as `ckpttool match` finds those of `{reference.path}`, all {sum(counts.values())}: "
            + ", ".join(f"{count} by {how}" for how, count in counts.items())
            + "; its `-o map.json` writes them down for `--map`"
        )
    elif by is not None:
        notes.append(f"the names are by key map `{by.name}`, which fits `{reference.path}`")
    return best, by


def _matched(
    planned: Catalogue,
    best: Catalogue,
    viewed: Viewed,
    reference: references.Reference,
    config: Mapping[str, Any] | None,
    head_dim: int | None,
) -> tuple[Catalogue, KeyMap, dict[str, int], list[str]] | None:
    """Return a model as `match` makes the reference of it, its key map, how many tensors were found by what, and the
    names of those that are assumed not to be transposed; None if the `best` so far fits, or anything is ambiguous or
    missing."""
    from ckpttool.models.matching import models  # which few exports need

    wanted = models.untied(reference, {tensor.name: tensor.shape for tensor in planned.tensors})
    if _fitting(best, wanted) == len(wanted):
        return None
    config, rows = reference.config or config, head_dim or reference.assets.head_dim
    solution = models.solved(planned, viewed, reference, config, rows)
    if solution.ambiguous or solution.unmatched:
        return None
    keymap = parse(models.key_map(solution, reference.path, config), "match")
    _check_resized(keymap, planned, viewed, reference)
    model = apply(keymap, planned, viewed, key_maps.facts(config, rows))[0]
    assumed = [one.name for one in solution.assumed]
    return (model, keymap, models.counts(solution), assumed) if _fitting(model, wanted) == len(wanted) else None


def _check_resized(keymap: KeyMap, planned: Catalogue, viewed: Viewed, reference: references.Reference) -> None:
    """Raise LossError for a rule that leaves out rows with values, and for one that makes rows of zeros: of a
    vocabulary of another size only padding, whose rows are all alike, may go."""
    hint = f"`ckpttool match SRC --like {reference.path} -o map.json` writes a map that does so, and `--map` applies it"
    for tensor in planned.tensors:
        rule = next((found[1] for found in matches(keymap, tensor.name)), None)
        for resize in rule.operations if rule is not None else ():
            old = tensor.shape[0]
            if isinstance(resize, Pad):
                message = f"`{tensor.name}` has {old} rows, and `{reference.path}` more: they would be zeros"
                raise LossError(message, hint=f"name a reference of this vocabulary; or {hint}", tensor=tensor.name)
            if isinstance(resize, Trim) and not _is_padding(tensor, int(resize.size), viewed):
                message = (
                    f"rows {resize.size} to {old} of `{tensor.name}` are not padding, and not in `{reference.path}`"
                )
                raise LossError(message, hint=f"name a reference of this vocabulary; or {hint}", tensor=tensor.name)


def _is_padding(tensor: Tensor, begin: int, viewed: Viewed) -> bool:
    """Return whether all rows of a tensor from `begin` on are the same."""
    stored = tensor.origin or tensor
    first: Array | None = None
    with closing(Pool()) as pool:
        for row in range(begin, tensor.shape[0]):
            offsets, sizes = (row, *[0] * len(tensor.shape[1:])), (1, *tensor.shape[1:])
            bits = read_box((offsets, sizes), stored, viewed, pool)
            first = bits if first is None else first
            if not (bits == first).all():
                return False
    # One row says nothing of padding, unless it is zero.
    return tensor.shape[0] - begin > 1 or first is None or not first.any()


_REVERSED = " reversed"


def _undecided(undecided: Mapping[str, UsageError], reference: references.Reference) -> UsageError:
    names, error = [*undecided], next(iter(undecided.values()))
    return UsageError(
        f"the names of `{reference.path}` are those of key map {some(names)}, which cannot be applied: {error.message}",
        hint=error.hint or f"`ckpttool match SRC --like {reference.path} -o map.json` lists what is open, for `--map`",
        found=names,
    )


def _candidates(
    name: str | None, config: Mapping[str, Any] | None, own: Sequence[str], wanted: Sequence[str]
) -> Iterator[KeyMap]:
    """Yield maps and their inverses, which do not have the tensors that a map drops. Where none is chosen by `name`,
    these are maps that recognise the names of the checkpoint, and inverses of those that recognise the reference's:
    that shapes fit is not evidence, as rows in another order have the same shape."""
    chosen = key_maps.chosen(name, (), config) if name is not None else None
    for keymap in [chosen] if chosen is not None else [*key_maps.of_config(config), *key_maps.known()]:
        is_own, is_wanted = (chosen is not None or keymap.fits(names, config) for names in (own, wanted))
        if chosen is None and is_own and is_wanted:
            continue  # both are spelt alike
        if is_own:
            yield keymap
        if is_wanted:
            with suppress(UsageError):
                yield replace(keymap, rules=tuple(rule for rule in keymap.rules if rule.targets)).inverse


def _ending_in(keymap: KeyMap, wanted: Collection[str]) -> KeyMap:
    """Return a map without the rules that give no name that is wanted: of the classes of a model type, several may have
    one name in files."""

    def is_wanted(rule: Rule) -> bool:
        return not rule.targets or any(target.is_one_of(wanted) for target in rule.targets)

    return replace(keymap, rules=tuple(filter(is_wanted, keymap.rules)))


def _fitting(planned: Catalogue, wanted: Mapping[str, Ints]) -> int:
    return sum(wanted.get(tensor.name) == tensor.shape for tensor in planned.tensors)


# Tensors --------------------------------------------------------------------------------------------------------------


def fitted(
    planned: Catalogue,
    reference: references.Reference,
    base: Base | None,
    where: str,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> Fitted:
    """Return the tensors of a model in the order of the reference, with missing ones from the base.

    Raises CorruptError for tensors that are missing or have another shape, LossError for those that the reference does
    not have. `where` is the path of the checkpoint; `tied` are names that the model ties, with the names that they are
    tied to.
    """
    own = {tensor.name: tensor for tensor in planned.tensors}
    result = Fitted(planned)
    chosen: dict[str, Tensor] = {}
    missing: list[str] = []
    twin = _twins(reference, own, tied)
    named = base is not None and bool(base.patterns)
    wanted = base.wanted if base is not None else None
    for name in reference.known:
        tensor = own.get(name) or twin(name)
        if base and wanted and (named or tensor is None) and name in base.tensors and wanted(name):
            chosen[name] = derived(base.tensors[name], part=_MODEL)
            result.filled.append(name)
        elif tensor is not None:
            chosen[name] = tensor
        else:
            missing.append(name)
    filled = {*result.filled}
    written = {planned.first(tensor).path: name for name, tensor in chosen.items() if name not in filled}
    extra = []
    for name, tensor in own.items():
        if name not in reference.known:
            kept = written.get(planned.first(tensor).path)
            if kept is None:
                extra.append(name)
            else:
                result.twins.append((name, kept))
    misshapen = [name for name, tensor in chosen.items() if tensor.shape != reference.known[name].shape]
    if missing or extra or misshapen:
        raise _refusal(missing, extra, misshapen, chosen, reference, base, where)
    stored_as = {name: known.tied_to for name, known in reference.known.items()}
    firsts = {name: planned.first(tensor).path for name, tensor in chosen.items() if name not in filled}

    def alias(name: str) -> tuple[str] | None:
        first = stored_as[name]
        return (first,) if first is not None and name in firsts and firsts[name] == firsts.get(first) else None

    tensors = [derived(tensor, path=(name,), alias=alias(name)) for name, tensor in chosen.items()]
    result.catalogue = rebuilt(planned, tensors, {})
    return result


def _twins(
    reference: references.Reference, own: Mapping[str, Tensor], tied: Mapping[str, str]
) -> Callable[[str], Tensor | None]:
    """Return a function that returns the tensor which a name of the reference is tied to, if the checkpoint has it
    under that name alone."""
    tied_to = {name: known.tied_to for name, known in reference.known.items() if known.tied_to is not None} | {**tied}
    together: dict[str, list[str]] = defaultdict(list)
    for name, kept in tied_to.items():
        together[kept].append(name)
    embeddings = [tensor for tensor in own.values() if ties.is_embedding(tensor.name)]

    def twin(name: str) -> Tensor | None:
        kept = tied_to.get(name, name)
        found = next((own[other] for other in (kept, *together.get(kept, ())) if other in own), None)
        if found is None and reference.assets.ties_words and ties.is_head(name):
            of_shape = [one for one in embeddings if one.shape == reference.known[name].shape]
            return of_shape[0] if len(of_shape) == 1 else None
        return found

    return twin


def _refusal(
    missing: Sequence[str],
    extra: Sequence[str],
    misshapen: Sequence[str],
    chosen: Mapping[str, Tensor],
    reference: references.Reference,
    base: Base | None,
    where: str,
) -> CkptError:
    whats = []
    if missing:
        of = f"{plural(len(missing), 'tensor')} of the reference"
        whats.append(f"{of} {is_or_are(missing)} missing: {some(missing, _SHOWN)}")
    if extra:
        whats.append(f"{plural(len(extra), 'tensor')} {is_or_are(extra)} not in the reference: {some(extra, _SHOWN)}")
    if misshapen:
        name = misshapen[0]
        found, expected = list(chosen[name].shape), list(reference.known[name].shape)
        more = f" and {len(misshapen) - 1} more" if len(misshapen) > 1 else ""
        whats.append(f"`{name}`{more} of another shape: found {found}, expected {expected}")
    if missing and extra:
        hint = (
            f"`ckpttool match {where} --like {reference.path} -o map.json` lists what may become of what, for `--map`"
        )
    elif missing and base is None:
        hint = "`--fill-from REF` takes what is missing from a base model"
    elif missing and base is not None:
        hint = f"`{base.path}` does not have them, or `--fill` does not name them"
    elif extra:
        hint = f"leave them out with `--exclude {literal(extra[0])}`"
    else:
        hint = "is the reference of this size of model?"
    facts = {"missing": [*missing], "unexpected": [*extra], "misshapen": [*misshapen]}
    kind = LossError if extra and not missing and not misshapen else CorruptError
    return kind(f"`{where}` does not fit `{reference.path}`: {'; '.join(whats)}", hint=hint, file=where, **facts)


def cast(planned: Catalogue, reference: references.Reference) -> Catalogue:
    """Return the tensors with the dtypes of the reference. Raises UsageError for those that no cast makes."""
    tensors = []
    for tensor in planned.tensors:
        wanted = DTYPES.get(reference.known[tensor.name].dtype, tensor.dtype)
        if wanted != tensor.dtype:
            kinds = {(one.kind, one.itemsize > 1) for one in (wanted, tensor.dtype)}
            if kinds != {("float", True)}:
                raise UsageError(
                    f"`{tensor.name}` is {tensor.dtype}, and {wanted} in `{reference.path}`: a cast does not quantise",
                    hint="name the release that is not quantised, or the dtypes with `--dtype`",
                    tensor=tensor.name,
                    found=tensor.dtype.name,
                    expected=wanted.name,
                )
            tensor = derived(tensor, dtype=wanted)
        tensors.append(tensor)
    return rebuilt(planned, tensors, {})


def files(planned: Catalogue, reference: references.Reference) -> tuple[str, dict[str, list[str]]] | None:
    """Return what the names of the files begin with, and the names in each, as the reference has them; None where it
    has no files of safetensors."""
    written = {tensor.name for tensor in planned.tensors if tensor.alias is None}
    named = {file: [name for name in names if name in written] for file, names in reference.files.items()}
    named = {file.rpartition("/")[2]: names for file, names in named.items() if names}
    if sum(map(len, named.values())) != len(written):
        return None
    match = _NUMBERED.fullmatch(next(iter(named)))
    return match[1] if match is not None else "model", named


# What the optimizer trained -------------------------------------------------------------------------------------------


def check_untrained(
    filled: Iterable[str],
    source: Catalogue,
    selection: Selection,
    mapped: Callable[[Catalogue], Catalogue],
    base: Base,
    where: str,
    notes: list[str],
) -> None:
    """Raise LossError if the optimizer of the source trained a tensor that is filled from the base. `mapped` gives
    tensors the names of the reference."""
    filled = [*filled]
    if not filled:
        return
    try:
        shapes = trained_parameters(source)
    except CkptError as error:
        raise LossError(
            f"`{where}`: whether the optimizer trained {some(filled, _SHOWN)} is unknown: {error.message}",
            hint=error.hint,
            file=where,
        ) from None
    if shapes is None:
        notes.append("there is no optimizer in the checkpoint: whether the filled tensors were trained is unknown")
        return
    prefix = f"{selection.strip_prefix.rstrip('.')}." if selection.strip_prefix else ""
    rename = renamer(selection.rename)
    own = {strip_wrappers(tensor.fqn): tensor for tensor in source.tensors if tensor.part.kind == "model"}
    tensors = {}
    for name, shape in shapes.items():
        stored = own.get(strip_wrappers(name))
        shape = stored.shape if stored is not None else shape
        path = (rename(strip_wrappers(name).removeprefix(prefix)),)
        tensors[path] = Tensor(path, DTYPES["float32"], shape or (), Chunks(), part=_MODEL)
    known = {tensor.name for tensor in mapped(rebuilt(source, tensors.values(), {})).tensors}
    lost = [name for name in filled if name in known]
    if lost:
        verb = "was" if len(lost) == 1 else "were"
        raise LossError(
            f"`{where}`: {plural(len(lost), 'tensor')} would be filled from `{base.path}`, but {verb} trained: the "
            f"optimizer has {some(lost, _SHOWN)}",
            hint="take the trained weights from a complete checkpoint, or name others with `--fill`",
            file=where,
            lost=lost,
        )
