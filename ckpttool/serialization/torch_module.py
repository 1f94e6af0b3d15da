"""Converts modules that were saved whole (`nn.Module` pickles, TorchScript) to state dicts, from inert stubs.

    nn.Module     state {"training", "_parameters": {name: tensor}, "_buffers": {...}, "_modules": {name: module},
                  "_non_persistent_buffers_set": {name}, ...}
    TorchScript   state {attribute: tensor | value | module}

Upstream: `torch/nn/modules/module.py` (`state_dict`), torch 1.0 to 2.15; `torch/csrc/jit/serialization`, a script,
whose pickle does not tell parameters, buffers and other tensor attributes apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ckpttool.catalogue.shown import spelt
from ckpttool.catalogue.values import Stub, stub_name, walk
from ckpttool.catalogue.warning import Warning
from ckpttool.catalogue.work_limit import charge
from ckpttool.errors import CorruptError
from ckpttool.serialization.torch_pickle import StorageRef, TensorRef
from ckpttool.text import some

_MAX_DEPTH = 64
_OWN = ("_parameters", "_buffers", "_modules")


@dataclass(slots=True)
class Dropped:
    """What a state dict leaves out of a module: `Dropped(["TinyNet"], ["scratch"], {"training"})`."""

    modules: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # attributes with tensors that no state dict has: not left out
    buffers: list[str] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)

    def warnings(self) -> list[Warning]:
        """Return what a person should know about the view that they get."""
        if not self.modules:
            return []
        text = f"holds {some(self.modules, 5)} as a whole object; its parameters and buffers are shown as a state dict"
        warnings = [Warning("converted", text)]
        if self.kept:
            text = "attributes of modules with tensors, which no state dict has, are kept beside those that it has"
            warnings.append(Warning("converted", f"{text}; `--exclude` leaves them out: {some(self.kept, 5)}"))
        if self.buffers:
            warnings.append(Warning("left-out", f"non-persistent buffers are not read: {some(self.buffers, 5)}"))
        return warnings + self.attribute_warnings()

    def attribute_warnings(self) -> list[Warning]:
        """Return the warnings about what is not a tensor."""
        if not self.attributes:
            return []
        return [Warning("left-out", f"attributes of modules are not read: {some(sorted(self.attributes), 5)}")]


def is_module(value: Any) -> bool:
    """Return whether this stub was an `nn.Module`."""
    return all(isinstance(_state(value).get(own), dict) for own in _OWN)


def _state(value: Any) -> dict[Any, Any]:
    state = value.state[-1] if isinstance(value, Stub) and value.state else {}
    return state if isinstance(state, dict) else {}


def replace_modules(value: Any, dropped: Dropped) -> Any:
    """Return `value` with a state dict in place of each module that stands in its dicts and lists. Containers without
    modules stay the very same objects."""
    return _replace(value, dropped, {}, 0)


def _replace(value: Any, dropped: Dropped, done: dict[int, Any], depth: int) -> Any:
    if isinstance(value, Stub) and is_module(value):
        if id(value) not in done:
            done[id(value)] = value  # an attribute may lead back to it
            dropped.modules.append(stub_name(value) or "")
            done[id(value)] = _state_dict(value, dropped, done, depth)
        return done[id(value)]
    if not isinstance(value, (dict, list)) or depth > _MAX_DEPTH:
        return value
    if id(value) not in done:
        done[id(value)] = value  # a container inside itself stays as it is
        items = value.items() if isinstance(value, dict) else enumerate(value)
        new = {k: replacement for k, v in items if (replacement := _replace(v, dropped, done, depth + 1)) is not v}
        if new:
            copy = done[id(value)] = value.copy()
            for key, replacement in new.items():
                copy[key] = replacement
    return done[id(value)]


# Every module has these; nobody misses them.
_USUAL = {"training", "_is_full_backward_hook", "_non_persistent_buffers_set", "call_super_init", "dump_patches", *_OWN}


def _state_dict(module: Any, dropped: Dropped, done: dict[int, Any], depth: int) -> OrderedDict[str, Any]:
    """Return the state dict of a module, in the order of `nn.Module.state_dict`, and then the attributes that hold
    other tensors than it and the buffers that do not persist."""
    result: OrderedDict[str, Any] = OrderedDict()
    modules = dict(_named_modules(module))
    for prefix, one in modules.items():
        state = _state(one)
        passing = state.get("_non_persistent_buffers_set")
        passing = passing if isinstance(passing, (set, frozenset, list)) else ()
        dropped.buffers += [f"{prefix}{k}" for k, v in state["_buffers"].items() if v is not None and k in passing]
        buffers = {k: v for k, v in state["_buffers"].items() if k not in passing}
        opaque = {k: v for k, v in state["_modules"].items() if not is_module(v)}
        own = (*state["_parameters"].items(), *buffers.items(), *opaque.items())
        result |= {f"{prefix}{name}": value for name, value in own if value is not None}
    seen = {id(one) for one in modules.values()}
    known = _tensors([[_state(one)[own] for own in ("_parameters", "_buffers")] for one in modules.values()], seen)
    for prefix, one in modules.items():
        for name, value in _state(one).items():
            if name in _USUAL or value is None or value == {}:
                continue
            if (new := _tensors(value, seen)) <= known:
                dropped.attributes.add(str(name))
                continue
            if f"{prefix}{name}" in result:
                raise CorruptError(f"a module has a parameter and an attribute `{prefix}{name}`, of other tensors")
            known |= new
            dropped.kept.append(f"{prefix}{name}")
            result[f"{prefix}{name}"] = _replace(value, dropped, done, depth + 1)
    return result


def _named_modules(module: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH:
        raise CorruptError(f"the module `{prefix[:80]}` is nested more than {_MAX_DEPTH} deep")
    charge(16)  # a module that each of many holds twice has a name for each way to it
    yield prefix, module
    for name, child in _state(module)["_modules"].items():
        if is_module(child):
            yield from _named_modules(child, f"{prefix}{name}.", depth + 1)


def _tensors(value: Any, seen: set[int]) -> set[Hashable]:
    """Return what tells the tensors in a value from others."""
    refs = (node.whole() if isinstance(node, StorageRef) else node for node in walk(value, seen))
    return {
        (ref.storage.key, ref.storage.view, ref.dtype.name, ref.offset, ref.shape, ref.strides, ref.codec)
        for ref in refs
        if isinstance(ref, TensorRef)
    }


def script_tensors(value: Any, dropped: Dropped, prefix: str = "", depth: int = 0) -> OrderedDict[str, Any]:
    """Return every tensor of a TorchScript object, under the dotted path of its attribute."""
    if depth > _MAX_DEPTH:
        raise CorruptError(f"the script's object `{prefix[:80]}` is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, (TensorRef, StorageRef)):
        return OrderedDict({prefix: value})
    items: Any = ()
    if isinstance(value, Stub) and (stub_name(value) or "").startswith("torch.jit._pickle.") and value.args:
        # `restore_type_tag([...], "List[Tensor]")` and its like: a container with its type.
        value = value.args[0]
    if isinstance(value, Stub):
        parts = value.state[-1] if value.state else value.args
        items = parts.items() if isinstance(parts, dict) else enumerate(parts if isinstance(parts, tuple) else (parts,))
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif value is not None and (name := prefix.rpartition(".")[2]) not in _USUAL:
        dropped.attributes.add(name)
    result: OrderedDict[str, Any] = OrderedDict()
    for key, child in items:
        result |= script_tensors(child, dropped, f"{prefix}.{spelt(key)}" if prefix else spelt(key), depth + 1)
    return result
