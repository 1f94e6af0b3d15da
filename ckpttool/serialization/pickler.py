"""Writes trees of plain values and stubs as pickles, byte for byte the same for the same tree."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from ckpttool.catalogue import identity
from ckpttool.catalogue.values import KnownName, Stub, StubType, TorchSize, check_spelling, stub_name, stub_type
from ckpttool.errors import LossError

_BATCH = 1000
Leaf = Callable[["PickleWriter", Any], bool]


def spelt_text(value: str) -> bytes:
    """Return a string in a pickle, where nothing refers to it."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


class PickleWriter:
    """Writes a tree as a pickle of protocol 2, as `torch.save` does, or 4. `leaf` is asked first for every value that
    is not a number, a string or None: it may write the value with the writer's own methods (a tensor, as a call with a
    persistent id), `remember` it, and return True."""

    def __init__(self, protocol: int = 2, leaf: Leaf | None = None) -> None:
        self.out = bytearray((0x80, protocol))
        self.protocol, self._leaf = protocol, leaf
        self._memo: dict[Any, int] = {}
        self._keep: list[Any] = []  # so that ids in the memo stay taken
        self._open: set[int] = set()  # stubs whose arguments are being written
        self.frozen = False  # nothing new comes into the memo

    def done(self) -> bytes:
        self.out += b"."
        return bytes(self.out)

    # The memo ------------------------------------------------------------------------------------------------

    def _put(self, key: Any) -> None:
        if self.frozen:
            return
        n = self._memo[key] = len(self._memo)
        self.out += b"q" + bytes((n,)) if n < 256 else b"r" + struct.pack("<I", n)

    def _get(self, key: Any) -> bool:
        n = self._memo.get(key)
        if n is None:
            return False
        self.out += b"h" + bytes((n,)) if n < 256 else b"j" + struct.pack("<I", n)
        return True

    # Values --------------------------------------------------------------------------------------------------

    def named(self, module: str, name: str) -> None:
        """Write a class or function by name."""
        key = ("global", module, name)
        if self._get(key):
            return
        if "." in name and self.protocol < 4:
            # Protocol 2 has no dotted names.
            owner, _, last = name.rpartition(".")
            self.named("builtins", "getattr")
            self.write_tuple((stub_type(module, owner), last))
            self.out += b"R"
        else:
            check_spelling(module, name)
            self.out += b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        self._put(key)

    def call(self, module: str, name: str, args: tuple[Any, ...]) -> None:
        """Write `module.name(*args)`, to be called when the pickle is loaded."""
        self.named(module, name)
        self.write_tuple(args)
        self.out += b"R"

    def persistent(self, pid: Any) -> None:
        self.write(pid)
        self.out += b"Q"

    def text(self, value: str) -> None:
        if not self._get(value):
            self.out += spelt_text(value)
            self._put(value)

    def integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K" + bytes((value,))
        elif 0 <= value < 65536:
            self.out += b"M" + struct.pack("<H", value)
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
            self.out += b"\x8a" + bytes((len(data),)) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))
            self.out += data

    def write_tuple(self, values: tuple[Any, ...]) -> None:
        is_short = len(values) <= 3
        self.out += b"" if is_short else b"("
        for value in values:
            self.write(value)
        self.out += (b")", b"\x85", b"\x86", b"\x87")[len(values)] if is_short else b"t"

    def write(self, value: Any) -> None:
        """Write any plain value, container or stub. Raises LossError for another value."""
        kind = type(value)
        if value is None:
            self.out += b"N"
        elif kind is bool:
            self.out += b"\x88" if value else b"\x89"
        elif kind is int:
            self.integer(value)
        elif kind is float:
            self.out += b"G" + struct.pack(">d", value)
        elif kind is str:
            self.text(value)
        elif not self._get(id(value)):
            self._write_new(value)

    def remember(self, value: Any) -> None:
        """Remember `value`, which was just written: the next time it is only referred to."""
        if not self.frozen:
            self._keep.append(value)
            self._put(id(value))

    def apart(self, value: Any) -> bytes:
        """Return how a value is written here, without writing it: it may be repeated at any later place of this pickle.
        It refers to what was written before, and nothing can refer into it."""
        start = len(self.out)
        self.frozen = True
        try:
            self.write(value)
            return bytes(self.out[start:])
        finally:
            self.frozen = False
            del self.out[start:]

    def _write_new(self, value: Any) -> None:  # noqa: C901 - one flat table of kinds
        if self._leaf is not None and self._leaf(self, value):
            return
        match value:
            case TorchSize():
                self.call("torch", "Size", (tuple(value),))
                self.remember(value)
            case tuple():
                self.write_tuple(value)
                if value:
                    self.remember(value)
            case list():
                self.out += b"]"
                self.remember(value)
                self._fill([(item,) for item in value], b"a", b"e")
            case OrderedDict():
                self.call("collections", "OrderedDict", ())
                self.remember(value)
                self._fill(list(value.items()), b"s", b"u")
                if vars(value):
                    self._build(dict(vars(value)))
            case dict():
                self.out += b"}"
                self.remember(value)
                self._fill(list(value.items()), b"s", b"u")
            case bytes():
                self._bytes(value)
                self.remember(value)
            case bytearray():
                self.call("builtins", "bytearray", (bytes(value),))
                self.remember(value)
            case set() | frozenset():
                # Sorted where that can be done, so that equal sets make equal files.
                self.call("builtins", type(value).__name__, (sorted(value, key=_order),))
                self.remember(value)
            case complex():
                self.call("builtins", "complex", (value.real, value.imag))
            case Stub():
                self._stub(value)
            case StubType() | KnownName():
                self.named(value.module, value.name)
            case _:
                raise LossError(f"a value of class `{type(value).__module__}.{type(value).__name__}` cannot be pickled")

    def _bytes(self, value: bytes) -> None:
        if self.protocol >= 4:
            n = len(value)
            self.out += b"B" + struct.pack("<I", n) if n < 2**32 else b"\x8e" + struct.pack("<Q", n)
            self.out += value
        else:
            # pickle itself spells b"" `bytes()`, which `torch.load(weights_only=True)` refuses.
            self.call("_codecs", "encode", (value.decode("latin1"), "latin1"))

    def _fill(self, items: Sequence[tuple[Any, ...]], one: bytes, many: bytes) -> None:
        # In batches, as pickle does: a reader keeps no more than one on its stack.
        for start in range(0, len(items), _BATCH):
            batch = items[start : start + _BATCH]
            self.out += b"(" if len(batch) > 1 else b""
            for value in chain.from_iterable(batch):
                self.write(value)
            self.out += many if len(batch) > 1 else one

    def _stub(self, value: Stub) -> None:
        if id(value) in self._open:
            # Only the whole around it, which is not written, could have been made before it.
            text = f"`{stub_name(value)}` is one of its own constructor arguments, and cannot be written again"
            raise LossError(text, hint="`--producer same` writes a copy of the file; or save its state dict")
        self._open.add(id(value))
        self._called(value)
        self.write_tuple(value.args)
        if value.kwargs:
            self.write(value.kwargs)
            self.out += b"\x92"
        else:
            self.out += b"\x81" if value.how == "new" else b"R"
        self._open.remove(id(value))
        self.remember(value)
        self._fill([(item,) for item in value.values], b"a", b"e")
        self._fill(value.pairs, b"s", b"u")
        for state in value.state:
            if isinstance(state, Stub) and state.how == "setter":
                self._called(state)
                self.write_tuple((value, *state.args))
                self.out += b"R0"
            else:
                self._build(state)

    def _called(self, value: Stub) -> None:
        """Write what was called to make a stub."""
        if value.target is not None:
            self.write(value.target)
        else:
            self.named(type(value).module, type(value).name)

    def _build(self, state: Any) -> None:
        self.write(state)
        self.out += b"b"


def _order(value: Any) -> tuple[bool, str]:
    """Return what the values of a set are sorted by; those of tuples and objects may be shared without end."""
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
    return not is_plain, repr(value) if is_plain else identity.key(value)


def dump(value: Any, *, protocol: int = 2, leaf: Leaf | None = None) -> bytes:
    """Return `value` as a pickle; see `PickleWriter`. Raises LossError for what cannot be pickled or is nested too
    deeply."""
    writer = PickleWriter(protocol, leaf)
    try:
        writer.write(value)
    except RecursionError:
        raise LossError("a value is nested too deeply to be written") from None
    return writer.done()
