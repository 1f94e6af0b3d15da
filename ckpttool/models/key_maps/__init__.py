"""Key maps by name: those that come with ckpttool, for the producers whose names are not those of Hugging Face, and
those of users. Each is a file of data beside this module; `layout.key_maps` is their grammar.

In the files of Meta and torchtitan the rotary embedding rotates neighbours, in transformers the two halves of a head.
Seen: the adapters of torchtitan (`models/llama3`, `models/qwen3`, 0.2.0 to 0.3.0) and `conversion_mapping` of
transformers 5.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttool.errors import UsageError
from ckpttool.layout.key_maps import KeyMap, parse
from ckpttool.serialization import strict_json
from ckpttool.storage.stores import local_path
from ckpttool.text import meant

_MAX_SIZE = 1 << 24
# Not `importlib.resources`, which takes ten milliseconds: the package is always a directory.
FOLDER = local_path(__file__).parent
_GENERATED = "-transformers"  # ends the names of generated maps


def known() -> list[KeyMap]:
    """Return the maps that come with ckpttool, but for the generated ones."""
    paths = (FOLDER.escaped() / "*.json").matches()
    return [parse(json.loads(path.read()), path.name) for path in paths]


def generated(kind: object) -> KeyMap | None:
    """Return the map from the names that transformers has in memory to those of files, for a model type or a class."""
    file = f"{kind}.json"
    folder = FOLDER / "transformers"
    return parse(json.loads((folder / file).read()), file) if file in folder.names() else None


def of_config(config: Mapping[str, Any] | None) -> Iterator[KeyMap]:
    """Yield the generated maps for the class and for the type of the model of a config."""
    kinds = [*((config or {}).get("architectures") or ())[:1], (config or {}).get("model_type")]
    yield from (keymap for keymap in map(generated, kinds) if keymap is not None)


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
        own = next(of_config(config), None)
        if own is not None and own.fits(names, config):
            return own if released and not own.fits(reference, config) else None
        return next((keymap for keymap in known() if keymap.fits(names, config)), None)
    if name.endswith(".json"):
        return parse(strict_json.parse_written(local_path(name).head(_MAX_SIZE), f"`{name}`"), name)
    maps = {keymap.name: keymap for keymap in known()}
    by_type = generated(name.removesuffix(_GENERATED)) if name.endswith(_GENERATED) else None
    if by_type is not None:
        return by_type
    if name not in maps:
        listed = ", ".join(f"`{known_name}`" for known_name in maps)
        hint = meant(name, [*maps, "none"], f"one of {listed}, `none`, or a file whose name ends in `.json`")
        raise UsageError(f"there is no key map `{name}`", hint=hint)
    return maps[name]


def head_dim(config: Mapping[str, Any] | None) -> int | None:
    """Return the rows of an attention head, by a config of transformers or the `params.json` of Meta."""
    config = config or {}
    rows = config.get("head_dim")
    if isinstance(rows, int) and rows > 0:
        return rows
    for width, heads in (("hidden_size", "num_attention_heads"), ("dim", "n_heads")):
        w, h = config.get(width), config.get(heads)
        if isinstance(w, int) and isinstance(h, int) and h > 0:
            return w // h
    return None


def facts(config: Mapping[str, Any] | None, head_dim: int | None) -> dict[str, int]:
    """Return the numbers of a config that operations may name, `vision_config.num_attention_heads` too; those of its
    text model count as its own."""
    config = config or {}
    inner = {f"{key}.": value for key, value in config.items() if isinstance(value, Mapping)}
    levels = [*inner.items(), ("", inner.get("text_config.", {})), ("", config)]
    numbers = {
        begin + key: value
        for begin, level in levels
        for key, value in level.items()
        if isinstance(key, str) and type(value) is int and value > 0
    }
    if "num_attention_heads" in numbers:
        numbers.setdefault("num_key_value_heads", numbers["num_attention_heads"])
    return numbers | ({"head_dim": head_dim} if head_dim is not None else {})
