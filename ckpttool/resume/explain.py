"""Explains why a resumed command differs: from what it had when its first step began, and what was saved.

The hook recorded the state of A at the first step after the save, and that of B at its first step. What no module and
no optimizer holds, an average or a counter of the script, is found by what the checkpoint holds: A had it, B had not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckpttool.analysis.saved_state import SavedState, SavedTensor, digested
from ckpttool.catalogue import identity
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CkptError
from ckpttool.resume import compare, states, window
from ckpttool.resume.causes import OTHER_MODULE, Causes
from ckpttool.resume.results import RunDifference, ScriptRun
from ckpttool.resume.starts import Starts
from ckpttool.resume.states import RunState, is_counter
from ckpttool.text import some


@dataclass
class Explanation:
    """What is known of a run B that differs from its reference, first in a checkpoint (`first`) or in none: the states
    where its first step began, and the checkpoint of the resume, which is read once."""

    starts: Starts
    reference: ScriptRun
    first: compare.FirstDifference | None = None

    def __post_init__(self) -> None:
        self.report, self.hooked, self.at = self.starts.report, self.starts.hooked, self.starts.report.at

    def causes(self) -> list[str]:
        """Return the causes of the first difference: what differed when the first step after the resume began."""
        why_not, found = self._begun()
        if (taken := self._other_checkpoint()) is not None:
            return [f"run B did not resume from step {self.at}: it had the state of step {taken}"]
        first, names = self.first, self.first.names if self.first is not None else set()
        if first is not None and not first.has_tensors and all(one.part == "rng" for one in found):
            # What was drawn has changed no weight, and may be in no checkpoint.
            found = found if any(one.part == "rng" for one in first.findings) else []
        differed = [one.message for one in found]
        if first is not None:
            # The batch is another; where its loader is saved, its values say more.
            more = [f" ({one.message})" for one in first.findings if one.part == "dataloader"][:1]
            if not more and any(one.kind == "data not restored" for one in found):
                more = [f" ({', '.join(values)})"] if (values := self._of_the_script(None)) else []
                # Of what a script keeps its batches may come, too.
                differed = [one.removeprefix("the data was not restored: ") if more else one for one in differed]
            of_data = ("the data", "the batch")
            differed = [f"{one}{''.join(more)}" if one.startswith(of_data) else one for one in differed]
            path = compare.shared(self.reference, self.report.runs[-1])[first.step][0]
            differed = differed or list(filter(None, [compare.averaged_weights(path, names)]))
        if not differed or all(one.part == "rng" or one.kind == OTHER_MODULE for one in found):
            of_script = self._of_the_script(names)
            differed = [*of_script, *(one.message for one in found if one.part == "rng" or not of_script)] or differed
        return differed or [self._later_cause() or self.starts.misplaced or f"{compare.NOT_DETERMINED}: {why_not}"]

    def unseen_step(self) -> int | None:
        """Return the optimizer step of A whose state a cause is read off, if it was not recorded: a save in the
        background is seen some steps later. None if it was."""
        if self._after_save("A") is not None:
            return None
        return int(max(self._counters, default=self.starts.taken(self.at))) + 1

    # The first step after the resume ----------------------------------------------------------------------------------

    def _begun(self) -> tuple[str, list[RunDifference]]:
        """Return what differed in run B when its first step began, and if nothing, why no cause follows from it."""
        b, name, when = self.report.runs[-1], self.reference.name, f"when step {self.at + 1} began"
        of_a, after, others = name == "A", self.hooked[b.name].states.get(1), self.hooked[name].states
        start, again = (others.get(1), self._after_save("A2")) if of_a else (None, None)
        # A save in the background ends some steps later.
        before = self._after_save("A") or again if of_a else others.get(1)
        if not after or not before:
            return f"the hook did not see the state of run {name if after else b.name} {when}", []
        names = sorted(before.unseen | after.unseen)
        but = f" ({some(names)} could not be seen)" if names else ""
        known = start, again, others.values() if of_a else (), lambda: self._digests
        return (
            f"all that the hook saw of run {b.name} {when} is as in run {name}{but}",
            [*Causes(before, after, self.at + 1, *known)],
        )

    def _after_save(self, name: str) -> RunState | None:
        """Return the state of an uninterrupted run where the first step began after it had saved step `at`; None if
        that was not seen, or if its steps are not those that the checkpoint counts."""
        if name not in self.hooked:
            return None
        states, began = self.hooked[name].states, self.starts.seen[name].began().get(self.at)
        # A save may go on in the background while the next steps are taken.
        alike = [number for number, one in states.items() if self._counters and one.counters == self._counters]
        known = [number for number in (began, *alike) if number in states and (number in alike or not self._counters)]
        return states[known[0]] if known else None

    def _other_checkpoint(self) -> int | None:
        """Return the step of another checkpoint of A whose state B had when its first step began; None if there is
        none."""
        a, began, after = self.hooked["A"].states, self.starts.seen["A"].began(), self.hooked["B"].states.get(1)

        def has_state_of(number: int | None) -> bool:
            state = a.get(number or 0)
            if state is None or after is None or not (alike := after.kinds.keys() & state.kinds.keys()):
                return False
            return all(state.digests(name) == after.digests(name) for name in alike if state.kinds[name] != "buffer")

        others = [step for step, number in began.items() if step != self.at and has_state_of(number)]
        return others[0] if others and not has_state_of(began.get(self.at)) else None

    def _later_cause(self) -> str | None:
        """Return what differs first in a step after the first one, and what happened in A just before; None if that was
        not observed, or is no more than a loss."""
        observed = [one for one in self.report.findings if one.kind.startswith(("next batch", "learning rate"))]
        later = [one for one in observed if one.step is not None and one.step > self.starts.taken(self.at) + 1]
        for finding in later[:1]:
            before = {event for event, step in self.hooked["A"].events if step + 1 == finding.step}
            after = "".join(f", after {text}" for event, text in window.EVENTS.items() if event in before)
            what = "the data" if finding.kind.startswith("next batch") else "the learning rate"
            return f"{what} differed from step {finding.step} on{after}, and was that of run A in the steps before"
        return None

    # The checkpoint of the resume -------------------------------------------------------------------------------------

    @property
    def _saved(self) -> str:
        """The checkpoint of the step of the resume, of A if it was saved there."""
        return next(run.paths[self.at] for run in self.report.runs if self.at in run.paths)

    @cached_property
    def _counters(self) -> set[float]:
        """The step counters of its optimizers."""
        with SavedState(self._saved) as saved:
            return {float(saved.tensors[one].as_float64()[0]) for one in saved.tensors if is_counter(one)}

    @cached_property
    def _digests(self) -> set[str]:
        """The digests of its tensors, as the hook takes them of whole ones."""
        with SavedState(self._saved) as saved:
            return {_digest(one) for one in saved.every.values()}

    def _of_the_script(self, names: Collection[str] | None) -> list[str]:
        """Return which tensors and values of the checkpoint, and of the files beside it, the script of A had when the
        first step after the resume began, and that of B had not; of values of the checkpoint those that differ later,
        `names`, or if that is None all which are variables of the same name."""
        before, after = self._after_save("A") or self._after_save("A2"), self.hooked["B"].states.get(1)
        if before is None or after is None:
            return []
        values = _values(self._saved, after)
        judged = {*self.report.unproven, *(names if names is not None else {*values} - {*self.report.unjudged})}
        found = _not_restored(values, judged, before, after, self.at, are_named=names is None)
        for name, path in self.starts.seen["A"].beside(self.at).items():
            with suppress(CkptError):  # a log, which no value of the script comes from
                values = _values(path, after)
                found += _not_restored(values, values.keys(), before, after, self.at, f" of {some([name])}")
        return found


def _values(path: str, after: RunState) -> dict[str, Any]:
    """Return what a checkpoint holds beside the state of optimizers, as the hook records it of a script, but for
    tensors that a module has when a run has resumed (`after`)."""
    there = {record.get("sha256") for one in (*after.tensors, *after.buffers) for record in one.values()}
    with SavedState(path) as saved:
        names = [*saved.objects, *(name for name in saved.tensors if saved.kind_of(name) != "optimizer")]
        lost = [name for name in names if name not in saved.every or _digest(saved.every[name]) not in there]
        return {name: saved.objects[name] if name in saved.objects else digested(saved.spelt(name)) for name in lost}


def _not_restored(
    values: Mapping[str, Any],
    judged: Collection[str],
    before: RunState,
    after: RunState,
    at: int,
    of: str = "",
    *,
    are_named: bool = False,
) -> list[str]:
    """Return which of the values that were saved at step `at` a script had then (`before`), and not when it had resumed
    (`after`). `of` is the file that has them. With `are_named`, a variable has the name of its value."""
    loose, others = ({*map(digested, one.of_script("loose"))} for one in (before, after))
    was, now = ({key: digested(v) for key, v in one.of_script("variables").items()} for one in (before, after))
    changed = {name for name in was.keys() & now.keys() if not identity.same(was[name], now[name])}
    lost, when = [], f"when step {at + 1} began"
    for name, text in values.items():
        if isinstance(text, str) and text in loose:
            held = [one for one in was if was[one] == text]
            lost += [name] if (changed.intersection(held) if held else text not in others) else []
    verb = "were" if lost[1:] else "was"
    them = "them" if lost[1:] else "it"
    found = [f"{some(lost)}{of} {verb} not restored: run B did not have {them} {when}"] if lost else []
    for name in sorted(values.keys() & {*judged} - {*lost}):
        value, leaf = values[name], name.rpartition(".")[2]
        same = [one for one in changed if identity.same(was[one], value)]
        is_element = are_named and any(part.isdecimal() for part in name.split("."))
        own = [one for one in same if one.rpartition(".")[2] == leaf and not is_element]
        # A value that is no other's tells what it is, whatever it is called.
        is_unique = isinstance(value, float) or (len(same) == 1 and value not in (0, 1))
        own = own or (same if is_unique and not are_named else [])
        for one in own[:1]:
            instead = f"`{one}` was " if "." in one and not name.endswith(one) else ""
            found.append(
                f"{some([name])}{of} was not restored: {instead}{shown(now[one])} and not {shown(value)} {when}"
            )
    return found


def _digest(tensor: SavedTensor) -> str:
    return states.digest(tensor.dtype, tensor.shape, tensor.bits)
