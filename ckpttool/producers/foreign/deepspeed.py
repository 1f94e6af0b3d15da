r"""Recognises checkpoints of DeepSpeed: ZeRO stages 0 to 3, and universal ones.

    latest                                             text: the name of the newest checkpoint
    global_step2/mp_rank_00_model_states.pt            weights; with ZeRO-3 zero_pp_rank_{dp}_mp_rank_00_model_states.pt
    global_step2/[bf16_]zero_pp_rank_{dp}_mp_rank_{mp}_optim_states.pt      what each rank has of the optimizer
    global_step2_universal/zero/{name}/fp32.pt exp_avg.pt exp_avg_sq.pt

Upstream: DeepSpeed 0.19 `runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`), `runtime/zero/stage3.py`,
`checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Object
from ckpttool.catalogue.values import TorchSize
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError
from ckpttool.producers.directory import Directory
from ckpttool.producers.foreign.recognition import Recognition, contents_of, ranks
from ckpttool.text import is_or_are, plural, some

_WEIGHTS = r"(zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt"
_OPTIMIZER = r"(bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
_EXPERT = r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"
_PIPELINE = r"layer_\d+-.*model_states\.pt"
_SHAPES_OF = ("param_shapes.", "frozen_param_shapes.")
_MAX_RANKS = 1 << 16
_LOOKING = "inspect, show and diff each file by its own name"


def recognise(directory: Directory) -> Recognition | None:
    """Return what a directory of DeepSpeed is, or the one that its `latest` names; None for any other directory."""
    if directory.has(_WEIGHTS):
        return _universal(directory) if "zero/" in directory else _zero(directory)
    newest = directory.text("latest") if "latest" in directory else ""
    inner = directory.folder(newest) if f"{newest}/" in directory else None
    if inner is None or not inner.has(_WEIGHTS):
        return None
    found = recognise(inner)
    assert found is not None
    return replace(found, details={"checkpoint": f"{newest}, of `latest`", **found.details})


def describe(catalogue: Catalogue) -> Recognition | None:
    """Return what one file of DeepSpeed is whose catalogue is open; None for any other file."""
    names = {path[0] for path in catalogue.entries if path}
    if not {"ds_version", "ds_config"} <= names:
        return None
    values = {entry.name: entry.value for entry in catalogue.objects if _is_descriptive(entry)}
    if "module" not in names:
        name = "file of DeepSpeed ZeRO, the optimizer state of one rank"
        return Recognition(name, str(values.get("ds_version", "")), can=(_LOOKING,), cannot=(_MERGE,))
    stage, shapes = _stage(values), _shapes(values, {t.name: t.shape for t in catalogue.tensors})
    absent = [e for e in catalogue.tensors if e.path[0] == "module" and shapes.get(e.fqn, e.shape) != e.shape]
    faults: tuple[CorruptError, ...] = ()
    if absent:
        weights = [tensor.name for tensor in absent]
        text = f"{plural(len(absent), 'weight')} of ZeRO-3 {is_or_are(absent)} in partitions, which "
        text += f"the `*_optim_states.pt` of all ranks have: {some(weights)}"
        hint = "merge them with DeepSpeed's own `zero_to_fp32.py`"
        faults = (CorruptError(text, hint=hint, tensor=weights[0], concerns=weights, needs="other ranks"),)
    return Recognition(
        f"file of DeepSpeed ZeRO-{stage}",
        str(values.get("ds_version", "")),
        _parallelism(values),
        sum(map(prod, shapes.values())) or None,
        can=(_LOOKING,) if absent else (_LOOKING, "convert the weights, as they were in training: `--only model`"),
        cannot=(_MERGE,),
        faults=faults,
    )


_MERGE = "merge the partitions of the ranks: DeepSpeed's own `zero_to_fp32.py` merges the weights into float32"


def _is_descriptive(entry: Object) -> bool:
    name = entry.name
    named = ("ds_version", "dp_world_size", "mp_world_size", "global_steps", "buffer_names")
    return name in named or name.startswith((*_SHAPES_OF, "shared_params.", "ds_config.zero_optimization."))


def _zero(directory: Directory) -> Recognition:
    weights = [*directory.matching(_WEIGHTS)]
    optimizer = [*directory.matching(_OPTIMIZER)]
    values: Mapping[str, Any] = {}
    tensors: Mapping[str, Ints] = {}
    broken: tuple[Warning, ...] = ()
    try:
        values, tensors = contents_of(directory.at(weights[0].string))
    except CkptError as error:
        broken = (Warning("damaged", f"damaged: {error.message}", file=weights[0].string),)
    stage = 3 if weights[0]["dp"] is not None else _stage(values) if optimizer else 0
    shapes = _shapes(values, tensors)
    first = directory.at(weights[0].string)
    command = f"`ckpttool convert {first} model.safetensors --only model`"
    hint = "merge the weights with DeepSpeed's own `zero_to_fp32.py`, which runs the pickles"
    can: tuple[str, ...] = (_LOOKING,)
    cannot: tuple[str, ...] = (_MERGE, "convert the optimizer")
    if stage < 3:
        hint = f"convert its weights, as they were in training: {command}"
        can += (f"convert the weights, as they were in training: {command}",)
    if not stage:
        cannot = ("open the directory: open its file",)
    details: dict[str, str | int] = {"files": f"{len(weights)} of weights, {len(optimizer)} of the optimizer"}
    if isinstance(steps := values.get("global_steps"), int):
        details["step"] = steps
    for what, pattern in (("experts", _EXPERT), ("pipeline layers", _PIPELINE)):
        if n := sum(1 for _ in directory.matching(pattern)):
            details[what] = plural(n, "file")
    if values.get("universal_checkpoint_info") is not None:
        details["universal info"] = "yes"
    return Recognition(
        f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed without ZeRO",
        str(values.get("ds_version", "")),
        _parallelism(values) or ranks(len(optimizer) or len(weights), "data-parallel"),
        sum(map(prod, shapes.values())) or None,
        details,
        can,
        cannot,
        hint,
        (*broken, *_missing(directory, values, stage)),
    )


def _universal(directory: Directory) -> Recognition:
    zero = directory.folder("zero")
    broken = [name for name in zero.folders if "fp32.pt" not in zero.folder(name)]
    weights = next(directory.matching(_WEIGHTS)).string
    values: Mapping[str, Any] = {}
    with suppress(CkptError):
        values = contents_of(directory.at(weights)).values
    text = f"{plural(len(broken), 'parameter')} without `fp32.pt`: {some(broken)}"
    return Recognition(
        "DeepSpeed universal",
        str(values.get("ds_version", "")),
        "for any number of ranks",
        sum(map(prod, _shapes(values).values())) or None,
        {"parameter folders": len(zero.folders)},
        ("inspect and show each `.pt` by its own name",),
        ("open `zero/` as one checkpoint: DeepSpeed loads it with `load_universal`",),
        f"open one of its files, such as `{directory.at(weights)}`",
        (Warning("missing-file", text),) if broken else (),
    )


def _stage(values: Mapping[str, Any]) -> int:
    stage = values.get("ds_config.zero_optimization.stage", 0)
    return stage if isinstance(stage, int) else 0


def _shapes(values: Mapping[str, Any], tensors: Mapping[str, Ints] = MappingProxyType({})) -> dict[str, Ints]:
    """Return the shapes of whole parameters; of those that the optimizer does not have, by `tensors` of the file."""
    shapes: dict[str, Ints] = {
        re.sub(r"^(frozen_)?param_shapes\.(\d+\.)?", "", name): tuple(value)
        for name, value in values.items()
        if name.startswith(_SHAPES_OF) and isinstance(value, TorchSize)
    }
    buffers = values.get("buffer_names")
    for name, shape in tensors.items():
        fqn = name.removeprefix("module.")
        is_buffer = isinstance(buffers, list) and fqn in buffers
        if fqn != name and fqn not in shapes and not is_buffer and f"shared_params.{fqn}" not in values:
            shapes[fqn] = shape
    return shapes


def _parallelism(values: Mapping[str, Any]) -> str:
    dp, mp = values.get("dp_world_size"), values.get("mp_world_size")
    if not isinstance(dp, int) or not isinstance(mp, int):
        return ""
    return ranks(dp, "data-parallel") + (f" x {ranks(mp, 'model-parallel')}" if mp > 1 else "")


def _missing(directory: Directory, values: Mapping[str, Any], stage: int) -> list[Warning]:
    dp, mp = values.get("dp_world_size"), values.get("mp_world_size")
    if not stage or not isinstance(dp, int) or not isinstance(mp, int) or dp * mp > _MAX_RANKS:
        return []
    warnings = []
    for what, pattern in (("weights", _WEIGHTS), ("optimizer", _OPTIMIZER)):
        present = {(int(m["dp"] or 0), int(m["mp"])) for m in directory.matching(pattern)}
        every = range(dp) if what == "optimizer" or stage == 3 else range(1)
        absent = [
            f"rank {i}" if mp == 1 else f"rank {i} of model-parallel rank {j}"
            for i in every
            for j in range(mp)
            if (i, j) not in present
        ]
        if absent:
            text = f"the {what} file of {some(absent)} {is_or_are(absent)} missing"
            warnings.append(Warning("missing-file", text))
        extra = sorted(place for place in present if place[0] not in every or place[1] >= mp)
        if extra:
            text = f"{plural(len(extra), 'file')} of the {what} from a save with more ranks"
            warnings.append(Warning("stale-file", text))
    return warnings
