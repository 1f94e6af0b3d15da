"""Values of objects as JSON: what it looks like, and the way back."""

from __future__ import annotations

import json
import math
import pickle
import random
import struct
from argparse import Namespace
from collections import OrderedDict, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.catalogue import typed_json
from ckpttool.catalogue.typed_json import MAX_DEPTH, encode
from ckpttool.catalogue.values import Link, Stub, StubType, TorchSize, stub_type
from ckpttool.errors import CorruptError, LossError
from ckpttool.serialization import pickler as picklewriter
from ckpttool.serialization import torch_pickle as torchpickle
from ckpttool.serialization import unpickler as pickles

decode = partial(typed_json.decode, functions={**pickles.REAL, **torchpickle.KNOWN})


def there_and_back(value: Any) -> Any:
    text = json.dumps(encode(value), ensure_ascii=False, allow_nan=False).encode("utf-8")
    return decode(json.loads(text))


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit and class. Written without the module's own rules."""
    if isinstance(a, OrderedDict) and isinstance(b, OrderedDict):
        return same(list(a.items()), list(b.items())) and same(vars(a), vars(b))
    if isinstance(a, StubType) or isinstance(b, StubType):
        return isinstance(a, StubType) and isinstance(b, StubType) and (a.module, a.name) == (b.module, b.name)
    if isinstance(a, Stub) and isinstance(b, Stub):
        return same(type(a), type(b)) and all(same(getattr(a, k), getattr(b, k)) for k in Stub.__slots__)
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    return bool(a == b)


NANS = st.sampled_from([0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8000000000001, 0xFFFFFFFFFFFFFFFF]).map(
    lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0]
)
FLOATS = st.one_of(st.floats(), NANS, st.sampled_from([-0.0, math.inf, -math.inf, 5e-324, 0.1]))
TEXT = st.text(st.characters(), max_size=6) | st.text(st.characters(categories=["Cs"]), max_size=3)
NAMES = st.sampled_from([("torch", "float32"), ("argparse", "Namespace"), ("a.b", "C.D"), ("", "")])
FUNCTIONS = st.sampled_from([*torchpickle.KNOWN.values(), *pickles.REAL.values()])
HOWS = st.sampled_from(["call", "new", "target"])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), FLOATS,
    st.builds(complex, FLOATS, FLOATS), TEXT, st.binary(max_size=6),
)  # fmt: skip
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)
LINKS = st.builds(Link, st.lists(KEYS, max_size=3).map(tuple), st.booleans())
LEAVES = st.one_of(
    SCALARS, st.binary(max_size=6).map(bytearray), st.lists(st.integers(0, 9), max_size=3).map(TorchSize), LINKS,
    st.sets(KEYS, max_size=3), st.frozensets(KEYS, max_size=3), NAMES.map(lambda n: stub_type(*n)), FUNCTIONS,
)  # fmt: skip


def ordered(pairs: list[Any], attributes: dict[str, Any]) -> OrderedDict[Any, Any]:
    made = OrderedDict(pairs)
    vars(made).update(attributes)
    return made


def stub(name: tuple[str, str], how: str, parts: list[Any], kwargs: dict[str, Any], pairs: Any, state: Any) -> Stub:
    kind: Any = stub_type(*name)
    make = {
        "call": kind,
        "new": lambda *a, **k: kind.__new__(kind, *a, **k),
        "target": lambda *a, **k: kind(1)(*a, **k),
    }
    made: Stub = make[how](*parts[:1], **kwargs)
    made.values, made.pairs, made.state = parts[1:], pairs, state
    return made


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    parts = st.lists(inner, max_size=3)
    pairs = st.lists(st.tuples(KEYS, inner), max_size=3)
    tags = st.sampled_from(["$tuple", "$float", "$", "$dict", "a", "$call", "args"])
    plain = st.dictionaries(TEXT | tags, inner, max_size=3)
    return st.one_of(
        parts, parts.map(tuple), plain, pairs.map(dict),
        st.builds(ordered, pairs, st.just({}) | plain.filter(lambda d: "" not in d)),
        st.builds(stub, NAMES, HOWS, parts, plain, pairs, st.lists(inner, max_size=1)),
    )  # fmt: skip


@settings(max_examples=300)
@given(st.recursive(LEAVES, containers, max_leaves=12))
def test_there_and_back_is_the_same(value: Any) -> None:
    back = there_and_back(value)
    assert same(value, back)
    assert encode(back) == encode(value)


def test_plain_things_are_plain() -> None:
    group = {
        "lr": 0.001,
        "betas": [0.9, 0.999],
        "eps": 1e-08,
        "foreach": None,
        "amsgrad": False,
        "params": [0, 1],
        "": "é",
    }
    assert encode(group) == group
    assert encode(2**64 - 1) == 2**64 - 1
    assert encode(-(2**63)) == -(2**63)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((0.9, 0.999), '{"$tuple": [0.9, 0.999]}'),
        (math.nan, '{"$float": "nan"}'),
        (-math.inf, '{"$float": "-inf"}'),
        (-0.0, "-0.0"),
        (2**64, '{"$int": "0x10000000000000000"}'),
        (b"\0\1", '{"$bytes": "AAE="}'),
        (bytearray(b"\0\1"), '{"$bytearray": "AAE="}'),
        (1j, '{"$complex": [0.0, 1.0]}'),
        ({0: 1}, '{"$dict": [[0, 1]]}'),
        ({"$tuple": 1}, '{"$dict": [["$tuple", 1]]}'),
        ({"a": {"$x": 1, "b": 2}}, '{"a": {"$dict": [["$x", 1], ["b", 2]]}}'),
        (TorchSize((2, 3)), '{"$size": [2, 3]}'),
        ({2, 1}, '{"$set": [1, 2]}'),
        (stub_type("torch", "float32"), '{"$name": ["torch", "float32"]}'),
        (Link(("optim", 0)), '{"$tensor": ["optim", 0]}'),
        (Link(("s",), storage=True), '{"$storage": ["s"]}'),
        (pickles.REAL["builtins", "set"], '{"$function": ["builtins", "set"]}'),
        (torchpickle.KNOWN["torch._utils", "_rebuild_tensor"], '{"$function": ["torch._utils", "_rebuild_tensor"]}'),
        (ordered([("a", 1)], {"_metadata": {}}), '{"$OrderedDict": [["a", 1]], "attributes": {"_metadata": {}}}'),
    ],
)  # fmt: skip
def test_spelling(value: Any, text: str) -> None:
    assert json.dumps(encode(value)) == text
    assert same(decode(json.loads(text)), value)


def test_an_integer_of_thousands_of_digits() -> None:
    assert there_and_back(-(10**4000)) == -(10**4000)
    with pytest.raises(CorruptError, match=r"a malformed `\$int`"):
        decode({"$int": hex(10**5000)})  # Python prints no longer one


def test_two_lone_surrogates_do_not_become_one_character() -> None:
    value = ["\ud83d" + "\ude00", {"\ud83d" + "\ude00": 1}]
    assert there_and_back(value) == value


class Made:
    """Pickled by protocol 2 as a call of `partial(cls.__new__, cls, lr=1)`."""

    def __new__(cls, *, lr: int) -> Made:  # noqa: PYI034
        self = super().__new__(cls)
        self.lr = lr
        return self

    lr: int

    def __getnewargs_ex__(self) -> tuple[Any, ...]:
        return (), {"lr": self.lr}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and self.lr == other.lr

    __hash__ = None  # type: ignore[assignment]


class WithSetter:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __reduce__(self) -> tuple[Any, ...]:
        return WithSetter, (0,), self.held, iter(()), iter(()), set_held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithSetter) and self.held == other.held

    __hash__ = None  # type: ignore[assignment]


def set_held(owner: WithSetter, held: Any) -> None:
    owner.held = held


def test_real_pickles_stay_the_same() -> None:
    """Through JSON, then pickled again, Python itself reads what it had pickled."""
    value = {
        "args": Namespace(lr=1e-3, layers=(1, 2), out=Path("a/b")),
        "rng": random.Random(0).getstate(),
        "factory": defaultdict(set, {"a": {1, 2}}),
        "ordered": defaultdict(OrderedDict),
        "partial": Made(lr=1),
        "setter": WithSetter([1, (2,)]),
        "dtype": torch.float32,
        "size": torch.Size((2, 3)),
    }
    tree = pickles.load(pickle.dumps(value, protocol=2), what="a test")
    assert pickle.loads(picklewriter.dump(there_and_back(tree))) == value


def test_same_stub_class_comes_back_as_one() -> None:
    kind = stub_type("m", "C")
    first, second = there_and_back([kind(), kind()])
    assert type(first) is type(second)


def test_cycle_is_a_loss() -> None:
    value: list[Any] = [1]
    value.append({"deep": (value,)})
    with pytest.raises(LossError, match=r"`cfg` .*a `list` in it holds itself"):
        encode(value, name="cfg")
    made = stub_type("m", "C")()
    made.state = [{"self": made}]
    with pytest.raises(LossError, match=r"a `m\.C` in it holds itself"):
        encode(made)


def test_shared_is_no_cycle() -> None:
    one = [1]
    assert there_and_back([one, one, (one, {"a": one})]) == [[1], [1], ([1], {"a": [1]})]


def test_shared_without_end_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.catalogue.typed_json.MAX_VALUES", 1000)
    value: Any = [1]
    for _ in range(40):
        value = [value, value]
    with pytest.raises(LossError, match="over 1000 values"):
        encode(value)


def test_depth() -> None:
    kind = stub_type("m", "C")
    value: Any = 1
    for i in range(MAX_DEPTH):
        value = kind(value) if i % 2 else {0: value}
    assert same(there_and_back(value), value)
    with pytest.raises(LossError, match="more than 100 deep"):
        encode([value])


def test_stranger_is_a_loss() -> None:
    with pytest.raises(LossError, match="`cfg` cannot be written as JSON: it holds a `slice`"):
        encode({"a": [slice(3)]}, name="cfg")


@pytest.mark.parametrize(
    "text",
    [
        '{"$what": 1}', '{"$tuple": [], "$set": []}', '{"$tuple": 1}', '{"$tuple": "ab"}', '{"$tuple": [], "x": 1}',
        '{"$int": 3}', '{"$int": "x"}', '{"$float": 3}', '{"$float": "x"}', '{"$float": "nan:00"}', '{"$bytes": "*"}',
        '{"$bytes": 3}', '{"$str": "/w=="}', '{"$complex": [1, 2, 3]}', '{"$complex": ["1", "2"]}',
        '{"$set": [[1]]}', '{"$dict": [[[1], 2]]}', '{"$dict": [[1]]}', '{"$dict": 1}', '{"$dict": [1]}',
        '{"$name": ["a"]}', '{"$name": [1, 2]}', '{"$name": 1}', '{"$call": ["a", "b"], "how": "x"}',
        '{"$call": ["a", "b"], "args": 1}', '{"$call": ["a", "b"], "kwargs": [1]}', '{"$call": ["a", "b"], "state": 2}',
        '{"$new": "ab", "args": {}}', '{"$setter": ["a"]}', '{"$function": ["os", "system"]}',
        '{"$OrderedDict": [[1]]}',
        '{"$OrderedDict": [], "attributes": 3}', '{"$OrderedDict": [], "attributes": {"items": 3}}',
        '{"$OrderedDict": [], "attributes": {"$dict": [[1, 2]]}}', '{"$tensor": 1}', '{"$storage": {}}',
        '{"a": [{"$bytes": null}]}',
        '{"$dict": [["ab"]]}', "[" * 4000,
        # Written as a pickle, these would be opcodes.
        '{"$name": ["collections", "deque\\n0cposix\\nsystem"]}', '{"$call": ["a\\n.", "b"]}',
        '{"$new": ["m\\ud800", "C"]}',
    ],
)  # fmt: skip
def test_json_that_we_do_not_write_is_refused(text: str) -> None:
    made: Any = 1
    if text.startswith("[["):
        for _ in text:
            made = [made]
    else:
        made = json.loads(text)
    with pytest.raises(CorruptError, match=r"ckpttool\.json"):
        decode(made, name="`ckpttool.json`")


@settings(max_examples=200)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([
                "$float", "$int", "$complex", "$str", "$bytes", "$bytearray", "$tuple", "$size", "$set", "$frozenset",
                "$dict", "$OrderedDict", "$name", "$call", "$new", "$function", "$tensor", "$storage", "$x", "args",
                "kwargs", "values", "pairs", "state", "attributes",
            ]),
            inner,
            max_size=2,
        ),
        max_leaves=8,
    )
)  # fmt: skip
def test_any_json_is_read_or_refused(made: Any) -> None:
    try:
        decode(made)
    except CorruptError:
        return
