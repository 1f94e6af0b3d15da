"""Checks, before anything is done, that the processes of a job were started with the same arguments on the same files.

Without that, one that was started otherwise writes a share of another destination, or copies the bytes of another
checkpoint, and what rank 0 finds wrong in the end is not what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from ckpttool.catalogue.entries import Catalogue, File
from ckpttool.errors import UsageError
from ckpttool.storage import files
from ckpttool.storage.crc import crc32
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import divide, is_remote, local_path, path_text
from ckpttool.transfer.processes import Coordinator
from ckpttool.version import __version__

T = TypeVar("T")

# What may differ between ranks: the source, which has a check of its own, and what one node has other than another.
_OF_ONE_RANK = frozenset(["src", "threads", "token", "stage", "html", "progress"])

# Both ends of a file: a header or an index, and the directory of an archive with the checksums of all that is in it.
_END = 64 << 10
# Files whose ends are read where a file is not the same one, as on nodes with copies of their own.
_MOST_FILES = 64


def check_arguments(coordinator: Coordinator, passed: Mapping[str, Any]) -> None:
    """Raise UsageError in all processes if one was called with other arguments than rank 0, or is of another version
    of ckpttool. `passed` are the arguments by their names."""

    def check(first: dict[str, Any]) -> None:
        for name, value in own().items():
            if value != first.get(name):
                ours, theirs = _as_option(name, value), _as_option(name, first.get(name))
                raise UsageError(
                    f"rank {coordinator.rank} was started {ours}, and rank 0 {theirs}",
                    hint="start all ranks with the same arguments",
                    found=value,
                    expected=first.get(name),
                )

    def own() -> dict[str, Any]:
        arguments = {name: _plain(value) for name, value in passed.items()}
        return {"ckpttool": __version__, **arguments}

    coordinator.compare("arguments", check, own)


def check_call(coordinator: Coordinator, passed: Mapping[str, Any]) -> None:
    """Raise UsageError in all processes if one was called with other arguments to write `dst` from `src` than rank 0,
    but for those that are its own."""
    dst = path_text(passed["dst"])
    compared = {name: value for name, value in passed.items() if name not in _OF_ONE_RANK}
    compared["dst"] = dst if is_remote(dst) else local_path(dst).absolute()
    compared["max_memory"] = passed["max_memory"] is not None
    check_arguments(coordinator, compared)


def share_source(coordinator: Coordinator, path: str, catalogue: Catalogue) -> None:
    """Have each process fetch what it copies of a checkpoint alone. Raises UsageError as `check_source` does."""
    check_source(coordinator, path, catalogue)
    if coordinator.size > 1:
        divide(file.location for file in catalogue.files)


def check_source(coordinator: Coordinator, path: str, catalogue: Catalogue) -> None:
    """Raise UsageError in all processes if one sees another checkpoint at `path` than rank 0: other files, or files of
    other sizes or of another time that do not begin and end with the same bytes."""
    if coordinator.size == 1:
        return
    listed = sorted((file for file in catalogue.own_files if not file.missing), key=lambda file: file.name)
    # Not the device's number, which each node has of its own.
    versions = {place: list(version[:3]) for place, version in files.fingerprint(f.location for f in listed).items()}
    rows = [[file.name, file.size, versions.get(file.location)] for file in listed]

    def check(first: dict[str, Any]) -> None:
        ends = dict(zip(_sampled(range(len(first["rows"]))), first["ends"], strict=True))
        for number, (own, other) in enumerate(zip_longest(rows, first["rows"], fillvalue=[None])):
            is_same_file = own == other
            if not is_same_file and (own[:2] != other[:2] or ends.get(number) not in (None, _ends(listed[number]))):
                name = own[0] or other[0]
                raise UsageError(
                    f"rank {coordinator.rank} sees another checkpoint at `{path}` than rank 0: `{name}` differs",
                    hint="start all ranks on the same files: on several nodes, on a file system that they share",
                    file=name,
                )

    coordinator.compare("source", check, lambda: {"rows": rows, "ends": [_ends(file) for file in _sampled(listed)]})


def _sampled(items: Sequence[T]) -> Sequence[T]:
    return items[:: max(1, -(-len(items) // _MOST_FILES))]


def _ends(file: File) -> int:
    """Return the CRC of the first and the last bytes of a file."""
    pool = Pool()
    try:
        first = pool.read(file.location, 0, min(_END, file.size))
        last = pool.read(file.location, max(0, file.size - _END), min(_END, file.size))
    finally:
        pool.close()
    return crc32(last, crc32(first))


def _plain(value: Any) -> Any:
    """Return an argument as it comes back from JSON."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value


def _as_option(name: str, value: Any) -> str:
    """Return `with `--to-world 3``, as an option is written on the command line."""
    if name == "ckpttool":
        return f"with ckpttool {value}"
    if name == "dst":
        return f"to write `{value}`"
    option = f"--{name.replace('_', '-')}"
    if value is None or value is True or value is False or value == []:
        return f"{'with' if value is True else 'without'} `{option}`"
    text = " ".join(map(str, value)) if isinstance(value, list) else value
    return f"with `{option} {text}`"
