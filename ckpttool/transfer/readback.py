"""Reading a destination back through its own reader, and comparing everything with the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool.catalogue import typed_json
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue, Chunks, Object, Path, Tensor, dotted
from ckpttool.catalogue.protocols import Format, Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CorruptError
from ckpttool.layout import select as layout
from ckpttool.transfer import plan
from ckpttool.transfer.execute import Transferred, transfer


def check_written(
    target: Format, partial: str, laid: Catalogue, source: Source,
    *, total: int, threads: int | None, memory: int | None,
) -> Transferred:  # fmt: skip
    """Compare what stands at `partial` with the source, bit for bit. Raises CorruptError."""
    written = target.open(partial)
    try:
        validate(written.catalogue)
        again = Catalogue(laid.format, written.catalogue.files)
        for tensor in laid.tensors:
            there = written.catalogue.entries.get(tensor.path)
            if not isinstance(there, Tensor) or (there.dtype, there.shape) != (tensor.dtype, tensor.shape):
                raise CorruptError(f"tensor `{tensor.name}` was not written as it was read", tensor=tensor.name)
            again.entries[tensor.path] = _resolved(there, tensor, written)
        ties = layout.interchangeable(written.catalogue, find_aliases(written.catalogue.tensors))
        same = layout.interchangeable(laid)
        for entry in laid.objects:
            found = written.catalogue.entries.get(entry.path)
            if not isinstance(found, Object) or _spelt(found, ties) != _spelt(entry, same):
                raise CorruptError(f"object `{entry.name}` was not written as it was read", found=entry.name)
        _check_containers(laid, written.catalogue)
        return transfer(plan.plan(again), source, again, total=total, threads=threads, memory=memory, compare=True)
    finally:
        written.close()


def _check_containers(laid: Catalogue, written: Catalogue) -> None:
    """Lists and ordered dicts must come back as what they were, where the format tells them apart."""
    for path, container in laid.containers.items():
        found = written.containers.get(path)
        if found is not None and found.kind != container.kind:
            raise CorruptError(f"the {container.kind} `{dotted(path)}` was written as a {found.kind}")


def _spelt(entry: Object, ties: Mapping[Path, Path]) -> str:
    return typed_json.key(layout.relinked(entry.value, ties), name=entry.name)


def _resolved(there: Tensor, tensor: Tensor, source: Source) -> Tensor:
    chunks = Chunks.of(chunk._replace(extent=source.resolve(there, chunk)) for chunk in there.chunks)
    return replace(there, chunks=chunks, origin=tensor.origin, alias=tensor.alias)
