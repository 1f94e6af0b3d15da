"""What the samples of one torch.save file for each rank share: the runs, what is saved beside them, and the saving."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dcp import fsdp1_state, spelled
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional
from training import STEPS, Block, Run, Sizes, Transformer, detached, rng_state, seed

Wrap = Callable[[nn.Module], nn.Module]
SMALL = Sizes(vocab=17, width=6, hidden=10, layers=1)  # a file for each of four ranks must stay small


def save_for_rank(state: Any, folder: Path, name: str = "rank{rank}.pt") -> None:
    """Save to a file of this rank and read it back, which only the same rank of the same world can."""
    path = folder / "ckpt" / name.format(rank=dist.get_rank())
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path)
    torch.load(path, weights_only=False)


def whole(tree: Any) -> Any:
    """The same tree with every `DTensor` gathered."""
    if isinstance(tree, DTensor):
        return tree.full_tensor()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return [whole(value) for value in tree] if isinstance(tree, list) else tree


def trained(
    wrap: Wrap,
    sizes: Sizes = SMALL,
    *,
    prepare: Callable[[nn.Module], object] | None = None,
    groups: int = 2,
    named: bool = False,
) -> Run:
    """As `training.train`, which groups parameters by a shape that FSDP1 takes from them; here it is by name.

    `prepare` changes the bare model. `named` hands the optimizer names too, which it then saves.
    """
    seed()
    model: nn.Module = Transformer(sizes)
    if prepare is not None:
        prepare(model)
    model = wrap(model)
    optimizer = torch.optim.AdamW(_groups(model.named_parameters(), groups, named), lr=1e-2, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    generator = torch.Generator().manual_seed(99)
    for _ in range(STEPS):
        tokens = torch.randint(sizes.vocab, (2, 5), generator=generator)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return Run(model, optimizer, scheduler)


def _groups(parameters: Iterable[tuple[str, nn.Parameter]], groups: int, named: bool) -> list[dict[str, Any]]:
    found = list(parameters)
    light = [groups > 1 and _is_light(name) for name, _ in found]
    chosen = [
        [one for one, is_light in zip(found, light, strict=True) if is_light == wanted] for wanted in (False, True)
    ]
    return [
        {"params": one if named else [parameter for _, parameter in one], "weight_decay": decay}
        for one, decay in zip(chosen[:groups], (0.1, 0.0), strict=False)
    ]


def _is_light(name: str) -> bool:
    """Whether weight decay spares a parameter; of flat parameters, it spares that of the root."""
    if name.endswith("_flat_param"):
        return "layers." not in name
    return name.endswith(("bias", "gate")) or "norm" in name


def fsdp1(use_orig_params: bool = True, **options: Any) -> Wrap:
    """FSDP1 on the CPU, as guides wrap a model: every block a unit by the policy, the rest the root's."""

    def wrap(model: nn.Module) -> nn.Module:
        chosen = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.device("cpu"), **options}
        return FullyShardedDataParallel(model, use_orig_params=use_orig_params, **chosen)

    return wrap


def fsdp1_sharded(run: Run) -> dict[str, Any]:
    """Model and optimizer of an FSDP1 run as this rank saves them."""
    model, optim = fsdp1_state(run, StateDictType.SHARDED_STATE_DICT)
    return {"model": model, "optim": optim}


def fsdp1_whole(run: Run, **rest: Any) -> dict[str, Any]:
    """The reference of an FSDP1 run: its full state dicts."""
    model, optim = fsdp1_state(run, StateDictType.FULL_STATE_DICT)
    return spelled(detached({"model": model, "optim": optim, **rest}))


def around(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Step, scheduler and this rank's own generators, as saved; and as the reference has them, all ranks' in a list."""
    seed(1234 + dist.get_rank())
    state = copy.deepcopy({"step": STEPS, "scheduler": run.scheduler.state_dict()})
    rng = rng_state()
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, rng)
    return {**state, "rng": rng}, {**state, "rng_by_rank": by_rank}
