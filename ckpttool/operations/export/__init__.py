"""Exports a model as `from_pretrained` and the tools of the Hub expect it: weights, index, config, tokenizer.

The weights of each file are planned and transferred alone, so that a file can be written, sent and removed before the
next one is begun. An export to a directory is written beside it and renamed once it is complete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ckpttool import formats
from ckpttool.catalogue.patterns import several
from ckpttool.errors import StorageError, UsageError
from ckpttool.operations import arguments
from ckpttool.operations import manifest as manifests
from ckpttool.operations import write as making
from ckpttool.operations.export import to_store as remote
from ckpttool.operations.export.plan import Export, Exported, Wanted, planned
from ckpttool.operations.export.to_store import Both, Remote
from ckpttool.storage import files
from ckpttool.transfer import readback as rereading
from ckpttool.transfer import staging
from ckpttool.transfer.threads import Progress

_SAFE = formats.named("safetensors")


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
    only, exclude, dtype = map(several, (only, exclude, dtype))
    rename = arguments.rules(rename, "--rename")
    wanted = Wanted(
        only, exclude, rename, strip_prefix, key_map, head_dim, dtype, max_shard_size,
        os.fspath(assets) if assets is not None else None, strict, card, shapes, threads, max_memory,
    )  # fmt: skip
    if dst.endswith(".safetensors"):
        raise UsageError(
            f"`{dst}`: an export is a directory, of config and weights",
            hint=f"`ckpttool convert {src} {dst} --only model` writes the weights alone",
        )
    how = Remote(private, create_pr, commit_message, os.fspath(stage) if stage is not None else None)
    listed = None if manifest is None else os.fspath(manifest)
    if remote.check(dst, how, overwrite=overwrite, check=check, manifest=listed is not None):
        both = Both(progress)
        with planned(src, dst, wanted, both.making) as plan:
            plan.made.dry_run = dry_run
            remote.send(plan, dst, how, dry_run=dry_run, both=both)
        made = plan.settle()
        made.seconds = time.monotonic() - began
        return made
    making.check_apart(dst, src, wanted.assets)
    manifests.check_wanted(listed, dst, is_file=False, dry_run=dry_run)
    notes = making.check_free(dst, _SAFE, overwrite, dry_run)
    with planned(src, dst, wanted, progress) as plan:
        plan.made.dry_run = dry_run
        plan.made.notes[:0] = notes
        plan.made.free = files.free_space(dst)
        making.check_place(listed, dst, (file.name for file in plan.files))
        if not dry_run:
            _write(plan, dst, overwrite=overwrite, check=check, threads=threads)
    if listed is not None and not dry_run:
        manifests.write_for(dst, listed, threads)
    made = plan.settle()
    made.seconds = time.monotonic() - began
    return made


def _write(plan: Export, dst: str, *, overwrite: bool, check: bool, threads: int | None) -> None:
    made = plan.made
    if made.disk > made.free:
        raise StorageError(
            f"`{dst}`: needs {made.disk} bytes, but {made.free} are free",
            hint="free some space, or write somewhere else",
            file=dst, found=made.free, expected=made.disk,
        )  # fmt: skip
    with staging.staged(dst, overwrite=overwrite, is_file=False, notes=made.notes) as partial:
        for file in plan.files:
            path = os.path.join(partial, *file.name.split("/"))
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            except OSError as error:
                raise files.failed(error, path, "write") from None
            file.write(path)
        if check:
            # The adapter is a file that is no whole model: it is opened by its name.
            there = os.path.join(partial, plan.files[0].name) if made.adapter else partial
            rereading.check_written(
                _SAFE, there, plan.laid, plan.source, total=made.bytes, threads=threads, memory=None
            )  # fmt: skip
