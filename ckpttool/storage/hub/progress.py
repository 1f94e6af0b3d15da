"""The progress of a transfer by the client, in bytes of the file.

download       the client accepts a class of progress bars, for HTTP and for Xet
upload, LFS    the client reads from an open file, whose position is the progress
upload, Xet    the client reports nothing before the file is complete
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import CommitOperationAdd, hf_hub_download
from huggingface_hub.utils._runtime import is_xet_available

Report = Callable[[int], None]


def download_arguments(report: Report) -> dict[str, Any]:
    """Return arguments with which `hf_hub_download` calls `report` with the bytes received so far, from any thread."""

    class Bar:
        """Class with the methods of a progress bar that the client calls. It draws nothing."""

        def __init__(self, *_: Any, total: int | None = None, initial: int = 0, **__: Any) -> None:
            self.total, self.n = total, initial
            report(self.n)

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            report(self.n)

        def ignore(self, *_: Any, **__: Any) -> None:
            pass

        set_transfer_postfix_str = set_postfix_str = set_description = refresh = close = __exit__ = ignore
        update_transfer = ignore  # the bytes on the network may be fewer than those of the file

        def __enter__(self) -> Bar:  # noqa: PYI034
            return self

    # The first 1.x releases lack the parameter.
    return {"tqdm_class": Bar} if "tqdm_class" in inspect.signature(hf_hub_download).parameters else {}


@contextmanager
def report_upload(operation: CommitOperationAdd, path: str, report: Report) -> Iterator[None]:
    """Call `report` with the bytes sent so far while the client sends the file of an operation in the block.

    It is not called for Xet: the client would send an open file over HTTP.
    """
    if is_xet_available():
        yield
        return
    with _ReportingReader(path, report) as stream:
        operation.path_or_fileobj = stream
        try:
            yield
        finally:
            if operation.path_or_fileobj is stream:
                operation.path_or_fileobj = path


class _ReportingReader(io.BufferedReader):
    def __init__(self, path: str, report: Report) -> None:
        super().__init__(io.FileIO(path))
        self._report = report

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._report(self.tell())
        return data
