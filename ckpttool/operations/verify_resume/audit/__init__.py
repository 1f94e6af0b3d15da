"""Is everything there that training needs to go on? Looked at without training, and without torch.

audit("run/step-1000").verdict                    "exactly", "with differences" or "no"
audit("run/step-1000", recipe="recipe.py")        also whether the names and shapes are those of the user's model
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
from ckpttool.layout import select as layout
from ckpttool.operations.verify_resume.audit import (
    counters as clocks,
)
from ckpttool.operations.verify_resume.audit import (
    optimizer_state as moments,
)
from ckpttool.operations.verify_resume.audit import (
    rank_values as ofranks,
)
from ckpttool.operations.verify_resume.audit import (
    values as soundness,
)
from ckpttool.operations.verify_resume.audit.checks import Check, Checks
from ckpttool.operations.verify_resume.audit.optimizer_state import Known
from ckpttool.producers.open import opened
from ckpttool.storage.files import Pool
from ckpttool.text import plural, size

SCHEMA = "ckpttool/audit/1"
VALUES_UP_TO = 1 << 30
"""Bytes of values that are read without being asked for: a second or two."""

_SHOULD_BE = ("model", "optimizer", "scheduler", "rng", "dataloader", "scaler", "progress")


@dataclass(frozen=True, slots=True)
class PartFound:
    """`PartFound("model", True, 19, 0, 4860)`: tensors, objects, bytes of values, tied ones once."""

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
    parts: list[PartFound] = field(default_factory=list)  #: parts of the training state
    checks: list[Check] = field(default_factory=list)  #: checks, one each
    values: bool | None = False  #: whether values were read; null if they are too many to be read unasked
    values_bytes: int = 0  #: how many bytes they are
    recipe: str | None = None  #: recipe whose model was built
    seconds: float = 0.0  #: duration
    catalogue: Catalogue | None = None

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints, but for the hyper-parameters. See `docs/reference/json.md`."""
        kept = {name: getattr(self, name) for name in self.__slots__ if name not in ("catalogue", "parts", "checks")}
        lines = {"parts": [asdict(part) for part in self.parts], "checks": [asdict(check) for check in self.checks]}
        return {"schema": SCHEMA, **kept, **lines}


def audit(
    path: str | os.PathLike[str],
    *,
    recipe: str | None = None,
    values: bool | None = None,
    shapes: str | None = None,
) -> Audit:
    """Look at the checkpoint at `path`: parts, the optimizer's state of each parameter, schedulers, generators and data
    loaders of every rank, counters. `values` says whether NaN, infinities and negative second moments are looked for;
    None does so when there is no more than `VALUES_UP_TO`. `recipe` is a file whose model is built, to compare names
    and shapes. Raises CkptError when the checkpoint cannot be opened, or the recipe does not run."""
    began = time.monotonic()
    path = os.fspath(path)
    if recipe is not None and not os.path.isfile(recipe):
        raise UsageError(
            f"`{recipe}`: there is no such recipe", hint="`ckpttool verify-resume init` writes one to begin with"
        )
    with opened(path, shapes) as source:
        made = _audited(path, source, values)
    if recipe is not None:
        from ckpttool.operations.verify_resume.audit import model_fit as fitting

        made.recipe = recipe
        assert made.catalogue is not None
        made.checks += fitting.look(recipe, made.catalogue)
    made.verdict, made.says = _verdict(made)
    made.seconds = time.monotonic() - began
    return made


def _audited(path: str, source: Source, values: bool | None) -> Audit:
    catalogue, checks = source.catalogue, Checks()
    made = Audit(path, catalogue.format, catalogue.world_size, catalogue=catalogue)
    is_whole = _whole(catalogue, checks)
    aliases = find_aliases(catalogue.tensors)
    made.parts = _parts(catalogue, aliases)
    for part in made.parts:
        if part.kind in ("model", "optimizer") and not part.present:
            checks.fails("parts", f"there is no {part.kind}" + _why(part.kind, catalogue))
    pool = Pool()
    known: list[Known] = []

    def number(tensor: Tensor) -> float:
        return soundness.number(tensor, source, pool)

    try:
        if any(part.kind == "optimizer" and part.present for part in made.parts):
            known = moments.look(catalogue, aliases, number, checks)
        made.step = clocks.look(catalogue, known, number, checks)
    finally:
        pool.close()
    ofranks.look(catalogue, checks)
    made.checks = checks
    chosen = soundness.chosen(catalogue, aliases)
    made.values_bytes = sum(tensor.nbytes for tensor in chosen)
    _values(made, chosen, source, known, values, is_whole)
    return made


def _whole(catalogue: Catalogue, checks: Checks) -> bool:
    try:
        validate(catalogue)
    except CkptError as error:
        more = len(catalogue.faults) - 1
        checks.fails("files", error.message + (f", and {plural(more, 'other fault')}" if more > 0 else ""),
                     hint=error.hint)  # fmt: skip
        return False
    checks.ok("files", f"every tensor is covered exactly, by {plural(len(catalogue.own_files), 'file')}")
    return True


def _parts(catalogue: Catalogue, aliases: Mapping[Path, Path]) -> list[PartFound]:
    counts = {kind: [0, 0, 0] for kind in KINDS}
    for path, entry in catalogue.entries.items():
        row = counts[entry.part.kind]
        if isinstance(entry, Object):
            row[1] += 1
        else:
            row[0] += 1
            row[2] += 0 if path in aliases else entry.nbytes
    return [
        PartFound(kind, any(row[:2]), *row) for kind, row in counts.items() if kind in _SHOULD_BE or any(row[:2])
    ]  # fmt: skip


def _why(kind: str, catalogue: Catalogue) -> str:
    if kind == "optimizer" and any(e.part.kind == "model" for e in catalogue.entries.values()):
        return ": this is a model alone, and its moments would begin at zero"
    return ""


def _values(
    made: Audit, chosen: Sequence[Tensor], source: Source, known: Sequence[Known], wanted: bool | None, is_whole: bool
) -> None:
    checks = made.checks
    assert isinstance(checks, Checks)
    if not chosen or (wanted is not False and not is_whole):
        if chosen:
            checks.note("values", "were not read, as files are damaged")
        return
    if wanted is False or (wanted is None and made.values_bytes > VALUES_UP_TO):
        made.values = wanted
        hint = "`--values` reads them: NaN, infinities, second moments below zero"
        checks.note("values", f"were not read: {size(made.values_bytes)}", hint=hint)
        return
    made.values = True
    told = [k for k in known if k.is_named]
    parameters = {name for k in told for name in k.names.values()}
    if len(told) < len(known):
        # Whose the ids are was not told: any tensor may be a parameter.
        models = layout.models(source.catalogue)
        parameters |= {layout.strip_wrappers(entry.fqn) for _, entries in models for entry in entries}
    soundness.look(chosen, source, soundness.trained_names(source.catalogue, parameters), checks)


def _verdict(made: Audit) -> tuple[str, str]:
    fails = [check for check in made.checks if check.state == "fails"]
    differs = [check for check in made.checks if check.state == "differs"]
    unread = "" if made.values else ", as far as can be told without reading the values"
    if fails:
        topics = ", ".join(dict.fromkeys(check.what for check in fails))
        return "no", f"not resumable: {plural(len(fails), 'reason')} ({topics})"
    if differs:
        topics = ", ".join(dict.fromkeys(check.what for check in differs))
        return "with differences", f"resumable with {plural(len(differs), 'difference')} ({topics}){unread}"
    return "exactly", f"resumable exactly{unread}"
