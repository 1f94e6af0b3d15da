"""A safetensors header at (file, offset), both ways.

    [u64 LE: n][n bytes of JSON, padded with spaces][payload: every tensor, row-major, little endian, no gaps]
    {"__metadata__": {str: str}, name: {"dtype": "F32", "shape": [64, 13], "data_offsets": [begin, end]}, ...}

Upstream: safetensors 0.8 `tensor.rs` (`prepare` writes, `read_metadata` and `validate` read). Offsets count from the
start of the payload. torch's own writers (DCP's `SerializationFormat.SAFETENSORS`, `HuggingFaceStorageWriter`) make
the same; its consolidation neither pads nor sorts.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from math import isinf, prod
from operator import mul
from typing import Any, NamedTuple

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import BY_SAFETENSORS, Dtype
from ckpttool.catalogue.entries import check_shape
from ckpttool.catalogue.shown import shown, spelt
from ckpttool.catalogue.work_limit import working
from ckpttool.errors import CorruptError, LossError
from ckpttool.serialization import other_files, strict_json
from ckpttool.text import cut, literal

Read = Callable[[int, int], bytes]
"""`read(offset, nbytes)` of the file that the header lies in, absolute offsets."""

MAX_HEADER = 100_000_000  # upstream's MAX_HEADER_SIZE: a longer one cannot be opened there
METADATA = "__metadata__"

# The enum of `tensor.rs`, which is sorted by alignment; files hold their tensors in descending order of it.
_ORDER = """BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 U32 F32
    C64 F64 I64 U64"""
_RANK = {name: -n for n, name in enumerate(_ORDER.split())}
_INTEGERS = {int}
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # a surrogate, half of a pair or alone
_LENGTH = struct.Struct("<Q")
_MAX_SHAPE = 1000  # bytes of a usual one
_TRUNCATED = "the file is truncated or still being written"


class HeaderEntry(NamedTuple):
    """A tensor of the header: `HeaderEntry(float32, (64, 13), 4096, 7424)`; begin and end are absolute in the file.
    `crc` is the CRC-32 of its bytes if the writer left one, which is not for a header to know."""

    dtype: Dtype
    shape: Ints
    begin: int
    end: int
    crc: int | None = None


class Header(NamedTuple):
    """A header that was read and found true: `Header({"w": HeaderEntry(...)}, {"format": "pt"}, 4096, 7424)`. `tensors`
    are in the order of their bytes; `payload` and `end` are where those begin and end, absolute."""

    tensors: Mapping[str, HeaderEntry]
    metadata: dict[str, str]
    payload: int
    end: int


_Kind = tuple[Dtype, Ints, int]  # of a tensor: its dtype, shape and bytes
_tuple: Any = tuple.__new__


class _Tiling(Mapping[str, HeaderEntry]):
    """Tensors whose bytes follow each other from `begin` on. Of a million, which have few kinds, an entry is made when
    it is asked for."""

    def __init__(self, kinds: dict[str, _Kind], begin: int) -> None:
        self._kinds, self._begin = kinds, begin
        self._begins: dict[str, int] = {}  # once one is asked for by its name

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def __getitem__(self, name: str) -> HeaderEntry:
        if not self._begins:
            begins = accumulate((nbytes for _, _, nbytes in self._kinds.values()), initial=self._begin)
            self._begins = dict(zip(self._kinds, begins, strict=False))
        dtype, shape, nbytes = self._kinds[name]
        begin = self._begins[name]
        return HeaderEntry(dtype, shape, begin, begin + nbytes)

    def items(self) -> ItemsView[str, HeaderEntry]:
        return _TilingItems(self)

    def pairs(self) -> Iterator[tuple[str, HeaderEntry]]:
        """Yield the names with their entries, in the order of their bytes."""
        at = self._begin
        for name, (dtype, shape, nbytes) in self._kinds.items():
            begin, at = at, at + nbytes
            yield name, _tuple(HeaderEntry, (dtype, shape, begin, at, None))


class _TilingItems(ItemsView[str, HeaderEntry]):
    _mapping: _Tiling

    def __iter__(self) -> Iterator[tuple[str, HeaderEntry]]:
        return self._mapping.pairs()


class Spec(NamedTuple):
    """A tensor to be written: `Spec("w", float32, (64, 13))`."""

    name: str
    dtype: Dtype
    shape: Ints

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


# Reading --------------------------------------------------------------------------------------------------------------


def looks_like(head: bytes) -> bool:
    """Return whether a file that begins with these nine bytes or more is a safetensors file."""
    return len(head) > 8 and head[8:9] == b"{" and 2 <= _LENGTH.unpack_from(head)[0] <= MAX_HEADER


def read_header(read: Read, base: int, length: int, *, name: str, exact: bool = True) -> Header:
    """Return the header of the safetensors file in the `length` bytes at `base`. `name` goes before each message as it
    is. With `exact` the payload ends where the bytes do, as in a file of its own; without, other data may follow.
    Raises CorruptError when the header lies about anything."""
    text, payload = _read_text(read, base, length, name)
    if text[:1] != b"{":
        message = f"{name}: the header begins with {shown(text[:1])}, not with `{{`"
        raise CorruptError(message, hint="this may not be a safetensors file")
    tensors, metadata, end = _usual(text, payload) or _parsed(text, payload, name)
    limit = base + length
    if end > limit:
        last = next(tensor for tensor, entry in tensors.items() if entry.end > limit)
        message = f"{name}: tensor `{last}` ends at byte {tensors[last].end}, but the file ends at {limit}"
        raise CorruptError(message, hint=_TRUNCATED, tensor=last, found=limit, expected=end)
    if exact and end < limit:
        message = f"{name}: the file has {limit} bytes, but the tensors in its header end at {end}"
        hint = "something was appended to the file, or its header was changed"
        raise CorruptError(message, hint=hint, found=limit, expected=end)
    return Header(tensors, metadata, payload, end)


def _read_text(read: Read, base: int, length: int, name: str) -> tuple[bytes, int]:
    if length < _LENGTH.size:
        message = f"{name}: a safetensors file begins with 8 bytes of header length, but this has {length}"
        raise CorruptError(message, hint=_TRUNCATED, found=length, expected=_LENGTH.size)
    (size,) = _LENGTH.unpack(read(base, _LENGTH.size))
    if size > MAX_HEADER:
        if (known := other_files.begins_as(read(base, min(length, other_files.HEAD)))) is not None:
            what, hint = known
            raise CorruptError(f"{name}: {what}", hint=hint, found=what)
        message = f"{name}: a header of {size} bytes is more than the {MAX_HEADER} that safetensors allows"
        raise CorruptError(message, hint="this may not be a safetensors file", found=size, expected=MAX_HEADER)
    payload = base + _LENGTH.size + size
    if payload > base + length:
        message = f"{name}: a header of {size} bytes ends at {payload}, but the file ends at {base + length}"
        raise CorruptError(message, hint=_TRUNCATED, found=base + length, expected=payload)
    return read(base + _LENGTH.size, size), payload


# How libraries write a tensor, and metadata before the first one. A million tensors take a sixth of the time of JSON.
_SIZE = rb"(0|[1-9]\d{0,17})"
_USUAL = re.compile(
    rb'[{,]"([^"\\\x00-\x1f]+)":{("dtype":"(\w+)","shape":\[([\d,]*)]),"data_offsets":\[%b,%b]}' % (_SIZE, _SIZE)
)
_USUAL_METADATA = re.compile(rb'{"__metadata__":({(?:"[^"\\]*(?:\\.[^"\\]*)*"[:,]?)*})(?=,)')
_SIZES = re.compile(rb"|(?:0|[1-9]\d*)(?:,(?:0|[1-9]\d*))*")


_Parsed = tuple[Mapping[str, HeaderEntry], dict[str, str], int]  # with the end of the payload


def _usual(text: bytes, payload: int) -> _Parsed | None:
    """Return the tensors and the metadata of a header as libraries write it, in the order of their bytes, or None for
    any other: what `_parsed` returns for it, or the error that it raises, counts."""
    head, metadata, at = _USUAL_METADATA.match(text), dict[str, str](), 0
    tensors: dict[str, _Kind] = {}
    known: dict[bytes, _Kind] = {}
    count = filled = 0
    try:
        if head is not None:
            metadata, at = _parse(head[1], ""), head.end()
        for match in _USUAL.finditer(text, at):
            if match.start() != at:
                return None
            at, count = match.end(), count + 1
            name, looks, dtype, shape, first, last = match.groups()
            kind = known.get(looks) or known.setdefault(looks, _kind(dtype, shape))
            if int(first) != filled or int(last) != filled + kind[2]:
                return None
            filled += kind[2]
            tensors[name.decode()] = kind
    except (CorruptError, KeyError, UnicodeDecodeError):
        return None
    is_usual = len(tensors) == count and METADATA not in tensors and text[at:].rstrip(b" ") == b"}"
    with working(len(text)):
        return (_Tiling(tensors, payload), metadata, payload + filled) if is_usual and count else None


def _kind(dtype: bytes, shape: bytes) -> _Kind:
    if _SIZES.fullmatch(shape) is None or len(shape) > _MAX_SHAPE:
        raise CorruptError("no list of sizes")
    name = dtype.decode()
    return BY_SAFETENSORS[name], *_measured(name, tuple(map(int, shape.split(b","))) if shape else ())


def _parsed(text: bytes, payload: int, name: str) -> _Parsed:
    """Return the tensors and the metadata of any header. Raises CorruptError."""
    table = _parse(text, f"{name}: the header")
    metadata = {} if table.get(METADATA) is None else table[METADATA]
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptError(f"{name}: `{METADATA}` in the header is not an object of strings")
    tensors = {tensor: _entry(tensor, info, payload, name) for tensor, info in table.items() if tensor != METADATA}
    # Writers need not list tensors in the order of their bytes.
    if not _is_tiling(tensors.values(), payload):
        tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    return tensors, metadata, _check_tiling(tensors, payload, name)


def _parse(text: bytes, what: str) -> dict[str, Any]:
    """Return the table of a header. Raises CorruptError, also for what upstream's parser (serde_json) does not read:
    -0 for an integer, a number that is too large for a float, half a character."""
    hooks: dict[str, Any] = {"parse_float": _finite}
    if b"-0" in text:
        hooks["parse_int"] = lambda digits: -0.0 if digits == "-0" else int(digits)
    table: dict[str, Any] = strict_json.parse(text, what, **hooks)
    if _HALF.search(text) is not None:
        try:
            json.dumps(table, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = literal(error.object[error.start])
            message = f"{what} has {half}, half a character, but names and values must be UTF-8"
            raise CorruptError(message, hint="safetensors cannot read it either", found=half) from None
    return table


def _finite(digits: str) -> float:
    if isinf(number := float(digits)):
        raise CorruptError(f"has the number {digits:.40}, which is too large")
    return number


def _is_ints(value: Any) -> bool:
    # JSON's true is an int to Python, and 1.0 is equal to one.
    return isinstance(value, list) and {*map(type, value)} <= _INTEGERS and (not value or min(value) >= 0)


def _entry(tensor: str, info: Any, payload: int, name: str) -> HeaderEntry:
    try:
        return _parse_entry(info, payload)
    except CorruptError as error:
        raise error.prefixed(f"{name}: tensor `{tensor}`", tensor=tensor) from None


def _parse_entry(info: Any, payload: int) -> HeaderEntry:
    if not isinstance(info, dict):
        raise CorruptError("its entry in the header is not an object")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in info:
            raise CorruptError(f"has no `{key}` in the header", expected=key)
    dtype_name, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    dtype = BY_SAFETENSORS.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CorruptError(f"unknown dtype `{cut(spelt(dtype_name), 80)}`", found=dtype_name)
    if not _is_ints(shape):
        raise CorruptError(f"its shape {shown(shape)} is not a list of sizes", found=shape)
    if not _is_ints(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptError(f"its data_offsets {shown(offsets)} are not a begin and an end", found=offsets)
    sizes, nbytes = _measured(dtype_name, tuple(shape))
    begin, end = payload + offsets[0], payload + offsets[1]
    if end - begin != nbytes:
        message = f"{end - begin} bytes at {begin}..{end}, but {dtype} {shape} needs {nbytes}"
        raise CorruptError(message, found=end - begin, expected=nbytes)
    return HeaderEntry(dtype, sizes, begin, end)


@lru_cache(4096)
def _measured(dtype_name: str, shape: Ints) -> tuple[Ints, int]:
    """Return the sizes of a tensor and its bytes. Raises CorruptError if there can be no such tensor."""
    dtype = BY_SAFETENSORS[dtype_name]
    check_shape(shape)
    if max(accumulate(shape, mul), default=0) >= 1 << 64:  # before a size of 0 makes it none
        raise CorruptError(f"the sizes {[*shape]} overflow 64 bits, multiplied in order")
    if dtype.safetensors == "F4":
        # torch counts the bytes of a float4_e2m1fn_x2 tensor, two values each, where safetensors counts values along
        # the last dimension (`bindings/python/src/lib.rs` doubles and halves it).
        if not shape or shape[-1] % 2:
            raise CorruptError(f"an odd number of 4-bit values in the last dimension of {[*shape]}")
        shape = (*shape[:-1], shape[-1] // 2)
    return shape, prod(shape) * dtype.itemsize


def _is_tiling(entries: Iterable[HeaderEntry], payload: int) -> bool:
    """Return whether each begins where the one before ends, which is the order of their bytes."""
    at = payload
    for entry in entries:
        if entry.begin != at:
            return False
        at = entry.end
    return True


def _check_tiling(tensors: Mapping[str, HeaderEntry], payload: int, name: str) -> int:
    at, before = payload, "the header"
    for tensor, entry in tensors.items():
        if entry.begin != at:
            fault = "overlaps" if entry.begin < at else f"leaves a hole of {entry.begin - at} bytes after"
            message = f"{name}: tensor `{tensor}` begins at byte {entry.begin}, not {at}: it {fault} {before}"
            hint = "the header was changed after it was written"
            raise CorruptError(message, hint=hint, tensor=tensor, found=entry.begin, expected=at)
        at, before = entry.end, f"`{tensor}`"
    return at


# Writing --------------------------------------------------------------------------------------------------------------

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def why_not(name: str, dtype: Dtype, shape: Ints) -> str | None:
    """Return why no safetensors file can hold this tensor, or None. Pure."""
    if dtype.safetensors is None:
        return f"safetensors has no dtype {dtype}"
    if name == METADATA:
        return f"safetensors keeps the name `{METADATA}` for itself"
    if not shape and dtype.safetensors == "F4":
        return f"safetensors has no 0-d {dtype}"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    return None


def build_header(
    tensors: Iterable[Spec], metadata: Mapping[str, str] | None = None, *, keep_order: bool = False
) -> bytes:
    """Return the length and the header of a file of these tensors, byte for byte as safetensors 0.8 writes them.
    Tensors are sorted as upstream sorts them, or with `keep_order` as little as alignment demands: that is the order of
    the payload. Upstream shuffles the keys of `metadata`; here they keep theirs. Raises LossError for what a header
    cannot say."""
    rows = [f"{json.dumps(METADATA)}:{_json(dict(metadata))}"] if metadata is not None else []
    names, known = set[str](), dict[tuple[Dtype, Ints], str]()
    at = 0
    for spec in _aligned(list(tensors)) if keep_order else sorted(tensors, key=lambda t: (_rank(t), t.name)):
        name, dtype, shape = spec
        if why := why_not(name, dtype, shape):
            raise LossError(f"tensor `{name}` {dtype} {list(shape)} cannot be written: {why}", tensor=name)
        if name in names:
            raise LossError(f"two tensors would be called `{name}`", tensor=name)
        names.add(name)
        end = at + spec.nbytes
        kind = known.get((dtype, shape))
        if kind is None:
            sizes = (*shape[:-1], shape[-1] * 2) if dtype.safetensors == "F4" else shape
            kind = known[dtype, shape] = _json({"dtype": dtype.safetensors, "shape": sizes})[:-1]
        rows.append(f'{_json(name)}:{kind},"data_offsets":[{at},{end}]}}')
        at = end
    try:
        text = f"{{{','.join(rows)}}}".encode()
    except UnicodeEncodeError as error:
        # Names are UTF-8, or `why_not` says so. JSON can spell half a character, and safetensors does not read it back.
        excerpt = literal(error.object[max(error.start - 20, 0) : error.start + 20])
        message = f"`{METADATA}` has {excerpt}, which is not UTF-8"
        raise LossError(message, hint="torch and DCP keep no such metadata: convert to one of them") from None
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        message = f"a header of {len(text)} bytes is more than the {MAX_HEADER} that safetensors can read back"
        raise LossError(message, hint="pass a smaller `--max-shard-size`", found=len(text), expected=MAX_HEADER)
    return _LENGTH.pack(len(text)) + text


def _rank(spec: Spec) -> int:
    return _RANK.get(spec.dtype.safetensors or "", 0)


def _aligned(tensors: list[Spec]) -> list[Spec]:
    """Return the tensors as they are if each begins at a multiple of its element size; otherwise by dtype. torch views
    bytes as elements of no other place."""
    begins = accumulate((spec.nbytes for spec in tensors), initial=0)
    fits = all(at % spec.dtype.itemsize == 0 for at, spec in zip(begins, tensors, strict=False))
    return tensors if fits else sorted(tensors, key=_rank)
