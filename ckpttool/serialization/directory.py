"""A directory listed once; sizes, small files and the folders in it are read on demand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from ckpttool.catalogue.values import check_json_levels
from ckpttool.catalogue.work_limit import working
from ckpttool.errors import CkptError, CorruptError, in_one_line
from ckpttool.serialization import strict_json
from ckpttool.storage.stores import Location

_MAX_JSON, _MAX_INDEX = 64 << 20, 1 << 30  # bytes; an index has a line for each tensor
_MAX_DEPTH = 4

T = TypeVar("T")


class Directory:
    """`names` are `["optimizer_0/", "random_states_0.pkl", ...]`, sorted, folders with a slash. `unseen` has, for each
    tool that could not be looked for in it, the error."""

    def __init__(self, path: Location) -> None:
        self.path = path.listed()
        self.name = path.name
        self._folders: dict[str, Directory] = {}
        self._sizes: dict[str, int] = {}
        self._json: dict[str, Any] = {}
        entries = [entry for entry in self.path.entries() if not (entry.is_dir and self._is_above(entry.name))]
        self.names = sorted(entry.name + ("/" if entry.is_dir else "") for entry in entries)
        self._names = frozenset(self.names)
        self.unseen: dict[str, CkptError] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def _is_above(self, name: str) -> bool:
        """Return whether a directory in it is a link to one that it lies in, of which all would be found again."""
        return self.at(name).is_link() and self.path.real().is_below(self.at(name).real())

    @property
    def folders(self) -> list[str]:
        """The names of the directories in it, without the slash."""
        return [name[:-1] for name in self.names if name.endswith("/")]

    def matching(self, pattern: str) -> Iterator[re.Match[str]]:
        """Return the matches of whole names, in their order."""
        compiled = re.compile(pattern)
        return (match for name in self.names if (match := compiled.fullmatch(name)) is not None)

    def has(self, pattern: str) -> bool:
        """Return whether a whole name matches."""
        return any(True for _ in self.matching(pattern))

    def at(self, name: str) -> Location:
        """Return the location of something in it; of a folder that was listed, with its entries."""
        location, inner = self.path / name, self._folders.get(name.rstrip("/"))
        location.listing = inner.path.listing if inner is not None else None
        return location

    def folder(self, name: str) -> Directory:
        """Return the listing of a directory in it, with or without the slash; of itself for no name."""
        name = name.rstrip("/")
        if not name:
            return self
        if name not in self._folders:
            self._folders[name] = Directory(self.at(name))
        return self._folders[name]

    def size(self, name: str) -> int:
        """Return the bytes of a file, 0 for one that does not exist; of all files below a folder."""
        if name.endswith("/"):
            return self.folder(name).nbytes()
        if name not in self._sizes:
            self._sizes[name] = 0
            with suppress(CkptError):
                self._sizes[name] = self.at(name).size()
        return self._sizes[name]

    def nbytes(self, depth: int = 0) -> int:
        """Return the bytes of all files in it and below, to a few levels: links can lead in a circle."""
        total = 0
        for name in self.names:
            if not name.endswith("/"):
                total += self.size(name)
            elif depth < _MAX_DEPTH:
                with suppress(CkptError):
                    total += self.folder(name).nbytes(depth + 1)
        return total

    def probe(self, tool: str, recognise: Callable[[Directory], T]) -> T | None:
        """Return what `recognise` finds here, or None when it fails: whether this is a checkpoint of one tool must not
        keep the others from being looked for. The error is kept in `unseen`."""
        try:
            return recognise(self)
        except CkptError as error:
            self.unseen.setdefault(tool, error)
        # Anything may stand in a file that only looks like one of the tool's.
        except Exception as error:
            message = f"`{self.path}`: could not be looked at: {in_one_line(error)}"
            self.unseen.setdefault(tool, CorruptError(message, file=self.path))
        return None

    def json(self, name: str) -> Any:
        """Return the value of a small JSON file, None without one. Raises ReadError, or CorruptError for no JSON."""
        if name not in self:
            return None
        if name not in self._json:
            limit = _MAX_INDEX if name.endswith(".index.json") else _MAX_JSON
            text = self._head(name, limit + 1)
            if len(text) > limit:
                raise CorruptError(f"`{self.at(name)}`: more than {limit} bytes of JSON", file=self.at(name))
            try:
                # A loss that is not a number is `NaN` in the Trainer's file.
                with working(len(text)):
                    value = json.loads(text)
                    check_json_levels(value)
                    self._json[name] = value
            except CorruptError as error:
                raise error.prefixed(f"`{self.at(name)}`", file=self.at(name)) from None
            except (ValueError, RecursionError):
                self._json[name] = strict_json.parse(text, f"`{self.at(name)}`")
        return self._json[name]

    def facts(self, name: str) -> dict[str, Any]:
        """Return the object in a small JSON file; empty when there is none, or it cannot be read."""
        with suppress(CkptError):
            if isinstance(value := self.json(name), dict):
                return value
        return {}

    def text(self, name: str) -> str:
        """Return the first kilobyte of a file of text; empty when it cannot be read."""
        with suppress(CkptError):
            return self._head(name, 1024).decode("utf-8", "replace").strip()
        return ""

    def leads_out(self, name: str) -> bool:
        """Return whether a file is reached through a link that leaves the directory."""
        if not self.path.store.is_local or self.at(name).real() == self.path.real() / name:
            return False
        try:
            self.path.inside(name)
        except CorruptError:
            return True
        return False

    def _head(self, name: str, nbytes: int) -> bytes:
        """Return the first bytes of a file. Raises ReadError, or CorruptError for a link that leaves the directory:
        that of a stranger may lead to any file."""
        return self.path.inside(name).head(nbytes)
