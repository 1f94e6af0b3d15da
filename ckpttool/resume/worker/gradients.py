"""Computes the gradients that a mesh reduces, and those of one rank on the batches of all ranks.

At the end of a run the model gets its last batch once more, without dropout, and a sum of its outputs with fixed
weights is differentiated. One rank with the same parameters and the batches of all ranks must get the same gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
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
from ckpttool.resume.job import Job
from ckpttool.resume.worker import save_load, setup
from ckpttool.resume.worker.observe import flat_handles
from ckpttool.resume.worker.record import gathered
from ckpttool.resume.worker.setup import Built
from ckpttool.training import collectives, fsdp1

FILE = "gradients.pt"


@collectives.quiet()
def keep(job: Job, built: Built, inputs: tuple[Any, Any] | None) -> str:
    """Save the inputs of all ranks, the parameters and the reduced gradients, whole, by torch alone. Returns the reason
    if that is not possible, or ""."""
    leaves, spec = _pytree.tree_flatten(inputs) if inputs is not None else ([], None)
    why = next(filter(None, collectives.all_gather(_why_not(built, leaves))), "")
    if why or spec is None or inputs is None:
        return why or "`step` does not call the model"
    values = [leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    batches = collectives.to_first((setup.replica(built.mesh), values))
    # Ranks of one replica share a batch.
    joined = _joined([batch for _, batch in sorted(dict(batches).items())]) if batches is not None else ("", [])
    if why := str(collectives.from_first(joined[0])):
        return why
    model = dict(_whole(save_load.model_state(built.model)))
    kept: dict[str, Any] = {"model": model, "gradients": dict(_whole(_gradients(built, inputs)))}
    kept |= {"leaves": joined[1], "spec": _pytree.treespec_dumps(spec), "compute": _compute(built.model)}
    if dist.get_rank() == 0:
        torch.save(kept, os.path.join(job.folder, FILE))
    return ""


@collectives.quiet()
def again(job: Job, built: Built) -> dict[str, Any]:
    """Compute on one rank the gradients of the run in `job.gradients_of`. Returns the dtype that the model computes in,
    and of each gradient its distance from that of the other run, its norm, and the projection of the other one on it;
    None of one that only the other run has, or only this one."""
    kept = torch.load(os.path.join(job.gradients_of or "", FILE), weights_only=True)
    save_load.set_model(built.model, kept["model"], StateDictOptions(full_state_dict=True))
    leaves = [one.to(job.device) if isinstance(one, torch.Tensor) else one for one in kept["leaves"]]
    inputs = _pytree.tree_unflatten(leaves, _pytree.treespec_loads(kept["spec"]))
    own, theirs = dict(_whole(_gradients(built, inputs))), kept["gradients"]
    rows: dict[str, list[float] | None] = {}
    for name in sorted(own.keys() | theirs.keys()):
        if name in own and name in theirs and own[name].shape == theirs[name].shape:
            one, other = own[name].double(), theirs[name].double()
            norms = (torch.linalg.vector_norm(value) for value in (one - other, one))
            rows[name] = [*map(float, norms), float((one * other).sum())]
        else:
            # Where one has no gradient, that of the other has to be zero.
            is_zero = not any(bool(side[name].any()) for side in (own, theirs) if name in side)
            rows[name] = [0.0, 0.0, 0.0] if is_zero else None
    return {"compute": kept["compute"], "rows": rows}


def _whole(tensors: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with their names, whole and on the CPU, on rank 0. Every rank calls it."""
    for name, tensor in tensors.items():
        whole = gathered(tensor)
        if whole is not None and dist.get_rank() == 0:
            yield name, whole.detach().cpu()


def _gradients(built: Built, inputs: tuple[Any, Any]) -> dict[str, Any]:
    """Run forward and backward, and return every gradient. Every rank calls it."""
    built.model.eval()
    built.optimizer.zero_grad()
    args, kwargs = inputs
    _scalar(built.model(*args, **kwargs)).backward()
    flat = FullyShardedDataParallel.summon_full_params(built.model, with_grads=True, writeback=False)
    found: dict[str, Any] = {}
    with collectives.quiet(), flat if fsdp1.is_fsdp1(built.model) else nullcontext():
        for name, parameter in built.model.named_parameters():
            if parameter.grad is not None:
                found[strip_wrappers(name)] = parameter.grad.detach().clone()
    built.optimizer.zero_grad()
    built.model.train()
    return found


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


def _joined(batches: list[list[Any]]) -> tuple[str, list[Any]]:
    """Concatenate the batches of all replicas along dimension 0. Returns the reason if that is not possible, or "", and
    the inputs."""
    leading = next(i for i, one in enumerate(batches[0]) if isinstance(one, torch.Tensor) and one.ndim)
    size = batches[0][leading].shape[0]
    inputs: list[Any] = []
    for number, column in enumerate(zip(*batches, strict=True)):
        one = column[0]
        if not isinstance(one, torch.Tensor):
            inputs.append(one)
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
        inputs.append(torch.cat(column) if batched else one)
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
