"""Names the cause of the first difference: what differed when the first step after the resume began.

The hook records the state of each rank there, in A and in B. What comes of a difference is no cause. Averaged weights
that are no module are not seen there; the first checkpoint that differs tells of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpttool.catalogue.identity import same
from ckpttool.catalogue.shown import shown
from ckpttool.layout.rename import strip_wrappers
from ckpttool.resume.compare_checkpoints import is_counter
from ckpttool.resume.observe import Record
from ckpttool.resume.saved_state import SavedState
from ckpttool.text import plural, some

_LIMIT = 4  # causes that are named
# Values of a scheduler that no learning rate depends on.
_ASIDE = ("_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "verbose")


class Begun:
    """The state of all ranks where a step began. `tensors` and `values` are of each rank, by name."""

    def __init__(self, ranks: Sequence[Record]) -> None:
        self.ranks, self.step = ranks, int(ranks[0]["step"])
        self.kinds = {strip_wrappers(name): kind for one in ranks for name, kind in one["kinds"].items()}
        self.tensors = [{strip_wrappers(name): value for name, value in one["tensors"].items()} for one in ranks]
        self.values = [{strip_wrappers(name): value for name, value in one["values"].items()} for one in ranks]
        forward = [one["forward"] for one in ranks]
        self.forward: list[dict[str, Any]] | None = forward if all(forward) else None
        self.buffers = [
            {strip_wrappers(name): value for name, value in (one or {"buffers": {}})["buffers"].items()}
            for one in forward
        ]

    def digests(self, name: str) -> list[str | None]:
        """Return the digest of a tensor on each rank; None where there is none."""
        return [one[name].get("sha256") if name in one else None for one in self.tensors]

    def number(self, name: str) -> Any:
        """Return the value of a tensor that is one number."""
        return next((one[name]["value"] for one in self.tensors if "value" in one.get(name, {})), None)

    def is_zero(self, name: str) -> bool:
        return all(one[name].get("zero", False) for one in self.tensors if name in one)

    def rng(self, rank: int) -> dict[str, str]:
        """Return the RNG states of a rank, before the forward pass if that was seen."""
        found: dict[str, str] = (self.forward or self.ranks)[rank]["rng"]
        return found

    def batch(self, rank: int) -> Any:
        return (self.ranks[rank]["batches"] or [None])[-1]

    @property
    def unseen(self) -> set[str]:
        """The names of what could not be recorded."""
        names = {name for one in self.tensors for name, record in one.items() if "unseen" in record}
        return names | ({"batch"} if any(not self.batch(rank) for rank in range(len(self.ranks))) else set())

    @property
    def counters(self) -> set[Any]:
        """The values of all step counters."""
        return {self.number(name) for name in self.kinds if is_counter(name)} - {None}


def averaged_weights(path: str, names: set[str]) -> str | None:
    """Return that averaged weights were not restored, if these names in the checkpoint at `path` are of such alone."""
    with SavedState(path) as state:
        tensors = sorted(name for name in names if name in state.tensors)
        models = {name.partition(".")[0] for name in state.tensors if state.kind_of(name) == "model"}
        are_weights = all(state.kind_of(name) == "model" for name in tensors)
    roots = {name.partition(".")[0] for name in tensors}
    if are_weights and len(roots) == 1 < len(models) and not roots & {"model", "state_dict", "module", "net"}:
        return f"the averaged weights `{roots.pop()}` were not restored: {some(tensors)}"
    return None


def causes(
    before: Begun, after: Begun, step: int, *, start: Begun | None = None, again: Begun | None = None
) -> list[str]:
    """Return what differed in run B (`after`) when step `step` began, in sentences; none if nothing did.

    `start` is what A had when its first step began, `again` what a repetition of A had: what differs there is no cause.
    """
    return list(_Causes(before, after, step, start, again).all())


class _Causes:
    def __init__(self, before: Begun, after: Begun, step: int, start: Begun | None, again: Begun | None) -> None:
        self.before, self.after, self.start, self.again = before, after, start, again
        self.when = f"when step {step} began"
        self.step = step
        self.world = min(len(before.ranks), len(after.ranks))
        excused = {name for name in before.kinds if again is not None and again.digests(name) != before.digests(name)}
        if any(before.kinds[name] != "buffer" for name in excused):  # which ones it is depends on chance
            excused = set(before.kinds)
        self.differing = [
            name
            for name, kind in before.kinds.items()
            if name not in excused and (kind.startswith("group") or name in after.kinds) and not self._is_same(name)
        ]

    def _is_same(self, name: str) -> bool:
        was, now = (one.digests(name)[: self.world] for one in (self.before, self.after))
        unseen = any("unseen" in one.get(name, {}) for one in (*self.before.tensors, *self.after.tensors))
        return was == now or unseen

    def _of_kind(self, kind: str) -> list[str]:
        return [name for name in self.differing if self.before.kinds[name] == kind]

    def all(self) -> Iterator[str]:
        """Yield all that differed, what the update is made of first."""
        yield from self._weights("weight", "of the model")
        yield from self._buffers()
        is_lost = list(self._state())
        yield from is_lost
        yield from self._values(skip_groups=any(one.startswith("the optimizer was not loaded") for one in is_lost))
        yield from self._batches()
        yield from self._weights("apart", "of modules that no optimizer trains")

    # Tensors ----------------------------------------------------------------------------------------------------------

    def _weights(self, kind: str, of: str) -> Iterator[str]:
        names = self._of_kind(kind)
        every = [name for name, one in self.before.kinds.items() if one == kind]
        pairs, names = self._swapped(names)
        for one, other in pairs:
            yield f"the weights `{one}` and `{other}` are swapped"
        if not names:
            return
        as_built = self.start is not None and all(self.start.digests(n) == self.after.digests(n) for n in names)
        how = ": they are as they were built" if as_built else f" {self.when}"
        if len(names) == len(every) and kind == "weight":
            yield f"the weights {of} were not restored{how}"
        else:
            which = f"{len(names):,} of {plural(len(every), 'tensor')} differ" if len(every) > 1 else "it differs"
            yield f"weights {of} were not restored ({some(names)}): {which}{how}"

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

    def _buffers(self) -> Iterator[str]:
        names = self._of_kind("buffer")
        if self.before.forward is not None and self.after.forward is not None:
            pairs = [*zip(self.before.buffers, self.after.buffers, strict=False)]
            names = [name for name in names if any(one.get(name) != other.get(name) for one, other in pairs)]
        if names:
            verb = "was" if len(names) == 1 else "were"
            yield f"{plural(len(names), 'buffer')} of the model {verb} not restored: {some(names)}"

    def _state(self) -> Iterator[str]:
        """Yield what differs in the state of optimizers."""
        names = [name for name in self.differing if self.before.kinds[name].startswith("group")]
        every = [name for name, kind in self.before.kinds.items() if kind.startswith("group")]
        lost = [name for name in names if name not in self.after.kinds or self.after.is_zero(name)]
        missing = [name for name in names if name not in self.after.kinds]
        counters = [name for name in names if is_counter(name) and name not in missing]
        moments = [name for name in names if not is_counter(name)]
        if names and (len(missing) == len(every) or (len(lost) == len(names) == len(every) and counters)):
            how = "it has no state" if missing else "its state is zero"
            yield f"the optimizer was not loaded: {how} {self.when}"
            return
        if missing:
            parameters = [*dict.fromkeys(map(_parameter, missing))]
            yield f"the optimizer was loaded in part: {some(parameters)} {_has(parameters)} no state {self.when}"
        moments = [name for name in moments if name not in missing]
        yield from self._counters(counters, every, alone=not moments)
        pairs, left = self._swapped(moments)
        by_pair: dict[tuple[str, str], list[str]] = {}
        for one, other in pairs:
            by_pair.setdefault((_parameter(one), _parameter(other)), []).append(_leaf(one))
        for (one, other), leaves in by_pair.items():
            yield f"the moments of `{one}` and `{other}` are swapped ({', '.join(leaves)})"
        yield from self._moments(left, every)

    def _counters(self, names: list[str], every: list[str], *, alone: bool) -> Iterator[str]:
        by_values: dict[tuple[Any, Any], list[str]] = {}
        for name in names:
            by_values.setdefault((self.before.number(name), self.after.number(name)), []).append(name)
        for (was, now), own in by_values.items():
            if was is None or now is None:
                continue
            of = "" if len(own) == sum(map(is_counter, every)) else f" of {some([_parameter(name) for name in own])}"
            rest = ", its moments were" if alone else ""
            yield (
                f"the step counters of the optimizer{of} were not restored{rest}: {shown(now)} and not {shown(was)} "
                f"{self.when}"
            )

    def _moments(self, names: list[str], every: list[str]) -> Iterator[str]:
        """Yield moments that were not restored, those of one kind and group together."""
        zero = [name for name in names if self.after.is_zero(name)]
        for own, how in ((zero, "they are zero"), ([name for name in names if name not in zero], "they differ")):
            if not own:
                continue
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
            origins = self._origins(own) if how == "they differ" else []
            taken = f"; they are those of {some(origins)}" if origins else f": {how} {self.when}"
            yield f"the moments of {which} were not restored ({', '.join(leaves)}){taken}"

    def _origins(self, names: list[str]) -> list[str]:
        """Return the parameters whose moments these are; none if one has values of its own."""
        origins = []
        for name in names:
            now = self.after.digests(name)
            same_leaf = (n for n in self.before.kinds if _leaf(n) == _leaf(name) and self.before.digests(n) == now)
            origins.append(next(same_leaf, None))
        return [*dict.fromkeys(_parameter(one) for one in origins if one)] if all(origins) else []

    # Values -----------------------------------------------------------------------------------------------------------

    def _changed(self, belongs: Callable[[str], bool]) -> list[tuple[str, Any, Any]]:
        """Return values that differ on any rank, with those of the first such rank."""
        found: dict[str, tuple[str, Any, Any]] = {}
        for rank in range(self.world):
            was, now = self.before.values[rank], self.after.values[rank]
            other = self.again.values[rank] if self.again is not None and rank < len(self.again.values) else was
            for name in was:
                is_repeated = name in other and same(was[name], other[name])
                if belongs(name) and is_repeated and not (name in now and same(was[name], now[name])):
                    found.setdefault(name, (name, was[name], now.get(name)))
        return [*found.values()]

    def _values(self, *, skip_groups: bool) -> Iterator[str]:
        """Yield hyperparameters, schedulers and grad scalers."""
        groups = [] if skip_groups else self._changed(lambda name: ".param_groups." in name)
        for name, was, now in sorted(groups, key=lambda one: not one[0].endswith(".lr"))[:_LIMIT]:
            group, _, leaf = name.partition(".param_groups.")[2].partition(".")
            what = "the learning rate" if leaf == "lr" else f"`{leaf}`"
            values = f"{shown(now)} and not {shown(was)} {self.when}"
            yield f"{what} of parameter group {group} was not restored: {values}"
        for kind, title in (("scheduler", "the scheduler"), ("scaler", "the grad scaler")):
            changed = [one for one in self._changed(lambda name: _leaf(name) not in _ASIDE) if one[0].startswith(kind)]
            changed.sort(key=lambda one: not isinstance(one[1], (int, float)))
            if changed:
                name, was, now = changed[0]
                yield f"{title} was not restored: `{name}` was {shown(now)} and not {shown(was)} {self.when}"

    def _batches(self) -> Iterator[str]:
        """Yield the data and the generators of ranks."""
        pairs = [(rank, self.before.batch(rank), self.after.batch(rank)) for rank in range(self.world)]
        if self.again is not None:
            pairs = [one for one in pairs if one[0] < len(self.again.ranks) and self.again.batch(one[0]) == one[1]]
        other = [(rank, now) for rank, was, now in pairs if was and now and was != now]
        kinds: dict[str, list[int]] = {}
        for rank in range(self.world):
            was, now = self.before.rng(rank), self.after.rng(rank)
            for kind in was.keys() & now.keys():
                is_drawn = self.start is None or self.start.rng(rank).get(kind) != was[kind]
                is_repeated = self.again is None or self.again.rng(rank).get(kind) == was[kind]
                later = [one.ranks[rank]["rng"].get(kind) for one in (self.before, self.after)]
                if is_drawn and is_repeated and was[kind] != now[kind] and later[0] != later[1]:
                    kinds.setdefault(kind, []).append(rank)
        ranks = sorted({rank for own in kinds.values() for rank in own})
        of = f" of rank {', '.join(map(str, ranks))}"
        generators = ", ".join(sorted(kinds))
        data = self._data(other) if other else None
        if other and data is None:
            # Of the RNG state and the data, either may come of the other.
            either = f"the data, or the RNG state{of} ({generators})," if kinds else "the data"
            ranks_of = ", ".join(str(rank) for rank, _ in other)
            yield f"{either} was not restored: the batch of rank {ranks_of} in step {self.step} is another"
        elif data:
            yield data + (f"; the RNG state{of} differs, too ({generators})" if kinds else "")
        elif kinds:
            yield f"the RNG state{of} was not restored ({generators})"

    def _data(self, other: list[tuple[int, Any]]) -> str | None:
        """Return what the batches of ranks are, which are not those of A: of another step or rank; None if unknown."""
        origins = {rank: self._origin(now) for rank, now in other}
        of = f" of rank {', '.join(map(str, origins))}" if len(self.before.ranks) > 1 else ""
        ranks = {origin[1] for origin in origins.values() if origin}
        steps = {origin[0] for origin in origins.values() if origin}
        if all(origins.values()) and steps == {1}:
            return f"the data{of} restarted: the batch of step {self.step} is that of step 1 of A"
        if all(origins.values()) and len(steps) == 1 and steps != {self.before.step}:
            by = next(iter(steps)) - self.before.step
            return f"the data{of} is off by {by:+d} steps: the batch of step {self.step} is that of another one of A"
        if all(origins.values()) and steps == {self.before.step} and len(ranks) == 1:
            return f"rank {', '.join(map(str, origins))} has the batch of rank {next(iter(ranks))} in step {self.step}"
        return None

    def _origin(self, batch: Any) -> tuple[int, int] | None:
        """Return the step and the rank of A that had this batch, first those of the step itself."""
        of_step = [
            (self.before.step, rank) for rank in range(len(self.before.ranks)) if self.before.batch(rank) == batch
        ]
        every = (
            (step, rank)
            for rank, one in enumerate(self.before.ranks)
            for step, had in enumerate(one["batches"], 1)
            if had == batch
        )
        return next(iter([*of_step, *every]), None)


def _parameter(name: str) -> str:
    return name.partition(".state.")[2].rpartition(".")[0] or name


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _has(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"
