"""Refuses pickles whose keys have all the same hash.

A dict compares a new key with all that have its hash: 30,000 keys of one hash are 450 million comparisons, in C and not
to be interrupted. Python's hash of text is secret; that of an integer is the integer modulo 2**61 - 1, and a tuple of
two large integers can be given any. So a pickle with many such integers is run in hashes before it runs in values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice

from ckpttool.errors import CorruptError

MOST_ALIKE = 1000  # different keys of one hash
_WIDE = re.compile(rb"\x8a[\x08-\xff]").finditer


def may_collide(data: bytes) -> bool:
    """Whether a pickle has that many integers of eight bytes or more; counted in all its bytes, strings too."""
    return next(islice(_WIDE(data), MOST_ALIKE, None), None) is not None


def check_integers(data: bytes, end: int, skip: Callable[[bytes, int], int]) -> None:
    """Raises CorruptError when more than `MOST_ALIKE` different integers of a pickle have the same hash. `skip(data,
    at)` is where the opcode after the one at `at` is."""
    alike: dict[int, set[bytes]] = {}
    at = 0
    while at < end:
        after = skip(data, at)
        if data[at] == 0x8A and after - at > 9:
            number = data[at + 2 : after]
            same = alike.setdefault(hash(int.from_bytes(number, "little", signed=True)), set())
            same.add(number)
            if len(same) > MOST_ALIKE:
                message = f"more than {MOST_ALIKE} of its integers have the same hash"
                hint = "the file was made to keep its reader busy: as keys, each is compared with all the others"
                raise CorruptError(message, hint=hint, expected=MOST_ALIKE)
        at = after
