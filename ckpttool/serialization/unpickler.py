"""Pickles without execution: an unpickler that imports nothing and builds inert stubs.

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
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from ckpttool.catalogue.values import Known, Stub, StubType, TorchSize, spend, stub_type
from ckpttool.errors import CkptError, CorruptError
from ckpttool.serialization import pickle_opcodes
from ckpttool.serialization.pickle_limits import charge_hashing, check_depths, copies_limited
from ckpttool.serialization.unsafe_globals import is_harmful, noted


def _encode(text: Any = "", encoding: Any = "latin1") -> bytes:
    # How protocol 2 spells bytes. Any other codec could be made to do work (or to import).
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise CorruptError("a pickle calls `_codecs.encode` in a way that pickle itself never does")
    spend(len(text))
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
            spend(len(data))
            return bytearray(data)
        case (str() as text, str() as encoding) if encoding in ("latin1", "latin-1"):
            spend(len(text))
            return bytearray(text.encode("latin1"))
    raise CorruptError("a pickle calls `bytearray` in a way that pickle itself never does")


def _complex(*args: Any) -> complex:
    if len(args) == 2 and all(isinstance(a, (int, float)) for a in args):
        return complex(*args)
    raise CorruptError("a pickle calls `complex` in a way that pickle itself never does")


def _attribute(owner: Any, name: Any) -> Any:
    # A nested class in protocol 2: `getattr(ShardedTensor, "ProcessGroupState")`.
    if isinstance(owner, StubType) and isinstance(name, str):
        return stub_type(owner.module, f"{owner.name}.{name}")
    raise CorruptError("a pickle calls `getattr` on something that is not a class")


def _list_of(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        if not args:
            return kind(())
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            charge_hashing(args[0])
            return kind(args[0])
        raise CorruptError(f"a pickle calls `{kind.__name__}` in a way that pickle itself never does")

    return make


def _size(*args: Any) -> TorchSize:
    if len(args) == 1 and isinstance(args[0], tuple) and all(isinstance(n, int) for n in args[0]):
        spend(len(args[0]))
        return TorchSize(args[0])
    raise CorruptError("a pickle calls `torch.Size` in a way that pickle itself never does")


class _Ordered(OrderedDict[Any, Any]):
    """An OrderedDict whose attributes a pickle can set, but not so that they hide its methods."""

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict) or not all(isinstance(k, str) and not hasattr(OrderedDict, k) for k in state):
            raise CorruptError("a pickle gives an `OrderedDict` attributes that it cannot have")
        spend(len(state))
        vars(self).update(state)


def _ordered(*args: Any) -> OrderedDict[Any, Any]:
    if not args:
        return _Ordered()
    if (
        len(args) == 1
        and isinstance(args[0], (list, tuple))
        and all(isinstance(p, (list, tuple)) and len(p) == 2 for p in args[0])
    ):
        charge_hashing(pair[0] for pair in args[0])
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
            asked = noted.get()
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
        end = pickle_opcodes.check(data)
        if end is None:
            raise CorruptError(f"{what}: not a whole pickle: it ends too early")
        if not isinstance(stream, bytes):
            stream.seek(start + end)
        with no_garbage_collection(), copies_limited(len(data)):
            return _loaded(pickle_opcodes.tuples(data, end), _Unpickler(io.BytesIO(data), known or {}, persistent))
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
        raise CorruptError(f"{what}: not a whole pickle: {error}".rstrip(".")) from None


# The hash of nested tuples takes stack for each level, see `pickle_limits.check_depths`.
_FEW_TUPLES = 20_000
_LEVEL = 256  # bytes of stack that one takes, and as many to spare
_stack_size = threading.Lock()


def _loaded(count: int, unpickler: _Unpickler) -> Any:
    """What the machine makes of a pickle of at most `count` tuples: if they are many, on a stack that all fit on."""
    if count < _FEW_TUPLES:
        return unpickler.load()
    results: list[Any] = []
    errors: list[BaseException] = []
    context = copy_context()

    def load() -> None:
        try:
            results.append(context.run(unpickler.load))
            check_depths(results[0])
        # Whatever it is, the thread that waits raises it.
        except BaseException as error:
            errors.append(error)

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
    if errors:
        raise errors[0]
    return results[0]
