"""Adapters of PEFT: taken out of the model that was trained, under the names that `save_pretrained` gives them, and
compared with `adapter_config.json`. Pure.

    model.q_proj.lora_A.default.weight           -> base_model.model.model.q_proj.lora_A.weight
    lm_head.modules_to_save.default.weight       -> base_model.model.lm_head.weight
    embed_tokens.token_adapter.trainable_tokens_delta.default -> .. without `.default`
    prompt_encoder.default.embedding.weight      -> prompt_embeddings

Upstream: peft 0.21 `utils/save_and_load.py`, `_get_adapter_state_dict` of `tuners/*/model.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.shown import shown
from ckpttool.errors import CorruptError, LossError, UsageError
from ckpttool.layout import select
from ckpttool.layout.rename import rename_entries
from ckpttool.models.assets import ADAPTER
from ckpttool.models.module_patterns import ModulePatterns
from ckpttool.text import some

# The parameters of the methods whose files are the trained tensors, as they are.
_METHODS = {
    "ADALORA": r"lora_[ABE]",
    "LORA": r"lora_(?:[AB]|embedding_[AB]|magnitude_vector)",
    "IA3": r"ia3_l",
    "LOHA": r"hada_(?:w[12]_[ab]|t[12])",
    "LOKR": r"lokr_(?:w[12](?:_[ab])?|t2)",
    "VERA": r"vera_lambda_[bd]",
    "OFT": r"oft_R",
    "BOFT": r"boft_[Rs]",
    "HRA": r"hra_u",
    "LN_TUNING": r"ln_tuning_layers",
    "MISS": r"miss_block",
    "FOURIERFT": r"fourierft_spectrum",
    "TRAINABLE_TOKENS": r"trainable_tokens_delta",
}
_PROMPTS = ("PROMPT_TUNING", "PREFIX_TUNING")
_PARAMETER = re.compile(
    rf"(?:(?P<module>.*)\.)?(?P<kind>{'|'.join(_METHODS.values())})(?:\.(?!(?:weight|bias)$)(?P<adapter>[^.]+))?"
    r"(?P<end>\.weight|\.bias)?"
)
# What other methods add to a model, and what any leaves in the names of the layers that it wraps.
_FOREIGN = re.compile(
    r"(?:^|\.)(?:(?:adamss|beft|boft|c3a|deft|delora|fourierft|frod|glora|gralora|hada|hira|hra|ia3|lily|lokr|lora|miss|oft|"
    r"osf|peanut|poly|psoft|pvera|randlora|road|shadow|shira|supertuning|tinylora|unilora|vblora|vera|waveft)_[A-Za-z]\w*|"
    r"adaption_(?:prompt|gate)|internal_xlora_classifier|"
    # Models that segment images have a `prompt_encoder` of their own, with other parts.
    r"prompt_encoder\.[^.]+\.(?:(?:delta_)?embedding|lstm_head|mlp_head|transform|prefix_task_(?:cols|rows)))(?:\.|$)"
)
_WRAPPED = re.compile(r"\.(?:base_layer|modules_to_save|original_module|token_adapter)\.")
_SAVED_TOO = re.compile(r"(?P<module>.*)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.*)")
_PROMPT = re.compile(r"(?:.*\.)?prompt_encoder\.(?P<adapter>[^.]+)\.embedding\.weight")
_PROJECTION = re.compile(r"(?:base_model\.)?(?P<kind>vera_[AB])(?:\.(?P<adapter>[^.]+))?")
# Of the frozen, what PEFT saves all the same: embeddings that are adapted.
_EMBEDDING = re.compile(r".*(?:embed_tokens|lm_head)\.base_layer\.[^.]+")
_UNUSED = re.compile(r"(?:.*\.)?(?:ranknum|vera_[AB])(?:\.[^.]+)?")
_ROOT = "base_model.model."
_HEADS = {"classifier", "score"}  # PEFT lists both for a classifier that has one of them
_TYPES: dict[str, tuple[type, ...]] = {
    "target_modules": (str, list),
    "modules_to_save": (list,),
    "layers_to_transform": (int, list),
    "rank_pattern": (dict,),
}
_RANKS = {"lora_A": 0, "lora_embedding_A": 0, "hada_w1_a": 1, "hra_u": 1, "miss_block": 0, "vera_lambda_d": 0}


def without_base(planned: Catalogue, config: Mapping[str, Any] | None) -> tuple[Catalogue, str]:
    """Return the adapter alone, with PEFT's names, and its method, `LORA`; or the model as it is, and an empty text.

    Raises UsageError when there are several adapters, and LossError for one that cannot be exported.
    """
    outer = _outer([tensor.name for tensor in planned.tensors])
    inner = rename_entries(planned, lambda name: name.removeprefix(outer)) if outer else planned
    names = [tensor.name for tensor in inner.tensors]
    if names == ["prompt_embeddings"]:
        return planned, str((config or {}).get("peft_type", _PROMPTS[0]))
    matches = {name: match for name in names if (match := _PARAMETER.fullmatch(name)) is not None}
    prompts = {name: match for name in names if (match := _PROMPT.fullmatch(name)) is not None}
    foreign = [n for n in names if _FOREIGN.search(n) and not (n in matches or n in prompts or _UNUSED.fullmatch(n))]
    wrapped = [name for name in names if _WRAPPED.search(name)]
    if foreign or (wrapped and not matches):
        raise _refused(foreign or wrapped, config, "its tensors are not those of a method whose export is known")
    if not matches and not prompts:
        return planned, ""
    adapter = _one_of(
        [m["adapter"] for m in (*matches.values(), *prompts.values())]
        + [m["adapter"] for name in names if (m := _SAVED_TOO.fullmatch(name))]
    )
    method = _method(matches, config)
    renamed: dict[str, str] = {}
    is_saved = adapter is None and all(name.startswith("base_model.") for name in names)
    for name in names:
        new = name if is_saved else _as_peft(name, method, config or {})
        if new is not None:
            renamed[name] = new
    if method == "ADALORA" and (config or {}).get("rank_pattern") is not None:
        raise _refused(
            [*matches], config, f"`rank_pattern` of `{ADAPTER}` leaves rows out, which PEFT does when it saves"
        )
    if method == "VERA" and (config or {}).get("save_projection", True) and "base_model.vera_A" not in renamed.values():
        raise _refused([*matches], config, "`base_model.vera_A` and `vera_B` are not in the checkpoint")
    adapter_alone = select.select(inner, lambda entry: entry.name in renamed)
    return rename_entries(adapter_alone, lambda name: renamed[name]), method


def _outer(names: Sequence[str]) -> str:
    """Return the keys above the model that all names begin with: `app.model.` of an application's state."""
    before = {match[1] for name in names if (match := re.match(r"((?:[^.]+\.)*?)base_model\.", name))}
    first = before.pop() if len(before) == 1 else "app.model."
    return first if all(name.startswith(first) for name in names) else ""


def _one_of(found: Sequence[str | None]) -> str | None:
    adapters = sorted({name for name in found if name is not None})
    if len(adapters) > 1:
        raise UsageError(
            f"there are {len(adapters)} adapters, and one can be exported: {some(adapters)}",
            hint=f"exclude the others: `--exclude '*.{adapters[1]}.*'`",
            found=adapters,
        )
    return adapters[0] if adapters else None


def _refused(names: Sequence[str], config: Mapping[str, Any] | None, why: str) -> LossError:
    kind = str((config or {}).get("peft_type", "unknown"))
    return LossError(
        f"an adapter of PEFT (type {kind}) cannot be exported: {why}: {some(names, 4)}",
        hint="load it with PEFT and call `save_pretrained`; `ckpttool convert` keeps all tensors as they are",
        found=list(names),
    )


def _method(matches: Mapping[str, re.Match[str]], config: Mapping[str, Any] | None) -> str:
    kinds = {match["kind"] for match in matches.values() if not (match["module"] or "").endswith("token_adapter")}
    if not kinds:
        kind = (config or {}).get("peft_type")
        return str(kind) if matches or kind in _PROMPTS else _PROMPTS[0]
    methods = [
        method
        for method, pattern in _METHODS.items()
        if all(re.fullmatch(pattern, kind) for kind in kinds) and (method != "ADALORA" or "lora_E" in kinds)
    ]
    if len(methods) != 1:
        raise _refused([*matches], config, "its tensors are of several methods")
    return methods[0]


def _as_peft(name: str, method: str, config: Mapping[str, Any]) -> str | None:
    """Return the name in PEFT's file; None for a tensor of the base model."""
    if _PROMPT.fullmatch(name):
        return "prompt_embeddings"
    if (match := _PROJECTION.fullmatch(name)) and method == "VERA":
        return f"base_model.{match['kind']}" if config.get("save_projection", True) else None
    if match := _PARAMETER.fullmatch(name):
        end = "" if match["kind"] == "lora_magnitude_vector" else match["end"] or ""
        return _rooted(f"{match['module']}.{match['kind']}{end}")
    if match := _SAVED_TOO.fullmatch(name):
        return _rooted(f"{match['module']}.{match['rest']}")
    bias, targets = str(config.get("bias", "none")), config.get("target_modules")
    if (bias == "all" and name.endswith(".bias")) or (bias.endswith("_only") and name.endswith(".base_layer.bias")):
        return None if ".original_module." in name else _rooted(name)
    tokens = method == "TRAINABLE_TOKENS" or config.get("trainable_token_indices") is not None
    is_adapted = isinstance(targets, list) and bool({"embed_tokens", "lm_head"} & set(map(str, targets)))
    return _rooted(name) if is_adapted and not tokens and _EMBEDDING.fullmatch(name) else None


def _rooted(name: str) -> str:
    return name if name.startswith(_ROOT) else _ROOT + name


def check(planned: Catalogue, method: str, config: Mapping[str, Any], where: str) -> None:
    """Raise CorruptError unless the tensors of an adapter are those that `adapter_config.json` describes."""
    shapes = {tensor.name: tensor.shape for tensor in planned.tensors}
    try:
        _check_types(config)
        differences = list(islice(_differences(shapes, method, config), 1))
    except CorruptError as error:
        raise error.prefixed(f"`{where}`", file=where) from None
    for what, found, expected in differences:
        raise CorruptError(
            f"`{where}` is not the config of this adapter: {what}: found {found}, expected {expected}",
            hint="pass the `adapter_config.json` of the training with `--assets`; `--no-strict` exports anyway",
            file=where,
            found=found,
            expected=expected,
        )


def _check_types(config: Mapping[str, Any]) -> None:
    """Raise CorruptError for a field that is not of the type that PEFT gives it."""
    for key, kinds in _TYPES.items():
        value = config.get(key)
        if value is not None and not isinstance(value, kinds):
            raise CorruptError(f"`{key}` is {shown(value)}, which PEFT does not write", found=shown(value))
    for key, kind in (("target_modules", str), ("modules_to_save", str), ("layers_to_transform", int)):
        value = config.get(key)
        if isinstance(value, list) and not all(isinstance(one, kind) for one in value):
            raise CorruptError(f"`{key}` has {shown(value)}, which PEFT does not write", found=shown(value))


def _differences(shapes: Mapping[str, Ints], method: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what the tensors have, and what the config says."""
    if config.get("peft_type") != method:
        yield "`peft_type` of the tensors", method or "no adapter", config.get("peft_type")
        return
    if "prompt_embeddings" in shapes:  # all that PEFT saves of those that add to the input
        rows = shapes["prompt_embeddings"][:1]
        if rows != (config.get("num_virtual_tokens"),):
            yield "rows of `prompt_embeddings`", list(rows), config.get("num_virtual_tokens")
        return
    kinds: dict[str, dict[str, Ints]] = {}  # of each module
    others: set[str] = set()
    for name, shape in shapes.items():
        match = _PARAMETER.fullmatch(name.removeprefix(_ROOT))
        if match is None:
            others.add(name.removeprefix(_ROOT).rpartition(".")[0])
        else:
            kinds.setdefault(match["module"] or "", {})[match["kind"] + (match["end"] or "")] = shape
    tokens = {module: kinds.pop(module) for module in [*kinds] if module.endswith(".token_adapter")}
    yield from _ranks(kinds, method, config)
    yield from _targets(kinds, config)
    yield from _extras(others, tokens, config)


def _ranks(kinds: Mapping[str, Mapping[str, Ints]], method: str, config: Mapping[str, Any]) -> Iterator[Any]:
    regular = ModulePatterns()
    flags = {"lora_magnitude_vector": "use_dora", "lora_B.bias": "lora_bias"} if method == "LORA" else {}
    for module, found in kinds.items():
        halves = {kind.partition(".")[0] for kind in found}
        for half in sorted(halves):
            other = half[:-1] + {"A": "B", "B": "A"}.get(half[-1], "")
            if half.startswith("lora_") and half[-1] in "AB" and other not in halves:
                yield f"tensors of `{module}`", sorted(halves), other
        for kind, flag in flags.items():
            if flag in config and (kind in found) != bool(config[flag]):
                yield f"`{flag}`, by `{module}`", kind in found, config.get(flag)
        rank = config.get("init_r" if method == "ADALORA" else "r")
        patterns = config.get("rank_pattern") or {}
        rank = next((patterns[key] for key in patterns if regular.match(rf"(?:.*\.)?(?:{key})$", module)), rank)
        for kind, shape in found.items():
            axis = _RANKS.get(kind.partition(".")[0])
            if axis is None or not isinstance(rank, int) or len(shape) <= axis:
                continue
            several = bool(config.get("target_parameters")) and rank > 0 and shape[axis] % rank == 0
            if shape[axis] != rank and not several:
                yield f"rank of `{module}.{kind}` {list(shape)}", shape[axis], rank


def _targets(modules: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Any]:
    targets = config.get("target_modules")
    if config.get("target_parameters") or targets == "all-linear" or not targets:
        return
    if isinstance(targets, str):
        regular = ModulePatterns()
        others = [module for module in modules if not regular.fullmatch(targets, module)]
    else:
        others = [m for m in modules if not any(m == t or m.endswith(f".{t}") for t in targets)]
        absent = [t for t in targets if not any(m == t or m.endswith(f".{t}") for m in modules)]
        if absent:
            yield "`target_modules` without tensors", f"none of {some(sorted(absent))}", sorted(targets)
    if others:
        yield "modules that are not `target_modules`", some(others), targets
    layers = config.get("layers_to_transform")
    if layers is not None:
        allowed = {layers} if isinstance(layers, int) else set(layers)
        numbers = {int(match[1]) for module in modules if (match := re.search(r"\.(\d+)\.", module))}
        if numbers != allowed:
            yield "`layers_to_transform`", sorted(numbers), sorted(allowed)


def _extras(others: set[str], tokens: Mapping[str, Mapping[str, Ints]], config: Mapping[str, Any]) -> Iterator[Any]:
    wanted = set(config.get("modules_to_save") or ())
    saved = {m for m in others if "base_layer" not in m and m != "base_model"}
    if config.get("bias", "none") == "none" and "modules_to_save" in config:
        strange = [m for m in saved if not any(f".{m}.".find(f".{name}.") >= 0 for name in wanted)]
        if strange:
            yield "`modules_to_save`", some(sorted(strange)), sorted(wanted)
    absent = {name for name in wanted if not any(f".{m}.".find(f".{name}.") >= 0 for m in saved)}
    if absent and not (absent < _HEADS and wanted & _HEADS):
        yield "`modules_to_save` without tensors", f"none of {some(sorted(absent))}", sorted(wanted)
    indices = config.get("trainable_token_indices")
    if "trainable_token_indices" in config and bool(tokens) != (indices is not None):
        yield "`trainable_token_indices`, by their tensors", sorted(tokens), indices
    elif isinstance(indices, list):
        for module, found in tokens.items():
            for kind, shape in found.items():
                if shape[:1] != (len(indices),):
                    yield f"rows of `{module}.{kind}`", list(shape), indices
