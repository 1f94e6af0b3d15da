"""DeepSpeed: a directory for each step, below a file that names the newest; to read and, universal, to resume from.

    latest                  text: global_step20
    global_step20/          what the format `deepspeed` reads
    latest_universal        text: global_step20_universal

The Trainer of transformers and accelerate have such directories in their own. Those of ZeRO 1, 2 and 3 are written for
the ranks that load them (`zero`), and universal ones, which DeepSpeed loads with `load_universal` on any number of
ranks. Of the latter, ZeRO 1 and 2 read `step.pt`, and `param_groups` of `optimizer_state.pt`; ZeRO 3
`optimizer_state_dict` in it, and model states under a name of their own.

Upstream: DeepSpeed 0.19 `checkpoint/universal_checkpoint.py`, `runtime/base_optimizer.py` and `runtime/zero/stage3.py`
(`load_hp_checkpoint_state_from_checkpoint_dir`).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Object, Part, Path, Tensor
from ckpttool.catalogue.values import Link, TorchSize, stub_type
from ckpttool.errors import LossError
from ckpttool.flat.zero_states import UNIVERSAL_VERSION
from ckpttool.formats.deepspeed.members import FILES, UNIVERSAL
from ckpttool.formats.deepspeed.reader import LAYOUT
from ckpttool.formats.deepspeed.writer import VERSION
from ckpttool.producers import zero
from ckpttool.producers.components import Constant, Pattern, Producer, WritableLayout
from ckpttool.text import some

if TYPE_CHECKING:
    from ckpttool.producers.arrange import LayoutBuilder
    from ckpttool.producers.writer import OutputLayout

_WEIGHTS = "mp_rank_00_model_states.pt"
_OF_ZERO_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_ADAM = {"exp_avg", "exp_avg_sq"}

# Writing --------------------------------------------------------------------------------------------------------------


def _write(builder: LayoutBuilder) -> OutputLayout:
    """Return a file for each parameter and each kind of its state, and two for all else."""
    model, optimizer = zero.trained_model(builder)
    groups, of_groups = zero.groups(builder, optimizer)
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
        builder.notes.append(f"{text}: they are those of the model that the script makes")
    if any(zero.EXPERT in name for name in shapes):
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
    if absent := sorted(trained - shapes.keys()):
        raise LossError(f"the optimizer trains {some(absent)}, which the model does not have", tensor=absent[0])
    return shapes, shared


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
    values: dict[str, Any] = {"param_groups": numbered, "ds_version": VERSION}
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
    others = {
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        "dp_world_size": builder.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
    }
    remaining = [entry for entry in builder.remaining() if entry.path and entry.path[0] not in LAYOUT]
    for entry in [entry for entry in remaining if entry.path[0] in zero.OF_RANKS[1:]]:
        builder.fold(entry)
        remaining.remove(entry)
    scheduler = zero.schedule(builder)
    taken = {entry.path[0] for entry in remaining if entry.part != scheduler}
    if scheduler is not None:
        taken.add("lr_scheduler")
    values |= {key: value for key, value in others.items() if key not in taken}
    component = builder.component(_WEIGHTS, "torch", values=values)
    builder.add_part_to(component, scheduler, ("lr_scheduler",))
    for entry in remaining:
        if entry.part != scheduler and entry.part.kind not in ("model", "optimizer"):
            builder.add(entry, component, entry.path)
    builder.copy(_WEIGHTS, _OF_ZERO_3)


DEEPSPEED = Producer(
    "DeepSpeed",
    (FILES,),
    (Pattern(FILES, kind="ignored"), Pattern(rf"{UNIVERSAL}/", kind="ignored")),
    whole=True,
    writes=(WritableLayout("deepspeed:universal", "fqn", _write), *zero.LAYOUTS),
)
