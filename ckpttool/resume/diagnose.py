"""Classifies the differences between two recorded states: cast, reordered, untied, not restored, flipped, ...

diagnose(before, after, fresh)    `fresh` is the state of what was newly built, before anything was loaded

Nothing is reported twice: a tensor that was swapped with another is not also one whose values differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool.analysis.differences.elements import Difference
from ckpttool.analysis.differences.results import Diff
from ckpttool.layout.optimizer.parse import STATE_KINDS
from ckpttool.resume.diagnose_values import changed_values
from ckpttool.resume.results import Finding
from ckpttool.resume.states import MappedTensor, RecordedState, compare
from ckpttool.text import plural, some
from ckpttool.transfer.numbers import Array

_LIMIT = 20
_BLOCK = 1 << 20  # elements that are rounded at once


def diagnose(
    before: RecordedState,
    after: RecordedState,
    fresh: RecordedState | None = None,
    run: str = "B",
    difference: Diff | None = None,
) -> list[Finding]:
    """Return every way in which `after` is not `before`, the most telling first; none when they are bit-identical.

    Values of a rank that one of the two does not have are left out: worlds may differ in size. `difference` is that of
    the two states, if it is known already.
    """
    difference = difference if difference is not None else compare(before, after)
    tensors = _Tensors(before, after, fresh, difference)
    findings = [*tensors.findings(), *changed_values(before, after, fresh, difference)]
    for finding in findings:
        finding.run = run
    return findings


class _Tensors:
    """The tensors that differ. `left` are those whose values differ for a reason that is not known yet."""

    def __init__(
        self, before: RecordedState, after: RecordedState, fresh: RecordedState | None, difference: Diff
    ) -> None:
        self.before, self.after, self.fresh, self.difference = before, after, fresh, difference
        differing = ((one, one.values) for one in difference.tensors if one.kinds == ["values"])
        self.values = {one.name: values for one, values in differing if values is not None}
        self.left = dict(self.values)

    def findings(self) -> Iterator[Finding]:
        """Yield what each cause explains, and then what none does."""
        yield from self._names()
        yield from self._ties()
        causes = (self._swapped, self._steps, self._not_restored, self._zeroed, self._rounded, self._flipped)
        for cause in (*causes, self._wrong_shards, self._others):
            yield from cause()

    def _names(self) -> Iterator[Finding]:
        """Yield the tensors that are missing, new, or of another dtype or shape."""
        kind_of, difference = self.before.kind_of, self.difference
        for kind, only, state, message in (
            ("tensor missing", difference.only_a, self.before, "is missing"),
            ("tensor unexpected", difference.only_b, self.after, "did not exist before"),
        ):
            names = {one.name for one in only} | {*difference.kinds}
            for name in sorted(names & state.tensors.keys())[:_LIMIT]:
                yield Finding(kind, f"`{name}` {message}", name=name, part=kind_of(name))
        for one in difference.tensors:
            if "dtype" in one.kinds or "shape" in one.kinds:
                kind = "shape differs" if "shape" in one.kinds else "dtype differs"
                was, now = (f"{kind} {list(shape)}" for kind, shape in zip(one.dtypes, one.shapes, strict=True))
                message = f"`{one.name}` was {was} and is {now}"
                yield Finding(kind, message, name=one.name, part=kind_of(one.name), expected=was, found=now)

    def _ties(self) -> Iterator[Finding]:
        """Yield the names that were one tensor and are several."""
        tied = [set(names) for names in self.after.ties]
        for names in self.before.ties:
            if any(set(names) <= group for group in tied):
                continue
            first, *rest = names
            # What differs because of it is not reported again.
            for name in names:
                self.left.pop(name, None)
            message = f"{some(rest)} was tied with `{first}` and is a tensor of its own"
            hint = "tie the weights in `build`, before the optimizer is made"
            yield Finding("untied", message, name=rest[0], part="model", hint=hint)

    def _swapped(self) -> Iterator[Finding]:
        """Yield tensors of the same shape that changed places, the moments of two parameters together."""
        by_digest: dict[tuple[str, Any, str], list[str]] = {}
        for name in self.left:
            tensor = self.before.tensors[name]
            by_digest.setdefault((tensor.dtype, tensor.shape, tensor.sha256), []).append(name)
        pairs: dict[tuple[str, str], list[str]] = {}
        for name in [*self.left]:
            now = self.after.tensors[name]
            origins = [n for n in by_digest.get((now.dtype, now.shape, now.sha256), ()) if n != name]
            was = self.before.tensors[name].sha256
            other = next((n for n in origins if self.after.tensors[n].sha256 == was), None)
            if other is not None and name < other and name in self.left and other in self.left:
                pairs.setdefault((_parameter(name), _parameter(other)), []).append(name)
                del self.left[name], self.left[other]
            elif other is None and origins and name in self.left and (now.bits[: 1 << 16] != now.bits[:1]).any():
                yield self._finding("taken from another", f"`{name}` has the values of `{origins[0]}`", [name])
        for (first, second), names in pairs.items():
            moments = [_leaf(name) for name in names if self.before.kind_of(name) == "optimizer"]
            of = f"the moments ({', '.join(moments)}) of " if moments else ""
            yield self._finding("swapped", f"{of}`{first}` and `{second}` are swapped", names)

    def _steps(self) -> Iterator[Finding]:
        """Yield step counters of the optimizer, together where they are off by the same."""
        steps: dict[Any, list[str]] = {}
        for name, difference in self.left.items():
            if self.before.kind_of(name) == "optimizer" and _leaf(name) == "step" and difference.numel == 1:
                steps.setdefault(difference.values or (0, 0), []).append(name)
        for (was, now), names in steps.items():
            parameters = [_parameter(name) for name in names]
            of = f"`{parameters[0]}`" if len(names) == 1 else f"{len(names):,} parameters ({some(parameters)})"
            yield self._finding("step", f"the step of {of} is off by {now - was:+g}: {now:g} and not {was:g}", names)

    def _not_restored(self) -> Iterator[Finding]:
        """Yield what is as it was newly built."""
        fresh = self.fresh.tensors if self.fresh is not None else {}
        as_built: dict[str, list[str]] = {}
        for name in self.left:
            if name in fresh and fresh[name].sha256 == self.after.tensors[name].sha256:
                kind = "buffer" if name in self.before.buffers else self.before.kind_of(name)
                as_built.setdefault(kind, []).append(name)
        for kind, names in as_built.items():
            what = plural(len(names), "buffer") if kind == "buffer" else f"{plural(len(names), 'tensor')} of the {kind}"
            message = f"{what} {_were(names)} not restored: {some(names)}"
            yield self._finding(f"{kind} not restored", message, names)

    def _zeroed(self) -> Iterator[Finding]:
        for name in [*self.left]:
            if not self.after.tensors[name].bits.any():
                kind = STATE_KINDS.get(_leaf(name)) if self.before.kind_of(name) == "optimizer" else None
                title = f"the {kind.title} of `{_parameter(name)}`" if kind and kind.title else f"`{name}`"
                yield self._finding("zeroed", f"{title} is all zeros", [name])

    def _rounded(self) -> Iterator[Finding]:
        """Yield what was cast to a smaller dtype and back."""
        rounded: dict[tuple[str, str], list[str]] = {}
        for name in self.left:
            if dtype := _rounded_to(self.before.tensors[name], self.after.tensors[name]):
                rounded.setdefault((self.before.kind_of(name), dtype), []).append(name)
        for (kind, dtype), names in rounded.items():
            if max(self.left[name].numel for name in names) == 1:
                continue  # a single number may have changed in any other way
            moments = f" ({', '.join(sorted({_leaf(name) for name in names}))})" if kind == "optimizer" else ""
            what = f"{plural(len(names), 'tensor')} of the {kind}{moments} {_were(names)}"
            yield self._finding("rounded", f"{what} rounded to {dtype}: {some(names)}", names)

    def _flipped(self) -> Iterator[Finding]:
        for name, difference in [*self.left.items()]:
            was, now = difference.bits or (0, 0)
            if difference.differing == 1 and (was ^ now).bit_count() == 1:
                index, value = difference.index(self.before.tensors[name].shape), self._values(difference)
                ulp = f", {difference.ulp:,} ULP apart" if difference.ulp is not None else ""
                message = f"bit {(was ^ now).bit_length() - 1} of `{name}`{index or ''} ({value}{ulp}) is flipped"
                yield self._finding("flipped bit", message, [name])

    def _wrong_shards(self) -> Iterator[Finding]:
        """Yield the box of one rank that has the values that the box of another one had."""
        for name in [*self.left]:
            boxes = self.before.boxes.get(name, [])
            was, now = self.before.tensors[name], self.after.tensors[name]
            if len({box for box in boxes if box}) < 2 or was.dtype == "complex128":
                continue
            if pair := _shifted_box(was.bits.reshape(was.shape), now.bits.reshape(now.shape), boxes):
                message = f"the shard of rank {pair[0]} of `{name}` is that of rank {pair[1]}"
                yield self._finding("wrong shard", message, [name], rank=pair[0])

    def _others(self) -> Iterator[Finding]:
        for number, (name, difference) in enumerate([*self.left.items()]):
            if number == _LIMIT:
                message = f"{plural(len(self.left), 'more tensor')} differ"
                yield Finding("values differ", message, part=self.before.kind_of(name))
                return
            of = f"{difference.differing:,} of {plural(difference.numel, 'element')} of `{name}` differ"
            index = difference.index(self.before.tensors[name].shape)
            yield self._finding("values differ", f"{of}, the first at {index}: {self._values(difference)}", [name])

    def _values(self, difference: Difference) -> str:
        was, now = (f"{v:.9g}" if isinstance(v, float) else v for v in difference.values or (None, None))
        return f"{now} and not {was}"

    def _finding(self, kind: str, message: str, names: list[str], rank: int | None = None) -> Finding:
        """Return a finding with the figures of the first of the names, all of which it explains."""
        for name in names:
            self.left.pop(name, None)
        name, difference = names[0], self.values[names[0]]
        # JSON has no complex numbers.
        was, now = (str(v) if isinstance(v, complex) else v for v in difference.values or (None, None))
        figures = {figure: getattr(difference, figure) for figure in ("ulp", "differing", "absolute", "relative")}
        figures |= {"index": difference.index(self.before.tensors[name].shape), "of": difference.numel}
        part = self.before.kind_of(name)
        return Finding(kind, message, name=name, part=part, rank=rank, expected=was, found=now, **figures)


def _rounded_to(was: MappedTensor, now: MappedTensor) -> str | None:
    # With numpy, since importing torch takes seconds, and it may not be there.
    if was.dtype != "float32":
        return None
    before, after = was.bits, now.bits
    blocks = [slice(low, low + _BLOCK) for low in range(0, len(before), _BLOCK)]
    for name, rounded in _ROUNDED.items():
        if all((rounded(before[block]) == after[block]).all() for block in blocks):
            return name
    return None


def _to_bfloat16(bits: Array) -> Array:
    """Return the bits of float32 elements, rounded to the nearest bfloat16, a tie to the even one."""
    rounded: Array = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded


def _to_float16(bits: Array) -> Array:
    import numpy as np

    with np.errstate(over="ignore"):
        rounded: Array = bits.view("f4").astype("f2").astype("f4").view("u4")
    return rounded


_ROUNDED = {"bfloat16": _to_bfloat16, "float16": _to_float16}


def _shifted_box(was: Array, now: Array, boxes: list[Any]) -> tuple[int, int] | None:
    """Return the first rank whose box changed, with the rank whose values it has; None if one has other values."""
    pairs: list[tuple[int, int]] = []
    for rank, box in enumerate(boxes):
        if not box or (_cut(was, box) == _cut(now, box)).all():
            continue
        alike = ((other, its) for other, its in enumerate(boxes) if its and its != box and its[1] == box[1])
        origin = next((other for other, its in alike if (_cut(was, its) == _cut(now, box)).all()), None)
        if origin is None:
            return None
        pairs.append((rank, origin))
    return pairs[0] if pairs else None


def _cut(array: Array, box: Any) -> Array:
    return array[tuple(slice(low, low + size) for low, size in zip(*box, strict=True))]


def _parameter(name: str) -> str:
    """Return the parameter that a moment belongs to; the name itself if it is no moment."""
    head, state, rest = name.partition(".state.")
    return rest.rpartition(".")[0] if state and "." not in head else name


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _were(names: list[str]) -> str:
    return "was" if len(names) == 1 else "were"
