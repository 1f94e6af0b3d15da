"""A document of JSON or YAML as a catalogue of values."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ckpttool.catalogue.entries import Catalogue, File
from ckpttool.catalogue.flatten import flatten
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions, PlacedSource, Source
from ckpttool.catalogue.values import walk
from ckpttool.catalogue.work_limit import working
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.serialization import other_files, plain_yaml, strict_json
from ckpttool.storage.stores import Location

MAX_SIZE = 1 << 20  # bytes of a text that may be a document
_MAX_NAMED = 64 << 20  # of one that begins as JSON, or is called a document: the history of a long run
_MAX_NAMES = 200_000  # in a text that may be a document: each is an entry of the catalogue
# Words of documents that describe a model, its tokenizer or other files, and are not state.
_DESCRIBING = {
    *("architectures", "model_type", "transformers_version", "_class_name", "_diffusers_version", "weight_map"),
    *("peft_type", "added_tokens", "added_tokens_decoder", "tokenizer_class", "image_processor_type"),
    *("zero_optimization", "do_sample", "eos_token_id", "bos_token", "eos_token", "cls_token", "distributed_type"),
}
_STRING = rb'("(?:[^"\\]|\\.)*"?)'
_COMMENT = re.compile(_STRING + rb"|//[^\n]*|/\*(?:.*?\*/|.*)|(?<!\S)#[^\n]*", re.DOTALL)
_EXTRA = re.compile(_STRING + rb"|,(?=\s*[}\]])|\b(nan|inf|infinity|None|True|False|undefined)\b", re.DOTALL)
_UNQUOTED, _QUOTED_NAME = re.compile(rb"\s*[\[{][\s\[{]*['A-Za-z_$]"), re.compile(rb'"\s*:')
_WORD, _NUMBER = re.compile(rb"[A-Za-z]{2,}"), re.compile(rb"\d+")
_LITERALS = (b"true", b"false", b"null", b"NaN", b"Infinity")
_NAME = re.compile(r"[\w./@:+-]+")
_Parse = Callable[[bytes, str], Any]


def _json(text: bytes, what: str) -> Any:
    return strict_json.parse(text, what, parse_constant=float)


def _by_hand(text: bytes, what: str) -> Any:
    """Return the value of a file that is called JSON and is none: a damaged one may be YAML of other values."""
    return plain_yaml.parse(text, what) if _is_by_hand(text) else None


def is_json(location: Location) -> bool:
    """Return whether this is a JSON document of values: an object, an array or a number."""
    return _holds_values(_value(location, rb"[{\[\d+-]", _json))


def is_yaml(location: Location) -> bool:
    """Return whether this is a YAML document of values: a mapping of names, or a sequence of mappings."""
    value = _value(location, rb"[^\x00-\x08<%@`*&!|>]", _by_hand if location.suffix == ".json" else plain_yaml.parse)
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, dict) for one in value) and _holds_values(value)
    return (
        isinstance(value, dict)
        and all(isinstance(key, int) or (isinstance(key, str) and _NAME.fullmatch(key)) for key in value)
        and _holds_values(value)
    )


def _value(location: Location, first: bytes, parse: _Parse) -> Any:
    with suppress(CkptError):
        size, head = location.size() if location.is_file() else 0, location.head(4096)
        most = _MAX_NAMED if parse is _json and _begins_json(head) else MAX_SIZE
        if 0 < size <= most and re.match(rb"\s*" + first, head):
            text = location.read()
            return parse(text, f"`{location}`") if text.count(b":") <= _MAX_NAMES else None
    return None


def _begins_json(head: bytes) -> bool:
    return re.match(rb"\s*[{\[]", head) is not None


def check(location: Location) -> None:
    """Raise CorruptError for a document that is damaged, and ReadError for one larger than what is read, of a text that
    is none of values. Lines of JSON, JSON with comments, and a vocabulary are no documents of values."""
    size, is_json_ = location.size(), location.suffix == ".json"
    if size == 0 and is_json_:
        raise CorruptError(f"`{location}` is empty", hint="the copy or the save did not end", found=0)
    if size > MAX_SIZE and (location.suffix in (".yaml", ".yml") or (is_json_ and size > _MAX_NAMED)):
        raise _too_large(location, f"{size} bytes", _MAX_NAMED if is_json_ else MAX_SIZE)
    if is_json_:
        text = location.read()
        try:
            value = _json(text.removeprefix(codecs.BOM_UTF8), f"`{location}`")
            if (count := text.count(b":")) > _MAX_NAMES and _holds_values(value) and not _is_vocabulary(value):
                raise _too_large(location, f"up to {count} names", _MAX_NAMES)
        except CorruptError:
            if (known := other_files.begins_as(text[: other_files.HEAD])) is not None and not _begins_json(text):
                raise ReadError(f"`{location}`: {known[0]}", hint=known[1], file=location) from None
            if not (_is_lines(text) or _is_by_hand(text) or _is_of_words(text)):
                raise


def _is_lines(text: bytes) -> bool:
    """Return whether a text is several values of JSON, one after the other, of which others may be cut: a log."""
    with suppress(ValueError, RecursionError):
        spelt = text.decode().lstrip()
        _, end = json.JSONDecoder().raw_decode(spelt)
        return spelt[0] in "{[" and spelt[end:].lstrip()[:1] == spelt[0]
    return False


def _is_by_hand(text: bytes) -> bool:
    """Return whether a text is JSON but for what people and other languages write: comments, commas before a bracket,
    words for values, names without quotes or in single ones."""
    if len(text) > MAX_SIZE or b"\0" in text:
        return False
    bare = _EXTRA.sub(lambda m: m[1] or (b"0" if m[2] else b""), _COMMENT.sub(lambda m: m[1] or b" ", text))
    with suppress(CkptError):
        is_python = _UNQUOTED.match(bare) is not None and _QUOTED_NAME.search(bare) is None
        (plain_yaml.parse if is_python else _json)(bare, "it")
        return True
    return False


def _is_of_words(text: bytes) -> bool:
    """Return whether a text is one of words outside quotes, as in a message or a log, and names no value."""
    if not other_files.is_text("", text) or text.lstrip()[:1] == b"<" or _QUOTED_NAME.search(text):
        return False
    words = [word for word in _WORD.findall(_COMMENT.sub(b" ", text)) if not any(w.startswith(word) for w in _LITERALS)]
    return 4 * len(words) >= len(_NUMBER.findall(text)) and bool(words)


def _too_large(location: Location, size: str, most: int) -> ReadError:
    return ReadError(f"`{location}` has {size}, more than the {most} of a document that is read", file=location)


def _is_vocabulary(value: Any) -> bool:
    """Return whether a value numbers words: each has an index of its own, and none is left out."""
    return (
        isinstance(value, dict) and {*map(type, value.values())} == {int} and {*value.values()} == {*range(len(value))}
    )


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
