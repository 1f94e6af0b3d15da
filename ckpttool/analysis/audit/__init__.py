"""Static check that a checkpoint has all the state needed to resume. Needs neither training nor torch.

audit("run/step-1000").verdict                    "exactly", "with differences" or "no"
audit("run/step-1000", recipe="recipe.py")        also whether names and shapes match the model of a recipe
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from ckpttool.analysis.audit.checks import Check, Checks
from ckpttool.analysis.audit.counters import check_counters
from ckpttool.analysis.audit.optimizer_state import check_optimizers
from ckpttool.analysis.audit.rank_values import check_rank_values
from ckpttool.analysis.audit.recipe import check_recipe
from ckpttool.analysis.audit.values import check_values, read_number, tensors_with_values, trained_names
from ckpttool.analysis.describe.optimizers import OptimizerSummary, optimizers
from ckpttool.analysis.result import Result
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.chosen import notes_of_run
from ckpttool.catalogue.entries import KINDS, Catalogue, Entry, Path, Tensor, dotted
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import DIFFERS, DONE, CkptError, UsageError
from ckpttool.producers.open import opened
from ckpttool.storage.files import Pool
from ckpttool.text import plural, size

VALUES_UP_TO = 1 << 30
"""Bytes of values that are read by default: a second or two."""

_SHOULD_BE = ("model", "optimizer", "scheduler", "rng", "dataloader", "scaler", "progress")


@dataclass(frozen=True, slots=True)
class PartSummary:
    """A part of the training state: `PartSummary("model", True, 19, 0, 4860)`."""

    part: str  #: kind of part
    present: bool  #: whether it is there
    tensor_count: int  #: number of tensors
    object_count: int  #: number of objects
    payload_bytes: int  #: bytes of values, tied ones counted once


@dataclass(frozen=True, slots=True)
class Group:
    """Parameter groups with equal hyper-parameters."""

    groups: list[str]  #: their numbers, or names of parameters
    parameters: int | None  #: number of parameters in them, if known
    values: dict[str, str]  #: hyper-parameters, as text


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The hyper-parameters of an optimizer."""

    optimizer: str  #: its key
    groups: list[Group]  #: its groups


@dataclass(slots=True, repr=False)
class Audit(Result):
    """The result of an audit."""

    command: ClassVar[str] = "audit"

    path: str  #: path, as it was typed
    format: str  #: its format
    world_size: int  #: number of ranks that wrote it
    step: float | None = None  #: step it was saved at, if known
    verdict: str = "exactly"  #: `exactly`, `with differences` or `no`
    message: str = ""  #: the verdict, for people
    parts: list[PartSummary] = field(default_factory=list)  #: parts of the training state
    checks: list[Check] = field(default_factory=list)  #: checks, one each
    values: bool | None = False  #: whether values were read; null if they are too many to be read unasked
    payload_bytes: int = 0  #: how many bytes they are
    hyperparameters: list[Hyperparameters] = field(default_factory=list)  #: those of each optimizer
    recipe: str | None = None  #: recipe whose model was built
    notes: list[str] = field(default_factory=list)  #: remarks, such as which checkpoint of a run was read
    seconds: float = 0.0  #: duration
    _optimizers: list[OptimizerSummary] = field(default_factory=list)

    @property
    def lines(self) -> Iterable[str]:
        """What `--quiet` prints: the verdict."""
        return (self.verdict,)

    @property
    def optimizers(self) -> list[OptimizerSummary]:
        """The optimizers, with their hyper-parameters."""
        return self._optimizers

    def note_hyperparameters(self, catalogue: Catalogue) -> None:
        """Note the hyper-parameters of each optimizer."""
        entries = [entry for entry in catalogue.entries.values() if entry.part.kind == "optimizer"]
        self._optimizers = optimizers(entries, catalogue.entries)
        for table in (optimizer.table for optimizer in self._optimizers if optimizer.table is not None):
            groups = [Group(one.groups, one.params, one.values) for one in table.columns]
            self.hyperparameters.append(Hyperparameters(dotted(table.root), groups))

    @property
    def exit_code(self) -> int:
        """1 if training cannot resume, else 0."""
        return DIFFERS if self.verdict == "no" else DONE


def audit(
    path: str | os.PathLike[str], *, recipe: str | None = None, values: bool | None = None, shapes: str | None = None
) -> Audit:
    """Check that the checkpoint at `path` has all the state needed to resume.

    Checks parts, the optimizer state of each parameter, schedulers, RNG states and data loaders of every rank, and
    counters. With `values`, also that no value is NaN or infinite and no second moment negative; None does so for up to
    `VALUES_UP_TO` bytes. `recipe` is a file whose model is built, to compare names and shapes. Raises CkptError if the
    checkpoint cannot be opened or the recipe does not run.
    """
    began = time.monotonic()
    path, checks = os.fspath(path), Checks()
    if recipe is not None:
        check_recipe(recipe)
    if path.endswith(".py"):
        order = f"`ckpttool verify-resume audit CHECKPOINT --recipe {path}`"
        raise UsageError(f"`{path}` is a recipe, and no checkpoint", hint=f"the checkpoint comes first: {order}")
    with opened(path, shapes) as source:
        catalogue = source.catalogue
        result = Audit(path, catalogue.format, catalogue.world_size, checks=checks, recipe=recipe)
        result.notes += notes_of_run(catalogue)
        result.note_hyperparameters(catalogue)
        _check(result, source, values, checks)
    if recipe is not None:
        from ckpttool.analysis.audit.model_fit import check_model

        check_model(recipe, catalogue, checks)
    _judge(result, checks)
    result.seconds = time.monotonic() - began
    return result


def _check(result: Audit, source: Source, values: bool | None, checks: Checks) -> None:
    catalogue = source.catalogue
    is_whole = _check_files(catalogue, checks)
    aliases = find_aliases(catalogue.tensors)
    result.parts = _parts(catalogue, aliases)
    present = {part.part for part in result.parts if part.present}
    for kind in ("model", "optimizer"):
        if kind not in present:
            alone = ": this is a model alone, and its moments would restart at zero" if "model" in present else ""
            checks.fails("parts", f"no {kind}{alone}")
    with closing(Pool()) as pool:
        number = partial(read_number, source=source, pool=pool)
        optimizers = check_optimizers(catalogue, aliases, number, checks) if "optimizer" in present else []
        step = check_counters(catalogue, optimizers, number, checks)
        result.step = int(step) if isinstance(step, float) and step.is_integer() else step
    check_rank_values(catalogue, checks)
    tensors = tensors_with_values(catalogue, aliases)
    result.payload_bytes = sum(tensor.nbytes for tensor in tensors)
    if tensors and values is not False and not is_whole:
        checks.note("values", "not read: files are damaged")
    elif tensors and (values is False or (values is None and result.payload_bytes > VALUES_UP_TO)):
        result.values = values
        hint = "`--values` reads them and checks for NaN, infinities and negative second moments"
        checks.note("values", f"not read: {size(result.payload_bytes)}", hint=hint)
    elif tensors:
        result.values = True
        check_values(tensors, source, trained_names(catalogue, optimizers), checks)


def _check_files(catalogue: Catalogue, checks: Checks) -> bool:
    try:
        validate(catalogue)
    except CkptError as error:
        more = len(catalogue.faults) - 1
        others = f", and {plural(more, 'other fault')}" if more > 0 else ""
        checks.fails("files", error.message + others, hint=error.hint)
        return False
    checks.ok("files", f"every tensor is fully covered, in {plural(len(catalogue.own_files), 'file')}")
    return True


def _parts(catalogue: Catalogue, aliases: Mapping[Path, Path]) -> list[PartSummary]:
    by_kind: dict[str, list[Entry]] = {kind: [] for kind in KINDS}
    for entry in catalogue.entries.values():
        by_kind[entry.part.kind].append(entry)
    summaries = []
    for kind, entries in by_kind.items():
        if entries or kind in _SHOULD_BE:
            tensors = [entry for entry in entries if isinstance(entry, Tensor)]
            nbytes = sum(tensor.nbytes for tensor in tensors if tensor.path not in aliases)
            summaries.append(PartSummary(kind, bool(entries), len(tensors), len(entries) - len(tensors), nbytes))
    return summaries


def _judge(result: Audit, checks: Checks) -> None:
    fails, differs = checks.topics("fails"), checks.topics("differs")
    topics = ", ".join(dict.fromkeys(fails or differs))
    unread = "" if result.values else " (values not read)"
    if fails:
        result.verdict, result.message = "no", f"not resumable: {plural(len(fails), 'reason')} ({topics})"
    elif differs:
        result.verdict = "with differences"
        result.message = f"resumable with {plural(len(differs), 'difference')} ({topics}){unread}"
    else:
        result.message = f"resumable exactly{unread}"
