"""Finds what a script keeps in no state of modules and optimizers: in its variables, and in what these hold.

    step    trainer.best    Net.fade (an attribute of a module)    Meter.count (of a class)    clip.norm (in a closure)

Nothing of the script is called, and what libraries have is not searched.
"""

import json
import os
import random
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from inspect import unwrap
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

from .state import FEW, PLAIN, each_of, is_of, plain, sha, spelt

_LOOSE, _ITEM = 1 << 30, 1 << 11  # bytes of tensors in no module, and for an item of a list, that have digests
_OF_NUMPY = ("numpy.random._generator.Generator", "numpy.random.mtrand.RandomState")
_DEEP = 3  # dicts and objects in each other in which values of a variable are looked for
_FOLDER = os.path.dirname(__file__)


class Variables:
    """Finds values by the names that they have in a script. What is in the objects with the ids `left_out` is not
    looked for."""

    def __init__(self, torch: Any, left_out: Iterable[int]) -> None:
        self._torch = torch
        self._libraries = tuple(os.path.dirname(os.path.dirname(str(one.__file__))) for one in (torch, json))
        self._kinds = torch.nn.Module, torch.optim.Optimizer, torch.Tensor
        # Of each module and optimizer, and not what a script has set.
        self._of_all = {*vars(torch.nn.Module()), "state", "defaults", "param_groups"}
        self._left, self._left_out, self._own = _LOOSE, {*left_out}, set[str]()
        self._values, self._generators = dict[str, Any](), dict[str, str]()
        self._loose: dict[int, str] = {}
        self._descriptors: dict[int, list[tuple[str, Any]]] = {}  # by the id of a class, of its `__dict__` and slots

    def find(self, tensors: Iterable[Any], gradients: dict[str, Any], objects: Iterable[Any]) -> dict[str, Any]:
        """Return the `loose` tensors; the plain values of `variables`, and in them those of the `gradients`; which of
        them are the script's `own`; and digests of `generators`. `objects` are modules and optimizers."""
        for tensor in {id(one): one for one in tensors}.values():
            self._spell(tensor, tensor)
        variables = self._variables()
        self._search([*variables.items()])
        self._search([(type(one).__name__, one) for one in objects if id(one) not in self._left_out])
        of_gradients = {name: self._loose.get(id(one)) for name, one in gradients.items()}
        return {
            "loose": sorted({*self._loose.values()}),
            "variables": {**of_gradients, **self._values},
            "own": sorted(self._own & {*self._values, *self._generators}),
            "generators": self._generators,
        }

    def _variables(self) -> dict[str, Any]:
        """Return the variables of the script, and of the functions that it is in."""
        main = vars(sys.modules["__main__"])
        found, self._own, frame = dict[str, Any](main), {*main}, sys._getframe().f_back
        while frame is not None and frame.f_locals is not main:  # what runs it has its own
            file, names = frame.f_code.co_filename, {*frame.f_locals}
            if os.path.dirname(file) != _FOLDER and "torch" not in frame.f_globals.get("__name__", "").split("."):
                found |= frame.f_locals
                self._own = self._own - names if file.startswith(self._libraries) else self._own | names
            frame = frame.f_back
        return found

    def _search(self, variables: list[tuple[str, Any]]) -> None:
        places, names = deque((name, one, 0) for name, one in variables), set[str]()
        while places:
            name, one, depth = places.popleft()
            if type(one) in ProxyTypes or type(one).__name__ == "_LazyModule":  # which is loaded when it is looked at
                continue
            self._look_at(name, one)
            is_end = depth == _DEEP or (depth and (is_of(one, *self._kinds) or len(self._values) > FEW))
            if is_end or id(one) in self._left_out:
                continue
            inside = dict[Any, Any]()
            with suppress(Exception):  # of a class that does not like to be looked at, or that changes meanwhile
                inside = self._inside(one, depth)
            if inside:
                self._left_out.add(id(one))
                few = [*inside.items()][:FEW]
                inner = {f"{name}.{key}": each for key, each in few if is_of(key, str, int)}
                inner = {key: each for key, each in inner.items() if key not in names}
                names.update(inner)  # `|=` with keys would make the whole set anew
                places.extend((key, each, depth + 1) for key, each in inner.items())
                is_own = name in self._own and not self._is_of_library(type(one))
                self._own.update(inner if is_own or is_of(one, *self._kinds[:2]) else ())

    def _inside(self, one: Any, depth: int) -> dict[Any, Any]:
        """Return what is in a variable by name: in dicts, objects, closures, a script's classes and modules."""
        if is_of(one, list, tuple, deque):
            items = dict(enumerate(each_of(one))) if len(one) < FEW else {}
            # Of thousands of items, the classes are a few.
            classes = {id(type(each)): type(each) for each in items.values()}.values()
            is_any = any(self._is_own(cls) and not issubclass(cls, self._kinds) for cls in classes)
            return items if is_any or any(id(each) in self._loose for each in items.values()) else {}
        if is_of(one, dict):
            return dict(dict.items(one))
        if is_of(one, FunctionType, MethodType):
            function = getattr(one, "__func__", one)
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            is_own = not function.__code__.co_filename.startswith(self._libraries)
            return {name: cell.cell_contents for name, cell in cells} if is_own else {}
        if is_of(one, ModuleType, type):
            is_own = not depth and self._is_own(one)
            is_code = (ModuleType, property, classmethod, staticmethod)
            own = {key: each for key, each in vars(one).items() if is_own and key[:2] != "__"}
            return {key: each for key, each in own.items() if not callable(each) and not is_of(each, *is_code)}
        own = self._attributes(one)
        if is_of(one, *self._kinds[:2]):
            kinds = (float, self._torch.Generator) if self._is_of_library(type(one)) else (object,)
            own = {key: each for key, each in own.items() if key not in self._of_all and is_of(each, *kinds)}
            # Of an optimizer, torch keeps some for itself.
            private = own if is_of(one, self._kinds[0]) else self._named_in(type(one))
            return {key: own[key] for key in own if key[0] != "_" or key in private}
        return own

    def _named_in(self, cls: type) -> set[str]:
        """Return the names of attributes in the functions of a script's class."""
        functions = (each for base in cls.__mro__ if not self._is_of_library(base) for each in vars(base).values())
        codes = (getattr(unwrap(each), "__code__", None) for each in functions if is_of(each, FunctionType))
        return {name for code in codes if code is not None for name in code.co_names}

    def _attributes(self, one: Any) -> dict[str, Any]:
        """Return what an object has in its `__dict__` and in slots, whatever its class says that it has."""
        found, cls = dict[str, Any](), type(one)
        if id(cls) not in self._descriptors:
            every = [(base, *row) for base in cls.__mro__[::-1] for row in vars(base).items()]
            dicts = [(key, each) for _, key, each in every if key == "__dict__" and is_of(each, GetSetDescriptorType)]
            slots = [
                (key, each) for base, key, each in every if is_of(each, MemberDescriptorType) and self._is_own(base)
            ]
            self._descriptors[id(cls)] = [*dicts, *slots]
        for name, each in self._descriptors[id(cls)]:
            with suppress(AttributeError):  # a slot that is empty
                found |= each.__get__(one) if name == "__dict__" else {name: each.__get__(one)}
        return found

    def _is_own(self, one: Any) -> bool:
        return self._file_of(one) != "" and not self._is_of_library(one)

    def _file_of(self, one: Any) -> str:
        module = one if is_of(one, ModuleType) else sys.modules.get(str(one.__module__))
        return "__main__" if module is sys.modules["__main__"] else getattr(module, "__file__", None) or ""

    def _is_of_library(self, one: Any) -> bool:
        return self._file_of(one).startswith(self._libraries)

    def _look_at(self, name: str, one: Any) -> None:
        """Take a value, the state of a generator, or what has the elements of a tensor."""
        with suppress(Exception):  # of a class that does not like to be looked at, or of a dtype that torch has not
            if is_of(one, self._torch.Generator):
                self._generators[name] = sha(bytes(one.get_state().tolist()))  # of what is gone, there are no bytes
                self._spell(one, one.get_state())
            elif is_of(one, random.Random):
                self._generators[name] = sha(repr(one.getstate()).encode())
            elif f"{type(one).__module__}.{type(one).__name__}" in _OF_NUMPY:
                state = one.bit_generator.state if hasattr(one, "bit_generator") else one.get_state()
                self._generators[name] = sha(repr(state).encode())
            elif type(one).__name__ == "ndarray" and id(one) not in self._loose and one.nbytes <= self._left:
                self._spell(one, self._torch.from_numpy(one))
            elif is_of(one, self._kinds[2]) and one.grad_fn is not None and one.numel() > 1:  # as a hidden state
                self._spell(one, one.detach())
            if id(one) in self._loose:
                self._values[name] = self._loose[id(one)]
            elif is_of(one, list, deque) and len(one) < FEW and len(one) * _ITEM <= self._left:
                self._left -= len(one) * _ITEM
                self._values[name] = [*map(plain, each_of(one))]  # whole, as a checkpoint has it
            elif is_of(one, *PLAIN):
                self._values[name] = plain(one)

    def _spell(self, one: Any, tensor: Any) -> None:
        if (size := tensor.numel() * tensor.element_size()) <= self._left:
            with suppress(Exception):  # of a class of tensors that has no bytes of its own
                self._loose[id(one)] = spelt(self._torch, tensor)
                self._left -= size
