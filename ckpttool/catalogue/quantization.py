"""Quantised weights: told by the tensors that each is stored as, with a check that every weight has its scales. Pure.

A scheme is a row of the table: the weight's suffix and dtypes, the suffixes of its scales, and how many elements a
stored one holds. The scheme of `P.weight` is the first row whose companions are there.

Upstream: transformers 5 `integrations/finegrained_fp8.py`, compressed-tensors 0.20 `compressors/`, gpt-oss
`*_blocks`/`*_scales`, bitsandbytes 0.50 `functional.py` (`QuantState.as_dict`), AutoGPTQ and AutoAWQ `qlinear`,
ModelOpt `hf_quant_config.json`, torchao 0.18 `prototype/safetensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.errors import CorruptError
from ckpttool.text import plural, some

_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_PACKED = ("uint8", "int8", "int32")

Companions = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way of storing a quantised weight: ``Scheme("FP8", ".weight", _FP8, (".weight_scale",))``.

    `scales` are the suffixes that tell the scheme and that every weight must have; `optional` are others that belong
    to it. `elements` are those that one stored element holds, or a function of the weight and its companions.
    """

    name: str
    weight: str
    dtypes: tuple[str, ...]
    scales: tuple[str, ...]
    optional: tuple[str, ...] = ()
    elements: int | Callable[[Tensor, Companions, int], int] = 1

    def count(self, weight: Tensor, companions: Companions, bits: int) -> int:
        """Return the elements of the weight before it was quantised, to that many `bits` if the tensors do not tell."""
        if isinstance(self.elements, int):
            return weight.numel * self.elements
        return self.elements(weight, companions, bits)


def _of_zeros(weight: Tensor, companions: Companions, _: int) -> int:
    """Return the elements of a packed weight whose zero points are packed alike: GPTQ and AWQ of 2 to 8 bits."""
    zeros, scales = companions[".qzeros"], companions[".scales"]
    bits = 32 * zeros.numel / max(1, scales.numel)
    return round(weight.numel * 32 / bits) if bits >= 1 else weight.numel


def _of_int32(weight: Tensor, companions: Companions, bits: int) -> int:
    # Each row is padded to whole integers.
    return weight.numel * 32 // bits


_BNB = ".weight.quant_state.bitsandbytes__"
SCHEMES = (
    Scheme("MXFP4 blocks", "_blocks", ("uint8",), ("_scales",), elements=2),
    Scheme("GPTQ", ".qweight", ("int32",), (".qzeros", ".scales", ".g_idx"), elements=_of_zeros),
    Scheme("AWQ", ".qweight", ("int32",), (".qzeros", ".scales"), elements=_of_zeros),
    Scheme(
        "bitsandbytes 4-bit",
        ".weight",
        ("uint8", "bfloat16", "float16", "float32"),
        (".weight.absmax", ".weight.quant_map"),
        (".weight.nested_absmax", ".weight.nested_quant_map", f"{_BNB}nf4", f"{_BNB}fp4"),
        elements=lambda weight, *_: weight.nbytes * 2,
    ),
    Scheme("bitsandbytes 8-bit", ".weight", ("int8",), (".SCB",), (".weight_format",)),
    Scheme(
        "NVFP4", ".weight_packed", ("uint8",), (".weight_scale", ".weight_global_scale"), (".input_global_scale",), 2
    ),
    Scheme("MXFP4", ".weight_packed", ("uint8",), (".weight_scale",), elements=2),
    Scheme(
        "packed integers",
        ".weight_packed",
        ("int32",),
        (".weight_scale", ".weight_shape"),
        (".weight_zero_point", ".weight_g_idx"),
        _of_int32,
    ),
    Scheme("NVFP4 (ModelOpt)", ".weight", ("uint8",), (".weight_scale", ".weight_scale_2"), (".input_scale",), 2),
    Scheme("FP8 blocks", ".weight", _FP8, (".weight_scale_inv",), (".activation_scale",)),
    Scheme("FP8", ".weight", _FP8, (".weight_scale",), (".input_scale", ".weight_zero_point", ".weight_g_idx")),
    Scheme("int8", ".weight", ("int8",), (".weight_scale",), (".input_scale", ".weight_zero_point", ".weight_g_idx")),
    Scheme("torchao", "_weight_qdata", (*_FP8, *_PACKED), ("_weight_scale",), ("_weight_zero_point",)),
)
_COMPANIONS = tuple(dict.fromkeys(s for scheme in SCHEMES for s in (*scheme.scales, *scheme.optional)))
_WEIGHTS = tuple(dict.fromkeys(scheme.weight for scheme in SCHEMES))
# A tensor of these names alone is not a scale: `P.scales` may be a parameter of anything.
_SURE: tuple[str, ...] = (
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_scale",
    ".qzeros",
    ".SCB",
)
_SURE += (".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map")


@dataclass(slots=True)
class Quantization:
    """What was found: quantised weights with their schemes, those without all scales, and scales without a weight."""

    schemes: dict[str, Scheme] = field(default_factory=dict)  #: by the name of the weight
    elements: dict[str, int] = field(default_factory=dict)  #: those of each weight before it was quantised
    companions: set[str] = field(default_factory=set)  #: names of scales and the like that belong to a weight
    missing: dict[str, str] = field(default_factory=dict)  #: weight -> the scale that it lacks
    orphans: list[str] = field(default_factory=list)  #: scales without a weight
    misfits: dict[str, str] = field(default_factory=dict)  #: scale -> what does not fit


def analyse(catalogue: Catalogue, config: Mapping[str, Any]) -> Quantization:
    """Return the quantised weights of a catalogue; `config` is the `quantization_config` of its `config.json`. Pure."""
    # What is inside an object is found by it: `Int8Params` with its own scale.
    tensors = {t.name: t for t in catalogue.tensors if t.part.kind == "model" and not t.embedded}
    result = Quantization()
    bases: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith(_COMPANIONS):
            suffix = next(s for s in _COMPANIONS if name.endswith(s))
            bases.setdefault(name.removesuffix(suffix), {})[suffix] = tensor
    for base, companions in bases.items():
        if not _assign(result, base, companions, tensors, config):
            result.orphans += [companions[s].name for s in companions if s in _SURE]
    if result.schemes:
        _add_missing(result, bases, tensors)
    return result


def _assign(
    result: Quantization, base: str, companions: Companions, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> bool:
    """Find the scheme of the weight whose companions these are; whether there is a weight."""
    partly = None
    for scheme in SCHEMES:
        weight = tensors.get(base + scheme.weight)
        if weight is None or weight.dtype.name not in scheme.dtypes:
            continue
        if all(suffix in companions for suffix in scheme.scales):
            result.schemes[weight.name] = scheme
            result.elements[weight.name] = scheme.count(weight, companions, _bits(config))
            known = {*scheme.scales, *scheme.optional}
            result.companions |= {companions[s].name for s in companions if s in known}
            _check_blocks(result, scheme, weight, companions, config)
            return True
        if partly is None and any(suffix in companions for suffix in scheme.scales):
            partly = scheme, weight
    if partly is None:
        return any(base + suffix in tensors for suffix in _WEIGHTS)
    scheme, weight = partly
    result.schemes[weight.name] = scheme
    result.elements[weight.name] = weight.numel
    result.companions |= {tensor.name for tensor in companions.values()}
    result.missing[weight.name] = base + next(s for s in scheme.scales if s not in companions)
    return True


def _bits(config: Mapping[str, Any]) -> int:
    """Return the bits of a quantised weight: `bits`, or those of the first group of compressed-tensors, else 4."""
    groups = config.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    bits = weights.get("num_bits") if isinstance(weights, dict) else config.get("bits", config.get("num_bits"))
    return bits if isinstance(bits, int) and 1 <= bits <= 32 else 4


def _add_missing(result: Quantization, bases: Mapping[str, Companions], tensors: Mapping[str, Tensor]) -> None:
    """Add weights of a quantised dtype that have no companion at all, where others of the checkpoint have some."""
    used = dict.fromkeys(result.schemes.values())
    for name, tensor in tensors.items():
        for scheme in used:
            base = name.removesuffix(scheme.weight)
            is_sure = scheme.weight != ".weight" or tensor.dtype.name in _FP8
            if base != name and name not in result.schemes and base not in bases and is_sure:
                if tensor.dtype.name in scheme.dtypes:
                    result.schemes[name], result.elements[name] = scheme, tensor.numel
                    result.missing[name] = base + scheme.scales[0]
                break


def _check_blocks(
    result: Quantization, scheme: Scheme, weight: Tensor, companions: Companions, config: Mapping[str, Any]
) -> None:
    """Compare the number of scales with the blocks of the weight, where the scheme says it."""
    if scheme.name == "MXFP4 blocks":
        scales = companions["_scales"]
        expected = weight.shape[:-1]
    elif scheme.name == "FP8 blocks":
        scales = companions[".weight_scale_inv"]
        block = config.get("weight_block_size")
        sizes = [n for n in block if type(n) is int and n > 0] if isinstance(block, list) else []
        if len(sizes) != 2:
            sizes = [128, 128]
        if len(weight.shape) != 2 or len(scales.shape) != 2:
            return
        expected = tuple(-(-n // size) for n, size in zip(weight.shape, sizes, strict=True))
    else:
        return
    if scales.shape != expected:
        found = f"{list(scales.shape)} for a weight of {list(weight.shape)}, where {list(expected)} belong"
        result.misfits[scales.name] = found


def faults(found: Quantization) -> list[CorruptError]:
    """Return an error for each kind of fault: weights without scales, scales without weights, scales of another
    number of blocks. Pure."""
    errors = []
    if found.missing:
        (weight, scale), *_ = found.missing.items()
        errors.append(
            CorruptError(
                f"{plural(len(found.missing), 'quantised weight')} without its scale: {some([*found.missing])}; "
                f"`{scale}` belongs to the first",
                hint="take another copy of the checkpoint, or quantise the model again",
                tensor=weight,
                expected=scale,
            )
        )
    if found.orphans:
        text = f"{plural(len(found.orphans), 'scale')} without a weight: {some(found.orphans)}"
        hint = "the weight is in another file, or it was dropped and its scale was not"
        errors.append(CorruptError(text, hint=hint, tensor=found.orphans[0]))
    if found.misfits:
        (scale, said), *_ = found.misfits.items()
        does = "does" if len(found.misfits) == 1 else "do"
        text = f"{plural(len(found.misfits), 'scale')} that {does} not fit: `{scale}` is {said}"
        errors.append(CorruptError(text, tensor=scale))
    return errors
