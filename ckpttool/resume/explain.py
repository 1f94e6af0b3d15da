"""Explains why a resumed command differs: from what it had when its first step began, and what was saved.

The hook recorded the state of A at the first step after the save, and that of B at its first step. What no module and
no optimizer holds, an average or a counter of the script, is found by what the checkpoint holds: A had it, B had not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

from ckpttool.analysis.saved_state import SavedState, SavedTensor, digested
from ckpttool.catalogue import identity
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CkptError
from ckpttool.resume import compare, states, window
from ckpttool.resume.causes import ANOTHER, OF_DATA, OTHER_DTYPE, OTHER_MODULE, Causes
from ckpttool.resume.observe.site.state import sha
from ckpttool.resume.results import RunDifference, ScriptRun
from ckpttool.resume.starts import Starts, counters
from ckpttool.resume.states import RunState, is_counter
from ckpttool.text import some

_MOST = 4  # values that are named where it is not known which of them come of others


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
        if any(followed := [self._follows(one) for one in found]) and (
            not all(followed) or self.of_the_script(names) or self.of_the_script(None)
        ):
            found = [one for one, follows in zip(found, followed, strict=True) if not follows]
        differed = [one.message for one in found]
        if first is not None:
            # The batch is another; where its loader is saved, its values say more.
            more = [f" ({one.message})" for one in first.findings if one.part == "dataloader"][:1]
            if not more and any(one.kind == "data not restored" for one in found):
                lost = self.of_the_script(None)
                # Of data of another step more or fewer numbers may have been drawn.
                is_another = any(one.found == ANOTHER for one in found)
                values = self._generators({one for names, _ in lost for one in names}) if is_another else []
                values += [text for _, text in self._first_lost(lost)]
                if not values and (is_another or lost):
                    values, is_sure = self._of_variables()
                    values = [f"of these, some may follow: {', '.join(values)}"] if values and not is_sure else values
                more = [f" ({', '.join(values)})"] if values else []
                # Of what a script keeps its batches may come, too.
                differed = [one.removesuffix(OF_DATA) if more else one for one in differed]
            of_data = ("the data", "the batch")
            differed = [f"{one}{''.join(more)}" if one.startswith(of_data) else one for one in differed]
        if not differed or all(one.part == "rng" or one.kind == OTHER_MODULE for one in found):
            lost = self.of_the_script(names) or self.of_the_script(None)
            lost = [] if self._may_follow(lost) else lost
            # What A never changes, as a count of starts, follows from the resume.
            of_script = [text for own, text in lost if not {*own} <= {*self.report.unproven}] or [t for _, t in lost]
            differed = [*of_script, *(one.message for one in found if one.part == "rng" or not of_script)] or differed
        if differed:
            return differed
        values, is_sure = self._of_variables()
        anew = values if any(is_anew for _, is_anew in self._others.values()) else []
        causes = anew or self._generators((), is_anew=bool(values)) or (values if is_sure else [])
        return causes or [self._later_cause() or self.starts.misplaced or self._not_determined(why_not, values)]

    def _not_determined(self, why_not: str, values: Sequence[str]) -> str:
        """Return that no cause is known, and what may be one."""
        anew = self._begun_anew()
        more = f"; {', '.join(values)}" if values else f"; reinitialised: {some(anew)}" if anew else ""
        return f"{compare.NOT_DETERMINED}: {why_not}{more}"

    def _first_lost(self, lost: list[tuple[list[str], str]]) -> list[tuple[list[str], str]]:
        """Return of values that were not restored those that are as when A began, or all if none is: others may be
        what has followed since the resume."""
        first = [one for one in lost if self._begun_as & {*one[0]}]
        return first or ([] if self._may_follow(lost) else lost)

    def _may_follow(self, lost: list[tuple[list[str], str]]) -> bool:
        """Return whether values may only have followed from others since the resume: none is as when A began, and there
        are other variables that both runs have changed since the save, each in its own way."""
        names, every = {name for own, _ in lost for name in own}, self.saved.every
        values = {one for one in self.saved.objects if one not in every or every[one].number is not None}
        return bool(names) and names <= values - self._begun_as and bool(self._others.keys() - names)

    @cached_property
    def _begun_as(self) -> set[str]:
        """The values of the checkpoint that are called as what is as when A began."""
        return {name for one in self._anew for name in _saved_as(one, self._names[1])}

    def _of_variables(self) -> tuple[list[str], bool]:
        """Return which variables of the script were not as in A: those that are as when A began, or else all; and
        whether these are causes, since they are of one value, or as they were."""
        every = [*self._others.values()]
        texts = [text for text, is_anew in every if is_anew or not any(anew for _, anew in every)]
        return texts[:_MOST], len(every) == 1 or any(anew for _, anew in every)

    @cached_property
    def _others(self) -> dict[str, tuple[str, bool]]:
        """The values of the checkpoint whose variables were not as in A, whatever the script had made of them since,
        with how they were, and whether that is as when A began."""
        found: dict[str, tuple[str, bool]] = {}
        if self._pair is None:
            return found
        (before, after), again, when = self._pair, self.after_save("A2"), f"when step {self.at + 1} began"
        for rank in range(min(before.world, after.world)):
            was, now = (one.of_script("variables", rank) for one in (before, after))
            known = again.of_script("variables", rank) if again is not None and rank < again.world else was
            for one in sorted(was.keys() & now.keys()):
                is_other = not identity.same(was[one], now[one]) and identity.same(was[one], known.get(one, was[one]))
                is_text = any(isinstance(value, str) and "] " in value for value in (was[one], now[one]))
                names = _saved_as(one, self._names[is_text]) if is_other else []
                told = compare.is_told(one, was[one], now[one], self.report.runs[-1], self.reference)
                is_saved = len(names) == 1 and identity.same(digested(was[one]), self.saved.objects.get(names[0]))
                told = told or (is_saved and _may_be_copy(one, digested(was[one]), was))
                if len(names) == 1 and not told and names[0] not in self.report.unjudged:
                    values = "" if is_text else f": {shown(now[one])} and not {shown(was[one])}"
                    how = "restored" if (is_anew := one in self._anew) else "as in run A"
                    since = ", as when run A began" if is_anew else ""
                    found.setdefault(names[0], (f"{some(names)} was not {how}{values} {when}{since}", is_anew))
        return found

    def _generators(self, lost: Collection[str], *, is_anew: bool = False) -> list[str]:
        """Return which generators of the script, whose names are in the checkpoint (unless `is_anew`) or whose states
        are those of A when it began, had another state than in A, but for those that are `lost`."""
        if self._pair is None:
            return []
        (before, after), others = self._pair, dict[str, list[int]]()
        for rank in range(min(before.world, after.world)):
            was, now = (one.of_script("generators", rank) for one in (before, after))
            for name in [one for one in was if one in now and was[one] != now[one]]:
                others.setdefault(name, []).append(rank)
        every = ({*self.saved.every, *self.saved.objects} - {*lost}, lost)
        words, gone = ({word for name in names for word in name.replace("/", ".").split(".")} for names in every)
        seen, that, start = _seen(before, after), "has another state than in A", self.hooked["A"].states.get(1)
        states = start.of_script("generators", 0) if start is not None else {}
        # Not one that a library seeds, as for the order of an epoch.
        left = {name for name in others if name.rpartition(".")[2] not in gone}
        own = {*before.of_script("own", 0)} & left
        anew = {name for name in own if states.get(name) == after.of_script("generators", 0).get(name)}
        named = {name for name in left if not is_anew and name.rpartition(".")[2] in words}
        found = {name: _of_ranks(ranks, seen) for name, ranks in others.items() if name in (named or anew)}
        return [f"the generator `{name}`{ranks} {that}" for name, ranks in found.items()]

    def _follows(self, finding: RunDifference) -> bool:
        """Return whether a script has set a hyper-parameter, or weights, before its step began, both times to other
        values than the saved ones: as a learning rate that follows from a count, and a first pass. Of values that have
        another dtype, all that is known may follow."""
        name, (after, before) = finding.name or "", (self.hooked["B"].states.get(1), self.after_save("A"))
        if finding.kind == "hyper-parameter":
            saved = self._objects.get(name.partition(".")[2])
            return saved is not None and not any(identity.same(saved, one) for one in (finding.expected, finding.found))
        if finding.kind != "weights not restored" or after is None or before is None:
            return finding.kind == OTHER_DTYPE
        # Of a shard, no checkpoint has the digest.
        moments = [one for one, kind in after.kinds.items() if kind.startswith("group") and not is_counter(one)]
        is_whole = any(_before_forward(after, one) & self.digests for one in moments if not after.is_zero(one))
        weights = [one for one in Causes(before, after, self.at + 1).differing if before.kinds[one] == "weight"]
        both = ({digest for one in weights for digest in state.digests(one)} for state in (before, after))
        return is_whole and not any(digests <= self.digests for digests in both)

    def add_unloaded(self) -> None:
        """Add to the report what run B had not loaded when its first step began, where all that followed is as in the
        run that it is compared with."""
        before, after = self.after_save("A"), self.hooked["B"].states.get(1)
        if before is not None and after is not None:
            causes = Causes(before, after, self.at + 1, self.hooked["A"].states.get(1))
            named = [(one.name or "", one.expected) for one in causes if one.kind == "hyper-parameter"]
            lost = [one for one, was in named if identity.same(self._objects.get(one.partition(".")[2]), was)]
            differing = causes.differing
            self.report.not_loaded = [*self._not_loaded(before, after, differing), *lost]
            self.report.begun_anew = self._begun_anew()
            self.report.unshown += self._of_no_checkpoint(before, after, differing)
        elif len(self.hooked["A"].steps) > 1:  # of one rank, all that matters comes into its checkpoints
            name = "A" if before is None else "B"
            self.report.unshown.append(f"the hook did not see the state of run {name} when step {self.at + 1} began")

    def _of_no_checkpoint(self, before: RunState, after: RunState, differing: Sequence[str]) -> list[str]:
        """Return which tensors some ranks had not as A had them, of which the checkpoint has those of other ranks: no
        checkpoint shows what comes of it."""
        lost: dict[tuple[int, ...], list[str]] = {}
        for name in differing if before.world == after.world else ():
            was, now = ([one.get("sha256") for one in state.held(name)] for state in (before, after))
            if len(was) == len(now) == before.world and not self.digests.isdisjoint(was):
                ranks = [rank for rank, one in enumerate(was) if one != now[rank] and one not in self.digests]
                lost.setdefault(tuple(ranks), []).append(name)
        return [
            f"{some(names)} of rank {', '.join(map(str, ranks))} {'were' if names[1:] else 'was'} not restored, and no "
            "checkpoint has what follows from it"
            for ranks, names in lost.items()
            if ranks
        ]

    def _not_loaded(self, before: RunState, after: RunState, differing: Sequence[str]) -> list[str]:
        """Return the tensors and values of the checkpoint that run B had not when its first step began, where all that
        followed is as in run A: it overwrites them, or does not use them."""
        lost = {one for name in differing for one in before.digests(name)}
        names, saved = list[str](), self.saved
        if lost := lost - _digests(after):
            others = {digested(one) for rank in range(after.world) for one in after.of_script("loose", rank)}
            names = [one for one in saved.every if _of(saved.every[one]) & lost and _text(saved, one) not in others]
        return [*dict.fromkeys([*names, *(name for own, _ in self.of_the_script(None) for name in own)])]

    def on_other_ranks(self) -> tuple[list[RunDifference], list[str]]:
        """Return what of the checkpoint run B, on other ranks than A, had not when its first step began although A had
        it; and the names of what was seen in neither, and of values that are not those of A."""
        before, after = self.after_save("A"), self.hooked["B"].states.get(1)
        if before is None or after is None:
            return [], [f"the state of run {'A' if before is None else 'B'}"]
        lost, unseen = list[str](), list[str]()
        for name, tensor in self.saved.tensors.items():
            own, now = (one.has(tensor.dtype, tensor.shape, tensor.bits, self.digests) for one in (before, after))
            # An average may be in no module; what is in one has to be there, not in what was read alone.
            held = (after.of_script("variables", rank).values() for rank in range(after.world))
            if now is None and own is not None:
                lost.append(own)
            elif now is None and not any(_text(self.saved, name) in map(digested, one) for one in held):
                unseen.append(name)
        start = self.hooked["A"].states.get(1)
        causes = Causes(before, after, self.at + 1, start)
        causes.differing = lost
        found = [one for one in causes if one.part in ("model", "optimizer", "scheduler", "scaler")]
        # A value that is not as it was built may follow from the number of ranks.
        built = start.values[0] if start is not None else {}
        values = [
            one for one in found if one.name not in lost and not identity.same(built.get(one.name or ""), one.found)
        ]
        return [one for one in found if one not in values], [*unseen, *(one.name or one.message for one in values)]

    def _begun_anew(self) -> list[str]:
        """Return the numbers, and lists of some, that the script counts itself and does not save: which A had changed
        when it had saved the step, and B began with as A did."""
        states = *filter(None, [self.hooked["A"].states.get(1)]), *(self._pair or ())
        found = {name: ranks for name, ranks in self._anew.items() if name not in self.report.not_loaded}
        return [f"{one}{_of_ranks(ranks, _seen(*states))}" for one, ranks in found.items()]

    @cached_property
    def _pair(self) -> tuple[RunState, RunState] | None:
        """The states of A, or else of A2, and of B where the first step after the save began; None if one is unseen."""
        before, after = self.after_save("A") or self.after_save("A2"), self.hooked["B"].states.get(1)
        return (before, after) if before is not None and after is not None else None

    @cached_property
    def _anew(self) -> dict[str, list[int]]:
        """The variables of the script that A had changed when it had saved the step, and B began with as A did, with
        the ranks."""
        start, found = self.hooked["A"].states.get(1), dict[str, list[int]]()
        if start is None or self._pair is None:
            return found
        before, after = self._pair
        for rank in range(min(start.world, before.world, after.world)):
            of_start, was, now = (one.of_script("variables", rank) for one in (start, before, after))
            for one in sorted({*before.of_script("own", rank)} & of_start.keys() & now.keys() & was.keys()):
                is_anew = identity.same(of_start[one], now[one]) and not identity.same(was[one], now[one])
                if is_anew and isinstance(was[one], (int, float, list)):
                    found.setdefault(one, []).append(rank)
        return found

    def unseen_step(self) -> int | None:
        """Return the optimizer step of A whose state a cause is read off, if it was not recorded: a save in the
        background is seen some steps later. None if it was."""
        if self.after_save("A") is not None:
            return None
        return int(max(self._counters, default=self.starts.taken(self.at))) + 1

    # The first step after the resume ----------------------------------------------------------------------------------

    def _begun(self) -> tuple[str, list[RunDifference]]:
        """Return what differed in run B when its first step began, and if nothing, why no cause follows from it."""
        b, name, when = self.report.runs[-1], self.reference.name, f"when step {self.at + 1} began"
        of_a, after, others = name == "A", self.hooked[b.name].states.get(1), self.hooked[name].states
        start, again = (others.get(1), self.after_save("A2")) if of_a else (None, None)
        # A save in the background ends some steps later.
        before = self.after_save("A") or again if of_a else others.get(1)
        if not after or not before:
            return f"the hook did not see the state of run {name if after else b.name} {when}", []
        names = sorted(before.unseen | after.unseen)
        but = f" ({some(names)} could not be seen)" if names else ""
        known = start, again, others.values() if of_a else (), lambda: self.digests
        found, restored = [*Causes(before, after, self.at + 1, *known)], list[RunDifference]()
        for one in found:
            # What is saved before a scheduler steps, or while training goes on, is not what the next step begins with.
            name, is_value = one.name or "", one.part in ("optimizer", "scheduler") and one.found is not None
            was, now = (_before_forward(state, name) for state in (before, after))
            is_of_save = bool(now) and now <= self.digests and not was <= self.digests
            if is_of_save or (is_value and identity.same(self._objects.get(name.partition(".")[2]), one.found)):
                one.message = one.message.replace("was not restored", "is as it was saved", 1)
                one.message = one.message.replace("were not restored", "are as they were saved", 1)
                restored.append(one)
        # What a script makes of weights that were restored follows from the state of its optimizer that was not.
        if any(one.part == "optimizer" and one not in restored for one in found):
            found = [one for one in found if one.part != "model" or one not in restored]
        return f"all that the hook saw of run {b.name} {when} is as in run {name}{but}", found

    def after_save(self, name: str) -> RunState | None:
        """Return the state of an uninterrupted run where the first step began after it had saved step `at`; None if
        that was not seen, or if its steps are not those that the checkpoint counts."""
        if name not in self.hooked:
            return None
        states, began = self.hooked[name].states, self.starts.seen[name].began("number").get(self.at)
        alike = [one for one in states.values() if self._counters and self._counters <= one.counters]
        if (state := states.get(began or 0)) and (state in alike or not self._counters or not self._unlike(state)):
            return state
        # A save may go on in the background while the next steps are taken; in phases, optimizers count anew.
        return min(alike, key=self._unlike, default=None)

    def _unlike(self, state: RunState) -> int:
        """Return how many weights of a state are not those of the checkpoint."""
        names = [name for name, kind in state.kinds.items() if kind == "weight"]
        return sum(self.digests.isdisjoint(state.digests(name)) for name in names)

    def _other_checkpoint(self) -> int | None:
        """Return the step of another checkpoint of A whose state B had when its first step began; None if there is
        none."""
        a, began = self.hooked["A"].states, self.starts.seen["A"].began("number")
        after = self.hooked["B"].states.get(1)

        def is_of_b(state: RunState | None) -> bool:
            if state is None or after is None or not (alike := after.kinds.keys() & state.kinds.keys()):
                return False
            return all(state.digests(name) == after.digests(name) for name in alike if state.kinds[name] != "buffer")

        others = [step for step, number in began.items() if step != self.at and is_of_b(a.get(number or 0))]
        own = self.after_save("A") or self.after_save("A2") or a.get(began.get(self.at) or 0)
        return others[0] if others and not is_of_b(own) else None

    def _later_cause(self) -> str | None:
        """Return what differs first in a step after the first one, and what happened in A just before; None if that was
        not observed, or is no more than a loss."""
        observed = [one for one in self.report.findings if one.kind.startswith(("next batch", "learning rate"))]
        later = [one for one in observed if one.step is not None and one.step > self.starts.taken(self.at) + 1]
        for finding in later[:1]:
            events = sorted(self.hooked["A"].events, key=itemgetter(1), reverse=True)
            first = {event: step + 1 for event, step in events if step >= self.starts.taken(self.at)}
            before = {event for event, step in first.items() if step == finding.step}
            after = "".join(f", after {text}" for event, text in window.EVENTS.items() if event in before)
            anew = f" (reinitialised: {some(names)})" if (names := self._begun_anew()) else ""
            what = "the data" if finding.kind.startswith("next batch") else "the learning rate"
            when = f"from step {finding.step} on{after}"
            return f"{what} differed {when}, and was that of run A in the steps before{anew}"
        return None

    # The checkpoint of the resume -------------------------------------------------------------------------------------

    @cached_property
    def saved(self) -> SavedState:
        """The checkpoint of the step of the resume, of A if it was saved there. It is opened once."""
        path = next(run.paths[self.at] for run in self.report.runs if self.at in run.paths)
        return self.starts.stack.enter_context(SavedState(path))

    @cached_property
    def _names(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """The names of its values, and of these and its tensors, by the last part of each."""
        found: tuple[dict[str, list[str]], dict[str, list[str]]] = {}, {}
        for name in dict.fromkeys([*self.saved.every, *self.saved.objects]):
            leaf = name.replace("/", ".").rpartition(".")[2]
            for one in found[name in self.saved.every :]:
                one.setdefault(leaf, []).append(name)
        return found

    @cached_property
    def _counters(self) -> set[float]:
        """The step counters of its optimizers."""
        return counters(self.saved)

    @cached_property
    def digests(self) -> set[str]:
        """The digests of its tensors, as the hook takes them of whole ones."""
        return {digest for one in self.saved.every.values() for digest in _of(one)}

    @cached_property
    def _objects(self) -> dict[str, Any]:
        """Its values by their names in the part that they belong to."""
        return {name.partition(".")[2]: value for name, value in self.saved.objects.items()}

    def of_the_script(self, names: Collection[str] | None, run: str = "B") -> list[tuple[list[str], str]]:
        """Return what of the checkpoint, and of files beside it, the script of A had when the first step after the
        resume began, and that of B had not; of values those that differ later, `names`, or all that are variables."""
        before, after = self.after_save("A") or self.after_save("A2"), self.hooked[run].states.get(1)
        if before is None or after is None:
            return []
        lost = [_lost(before, after, rank) for rank in range(min(before.world, after.world))]
        values = _values(self.saved, lost, after)
        judged = {*self.report.unproven, *(names if names is not None else {*values} - {*self.report.unjudged})}
        found = _not_restored(values, judged, lost, before, after, self.at, are_named=names is None)
        for name, path in self.starts.seen["A"].beside(self.at).items():
            with suppress(CkptError):  # a log, which no value of the script comes from
                with SavedState(path) as saved:
                    values = _values(saved, lost, after)
                found += _not_restored(values, values.keys(), lost, before, after, self.at, f" of {some([name])}")
        return found


def _lost(before: RunState, after: RunState, rank: int) -> dict[str, str]:
    """Return the tensors that the script of a rank kept (`before`) and had not when it had resumed, in none of the
    variables that had them, or else nowhere: by what they are compared by, with dtype and shape."""
    was, now = (one.of_script("variables", rank) for one in (before, after))
    others, held = {*after.of_script("loose", rank)}, dict[str, list[Any]]()
    for name, text in was.items():
        # A dict may have been None before.
        place = name if name in now else name.partition(".")[0]
        if isinstance(text, str) and place in now:
            held.setdefault(text, []).append(now[place])
    return {
        digested(text): text.partition("] ")[0]
        for text in before.of_script("loose", rank)
        if text not in held.get(text, others)
    }


def _values(saved: SavedState, ranks: Sequence[Mapping[str, str]], after: RunState) -> dict[str, Any]:
    """Return the values of a checkpoint, and of its tensors those that are lost on some of the `ranks`, as the hook
    records them: not those that a module or a generator has when a run has resumed."""
    there = _digests(after) | {state for rank in range(after.world) for state in after.rng(rank).values()}
    lost = {text: kind for one in ranks for text, kind in one.items()}
    values, kinds = dict[str, Any](), {*lost.values()}
    for name, tensor in saved.every.items():
        if f"{tensor.dtype}{[*tensor.shape]}".removesuffix("]") in kinds:
            text = _text(saved, name)
            if text in lost and there.isdisjoint({*_of(tensor), sha(tensor.bits)}):
                values[name] = text
    # One number is a value, whether or not it is saved as a tensor.
    numbers = {
        name: one.number for name, one in saved.every.items() if name in saved.objects and one.number is not None
    }
    others = {name: value for name, value in saved.objects.items() if name not in saved.every}
    return {**numbers, **values, **others}


def _not_restored(
    values: Mapping[str, Any],
    judged: Collection[str],
    tensors: Sequence[Collection[str]],
    before: RunState,
    after: RunState,
    at: int,
    of: str = "",
    *,
    are_named: bool = False,
) -> list[tuple[list[str], str]]:
    """Return which of the values that were saved at step `at` a script had then, and not when it had resumed, and of
    `tensors` these, by rank. `of` is the file that has them. With `are_named`, a variable has the name of its value."""
    when = f"when step {at + 1} began"
    lost: dict[str, list[int]] = {}
    others: dict[tuple[str, str], list[int]] = {}
    for rank, own in enumerate(tensors):
        for name in [one for one, text in values.items() if isinstance(text, str) and text in own]:
            lost.setdefault(name, []).append(rank)
        left = {name: value for name, value in values.items() if name in judged and rank not in lost.get(name, ())}
        of_rank = [{key: digested(v) for key, v in one.of_script("variables", rank).items()} for one in (before, after)]
        for name, how in _other_values(left, values, *of_rank, are_named=are_named):
            others.setdefault((name, how), []).append(rank)
    found: list[tuple[list[str], str]] = []
    seen = _seen(before, after)
    for ranks in dict.fromkeys(map(tuple, lost.values())):
        names = [name for name, of_it in lost.items() if tuple(of_it) == ranks]
        on = _of_ranks(ranks, seen, "on")
        verb, them = ("were", "them") if names[1:] else ("was", "it")
        found.append((names, f"{some(names)}{of} {verb} not restored{on}: run B did not have {them} {when}"))
    for (name, how), ranks_of in others.items():
        on = _of_ranks(ranks_of, seen, "on")
        found.append(([name], f"{some([name])}{of} was not restored{on}: {how} {when}"))
    return found


def _other_values(
    values: Mapping[str, Any],
    every: Mapping[str, Any],
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    are_named: bool,
) -> Iterator[tuple[str, str]]:
    """Yield the names of values that a variable of a rank had (`was`), and has not (`now`), with what it has instead.
    `every` are all values of the checkpoint."""
    changed = {name for name in was.keys() & now.keys() if not identity.same(was[name], now[name])}
    leaves = {key: key.rpartition(".")[2] for key in (*every, *changed)}
    named = {leaves[key] for key in every}
    for name, value in sorted(values.items()):
        leaf = leaves[name]
        if _may_be_copy(name, value, was):
            continue
        same = [one for one in changed if value is not None and identity.same(was[one], value)]
        is_element = are_named and any(part.isdecimal() for part in name.split("."))
        own = [one for one in same if leaves[one] == leaf and not is_element]
        # A variable that is called as another value is that one.
        same = [one for one in same if leaves[one] not in named]
        # A value that is no other's tells what it is, whatever it is called.
        alike = [key for key in values if identity.same(values[key], value)]
        is_alone = len(same) == len(alike) == 1
        is_unique = isinstance(value, float) or (is_alone and value not in (0, 1))
        own = own or (same if is_unique and not are_named else [])
        for one in own[:1]:
            instead = f"`{one}` was " if "." in one and not name.endswith(one) else ""
            yield name, f"{instead}{shown(now[one])} and not {shown(value)}"


def _may_be_copy(name: str, value: Any, was: Mapping[str, Any]) -> bool:
    """Return whether what has a value as it was saved may be a copy that was made for that: of the variables of its
    name, one has another since. A number is no copy."""
    others = (one for key, one in was.items() if key.endswith(f".{name.rpartition('.')[2]}"))
    return not isinstance(value, (int, float)) and not all(identity.same(digested(one), value) for one in others)


def _saved_as(variable: str, names: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the values of a checkpoint that are called as a variable, those whose names have most in common."""
    own = variable.split(".")[::-1]
    others = {name: name.replace("/", ".").split(".")[::-1] for name in names.get(own[0], ())}
    alike = {name: max(n for n in range(len(own) + 1) if own[:n] == one[:n]) for name, one in others.items()}
    most = max(alike.values(), default=0)
    return [name for name, count in alike.items() if count == most and (count > 1 or not own[0].isdecimal())]


def _seen(*states: RunState) -> int:
    """Return how many ranks recorded all of some states: one that did not see in time that another one had saved is not
    known to have restored anything."""
    return sum(map(all, zip(*(one.forward for one in states), strict=False)))


def _of_ranks(ranks: Sequence[int], world: int, word: str = "of") -> str:
    """Return of which ranks something is; "" if it is of all."""
    return "" if len(ranks) == world else f" {word} rank {', '.join(map(str, ranks))}"


def _before_forward(state: RunState, name: str) -> set[str]:
    """Return the digests of a tensor on all ranks, of a buffer those before the forward pass."""
    buffers = [one[name]["sha256"] for one in state.buffers if "sha256" in one.get(name, {})]
    return {digest for digest in buffers or state.digests(name) if digest is not None}


def _digests(state: RunState) -> set[str | None]:
    """Return the digests of what modules and optimizers had."""
    records = [record for one in (*state.tensors, *state.buffers) for record in one.values()]
    return {each for one in records for each in (one.get("sha256"), *one.get("rounded", {}).values())}


def _text(saved: SavedState, name: str) -> Any:
    """Return a tensor of a checkpoint as it is compared."""
    return saved.objects[name] if name in saved.objects else digested(saved.spelt(name))


def _of(tensor: SavedTensor) -> set[str]:
    """Return the digests of a tensor of a checkpoint."""
    return states.digests(tensor.dtype, tensor.shape, tensor.bits)
