"""The document of `inspect --json`, the schema `ckpttool/inspect/1`: docs/reference/json.md. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue, Object, Path, Tensor, dotted
from ckpttool.operations.inspect import sharding, summary, warnings
from ckpttool.operations.inspect.format_value import describe, jsonable, peek, type_name
from ckpttool.operations.inspect.listing import ALL, Listing

SCHEMA = "ckpttool/inspect/1"
_OURS = ("tensors", "objects", "warnings")


def document(catalogue: Catalogue, path: str, listing: Listing = ALL, exit_code: int = 0) -> Iterator[str]:
    """Yield the document as JSON text, a tensor or an object a line: a large checkpoint has hundreds of
    megabytes of it. `listing` selects tensors and objects;
    `exit_code` is that of the command."""
    headline, parts = summary.head(catalogue)
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "format": catalogue.format,
        "world_size": headline.world_size,
        "path": path,
        "damaged": bool(summary.damage(catalogue)),
        "exit_code": exit_code,
        "step": headline.step,
        "parameters": headline.parameters,
        "dtypes": headline.dtypes,
        "architecture": headline.architecture,
        "layers": headline.layers,
        "optimizers": [
            {"root": dotted(o.root), "name": o.name, "state": [asdict(state) for state in o.state]}
            for o in headline.optimizers
        ],
        "parts": [
            {"part": line.part.kind, "root": dotted(line.part.root)}
            | {name: getattr(line, name) for name in ("tensors", "elements", "nbytes", "dtypes", "objects")}
            for line in parts
        ],
        "bytes": catalogue.nbytes(),
        "bytes_per_rank": sharding.bytes_per_rank(catalogue),
        "files": [{"name": f.name, "bytes": f.size, "rank": f.rank} for f in catalogue.own_files],
    }
    for key, value in catalogue.facts.items():
        if key not in _OURS:
            head.setdefault(str(key), jsonable(value, catalogue.entries))
    yield "{" + ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    yield ',\n "tensors": ['
    placements = sharding.Placements(catalogue)
    yield from _lines(_tensor(t, catalogue, placements.of(t)) for t in listing.tensors(catalogue))
    yield '],\n "objects": ['
    yield from _lines(_object(o, catalogue) for o in listing.objects(catalogue))
    findings = [*catalogue.warnings, *warnings.findings(catalogue, find_aliases(catalogue.tensors))]
    yield f'],\n "warnings": {json.dumps([str(warning) for warning in findings])}}}\n'


def _lines(items: Iterator[dict[str, Any]]) -> Iterator[str]:
    for i, item in enumerate(items):
        yield f"{',' if i else ''}\n  {json.dumps(item)}"


def path_json(path: Path) -> list[Any]:
    """A key path for JSON: strings and integers as they are."""
    return [key if isinstance(key, (str, int)) else describe(key) for key in path]


def _tensor(tensor: Tensor, catalogue: Catalogue, placement: sharding.Placement | None) -> dict[str, Any]:
    files, chunks = catalogue.files, tensor.chunks
    return {
        "name": tensor.name,
        "path": path_json(tensor.path),
        "part": tensor.part.kind,
        "dtype": tensor.dtype.name,
        "shape": tensor.shape,
        "nbytes": tensor.nbytes,
        "placements": None if placement is None else placement.placements,
        "mesh": None if placement is None else placement.mesh,
        "chunks": [
            {"offsets": offsets, "sizes": sizes, "file": files[file].name, "rank": files[file].rank}
            for offsets, sizes, file in zip(chunks.offsets, chunks.sizes, chunks.file, strict=True)
        ],
    }


def _object(entry: Object, catalogue: Catalogue) -> dict[str, Any]:
    value, instead = peek(entry)
    kind, shown = ("unread", instead) if instead else (type_name(value), jsonable(value, catalogue.entries))
    return {"name": entry.name, "path": path_json(entry.path), "part": entry.part.kind, "type": kind, "value": shown}
