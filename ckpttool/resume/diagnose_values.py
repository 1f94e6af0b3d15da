"""Classifies differences between values that are no tensors: hyperparameters, schedulers, RNG states, data loaders.

optimizer.param_groups.0.lr     of a group              rng.rank1.torch            of a rank, a digest
scheduler.last_epoch            of the run              dataloader.rank0.position  of a rank
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ckpttool.analysis.differences.results import Diff
from ckpttool.analysis.result import ABSENT
from ckpttool.catalogue.identity import same
from ckpttool.catalogue.parts import PER_RANK, rank_key
from ckpttool.catalogue.shown import shown
from ckpttool.resume.results import Finding
from ckpttool.resume.states import RecordedState, difference_names

_LIMIT = 20
_TITLES = {"rng": "RNG", "dataloader": "data loader", "scaler": "grad scaler"}


class _Change(NamedTuple):
    name: str
    was: Any
    now: Any


def changed_values(
    before: RecordedState, after: RecordedState, fresh: RecordedState | None, difference: Diff
) -> Iterator[Finding]:
    """Yield every value that is not what it was, by the `difference` of the two states."""
    names = difference_names(difference)
    by_root: dict[str, list[_Change]] = {}
    for name in dict.fromkeys([*before.objects, *after.objects]):
        if name in names:
            change = _Change(name, before.objects.get(name, ABSENT), after.objects.get(name, ABSENT))
            by_root.setdefault(name.partition(".")[0], []).append(change)
    for root, changes in by_root.items():
        kind = before.kinds.get(root) or after.kinds.get(root) or root
        if kind == "optimizer":
            yield from _hyperparameters(root, changes)
        elif kind in PER_RANK:
            yield from _of_ranks(kind, changes, before, after, fresh)
        else:
            yield from _of_the_run(root, kind, changes, fresh)


def _hyperparameters(root: str, changes: list[_Change]) -> Iterator[Finding]:
    for change in changes[:_LIMIT]:
        name, was, now = change
        words = name.removeprefix(f"{root}.").split(".", 2)
        in_group = words[0] == "param_groups" and len(words) > 2
        what = f"`{words[2]}` of parameter group {words[1]}" if in_group else f"`{name}`"
        kind, message = "hyper-parameter", f"{what} is {_shown(now)} and not {_shown(was)}"
        if now is ABSENT:
            kind, message = "hyper-parameter lost", f"{what} is lost: it was {_shown(was)}"
        elif was is ABSENT:
            message = f"{what} is {_shown(now)} and did not exist before"
        yield _finding(kind, message, "optimizer", change)
    if len(changes) > _LIMIT:
        yield Finding("hyper-parameter", f"{len(changes) - _LIMIT} more of the optimizer's values differ", part=root)


def _of_the_run(root: str, kind: str, changes: list[_Change], fresh: RecordedState | None) -> Iterator[Finding]:
    """Yield one finding for a scheduler, a grad scaler or a counter: as newly built, or otherwise not as it was."""
    values = _in_words(changes, lambda name: name.partition(".")[2] or name)
    is_fresh = _is_fresh(changes, fresh)
    how, was = ("not restored", "was not restored") if is_fresh else ("differs", "is not as it was")
    message = f"the {_TITLES.get(kind, kind)} `{root}` {was}: {values}"
    yield _finding(f"{kind} {how}", message, kind, _numbers_first(changes)[0])


def _of_ranks(
    kind: str, changes: list[_Change], before: RecordedState, after: RecordedState, fresh: RecordedState | None
) -> Iterator[Finding]:
    """Yield RNG states and data loaders of ranks that are missing or not as they were."""
    title, world = _TITLES[kind], min(before.world, after.world)
    by_rank: dict[int, list[_Change]] = {}
    for change in changes:
        rank = before.rank_of(change.name)
        by_rank.setdefault(-1 if rank is None else rank, []).append(change)
    swapped: set[int] = set()
    for rank, own in by_rank.items():
        if rank in swapped:
            continue
        subject = f"the {title} of rank {rank}" if rank >= 0 else f"the {title}"
        what = ", ".join(dict.fromkeys(one.name.rpartition(".")[2] for one in own))
        other = next((r for r in range(world) if r != rank and _took(own, before, rank, r)), None)
        if other is not None and other in by_rank and _took(by_rank[other], before, other, rank):
            swapped.add(other)
            how, message = "swapped", f"the {title}s of ranks {rank} and {other} are swapped ({what})"
        elif other is not None:
            how, message = "of another rank", f"{subject} is that of rank {other} ({what})"
        elif _is_fresh(own, fresh):
            how = "restarted" if kind == "dataloader" else "not restored"
            message = f"{subject} was {how} ({what})"
        else:
            values = _in_words(own, lambda name: name.rpartition(".")[2])
            how, message = "differs", f"{subject} is not as it was: {values}"
        yield _finding(f"{kind} {how}", message, kind, _numbers_first(own)[0], rank)


def _took(own: list[_Change], before: RecordedState, rank: int, other: int) -> bool:
    """Return whether every value that changed at `rank` is what `other` had."""
    old, new = f".{rank_key(rank)}.", f".{rank_key(other)}."
    return rank >= 0 and all(
        same(one.now, before.objects.get(f"{one.name}.".replace(old, new, 1)[:-1], ABSENT)) for one in own
    )


def _is_fresh(changes: list[_Change], fresh: RecordedState | None) -> bool:
    return fresh is not None and all(same(one.now, fresh.objects.get(one.name, ABSENT)) for one in changes)


def _numbers_first(changes: list[_Change]) -> list[_Change]:
    """Return changes with those of counters, which say more, before those of digests."""
    return sorted(changes, key=lambda one: not isinstance(one.was, (int, float)))


def _in_words(changes: list[_Change], short: Any) -> str:
    return ", ".join(
        f"{short(one.name)} {_shown(one.now)} and not {_shown(one.was)}" for one in _numbers_first(changes)[:3]
    )


def _finding(kind: str, message: str, part: str, change: _Change, rank: int | None = None) -> Finding:
    name, was, now = change
    expected, actual = (None if value is ABSENT else value for value in (was, now))
    return Finding(kind, message, name=name, part=part, rank=rank, expected=expected, found=actual)


def _shown(value: Any) -> str:
    return "missing" if value is ABSENT else shown(value)
