"""The models and optimizers of training scripts, over every mesh, and what torch gathers of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from support.upstream_readers import detached, difference
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from training import Block, Run, Sizes, Transformer, seed

from ckpttool.training import devices

SMALL = Sizes(vocab=17, width=6, hidden=10, layers=1)
Wrap = Callable[[nn.Module], nn.Module]
HOME = [torch.device("cpu")]  # where models are


def use(kind: str) -> None:
    """Have models on this process's own device of a kind of `devices`."""
    HOME[0] = devices.take(kind)


def sizes_of(model: Mapping[str, torch.Tensor]) -> Sizes:
    """The sizes of the model that a state dict is of."""
    vocab, width = model["embed.weight"].shape
    layers = {name.split(".")[1] for name in model if name.startswith("layers.")}
    return Sizes(vocab, width, model["layers.0.up.weight"].shape[0], len(layers))


def bare(sizes: Sizes, device: str = "") -> nn.Module:
    """A model that shares no value with one that was trained; on the meta device, or where models are."""
    seed(4321)
    with torch.device(device or "cpu"):
        model = Transformer(sizes)
        model.lm_head.weight = model.embed.weight
        # Made of a list: it would be of that device whatever the context says.
        model.register_buffer("tokens_seen", torch.empty((), dtype=torch.int64))
        model.register_buffer("frozen", torch.empty(3, dtype=torch.bool))
    if device == "meta":
        return model
    model.tokens_seen.fill_(-1)
    model.frozen.fill_(True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(17.0)
    model.to(HOME[0])
    # Where a tensor cannot change its device, as where an extension of torch has brought it, `to` makes another.
    model.lm_head.weight = model.embed.weight
    return model


def fsdp2(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    """Bottom up over the blocks, then the root."""
    mesh = mesh or init_device_mesh(HOME[0].type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def grid(*names: str) -> Any:
    """Two dimensions, the first of two."""
    return init_device_mesh(HOME[0].type, (2, dist.get_world_size() // 2), mesh_dim_names=names)


def offloaded(model: nn.Module) -> nn.Module:
    """Parameters stay on the CPU between steps, buffers on the accelerator."""
    return fsdp2(model, offload_policy=CPUOffloadPolicy())


def hsdp(model: nn.Module) -> nn.Module:
    """Two replicas."""
    return fsdp2(model, grid("replicate", "shard"))


def tensor_parallel(model: nn.Module) -> nn.Module:
    """FSDP2 over the outer dimension, tensor parallelism over the inner: two cuts of one dimension."""
    mesh = grid("dp", "tp")
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fsdp2(model, mesh["dp"])


def columns(model: nn.Module) -> nn.Module:
    """Tensor parallelism alone: `down` is cut along its columns, and what is in no plan is whole on every rank."""
    mesh = init_device_mesh(HOME[0].type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def fsdp1(**options: Any) -> Wrap:
    """FSDP1 over every block and the root."""

    def wrap(model: nn.Module) -> nn.Module:
        chosen = {"use_orig_params": True, "device_id": HOME[0], **options}
        return Fsdp(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **chosen)

    return wrap


def fsdp1_on_mesh(model: nn.Module) -> nn.Module:
    """Its sharded state dicts are of DTensors then."""
    return fsdp1(device_mesh=init_device_mesh(HOME[0].type, (dist.get_world_size(),)))(model)


def fsdp1_hybrid(model: nn.Module) -> nn.Module:
    """Two replicas."""
    return fsdp1(device_mesh=grid("replicate", "shard"), sharding_strategy=ShardingStrategy.HYBRID_SHARD)(model)


def compiled(model: nn.Module) -> nn.Module:
    """Wrapped twice; compiled when it is first called."""
    return torch.compile(DistributedDataParallel(model))


MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.float32)

KINDS: dict[str, Wrap] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "compiled": compiled,
    "fsdp2": fsdp2,
    "offloaded": offloaded,
    "hsdp": hsdp,
    "tp": tensor_parallel,
    "columns": columns,
    "fsdp1": fsdp1(),
    "fsdp1 flat": fsdp1(use_orig_params=False),
    "fsdp1 grad": fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp1 none": fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp1 mixed": fsdp1(mixed_precision=MIXED),
    "fsdp1 mesh": fsdp1_on_mesh,
    "fsdp1 hybrid": fsdp1_hybrid,
}


def names_of(name: str, parameter: nn.Parameter) -> list[str]:
    """The name of a parameter without wrappers, or those of the parameters in a flat one."""
    for prefix in ("_fsdp_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(prefix, "")
    if not name.endswith("_flat_param"):
        return [name]
    return [name.removesuffix("_flat_param") + fqn for fqn in parameter._fqns]


def optimizer_for(model: nn.Module, groups: list[list[str]]) -> torch.optim.Optimizer:
    """AdamW over these groups, with hyper-parameters that nobody saved."""
    named = [(names_of(name, parameter), parameter) for name, parameter in model.named_parameters()]
    chosen = [[p for names, p in named if names[0] in group] for group in groups]
    return torch.optim.AdamW(
        [{"params": one, "weight_decay": 0.7} for one in chosen], lr=3.0, betas=(0.1, 0.2), eps=0.3
    )


def whole(run: Run) -> dict[str, Any]:
    """Model and optimizer as torch gathers them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optim = get_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    return detached({"model": dict(model), "optim": optim})


def steps(run: Run, vocab: int, count: int = 2) -> list[float]:
    """A few steps on the same batches on all ranks; the losses."""
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(count):
        tokens = torch.randint(vocab, (2, 5), generator=generator).to(HOME[0])
        loss = functional.cross_entropy(run.model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        losses.append(loss.item())
    return losses


__all__ = ["detached", "difference"]
