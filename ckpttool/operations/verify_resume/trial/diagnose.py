"""What became of a state on its way, each thing named as what it is. Pure.

diagnose(before, after, fresh)    `fresh` is the state of what was newly built, before anything was loaded

Nothing is told twice: a tensor that was swapped with another is not also one whose values differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.catalogue import dtypes
from ckpttool.operations.diff.elements import Comparison, Difference
from ckpttool.operations.verify_resume.trial.diagnose_values import changed
from ckpttool.operations.verify_resume.trial.results import Finding
from ckpttool.operations.verify_resume.trial.state import Held, State
from ckpttool.text import plural, some

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 1 << 20
_MOST = 20
_MOMENTS = {
    "exp_avg": "first moment", "exp_avg_sq": "second moment", "max_exp_avg_sq": "largest second moment",
    "momentum_buffer": "momentum", "square_avg": "second moment", "sum": "sum of squares",
}  # fmt: skip


def diagnose(before: State, after: State, fresh: State | None = None, run: str = "B") -> list[Finding]:
    """Every way in which `after` is not `before`, the most telling first; none when they are equal bit for bit.

    Values of a rank that one of the two does not have are left out: the worlds may differ in size.
    """
    made = _Diagnosis(before, after, fresh, run)
    found = [*made.names(), *made.ties(), *made.tensors(), *changed(before, after, fresh)]
    for one in found:
        one.run = run
    return found


class _Diagnosis:
    def __init__(self, before: State, after: State, fresh: State | None, run: str) -> None:
        self.before, self.after, self.fresh, self.run = before, after, fresh, run
        self.left = {
            name: difference
            for name, held in before.tensors.items()
            if name in after.tensors and _alike(held, after.tensors[name])
            and (difference := compared(held, after.tensors[name])).differing
        }  # fmt: skip

    def names(self) -> Iterator[Finding]:
        """Tensors that are missing, new, or of another dtype or shape."""
        before, after = self.before.tensors, self.after.tensors
        for kind, names in (("missing", before.keys() - after.keys()), ("unexpected", after.keys() - before.keys())):
            for name in sorted(names)[:_MOST]:
                says = f"`{name}` is not there" if kind == "missing" else f"`{name}` was not there before"
                yield Finding(f"tensor {kind}", says, name=name, part=self.before.kind_of(name))
        for name in before:
            if name in after and not _alike(before[name], after[name]):
                was, now = before[name], after[name]
                kind = "dtype differs" if was.shape == now.shape else "shape differs"
                expected, found = f"{was.dtype} {list(was.shape)}", f"{now.dtype} {list(now.shape)}"
                yield Finding(
                    kind, f"`{name}` was {expected} and is {found}", name=name, part=self.before.kind_of(name),
                    expected=expected, found=found,
                )  # fmt: skip

    def ties(self) -> Iterator[Finding]:
        """Names that were one tensor and are several."""
        tied = {frozenset(one) for one in self.after.ties}
        for one in self.before.ties:
            if any(set(one) <= group for group in tied):
                continue
            first, *rest = one
            # What differs because of it is not told again.
            for name in one:
                self.left.pop(name, None)
            yield Finding(
                "untied", f"{some(rest)} was one tensor with `{first}` and is one of its own", name=rest[0],
                part="model", hint="tie the weights in `build`, before the optimizer is made",
            )  # fmt: skip

    def tensors(self) -> Iterator[Finding]:
        """What became of the values of each tensor."""
        steps: tuple[Callable[[], Iterator[Finding]], ...] = (
            self._swapped, self._steps, self._not_restored, self._zeroed, self._rounded, self._flipped,
            self._wrong_shards, self._others,
        )  # fmt: skip
        for step in steps:
            yield from step()

    def _swapped(self) -> Iterator[Finding]:
        """Two tensors of the same shape that changed places; the moments of two parameters as one thing."""
        by_digest: dict[tuple[str, Any, str], list[str]] = {}
        for name in self.left:
            one = self.before.tensors[name]
            by_digest.setdefault((one.dtype, one.shape, one.sha256()), []).append(name)
        pairs: dict[tuple[str, str], list[str]] = {}
        for name in [*self.left]:
            now = self.after.tensors[name]
            from_ = [n for n in by_digest.get((now.dtype, now.shape, now.sha256()), ()) if n != name]
            other = next((n for n in from_ if self._is(n, name)), None)
            if other is not None and name < other and name in self.left and other in self.left:
                pairs.setdefault((_owner(name), _owner(other)), []).append(name)
                del self.left[name], self.left[other]
            elif other is None and from_ and name in self.left and not self._is_uniform(name):
                del self.left[name]
                yield self._finding("taken from another", f"`{name}` holds what `{from_[0]}` was", name)
        for (first, second), names in pairs.items():
            moments = [_leaf(name) for name in names if self.before.kind_of(name) == "optimizer"]
            what = (
                f"the moments ({', '.join(moments)}) of `{first}` and `{second}`"
                if moments
                else f"`{first}` and `{second}`"
            )
            yield self._finding("swapped", f"{what} are swapped", names[0])

    def _is(self, name: str, was: str) -> bool:
        return self.after.tensors[name].sha256() == self.before.tensors[was].sha256()

    def _is_uniform(self, name: str) -> bool:
        bits = self.after.tensors[name].bits
        return len(bits) < 2 or bool((bits[: 1 << 16] == bits[0]).all())

    def _steps(self) -> Iterator[Finding]:
        """Counters of the optimizer, together where they are off by the same."""
        off: dict[Any, list[str]] = {}
        for name in [*self.left]:
            if self.before.kind_of(name) == "optimizer" and _leaf(name) == "step" and self.left[name].numel == 1:
                was, now = self.left[name].values or (0, 0)
                off.setdefault((was, now), []).append(name)
        for (was, now), names in off.items():
            by = now - was
            says = f"the step of {_who(names)} is off by {by:+g}: {now:g} and not {was:g}"
            yield self._finding("step", says, names[0])
            for name in names:
                del self.left[name]

    def _not_restored(self) -> Iterator[Finding]:
        """What is as it was newly built."""
        fresh = self.fresh.tensors if self.fresh is not None else {}
        as_built: dict[str, list[str]] = {}
        for name in [*self.left]:
            if name in fresh and fresh[name].sha256() == self.after.tensors[name].sha256():
                kind = "buffer" if name in self.before.buffers else self.before.kind_of(name)
                as_built.setdefault(kind, []).append(name)
        for kind, names in as_built.items():
            what = plural(len(names), "buffer") if kind == "buffer" else f"{plural(len(names), 'tensor')} of the {kind}"
            says = f"{what} {'was' if len(names) == 1 else 'were'} not restored: {some(names)}"
            yield self._finding(f"{kind} not restored", says, names[0])
            for name in names:
                del self.left[name]

    def _zeroed(self) -> Iterator[Finding]:
        for name in [*self.left]:
            if _all(self.after.tensors[name], lambda block: not block.any()):
                yield self._finding("zeroed", f"{self._called(name)} is all zeros", name)
                del self.left[name]

    def _rounded(self) -> Iterator[Finding]:
        """What went through a smaller dtype and came back."""
        rounded: dict[tuple[str, str], list[str]] = {}
        for name in [*self.left]:
            through = _rounded_to(self.before.tensors[name], self.after.tensors[name])
            if through is not None:
                rounded.setdefault((self.before.kind_of(name), through), []).append(name)
        for (kind, through), names in rounded.items():
            if max(self.left[name].numel for name in names) == 1:
                continue  # which may as well be any other change
            moments = sorted({_leaf(name) for name in names}) if kind == "optimizer" else []
            what = f"{plural(len(names), 'tensor')} of the {kind}" + (f" ({', '.join(moments)})" if moments else "")
            verb = "was" if len(names) == 1 else "were"
            yield self._finding("rounded", f"{what} {verb} rounded to {through}: {some(names)}", names[0])
            for name in names:
                del self.left[name]

    def _flipped(self) -> Iterator[Finding]:
        for name, difference in [*self.left.items()]:
            if difference.differing == 1 and difference.bits is not None:
                apart = difference.bits[0] ^ difference.bits[1]
                if apart.bit_count() == 1:
                    where = self._where(name, difference)
                    says = f"bit {apart.bit_length() - 1} of {where} is flipped"
                    yield self._finding("flipped bit", says, name)
                    del self.left[name]

    def _wrong_shards(self) -> Iterator[Finding]:
        """A box of one rank that holds what the box of another one held."""
        for name in [*self.left]:
            boxes = self.before.boxes.get(name, [])
            was, now = self.before.tensors[name], self.after.tensors[name]
            if len({box for box in boxes if box}) < 2 or was.dtype == "complex128":
                continue
            a, b = was.bits.reshape(was.shape), now.bits.reshape(now.shape)
            told = 0
            for rank, box in enumerate(boxes):
                if not box or (_cut(a, box) == _cut(b, box)).all():
                    continue
                other = next(
                    (s for s, o in enumerate(boxes) if o and o != box and o[1] == box[1]
                     and (_cut(a, o) == _cut(b, box)).all()), None,
                )  # fmt: skip
                if other is None:
                    told = 0
                    break
                if not told:
                    yield self._finding(
                        "wrong shard", f"the shard of rank {rank} of `{name}` is that of rank {other}", name, rank=rank
                    )
                told += 1
            if told:
                del self.left[name]

    def _others(self) -> Iterator[Finding]:
        for number, (name, difference) in enumerate(self.left.items()):
            if number == _MOST:
                more = len(self.left) - _MOST
                yield Finding("values differ", f"{plural(more, 'more tensor')} differ", part=self.before.kind_of(name))
                return
            was, now = difference.values or (None, None)
            says = (
                f"{difference.differing:,} of {plural(difference.numel, 'element')} of `{name}` differ, the first "
                f"at {difference.index(self.before.tensors[name].shape)}: {_number(now)} and not {_number(was)}"
            )
            yield self._finding("values differ", says, name)

    def _called(self, name: str) -> str:
        moment = _MOMENTS.get(_leaf(name)) if self.before.kind_of(name) == "optimizer" else None
        return f"the {moment} of `{_owner(name)}`" if moment else f"`{name}`"

    def _where(self, name: str, difference: Difference) -> str:
        was, now = difference.values or (None, None)
        apart = f", {difference.ulp:,} ULP apart" if difference.ulp is not None else ""
        index = difference.index(self.before.tensors[name].shape)
        return f"`{name}`{index or ''} ({_number(now)} and not {_number(was)}{apart})"

    def _finding(self, kind: str, says: str, name: str, rank: int | None = None) -> Finding:
        difference = self.left.get(name) or compared(self.before.tensors[name], self.after.tensors[name])
        expected, found = difference.values or (None, None)
        return Finding(
            kind, says, self.run, name, self.before.kind_of(name), rank,
            index=difference.index(self.before.tensors[name].shape), expected=_plain(expected), found=_plain(found),
            ulp=difference.ulp, differing=difference.differing, of=difference.numel, absolute=difference.absolute,
            relative=difference.relative,
        )  # fmt: skip


def compared(was: Held, now: Held) -> Difference:
    """How two tensors of one dtype and shape differ; looked at only when their digests do."""
    kind = dtypes.dtype(was.dtype)
    made = Comparison(kind, cosine=False)
    if was.sha256() == now.sha256():
        return Difference(was.dtype, was.numel)
    per = 2 if kind.itemsize == 16 else 1
    for low in range(0, len(was.bits), _BLOCK):
        made.feed(was.bits[low : low + _BLOCK], now.bits[low : low + _BLOCK], low // per)
    return made.result()


def _alike(one: Held, two: Held) -> bool:
    return (one.dtype, one.shape) == (two.dtype, two.shape)


def _all(held: Held, holds: Callable[[Array], bool]) -> bool:
    return len(held.bits) > 0 and all(
        holds(held.bits[low : low + _BLOCK]) for low in range(0, len(held.bits), _BLOCK)
    )  # fmt: skip


def _rounded_to(was: Held, now: Held) -> str | None:
    if was.dtype != "float32":
        return None
    for name, rounded in (("bfloat16", _as_bfloat16), ("float16", _as_float16)):
        if all(
            (rounded(was.bits[low : low + _BLOCK]) == now.bits[low : low + _BLOCK]).all()
            for low in range(0, len(was.bits), _BLOCK)
        ):
            return name
    return None


def _as_bfloat16(bits: Array) -> Array:
    """To the nearest, ties to even, and back."""
    import numpy as np

    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: Array = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return rounded


def _as_float16(bits: Array) -> Array:
    import numpy as np

    with np.errstate(over="ignore"):
        rounded: Array = bits.view(np.float32).astype(np.float16).astype(np.float32).view(np.uint32)
    return rounded


def _cut(array: Array, box: Any) -> Array:
    return array[tuple(slice(low, low + size) for low, size in zip(*box, strict=True))]


def _owner(name: str) -> str:
    """The parameter that a moment is of; anything else is its own."""
    head, state, rest = name.partition(".state.")
    return rest.rpartition(".")[0] if state and "." not in head else name


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _who(names: list[str]) -> str:
    owners = [_owner(name) for name in names]
    return f"`{owners[0]}`" if len(owners) == 1 else f"{plural(len(owners), 'parameter')} ({some(owners)})"


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return str(value) if isinstance(value, complex) else value
