"""Casts: which tensors `--dtype` rules apply to, and a catalogue with their new dtypes. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence

from ckpttool.catalogue.dtypes import ALIASES, DTYPES, Dtype
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Tensor
from ckpttool.catalogue.patterns import compile_pattern, rule
from ckpttool.errors import UsageError
from ckpttool.layout.move import derived, rebuilt, retied
from ckpttool.text import meant

_FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def caster(
    rules: Sequence[str], stays: Callable[[str], bool] = lambda name: False, scales: Container[str] = ()
) -> Callable[[Tensor], Dtype | None]:
    """Return the dtype that `--dtype` rules give a tensor; None to leave it.

    A rule is `PATTERN=DTYPE` over full names, the first that matches, or a bare `DTYPE` for the floating-point tensors
    of models that match none (8-bit floats stay, and so do their `scales`: rounding one changes all elements of its
    block). Integers and bools are never cast. A bare dtype is not for tensors whose name `stays`: they become float32.
    Raises UsageError for a dtype that is none.
    """
    compiled: list[tuple[re.Pattern[str] | None, Dtype]] = []
    if sum("=" not in text for text in rules) > 1:
        raise UsageError("`--dtype` without a pattern is given more than once")
    # The bare one is the general case, wherever it stands.
    for text in sorted(rules, key=lambda text: "=" not in text):
        pattern, name = rule(text, "--dtype") if "=" in text else (None, text)
        short = name.removeprefix("torch.")
        kind = DTYPES.get(ALIASES.get(short, short))
        if kind is None or kind.kind != "float" or kind.name.startswith("float4"):
            hint = meant(short, _FLOATS, f"one of {', '.join(_FLOATS)}")
            if kind is not None or re.fullmatch(r"u?int\d|nf4|fp4", short):
                hint = f"`--dtype` casts to {', '.join(_FLOATS)}; to quantize, use a library for that on the result"
            if "=" not in text and ":" in text and (known := text.rpartition(":"))[2] in {*_FLOATS, *ALIASES}:
                hint = f"did you mean `--dtype '{known[0]}={known[2]}'`?"
            raise UsageError(f"`--dtype {text}`: `{name}` is not a floating-point dtype", hint=hint)
        compiled.append((compile_pattern(pattern) if pattern else None, kind))

    def cast_to(tensor: Tensor) -> Dtype | None:
        # Nothing converts the 4-bit floats, and torch has no other names for them.
        if tensor.dtype.kind != "float" or tensor.embedded or tensor.dtype.name.startswith("float4"):
            return None
        is_general = tensor.part.kind == "model" and tensor.dtype.itemsize > 1 and tensor.name not in scales
        for pattern, kind in compiled:
            if pattern is not None and pattern.fullmatch(tensor.name):
                return kind
            if pattern is None and is_general:
                keeps = kind.itemsize < 4 and kind != tensor.dtype and stays(tensor.name)
                return DTYPES["float32"] if keeps else kind
        return None

    return cast_to


def left_scales(catalogue: Catalogue, rules: Sequence[str], scales: Container[str]) -> list[str]:
    """Return the names of the `scales` of quantised weights that the rules would cast, did these not stay."""
    every, but_scales = caster(rules), caster(rules, scales=scales)
    candidates = (tensor for tensor in catalogue.tensors if tensor.name in scales)
    return [t.name for t in candidates if every(t) not in (None, t.dtype) and but_scales(t) is None]


def general(rules: Sequence[str]) -> str | None:
    """Return the dtype of the rule without a pattern: `"bfloat16"`."""
    short = next((text.removeprefix("torch.") for text in rules if "=" not in text), None)
    return ALIASES.get(short, short) if short is not None else None


def cast(catalogue: Catalogue, cast_to: Callable[[Tensor], Dtype | None]) -> Catalogue:
    """Return the catalogue with the new dtypes. Tied tensors that get different dtypes are untied."""

    def change(entry: Entry) -> Entry:
        kind = cast_to(entry) if isinstance(entry, Tensor) else None
        return entry if kind is None or isinstance(entry, Object) else derived(entry, dtype=kind)

    return rebuilt(catalogue, retied(map(change, catalogue.entries.values())), catalogue.containers)
