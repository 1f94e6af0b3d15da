"""Judges a run that resumed on another number of ranks than saved, by what does not depend on that number: the tensors,
data, generators and values that A had. The run that it is compared with has the same code, and could lack the same.

A run from its start (`fresh`) and one that resumes on as many ranks as saved (`B0`) are run only where needed. What
neither judges is not proven. The design in the documentation says why it is done in this way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Any

from ckpttool.catalogue import identity, parts
from ckpttool.resume import compare
from ckpttool.resume.causes import Causes
from ckpttool.resume.explain import Explanation
from ckpttool.resume.results import RunDifference, ScriptRun
from ckpttool.resume.starts import RunEnded, Starts
from ckpttool.resume.states import RunState, same_batch
from ckpttool.resume.steps import SAMPLES, Steps, of_hook
from ckpttool.text import plural

Portion = Counter[str]
FRESH, AS_SAVED = "fresh", "B0"


@dataclass
class Elastic:
    """What run B is judged by on `world` ranks, in whose report what differs, what is not proven and what goes on is
    added. The checkpoint that it resumed from was saved by the run `origin`."""

    starts: Starts
    explanation: Explanation
    origin: str
    world: int
    goes_on: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Judge everything, and add to the report what comes of it."""
        report = self.starts.report
        found, report.unseen = self.explanation.on_other_ranks()
        a, b = self._state("A"), self._state("B")
        if a is not None and b is not None:
            found += [*self._data(), *self._generators(a, b), *self._values()]
        report.findings += found
        report.causes = [one.message for one in found]
        report.goes_on = self.goes_on

    def _state(self, name: str) -> RunState | None:
        """Return the state of a run where its first step began after it had resumed, or saved the step of that."""
        if name == "A":
            return self.explanation.after_save(name)
        states = self.starts.hooked[name].states
        return states.get(1) if name != FRESH else states.get(self.starts.seen[name].began("number").get(self._at) or 0)

    @property
    def _at(self) -> int:
        return self.starts.report.at

    @cached_property
    def _fresh(self) -> ScriptRun | None:
        """A run from its start on the new number of ranks; None if it failed."""
        try:
            run = self.starts.uninterrupted(FRESH, self.world)
        except RunEnded as ended:
            self.starts.report.note(f"no run from its start on {plural(self.world, 'rank')}: {ended.failure.message}")
            return None
        self._add(run, self.starts.report.until)
        return run

    def _add(self, run: ScriptRun, steps: int) -> None:
        report = self.starts.report
        report.runs.insert(1, run)
        report.cost.runs, report.cost.steps = report.cost.runs + 1, report.cost.steps + steps

    # Data -------------------------------------------------------------------------------------------------------------

    def _steps(self, name: str) -> Steps:
        return of_hook(self.starts.hooked[name], 0)

    def _data(self) -> Iterator[RunDifference]:
        report, own = self.starts.report, [*_portions(self._steps("B"))]
        of_fresh = f"a run from its start on {plural(self.world, 'rank')}"
        if not any(own):
            report.unshown.append("what run B was trained on was not seen")
            return
        of_a, taken = [*_portions(self._steps("A"))], self.starts.taken(self._at, counted=True)
        if _follows(of_a[taken:], own):
            self.goes_on.append("the data go on as in run A")
            return
        places = {"run A": (taken, of_a)}
        if (fresh := self._fresh) is not None:
            since, portions = self.starts.taken(self._at, fresh, counted=True), [*_portions(self._steps(FRESH))]
            places[of_fresh] = since, portions
            if _are_equal(portions[since:], own):
                self.goes_on.append(f"the data are those of {of_fresh}")
                return
        if self._goes_on_by_rank(taken):
            self.goes_on.append("the data of each rank that A had go on as in run A, those of others are in no run")
            return
        for of, (since, portions) in places.items():
            firsts = [first for first in range(len(portions)) if _follows(portions[first:], own)]
            if firsts:
                first = min(firsts, key=lambda one: (one != 0, abs(one - since)))
                how = "restarted" if first == 0 else f"is off by {first - since:+d} steps"
                message = f"the data {how}: the samples of step {since + 1} are those of step {first + 1} of {of}"
                yield RunDifference("data not restored", message, step=self._at + 1)
                return
        report.unshown.append(
            f"the samples of run B are neither those that run A went on with, nor those of {of_fresh} at the same steps"
        )

    def _goes_on_by_rank(self, taken: int) -> bool:
        """Return whether each rank of A goes on with its own batches, and ranks that it did not have add samples that
        no other rank has, as where each draws its own."""
        later = {number - taken: seen for number, seen in self._steps("A").items() if number > taken}
        own = {number: seen for number, seen in self._steps("B").items() if number in later}
        known, new = set[str](), set[str]()
        for number, seen in own.items():
            was = later[number]["next batch"]
            if not was or any(not same_batch(one, seen["next batch"].get(key)) for key, one in was.items()):
                return False
            for key, samples in seen[SAMPLES].items():
                (known if key in was else new).update(samples)
        known |= {one for seen in self._steps("A").values() for each in seen[SAMPLES].values() for one in each}
        return bool(new) and known.isdisjoint(new)

    # Generators -------------------------------------------------------------------------------------------------------

    def _generators(self, a: RunState, b: RunState) -> Iterator[RunDifference]:
        start, world = self.starts.hooked["A"].states.get(1), min(a.world, b.world)
        every = {kind for rank in range(world) for kind in a.rng(rank).keys() & b.rng(rank).keys()}
        lost, kept = dict[int, list[str]](), set[int]()
        for kind in sorted(every):
            of_a, of_b = ([one.rng(rank).get(kind) for rank in range(one.world)] for one in (a, b))
            for rank, (was, now) in enumerate(zip(of_a, of_b, strict=False)):
                is_drawn = start is None or start.rng(rank).get(kind) != was
                is_moved = now in of_a and of_b.count(now) <= of_a.count(now)
                if is_drawn and self._matters(a, rank, kind):
                    kept.add(rank)
                    if was != now and not is_moved:
                        lost.setdefault(rank, []).append(kind)
        fresh = self._state(FRESH) if lost and self._fresh is not None else None
        if fresh is not None:
            lost = {
                rank: left
                for rank, own in lost.items()
                if (left := [kind for kind in own if fresh.rng(rank).get(kind) != b.rng(rank)[kind]])
            }
        if kept and not lost:
            ranks, of = ", ".join(map(str, sorted(kept))), "saved" if fresh is None else "in such a run"
            self.goes_on.append(f"the RNG state of rank {ranks} is as {of}")
        if lost:
            causes = Causes(a, b, self._at + 1, start, others=[*self.starts.hooked["A"].states.values()])
            yield causes.lost(lost)
        if kept and (new := ", ".join(map(str, range(a.world, b.world)))):
            self.goes_on.append(f"of rank {new}, which A did not have, none was saved")

    def _matters(self, a: RunState, rank: int, kind: str) -> bool:
        """Return whether a forward pass draws from a generator, or its state is in the checkpoint: what else is drawn
        from it shows in the samples."""
        return kind in a.drawn(rank) or kind in self._saved_generators

    @cached_property
    def _saved_generators(self) -> set[str]:
        saved = self.explanation.saved
        words = {word for name in (*saved.every, *saved.objects) for word in name.split(".")}
        return {kind for kind, known in parts.GENERATORS.items() if any(re.fullmatch(known, word) for word in words)}

    # Values -----------------------------------------------------------------------------------------------------------

    def _values(self) -> Iterator[RunDifference]:
        lost = {name: text for name, text in self._lost("B").items() if not self._is_explained(name)}
        without = self._lost(AS_SAVED) if lost and self._is_exact_as_saved() else {}
        for name, text in lost.items():
            if name in without:
                self.starts.report.not_loaded.append(name)
            else:
                yield RunDifference("value not restored", text, name=name)

    def _lost(self, run: str) -> dict[str, str]:
        """Return which values of the checkpoint the script of A had, and not that of a run, and how."""
        saved = self.explanation.saved
        kinds = {name: saved.kind_of(name) for name in (*saved.every, *saved.objects)}
        every = self.explanation.of_the_script(None, run)
        # What the samples show, and what is judged by what modules and optimizers have.
        aside = {"rng", "model", "optimizer", "scheduler", "scaler", *(["dataloader"] if self.goes_on else [])}
        return {names[0]: text for names, text in every if kinds.get(names[0]) not in aside}

    def _is_explained(self, name: str) -> bool:
        """Return whether a value is one that A does not change, or that follows from the number of ranks."""
        states = self.starts.hooked["A"].states.get(1), self._state("A"), self._state("B")
        start, was, now = (_held(one, name.rpartition(".")[2]) if one is not None else {} for one in states)
        if _are_alike(start, was):
            return True
        fresh = self._state(FRESH) if now and not _are_alike(now, start) and self._fresh is not None else None
        return fresh is not None and _are_alike(now, _held(fresh, name.rpartition(".")[2]))

    def _is_exact_as_saved(self) -> bool:
        """Return whether a run that resumes on as many ranks as saved is as run A."""
        starts, report, a = self.starts, self.starts.report, self.starts.report.runs[0]
        run = starts.planned(AS_SAVED, step=self._at)
        try:
            starts.resume(run, starts.restored(AS_SAVED, self.origin))
        except RunEnded as ended:
            report.note(f"no resume on as many ranks as saved: {ended.failure.message}")
            return False
        self._add(run, report.until - self._at)
        scratch = replace(report, findings=[], compared=[], unproven=[], unjudged=[], reasons={})
        compare.compare_runs(scratch, a, run, starts.excused, starts.changing, may_miss=starts.seen[run.name].may_miss)
        return compare.is_same(scratch, starts.excused)


def _held(state: RunState, leaf: str) -> dict[tuple[int, str], Any]:
    """Return the values of the variables of a name on each rank."""
    return {
        (rank, name): value
        for rank in range(state.world)
        for name, value in state.of_script("variables", rank).items()
        if name.rpartition(".")[2] == leaf
    }


def _are_alike(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Return whether variables that are there in both have one value."""
    both = one.keys() & other.keys()
    return bool(both) and all(identity.same(one[key], other[key]) for key in both)


def _portions(steps: Steps) -> Iterator[Portion]:
    """Yield the samples of each step on all ranks. Where ranks have the same ones, each counts once."""
    for _, seen in sorted(steps.items()):
        portion = Counter(sample for own in seen.get(SAMPLES, {}).values() for sample in own)
        often = gcd(*portion.values())
        yield Counter({sample: count // often for sample, count in portion.items()})


def _follows(stream: Sequence[Portion], own: Sequence[Portion]) -> bool:
    """Return whether the samples of some steps are those of a stream in its order, as far as that is known and at least
    those of one of its steps, in portions of another size."""
    left, later, whole = Counter[str](), iter(stream), 0
    for portion in own:
        wanted = Counter(portion)
        while wanted:
            if not left:
                left = Counter(next(later, ()))
                whole += 1
            if not left:
                return whole > 1
            taken = wanted & left
            wanted, left = wanted - taken, left - taken
            if wanted and left:
                return False
    return whole > 1 or (whole == 1 and not left)


def _are_equal(stream: Sequence[Portion], own: Sequence[Portion]) -> bool:
    """Return whether steps have the same samples, as far as both are known."""
    pairs = [*zip(stream, own, strict=False)]
    return bool(pairs) and all(one and one == other for one, other in pairs)
