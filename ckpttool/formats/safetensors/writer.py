"""Writes a catalogue as safetensors: a model by the convention of Hugging Face, anything else as a training state."""

from __future__ import annotations

import json
from array import array
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.catalogue import typed_json
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Path, Record, Tensor, dotted
from ckpttool.catalogue.protocols import Crcs, CreatedSink, FormatLoss, Sink, SinkOptions
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import LossError
from ckpttool.formats.safetensors import checksums, index, sharding, state_json
from ckpttool.formats.safetensors.model_files import MODEL
from ckpttool.formats.safetensors.sharding import MAX_SHARD_SIZE, SUFFIX, FilePlan
from ckpttool.formats.safetensors.state_json import TensorPlace
from ckpttool.serialization import safetensors_header, safetensors_library
from ckpttool.serialization.safetensors_header import Header
from ckpttool.storage import files
from ckpttool.storage.stores import Location
from ckpttool.version import __version__


def create(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create files of full size, with headers: a model by the convention of Hugging Face, anything else as a state."""
    one_file = options.one_file or location.endswith(SUFFIX)
    max_size = options.max_shard_size or MAX_SHARD_SIZE
    model, state = sharding.is_model(planned), b""
    if one_file and not model:
        raise LossError(f"`{location}`: one safetensors file holds the tensors of one model, and nothing else")
    created = Catalogue("safetensors")
    if model:
        metadata, most = _metadata(planned, created) if not options.bare else {}, None if one_file else max_size
        plan = sharding.plan_model(planned, most, metadata, keep_order=options.keep_order)
        created.facts["layout"] = "one file" if len(plan.files) == 1 else "indexed"
    else:
        plan = sharding.plan_state(planned, max_size)
        # What JSON cannot encode is found before anything is written.
        state = state_json.build(planned, plan.places, f"ckpttool {__version__}")
        created.facts["layout"], created.containers = "training state", dict(planned.containers)
    if not one_file:
        files.make_directory(location)
    written = _Files(created, bare=options.bare)
    headers = {file.name: written.add(file, location if one_file else location / file.name) for file in plan.files}
    _fill(created, planned, plan.places, headers, are_records=not options.bare, model=model)
    indexes = plan.indexes

    def finish(crcs: Crcs) -> None:
        sums = written.finish(crcs)
        for name, data in indexes.items():
            (location / name).put(data if options.bare else index.sealed(data, sums))
        # The state file last of all: without it the directory is not a checkpoint.
        if state:
            (location / state_json.NAME).put(state_json.sealed(state, sums))

    return CreatedSink(created, finish, written.seal)


def _metadata(planned: Catalogue, created: Catalogue) -> dict[str, str]:
    """Return the metadata of a model: that of the source, and the keys around the model, which its names do not have.
    That they do not is noted in `created`."""
    root = next((entry.part.root for entry in planned.entries.values()), ())
    if root:
        text = f"`{dotted(root)}` is left off the names, as it is in a model's safetensors"
        kept = all(type(key) in (str, int) for key in root)
        created.warnings.append(
            Warning("root-key", f"{text}; a conversion to another format puts it back" if kept else text)
        )
        root = root if kept else ()
    root = root or planned.facts.get("root", ())
    metadata: dict[str, str] = dict(planned.facts.get("metadata", {}))
    return metadata | ({sharding.ROOT: json.dumps(list(root))} if root else {})


class _Unsealed(NamedTuple):
    """A file whose header lacks checksums: where the tensors begin, in their order, -1 for those of no bytes; the CRC
    of the rest of the header, and where in it the checksums are."""

    name: str
    begins: array[int]
    rest: int
    at: int


@dataclass(slots=True)
class _Files:
    """The files of a catalogue, each with a header that has room for the checksums of its tensors, unless it is
    `bare`."""

    created: Catalogue
    bare: bool
    _written: list[_Unsealed] = field(default_factory=list)
    _sums: dict[str, int] = field(default_factory=dict)
    _sealed: set[int] = field(default_factory=set)

    def add(self, plan: FilePlan, location: Location) -> tuple[int, Header]:
        """Create a file of full size, with its header, and return its number, and the header as the reader finds it.
        Raises LossError."""
        room, number = checksums.room(len(plan.tensors)), len(self.created.files)
        text = plan.header({} if self.bare else {checksums.KEY: room})
        size = len(text) + sum(spec.nbytes for spec in plan.tensors)
        location.create(size)
        with closing(files.Pool(writing=True)) as pool:
            pool.write(location, 0, text)
        self.created.files.append(File(location, location.name, size))
        header = _parsed(text, size, location)
        if not self.bare:
            entries = (header.tensors[name] for name in checksums.in_order(header.tensors))
            begins = array("q", [entry.begin if entry.end > entry.begin else -1 for entry in entries])
            rest = checksums.of_header(header.tensors, header.metadata, header.payload)
            self._written.append(_Unsealed(plan.name, begins, rest, text.index(f'"{checksums.KEY}":"{room}"'.encode())))
        return number, header

    def finish(self, crcs: Crcs) -> dict[str, int]:
        """Complete all files that are not, and return the checksum of each file, by its name. Raises LossError."""
        for number in range(len(self.created.files)):
            if number not in self._sealed:
                self.seal(number, crcs)
        return self._sums

    def seal(self, number: int, crcs: Crcs) -> None:
        """Write the checksums of a file. Raises LossError if the safetensors library cannot open it."""
        file = self.created.files[number]
        if not self.bare:
            name, begins, rest, at = self._written[number]
            value = checksums.value(rest, [crcs[number, begin] if begin >= 0 else 0 for begin in begins])
            with closing(files.Pool(writing=True)) as pool:
                pool.write(file.location, at, f'"{checksums.KEY}":"{value}"'.encode())
            self._sums[name] = checksums.of_value(value)
        if reason := safetensors_library.refusal(file.location):
            text = f"`{file.name}`: safetensors {safetensors_library.version()} cannot open what was written: {reason}"
            raise LossError(text, hint="install the newest safetensors, or write another format", file=file.name)
        self._sealed.add(number)


def _parsed(text: bytes, size: int, location: Location) -> Header:
    return safetensors_header.read_header(lambda at, n: text[at : at + n], 0, size, name=f"`{location}`")


def _fill(
    created: Catalogue,
    planned: Catalogue,
    places: dict[Path, TensorPlace],
    headers: dict[str, tuple[int, Header]],
    *,
    are_records: bool,
    model: bool,
) -> None:
    """Add the entries as the reader will find them: a model's by their names, one key each."""
    first: dict[TensorPlace, Path] = {}
    for entry in planned.entries.values():
        if not isinstance(entry, Tensor):
            created.add(entry)
            continue
        place = places[entry.path]
        path = (entry.fqn,) if model and entry.path != (entry.fqn,) else entry.path
        target = first.setdefault(place, path)
        number, header = headers[place.file]
        begin, end = header.tensors[place.name][2:4]
        record = Record(number, begin, end - begin) if end > begin and are_records else None
        chunks = Chunks.single(entry.shape, Extent(number, begin, end - begin, record=record))
        part = MODEL if model else entry.part
        alias = None if target == path else target
        created.add(Tensor(path, entry.dtype, entry.shape, chunks, part, entry.embedded, entry.origin, alias))


def losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
    """Return what one file, or a directory, cannot store."""
    if sharding.is_model(catalogue):
        return _model_losses(list(catalogue.tensors))
    if not path.endswith(SUFFIX):
        return _state_losses(catalogue)
    parts = {e.part for e in catalogue.tensors if not e.embedded}
    models = [p for p in parts if p.kind == "model"]
    model = models[0] if len(models) == 1 else None
    unsupported = [
        FormatLoss(e.name, "one safetensors file holds the tensors of one model, and nothing else")
        for e in catalogue.entries.values()
        if e.part != model or not isinstance(e, Tensor) or e.embedded
    ]
    return unsupported + _model_losses([t for t in catalogue.tensors if t.part == model and not t.embedded])


def _model_losses(tensors: list[Tensor]) -> list[FormatLoss]:
    reasons = ((t, safetensors_header.why_not(t.fqn, t.dtype, t.shape)) for t in tensors)
    return [FormatLoss(t.name, reason) for t, reason in reasons if reason is not None] + [
        FormatLoss(other.name, f"keys {list(one.path)} and {list(other.path)} make the same name")
        for one, other in sharding.collisions(tensors)
    ]


def _state_losses(catalogue: Catalogue) -> list[FormatLoss]:
    unsupported = []
    sharing = typed_json.Sharing()
    for entry in catalogue.objects:
        try:
            typed_json.encode(entry.value, name=entry.name, sharing=sharing)
        except LossError as error:
            unsupported.append(FormatLoss(entry.name, error.message))
    return unsupported
