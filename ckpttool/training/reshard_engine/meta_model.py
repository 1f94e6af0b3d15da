"""A model on the meta device and the state of its optimizer, sharded as a training script would shard them.

    ("model", "layers.0.w")                 a parameter of the module `model.layers.0`, cut by `fully_shard`
    ("model", "rope"), ("model", "gate")    buffers: what is whole, and what has no dimensions, which FSDP2 refuses
    ("optim", "state", 3, "exp_avg")        optimizer[the name of the parameter]["exp_avg"]
    ("optim", "state", 3, "row")            a tensor by itself, where it is not cut as its parameter is

Nothing has to be known of the model's code: `load_state_dict` asks for names and shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.errors import CkptError
from ckpttool.formats.dcp import combine
from ckpttool.layout.mesh import CheckpointSharding, Placements, same_boxes
from ckpttool.layout.optimizer import parse, respell
from ckpttool.layout.rename import strip_wrappers
from ckpttool.training import collectives
from ckpttool.training.contents import Contents, SavedOptimizer, Shape

# What a module has of its own, and what torch and our loader take off names.
_TAKEN = {*dir(nn.Module()), *dir(FSDPModule), "module"}


class _Node(nn.Module):  # type: ignore[misc] # torch is not looked into
    """A module with parameters, buffers and modules."""


@dataclass(slots=True)
class MetaTensor:
    """A parameter or a buffer of `node`; with `key`, the state that the optimizer has of that parameter under it."""

    node: nn.Module
    leaf: str
    name: str
    key: str | None = None

    @property
    def value(self) -> Any:
        included = self.node._parameters if self.leaf in self.node._parameters else self.node._buffers
        return included[self.leaf]


class MetaModel:
    """The meta model of all models and optimizers, and of other sharded tensors.

    `contents` maps tensors to read to the names of this model; `optimizer` is the state of parameters by their name,
    once it is filled. Args: `mesh` is the device mesh for `sharding.mesh`; `path` is for messages.
    """

    def __init__(self, catalogue: Catalogue, sharding: CheckpointSharding, mesh: DeviceMesh, path: str) -> None:
        self.model: nn.Module = _Node()
        self.contents = Contents(path, catalogue.format)
        self.optimizer: dict[str, dict[str, torch.Tensor]] = {}
        self.tensors: dict[Path, MetaTensor] = {}
        self._catalogue, self._sharding, self._mesh = catalogue, sharding, mesh
        self._keeper = combine.keepers(catalogue)
        self._segments: dict[tuple[int, bool, str], str] = {}
        self._ignored: set[nn.Parameter] = set()
        self._dims: dict[nn.Parameter, int] = {}
        included = [t for t in catalogue.tensors if self._is_included(t)]
        owners = _owners(catalogue)
        trained = {owners[path][0] for path in owners if path in catalogue.entries}
        parameters: dict[str, Tensor] = {}
        for tensor in included:
            if tensor.part.kind == "model":
                name = strip_wrappers(tensor.fqn)
                self._place(tensor, name in trained)
                parameters.setdefault(name, tensor)
        for tensor in included:
            if tensor.part.kind != "model":
                name, key = owners.get(tensor.path, ("", ""))
                parameter = parameters.get(name)
                if parameter is None or not self._follows(tensor, parameter, key):
                    self._place(tensor, False)
        self._tie()
        if self._dims:
            self._shard()

    def state(self) -> dict[Path, torch.Tensor]:
        """Return the tensors by their path in the catalogue."""
        return {
            path: (target.value if target.key is None else self.optimizer[target.name][target.key]).detach()
            for path, target in self.tensors.items()
        }

    def _is_included(self, tensor: Tensor) -> bool:
        if tensor.embedded or self._keeper[tensor.path] != tensor.path:
            return False
        return tensor.part.kind in ("model", "optimizer") or tensor.path in self._sharding.placements

    def _placements_of(self, tensor: Tensor) -> Placements:
        return self._sharding.placements.get(tensor.path, {})

    # Modules ---------------------------------------------------------------------------------------------------------

    def _place(self, tensor: Tensor, trained: bool) -> None:
        """Add a tensor as a parameter if FSDP shards it, or if it can be and has been trained; else as a buffer."""
        placements = self._placements_of(tensor)
        value: Any = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype.name), device="meta")
        if "tp" in placements:
            value = distribute_tensor(value, self._mesh["tp"], [Shard(placements["tp"])], src_data_rank=None)
        target = self._target(tensor.path)
        is_trainable = value.is_floating_point() or value.is_complex()
        if "shard" in placements or (trained and is_trainable and tensor.shape):
            value = nn.Parameter(value, requires_grad=is_trainable)
            target.node._parameters[target.leaf] = value
            if "shard" in placements:
                self._dims[value] = placements["shard"]
            else:
                self._ignored.add(value)
        else:
            target.node._buffers[target.leaf] = value
        self.tensors[tensor.path] = target
        self.contents.model[target.name] = Shape(tensor.dtype.name, tensor.shape)
        self.contents.tensors["model", target.name] = tensor.origin or tensor

    def _target(self, path: Path) -> MetaTensor:
        *above, last = [segment for key in path for segment in str(key).split(".")]
        node, names = self.model, list[str]()
        for segment in above:
            names.append(self._segment(node, segment, leaf=False))
            node = node._modules.setdefault(names[-1], _Node())
        leaf = self._segment(node, last, leaf=True)
        return MetaTensor(node, leaf, ".".join([*names, leaf]))

    def _segment(self, node: nn.Module, key: str, *, leaf: bool) -> str:
        """Return the name of a key as a module may have it: `type`, `_orig_mod`, an empty key, and a tensor called like
        a module beside it get other names."""
        known = self._segments.get((id(node), leaf, key))
        if known is None:
            odd = _is_odd(key) or (id(node), not leaf, key) in self._segments
            known = self._segments[id(node), leaf, key] = f"-{len(self._segments)}" if odd else key
        return known

    def _tie(self) -> None:
        """Tie second names of parameters, as in the model that was saved."""
        for path, first in self._keeper.items():
            target = self.tensors.get(first)
            tensor = self._catalogue.tensor(path)
            is_second = path != first and tensor.part.kind == "model"
            if not is_second or target is None or target.leaf not in target.node._parameters:
                continue
            second = self._target(path)
            second.node._parameters[second.leaf] = target.value
            self.contents.model[second.name] = Shape(tensor.dtype.name, tensor.shape)
            self.contents.same[second.name] = target.name

    def _shard(self) -> None:
        dims = self._dims
        is_hybrid = "replicate" in (self._mesh.mesh_dim_names or ())
        over = self._mesh["replicate", "shard"] if is_hybrid else self._mesh["shard"]
        with collectives.quiet():
            fully_shard(
                self.model, mesh=over, ignored_params=self._ignored, shard_placement_fn=lambda value: Shard(dims[value])
            )

    # The optimizer ---------------------------------------------------------------------------------------------------

    def _follows(self, tensor: Tensor, parameter: Tensor, key: str) -> bool:
        """Return whether the tensor is state of a parameter that torch can place: sharded as the parameter is, or whole
        and of another shape."""
        target = self.tensors[parameter.path]
        if target.leaf not in target.node._parameters or not target.value.requires_grad:
            return False
        has_shape = tensor.shape == parameter.shape
        is_alike = same_boxes(tensor, parameter) if has_shape else not self._placements_of(tensor)
        optimizer = self.contents.optimizer = self.contents.optimizer or SavedOptimizer([], {})
        state = optimizer.state.setdefault(target.name, {})
        if not is_alike or (key,) in state:
            return False
        state[key,] = Shape(tensor.dtype.name, tensor.shape)
        self.contents.tensors["optimizer", target.name, key] = tensor.origin or tensor
        self.tensors[tensor.path] = MetaTensor(target.node, target.leaf, target.name, key)
        return True


def _is_odd(key: str) -> bool:
    return not key or key in _TAKEN or key.startswith("_") or "-" in key


def _named(catalogue: Catalogue) -> list[parse.Optimizer]:
    """Return the optimizers of a catalogue with state by names, where ids can be mapped to parameters."""
    try:
        catalogue = respell.respell(catalogue, "fqn")
    except CkptError:
        # Some have numbers that could be those of several parameters: their state is then not the parameters'.
        return [optimizer for optimizer in parse.optimizers(catalogue) if optimizer.spelling != "id"]
    return parse.optimizers(catalogue)


def _owners(catalogue: Catalogue) -> dict[Path, tuple[str, str]]:
    """Return the parameter that a tensor of optimizer state is of, and its key: `("layers.0.w", "exp_avg")`."""
    by_origin = {
        entry.origin.path: (strip_wrappers(str(name)), below[0])
        for optimizer in _named(catalogue)
        for name, items in optimizer.state.items()
        for below, entry in items
        if isinstance(entry, Tensor) and entry.origin is not None and len(below) == 1 and isinstance(below[0], str)
    }
    return {
        tensor.path: by_origin[tensor.origin.path]
        for tensor in catalogue.tensors
        if tensor.part.kind == "optimizer" and tensor.origin is not None and tensor.origin.path in by_origin
    }
