"""Filling a model and an optimizer from a checkpoint, by either strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpttool.catalogue.entries import Path, Tensor
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout.rename import strip_wrappers
from ckpttool.training import broadcast, collectives, match
from ckpttool.training.broadcast import OutgoingTensor
from ckpttool.training.contents import Contents, Shape, put, with_lists
from ckpttool.training.match import GroupMatch, ModelMatch, TensorTarget
from ckpttool.training.read import LocalShard, Reader, empty, like, local_shards, torch_dtype

# Elements of what is sent in one message with others: there are as many `step`s as parameters.
_SMALL = 64


@dataclass(frozen=True, slots=True)
class Filler:
    """Fills shards of tensors. `reader` is that of ranks that read: all of them, or with `broadcast` the first."""

    reader: Reader | None
    contents: Contents
    broadcast: bool
    strict: bool = True

    @property
    def sends(self) -> bool:
        """Whether rank 0 reads for others."""
        return self.broadcast and collectives.is_distributed()

    def fill(self, key: Path, shape: Shape, shards: Sequence[LocalShard]) -> None:
        """Fill the shards of one tensor that this rank has. With `broadcast` a collective."""
        tensor = self.contents.tensors.get(key)
        # What is written there is lost without a word.
        assert not any(shard.memory.is_meta for shard in shards), f"{key} has no memory"
        if self.sends:
            broadcast.send_tiles(shape, shards, tensor, self.reader)
        elif self.reader is not None and tensor is not None:
            for shard in shards:
                self.reader.read(tensor, shard.box, shard.memory)

    def together(self) -> AbstractContextManager[None]:
        """Context manager that raises errors of one rank on all, if ranks read by themselves."""
        return nullcontext() if self.broadcast else collectives.together()


def prepare(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, filler: Filler, elsewhere: Collection[str] = ()
) -> tuple[ModelMatch, list[GroupMatch]]:
    """Match names, shapes and groups, and change nothing; `elsewhere` are names that only other ranks may have. Raises
    UsageError or CorruptError."""
    contents = filler.contents
    owners = {
        f"{prefix}.{name}".lstrip("."): module
        for prefix, module in model.named_modules()
        for name in [*module._parameters, *module._buffers]
    }
    # Of the class: an instance's own may be patched to return another (`_patch_model_state_dict` of torch).
    matched = match.match(type(model).state_dict(model, keep_vars=True), contents, owners, elsewhere)
    if filler.strict:
        match.check_complete(matched, contents, model)
    check_memory(matched.targets, filler)
    if optimizer is None:
        return matched, []
    groups = match.match_groups(optimizer, model, contents, elsewhere)
    if filler.strict:
        match.check_kind(groups, contents.path)
    assert contents.optimizer is not None
    labels = {id(parameter): strip_wrappers(name) for name, parameter in model.named_parameters()}
    trained = [
        (one.saved, [(n, labels.get(id(p), str(n))) for p, n in one.pairs() if p.requires_grad]) for one in groups
    ]
    matched.without_state = match.without_state(trained, contents.optimizer, contents.path, strict=filler.strict)
    return matched, groups


def check_memory(targets: Iterable[TensorTarget], filler: Filler) -> None:
    """Raise UsageError for tensors of a model that cannot be filled, and for those of the checkpoint that no torch
    tensor holds."""
    for target in targets:
        check_fillable(target.value, target.name)
        tensor = filler.contents.tensors.get(("model", target.name))
        if tensor is not None:
            torch_dtype(tensor.dtype, tensor.name)


def check_fillable(value: Any, name: str) -> None:
    """Raise UsageError for a tensor of which several elements are one, and for one with an odd placement."""
    for _, memory in local_shards(value, name):
        if any(step == 0 and n > 1 for step, n in zip(memory.stride(), memory.shape, strict=True)):
            raise UsageError(
                f"`{name}` is an expanded tensor, whose elements share memory: it cannot be loaded",
                hint="give it memory of its own with `.contiguous()` or `.clone()`, or make the buffer non-persistent",
                tensor=name,
            )


def fill(model: nn.Module, matched: ModelMatch, filler: Filler) -> None:
    """Fill a model of tensors or DTensors (FSDP2, tensor parallelism, DDP, plain)."""
    with torch.no_grad():
        _fill_model(model, matched, filler)
        with collectives.together():
            for name, module in model.named_modules() if matched.extra_state else ():
                key = f"{name}._extra_state".lstrip(".")
                if key in matched.extra_state:
                    module.set_extra_state(matched.extra_state[key])


def fill_optimizer(
    optimizer: torch.optim.Optimizer, matched: ModelMatch, groups: Sequence[GroupMatch], filler: Filler
) -> None:
    """Fill the optimizer of such a model."""
    contents = filler.contents
    assert contents.optimizer is not None
    saved = contents.optimizer.state
    named = (pair for one in groups for pair in one.pairs())
    to_fill = [(parameter, name, saved[name]) for parameter, name in named if saved.get(name)]
    with torch.no_grad():
        state = fill_state(to_fill, filler, optimizer)
        with collectives.together():
            as_saved = {id(t.value) for t in matched.targets if is_as_saved(t.value, contents.model[t.name])}
            _set_state(optimizer, groups, state, as_saved, contents.path)


def _fill_model(model: nn.Module, matched: ModelMatch, filler: Filler) -> None:
    """Fill tensor by tensor; those that torch can send by itself, by module."""
    # torch hands a placeholder to `set_extra_state` of the modules that it sends, and of those below them.
    any_has = filler.sends and any(map(_has_extra_state, model.modules()))
    with_extra = {id(m) for m in model.modules() if any_has and any(map(_has_extra_state, m.modules()))}
    by_module: dict[int, tuple[nn.Module, list[tuple[str, Tensor | None]]]] = {}
    # torch refuses a module that has, or that has below it, tensors on several devices.
    on_one = len({target.value.device for target in matched.targets if target.value.dim()}) == 1
    with filler.together():
        for target in matched.targets:
            key, shape = ("model", target.name), filler.contents.model[target.name]
            by_torch = filler.sends and on_one and broadcast.travels(target.value, shape.dtype)
            if by_torch and target.module is not None and id(target.module) not in with_extra:
                _, names = by_module.setdefault(id(target.module), (target.module, []))
                names.append((target.key.rpartition(".")[2], filler.contents.tensors.get(key)))
            else:
                filler.fill(key, shape, local_shards(target.value, target.name))
    if filler.sends:
        broadcast.send_model(list(by_module.values()), filler.reader)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


# The optimizer --------------------------------------------------------------------------------------------------------

State = dict[int, dict[Any, Any]]
"""By the `id` of the parameter, as `Optimizer.state` has it by the parameter."""


def fill_state(
    saved: Iterable[tuple[Any, Any, Mapping[Path, Any]]], filler: Filler, optimizer: torch.optim.Optimizer | None = None
) -> State:
    """Return the state of parameters, each given with its name in the checkpoint and its state there. What is sent goes
    to each rank as its shards if it is sharded, together if it is small, and else in tiles."""
    # A model that is filled without an optimizer, as by the mesh engine, has states of none.
    saved_optimizer = filler.contents.optimizer
    apart = saved_optimizer.apart if saved_optimizer is not None else ()
    lists = saved_optimizer.lists if saved_optimizer is not None else {}
    result: State = {}
    small: list[OutgoingTensor] = []
    shares: list[OutgoingTensor] = []
    by_cpu = filler.sends and collectives.sending_device().type == "cpu"
    alone: list[tuple[Path, OutgoingTensor]] = []
    # Memory first: a rank that has none left must not leave the others waiting for it.
    with collectives.together():
        for parameter, name, state in saved:
            values = result[id(parameter)] = {}
            for below, value in state.items():
                if isinstance(value, Shape):
                    key, shape = ("optimizer", name, *below), value
                    current = None if filler.sends else _now(optimizer, parameter, below)
                    value = allocate(parameter, shape, current, apart=len(below) > 1 and below[0] in apart)
                    shards = local_shards(value, f"{name}.{below[-1]}")
                    outgoing = OutgoingTensor(shape, shards, filler.contents.tensors.get(key))
                    if by_cpu and broadcast.is_sharded(value):
                        shares.append(outgoing)
                    elif filler.sends and not broadcast.is_sharded(value) and prod(shape.sizes) <= _SMALL:
                        small.append(outgoing)
                    else:
                        alone.append((key, outgoing))
                put(values, below, value)
            with_lists(values, lists.get(name, ()))
    with filler.together():
        for key, outgoing in alone:
            filler.fill(key, outgoing.shape, outgoing.shards)
    if filler.sends:
        broadcast.send_small(small, filler.reader)
        broadcast.send_shares(shares, filler.reader)
    return result


def _now(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter, below: Path) -> Any:
    """Return the tensor that the optimizer has at this path, if it has stepped."""
    value: Any = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    for key in below:
        if isinstance(value, list):
            value = dict(enumerate(value))
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, torch.Tensor) else None


def allocate(parameter: Any, saved: Shape, current: Any = None, *, apart: bool = False) -> Any:
    """Return memory for one tensor of a parameter's state: placed like `current`, else like the parameter if it has its
    shape and is not one `apart`, else replicated, as `step` is."""
    dtype = getattr(torch, saved.dtype)
    if isinstance(current, DTensor) and tuple(current.shape) == saved.sizes:
        return like(current, dtype)
    if tuple(parameter.size()) == saved.sizes and saved.sizes and not apart:
        return like(parameter, dtype)
    return empty(saved.sizes, dtype)


def _set_state(
    optimizer: torch.optim.Optimizer, matches: Sequence[GroupMatch], state: State, as_saved: set[int], path: str
) -> None:
    """Load state and hyper-parameters through `Optimizer.load_state_dict`, which casts and moves them, but keep the
    dtypes of state of parameters in `as_saved`, which have the checkpoint's. Raises UsageError for other state."""
    numbers: dict[int, int] = {}
    parameters = [parameter for one in matches for parameter in one.group["params"]]
    for parameter in parameters:
        numbers.setdefault(id(parameter), len(numbers))
    groups = [group_of(one, [numbers[id(p)] for p in one.group["params"]]) for one in matches]
    contents = {"state": {numbers[key]: value for key, value in state.items()}, "param_groups": groups}
    hand_over(optimizer, contents, path)
    for parameter in parameters:
        if id(parameter) in as_saved:
            keep_dtypes(optimizer, parameter, state.get(id(parameter), {}))


def hand_over(optimizer: torch.optim.Optimizer, contents: dict[str, Any], path: str) -> None:
    """Call `Optimizer.load_state_dict`. Raises UsageError for state of another optimizer."""
    try:
        type(optimizer).load_state_dict(optimizer, contents)
    except CkptError:
        raise
    except (KeyError, TypeError, AttributeError) as error:
        kept = sorted({str(key) for value in contents["state"].values() for key in value})
        raise UsageError(
            f"`{path}`: the state there ({', '.join(kept)}) is not of an {type(optimizer).__name__}: "
            f"{type(error).__name__}: {error}",
            hint="make the optimizer as in the run that saved it, or load the model alone",
        ) from None
    except Exception as error:
        raise UsageError(
            f"`{path}`: {type(optimizer).__name__}.load_state_dict failed: {type(error).__name__}: {error}",
            hint="it is the optimizer's own method, or one of its hooks; nothing was changed",
        ) from error


def undo(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that gives an optimizer back the state and the groups that it has now."""
    state, groups = optimizer.state, optimizer.param_groups
    dicts = [state, *(of for of in state.values() if isinstance(of, dict)), *groups]
    before = [(one, dict(one)) for one in dicts]
    listed = list(groups)

    def restore() -> None:
        optimizer.state, optimizer.param_groups = state, groups
        groups[:] = listed
        for one, items in before:
            one.clear()
            one.update(items)

    return restore


def is_as_saved(parameter: Any, saved: Shape) -> bool:
    """Return whether a parameter has the dtype that it has in the checkpoint."""
    return str(parameter.dtype).removeprefix("torch.") == saved.dtype


def keep_dtypes(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, loaded: dict[Any, Any]) -> None:
    """Undo the cast of `Optimizer.load_state_dict` for state of another dtype than its parameter, such as a float32
    copy of a bfloat16 one. An optimizer with its own method is left as it is."""
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and parameter in optimizer.state:
        optimizer.state[parameter] = _uncast(optimizer.state[parameter], loaded)


def _uncast(current: Any, loaded: Any) -> Any:
    if isinstance(current, dict) and isinstance(loaded, dict):
        return {key: _uncast(value, loaded[key]) if key in loaded else value for key, value in current.items()}
    if isinstance(current, list) and isinstance(loaded, list):
        return [_uncast(*pair) for pair in zip(current, loaded, strict=True)]
    both = isinstance(current, torch.Tensor) and isinstance(loaded, torch.Tensor) and current.is_floating_point()
    is_cut_short = both and loaded.is_floating_point() and current.dtype.itemsize < loaded.dtype.itemsize
    return loaded.to(current.device) if is_cut_short else current


def group_of(matches: GroupMatch, params: list[Any]) -> dict[str, Any]:
    """Return the checkpoint's hyper-parameters over those that only the optimizer has. Lists become tuples where the
    optimizer has one, such as `betas`: a run that torch loaded by broadcast has lists."""
    result = {key: value for key, value in matches.group.items() if key != "params"}
    for key, value in matches.saved.values.items():
        if key != "param_names" or key not in result:
            is_tuple = isinstance(result.get(key), tuple) and isinstance(value, list)
            result[key] = tuple(value) if is_tuple else value
    return {**result, "params": params}
