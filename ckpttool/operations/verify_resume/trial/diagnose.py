"""Classifies the differences between two recorded states: cast, reordered, untied, not restored, flipped, ...

diagnose(before, after, fresh)    `fresh` is the state of what was newly built, before anything was loaded

Nothing is reported twice: a tensor that was swapped with another is not also one whose values differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckpttool.layout.optimizer.keys import STATE_KINDS
from ckpttool.operations.diff import Diff, TensorDifference
from ckpttool.operations.diff.elements import Difference
from ckpttool.operations.verify_resume.trial.diagnose_values import changed_values
from ckpttool.operations.verify_resume.trial.results import Finding
from ckpttool.operations.verify_resume.trial.state import MappedTensor, RecordedState, compare
from ckpttool.text import plural, some
from ckpttool.transfer.numbers import Array

_BLOCK = 1 << 20
_MOST = 20


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
    diagnosis = _Diagnosis(before, after, fresh, run, difference)
    findings = [
        *diagnosis.names(),
        *diagnosis.ties(),
        *diagnosis.tensors(),
        *changed_values(before, after, fresh, difference),
    ]
    for finding in findings:
        finding.run = run
    return findings


class _Diagnosis:
    def __init__(
        self, before: RecordedState, after: RecordedState, fresh: RecordedState | None, run: str, difference: Diff
    ) -> None:
        self.before, self.after, self.fresh, self.run = before, after, fresh, run
        self.difference = difference
        # Tensors whose values differ for a reason that is not known yet.
        self.left = {
            one.name: one.values for one in difference.tensors if one.kinds == ["values"] and one.values is not None
        }
        self.values = dict(self.left)

    def names(self) -> Iterator[Finding]:
        """Yield the tensors that are missing, new, or of another dtype or shape."""
        other_kinds = self.difference.kinds
        missing = {one.name for one in self.difference.only_a} | {*other_kinds}
        unexpected = {one.name for one in self.difference.only_b} | {*other_kinds}
        for name in sorted(missing & self.before.tensors.keys())[:_MOST]:
            yield Finding("tensor missing", f"`{name}` is missing", name=name, part=self.before.kind_of(name))
        for name in sorted(unexpected & self.after.tensors.keys())[:_MOST]:
            says = f"`{name}` did not exist before"
            yield Finding("tensor unexpected", says, name=name, part=self.before.kind_of(name))
        for one in self.difference.tensors:
            if "dtype" in one.kinds or "shape" in one.kinds:
                yield self._reshaped(one)

    def _reshaped(self, one: TensorDifference) -> Finding:
        expected, actual = (f"{kind} {list(shape)}" for kind, shape in zip(one.dtypes, one.shapes, strict=True))
        kind = "shape differs" if "shape" in one.kinds else "dtype differs"
        return Finding(
            kind,
            f"`{one.name}` was {expected} and is {actual}",
            name=one.name,
            part=self.before.kind_of(one.name),
            expected=expected,
            found=actual,
        )

    def ties(self) -> Iterator[Finding]:
        """Yield the names that were one tensor and are several."""
        tied = [set(names) for names in self.after.ties]
        for names in self.before.ties:
            if any(set(names) <= group for group in tied):
                continue
            first, *rest = names
            # What differs because of it is not reported again.
            for name in names:
                self.left.pop(name, None)
            yield Finding(
                "untied",
                f"{some(rest)} was tied with `{first}` and is a tensor of its own",
                name=rest[0],
                part="model",
                hint="tie the weights in `build`, before the optimizer is made",
            )

    def tensors(self) -> Iterator[Finding]:
        """Yield what happened to the values of each tensor."""
        yield from self._swapped()
        yield from self._steps()
        yield from self._not_restored()
        yield from self._zeroed()
        yield from self._rounded()
        yield from self._flipped()
        yield from self._wrong_shards()
        yield from self._others()

    def _swapped(self) -> Iterator[Finding]:
        """Yield tensors of the same shape that changed places, the moments of two parameters together."""
        by_digest: dict[tuple[str, Any, str], list[str]] = {}
        for name in self.left:
            tensor = self.before.tensors[name]
            by_digest.setdefault((tensor.dtype, tensor.shape, tensor.sha256()), []).append(name)
        pairs: dict[tuple[str, str], list[str]] = {}
        for name in [*self.left]:
            now = self.after.tensors[name]
            origins = [n for n in by_digest.get((now.dtype, now.shape, now.sha256()), ()) if n != name]
            other = next((n for n in origins if self._holds(n, name)), None)
            if other is not None and name < other and name in self.left and other in self.left:
                pairs.setdefault((_parameter(name), _parameter(other)), []).append(name)
                del self.left[name], self.left[other]
            elif other is None and origins and name in self.left and not self._is_uniform(name):
                del self.left[name]
                yield self._finding("taken from another", f"`{name}` has the values of `{origins[0]}`", name)
        for (first, second), names in pairs.items():
            moments = [_leaf(name) for name in names if self.before.kind_of(name) == "optimizer"]
            what = f"`{first}` and `{second}`"
            if moments:
                what = f"the moments ({', '.join(moments)}) of {what}"
            yield self._finding("swapped", f"{what} are swapped", names[0])

    def _holds(self, name: str, other: str) -> bool:
        """Return whether a tensor has the values that the other one had."""
        return self.after.tensors[name].sha256() == self.before.tensors[other].sha256()

    def _is_uniform(self, name: str) -> bool:
        bits = self.after.tensors[name].bits
        return len(bits) < 2 or bool((bits[: 1 << 16] == bits[0]).all())

    def _steps(self) -> Iterator[Finding]:
        """Yield step counters of the optimizer, together where they are off by the same."""
        steps: dict[Any, list[str]] = {}
        for name in [*self.left]:
            if self.before.kind_of(name) == "optimizer" and _leaf(name) == "step" and self.left[name].numel == 1:
                steps.setdefault(self.left[name].values or (0, 0), []).append(name)
        for (was, now), names in steps.items():
            says = f"the step of {_parameters(names)} is off by {now - was:+g}: {now:g} and not {was:g}"
            yield self._finding("step", says, names[0])
            self._explained(names)

    def _not_restored(self) -> Iterator[Finding]:
        """Yield what is as it was newly built."""
        fresh = self.fresh.tensors if self.fresh is not None else {}
        as_built: dict[str, list[str]] = {}
        for name in [*self.left]:
            if name in fresh and fresh[name].sha256() == self.after.tensors[name].sha256():
                kind = "buffer" if name in self.before.buffers else self.before.kind_of(name)
                as_built.setdefault(kind, []).append(name)
        for kind, names in as_built.items():
            what = plural(len(names), "buffer") if kind == "buffer" else f"{plural(len(names), 'tensor')} of the {kind}"
            says = f"{what} {_were(names)} not restored: {some(names)}"
            yield self._finding(f"{kind} not restored", says, names[0])
            self._explained(names)

    def _zeroed(self) -> Iterator[Finding]:
        for name in [*self.left]:
            if _all_blocks(self.after.tensors[name], lambda bits: not bits.any()):
                yield self._finding("zeroed", f"{self._title(name)} is all zeros", name)
                self._explained([name])

    def _rounded(self) -> Iterator[Finding]:
        """Yield what was cast to a smaller dtype and back."""
        rounded: dict[tuple[str, str], list[str]] = {}
        for name in [*self.left]:
            dtype = _rounded_to(self.before.tensors[name], self.after.tensors[name])
            if dtype is not None:
                rounded.setdefault((self.before.kind_of(name), dtype), []).append(name)
        for (kind, dtype), names in rounded.items():
            if max(self.left[name].numel for name in names) == 1:
                continue  # a single number may have changed in any other way
            moments = sorted({_leaf(name) for name in names}) if kind == "optimizer" else []
            what = f"{plural(len(names), 'tensor')} of the {kind}" + (f" ({', '.join(moments)})" if moments else "")
            yield self._finding("rounded", f"{what} {_were(names)} rounded to {dtype}: {some(names)}", names[0])
            self._explained(names)

    def _flipped(self) -> Iterator[Finding]:
        for name, difference in [*self.left.items()]:
            if difference.differing == 1 and difference.bits is not None:
                apart = difference.bits[0] ^ difference.bits[1]
                if apart.bit_count() == 1:
                    says = f"bit {apart.bit_length() - 1} of {self._element(name, difference)} is flipped"
                    yield self._finding("flipped bit", says, name)
                    self._explained([name])

    def _wrong_shards(self) -> Iterator[Finding]:
        """Yield the box of one rank that has the values that the box of another one had."""
        for name in [*self.left]:
            boxes = self.before.boxes.get(name, [])
            was, now = self.before.tensors[name], self.after.tensors[name]
            if len({box for box in boxes if box}) < 2 or was.dtype == "complex128":
                continue
            pairs = _shifted_boxes(was.bits.reshape(was.shape), now.bits.reshape(now.shape), boxes)
            if pairs:
                rank, other = pairs[0]
                says = f"the shard of rank {rank} of `{name}` is that of rank {other}"
                yield self._finding("wrong shard", says, name, rank=rank)
                self._explained([name])

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

    def _explained(self, names: list[str]) -> None:
        for name in names:
            del self.left[name]

    def _title(self, name: str) -> str:
        kind = STATE_KINDS.get(_leaf(name)) if self.before.kind_of(name) == "optimizer" else None
        return f"the {kind.title} of `{_parameter(name)}`" if kind is not None and kind.title else f"`{name}`"

    def _element(self, name: str, difference: Difference) -> str:
        was, now = difference.values or (None, None)
        apart = f", {difference.ulp:,} ULP apart" if difference.ulp is not None else ""
        index = difference.index(self.before.tensors[name].shape)
        return f"`{name}`{index or ''} ({_number(now)} and not {_number(was)}{apart})"

    def _finding(self, kind: str, says: str, name: str, rank: int | None = None) -> Finding:
        difference = self.values[name]
        expected, actual = difference.values or (None, None)
        return Finding(
            kind,
            says,
            self.run,
            name,
            self.before.kind_of(name),
            rank,
            index=difference.index(self.before.tensors[name].shape),
            expected=_plain(expected),
            found=_plain(actual),
            ulp=difference.ulp,
            differing=difference.differing,
            of=difference.numel,
            absolute=difference.absolute,
            relative=difference.relative,
        )


def _all_blocks(tensor: MappedTensor, test: Callable[[Array], bool]) -> bool:
    return len(tensor.bits) > 0 and all(
        test(tensor.bits[low : low + _BLOCK]) for low in range(0, len(tensor.bits), _BLOCK)
    )


def _rounded_to(was: MappedTensor, now: MappedTensor) -> str | None:
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
    """Round to the nearest, ties to even, and widen again."""
    import numpy as np

    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: Array = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return rounded


def _as_float16(bits: Array) -> Array:
    import numpy as np

    with np.errstate(over="ignore"):
        rounded: Array = bits.view(np.float32).astype(np.float16).astype(np.float32).view(np.uint32)
    return rounded


def _shifted_boxes(was: Array, now: Array, boxes: list[Any]) -> list[tuple[int, int]]:
    """Return the ranks whose boxes changed, each with the rank whose values it has; none if one has other values."""
    pairs = []
    for rank, box in enumerate(boxes):
        if not box or (_cut(was, box) == _cut(now, box)).all():
            continue
        others = (
            other
            for other, its in enumerate(boxes)
            if its and its != box and its[1] == box[1] and (_cut(was, its) == _cut(now, box)).all()
        )
        other = next(others, None)
        if other is None:
            return []
        pairs.append((rank, other))
    return pairs


def _cut(array: Array, box: Any) -> Array:
    return array[tuple(slice(low, low + size) for low, size in zip(*box, strict=True))]


def _parameter(name: str) -> str:
    """Return the parameter that a moment belongs to; the name itself if it is no moment."""
    head, state, rest = name.partition(".state.")
    return rest.rpartition(".")[0] if state and "." not in head else name


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parameters(names: list[str]) -> str:
    parameters = [_parameter(name) for name in names]
    if len(parameters) == 1:
        return f"`{parameters[0]}`"
    return f"{plural(len(parameters), 'parameter')} ({some(parameters)})"


def _were(names: list[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """Return a number as JSON has it."""
    return str(value) if isinstance(value, complex) else value
