"""Saving the state of a training script through torch's own functions, complete or not at all.

    dcp      a directory; every rank writes its shards            {"model", "optim", ...}
    torch    one file; rank 0 writes everything, gathered         the same
    fsdp1    a directory of `rank{R}.pt`; FSDP1's sharded state   the same

Random states, data loaders and whatever else differs between ranks are saved for each rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from ckpttool import formats
from ckpttool.catalogue.entries import Path, dotted
from ckpttool.errors import StorageError, UsageError
from ckpttool.formats.dcp import manifest as manifests
from ckpttool.producers.published import below, is_commit, replaced
from ckpttool.storage import files, free_space, workspace
from ckpttool.storage.errors import FREE_SPACE, from_os_error
from ckpttool.storage.stores import Location, Outgoing, destination, is_remote, local_path
from ckpttool.text import meant, size
from ckpttool.training import collectives, stages
from ckpttool.training.counted_files import counting
from ckpttool.training.fsdp1 import is_fsdp1, own_errors_last, sharded
from ckpttool.training.load import path_first
from ckpttool.training.rank_values import Checksum, Separate, find_separate, separate
from ckpttool.training.sharded_values import gather, holds_sharded, is_sharded
from ckpttool.training.state_notes import Notes, joined, note

FORMATS = ("dcp", "torch", "fsdp1")

# Bytes: a disk that has less left has perhaps no room for one more tensor.
_LITTLE = 64 << 20


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    format: str = "dcp",
    overwrite: bool = False,
    manifest: bool = True,
    **extra: Any,
) -> None:
    """Save model and optimizer, and other values: plain ones, or objects with a `state_dict`, such as a scheduler or a
    second model, also in dicts. Every rank calls it.

    Args:
        path: the directory to write, or for `torch` the file; also in an object store or in a bucket of the Hub, where
            each rank sends its own files and rank 0 makes a checkpoint of them.
        model: the model, wrapped or not.
        optimizer: its optimizer.
        format: `dcp`, a directory to which every rank writes its shards; `torch`, one file, gathered by rank 0; or
            `fsdp1`, a directory of one file per rank.
        overwrite: whether to replace what is at `path`; it is kept until the new one is complete.
        manifest: whether a DCP directory carries its manifest.
        **extra: other values, by key: plain ones, or objects with a `state_dict`, also in dicts.

    Raises:
        CkptError: the same on every rank; then there is nothing at `path`, or what was there before.
    """
    path = path_first(path, "save")
    extra = dict(sorted(extra.items()))  # in one order on all ranks: methods of objects may call collectives
    collectives.same_on_all(lambda: _arguments(path, format, overwrite, manifest, model, optimizer, extra))
    with collectives.together():
        # What is the script's own fails here, and not between the collectives below.
        models = dict(_models(extra))
        for each in (model, *models.values()):
            if not is_fsdp1(each):
                type(each).state_dict(each, keep_vars=True)
        if optimizer is not None:
            type(optimizer).state_dict(optimizer)
    with collectives.together(), own_errors_last(model, *models.values()):
        state = _state(model, optimizer, format)
        own = {where: _state(each, None, format)["model"] for where, each in models.items()}
    with collectives.together():
        extra = {name: _value(value, (name,), own) for name, value in extra.items()}
    which = Separate()
    if format != "fsdp1":
        # Before sharded tensors are gathered, by rank 0 alone.
        which = find_separate(extra, own)
        which.not_on_first += stages.join(state)
    state = separate(gather(state | extra, format), which, gathered=format == "torch")
    planner = _planner(state) if format == "dcp" else None
    away, is_file = is_remote(path), format == "torch"
    with _sent(path, is_file, overwrite) if away else _stage(path, is_file, overwrite) as partial:
        with collectives.together():
            # Before the collectives of DCP, which would wait for a rank that fails here.
            writer = torch_dcp.FileSystemWriter(partial) if format == "dcp" else None
            counted = counting(writer) if writer is not None else None

        def write() -> tuple[dict[str, int], dict[str, int]]:
            try:
                if writer is None or counted is None:
                    _write_file(state, partial, format)
                    return {}, {}
                with collectives.quiet():
                    torch_dcp.save(state, storage_writer=writer, planner=planner)
                return counted.crcs, partial.sizes() if away else {}
            except (Exception, CheckpointException) as error:  # which is not an Exception
                raise failed(error, path, partial, extra) from None

        written = collectives.all_gather_of(write)
        with collectives.together():
            if manifest and format == "dcp" and collectives.rank() == 0:
                crcs, elsewhere = (
                    dict(chain.from_iterable(map(dict.items, rows))) for rows in zip(*written, strict=True)
                )
                manifests.write(partial, crcs, elsewhere)


def failed(error: BaseException, path: str, partial: Location, extra: Mapping[str, Any]) -> BaseException:
    """Return the exception for an error of DCP or torch.save, writing `path` at the staging path `partial`. `extra`
    are the values besides model and optimizer."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError):
        return from_os_error(error, path, "write")
    if isinstance(error, StorageError):
        return StorageError(error.message.replace(partial, path), hint=error.hint, file=path)
    if "pickle" in str(error):
        at_fault = next((name for name in extra if _is_refused(extra[name])), None)
        what = "what is to be saved" if at_fault is None else f"`{at_fault}`"
        message = f"`{path}`: {what} cannot be pickled: {error}"
        return UsageError(message, hint="pass values, and objects that have a `state_dict`")
    if not isinstance(error, RuntimeError):
        return error
    # What torch makes of a full disk.
    free = free_space.free_bytes(partial.parent)
    hint = FREE_SPACE if free < _LITTLE else None
    return StorageError(f"`{path}`: cannot save: {error} ({size(free)} are free)", hint=hint)


def _is_refused(value: Any) -> bool:
    """Return whether a value cannot be pickled by itself."""
    if is_sharded(value) or holds_sharded(value):
        return False
    try:
        torch.save(value, Checksum())
    except Exception:  # of objects of the script's own classes
        return True
    return False


def _arguments(
    path: str,
    format: str,
    overwrite: bool,
    manifest: bool,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Return what every rank has to pass alike. Raises UsageError for what cannot be saved."""
    if not isinstance(model, nn.Module):
        hint = "`torch.save` or `torch.distributed.checkpoint.save` saves a state dict"
        raise UsageError(f"`save` takes a `torch.nn.Module`, and this is a {type(model).__name__}", hint=hint)
    if format not in FORMATS:
        hint = meant(format, list(FORMATS), "one of `dcp`, `torch`, `fsdp1`")
        raise UsageError(f"there is no format `{format}` to save in", hint=hint)
    formats.check_suffix(path, formats.named(format))
    if format == "fsdp1" and not is_fsdp1(model):
        raise UsageError("the model is not wrapped by FSDP1", hint='`format="dcp"` saves every model in shards')
    reserved = {"model", "optim"} & extra.keys()
    if reserved:
        raise UsageError(f"`{reserved.pop()}` is what the model or its optimizer is saved as")
    models = [dotted(where) for where, _ in _models(extra)]
    return {
        "format": format,
        "overwrite": overwrite,
        "manifest": manifest,
        "optimizer": optimizer is not None,
        "models": models,
    }


@collectives.quiet()
def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None, format: str) -> dict[str, Any]:
    """Return the state dicts of model and optimizer, in shards; of FSDP1 by its own functions, for one file whole."""
    if is_fsdp1(model) and format != "torch":
        with sharded(model):
            state: dict[str, Any] = {"model": type(model).state_dict(model)}
            if optimizer is not None:
                state["optim"] = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        return state
    # Tensors on the CPU must not be offloaded (a segmentation fault or wrong moments in torch 2.13).
    is_off_cpu = any(parameter.device.type != "cpu" for parameter in model.parameters())
    options = StateDictOptions(full_state_dict=is_fsdp1(model), cpu_offload=is_fsdp1(model) and is_off_cpu)
    state = {"model": get_model_state_dict(model, options=options)}
    if optimizer is not None:
        with _not_stepped(optimizer):
            state["optim"] = get_optimizer_state_dict(model, optimizer, options=options)
    return state


@contextmanager
def _not_stepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from stepping an optimizer that has no state on any rank, to get some: Adam would count that step, and
    Rprop keep its learning rate, which is 0."""
    attributes: dict[str, Any] = vars(optimizer)
    step = attributes.get("step")  # of the object itself: a schedule counts the calls
    if not any(collectives.all_gather_of(lambda: bool(optimizer.state))):
        attributes["step"] = lambda closure=None: None
    try:
        yield
    finally:
        attributes.pop("step", None)
        if step is not None:
            attributes["step"] = step


def _models(extra: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, nn.Module]]:
    for key, value in extra.items():
        if isinstance(value, nn.Module):
            yield (*path, key), value
        elif isinstance(value, Mapping) and not hasattr(value, "state_dict"):
            yield from _models(value, (*path, key))


def _value(value: Any, path: Path, models: Mapping[Path, Any]) -> Any:
    if path in models:
        return models[path]
    if isinstance(value, Mapping) and not hasattr(value, "state_dict"):
        values = {key: _value(below, (*path, key), models) for key, below in value.items()}
        return values if any(values[key] is not below for key, below in value.items()) else value
    return value.state_dict() if hasattr(value, "state_dict") else value


@contextmanager
def _stage(path: str, is_file: bool, overwrite: bool) -> Iterator[Location]:
    """Context manager of the staging path that all ranks write to. Rank 0 renames it to `path` at the end."""
    hint = 'all ranks must write to one shared file system; `format="torch"` is written by rank 0 alone'
    with ExitStack() as stack:
        partial = ""
        with collectives.together():
            if collectives.rank() == 0:
                stage = stack.enter_context(local_path(path).stage(overwrite=overwrite, is_file=is_file))
                partial = stage.shared_path
                if not is_file:
                    files.make_directory(partial, exist_ok=True)
        folder = local_path(collectives.from_first(partial))
        if not is_file:
            collectives.check_sees(folder, hint)
        yield folder
        with collectives.together():
            stack.close()


@contextmanager
def _sent(path: str, is_file: bool, overwrite: bool) -> Iterator[Location]:
    """Context manager of a path of each rank's own, on its machine. What is there at the end is sent to `path`, by each
    rank, and rank 0 then makes a checkpoint of it."""
    options: dict[str, Any] = {"overwrite": overwrite, "claims": ""}
    with ExitStack() as stack:
        with collectives.together():
            location, scratch = destination(path), workspace.scratch_directory("ckpttool-save-")
            if location.store.is_versioned:
                hint = "save to a bucket, `hf://buckets/org/name/path`, or send a checkpoint by `ckpttool convert`"
                raise UsageError(f"`{path}` is a repository, which is written in one commit", hint=hint)
            folder = local_path(stack.enter_context(scratch))
            partial = folder / location.name if is_file else folder
            if collectives.rank() == 0:
                options["replaces"] = replaced(location)
            if is_file:
                location, options["claims"] = location.parent, location.name
            if collectives.rank() == 0:
                # Before hours of work.
                location.publish([], dry_run=True, **options)
        yield partial
        own: list[Outgoing] = []
        with collectives.together():
            own = below(folder)
        # The last of them makes a checkpoint of all.
        last = [one for one in own if is_commit(one.name)] or own[-1:] if collectives.rank() == 0 else []
        rest = [one for one in own if one not in last]
        of_all = collectives.all_gather([(one.name, one.size) for one in rest])
        others = [Outgoing(*row) for rank, rows in enumerate(of_all) for row in rows if rank != collectives.rank()]
        options |= {"last": lambda: last, "is_index": is_commit, "writers": collectives.Ranks()}
        location.publish([*rest, *others], **options)


class _NotesPlanner(DefaultSavePlanner):  # type: ignore[misc]
    """Saves what the names of DCP do not say where our DCP writer does: in an attribute of the index, which torch
    ignores. `extras` are those of all ranks, on rank 0."""

    def __init__(self, own: Notes, extras: list[dict[str, Any]] | None) -> None:
        super().__init__()
        self._own, self._extras = own, extras

    def set_up_planner(self, *arguments: Any, **options: Any) -> None:
        super().set_up_planner(*arguments, **options)
        for name, (path, value) in self._own.empty.items():
            self.state_dict[name], self.mappings[name] = value, path

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        # As in the state dict: the plans of the ranks are interleaved.
        entries = metadata.state_dict_metadata
        order = chain.from_iterable(plan.planner_data for plan in all_plans)
        metadata = replace(metadata, state_dict_metadata={name: entries[name] for name in order if name in entries})
        setattr(metadata, "ckpttool", joined(self._extras or []))  # noqa: B010
        return plans, metadata


def _planner(state: dict[str, Any]) -> _NotesPlanner:
    own = Notes({}, {})
    with collectives.together():
        own = note(state)
    extras = collectives.to_first(own.extra)
    planner = None
    with collectives.together():
        planner = _NotesPlanner(own, extras)
    assert planner is not None
    return planner


def _write_file(state: dict[str, Any], partial: Location, format: str) -> None:
    """Write the file of this rank, if it has one."""
    if format == "fsdp1" or collectives.rank() == 0:
        path = partial if format == "torch" else partial / f"rank{collectives.rank()}.pt"
        path.put(lambda stream: torch.save(state, stream))
