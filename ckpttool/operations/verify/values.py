"""Counts NaN, infinite, zero and denormal elements by their bits, without converting a dtype."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.findings import NAN, NOTE, SUSPECT, Finding
from ckpttool.errors import CkptError
from ckpttool.operations.verify.report import Verification
from ckpttool.text import is_or_are
from ckpttool.transfer.counts import counted
from ckpttool.transfer.numbers import EXPONENT_ONLY, FLOATS

_FLOATING = {*FLOATS, EXPONENT_ONLY, "complex128", "complex64", "complex32"}


def check(run: Verification) -> Iterator[Finding]:
    """Count the elements of every floating-point tensor that is not damaged."""
    aliases, damaged = find_aliases(run.catalogue.tensors), run.damaged
    tensors = [
        tensor
        for tensor in run.catalogue.tensors
        if tensor.dtype.name in _FLOATING and tensor.numel and tensor.path not in aliases and tensor.name not in damaged
    ]
    failures: list[Finding] = []

    def failed(tensor: Tensor, error: CkptError) -> None:
        failures.append(Finding.of(error, "unreadable", tensor=tensor.name))

    counts = counted(tensors, run.source, run.threads, run.progress, failed)
    run.report.numel += sum(tensor.numel for tensor in tensors)
    yield from failures
    for tensor, result in zip(tensors, counts, strict=True):
        of = f"of {tensor.numel:,} elements"
        at = f", the first at {list(result.first)}" if result.first else ""
        for gravity, kind, is_found, text in (
            (NAN, "nan", result.nans, f"{result.nans:,} {of} {is_or_are(result.nans)} NaN{at}"),
            (SUSPECT, "inf", result.infs, f"{result.infs:,} {of} {is_or_are(result.infs)} infinite"),
            (NOTE, "zeros", result.zeros == tensor.numel > 1, f"all {tensor.numel:,} elements are zero"),
            (NOTE, "denormal", result.denormals, f"{result.denormals:,} {of} {is_or_are(result.denormals)} denormal"),
        ):
            if is_found:
                yield Finding(gravity, kind, f"tensor `{tensor.name}`: {text}", tensor=tensor.name)
