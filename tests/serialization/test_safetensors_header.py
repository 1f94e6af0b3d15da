"""Headers of safetensors files: every way in which one can lie, and writing them as safetensors does."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.catalogue.dtypes import BY_SAFETENSORS, dtype
from ckpttool.errors import CorruptError, LossError
from ckpttool.serialization import safetensors_header as stheader
from ckpttool.serialization.safetensors_header import HeaderEntry, Spec, build_header, looks_like, read_header

NAME = "`Model.safetensors`"


def blob(header: Any, payload: bytes = b"") -> bytes:
    # As libraries write it: what is wrong with such a header is found as with any other.
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + payload


def read(data: bytes, base: int = 0, length: int | None = None, **options: Any) -> stheader.Header:
    length = len(data) - base if length is None else length

    def at(offset: int, nbytes: int) -> bytes:
        assert base <= offset and offset + nbytes <= base + length, "reads outside what it was given"
        return data[offset : offset + nbytes]

    return read_header(at, base, length, name=NAME, **options)


def refuse(data: bytes, *words: str, **options: Any) -> CorruptError:
    with pytest.raises(CorruptError) as caught:
        read(data, **options)
    message = str(caught.value)
    assert message.startswith(f"{NAME}: ") and not message.endswith(".")
    for word in words:
        assert word in message, message
    return caught.value


def tensor(begin: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@given(
    st.dictionaries(
        st.text(max_size=4), st.tuples(st.sampled_from(["F32", "I8", "F4"]), st.lists(st.integers(0, 3), max_size=3))
    ),
    st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2) | st.none(),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_header_of_the_usual_spelling_is_read_as_any_other(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None, is_ascii: bool
) -> None:
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (kind, shape) in tensors.items():
        elements = math.prod(shape)
        end = at + (elements // 2 if kind == "F4" else elements * (4 if kind == "F32" else 1))
        table[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end

    def answer(**how: Any) -> object:
        try:
            header = json.dumps(table, ensure_ascii=is_ascii, **how).encode("utf-8", "surrogatepass")
            found = read(blob(header + b" " * (-len(header) % 256), bytes(at)))
        except CorruptError as error:
            return str(error).partition(" at byte")[0]
        assert all(found.tensors[name] == entry for name, entry in found.tensors.items())
        begin = found.payload
        rows = [(name, *entry[:2], entry.begin - begin, entry.end - begin) for name, entry in found.tensors.items()]
        return rows, len(found.tensors), found.metadata

    assert answer(separators=(",", ":")) == answer(separators=(" ,", ": "))


# Each way to lie ------------------------------------------------------------------------------------------------------


def test_too_short_for_a_length() -> None:
    refuse(b"\x08\0\0", "8 bytes of header length", "this has 3")


def test_header_not_an_object() -> None:
    refuse(blob([]), "begins with b'['")
    refuse(blob(b" {}"), "begins with b' '")
    refuse(blob(b""), "begins with b''")


def test_name_twice() -> None:
    one = json.dumps(tensor(0, 4))
    error = refuse(blob(f'{{"w": {one}, "v": {one}, "w": {one}}}'.encode(), bytes(4)), "names `w` twice")
    assert error.facts["tensor"] == "w"


def test_size_is_not_dtype_times_shape() -> None:
    data = blob({"w": tensor(0, 8, shape=[3])}, bytes(8))
    start = len(data) - 8
    error = refuse(data, f"8 bytes at {start}..{start + 8}, but float32 [3] needs 12")
    assert (error.facts["found"], error.facts["expected"]) == (8, 12)


def test_file_ends_before_the_tensors() -> None:
    data = blob({"a": tensor(0, 4), "b": tensor(4, 12)}, bytes(11))
    error = refuse(data, "tensor `b`", f"ends at byte {len(data) + 1}, but the file ends at {len(data)}")
    assert "truncated" in str(error.hint)


def test_bytes_after_the_tensors() -> None:
    data = blob({"a": tensor(0, 4)}, bytes(5))
    refuse(data, f"has {len(data)} bytes", f"end at {len(data) - 1}")
    assert read(data, exact=False).end == len(data) - 1


# Reading --------------------------------------------------------------------------------------------------------------


def test_reads_at_an_offset_inside_a_file() -> None:
    w = torch.arange(6.0).reshape(2, 3)
    data = safetensors.torch.save({"w": w}, {"format": "pt"})
    found = read(b"x" * 13 + data + b"yy", 13, len(data))
    assert found.metadata == {"format": "pt"}
    assert found.tensors == {"w": HeaderEntry(dtype("float32"), (2, 3), found.payload, found.payload + 24)}
    assert found.end == 13 + len(data)


def test_reads_tensors_in_the_order_of_their_bytes() -> None:
    data = blob({"b": tensor(4, 8), "e": tensor(4, 4), "a": tensor(0, 4), "m": tensor(8, 8)}, bytes(8))
    assert list(read(data).tensors) == ["a", "e", "b", "m"]


def test_no_tensors_and_null_metadata() -> None:
    assert read(blob({})).tensors == {}
    assert read(blob({"__metadata__": None})).metadata == {}


def test_looks_like() -> None:
    assert looks_like(safetensors.torch.save({}))
    assert looks_like(blob({"a": 1}))
    assert not looks_like(b"")
    assert not looks_like(b"PK\3\4" + b"{" * 20)
    assert not looks_like(struct.pack("<Q", 16) + b"[" * 20)


@settings(max_examples=300)
@given(st.binary(max_size=120), st.booleans())
def test_any_bytes_are_read_or_refused(data: bytes, framed: bool) -> None:
    data = blob(data) if framed else data
    try:
        read(data)
    except CorruptError:
        return
    # What we accept, upstream does.
    safetensors.torch.load(data)


# Writing --------------------------------------------------------------------------------------------------------------

UPSTREAM = [d for d in BY_SAFETENSORS.values() if hasattr(torch, d.name)]


def zeros(spec: Spec) -> torch.Tensor:
    nbytes = math.prod(spec.shape) * spec.dtype.itemsize
    return torch.zeros(nbytes, dtype=torch.uint8).view(getattr(torch, spec.dtype.name)).reshape(spec.shape)


def written(specs: list[Spec], metadata: dict[str, str] | None) -> bytes:
    head = build_header(specs, metadata)
    return head + bytes(sum(zeros(s).nbytes for s in specs))


def test_every_dtype_sorted_as_upstream() -> None:
    assert len(UPSTREAM) >= 20
    specs = [Spec(f"{p}.{d.name}", d, s) for p, s in (("b", (2, 3)), ("a", (4,)), ("c", (3, 0))) for d in UPSTREAM]
    specs += [Spec(f"scalar.{d.name}", d, ()) for d in UPSTREAM if d.safetensors != "F4"]
    expected = safetensors.torch.save({s.name: zeros(s) for s in specs}, {"format": "pt"})
    assert written(specs, {"format": "pt"}) == expected
    found = read(expected).tensors
    assert {(n, e.dtype, e.shape) for n, e in found.items()} == set(specs)


@settings(max_examples=100)
@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(UPSTREAM), st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)),
        max_size=6,
    ),
    st.one_of(st.none(), st.just({}), st.dictionaries(st.text(max_size=6), st.text(max_size=9), max_size=1)),
)
def test_same_bytes_as_upstream(table: dict[str, Any], metadata: dict[str, str] | None) -> None:
    specs = [Spec(name, d, shape) for name, (d, shape) in table.items()]
    # Upstream makes `{},"__metadata__":{}}` of nothing at all.
    if specs or metadata:
        assert written(specs, metadata) == safetensors.torch.save({s.name: zeros(s) for s in specs}, metadata)


def test_nothing_at_all_is_still_json() -> None:
    assert read(build_header([], {})).tensors == {}
    assert build_header([]) == safetensors.torch.save({})


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (Spec("w", dtype("complex128"), (2,)), "no dtype complex128"),
        (Spec("w", dtype("qint8"), (2,)), "no dtype qint8"),
        (Spec("__metadata__", dtype("float32"), (2,)), "for itself"),
        (Spec("\ud800", dtype("float32"), (2,)), "not UTF-8"),
        (Spec("w", dtype("float4_e2m1fn_x2"), ()), "no 0-d"),
    ],
)
def test_what_no_header_can_say(spec: Spec, why: str) -> None:
    with pytest.raises(LossError, match=why):
        build_header([spec])


@pytest.mark.parametrize("metadata", [{"a": "\ud800"}, {"\udfff" * 50: "a"}])
def test_metadata_that_is_not_utf8(metadata: dict[str, str]) -> None:
    with pytest.raises(LossError, match=r"`__metadata__` has .* not UTF-8") as caught:
        build_header([Spec("w", dtype("float32"), (2,))], metadata)
    caught.value.message.encode("ascii")


def test_two_tensors_of_one_name() -> None:
    with pytest.raises(LossError, match="two tensors would be called `w`"):
        build_header([Spec("w", dtype("float32"), (2,)), Spec("w", dtype("int8"), (2,))])


def test_header_that_upstream_could_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stheader, "MAX_HEADER", 100)
    with pytest.raises(LossError, match="more than the 100") as caught:
        build_header([Spec("w" * 100, dtype("float32"), (2,))])
    assert "--max-shard-size" in str(caught.value.hint)


def entry(name: str = "w", shape: str = "[2]", offsets: str = "[0,8]", more: str = "", inside: str = "") -> str:
    return f'{{{more}"{name}":{{{inside}"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}'


SPELT = [
    entry(),
    *(
        entry(name)
        for name in (r"\ud800", r"\udfff", r"\udc00\ud800", r"\ud83d\ude00", r"\\ud800", r"\u0077", "\\ud83d")
    ),
    *(entry(more=f'"__metadata__":{{{pair}}},') for pair in (r'"a":"\ud800"', r'"\udc00":"a"', r'"a":"\ud83d\ude00"')),
    *(
        entry(offsets=f"[{n},8]")
        for n in ["0", "-0", "0.0", "-0.0", "0e0", "00", "+0", "1e-400", "-1", "true", "null", str(1 << 64)]
    ),
    *(entry(offsets=f"[0,{n}]") for n in ["8", "8.0", "8e0", "08", "80e-1", "800e-2"]),
    *(entry(shape=f"[{n}]") for n in ["2", "2.0", "2e0", "02", "-2", "20e-1"]),
    *(entry(shape=shape, offsets="[0,0]") for shape in ("[0,5]", "[-0,5]", "[2,1,-0]", "[0,4611686018427387904]")),
    *(entry(shape=f"[{n},{n},0]", offsets="[0,0]") for n in (1 << 31, 1 << 32, 1 << 62)),
    *(entry(inside=f'"x":{value},') for value in ("-0", "1e999", "1e308", r'"\ud800"', "NaN", "{}")),
]


@pytest.mark.parametrize("text", SPELT)
def test_what_the_library_refuses(text: str) -> None:
    data = struct.pack("<Q", len(text)) + text.encode() + bytes(8 if text.find("[0,0]") < 0 else 0)
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        with pytest.raises(CorruptError):
            read_header(lambda at, n: data[at : at + n], 0, len(data), name="x")
    else:
        read_header(lambda at, n: data[at : at + n], 0, len(data), name="x")
