"""How much of a file has gone or come while the client is at it, for a progress of our own.

download       the client takes a class for its bars, whether it fetches over HTTP or over Xet
upload, LFS    it reads a file that we open, and where it reads is how far it is
upload, Xet    it makes bars of its own class or none, and tells nobody else: the file is there, or not yet
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import CommitOperationAdd, hf_hub_download
from huggingface_hub.utils._runtime import is_xet_available

Told = Callable[[int], None]


def arriving(tell: Told) -> dict[str, Any]:
    """Arguments for a download which make it call `tell` with the bytes of the file that are here; from any thread."""

    class Bar:
        """As much of a bar as the client asks of one. None is drawn."""

        def __init__(self, *_: Any, total: int | None = None, initial: int = 0, **__: Any) -> None:
            self.total, self.n = total, initial
            tell(self.n)

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            tell(self.n)

        def update_transfer(self, n: float | None = 1) -> None:
            """What went over the network, which may be less than the file."""

        def set_postfix_str(self, *_: Any, **__: Any) -> None:
            pass

        set_transfer_postfix_str = set_description = refresh = set_postfix_str

        def close(self) -> None:
            pass

        def __enter__(self) -> Bar:  # noqa: PYI034
            return self

        def __exit__(self, *_: object) -> None:
            pass

    # The first releases of 1.x have no such parameter.
    return {"tqdm_class": Bar} if "tqdm_class" in inspect.signature(hf_hub_download).parameters else {}


@contextmanager
def leaving(operation: CommitOperationAdd, path: str, tell: Told) -> Iterator[None]:
    """While the client sends the file of an operation, `tell` is called with the bytes of it that were read for that.
    Over Xet it is not: the client would send what we open over HTTP."""
    if is_xet_available():
        yield
        return
    with _Told(path, tell) as stream:
        operation.path_or_fileobj = stream
        try:
            yield
        finally:
            if operation.path_or_fileobj is stream:
                operation.path_or_fileobj = path


class _Told(io.BufferedReader):
    def __init__(self, path: str, tell: Told) -> None:
        super().__init__(io.FileIO(path))
        self._told = tell

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._told(self.tell())
        return data
