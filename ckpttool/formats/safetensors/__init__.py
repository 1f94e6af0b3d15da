"""safetensors: one file, a directory of them, or a whole training state without pickle.

    model.safetensors                                            one file; see `stheader`
    model-00001-of-00002.safetensors .. + model.safetensors.index.json   several; see `stindex`
    [sharded/]shard-00001-model-00001-of-00001.safetensors ..    pieces of tensors, one file per rank (and index)
    model.safetensors optimizer.safetensors .. + ckpttool.json   ours; see `statefile`

Upstream: safetensors 0.8, huggingface_hub 2.4, transformers 5, and torch 2.8 to 2.13 `HuggingFaceStorageWriter`, which
keeps the offset of a piece in the header's `DCP_SHARDING_INFO` and the size of the whole tensor nowhere. A tensor's
path is its name, dots and all; a tied tensor is written once and its other name kept in `__metadata__` (or in the
index), as `safetensors.torch.save_model` does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from ckpttool import files
from ckpttool.catalogue import Catalogue, Chunk, Chunks, Extent, File, Path, Tensor
from ckpttool.containers import stheader, typedjson
from ckpttool.containers.stheader import Header
from ckpttool.contract import NO_HINTS, Crcs, Format, Loss, OpenOptions, Sink, SinkOptions, Source
from ckpttool.errors import CkptError, CorruptError, LossError, ReadError, some
from ckpttool.formats.safetensors import index as stindex
from ckpttool.formats.safetensors import placing as stfiles
from ckpttool.formats.safetensors import statefile
from ckpttool.formats.safetensors.placing import FilePlan
from ckpttool.formats.safetensors.reader import (
    MODEL,
    SHARDED,
    SUFFIX,
    mount,
    open_directory,
    open_file,
    open_indexed,
    rank_files,
    read_json,
    read_range,
)
from ckpttool.formats.safetensors.statefile import Place, Wanted
from ckpttool.version import __version__


class _SafeSource:
    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def resolve(self, tensor: Tensor, chunk: Chunk) -> Extent:
        return chunk.extent

    def close(self) -> None:
        """Nothing is kept open."""


def recognise(path: str) -> bool:
    """Whether this is a safetensors file, whole or not, or a directory that has some."""
    try:
        if not os.path.isdir(path):
            return _looks_like_file(path)
        names = os.listdir(path)
        return (
            _is_state(path, names)
            or any(name.endswith((SUFFIX, stindex.INDEX)) for name in names)
            or (SHARDED in names and bool(rank_files(os.path.join(path, SHARDED))))
        )
    except (OSError, CorruptError, ReadError):
        return False


def _looks_like_file(path: str) -> bool:
    head = _head(path, 9)
    # A file that is cut before its header, or whose header is too long, is known by its name only.
    named = path.endswith(SUFFIX) and head[8:9] in (b"", b"{")
    return stheader.looks_like(head) or named or (path.endswith(stindex.INDEX) and head[:1] == b"{")


def _head(path: str, most: int) -> bytes:
    return read_range(path, 0, min(files.size_of(path), most))


def _is_state(root: str, names: Sequence[str]) -> bool:
    return statefile.NAME in names and statefile.looks_like(_head(os.path.join(root, statefile.NAME), 4096))


def open(path: str, options: OpenOptions = NO_HINTS) -> Source:
    """The catalogue of a file, an index or a directory.

    Raises CorruptError for files that contradict themselves or each other.
    """
    if not os.path.isdir(path):
        root, name = os.path.split(path)
        indexed = path.endswith(stindex.INDEX)
        return _SafeSource(open_indexed(root or ".", name) if indexed else open_file(root or ".", name))
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise files.failed(error, path, "read") from None
    if _is_state(path, names):
        return _SafeSource(_open_state(path))
    catalogue = open_directory(path, names)
    if "config.json" in names:
        catalogue.facts |= _config(os.path.join(path, "config.json"))
    return _SafeSource(catalogue)


def _config(path: str) -> dict[str, Any]:
    """What a transformers model says of itself; nothing when it says it badly."""
    try:
        config = json.loads(read_json(path))
    except (CkptError, ValueError, RecursionError):
        return {}
    return {k: config[k] for k in ("model_type", "architectures") if k in config} if isinstance(config, dict) else {}


# A whole training state -----------------------------------------------------------------------------------------------


def _open_state(root: str) -> Catalogue:
    catalogue = Catalogue("safetensors", facts={"layout": "training state"})
    headers: dict[str, tuple[int, Header]] = {}
    used: set[tuple[str, str]] = set()
    where = f"`{os.path.join(root, statefile.NAME)}`"

    def make(wanted: Wanted) -> Tensor:
        file, name, _ = wanted.place
        if file not in headers:
            headers[file] = mount(catalogue, files.inside(root, file), file)
        number, header = headers[file]
        entry = header.tensors.get(name)
        if entry is None:
            raise CorruptError(
                f"{where}: says that tensor `{name}` is in `{file}`, which does not have it",
                hint="the files are not of the same save", tensor=name, file=file,
            )  # fmt: skip
        used.add((file, name))
        dtype, shape = statefile.true_type(wanted, entry.dtype, entry.shape, f"`{os.path.join(root, file)}`")
        extent = Extent(number, entry.begin, entry.end - entry.begin)
        return Tensor(wanted.path, dtype, shape, Chunks.single(shape, extent), embedded=wanted.embedded)

    statefile.parse(read_json(os.path.join(root, statefile.NAME)), catalogue, make, where)
    spare = [n for file, (_, header) in headers.items() for n in header.tensors if (file, n) not in used]
    if spare:
        catalogue.warnings.append(f"{len(spare)} tensors are in the files but not in `{statefile.NAME}`: {some(spare)}")
    return catalogue


# Writing --------------------------------------------------------------------------------------------------------------


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
        _make_directory(path)
    extents = _write_files(made, path, plan.files, one_file)
    _fill(made, laid, plan.places, extents, model)
    marks = {os.path.join(path, name): data for name, data in plan.indexes.items()}
    if state is not None:
        marks[os.path.join(path, statefile.NAME)] = state
    return _SafeSink(made, marks)


def _make_directory(path: str) -> None:
    try:
        FilePath(path).mkdir(parents=True)
    except OSError as error:
        raise files.failed(error, path, "write") from None


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
            location = path if one_file else os.path.join(path, plan.name)
            files.create(location, size)
            pool.write(location, 0, head)
            made.files.append(File(location, os.path.basename(location), size))
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


def losses(catalogue: Catalogue, path: str) -> list[Loss]:
    """What a file or a directory at `path` could not hold of this."""
    if stfiles.is_model(catalogue):
        return _model_losses(list(catalogue.tensors))
    if not is_file(path):
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
            typedjson.encode(entry.value, name=entry.name)
        except LossError as error:
            lost.append(Loss(entry.name, error.message))
    return lost


def is_file(path: str) -> bool:
    """Whether a person who types this means one file."""
    return path.endswith(SUFFIX)


FORMAT = Format(
    name="safetensors",
    title="safetensors file or directory",
    recognise=recognise,
    open=open,
    create=create,
    losses=losses,
    is_file=is_file,
    splits=True,
    suffixes=(SUFFIX,),
)
