"""A log of JSON lines that a kill at any moment may tear."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from ckpttool.storage.crc import crc32

_LONGEST = 16 << 20  # bytes of a line: a file of zeros would be one of its whole size


class Log:
    """Lines of JSON at an open descriptor, each behind the CRC-32 of its text; one that is torn or damaged ends them.

    The methods raise OSError.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __iter__(self) -> Iterator[Any]:
        return (json.loads(line[9:]) for line in self._undamaged())

    def append(self, lines: Iterable[Any]) -> None:
        """Append values, a line each."""
        texts = [json.dumps(line, separators=(",", ":")).encode() for line in lines]
        data = b"".join([b"%08x %s\n" % (crc32(text), text) for text in texts])
        while data:
            data = data[os.write(self.descriptor, data) :]

    def record(self, line: Any) -> None:
        """Append a value, and wait until it is on disk."""
        self.append([line])
        os.fsync(self.descriptor)

    def cut(self, most: int | None = None) -> None:
        """Cut off what is behind the last undamaged line, or behind the first `most` lines."""
        end = sum(len(line) for number, line in enumerate(self._undamaged()) if most is None or number < most)
        if end != os.lseek(self.descriptor, 0, os.SEEK_END):
            os.truncate(self.descriptor, end)
        os.lseek(self.descriptor, end, os.SEEK_SET)

    def _undamaged(self) -> Iterator[bytes]:
        with open(os.dup(self.descriptor), "rb") as stream:
            stream.seek(0)
            while line := stream.readline(_LONGEST):
                if not line.endswith(b"\n") or line[:9] != b"%08x " % crc32(line[9:-1]):
                    return
                try:
                    json.loads(line[9:])
                except (ValueError, RecursionError):  # with a checksum that is right
                    return
                yield line
