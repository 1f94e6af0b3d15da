"""DeepSpeed: a directory for each step, below a file that names the newest; to read and to resume from.

    latest                text: global_step20
    global_step20/        what the format `deepspeed` reads, for the ranks that load it; DST itself if that is its name
    latest_universal      text: global_step20_universal

The Trainer of transformers and accelerate have such directories in their own. Those of ZeRO 1, 2 and 3 have one flat
tensor of the parameters of a group, and one of each kind of their state, and DeepSpeed takes the elements by their
place: what a group's parameters do not have in common has no place there. Universal ones are loaded with
`load_universal` on any number of ranks: ZeRO 1 and 2 read `step.pt`, and `param_groups` of `optimizer_state.pt`; ZeRO 3
`optimizer_state_dict` in it, and model states under a name of their own.

Upstream: DeepSpeed 0.19 `checkpoint/universal_checkpoint.py`, `runtime/base_optimizer.py` and `runtime/zero/stage3.py`
(`load_hp_checkpoint_state_from_checkpoint_dir`).
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Container, Entry, Object, Part, Path, Tensor
from ckpttool.catalogue.flatten import stored, subtree
from ckpttool.catalogue.values import Link, Stub, TorchSize, stub_type
from ckpttool.errors import LossError, UsageError
from ckpttool.flat.zero_states import UNIVERSAL_VERSION
from ckpttool.formats import deepspeed
from ckpttool.formats.deepspeed import writer
from ckpttool.formats.deepspeed.members import FILES, UNIVERSAL
from ckpttool.formats.deepspeed.reader import LAYOUT
from ckpttool.layout import rechunk
from ckpttool.producers.components import Constant, Pattern, Producer, WritableLayout
from ckpttool.text import some

if TYPE_CHECKING:
    from ckpttool.catalogue.protocols import OpenOptions, Source
    from ckpttool.producers.arrange import LayoutBuilder
    from ckpttool.producers.writer import OutputLayout
    from ckpttool.serialization.directory import Directory

_WEIGHTS = "mp_rank_00_model_states.pt"
_OF_ZERO_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_ADAM = {"exp_avg", "exp_avg_sq"}

_State = dict[str, dict[str, Entry]]
"""The state of each parameter by its kind."""
_KEEPS = "`--producer deepspeed:universal` keeps the state of each parameter by itself"
_EXPERT = ".deepspeed_experts."
"""What the names of experts have in them."""
_ROOT_OF_GROUPS = ("optimizer", "param_groups")
_OF_RANKS = ("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions")
"""What says on which ranks a run was, and is written anew."""


def _trained_model(builder: LayoutBuilder) -> tuple[Part, Part]:
    """Return the model and the optimizer. Raises UsageError without one of them."""
    model, optimizer = builder.first("model"), builder.first("optimizer")
    if model is None or optimizer is None:
        absent = "model" if model is None else "optimizer"
        text = f"a checkpoint of DeepSpeed has a model and its optimizer, and there is no {absent}"
        raise UsageError(text, hint="convert a whole training state, without `--only`")
    of_optimizer = (e for e in builder.catalogue.entries.values() if e.part == optimizer and isinstance(e, Tensor))
    if masters := [e.name for e in of_optimizer if e.path[-1] == "fp32"]:
        text = f"{some(masters)} are weights beside those of the model, and DeepSpeed has one of each"
        raise LossError(text, hint="`--exclude '*.fp32'` leaves them out: training goes on from those of the model")
    return model, optimizer


def _schedule(builder: LayoutBuilder) -> Part | None:
    """Return the schedule that DeepSpeed itself steps. A script that runs under DeepSpeed may have another, its own."""
    own = [part for part in builder.parts("scheduler") if part.root == ("lr_scheduler",)]
    of_deepspeed = ("ds_version",) in builder.catalogue.entries
    return own[0] if own else None if of_deepspeed else builder.first("scheduler")


def _groups(builder: LayoutBuilder, part: Part) -> tuple[list[dict[str, Any]], list[Entry]]:
    """Return `param_groups` as a list, and its entries."""
    root = (*part.root, "param_groups")
    inside = [e for e in builder.catalogue.entries.values() if e.path[: len(root)] == root]
    if tensors := [entry.name for entry in inside if isinstance(entry, Tensor)]:
        text = f"{some(tensors)} is a tensor, and DeepSpeed has numbers there"
        raise LossError(text, hint="save the optimizer with numbers", tensor=tensors[0])
    found = subtree(builder.catalogue, root) or []
    groups = [group for group in found if isinstance(group, dict) and isinstance(group.get("params"), list)]
    if not groups or len(groups) != len(found):
        raise UsageError("the optimizer has no `param_groups` with the names of parameters", hint="save it with them")
    return groups, inside


def _write_zero(builder: LayoutBuilder, *, stage: int, bf16: bool) -> OutputLayout:
    """Return the files of all ranks as one component, and `latest` around them."""
    model, optimizer = _trained_model(builder)
    found, of_groups = _groups(builder, optimizer)
    state = _states(builder, optimizer)
    tensors = {e.fqn: e for e in builder.catalogue.tensors if e.part == model and not e.embedded}
    trained = [*_checked(builder, found, state, tensors)]
    buffers = _buffers(builder, stage, tensors, {name for names in trained for name in names})
    step = builder.step_or_name("DeepSpeed reads the step from `global_steps`", "global_stepN")
    is_tag = re.fullmatch(r"global_step\d+", builder.name) is not None
    bf16 = bf16 or _is_bf16(builder, [tensors[name] for names in trained for name in names])
    layout = writer.ZeroLayout(stage, bf16, buffers, not is_tag)
    form = replace(
        deepspeed.FORMAT, create=partial(writer.create, layout=layout), losses=partial(writer.losses, layout=layout)
    )
    tag, world = "" if is_tag else f"global_step{step}", builder.world_size
    taken = {entry.path[0] for entry in builder.catalogue.entries.values() if entry.path}.difference(_OF_RANKS)
    taken |= {"lr_scheduler"} if _schedule(builder) is not None else set()
    values = {key: value for key, value in _values(builder, step).items() if key not in taken}
    component = builder.component(tag, form, values=values, world=world)
    for entry in [e for e in builder.catalogue.entries.values() if e.part == model and not e.embedded]:
        below = entry.path[len(model.root) :]
        kept = len(below) < 2 or str(below[0]).endswith("_extra_state")
        builder.add(entry, component, ("model", *(below if kept else (entry.fqn,))), Part("model", ("model",)))
    part, depth = Part("optimizer", ("optimizer",)), len(optimizer.root)
    numbers = {n: i for i, n in enumerate(n for n, names in enumerate(trained) if names)}
    for entry in of_groups:
        _, number, *rest = entry.path[depth:]
        builder.fold(entry)
        if number in numbers:
            value = trained[number] if rest == ["params"] else stored(entry)
            builder.add_value(component, Object((*_ROOT_OF_GROUPS, numbers[number], *rest), value, part=part))
    for entry in (entry for kinds in state.values() for entry in kinds.values()):
        builder.add(entry, component, ("optimizer", *entry.path[depth:]), part)
    builder.add_part_to(component, _schedule(builder), ("lr_scheduler",))
    has_scaler = ("loss_scaler", "class") in builder.catalogue.entries
    for entry in [e for e in builder.remaining() if e.path and e.path[0] not in LAYOUT]:
        if entry.path[0] in _OF_RANKS:
            builder.fold(entry)
        elif entry.path[0] in ("zero", "loss_scaler") and (
            isinstance(entry, Tensor) or (entry.path[0] == "loss_scaler" and not has_scaler)
        ):
            builder.lose(entry, "ZeRO has numbers there, and those of a loss scaler of its own")
        elif entry.part.kind not in ("model", "optimizer"):
            builder.add(entry, component, entry.path)
    if stage == 3 and builder.parts("scaler") and not has_scaler:
        builder.notes.append("the gradient scaler is in `client_state`: ZeRO 3 of DeepSpeed starts with a scale of 1")
    text = "DeepSpeed takes the elements by their place: the groups of its optimizer, and the parameters in each,"
    builder.notes.append(f"{text} have to be those of the checkpoint, in the same order")
    output = builder.finish("DeepSpeed has another value of that name")
    output.catalogue.containers[_ROOT_OF_GROUPS] = Container("list")
    return output


def _values(builder: LayoutBuilder, step: int) -> dict[str, Any]:
    """Return what DeepSpeed has in each checkpoint, of a source that has none of it."""
    ranks = (builder.world_size, 1, {"pp_degree": 1, "tp_degree": 1})
    return {
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        **dict(zip(_OF_RANKS, ranks, strict=True)),
        "ds_config": {},
        "ds_version": writer.VERSION,
    }


# What has a place in flat tensors -------------------------------------------------------------------------------------


def _states(builder: LayoutBuilder, part: Part) -> _State:
    """Return the state of each parameter; what else an optimizer has, but for its groups, is lost."""
    depth, state = len(part.root), _State()
    for entry in [e for e in builder.catalogue.entries.values() if e.part == part and not e.embedded]:
        below = entry.path[depth:]
        if below[0] == "state" and len(below) == 3:
            state.setdefault(str(below[1]), {})[str(below[2])] = entry
        elif below == ("state",) and isinstance(entry, Object) and entry.value == {}:
            builder.fold(entry)
        elif below[0] != "param_groups":
            builder.lose(entry, "ZeRO has the state of each parameter, and groups of them")
    return state


def _checked(
    builder: LayoutBuilder, found: list[dict[str, Any]], state: _State, tensors: dict[str, Tensor]
) -> Iterator[list[str]]:
    """Yield the parameters of each group that are trained. Raises LossError for what they do not have in common."""
    frozen: list[str] = []
    for number, group in enumerate(found):
        names = [name for name in group["params"] if name in state] or group["params"]
        frozen += [name for name in group["params"] if name not in names]
        _check_there(group["params"], tensors)
        if experts := [name for name in names if _EXPERT in name]:
            text = f"{some(experts)}: experts have files and groups of ranks of their own, which are not written"
            raise LossError(text, hint=_KEEPS, tensor=experts[0])
        if empty := [name for name in names if not tensors[name].numel]:
            raise LossError(f"{some(empty)} has no elements, and ZeRO does not train it", hint=_KEEPS)
        if not names:
            text = f"group {number} of the optimizer has no parameters, and is left out: DeepSpeed has no such group"
            builder.notes.append(text)
        _check_alike("weights", number, {name: tensors[name] for name in names})
        for kind in dict.fromkeys(kind for name in names for kind in state.get(name, {})):
            _check_state(builder, number, kind, {name: state.get(name, {}).get(kind) for name in names}, tensors)
        yield names
    every = {name for group in found for name in group["params"]}
    for entry in (e for name, kinds in state.items() if name not in every for e in kinds.values()):
        builder.lose(entry, "it belongs to no parameter of a group")
    if frozen:
        text = f"no optimizer state of {some(frozen)}: written as frozen, which DeepSpeed leaves out of its groups"
        builder.notes.append(text)


def _check_alike(what: str, number: int, entries: dict[str, Tensor]) -> None:
    dtypes = {entry.dtype.name: name for name, entry in entries.items()}
    if len(dtypes) > 1:
        (one, a), (other, b), *_ = dtypes.items()
        text = f"the {what} of group {number} have one dtype with ZeRO, and `{a}` has {one}, `{b}` {other}"
        raise LossError(text, hint="`--dtype` casts them: `--dtype 'PATTERN=float32'`", tensor=b)


def _check_state(
    builder: LayoutBuilder, number: int, kind: str, entries: dict[str, Entry | None], tensors: dict[str, Tensor]
) -> None:
    """Raise LossError unless a kind of state is of each element of all parameters of a group, or the same for all."""
    present = {name: entry for name, entry in entries.items() if entry is not None}
    if absent := [name for name in entries if name not in present]:
        text = f"{some(absent)} of group {number} has no `{kind}`, which others of the group have"
        raise LossError(f"{text}: ZeRO has one tensor of all", hint=_KEEPS, tensor=absent[0])
    whole = {n: e for n, e in present.items() if isinstance(e, Tensor) and e.shape == tensors[n].shape}
    if kind != "step" and len(whole) == len(present):
        _check_alike(f"`{kind}`", number, whole)
        return
    first, values = next(iter(present)), dict[Path, Any]()
    for name, entry in present.items():
        path, is_number = entry.path, False
        if isinstance(entry, Tensor):
            path = entry.alias or path
            if path not in values:
                values[path] = (entry.dtype, entry.shape, builder.integer(entry))
            is_number = values[path][2] is not None
        else:
            values[path], is_number = entry.value, not isinstance(entry.value, (dict, list, tuple, Stub))
        if not is_number:
            text = f"`{kind}` of `{name}` is neither of each element nor one integer, and ZeRO has no place for it"
            raise LossError(text, hint=_KEEPS, tensor=name)
        if values[path] != next(iter(values.values())):
            text = f"`{kind}` of group {number} is one number with ZeRO, and those of `{first}` and `{name}` differ"
            raise LossError(text, hint=_KEEPS, tensor=name)


def _buffers(builder: LayoutBuilder, stage: int, tensors: dict[str, Tensor], trained: set[str]) -> set[str]:
    """Return the names of the tensors that are not trained and no parameters. ZeRO 1 and 2 load a frozen parameter from
    wherever it is; what else may be one is written as one. ZeRO 3 has pieces of parameters, and buffers whole."""
    known = builder.catalogue.facts.get("buffers")
    tied = {builder.catalogue.first(tensors[name]).path for name in trained}
    others = {n: t for n, t in tensors.items() if n not in trained and builder.catalogue.first(t).path not in tied}
    if known is not None:
        return {name for name, tensor in others.items() if (tensor.origin or tensor).path[-1] in known}
    if stage < 3:
        return {name for name, tensor in others.items() if tensor.dtype.kind != "float"}
    parameters = rechunk.sharded([*builder.catalogue.tensors], untrained=True)
    buffers = {name for name, tensor in others.items() if tensor.path not in parameters}
    if unsure := [name for name in others if name in buffers and others[name].dtype.kind == "float"]:
        text = f"{some(unsure)}: taken for buffers, which ZeRO 3 does not partition"
        how = "`ckpttool reshard SRC DST --to-world 2 --shard NAME` before makes a frozen parameter of one"
        builder.notes.append(f"{text}; {how}")
    return buffers


def _is_bf16(builder: LayoutBuilder, weights: Iterable[Tensor]) -> bool:
    """Return whether the run is one in bfloat16, by its configuration or its weights: its files have other names."""
    entries = builder.catalogue.entries
    config = [entry for path, entry in entries.items() if path[:1] == ("ds_config",) and len(path) > 1]
    if config:
        enabled = [e for e in config if e.path[1:] in (("bf16", "enabled"), ("bfloat16", "enabled"))]
        return any(isinstance(entry, Object) and entry.value is True for entry in enabled)
    is_bf16 = {tensor.dtype.name for tensor in weights} == {"bfloat16"}
    if not is_bf16:
        text = "nothing says what the run computes in, and the files have the names of float32 and float16"
        builder.notes.append(f"{text}: with `bf16` in its configuration, take `--producer deepspeed:zeroN-bf16`")
    return is_bf16


# Universal checkpoints ------------------------------------------------------------------------------------------------


def _write_universal(builder: LayoutBuilder) -> OutputLayout:
    """Return a file for each parameter and each kind of its state, and two for all else."""
    model, optimizer = _trained_model(builder)
    groups, of_groups = _groups(builder, optimizer)
    for entry in of_groups:
        builder.fold(entry)
    shapes, shared = _add_model(builder, model, groups)
    step = _add_state(builder, optimizer, groups)
    _add_common(builder, groups, step)
    _add_rest(builder, groups, shapes, shared)
    if any({**group, "params": []} != {**groups[0], "params": []} for group in groups):
        text = "ZeRO 3 of DeepSpeed takes the hyper-parameters of the first group for all groups, which differ here"
        builder.notes.append(f"{text}: set them again after loading; ZeRO 1 and 2 take those of each")
    untrained = [name for name in shapes if name not in {n for group in groups for n in group["params"]}]
    untrained = [name for name in untrained if name not in shared]
    if untrained:
        text = f"DeepSpeed loads no buffers and frozen parameters from a universal checkpoint, {some(untrained)}"
        builder.notes.append(f"{text}: they are taken from the model that the script builds")
    if any(_EXPERT in name for name in shapes):
        text = "each rank of DeepSpeed calls its experts 0, 1, ..., and takes those of the first rank from a universal"
        builder.notes.append(f"{text} checkpoint: load it with `ep_size=1`, where each rank has all experts")
    parent = "`engine.load_checkpoint(DIR, tag=NAME)`, or a file `latest_universal` beside it with its name in it"
    builder.notes.append(f'DeepSpeed loads it with `"checkpoint": {{"load_universal": true}}` and {parent}')
    return builder.finish("DeepSpeed has another value of that name")


def _add_model(
    builder: LayoutBuilder, part: Part, groups: list[dict[str, Any]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Add the weights, and return the shapes of all tensors and which are tied to another."""
    catalogue, shapes, shared = builder.catalogue, dict[str, tuple[int, ...]](), dict[str, str]()
    trained = {name for group in groups for name in group["params"]}
    by_path: dict[Path, str] = {}
    for entry in [e for e in catalogue.tensors if e.part == part and not e.embedded]:
        name = entry.fqn
        shapes[name], by_path[entry.path] = entry.shape, name
        if entry.alias is not None and name not in trained and entry.alias in by_path:
            shared[name] = by_path[entry.alias]
            builder.fold(entry)
        elif _is_folder(name):
            _add_file(builder, entry, name, "fp32", ("model", name), "model", trained=name in trained)
        else:
            builder.lose(entry, "DeepSpeed has a folder of this name, which cannot be")
    _check_there(sorted(trained), shapes)
    return shapes, shared


def _check_there(trained: Iterable[str], model: Collection[str]) -> None:
    """Raise LossError for names of the optimizer that are none of the model's."""
    if absent := [name for name in trained if name not in model]:
        text = f"the optimizer trains {some(absent)}, which the model does not have"
        raise LossError(text, hint="model and optimizer are of two runs, or `--exclude` took it", tensor=absent[0])


def _is_folder(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and name not in (".", "..") and len(name) < 250


def _add_file(
    builder: LayoutBuilder, entry: Tensor, name: str, kind: str, path: Path, part: str, *, trained: bool = True
) -> None:
    # The dimension that tensor parallelism cuts, as `ds_to_universal` says of what the optimizer has.
    values = {"cat_dim": 0} if trained else {}
    component = builder.component(f"{UNIVERSAL}/{name}/{kind}.pt", "torch", path, key=("param",), values=values)
    builder.add(entry, component, path, Part(part, path[:1]))


def _add_state(builder: LayoutBuilder, part: Part, groups: list[dict[str, Any]]) -> int | None:
    """Add the state of each parameter, and return its step."""
    trained = {name for group in groups for name in group["params"]}
    depth, step, kinds = len(part.root), None, set[str]()
    for entry in [e for e in builder.catalogue.entries.values() if e.part == part and not e.embedded]:
        section, name, kind = (*entry.path[depth : depth + 3], "", "", "")[:3]
        if section != "state" or name not in trained or len(entry.path) != depth + 3 or not _is_folder(str(name)):
            continue
        path = ("optimizer", "state", name, kind)
        if kind == "step":
            step = builder.integer(entry) if step is None else step
            component = builder.component(f"{UNIVERSAL}/{name}/step.pt", "torch", path)
            builder.add(entry, component, path, Part("optimizer", path[:1]))
        elif isinstance(entry, Tensor) and entry.shape:
            kinds.add(str(kind))
            _add_file(builder, entry, str(name), str(kind), path, "optimizer")
        else:
            builder.lose(entry, "DeepSpeed has optimizer state of each element, and `step`")
    if kinds != _ADAM:
        text = f"the optimizer's state is {some(sorted(kinds)) if kinds else 'empty'}"
        builder.notes.append(f"{text}: ZeRO 3 of DeepSpeed loads `exp_avg` and `exp_avg_sq` alone")
    return step


def _add_common(builder: LayoutBuilder, groups: list[dict[str, Any]], step: int | None) -> None:
    """Add `optimizer_state.pt`: hyper-parameters by group, and what ZeRO keeps beside them."""
    numbered = [{**group, "params": [number]} for number, group in enumerate(groups)]
    values: dict[str, Any] = {"param_groups": numbered, "ds_version": writer.VERSION}
    state: dict[int, Any] = {}
    constants = []
    if step is not None:
        constants.append(Constant(("step",), DTYPES["float32"], struct.pack("<f", step)))
        state[0] = {"step": Link(("step",))}
    values["optimizer_state_dict"] = {"state": state, "param_groups": numbered}
    scaler: dict[str, Any] = {}
    named = ("loss_scaler", "class") in builder.catalogue.entries
    for entry in list(builder.remaining()):
        if entry.path[:1] == ("loss_scaler",) and not named:
            builder.lose(entry, "ZeRO has a loss scaler of its own")
        elif entry.path[:1] == ("loss_scaler",) and len(entry.path) == 2 and isinstance(entry, Object):
            scaler[str(entry.path[1])] = entry.value
            builder.fold(entry)
        elif entry.path[:1] == ("zero",) and len(entry.path) == 2 and isinstance(entry, Object):
            values[str(entry.path[1])] = entry.value
            builder.fold(entry)
    module, _, name = str(scaler.pop("class", "")).rpartition(".")
    if module.startswith("deepspeed."):
        kind = stub_type(module, name)
        values["loss_scaler"] = kind.__new__(kind)
        values["loss_scaler"].state = [scaler]
    builder.component(f"{UNIVERSAL}/optimizer_state.pt", "torch", values=values, constants=constants)


def _add_rest(
    builder: LayoutBuilder, groups: list[dict[str, Any]], shapes: dict[str, tuple[int, ...]], shared: dict[str, str]
) -> None:
    """Add model states without a model: what is in which group, counters, and what DeepSpeed hands to the script."""
    step = builder.step_or_name("DeepSpeed reads the step from `global_steps`", "global_stepN_universal")
    values: dict[str, Any] = {
        "module": OrderedDict.fromkeys(shapes),  # names in their order, no values: those are in `zero`
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, TorchSize(shapes[n])) for n in group["params"]) for group in groups],
        "frozen_param_shapes": None,
        "shared_params": shared,
        "frozen_param_fragments": None,
    }
    remaining = [entry for entry in builder.remaining() if entry.path and entry.path[0] not in LAYOUT]
    for entry in [entry for entry in remaining if entry.path[0] in _OF_RANKS[1:]]:
        builder.fold(entry)
        remaining.remove(entry)
    scheduler = _schedule(builder)
    taken = {entry.path[0] for entry in remaining if entry.part != scheduler}
    if scheduler is not None:
        taken.add("lr_scheduler")
    values |= {key: value for key, value in _values(builder, step).items() if key not in taken}
    if "universal_checkpoint_info" not in taken:
        values["universal_checkpoint_info"] = {"universal_checkpoint_version": UNIVERSAL_VERSION}
    component = builder.component(_WEIGHTS, "torch", values=values)
    builder.add_part_to(component, scheduler, ("lr_scheduler",))
    for entry in remaining:
        if entry.part != scheduler and entry.part.kind not in ("model", "optimizer"):
            builder.add(entry, component, entry.path)
    builder.copy(_WEIGHTS, _OF_ZERO_3)


# The row --------------------------------------------------------------------------------------------------------------


def _open(directory: Directory, options: OpenOptions) -> Source:
    """Open what was written: a tag, or the directory around it."""
    inside = "latest" in directory
    source: Source = deepspeed.FORMAT.open(directory.at(directory.folders[0]) if inside else directory.path, options)
    return source


_OF_ZERO = tuple(
    WritableLayout(
        f"deepspeed:zero{stage}{suffix}", "fqn", partial(_write_zero, stage=stage, bf16=bool(suffix)), open=_open
    )
    for stage in (1, 2, 3)
    for suffix in ("", "-bf16")
)
DEEPSPEED = Producer(
    "DeepSpeed",
    (FILES,),
    (Pattern(FILES, kind="ignored"), Pattern(rf"{UNIVERSAL}/", kind="ignored")),
    whole=True,
    writes=(WritableLayout("deepspeed:universal", "fqn", _write_universal), *_OF_ZERO),
)
