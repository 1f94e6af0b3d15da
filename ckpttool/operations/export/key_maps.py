"""Key maps: translate names and shapes of a producer to those of Hugging Face, for the families where they differ.
Each is a file of data in `keymaps/`; a user's own has the same form.

    {"name": "llama-meta", "model_types": ["llama"], "needs": [pattern, ..], "never": [pattern, ..], "rules": [
      {"from": "layers.{n}.attention.wq.weight", "to": "model.layers.{n}.self_attn.q_proj.weight", "rows": "halves"},
      {"from": "layers.{n}.moe.experts.w1", "to": "model.layers.{n}.mlp.experts.{e}.gate_proj.weight"},
      {"from": "rope.freqs", "to": null}]}

`docs/how-to/export.md` explains the rules; `*` in `needs` and `never` stands for anything. In the files of Meta and
torchtitan the rotary embedding rotates neighbours, in transformers the two halves of a head. Seen: the adapters of
torchtitan (`models/llama3`, `models/qwen3`, 0.2.0 to 0.3.0) and `conversion_mapping` of transformers 5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.errors import UsageError
from ckpttool.layout.move import again, rebuilt
from ckpttool.operations.export.views import Slice, Viewed, halves, piece
from ckpttool.serialization import strict_json
from ckpttool.storage.stores import local_path
from ckpttool.text import meant, some

_NUMBER = re.compile(r"\\\{(\w+)\\\}")
_ENOUGH = 65_536
_FOLDER = local_path(__file__).parent / "keymaps"
_GENERATED = "-transformers"  # ends the names of generated maps


@dataclass(frozen=True, slots=True)
class Rule:
    """`Rule(re.compile(r"layers\\.(?P<n>\\d+)\\.w"), ("model.layers.{n}.w",), None)`; no names: dropped."""

    pattern: re.Pattern[str]
    to: tuple[str, ...]
    rows: str | None


@dataclass(frozen=True, slots=True)
class KeyMap:
    """A key map: the models that it is for, patterns that recognise them, and its rules."""

    name: str
    title: str
    model_types: tuple[str, ...]
    needs_config: bool
    needs: tuple[re.Pattern[str], ...]
    never: tuple[re.Pattern[str], ...]
    rules: tuple[Rule, ...]
    generated: bool = False

    def fits(self, names: Sequence[str], config: Mapping[str, Any] | None) -> bool:
        """Return whether these are names of the producer, and the config, if there is one, is of such a model."""
        if self.generated:
            return self._in_memory(names)
        kind = (config or {}).get("model_type")
        if (kind is None and self.needs_config) or (kind is not None and kind not in self.model_types):
            return False
        has_all = all(any(p.fullmatch(n) for n in names) for p in self.needs)
        return has_all and not any(p.fullmatch(n) for p in self.never for n in names)

    def _in_memory(self, names: Sequence[str]) -> bool:
        """Return whether some names are those that the rules begin with, and none is one that they only end with."""
        old = re.compile("|".join(re.sub(r"\?P<\w+>", "?:", rule.pattern.pattern) for rule in self.rules))
        new = re.compile(
            "|".join(re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(name)) for r in self.rules for name in r.to)
        )
        found = [name for name in names if not old.fullmatch(name)]
        return len(found) < len(names) and not any(new.fullmatch(name) for name in found)


def known() -> list[KeyMap]:
    """Return the maps that come with ckpttool, but for the generated ones."""
    # Not `importlib.resources`, which takes ten milliseconds: the package is always a directory.
    paths = (_FOLDER.escaped() / "*.json").matches()
    return [parse(json.loads(path.read()), path.name) for path in paths]


def generated(kind: object) -> KeyMap | None:
    """Return the map from the names that transformers has in memory to those of files, for a model type or a class."""
    file = f"{kind}.json"
    folder = _FOLDER / "transformers"
    return parse(json.loads((folder / file).read()), file) if file in folder.names() else None


def chosen(
    name: str | None,
    names: Sequence[str],
    config: Mapping[str, Any] | None,
    *,
    released: bool = True,
    reference: Sequence[str] = (),
) -> KeyMap | None:
    """Return the map called `name`, or in that file; by default the one that fits; None for `none`. Unless `released`,
    and where a `reference` has them too, names that transformers has in memory stay.

    Raises UsageError.
    """
    if name == "none":
        return None
    if name is None:
        of_config = [*((config or {}).get("architectures") or ())[:1], (config or {}).get("model_type")]
        own = next((keymap for keymap in map(generated, of_config) if keymap is not None), None)
        if own is not None and own.fits(names, config):
            return own if released and not own.fits(reference, config) else None
        return next((keymap for keymap in known() if keymap.fits(names, config)), None)
    if name.endswith(".json"):
        return parse(strict_json.parse(local_path(name).head(1 << 24), f"`{name}`"), name)
    maps = {keymap.name: keymap for keymap in known()}
    by_type = generated(name.removesuffix(_GENERATED)) if name.endswith(_GENERATED) else None
    if by_type is not None:
        return by_type
    if name not in maps:
        listed = ", ".join(f"`{known_name}`" for known_name in maps)
        hint = meant(name, [*maps, "none"], f"one of {listed}, `none`, or a file whose name ends in `.json`")
        raise UsageError(f"unknown key map `{name}`", hint=hint)
    return maps[name]


def parse(data: Any, where: str) -> KeyMap:
    """Parse a key map from its JSON. Raises UsageError, which names the file `where`."""
    if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
        raise UsageError(
            f"`{where}`: a key map is an object with a list `rules`",
            hint='`{"name": "mine", "rules": [{"from": "blocks.{n}.w", "to": "model.layers.{n}.weight"}]}`',
        )
    name, title, needs_config = str(data.get("name", where)), str(data.get("title", "")), bool(data.get("needs_config"))
    needs, never = (tuple(_compiled(text, where) for text in _strings(data, key, where)) for key in ("needs", "never"))
    rules = tuple(_rule(rule, where) for rule in data["rules"])
    types = tuple(_strings(data, "model_types", where))
    return KeyMap(name, title, types, needs_config, needs, never, rules, bool(data.get("generated")))


def _strings(data: Mapping[str, Any], key: str, where: str) -> list[str]:
    strings = data.get(key, [])
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise UsageError(f"`{where}`: `{key}` of a key map is a list of strings")
    return strings


def _rule(data: Any, where: str) -> Rule:
    match data:
        case {"from": str() as old, "to": str() | None | [*_] as new}:
            to = () if new is None else (new,) if isinstance(new, str) else tuple(new)
            rows = data.get("rows")
            if all(isinstance(name, str) for name in to) and rows in (None, "halves") and not (rows and len(to) > 1):
                pattern = _compiled(old, where)
                unknown = {field for name in to for field in re.findall(r"\{(\w+)\}", name)} - {*pattern.groupindex}
                if unknown <= {"e"} and (not rows or not unknown):
                    return Rule(pattern, to, rows)
    raise UsageError(
        f"`{where}`: {data!r:.100} is not a rule of a key map",
        hint='`{"from": "blocks.{n}.w", "to": "model.layers.{n}.weight"}`; `to` may be a list, or null to drop it',
    )


def _compiled(text: str, where: str) -> re.Pattern[str]:
    named = _NUMBER.sub(lambda match: rf"(?P<{match[1]}>\d+)", re.escape(text))
    try:
        return re.compile(named.replace(r"\*", ".*"))
    except re.error:
        message = f"`{where}`: a number in {text!r:.100} has no name of its own"
        raise UsageError(message, hint="write `{n}` for the first number of a name, `{m}` for the second") from None


def apply(keymap: KeyMap, planned: Catalogue, viewed: Viewed, head_dim: int | None) -> tuple[Catalogue, list[str]]:
    """Return the model under the names of the map, in the same order, and the names that it has no rule for. `head_dim`
    is that of the attention.

    Raises UsageError when two tensors would have one name, when a tensor cannot be split as the map says, or when
    `head_dim` is unknown.
    """
    tensors: list[Tensor] = []
    dropped: list[str] = []
    unknown: list[str] = []
    new_path: dict[Path, Path] = {}
    for tensor in planned.tensors:
        matches = ((rule, rule.pattern.fullmatch(tensor.name)) for rule in keymap.rules)
        rule, match = next(((rule, match) for rule, match in matches if match), (None, None))
        if rule is None or match is None:
            unknown.append(tensor.name)
            tensors.append(tensor)
        elif not rule.to:
            dropped.append(tensor.name)
        else:
            pieces = list(_pieces(rule, tensor, match.groupdict(), viewed, head_dim))
            if pieces[0].origin is tensor.origin:
                new_path[tensor.path] = pieces[0].path
            tensors += pieces
    moved = [_aliased(tensor, new_path, dropped) for tensor in tensors]
    _check_apart(moved, keymap)
    return rebuilt(planned, moved, {}), unknown


def _aliased(tensor: Tensor, new_path: Mapping[Path, Path], left: Sequence[str]) -> Tensor:
    """Untie a tensor from one that was split or dropped."""
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
                hint="exclude one of them with `--exclude`",
                tensor=tensor.name,
            )


def _pieces(
    rule: Rule, tensor: Tensor, numbers: dict[str, str], viewed: Viewed, head_dim: int | None
) -> Iterable[Tensor]:
    shape = tensor.shape

    def view(name: str, shape: Ints, slices: Sequence[Slice]) -> Tensor:
        path: Path = (name,)
        origin = viewed.view(tensor.origin or tensor, path, shape, slices)
        return replace(tensor, path=path, shape=shape, alias=None, origin=origin)

    if rule.rows is not None:
        yield view(rule.to[0].format(**numbers), shape, halves(shape, _head(tensor, head_dim)))
        return
    stacked = "e" not in numbers and any("{e}" in name for name in rule.to)
    if not stacked and len(rule.to) == 1:
        yield again(tensor, path=(rule.to[0].format(**numbers),))
        return
    depth = 1 if stacked else 0
    ways = len(rule.to)
    if len(shape) <= depth or shape[depth] % ways or (stacked and shape[0] > _ENOUGH):
        raise UsageError(
            f"tensor `{tensor.name}` {list(shape)} cannot be split into `{rule.to[0]}`",
            hint="`--key-map none` leaves the names as they are",
            tensor=tensor.name,
        )
    size = shape[depth] // ways
    for number in range(shape[0] if stacked else 1):
        for part, name in enumerate(rule.to):
            at = (number,) if stacked else ()
            left, cut = piece(shape, at, part * size, size)
            yield view(name.format(**numbers, e=number), left, [cut])


def _head(tensor: Tensor, head_dim: int | None) -> int:
    if head_dim is None:
        raise UsageError(
            f"the rows of `{tensor.name}` must be permuted, and the number of rows per head is unknown",
            hint="pass `--assets` with the model's `config.json`, or `--head-dim 128`",
            tensor=tensor.name,
        )
    rows = tensor.shape[0] if tensor.shape else 0
    if head_dim < 2 or head_dim % 2 or rows % head_dim:
        raise UsageError(
            f"tensor `{tensor.name}` {list(tensor.shape)}: its rows are no multiple of {head_dim}, those of a head",
            hint="the config is not this model's, or pass another `--head-dim`",
            tensor=tensor.name,
            found=rows,
            expected=head_dim,
        )
    return head_dim
