"""accelerate: what `Accelerator.save_state` leaves, and what `load_state` resumes from.

    model.safetensors pytorch_model.bin pytorch_model_fsdp.bin      the model, whole
    pytorch_model_fsdp_0/ optimizer_0/                              DCP, keys under `model`, `optimizer`
    pytorch_model_fsdp_rank3.bin pytorch_model_fsdp_0_rank3.bin     LOCAL; SHARDED without DCP: one file per rank
    pytorch_model/ global_step20/ latest                            DeepSpeed; the latter of the Trainer
    optimizer.bin scheduler.bin sampler.bin dl_state_dict.bin scaler.pt custom_checkpoint_0.pkl random_states_3.pkl

The second model or optimizer has `_1` in its name. Beside LOCAL files the optimizer is saved through DCP, which has the
shapes of the parameters.

Upstream: accelerate 1.15 `checkpointing.py` (`load_accelerator_state`) and `utils/fsdp_utils.py` (`load_fsdp_model`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.catalogue.entries import Catalogue, Object, Part
from ckpttool.catalogue.values import stub_name
from ckpttool.producers.components import INDEXES, Layout, Pattern, Producer, WritableLayout
from ckpttool.serialization.directory import Directory

if TYPE_CHECKING:
    from ckpttool.producers.arrange import LayoutBuilder
    from ckpttool.producers.writer import OutputLayout

# Reading --------------------------------------------------------------------------------------------------------------

_I = r"(_(?P<i>\d+))?"
# The Trainer of transformers has the same files of these.
STATE = (
    Pattern(r"(global_step\d+|pytorch_model)/"),  # of DeepSpeed: model, optimizer and what is beside them
    Pattern(r"pytorch_model_(?P<n>\d+)/", "model_{n}"),
    Pattern(r"pytorch_model_fsdp_(?P<i>\d+)/", "model", key="model"),
    Pattern(rf"pytorch_model_fsdp{_I}\.bin", "model"),
    Pattern(rf"pytorch_model_fsdp{_I}_rank(?P<rank>\d+)\.bin", "model", "rank files", shapes_from="optimizer_{i}/"),
    Pattern(r"model\.safetensors\.index\.json", "model"),
    Pattern(rf"model{_I}\.safetensors", "model"),
    Pattern(r"model-\d+-of-(?P<count>\d+)\.safetensors", "model", "shard", unless=INDEXES[0]),
    Pattern(rf"pytorch_model{_I}\.bin", "model"),
    Pattern(r"pytorch_model-\d+-of-\d+\.bin", "model", "shard"),
    Pattern(r"pytorch_model\.bin\.index\.json", kind="ignored"),
    Pattern(r"adapter_model\.(safetensors|bin)", "model"),
    Pattern(r"optimizer_(?P<i>\d+)/", "optimizer", key="optimizer"),
    Pattern(rf"optimizer{_I}\.(bin|pt)", "optimizer"),
    Pattern(rf"optimizer{_I}_rank(?P<rank>\d+)\.bin", "optimizer", "rank files"),
)
REST = (Pattern(rf"scheduler{_I}\.(bin|pt)", "scheduler"), Pattern(r"scaler\.pt", "scaler"))


def prefer_deepspeed(directory: Directory, layout: Layout) -> None:
    """Take the weights in 16 bits beside a directory of DeepSpeed, which has the float32 ones, for a model of their own
    only if they are of another one."""
    if any(not component.root for component in layout.components):
        layout.components = [
            replace(one, root=(one.name,), spare=True) if one.root == ("model",) else one for one in layout.components
        ]


def adjust_layout(directory: Directory, layout: Layout) -> None:
    """Take the weights of DeepSpeed; and add the file to `missing` by which a directory is known to be the Trainer's,
    beside its generators. Those of accelerate have another name."""
    prefer_deepspeed(directory, layout)
    if directory.has(r"rng_state(_0)?\.pth") and not directory.has(r"random_states_\d+\.pkl"):
        layout.missing.append("`trainer_state.json` is missing: the Trainer saves it with its generators")


_PATTERNS = (
    *STATE,
    Pattern(rf"sampler{_I}\.bin", "sampler"),
    Pattern(rf"dl_state_dict{_I}\.bin", "dataloader"),
    Pattern(r"random_states_(?P<rank>\d+)\.pkl", "rng", "per rank"),
    Pattern(r"custom_checkpoint_(?P<n>\d+)\.pkl", "custom_checkpoint_{n}"),
    *REST,
)

# Writing --------------------------------------------------------------------------------------------------------------

_RNG = {"python": "random_state", "numpy": "numpy_random_seed", "torch": "torch_manual_seed"}
_OWN_RNG = re.compile(r"step|(torch|xm)_\w*seed")
Files = tuple[tuple[str, str, str], ...]
"""Parts by their kind, with the name of the file of each and its format; `{n}` is the number of the part, `{_n}` that
of another than the first."""
OF_SHARDED: Files = (("model", "pytorch_model_fsdp_{n}", "dcp"), ("optimizer", "optimizer_{n}", "dcp"))
_OPTIMIZER: Files = (("optimizer", "optimizer{_n}.bin", "torch"),)
_OF_FULL: Files = (("model", "pytorch_model_fsdp{_n}.bin", "torch"), *_OPTIMIZER)
_OF_DDP: Files = (("model", "model{_n}.safetensors", "safetensors"), *_OPTIMIZER)
_OF_UNTIED: Files = (("model", "pytorch_model{_n}.bin", "torch"), *_OPTIMIZER)


def add_files(builder: LayoutBuilder, files: Files, limit: int | None = None) -> None:
    """Add parts as files, or as folders of DCP, the first `limit` of each kind."""
    for kind, name, format in files:
        for n, part in [*builder.numbered(kind)][:limit]:
            of_number = f"_{n}" if n and "{" in name else ""
            key = (kind,) if format == "dcp" else ()
            builder.add_part(part, name.format(n=n, _n=of_number), format, (f"{kind}{of_number}",), key=key)


def _write(builder: LayoutBuilder, files: Files) -> OutputLayout:
    add_files(builder, files)
    return _write_rest(builder)


def _write_ddp(builder: LayoutBuilder) -> OutputLayout:
    ties_known = any(t.alias for t in builder.catalogue.tensors if t.part.kind == "model")
    # These formats do not store ties. `load_model` of safetensors refuses a tied tensor that is there under both names,
    # `load_state_dict` takes it.
    is_untied = builder.catalogue.format in ("dcp", "rankfiles") and not ties_known
    return _write(builder, _OF_UNTIED if is_untied else _OF_DDP)


def _write_rest(builder: LayoutBuilder) -> OutputLayout:
    add_files(builder, (("scheduler", "scheduler{_n}.bin", "torch"),))
    builder.add_scaler()
    loaders = [*builder.stateful_loaders()]
    for part in builder.parts("dataloader"):
        match = re.fullmatch(r"(sampler|dataloader)((_\d+)?)", str(part.root[-1])) if len(part.root) == 1 else None
        if match is not None and (part in loaders or (match[1] == "sampler" and _is_sampler(builder.catalogue, part))):
            stem = "sampler" if match[1] == "sampler" else "dl_state_dict"
            builder.add_part(part, f"{stem}{match[2]}.bin", "torch", part.root)
    others = [e for e in builder.remaining() if e.path and re.fullmatch(r"custom_checkpoint_\d+", str(e.path[0]))]
    for name in dict.fromkeys(str(e.path[0]) for e in others if e.part.kind == "other"):
        component = builder.component(f"{name}.pkl", "torch", (name,))
        for entry in (e for e in others if e.path[0] == name):
            builder.add(entry, component, entry.path)
    builder.add_generator_files("random_states_{rank}.pkl", _RNG, _OWN_RNG)
    return builder.finish("accelerate stores no such value")


def _is_sampler(catalogue: Catalogue, part: Part) -> bool:
    """Return whether this is the sampler of accelerate, an object in whose place no other one can stand."""
    entry = catalogue.entries.get(part.root)
    return isinstance(entry, Object) and (stub_name(entry.value) or "").startswith("accelerate.")


# FSDP with SHARDED_STATE_DICT, and with FULL_STATE_DICT.
_SHARDED = WritableLayout("accelerate:sharded", "fqn", partial(_write, files=OF_SHARDED), chunked=True)
_FULL = WritableLayout("accelerate:full", "fqn", partial(_write, files=_OF_FULL))
_DDP = WritableLayout("accelerate:ddp", "id", _write_ddp)  # one process, or DDP


def was_saved_as(source: Catalogue, pattern: str) -> bool:
    """Return whether the source has a component whose file or folder matches."""
    return any(re.fullmatch(pattern, str(component["path"])) for component in source.facts.get("mounted", ()))


def _choose(source: Catalogue, to_world: int | None) -> WritableLayout:
    """Return the layout of the source; else the one for FSDP when the source is sharded, or is to be."""
    if was_saved_as(source, r"pytorch_model_fsdp(_\d+)?\.bin") and to_world is None:
        return _FULL
    is_sharded = any(len(t.chunks) > 1 for t in source.tensors if not t.embedded)
    return _SHARDED if is_sharded or (to_world or 1) > 1 else _DDP


ACCELERATE = Producer(
    "accelerate",
    (r"random_states_\d+\.pkl|optimizer\.bin|pytorch_model_fsdp(_\d+)?(/|\.bin|_rank\d+\.bin)",),
    _PATTERNS,
    expected=("model", "optimizer", "rng"),
    adjust=adjust_layout,
    writes=(_SHARDED, _FULL, _DDP),
    choose=_choose,
)
