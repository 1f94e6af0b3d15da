"""Reads a destination back through its own reader, and compares everything with the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool.catalogue import typed_json
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue, Chunks, Object, Path, Tensor, dotted
from ckpttool.catalogue.protocols import Format, Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CorruptError
from ckpttool.layout import select
from ckpttool.layout.move import relinked
from ckpttool.transfer import plan
from ckpttool.transfer.execute import Transferred, transfer


def check_written(
    target: Format,
    partial: str,
    planned: Catalogue,
    source: Source,
    *,
    total: int,
    threads: int | None,
    memory: int | None,
) -> Transferred:
    """Compare what was written to `partial` with the source, bit for bit. Raises CorruptError."""
    written = target.open(partial)
    try:
        validate(written.catalogue)
        again = Catalogue(planned.format, written.catalogue.files)
        for tensor in planned.tensors:
            stored = written.catalogue.entries.get(tensor.path)
            if not isinstance(stored, Tensor) or (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
                raise CorruptError(f"tensor `{tensor.name}` was not written as it was read", tensor=tensor.name)
            chunks = Chunks.of(chunk._replace(extent=written.resolve(stored, chunk)) for chunk in stored.chunks)
            again.entries[tensor.path] = replace(stored, chunks=chunks, origin=tensor.origin, alias=tensor.alias)
        ties = select.interchangeable(written.catalogue, find_aliases(written.catalogue.tensors))
        same = select.interchangeable(planned)
        for entry in planned.objects:
            actual = written.catalogue.entries.get(entry.path)
            if not isinstance(actual, Object) or _spelt(actual, ties) != _spelt(entry, same):
                raise CorruptError(f"object `{entry.name}` was not written as it was read", found=entry.name)
        _check_containers(planned, written.catalogue)
        return transfer(plan.plan(again), source, again, total=total, threads=threads, memory=memory, compare=True)
    finally:
        written.close()


def _check_containers(planned: Catalogue, written: Catalogue) -> None:
    """Raises CorruptError for a list or an ordered dict that became another container, where the format stores that."""
    for path, container in planned.containers.items():
        actual = written.containers.get(path)
        if actual is not None and actual.kind != container.kind:
            raise CorruptError(f"the {container.kind} `{dotted(path)}` was written as a {actual.kind}")


def _spelt(entry: Object, ties: Mapping[Path, Path]) -> str:
    return typed_json.key(relinked(entry.value, ties), name=entry.name)
