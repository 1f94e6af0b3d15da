"""The weights as files of safetensors, each of which is created, filled and checked alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import SinkOptions, Source
from ckpttool.errors import LossError
from ckpttool.formats import named
from ckpttool.formats.safetensors import sharding
from ckpttool.layout import rechunk
from ckpttool.layout.move import rebuilt
from ckpttool.operations.export.assets import of_bytes
from ckpttool.serialization import safetensors_header
from ckpttool.storage import files
from ckpttool.storage.stores import Outgoing
from ckpttool.text import some
from ckpttool.transfer import plan
from ckpttool.transfer.execute import Transferred, transfer
from ckpttool.transfer.threads import Progress

_SAFE = named("safetensors")
# What the names of the files begin with: those of transformers, diffusers and PEFT.
MODEL, DIFFUSION, ADAPTER = "model", "diffusion_pytorch_model", "adapter_model"


@dataclass(slots=True)
class Moving:
    """How bytes are copied: source, fingerprint of its files, threads, memory, and the callback for progress. `total`
    are the bytes of all files, `done` those of each so far, and `moved` sums up the files that are written."""

    source: Source
    before: files.Fingerprint
    threads: int | None = None
    memory: int | None = None
    progress: Progress | None = None
    total: int = 0
    done: dict[str, int] = field(default_factory=dict)
    moved: Transferred = field(default_factory=Transferred)


def outgoing(planned: Catalogue, most: int, moving: Moving, *, stem: str = MODEL, folder: str = "") -> list[Outgoing]:
    """Return the files of a model in a folder, `""` or `"unet/"`, of at most `most` bytes of weights each, and their
    index. An adapter is one file. Raises LossError for what safetensors cannot store."""
    lost = _SAFE.losses(planned, "")
    if lost:
        raise LossError(
            f"{len(lost)} tensors cannot be written as safetensors ({some([one.name for one in lost])}): {lost[0].why}",
            hint=f"exclude them with `--exclude {lost[0].name!r}`, or keep them with `ckpttool convert --to torch`",
            lost=[loss.name for loss in lost],
        )
    planned = rechunk.whole(planned)
    # `__metadata__` of the source describes the source.
    planned.facts = {key: value for key, value in planned.facts.items() if key != "metadata"}
    placed = sharding.plan_model(planned, None if stem == ADAPTER else most, {}, stem=stem, count_parameters=True)
    owners = {tensor.name: tensor for tensor in planned.tensors}
    moving.total += sum(spec.nbytes for file in placed.files for spec in file.tensors)
    files_: list[Outgoing] = []
    for file in placed.files:
        tensors = list(planned.tensors) if len(placed.files) == 1 else [owners[spec.name] for spec in file.tensors]
        payload = sum(spec.nbytes for spec in file.tensors)
        size = len(safetensors_header.build_header(file.tensors, file.metadata)) + payload
        name = folder + file.name
        files_.append(Outgoing(name, size, _writer(name, rebuilt(planned, tensors, {}), payload, moving)))
    return files_ + [of_bytes(folder + name, data) for name, data in placed.indexes.items()]


def _writer(name: str, catalogue: Catalogue, payload: int, moving: Moving) -> Callable[[str], None]:
    def progress(done: int, _: int) -> None:
        moving.done[name] = done
        if moving.progress is not None:
            moving.progress(sum(moving.done.values()), moving.total)

    def write(path: str) -> None:
        assert _SAFE.create is not None
        sink = _SAFE.create(path, catalogue, SinkOptions(one_file=True))
        created, threads, memory = sink.catalogue, moving.threads, moving.memory
        moved = transfer(
            plan.plan(created), moving.source, created, total=payload, threads=threads, memory=memory, progress=progress
        )
        files.check_unchanged(moving.before)
        sink.finish(moved.crcs)
        moving.moved.checked += moved.checked
        moving.moved.unchecked += moved.unchecked
        moving.moved.overflowed |= moved.overflowed

    return write
