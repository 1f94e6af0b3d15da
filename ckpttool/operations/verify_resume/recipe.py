"""The user's recipe: a Python file that builds what is trained, and takes one step of training.

    def build(mesh):                    a dict: "model", "optimizer", and whatever else has a state
    def step(state, i):                 one whole optimizer step; the loss
    def mesh(world):                    optional: {"replicate": 2, "shard": world // 2}; else {"shard": world}

A recipe is a program of the user's, run as such; nothing of a checkpoint ever is.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any

from ckpttool.errors import OverwriteError, UsageError
from ckpttool.operations.verify_resume import recipe_template
from ckpttool.storage.files import failed
from ckpttool.text import meant

DIMENSIONS = ("replicate", "shard", "tp")
_START = "`ckpttool verify-resume init` writes one to begin with"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe that has been read: `path` is the file, the functions are those in it."""

    path: str
    build: Callable[[Any], dict[str, Any]]
    step: Callable[[dict[str, Any], int], Any]
    mesh: Callable[[int], Mapping[str, int]] | None = None


def load(path: str | os.PathLike[str]) -> Recipe:
    """The recipe in the file `path`, whose directory can be imported from, as that of a script can.

    Raises UsageError when it is no Python file, fails when it is run, or lacks a function.
    """
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise UsageError(f"`{path}`: there is no such recipe", hint=_START)
    module = _imported(path)
    functions = {name: _function(module, path, name, takes) for name, takes in (("build", 1), ("step", 2))}
    mesh = _function(module, path, "mesh", 1) if hasattr(module, "mesh") else None
    return Recipe(path, functions["build"], functions["step"], mesh)


def _imported(path: str) -> ModuleType:
    name = "ckpttool_recipe_" + "".join(c if c.isalnum() else "_" for c in os.path.basename(path).removesuffix(".py"))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"`{path}`: a recipe is a Python file, called `.py`", hint=_START)
    module = importlib.util.module_from_spec(spec)
    # What the recipe defines is found by its name again: by data loaders' processes, by dataclasses.
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
    """With the line of the recipe that the error came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines = [error.lineno]
    where = f" at line {lines[-1]}" if lines else ""
    return UsageError(f"`{path}`: {what}{where}: {type(error).__name__}: {error}", file=path)


def _function(module: ModuleType, path: str, name: str, takes: int) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        defined = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise UsageError(f"`{path}`: the recipe has no function `{name}`", hint=meant(name, defined, _START), file=path)
    if not callable(found):
        raise UsageError(f"`{path}`: `{name}` is {type(found).__name__}, and not a function", hint=_START, file=path)
    try:
        inspect.signature(found).bind(*range(takes))
    except (TypeError, ValueError) as error:
        wanted = {"build": "build(mesh)", "step": "step(state, i)", "mesh": "mesh(world)"}[name]
        raise UsageError(
            f"`{path}`: `{name}` cannot be called as `{wanted}`: {error}", hint=f"write `def {wanted}:`", file=path
        ) from None
    return found  # type: ignore[no-any-return]


def dimensions(recipe: Recipe, world: int) -> dict[str, int]:
    """The mesh of so many ranks, outermost dimension first: `{"replicate": 2, "shard": 4}`. Raises UsageError when
    the recipe says none that has `world` ranks."""
    if recipe.mesh is None:
        return {"shard": world}
    try:
        said = recipe.mesh(world)
    except Exception as error:
        raise _failed(recipe.path, f"`mesh({world})` fails", error) from error
    if not isinstance(said, Mapping) or not said:
        raise UsageError(
            f"`{recipe.path}`: `mesh({world})` is {said!r:.80}, and not a dict of dimensions",
            hint='return `{"shard": world}`, or `{"replicate": 2, "shard": world // 2}`', file=recipe.path,
        )  # fmt: skip
    for name, size in said.items():
        if name not in DIMENSIONS:
            raise UsageError(
                f"`{recipe.path}`: `mesh({world})` has a dimension `{name}`",
                hint="the dimensions are `replicate`, `shard` and `tp`, outermost first", file=recipe.path,
            )  # fmt: skip
        if type(size) is not int or size < 1:
            raise UsageError(
                f"`{recipe.path}`: `mesh({world})`: the size of `{name}` is {size!r:.40}", file=recipe.path
            )
    if prod(said.values()) != world:
        spelt = ",".join(f"{name}={size}" for name, size in said.items())
        raise UsageError(
            f"`{recipe.path}`: `mesh({world})` is {spelt}, which has {prod(said.values())} ranks",
            hint="run it on as many ranks as its mesh allows", file=recipe.path, found=prod(said.values()),
            expected=world,
        )  # fmt: skip
    return dict(said)


def built(recipe: Recipe, mesh: Any) -> dict[str, Any]:
    """What `build(mesh)` makes, each of it something with a state. Raises UsageError when it is not as agreed."""
    try:
        state = recipe.build(mesh)
    except Exception as error:
        raise _failed(recipe.path, "`build(mesh)` fails", error) from error
    return checked(recipe, state)


def checked(recipe: Recipe, state: Any) -> dict[str, Any]:
    """`state` itself, if it is a dict with a model, an optimizer, and else only what has a state: objects with
    `state_dict` and `load_state_dict`, and `torch.Generator`s. Raises UsageError."""
    import torch

    path = recipe.path
    if not isinstance(state, dict):
        raise UsageError(
            f"`{path}`: `build(mesh)` returned {type(state).__name__}, and not a dict",
            hint='return `{"model": model, "optimizer": optimizer, "scheduler": scheduler}`', file=path,
        )  # fmt: skip
    for name, kind, of in (("model", torch.nn.Module, "torch.nn.Module"), ("optimizer", torch.optim.Optimizer, "")):
        if name not in state:
            there = [key for key in state if isinstance(key, str)]
            hint = meant(name, there, f'return `{{"model": ..., "optimizer": ...}}`; there is {_listed(there)}')
            raise UsageError(f"`{path}`: what `build(mesh)` returned has no `{name}`", hint=hint, file=path)
        if not isinstance(state[name], kind):
            raise UsageError(
                f"`{path}`: `{name}` is {type(state[name]).__name__}, and not a {of or 'torch.optim.Optimizer'}",
                file=path,
            )
    for name, value in state.items():
        stateful = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
        if not isinstance(name, str) or not (stateful or isinstance(value, torch.Generator)):
            raise UsageError(
                f"`{path}`: `{name}` is {type(value).__name__}, which has no state to save",
                hint="what is returned has `state_dict` and `load_state_dict`, or is a `torch.Generator`; keep the "
                "rest in the module, or as attributes of these",
                file=path,
            )
    return state


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def write(path: str | os.PathLike[str]) -> None:
    """Write a recipe to begin with. Raises OverwriteError when `path` exists, UsageError for a name that is no Python
    file's, StorageError when it cannot be written."""
    path = os.fspath(path)
    if not path.endswith(".py"):
        raise UsageError(
            f"`{path}`: a recipe is a Python file", hint=f"name it `{os.path.splitext(path.rstrip('/'))[0]}.py`"
        )
    try:
        with open(path, "x", encoding="utf-8") as stream:
            stream.write(recipe_template.recipe(os.path.basename(path)))
    except FileExistsError:
        raise OverwriteError(f"`{path}` exists", hint="name another file", file=path) from None
    except OSError as error:
        raise failed(error, path, "write") from None
