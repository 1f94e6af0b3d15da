"""Parses arguments that several operations take: rules `PATTERN=VALUE`, sizes, and the memory limit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckpttool.catalogue.patterns import rule, several
from ckpttool.errors import ReadError, UsageError
from ckpttool.storage.stores import local_path
from ckpttool.text import parse_size

# What Python, the catalogue and the buffers of the standard library need on top of the transfer's own.
BASE_MEMORY = 48 << 20


def size(value: int | str | None, flag: str) -> int | None:
    """Return a size in bytes, which may be given as text such as `5GB`. Raises UsageError."""
    return parse_size(value, flag) if isinstance(value, str) else value


def memory(value: int | str | None) -> int | None:
    """Return the value of `--max-memory` in bytes. Raises UsageError when it is less than the tool itself needs."""
    limit = size(value, "--max-memory")
    if limit is not None and limit < BASE_MEMORY:
        raise UsageError(f"`--max-memory`: at least {BASE_MEMORY >> 20} MiB are needed")
    return limit


def check_apart(dst: str, *sources: str | None) -> None:
    """Raises UsageError when `dst` is a source, or one contains the other: `--overwrite` replaces a directory with all
    that it holds."""
    for path in filter(None, sources):
        real, other = local_path(dst).real(), local_path(path).real()
        hint = "write somewhere else; SRC is never touched"
        if real.is_below(other):
            raise UsageError(f"`{dst}` is the source, or lies inside it", hint=hint)
        if other.is_below(real):
            raise UsageError(f"the source `{path}` lies inside `{dst}`", hint=hint)


def rules(value: str | Sequence[str], flag: str) -> list[str]:
    """Return the rules of an option. `@FILE` is replaced by the rules in the file: one a line, comments after ` #`.

    Raises UsageError for a line that is not a rule, ReadError for a file that is not text.
    """
    result: list[str] = []
    for text in several(value):
        result += _of_file(text[1:], flag) if text.startswith("@") else [text]
    return result


def _of_file(path: str, flag: str) -> Iterator[str]:
    try:
        lines = local_path(path).read().decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ReadError(f"`{path}`: not a text file", hint="write one rule a line", file=path) from None
    for number, line in enumerate(lines, 1):
        # A name may have a `#` in it.
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if not text:
            continue
        try:
            rule(text, flag)
        except UsageError as error:
            raise error.prefixed(f"`{path}` line {number}", file=path) from None
        yield text
