"""Started by torchrun: DeepSpeed loads a checkpoint, trains on, and saves what came of it.

    deepspeed_step.py STAGE FROM OUT [--universal] [--one-group] [--config JSON] [--save DIR]

`OUT` has the float32 weights as they were loaded, and after a step; `module` are those of ZeRO 1 and 2 that it computes
with, `others` the frozen parameter and the buffer. All ranks train on the same data, so that the step is that of one
process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

GENERATORS = Path(__file__).resolve().parents[2] / "samples" / "generators"
sys.path.insert(0, str(GENERATORS))

from deepspeed_runs import groups_of, model_class  # type: ignore[import-not-found]  # noqa: E402


def loss_of(model: Any, step: int) -> torch.Tensor:
    ids = torch.randint(0, 13, (2, 4), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """The float32 weights of what is trained, whole."""
    from deepspeed.utils import safe_get_full_fp32_param

    named = engine.module.named_parameters()
    return {name: safe_get_full_fp32_param(p).clone() for name, p in named if p.requires_grad}


def main(stage: int, source: Path, out: Path, *options: str) -> None:
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"load_universal": "--universal" in options},
    }
    if "--config" in options:
        for key, value in json.loads(options[options.index("--config") + 1]).items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = model_class()()
    groups = groups_of(model)
    if "--one-group" in options:
        groups = [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": 0.1}]
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)[0]
    path, client = engine.load_checkpoint(str(source.parent), tag=source.name)
    assert path is not None
    loaded = weights_of(engine)
    with deepspeed.zero.GatheredParameters([engine.module.frozen]):
        others = {"frozen": engine.module.frozen.detach().clone(), "seen": engine.module.seen.clone()}
    engine.backward(loss_of(engine, engine.global_steps))
    engine.step()
    weights = weights_of(engine)
    module = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    if engine.global_rank == 0:
        result = {"loaded": loaded, "weights": weights, "others": others, "module": module}
        torch.save({**result, "steps": engine.global_steps, "epoch": client.get("epoch")}, out)
    if "--save" in options:
        engine.save_checkpoint(options[options.index("--save") + 1])
    torch.distributed.barrier()
    # DeepSpeed leaves its process groups to the end of Python, where a thread of gloo now and then aborts.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
