"""The one model of a checkpoint that is exported: which part, without wrappers, under the author's names. Pure, but for
files of rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Entry, Part, Tensor, dotted
from ckpttool.catalogue.patterns import any_of, renamer
from ckpttool.catalogue.validation import validate
from ckpttool.errors import UsageError
from ckpttool.layout import select as layout
from ckpttool.text import some

_MODEL = Part("model")
_ADAPTER = re.compile(r"(?:^|\.)lora_(?:[AB]|embedding_[AB]|magnitude_vector)(?:\.([^.]+))?(?:\.weight|\.bias)?$")
_SAVED_TOO = re.compile(r"\.modules_to_save\.([^.]+)\.")
_PEFT = "base_model.model."


@dataclass(slots=True)
class Chosen:
    """The tensors of one model, each under a path of one key. `left` says what of the checkpoint is not among them;
    `adapter` is the name of a LoRA adapter, when the tensors are one."""

    catalogue: Catalogue
    left: list[str] = field(default_factory=list)
    adapter: str | None = None


def model_of(source: Catalogue, only: Sequence[str]) -> Chosen:
    """The model that is wanted, wherever it hangs. Raises UsageError when there is none, or more than one to choose
    from; CorruptError when what is wanted is damaged."""
    models = [part for part in parts.parts(source) if part.kind == "model"]
    if only:
        wanted = parts.matcher(only, source)
        models = [part for part in parts.parts(source) if wanted(part)]
    for fault in source.faults:
        # A part that could not be opened may be the model.
        root = fault.facts.get("absent")
        if root is not None and (not models or parts.kind_of_key(root.partition(".")[0]) == "model"):
            raise fault
    if len(models) != 1:
        raise _not_one(models, source)
    part = models[0]
    laid = layout.start(source)
    made = layout.select(laid, lambda entry: entry.part == part and isinstance(entry, Tensor) and not entry.embedded)
    if not made.entries:
        raise UsageError(f"part `{part}` has no tensors", hint="look at what is there with `ckpttool inspect`")
    validate(source, set(made.entries))
    left = [str(other) for other in parts.parts(source) if other != part]
    left += [entry.name for entry in source.entries.values() if entry.part == part and entry.path not in made.entries]
    made = layout.without_root(made, part)
    return Chosen(_flat(made), left)


def _not_one(models: Sequence[Part], source: Catalogue) -> UsageError:
    if not models:
        there = some([str(part) for part in parts.parts(source)], 5)
        return UsageError("there is no model here", hint=f"the parts are {there}; `--only PART` takes one of them")
    names = [dotted(part.root) or part.kind for part in models]
    return UsageError(
        f"there are {len(models)} models, and one can be exported: {some(names, 5)}",
        hint=f"pass `--only {names[0]}`, or `--only {names[1]}`",
        found=names,
    )


def _flat(catalogue: Catalogue) -> Catalogue:
    """Each tensor under a path of one key, as files of safetensors have them."""
    made = layout.move(catalogue, {path: (dotted(path),) for path in catalogue.entries})
    entries: list[Entry] = []
    for tensor in made.tensors:
        # A list that was left without its head, `layers`, has its indexes as they were.
        entries.append(layout.again(tensor, part=_MODEL))
    return layout.rebuilt(made, entries, {})


def named_anew(chosen: Chosen, exclude: Sequence[str], strip_prefix: str | None, rename: Sequence[str]) -> Chosen:
    """Without wrappers at any depth, without what is excluded, without the prefix, and renamed by the author's rules,
    in this order. Raises UsageError for a rule that does nothing, or names that collide."""
    made = layout.rename(chosen.catalogue, layout.strip_wrappers)
    left = list(chosen.left)
    if exclude:
        unwanted = any_of(exclude)
        for pattern in exclude:
            _check_some("--exclude", pattern, any_of([pattern]), made)
        left += [tensor.name for tensor in made.tensors if unwanted(tensor.name)]
        made = layout.select(made, lambda entry: not unwanted(entry.name))
        if not made.entries:
            raise UsageError("nothing is left to write", hint="take an `--exclude` away")
    if strip_prefix is not None:
        prefix = strip_prefix.rstrip(".") + "."
        _check_some("--strip-prefix", strip_prefix, lambda name: name.startswith(prefix), made)
        made = layout.rename(made, lambda name: name.removeprefix(prefix))
    for text in rename:
        step = renamer([text])
        _check_some("--rename", text, lambda name, step=step: step(name) != name, made)  # type: ignore[misc]
    if rename:
        made = layout.rename(made, renamer(rename))
    return Chosen(_flat(made), left, chosen.adapter)


def _check_some(flag: str, text: str, does: Callable[[str], bool], laid: Catalogue) -> None:
    names = [tensor.name for tensor in laid.tensors]
    if not any(map(does, names)):
        raise UsageError(
            f"`{flag} {text}` matches nothing",
            hint=f"names here are like `{names[len(names) // 2]}`; `ckpttool inspect SRC --tensors '*'` lists them",
        )


# LoRA -----------------------------------------------------------------------------------------------------------------


def without_base(chosen: Chosen) -> Chosen:
    """The LoRA adapter alone, named as PEFT names it in its files, when there is one; else the model as it is.

    Raises UsageError when there are several adapters.
    """
    names = [tensor.name for tensor in chosen.catalogue.tensors]
    found = [match for name in names if (match := _ADAPTER.search(name)) is not None]
    if not found:
        return chosen
    adapters = sorted({match[1] for match in found if match[1] not in (None, "weight", "bias")})
    if len(adapters) > 1:
        raise UsageError(
            f"there are {len(adapters)} adapters, and one can be exported: {some(adapters)}",
            hint=f"leave the others out: `--exclude '*.{adapters[1]}.*'`",
            found=adapters,
        )
    adapter = adapters[0] if adapters else None
    own = {name for name in names if _ADAPTER.search(name) or _is_saved_too(name, adapter)}
    base = [name for name in names if name not in own]
    made = layout.select(chosen.catalogue, lambda entry: entry.name in own)
    made = layout.rename(made, lambda name: _as_peft(name, adapter))
    left = [*chosen.left, f"{len(base)} tensors of the base model"] if base else chosen.left
    return Chosen(_flat(made), left, adapter or "default")


def _is_saved_too(name: str, adapter: str | None) -> bool:
    found = _SAVED_TOO.search(name)
    return found is not None and adapter in (None, found[1])


def _as_peft(name: str, adapter: str | None) -> str:
    """`model.q.lora_A.default.weight` -> `base_model.model.model.q.lora_A.weight`. Pure."""
    if adapter is not None:
        name = name.replace(f".modules_to_save.{adapter}.", ".modules_to_save.")
        name = re.sub(rf"\.{re.escape(adapter)}(\.weight|\.bias)?$", r"\1", name)
        name = name.replace(".modules_to_save.", ".")
    name = re.sub(r"(\.lora_magnitude_vector)\.weight$", r"\1", name)
    return name if name.startswith(_PEFT) else _PEFT + name
