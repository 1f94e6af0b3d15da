"""torchtitan: one DCP directory, to read and to resume from.

    step-10/{.metadata, __R_0.distcp}          keys of the model at the root, beside them
        optimizer.state.<name>.exp_avg  optimizer.param_groups.<name>.lr  lr_scheduler.*
        train_state.{step, ntokens_seen}  dataloader.{dp_rank_R, world_size}
    step-10/{sharded/, model-*.safetensors}    the last step, for transformers

Upstream: torchtitan `components/checkpoint.py` and `trainer.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue
from ckpttool.producers.components import DCP_FILE, DCP_FILES, Constant, Pattern, Producer, WritableLayout

if TYPE_CHECKING:
    from ckpttool.producers.arrange import LayoutBuilder
    from ckpttool.producers.writer import OutputLayout

# Reading --------------------------------------------------------------------------------------------------------------


def _confirm(catalogue: Catalogue) -> bool:
    """Return whether a model lies at the root with its optimizer beside it; one alone may be anybody's."""
    roots = {str(path[0]).partition(".")[0] for path in catalogue.entries if path}
    return "model" not in roots and ("train_state" in roots or {"optimizer", "lr_scheduler"} <= roots)


# Writing --------------------------------------------------------------------------------------------------------------


def _write(builder: LayoutBuilder) -> OutputLayout:
    optimizer = builder.first("optimizer")
    constants = _train_state(builder, training=optimizer is not None)
    component = builder.component("", "dcp", constants=constants)
    for kind, root in (("model", ()), ("optimizer", ("optimizer",)), ("scheduler", ("lr_scheduler",))):
        builder.add_part_to(component, builder.first(kind), root)
    for entry in list(builder.remaining()):
        is_loader = entry.part.root == ("dataloader",) and re.fullmatch(r"dp_rank_\d+|world_size", str(entry.path[-1]))
        if entry.path[:1] == ("train_state",) or is_loader:
            builder.add(entry, component, entry.path)
    if optimizer is not None and not builder.parts("dataloader"):
        builder.notes.append(
            'no state of torchtitan\'s data loader: set `exclude_from_loading = ["dataloader"]` of its checkpoint'
        )
    return builder.finish("torchtitan stores no such value")


def _train_state(builder: LayoutBuilder, *, training: bool) -> list[Constant]:
    """Return the step and the tokens seen, as tensors, unless the source has its own."""
    if not training:
        return []
    step = builder.step_or_name("torchtitan reads the step from `train_state`", "step-N")
    if builder.name != f"step-{step}":
        builder.notes.append(f"torchtitan finds a checkpoint by its name, which would be `step-{step}`")
    if any(path[:2] == ("train_state", "step") for path in builder.catalogue.entries):
        return []
    builder.fold_step(step)
    builder.notes.append(f"`train_state` is made with step {step} and no tokens seen")
    saved = Constant(("train_state", "step"), DTYPES["int32"], step.to_bytes(4, "little"))
    seen = Constant(("train_state", "ntokens_seen"), DTYPES["int64"], bytes(8))
    return [saved] if seen.path in builder.catalogue.entries else [saved, seen]


_FOR_TRANSFORMERS = r".*\.safetensors(\.index\.json)?|sharded/"
TORCHTITAN = Producer(
    "torchtitan",
    (rf"{DCP_FILE}|sharded/",),
    (DCP_FILES, Pattern(_FOR_TRANSFORMERS, kind="ignored")),
    folder=r"(step-)?\d+",
    whole=True,
    # It saves a step in one of the two: of both together, one is somebody's own.
    applies=lambda directory: not (directory.has(DCP_FILE) and directory.has(_FOR_TRANSFORMERS)),
    confirm=_confirm,
    writes=(WritableLayout("torchtitan", "flat", _write, chunked=True),),
)
