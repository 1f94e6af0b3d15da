"""A document of JSON or YAML as a catalogue of values."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ckpttool.catalogue.entries import Catalogue, File
from ckpttool.catalogue.flatten import flatten
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions, PlacedSource, Source
from ckpttool.catalogue.values import walk
from ckpttool.catalogue.work_limit import working
from ckpttool.errors import CkptError, CorruptError
from ckpttool.serialization import plain_yaml, strict_json
from ckpttool.storage.stores import Location

MAX_SIZE = 1 << 20  # bytes of what may be a document
_MAX_NAMED = 64 << 20  # and of what a framework's layout says is one: the history of a long run
# Words of documents that describe a model, its tokenizer or other files, and are not state.
_DESCRIBING = {
    *("architectures", "model_type", "transformers_version", "_class_name", "_diffusers_version", "weight_map"),
    *("peft_type", "added_tokens", "added_tokens_decoder", "tokenizer_class", "image_processor_type"),
    *("zero_optimization", "do_sample", "eos_token_id", "bos_token", "eos_token", "cls_token", "distributed_type"),
}
_NAME = re.compile(r"[\w./@:+-]+")
_Parse = Callable[[bytes, str], Any]


def _json(text: bytes, what: str) -> Any:
    return strict_json.parse(text, what, parse_constant=float)


def is_json(location: Location) -> bool:
    """Return whether this is a JSON document of values: an object, an array or a number."""
    return _holds_values(_value(location, rb"[{\[\d+-]", _json))


def is_yaml(location: Location) -> bool:
    """Return whether this is a YAML document of values: a mapping of names, or a sequence of mappings."""
    value = _value(location, rb"[^\x00-\x08<%@`*&!|>]", plain_yaml.parse)
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, dict) for one in value) and _holds_values(value)
    return (
        isinstance(value, dict)
        and all(isinstance(key, int) or (isinstance(key, str) and _NAME.fullmatch(key)) for key in value)
        and _holds_values(value)
    )


def _value(location: Location, first: bytes, parse: _Parse) -> Any:
    with suppress(CkptError):
        if location.is_file() and 0 < location.size() <= MAX_SIZE and re.match(rb"\s*" + first, location.head(4096)):
            return parse(location.read(), f"`{location}`")
    return None


def _holds_values(value: Any) -> bool:
    """Return whether a number is in a value that describes nothing else: words alone are a message, or settings."""
    if isinstance(value, dict) and _DESCRIBING & value.keys():
        return False
    return any(type(node) in (int, float) for node in walk(value))


def open_json(location: Location, options: OpenOptions = NO_HINTS) -> Source:
    """Return the catalogue of a JSON document. Raises CorruptError for what is none."""
    return _open("json", location, _json)


def open_yaml(location: Location, options: OpenOptions = NO_HINTS) -> Source:
    """Return the catalogue of a YAML document. Raises CorruptError for what is none."""
    return _open("yaml", location, plain_yaml.parse)


def _open(format: str, location: Location, parse: _Parse) -> Source:
    size = location.size()
    if size > _MAX_NAMED:
        raise CorruptError(f"`{location}` has {size} bytes, more than {_MAX_NAMED} of a document", expected=_MAX_NAMED)
    catalogue = Catalogue(format, [File(location, location.name, size)], facts={"layout": "document"})
    with working(size):
        flatten(parse(location.read(), f"`{location}`"), catalogue, (), lambda value, path, embedded: value)
    return PlacedSource(catalogue)
