"""How two states of a random number generator follow from each other: the same one, some numbers further.

The generators of Python, of NumPy (the legacy one) and of torch on the CPU are all MT19937: 624 words, of which a
position has been drawn, and which are replaced together. That of a GPU is a seed and an offset. The hook records
`[position, words in base64]`, see `observe/site/hook.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ckpttool.text import plural

Words = Sequence[Any]
_WORDS = 624
_AT_ONCE = 1 << 8
_BLOCKS = 1 << 14  # times that the words are replaced, before a state is taken for one of another seed
_FEW = 4  # numbers that the start of a loader draws, at most
_NAMES = {"torch": "torch's", "python": "Python's", "numpy": "NumPy's"}
_BITS = 32


def numbers_between(one: Words, other: Words) -> int | None:
    """Return how many numbers have to be drawn from one state to come to the other, negative if it is the other way
    round; None if neither follows from the other."""
    for sign, first, last in ((1, one, other), (-1, other, one)):
        if (count := _numbers_until(tuple(first), tuple(last))) is not None:
            return sign * count
    return None


@lru_cache  # whether a state was restored is asked before how far it is from others
def _numbers_until(first: Words, last: Words) -> int | None:
    import numpy as np

    words, wanted = (base64.b64decode(one) for _, one in (first, last))
    apart = int(last[0]) - int(first[0])
    if words == wanted and apart >= 0:
        return apart
    if len(words) != len(wanted) or len(words) != _WORDS * 4:
        return None
    # What is drawn tells words apart, and is quicker to come by than the words themselves.
    now = _generator(wanted, 0).random_raw(_WORDS)
    later = _generator(words, _WORDS)
    for low in range(0, _BLOCKS, _AT_ONCE):
        drawn = later.random_raw(_AT_ONCE * _WORDS).reshape(_AT_ONCE, _WORDS)
        for block in np.flatnonzero(drawn[:, 0] == now[0]):
            if np.array_equal(drawn[block], now):
                return _WORDS * (low + int(block) + 1) + apart
    return None


def _generator(words: bytes, position: int) -> Any:
    import numpy as np

    generator: Any = np.random.MT19937()
    state = {"key": np.frombuffer(words, "<u4"), "pos": position}
    generator.state = {"bit_generator": "MT19937", "state": state}
    return generator


def origin(kind: str, now: Words | None, known: Mapping[str, Words | None]) -> str:
    """Return which of the states `known` a generator has, by their names, or how far from the nearest it is; "" if it
    follows from none of them."""
    far = {name: numbers_between(one, now) for name, one in known.items() if one is not None and now is not None}
    near = {name: count for name, count in far.items() if count is not None}
    if not near:
        return ""
    name = min(near, key=lambda one: abs(near[one]))
    count, whose = near[name], _NAMES.get(kind, f"{kind}'s")
    of = f"{whose} is that of {name}"
    if count == 0:
        return of
    if count < 0:
        return f"{of}, {_drawn(kind, -count)} before: run A drew from it what run B did not"
    as_of = ", such as `iter(DataLoader)`" if kind == "torch" and count <= _FEW and count % 2 == 0 else ""
    return f"{of}, {_drawn(kind, count)} further: something drew from it after it was restored{as_of}"


def _drawn(kind: str, count: int) -> str:
    if kind not in _NAMES:
        return plural(count, "number")
    wide = kind == "torch" and count % 2 == 0
    return f"{plural(count // 2 if wide else count, 'draw')} of {2 * _BITS if wide else _BITS} bits"
