"""The calls that rebuild a tensor in a pickle of torch: reading and writing them.

Sources: `torch/_utils.py`, `torch/_tensor.py` and `torch/serialization.py` of torch 2.0 to 2.15.
A storage is a persistent id `("storage", torch.FloatStorage, key, location, numel)`; a tensor is a call
`torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, {"conj": True}])`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import Any

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import BY_STORAGE, DTYPES, Dtype, dtype
from ckpttool.catalogue.entries import check_shape
from ckpttool.catalogue.shown import shown, spelt
from ckpttool.catalogue.values import KnownName, Stub, StubType, known_names, stub_name, stub_type, walk
from ckpttool.catalogue.work_limit import charge
from ckpttool.errors import CorruptError
from ckpttool.serialization import pickler, unpickler
from ckpttool.serialization.pickler import PickleWriter, spelt_text


# Neither this nor `TensorRef` is ever changed; a frozen dataclass takes three times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class StorageRef:
    """A storage of the file: `StorageRef("0", float32, 52, "cpu")`. `numel` counts elements, or bytes when `dtype` is
    None (untyped). `view` is a legacy file's `(offset, numel)` of a view into the storage."""

    key: str
    dtype: Dtype | None
    numel: int
    location: str = "cpu"
    view: tuple[int, int] | None = None

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize if self.dtype else 1

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def whole(self) -> TensorRef:
        """Return the storage as a tensor, of bytes if it is untyped."""
        numel = self.view[1] if self.view else self.numel
        return TensorRef(self, self.dtype or DTYPES["uint8"], 0, (numel,), (1,))


@dataclass(slots=True, eq=False)
class TensorRef:
    """A tensor as a pickle describes it; offset and strides in elements. `wrapper` is the class it had beyond
    Tensor, Parameter and Buffer; `attributes` are names of Python attributes that were set on it. A tensor on the
    meta device is none of these: it stays a stub of the call that makes it."""

    storage: StorageRef
    dtype: Dtype
    offset: int
    shape: Ints
    strides: Ints
    codec: tuple[str, ...] = ()
    wrapper: str | None = None
    attributes: tuple[str, ...] = ()

    def span(self) -> tuple[int, int, Ints | None]:
        """Return begin and length of its elements in the storage, in bytes; and their strides unless contiguous."""
        span, is_row_major = _laid_out(self.shape, self.strides)
        strides = None if is_row_major else self.strides
        return self.offset * self.dtype.itemsize, span * self.dtype.itemsize, strides


@lru_cache(4096)
def _laid_out(shape: Ints, strides: Ints) -> tuple[int, bool]:
    """Return the span of a tensor, in elements, and whether these strides are row-major. A model has few shapes."""
    return boxes.span(shape, strides), boxes.is_row_major(shape, strides)


MAX_REPEATED = 1 << 30  # bytes that a tensor may claim beyond its storage, by strides of 0; or 64 times the storage


_INTEGERS = {int}


@lru_cache(4096)
def _checked(shape: Ints) -> Ints:
    check_shape(shape)
    return shape


def _ints(value: Any) -> Ints:
    if isinstance(value, (tuple, list)) and {*map(type, value)} <= _INTEGERS and (not value or min(value) >= 0):
        return _checked(tuple(value))
    raise CorruptError(f"a tensor's size or stride is {shown(value)}, not a tuple of integers")


def rebuild(storage: Any, dtype: Dtype, offset: Any, size: Any, stride: Any, flags: Any = None) -> TensorRef:
    """Return a tensor over a storage. Raises CorruptError when this is none, or the storage is too small."""
    shape, strides = _ints(size), _ints(stride)
    if not isinstance(storage, StorageRef) or type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise CorruptError("a tensor is not rebuilt from a storage, an offset, a size and a stride")
    codec = tuple(name for name in ("conj", "neg") if isinstance(flags, dict) and flags.get(name))
    have = storage.nbytes if storage.view is None else storage.view[1] * dtype.itemsize
    need = (offset + _laid_out(shape, strides)[0]) * dtype.itemsize if 0 not in shape else 0
    if need > have:
        tensor = f"a tensor {dtype} {list(shape)}"
        raise CorruptError(f"{tensor} needs {need} bytes of a storage that has {have}", found=have, expected=need)
    claimed = prod(shape) * dtype.itemsize
    if claimed > max(have, min(64 * have, 1 << 62), MAX_REPEATED):
        tensor = f"a tensor {dtype} {list(shape)}"
        message = f"{tensor} with strides {list(strides)} claims {claimed} bytes of a storage that has {have}"
        hint = "no tensor repeats its elements that often: the file was made to fill a disk"
        raise CorruptError(message, hint=hint, found=have, expected=claimed)
    return TensorRef(storage, dtype, offset, shape, strides, codec)


def _tensor_v2(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Any:
    if not isinstance(storage, StorageRef) or storage.dtype is None:
        raise CorruptError("a tensor is rebuilt from something that is not a typed storage")
    return rebuild(storage, storage.dtype, offset, size, stride, rest[2] if len(rest) > 2 else None)


def _tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Any:
    if len(rest) < 3 or (name := stub_name(rest[2])) is None:
        raise CorruptError("a tensor is rebuilt without a dtype")
    return rebuild(storage, dtype(name), offset, size, stride, rest[3] if len(rest) > 3 else None)


def _parameter(data: Any, requires_grad: Any = None, hooks: Any = None, state: Any = None, *rest: Any) -> Any:
    tensor = _with_attributes(data, state)
    return tensor if tensor is not None else _PARAMETER(data, requires_grad, hooks, state)


# FSDP1 sets the first on every tensor of a full state dict, `nn.Buffer` and `nn.Parameter` the others on themselves.
_UNREPORTED = {"_has_been_cloned", "persistent", "_is_buffer", "_is_param"}


def _with_attributes(data: Any, state: Any) -> Any:
    """Return a tensor with the names of its attributes; None where there are tensors in these, to be kept with them."""
    if not isinstance(data, (TensorRef, Stub)):
        # A tuple that came back from a call would be one more name for it: see `pickle_limits`.
        raise CorruptError("a parameter is made of something that is not a tensor")
    if isinstance(data, Stub):
        return data
    parts = state if isinstance(state, tuple) else (state,)
    charge(4 * sum(len(part) for part in parts if isinstance(part, dict)) + len(data.attributes))
    names = [spelt(k) for part in parts if isinstance(part, dict) for k in part if k not in _UNREPORTED]
    if names and any(isinstance(node, (TensorRef, StorageRef)) for node in walk(parts)):
        return None
    return replace(data, attributes=(*data.attributes, *names)) if names else data


_PLAIN = {"torch.Tensor", "torch._tensor.Tensor"} | {
    f"torch.nn.{name}" for name in ("parameter.Parameter", "parameter.Buffer", "Parameter", "Buffer")
}
# One class for all: making one for each of a file's DTensors takes as long as reading the file.
_WRAPPED = stub_type("torch._tensor", "_rebuild_from_type_v2")
_PARAMETER = stub_type("torch._utils", "_rebuild_parameter_with_state")


def _from_type_v2(function: Any, kind: Any, args: Any, state: Any) -> Any:
    if isinstance(function, KnownName) and function.module == "torch._utils" and isinstance(args, tuple):
        tensor = _with_attributes(function(*args), state)
        name = stub_name(kind)
        if isinstance(tensor, TensorRef):
            return tensor if name in _PLAIN else replace(tensor, wrapper=name)
    return _WRAPPED(function, kind, args, state)


def wrapper_class(stub: Stub) -> str | None:
    """Return the class of a tensor that is made of others, such as `OptimState8bit` of its codes and scales; None for
    anything else."""
    return stub_name(stub.args[1]) if isinstance(stub, _WRAPPED) and len(stub.args) == 4 else None


KNOWN = known_names(
    ("torch._utils", "_rebuild_tensor", _tensor_v2),
    ("torch._utils", "_rebuild_tensor_v2", _tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3", _tensor_v3),
    ("torch._utils", "_rebuild_parameter", _parameter),
    ("torch._utils", "_rebuild_parameter_with_state", _parameter),
    ("torch._tensor", "_rebuild_from_type", _from_type_v2),
    ("torch._tensor", "_rebuild_from_type_v2", _from_type_v2),
)


def persistent_load(pid: Any) -> Any:
    """Return a storage for a persistent id. Legacy files also hold `("module", class, file, source)` for modules."""
    if not isinstance(pid, tuple) or not pid:
        raise CorruptError("a persistent id is not a tuple")
    if pid[0] == "module" and len(pid) >= 2 and isinstance(pid[1], StubType):
        return pid[1]
    if pid[0] != "storage" or len(pid) < 5:
        raise CorruptError(f"a persistent id of an unknown kind: {shown(pid[0])}")
    _, kind, key, location, numel, *rest = pid
    if type(numel) is not int or numel < 0 or not isinstance(key, (str, int)):
        raise CorruptError("a storage has no key or no size")
    match rest:
        case [] | [None, *_]:
            view = None
        case [(str(), int() as start, int() as size), *_]:
            view = (start, size)
        case _:
            raise CorruptError("a storage view that is not (key, offset, size)")
    return StorageRef(str(key), storage_dtype(kind), numel, spelt(location), view)


def storage_dtype(kind: Any) -> Dtype | None:
    """Return the dtype of a class of storages; None for the untyped one. Raises CorruptError for another class."""
    name = (stub_name(kind) or "").rpartition(".")[2]
    if name not in BY_STORAGE and name != "UntypedStorage":
        raise CorruptError(f"unknown dtype: storage class `{stub_name(kind)}`", found=stub_name(kind))
    return BY_STORAGE.get(name)


def load(data: bytes, what: str) -> Any:
    """Return the tree of a torch pickle: plain values and stubs, with a `TensorRef` for each tensor."""
    return unpickler.load(data, what=what, known=KNOWN, persistent=persistent_load)


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor (or, with `bare`, only its storage) to be written into a pickle: a storage of its own called `key`,
    contiguous elements."""

    key: str
    dtype: Dtype
    shape: Ints
    bare: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


@cache
def _storage_class(name: str | None) -> type[Stub]:
    return stub_type("torch", name) if name else stub_type("torch.storage", "UntypedStorage")


def write_tensor(writer: PickleWriter, tensor: NewTensor) -> None:
    """Write the call that rebuilds a plain CPU tensor, spelt as torch spells it."""
    name = tensor.dtype.storage
    numel = tensor.numel if name is not None else tensor.numel * tensor.dtype.itemsize
    pid = ("storage", _storage_class(name), tensor.key, "cpu", numel)
    if tensor.bare:
        writer.persistent(pid)
        return
    writer.named("torch._utils", "_rebuild_tensor_v2" if name is not None else "_rebuild_tensor_v3")
    writer.out += b"("
    writer.persistent(pid)
    writer.integer(0)
    writer.write_tuple(tensor.shape)
    writer.write_tuple(boxes.row_major(tensor.shape))
    writer.write(False)
    writer.call("collections", "OrderedDict", ())
    if name is None:
        writer.named("torch", tensor.dtype.name)
    writer.out += b"tR"


@dataclass(frozen=True, slots=True)
class Wrapper:
    """What is written in the place of a tensor: `make()`, a stub that may have the tensor in it. `kind` is the same for
    tensors whose stubs are written alike, but for the key of the storage: `Wrapper(((29, 7), float32), make)`."""

    kind: Hashable
    make: Callable[[], Stub]


TensorOf = Callable[[Any], NewTensor | None]
WrapperOf = Callable[[Any], Wrapper | None]
_KEY = "<storage>"


class _TensorLeaves:
    """Writes tensors and their wrappers: a file of 4,000 sharded tensors says much the same 4,000 times, so of each
    kind it is spelt twice, and then repeated (35 s -> 8 s for 64 ranks)."""

    def __init__(self, tensor_of: TensorOf, wrapper_of: WrapperOf | None) -> None:
        self._tensor_of, self._wrapper_of = tensor_of, wrapper_of
        self._templates: dict[Hashable, list[bytes]] = {}  # what comes before the key of the storage, and after
        self._is_inside = False

    def __call__(self, writer: PickleWriter, value: Any) -> bool:
        wrapper = self._wrapper_of(value) if self._wrapper_of is not None and not self._is_inside else None
        if wrapper is not None:
            self._is_inside = True
            self._write_wrapper(writer, wrapper, value)
            self._is_inside = False
            return True
        tensor = self._tensor_of(value)
        if tensor is None:
            return False
        write_tensor(writer, replace(tensor, key=_KEY) if writer.frozen else tensor)
        writer.remember(value)
        return True

    def _write_wrapper(self, writer: PickleWriter, wrapper: Wrapper, value: Any) -> None:
        template = self._templates.get(wrapper.kind)
        if template is None:
            # What tensors share is in the memo after this.
            writer.write(wrapper.make())
            self._templates[wrapper.kind] = []
            return
        if not template:
            template = self._templates[wrapper.kind] = writer.apart(wrapper.make()).split(spelt_text(_KEY))
        writer.out += template[0]
        # A rank without rows may have no tensor there.
        for after in template[1:]:
            tensor = self._tensor_of(value)
            assert tensor is not None
            writer.out += spelt_text(tensor.key) + after


def dump(tree: Any, tensor_of: TensorOf, wrapper_of: WrapperOf | None = None) -> bytes:
    """Return a pickle of `tree` as torch.save writes it. `tensor_of` says for each value whether it is a tensor, and
    where; `wrapper_of`, for each tensor, what else is written there.

    A tensor that was written before is written with the same key, so that tensors go on sharing a storage.
    """
    return pickler.dump(tree, protocol=2, leaf=_TensorLeaves(tensor_of, wrapper_of))
