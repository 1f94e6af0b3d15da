"""The user's recipe: a Python file that builds a model and takes one training step.

    def build(mesh):                    a dict: "model", "optimizer", and everything else with a state
    def step(state, i):                 take one whole optimizer step, return the loss
    def mesh(world):                    optional: {"replicate": 2, "shard": world // 2}; default {"shard": world}

A recipe is the user's program and is run as such; nothing in a checkpoint ever is.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

from ckpttool.catalogue.shown import shown
from ckpttool.errors import OverwriteError, UsageError
from ckpttool.layout.mesh import ORDER, Mesh
from ckpttool.storage.errors import from_os_error
from ckpttool.text import meant

_TEMPLATE = os.path.join(os.path.dirname(__file__), "recipe_template.txt")
_PARAMETERS = {"build": ("mesh",), "step": ("state", "i"), "mesh": ("world",)}
_START = "`ckpttool verify-resume init` writes a template"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A loaded recipe: the path of its file, and its functions."""

    path: str
    build: Callable[[Any], dict[str, Any]]
    step: Callable[[dict[str, Any], int], Any]
    mesh: Callable[[int], Mapping[str, int]] | None = None


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Return the recipe in the file `path`. Its directory is added to `sys.path`, as that of a script.

    Raises UsageError if it is not a Python file, fails when it is run, or lacks a function.
    """
    path = os.path.abspath(path)
    check_recipe(path)
    module = _imported(path)
    names = [name for name in _PARAMETERS if name != "mesh" or hasattr(module, "mesh")]
    return Recipe(path, **{name: _function(module, path, name) for name in names})


def check_recipe(path: str) -> None:
    """Raise UsageError unless there is a file at `path`."""
    if os.path.isdir(path):
        hint = "the recipe is a Python file: `--recipe recipe.py`; checkpoints are named without an option"
        raise UsageError(f"`{path}` is a directory, and no recipe", hint=hint)
    if not os.path.isfile(path):
        raise UsageError(f"`{path}`: there is no such recipe", hint=_START)


def _invalid(path: str, what: str, hint: str | None = None, **facts: Any) -> UsageError:
    return UsageError(f"`{path}`: {what}", hint=hint, file=path, **facts)


def _imported(path: str) -> ModuleType:
    name = "ckpttool_recipe_" + "".join(c if c.isalnum() else "_" for c in os.path.basename(path).removesuffix(".py"))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"`{path}`: a recipe is a Python file, with the suffix `.py`", hint=_START)
    module = importlib.util.module_from_spec(spec)
    # Data loaders' processes and dataclasses look up by name what the recipe defines.
    sys.modules[name] = module
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(path, "does not run", error) from error
    return module


def _failed(path: str, what: str, error: Exception) -> UsageError:
    """Return an error with the line of the recipe that it came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines = [error.lineno]
    where = f" at line {lines[-1]}" if lines else ""
    return _invalid(path, f"{what}{where}: {type(error).__name__}: {error}")


def _function(module: ModuleType, path: str, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        defined = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise _invalid(path, f"the recipe has no function `{name}`", meant(name, defined, _START))
    if not callable(function):
        raise _invalid(path, f"`{name}` is {type(function).__name__}, not a function", _START)
    parameters = _PARAMETERS[name]
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:
        call = f"{name}({', '.join(parameters)})"
        raise _invalid(path, f"`{name}` cannot be called as `{call}`: {error}", f"write `def {call}:`") from None
    return function  # type: ignore[no-any-return]


def recipe_mesh(recipe: Recipe, world: int) -> Mesh:
    """Return the mesh of `world` ranks. Raises UsageError if the recipe's mesh has another number of ranks."""
    path, call = recipe.path, f"`mesh({world})`"
    if recipe.mesh is None:
        return Mesh(("shard",), (world,))
    try:
        sizes = recipe.mesh(world)
    except Exception as error:
        raise _failed(path, f"{call} fails", error) from error
    if not isinstance(sizes, Mapping) or not sizes:
        hint = 'return `{"shard": world}`, or `{"replicate": 2, "shard": world // 2}`'
        raise _invalid(path, f"{call} is {shown(sizes)}, not a dict of dimensions", hint)
    for name, size in sizes.items():
        if name not in ORDER:
            hint = "the dimensions are `replicate`, `shard` and `tp`, outermost first"
            raise _invalid(path, f"{call} has an unknown dimension `{name}`", hint)
        if type(size) is not int or size < 1:
            raise _invalid(path, f"{call}: the size of `{name}` is {shown(size)}")
    mesh = Mesh(tuple(sizes), tuple(sizes.values()))
    if mesh.world != world:
        hint = "run it on as many ranks as its mesh allows"
        what = f"{call} is {mesh}, which has {mesh.world} ranks"
        raise _invalid(path, what, hint, found=mesh.world, expected=world)
    return mesh


def build_state(recipe: Recipe, mesh: Any) -> dict[str, Any]:
    """Return the state that `build(mesh)` returns. Raises UsageError if it fails, or returns anything but a dict with a
    model, an optimizer, and otherwise only objects with `state_dict` and `load_state_dict`, and `torch.Generator`s."""
    import torch

    path = recipe.path
    try:
        state = recipe.build(mesh)
    except Exception as error:
        raise _failed(path, "`build(mesh)` fails", error) from error
    if not isinstance(state, dict):
        hint = 'return `{"model": model, "optimizer": optimizer, "scheduler": scheduler}`'
        raise _invalid(path, f"`build(mesh)` returned {type(state).__name__}, not a dict", hint)
    for name, kind in (("model", "nn.Module"), ("optimizer", "optim.Optimizer")):
        if name not in state:
            keys = [key for key in state if isinstance(key, str)]
            has = ", ".join(f"`{key}`" for key in keys) or "nothing"
            hint = meant(name, keys, f'return `{{"model": ..., "optimizer": ...}}`; it has {has}')
            raise _invalid(path, f"the dict that `build(mesh)` returned has no `{name}`", hint)
        if not isinstance(state[name], attrgetter(kind)(torch)):
            raise _invalid(path, f"`{name}` is {type(state[name]).__name__}, not a torch.{kind}")
    for name, value in state.items():
        stateful = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
        if not isinstance(name, str) or not (stateful or isinstance(value, torch.Generator)):
            what = "return objects with `state_dict` and `load_state_dict`, or `torch.Generator`s"
            hint = f"{what}; keep the rest in the module, or as attributes of these"
            raise _invalid(path, f"`{name}` is {type(value).__name__}, which has no state to save", hint)
    return state


def write_template(path: str | os.PathLike[str]) -> None:
    """Write a recipe template. Raises OverwriteError if `path` exists, UsageError if it lacks the suffix `.py`, and
    StorageError if it cannot be written."""
    path = os.fspath(path)
    if not path.endswith(".py"):
        hint = f"name it `{os.path.splitext(path.rstrip('/'))[0]}.py`"
        raise UsageError(f"`{path}`: a recipe is a Python file", hint=hint)
    with open(_TEMPLATE, encoding="utf-8") as stream:
        template = stream.read()
    try:
        with open(path, "x", encoding="utf-8") as stream:
            stream.write(template.replace("{name}", os.path.basename(path)))
    except FileExistsError:
        raise OverwriteError(f"`{path}` exists", hint="name another file", file=path) from None
    except OSError as error:
        raise from_os_error(error, path, "write") from None
