"""Reads a destination back through its own reader, and compares everything with the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.catalogue import identity, parts
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, Object, Path, Tensor, dotted
from ckpttool.catalogue.protocols import Format, Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CorruptError
from ckpttool.layout import select
from ckpttool.layout.move import relinked
from ckpttool.transfer import plan
from ckpttool.transfer.execute import Transferred, transfer
from ckpttool.transfer.read import are_equal


def check_written(target: Format, partial: str, planned: Catalogue, source: Source, **options: Any) -> Transferred:
    """Compare what was written to `partial` with the source, bit for bit; `options` are those of `transfer`. Raises
    CorruptError."""
    written = target.open(partial)
    try:
        validate(written.catalogue)
        again = Catalogue(planned.format, written.catalogue.files)
        for tensor in planned.tensors:
            stored = _entry(written.catalogue, tensor.path)
            if not isinstance(stored, Tensor) or (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
                raise CorruptError(f"tensor `{tensor.name}` was not written as it was read", tensor=tensor.name)
            if any(not chunk.extent.plain and not chunk.extent.item for chunk in stored.chunks):
                # Its elements are not in rows, as those that a transfer writes are.
                if tensor.origin is None or not are_equal(tensor.origin, source, stored, written):
                    raise CorruptError(f"tensor `{tensor.name}` was not written as it was read", tensor=tensor.name)
                continue
            extents = (written.resolve(stored, chunk)._replace(record=None) for chunk in stored.chunks)
            chunks = Chunks.of(c._replace(extent=extent) for c, extent in zip(stored.chunks, extents, strict=True))
            again.entries[tensor.path] = replace(stored, chunks=chunks, origin=tensor.origin, alias=tensor.alias)
        ties = select.interchangeable(written.catalogue, find_aliases(written.catalogue.tensors))
        same = select.interchangeable(planned)
        for entry in planned.objects:
            actual = _entry(written.catalogue, entry.path)
            if not isinstance(actual, Object) or _spelt(actual, ties) != _spelt(entry, same):
                raise CorruptError(f"object `{entry.name}` was not written as it was read", found=entry.name)
        for path, container in planned.containers.items():
            became = written.catalogue.containers.get(path)  # None where the format does not store that
            if became is not None and became.kind != container.kind:
                raise CorruptError(f"the {container.kind} `{dotted(path)}` was written as a {became.kind}")
        return transfer(plan.plan(again), source, again, compare=True, **options)
    finally:
        written.close()


def _entry(catalogue: Catalogue, path: Path) -> Entry | None:
    """Return what was written as `path`; of what all ranks have alike, a reader may find one."""
    return catalogue.entries.get(path) or catalogue.entries.get(parts.without_rank(path))


def _spelt(entry: Object, ties: Mapping[Path, Path]) -> str:
    return identity.key(relinked(entry.value, ties))
