"""Tensors that a recipe's objects hold and that no part of its state covers, such as an average of the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from ckpttool.analysis.audit.checks import Checks
from ckpttool.text import plural

_MAX_DEPTH = 8


def check_uncovered(state: Mapping[str, Any], module: Mapping[str, Any], checks: Checks) -> None:
    """Name the tensors that the objects of a state, and the variables of the recipe's `module`, hold beside what is
    saved. A copy of the model's parameters differs after a resume; others may be constants, and are noted."""
    known = {id(value) for value in state.values()}
    own = {name: value for name, value in module.items() if not name.startswith("__") and id(value) not in known}
    walk = _Walk(state)
    # What a data loader holds beside its state is data.
    objects = [(name, value) for name, value in state.items() if not _is_loader(value)]
    held = [*walk.held(objects), *walk.held(own.items())]
    shapes = Counter(tuple(p.shape) for p in state["model"].parameters() if p.requires_grad)
    holders: dict[str, list[Any]] = {}
    for holder, tensor in held:
        holders.setdefault(holder, []).append(tensor)
    for holder, tensors in holders.items():
        is_copy = shapes <= Counter(tuple(tensor.shape) for tensor in tensors)
        what = f"`{holder}` holds {plural(len(tensors), 'tensor')} that no `state_dict` of the recipe's state has"
        if is_copy:
            checks.differs(
                "recipe", f"{what}, shaped like the model's parameters: they start afresh on resume", [holder]
            )
        else:
            hint = "what training changes belongs in the state that `build` returns; constants need not"
            checks.note("recipe", what, [holder], hint=hint)


def _is_loader(value: Any) -> bool:
    from torch import nn

    return not isinstance(value, nn.Module) and (hasattr(value, "__next__") or hasattr(value, "__iter__"))


class _Walk:
    """A walk over objects, which finds each tensor once and passes over those that are saved or made again."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        import torch

        self._torch = torch
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # an `id` is that of one object only while it lives
        models = [value for value in state.values() if isinstance(value, torch.nn.Module)]
        covered = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        self._saved: dict[str, Counter[tuple[int, ...]]] = {}
        for name, value in state.items():
            if callable(getattr(value, "state_dict", None)):
                tensors = [tensor for _, tensor in self._tensors("", value.state_dict(), 0)]
                covered += tensors
                if not isinstance(value, torch.nn.Module):
                    self._saved[name] = Counter(tuple(tensor.shape) for tensor in tensors)
        self._seen.clear()
        self._covered = {self._storage(tensor) for tensor in covered}

    def held(self, items: Any) -> Iterator[tuple[str, Any]]:
        """Yield each tensor that is not covered, and the name of what holds it."""
        for name, value in items:
            # An object may save copies of what it holds.
            saved = self._saved.get(name, Counter())
            for holder, tensor in self._tensors(name, value, 0):
                if saved[tuple(tensor.shape)]:
                    saved[tuple(tensor.shape)] -= 1
                elif tensor.numel() and self._storage(tensor) not in self._covered:
                    yield holder, tensor

    def _storage(self, tensor: Any) -> int:
        local = getattr(tensor, "_local_tensor", tensor)
        return int(local.untyped_storage()._cdata)

    def _tensors(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield tensors with the name of the attribute that they are in, or of the container there."""
        torch = self._torch
        if id(value) in self._seen or depth > _MAX_DEPTH:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            for child in value.values():
                yield from self._tensors(name, child, depth + 1)
        elif isinstance(value, (list, tuple, set)):
            for child in value:
                yield from self._tensors(name, child, depth + 1)
        elif isinstance(value, torch.nn.Module):
            yield from ((name, tensor) for tensor in (*value.parameters(), *value.buffers()))
            for prefix, module in value.named_modules():
                yield from self._attributes(f"{name}.{prefix}".rstrip("."), module, depth)
        elif not isinstance(value, (type, ModuleType, FunctionType, MethodType)):
            yield from self._attributes(name, value, depth)

    def _attributes(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield those of the attributes of a module, or of an object of the script's own class."""
        is_module = isinstance(value, self._torch.nn.Module)
        outside = ("torch", "builtins", "typing")
        is_own = is_module or any(c.__module__.partition(".")[0] not in outside for c in type(value).__mro__)
        skipped = vars(self._torch.nn.Module()).keys() if is_module else ()
        for key, child in getattr(value, "__dict__", {}).items() if is_own else ():
            if key not in skipped:
                yield from self._tensors(f"{name}.{key}", child, depth + 1)
