"""Selects the one model of a checkpoint to export, strips wrappers and applies the user's names. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Entry, Part, Tensor, dotted
from ckpttool.catalogue.patterns import any_of, renamer
from ckpttool.catalogue.validation import validate
from ckpttool.errors import UsageError
from ckpttool.layout import select
from ckpttool.layout.move import again, move, rebuilt
from ckpttool.layout.rename import rename_entries, strip_wrappers, without_root
from ckpttool.text import some

_MODEL = Part("model")
_ADAPTER = re.compile(r"(?:^|\.)lora_(?:[AB]|embedding_[AB]|magnitude_vector)(?:\.([^.]+))?(?:\.weight|\.bias)?$")
_SAVED_TOO = re.compile(r"\.modules_to_save\.([^.]+)\.")
_PEFT = "base_model.model."


@dataclass(slots=True)
class SelectedModel:
    """The tensors of one model, each with a path of one key. `left` names what else the checkpoint has; `adapter` is
    the name of a LoRA adapter, when the tensors are one."""

    catalogue: Catalogue
    left: list[str] = field(default_factory=list)
    adapter: str | None = None


def model_of(source: Catalogue, only: Sequence[str]) -> SelectedModel:
    """Return the selected model. Raises UsageError when there is none, or more than one; CorruptError when it is
    damaged."""
    models = [part for part in parts.parts(source) if part.kind == "model"]
    if only:
        is_selected = parts.matcher(only, source)
        models = [part for part in parts.parts(source) if is_selected(part)]
    for fault in source.faults:
        # A part that could not be opened may be the model.
        root = fault.facts.get("absent")
        if root is not None and (not models or parts.kind_of_key(root.partition(".")[0]) == "model"):
            raise fault
    if len(models) != 1:
        raise _not_one(models, source)
    part = models[0]
    planned = select.start(source)
    model = select.select(
        planned, lambda entry: entry.part == part and isinstance(entry, Tensor) and not entry.embedded
    )
    if not model.entries:
        raise UsageError(f"part `{part}` has no tensors", hint="look at what is there with `ckpttool inspect`")
    validate(source, set(model.entries))
    left = [str(other) for other in parts.parts(source) if other != part]
    left += [entry.name for entry in source.entries.values() if entry.part == part and entry.path not in model.entries]
    model = without_root(model, part)
    return SelectedModel(_flat(model), left)


def _not_one(models: Sequence[Part], source: Catalogue) -> UsageError:
    if not models:
        listed = some([str(part) for part in parts.parts(source)], 5)
        return UsageError(
            "no model in this checkpoint", hint=f"the parts are {listed}; `--only PART` takes one of them"
        )
    names = [dotted(part.root) or part.kind for part in models]
    return UsageError(
        f"there are {len(models)} models, and one can be exported: {some(names, 5)}",
        hint=f"pass `--only {names[0]}`, or `--only {names[1]}`",
        found=names,
    )


def _flat(catalogue: Catalogue) -> Catalogue:
    """Give each tensor a path of one key, as in files of safetensors."""
    flat = move(catalogue, {path: (dotted(path),) for path in catalogue.entries})
    entries: list[Entry] = []
    for tensor in flat.tensors:
        # Indexes of a list without its prefix, `layers`, stay as they are.
        entries.append(again(tensor, part=_MODEL))
    return rebuilt(flat, entries, {})


def renamed(
    chosen: SelectedModel, exclude: Sequence[str], strip_prefix: str | None, rename: Sequence[str]
) -> SelectedModel:
    """Strip wrappers at any depth, exclude tensors, strip the prefix and apply the renaming rules, in this order.
    Raises UsageError for a rule that does nothing, or names that collide."""
    model = rename_entries(chosen.catalogue, strip_wrappers)
    left = list(chosen.left)
    if exclude:
        is_excluded = any_of(exclude)
        for pattern in exclude:
            _check_some("--exclude", pattern, any_of([pattern]), model)
        left += [tensor.name for tensor in model.tensors if is_excluded(tensor.name)]
        model = select.select(model, lambda entry: not is_excluded(entry.name))
        if not model.entries:
            raise UsageError("nothing is left to write", hint="remove an `--exclude`")
    if strip_prefix is not None:
        prefix = strip_prefix.rstrip(".") + "."
        _check_some("--strip-prefix", strip_prefix, lambda name: name.startswith(prefix), model)
        model = rename_entries(model, lambda name: name.removeprefix(prefix))
    for text in rename:
        step = renamer([text])
        _check_some("--rename", text, lambda name, step=step: step(name) != name, model)  # type: ignore[misc]
    if rename:
        model = rename_entries(model, renamer(rename))
    return SelectedModel(_flat(model), left, chosen.adapter)


def _check_some(flag: str, text: str, does: Callable[[str], bool], planned: Catalogue) -> None:
    names = [tensor.name for tensor in planned.tensors]
    if not any(map(does, names)):
        raise UsageError(
            f"`{flag} {text}` matches nothing",
            hint=f"names here are like `{names[len(names) // 2]}`; `ckpttool inspect SRC --tensors '*'` lists them",
        )


# LoRA -----------------------------------------------------------------------------------------------------------------


def without_base(chosen: SelectedModel) -> SelectedModel:
    """Return the LoRA adapter alone, with PEFT's names, when there is one; else the model as it is.

    Raises UsageError when there are several adapters.
    """
    names = [tensor.name for tensor in chosen.catalogue.tensors]
    matches = [match for name in names if (match := _ADAPTER.search(name)) is not None]
    if not matches:
        return chosen
    adapters = sorted({match[1] for match in matches if match[1] not in (None, "weight", "bias")})
    if len(adapters) > 1:
        raise UsageError(
            f"there are {len(adapters)} adapters, and one can be exported: {some(adapters)}",
            hint=f"exclude the others: `--exclude '*.{adapters[1]}.*'`",
            found=adapters,
        )
    adapter = adapters[0] if adapters else None
    own = {name for name in names if _ADAPTER.search(name) or _is_saved_too(name, adapter)}
    base = [name for name in names if name not in own]
    model = select.select(chosen.catalogue, lambda entry: entry.name in own)
    model = rename_entries(model, lambda name: _as_peft(name, adapter))
    left = [*chosen.left, f"{len(base)} tensors of the base model"] if base else chosen.left
    return SelectedModel(_flat(model), left, adapter or "default")


def _is_saved_too(name: str, adapter: str | None) -> bool:
    match = _SAVED_TOO.search(name)
    return match is not None and adapter in (None, match[1])


def _as_peft(name: str, adapter: str | None) -> str:
    """`model.q.lora_A.default.weight` -> `base_model.model.model.q.lora_A.weight`. Pure."""
    if adapter is not None:
        name = name.replace(f".modules_to_save.{adapter}.", ".modules_to_save.")
        name = re.sub(rf"\.{re.escape(adapter)}(\.weight|\.bias)?$", r"\1", name)
        name = name.replace(".modules_to_save.", ".")
    name = re.sub(r"(\.lora_magnitude_vector)\.weight$", r"\1", name)
    return name if name.startswith(_PEFT) else _PEFT + name
