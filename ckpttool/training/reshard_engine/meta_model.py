"""A model and an optimizer made from a layout alone, on the meta device, cut as a training script would have cut them.

    ("model", "layers.0.w")                 a parameter of the module `model.layers.0`, cut by `fully_shard`
    ("model", "rope"), ("model", "gate")    buffers: what is whole, and what has no dimensions, which FSDP2 refuses
    ("optim", "state", 3, "exp_avg")        optimizer.state[the parameter]["exp_avg"]
    ("optim", "state", 3, "row")            a tensor by itself, where it is not cut as its parameter is

Nothing has to be known of the model's code: `load_state_dict` asks for names and shapes only.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from ckpttool.catalogue.entries import Catalogue, Object, Path, Tensor
from ckpttool.errors import CkptError
from ckpttool.formats.dcp import combine as joining
from ckpttool.layout import select as layout
from ckpttool.layout.mesh import Placements, Sharding, same_boxes
from ckpttool.layout.optimizer import parse as found
from ckpttool.layout.optimizer import respell as optimkeys
from ckpttool.training.contents import Described, Group, Optimizer, Shape

# What a module has of its own, and what torch and our loader take off names.
_TAKEN = {*dir(nn.Module()), *dir(FSDPModule), "module"}


class _Node(nn.Module):  # type: ignore[misc] # torch is not looked into
    """A module of the shell: it has parameters, buffers and modules, and does nothing."""


class ShellOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Has groups, hyper-parameters and state, and does nothing."""

    def step(self, closure: Any = None) -> None:
        """Never called."""
        raise AssertionError


@dataclass(slots=True)
class Slot:
    """Where a tensor of the layout is in the shell: a parameter or a buffer of `node`; with `key`, what the optimizer
    keeps under it of that parameter."""

    node: nn.Module
    leaf: str
    name: str
    key: str | None = None

    @property
    def value(self) -> Any:
        held = self.node._parameters if self.leaf in self.node._parameters else self.node._buffers
        return held[self.leaf]


@dataclass(slots=True)
class Shell:
    """`told` says to the loader what goes where, in the names of the shell."""

    model: nn.Module
    told: Described
    optimizer: ShellOptimizer | None = None
    slots: dict[Path, Slot] = field(default_factory=dict)

    def state(self) -> dict[Path, torch.Tensor]:
        """What was filled, by its path in the layout."""
        made: dict[Path, torch.Tensor] = {}
        for path, slot in self.slots.items():
            value = slot.value
            if slot.key is not None:
                assert self.optimizer is not None
                value = self.optimizer.state[value][slot.key]
            made[path] = value.detach()
        return made


def build(laid: Catalogue, placing: Sharding, mesh: DeviceMesh, path: str) -> Shell:
    """The shell of everything that is of a model or an optimizer, and of whatever else is cut. `mesh` is
    `placing.mesh`, for real; `path` is for messages."""
    return _Building(laid, placing, mesh, path).shell()


class _Building:
    def __init__(self, laid: Catalogue, placing: Sharding, mesh: DeviceMesh, path: str) -> None:
        self._laid, self._placing, self._mesh = laid, placing, mesh
        self._keeper = joining.keepers(laid)
        self._root: nn.Module = _Node()
        self._segments: dict[tuple[int, bool, str], str] = {}
        self._ignored: set[nn.Parameter] = set()
        self._dims: dict[nn.Parameter, int] = {}
        self._shell = Shell(self._root, Described(path, laid.format))

    def shell(self) -> Shell:
        held = [t for t in self._laid.tensors if self._is_held(t)]
        owners = _owners(self._laid)
        trained = {owners[path][0] for path in owners if path in self._laid.entries}
        parameters: dict[str, Tensor] = {}
        for tensor in held:
            if tensor.part.kind == "model":
                name = layout.strip_wrappers(tensor.fqn)
                self._place(tensor, name in trained)
                parameters.setdefault(name, tensor)
        for tensor in held:
            if tensor.part.kind != "model":
                name, key = owners.get(tensor.path, ("", ""))
                parameter = parameters.get(name)
                if parameter is None or not self._follows(tensor, parameter, key):
                    self._place(tensor, False)
        self._tie()
        self._shard()
        self._make_optimizer(parameters)
        return self._shell

    def _is_held(self, tensor: Tensor) -> bool:
        if tensor.embedded or self._keeper[tensor.path] != tensor.path:
            return False
        return tensor.part.kind in ("model", "optimizer") or tensor.path in self._placing.placements

    def _placed(self, tensor: Tensor) -> Placements:
        return self._placing.placements.get(tensor.path, {})

    # Modules ---------------------------------------------------------------------------------------------------------

    def _place(self, tensor: Tensor, trained: bool) -> None:
        """Parameters are what FSDP cuts and what has state, as far as it has dimensions and can have a gradient; the
        rest are buffers."""
        placed = self._placed(tensor)
        value: Any = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype.name), device="meta")
        if "tp" in placed:
            value = distribute_tensor(value, self._mesh["tp"], [Shard(placed["tp"])], src_data_rank=None)
        slot = self._slot(tensor.path)
        learns = value.is_floating_point() or value.is_complex()
        if "shard" in placed or (trained and learns and tensor.shape):
            value = nn.Parameter(value, requires_grad=learns)
            slot.node._parameters[slot.leaf] = value
            if "shard" in placed:
                self._dims[value] = placed["shard"]
            else:
                self._ignored.add(value)
        else:
            slot.node._buffers[slot.leaf] = value
        self._shell.slots[tensor.path] = slot
        self._shell.told.model[slot.name] = Shape(tensor.dtype.name, tensor.shape)
        self._shell.told.tensors["model", slot.name] = tensor.origin or tensor

    def _slot(self, path: Path) -> Slot:
        *above, last = [segment for key in path for segment in str(key).split(".")]
        node, names = self._root, list[str]()
        for segment in above:
            names.append(self._segment(node, segment, leaf=False))
            node = node._modules.setdefault(names[-1], _Node())
        leaf = self._segment(node, last, leaf=True)
        return Slot(node, leaf, ".".join([*names, leaf]))

    def _segment(self, node: nn.Module, key: str, *, leaf: bool) -> str:
        """A key as a module may have it: `type`, `_orig_mod` and an empty one get names that stand for them, and so
        does a tensor that is called like a module beside it."""
        known = self._segments.get((id(node), leaf, key))
        if known is None:
            odd = _is_odd(key) or (id(node), not leaf, key) in self._segments
            known = self._segments[id(node), leaf, key] = f"-{len(self._segments)}" if odd else key
        return known

    def _tie(self) -> None:
        """Second names of parameters are the same parameter, as in the model that was saved."""
        for path, kept in self._keeper.items():
            slot = self._shell.slots.get(kept)
            tensor = self._laid.tensor(path)
            if path == kept or slot is None or slot.leaf not in slot.node._parameters or tensor.part.kind != "model":
                continue
            again = self._slot(path)
            again.node._parameters[again.leaf] = slot.value
            self._shell.told.model[again.name] = Shape(tensor.dtype.name, tensor.shape)
            self._shell.told.same[again.name] = slot.name

    def _shard(self) -> None:
        if not self._dims:
            return
        names = self._mesh.mesh_dim_names or ()
        dims = dict(self._dims)
        over = self._mesh["replicate", "shard"] if "replicate" in names else self._mesh["shard"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fully_shard(
                self._root, mesh=over, ignored_params=self._ignored,
                shard_placement_fn=lambda parameter: Shard(dims[parameter]),
            )  # fmt: skip

    # The optimizer ---------------------------------------------------------------------------------------------------

    def _follows(self, tensor: Tensor, parameter: Tensor, key: str) -> bool:
        """Whether the tensor is what the optimizer keeps of a parameter under a key, cut as the parameter is, or whole
        and of another shape: so it is that torch knows where to put it."""
        slot = self._shell.slots[parameter.path]
        if slot.leaf not in slot.node._parameters or not slot.value.requires_grad:
            return False
        alike = tensor.shape == parameter.shape and same_boxes(tensor, parameter)
        told = self._shell.told
        told.optimizer = told.optimizer or Optimizer([], {})
        state = told.optimizer.state.setdefault(slot.name, {})
        if not (alike or (tensor.shape != parameter.shape and not self._placed(tensor))) or (key,) in state:
            return False
        state[key,] = Shape(tensor.dtype.name, tensor.shape)
        told.tensors["optimizer", slot.name, key] = tensor.origin or tensor
        self._shell.slots[tensor.path] = Slot(slot.node, slot.leaf, slot.name, key)
        return True

    def _make_optimizer(self, parameters: dict[str, Tensor]) -> None:
        """Of the parameters that there is state of, in the groups of the layout, with their hyper-parameters."""
        told = self._shell.told.optimizer
        if told is None:
            return
        told.state = {name: kept for name, kept in told.state.items() if kept}
        names = {name: self._shell.slots[t.path].name for name, t in parameters.items()}
        left = dict.fromkeys(told.state)
        for params, values in _groups(self._laid):
            kept = [names[name] for name in params if names.get(name) in left]
            if kept:
                told.groups.append(Group(kept, values))
                left = {name: None for name in left if name not in set(kept)}
        by_name = {slot.name: slot.value for slot in self._shell.slots.values() if slot.key is None}
        if told.state:
            groups = [{"params": [by_name[name] for name in group.params], **group.values} for group in told.groups]
            self._shell.optimizer = ShellOptimizer(groups, {})
        else:
            self._shell.told.optimizer = None


def _is_odd(key: str) -> bool:
    return not key or key in _TAKEN or key.startswith("_") or "-" in key


def _named(laid: Catalogue) -> list[found.Optimizer]:
    """The optimizers of a layout by the names of parameters, where those can be told."""
    try:
        laid = optimkeys.respell(laid, "fqn")
    except CkptError:
        # Some have numbers that could be those of several parameters: their state is then not the parameters'.
        return [one for one in found.optimizers(laid) if one.spelling != "id"]
    return found.optimizers(laid)


def _owners(laid: Catalogue) -> dict[Path, tuple[str, str]]:
    """Which parameter a piece of optimizer state is of, and under which key: `("layers.0.w", "exp_avg")`."""
    by_origin = {
        entry.origin.path: (layout.strip_wrappers(str(name)), below[0])
        for one in _named(laid) for name, items in one.state.items() for below, entry in items
        if isinstance(entry, Tensor) and entry.origin is not None and len(below) == 1 and isinstance(below[0], str)
    }  # fmt: skip
    return {
        tensor.path: by_origin[tensor.origin.path]
        for tensor in laid.tensors
        if tensor.part.kind == "optimizer" and tensor.origin is not None and tensor.origin.path in by_origin
    }


def _groups(laid: Catalogue) -> list[tuple[list[str], dict[str, Any]]]:
    """The parameters of each group, and those of its hyper-parameters that stand for themselves."""
    made = []
    for one in _named(laid):
        for group in one.groups:
            values = {
                str(below[0]): entry.value
                for below, entry in group.items
                if len(below) == 1 and below[0] != "params" and isinstance(entry, Object)
            }
            made.append(([layout.strip_wrappers(str(name)) for name in group.params], values))
    return made
