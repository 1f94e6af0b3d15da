"""Validates a catalogue: coverage, overlaps, missing files, extents within files; and selects the faults that concern
certain entries. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import prod
from operator import add, le

from ckpttool.catalogue import boxes
from ckpttool.catalogue.entries import Catalogue, Chunks, File, Path, Tensor
from ckpttool.errors import CkptError, CorruptError, DeniedError
from ckpttool.text import some


def validate(catalogue: Catalogue, paths: Collection[Path] | None = None) -> None:
    """Prove what everything after relies on: each tensor's chunks tile it exactly, and each extent lies inside its
    file and is as large as its box. Raises the first of its faults, or CorruptError with the file and the tensor.
    With `paths`, of these entries alone: what is wrong with others, which nobody asked for, stops nobody."""
    for fault in catalogue.faults:
        if "absent" in fault.facts and paths is None:
            raise fault
    entries = catalogue.entries.values()
    checked = entries if paths is None else [entry for entry in entries if entry.path in paths]
    stop_at_fault(catalogue, (entry.name for entry in checked))
    sizes = [f.size for f in catalogue.files]
    whole = catalogue.whole
    for tensor in checked:
        if isinstance(tensor, Tensor) and tensor not in whole:
            for fault in faults_of(tensor, catalogue.files, sizes):
                raise fault
            whole.add(tensor)


def stop_at_denied(catalogue: Catalogue) -> None:
    """Raise the fault of a file that this user may not read: nobody knows what is in it, and it is no damage."""
    for fault in catalogue.faults:
        if isinstance(fault, DeniedError):
            raise fault


def require(tensor: Tensor, catalogue: Catalogue) -> None:
    """Prove of one tensor what `validate` proves, unless that was done before. Raises CorruptError."""
    if catalogue.faults:
        stop_at_fault(catalogue, (tensor.source_name,))
    if tensor not in catalogue.whole:
        for fault in faults_of(tensor, catalogue.files):
            raise fault
        catalogue.whole.add(tensor)


def faults_of(tensor: Tensor, files: Sequence[File], sizes: list[int] | None = None) -> list[CorruptError]:
    """Return what is wrong with one tensor, as far as the index and the sizes of the files tell: its chunks do not tile
    it, a file is missing, a chunk lies outside of its file or is not as large as its box."""
    if sizes is not None and _is_one_run(tensor, sizes):  # as most of a million are
        return []
    chunks = tensor.chunks
    is_whole = len(chunks) == 1 and chunks.sizes[0] == tensor.shape and not any(chunks.offsets[0])
    faults: list[CorruptError] = []
    if not is_whole and (fault := boxes.tiling_fault(tensor.shape, chunks.offsets, chunks.sizes)):
        message = f"tensor `{tensor.name}` {list(tensor.shape)} is not covered exactly: {fault}"
        hint = "a rank's file is missing, or the index belongs to another save"
        faults.append(CorruptError(message, hint=hint, tensor=tensor.name, shape=list(tensor.shape)))
    if chunks.item and _inside(chunks, sizes.__getitem__ if sizes is not None else lambda i: files[i].size):
        return faults
    for i in range(len(chunks)):
        if outside_or_short := _chunk_fault(tensor, i, files):
            faults.append(outside_or_short)
    return faults


def _is_one_run(tensor: Tensor, sizes: Sequence[int]) -> bool:
    """Return whether a tensor is one chunk, a run of its bytes inside a file."""
    chunks = tensor.chunks
    if len(chunks.file) != 1 or chunks.strides or chunks.sizes[0] != tensor.shape or any(chunks.offsets[0]):
        return False
    offset, nbytes = chunks.offset[0], tensor.nbytes
    return 0 <= offset <= sizes[chunks.file[0]] - nbytes and chunks.nbytes[0] == nbytes


def _chunk_fault(tensor: Tensor, i: int, files: Sequence[File]) -> CorruptError | None:
    chunks = tensor.chunks
    file, offset, nbytes = files[chunks.file[i]], chunks.offset[i], chunks.nbytes[i]
    if file.missing and nbytes:
        missing = [f.name for f in files if f.missing]
        several = f"{len(missing)} files are missing ({some(missing)}), and with them"
        lost = several if len(missing) > 1 else f"`{file.name}` is missing, and with it"
        hint = "copy what is missing from where the checkpoint was saved"
        message = f"{lost} a part of tensor `{tensor.name}`"
        return CorruptError(message, hint=hint, file=file.name, tensor=tensor.name)
    if offset < 0 or nbytes < 0 or offset + nbytes > file.size:
        return outside(f"tensor `{tensor.name}`", file, offset, nbytes, tensor.name)
    strides = chunks.strides.get(i)
    elements = prod(chunks.sizes[i]) if strides is None else boxes.span(chunks.sizes[i], strides)
    needed = elements * tensor.dtype.itemsize
    if chunks.item or nbytes == needed:
        return None
    where = f"`{file.name}`: tensor `{tensor.name}`: {nbytes} bytes at {offset}..{offset + nbytes}"
    message = f"{where}, but {tensor.dtype} {list(chunks.sizes[i])} needs {needed}"
    facts = {"file": file.name, "tensor": tensor.name, "found": nbytes, "expected": needed}
    return CorruptError(message, hint=None, **facts, offset=offset, nbytes=nbytes)


def outside(what: str, file: File, offset: int, nbytes: int, tensor: str | None = None) -> CorruptError:
    """Return the error for bytes that would lie outside their file."""
    end = offset + nbytes
    message = f"`{file.name}`: {what}: bytes {offset}..{end} are outside the file, which has {file.size}"
    hint = "the file is truncated, or not the one that the index was written for"
    facts = {"file": file.name, "found": file.size, "expected": end, "offset": offset, "nbytes": nbytes}
    return CorruptError(message, hint=hint, **facts, **({"tensor": tensor} if tensor is not None else {}))


def _inside(chunks: Chunks, size_of: Callable[[int], int]) -> bool:
    """Return whether every item lies inside its file; a large checkpoint has too many to look at one by one."""
    if not chunks:
        return True
    ends = map(add, chunks.offset, chunks.nbytes)
    return min(chunks.offset) >= 0 <= min(chunks.nbytes) and all(map(le, ends, map(size_of, chunks.file)))


def stop_at_fault(catalogue: Catalogue, names: Iterable[str]) -> None:
    """Raise the first fault that concerns the whole checkpoint, or one of these names of entries. A part that could
    not be opened at all (the fact `absent`) has none: whoever asks for parts sees to it."""
    faults = [fault for fault in catalogue.faults if "absent" not in fault.facts]
    named = {above for name in names for above in _upwards(name)} if faults else set()
    for fault in faults:
        about = fault.facts.get("concerns")
        if about is None or not named.isdisjoint(about):
            raise fault


def concerns(fault: CkptError, name: str | None) -> bool:
    """Return whether a fault is about the entry of this name; with None, about the checkpoint as a whole."""
    about = fault.facts.get("concerns")
    if about is None or name is None:
        return about is None
    return not set(_upwards(name)).isdisjoint(about)


def _upwards(name: str) -> Iterator[str]:
    """Yield `a.b.c`, `a.b`, `a` and the name of the root."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
