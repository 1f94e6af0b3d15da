"""Recognises what a dict, a list, a tensor or an object is by its content, whatever it is called.

    optimizer    {state, param_groups}, the state alone, flat names `state.0.exp_avg`, `state/0/exp_avg`, `exp_avg.w`
    scheduler    counters: last_epoch with base_lrs, _step_count, ...; an object of torch.optim.lr_scheduler
    rng          uint8[5056] of torch, uint8[16] of CUDA, tuples of Python and numpy, lists of 625 numbers
    model        tensors by dotted names, or with the `_metadata` of a module's state dict; a pickled module

A list or a dict of what is all of one kind is of that kind. Each dict is looked at once.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Object, Tensor
from ckpttool.catalogue.values import Stub, stub_name

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
"""Keys of an optimizer's state that have the shape of their parameter, and no other use."""
_MOMENTS = frozenset(MOMENTS)

_FLAT_STATE = re.compile(rf"(?s)(?:state[./]|.+[./])(?:.*[./])?(?:{'|'.join(MOMENTS)})")
_FLAT_BY_MOMENT = re.compile(rf"(?s)(?:state[./])?(?:{'|'.join(MOMENTS)})[./].+")
_FLAT_REST = re.compile(r"(?s)(?:state|param_groups)[./].+|.+[./]step")
_GENERATORS = {5056, 816, 16, 44}  # bytes of a generator's state: CPU, CUDA before 2018, CUDA, MPS
_NUMBERS = {5056, 625, 624}
_COUNTERS = {"_step_count", "base_lrs", "_last_lr", "step_size", "lr_lambdas", "_get_lr_called_within_step"}
_SCHEDULERS = ({"patience", "num_bad_epochs"}, {"_schedulers", "last_epoch"}, {"_schedulers", "_milestones"})
_LOADERS = {"_snapshot", "_sampler_iter_state", "_steps_since_snapshot", "_num_yielded", "_sampler_iter_yielded"}
_ALONE = (
    {"last_step"},
    {"losses", "n_steps"},
    {"losses", "n_steps", "current_lr"},
    {"hyperparam_value", "metric_values", "current_patient"},  # SpeechBrain's, as the two before
)
_MODULE = re.compile(r"(?s)(?:.*\.)?(?:weight|bias|running_mean|running_var|num_batches_tracked|in_proj_\w+)")
_RANDOM = re.compile(r"(?i).*(?:rng|random|seed|generator).*|cuda|torch|numpy|python|cpu")
_MERGED = {"optimizer", "scheduler", "scaler", "rng"}
_UNKNOWN: Any = object()


_NO_CHILDREN: dict[Hashable, Any] = {}  # of the entries, which are most of all; never added to


class KeyNode:
    """A key path: what lies below it, and the entry at it."""

    __slots__ = ("_has_parts", "_is_state_dict", "_kind", "children", "entry", "has_metadata")

    def __init__(self) -> None:
        self.children: dict[Hashable, KeyNode] = _NO_CHILDREN
        self.entry: Tensor | Object | None = None
        self.has_metadata = False
        self._kind = self._has_parts = self._is_state_dict = _UNKNOWN

    @property
    def kind(self) -> str | None:
        """The kind that the content gives away; None where it does not."""
        if self._kind is _UNKNOWN:
            self._kind = _kind(self)
        kind: str | None = self._kind
        return kind

    @property
    def is_state_dict(self) -> bool:
        """Whether this is the state dict of a module, known by its names or by what torch notes in it."""
        if self._is_state_dict is _UNKNOWN:
            self._is_state_dict = self.kind in (None, "model") and _is_state_dict(self)
        return bool(self._is_state_dict)

    @property
    def is_part(self) -> bool:
        """Whether the content gives away what this is. A tensor alone may be a buffer, unless it is as long as the
        state of torch's generator."""
        if isinstance(self.entry, Tensor):
            return self.kind is not None and self.entry.shape == (5056,)
        return self.kind is not None or self.is_state_dict

    @property
    def state_dicts(self) -> int:
        """How many state dicts of modules there are at and below the path."""
        return 1 if self.is_state_dict else sum(one.state_dicts for one in self.children.values() if one.children)

    @property
    def has_parts(self) -> bool:
        """Whether something below is of a kind of its own."""
        if self._has_parts is _UNKNOWN:
            below = self.children.values()
            self._has_parts = any(one.is_part or one.has_parts for one in below)
        return bool(self._has_parts)

    def child(self, key: Hashable) -> KeyNode:
        """The node below this one at `key`, which is made if it is not there."""
        node = self.children.get(key)
        if node is None:
            node = KeyNode()
            if self.children:
                self.children[key] = node
            else:
                self.children = {key: node}
        return node

    def entries(self) -> Iterator[Tensor | Object]:
        """The entries at and below the path."""
        todo = [self]
        while todo:
            node = todo.pop()
            if node.entry is not None:
                yield node.entry
            if node.children:  # as most nodes have not
                todo.extend(reversed(node.children.values()))

    @property
    def has_tensor(self) -> bool:
        """Whether there is a tensor at or below the path."""
        return any(isinstance(entry, Tensor) for entry in self.entries())

    def holds(self, kind: str) -> bool:
        """Whether something below is of this kind, by its content."""
        below = self.children.values()
        is_model = kind == "model"
        return any(one.kind == kind or (is_model and one.is_state_dict) or one.holds(kind) for one in below)


def tree(catalogue: Catalogue) -> KeyNode:
    """Return the entries of a catalogue as the tree of their keys."""
    root = KeyNode()
    for path, entry in catalogue.entries.items():
        node = root
        for key in path:
            node = node.children.get(key) or node.child(key)
        node.entry = entry
    for path, container in catalogue.containers.items():
        if isinstance(container.attrs, dict) and "_metadata" in container.attrs:
            below: KeyNode | None = root
            for key in path:
                below = below.children.get(key) if below is not None else None
            if below is not None:
                below.has_metadata = True
    return root


def is_module_name(key: object) -> bool:
    """Return whether a tensor of this name can only be a module's."""
    return isinstance(key, str) and _MODULE.fullmatch(key[-200:]) is not None


def is_extra_state(key: object) -> bool:
    """Return whether a key is what torch calls the state of a module's own: `layers.0._extra_state`."""
    return isinstance(key, str) and key.rpartition(".")[2] == "_extra_state"


def _kind(node: KeyNode) -> str | None:
    if isinstance(node.entry, Tensor):
        return "rng" if is_generator(node.entry) else None
    if isinstance(node.entry, Object):
        return _kind_of_object(node.entry)
    children = node.children
    keys: set[Any] = {*children} if len(children) <= 64 else {*()}
    kind = _kind_of_keys(children, keys)
    if kind is not None or not children:
        return kind
    first = next(iter(children.values()))
    if first.children and all(not _MOMENTS.isdisjoint(one.children) for one in children.values()):
        return "optimizer"
    if first.children and all({"params", "lr"} <= one.children.keys() for one in children.values()):
        return "optimizer"
    if _is_flat_optimizer(node):
        return "optimizer"
    return _merged(node)


def _kind_of_keys(children: dict[Hashable, KeyNode], keys: set[Any]) -> str | None:
    if "state" in children and "param_groups" in children:
        return "optimizer"
    if ("last_epoch" in keys and keys & _COUNTERS) or any(known <= keys for known in _SCHEDULERS) or keys in _ALONE:
        return "scheduler"
    if {"scale", "growth_factor"} <= keys or (keys == {"loss_scaler0"}):
        return "scaler"
    if {"bit_generator", "state"} <= keys or {"name", "keys", "pos"} <= keys:
        return "rng"
    if keys & _LOADERS:
        return "dataloader"
    return None


def _is_flat_optimizer(node: KeyNode) -> bool:
    """Return whether the names are those of flattened optimizer state: `state.0.exp_avg`, `param_groups.w.lr`."""
    names = [key for key, one in node.children.items() if isinstance(key, str) and not one.children]
    if not names or len(names) < len(node.children):
        return False
    if all(map(_FLAT_BY_MOMENT.fullmatch, names)):
        return True
    if not any((n.endswith(MOMENTS) and _FLAT_STATE.fullmatch(n)) or n.startswith("param_groups.") for n in names):
        return False
    return all(_FLAT_STATE.fullmatch(name) or _FLAT_REST.fullmatch(name) for name in names)


def _merged(node: KeyNode) -> str | None:
    """Return the one kind of everything in a list, but for what says nothing; of a dict, if all are generators."""
    kinds: set[str] = set()
    mergeable = _MERGED if all(isinstance(key, int) for key in node.children) else {"rng"}
    for key, one in node.children.items():
        kind = one.kind
        if kind in mergeable:
            kinds.add(kind)
        elif kind is not None or not (_is_nothing(one) or ("rng" in kinds and _is_random(key) and not one.children)):
            return None
    return kinds.pop() if len(kinds) == 1 else None


def _is_nothing(node: KeyNode) -> bool:
    entry = node.entry
    return isinstance(entry, Object) and entry.is_read and entry.value in (None, [], {}, ())


def _is_random(key: object) -> bool:
    return isinstance(key, str) and _RANDOM.fullmatch(key[:80]) is not None


def is_generator(tensor: Tensor) -> bool:
    """Return whether a tensor is as long as the state of a generator, and of its dtype."""
    size = tensor.shape[0] if len(tensor.shape) == 1 else 0
    if tensor.dtype.name == "uint8":
        return size in _GENERATORS
    return size in (624, 625) and tensor.dtype.name in ("int64", "uint32")


def _kind_of_object(entry: Object) -> str | None:
    if not entry.is_read:
        return None
    value = entry.value
    if isinstance(value, Stub):
        return _kind_of_class(value)
    # The generators of several ranks or devices: a list of lists of lists may be without end.
    are_several = isinstance(value, list) and bool(value) and all(map(_is_state_of_generator, value[:16]))
    return "rng" if are_several or _is_state_of_generator(value) else None


def _is_state_of_generator(value: object) -> bool:
    """Return whether this is the state of a generator of Python or NumPy, or as long as one of torch."""
    if not isinstance(value, (tuple, list)) or not value:
        return False
    if isinstance(value, list) and len(value) in _NUMBERS:
        return all(type(one) is int for one in value)
    is_python = len(value) == 3 and value[0] == 3 and isinstance(value[1], (tuple, list)) and len(value[1]) == 625
    return is_python or (isinstance(value[0], str) and value[0] == "MT19937")


def _kind_of_class(value: Stub) -> str | None:
    name = stub_name(value) or ""
    if name.startswith("torch.optim.lr_scheduler."):
        return "scheduler"
    if name.startswith("torch.optim."):
        return "optimizer"
    if name.startswith(("torch.amp.grad_scaler.", "torch.cuda.amp.grad_scaler.")):
        return "scaler"
    state = value.state[0] if value.state else None
    return "model" if isinstance(state, dict) and {"_parameters", "_modules"} <= state.keys() else None


def _is_state_dict(node: KeyNode) -> bool:
    if not node.children or isinstance(node.entry, Tensor):
        return False
    tensors = telling = weights = 0
    for key, one in node.children.items():
        if not isinstance(key, str) or one.children:
            return False
        if isinstance(one.entry, Tensor):
            tensors += 1
            telling += "." in key and not key.startswith(".")
            weights += one.entry.dtype.kind not in ("int", "bool") or is_module_name(key)
        elif not (key.endswith("_extra_state") or _is_nothing(one)):
            return False
    return tensors > 0 and (node.has_metadata or (telling > 0 and weights > 0))
