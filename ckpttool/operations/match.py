"""`match`: how is each tensor of a reference made of those of a checkpoint? The answer is a key map.

Of both, names and shapes are read, and values only to choose among the ways in which a tensor may be made.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckpttool.analysis.result import Result
from ckpttool.catalogue.chosen import notes_of_run
from ckpttool.catalogue.findings import DIFFERENCE, Finding
from ckpttool.catalogue.patterns import several
from ckpttool.errors import DIFFERS, DONE
from ckpttool.layout.views import Viewed
from ckpttool.models import key_maps, select_model
from ckpttool.models import reference as references
from ckpttool.models.fitting.names import is_left_over, is_scale
from ckpttool.models.matching import decide, models
from ckpttool.models.matching.solution import Candidate, Open, Solution
from ckpttool.models.reference import Reference
from ckpttool.operations import arguments
from ckpttool.producers.open import naming, opened
from ckpttool.reports.report import (
    SHOWN,
    Block,
    Facts,
    Findings,
    Line,
    Styled,
    Text,
    Verbatim,
    bold,
    dim,
    how_many,
    known,
)
from ckpttool.storage import staging
from ckpttool.storage.stores import local_path, path_text
from ckpttool.text import duration, plural, some
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.threads import Progress

__all__ = ["Candidate", "Matched", "Open", "match"]


@dataclass(slots=True, repr=False)
class Matched(Result):
    """The result of a match: a key map, and what it leaves open."""

    command: ClassVar[str] = "match"

    source: str  #: path of the checkpoint, as it was typed
    like: str  #: path of the reference, as it was typed
    tensor_count: int = 0  #: number of tensors of the model
    reference_tensor_count: int = 0  #: number of tensors of the reference
    found: int = 0  #: number of tensors of the reference of which it is known how they are made
    by: dict[str, int] = field(default_factory=dict)  #: number of them by what decided, such as `words`
    map: dict[str, Any] = field(default_factory=dict)  #: the key map, as its file has it
    ambiguous: list[Open] = field(default_factory=list)  #: tensors of the reference that may be made in several ways
    unmatched: list[Open] = field(default_factory=list)  #: tensors of the reference that nothing can make
    assumed: list[Open] = field(default_factory=list)  #: tensors that are found, but may be transposed all the same
    unused: list[str] = field(default_factory=list)  #: tensors of the checkpoint that no rule takes
    left_over: list[str] = field(default_factory=list)  #: those of an adapter, or the scales of quantised weights
    compared: int = 0  #: number of tensors of which values were compared (`--content`)
    destination: str | None = None  #: file of the map, if it was written
    notes: list[str] = field(default_factory=list)  #: remarks, such as which checkpoint of a run was read
    seconds: float = 0.0  #: duration

    @property
    def verdict(self) -> str:
        """`found`, or `open` if something is ambiguous or unmatched, or belongs to tensors that a rule takes alone."""
        return "open" if self.ambiguous or self.unmatched or self.left_over else "found"

    @property
    def message(self) -> str:
        """The verdict in a sentence."""
        reference = f"{plural(self.reference_tensor_count, 'tensor')} of {self.like}"
        text = f"{self.found:,} of {reference} can be built from {self.source}"
        for what, all_ in (("ambiguous", self.ambiguous), ("unmatched", self.unmatched)):
            number = sum(len(one.names) for one in all_)
            text += f"; {number:,} {what}" if number else ""
        return text + (f"; {len(self.left_over):,} left over" if self.left_over else "")

    @property
    def lines(self) -> Iterable[str]:
        """What `--quiet` prints: the map."""
        return text(self.map).splitlines()

    @property
    def exit_code(self) -> int:
        """1 unless all is found."""
        return DIFFERS if self.verdict == "open" else DONE


def match(
    src: str | os.PathLike[str],
    like: str | os.PathLike[str],
    *,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    strip_wrappers: bool = False,
    head_dim: int | None = None,
    output: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    content: bool = False,
    shapes: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Matched:
    """Return how the tensors of the reference `like` are made of those of the checkpoint `src`: a key map.

    Args:
        src: a checkpoint of any format.
        like: a checkpoint of any format or `hf://org/name`, of which only headers are read; or a `config.json`, of
            which transformers makes the model without weights.
        only: the model, if there are several: its key.
        exclude: globs of tensors to leave out.
        strip_wrappers: whether to remove `module.`, `_orig_mod.` and the like from names.
        head_dim: the rows of an attention head; by default as the config of the reference says.
        output: the file to write the map to.
        overwrite: whether to replace that file.
        content: whether to choose among the ways in which a tensor may be made by samples of the values; those of a
            fine-tune are like the reference's.
        shapes: a checkpoint or JSON file with the shapes of parameters, for FSDP1 flat parameters.
        threads: how many threads read.
        progress: called with bytes done and in all, from this thread.

    Raises:
        UsageError: if there is no model in either, or the options do not fit.
        ReadError: if there is no checkpoint at `src` or `like`, or it cannot be read.
        CorruptError: if one of them is damaged.
        OverwriteError: if `output` exists.
    """
    began = time.monotonic()
    result = Matched(path_text(src), path_text(like), destination=arguments.path(output))
    if result.destination is not None:
        staging.check_free(result.destination, overwrite=overwrite, is_file=True)
    selected = arguments.selection(only, (), (), exclude, (), strip_wrappers, None)
    with ExitStack() as stack:
        reference = references.read(stack, result.like)
        with naming(result.source):
            source = stack.enter_context(opened(result.source, shapes))
            result.notes += [*reference.notes, *notes_of_run(source.catalogue, result.source)]
            viewed = Viewed(source)
            model = select_model.model_of(viewed.catalogue, several(selected.only))
            model = select_model.renamed(model, selected)
        rows = head_dim or reference.assets.head_dim
        solution = models.solved(model, viewed, reference, reference.config, rows)
        if content:
            facts = key_maps.facts(reference.config, rows)
            how = threads or DEFAULT_THREADS, progress
            result.compared = decide.by_content(solution, model.tensors, viewed, reference, facts, *how)
        _fill(result, solution, reference)
    result.tensor_count = len(model.tensors)
    if result.destination is not None:
        with local_path(result.destination).stage(overwrite=overwrite, is_file=True) as stage:
            stage.path.put(f"{text(result.map)}\n".encode())
    result.seconds = time.monotonic() - began
    return result


def text(keymap: Mapping[str, Any]) -> str:
    """Return a key map as its file has it: one line for each rule."""
    head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in keymap.items() if key != "rules")
    rules = ",\n".join(f"    {json.dumps(rule)}" for rule in keymap["rules"])
    rules = f"[\n{rules}\n  ]" if rules else "[]"
    return f'{{\n{head}  "rules": {rules}\n}}'


def _fill(result: Matched, solution: Solution, reference: Reference) -> None:
    result.reference_tensor_count = len(reference.known)
    result.by = models.counts(solution)
    result.found = sum(result.by.values())
    result.map = models.key_map(solution, f"{result.source} as {result.like}", reference.config)
    result.ambiguous, result.unmatched, result.unused = solution.ambiguous, solution.unmatched, solution.unused
    result.assumed = solution.assumed
    result.left_over = [name for name in solution.unused if is_left_over(name)]


# What it looks like ---------------------------------------------------------------------------------------------------

_BY = {
    "name": "by their names",
    "renaming": "by names with the same ending",
    "words": "by what their names say",
    "shape": "as nothing else of their shapes is left",
    "map": "by a key map that comes with ckpttool",
    "content": "by samples of the values",
}


def blocks(result: Matched, verbose: bool = False) -> Iterator[Block]:
    """Yield the verdict, how much is found by what, what is left open, and the key map or where it is."""
    verdict = Styled("is matched in part", "red") if result.exit_code else bold("is matched")
    yield Line([bold(result.like), " ", verdict, " by ", bold(result.source)])
    yield Facts(known(_facts(result)))
    yield Findings("ambiguous", [_finding(one, "ambiguous") for one in result.ambiguous])
    yield Findings("unmatched", [_finding(one, "unmatched") for one in result.unmatched])
    if result.left_over:
        yield Findings("left over", [Finding(DIFFERENCE, "left over", _why_left(result.left_over))])
    if result.unused:
        yield Text(some(result.unused, len(result.unused) if verbose else SHOWN), "not used", how_many(result.unused))
    if result.destination is None:
        yield Verbatim("key map", text(result.map))
    else:
        yield Line([dim("wrote "), result.destination])


def _why_left(names: Sequence[str]) -> str:
    if all(is_scale(name) for name in names):
        return f"{some(names)}: scales of quantised weights, without which these are codes: dequantise the model first"
    return (
        f"{some(names)}: an adapter that is not merged into the weights: merge it first, as PEFT's `merge_and_unload`"
    )


def _finding(one: Open, kind: str) -> Finding:
    of = f" ({plural(len(one.names), 'tensor')})" if len(one.names) > 1 else ""
    message = f"`{one.name}`{of} {list(one.shape)}: {one.why}"
    return Finding(DIFFERENCE, kind, message, names=one.names, ways=[way.text for way in one.candidates])


def _facts(result: Matched) -> Iterator[tuple[str, str | None]]:
    found = f"{result.found:,} are found"
    yield "tensors", f"{result.tensor_count:,}, and {result.reference_tensor_count:,} in the reference; {found}"
    yield from (("", f"{number:,} {_BY[by]}") for by, number in result.by.items())
    if result.assumed:
        yield "assumed", f"not to be transposed, which shapes do not show: {some([one.name for one in result.assumed])}"
    yield "time", duration(result.seconds)
