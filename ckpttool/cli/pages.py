"""Writes the reports that commands make beside their answer: HTML pages, which say how they were made, and others."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ckpttool.errors import UsageError, without_credentials


def write_page(path: str, page_of: Callable[[Any, dict[str, str]], str], document: Any) -> None:
    """Write the page of a document. Raises OverwriteError if there is a file that is not a page, and StorageError."""
    import platform
    import shlex
    import sys
    from datetime import datetime
    from importlib.metadata import PackageNotFoundError, version

    from ckpttool.reports import page_file
    from ckpttool.version import __version__

    environment = {
        "command": without_credentials(shlex.join(["ckpttool", *sys.argv[1:]])),
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "ckpttool": __version__,
        "Python": platform.python_version(),
        "system": platform.platform(terse=True),
    }
    try:
        environment["torch"] = version("torch")
    except PackageNotFoundError:
        environment["torch"] = "not installed"
    page_file.write(page_of(document, environment), path)


def check_folder(path: str | None) -> None:
    """Raise UsageError for a file whose folder is absent, before the work that it reports."""
    folder = os.path.dirname(os.path.abspath(path)) if path else "."
    if not os.path.isdir(folder):
        raise UsageError(f"`{path}` cannot be written: there is no folder `{folder}`")


def write_text(path: str, text: str) -> None:
    """Write a file. Raises UsageError if it cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(f"`{path}` cannot be written: {(error.strerror or str(error)).lower()}") from None
