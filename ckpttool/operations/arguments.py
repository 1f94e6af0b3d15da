"""Rules `PATTERN=VALUE` of the command line, those of files among them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckpttool.catalogue.patterns import rule, several
from ckpttool.errors import ReadError, UsageError
from ckpttool.storage.files import failed


def rules(value: str | Sequence[str], flag: str) -> list[str]:
    """Rules, with those of `@FILE` in its place: one a line, and comments after ` #`.

    Raises UsageError for a line that is no rule, ReadError for what is no text file.
    """
    found: list[str] = []
    for text in several(value):
        found += _of_file(text[1:], flag) if text.startswith("@") else [text]
    return found


def _of_file(path: str, flag: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8-sig") as stream:
            lines = stream.read().splitlines()
    except OSError as error:
        raise failed(error, path, "read") from None
    except UnicodeDecodeError:
        raise ReadError(f"`{path}`: not a text file", hint="write one rule a line", file=path) from None
    for number, line in enumerate(lines, 1):
        # A name may have a `#` in it.
        said = re.sub(r"(^|\s)#.*", "", line).strip()
        if not said:
            continue
        try:
            rule(said, flag)
        except UsageError as error:
            raise UsageError(f"`{path}` line {number}: {error.message}", hint=error.hint, file=path) from None
        yield said
