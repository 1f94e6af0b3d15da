"""transformers: what the Trainer and `save_pretrained` leave, and what the Trainer resumes from.

    checkpoint-N/    model and optimizer as accelerate saves them, optimizer.pt scheduler.pt scaler.pt
                     trainer_state.json training_args.bin rng_state.pth rng_state_3.pth
    model directory  config.json beside model*.safetensors or pytorch_model*.bin

Upstream: transformers 5.23 `trainer.py` (`_load_from_checkpoint`, `_load_optimizer_and_scheduler`, `_load_rng_state`).
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.catalogue.entries import Catalogue
from ckpttool.formats import documents
from ckpttool.producers import accelerate
from ckpttool.producers.components import TEXTS, Layout, Pattern, Producer, WritableLayout
from ckpttool.serialization.directory import Directory

if TYPE_CHECKING:
    from ckpttool.producers.arrange import LayoutBuilder
    from ckpttool.producers.writer import OutputLayout

# Reading --------------------------------------------------------------------------------------------------------------

# The output directory of the Trainer has its last model too, beside the checkpoints.
_CHECKPOINT = r"checkpoint-\d+/"
_TRAINER = (
    *accelerate.STATE,
    Pattern(r"rng_state_(?P<rank>\d+)\.pth", "rng", "per rank"),
    Pattern(r"rng_state\.pth", "rng"),
    Pattern(r"trainer_state\.json", "trainer_state", "json"),
    Pattern(r"training_args\.bin", "training_args"),
    *accelerate.REST,
    Pattern(_CHECKPOINT, kind="ignored"),
)
# Its weights are told by what they hold, as in any directory.
_PRETRAINED = (
    Pattern(rf"training_args\.bin|(?!.*\.index\.json$){TEXTS.pattern}", kind="asset"),
    Pattern(_CHECKPOINT, kind="ignored"),
)


def _require_files(directory: Directory, layout: Layout) -> None:
    accelerate.prefer_deepspeed(directory, layout)
    if directory.has(r"rng_state_0\.pth") and not directory.has(r"rng_state_[1-9]\d*\.pth"):
        layout.missing.append("`rng_state_1.pth` is missing: one process alone saves `rng_state.pth`")


# Writing --------------------------------------------------------------------------------------------------------------

# The Trainer fails without these: a batch size, which it compares with its own to warn, and the state of its control,
# which it updates when it saves. Every other value has a default.
_CONTROL = dict.fromkeys(
    ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"), False
)
_REQUIRED = {
    "train_batch_size": 0,
    "log_history": [],
    "stateful_callbacks": {"TrainerControl": {"args": _CONTROL, "attributes": {}}},
}
_RNG = {"python": "python", "numpy": "numpy", "torch": "cpu"}
_OWN_RNG = re.compile(r"cuda|npu|hpu|mlu|musa|xla")


_FILES: accelerate.Files = (("model", "model.safetensors", "safetensors"), ("optimizer", "optimizer.pt", "torch"))


def _write(builder: LayoutBuilder, files: accelerate.Files) -> OutputLayout:
    """Return the model and the optimizer in these files, and the rest as the Trainer saves it."""
    accelerate.add_files(builder, (*files, ("scheduler", "scheduler.pt", "torch")), limit=1)
    builder.add_scaler()
    for entry in [e for e in builder.remaining() if e.path == ("training_args",)]:
        builder.add(entry, builder.component("training_args.bin", "torch", entry.path), entry.path)
    _write_state(builder)
    name = "rng_state.pth" if builder.world_size == 1 else "rng_state_{rank}.pth"
    builder.add_generator_files(name, _RNG, _OWN_RNG)
    return builder.finish("the Trainer stores no such value")


def _write_state(builder: LayoutBuilder) -> None:
    """Add `trainer_state.json`: that of the source, or the least that the Trainer needs. It skips as many batches of
    the first epochs as the step says."""
    entries = [e for e in builder.remaining() if e.part.kind == "progress" and e.path[:1] == ("trainer_state",)]
    step = next((builder.integer(e) for e in entries if e.path[1:] == ("global_step",)), None)
    if step is not None:
        component = builder.component("trainer_state.json", documents.JSON, ("trainer_state",))
        for entry in entries:
            builder.add(entry, component, entry.path)
    else:
        step = builder.step_or_name("the Trainer reads the step from `trainer_state.json`", "checkpoint-N")
        builder.component(
            "trainer_state.json", documents.JSON, ("trainer_state",), values={"global_step": step, **_REQUIRED}
        )
        builder.notes.append(
            f"`trainer_state.json` is made with step {step} and no history; other values are the Trainer's defaults, "
            "such as 500 for `logging_steps`, `eval_steps` and `save_steps`"
        )
    builder.fold_step(step)
    if builder.name != f"checkpoint-{step}":
        builder.notes.append(f"the Trainer finds the newest checkpoint by its name, which would be `checkpoint-{step}`")


_WHOLE = WritableLayout(
    "trainer", "id", partial(_write, files=_FILES), splits=True, ordered=True
)  # one process, or DDP
_SHARDED = WritableLayout(
    "trainer:sharded", "fqn", partial(_write, files=accelerate.OF_SHARDED), chunked=True
)  # FSDP with SHARDED_STATE_DICT


def _choose(source: Catalogue, to_world: int | None) -> WritableLayout:
    """Return the layout of the source if the Trainer saved it; else whole tensors."""
    is_sharded = accelerate.was_saved_as(source, r"pytorch_model_fsdp_\d+/")
    return _SHARDED if is_sharded and source.facts.get("producer") == TRAINER.name else _WHOLE


TRAINER = Producer(
    "transformers Trainer",
    (r"trainer_state\.json",),
    _TRAINER,
    expected=("model", "optimizer", "rng"),
    adjust=_require_files,
    writes=(_WHOLE, _SHARDED),
    choose=_choose,
    checkpoint_folders=_CHECKPOINT,
)
PRETRAINED = Producer(
    "transformers",
    (r"(adapter_)?config\.json", r".*\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin"),
    _PRETRAINED,
    applies=lambda directory: not directory.has(r"ckpttool\.json|(__\d+)?\.metadata"),
    adjust=accelerate.adjust_layout,
    checkpoint_folders=_CHECKPOINT,
)
