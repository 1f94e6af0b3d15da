"""Any value of an object as JSON, and back exactly: what a whole training state keeps beside its tensors.

What JSON has is written plainly, so that a person can read it and `jq` can pick it apart. The rest is an object with a
key that begins with `$`, which says what it is, e.g. `{"$tuple": [0.9, 0.95]}`; `_READERS` has them all, and
`docs/reference/training-state.md` explains them. Integers of up to 64 bits are JSON numbers. What a pickle shared comes
back as copies.
"""

from __future__ import annotations

import json
import struct
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import isfinite, isnan
from typing import Any

from ckpttool.catalogue.key_hashes import charge_hashing
from ckpttool.catalogue.values import KnownName, Link, Stub, StubType, TorchSize, attributes_of, stub_name, stub_type
from ckpttool.errors import CorruptError, LossError

MAX_DEPTH = 100
MAX_VALUES = 10_000_000
# What is shared is written again for each mention: lists that hold one list twice, forty deep, would be 2**40 values.
MAX_REPEATED = 200_000  # and twice as many as there are values that are not repeated

MAX_HEX = 3500  # digits of an integer: Python prints no longer ones, and a pickle may hold none

_NAN = struct.pack(">d", float("nan"))


def encode(value: Any, *, name: str = "value", sharing: Sharing | None = None) -> Any:
    """Return `value` as what `json.dumps` takes. `name` is what messages call it. With `sharing`, what it shares with
    the values before counts as repeated. Raises LossError for a value that holds itself, is nested too deeply, shares
    so much that it would become millions of values, or has no spelling here."""
    return _Encoder(name, sharing or Sharing()).encode(value, 0)


class Sharing:
    """What values share with one another, which JSON repeats: the containers that were written, and how much of them
    was written again. One for all values of a file."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.once = self.again = 0


class _Encoder:
    def __init__(self, name: str, sharing: Sharing) -> None:
        self._name, self._sharing = name, sharing
        self._open: set[int] = set()  # the containers that we are inside of
        self._repeating = 0  # how many of these were written before
        self._count = 0

    def encode(self, value: Any, depth: int) -> Any:
        self._check(depth)
        if not isinstance(value, (dict, list, tuple, set, frozenset, Stub)):
            return self._leaf(value)
        if id(value) in self._open:
            raise self._loss(f"a {_kind(value)} in it holds itself")
        self._open.add(id(value))
        is_repeated = id(value) in self._sharing.seen
        self._sharing.seen.add(id(value))
        self._repeating += is_repeated
        encoded = self._container(value, depth + 1)
        self._repeating -= is_repeated
        self._open.remove(id(value))
        return encoded

    def _check(self, depth: int) -> None:
        sharing = self._sharing
        self._count += 1
        if self._repeating:
            sharing.again += 1
        else:
            sharing.once += 1
        if depth > MAX_DEPTH or self._count > MAX_VALUES:
            what = f"is nested more than {MAX_DEPTH} deep" if depth > MAX_DEPTH else f"has over {MAX_VALUES} values"
            raise LossError(f"`{self._name}` {what}: it cannot be written as JSON", name=self._name)
        if sharing.again > MAX_REPEATED + 2 * sharing.once:
            message = f"`{self._name}` shares lists or dicts which JSON repeats for each mention, to millions of values"
            hint = "`--to torch` keeps what is shared; `--exclude` leaves the value out"
            raise LossError(message, hint=hint, name=self._name)

    def _leaf(self, value: Any) -> Any:
        match value:
            case None | bool():
                return value
            case int():
                return value if -(2**63) <= value < 2**64 else {"$int": hex(value)}
            case float():
                return value if isfinite(value) else {"$float": _spell_float(value)}
            case complex():
                return {"$complex": [self._leaf(value.real), self._leaf(value.imag)]}
            case str():
                return value if _is_text(value) else {"$str": _base64(value.encode("utf-8", "surrogatepass"))}
            case bytes():
                return {"$bytes": _base64(value)}
            case bytearray():
                return {"$bytearray": _base64(value)}
        if isinstance(value, StubType):
            return {"$name": [value.module, value.name]}
        if isinstance(value, KnownName):
            return {"$function": [value.module, value.name]}
        raise self._loss(f"it holds a {_kind(value)}")

    def _loss(self, why: str) -> LossError:
        return LossError(f"`{self._name}` cannot be written as JSON: {why}", name=self._name)

    def _container(self, value: Any, depth: int) -> Any:
        match value:
            case Link():
                return {"$storage" if value.storage else "$tensor": self._all(value.path, depth)}
            case TorchSize():
                return {"$size": self._all(value, depth)}
            case tuple():
                return {"$tuple": self._all(value, depth)}
            case list():
                return self._all(value, depth)
            case set() | frozenset():
                # Equal sets make equal files.
                return {f"${type(value).__name__}": sorted(self._all(value, depth), key=json.dumps)}
            case OrderedDict():
                encoded: dict[str, Any] = {"$OrderedDict": self._pairs(list(value.items()), depth)}
                return encoded | {"attributes": self.encode(dict(vars(value)), depth)} if vars(value) else encoded
            case dict() if all(type(k) is str and not k.startswith("$") and _is_text(k) for k in value):
                return {k: self.encode(v, depth) for k, v in value.items()}
            case dict():
                return {"$dict": self._pairs(list(value.items()), depth)}
        return self._stub(value, depth)

    def _stub(self, stub: Stub, depth: int) -> Any:
        encoded: dict[str, Any] = {f"${stub.how}": [type(stub).module, type(stub).name]}
        if stub.target is not None:
            encoded["target"] = self.encode(stub.target, depth)
        fields = {
            "args": self._all(stub.args, depth),
            "kwargs": self.encode(stub.kwargs, depth) if stub.kwargs else {},
            "values": self._all(stub.values, depth),
            "pairs": self._pairs(stub.pairs, depth),
            "state": self._all(stub.state, depth),
        }
        return encoded | {name: field for name, field in fields.items() if field}

    def _all(self, values: Any, depth: int) -> list[Any]:
        return [self.encode(v, depth) for v in values]

    def _pairs(self, pairs: list[tuple[Any, Any]], depth: int) -> list[Any]:
        return [[self.encode(k, depth), self.encode(v, depth)] for k, v in pairs]


def _kind(value: Any) -> str:
    return f"`{stub_name(value) or type(value).__name__}`"


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _spell_float(value: float) -> str:
    bits = struct.pack(">d", value)
    return f"nan:{bits.hex()}" if isnan(value) and bits != _NAN else repr(value)


def _base64(data: bytes | bytearray) -> str:
    return b64encode(data).decode("ascii")


# Back -----------------------------------------------------------------------------------------------------------------


Functions = Mapping[tuple[str, str], KnownName]


def decode(encoded: Any, *, name: str = "value", functions: Functions | None = None) -> Any:
    """Return the value that `encode` made this JSON of; `functions` are those that `$function` may name, by module and
    name. Raises CorruptError for JSON that `encode` does not make."""
    try:
        return _Decoder(name, functions or {}).decode(encoded)
    except RecursionError:
        raise CorruptError(f"{name}: nested too deeply") from None


class _Decoder:
    def __init__(self, name: str, functions: Functions) -> None:
        self._name, self.functions = name, functions
        self._types: dict[tuple[str, str], type[Stub]] = {}

    def decode(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return [self.decode(v) for v in encoded]
        if not isinstance(encoded, dict):
            return encoded
        tags = [k for k in encoded if k.startswith("$")]
        if not tags:
            return {k: self.decode(v) for k, v in encoded.items()}
        read = _READERS.get(tags[0])
        if len(tags) > 1 or read is None:
            message = f"{self._name}: `{'`, `'.join(tags)}` is not a kind of value"
            raise CorruptError(message, hint="it was written by a later ckpttool")
        fields = {k: v for k, v in encoded.items() if k != tags[0]}
        try:
            if not fields.keys() <= _FIELDS.get(tags[0], set()):
                raise TypeError
            return read(self, encoded[tags[0]], fields)
        except (TypeError, ValueError, KeyError, OverflowError, struct.error):
            raise CorruptError(f"{self._name}: a malformed `{tags[0]}`") from None

    def all(self, encoded: Any) -> list[Any]:
        if not isinstance(encoded, list):
            raise TypeError
        return [self.decode(v) for v in encoded]

    def path(self, encoded: Any) -> tuple[Any, ...]:
        path = tuple(self.all(encoded))
        hash(path)  # TypeError for a list in place of a key
        return path

    def keys(self, encoded: Any) -> list[Any]:
        charge_hashing(keys := self.all(encoded))
        return keys

    def pairs(self, encoded: Any) -> list[tuple[Any, Any]]:
        pairs = [(self.decode(k), self.decode(v)) for k, v in encoded]
        charge_hashing([key for key, _ in pairs])
        return pairs

    def type(self, encoded: Any) -> type[Stub]:
        module, name = _two_names(encoded)
        if (module, name) not in self._types:
            try:
                self._types[module, name] = stub_type(module, name)
            except CorruptError as error:
                raise error.prefixed(self._name) from None
        return self._types[module, name]

    def object(self, how: str, encoded: Any, fields: dict[str, Any]) -> Stub:
        kind = self.type(encoded)
        stub = kind.__new__(kind, *self.all(fields.get("args", [])))
        stub.how, stub.target = how, self.decode(fields.get("target"))
        stub.kwargs = self.decode(fields.get("kwargs", {}))
        if not isinstance(stub.kwargs, dict):
            raise TypeError
        stub.values = self.all(fields.get("values", []))
        stub.pairs = self.pairs(fields.get("pairs", []))
        stub.state = self.all(fields.get("state", []))
        return stub

    def ordered(self, encoded: Any, fields: dict[str, Any]) -> OrderedDict[Any, Any]:
        ordered: OrderedDict[Any, Any] = OrderedDict(self.pairs(encoded))
        vars(ordered).update(attributes_of(self.decode(fields.get("attributes", {}))))
        return ordered


def _two_names(encoded: Any) -> tuple[str, str]:
    module, name = encoded
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError
    return module, name


def _read_float(text: Any) -> float:
    if not isinstance(text, str):
        raise TypeError
    return float(struct.unpack(">d", bytes.fromhex(text[4:]))[0] if text.startswith("nan:") else text)


def _read_int(text: Any) -> int:
    if not isinstance(text, str) or len(text) > MAX_HEX:
        raise ValueError
    return int(text, 16)


def _bytes(text: Any) -> bytes:
    return b64decode(text, validate=True)


_READERS: dict[str, Callable[[_Decoder, Any, dict[str, Any]], Any]] = {
    "$float": lambda d, made, _: _read_float(made),
    "$int": lambda d, made, _: _read_int(made),
    "$complex": lambda d, made, _: complex(*d.all(made)),
    "$str": lambda d, made, _: _bytes(made).decode("utf-8", "surrogatepass"),
    "$bytes": lambda d, made, _: _bytes(made),
    "$bytearray": lambda d, made, _: bytearray(_bytes(made)),
    "$tuple": lambda d, made, _: tuple(d.all(made)),
    "$size": lambda d, made, _: TorchSize(d.all(made)),
    "$set": lambda d, made, _: set(d.keys(made)),
    "$frozenset": lambda d, made, _: frozenset(d.keys(made)),
    "$dict": lambda d, made, _: dict(d.pairs(made)),
    "$OrderedDict": lambda d, made, fields: d.ordered(made, fields),
    "$name": lambda d, made, _: d.type(made),
    "$call": lambda d, made, fields: d.object("call", made, fields),
    "$new": lambda d, made, fields: d.object("new", made, fields),
    "$setter": lambda d, made, fields: d.object("setter", made, fields),
    "$function": lambda d, made, _: d.functions[_two_names(made)],
    "$tensor": lambda d, made, _: Link(d.path(made)),
    "$storage": lambda d, made, _: Link(d.path(made), storage=True),
}
_OBJECT_FIELDS = {"target", "args", "kwargs", "values", "pairs", "state"}
_FIELDS = {
    **dict.fromkeys(("$call", "$new", "$setter"), _OBJECT_FIELDS),
    "$OrderedDict": {"attributes"},
}
