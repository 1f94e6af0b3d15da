"""`check`: does the model of a checkpoint fit a reference, by names, shapes and dtypes, and by samples of its values?

The names are those that `export` would write. Of the reference only what its headers say is read, or `config.json`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar

from ckpttool.analysis.result import Result
from ckpttool.catalogue.chosen import notes_of_run
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.findings import Finding, published
from ckpttool.catalogue.patterns import several
from ckpttool.errors import DIFFERS, DONE
from ckpttool.layout.key_maps import apply
from ckpttool.layout.selection import Selection
from ckpttool.layout.views import Viewed
from ckpttool.models import key_maps, select_model
from ckpttool.models import reference as references
from ckpttool.models.fitting import names, values
from ckpttool.models.fitting.names import Mismatch
from ckpttool.models.reference import Known, Reference
from ckpttool.operations import arguments
from ckpttool.producers.open import naming, opened
from ckpttool.reports.report import Block, Facts, Findings, Line, Styled, Text, bold, known
from ckpttool.storage.stores import path_text
from ckpttool.text import duration, plural
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.threads import Progress

__all__ = ["Checked", "check"]


@dataclass(slots=True, repr=False)
class Checked(Result):
    """The result of a check."""

    command: ClassVar[str] = "check"

    path: str  #: path of the checkpoint, as it was typed
    against: str  #: path of the reference, as it was typed
    tensor_count: int = 0  #: number of tensors of the model
    reference_tensor_count: int = 0  #: number of tensors of the reference
    matched: int = 0  #: number of tensors with the same name and shape in both
    key_map: str = ""  #: key map that was applied, or empty
    mismatches: list[Finding] = field(default_factory=list, metadata=published(Mismatch))  #: the gravest first
    compared: int = 0  #: number of tensors of which values were compared (`--content`)
    similarity: float | None = None  #: lowest cosine of them; null without any
    notes: list[str] = field(default_factory=list)  #: remarks, such as which checkpoint of a run was read
    seconds: float = 0.0  #: duration

    @property
    def verdict(self) -> str:
        """`fits`, or `differs` if the reference's names or shapes are not the model's."""
        return "differs" if any(one.fails for one in self.mismatches) else "fits"

    @property
    def message(self) -> str:
        """The verdict in a sentence."""
        of = f"{self.matched:,} of {plural(self.reference_tensor_count, 'tensor')}"
        if self.verdict == "fits":
            return f"{self.path} fits {self.against}: {of}"
        kinds = dict.fromkeys(one.kind for one in self.mismatches if one.fails)
        return f"{self.path} does not fit {self.against}: {of} match; {', '.join(kinds)}"

    @property
    def lines(self) -> Iterable[str]:
        """What `--quiet` prints: why it does not fit."""
        return (f"{one.kind}: {one.message}" for one in self.mismatches if one.fails)

    @property
    def exit_code(self) -> int:
        """1 if the model does not fit."""
        return DIFFERS if self.verdict == "differs" else DONE


def check(
    src: str | os.PathLike[str],
    against: str | os.PathLike[str],
    *,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: str | Sequence[str] = (),
    strip_wrappers: bool = False,
    strip_prefix: str | None = None,
    key_map: str | None = None,
    content: bool = False,
    shapes: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Checked:
    """Return in what the model of the checkpoint `src` does not fit the reference `against`.

    Args:
        src: a checkpoint of any format.
        against: a checkpoint of any format or `hf://org/name`, of which only headers are read; or a `config.json`, of
            which transformers makes the model without weights.
        only: the model, if there are several: its key.
        exclude: globs of tensors to leave out.
        rename: rules `OLD=NEW` for names of `src`.
        strip_wrappers: whether to remove `module.`, `_orig_mod.` and the like from names.
        strip_prefix: a prefix to remove from names.
        key_map: name of a key map, or its file; by default the one that fits, as `export` does; `"none"` for none.
        content: whether to compare samples of the values too.
        shapes: a checkpoint or JSON file with the shapes of parameters, for FSDP1 flat parameters.
        threads: how many threads read.
        progress: called with bytes done and in all, from this thread.

    Raises:
        UsageError: if there is no model in either, or the options do not fit.
        ReadError: if there is no checkpoint at `src` or `against`, or it cannot be read.
        CorruptError: if one of them is damaged.
    """
    began = time.monotonic()
    result = Checked(path_text(src), path_text(against))
    selected = arguments.selection(only, (), (), exclude, rename, strip_wrappers, strip_prefix)
    with ExitStack() as stack:
        reference = references.read(stack, result.against)
        with naming(result.path):
            source = stack.enter_context(opened(result.path, shapes))
            result.notes += [*reference.notes, *notes_of_run(source.catalogue, result.path)]
            viewed = Viewed(source)
            model = _model(viewed, selected, key_map, reference, result)
        known = {tensor.name: Known.of(tensor) for tensor in model.tensors}
        new_names, prefix = names.without_prefix(known, reference.known)
        known = {new_names[name]: one for name, one in known.items()}
        for one in known.values():
            one.tied_to = new_names.get(one.tied_to, one.tied_to) if one.tied_to is not None else None
        result.mismatches += [prefix] if prefix is not None else []
        result.mismatches += names.mismatches(known, reference.known, ties_words=reference.assets.ties_words)
        result.tensor_count, result.reference_tensor_count = len(known), len(reference.known)
        fitting = [n for n, one in known.items() if n in reference.known and one.shape == reference.known[n].shape]
        result.matched = len(fitting)
        if content:
            result.mismatches += _content(model, new_names, {*fitting}, viewed, reference, result, threads, progress)
    result.mismatches.sort(key=names.order)
    result.seconds = time.monotonic() - began
    return result


def _model(
    viewed: Viewed, selected: Selection, key_map: str | None, reference: Reference, result: Checked
) -> Catalogue:
    model = select_model.renamed(select_model.model_of(viewed.catalogue, several(selected.only)), selected)
    own = [tensor.name for tensor in model.tensors]
    chosen = key_maps.chosen(key_map, own, reference.config, reference=[*reference.known])
    if chosen is None:
        return model
    result.key_map = chosen.name
    facts = key_maps.facts(reference.config, reference.assets.head_dim)
    return apply(chosen, model, viewed, facts)[0]


def _content(
    model: Catalogue,
    new_names: dict[str, str],
    fitting: set[str],
    viewed: Viewed,
    reference: Reference,
    result: Checked,
    threads: int | None,
    progress: Progress | None,
) -> list[Finding]:
    source = reference.with_values()
    pairs = [
        values.ReferencePair(name, tensor.origin or tensor, reference.tensors[name].origin or reference.tensors[name])
        for tensor in model.tensors
        if (name := new_names[tensor.name]) in fitting
    ]
    sources, count = (viewed, source), threads or DEFAULT_THREADS
    similarities = values.compare(pairs, sources, count, progress)
    result.compared = len(similarities)
    result.similarity = min((one.lowest for one in similarities), default=None)
    found = list(values.judged(similarities))
    named = {name for one in found for name in one.names}
    # From scratch, nothing is like anything.
    for rows in values.vectors(pairs, sources) if any(map(values.same, similarities)) else ():
        found += [one for one in values.judged_vectors(rows) if named.isdisjoint(one.names)]
    if viewed.catalogue.is_local:
        found += values.nonfinite(pairs, sources, count, progress)
    else:
        result.notes.append(f"`{result.path}` is not on this machine: NaN outside of the samples is not seen")
    return found


# What it looks like ---------------------------------------------------------------------------------------------------

_SHOWN = 40
_TITLES = {
    "left over": "left over",
    "extra": "not in the reference",
    "shape": "shapes",
    "tie": "ties",
    "content": "values",
    "dtype": "dtypes",
    "unknown": "values",
}


def blocks(result: Checked, verbose: bool = False) -> Iterator[Block]:
    """Yield the verdict, how much was compared, the mismatches of each kind, and what to try next."""
    verdict = Styled("does not fit", "red") if result.exit_code else bold("fits")
    yield Line([bold(result.path), " ", verdict, " ", bold(result.against)])
    yield Facts(known(_facts(result)))
    kinds = dict.fromkeys(one.kind for one in result.mismatches)
    for kind in kinds:
        yield Findings(_TITLES.get(kind, kind), [one for one in result.mismatches if one.kind == kind], _SHOWN)
    if {"missing", "extra"} <= {*kinds}:
        command = f"ckpttool match {result.path} --like {result.against}"
        yield Text(f"`{command}` finds out whether the missing tensors exist under other names.")


def _facts(result: Checked) -> Iterator[tuple[str, str | None]]:
    yield (
        "tensors",
        f"{result.tensor_count:,}, and {result.reference_tensor_count:,} in the reference; {result.matched:,} match",
    )
    yield "names", result.key_map and f"those of key map `{result.key_map}`"
    if result.similarity is not None:
        yield "values", f"samples of {plural(result.compared, 'tensor')}; the lowest cosine is {result.similarity:.4f}"
    yield "time", duration(result.seconds)
