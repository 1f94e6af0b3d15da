"""Parses arguments that several operations take: rules `PATTERN=VALUE`, sizes, and the memory limit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from ckpttool.catalogue.patterns import rule, several
from ckpttool.errors import ReadError, UsageError
from ckpttool.layout.selection import Selection
from ckpttool.serialization.manifest import NAME
from ckpttool.storage.stores import is_remote, local_path, path_text
from ckpttool.text import parse_size, plural

_LEAST = 1000  # a file of fewer bytes is not meant
# What Python, the catalogue and the buffers of the standard library need on top of the transfer's own.
BASE_MEMORY = 48 << 20


def selection(
    only: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    tensors: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: str | Sequence[str] = (),
    strip_wrappers: bool = False,
    strip_prefix: str | None = None,
) -> Selection:
    """Return the options of these names, as the functions of `ckpttool` take them. Raises UsageError."""
    only, drop, tensors, exclude = map(several, (only, drop, tensors, exclude))
    return Selection(only, drop, tensors, exclude, rules(rename, "--rename"), strip_wrappers, strip_prefix)


def size(value: int | str | None, flag: str) -> int | None:
    """Return a size in bytes, which may be given as text such as `5GB`. Raises UsageError."""
    return parse_size(value, flag) if isinstance(value, str) else value


def max_shard_size(value: int | str | None) -> int | None:
    """Return `--max-shard-size` in bytes. Raises UsageError, also for text without a unit that is too small to be
    meant."""
    flag, nbytes = "--max-shard-size", size(value, "--max-shard-size")
    if isinstance(value, str) and value.isdecimal() and int(value) < _LEAST:
        raise UsageError(f"`{flag} {value}` is {plural(int(value), 'byte')}", hint=f"write a unit: `{flag} {value}GB`")
    if nbytes is not None and nbytes < 1:
        raise UsageError(f"`{flag} {value}` is less than one byte", hint=f"such as `{flag} 5GB`")
    return nbytes


def path(value: str | os.PathLike[str] | None) -> str | None:
    """Return a path as text; None stays None. Raises UsageError."""
    return None if value is None else path_text(value)


def manifest(value: str | os.PathLike[str] | bool | None, dst: str) -> tuple[str | None, bool]:
    """Return where a manifest of everything is to be written, if at all, and whether a DCP directory at `dst` carries
    its own: not with False, nor if the other takes its place."""
    if value is None or isinstance(value, bool):
        return None, value is not False
    wanted = os.fspath(value)
    return wanted, local_path(wanted).real() != (local_path(dst) / NAME).real()


def memory(value: int | str | None) -> int | None:
    """Return the value of `--max-memory` in bytes. Raises UsageError when it is less than the tool itself needs."""
    limit = size(value, "--max-memory")
    if limit is not None and limit < BASE_MEMORY:
        least = f"{BASE_MEMORY >> 20}MiB"
        raise UsageError(
            f"`--max-memory {value}` is less than the {least} that are always needed",
            hint="write a unit and leave room for buffers: `--max-memory 2GB`",
        )
    return limit


def check_source(src: str, dst: str, hint: str = "SRC comes first: are SRC and DST swapped?") -> None:
    """Raise ReadError when there is nothing at `src` but something at `dst`: the two are probably swapped."""
    if is_remote(src) or is_remote(dst):
        return
    location = local_path(src)
    if not (location.exists() or location.is_link() or location.is_pattern()) and local_path(dst).exists():
        text = f"`{src}`: no such file or directory, but `{dst}` exists"
        raise ReadError(text, hint=hint, file=src)


def check_apart(dst: str, *sources: str | None) -> None:
    """Raise UsageError when `dst` is a source, or one contains the other: `--overwrite` replaces a directory with all
    that it holds."""
    for path in filter(None, sources):
        real, other = local_path(dst).real(), local_path(path).real()
        hint = "write somewhere else; SRC is never touched"
        if real.is_below(other):
            raise UsageError(f"`{dst}` is the source, or is inside it", hint=hint)
        if other.is_below(real):
            hint = f"name a new destination, such as `{dst.rstrip('/')}/NAME`"
            raise UsageError(f"the source `{path}` is inside `{dst}`", hint=hint)


class DtypeOfTorch(Protocol):
    """A dtype of torch, such as `torch.bfloat16`."""

    @property
    def is_floating_point(self) -> bool:
        """Whether its elements are floating-point numbers."""


def dtypes(value: str | DtypeOfTorch | Sequence[str | DtypeOfTorch] | None) -> list[str]:
    """Return the rules of `dtype` as text: those that are text, and a dtype of torch by its name."""
    rules = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
    return [str(rule).removeprefix("torch.") for rule in rules if rule is not None]


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
        raise ReadError(f"`{path}` is not a text file", hint="write one rule a line", file=path) from None
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
