"""Whether values are the same, bit for bit and type for type: 1 is not 1.0, a tuple no list, NaN equals itself. Pure.

Each container is looked at once, however often it is shared, and nothing here recurses: `==`, `hash` and `repr` take
2**40 steps for forty lists that each hold the one before twice, and end at a thousand levels.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from hashlib import sha256
from itertools import chain
from typing import Any

from ckpttool.catalogue.values import CONTAINERS, KnownName, Link, Stub, StubType, TorchSize


def key(value: Any, *, ordered: bool = True) -> str:
    """Return a digest of a value: equal for two values exactly when they are the same; unless `ordered`, in whatever
    order dicts have their keys. A container inside itself counts by how far above it is. A value that no file can hold
    is the same as itself only."""
    return _Digests(ordered).of(value).hex()


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same."""
    digests = _Digests()
    return one is other or digests.of(one) == digests.of(other)


class _Open:
    """A container whose digest is not known yet: those of what is in it so far."""

    __slots__ = ("children", "done", "ordered", "tag", "value")

    def __init__(self, value: Any, ordered: bool) -> None:
        self.value, self.ordered = value, ordered
        self.tag, children = _spelling(value)
        self.children = iter(children)
        self.done: list[bytes] = []

    def digest(self) -> bytes:
        parts = sorted(self.done) if isinstance(self.value, (set, frozenset)) else self.done
        if not self.ordered and type(self.value) is dict:
            parts = [*chain.from_iterable(sorted(zip(parts[::2], parts[1::2], strict=True)))]
        sizes = struct.pack(f"<{len(parts)}Q", *map(len, parts))
        return b"#" + sha256(b"".join((self.tag, b"\0", sizes, *parts))).digest()


class _Digests:
    def __init__(self, ordered: bool = True) -> None:
        self._known: dict[int, bytes] = {}
        self._ordered = ordered

    def of(self, value: Any) -> bytes:
        if not isinstance(value, CONTAINERS):
            return _leaf(value)
        stack = [_Open(value, self._ordered)]
        at = {id(value): 0}  # the place of what is open
        while True:
            top = stack[-1]
            for child in top.children:
                if not isinstance(child, CONTAINERS):
                    top.done.append(_leaf(child))
                elif id(child) in self._known:
                    top.done.append(self._known[id(child)])
                elif id(child) in at:
                    top.done.append(b"^%d" % (len(stack) - at[id(child)]))
                else:
                    at[id(child)] = len(stack)
                    stack.append(_Open(child, self._ordered))
                    break
            else:
                stack.pop()
                digest = self._known[id(top.value)] = top.digest()
                del at[id(top.value)]
                if not stack:
                    return digest
                stack[-1].done.append(digest)


def _spelling(value: Any) -> tuple[bytes, Any]:
    """Return what kind of container a value is, and what is in it."""
    match value:
        case Link():
            return b"storage" if value.storage else b"tensor", value.path
        case TorchSize() | tuple() | list() | set() | frozenset():
            return type(value).__name__.encode(), value
        case OrderedDict():
            attributes = vars(value)
            count = b"%d" % len(attributes)
            return b"ordered " + count, chain(chain.from_iterable(attributes.items()), _pairs(value.items()))
        case dict():
            return b"dict", _pairs(value.items())
    counts = struct.pack("<?5Q", value.target is not None, *map(len, _fields(value)))
    name = f"{value.how} {type(value).module}\n{type(value).name}\n".encode("utf-8", "surrogatepass")
    args, kwargs, values, pairs, state = _fields(value)
    inside = chain((value.target,), args, _pairs(kwargs.items()), values, _pairs(pairs), state)
    return name + counts, inside


def _fields(stub: Stub) -> tuple[Any, ...]:
    return stub.args, stub.kwargs, stub.values, stub.pairs, stub.state


def _pairs(pairs: Any) -> Any:
    return chain.from_iterable(pairs)


def _leaf(value: Any) -> bytes:
    match value:
        case None | bool():
            return b"%a" % value
        case int():
            return b"i%x" % value
        case float():
            return b"d" + struct.pack("<d", value)
        case complex():
            return b"c" + struct.pack("<dd", value.real, value.imag)
        case str():
            return b"s" + value.encode("utf-8", "surrogatepass")
        case bytes():
            return b"b" + value
        case bytearray():
            return b"a" + value
    if isinstance(value, (StubType, KnownName)):
        kind = "name" if isinstance(value, StubType) else "function"
        return f"{kind} {value.module}\n{value.name}".encode("utf-8", "surrogatepass")
    return b"@%d" % id(value)
