"""What transformers or diffusers says of a config: names and shapes of the model's tensors, of its files, and its ties.

Run as a program, `python -m ckpttool.models.architecture_process DIR OUT`: torch and transformers take
400 MB, which the process that copies is to have no part in. The model is built on the meta device, without weights; no
code of DIR runs.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from typing import Any

from ckpttool.errors import in_one_line, why_no_import
from ckpttool.models import written_names
from ckpttool.models.written_names import WrittenNames
from ckpttool.storage.stores import local_path


def describe(folder: str, dtype: str) -> dict[str, Any]:
    """Return `{"memory": {name: shape}, "files": {name: shape}, "tied": {name: name}, "prefix", "float32", "missing",
    "unexpected", "rules"}`, or `{"why_not": text}`. `float32` are the names of tensors that stay float32 in a model of
    a dtype of 16 bits or less. `missing` and `unexpected` are patterns of names that transformers passes over."""
    config = json.loads((local_path(folder) / "config.json").read())
    is_diffusion = "_class_name" in config
    package = "torch"
    try:
        import torch  # noqa: F401

        package = "diffusers" if is_diffusion else "transformers"
        if is_diffusion:
            import diffusers  # type: ignore[import-not-found] # noqa: F401 # not needed to develop
        else:
            import transformers  # noqa: F401
    except Exception as error:
        return {"why_not": why_no_import(package, error)}
    return _diffusion(config) if is_diffusion else _transformer(folder, dtype)


def _diffusion(config: dict[str, Any]) -> dict[str, Any]:
    import diffusers
    import torch

    name, library = str(config["_class_name"]), f"diffusers {diffusers.__version__}"
    kind = getattr(diffusers, name, None)
    if kind is None:
        return {"why_not": f"{library} has no `{name}`"}
    if "quantization_config" in config:
        return {"why_not": "the model is quantized"}
    with torch.device("meta"):
        model = kind.from_config(config)
    names = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    words = set(getattr(kind, "_keep_in_fp32_modules", None) or ())
    kept = [name for name in names if words.intersection(name.split("."))]
    return {"architecture": name, "library": library, "memory": names, "files": names, "tied": {}, "float32": kept}


def _transformer(folder: str, dtype: str) -> dict[str, Any]:
    import torch
    import transformers

    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    named = getattr(config, "architectures", None) or []
    if not named:
        return {"why_not": "the config names no architecture"}
    kind = getattr(transformers, str(named[0]), None)
    if kind is None:
        return {"why_not": f"transformers {transformers.__version__} has no `{named[0]}`"}
    if getattr(config, "quantization_config", None) is not None:
        return {"why_not": "the model is quantized"}
    default = torch.get_default_dtype()
    wanted = default if dtype in ("", "float32", "float64") else getattr(torch, dtype)
    if wanted.itemsize < 2:
        wanted = torch.bfloat16  # a model cannot be made of 8 bits
    _set_dtype(config, wanted)
    try:
        torch.set_default_dtype(wanted)
        with torch.device("meta"):
            model = kind(config)
    finally:
        torch.set_default_dtype(default)
    stays = _float32_patterns(model, wanted)
    state = {
        name: tensor.float() if tensor.is_floating_point() and any(one.search(name) for one in stays) else tensor
        for name, tensor in model.state_dict().items()
    }
    memory = {name: list(tensor.shape) for name, tensor in state.items()}
    tied = _tied(model, memory)
    untied = {name: tensor for name, tensor in state.items() if name not in tied}
    files = _in_files(model, untied)
    shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (untied, files)]
    written = _written(model, state) if shapes[0] != shapes[1] else []
    spelling = {one.old[0]: one.new[0] for one in written if len(one.old) == len(one.new) == 1}
    tied |= {spelling.get(name, name): spelling.get(kept, kept) for name, kept in tied.items()}
    kept = {
        n for names in (state, files) for n, tensor in names.items() if wanted.itemsize < tensor.dtype.itemsize == 4
    }
    return {
        "architecture": str(named[0]),
        "library": f"transformers {transformers.__version__}",
        "memory": memory,
        "files": {name: list(tensor.shape) for name, tensor in files.items()},
        "tied": tied,
        "rules": written_names.rules(written),
        "prefix": getattr(model, "base_model_prefix", ""),
        "float32": sorted(kept),
        "missing": sorted(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()),
        "unexpected": [*sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_passed(model)],
    }


def _set_dtype(config: Any, dtype: Any) -> None:
    """Set the dtype of a config and of those in it, as `from_pretrained` does: a class that has another model inside
    builds that one with the dtype of its config."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    for one in [config, *inner]:
        if one is not None:
            setattr(one, "dtype" if hasattr(one, "dtype") else "torch_dtype", dtype)


def _tied(model: Any, memory: dict[str, Any]) -> dict[str, str]:
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied is None:
        # transformers 4 ties the parameters themselves when the model is made.
        model.tie_weights()
        first: dict[int, str] = {}
        tied = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            kept = first.setdefault(id(parameter), name)
            if kept != name:
                tied[name] = kept
    return {name: kept for name, kept in tied.items() if name in memory and kept in memory}


def _float32_patterns(model: Any, dtype: Any) -> list[re.Pattern[str]]:
    """Return the names of what `from_pretrained` loads as float32 when a model of this dtype is asked for."""
    plan = getattr(model, "_get_dtype_plan", None)
    if plan is not None:
        return [re.compile(name.replace("*", ".*")) for name, kept in plan(dtype).items() if "32" in str(kept)]
    # transformers 4
    kinds = ["_keep_in_fp32_modules_strict"] + (["_keep_in_fp32_modules"] if "float16" in str(dtype).split(".") else [])
    names = [name for kind in kinds for name in getattr(model, kind, None) or ()]
    return [re.compile(rf"((^|\.){name}($|\.))") for name in names]


def _in_files(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 stacks what the files of some families hold apart; 4 has other names for some in memory."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {_released(model, name): tensor for name, tensor in state.items()}
    return dict(revert_weight_conversion(model, state))


def _released(model: Any, name: str) -> str:
    """Return the name under which `save_pretrained` of transformers 4.52 to 4.57 writes a tensor."""
    from transformers import modeling_utils

    families = getattr(modeling_utils, "VLMS", ())
    kinds = [kind.__name__.lower() for kind in type(model).__mro__[:-1]]
    if not any(family in kind for family in families for kind in kinds):
        return name
    for released, pattern in getattr(model, "_checkpoint_conversion_mapping", {}).items():
        spelt, count = re.subn(pattern, re.sub(r"\(.*\)", "", released.lstrip("^")), name)
        if count:
            return spelt
    return name


def _written(model: Any, state: dict[str, Any]) -> list[WrittenNames]:
    """Return how names in memory are written; nothing where a key map cannot say it."""
    released = {name: _released(model, name) for name in state}
    if any(old != new for old, new in released.items()) and len({*released.values()}) == len(released):
        return [WrittenNames((old,), (new,)) for old, new in released.items()]
    # It is of what transformers has inside, which each version may name otherwise.
    with suppress(NotImplementedError, ImportError, AttributeError, ValueError, KeyError):
        return written_names.of_model(model, state)
    return []


def _passed(model: Any) -> list[str]:
    """Return buffers that were saved once and are not any more."""
    names = [name for name, _ in model.named_buffers()]
    passed = [r"rotary_emb\.inv_freq"] if any(name.endswith("rotary_emb.inv_freq") for name in names) else []
    return passed + ([r"(^|\.)position_ids$"] if any(name.endswith("position_ids") for name in names) else [])


def main(folder: str, out: str, dtype: str) -> None:
    """Write what there is to say to the file `out`, what went wrong included."""
    try:
        answer = describe(folder, dtype)
    # Whatever it is, the config is what it is about, and the other process says it in one line.
    except Exception as error:
        answer = {"why_not": f"the library cannot make the model: {in_one_line(error)}"}
    local_path(out).put(json.dumps(answer).encode())


if __name__ == "__main__":
    main(*sys.argv[1:4])
