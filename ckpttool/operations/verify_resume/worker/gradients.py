"""Computes the gradients that a mesh reduces, and those of one rank on the batches of all ranks.

At the end of a run the model gets its last batch once more, without dropout, and a sum of its outputs with fixed
weights is differentiated, so that no loss of the recipe is needed. One rank with the same parameters and the
concatenated batches of all ranks must compute the same gradients, up to the order of additions.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from ckpttool.operations.verify_resume.trial.job import END, Job
from ckpttool.operations.verify_resume.trial.state import MappedTensor, read_tensors
from ckpttool.operations.verify_resume.worker import setup
from ckpttool.operations.verify_resume.worker.build import Built
from ckpttool.operations.verify_resume.worker.record import Writer, bare
from ckpttool.training import fsdp1

FOLDER = "gradients"


def keep(job: Job, built: Built, inputs: tuple[Any, Any] | None) -> str:
    """Record the inputs of each rank and the reduced gradients. Returns the reason if that is not possible, or ""."""
    folder = os.path.join(job.folder, FOLDER)
    os.makedirs(folder, exist_ok=True)
    rank = dist.get_rank()
    leaves, spec = _pytree.tree_flatten(inputs) if inputs is not None else ([], None)
    why = _why_not(built, leaves)
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why)
    why = next((reason for reason in reasons if reason), "")
    if why or spec is None or inputs is None:
        return why or "`step` does not call the model"
    writer = Writer(folder if rank == 0 else None)
    values = [leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    gathered: list[Any] | None = [None] * len(reasons) if rank == 0 else None
    dist.gather_object((setup.replica(job, built.mesh), values), gathered)
    joined: list[Any] = []
    if gathered is not None:
        # Ranks of one replica share a batch.
        batches = [leaves for _, leaves in sorted(dict(gathered).items(), key=lambda one: one[0])]
        why, joined = _joined(batches, writer)
    reasons = [why]
    dist.broadcast_object_list(reasons, src=0)
    if reasons[0]:
        writer.close({})
        return str(reasons[0])
    write(built, inputs, writer)
    writer.close({"leaves": joined, "spec": _pytree.treespec_dumps(spec), "compute": _compute(built.model)})
    return ""


def again(job: Job, built: Built) -> None:
    """Compute on one rank the gradients of the run in `job.gradients_of`."""
    source = os.path.join(job.gradients_of or "", FOLDER)
    tensors, index = read_tensors(source)
    leaves = [
        _tensor(tensors[leaf["tensor"]]).to(job.device) if "tensor" in leaf else leaf["value"]
        for leaf in index["leaves"]
    ]
    inputs = _pytree.tree_unflatten(leaves, _pytree.treespec_loads(index["spec"]))
    _fill(built, os.path.join(job.gradients_of or "", END))
    folder = os.path.join(job.folder, FOLDER)
    os.makedirs(folder, exist_ok=True)
    writer = Writer(folder)
    write(built, inputs, writer)
    writer.close({})


def write(built: Built, inputs: tuple[Any, Any], writer: Any) -> None:
    """Run forward and backward, and write every gradient as a whole tensor. Every rank calls it."""
    built.model.eval()
    built.optimizer.zero_grad()
    args, kwargs = inputs
    out = _output(built.model(*args, **kwargs))
    _projected(out).backward()
    with _whole_gradients(built.model):
        for name, parameter in built.model.named_parameters():
            grad = parameter.grad
            if grad is not None:
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                writer.add(f"gradient.{bare(name)}", whole)
    built.optimizer.zero_grad()
    built.model.train()


def _why_not(built: Built, leaves: list[Any]) -> str:
    if not any(isinstance(one, torch.Tensor) and one.ndim for one in leaves):
        return "the model has no tensor among its inputs"
    if not all(isinstance(one, (torch.Tensor, bool, int, float, str, type(None))) for one in leaves):
        return "the model has inputs that are neither tensors nor plain values"
    if any(isinstance(one, DTensor) for one in leaves):
        return "the model has a sharded tensor among its inputs"
    if fsdp1.is_fsdp1(built.model) and not all(
        handle._use_orig_params
        for handle in (m._handle for m in FullyShardedDataParallel.fsdp_modules(built.model))
        if handle is not None
    ):
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


def _output(out: Any) -> torch.Tensor:
    if isinstance(out, Mapping):
        out = [out["logits"]] if "logits" in out else [*out.values()]
    first: torch.Tensor = next(
        one for one in _pytree.tree_leaves(out) if isinstance(one, torch.Tensor) and one.is_floating_point()
    )
    return first.full_tensor() if isinstance(first, DTensor) else first


def _projected(out: torch.Tensor) -> torch.Tensor:
    """Return the mean over the batch of a sum with fixed weights; a single number as it is."""
    if not out.ndim:
        return out
    flat = out.float().reshape(out.shape[0], -1)
    weights = torch.arange(flat.shape[1], device=out.device, dtype=torch.float32).cos()
    return (flat * weights).sum() / out.shape[0]


@contextmanager
def _whole_gradients(model: nn.Module) -> Iterator[None]:
    if not fsdp1.is_fsdp1(model):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
            yield


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

    dtype = getattr(torch, tensor.dtype)
    data = np.array(tensor.bits).view(np.uint8)
    if not data.size:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)


def _fill(built: Built, folder: str) -> None:
    """Load parameters and buffers of the end of the other run."""
    tensors, _ = read_tensors(folder)
    state = {
        name.removeprefix("model."): _tensor(tensor) for name, tensor in tensors.items() if name.startswith("model.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if fsdp1.is_fsdp1(built.model):
            with FullyShardedDataParallel.state_dict_type(
                built.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)
            ):
                built.model.load_state_dict(state)
            return
        set_model_state_dict(built.model, state, options=StateDictOptions(full_state_dict=True))
