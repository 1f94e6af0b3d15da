"""Writing a catalogue as safetensors: a model by the convention of Hugging Face, anything else as a training state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpttool.catalogue import typed_json
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Path, Tensor
from ckpttool.catalogue.protocols import Crcs, Loss, Sink, SinkOptions
from ckpttool.errors import LossError
from ckpttool.formats.safetensors import index as stindex
from ckpttool.formats.safetensors import sharding as stfiles
from ckpttool.formats.safetensors import state_json as statefile
from ckpttool.formats.safetensors.model_files import MODEL
from ckpttool.formats.safetensors.sharding import SUFFIX, FilePlan
from ckpttool.formats.safetensors.state_json import Place
from ckpttool.serialization import safetensors_header as stheader
from ckpttool.storage import files
from ckpttool.storage.stores import locate
from ckpttool.version import __version__


class _SafeSink:
    def __init__(self, catalogue: Catalogue, marks: dict[str, bytes]) -> None:
        self.catalogue = catalogue
        self._marks = marks

    def finish(self, crcs: Crcs) -> None:
        """Indexes, and last of all the state file: without it the directory is none."""
        for path, data in self._marks.items():
            files.write_file(path, data)


def create(path: str, laid: Catalogue, options: SinkOptions) -> Sink:
    """Files of full size, headers written. A model by the convention of Hugging Face, anything else as a state."""
    one_file = options.one_file or path.endswith(SUFFIX)
    most = options.max_shard_size or stindex.MAX_SHARD_SIZE
    model = stfiles.is_model(laid)
    if one_file and not model:
        raise LossError(f"`{path}`: one safetensors file holds the tensors of one model, and nothing else")
    if model:
        plan = stfiles.plan_model(laid, None if one_file else most, laid.facts.get("metadata", {}))
    else:
        plan = stfiles.plan_state(laid, most)
    # What cannot be spelt is found before anything is written.
    state = None if model else statefile.build(laid, plan.places, f"ckpttool {__version__}")
    made = Catalogue("safetensors", containers={} if model else dict(laid.containers))
    made.facts["layout"] = "training state" if not model else "one file" if len(plan.files) == 1 else "indexed"
    if not one_file:
        files.make_directory(path)
    extents = _write_files(made, path, plan.files, one_file)
    _fill(made, laid, plan.places, extents, model)
    root = locate(path)
    marks: dict[str, bytes] = {root / name: data for name, data in plan.indexes.items()}
    if state is not None:
        marks[root / statefile.NAME] = state
    return _SafeSink(made, marks)


def _write_files(
    made: Catalogue, path: str, plans: Sequence[FilePlan], one_file: bool
) -> dict[tuple[str, str], Extent]:
    """Each file with its header, by (file, name) where the tensors go: what our own reader makes of the header."""
    extents: dict[tuple[str, str], Extent] = {}
    pool = files.Pool(writing=True)
    try:
        for number, plan in enumerate(plans):
            head = stheader.build_header(plan.tensors, plan.metadata)
            size = len(head) + sum(s.nbytes for s in plan.tensors)
            location = locate(path) if one_file else locate(path) / plan.name
            files.create(location, size)
            pool.write(location, 0, head)
            made.files.append(File(location, location.name, size))
            header = stheader.read_header(lambda at, n, h=head: h[at : at + n], 0, size, name=f"`{location}`")  # type: ignore[misc]
            for name, entry in header.tensors.items():
                extents[plan.name, name] = Extent(number, entry.begin, entry.end - entry.begin)
    finally:
        pool.close()
    return extents


def _fill(
    made: Catalogue, laid: Catalogue, places: dict[Path, Place], extents: dict[tuple[str, str], Extent], model: bool
) -> None:
    """The entries as the reader will find them: a model's under their names, one key each."""
    first: dict[Place, Path] = {}
    for entry in laid.entries.values():
        if not isinstance(entry, Tensor):
            made.add(entry)
            continue
        place = places[entry.path]
        path = (stfiles.name_below(entry),) if model else entry.path
        kept = first.setdefault(place, path)
        chunks = Chunks.single(entry.shape, extents[place.file, place.name])
        part = MODEL if model else entry.part
        made.add(replace(entry, path=path, part=part, chunks=chunks, alias=None if kept == path else kept))


def losses(catalogue: Catalogue, *, one_file: bool) -> list[Loss]:
    """What one file, or a directory, could not hold of this."""
    if stfiles.is_model(catalogue):
        return _model_losses(list(catalogue.tensors))
    if not one_file:
        return _state_losses(catalogue)
    parts = {e.part for e in catalogue.tensors if not e.embedded}
    models = [p for p in parts if p.kind == "model"]
    kept = models[0] if len(models) == 1 else None
    lost = [
        Loss(e.name, "one safetensors file holds the tensors of one model, and nothing else")
        for e in catalogue.entries.values()
        if e.part != kept or not isinstance(e, Tensor) or e.embedded
    ]
    return lost + _model_losses([t for t in catalogue.tensors if t.part == kept and not t.embedded])


def _model_losses(tensors: list[Tensor]) -> list[Loss]:
    lost = []
    for tensor in tensors:
        why = stheader.why_not(stfiles.name_below(tensor), tensor.dtype, tensor.shape)
        if why is not None:
            lost.append(Loss(tensor.name, why))
    for one, other in stfiles.collisions(tensors):
        lost.append(Loss(other.name, f"keys {list(one.path)} and {list(other.path)} make the same name"))
    return lost


def _state_losses(catalogue: Catalogue) -> list[Loss]:
    lost = []
    for entry in catalogue.objects:
        try:
            typed_json.encode(entry.value, name=entry.name)
        except LossError as error:
            lost.append(Loss(entry.name, error.message))
    return lost
