"""Load `lost_classes.py` as `lost_package.models`, and show its instances without it."""

from __future__ import annotations

import enum
import linecache
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

PACKAGE, MODULE = "lost_package", "lost_package.models"


@cache
def package() -> Any:
    """The module that readers will not have; its source is known under a file name of no real place."""
    source = Path(__file__).with_name("lost_classes.py").read_text(encoding="utf-8")
    name = "lost_package/models.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType(MODULE)
    module.__file__ = name
    sys.modules[PACKAGE] = ModuleType(PACKAGE)
    sys.modules[MODULE] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def shown(value: Any) -> Any:
    """The same tree with what belongs to the lost package as `{"class": name, ...}` of plain values."""
    kind = type(value)
    if isinstance(value, (type, FunctionType)):
        return {"global": f"{value.__module__}.{value.__qualname__}"} if value.__module__ == MODULE else value
    if isinstance(value, partial):
        return {"partial": shown(value.func), "args": shown(value.args), "keywords": shown(value.keywords)}
    if kind.__module__ == MODULE:
        return {"class": f"{MODULE}.{kind.__qualname__}", **_content(value)}
    if kind in (list, tuple):
        return kind(shown(item) for item in value)
    if kind is dict:
        return {key: shown(item) for key, item in value.items()}
    return value


def _content(value: Any) -> dict[str, Any]:
    if isinstance(value, enum.Enum):
        return {"value": value.value}
    content: dict[str, Any] = {}
    if isinstance(value, torch.Tensor):
        content["tensor"] = value.as_subclass(torch.Tensor)
    elif isinstance(value, Mapping):
        content["items"] = {key: shown(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        content["items"] = [shown(item) for item in value]
    elif isinstance(value, str):
        content["value"] = str.__str__(value)
    elif isinstance(value, int):
        content["value"] = int(value)
    slots = {name: getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)}
    state = {**slots, **getattr(value, "__dict__", {})}
    return content | {"state": {key: shown(item) for key, item in state.items()}}
