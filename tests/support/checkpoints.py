"""Checkpoints made by hand for the tests: plain files, with every chunk where the test wants it.

Elements are compared as bytes: numpy has no bfloat16, and a NaN equals no other.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from ckpttool.catalogue import flatten as nesting
from ckpttool.catalogue.boxes import Box, whole
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Path, Record, Tensor
from ckpttool.catalogue.protocols import Source

GAP = b"\xa5\xa5\xa5"  # odd, so that nothing is aligned by luck


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements of a tensor as opaque units, in its shape."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return np.frombuffer(raw, f"V{tensor.element_size()}").reshape(tuple(tensor.shape))


def random(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits; of 0 and 1 for bool, which has no other values."""
    made = torch.empty(tuple(shape), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    raw = torch.randint(0, 256, (made.numel() * made.element_size(),), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(tuple(shape)) if made.numel() else made


def within(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(o, o + s) for o, s in zip(*box, strict=True))


def grid(shape: Sequence[int], cuts: Sequence[int]) -> list[Box]:
    """`cuts[d]` pieces along each dimension, as `torch.chunk` makes them (uneven, fewer when there is too little)."""
    axes = []
    for size, pieces in zip(shape, cuts, strict=True):
        spans, at = [], 0
        for part in torch.arange(size).chunk(pieces):
            spans.append((at, len(part)))
            at += len(part)
        axes.append(spans)
    return [(tuple(o for o, _ in axis), tuple(s for _, s in axis)) for axis in itertools.product(*axes)]


class Made(Source):
    """A source whose chunks lie in plain files, in turn; itself what a format's `open` returns."""

    def __init__(self, folder: FilePath, files: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{i}.bin" for i in range(files)]
        for path in paths:
            path.write_bytes(b"")
        self.catalogue = Catalogue("made", [File(str(p), p.name, 0, rank=i) for i, p in enumerate(paths)])
        self._turn = itertools.cycle(range(files))

    def add(
        self,
        path: Path | str,
        tensor: torch.Tensor,
        cuts: Sequence[Box] | None = None,
        *,
        crc: bool = False,
        codec: tuple[str, ...] = (),
    ) -> Tensor:
        """A tensor in row-major chunks, each a checksummed record of its own if `crc`."""
        elements = bits(tensor)
        chunks = Chunks()
        for box in cuts if cuts is not None else [whole(tuple(tensor.shape))]:
            data = encoded(elements[(..., *within(box))], codec, tensor.dtype)
            chunks.add(*box, self.put(data, crc=crc)._replace(codec=codec))
        return self.enter(path, tensor, chunks)

    def add_view(self, path: Path | str, view: torch.Tensor, *, crc: bool = False) -> Tensor:
        """A tensor that is a view: its storage whole, and strides into it."""
        storage = view.untyped_storage()
        extent = self.put(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes(), crc=crc)
        size = view.element_size()
        elements = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) if view.numel() else 0
        extent = extent._replace(
            offset=extent.offset + view.storage_offset() * size,
            nbytes=elements * size,
            strides=tuple(view.stride()),
            codec=("conj",) * view.is_conj() + ("neg",) * view.is_neg(),
        )
        shape = tuple(view.shape)
        return self.enter(path, view, Chunks.single(shape, extent))

    def put(self, data: bytes, *, crc: bool = False) -> Extent:
        index = next(self._turn)
        file = self.catalogue.files[index]
        with open(file.location, "ab") as stream:
            stream.write(GAP + data)
        extent = Extent(index, file.size + len(GAP), len(data))
        file.size += len(GAP) + len(data)
        return extent._replace(record=Record(*extent[:3], zlib.crc32(data))) if crc else extent

    def enter(self, path: Path | str, tensor: torch.Tensor, chunks: Chunks) -> Tensor:
        key = (path,) if isinstance(path, str) else path
        made = Tensor(key, DTYPES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), chunks)
        self.catalogue.add(made)
        return made

    def close(self) -> None:
        pass


def encoded(elements: np.ndarray[Any, Any], codec: tuple[str, ...], dtype: torch.dtype) -> bytes:
    """Row-major bytes, as a writer of the other byte order leaves them when `codec` says `swap`."""
    raw = np.ascontiguousarray(elements).tobytes()
    word = dtype.itemsize // (2 if dtype.is_complex else 1)
    return np.frombuffer(raw, f"u{word}").byteswap().tobytes() if "swap" in codec and word > 1 else raw


def laid_down(folder: FilePath, laid: Catalogue, *, crc: bool = False) -> Catalogue:
    """What a sink's `create` leaves: one file of full size per rank, a final extent for every chunk."""
    folder.mkdir(parents=True)
    ranks = 1 + max((rank for t in laid.tensors for rank in t.chunks.file), default=0)
    sizes = [0] * ranks
    for tensor in laid.tensors:
        if tensor.alias is not None:
            continue
        chunks = Chunks()
        for chunk in tensor.chunks:
            nbytes = int(np.prod(chunk.sizes)) * tensor.dtype.itemsize
            rank = chunk.extent.file
            record = Record(rank, sizes[rank] + len(GAP), nbytes) if crc else None
            chunks.add(chunk.offsets, chunk.sizes, Extent(rank, sizes[rank] + len(GAP), nbytes, record=record))
            sizes[rank] += len(GAP) + nbytes
        tensor.chunks = chunks
    for rank, size in enumerate(sizes):
        path = folder / f"{rank}.bin"
        path.write_bytes(b"\xff" * size)
        laid.files.append(File(str(path), path.name, size, rank=rank))
    return laid


def stored(catalogue: Catalogue, tensor: Tensor) -> np.ndarray[Any, Any]:
    """The elements that lie at plain extents, read by numpy alone."""
    made = np.empty(tensor.shape, f"V{tensor.dtype.itemsize}")
    for chunk in tensor.chunks:
        extent = chunk.extent
        assert extent.plain
        data = FilePath(catalogue.files[extent.file].location).read_bytes()[extent.offset :][: extent.nbytes]
        made[(..., *within((chunk.offsets, chunk.sizes)))] = np.frombuffer(data, made.dtype).reshape(chunk.sizes)
    return made


def state(tree: Mapping[Any, Any], cuts: Mapping[str, Sequence[Box]] | None = None) -> Catalogue:
    """The catalogue of a nested state with torch tensors, in memory: as every format makes one, but nothing to read.

    Tensors of the same storage share their extent; `cuts` gives the boxes of some, chunk i on rank i.
    """
    ranks = max([len(boxes) for boxes in (cuts or {}).values()], default=1)
    made = Catalogue("made", [File(f"{i}.bin", f"{i}.bin", 1 << 40, rank=i) for i in range(ranks)])
    places: dict[int, int] = {}

    def make(value: torch.Tensor, path: Path, embedded: bool) -> Tensor:
        shape, size = tuple(value.shape), value.element_size()
        offset = places.setdefault(value.untyped_storage().data_ptr() or id(value), len(places) << 20)
        kind = DTYPES[str(value.dtype).removeprefix("torch.")]
        boxes = (cuts or {}).get(".".join(map(str, path)), [whole(shape)])
        chunks = Chunks()
        for rank, box in enumerate(boxes):
            chunks.add(*box, Extent(rank, offset, int(np.prod(box[1])) * size))
        return Tensor(path, kind, shape, chunks, embedded=embedded)

    nesting.flatten(tree, made, torch.Tensor, make)
    return made
