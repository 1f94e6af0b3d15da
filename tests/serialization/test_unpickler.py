"""Pickles without execution: payloads along every route an opcode opens, and the writer against Python's own reader."""

from __future__ import annotations

import argparse
import copyreg
import enum
import functools
import io
import math
import pickle
import pickletools
import re
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hang import no_hang

from ckpttool.catalogue import flatten as nesting
from ckpttool.catalogue import values as stubs
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.values import Stub, TorchSize, stub_name, stub_type
from ckpttool.errors import CorruptError, LossError
from ckpttool.serialization import pickle_limits
from ckpttool.serialization import pickle_opcodes as opcodes
from ckpttool.serialization import pickler as picklewriter
from ckpttool.serialization import torch_pickle as torchpickle
from ckpttool.serialization import unpickler as pickles
from ckpttool.serialization import unsafe_globals as harm
from ckpttool.serialization.dcp import metadata as dcpmetadata
from ckpttool.serialization.torch_pickle import KNOWN, NewTensor, StorageRef, TensorRef


def load(data: bytes) -> Any:
    return torchpickle.load(data, "the pickle")


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


# Payloads -------------------------------------------------------------------------------------------------------------

TRIPPED: list[str] = []


def trip(*args: Any, **kwargs: Any) -> Any:
    TRIPPED.append("called")
    return trip


class Tripwire:
    """Every way in which making, filling or naming an object could run something."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        trip()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        trip()
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        trip()

    def __setattr__(self, name: str, value: Any) -> None:
        trip()

    def append(self, value: Any) -> None:
        trip()

    extend = __setitem__ = add = update = __call__ = append


HERE = Tripwire.__module__.encode()
CLASS = b"c" + HERE + b"\nTripwire\n"
FUNCTION = b"c" + HERE + b"\ntrip\n"
ITEM = text("a") + b"K\1"

ROUTES = {
    "REDUCE": b"\x80\x02" + FUNCTION + text("x") + b"\x85R.",
    "REDUCE without arguments": b"\x80\x02" + FUNCTION + b")R.",
    "REDUCE of what REDUCE gave": b"\x80\x02" + FUNCTION + b")R)R)R.",
    "NEWOBJ": b"\x80\x02" + CLASS + b")\x81.",
    "NEWOBJ_EX": b"\x80\x04" + CLASS + b")}" + ITEM + b"s\x92.",
    "OBJ": b"\x80\x02(" + CLASS + text("x") + b"o.",
    "OBJ without arguments": b"\x80\x02(" + CLASS + b"o.",
    "INST": b"(i" + HERE + b"\nTripwire\n.",
    "INST with arguments": b"(S'x'\ni" + HERE + b"\nTripwire\n.",
    "STACK_GLOBAL": b"\x80\x04\x8c" + bytes([len(HERE)]) + HERE + b"\x8c\x04trip\x93)R.",
    "BUILD": b"\x80\x02" + CLASS + b")\x81}" + ITEM + b"sb.",
    "BUILD with slots": b"\x80\x02" + CLASS + b")\x81N}" + ITEM + b"s\x86b.",
    "APPEND": b"\x80\x02" + CLASS + b")\x81K\1a.",
    "APPENDS": b"\x80\x02" + CLASS + b")\x81(K\1K\2e.",
    "SETITEM": b"\x80\x02" + CLASS + b")\x81" + ITEM + b"s.",
    "SETITEMS": b"\x80\x02" + CLASS + b")\x81(" + ITEM + b"u.",
    "ADDITEMS": b"\x80\x04" + CLASS + b")\x81(K\1\x90.",
    "getattr": b"\x80\x02cbuiltins\ngetattr\n" + CLASS + text("append") + b"\x86RK\1\x85R.",
    "getattr of a module": b"\x80\x02c__builtin__\ngetattr\ncos\n__dict__\n" + text("system") + b"\x86R.",
    "dotted name": b"\x80\x04\x8c" + bytes([len(HERE)]) + HERE + b"\x8c\x0fTripwire.append\x93K\1K\2\x86R.",
    "memo": b"\x80\x02" + FUNCTION + b"q\0)Rq\1h\0h\1\x85R.",
    "hooks of a tensor": b"\x80\x02ctorch._utils\n_rebuild_parameter\n" + FUNCTION + b")R\x88" + FUNCTION + b"\x87R.",
    "function of a subclass": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(" + FUNCTION + CLASS + b")NtR.",
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_runs_along(route: str) -> None:
    TRIPPED.clear()
    value = load(ROUTES[route])
    assert not TRIPPED
    list(stubs.walk(value))
    repr(value)
    stub_name(value)
    assert not TRIPPED


@pytest.mark.parametrize("route", [r for r in ROUTES if "getattr" not in r and " of a " not in r])
def test_the_payloads_are_live(route: str) -> None:
    """The same bytes trip the wire when Python's own unpickler runs them."""
    TRIPPED.clear()
    try:
        pickle.loads(ROUTES[route])
    except Exception:
        assert TRIPPED, "the payload never got as far as the wire"
    assert TRIPPED or route == "memo"


def test_persistent_ids_are_answered_by_us_only() -> None:
    command = b"cos\nsystem\n" + text("true") + b"\x85R"
    with pytest.raises(CorruptError, match="persistent id"):
        load(b"\x80\x02" + command + b"Q.")
    with pytest.raises(CorruptError, match="persistent id"):
        load(b"\x80\x02(" + text("storage") + command + b"tQ.")
    with pytest.raises(CorruptError, match="outside itself"):
        pickles.load(b"\x80\x02K\1Q.", what="p")
    with pytest.raises(CorruptError, match="persistent id"):
        load(b"Psomething\n.")


@pytest.mark.parametrize(
    "name",
    [
        ("collections", "OrderedDict"),
        ("builtins", "getattr"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor_v2"),
    ],
)
@pytest.mark.parametrize("state", [b"}" + text("answer") + b"K\1s", b"N}" + text("answer") + b"K\1s\x86"])
def test_what_we_answer_with_cannot_be_changed(name: tuple[str, str], state: bytes) -> None:
    """BUILD sets attributes of whatever is on the stack: of our own functions, for all files after this one."""
    known = (KNOWN | pickles.REAL)[name]
    before = known.answer
    with pytest.raises(CorruptError, match="changes"):
        load(b"\x80\x02c" + "\n".join(name).encode() + b"\n" + state + b"b.")
    assert known.answer is before


# Memo and limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"\x80\x02X\xff\xff\xff\x7f", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f", b"\x8b\xfe\xff\xff\xff"]
)
def test_lengths_past_the_pickle_are_not_waited_for(data: bytes) -> None:
    """A legacy file is read on until its pickle is whole: a made-up length must not make that the whole file."""
    with pytest.raises(CorruptError, match="a value of"):
        opcodes.find_end(lambda at, nbytes: data[at : at + nbytes], 1000)


def test_cut_pickles() -> None:
    data = pickle.dumps({"a": [1, 2.5, "text", b"bytes", (1, 2, 3), {4}], "b": OrderedDict(c=None)}, protocol=2)
    for n in range(len(data)):
        with pytest.raises(CorruptError):
            load(data[:n])


@pytest.mark.parametrize("protocol", range(6))
def test_ends_are_found(protocol: int) -> None:
    values = {
        "a": [1, -5, 2**40, 2**900, 1.5, None, True, "x" * 300, b"y" * 300, bytearray(b"z")],
        "s": {1},
        2: (1,) * 9,
    }
    data = pickle.dumps(values, protocol=protocol)
    assert opcodes.end_of(data) == len(data)
    assert opcodes.end_of(data + b"more.") == len(data)
    assert opcodes.end_of(data[:-1]) is None


@pytest.mark.parametrize("rest", [pickle.dumps([2]), b".", b"\0", b"rest"])
def test_what_follows_a_pickle_is_refused(rest: bytes) -> None:
    """Who calls `pickle.load` once does not see it, who calls it again runs it."""
    data = pickle.dumps(1)
    assert pickle.load(io.BytesIO(data + rest)) == 1
    assert opcodes.end_of(data + rest) == len(data)
    with pytest.raises(CorruptError, match=rf"^p: {len(rest)} bytes after the end of its pickle, at {len(data)}\b"):
        pickles.load(data + rest, what="p")


def test_thirty_thousand_tensors_do_not_hang() -> None:
    state = {f"layers.{i}.weight": None for i in range(30_000)}
    slots = {name: NewTensor(str(i), torchpickle.dtype("float32"), (2, 2)) for i, name in enumerate(state)}
    with no_hang():
        loaded = load(torchpickle.dump(slots, lambda v: v if isinstance(v, NewTensor) else None))
    assert len(loaded) == 30_000 and loaded["layers.7.weight"].storage.key == "7"


# Stubs ----------------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Filled:
    """Made by REDUCE, then filled by every opcode that fills."""

    def __init__(self, *args: Any) -> None:
        self.made = args
        self.items: list[Any] = []
        self.pairs: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Filled, self.made, {"state": 1}, iter([10, 11]), iter([("k", "v")])

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs[key] = value


class WithKeywords:
    def __new__(cls, one: Any, *, two: Any) -> Any:
        made = super().__new__(cls)
        made.both = (one, two)
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[Any], dict[str, Any]]:
        return (self.both[0],), {"two": self.both[1]}


def set_state(owner: Any, state: dict[str, Any]) -> None:
    vars(owner).update(state)


class WithSetter:
    """As cloudpickle writes functions and classes: what it holds comes by a call whose result is dropped."""

    def __init__(self, held: Any = None) -> None:
        self.held, self.itself = held, self

    def __reduce__(self) -> tuple[Any, ...]:
        return WithSetter, (), {"held": self.held, "itself": self}, None, None, set_state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithSetter) and self.itself is self and self.held == other.held

    __hash__ = None  # type: ignore[assignment]


class ByValue(type):
    """Classes that are made when they are loaded, as cloudpickle and dill write those of a script."""


def by_value(name: str, x: int) -> Any:
    return ByValue(name, (), {"x": x, "__new__": lambda cls, *, n=0: object.__new__(cls)})


MADE = by_value("Made", 3)
copyreg.pickle(ByValue, lambda cls: (by_value, (cls.__name__, cls.x), {}, None, None, set_class))  # type: ignore[arg-type,return-value]


def set_class(cls: Any, state: Any) -> None:
    cls.y = 5


class Outer:
    class Inner:
        x = 1


def test_what_a_stub_knows() -> None:
    made = load(pickle.dumps(Filled(1, "two"), protocol=2))
    assert isinstance(made, Stub) and stub_name(made) == f"{__name__}.Filled"
    assert (made.args, made.how, made.state) == ((1, "two"), "call", [{"state": 1}])
    assert (made.values, made.pairs) == ([10, 11], [("k", "v")])
    assert f"{__name__}.Filled" in repr(made)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "value",
    [
        Filled(1, "two"), Colour.RED, argparse.Namespace(lr=0.1, names=["a"]), WithKeywords(1, two=2),
        defaultdict(list, a=[1]), Counter("hello"), deque([1, 2], maxlen=3), functools.partial(int, base=2),
        datetime(2024, 2, 29, tzinfo=timezone.utc), torch.device("cuda", 3), torch.bfloat16, slice(1, None, 2),
        range(3), len, dict, Outer.Inner(), Outer.Inner, KeyError("gone"), 1 + 2j, ..., frozenset({"a"}),
        {3, 1}, Path("a/b"), WithSetter([1, {2}]), WithSetter(WithSetter(b"R0")),
    ],
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", repr(value)),
)  # fmt: skip
def test_objects_come_back_as_they_were(value: Any, protocol: int) -> None:
    """Read by us, written by us, read by Python: the same object."""
    tree = {"a": value, "again": value}
    copy = pickle.loads(picklewriter.dump(load(pickle.dumps(tree, protocol=protocol)), protocol=protocol))
    assert copy["a"] is copy["again"] or value == copy["again"]
    assert type(copy["a"]) is type(value)
    if type(value).__eq__ is not object.__eq__ and not isinstance(value, (BaseException, functools.partial)):
        assert copy["a"] == value
    else:
        assert vars_of(copy["a"]) == vars_of(pickle.loads(pickle.dumps(value)))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_objects_of_classes_that_the_pickle_makes(protocol: int) -> None:
    one, other = MADE(), MADE()
    one.lr, other.lr = 0.1, WithSetter(7)
    tree = {"a": one, "b": [other, MADE], "R0": WithKeywords(1, two=2), "c": b"\x81R0"}
    read = load(pickle.dumps(tree, protocol=protocol))
    copy = pickle.loads(picklewriter.dump(read, protocol=min(protocol, 4)))
    kind = copy["b"][1]
    assert type(copy["a"]) is type(copy["b"][0]) is kind is not MADE and (kind.x, kind.y) == (3, 5)
    assert (copy["a"].lr, copy["b"][0].lr.held, copy["R0"].both, copy["c"]) == (0.1, 7, (1, 2), b"\x81R0")
    assert isinstance(read["a"], Stub) and read["a"].how == "new"


def test_what_classes_are_made_of_is_harmless() -> None:
    names = ["property", "classmethod", "staticmethod", "super", "object.__new__", "tuple.__new__"]
    calls = [stub_type("builtins", name)() for name in names]
    assert not harm.harmful_names(calls) and harm.harmful_names([*calls, stub_type("builtins", "eval.__new__")])


def test_a_call_that_is_dropped_and_sets_nothing() -> None:
    """What is made from itself is made twice, and once for nothing; a call with no object first does nothing here."""
    data = pickle.dumps(Filled(1), protocol=2)[:-1] + b"cos\nsystem\nX\2\0\0\0ls\x85R0."
    assert load(data).state == [{"state": 1}]


def vars_of(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    return vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else repr(value)


# The writer -----------------------------------------------------------------------------------------------------------

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**80), 2**80), st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=())), st.binary(max_size=20), st.complex_numbers(allow_nan=False),
)  # fmt: skip
hashable = st.recursive(scalars, lambda inner: st.tuples(inner) | st.tuples(inner, inner, inner, inner), max_leaves=4)
trees = st.recursive(
    st.one_of(scalars, st.binary(max_size=5).map(bytearray), st.sets(st.integers()), st.frozensets(st.text())),
    lambda inner: st.one_of(
        st.lists(inner),
        st.dictionaries(hashable, inner),
        st.tuples(inner, inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.text(), inner).map(OrderedDict),
    ),
    max_leaves=20,
)


def same(found: Any, expected: Any) -> bool:
    if type(found) is not type(expected) and not isinstance(found, OrderedDict):
        return False
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, (float, complex)):
        return repr(found) == repr(expected)
    return bool(found == expected)


@settings(max_examples=200)
@given(trees, st.sampled_from([2, 4]))
def test_round_trip(tree: Any, protocol: int) -> None:
    assert same(pickle.loads(picklewriter.dump(tree, protocol=protocol)), tree)
    for theirs in range(2, 6):
        assert same(load(pickle.dumps(tree, protocol=theirs)), tree)


@pytest.mark.parametrize(
    "number", [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**2040, -(2**2047)]
)
def test_integers_at_the_edges(number: int) -> None:
    assert pickle.loads(picklewriter.dump(number)) == number


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0, 5e-324])
def test_floats(number: float) -> None:
    assert struct.pack("<d", pickle.loads(picklewriter.dump(number))) == struct.pack("<d", number)


def test_what_is_shared_stays_shared() -> None:
    inner: list[Any] = [1]
    tree = {"a": inner, "b": inner, "c": (inner,)}
    tree["self"] = tree
    for copy in (pickle.loads(picklewriter.dump(tree)), load(picklewriter.dump(load(pickle.dumps(tree))))):
        assert copy["a"] is copy["b"] is copy["c"][0]
        assert copy["self"] is copy


def test_a_state_dict_keeps_its_metadata() -> None:
    state = torch.nn.Linear(2, 3).state_dict()
    copy = pickle.loads(picklewriter.dump(OrderedDict({"a": 1})))
    assert type(copy) is OrderedDict
    made = OrderedDict(a=1)
    made._metadata = state._metadata
    copy = pickle.loads(picklewriter.dump(made))
    assert copy._metadata == state._metadata and type(copy._metadata) is OrderedDict
    assert vars(load(pickle.dumps(made)))["_metadata"] == state._metadata


@pytest.mark.parametrize("value", [object(), memoryview(b""), torch.ones(1), [lambda: 1], argparse.Namespace()])
def test_what_cannot_be_written(value: Any) -> None:
    with pytest.raises(LossError):
        picklewriter.dump(value)


def test_too_deep_to_write() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(LossError, match="deep"):
        picklewriter.dump(value)


def test_sets_are_written_in_one_order() -> None:
    names = [f"n{i}" for i in range(50)]
    backwards = names[::-1]
    assert picklewriter.dump(set(names)) == picklewriter.dump(set(backwards))


# torch's words --------------------------------------------------------------------------------------------------------


def pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return bytes(torch._C.PyTorchFileReader(io.BytesIO(stream.getvalue())).get_record("data.pkl"))


def test_a_tensor() -> None:
    ref = load(pickled(torch.arange(12.0).reshape(3, 4).t()[1:]))
    assert isinstance(ref, TensorRef)
    assert (ref.dtype.name, ref.offset, ref.shape, ref.strides) == ("float32", 1, (3, 3), (1, 4))
    assert ref.storage == StorageRef("0", torchpickle.dtype("float32"), 12, "cpu")


def test_sizes_and_dtypes() -> None:
    size = load(pickled(torch.Size([2, 3])))
    assert type(size) is TorchSize and size == (2, 3)
    assert stub_name(load(pickled(torch.float16))) == "torch.float16"


def test_parameters_and_subclasses() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert load(pickled(parameter)).attributes == ()
    parameter.sequence_parallel = True
    assert load(pickled(parameter)).attributes == ("sequence_parallel",)
    cloned = torch.ones(2)
    cloned._has_been_cloned = True
    assert load(pickled(cloned)).attributes == () and load(pickled(cloned)).wrapper is None


def test_meta_tensors_are_objects() -> None:
    made = load(pickled(torch.empty(2, 3, device="meta", dtype=torch.bfloat16)))
    assert stub_name(made) == "torch._utils._rebuild_meta_tensor_no_storage"


@pytest.mark.parametrize("dtype", [d for d in torchpickle.BY_STORAGE.values() if d.kind != "quantized"], ids=str)
def test_a_tensor_is_spelt_as_torch_spells_it(dtype: Any) -> None:
    """The pickle of one tensor: byte for byte torch's own, but for the memo."""
    value = torch.zeros(2, 3, dtype=getattr(torch, dtype.name))
    ours = torchpickle.dump({"w": NewTensor("0", dtype, (2, 3))}, lambda v: v if isinstance(v, NewTensor) else None)
    assert words(ours) == words(pickled({"w": value}))


def words(data: bytes) -> list[Any]:
    puts = ("BINPUT", "LONG_BINPUT", "MEMOIZE")
    return [(op.name, arg) for op, arg, _ in pickletools.genops(data) if op.name not in puts and "GET" not in op.name]


def test_torch_is_not_imported() -> None:
    modules = "unpickler, torch_pickle, torch_zip, torch_legacy, torch_export, torch_module, torch_tree"
    code = f"import sys; from ckpttool.serialization import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Names ---------------------------------------------------------------------------------------------------------------

SMUGGLED = "deque\n0cposix\nsystem\n(U\x04truetR0cdecimal\nDecimal"
NOT_NAMES = [
    ("collections", SMUGGLED), (SMUGGLED, "deque"), ("m\ud800", "C"), ("m", "C\ud800"), ("m", "C\0"), ("m", "C\r"),
    ("m", "C D"), ("m", "C\u2028"), ("m", "C\x85"), ("m\t", "C"),
]  # fmt: skip


def stack_global(module: str, name: str) -> bytes:
    parts = (part.encode("utf-8", "surrogatepass") for part in (module, name))
    return b"\x80\x04" + b"".join(b"X" + struct.pack("<I", len(part)) + part for part in parts) + b"\x93."


@pytest.mark.parametrize(("module", "name"), NOT_NAMES)
def test_names_that_hold_more_than_a_name(module: str, name: str) -> None:
    for refused in (
        lambda: load(stack_global(module, name)),
        lambda: stub_type(module, name),
        lambda: picklewriter.PickleWriter(2).named(module, name),
        lambda: picklewriter.PickleWriter(4).named(module, name),
    ):
        with pytest.raises(CorruptError, match="is not what a module, class or function can be called") as caught:
            refused()
        caught.value.message.encode("ascii")


def test_an_attribute_is_no_longer_name_either() -> None:
    nested = b"\x80\x02cbuiltins\ngetattr\ncm\nC\n" + text(SMUGGLED) + b"\x86R."
    with pytest.raises(CorruptError, match="is not what a module, class or function can be called"):
        load(nested)


@pytest.mark.parametrize("name", ["outer.<locals>.C", "<lambda>", "Größe", "模型", "_a1"])
def test_names_of_all_languages_are_kept(name: str) -> None:
    found = load(stack_global("my.módulo", name))
    assert stub_name(load(picklewriter.dump(found, protocol=4))) == f"my.módulo.{name}"


# Tuples in tuples ----------------------------------------------------------------------------------------------------


def test_tuples_by_a_decimal_memo_do_not_fill_the_stack() -> None:
    """Other forms are in tests/hostile, whose limit of calls this exceeds. A hash of them would end the process."""
    program = "from ckpttool.serialization import torch_pickle\n"
    program += "torch_pickle.load(b'\\x80\\x04})' + b'p1\\n0g1\\n\\x85' * 130_000 + b'K\\x01s.', 'it')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and f"nested more than {pickle_limits.MAX_NESTED} deep" in done.stderr


def test_nesting_that_the_machine_lets_through_does_no_harm() -> None:
    """As deep as can be without being followed, as a key, where the stack is that of a thread."""
    level = b"N0\x85"
    data = b"\x80\x04})" + level * (pickles._FEW_TUPLES - 2) + b"K\x01s."
    program = f"import threading; from ckpttool.serialization import unpickler as pickles; data = {data!r}\n"
    program += """
def look():
    try:
        pickles.load(data, what='it')
    except pickles.CorruptError as error:
        print(error)
t = threading.Thread(target=look); t.start(); t.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "") and "nested more than" in done.stdout


def test_many_tuples_that_are_not_nested_are_read() -> None:
    several = [(i, (i, "b"), ((None, i), [i]), torch.Size([i])) for i in range(30_000)]
    assert load(pickle.dumps(several, protocol=4)) == several
    deep = b")" + b"N0\x85" * (pickle_limits.MAX_NESTED - 3)
    body = pickle.dumps(several, protocol=2)[2:-1]
    assert len(load(b"\x80\x02}(" + deep + b"K\x01" + text("a") + body + b"u.")) == 2


def test_depths_add_up_over_keys_that_share_tuples() -> None:
    """Each key is the one before it in some more tuples: seen after that one, it is not deep by itself."""
    more = b"\x85" * (pickle_limits.MAX_NESTED * 3 // 4)
    first = b"}(" + b")" + more + b"q\x00K\x01" + b"h\x00" + more + b"K\x02u"
    many = b"(" + b")\x85" * pickles._FEW_TUPLES + b"l"
    with pytest.raises(CorruptError, match="nested more than"):
        load(b"\x80\x04](" + first + many + b"e.")
    assert load(b"\x80\x04](}(" + b")" + more + b"q\x00K\x01u" + many + b"e.")


@pytest.mark.parametrize("argument", [b"](K\x01e", b"}", b"K\x01"])
def test_a_size_is_made_of_a_tuple(argument: bytes) -> None:
    call = b"ctorch\nSize\n" + argument + b"\x85R"
    with pytest.raises(CorruptError, match=r"torch\.Size"):
        load(b"\x80\x02" + call + b".")
    with pytest.raises(CorruptError, match=r"torch\.Size"):
        dcpmetadata.read(io.BytesIO(b"\x80\x02" + call + b"."), ".metadata")


@pytest.mark.parametrize("value", ["t" * 10_000, b"\x85" * 10_000, [("t" * 5000, (1,))] * 3])
def test_what_only_looks_like_tuples_is_read(value: Any) -> None:
    assert load(pickle.dumps(value, protocol=4)) == value


def test_a_key_of_many_tuples_is_refused() -> None:
    data = b"\x80\x04}" + b")" + b"\x85" * 1500 + b"K\x01s."
    with pytest.raises(CorruptError, match="values are nested more than"):
        nesting.flatten(load(data), Catalogue("torch"), TensorRef, lambda *_: None)  # type: ignore[arg-type]
