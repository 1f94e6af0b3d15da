"""Samples of the package torch_checkpointing, the other backend of torchtitan's checkpoints.

It is not among the requirements of these scripts: `pip install --no-deps torch_checkpointing==0.1.1`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from runs import apart, make_folder, reference, require_same, rng_by_rank, settle, world
from runs_dcp import fsdp2_run
from sample import sample
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from training import STEPS, rng_state


def gather(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Stands for `_all_gather_pickled_data` of its metadata manager, which insists on CUDA tensors."""
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


@sample(
    "run/torch_checkpointing_w4",
    what="checkpoint folder of 4 FSDP2 ranks with `step-3/`: `model_R.pt`, `optimizer_R.pt`, `metadata.pkl`",
    trap="a torch.save file for each item and rank; shapes and placements are in one pickle of the package's own",
    writer="torch_checkpointing 0.1.1 `CheckpointManager.save`; the metadata are gathered on the CPU",
    load=None,
    world=4,
    needs="torch_checkpointing",
)
@sample(
    "run/torch_checkpointing_w2",
    what="checkpoint folder of 2 FSDP2 ranks with `step-3/`: `model_R.pt`, `optimizer_R.pt`, `metadata.pkl`",
    trap="a torch.save file for each item and rank; shapes and placements are in one pickle of the package's own",
    writer="torch_checkpointing 0.1.1 `CheckpointManager.save`; the metadata are gathered on the CPU",
    load=None,
    world=2,
    needs="torch_checkpointing",
)
def torch_checkpointing(folder: Path) -> Any:
    """The items are those of torchtitan/components/checkpointer/torch_checkpointing.py `_item_specs`."""
    import torch_checkpointing as package  # not installed everywhere: needed by this sample alone
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    run = fsdp2_run()
    notes = {
        "model": "step-3/model_R.pt, same names",
        "optim": "step-3/optimizer_R.pt, state.<name>.*, param_groups.<name>.<option> flattened",
        "scheduler": "step-3/lr_scheduler_R.pt",
        "step": "step-3/train_state_R.pt",
        "rng_by_rank": "step-3/rng_R.pt",
    }
    whole = reference(run, notes, scheduler=run.scheduler.state_dict())
    apart()
    whole["rng_by_rank"] = rng_by_rank()
    model, optim = get_state_dict(run.model, run.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    items = {
        "model": model,
        "optimizer": optim,
        "lr_scheduler": run.scheduler.state_dict(),
        "train_state": {"step": STEPS, "ntokens_seen": 30},
        "rng": rng_state(),
    }
    spec = package.ItemSpec(requires_copy=True, resharder=DefaultResharder(), required=False)
    make_folder(folder / "ckpt")
    settle()
    with mock.patch.object(DefaultMetadataManager, "_all_gather_pickled_data", gather):
        manager = package.CheckpointManager.Config(
            items={"model": spec, "optimizer": spec},
            default=package.ItemSpec(requires_copy=False),
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        ).build()
        manager.save(str(folder / "ckpt/step-3"), items)
        settle()
        manager.close()
    found = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in model.items()}
    require_same(found, whole["model"], "model")
    return whole
