"""Computes the gradients that a mesh reduces, and those of one rank on the batches of all ranks.

At the end of a run the model gets its last batch once more, without dropout, and a sum of its outputs with fixed
weights is differentiated, so that no loss of the recipe is needed. One rank with the same parameters and the
concatenated batches of all ranks must compute the same gradients, up to the order of additions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from ckpttool.layout.rename import strip_wrappers
from ckpttool.resume.job import END, Job
from ckpttool.resume.states import MappedTensor, read_tensors
from ckpttool.resume.worker import save_load, setup
from ckpttool.resume.worker.build import Built
from ckpttool.resume.worker.observe import flat_handles
from ckpttool.resume.worker.record import Writer, gathered
from ckpttool.training import collectives, fsdp1

FOLDER = "gradients"


def keep(job: Job, built: Built, inputs: tuple[Any, Any] | None) -> str:
    """Record the inputs of each rank and the reduced gradients. Returns the reason if that is not possible, or ""."""
    folder = os.path.join(job.folder, FOLDER)
    os.makedirs(folder, exist_ok=True)
    leaves, spec = _pytree.tree_flatten(inputs) if inputs is not None else ([], None)
    why = next(filter(None, collectives.all_gather(_why_not(built, leaves))), "")
    if why or spec is None or inputs is None:
        return why or "`step` does not call the model"
    writer = Writer(folder if dist.get_rank() == 0 else None)
    values = [leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    gathered = collectives.to_first((setup.replica(built.mesh), values))
    joined: list[Any] = []
    if gathered is not None:
        # Ranks of one replica share a batch.
        why, joined = _joined([batch for _, batch in sorted(dict(gathered).items())], writer)
    if why := str(collectives.from_first(why)):
        writer.close({})
        return why
    write(built, inputs, writer)
    writer.close({"leaves": joined, "spec": _pytree.treespec_dumps(spec), "compute": _compute(built.model)})
    return ""


@collectives.quiet()
def again(job: Job, built: Built) -> None:
    """Compute on one rank the gradients of the run in `job.gradients_of`."""
    other, folder = job.gradients_of or "", os.path.join(job.folder, FOLDER)
    tensors, index = read_tensors(os.path.join(other, FOLDER))
    found = ((leaf, tensors.get(leaf.get("tensor"))) for leaf in index["leaves"])
    leaves = [_tensor(tensor).to(job.device) if tensor is not None else leaf["value"] for leaf, tensor in found]
    # Parameters and buffers of the end of the other run.
    at_end, _ = read_tensors(os.path.join(other, END))
    state = {name[len("model.") :]: _tensor(one) for name, one in at_end.items() if name.startswith("model.")}
    save_load.set_model(built.model, state, StateDictOptions(full_state_dict=True))
    os.makedirs(folder, exist_ok=True)
    writer = Writer(folder)
    write(built, _pytree.tree_unflatten(leaves, _pytree.treespec_loads(index["spec"])), writer)
    writer.close({})


def write(built: Built, inputs: tuple[Any, Any], writer: Any) -> None:
    """Run forward and backward, and write every gradient as a whole tensor. Every rank calls it."""
    built.model.eval()
    built.optimizer.zero_grad()
    args, kwargs = inputs
    _scalar(built.model(*args, **kwargs)).backward()
    flat = FullyShardedDataParallel.summon_full_params(built.model, with_grads=True, writeback=False)
    with collectives.quiet(), flat if fsdp1.is_fsdp1(built.model) else nullcontext():
        for name, parameter in built.model.named_parameters():
            writer.add(f"gradient.{strip_wrappers(name)}", gathered(parameter.grad))
    built.optimizer.zero_grad()
    built.model.train()


def _why_not(built: Built, leaves: list[Any]) -> str:
    if not any(isinstance(one, torch.Tensor) and one.ndim for one in leaves):
        return "the model has no tensor among its inputs"
    if not all(isinstance(one, (torch.Tensor, bool, int, float, str, type(None))) for one in leaves):
        return "the model has inputs that are neither tensors nor plain values"
    if any(isinstance(one, DTensor) for one in leaves):
        return "the model has a sharded tensor among its inputs"
    if not all(handle._use_orig_params for _, handle in flat_handles(built.model)):
        return "FSDP1 hides the gradients of flat parameters; pass it `use_orig_params=True`"
    return ""


def _joined(batches: list[list[Any]], writer: Any) -> tuple[str, list[Any]]:
    """Concatenate the batches of all replicas along dimension 0. Returns the reason if that is not possible, or "", and
    the inputs."""
    leading = next(i for i, one in enumerate(batches[0]) if isinstance(one, torch.Tensor) and one.ndim)
    size = batches[0][leading].shape[0]
    inputs: list[Any] = []
    for number, column in enumerate(zip(*batches, strict=True)):
        one = column[0]
        if not isinstance(one, torch.Tensor):
            inputs.append({"value": one})
            continue
        if len({(tuple(t.shape), t.dtype) for t in column}) > 1:
            return "the ranks have batches of different shapes", []
        batched = one.ndim > 0 and one.shape[0] == size
        is_shared = all(torch.equal(one, other) for other in column)
        if not batched and not is_shared:
            return "the ranks have different inputs beside their batches", []
        if batched and is_shared and number != leading and one.ndim > 1 and one.shape[0] == one.shape[1]:
            # Either a causal mask, or one row for each element of the batch.
            return "a square tensor that all ranks share may be part of the batch or a mask", []
        writer.add(f"input.{number}", torch.cat(column) if batched else one)
        inputs.append({"tensor": f"input.{number}"})
    return "", inputs


def _scalar(out: Any) -> torch.Tensor:
    """Return the mean over the batch of a sum of the output with fixed weights; a single number as it is."""
    if isinstance(out, Mapping):
        out = [out["logits"]] if "logits" in out else [*out.values()]
    found = (one for one in _pytree.tree_leaves(out) if isinstance(one, torch.Tensor))
    first: torch.Tensor = next(one for one in found if one.is_floating_point())
    values = first.full_tensor() if isinstance(first, DTensor) else first
    if not values.ndim:
        return values
    flat = values.float().reshape(values.shape[0], -1)
    weights = torch.arange(flat.shape[1], device=flat.device, dtype=torch.float32).cos()
    return (flat * weights).sum() / len(flat)


def _compute(model: nn.Module) -> str:
    """Return the smallest floating-point dtype that the model computes in."""
    kinds = {parameter.dtype for parameter in model.parameters()}
    for module in model.modules():
        policy = getattr(module, "mixed_precision", None)
        if policy is None and hasattr(module, "_get_fsdp_state"):
            policy = module._get_fsdp_state()._mp_policy
        for name in ("param_dtype", "reduce_dtype"):
            kinds.add(getattr(policy, name, None) or torch.float32)
    smallest = min((kind for kind in kinds if kind.is_floating_point), key=lambda kind: torch.finfo(kind).bits)
    return str(smallest).removeprefix("torch.")


def _tensor(tensor: MappedTensor) -> torch.Tensor:
    import numpy as np

    data = torch.from_numpy(np.array(tensor.bits).view(np.uint8))
    return data.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
