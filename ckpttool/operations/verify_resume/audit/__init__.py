"""Static check that a checkpoint has all the state needed to resume. Needs neither training nor torch.

audit("run/step-1000").verdict                    "exactly", "with differences" or "no"
audit("run/step-1000", recipe="recipe.py")        also whether names and shapes match the model of a recipe
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import KINDS, Catalogue, Object, Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout import select
from ckpttool.layout.rename import strip_wrappers
from ckpttool.operations.verify_resume.audit.checks import Check, Checks
from ckpttool.operations.verify_resume.audit.counters import check_counters
from ckpttool.operations.verify_resume.audit.optimizer_state import NamedOptimizer, check_optimizers
from ckpttool.operations.verify_resume.audit.rank_values import check_rank_values
from ckpttool.operations.verify_resume.audit.values import check_values, read_number, tensors_with_values, trained_names
from ckpttool.producers.open import opened
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import local_path
from ckpttool.text import plural, size

SCHEMA = "ckpttool/audit/1"
VALUES_UP_TO = 1 << 30
"""Bytes of values that are read by default: a second or two."""

_SHOULD_BE = ("model", "optimizer", "scheduler", "rng", "dataloader", "scaler", "progress")


@dataclass(frozen=True, slots=True)
class PartSummary:
    """A part of the training state: `PartSummary("model", True, 19, 0, 4860)`."""

    kind: str  #: kind of part
    present: bool  #: whether it is there
    tensors: int  #: number of tensors
    objects: int  #: number of objects
    bytes: int  #: bytes of values, tied ones counted once


@dataclass(slots=True)
class Audit:
    """The result of an audit."""

    path: str  #: path, as it was typed
    format: str  #: its format
    world_size: int  #: number of ranks that wrote it
    step: float | None = None  #: step it was saved at, if known
    verdict: str = "exactly"  #: `exactly`, `with differences` or `no`
    says: str = ""  #: the verdict, for people
    parts: list[PartSummary] = field(default_factory=list)  #: parts of the training state
    checks: list[Check] = field(default_factory=list)  #: checks, one each
    values: bool | None = False  #: whether values were read; null if they are too many to be read unasked
    values_bytes: int = 0  #: how many bytes they are
    recipe: str | None = None  #: recipe whose model was built
    seconds: float = 0.0  #: duration
    catalogue: Catalogue | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints, but for the hyperparameters. See `docs/reference/json.md`."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in ("catalogue", "parts", "checks")}
        lines = {"parts": [asdict(part) for part in self.parts], "checks": [asdict(check) for check in self.checks]}
        return {"schema": SCHEMA, **fields, **lines}


def audit(
    path: str | os.PathLike[str],
    *,
    recipe: str | None = None,
    values: bool | None = None,
    shapes: str | None = None,
) -> Audit:
    """Check that the checkpoint at `path` has all the state needed to resume.

    Checks parts, the optimizer state of each parameter, schedulers, RNG states and data loaders of every rank, and
    counters. With `values`, also that no value is NaN or infinite and no second moment negative; None does so for up to
    `VALUES_UP_TO` bytes. `recipe` is a file whose model is built, to compare names and shapes. Raises CkptError if the
    checkpoint cannot be opened or the recipe does not run.
    """
    began = time.monotonic()
    path = os.fspath(path)
    if recipe is not None and not local_path(recipe).is_file():
        raise UsageError(f"`{recipe}`: no such recipe", hint="`ckpttool verify-resume init` writes a template")
    with opened(path, shapes) as source:
        result = _audited(path, source, values)
    if recipe is not None:
        from ckpttool.operations.verify_resume.audit.model_fit import check_model

        result.recipe = recipe
        assert result.catalogue is not None
        result.checks += check_model(recipe, result.catalogue)
    result.verdict, result.says = _verdict(result)
    result.seconds = time.monotonic() - began
    return result


def _audited(path: str, source: Source, values: bool | None) -> Audit:
    catalogue, checks = source.catalogue, Checks()
    result = Audit(path, catalogue.format, catalogue.world_size, catalogue=catalogue)
    is_whole = _whole(catalogue, checks)
    aliases = find_aliases(catalogue.tensors)
    result.parts = _parts(catalogue, aliases)
    for part in result.parts:
        if part.kind in ("model", "optimizer") and not part.present:
            checks.fails("parts", f"no {part.kind}" + _why(part.kind, catalogue))
    pool = Pool()
    optimizers: list[NamedOptimizer] = []

    def number(tensor: Tensor) -> float:
        return read_number(tensor, source, pool)

    try:
        if any(part.kind == "optimizer" and part.present for part in result.parts):
            optimizers = check_optimizers(catalogue, aliases, number, checks)
        result.step = check_counters(catalogue, optimizers, number, checks)
    finally:
        pool.close()
    check_rank_values(catalogue, checks)
    result.checks = checks
    tensors = tensors_with_values(catalogue, aliases)
    result.values_bytes = sum(tensor.nbytes for tensor in tensors)
    _values(result, tensors, source, optimizers, values, is_whole)
    return result


def _whole(catalogue: Catalogue, checks: Checks) -> bool:
    try:
        validate(catalogue)
    except CkptError as error:
        more = len(catalogue.faults) - 1
        checks.fails(
            "files", error.message + (f", and {plural(more, 'other fault')}" if more > 0 else ""), hint=error.hint
        )
        return False
    checks.ok("files", f"every tensor is fully covered, in {plural(len(catalogue.own_files), 'file')}")
    return True


def _parts(catalogue: Catalogue, aliases: Mapping[Path, Path]) -> list[PartSummary]:
    counts = {kind: [0, 0, 0] for kind in KINDS}
    for path, entry in catalogue.entries.items():
        row = counts[entry.part.kind]
        if isinstance(entry, Object):
            row[1] += 1
        else:
            row[0] += 1
            row[2] += 0 if path in aliases else entry.nbytes
    return [PartSummary(kind, any(row[:2]), *row) for kind, row in counts.items() if kind in _SHOULD_BE or any(row[:2])]


def _why(kind: str, catalogue: Catalogue) -> str:
    if kind == "optimizer" and any(e.part.kind == "model" for e in catalogue.entries.values()):
        return ": this is a model alone, and its moments would restart at zero"
    return ""


def _values(
    result: Audit,
    tensors: Sequence[Tensor],
    source: Source,
    optimizers: Sequence[NamedOptimizer],
    read: bool | None,
    is_whole: bool,
) -> None:
    checks = result.checks
    assert isinstance(checks, Checks)
    if not tensors or (read is not False and not is_whole):
        if tensors:
            checks.note("values", "not read: files are damaged")
        return
    if read is False or (read is None and result.values_bytes > VALUES_UP_TO):
        result.values = read
        hint = "`--values` reads them and checks for NaN, infinities and negative second moments"
        checks.note("values", f"not read: {size(result.values_bytes)}", hint=hint)
        return
    result.values = True
    parameters = {name for one in optimizers if one.is_named for name in one.names.values()}
    if not all(one.is_named for one in optimizers):
        # The ids have no names: any tensor may be a parameter.
        models = select.models(source.catalogue)
        parameters |= {strip_wrappers(entry.fqn) for _, entries in models for entry in entries}
    check_values(tensors, source, trained_names(source.catalogue, parameters), checks)


def _verdict(result: Audit) -> tuple[str, str]:
    fails = [check for check in result.checks if check.state == "fails"]
    differs = [check for check in result.checks if check.state == "differs"]
    unread = "" if result.values else " (values not read)"
    if fails:
        topics = ", ".join(dict.fromkeys(check.what for check in fails))
        return "no", f"not resumable: {plural(len(fails), 'reason')} ({topics})"
    if differs:
        topics = ", ".join(dict.fromkeys(check.what for check in differs))
        return "with differences", f"resumable with {plural(len(differs), 'difference')} ({topics}){unread}"
    return "exactly", f"resumable exactly{unread}"
