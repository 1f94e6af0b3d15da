"""Writes a catalogue as safetensors: a model by the convention of Hugging Face, anything else as a training state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from ckpttool.catalogue import typed_json
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, Path, Tensor
from ckpttool.catalogue.protocols import Crcs, CreatedSink, Loss, Sink, SinkOptions
from ckpttool.errors import LossError
from ckpttool.formats.safetensors import sharding, state_json
from ckpttool.formats.safetensors.model_files import MODEL, mount
from ckpttool.formats.safetensors.sharding import MAX_SHARD_SIZE, SUFFIX, FilePlan
from ckpttool.formats.safetensors.state_json import Place
from ckpttool.serialization import safetensors_header
from ckpttool.storage import files
from ckpttool.storage.stores import locate
from ckpttool.version import __version__


def create(path: str, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create files of full size, with headers: a model by the convention of Hugging Face, anything else as a state."""
    one_file = options.one_file or path.endswith(SUFFIX)
    max_size = options.max_shard_size or MAX_SHARD_SIZE
    model = sharding.is_model(planned)
    if one_file and not model:
        raise LossError(f"`{path}`: one safetensors file holds the tensors of one model, and nothing else")
    created = Catalogue("safetensors")
    if model:
        metadata, most = planned.facts.get("metadata", {}), None if one_file else max_size
        plan = sharding.plan_model(planned, most, metadata, keep_order=options.keep_order)
        late_files = plan.indexes
        created.facts["layout"] = "one file" if len(plan.files) == 1 else "indexed"
    else:
        plan = sharding.plan_state(planned, max_size)
        # What JSON cannot encode is found before anything is written.
        state = state_json.build(planned, plan.places, f"ckpttool {__version__}")
        late_files = {**plan.indexes, state_json.NAME: state}
        created.facts["layout"], created.containers = "training state", dict(planned.containers)
    if not one_file:
        files.make_directory(path)
    extents = _write_files(created, path, plan.files, one_file)
    _fill(created, planned, plan.places, extents, model)

    def finish(crcs: Crcs) -> None:
        # The state file last of all: without it the directory is not a checkpoint.
        for name, data in late_files.items():
            (locate(path) / name).put(data)

    return CreatedSink(created, finish)


def _write_files(
    created: Catalogue, path: str, plans: Sequence[FilePlan], one_file: bool
) -> dict[tuple[str, str], Extent]:
    """Write each file with its header, and return where the tensors go, by (file, name), as the reader finds them."""
    extents: dict[tuple[str, str], Extent] = {}
    with closing(files.Pool(writing=True)) as pool:
        for plan in plans:
            head = plan.header()
            location = locate(path) if one_file else locate(path) / plan.name
            location.create(len(head) + sum(s.nbytes for s in plan.tensors))
            pool.write(location, 0, head)
            number, header = mount(created, location, location.name)
            for name, entry in header.tensors.items():
                extents[plan.name, name] = Extent(number, entry.begin, entry.end - entry.begin)
    return extents


def _fill(
    created: Catalogue,
    planned: Catalogue,
    places: dict[Path, Place],
    extents: dict[tuple[str, str], Extent],
    model: bool,
) -> None:
    """Add the entries as the reader will find them: a model's by their names, one key each."""
    first: dict[Place, Path] = {}
    for entry in planned.entries.values():
        if not isinstance(entry, Tensor):
            created.add(entry)
            continue
        place = places[entry.path]
        path = (entry.fqn,) if model else entry.path
        target = first.setdefault(place, path)
        chunks = Chunks.single(entry.shape, extents[place.file, place.name])
        part = MODEL if model else entry.part
        created.add(replace(entry, path=path, part=part, chunks=chunks, alias=None if target == path else target))


def losses(catalogue: Catalogue, path: str) -> list[Loss]:
    """Return what one file, or a directory, cannot store."""
    if sharding.is_model(catalogue):
        return _model_losses(list(catalogue.tensors))
    if not path.endswith(SUFFIX):
        return _state_losses(catalogue)
    parts = {e.part for e in catalogue.tensors if not e.embedded}
    models = [p for p in parts if p.kind == "model"]
    model = models[0] if len(models) == 1 else None
    unsupported = [
        Loss(e.name, "one safetensors file holds the tensors of one model, and nothing else")
        for e in catalogue.entries.values()
        if e.part != model or not isinstance(e, Tensor) or e.embedded
    ]
    return unsupported + _model_losses([t for t in catalogue.tensors if t.part == model and not t.embedded])


def _model_losses(tensors: list[Tensor]) -> list[Loss]:
    reasons = ((t, safetensors_header.why_not(t.fqn, t.dtype, t.shape)) for t in tensors)
    return [Loss(t.name, reason) for t, reason in reasons if reason is not None] + [
        Loss(other.name, f"keys {list(one.path)} and {list(other.path)} make the same name")
        for one, other in sharding.collisions(tensors)
    ]


def _state_losses(catalogue: Catalogue) -> list[Loss]:
    unsupported = []
    for entry in catalogue.objects:
        try:
            typed_json.encode(entry.value, name=entry.name)
        except LossError as error:
            unsupported.append(Loss(entry.name, error.message))
    return unsupported
