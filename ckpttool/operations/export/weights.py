"""The weights as files of safetensors, each of which is created, filled and checked alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from ckpttool.catalogue.entries import Catalogue, Chunks, Extent
from ckpttool.catalogue.protocols import SinkOptions, Source
from ckpttool.errors import LossError
from ckpttool.formats import named
from ckpttool.formats.safetensors import sharding
from ckpttool.layout import rechunk
from ckpttool.layout.move import rebuilt
from ckpttool.models.assets import of_bytes
from ckpttool.serialization import safetensors_header
from ckpttool.storage import files
from ckpttool.storage.assembled import AssembledFile
from ckpttool.storage.gathered import GatheredFile
from ckpttool.storage.stores import Location, Outgoing
from ckpttool.text import literal, some
from ckpttool.transfer import plan
from ckpttool.transfer.execute import Transferred, transfer
from ckpttool.transfer.file_by_file import FileByFile
from ckpttool.transfer.file_checksums import WholeFiles
from ckpttool.transfer.file_digest import FileDigest
from ckpttool.transfer.gather import gathered, may_be
from ckpttool.transfer.processes import Coordinator
from ckpttool.transfer.threads import Progress

_SAFE = named("safetensors")
# What the names of the files begin with: those of transformers, diffusers and PEFT.
MODEL, DIFFUSION, ADAPTER = "model", "diffusion_pytorch_model", "adapter_model"


@dataclass(slots=True)
class Moving:
    """How bytes are copied: source, fingerprint of its files, threads, memory, and the callback for progress. `total`
    are the bytes of all files, `done` those of each so far, `moved` sums up the files that are read, and `whole` knows
    of which files of the source that is everything. With `sends`, files are not written where that is not needed, and
    the SHA-256 of others is computed on the way. `can_copy` says from where the store of the destination copies."""

    source: Source
    before: files.Fingerprint
    threads: int | None = None
    memory: int | None = None
    progress: Progress | None = None
    sends: bool = False
    can_copy: Callable[[Location], bool] | None = None
    total: int = 0
    done: dict[str, int] = field(default_factory=dict)
    moved: Transferred = field(default_factory=Transferred)
    read: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    whole: WholeFiles = field(init=False)

    def __post_init__(self) -> None:
        self.whole = WholeFiles(self.source.catalogue)

    def report(self) -> None:
        """Report the bytes of all files so far."""
        if self.progress is not None:
            self.progress(sum(self.done.values()), self.total)

    def progress_of(self, name: str) -> Progress:
        """Return the callback for the bytes of a file."""

        def progress(done: int, _: int) -> None:
            self.done[name] = done
            self.report()

        return progress

    def add(self, name: str, moved: Transferred) -> None:
        """Add a file that was read, unless the source has changed. Raises ReadError."""
        files.check_unchanged(self.before)
        with self.lock:
            # A file that is sent again is read again.
            if name in self.read:
                return
            self.read.add(name)
            self.moved.checked += moved.checked
            self.moved.unchecked += moved.unchecked
            self.moved.overflowed |= moved.overflowed


def outgoing(
    planned: Catalogue,
    most: int,
    moving: Moving,
    *,
    stem: str = MODEL,
    folder: str = "",
    given: Mapping[str, Sequence[str]] | None = None,
) -> list[Outgoing]:
    """Return the files of a model in a folder, `""` or `"unet/"`, of at most `most` bytes of weights each, and their
    index. An adapter is one file. `given` are files by name with the names of their tensors in order. Raises LossError
    for what safetensors cannot store."""
    lost = _SAFE.losses(planned, "")
    if lost:
        raise LossError(
            f"{len(lost)} tensors cannot be written as safetensors ({some([one.name for one in lost])}): {lost[0].why}",
            hint=f"exclude them with `--exclude {literal(lost[0].name)}`, or keep them with `ckpttool convert "
            "--to torch`",
            lost=[loss.name for loss in lost],
        )
    planned = rechunk.whole(planned)
    # `__metadata__` of the source describes the source.
    planned.facts = {key: value for key, value in planned.facts.items() if key != "metadata"}
    placed = sharding.plan_model(
        planned, None if stem == ADAPTER else most, {}, stem=stem, count_parameters=True, files=given
    )
    owners = {tensor.name: tensor for tensor in planned.tensors}
    moving.total += sum(spec.nbytes for file in placed.files for spec in file.tensors)
    files_: list[Outgoing] = []
    for file in placed.files:
        tensors = [owners[spec.name] for spec in file.tensors]
        tensors += [t for t in planned.tensors if t.alias is not None] if len(placed.files) == 1 else []
        payload = sum(spec.nbytes for spec in file.tensors)
        head, name = len(file.header()), folder + file.name
        catalogue = rebuilt(planned, tensors, {})
        write = _writer(name, catalogue, head, payload, moving, keep_order=file.keep_order)
        gather = None
        if moving.sends and may_be(tensors, moving.source):
            gather = _gatherer(name, file.header(), catalogue, payload, moving)
        assemble = _assembler(name, catalogue, payload, moving, keep_order=file.keep_order)
        files_.append(Outgoing(name, head + payload, write, gather=gather, assemble=assemble))
        moving.done[name] = 0
    return files_ + [of_bytes(folder + name, data) for name, data in placed.indexes.items()]


def _writer(
    name: str, catalogue: Catalogue, head: int, payload: int, moving: Moving, *, keep_order: bool
) -> Callable[[Location], str | None]:
    def write(path: Location) -> str | None:
        assert _SAFE.create is not None
        sink = _SAFE.create(path, catalogue, SinkOptions(one_file=True, keep_order=keep_order, bare=True))
        created = sink.catalogue
        with FileDigest(path, head + payload) if moving.sends else nullcontext() as digest:
            if digest is not None:
                digest.note(0, head)
            moved = transfer(
                plan.plan(created),
                moving.source,
                created,
                total=payload,
                threads=moving.threads,
                memory=moving.memory,
                progress=moving.progress_of(name),
                written=None if digest is None else digest.note,
                whole=moving.whole,
            )
            moving.add(name, moved)
            sink.finish(moved.crcs)
            return None if digest is None else digest.result()

    return write


def _assembler(
    name: str, catalogue: Catalogue, payload: int, moving: Moving, *, keep_order: bool
) -> Callable[[Location], AssembledFile | None] | None:
    if moving.can_copy is None:
        return None

    def assemble(path: Location) -> AssembledFile | None:
        assert _SAFE.create is not None
        sink = _SAFE.create(path, catalogue, SinkOptions(one_file=True, keep_order=keep_order, bare=True))
        how = {"threads": moving.threads, "memory": moving.memory}
        filling = FileByFile(
            sink, moving.source, payload, Coordinator(), [0], moving.can_copy, progress=moving.progress_of(name), **how
        )

        def end() -> None:
            filling.finish()
            moving.add(name, filling.moved)

        filling.end = end
        made = filling.assemble(0, path)
        if made is None:
            path.remove()
        return made

    return assemble


def _gatherer(
    name: str, head: bytes, catalogue: Catalogue, payload: int, moving: Moving
) -> Callable[[], GatheredFile | None]:
    def progress(nbytes: int) -> None:
        moving.done[name] = max(moving.done[name], nbytes - len(head))

    def gather() -> GatheredFile | None:
        header = safetensors_header.read_header(lambda at, n: head[at : at + n], 0, len(head) + payload, name=name)
        extents = {each: Extent(0, at.begin, at.end - at.begin) for each, at in header.tensors.items()}
        tensors = [
            replace(tensor, chunks=Chunks.single(tensor.shape, extents[tensor.name]))
            for tensor in catalogue.tensors
            if tensor.alias is None
        ]
        jobs = plan.plan(rebuilt(catalogue, tensors, {}))
        return gathered(head, jobs, moving.source, partial(moving.add, name), progress, moving.whole)

    return gather
