"""The table of element types: torch's short name, size, and the name in each format.

Sources: `torch.dtype` of torch 2.13; `torch/storage.py` for the storage classes; safetensors 0.8 `tensor.rs` for its
names. A dtype without a safetensors name cannot be written there.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpttool.errors import CorruptError


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dtype:
    """An element type, e.g. `Dtype("bfloat16", 2, "float", "BF16", "BFloat16Storage")`. `itemsize` is bytes per element
    of the tensor as torch counts elements. `word` is the size of the unit that is swapped between little and big endian
    (half an element for complex types). A dtype equals its name, `dtype("half") == "float16"`, and that of torch."""

    name: str
    itemsize: int
    kind: str  # float, int, bool, complex, quantized, bits
    safetensors: str | None = None
    storage: str | None = None  # the typed storage class of a torch.save pickle; None: untyped, `_rebuild_tensor_v3`

    @property
    def word(self) -> int:
        return self.itemsize // 2 if self.kind == "complex" else self.itemsize

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        if type(other).__module__ == "torch":
            return str(other) == f"torch.{self.name}"
        return self.name == (other.name if isinstance(other, Dtype) else other)

    def __hash__(self) -> int:
        return hash(self.name)


_TABLE = (
    Dtype("float64", 8, "float", "F64", "DoubleStorage"),
    Dtype("float32", 4, "float", "F32", "FloatStorage"),
    Dtype("float16", 2, "float", "F16", "HalfStorage"),
    Dtype("bfloat16", 2, "float", "BF16", "BFloat16Storage"),
    Dtype("float8_e4m3fn", 1, "float", "F8_E4M3"),
    Dtype("float8_e4m3fnuz", 1, "float", "F8_E4M3FNUZ"),
    Dtype("float8_e5m2", 1, "float", "F8_E5M2"),
    Dtype("float8_e5m2fnuz", 1, "float", "F8_E5M2FNUZ"),
    Dtype("float8_e8m0fnu", 1, "float", "F8_E8M0"),
    # Two 4-bit values in a byte: torch counts bytes, safetensors counts values (see safetensors_header).
    Dtype("float4_e2m1fn_x2", 1, "float", "F4"),
    Dtype("int64", 8, "int", "I64", "LongStorage"),
    Dtype("int32", 4, "int", "I32", "IntStorage"),
    Dtype("int16", 2, "int", "I16", "ShortStorage"),
    Dtype("int8", 1, "int", "I8", "CharStorage"),
    Dtype("uint8", 1, "int", "U8", "ByteStorage"),
    Dtype("uint16", 2, "int", "U16"),
    Dtype("uint32", 4, "int", "U32"),
    Dtype("uint64", 8, "int", "U64"),
    Dtype("bool", 1, "bool", "BOOL", "BoolStorage"),
    Dtype("complex32", 4, "complex"),
    Dtype("complex64", 8, "complex", "C64", "ComplexFloatStorage"),
    Dtype("complex128", 16, "complex", None, "ComplexDoubleStorage"),
    Dtype("qint8", 1, "quantized", None, "QInt8Storage"),
    Dtype("quint8", 1, "quantized", None, "QUInt8Storage"),
    Dtype("qint32", 4, "quantized", None, "QInt32Storage"),
    Dtype("quint4x2", 1, "quantized", None, "QUInt4x2Storage"),
    Dtype("quint2x4", 1, "quantized", None, "QUInt2x4Storage"),
    Dtype("bits16", 2, "bits"),
    *(Dtype(f"bits{bits}", 1, "bits") for bits in ("8", "1x8", "2x4", "4x2")),
    *(Dtype(f"{sign}int{bits}", 1, "int") for sign in ("", "u") for bits in range(1, 8)),
)

DTYPES: dict[str, Dtype] = {d.name: d for d in _TABLE}
BY_SAFETENSORS: dict[str, Dtype] = {d.safetensors: d for d in _TABLE if d.safetensors}
BY_STORAGE: dict[str, Dtype] = {d.storage: d for d in _TABLE if d.storage}

# The names that torch also accepts.
ALIASES = {
    "float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32", "short": "int16",
    "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32",
    "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64",
    "fp8": "float8_e4m3fn",
}  # fmt: skip


def dtype(name: str) -> Dtype:
    """Return the dtype called `name`, with or without `torch.` before it. Raises CorruptError for an unknown name."""
    short = name.removeprefix("torch.")
    match = DTYPES.get(ALIASES.get(short, short))
    if match is None:
        raise CorruptError(f"unknown dtype `{name}`", found=name)
    return match
