"""Keeps each version of a file that a script writes again and again, from within its process.

A version is copied when it is about to be opened for writing, replaced or removed by Python, or written over by
`torch.save`, whose writer opens files by itself. The last version is never written over, and stays where it is.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

Note = Callable[[str, BaseException], None]
_WRITES = os.O_WRONLY | os.O_RDWR


class Keeper:
    """Copies a file to a folder each time before it is written over."""

    def __init__(self, path: str, folder: str, note: Note) -> None:
        self._path, self._folder, self._note = os.path.realpath(path), folder, note
        self._name = os.path.basename(self._path)
        self._keeping = False

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Look at an event of `sys.addaudithook`, which must never raise."""
        if event == "open":
            path = args[0] if isinstance(args[2], int) and args[2] & _WRITES else None
        elif event == "os.rename":
            path = args[1]
        elif event == "os.remove":
            path = args[0]
        else:
            return
        self._before_writing(path)

    def watch(self, torch: Any) -> None:
        """Watch `torch.save`."""
        save = torch.save

        @functools.wraps(save)
        def kept(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            self._before_writing(f)
            return save(obj, f, *args, **kwargs)

        torch.save = torch.serialization.save = kept

    def _before_writing(self, path: Any) -> None:
        if self._keeping or not isinstance(path, (str, bytes, os.PathLike)):
            return
        self._keeping = True
        try:
            path = os.fsdecode(path)
            if os.path.basename(path) == self._name and os.path.realpath(path) == self._path:
                self._keep()
        except Exception as error:
            self._note(f"the copy of {self._name}", error)
        finally:
            self._keeping = False

    def _keep(self) -> None:
        if not os.path.isfile(self._path):
            return
        import shutil

        os.makedirs(self._folder, exist_ok=True)
        name = f"{time.time_ns()}-{os.getpid()}{os.path.splitext(self._name)[1]}"
        # Only whole copies have a name that is looked at.
        part = os.path.join(self._folder, f".{name}")
        shutil.copyfile(self._path, part)
        os.rename(part, os.path.join(self._folder, name))
