"""Train small models with FSDP1 on a few gloo ranks; save the rank files and what torch gathers of them.

    python save_flat_on_ranks.py FOLDER WORLD [hybrid]    -> FOLDER/<case>/rank<R>.pt, dcp/, reference.pt

Each rank saves `{model, optim}`: the `LOCAL_STATE_DICT` of the model (where there is none, of a device mesh and of
`NO_SHARD`, the `SHARDED_STATE_DICT`) and its own `optimizer.state_dict()`; a `LOCAL_STATE_DICT` is saved as a DCP
directory too. The reference is `FULL_STATE_DICT` of that run. One launch goes through all cases, as starting the ranks
is what costs most.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.nn import functional

Wrap = Callable[..., FullyShardedDataParallel]


class Block(nn.Module):
    """Parameters before and after its submodules, of 1 to 143 elements, all of one dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(7, 11, dtype=dtype)
        self.mlp = nn.Sequential(nn.Linear(11, 13, dtype=dtype), nn.GELU(), nn.Linear(13, 7, bias=False, dtype=dtype))
        self.gate = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One residual update."""
        return x + (self.gate * self.mlp(self.up(x.to(self.gate.dtype)))).float()


class Net(nn.Module):
    """Blocks between an embedding and a head tied to it, and two buffers, one of them of one dimension."""

    def __init__(self, tied: bool = True, dtype: torch.dtype = torch.float32, rates: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((7,), 1.5))
        self.embed = nn.Embedding(29, 7)
        self.layers = nn.ModuleList([Block(), Block(dtype), Block()])
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 29, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(3))
        if rates:  # on a rank with everything whole, nothing tells it from a parameter
            self.register_buffer("rates", torch.arange(5.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Case(NamedTuple):
    """How a model is wrapped and trained. `units` are the submodules that are wrapped, inner ones first."""

    name: str
    orig: bool
    model: Callable[[], Net] = Net
    units: tuple[str, ...] = ("layers.0", "layers.1", "layers.2")
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    frozen: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    mesh: bool = False


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, neither of which comes first in the model."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    bare = [p for name, p in named if name.endswith("bias") or "norm" in name]
    rest = [p for name, p in named if not (name.endswith("bias") or "norm" in name)]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def trained_only(model: nn.Module) -> torch.optim.Optimizer:
    """What does not learn is not in the optimizer."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def named(model: nn.Module) -> torch.optim.Optimizer:
    """Given names, torch 2.6 and later save them; by size alone one of like units could be another."""
    found = list(model.named_parameters())
    return torch.optim.AdamW([{"params": found[2:3]}, {"params": [*found[:2], *found[3:]], "lr": 3e-3}], lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """State of one tensor and no step."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def by_unit(model: nn.Module) -> torch.optim.Optimizer:
    """Flat parameters in two groups, that of the root in the second one."""
    root, *units = model.parameters()
    return torch.optim.AdamW([{"params": units}, {"params": [root], "lr": 3e-3}], lr=1e-2)


NESTED = ("layers.0.mlp", "layers.0", "layers.1.mlp", "layers.1", "layers.2")
PLAIN = {"model": lambda: Net(rates=False)}
HALF = {"model": lambda: Net(dtype=torch.bfloat16)}
CASES = [
    Case("orig", True, units=NESTED),
    Case("orig_one_unit", True, units=()),
    Case("orig_groups", True, optimizer=decayed),
    Case("orig_names", True, optimizer=named),
    Case("orig_frozen", True, optimizer=trained_only, frozen=("embed.weight", "layers.1.up.bias")),
    Case("orig_dtypes", True, **HALF),
    Case("orig_ignored", True, ignored=("layers.0.gate", "layers.1.up.weight", "norm.bias")),
    Case("orig_momentum", True, optimizer=momentum),
    Case("orig_mesh", True, mesh=True),
    Case("flat", False, units=NESTED),
    Case("flat_one_unit", False, units=()),
    Case("flat_untied", False, model=lambda: Net(tied=False)),
    Case("flat_groups", False, optimizer=by_unit),
    Case("flat_names", False, optimizer=named),
    Case("flat_frozen", False, optimizer=trained_only, frozen=("layers.1.",)),
    Case("flat_dtypes", False, **HALF),
    Case("flat_ignored", False, ignored=("layers.0.gate", "layers.1.up.weight", "norm.bias")),
    Case("flat_momentum", False, optimizer=momentum),
    Case("flat_mesh", False, mesh=True),
    Case("flat_mesh_groups", False, mesh=True, optimizer=by_unit, **PLAIN),
    Case("flat_copies", False, strategy=ShardingStrategy.NO_SHARD, **PLAIN),
    # All that the first rank has is frozen.
    Case("orig_mesh_frozen", True, mesh=True, frozen=("scale", "embed.", "layers."), **PLAIN),
    Case("flat_mesh_nested", False, mesh=True, units=(*NESTED[:-1], "layers.2.mlp", "layers.2")),
]  # fmt: skip
RAW = ("orig", "flat")  # saved as DCP with the raw state of the optimizer too
# Two replicas of two shards; what `LOCAL_STATE_DICT` refuses.
HYBRID = [
    Case("orig_hybrid", True, mesh=True, strategy=ShardingStrategy.HYBRID_SHARD),
    Case("flat_hybrid", False, mesh=True, strategy=ShardingStrategy.HYBRID_SHARD),
]


def by_name(case: Case) -> bool:
    """Whether the model is saved by name, as verl does."""
    return case.mesh or case.strategy is ShardingStrategy.NO_SHARD


def wrapped(case: Case) -> FullyShardedDataParallel:
    """The model of a case, under FSDP1."""
    torch.manual_seed(1234)
    model = case.model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(f) for f in case.frozen))
    ignored = [p for name, p in model.named_parameters() if name in case.ignored]
    options: dict[str, Any] = {
        "device_id": torch.device("cpu"), "use_orig_params": case.orig, "ignored_states": ignored,
        "sharding_strategy": case.strategy,
    }  # fmt: skip
    if case.strategy is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    elif case.mesh:
        options["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in case.units:
        above, _, last = name.rpartition(".")
        setattr(model.get_submodule(above), last, FullyShardedDataParallel(model.get_submodule(name), **options))
    return FullyShardedDataParallel(model, **options)


def run(case: Case, folder: Path) -> None:
    """Train, save what this rank has, and what torch makes of it all."""
    model = wrapped(case)
    optimizer = case.optimizer(model)
    # The ranks of an ignored parameter agree on it only when they are fed the same.
    generator = torch.Generator().manual_seed(99 if case.ignored else 99 + dist.get_rank())
    for _ in range(2):
        tokens = torch.randint(29, (2, 5), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    kind = StateDictType.SHARDED_STATE_DICT if by_name(case) else StateDictType.LOCAL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, kind):
        local = model.state_dict()
    folder.mkdir(exist_ok=True)
    torch.save({"model": local, "optim": optimizer.state_dict()}, folder / f"rank{dist.get_rank()}.pt")
    if kind == StateDictType.LOCAL_STATE_DICT:
        dcp.save({"model": local, "step": 2}, checkpoint_id=folder / "dcp")
    if case.name in RAW:
        dcp.save({"model": local, "optim": optimizer.state_dict()}, checkpoint_id=folder / "dcp_raw")
    # With `offload_to_cpu=True` torch 2.13 gathers wrong values on a CPU.
    config = FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config):
        whole = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    if dist.get_rank() == 0:
        torch.save(whole, folder / "reference.pt")


def rank_main(rank: int, folder: Path, world: int) -> None:
    """All cases on one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    cases = CASES if world > 1 else [case for case in CASES if by_name(case)]
    for case in HYBRID if "hybrid" in sys.argv else cases:
        run(case, folder / case.name)
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked, so that torch is imported once; nothing has been computed yet, so there are no threads to lose.
    world = int(sys.argv[2])
    mp.start_processes(rank_main, args=(Path(sys.argv[1]), world), nprocs=world, start_method="fork")
