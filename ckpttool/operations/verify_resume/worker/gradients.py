"""The gradients that a mesh reduces, and those of one rank on all of its batches.

At the end of a run the model is given its last batch once more, without dropout, and a sum of its outputs with fixed
weights is differentiated: no loss of the recipe is needed. One rank, with the same parameters and the batches of all
ranks one behind the other, must come to the same gradients but for the order of additions.
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
from ckpttool.operations.verify_resume.worker import record as recording
from ckpttool.operations.verify_resume.worker import setup
from ckpttool.operations.verify_resume.worker.build import Built
from ckpttool.training import fsdp1

FOLDER = "gradients"


def keep(job: Job, built: Built, inputs: tuple[Any, Any] | None) -> str:
    """Write down what each rank was given, and the reduced gradients. Returns why it could not be done, or ""."""
    folder = os.path.join(job.folder, FOLDER)
    os.makedirs(folder, exist_ok=True)
    rank = dist.get_rank()
    leaves, spec = _pytree.tree_flatten(inputs) if inputs is not None else ([], None)
    why = _why_not(built, leaves)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, why)
    why = next((one for one in told if one), "")
    if why or spec is None or inputs is None:
        return why or "the model was not called by the step"
    writer = recording.Writer(folder if rank == 0 else None)
    sent = [one.detach().cpu() if isinstance(one, torch.Tensor) else one for one in leaves]
    found: list[Any] | None = [None] * len(told) if rank == 0 else None
    dist.gather_object((setup.replica(job, built.mesh), sent), found)
    told_leaves: list[Any] = []
    if found is not None:
        # Ranks that share a batch are one.
        batches = [leaves for _, leaves in sorted(dict(found).items(), key=lambda one: one[0])]
        why, told_leaves = _joined(batches, writer)
    told = [why]
    dist.broadcast_object_list(told, src=0)
    if told[0]:
        writer.close({})
        return str(told[0])
    write(built, inputs, writer)
    writer.close({"leaves": told_leaves, "spec": _pytree.treespec_dumps(spec), "compute": _compute(built.model)})
    return ""


def again(job: Job, built: Built) -> None:
    """On one rank, the gradients of the run in `job.gradients_of`."""
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
    writer = recording.Writer(folder)
    write(built, inputs, writer)
    writer.close({})


def write(built: Built, inputs: tuple[Any, Any], writer: Any) -> None:
    """Forward, backward, and every gradient gathered. Every rank calls it."""
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
                writer.add(f"gradient.{recording.bare(name)}", whole)
    built.optimizer.zero_grad()
    built.model.train()


def _why_not(built: Built, leaves: list[Any]) -> str:
    if not any(isinstance(one, torch.Tensor) and one.ndim for one in leaves):
        return "the model was given no tensor"
    if not all(isinstance(one, (torch.Tensor, bool, int, float, str, type(None))) for one in leaves):
        return "the model was given more than tensors and plain values"
    if any(isinstance(one, DTensor) for one in leaves):
        return "the model was given a tensor that is sharded itself"
    if fsdp1.is_fsdp1(built.model) and not all(
        handle._use_orig_params for handle in (m._handle for m in FullyShardedDataParallel.fsdp_modules(built.model))
        if handle is not None
    ):  # fmt: skip
        return "FSDP1 keeps the gradients of flat parameters to itself; `use_orig_params=True` shows them"
    return ""


def _joined(batches: list[list[Any]], writer: Any) -> tuple[str, list[Any]]:
    """The batches of all replicas as one, along dimension 0."""
    leading = next(i for i, one in enumerate(batches[0]) if isinstance(one, torch.Tensor) and one.ndim)
    size = batches[0][leading].shape[0]
    made: list[Any] = []
    for number, column in enumerate(zip(*batches, strict=True)):
        one = column[0]
        if not isinstance(one, torch.Tensor):
            made.append({"value": one})
            continue
        if len({(tuple(t.shape), t.dtype) for t in column}) > 1:
            return "the ranks have batches of different shapes", []
        batched = one.ndim > 0 and one.shape[0] == size
        alike = all(torch.equal(one, other) for other in column)
        if not batched and not alike:
            return "the ranks were given different values beside their batches", []
        if batched and alike and number != leading and one.ndim > 1 and one.shape[0] == one.shape[1]:
            # A causal mask, or one row for each of a batch: both look like this.
            return "a square tensor that all ranks were given may be of the batch, or not", []
        writer.add(f"input.{number}", torch.cat(column) if batched else one)
        made.append({"tensor": f"input.{number}"})
    return "", made


def _output(out: Any) -> torch.Tensor:
    if isinstance(out, Mapping):
        out = [out["logits"]] if "logits" in out else [*out.values()]
    found: torch.Tensor = next(
        one for one in _pytree.tree_leaves(out) if isinstance(one, torch.Tensor) and one.is_floating_point()
    )
    return found.full_tensor() if isinstance(found, DTensor) else found


def _projected(out: torch.Tensor) -> torch.Tensor:
    """The mean over the batch of a sum with fixed weights; a single number as it is."""
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
    """The smallest floating-point dtype that the model calculates in."""
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
    """Parameters and buffers as they were at the end of the other run."""
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
