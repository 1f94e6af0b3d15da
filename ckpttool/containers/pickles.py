"""Pickles without execution: an unpickler that imports nothing and builds inert stubs, and the writer for its values.

A pickle is a program for a stack machine. Ours runs on CPython's own machine, but every name that the program asks
for (`find_class`) is answered with a class made on the spot that remembers how it was called and does nothing. The
few names that are answered with something real are listed in `REAL` and checked there.

Grammar of what comes back: Python's plain values (None, bool, int, float, complex, str, bytes, bytearray, tuple, list,
dict, OrderedDict, set, frozenset), `TorchSize`, subclasses of `Stub` (a name that was only mentioned: a class, an enum
member's class, `torch.float32`), instances of them (a name that was called), and what the caller's `known` names
return.
"""

from __future__ import annotations

import gc
import io
import pickle
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from ckpttool.containers import opcodes
from ckpttool.errors import CkptError, CorruptError, LossError

if TYPE_CHECKING:
    from typing_extensions import Self


class TorchSize(tuple[int, ...]):
    """A `torch.Size`, so that it is written back as one."""

    __slots__ = ()


class _StubType(type):
    """Calling a stub class remembers the call (pickle's REDUCE); `cls.__new__` is what NEWOBJ does."""

    module: str
    name: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        made.how = "call"
        return made

    @property
    def full_name(cls) -> str:
        """`module.name` of what the stub stands for."""
        return f"{cls.module}.{cls.name}"


# What most stubs have of everything; of a ShardedTensor's hundreds, lists of their own took most of the memory.
_NOTHING: list[Any] = []  # never added to
_NO_KWARGS: dict[str, Any] = {}


class Stub(metaclass=_StubType):
    """An object of a class that was not imported: which one, how it was made, and what was put into it after."""

    __slots__ = ("args", "how", "kwargs", "pairs", "state", "target", "values")
    module: ClassVar[str] = ""
    name: ClassVar[str] = ""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    how: str  # "call" or "new"
    target: Any  # what was called, when that was no name but an instance: a `functools.partial`
    state: list[Any]  # of BUILD, none or one
    values: list[Any]  # of APPEND and ADDITEMS
    pairs: list[tuple[Any, Any]]  # of SETITEM

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = object.__new__(cls)
        if kwargs:
            _spend(len(kwargs))
        self.args, self.kwargs, self.how, self.target = args, kwargs or _NO_KWARGS, "new", None
        self.state = self.values = self.pairs = _NOTHING
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Stub:
        # Protocol 2 spells `cls.__new__(cls, *args, **kwargs)` as a call of `partial(cls.__new__, ...)`.
        kind = type(self)
        maker = self.args[0] if self.args else None
        if isinstance(maker, _StubType) and maker.name.endswith(".__new__"):
            kind = stub_type(maker.module, maker.name.removesuffix(".__new__"))
        made: Stub = kind(*args, **kwargs)
        made.target = self
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = [state]

    def append(self, value: Any) -> None:
        if not self.values:
            self.values = []
        self.values.append(value)

    add = append

    def extend(self, values: Any) -> None:
        if not self.values:
            self.values = []
        self.values.extend(values)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self.pairs:
            self.pairs = []
        self.pairs.append((key, value))

    def __repr__(self) -> str:
        return f"<{stub_name(self)}>"


def _check_spelling(module: str, name: str) -> None:
    # Opcode GLOBAL ends a name at a newline and takes what follows for opcodes: written out, such a name would run.
    for part in (module, name):
        if " " in part or not part.isprintable():
            said = ascii(part)
            said = said if len(said) <= 80 else said[:77] + "..."
            raise CorruptError(f"{said} is not what a module, class or function can be called", found=said)


def stub_type(module: str, name: str) -> type[Stub]:
    """A new inert class that stands for `module.name`. Raises CorruptError for what nothing can be called."""
    _check_spelling(module, name)
    attributes = {"module": module, "name": name, "__slots__": ()}
    made: type[Stub] = _StubType(name.rpartition(".")[2] or "Stub", (Stub,), attributes)  # type: ignore[assignment]
    return made


def is_stub_type(value: Any) -> bool:
    """Whether this is a name that a pickle mentioned without calling it."""
    return isinstance(value, _StubType)


def stub_name(value: Any) -> str | None:
    """`torch.float32` for the stub class that stands for it or an instance of that; None for anything else."""
    kind = type(value) if isinstance(value, Stub) else value
    return kind.full_name if isinstance(kind, _StubType) else None


class Known:
    """A name that is answered with something real. A pickle may mention it and call it, but not change it."""

    __slots__ = ("answer", "module", "name")

    def __init__(self, module: str, name: str, answer: Callable[..., Any]) -> None:
        self.module, self.name, self.answer = module, name, answer

    def __call__(self, *args: Any) -> Any:
        try:
            return self.answer(*args)
        except TypeError:
            raise CorruptError(f"a pickle calls `{self.module}.{self.name}` with the wrong arguments") from None

    def __setstate__(self, state: Any) -> None:
        # BUILD would set attributes, here and for every file read after.
        raise CorruptError(f"a pickle changes `{self.module}.{self.name}`")


# What the functions below may copy while one pickle is read. They are called with what the pickle has already, which a
# few bytes of it may mention again and again.
_left: ContextVar[list[int] | None] = ContextVar("_left", default=None)
_MOST_COPIED = 16 << 20  # elements or bytes, and the length of the pickle eight times


@contextmanager
def _copying(nbytes: int) -> Iterator[None]:
    token = _left.set([_MOST_COPIED + 8 * nbytes])
    try:
        yield
    finally:
        _left.reset(token)


def _spend(count: int) -> None:
    left = _left.get()
    if left is not None:
        left[0] -= count
        if left[0] < 0:
            raise CorruptError("a pickle copies the same values again and again")


def _hashing(values: Iterable[Any]) -> None:
    """Called before values are put into a set or made keys: a tuple of tuples that are shared is worth many."""
    costs: dict[int, int] = {}
    for value in values:
        _spend(_cost(value, costs) if isinstance(value, tuple) else 1)


def _cost(top: tuple[Any, ...], costs: dict[int, int]) -> int:
    """What the hash of a tuple computes, in elements; `costs` remembers those of the tuples in it."""
    todo = [top]
    while todo:
        node = todo[-1]
        inner = [item for item in node if isinstance(item, tuple) and id(item) not in costs]
        if inner:
            todo += inner
        else:
            costs[id(node)] = 1 + sum(costs[id(item)] if isinstance(item, tuple) else 1 for item in node)
            todo.pop()
    return costs[id(top)]


def _encode(text: Any = "", encoding: Any = "latin1") -> bytes:
    # How protocol 2 spells bytes. Any other codec could be made to do work (or to import).
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise CorruptError("a pickle calls `_codecs.encode` in a way that pickle itself never does")
    _spend(len(text))
    return text.encode("latin1")


def _bytes(*args: Any) -> bytes:
    # How protocol 2 spells b"".
    if args:
        raise CorruptError("a pickle calls `bytes` in a way that pickle itself never does")
    return b""


def _bytearray(*args: Any) -> bytearray:
    # `bytearray(10**12)` would allocate a terabyte.
    match args:
        case ():
            return bytearray()
        case (bytes() as data,) | (bytearray() as data,):
            _spend(len(data))
            return bytearray(data)
        case (str() as text, str() as encoding) if encoding in ("latin1", "latin-1"):
            _spend(len(text))
            return bytearray(text.encode("latin1"))
    raise CorruptError("a pickle calls `bytearray` in a way that pickle itself never does")


def _complex(*args: Any) -> complex:
    if len(args) == 2 and all(isinstance(a, (int, float)) for a in args):
        return complex(*args)
    raise CorruptError("a pickle calls `complex` in a way that pickle itself never does")


def _attribute(owner: Any, name: Any) -> Any:
    # A nested class in protocol 2: `getattr(ShardedTensor, "ProcessGroupState")`.
    if isinstance(owner, _StubType) and isinstance(name, str):
        return stub_type(owner.module, f"{owner.name}.{name}")
    raise CorruptError("a pickle calls `getattr` on something that is not a class")


def _list_of(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        if not args:
            return kind(())
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            _hashing(args[0])
            return kind(args[0])
        raise CorruptError(f"a pickle calls `{kind.__name__}` in a way that pickle itself never does")

    return make


def _size(*args: Any) -> TorchSize:
    if len(args) == 1 and isinstance(args[0], tuple) and all(isinstance(n, int) for n in args[0]):
        _spend(len(args[0]))
        return TorchSize(args[0])
    raise CorruptError("a pickle calls `torch.Size` in a way that pickle itself never does")


class _Ordered(OrderedDict[Any, Any]):
    """An OrderedDict whose attributes a pickle can set, but not so that they hide its methods."""

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict) or not all(isinstance(k, str) and not hasattr(OrderedDict, k) for k in state):
            raise CorruptError("a pickle gives an `OrderedDict` attributes that it cannot have")
        _spend(len(state))
        vars(self).update(state)


def _ordered(*args: Any) -> OrderedDict[Any, Any]:
    if not args:
        return _Ordered()
    if len(args) == 1 and isinstance(args[0], (list, tuple)) and all(
        isinstance(p, (list, tuple)) and len(p) == 2 for p in args[0]
    ):  # fmt: skip
        _hashing(pair[0] for pair in args[0])
        return _Ordered(args[0])
    raise CorruptError("a pickle calls `OrderedDict` in a way that pickle itself never does")


REAL: dict[tuple[str, str], Known] = {
    (module, name): Known(module, name, answer)
    for module, name, answer in (
        ("collections", "OrderedDict", _ordered),
        ("_codecs", "encode", _encode),
        ("torch", "Size", _size),
        ("builtins", "set", _list_of(set)),
        ("builtins", "frozenset", _list_of(frozenset)),
        ("builtins", "bytes", _bytes),
        ("builtins", "bytearray", _bytearray),
        ("builtins", "complex", _complex),
        ("builtins", "getattr", _attribute),
    )
}
REAL |= {("__builtin__", known.name): known for (module, _), known in REAL.items() if module == "builtins"}

# Names that run commands or code when called. They are never called here, but neither do we pass them on.
_HARMFUL_MODULES = frozenset({
    "os", "posix", "nt", "subprocess", "sys", "shutil", "socket", "runpy", "importlib", "pty", "ctypes", "code",
    "commands", "webbrowser", "pip", "pdb", "bdb", "timeit", "cProfile", "profile", "asyncio", "multiprocessing",
    "signal", "tempfile", "urllib", "http", "requests", "pickle", "_pickle", "marshal", "types", "operator", "imp",
    "concurrent", "threading", "_thread", "builtins", "__builtin__",
})  # fmt: skip
_HARMLESS = frozenset({
    *((m, n) for m in ("builtins", "__builtin__") for n in (
        "int", "long", "float", "bool", "str", "unicode", "bytes", "list", "dict", "tuple", "set", "frozenset",
        "bytearray", "complex", "object", "slice", "range", "xrange", "type", "NoneType", "Ellipsis", "NotImplemented",
        "print", "len", "abs", "sum",
        "min", "max", "sorted", "reversed", "enumerate", "zip", "map", "filter", "getattr",
        "Exception", "ValueError", "KeyError", "RuntimeError", "TypeError",
    )),
    ("types", "SimpleNamespace"), ("types", "MappingProxyType"), ("operator", "itemgetter"),
    ("operator", "attrgetter"), ("tempfile", "SpooledTemporaryFile"),
})  # fmt: skip


def is_harmful(module: str, name: str) -> bool:
    """Whether loading a pickle that names this elsewhere could run a command. A courtesy, not a scanner: any name
    of an unknown class can do that too."""
    return module.partition(".")[0] in _HARMFUL_MODULES and (module, name) not in _HARMLESS


def harmful_names(value: Any) -> set[str]:
    """The names in this tree that `is_harmful` knows."""
    found: set[str] = set()
    for node in walk(value):
        kind = node if isinstance(node, _StubType) else type(node) if isinstance(node, Stub) else None
        if kind is not None and is_harmful(kind.module, kind.name):
            found.add(kind.full_name)
    return found


def children(value: Any) -> Iterator[tuple[Any, Any]]:
    """The keys and values directly inside a value; an attribute of a stub has a string key."""
    if isinstance(value, dict):
        yield from value.items()
        if getattr(value, "__dict__", None):
            yield "__dict__", vars(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from enumerate(value)
    elif isinstance(value, Stub):
        yield from (("target", v) for v in [value.target] if v is not None)
        yield from (("args", v) for v in [value.args] if v)
        yield from (("kwargs", v) for v in [value.kwargs] if v)
        yield from (("state", v) for v in value.state)
        yield from enumerate(value.values)
        yield from value.pairs


def walk(value: Any) -> Iterator[Any]:
    """Every value in a tree and every key that is more than a string or a number, each shared one once."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, (dict, list, tuple, set, frozenset, Stub)):
            if id(node) in seen:
                continue
            seen.add(id(node))
            for key, child in children(node):
                todo.append(child)
                if not isinstance(key, (str, int)):
                    todo.append(key)
        yield node


_noted: ContextVar[set[str] | None] = ContextVar("_noted", default=None)


@contextmanager
def noting_harm() -> Iterator[set[str]]:
    """The harmful names that any pickle asks for which is loaded in the block, also those that leave no value."""
    asked: set[str] = set()
    token = _noted.set(asked)
    try:
        yield asked
    finally:
        _noted.reset(token)


_MANY = 100_000


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For the length of a block that makes millions of objects that all stay: the collector would look through them
    again and again (9.3 s -> 1.6 s)."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
        if was and gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            # Moves them to the oldest generation; as young ones they would be looked through twice yet. Not for a few,
            # nor for what failed: the collector hardly ever looks there, and whoever reads many pickles would keep all.
            gc.freeze()
            gc.unfreeze()
    finally:
        if was:
            gc.enable()


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, stream: Any, known: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(stream, encoding="latin1")
        self._known = known
        self._persistent = persistent
        self._stubs: dict[tuple[str, str], type[Stub]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        key = (module, name)
        if key in self._known:
            return self._known[key]
        if key in REAL:
            return REAL[key]
        if key not in self._stubs:
            self._stubs[key] = stub_type(module, name)
            asked = _noted.get()
            if asked is not None and is_harmful(module, name):
                asked.add(f"{module}.{name}")
        return self._stubs[key]

    def persistent_load(self, pid: Any, /) -> Any:
        if self._persistent is None:
            raise CorruptError("the pickle refers to something outside itself")
        return self._persistent(pid)


def load(
    stream: io.BufferedIOBase | io.BytesIO | bytes,
    *,
    what: str,
    known: Mapping[tuple[str, str], Any] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read one pickle from `stream` without running anything in it; what follows it is left in the stream.

    `what` names it for errors. `known` answers some names with something better than a stub; `persistent` answers
    persistent ids. Raises CorruptError for anything that is not a whole pickle.
    """
    start = 0 if isinstance(stream, bytes) else stream.tell()
    data = stream if isinstance(stream, bytes) else stream.read()
    try:
        end = opcodes.check(data)
        if end is None:
            raise CorruptError(f"{what}: not a whole pickle: it ends too early")
        if not isinstance(stream, bytes):
            stream.seek(start + end)
        with no_garbage_collection(), _copying(len(data)):
            return _loaded(opcodes.tuples(data, end), _Unpickler(io.BytesIO(data), known or {}, persistent))
    except CkptError as error:
        if what in error.message:
            raise
        raise type(error)(f"{what}: {error.message}", hint=error.hint, **error.facts) from None
    except RecursionError:
        raise CorruptError(f"{what}: the pickle is nested too deeply") from None
    except MemoryError:
        raise CorruptError(f"{what}: the pickle asks for more memory than there is") from None
    # The machine raises whatever the operation at hand raises when a pickle is cut or made up.
    except Exception as error:
        raise CorruptError(f"{what}: not a whole pickle: {error}".rstrip(".")) from None


# Python's hash of a tuple calls itself for each tuple in it, in C and with nothing to stop it, until the stack is full:
# a SIGSEGV at 100,000 or so. A key of fewer does no harm anywhere.
MAX_NESTED = 2000
_FEW_TUPLES = 20_000
_LEVEL = 256  # bytes of stack that one takes, and as many to spare
_stack_size = threading.Lock()


def _loaded(count: int, unpickler: _Unpickler) -> Any:
    """What the machine makes of a pickle of at most `count` tuples: if they are many, on a stack that all fit on."""
    if count < _FEW_TUPLES:
        return unpickler.load()
    made: list[Any] = []
    failed: list[BaseException] = []
    context = copy_context()

    def load() -> None:
        try:
            made.append(context.run(unpickler.load))
            check_depths(made[0])
        # Whatever it is, the thread that waits raises it.
        except BaseException as error:
            failed.append(error)

    with _stack_size:
        before = threading.stack_size((16 << 20) + (count * _LEVEL >> 12 << 12))
        try:
            thread = threading.Thread(target=load, name="unpickler", daemon=True)
            thread.start()
        except RuntimeError:
            raise MemoryError from None
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


_LEAVES = frozenset({str, int, float, bool, type(None), bytes, _StubType, Known})


def check_depths(tree: Any) -> None:
    """Raises CorruptError for tuples nested so deep that their hash would end the process: as a key, it was computed on
    the stack above, but whoever puts it into another dict computes it again."""
    seen: set[int] = set()
    depths: dict[int, int] = {}
    todo = [tree]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        below: Iterable[Any]
        kind = type(node)
        if kind is list:
            below = node
        elif kind is dict:
            below = (*node.values(), *node)
        elif isinstance(node, Stub):
            below = (node.target, node.args or None, node.kwargs or None, *node.state, *node.values)
            if node.pairs:
                below = chain(below, *node.pairs)
        elif isinstance(node, tuple):
            below = _inside(node, depths)
        elif isinstance(node, dict):
            below = (*node.values(), *node, *getattr(node, "__dict__", {}).values())
        elif isinstance(node, (list, set, frozenset)):
            below = node
        else:
            continue
        todo += [value for value in below if type(value) not in _LEAVES]


def _inside(top: tuple[Any, ...], depths: dict[int, int]) -> list[Any]:
    """What is in a tuple and in the tuples in it; `depths` remembers how deep each is."""
    below: list[Any] = []
    if id(top) in depths:
        return below
    path, left, deepest = [top], [iter(top)], [1]
    while path:
        for item in left[-1]:
            if not isinstance(item, tuple):
                below.append(item)
            elif id(item) in depths:
                deepest[-1] = max(deepest[-1], depths[id(item)] + 1)
            else:
                path.append(item)
                left.append(iter(item))
                deepest.append(1)
                break
        else:
            left.pop()
            depth = depths[id(path.pop())] = deepest.pop()
            if deepest:
                deepest[-1] = max(deepest[-1], depth + 1)
            if depth > MAX_NESTED:
                raise CorruptError(f"tuples nested more than {MAX_NESTED} deep")
    return below


_BATCH = 1000


def spelt_text(value: str) -> bytes:
    """A string in a pickle, where nothing refers to it."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


class Writer:
    """Writes a tree as a pickle of protocol 2, as `torch.save` does, or 4.

    `leaf` is asked first for every value that is not a number, a string or None: it may write the value with the
    writer's own methods (a tensor, as a call with a persistent id), `remember` it, and return True.
    """

    def __init__(
        self,
        protocol: int = 2,
        leaf: Callable[[Writer, Any], bool] | None = None,
    ) -> None:
        self.out = bytearray(b"\x80" + bytes([protocol]))
        self.protocol = protocol
        self._leaf = leaf
        self._memo: dict[Any, int] = {}
        self._keep: list[Any] = []  # so that ids in the memo stay taken
        self._count = 0
        self.frozen = False  # nothing new comes into the memo

    def done(self) -> bytes:
        self.out += b"."
        return bytes(self.out)

    # The memo ------------------------------------------------------------------------------------------------

    def _put(self, key: Any) -> None:
        if self.frozen:
            return
        n = self._count
        self._count += 1
        self._memo[key] = n
        if n < 256:
            self.out += b"q" + bytes((n,))
        else:
            self.out += b"r" + struct.pack("<I", n)

    def _get(self, key: Any) -> bool:
        n = self._memo.get(key)
        if n is None:
            return False
        self.out += b"h" + bytes((n,)) if n < 256 else b"j" + struct.pack("<I", n)
        return True

    # Values --------------------------------------------------------------------------------------------------

    def named(self, module: str, name: str) -> None:
        """A class or function by name."""
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
            _check_spelling(module, name)
            self.out += b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        self._put(key)

    def call(self, module: str, name: str, args: tuple[Any, ...]) -> None:
        """`module.name(*args)`, to be called when the pickle is loaded."""
        self.named(module, name)
        self.write_tuple(args)
        self.out += b"R"

    def persistent(self, pid: Any) -> None:
        self.write(pid)
        self.out += b"Q"

    def text(self, value: str) -> None:
        key = ("str", value)
        if self._get(key):
            return
        self.out += spelt_text(value)
        self._put(key)

    def integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K" + bytes((value,))
        elif 0 <= value < 65536:
            self.out += b"M" + struct.pack("<H", value)
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
            if len(data) < 256:
                self.out += b"\x8a" + bytes((len(data),)) + data
            else:
                self.out += b"\x8b" + struct.pack("<i", len(data)) + data

    def write_tuple(self, values: tuple[Any, ...]) -> None:
        if len(values) <= 3:
            for value in values:
                self.write(value)
            self.out += (b")", b"\x85", b"\x86", b"\x87")[len(values)]
        else:
            self.out += b"("
            for value in values:
                self.write(value)
            self.out += b"t"

    def write(self, value: Any) -> None:
        """Any value of the grammar at the top of this module. Raises LossError for another one."""
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
        """What was just written is `value`: the next time it is only referred to."""
        if not self.frozen:
            self._keep.append(value)
            self._put(id(value))

    def apart(self, value: Any) -> bytes:
        """How a value is written here, without writing it: it may be repeated at any later place of this pickle. It
        refers to what was written before, and nothing can refer into it."""
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
                self._appends(value)
            case OrderedDict():
                self.call("collections", "OrderedDict", ())
                self.remember(value)
                self._set_items(list(value.items()))
                if vars(value):
                    self.write(dict(vars(value)))
                    self.out += b"b"
            case dict():
                self.out += b"}"
                self.remember(value)
                self._set_items(list(value.items()))
            case bytes():
                self._bytes(value)
                self.remember(value)
            case bytearray():
                self.call("builtins", "bytearray", (bytes(value),))
                self.remember(value)
            case set() | frozenset():
                # Sorted where that can be done, so that equal sets make equal files.
                self.call("builtins", type(value).__name__, (sorted(value, key=repr),))
                self.remember(value)
            case complex():
                self.call("builtins", "complex", (value.real, value.imag))
            case Stub():
                self._stub(value)
            case _StubType():
                self.named(value.module, value.name)
            case Known():
                self.named(value.module, value.name)
            case _:
                raise LossError(f"a value of class `{type(value).__module__}.{type(value).__name__}` cannot be pickled")

    def _bytes(self, value: bytes) -> None:
        if self.protocol >= 4:
            self.out += (
                b"B" + struct.pack("<I", len(value)) if len(value) < 2**32 else b"\x8e" + struct.pack("<Q", len(value))
            )
            self.out += value
        else:
            # pickle itself spells b"" `bytes()`, which `torch.load(weights_only=True)` refuses.
            self.call("_codecs", "encode", (value.decode("latin1"), "latin1"))

    def _appends(self, values: list[Any]) -> None:
        self._fill([(value,) for value in values], b"a", b"e")

    def _set_items(self, pairs: list[tuple[Any, Any]]) -> None:
        self._fill(pairs, b"s", b"u")

    def _fill(self, items: Sequence[tuple[Any, ...]], one: bytes, many: bytes) -> None:
        # In batches, as pickle does: a reader keeps no more than one on its stack.
        for start in range(0, len(items), _BATCH):
            batch = items[start : start + _BATCH]
            if len(batch) > 1:
                self.out += b"("
            for item in batch:
                for value in item:
                    self.write(value)
            self.out += many if len(batch) > 1 else one

    def _stub(self, value: Stub) -> None:
        if value.target is not None:
            self.write(value.target)
        else:
            self.named(type(value).module, type(value).name)
        self.write_tuple(value.args)
        if value.kwargs:
            self.write(value.kwargs)
            self.out += b"\x92"
        else:
            self.out += b"\x81" if value.how == "new" else b"R"
        self.remember(value)
        self._appends(value.values)
        self._set_items(value.pairs)
        for state in value.state:
            self.write(state)
            self.out += b"b"


def dump(value: Any, *, protocol: int = 2, leaf: Callable[[Writer, Any], bool] | None = None) -> bytes:
    """`value` as a pickle; see `Writer`. Raises LossError for what cannot be pickled or is nested too deeply."""
    writer = Writer(protocol, leaf)
    try:
        writer.write(value)
    except RecursionError:
        raise LossError("a value is nested too deeply to be written") from None
    return writer.done()
