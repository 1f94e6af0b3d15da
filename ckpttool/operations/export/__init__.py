"""Exports a model as `from_pretrained` and the tools of the Hub expect it: weights, index, config, tokenizer.

The weights of each file are planned and transferred alone, so that a file can be written, sent and removed, or sent
without being written, before the next one is begun. An export to a directory is written beside it and renamed once it
is complete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool import formats
from ckpttool.catalogue.patterns import several
from ckpttool.errors import UsageError
from ckpttool.operations import arguments, publish, write
from ckpttool.operations.arguments import DtypeOfTorch
from ckpttool.operations.export.plan import NAMES, Export, Exported, ExportOptions, planned
from ckpttool.operations.write import WriteOptions
from ckpttool.producers.published import in_order
from ckpttool.storage import free_space, stores
from ckpttool.storage.errors import hub_address
from ckpttool.storage.files import temporary_folder
from ckpttool.storage.stores import Location, local_path, path_text
from ckpttool.text import meant
from ckpttool.transfer.check_destination import check_written
from ckpttool.transfer.threads import Progress

_SAFETENSORS = formats.named("safetensors")
# Suffixes of files of weights, and what makes such a file of a directory; nothing where `convert` writes it.
_FILES = {
    **dict.fromkeys((".safetensors", ".pt", ".pth", ".ckpt", ".bin"), ""),
    ".gguf": "`convert_hf_to_gguf.py` of llama.cpp",
    ".onnx": "`optimum-cli export onnx`",
}


def export(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: str | Sequence[str] = (),
    strip_prefix: str | None = None,
    key_map: str | None = None,
    names: str = NAMES[0],
    head_dim: int | None = None,
    dtype: str | DtypeOfTorch | Sequence[str | DtypeOfTorch] = (),
    dtype_strict: bool = False,
    max_shard_size: int | str | None = None,
    assets: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    fill_from: str | os.PathLike[str] | None = None,
    fill: str | Sequence[str] = (),
    take: str | None = None,
    include: str | Sequence[str] = (),
    not_secret: str | Sequence[str] = (),
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
    public: bool = False,
    keep: str | Sequence[str] = (),
    create_pr: bool = False,
    tag: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
    stage: str | os.PathLike[str] | None = None,
    in_store: str = "auto",
    announce: Callable[[Exported], object] | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write the model of the checkpoint at `src` to the directory `dst`, as `from_pretrained` expects it, or to a
    repository `hf://org/name` on the Hub, in one commit, or to a bucket.

    Nothing appears at `dst` unless all of it does.

    Args:
        src: the checkpoint to read, which is never changed: a file, a directory, a run directory or
            `hf://org/name[/path]`.
        dst: the directory to write, `hf://org/name[@branch]` or `hf://buckets/org/name/path`.
        only: which model, by its key, if there are several.
        exclude: globs of tensors to exclude, where `*` also matches dots, or `re:` and a regular expression.
        rename: rules `OLD=NEW`, in which `*` captures; `@FILE` reads rules.
        strip_prefix: a prefix to remove from the names of the model.
        key_map: how the producer names the parameters: the name of a key map, a `.json` file, or `none`; None goes by
            the names.
        names: whether the names are those of released files (`released`) or those that transformers has in memory
            (`memory`).
        head_dim: elements of an attention head, if no config has it.
        dtype: dtypes to cast floating-point tensors to: `bfloat16` (also as `torch.bfloat16`), or `norm*=float32` for
            some; the first match applies.
        dtype_strict: whether to cast also what the model's library keeps in float32, such as the bias of routers.
        max_shard_size: most bytes of a file of weights, a number or text such as `512MiB`; None is 5 GB.
        assets: directory or Hub repository with config, tokenizer and code; None looks beside the weights.
        like: a released model, a directory, a file or `hf://org/name`: names, order, dtypes, files and assets become
            its own. Only its headers are read.
        fill_from: a model to take missing tensors from, likewise, with `like`.
        fill: globs of the tensors to take from there, also in place of those of `src`; all that are missing, without
            any.
        take: a tree of averaged weights with the names of the model, such as `ema`, to export in place of it.
        include: globs of further files to copy, which are not assets by their names.
        not_secret: files to send although they seem to have a key or a token in them.
        strict: if false, tensors that do not match `config.json` are reported instead of refused.
        card: whether to write a model card where there is none.
        shapes: a checkpoint or a JSON file with the names, shapes and order of the parameters, for FSDP1's flat
            parameters and optimizers keyed by numbers.
        overwrite: whether to replace `dst`; the old one is kept until the new one is complete.
        dry_run: whether to return the plan and write nothing.
        threads: number of threads that read and write; None chooses it.
        max_memory: most bytes of the process, a number or text such as `2GB`; None limits the buffers alone.
        check: whether to compare `dst` with `src` before it is put in its place.
        manifest: path of a manifest of `dst` to write: SHA-256 of each file and tensor.
        private: whether to refuse a repository that is public.
        public: whether a repository that is created is public.
        keep: globs of weights of an earlier export to keep in the repository.
        create_pr: whether to open a pull request in place of a commit to the branch.
        tag: a tag for the commit, which must not exist in the repository.
        commit_message: message of the commit.
        token: the value of `HF_TOKEN` while this runs.
        stage: directory for what is sent, which is kept; None writes only what has to be calculated, to temporary
            files, up to three at a time.
        in_store: `auto`, or `never` to have no bytes copied by the object store that `src` and `dst` lie in.
        announce: called once with the plan, before the first file is written or sent.
        progress: called with the bytes of weights done and in all, several times a second, from this thread.

    Raises:
        UsageError: if the arguments do not fit each other or the checkpoint.
        ReadError: if there is no checkpoint at `src`, or it cannot be read.
        CorruptError: if it is damaged; then nothing is written.
        LossError: if something of it cannot be kept and was not excluded, or what its optimizer trained would be
            filled.
        OverwriteError: if `dst` exists, without `overwrite`, or the tag does.
        StorageError: if `dst` cannot be written, or does not fit on the disk.
        RemoteError: if the Hub cannot be reached, or refuses.
    """
    began = time.monotonic()
    src, dst = path_text(src), path_text(dst)
    arguments.check_source(src, dst)
    if names not in NAMES:
        raise UsageError(
            f"`--names {names}`: there is no such spelling", hint=meant(names, NAMES, "`released` or `memory`")
        )
    selection = arguments.selection(only, exclude=exclude, rename=rename, strip_prefix=strip_prefix)
    most = arguments.max_shard_size(max_shard_size)
    beside, listed = arguments.path(assets), arguments.path(manifest)
    options = ExportOptions(
        selection,
        key_map,
        names,
        head_dim,
        arguments.dtypes(dtype),
        dtype_strict,
        most,
        beside,
        strict,
        card,
        shapes,
        several(include),
        several(not_secret),
        arguments.path(like),
        arguments.path(fill_from),
        several(fill),
        take,
    )
    _check_reference(options)
    how = WriteOptions(overwrite, dry_run, threads, arguments.memory(max_memory), check, progress, manifest=listed)
    in_store = publish.check_in_store(in_store)
    _check_name(src, dst)
    result = Exported(src, "", dst, "safetensors", dry_run=dry_run)
    if (address := hub_address(dst)) is not None:
        result.notes.append(f"`{dst}` is a directory of this machine; a repository of the Hub is written `{address}`")
    remote: dict[str, Any] = {
        "private": private,
        "public": public,
        "keep": several(keep),
        "create_pr": create_pr,
        "tag": tag,
        "message": commit_message,
        "stage": arguments.path(stage),
    }
    _check_options(dst, remote, how)
    with publish.user(token):
        if stores.is_remote(dst):
            if not stores.destination(dst).store.is_versioned:
                arguments.check_apart(dst, src, beside, options.like, options.fill_from)
            writing, sending = publish.combined(progress) if progress is not None else (None, None)
            can_copy = publish.can_copy(stores.destination(dst), in_store)
            with planned(result, options, replace(how, progress=writing, can_copy=can_copy)) as plan:
                if announce is not None:
                    announce(result)
                _send(plan, remote, how, sending)
            result.seconds = time.monotonic() - began
        else:
            read = (src, beside, options.like, options.fill_from)
            with write.destination(result, _SAFETENSORS, how, *read), planned(result, options, how) as plan:
                result.free_bytes = free_space.free_bytes(dst)
                write.check_place(listed, dst, (file.name for file in plan.files))
                if announce is not None:
                    announce(result)
                if not dry_run:
                    _write(plan, how)
                elif error := free_space.shortage(dst, result.file_bytes, result.free_bytes):
                    write.note_obstacle(result, error)
    result.checked_bytes, result.unchecked_bytes = plan.moved.checked, plan.moved.unchecked
    write.note_overflow(result, plan.moved.overflowed)
    return result


def _check_reference(options: ExportOptions) -> None:
    """Raise UsageError for options of a reference that do not fit each other."""
    if options.fill_from is not None and options.like is None:
        hint = f"`--like {options.fill_from}` has the names of all"
        raise UsageError("`--fill-from` fills what `--like` names, and that is not given", hint=hint)
    if options.fill and options.fill_from is None:
        raise UsageError(f"`--fill {options.fill[0]}` needs a model to take it from", hint="pass `--fill-from REF`")
    if options.take is not None and options.selection.only:
        raise UsageError("`--take` and `--only` cannot be used together", hint="`--take` names what is exported")


def _check_name(src: str, dst: str) -> None:
    """Raise UsageError for a destination with the name of a file: an export is a directory."""
    # A repository on the Hub may be called `org/model.gguf`, and a directory, said to be one with `/`, too.
    suffix = next((suffix for suffix in _FILES if dst.lower().endswith(suffix)), "")
    if not suffix or (stores.is_remote(dst) and suffix != ".safetensors"):
        return
    hint = f"`ckpttool convert {src} {dst} --only model` writes the weights alone"
    if _FILES[suffix]:
        hint = f"export to `{dst[: -len(suffix)]}`, and make the file from that with {_FILES[suffix]}"
    raise UsageError(f"`{dst}`: an export is a directory, of config and weights", hint=hint)


def _write(plan: Export, how: WriteOptions) -> None:
    result, dst = plan.result, plan.result.destination
    free_space.check(dst, result.file_bytes, result.free_bytes)

    def check(folder: Location) -> None:
        # An adapter alone is not recognised as a model in the directory: it is opened by its name.
        for one in plan.components:
            inside = folder / one.folder.rstrip("/") if one.folder else folder
            written = folder / plan.files[0].name if result.adapter else inside
            total, threads = result.payload_bytes, how.threads
            check_written(_SAFETENSORS, written, one.catalogue, plan.source, total=total, threads=threads, memory=None)

    checked = check if how.check else None
    local_path(dst).publish(
        plan.files, overwrite=how.overwrite, notes=result.notes, check=checked, after=how.after(dst)
    )


# To a store: each file is written if needed, sent and removed; one commit publishes all -------------------------------


def _check_options(dst: str, remote: Mapping[str, Any], how: WriteOptions) -> None:
    """Raise UsageError for options that do not fit the destination."""
    publish.check_options(dst, remote)
    if not stores.is_remote(dst):
        return
    if how.overwrite and stores.destination(dst).store.is_versioned:
        raise UsageError("`--overwrite`: a commit keeps the earlier version", hint="leave it out")
    if how.check:
        raise UsageError("`--check`: what was sent is compared by its digests in any case", hint="leave it out")
    if how.manifest is not None:
        hint = "export to a directory with `--manifest`, and send that with `hf upload`"
        raise UsageError("`--manifest` lists local files, which are removed as they are sent", hint=hint)


def _send(plan: Export, remote: Mapping[str, Any], how: WriteOptions, sending: Progress | None) -> None:
    """Send the files of a plan, or note what would be sent. Raises RemoteError and what the files raise."""
    result = plan.result
    result.free_bytes = free_space.free_bytes(remote.get("stage") or temporary_folder())

    def progress(done: int, total: int) -> None:
        plan.report()
        if sending is not None:
            sending(done, total)

    location = stores.destination(result.destination)
    options = publish.accepted(location, remote, how.overwrite)
    outgoing = plan.files if location.store.is_versioned else in_order(plan.files)
    sent = location.publish(
        outgoing, **options, dry_run=result.dry_run, progress=progress, unless_there=plan.unless_there
    )
    publish.add_sent(result, sent)
    if remote.get("stage") is None:
        result.file_bytes = max((file.size for file in plan.files if file.gather is None), default=0)
