"""Writes a catalogue of values as a document of JSON or YAML."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable
from datetime import date
from typing import Any

from ckpttool.catalogue.entries import Catalogue, File, Object
from ckpttool.catalogue.flatten import MAX_REPEATED, unflatten
from ckpttool.catalogue.protocols import CreatedSink, FormatLoss, Sink, SinkOptions
from ckpttool.storage.stores import Location

_JSON = frozenset({type(None), bool, int, float, str})
_YAML = _JSON | {bytes, date}


def json_losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
    """Return what JSON has no words for: tensors, tuples, keys that are numbers."""
    return _losses(catalogue, "JSON", lambda value: type(value) in _JSON, lambda key: type(key) is str)


def yaml_losses(catalogue: Catalogue, path: str) -> list[FormatLoss]:
    """Return what YAML has no words for without tags of its own."""
    return _losses(catalogue, "YAML", _is_yaml, lambda key: type(key) in _JSON and key == key)


def _is_yaml(value: Any) -> bool:
    return type(value) in _YAML and not (type(value) is float and math.isnan(value) and math.copysign(1, value) < 0)


def _losses(
    catalogue: Catalogue, name: str, is_leaf: Callable[[Any], bool], is_key: Callable[[Any], bool]
) -> list[FormatLoss]:
    why = f"{name} has no words for it"
    lists = {path for path, container in catalogue.containers.items() if container.kind == "list"}
    lost = []
    for entry in catalogue.entries.values():
        keys = (key for depth, key in enumerate(entry.path) if entry.path[:depth] not in lists)
        if not isinstance(entry, Object) or not all(map(is_key, keys)) or not _is_plain(entry.value, is_leaf, is_key):
            lost.append(FormatLoss(entry.name, why))
    return lost


def _is_plain(value: Any, is_leaf: Callable[[Any], bool], is_key: Callable[[Any], bool]) -> bool:
    todo, seen, repeated = [value], set(), 0
    while todo:
        node = todo.pop()
        if type(node) in (dict, list, OrderedDict):
            if id(node) in seen:
                # Documents have no references: what is shared is written for each mention.
                repeated += 1 + len(node)
                if repeated > MAX_REPEATED:
                    return False
            seen.add(id(node))
            if isinstance(node, dict) and not all(map(is_key, node)):
                return False
            todo += node.values() if isinstance(node, dict) else node
        elif not is_leaf(node):
            return False
    return True


def create_json(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create a JSON document."""
    return _create("json", location, planned, lambda value: json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def create_yaml(location: Location, planned: Catalogue, options: SinkOptions) -> Sink:
    """Create a YAML document."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.add_representer(OrderedDict, lambda dumper, value: dumper.represent_dict(dict(value)))
    return _create(
        "yaml", location, planned, lambda value: yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    )


def _create(format: str, location: Location, planned: Catalogue, spell: Callable[[Any], str]) -> Sink:
    text = spell(unflatten(planned)).encode("utf-8", "surrogatepass")
    location.put(text)
    created = Catalogue(format, [File(location, location.name, len(text))], facts={"layout": "document"})
    created.containers = dict(planned.containers)
    for entry in planned.entries.values():
        created.add(entry)
    return CreatedSink(created, lambda crcs: None)
