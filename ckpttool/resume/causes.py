"""Names the causes of a difference: what differed in memory when the first step after the resume began.

The state of each rank is recorded there, in A and in B, and what is said of B is read off: not restored, as it was
built, zero, rounded, swapped, of another rank. What comes of a difference is not a cause. What a script keeps in no
module is found by `explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpttool.analysis import generators
from ckpttool.catalogue.identity import same
from ckpttool.catalogue.shown import shown
from ckpttool.resume.results import RunDifference
from ckpttool.resume.states import RunState, is_counter, same_batch
from ckpttool.text import plural, some

T = TypeVar("T")
_LIMIT = 4  # values of parameter groups that are named
# Values of a scheduler that no learning rate depends on; those that it is made of are schedulers, too.
_ASIDE = ("_schedulers", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "verbose")
_TITLES = {"rng": "RNG state", "dataloader": "data loader", "scaler": "grad scaler"}
_MISSING = "missing"
ANOTHER = "another batch"
OF_DATA = ": the data, or what the script makes of them, was not restored"
"""What is said of a batch of which no more is known."""
OTHER_MODULE = "module not restored"
"""The kind of difference of weights that no optimizer trains."""

OTHER_DTYPE = "another dtype"
"""The kind of difference of moments that have the values that they had, in a larger dtype."""


@dataclass
class Causes:
    """What differed in a run (`after`) when step `step` began; nothing if it had what A had (`before`).

    `start` is what was there as built: of a command what A had when its first step began. `again` is what a repetition
    of A had: what differs there is no cause. `others` are what A had when other steps began. `saved` returns the
    digests of the tensors in the checkpoint.
    """

    before: RunState
    after: RunState
    step: int
    start: RunState | None = None
    again: RunState | None = None
    others: Collection[RunState] = ()
    saved: Callable[[], Collection[str]] = tuple

    def __post_init__(self) -> None:
        before, after, start, again = self.before, self.after, self.start, self.again
        self.when, self.world = f"when step {self.step} began", min(before.world, after.world)
        excused = {name for name in before.kinds if again is not None and again.digests(name) != before.digests(name)}
        if any(before.kinds[name] != "buffer" for name in excused):  # which ones it is depends on chance
            excused = set(before.kinds)
        self.differing = [
            name
            for name, kind in before.kinds.items()
            if name not in excused and (kind.startswith("group") or name in after.kinds) and not self._is_same(name)
            if not (kind == "apart" and start is not None and start.digests(name) == before.digests(name))
        ]

    def _is_same(self, name: str) -> bool:
        was, now = (one.digests(name)[: self.world] for one in (self.before, self.after))
        unseen = any("unseen" in one.get(name, {}) for one in (*self.before.tensors, *self.after.tensors))
        return was == now or unseen

    def _is_widened(self, name: str) -> bool:
        """Return whether a tensor has the values that it had in a smaller dtype, as torch loads those of an optimizer
        in that of its parameter."""
        if name not in self.after.kinds or self.after.kind(name) == self.before.kind(name):
            return False
        was = self.before.digests(name)[: self.world]
        return None not in was and was == self.after.digests(name, self.before.kind(name).split()[0])[: self.world]

    def _ranks(self, names: Collection[str]) -> list[int]:
        """Return the ranks on which tensors differ."""
        both = [(self.before.digests(name), self.after.digests(name)) for name in names]
        return [rank for rank in range(self.world) if any(was[rank] != now[rank] for was, now in both)]

    def _on(self, ranks: Collection[int]) -> str:
        """Return on which ranks something differs; "" if it does on all, or if whole tensors are compared."""
        is_on_all = len(ranks) == self.world or self.before.has_whole
        return "" if is_on_all else f" on rank {', '.join(map(str, ranks))}"

    def _is_lacking(self, name: str) -> bool:
        """Return whether a tensor that differs is not there."""
        return all(self.after.digests(name)[rank] is None for rank in self._ranks([name]))

    def _of_kind(self, kind: str) -> list[str]:
        return [name for name in self.differing if self.before.kinds[name] == kind]

    def _finding(self, kind: str, message: str, names: Sequence[str], **more: Any) -> RunDifference:
        return RunDifference(kind, message, name=names[0], part=self.before.part(names[0]), **more)

    def __iter__(self) -> Iterator[RunDifference]:
        """Yield all that differed, what the update is made of first."""
        found = [*self._untied("weight"), *self._weights("weight", "of the model"), *self._buffers()]
        state = list(self._state())
        found += [*state, *self._groups(is_lost=any(one.kind == "optimizer not loaded" for one in state))]
        found += [*self._of_the_run(), *self._loaders()]
        apart = [*self._untied("apart"), *self._weights("apart", "of modules that no optimizer trains")]
        roots = {name.partition(".")[0] for name, kind in self.before.kinds.items() if kind in ("weight", "apart")}
        # A batch may be what another model made, whose weights are not as they were.
        may_follow = len(roots) > 1 and any(one.part == "model" for one in found)
        found += [*self._batches(is_alone=not (found or apart), may_follow=may_follow)]
        # What a script makes of other state, and does not save, comes of that state.
        known = self.saved() if found else ()
        of_tensors = [(one, one.name) for one in found if one.name in self.before.kinds]
        saved = [one for one, name in of_tensors if self.before.digests(name)[0] in known]
        weights = [one for one, name in of_tensors if self.before.kinds[name] == "weight"]
        weights = [one for one in weights if one not in saved and self.after.digests(one.name or "")[0] not in known]
        # A module that no optimizer trains may be one that is not saved, and has no effect.
        yield from [one for one in found if not (saved and one in weights)] or apart

    # Tensors ----------------------------------------------------------------------------------------------------------

    def _untied(self, kind: str) -> Iterator[RunDifference]:
        for names in self.before.ties:
            if (
                self.before.kinds.get(names[0]) != kind
                or any(set(names) <= set(group) for group in self.after.ties)
                or not {*names} <= self.after.kinds.keys()
            ):
                continue
            # What differs because of it is not named again.
            self.differing = [name for name in self.differing if name not in names]
            message = f"{some(names[1:])} was tied with `{names[0]}` and is a tensor of its own"
            hint = "tie the weights where the model is built, before the optimizer"
            yield self._finding("untied", message, names[1:], hint=hint)

    def _weights(self, kind: str, of: str) -> Iterator[RunDifference]:
        names = self._of_kind(kind)
        if kind == "apart" and names:  # some that a script keeps are of no use, and in no checkpoint
            known = self.saved()
            names = [name for name in names if self.before.digests(name)[0] in known] or names
        every = [name for name, one in self.before.kinds.items() if one == kind]
        pairs, names = self._swapped(names)
        for one, other in pairs:
            yield self._finding("swapped", f"the weights `{one}` and `{other}` are swapped", [one])
        for instead, own in _grouped(names, self._instead):
            is_all = len(own) == len(every) and kind == "weight"
            differ = f"{len(own):,} of {plural(len(every), 'tensor')} differ" if len(every) > 1 else "it differs"
            how = instead or ("" if is_all else f"{differ} {self.when}")
            message = f"{'the ' if is_all else ''}weights {of} were not restored{self._on(self._ranks(own))}"
            message += "" if is_all else f" ({some(own)})"
            of_kind = "weights not restored" if kind == "weight" else OTHER_MODULE
            yield self._finding(of_kind, f"{message}: {how}" if how else f"{message} {self.when}", own)

    def _instead(self, name: str) -> str:
        """Return what a tensor is instead: zero, as it was built, ...; "" if that is unknown."""
        before, after = self.before, self.after
        if name not in after.kinds:
            return ""
        ranks = self._ranks([name])
        # Moments have the dtype of their parameter when torch has loaded them.
        is_zero_moment = after.is_zero(name, ranks) and before.kinds[name].startswith("group")
        if before.kind(name) != after.kind(name) and not is_zero_moment:
            return f"{after.kind(name)} and not {before.kind(name)}"
        if self.start is not None and _at(self.start.digests(name), ranks) == _at(after.digests(name), ranks):
            return "they are as they were built"
        if after.is_zero(name, ranks):
            return f"they are zero {self.when}"
        for dtype in ("bfloat16", "float16"):
            now = _at(after.digests(name, dtype), ranks) if after.is_exact(name, dtype) else []
            if any(now) and _at((self.again or before).digests(name, dtype), ranks) == now:
                return f"they were rounded to {dtype}"
        was = [before.shard(name, rank) for rank in range(before.world)]
        own = {rank: after.shard(name, rank) for rank in range(self.world)}
        origins = {rank: _place(was, one) for rank, one in own.items() if one != was[rank]}
        return _taken("shard", origins) if before.world == after.world else ""

    def _swapped(self, names: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
        """Return pairs of names that changed places, and the other names."""
        left, pairs = [*names], []
        for name in names:
            now, was = self.after.digests(name), self.before.digests(name)
            other = next((n for n in left if n != name and self.before.digests(n) == now), None)
            if name in left and other is not None and self.after.digests(other) == was:
                pairs.append((min(name, other), max(name, other)))
                left = [one for one in left if one not in (name, other)]
        return pairs, left

    def _buffers(self) -> Iterator[RunDifference]:
        pairs = [*zip(self.before.buffers, self.after.buffers, strict=False)]
        differing = {name: self._ranks([name]) for name in self._of_kind("buffer")}
        for name, on in differing.items():  # as they were before the forward pass, where that was seen
            on[:] = [
                rank for rank in on if not all(pairs[rank]) or pairs[rank][0].get(name) != pairs[rank][1].get(name)
            ]
        if names := [name for name, on in differing.items() if on]:
            on_ranks = self._on(sorted({rank for name in names for rank in differing[name]}))
            verb = "was" if len(names) == 1 else "were"
            message = f"{plural(len(names), 'buffer')} of the model {verb} not restored{on_ranks}: {some(names)}"
            yield self._finding("buffers not restored", message, names)

    def _state(self) -> Iterator[RunDifference]:
        """Yield what differs in the state of optimizers."""
        names = [name for name in self.differing if self.before.kinds[name].startswith("group")]
        every = [name for name, kind in self.before.kinds.items() if kind.startswith("group")]
        missing = [name for name in names if self._is_lacking(name)]
        lost = [name for name in names if name in missing or self.after.is_zero(name, self._ranks([name]))]
        counters = [name for name in names if is_counter(name) and name not in missing]
        moments = [name for name in names if not is_counter(name)]
        if names and (len(missing) == len(every) or (len(lost) == len(names) == len(every) and counters)):
            how = "it has no state" if missing else "its state is zero"
            message = f"the optimizer was not loaded{self._on(self._ranks(names))}: {how} {self.when}"
            yield self._finding("optimizer not loaded", message, names)
            return
        if missing:
            parameters = [*dict.fromkeys(map(_parameter, missing))]
            has = "has" if len(parameters) == 1 else "have"
            on = self._on(self._ranks(missing))
            message = f"the optimizer was loaded in part{on}: {some(parameters)} {has} no state {self.when}"
            yield self._finding("optimizer loaded in part", message, missing)
        moments = [name for name in moments if name not in missing]
        yield from self._counters(counters, every, alone=not moments)
        pairs, left = self._swapped(moments)
        for (first, second), own in _grouped(pairs, lambda pair: tuple(map(_parameter, pair))):
            message = f"the moments of `{first}` and `{second}` are swapped ({', '.join(_leaf(one) for one, _ in own)})"
            yield self._finding("swapped", message, own[0])
        yield from self._moments(left, every)

    def _counters(self, names: list[str], every: list[str], *, alone: bool) -> Iterator[RunDifference]:
        for (was, now, on), own in _grouped(names, self._counts):
            if was is None or now is None:
                continue
            of = "" if len(own) == sum(map(is_counter, every)) else f" of {some([_parameter(name) for name in own])}"
            rest = ", its moments were" if alone else ""
            values = f"{shown(now)} and not {shown(was)} {self.when}"
            message = f"the step counters of the optimizer{of} were not restored{on}{rest}: {values}"
            yield self._finding("step counters not restored", message, own, expected=was, found=now)

    def _counts(self, name: str) -> tuple[Any, Any, str]:
        """Return what a step counter was and is, and on which ranks."""
        ranks = self._ranks([name])
        return self.before.number(name, ranks), self.after.number(name, ranks), self._on(ranks)

    def _moments(self, names: list[str], every: list[str]) -> Iterator[RunDifference]:
        """Yield moments that were not restored, those of one kind and group together."""
        for instead, own in _grouped(names, self._instead):
            leaves = [*dict.fromkeys(map(_leaf, own))]
            groups = sorted({self.before.kinds[name] for name in own})
            of = [name for name in every if _leaf(name) in leaves]
            in_groups = [name for name in of if self.before.kinds[name] in groups]
            if len(own) == len(of):
                which = "the optimizer"
            elif len(own) == len(in_groups):
                which = f"parameter {', '.join(groups)}"
            else:
                which = some([*dict.fromkeys(map(_parameter, own))])
            origins = [] if instead else self._parameters_of(own)
            taken = f"they are those of {some(origins)}" if origins else instead or f"they differ {self.when}"
            on = self._on(self._ranks(own))
            message = f"the moments of {which} were not restored{on} ({', '.join(leaves)}): {taken}"
            kind = OTHER_DTYPE if all(map(self._is_widened, own)) else "moments not restored"
            yield self._finding(kind, message, own)

    def _parameters_of(self, names: list[str]) -> list[str]:
        """Return the parameters whose moments these are; none if one has values of its own."""
        origins = []
        for name in names:
            now = self.after.digests(name)
            same_leaf = (n for n in self.before.kinds if _leaf(n) == _leaf(name) and self.before.digests(n) == now)
            origins.append(next(same_leaf, None))
        return [*dict.fromkeys(_parameter(one) for one in origins if one)] if all(origins) else []

    # Values -----------------------------------------------------------------------------------------------------------

    def _changed(self, rank: int, belongs: Callable[[str], bool]) -> list[tuple[str, Any, Any]]:
        """Return the values of a rank that differ, numbers first, which say more than digests."""
        was, now = self.before.values[rank], self.after.values[rank]
        other = self.again.values[rank] if self.again is not None and rank < self.again.world else was
        found = [
            (name, was[name], now.get(name, _MISSING))
            for name in was
            if belongs(name) and name in other and same(was[name], other[name])
            if not (name in now and same(was[name], now[name]))
        ]
        return sorted(found, key=lambda one: not isinstance(one[1], (int, float)))

    def _on_any(self, belongs: Callable[[str], bool]) -> list[tuple[str, Any, Any, str]]:
        """Return values that differ on any rank, with those of the first such rank, and on which they do."""
        every = {(rank, one[0]): one for rank in range(self.world) for one in self._changed(rank, belongs)}
        ranks = {own: [rank for rank, name in every if name == own] for _, own in every}
        return [(*every[on[0], name], self._on(on)) for name, on in ranks.items()]

    def _groups(self, *, is_lost: bool) -> Iterator[RunDifference]:
        """Yield hyperparameters, and numbers that an optimizer keeps beside its tensors."""
        groups = [] if is_lost else self._on_any(lambda name: self.before.part(name) == "optimizer")
        # Of a parameter whose state is gone, its count is, too.
        gone = {_owner(name) for name in self.before.kinds.keys() - self.after.kinds.keys() if ".state." in name}
        groups = [one for one in groups if not (one[2] == _MISSING and _owner(one[0]) in gone)]
        ranks = self.after.values[: 1 if self.after.has_whole else None]
        there = set.intersection(*({*map(_owner, one)} for one in ranks))
        for own, _ in _grouped(groups, lambda one: _owner(one[0])):
            if ".param_groups." in own and own not in there:
                message = f"parameter group {own.rpartition('.')[2]} of the optimizer is missing {self.when}"
                yield self._finding("parameter group missing", message, [own])
        groups = [one for one in groups if ".param_groups." not in one[0] or _owner(one[0]) in there]
        for name, was, now, on in sorted(groups, key=lambda one: not one[0].endswith(".lr"))[:_LIMIT]:
            group, _, leaf = name.partition(".param_groups.")[2].partition(".")
            what = "the learning rate" if leaf == "lr" else f"`{leaf or name}`"
            root = name.partition(".")[0]
            of = f" of parameter group {group}{f' of `{root}`' if root != 'optimizer' else ''}" if group else ""
            message = f"{what}{of} was not restored{on}: {_values(now, was)} {self.when}"
            yield self._finding("hyper-parameter", message, [name], expected=was, found=now)

    def _of_the_run(self) -> Iterator[RunDifference]:
        """Yield schedulers, grad scalers, and what else a recipe keeps that is of no rank."""
        for root in dict.fromkeys(name.partition(".")[0] for one in self.before.values for name in one):
            kind = self.before.part(root)
            if kind in ("optimizer", "dataloader"):
                continue
            changed = self._on_any(lambda name, root=root: name.partition(".")[0] == root)  # type: ignore[misc]
            if kind == "scheduler":
                changed = [one for one in changed if _leaf(one[0]) not in _ASIDE]
            for name, was, now, on in changed[:1]:
                title = f"the {_TITLES.get(kind, kind)}" if kind != "other" else f"`{root}`"
                message = f"{title} was not restored{on}: `{name}` was {_values(now, was)} {self.when}"
                yield self._finding(f"{kind} not restored", message, [name], expected=was, found=now)

    def _loaders(self) -> Iterator[RunDifference]:
        """Yield the data loaders of a recipe."""
        ranks = {rank: self._changed(rank, self._is_of_loader) for rank in range(self.world)}
        ranks = {rank: changed for rank, changed in ranks.items() if changed}
        if ranks:
            every = [{name: v for name, v in one.items() if self._is_of_loader(name)} for one in self.before.values]
            now = {rank: {name: self.after.values[rank].get(name) for name in every[rank]} for rank in ranks}
            name, was, value = next(iter(ranks.values()))[0]
            how = _taken("data loader", {rank: _place(every, one) for rank, one in now.items()})
            how = how or f"`{name}` was {_values(value, was)} {self.when}"
            message = f"the data loader of rank {', '.join(map(str, ranks))} was not restored: {how}"
            rank = min(ranks)
            yield self._finding("dataloader not restored", message, [name], rank=rank, expected=was, found=value)

    def _is_of_loader(self, name: str) -> bool:
        return self.before.part(name) == "dataloader"

    def _generators(self) -> dict[int, list[str]]:
        """Return the generators whose states differ and matter, by rank."""

        def matters(rank: int, kind: str) -> bool:
            was, now = (one.rng(rank)[kind] for one in (self.before, self.after))
            is_drawn = self.start is None or self.start.rng(rank).get(kind) != was
            is_repeated = self.again is None or self.again.rng(rank).get(kind) == was
            later = [one.ranks[rank]["rng"].get(kind) for one in (self.before, self.after)]
            return is_drawn and is_repeated and was != now and later[0] != later[1]

        every = {rank: sorted(self.before.rng(rank).keys() & self.after.rng(rank).keys()) for rank in range(self.world)}
        return _only(every, matters)

    def _batches(self, *, is_alone: bool, may_follow: bool) -> Iterator[RunDifference]:
        """Yield the data and the generators of ranks; with `is_alone` those from which nothing was drawn, too, with
        `may_follow` no batch that comes of what was named already."""
        pairs = [(rank, self.before.batch(rank), self.after.batch(rank)) for rank in range(self.world)]
        if self.again is not None:
            pairs = [one for one in pairs if one[0] < self.again.world and same_batch(self.again.batch(one[0]), one[1])]
        other = [(rank, now) for rank, was, now in pairs if was and now and not same_batch(was, now, has_fewer=True)]
        kinds, data = self._generators(), self._data(other) if other else None
        if data or not (other or is_alone):
            # From a generator that no forward pass draws from, a loader drew: its batches are known.
            kinds = _only(kinds, lambda rank, kind: kind in self.before.drawn(rank))
        lost = _only(kinds, lambda rank, kind: not self._follows(rank, kind))
        # From one that was restored, another number was drawn for another batch.
        kinds = lost if data or (other and lost) else kinds
        of = f" of rank {', '.join(map(str, kinds))}"
        names = ", ".join(sorted({kind for own in kinds.values() for kind in own}))
        how = self._drawn(kinds)
        more = f": {how}" if how else ""
        if other and data is None and may_follow and not kinds:
            return
        if other and data is None:
            # Of the RNG state and the data, either may come of the other.
            which = f"the batch of rank {', '.join(str(rank) for rank, _ in other)} in step {self.step} is another"
            either = f"the data, or the RNG state{of} ({names}), was not restored: {which}"
            message = either if kinds else f"{which}{OF_DATA}"
            message += f" (of the RNG state, {how})" if how else ""
            yield RunDifference("data not restored", message, rank=other[0][0], found=ANOTHER)
        elif data:
            text = f"; the RNG state{of} differs, too ({names}){more}" if kinds else ""
            yield RunDifference("data not restored", data + text, rank=other[0][0])
        elif kinds:
            yield self.lost(kinds)

    def lost(self, kinds: dict[int, list[str]]) -> RunDifference:
        """Return the difference of generators, by rank."""
        names = ", ".join(sorted({kind for own in kinds.values() for kind in own}))
        was, how = [self.before.rng(one) for one in range(self.before.world)], self._drawn(kinds)
        taken = _taken("RNG state", {one: _place(was, self.after.rng(one)) for one in kinds})
        verb = "differs" if how and not taken else "was not restored"
        more = f": {taken or how}" if taken or how else ""
        message = f"the RNG state of rank {', '.join(map(str, kinds))} {verb} ({names}){more}"
        return RunDifference("rng not restored", message, part="rng", rank=min(kinds))

    def _drawn(self, kinds: dict[int, list[str]]) -> str:
        """Return which states of A the generators of ranks have instead, or how many numbers further; "" if unknown."""
        found: dict[str, None] = {}
        for rank, kind in ((rank, kind) for rank, own in kinds.items() for kind in own):
            now = self.after.words(rank, kind)
            alike = [one for one in self.others if now is not None and one.words(rank, kind) == now]
            near = alike[:1] or [one for one in (self.before, self.start) if one is not None]
            # A command may count epochs.
            step = "step" if self.step == self.before.step else "optimizer step"
            known = {f"run A when {step} {one.step} began": one.words(rank, kind) for one in near}
            found[generators.origin(kind, now, known)] = None
        return ", and ".join(filter(None, found))

    def _follows(self, rank: int, kind: str) -> bool:
        """Return whether a generator has the state that A had, or one near it, and not near that of the start."""
        now, near = self.after.words(rank, kind), [one for one in (self.before, self.start) if one is not None]
        words = [one.words(rank, kind) for one in near if now is not None]
        far = [generators.numbers_between(was, now) for was in words if was is not None]
        return bool(far) and far[0] is not None and abs(far[0]) == min(abs(one) for one in far if one is not None)

    def _data(self, other: list[tuple[int, Any]]) -> str | None:
        """Return what the batches of ranks are, which are not those of A: of another step or rank; None if unknown."""
        origins = {rank: self._origin(now) for rank, now in other}
        of = f" of rank {', '.join(map(str, origins))}" if self.before.world > 1 else ""
        ranks = {origin[1] for origin in origins.values() if origin}
        steps = {origin[0] for origin in origins.values() if origin}
        if all(origins.values()) and steps == {1}:
            return f"the data{of} restarted: the batch of step {self.step} is that of step 1 of A"
        if all(origins.values()) and len(steps) == 1 and steps != {self.before.step}:
            by = next(iter(steps)) - self.before.step
            return f"the data{of} is off by {by:+d} steps: the batch of step {self.step} is that of another step of A"
        if all(origins.values()) and steps == {self.before.step} and len(ranks) == 1:
            return f"rank {', '.join(map(str, origins))} has the batch of rank {next(iter(ranks))} in step {self.step}"
        return None

    def _origin(self, batch: Any) -> tuple[int, int] | None:
        """Return the step and the rank of A that had this batch, first those of the step itself."""
        of_step = [
            (self.before.step, rank) for rank in range(self.before.world) if same_batch(self.before.batch(rank), batch)
        ]
        every = (
            (step, rank)
            for rank, one in enumerate(self.before.ranks)
            for step, had in enumerate(one["batches"], 1)
            if same_batch(had, batch)
        )
        return next(iter([*of_step, *every]), None)


def _grouped(items: Iterable[T], key: Callable[[T], Any]) -> Iterator[tuple[Any, list[T]]]:
    """Yield the keys of items, each with the items that have it."""
    found: dict[Any, list[T]] = {}
    for one in items:
        found.setdefault(key(one), []).append(one)
    yield from found.items()


def _only(kinds: dict[int, list[str]], belongs: Callable[[int, str], bool]) -> dict[int, list[str]]:
    """Return the generators of each rank that belong, and no rank without one."""
    found = {rank: [kind for kind in own if belongs(rank, kind)] for rank, own in kinds.items()}
    return {rank: own for rank, own in found.items() if own}


def _place(every: Sequence[Any], one: Any) -> int | None:
    """Return the rank that had something; None if none had it."""
    return next((rank for rank, had in enumerate(every) if one and had == one), None)


def _taken(what: str, origins: dict[int, int | None]) -> str:
    """Return that ranks have what other ranks had, `{0: 1, 1: 0}`; nothing if one has something else."""
    if not origins or any(other is None or other == rank for rank, other in origins.items()):
        return ""
    if len(origins) == 2 and [*origins] == [*origins.values()][::-1]:
        return f"those of ranks {' and '.join(map(str, origins))} are swapped"
    return ", ".join(f"rank {rank} has the {what} of rank {other}" for rank, other in origins.items())


def _at(values: Sequence[T], ranks: Collection[int]) -> list[T]:
    return [values[rank] for rank in ranks if rank < len(values)]


def _values(now: Any, was: Any) -> str:
    return f"{shown(now) if now != _MISSING else _MISSING} and not {shown(was)}"


def _parameter(name: str) -> str:
    return name.partition(".state.")[2].rpartition(".")[0] or name


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
