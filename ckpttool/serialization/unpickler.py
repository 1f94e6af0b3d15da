"""Pickles without execution: an unpickler that imports nothing and builds inert stubs.

A pickle is a program for a stack machine. Ours runs on CPython's own machine, but every name that the program asks
for (`find_class`) is answered with a class made on the spot that remembers how it was called and does nothing. The
few names that are answered with something real are listed in `REAL` and checked there.

What comes back: Python's plain values and containers, `TorchSize`, subclasses of `Stub` (a name that was only
mentioned, `torch.float32`), instances of them (a name that was called), and what the caller's `known` names return.
"""

from __future__ import annotations

import gc
import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from itertools import islice
from typing import Any

from ckpttool.catalogue.key_hashes import MANY, Alike, charge_hashing, is_secret
from ckpttool.catalogue.values import Stub, StubType, TorchSize, attributes_of, check_levels, known_names, stub_type
from ckpttool.catalogue.work_limit import charge, working
from ckpttool.errors import CkptError, CorruptError
from ckpttool.serialization import pickle_opcodes
from ckpttool.serialization.pickle_limits import check_depths, count_tuples
from ckpttool.serialization.unsafe_globals import note

# What REDUCE calls. Each raises TypeError, which `Known` explains, for a call that pickle itself never makes.


def _latin1(text: Any = "", encoding: Any = "latin1") -> bytes:
    # How protocol 2 spells bytes. Any other codec could be made to do work (or to import).
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError
    charge(len(text))
    return text.encode("latin1")


def _bytes() -> bytes:
    # How protocol 2 spells b"".
    return b""


def _bytearray(data: Any = b"", *encoding: Any) -> bytearray:
    # `bytearray(10**12)` would allocate a terabyte.
    if encoding:
        return bytearray(_latin1(data, *encoding))
    if not isinstance(data, (bytes, bytearray)):
        raise TypeError
    charge(len(data))
    return bytearray(data)


def _complex(real: Any, imag: Any) -> complex:
    if not isinstance(real, (int, float)) or not isinstance(imag, (int, float)):
        raise TypeError
    return complex(real, imag)


_BOUND = stub_type("builtins", "getattr")


def _attribute(owner: Any, name: Any) -> Any:
    # A bound method is `getattr(module, "forward")`; in protocol 2 a nested class `getattr(ShardedTensor, "State")`.
    # What a call has returned (`__import__("os")`) is no object that has methods of its own.
    if isinstance(owner, Stub) and owner.how == "new" and isinstance(name, str):
        return _BOUND(owner, name)
    if not isinstance(owner, StubType) or not isinstance(name, str):
        raise TypeError
    charge(len(owner.name) + len(name))
    return stub_type(owner.module, f"{owner.name}.{name}")


def _hashing(values: Any) -> Any:
    if not isinstance(values, (list, tuple)):
        raise TypeError
    charge_hashing(values)
    return values


def _set(values: Any = ()) -> set[Any]:
    return set(_hashing(values))


def _frozenset(values: Any = ()) -> frozenset[Any]:
    return frozenset(_hashing(values))


def _size(sizes: Any) -> TorchSize:
    if not isinstance(sizes, tuple) or not all(isinstance(n, int) for n in sizes):
        raise TypeError
    charge(len(sizes))
    return TorchSize(sizes)


class _Ordered(OrderedDict[Any, Any]):
    """An OrderedDict whose attributes a pickle can set, but not so that they hide its methods."""

    def __setstate__(self, state: Any) -> None:
        # Whoever walks a value walks its attributes too, as often as they are merged.
        charge(16 * len(state) if isinstance(state, dict) else 1)
        try:
            attributes = attributes_of(state)
        except TypeError:
            raise CorruptError("a pickle gives an `OrderedDict` attributes that it cannot have") from None
        vars(self).update(attributes)


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    if pairs == ():  # as each tensor of torch.save has one, for its hooks
        return _Ordered()
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        raise TypeError
    _hashing([key for key, _ in pairs])
    return _Ordered(pairs)


REAL = known_names(
    ("collections", "OrderedDict", _ordered),
    ("_codecs", "encode", _latin1),
    ("torch", "Size", _size),
    ("builtins", "set", _set),
    ("builtins", "frozenset", _frozenset),
    ("builtins", "bytes", _bytes),
    ("builtins", "bytearray", _bytearray),
    ("builtins", "complex", _complex),
    ("builtins", "getattr", _attribute),
)
REAL |= {("__builtin__", known.name): known for (module, _), known in REAL.items() if module == "builtins"}

_MANY = 100_000
_TUPLE = ord("t")
_SMALL = 1 << 9  # bytes of a piece of a stream, and how many of these are joined


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Context manager of a block that makes millions of objects that all stay: the collector would look through them
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


Names = Mapping[tuple[str, str], Any]


class _Pieces(io.RawIOBase):
    """A stream of bytes in pieces; `seen` is told how many have been read."""

    def __init__(self, pieces: Iterable[bytes], seen: Callable[[int], None] = lambda count: None) -> None:
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")
        self._read, self._seen = 0, seen

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # As many as fit: the machine would ask for each.
        at, room, piece = 0, len(buffer), self._piece
        while at < room:
            if not piece:
                following = next(self._pieces, None)
                if following is None:
                    break
                if len(following) < _SMALL:
                    following = b"".join((following, *islice(self._pieces, _SMALL)))
                piece = memoryview(following)
            n = min(room - at, len(piece))
            buffer[at : at + n] = piece[:n]
            at, piece = at + n, piece[n:]
        self._piece = piece
        self._seen(self._read)
        self._read += at
        return at


class _Shared(Exception):
    """Raised if the tuples of a pickle are large or shared often."""


class _Guard:
    """Is asked for each tuple that may hold others, before it can be a key: the hash of any is cheap."""

    _MAX_COST = 256  # elements that one hash may take

    def __init__(self) -> None:
        # Those that are not as small as those that are not asked for; kept, so that another cannot have their id.
        self._costs: dict[int, tuple[int, Any]] = {}

    def __call__(self, value: Any) -> Any:
        cost = 1 + len(value)
        if cost <= pickle_opcodes.FLAT_COST and tuple not in map(type, value):
            return value
        for item in value:
            if type(item) is tuple:
                cost += self._costs[id(item)][0] if id(item) in self._costs else pickle_opcodes.FLAT_COST
        if cost > self._MAX_COST:
            raise _Shared
        if cost > pickle_opcodes.FLAT_COST:
            self._costs[id(value)] = cost, value
        return value


class _Inserting:
    """Puts keys into dicts and sets as the machine would, and charges what comparing them takes."""

    def __init__(self) -> None:
        # Kept, so that another container cannot have the id of one.
        self._alike: dict[int, tuple[Any, Alike]] = {}
        insert = {
            b"u": self._items,
            b"s": self._item,
            b"d": self._dict,
            b"\x90": self._values,
            b"\x91": self._frozenset,
        }
        self.by_opcode: dict[int, Any] = {opcode[0]: function for opcode, function in insert.items()}

    def _charge(self, container: Any, keys: tuple[Any, ...]) -> None:
        if len(container) + len(keys) <= MANY or is_secret(keys):
            return
        if id(container) not in self._alike:
            self._alike[id(container)] = container, Alike()
            self._alike[id(container)][1].add(container)
        self._alike[id(container)][1].add(keys)

    def _items(self, taken: tuple[Any, tuple[Any, ...]]) -> Any:
        container, items = taken
        pairs = zip(items[::2], items[1::2], strict=True)
        if isinstance(container, dict):
            self._charge(container, items[::2])
        if type(container) is dict:
            container.update(pairs)
        else:
            for key, value in pairs:
                container[key] = value
        return container

    def _item(self, taken: tuple[Any, Any, Any]) -> Any:
        container, *items = taken
        return self._items((container, tuple(items)))

    def _dict(self, items: tuple[Any, ...]) -> dict[Any, Any]:
        made: dict[Any, Any] = self._items(({}, items))
        return made

    def _values(self, taken: tuple[Any, tuple[Any, ...]]) -> Any:
        container, values = taken
        if isinstance(container, set):
            self._charge(container, values)
            container.update(values)
        else:
            for value in values:
                container.add(value)
        return container

    def _frozenset(self, values: tuple[Any, ...]) -> frozenset[Any]:
        self._charge((), values)
        return frozenset(values)


def _called(call: tuple[Any, Any]) -> None:
    """Keep a call whose result is dropped, which a pickle makes for what it does to its first argument: the setter of
    the object's state, as cloudpickle has one for each function and class."""
    function, args = call
    if isinstance(args, tuple) and args and isinstance(args[0], Stub) and isinstance(function, (Stub, StubType)):
        charge(len(args))
        setter = function(*args[1:])
        setter.how = "setter"
        args[0].__setstate__(setter)


def _new(call: tuple[Any, ...]) -> Any:
    """Return an object of a class, also of one that the pickle makes itself, which is a stub like any object."""
    kind, args, *kwargs = call
    if not isinstance(kind, Stub):
        return kind.__new__(kind, *args, **dict(*kwargs))
    stub = kind(*args, **dict(*kwargs))
    stub.how = "new"
    return stub


_CALLS = {ord("R"): _called, 0x81: _new, 0x92: _new}
_READ_AHEAD = 1 << 17  # bytes; without, the machine calls the stream for each opcode of protocol 2


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        stream: Any,
        known: Names,
        persistent: Callable[[Any], Any] | None,
        guarded: Names | None = None,
        calls: bytes | bytearray = b"",
    ) -> None:
        super().__init__(io.BufferedReader(stream, _READ_AHEAD), encoding="latin1")
        self._known, self._persistent, self._guarded = known, persistent, guarded or {}
        answers: dict[int, Any] = {**_Inserting().by_opcode, _TUPLE: _Guard(), **_CALLS} if calls else {}
        self._answers = map(answers.get, calls)
        self._stubs: dict[tuple[str, str], type[Stub]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        key = (module, name)
        if key in self._guarded:
            return self._guarded[key]
        if key in self._known:
            return self._known[key]
        if key in REAL:
            return REAL[key]
        if key not in self._stubs:
            self._stubs[key] = stub_type(module, name)
            note(f"{module}.{name}")
        return self._stubs[key]

    def persistent_load(self, pid: Any, /) -> Any:
        answer = next(self._answers, None)
        if answer is not None:
            return answer(pid)
        if self._persistent is None:
            raise CorruptError("the pickle refers to something outside itself")
        return self._persistent(pid)


def load(
    data: bytes,
    *,
    what: str,
    known: Names | None = None,
    persistent: Callable[[Any], Any] | None = None,
    guarded: Names | None = None,
    seen: Callable[[float], None] = lambda share: None,
) -> Any:
    """Read the pickle `data`, without running anything in it. `what` names it for errors. `known`
    answers some names with something better than a stub; `persistent` answers persistent ids. `guarded` answers names
    of a large pickle whose tuples may be hashed without a thought, and `seen` is told the share of that which is read.
    Raises CorruptError for anything that is not a whole pickle."""
    try:
        found = None
        if guarded is not None and persistent is None:
            found = pickle_opcodes.guarded(data, lambda share: seen(share / 2))
        if found is not None:
            # What cannot be read so is read again, and checked as a whole.
            with suppress(Exception), no_garbage_collection(), working(len(data)):
                stream = _Pieces(found.pieces, lambda count: seen(min(0.5 + count / len(data) / 2, 1.0)))
                return _Unpickler(stream, known or {}, None, guarded, found.calls).load()
        end = pickle_opcodes.check(data)
        if end is None:
            raise CorruptError(f"{what}: not a complete pickle: it ends too early")
        if end < len(data):
            # Nobody who calls `pickle.load` once sees them; who calls it again runs another program.
            message = f"{what}: {len(data) - end} bytes after the end of its pickle, at {end}"
            raise CorruptError(message, hint="the file was put together by hand", found=len(data), expected=end)
        with no_garbage_collection(), working(len(data)):
            try:
                value = _loaded(count_tuples(data, end), _machine(data, known, persistent))
            except pickle.UnpicklingError as error:
                if "class argument" not in str(error):
                    raise
                # Of NEWOBJ: the class is one that the pickle makes itself.
                value = _loaded(count_tuples(data, end), _machine(data, known, persistent, objects=True))
            check_levels(value)
            return value
    except CkptError as error:
        if error.names(what):
            raise
        raise error.prefixed(what) from None
    except RecursionError:
        raise CorruptError(f"{what}: the pickle is nested too deeply") from None
    except MemoryError:
        raise CorruptError(f"{what}: the pickle asks for more memory than there is") from None
    # The machine raises whatever the operation at hand raises when a pickle is cut or made up.
    except Exception as error:
        raise CorruptError(f"{what}: not a complete pickle: {error}".rstrip(".")) from None


def _machine(
    data: bytes, known: Names | None, persistent: Callable[[Any], Any] | None, *, objects: bool = False
) -> _Unpickler:
    found = pickle_opcodes.answered(data, objects=objects)
    stream = io.BytesIO(data) if found is None else _Pieces(found.pieces)
    return _Unpickler(stream, known or {}, persistent, calls=b"" if found is None else found.calls)


# The hash of nested tuples takes stack for each level, see `pickle_limits.check_depths`.
_FEW_TUPLES = 20_000
_LEVEL = 256  # bytes of stack that one takes, and as many to spare
_stack_size = threading.Lock()


def _loaded(count: int, unpickler: _Unpickler) -> Any:
    """Return what a pickle of at most `count` tuples makes; of many, on a stack that all fit on."""
    if count < _FEW_TUPLES:
        return unpickler.load()
    from concurrent.futures import Future

    outcome: Future[Any] = Future()
    context = copy_context()

    def load() -> None:
        try:
            value = context.run(unpickler.load)
            check_depths(value)
            outcome.set_result(value)
        # Whatever it is, the thread that waits raises it.
        except BaseException as error:
            outcome.set_exception(error)

    with _stack_size:
        before = threading.stack_size((16 << 20) + (count * _LEVEL >> 12 << 12))
        try:
            threading.Thread(target=load, name="unpickler", daemon=True).start()
        except RuntimeError:
            raise MemoryError from None
        finally:
            threading.stack_size(before)
    return outcome.result()


def stream_of(data: bytes, position: int) -> io.BytesIO:
    """Return the stream in memory that a stub of `io.BytesIO` stands for."""
    stream = io.BytesIO(data)
    stream.seek(position)
    return stream
