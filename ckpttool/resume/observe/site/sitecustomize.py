"""Python runs this at its start in each process of a command that `verify-resume run` has started.

It needs the standard library alone, and waits until the script itself imports torch. No failure here ends the script:
it is written to a file that the report reads. A `sitecustomize` that was there before runs as always.
"""

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_SETTINGS = json.loads(os.environ.get("CKPTTOOL_HOOK") or "{}")
_PACKAGE = "_ckpttool_site"  # what the modules of this folder, which is on no path, are a package of
_keeper: Any = None


def _failed(what: str, error: BaseException) -> None:
    with suppress(OSError):
        text = f"{what}: {type(error).__name__}: {error}".replace("\n", " ").strip()
        _load("state").write(_SETTINGS["folder"], {"failed": text})


def _load(name: str) -> Any:
    """Import a module of this folder."""
    import importlib
    from importlib.machinery import ModuleSpec
    from importlib.util import module_from_spec

    if _PACKAGE not in sys.modules:
        spec = ModuleSpec(_PACKAGE, None, is_package=True)
        spec.submodule_search_locations = [_HERE]
        sys.modules[_PACKAGE] = module_from_spec(spec)
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _keep() -> None:
    """Keep the output directory as it is after each save: in rank 0 of a launcher, or any process without a rank."""
    global _keeper
    if _SETTINGS["keep"] and not int(os.environ.get("RANK") or 0):
        _keeper = _load("keep").Keeper(*_SETTINGS["keep"], _failed)
        sys.addaudithook(_keeper.audit)


def list_backwards() -> None:
    """List directories in the opposite order, which no file system promises."""
    system: Any = os
    listdir, scandir = os.listdir, os.scandir

    class Backwards(closing[Any]):
        """The entries of a directory, as `os.scandir` returns them: an iterator that is closed."""

        thing: Any

        def __init__(self, path: Any = ".") -> None:
            with scandir(path) as entries:
                super().__init__(one for one in [*entries][::-1])

        def __iter__(self) -> Any:
            return self.thing

        def __next__(self) -> Any:
            return next(self.thing)

        def close(self) -> None:
            self.thing.close()

    system.listdir = lambda path=".": listdir(path)[::-1]
    system.scandir = Backwards


def _hook() -> None:
    try:
        if _keeper is not None:
            _keeper.watch(sys.modules["torch"])
        observer = _load("hook").install(_SETTINGS, _failed, _keeper)
        after_import("torch.distributed.checkpoint.state_dict_loader", observer.watch_dcp)
        after_import("torch._dynamo", observer.watch_compiler)
    except Exception as error:
        _failed("the hook", error)


def after_import(name: str, what: Callable[[], object]) -> None:
    """Call something as soon as a module is imported; now if it is."""
    if name in sys.modules:
        what()
    else:
        sys.meta_path.insert(0, _Wait(name, what))


class _Wait:
    """Finds a module as Python would, and calls something as soon as it is imported."""

    def __init__(self, name: str, what: Callable[[], object]) -> None:
        self._name, self._what, self._finding = name, what, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        # It may be looked for long before it is imported: whether it is there, is all that some ask.
        if name != self._name or self._finding:
            return None
        import importlib.util

        self._finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding = False
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return spec

        def exec_module(module: Any) -> None:
            del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            loader.exec_module(module)
            self._what()

        try:
            loader.exec_module = exec_module
        except AttributeError as error:
            _failed(f"the import of {name}", error)
        return spec


def _write_lines() -> None:
    """Write each line at once: ranks share a log, and unbuffered, a line is several writes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _chain() -> None:
    """Run the `sitecustomize` that this one hides, and leave no trace of the folder on `sys.path`."""
    from importlib.machinery import PathFinder

    sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.origin is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if _SETTINGS and __name__ == "sitecustomize":
    try:
        open(os.path.join(_SETTINGS["folder"], "started"), "a").close()
        if _SETTINGS["seed"] is not None:
            import random

            ranks, seed_of_new = _SETTINGS["known"]
            if ranks is not None and int(os.environ.get("RANK") or ranks) >= ranks:  # or it is not known yet
                _SETTINGS["seed"] = seed_of_new
            random.seed(_SETTINGS["seed"] + int(os.environ.get("RANK") or 0))
            if _SETTINGS["is_backwards"]:
                list_backwards()
        _keep()
        sys.meta_path.insert(0, _Wait("torch", _hook))
        _write_lines()
    except Exception as error:
        _failed("the start", error)
    _chain()
