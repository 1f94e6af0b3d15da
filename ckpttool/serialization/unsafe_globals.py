"""Globals that are unsafe to unpickle (`os.system`, `subprocess.Popen`, ...)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ckpttool.catalogue.values import stub_name, walk

# Names that run commands or code when called. They are never called here, but neither do we pass them on.
_HARMFUL_MODULES = frozenset({
    "os", "posix", "nt", "subprocess", "sys", "shutil", "socket", "runpy", "importlib", "pty", "ctypes", "code",
    "commands", "webbrowser", "pip", "pdb", "bdb", "timeit", "cProfile", "profile", "asyncio", "multiprocessing",
    "signal", "tempfile", "urllib", "http", "requests", "pickle", "_pickle", "marshal", "types", "operator", "imp",
    "concurrent", "threading", "_thread", "builtins", "__builtin__",
})  # fmt: skip
_HARMLESS = frozenset({
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in (
        "int", "long", "float", "bool", "str", "unicode", "bytes", "list", "dict", "tuple", "set", "frozenset",
        "bytearray", "complex", "object", "slice", "range", "xrange", "type", "NoneType", "Ellipsis", "NotImplemented",
        "print", "len", "abs", "sum",
        "property", "classmethod", "staticmethod", "super",
        "min", "max", "sorted", "reversed", "enumerate", "zip", "map", "filter", "getattr",
        "Exception", "ValueError", "KeyError", "RuntimeError", "TypeError",
    )),
    "types.SimpleNamespace", "types.MappingProxyType", "operator.itemgetter", "operator.attrgetter",
    "tempfile.SpooledTemporaryFile",
})  # fmt: skip


def _is_harmful(name: str) -> bool:
    """Return whether loading a pickle that names this elsewhere could run a command. A courtesy, not a scanner: any
    name of an unknown class can do that too."""
    return name.partition(".")[0] in _HARMFUL_MODULES and name.removesuffix(".__new__") not in _HARMLESS


def harmful_names(value: Any) -> set[str]:
    """Return the harmful names in this tree."""
    return {name for name in map(stub_name, walk(value)) if name and _is_harmful(name)}


_noted: ContextVar[set[str] | None] = ContextVar("noted", default=None)


def note(name: str) -> None:
    """Note a name that a pickle asks for."""
    noted = _noted.get()
    if noted is not None and _is_harmful(name):
        noted.add(name)


@contextmanager
def noting_harm() -> Iterator[set[str]]:
    """Context manager with the harmful names that pickles loaded in the block ask for, also those without a value."""
    noted: set[str] = set()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)
