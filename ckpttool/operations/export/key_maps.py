"""Key maps: how the names and the shapes of a producer become those of Hugging Face, for the families where they
differ. Each is a file of data in `keymaps/`; a user's own has the same form.

    {"name": "llama-meta", "model_types": ["llama"], "needs": [pattern, ..], "never": [pattern, ..], "rules": [
      {"from": "layers.{n}.attention.wq.weight", "to": "model.layers.{n}.self_attn.q_proj.weight", "rows": "halves"},
      {"from": "layers.{n}.moe.experts.w1", "to": "model.layers.{n}.mlp.experts.{e}.gate_proj.weight"},
      {"from": "rope.freqs", "to": null}]}

`{n}` stands for the same number on both sides, `*` in `needs` and `never` for anything. `{e}` on the right only: the
tensor is cut along its first dimension, `e` counts. Several names on the right: what is left is cut along its first
dimension into as many equal pieces. `null`: left out. `rows` is what happens to the rows of each head: in Meta's files
and torchtitan's the rotary embedding turns neighbours, in transformers the two halves of a head.

Seen: the adapters of torchtitan (`models/llama3`, `models/qwen3`, August 2025 to October 2026), the converters of
transformers for Llama and Mistral, and `conversion_mapping` of transformers 5.23.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Entry, Path, Tensor
from ckpttool.errors import UsageError
from ckpttool.layout.select import again, rebuilt
from ckpttool.operations.export.views import Slice, Viewed, halves, piece
from ckpttool.serialization import strict_json as strictjson
from ckpttool.storage.files import failed
from ckpttool.text import meant, some

_NUMBER = re.compile(r"\\\{(\w+)\\\}")
_ENOUGH = 65_536


@dataclass(frozen=True, slots=True)
class Rule:
    """`Rule(re.compile(r"layers\\.(?P<n>\\d+)\\.w"), ("model.layers.{n}.w",), None)`; no names: left out."""

    pattern: re.Pattern[str]
    to: tuple[str, ...]
    rows: str | None


@dataclass(frozen=True, slots=True)
class KeyMap:
    """A key map: which models it is for, how names tell, and its rules."""

    name: str
    title: str
    model_types: tuple[str, ...]
    needs_config: bool
    needs: tuple[re.Pattern[str], ...]
    never: tuple[re.Pattern[str], ...]
    rules: tuple[Rule, ...]

    def fits(self, names: Sequence[str], config: Mapping[str, Any] | None) -> bool:
        """Whether these are names of the producer's, and the config, if there is one, that of such a model."""
        kind = (config or {}).get("model_type")
        if (kind is None and self.needs_config) or (kind is not None and kind not in self.model_types):
            return False
        found = all(any(p.fullmatch(n) for n in names) for p in self.needs)
        return found and not any(p.fullmatch(n) for p in self.never for n in names)


@dataclass(slots=True)
class Mapped:
    """What a key map made of a model. `left` are names left out on purpose, `unknown` those that no rule is about."""

    catalogue: Catalogue
    left: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def known() -> list[KeyMap]:
    """The maps that come with ckpttool."""
    # Not `importlib.resources`, which takes ten milliseconds: the package is always a directory.
    paths = sorted(FilePath(__file__).with_name("keymaps").glob("*.json"))
    return [parse(json.loads(path.read_text(encoding="utf-8")), path.name) for path in paths]


def chosen(wanted: str | None, names: Sequence[str], config: Mapping[str, Any] | None) -> KeyMap | None:
    """The map called `wanted`, or in that file; the one that fits when nothing is wanted; None for `none`.

    Raises UsageError.
    """
    if wanted == "none":
        return None
    if wanted is None:
        return next((keymap for keymap in known() if keymap.fits(names, config)), None)
    if wanted.endswith(".json"):
        return _from_file(wanted)
    maps = {keymap.name: keymap for keymap in known()}
    if wanted not in maps:
        there = ", ".join(f"`{name}`" for name in maps)
        hint = meant(wanted, [*maps, "none"], f"one of {there}, `none`, or a file whose name ends in `.json`")
        raise UsageError(f"there is no key map `{wanted}`", hint=hint)
    return maps[wanted]


def _from_file(path: str) -> KeyMap:
    try:
        with open(path, "rb") as stream:
            text = stream.read(1 << 24)
    except OSError as error:
        raise failed(error, path, "read") from None
    return parse(strictjson.parse(text, f"`{path}`"), path)


def parse(said: Any, where: str) -> KeyMap:
    """A key map from its JSON. Raises UsageError; `where` goes before its message."""
    if not isinstance(said, dict) or not isinstance(said.get("rules"), list):
        raise UsageError(
            f"`{where}`: a key map is an object with a list `rules`",
            hint='`{"name": "mine", "rules": [{"from": "blocks.{n}.w", "to": "model.layers.{n}.weight"}]}`',
        )
    needs, never = (_strings(said, key, where) for key in ("needs", "never"))
    return KeyMap(
        str(said.get("name", where)),
        str(said.get("title", "")),
        tuple(_strings(said, "model_types", where)),
        bool(said.get("needs_config")),
        tuple(map(_compiled, needs)),
        tuple(map(_compiled, never)),
        tuple(_rule(rule, where) for rule in said["rules"]),
    )


def _strings(said: Mapping[str, Any], key: str, where: str) -> list[str]:
    found = said.get(key, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise UsageError(f"`{where}`: `{key}` of a key map is a list of strings")
    return found


def _rule(said: Any, where: str) -> Rule:
    match said:
        case {"from": str() as old, "to": str() | None | [*_] as new}:
            to = () if new is None else (new,) if isinstance(new, str) else tuple(new)
            rows = said.get("rows")
            if all(isinstance(name, str) for name in to) and rows in (None, "halves") and not (rows and len(to) > 1):
                pattern = _compiled(old)
                unknown = {field for name in to for field in re.findall(r"\{(\w+)\}", name)} - {*pattern.groupindex}
                if unknown <= {"e"} and (not rows or not unknown):
                    return Rule(pattern, to, rows)
    raise UsageError(
        f"`{where}`: {said!r:.100} is no rule of a key map",
        hint='`{"from": "blocks.{n}.w", "to": "model.layers.{n}.weight"}`; `to` may be a list, or null to leave it out',
    )


def _compiled(text: str) -> re.Pattern[str]:
    named = _NUMBER.sub(lambda found: rf"(?P<{found[1]}>\d+)", re.escape(text))
    return re.compile(named.replace(r"\*", ".*"))


def apply(keymap: KeyMap, laid: Catalogue, viewed: Viewed, head_dim: int | None) -> Mapped:
    """The model under the names of the map, in the order in which it was. `head_dim` is that of the attention.

    Raises UsageError when two tensors would have one name, when a tensor cannot be cut as the map says, or for want
    of `head_dim`.
    """
    made = Mapped(laid)
    entries: list[Entry] = []
    new_path: dict[Path, Path] = {}
    for tensor in laid.tensors:
        rule, match = _matching(keymap, tensor.name)
        if rule is None or match is None:
            made.unknown.append(tensor.name)
            entries.append(tensor)
        elif not rule.to:
            made.left.append(tensor.name)
        else:
            numbers = match.groupdict()
            pieces = list(_pieces(rule, tensor, numbers, viewed, head_dim))
            if pieces[0].origin is tensor.origin:
                new_path[tensor.path] = pieces[0].path
            entries += pieces
    moved = [_aliased(entry, new_path, made.left) for entry in entries if isinstance(entry, Tensor)]
    _check_apart(moved, keymap)
    made.catalogue = rebuilt(laid, moved, {})
    return made


def _matching(keymap: KeyMap, name: str) -> tuple[Rule | None, re.Match[str] | None]:
    for rule in keymap.rules:
        match = rule.pattern.fullmatch(name)
        if match is not None:
            return rule, match
    return None, None


def _aliased(tensor: Tensor, new_path: Mapping[Path, Path], left: Sequence[str]) -> Tensor:
    """What is tied to a tensor that was cut or left out has its bytes to itself."""
    if tensor.alias is None:
        return tensor
    alias = new_path.get(tensor.alias)
    if alias is None and ".".join(map(str, tensor.alias)) not in left:
        alias = tensor.alias
    return again(tensor, alias=alias if tensor.path != alias else None)


def _check_apart(tensors: Iterable[Tensor], keymap: KeyMap) -> None:
    taken: dict[str, Tensor] = {}
    for tensor in tensors:
        other = taken.setdefault(tensor.name, tensor)
        if other is not tensor:
            both = some([(t.origin or t).name for t in (other, tensor)])
            raise UsageError(
                f"key map `{keymap.name}`: {both} would both be called `{tensor.name}`",
                hint="leave one of them out with `--exclude`",
                tensor=tensor.name,
            )


def _pieces(
    rule: Rule, tensor: Tensor, numbers: dict[str, str], viewed: Viewed, head_dim: int | None
) -> Iterable[Tensor]:
    origin = tensor.origin or tensor
    shape = tensor.shape
    if rule.rows is not None:
        slices = halves(shape, _head(tensor, head_dim))
        path: Path = (rule.to[0].format(**numbers),)
        yield replace(tensor, path=path, alias=None, origin=viewed.view(origin, path, shape, slices))
        return
    stacked = "e" not in numbers and any("{e}" in name for name in rule.to)
    if not stacked and len(rule.to) == 1:
        yield again(tensor, path=(rule.to[0].format(**numbers),))
        return
    depth = 1 if stacked else 0
    ways = len(rule.to)
    if len(shape) <= depth or shape[depth] % ways or (stacked and shape[0] > _ENOUGH):
        raise UsageError(
            f"tensor `{tensor.name}` {list(shape)} cannot be cut into `{rule.to[0]}`",
            hint="`--key-map none` leaves the names as they are",
            tensor=tensor.name,
        )
    size = shape[depth] // ways
    for number in range(shape[0] if stacked else 1):
        for part, name in enumerate(rule.to):
            at = (number,) if stacked else ()
            left, cut = piece(shape, at, part * size, size)
            path = (name.format(**numbers, e=number),)
            yield _made(tensor, origin, viewed, path, left, cut)


def _made(tensor: Tensor, origin: Tensor, viewed: Viewed, path: Path, shape: tuple[int, ...], cut: Slice) -> Tensor:
    seen = viewed.view(origin, path, shape, [cut])
    return replace(tensor, path=path, shape=shape, alias=None, origin=seen)


def _head(tensor: Tensor, head_dim: int | None) -> int:
    if head_dim is None:
        raise UsageError(
            f"the rows of `{tensor.name}` have to be put in another order, and nothing here says how many a head has",
            hint="pass `--assets` with the model's `config.json`, or `--head-dim 128`",
            tensor=tensor.name,
        )
    rows = tensor.shape[0] if tensor.shape else 0
    if head_dim < 2 or head_dim % 2 or rows % head_dim:
        raise UsageError(
            f"tensor `{tensor.name}` {list(tensor.shape)}: its rows are no heads of {head_dim}",
            hint="the config is not this model's, or pass another `--head-dim`",
            tensor=tensor.name, found=rows, expected=head_dim,
        )  # fmt: skip
    return head_dim
