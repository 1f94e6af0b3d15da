"""Exports a model as `from_pretrained` and the tools of the Hub expect it: weights, index, config, tokenizer.

The weights of each file are planned and transferred alone, so that a file can be written, sent and removed before the
next one is begun. An export to a directory is written beside it and renamed once it is complete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

from ckpttool import formats
from ckpttool.catalogue.patterns import several
from ckpttool.errors import UsageError
from ckpttool.formats.safetensors.sharding import MAX_SHARD_SIZE
from ckpttool.operations import arguments, write
from ckpttool.operations.export import to_store
from ckpttool.operations.export.plan import Export, Exported, ExportOptions, planned
from ckpttool.operations.export.to_store import Remote
from ckpttool.operations.write import WriteOptions
from ckpttool.storage import free_space
from ckpttool.storage.stores import Location, local_path
from ckpttool.transfer import readback
from ckpttool.transfer.threads import Progress

_SAFETENSORS = formats.named("safetensors")


def export(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: str | Sequence[str] = (),
    strip_prefix: str | None = None,
    key_map: str | None = None,
    head_dim: int | None = None,
    dtype: str | Sequence[str] = (),
    max_shard_size: int | str | None = None,
    assets: str | os.PathLike[str] | None = None,
    strict: bool = True,
    card: bool = True,
    shapes: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    max_memory: int | str | None = None,
    check: bool = False,
    manifest: str | os.PathLike[str] | None = None,
    private: bool = False,
    create_pr: bool = False,
    commit_message: str | None = None,
    stage: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write the model of the checkpoint at `src` to the directory `dst`, as `from_pretrained` expects it, or to a
    repository `hf://org/name` on the Hub, in one commit. See `docs/how-to/export.md` and `docs/how-to/hub.md`.

    Sizes are bytes, or text such as `5GB`. `progress(done, total)` is called with bytes of weights from this thread.
    Nothing appears at `dst` unless all of it does. A `manifest` of a directory is then written to that path.
    Raises the errors of `ckpttool.errors`, each with its exit code.
    """
    began = time.monotonic()
    src, dst = os.fspath(src), os.fspath(dst)
    selection = arguments.selection(only, exclude=exclude, rename=rename, strip_prefix=strip_prefix)
    most = arguments.size(max_shard_size, "--max-shard-size") or MAX_SHARD_SIZE
    beside, listed = arguments.path(assets), arguments.path(manifest)
    options = ExportOptions(selection, key_map, head_dim, several(dtype), most, beside, strict, card, shapes)
    how = WriteOptions(overwrite, dry_run, threads, arguments.memory(max_memory), check, progress, manifest=listed)
    if dst.endswith(".safetensors"):
        raise UsageError(
            f"`{dst}`: an export is a directory, of config and weights",
            hint=f"`ckpttool convert {src} {dst} --only model` writes the weights alone",
        )
    result = Exported(src, "", dst, "safetensors", dry_run=dry_run)
    remote = Remote(private, create_pr, commit_message, arguments.path(stage))
    if to_store.check(dst, remote, how):
        writing, sending = to_store.combined(progress) if progress is not None else (None, None)
        with planned(result, options, replace(how, progress=writing)) as plan:
            to_store.send(plan, remote, sending)
        result.seconds = time.monotonic() - began
    else:
        with write.destination(result, _SAFETENSORS, how, src, beside), planned(result, options, how) as plan:
            result.free = free_space.free_bytes(dst)
            write.check_place(listed, dst, (file.name for file in plan.files))
            if not dry_run:
                _write(plan, how)
    result.checked, result.unchecked = plan.moved.checked, plan.moved.unchecked
    write.note_overflow(result, plan.moved.overflowed)
    return result


def _write(plan: Export, how: WriteOptions) -> None:
    result, dst = plan.result, plan.result.destination
    free_space.check(dst, result.disk, result.free)

    def check(folder: Location) -> None:
        # An adapter alone is not recognised as a model in the directory: it is opened by its name.
        written = folder / plan.files[0].name if result.adapter else folder
        readback.check_written(
            _SAFETENSORS, written, plan.planned, plan.source, total=result.bytes, threads=how.threads, memory=None
        )

    local_path(dst).publish(plan.files, overwrite=how.overwrite, notes=result.notes, check=check if how.check else None)
