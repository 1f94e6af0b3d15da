# ruff: noqa: E501  (a table of lies, one to a line)
"""Pickles that lie: about how much they need, what they are made of, and what their tensors are."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from support.lying_files import (
    CANARY,
    CORRUPT,
    LOSS,
    READ,
    TOUCH,
    Entry,
    Saved,
    file,
    integer,
    ints,
    lie,
    many,
    pickled,
    saved,
    storage,
    tensor,
    tree,
)
from support.pickle_payloads import call, named, text


def raw(data: bytes) -> Callable[[Path], Path]:
    """A torch.save file with this pickle, byte for byte."""
    return file("ckpt.pt", lambda: Saved(data).bytes())


def of(value: bytes, protocol: int = 2) -> Callable[[Path], Path]:
    return file("ckpt.pt", lambda: saved(value, protocol))


def with_w(value: bytes, protocol: int = 2) -> Callable[[Path], Path]:
    """An honest tensor beside a value."""
    return of(tree(w=tensor(), x=value), protocol)


def _long(code: bytes, form: str, length: int) -> bytes:
    return b"\x80\x04" + code + struct.pack(form, length)


# The machine ----------------------------------------------------------------------------------------------------------

for name, data, pattern in (
    ("cut", Saved().pickle[:-20], "not a complete pickle: it ends too early"),
    ("empty", b"", "not a complete pickle: it ends too early"),
    ("only a protocol", b"\x80\x02", "too early"),
    ("no value", b"\x80\x02.", "not a complete pickle: (?!it ends)"),
    ("protocol 200", b"\x80\xc8N.", "protocol"),
    ("an opcode that there is not", b"\x80\x02\xff.", "opcode 0xff"),
    ("an extension code", b"\x80\x02\x82\x01.", "opcode 0x82"),
    ("an extension code of four bytes", b"\x80\x02\x84\1\0\0\0.", "opcode 0x84"),
    ("a buffer from outside", b"\x80\x05\x97.", "opcode 0x97"),
    ("DUP", b"\x80\x02N2\x86.", "opcode 0x32"),
    ("a memo index of 2**31", b"\x80\x02Nr\xff\xff\xff\x7f.", "memo index"),
    ("a memo index in text", b"\x80\x02Np99999999999999\n.", r"memo index \d+ in a pickle that has room for 20"),
    ("a memo index below zero", b"\x80\x02Np-1\n.", "memo index 9 in a pickle that has room for 8"),
    ("a memo index of 10**8 in a hole", b"\x80\x02Nr\x00\xe1\xf5\x05" + b"0N" * 50 + b".", "memo index"),
    ("a memo that was never filled", b"\x80\x02h\x05.", "not a complete pickle: (?!it ends)"),
    ("bytes of 2**63", _long(b"\x8e", "<Q", 2**63) + b".", r"a value of \d+ bytes at byte 2, in a pickle of at most 12"),
    ("text of 4 GiB", _long(b"X", "<I", 2**32 - 1) + b".", r"a value of \d+ bytes at byte 2, in a pickle of at most 8"),
    ("text of 2**62", _long(b"\x8d", "<Q", 2**62) + b".", r"a value of \d+ bytes at byte 2, in a pickle of at most 12"),
    ("a bytearray of 2**60", _long(b"\x96", "<Q", 2**60) + b".", r"a value of \d+ bytes at byte 2, in a pickle of at most 12"),
    ("an integer of 2 GiB", b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".", r"an integer of \d+ bytes at byte 2: Python itself prints none of more than \d+"),
    ("an integer of minus one byte", b"\x80\x02\x8b\xff\xff\xff\xff.", "a value of -1 bytes at byte 2, in a pickle of at most 8"),
    ("a frame of 2**63", b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"N.", "not a complete pickle: (?!it ends)"),
    ("a stack that is not there", b"\x80\x02\x86.", "not a complete pickle: (?!it ends)"),
    ("lists without end", b"\x80\x02" + b"]" * 6_000_000 + b".", r"it makes up to \d+ lists, dicts and other containers in \d+ bytes"),
    ("dicts without end", b"\x80\x02" + b"}" * 6_000_000 + b".", r"it makes up to \d+ lists, dicts and other containers in \d+ bytes"),
    ("sets without end", b"\x80\x04" + b"\x8f" * 3_000_000 + b".", r"it makes up to \d+ lists, dicts and other containers in \d+ bytes"),
    ("lists in lists, a million deep", b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".", r"values are nested more than \d+ deep"),
    ("tuples in tuples, a million deep", b"\x80\x02" + b")" + b"\x85" * 1_000_000 + b".", r"tuples are nested more than \d+ deep"),
    ("a key of tuples, 300,000 deep", b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.", r"tuples are nested more than \d+ deep"),
    ("a call with no function", b"\x80\x02NN)R.", "not a complete pickle: (?!it ends)"),
    ("a call of a string", b"\x80\x02" + text("os") + b")R.", "not a complete pickle: (?!it ends)"),
    ("BUILD on a number", b"\x80\x02K\1}b.", "not a complete pickle: (?!it ends)"),
    ("APPEND to a number", b"\x80\x02K\1K\2a.", "not a complete pickle: (?!it ends)"),
    ("SETITEM on a list", b"\x80\x02]K\0K\1s.", "not a complete pickle: (?!it ends)"),
    ("a name of two lines", b"\x80\x04" + b"\x8c\x04os\nc\x8c\x06system\x93.", "can be called"),
    ("a name with a space", b"\x80\x04" + b"\x8c\x04os x\x8c\x06system\x93.", "can be called"),
    ("a name that is a number", b"\x80\x04K\1K\2\x93.", "not a complete pickle: (?!it ends)"),
    ("a list for a key", b"\x80\x02}]K\1s.", "not a complete pickle: (?!it ends)"),
    ("a number of 10,000 digits in text", b"\x80\x02L" + b"9" * 10_000 + b"L\n.", "not a complete pickle: (?!it ends)"),
):  # fmt: skip
    lie(f"pickle: {name}", raw(data), pattern)


TOO_DEEP = 130_000  # CPython ends a process whose stack has 8 MiB when it hashes tuples of 120,000 levels
KEYS = {"a key": b"}%bK\x01s", "an element of a set": b"\x8f(%b\x90", "a value beside others": b"}(K\x01%bu"}
NESTED = {
    "bare": b"\x85",
    "MEMOIZE": b"\x85\x94",
    "BINPUT": b"\x85q\x00",
    "LONG_BINPUT": b"\x85r\x01\0\0\0",
    "PUT": b"\x85p3\n",
}
for place, where in KEYS.items():
    for name, level in NESTED.items():
        deep = b"\x80\x04" + where.replace(b"%b", b")" + level * TOO_DEEP) + b"."
        lie(f"deep: {place}, {name}", raw(deep), r"nested more than \d+ deep")


# What is shared -------------------------------------------------------------------------------------------------------


def doubled(levels: int, opening: bytes = b"", closing: bytes = b"\x86") -> bytes:
    """A value that holds one twice, that one another twice, and so on."""
    made = b"K\x01K\x02\x86q\x00"
    for n in range(levels):
        made += opening + (b"0h" if not opening else b"h") + bytes((n,)) + b"h" + bytes((n,)) + closing
        made += b"q" + bytes((n + 1,))
    return made


def doubled_memoized(levels: int) -> bytes:
    """The same for protocol 4, whose memo counts by itself."""
    made = b"K\x01K\x02\x86\x94"
    for n in range(levels):
        made += b"0h" + bytes((n,)) + b"h" + bytes((n,)) + b"\x86\x94"
    return made


def reused(key: int, times: int) -> bytes:
    """One long key, looked up again and again."""
    made = b"}q\x00(" + b"K\x01" * key + b"tq\x010"
    return made + b"h\x00" + b"h\x01Ns" * times


def sized(levels: int) -> bytes:
    """The tuples are torch.Size, each made by a call."""
    made = b"K\x01K\x02\x86q\x00"
    for n in range(levels):
        made += (
            b"0" + named("torch", "Size") + b"h" + bytes((n,)) + b"h" + bytes((n,)) + b"\x86\x85Rq" + bytes((n + 1,))
        )
    return made


def listed(levels: int) -> bytes:
    """Lists that hold one twice: nothing hashes them, but whoever walks them walks for ever."""
    made = b"]q\x00"
    for n in range(levels):
        made += b"0](h" + bytes((n,)) + b"h" + bytes((n,)) + b"eq" + bytes((n + 1,))
    return made


def dicts(levels: int) -> bytes:
    made = b"}" + text("w") + tensor() + b"sq\x00"
    for n in range(levels):
        made += b"0}(" + text("a") + b"h" + bytes((n,)) + text("b") + b"h" + bytes((n,)) + b"uq" + bytes((n + 1,))
    return made


COST = "its tuples are shared so often that hashing them|it asks for far more work than its size allows"
for name, make, pattern in (
    ("a key of 60 tuples that hold the one before twice", raw(b"\x80\x02}" + doubled(60) + b"Ns."), COST),
    ("the same, in protocol 4", raw(b"\x80\x04}" + doubled_memoized(60) + b"Ns."), COST),
    ("the same, of threes", raw(b"\x80\x02}" + doubled(40).replace(b"\x86q", b"\x86q") + b"Ns."), COST),
    ("the same, in a set", raw(b"\x80\x04\x8f(" + doubled_memoized(60) + b"\x90."), COST),
    ("the same, in a frozenset", raw(b"\x80\x04(" + doubled_memoized(60) + b"\x91."), COST),
    ("the same, in an OrderedDict", raw(pickled(call(named("collections", "OrderedDict"), b"](" + doubled(60) + b"N\x86e"))), COST),
    ("the same, of torch.Size", raw(b"\x80\x02}" + sized(60) + b"Ns."), r"a pickle calls `torch\.Size` with the wrong arguments"),
    ("the same, hidden under a mark", raw(b"\x80\x02}" + doubled(60, opening=b"(", closing=b"t") + b"Ns."), COST),
    ("a key of 500,000 numbers, 50,000 times", raw(b"\x80\x02" + reused(500_000, 50_000) + b"."), COST),
    ("dicts that hold one twice, 40 deep", raw(b"\x80\x02" + dicts(40) + b"."), "asks for far more work than its size allows"),
):  # fmt: skip
    lie(f"pickle: {name}", make, pattern)


# Payloads -------------------------------------------------------------------------------------------------------------

OPEN = f"open({CANARY!r}, 'w')"
HARM = r"`x` names `[\w.]+`, which runs code when loaded(, and is not passed on|; not here)"
for name, value in {
    "os.system": call(named("os", "system"), text(TOUCH)),
    "posix.system": call(named("posix", "system"), text(TOUCH)),
    "eval": call(named("builtins", "eval"), text(OPEN)),
    "exec of Python 2": call(named("__builtin__", "exec"), text(OPEN)),
    "subprocess": call(named("subprocess", "check_call"), b"](" + text("touch") + text(CANARY) + b"e"),
    "INST": b"(" + text(TOUCH) + b"iposix\nsystem\n",
    "OBJ": b"(" + named("posix", "system") + text(TOUCH) + b"o",
    "pickle.loads": call(named("pickle", "loads"), b"U\x03abc"),
    "runpy": call(named("runpy", "run_path"), text("evil.py")),
    "importlib": call(named("importlib", "import_module"), text("evil")),
    "pip": call(named("pip", "main"), b"](" + text("install") + text("evil") + b"e"),
    "pty": call(named("pty", "spawn"), text("sh")),
    "socket": call(named("socket", "create_connection"), many(text("127.0.0.1"), integer(9))),
    "ctypes": call(named("ctypes", "CDLL"), text("evil.so")),
    "multiprocessing": call(named("multiprocessing.util", "spawnv_passfds"), b"N"),
}.items():
    lie(f"payload: {name}", with_w(value), HARM, late=True, harmless_at_rest=True)

for name, value, pattern in (
    ("getattr of a module", call(named("builtins", "getattr"), call(named("builtins", "__import__"), text("os")), text("system")), "getattr"),
    ("getattr of a list", call(named("builtins", "getattr"), b"]", text("__class__")), "getattr"),
    ("getattr of a class of ours", call(named("builtins", "getattr"), named("torch", "Size"), text("__call__")), "getattr"),
    ("attributes of OrderedDict", call(named("collections", "OrderedDict")) + b"}" + text("items") + b"K\1sb", "attributes"),
    ("attributes of a function of ours", named("torch._utils", "_rebuild_tensor_v2") + b"}" + text("answer") + b"K\1sb", "changes"),
    ("a bytearray of a tebibyte by a call", call(named("builtins", "bytearray"), integer(1 << 40)), "bytearray"),
    ("bytes by a call", call(named("builtins", "bytes"), integer(1 << 40)), "a pickle calls `builtins.bytes` with the wrong arguments"),
    ("a codec that imports", call(named("_codecs", "encode"), text("x"), text("evil")), "_codecs"),
    ("a codec that unpacks", call(named("_codecs", "encode"), text("a"), text("zip")), "_codecs"),
    ("a codec of numbers", call(named("_codecs", "encode"), b"K\1", b"K\2"), "_codecs"),
    ("frozenset of text", call(named("builtins", "frozenset"), text("abc")), "frozenset"),
    ("a set with keywords", call(named("builtins", "set"), b"K\1", b"K\2"), "a pickle calls `builtins.set` with the wrong arguments"),
    ("complex of text", call(named("builtins", "complex"), text("1"), text("2")), "complex"),
    ("torch.Size of text", call(named("torch", "Size"), text("abc")), "torch.Size"),
    ("torch.Size of tuples", call(named("torch", "Size"), many(many(b"K\1"))), "torch.Size"),
    ("OrderedDict of text", call(named("collections", "OrderedDict"), text("abc")), "a pickle calls `collections.OrderedDict` with the wrong arguments"),
):  # fmt: skip
    lie(f"payload: {name}", with_w(value), pattern)


# Tensors --------------------------------------------------------------------------------------------------------------


def t(**how: object) -> Callable[[Path], Path]:
    return of(tree(w=tensor(**how)))  # type: ignore[arg-type]


def rebuilt(*args: bytes, function: str = "_rebuild_tensor_v2") -> Callable[[Path], Path]:
    return of(tree(w=call(named("torch._utils", function), *args)))


TAIL = (b"\x89", call(named("collections", "OrderedDict")))
for name, make, pattern in (
    ("more elements than its storage", t(shape=(3, 3)), r"a tensor float32 \[3, 3\] needs 36 bytes of a storage that has 24"),
    ("a stride past its storage", t(strides=(30, 1)), r"a tensor float32 \[2, 3\] needs \d+ bytes of a storage that has 24"),
    ("an offset past its storage", t(offset=3), r"a tensor float32 \[2, 3\] needs 36 bytes of a storage that has 24"),
    ("an offset of 2**63", t(offset=2**63), r"a tensor float32 \[2, 3\] needs \d+ bytes of a storage that has 24"),
    ("an offset below zero", t(offset=-1), "a tensor is not rebuilt from a storage, an offset, a size and a stride"),
    ("a stride below zero", t(strides=(-3, 1)), r"a tensor's size or stride is \(-3, 1\), not a tuple of integers"),
    ("a size below zero", t(shape=(-2, 3)), r"a tensor's size or stride is \(-2, 3\), not a tuple of integers"),
    ("a size of 2**63", t(shape=(2**63,), strides=(0,)), r"a tensor with a size of 2\*\*63 or more"),
    ("a size of 3,000 digits", t(shape=(1 << 10_000, 1), strides=(0, 0)), r"a tensor with a size of 2\*\*63 or more"),
    ("a size of 100,000 digits", t(shape=(1 << 300_000, 1), strides=(0, 0)), r"an integer of \d+ bytes at byte \d+: Python itself prints none of more than \d+"),
    ("4 bytes that claim 4 TiB", t(shape=(1 << 20, 1 << 20), strides=(0, 0)), r"a tensor float32 \[\d+, \d+\] with strides \[0, 0\] claims \d+ bytes of a"),
    ("24 bytes that claim 4 TiB", t(shape=(1 << 38, 2, 3), strides=(0, 3, 1)), r"a tensor float32 \[\d+, 2, 3\] with strides \[0, 3, 1\] claims \d+ bytes"),
    ("strides of another rank", t(strides=(3, 1, 1)), "a tensor is not rebuilt from a storage, an offset, a size and a stride"),
    ("100,000 dimensions", t(shape=(1,) * 100_000, strides=(1,) * 100_000), "dimensions"),
    ("100,000 dimensions of 2**62", t(shape=(2**62,) * 100_000, strides=(0,) * 100_000), "dimensions"),
    ("a size that is a string", rebuilt(storage(), integer(0), text("23"), ints((3, 1)), *TAIL), "a tensor's size or stride is '23', not a tuple of integers"),
    ("a size that is true", rebuilt(storage(), integer(0), many(b"\x88", b"K\3"), ints((3, 1)), *TAIL), r"a tensor's size or stride is \(True, 3\), not a tuple of integers"),
    ("a size that is a float", rebuilt(storage(), integer(0), many(b"G" + struct.pack(">d", 2.0), b"K\3"), ints((3, 1)), *TAIL), r"a tensor's size or stride is \(2\.0, 3\), not a tuple of integers"),
    ("a size that is a number", rebuilt(storage(), integer(0), integer(6), ints((1,)), *TAIL), "a tensor's size or stride is 6, not a tuple of integers|a tensor is not rebuilt"),
    ("an offset of true", rebuilt(storage(), b"\x88", ints((2, 3)), ints((3, 1)), *TAIL), "a tensor is not rebuilt from a storage, an offset, a size and a stride"),
    ("no storage", rebuilt(b"N", integer(0), ints((2, 3)), ints((3, 1)), *TAIL), "a tensor is rebuilt from something that is not a typed storage"),
    ("a storage that is a tensor", rebuilt(tensor(), integer(0), ints((2, 3)), ints((3, 1)), *TAIL), "a tensor is rebuilt from something that is not a typed storage"),
    ("too few arguments", rebuilt(storage()), "arguments"),
    ("version 3 without a dtype", rebuilt(storage(), integer(0), ints((2, 3)), ints((3, 1)), *TAIL, function="_rebuild_tensor_v3"), "a tensor is rebuilt without a dtype"),
    ("a storage that is not there", t(at=storage("7")), "data/7"),
    ("a storage outside of data/", t(at=storage("../version")), r"data/\.\./version"),
    ("a storage of 2**62 elements", t(at=storage(numel=2**62)), r"record `data/0` has 24 bytes, but its storage needs \d+"),
    ("a storage of -6 elements", t(at=storage(numel=-6)), "a storage has no key or no size"),
    ("a storage of a class that nobody knows", t(at=storage(kind="EvilStorage")), "EvilStorage"),
    ("a storage of text", of(tree(w=text("x") + b"Q")), "a persistent id is not a tuple"),
    ("a storage of one word", of(tree(w=many(text("storage")) + b"Q")), "a persistent id of an unknown kind: 'storage'"),
    ("a storage of another kind", of(tree(w=many(text("rref"), b"N", b"N", b"N", b"N") + b"Q")), "a persistent id of an unknown kind: 'rref'"),
    ("a storage view of words", of(tree(w=many(text("storage"), named("torch", "FloatStorage"), text("0"), text("cpu"), integer(6), many(text("a"), text("b"), text("c"))) + b"Q")), "view"),
):  # fmt: skip
    lie(f"tensor: {name}", make, pattern)


# Legacy streams -------------------------------------------------------------------------------------------------------

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
HEAD = MAGIC + b"\x80\x02M\xe9\x03." + b"\x80\x02}."
KEYS = b"\x80\x02](" + text("0") + b"e."
BYTES = bytes(24)


def legacy(
    *, head: bytes = HEAD, value: bytes | None = None, keys: bytes = KEYS, numel: int = 6, tail: bytes = BYTES
) -> Callable[[Path], Path]:
    body = pickled(tree(w=tensor(at=storage()))) if value is None else value
    return file("ckpt.pt", head + body + keys + struct.pack("<q", numel) + tail)


for name, make, pattern in (
    ("another version", legacy(head=MAGIC + b"\x80\x02K\1." + b"\x80\x02}."), r"not a legacy torch\.save file of version \d+"),
    ("cut after the magic number", file("ckpt.pt", MAGIC), "version: not a complete pickle"),
    ("a storage that is cut", legacy(tail=b"abc"), r"ends at byte \d+, but 24 bytes are needed at \d+"),
    ("a storage of 2**62", legacy(numel=2**62), "bytes are needed"),
    ("a storage of -1", legacy(numel=-1), "bytes are needed"),
    ("a storage shorter than its tensor", legacy(numel=2), "16 bytes after the end"),
    ("keys that are a dict", legacy(keys=b"\x80\x02}."), "the storage keys are not a list"),
    ("a key that no tensor names", legacy(keys=b"\x80\x02](" + text("9") + b"e."), "no tensor names it"),
    ("a key twice", legacy(keys=b"\x80\x02](" + text("0") * 2 + b"e."), "no tensor names it|listed"),
    ("no keys", legacy(keys=b"\x80\x02]."), "no storage"),
    ("a pickle that never ends", file("ckpt.pt", HEAD + b"\x80\x02" + b"N0" * 2_000_000), "tree: not a complete pickle"),
    ("a pickle in a hole", file("ckpt.pt", HEAD + b"\x80\x02", size=1 << 40), "opcode 0x00 at byte 2 is not one that a checkpoint needs"),
    ("text of half a tebibyte", file("ckpt.pt", HEAD + b"\x80\x04\x8d" + struct.pack("<Q", 1 << 39), size=1 << 40), "opcode 0x00"),
    ("text of a tebibyte", file("ckpt.pt", HEAD + b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40), size=1 << 40), "a value of 1099511627776 bytes"),
    ("text of 800 MiB", file("ckpt.pt", HEAD + b"\x80\x04\x8d" + struct.pack("<Q", 800 << 20), size=1 << 40), "opcode 0x00"),
    ("a line without end", file("ckpt.pt", HEAD + b"\x80\x02cos", size=1 << 40), "tree: not a complete pickle"),
):  # fmt: skip
    lie(f"legacy: {name}", make, pattern)

lie(
    "legacy: a bare pickle",
    file("ckpt.pt", pickled(call(named("os", "system"), text(TOUCH)))),
    r"`` names `os\.system`, which runs code when loaded(, and is not passed on|; not here)",
    code=(CORRUPT, LOSS, READ),
    late=True,
    harmless_at_rest=True,
)
lie(
    "pickle: not of torch at all",
    of(call(named("os", "system"), text(TOUCH))),
    r"`` names `os\.system`, which runs code when loaded(, and is not passed on|; not here)",
    code=(CORRUPT, LOSS, READ),
    late=True,
    harmless_at_rest=True,
)
lie(
    "pickle: a name that talks to the terminal",
    of(b"}" + text("\x1b]0;owned\x07") + tensor(shape=(9,), strides=(1,)) + b"s"),
    r"a tensor float32 \[9\] needs 36 bytes of a storage that has 24",
)
lie(
    "pickle: a data.pkl in a hole",
    file(
        "ckpt.pt", lambda: Saved(records={b"data.pkl": Entry(b"ckpt/data.pkl", b"\x80\x02" + bytes(1 << 20))}).bytes()
    ),
    "opcode 0x00 at byte 2 is not one that a checkpoint needs",
)
