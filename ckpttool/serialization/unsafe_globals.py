"""Globals that are unsafe to unpickle (`os.system`, `subprocess.Popen`, ...)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Object, Path, dotted
from ckpttool.catalogue.values import stub_name, walk
from ckpttool.catalogue.warning import Warning

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


def harmful(objects: Iterable[Object]) -> Iterator[tuple[str, str]]:
    """Return the names of entries whose values name functions that run commands, with each function."""
    return ((entry.name, called) for entry in objects for called in sorted(harmful_names(entry.value)))


def harmful_attributes(catalogue: Catalogue) -> Iterator[tuple[Path, str]]:
    """Return the paths of dicts whose attributes name functions that run commands, with each function."""
    with_attributes = ((path, c.attrs) for path, c in catalogue.containers.items() if c.attrs)
    return ((path, called) for path, attributes in with_attributes for called in sorted(harmful_names(attributes)))


def warnings(catalogue: Catalogue, named: set[str]) -> list[Warning]:
    """Return warnings of functions that run commands: in values, in attributes, or only `named` in pickles."""
    runs_code = "which runs code when loaded"
    read = (entry for entry in catalogue.objects if entry.is_read)
    texts = [(f"`{name}` names `{called}`, {runs_code}; not here", called) for name, called in harmful(read)]
    for path, called in harmful_attributes(catalogue):
        text = f"the attributes of `{dotted(path)}` name `{called}`, {runs_code}; not here, and they are not passed on"
        texts.append((text, called))
    known = {called for _, called in texts}
    known.update(name for w in catalogue.warnings if w.kind == "unsafe-global" for name in w.names)
    for called in sorted(named - known):
        # A pickle can call a function and discard its result.
        texts.append((f"a pickle names `{called}`, {runs_code}, outside of every entry; not here", called))
    return [Warning("unsafe-global", text, names=(called,)) for text, called in texts]
