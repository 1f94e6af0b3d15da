"""What became of the values of a state that are no tensors: hyper-parameters, scheduler, random states, data. Pure.

optimizer.param_groups.0.lr     of a group              rng.rank1.torch            of a rank, a digest
scheduler.last_epoch            of the run              dataloader.rank0.position  of a rank
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ckpttool.catalogue import parts
from ckpttool.operations.verify_resume.trial.results import Finding
from ckpttool.operations.verify_resume.trial.state import State

_GONE = object()
_MOST = 20
_TITLES = {"rng": "RNG", "dataloader": "data loader", "scaler": "grad scaler"}


class _Changed(NamedTuple):
    name: str
    was: Any
    now: Any


def changed(before: State, after: State, fresh: State | None) -> Iterator[Finding]:
    """Every value that is not what it was. Values of ranks that one of the two has not are left out."""
    groups: dict[str, list[_Changed]] = {}
    for name in dict.fromkeys([*before.objects, *after.objects]):
        rank = rank_of(before, name)
        if rank is not None and rank >= min(before.world, after.world):
            continue
        was, now = before.objects.get(name, _GONE), after.objects.get(name, _GONE)
        if not same(was, now):
            groups.setdefault(name.partition(".")[0], []).append(_Changed(name, was, now))
    for root, found in groups.items():
        kind = before.kinds.get(root) or after.kinds.get(root) or root
        if kind == "optimizer":
            yield from _hyperparameters(root, found)
        elif kind in parts.PER_RANK:
            yield from _of_ranks(root, kind, found, before, after, fresh)
        else:
            yield from _of_the_run(root, kind, found, after, fresh)


def same(was: Any, now: Any) -> bool:
    """Whether two values are equal and of one type; NaN is equal to itself, and -0.0 not to 0.0."""
    if isinstance(was, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(was) == len(now) and all(map(same, was, now))
    if isinstance(was, dict) and isinstance(now, dict):
        return was.keys() == now.keys() and all(same(was[key], now[key]) for key in was)
    if isinstance(was, float) and isinstance(now, float):
        return repr(was) == repr(now)
    return type(was) is type(now) and bool(was == now)


def rank_of(state: State, name: str) -> int | None:
    """The rank whose value it is: 3 for `rng.rank3.torch`."""
    if state.kind_of(name) not in parts.PER_RANK:
        return None
    found = parts.find_rank(tuple(name.split(".")))
    return found[1] if found is not None else None


def _hyperparameters(root: str, found: list[_Changed]) -> Iterator[Finding]:
    for number, (name, was, now) in enumerate(found):
        words = name.removeprefix(f"{root}.").split(".", 2)
        what = (
            f"`{words[2]}` of parameter group {words[1]}" if words[0] == "param_groups" and words[2:] else f"`{name}`"
        )
        if number == _MOST:
            yield Finding("hyper-parameter", f"{len(found) - _MOST} more of the optimizer's values differ", part=root)
            return
        if now is _GONE:
            kind, says = "hyper-parameter lost", f"{what} is lost: it was {_shown(was)}"
        elif was is _GONE:
            kind, says = "hyper-parameter", f"{what} is {_shown(now)} and was not there"
        else:
            kind, says = "hyper-parameter", f"{what} is {_shown(now)} and not {_shown(was)}"
        yield _finding(kind, says, "optimizer", name, was, now)


def _of_the_run(root: str, kind: str, found: list[_Changed], after: State, fresh: State | None) -> Iterator[Finding]:
    """A scheduler, a grad scaler, a counter: one thing, as newly built or otherwise not as it was."""
    title = _TITLES.get(kind, kind)
    name, was, now = _telling(found)
    told = ", ".join(f"{one.name.partition('.')[2] or one.name} {_shown(one.now)} and not {_shown(one.was)}"
                     for one in _first(found))  # fmt: skip
    if _is_fresh(root, found, after, fresh):
        yield _finding(f"{kind} not restored", f"the {title} `{root}` was not restored: {told}", kind, name, was, now)
    else:
        yield _finding(f"{kind} differs", f"the {title} `{root}` is not as it was: {told}", kind, name, was, now)


def _of_ranks(
    root: str, kind: str, found: list[_Changed], before: State, after: State, fresh: State | None
) -> Iterator[Finding]:
    """Random states and data loaders: what of which rank is missing, or stands at another."""
    title, world = _TITLES[kind], min(before.world, after.world)
    by_rank: dict[int, list[_Changed]] = {}
    for one in found:
        rank = rank_of(before, one.name)
        by_rank.setdefault(-1 if rank is None else rank, []).append(one)
    told: set[int] = set()
    for rank, mine in by_rank.items():
        if rank in told:
            continue
        name, was, now = _telling(mine)
        other = next((r for r in range(world) if r != rank and _took(mine, before, rank, r)), None)
        whose = f"the {title} of rank {rank}" if rank >= 0 else f"the {title}"
        what = ", ".join(dict.fromkeys(one.name.rpartition(".")[2] for one in mine))
        if other is not None and other in by_rank and _took(by_rank[other], before, other, rank):
            told.add(other)
            says = f"the {title}s of ranks {rank} and {other} are swapped ({what})"
            yield _finding(f"{kind} swapped", says, kind, name, was, now, rank)
        elif other is not None:
            says = f"{whose} is that of rank {other} ({what})"
            yield _finding(f"{kind} of another rank", says, kind, name, was, now, rank)
        elif _is_fresh(root, mine, after, fresh):
            verb = "restarted" if kind == "dataloader" else "not restored"
            yield _finding(f"{kind} {verb}", f"{whose} was {verb} ({what})", kind, name, was, now, rank)
        else:
            said = ", ".join(f"{one.name.rpartition('.')[2]} {_shown(one.now)} and not {_shown(one.was)}"
                             for one in _first(mine))  # fmt: skip
            yield _finding(f"{kind} differs", f"{whose} is not as it was: {said}", kind, name, was, now, rank)


def _took(mine: list[_Changed], before: State, rank: int, other: int) -> bool:
    """Whether everything that changed at `rank` is what `other` had."""
    there = [f".{parts.rank_key(rank)}", f".{parts.rank_key(other)}"]
    return rank >= 0 and all(
        same(one.now, before.objects.get(f"{one.name}.".replace(f"{there[0]}.", f"{there[1]}.", 1)[:-1], _GONE))
        for one in mine
    )  # fmt: skip


def _is_fresh(root: str, found: list[_Changed], after: State, fresh: State | None) -> bool:
    return fresh is not None and all(same(one.now, fresh.objects.get(one.name, _GONE)) for one in found)


def _telling(found: list[_Changed]) -> _Changed:
    """What says most: a counter, before a digest of everything."""
    return min(found, key=lambda one: not isinstance(one.was, (int, float)))


def _first(found: list[_Changed]) -> list[_Changed]:
    return sorted(found, key=lambda one: not isinstance(one.was, (int, float)))[:3]


def _finding(kind: str, says: str, part: str, name: str, was: Any, now: Any, rank: int | None = None) -> Finding:
    return Finding(
        kind, says, name=name, part=part, rank=rank,
        expected=None if was is _GONE else was, found=None if now is _GONE else now,
    )  # fmt: skip


def _shown(value: Any) -> str:
    if value is _GONE:
        return "not there"
    return f"{value!r:.60}"
