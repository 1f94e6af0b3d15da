"""Explains why a resumed command differs: from what it had when its first step began, and what was saved.

The hook recorded the state of A at the first step after the save, and that of B at its first step. What no module and
no optimizer holds, an average or a counter of the script, is found by what the checkpoint holds: A had it, B had not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ckpttool.analysis.saved_state import SavedState, SavedTensor, digested
from ckpttool.catalogue import identity
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CkptError
from ckpttool.resume import causes as state_causes
from ckpttool.resume import compare, states, window
from ckpttool.resume.results import RunDifference, ScriptRun
from ckpttool.resume.starts import Starts
from ckpttool.resume.states import RunState, is_counter
from ckpttool.text import some


def causes(starts: Starts, reference: ScriptRun, first: compare.FirstDifference | None) -> list[str]:
    """Return the causes of the first difference: what differed when the first step after the resume began."""
    b = starts.report.runs[-1]
    why_not, found = _begun(starts, reference, b)
    if (taken := _other_checkpoint(starts)) is not None:
        return [f"run B did not resume from step {starts.report.at}: it had the state of step {taken}"]
    names = first.names if first is not None else set()
    if first is not None and not first.has_tensors and all(one.part == "rng" for one in found):
        # What was drawn has changed no weight, and may be in no checkpoint.
        found = found if any(one.part == "rng" for one in first.findings) else []
    differed = [one.message for one in found]
    if first is not None:
        # The batch is another; where its loader is saved, its values say more.
        more = [f" ({one.message})" for one in first.findings if one.part == "dataloader"]
        if not more and any(one.kind == "data not restored" for one in found):
            more = [f" ({', '.join(values)})"] if (values := _of_the_script(starts, None)) else []
            # Of what a script keeps its batches may come, too.
            differed = [one.removeprefix("the data was not restored: ") if more else one for one in differed]
        differed = [
            f"{one}{''.join(more[:1])}" if one.startswith(("the data", "the batch")) else one for one in differed
        ]
        path = compare.shared(reference, b)[first.step][0]
        differed = differed or list(filter(None, [compare.averaged_weights(path, names)]))
    if not differed or all(one.part == "rng" or one.kind == state_causes.OTHER_MODULE for one in found):
        of_script = _of_the_script(starts, names)
        differed = [*of_script, *(one.message for one in found if one.part == "rng" or not of_script)] or differed
    return differed or [_later_cause(starts) or starts.misplaced or f"{compare.NOT_DETERMINED}: {why_not}"]


def _other_checkpoint(starts: Starts) -> int | None:
    """Return the step of another checkpoint of A whose state B had when its first step began; None if there is none."""
    a, began, at = starts.hooked["A"].states, starts.seen["A"].began(), starts.report.at
    after = starts.hooked["B"].states.get(1)

    def has_state_of(number: int | None) -> bool:
        state = a.get(number or 0)
        if state is None or after is None or not (alike := after.kinds.keys() & state.kinds.keys()):
            return False
        return all(state.digests(name) == after.digests(name) for name in alike if state.kinds[name] != "buffer")

    others = [step for step, number in began.items() if step != at and has_state_of(number)]
    return others[0] if others and not has_state_of(began.get(at)) else None


def _of_the_script(starts: Starts, names: Collection[str] | None) -> list[str]:
    """Return which tensors and values of the checkpoint, and of the files beside it, the script of A had when the first
    step after the resume began, and that of B had not; of values of the checkpoint those that differ later, `names`, or
    if that is None all which are variables of the same name."""
    before, after = _after_save(starts, "A") or _after_save(starts, "A2"), starts.hooked["B"].states.get(1)
    if before is None or after is None:
        return []
    at, values = starts.report.at, _values(_saved(starts), after)
    judged = {*starts.report.unproven, *(names if names is not None else {*values} - {*starts.report.unjudged})}
    found = _not_restored(values, judged, before, after, at, are_named=names is None)
    for name, path in starts.seen["A"].beside(at).items():
        with suppress(CkptError):  # a log, which no value of the script comes from
            values = _values(path, after)
            found += _not_restored(values, values.keys(), before, after, at, f" of {some([name])}")
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


def unseen_step(starts: Starts) -> int | None:
    """Return the optimizer step of A whose state a cause is read off, if it was not recorded: a save in the background
    is seen some steps later. None if it was."""
    if _after_save(starts, "A") is not None:
        return None
    return int(max(_counters(starts), default=starts.taken(starts.report.at))) + 1


def _counters(starts: Starts) -> set[float]:
    """Return the step counters of optimizers in the checkpoint of the resume."""
    with SavedState(_saved(starts)) as saved:
        return {float(saved.tensors[one].as_float64()[0]) for one in saved.tensors if is_counter(one)}


def _saved(starts: Starts) -> str:
    """Return the checkpoint of the step of the resume, of A if it was saved there."""
    return next(run.paths[starts.report.at] for run in starts.report.runs if starts.report.at in run.paths)


def _later_cause(starts: Starts) -> str | None:
    """Return what differs first in a step after the first one, and what happened in A just before; None if that was not
    observed, or is no more than a loss."""
    report, offset = starts.report, starts.taken(starts.report.at)
    observed = [one for one in report.findings if one.kind.startswith(("next batch", "learning rate"))]
    for finding in [one for one in observed if one.step is not None and one.step > offset + 1][:1]:
        before = {event for event, step in starts.hooked["A"].events if step + 1 == finding.step}
        after = "".join(f", after {text}" for event, text in window.EVENTS.items() if event in before)
        what = "the data" if finding.kind.startswith("next batch") else "the learning rate"
        return f"{what} differed from step {finding.step} on{after}, and was that of run A in the steps before"
    return None


def _begun(starts: Starts, reference: ScriptRun, b: ScriptRun) -> tuple[str, list[RunDifference]]:
    """Return what differed in run B when its first step began, and if nothing, why no cause follows from it."""
    step, of_a, after = (b.resumed_at or 0) + 1, reference.name == "A", starts.hooked[b.name].states.get(1)
    others, start, again = starts.hooked[reference.name].states, None, None
    before = others.get(1)
    if of_a:
        start, again = before, _after_save(starts, "A2")
        before = _after_save(starts, "A") or again  # a save in the background ends some steps later
    if not after or not before:
        name = reference.name if after else b.name
        return f"the hook did not see the state of run {name} when step {step} began", []
    names = sorted(before.unseen | after.unseen)
    but = f" ({some(names)} could not be seen)" if names else ""
    known = start, again, others.values() if of_a else (), partial(_digests, starts)
    return (
        f"all that the hook saw of run {b.name} when step {step} began is as in run {reference.name}{but}",
        [*state_causes.Causes(before, after, step, *known)],
    )


def _digests(starts: Starts) -> set[str]:
    """Return the digests of the tensors in the checkpoint of the resume, as the hook takes them of whole ones."""
    with SavedState(_saved(starts)) as saved:
        return {_digest(one) for one in saved.every.values()}


def _digest(tensor: SavedTensor) -> str:
    return states.digest(tensor.dtype, tensor.shape, tensor.bits)


def _after_save(starts: Starts, name: str) -> RunState | None:
    """Return the state of an uninterrupted run where the first step began after it had saved step `at`; None if that
    was not seen, or if its steps are not those that the checkpoint counts."""
    if name not in starts.hooked:
        return None
    states, began = starts.hooked[name].states, starts.seen[name].began().get(starts.report.at)
    counters = _counters(starts)
    # A save may go on in the background while the next steps are taken.
    alike = [number for number, state in states.items() if counters and state.counters == counters]
    known = [number for number in (began, *alike) if number in states and (number in alike or not counters)]
    return states[known[0]] if known else None
