"""`config.json`, of which one key is changed: the dtype, as a word in the text; all else stays as it is. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_KEYS = ("dtype", "torch_dtype")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|null')


def with_dtype(text: str, dtype: str) -> tuple[str, list[tuple[str, str]]]:
    """The text of a config with the dtype that was written, and which key had which: `[("torch_dtype", "float32")]`.

    Only keys that are there, at the top. Pure.
    """
    changed: list[tuple[str, str]] = []
    pieces: list[str] = []
    at = depth = done = 0
    while at < len(text):
        char = text[at]
        if char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        elif char == '"':
            found = _STRING.match(text, at)
            if found is None:
                break
            at = found.end()
            key = json.loads(found[0])
            colon = _skipped(text, at)
            if depth == 1 and key in _KEYS and text[colon : colon + 1] == ":":
                value = _WORD.match(text, _skipped(text, colon + 1))
                old = json.loads(value[0]) if value else None
                if value is not None and old != dtype and old != f"torch.{dtype}":
                    pieces += [text[done : value.start()], json.dumps(dtype)]
                    done = at = value.end()
                    changed.append((key, str(old)))
            continue
        at += 1
    return "".join([*pieces, text[done:]]), changed


def _skipped(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def head_dim(config: Mapping[str, Any]) -> int | None:
    """Rows of one attention head, by a config of transformers or the `params.json` of Meta. Pure."""
    said = config.get("head_dim")
    if isinstance(said, int) and said > 0:
        return said
    for width, heads in (("hidden_size", "num_attention_heads"), ("dim", "n_heads")):
        w, h = config.get(width), config.get(heads)
        if isinstance(w, int) and isinstance(h, int) and h > 0:
            return w // h
    return None


def ties_words(config: Mapping[str, Any]) -> bool | None:
    """What a config says of `tie_word_embeddings`; None when it says nothing. Pure."""
    said = config.get("tie_word_embeddings")
    return said if isinstance(said, bool) else None
