"""A file whose classes are needed to make it again, written as a copy of itself with other elements in its tensors.

    [pickle, code, graph: as they are][storage: elements of the tensors][...]   (nothing of it is run)

What such a file says beside its tensors (a module that `torch.save` pickled whole, a TorchScript program) stays as it
is, so each entry of the state has to have its place there, of the same dtype and shape, and values have to be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from ckpttool.catalogue import identity
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Path, Tensor
from ckpttool.catalogue.protocols import Crcs, CreatedSink, Format, FormatLoss, PlacedSource, Sink, SinkOptions
from ckpttool.errors import CorruptError, LossError
from ckpttool.layout import select
from ckpttool.layout.move import relinked
from ckpttool.serialization import torch_zip, torch_zip_writer, unsafe_globals
from ckpttool.storage import files
from ckpttool.storage.stores import Location
from ckpttool.transfer.read import are_equal


def is_copied(catalogue: Catalogue) -> bool:
    """Return whether a file cannot be made again from what its catalogue has."""
    return bool(catalogue.facts.get("whole objects"))


@dataclass(frozen=True, slots=True)
class FileTemplate:
    """A file to write others like: `FileTemplate(locate("model.pt"), torchsave.FORMAT)`."""

    location: Location
    format: Format

    @property
    def as_format(self) -> Format:
        """The files like it, as a format that is written."""
        return replace(self.format, create=self.create, losses=self.losses, splits=False, any_state=False)

    def losses(self, planned: Catalogue, path: str) -> list[FormatLoss]:
        """Return the entries that have no place in the file, and those of the file that would stay what they are."""
        with closing(self.format.open(self.location)) as source:
            return list(self._losses(planned, source.catalogue))

    def _losses(self, planned: Catalogue, stored: Catalogue) -> Iterator[FormatLoss]:
        why = f"`{self.location.name}` contains whole objects; only the elements of their tensors can be written"
        wanted, present = _contents(planned), _contents(stored, find_aliases(stored.tensors))
        for path in wanted | present:
            if wanted.get(path) != present.get(path):
                entry = planned.entries.get(path) or stored.entries[path]
                is_other = f"has another {'dtype or shape' if isinstance(entry, Tensor) else 'value'} there"
                what = is_other if path in wanted and path in present else "is not there"
                yield FormatLoss(entry.name, f"{why}: it {what if path in wanted else 'cannot be excluded'}")

    def create(self, location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
        """Create a copy of the file. Tensors that have no run of bytes of their own in it are put behind its end until
        they can be compared. Raises CorruptError for a file that runs code when loaded."""
        self.location.copy_to(location)
        with unsafe_globals.noting_harm() as harmful, closing(self.format.open(location)) as source:
            stored = source.catalogue
        if harmful:
            text = f"`{self.location}` names `{min(harmful)}`, which runs code when loaded, and is not copied"
            raise CorruptError(text, hint="look where this file came from", file=self.location)
        size = location.size()
        created = Catalogue(stored.format, [File(location, location.name, size)], containers=stored.containers)
        runs, behind, end = _runs(stored), dict[Path, Extent](), size
        ties = find_aliases(stored.tensors)
        for path, entry in planned.entries.items():
            if isinstance(entry, Tensor):
                first = planned.first(entry).path
                if first != path and ties.get(path, path) == ties.get(first, first):
                    entry = replace(entry, chunks=created.tensor(first).chunks, alias=first)
                else:
                    if path not in runs:
                        behind[path], end = Extent(0, end, entry.nbytes), end + entry.nbytes
                    extent = (runs.get(path) or behind[path])._replace(record=None)
                    entry = replace(entry, chunks=Chunks.single(entry.shape, extent), alias=None)
            created.add(entry)
        files.resize(location, end)
        return CreatedSink(created, partial(self._finish, location, size, stored, behind, runs))

    def _finish(
        self,
        location: Location,
        size: int,
        stored: Catalogue,
        behind: Mapping[Path, Extent],
        runs: Mapping[Path, Extent],
        crcs: Crcs,
    ) -> None:
        """Compare what lies behind the end, cut it off, and write the checksums of the storages."""
        if behind:
            self._compare(location, stored, behind)
            files.resize(location, size)
        records = {extent.record for extent in runs.values() if extent.record is not None}
        if records:
            with closing(files.Pool(writing=True)) as pool:
                known = {r: pool.crc(location, r.offset, r.nbytes) for r in records if r.crc}
                archive = torch_zip.open_archive(partial(pool.read, location), 0, size, name=f"`{location}`")
                pool.write_all(location, [*torch_zip_writer.checksum_patches(archive, size, known)])

    def _compare(self, location: Location, stored: Catalogue, behind: Mapping[Path, Extent]) -> None:
        """Raise LossError for a tensor without a run of bytes of its own that has other elements than the file."""
        there = PlacedSource(stored)
        given = PlacedSource(Catalogue("", [File(location, "", location.size())]))
        with closing(self.format.open(self.location)) as original:
            for path, extent in behind.items():
                tensor = stored.tensor(path)
                other = replace(tensor, chunks=Chunks.single(tensor.shape, extent))
                # Bytes that had to be decoded are not in the copy.
                source = original if any(tensor.chunks.file) else there
                if not are_equal(source.catalogue.tensor(path), source, other, given):
                    text = f"`{tensor.name}` shares its bytes with another tensor in `{self.location.name}`, or they "
                    text += (
                        "are in another order; such bytes can only be copied unchanged, and here they have other values"
                    )
                    raise LossError(text, hint="`--to torch` writes a state dict", tensor=tensor.name)


def _contents(catalogue: Catalogue, aliases: Mapping[Path, Path] | None = None) -> dict[Path, object]:
    """Return what does not change with the elements: dtypes, shapes, and values, whichever of tied tensors they link
    to."""
    same = select.interchangeable(catalogue, aliases)
    return {
        path: (e.dtype, e.shape) if isinstance(e, Tensor) else identity.key(relinked(e.value, same))
        for path, e in catalogue.entries.items()
    }


def _runs(stored: Catalogue) -> dict[Path, Extent]:
    """Return the places of tensors that have a run of bytes of the file to themselves."""
    runs: dict[Path, Extent] = {}
    end = 0
    extents = [(tensor.chunks[0].extent, tensor.path) for tensor in stored.tensors]
    for extent, path in sorted(extents, key=lambda one: (one[0].file, one[0].offset, one[0].nbytes)):
        if extent.file == 0 and extent.plain and (extent.offset >= end or not extent.nbytes):
            runs[path] = extent
        end = max(end, extent.offset + extent.nbytes)
    return runs
