"""Whether the index, the headers and the sizes of the files agree: what can be said without reading a payload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpttool.catalogue.entries import Catalogue, File, Tensor
from ckpttool.catalogue.protocols import Itemised, Source
from ckpttool.catalogue.validation import faults_of
from ckpttool.errors import CkptError
from ckpttool.operations.verify.findings import DAMAGE, SUSPECT, Finding


def faults(catalogue: Catalogue) -> Iterator[Finding]:
    """What is wrong with the checkpoint as a whole, and with each tensor: holes, overlaps, missing files, ranges
    outside of files, sizes that do not fit. Missing files first, each once."""
    for file in catalogue.own_files:
        if file.missing:
            yield Finding(
                DAMAGE, "missing", f"`{file.name}` is missing, and the index names it", file.name,
                hint="copy it from where the checkpoint was saved",
            )  # fmt: skip
    for fault in catalogue.faults:
        if "needs" in fault.facts:
            yield Finding.of(fault, "unread", SUSPECT)  # nothing is wrong but what we were told
        else:
            yield Finding.of(fault, "missing" if "missing" in fault.facts else "structure")
    sizes = [file.size for file in catalogue.files]
    missing = {file.name for file in catalogue.files if file.missing}
    for tensor in catalogue.tensors:
        for fault in faults_of(tensor, catalogue.files, sizes):
            named = fault.facts.get("file")
            if named not in missing:
                yield Finding.of(fault, "range" if "offset" in fault.facts else "coverage")


def is_readable(tensor: Tensor, i: int, files: Sequence[File]) -> bool:
    """Whether chunk `i` lies inside a file that is there."""
    chunks = tensor.chunks
    file, offset, nbytes = files[chunks.file[i]], chunks.offset[i], chunks.nbytes[i]
    return not file.missing and offset >= 0 <= nbytes and offset + nbytes <= file.size


def objects(catalogue: Catalogue) -> Iterator[Finding]:
    """Objects whose bytes cannot be read, or are not those that were written."""
    for entry in catalogue.objects:
        try:
            _ = entry.value
        except CkptError as error:
            yield Finding.of(error, "object", tensor=entry.name)


class _Placed(NamedTuple):
    offset: int
    end: int
    name: str


def items(source: Source) -> Iterator[Finding]:
    """Files that are made of items one behind the other: items that overlap, and bytes that belong to none."""
    if not isinstance(source, Itemised):
        return
    catalogue = source.catalogue
    placed: dict[int, set[_Placed]] = defaultdict(set)
    blobs: set[int] = set()
    for name, run in source.items():
        placed[run.file].add(_Placed(run.offset, run.offset + run.nbytes, name))
    for tensor in catalogue.tensors:
        chunks = tensor.chunks
        # Tensors inside of an object are a part of its item.
        if chunks.item:
            for file, offset, nbytes in zip(chunks.file, chunks.offset, chunks.nbytes, strict=True):
                if nbytes:
                    placed[file].add(_Placed(offset, offset + nbytes, tensor.name))
        elif tensor.numel and not tensor.embedded and not chunks.records:
            # One safetensors file for all tensors of a rank, behind its objects; its header was read.
            blobs.update(chunks.file)
    for number, found in placed.items():
        held = catalogue.files[number]
        if held.name.endswith(".distcp") and not held.missing and number not in blobs:
            yield from _between(sorted(found), held)


def _between(found: list[_Placed], file: File) -> Iterator[Finding]:
    end, last = 0, _Placed(0, 0, "")
    for item in [*found, _Placed(file.size, file.size, "")]:
        if item.offset > end:
            yield Finding(
                SUSPECT, "gap", f"`{file.name}`: bytes {end}..{item.offset} belong to nothing that the index names",
                file.name, None, end, item.offset - end,
            )  # fmt: skip
        elif item.offset < end and (item.offset, item.end) != (last.offset, last.end) and item.name:
            yield Finding(
                DAMAGE, "overlap",
                f"`{file.name}`: `{item.name}` at {item.offset}..{item.end} overlaps `{last.name}` at "
                f"{last.offset}..{last.end}",
                file.name, item.name, item.offset, item.end - item.offset,
                "the index belongs to another save than the data file",
            )  # fmt: skip
        if item.end > end:
            end, last = item.end, item
